"""The backend "jit": the shipped kernel sources, compiled where they run, by nvidia-cutlass-dsl.

Only programs differ from the `aot` backend; checks, plans, launches and limits are its. A call under `jit` runs the
extension's operator with a switch set for this thread (launch/jit.h). A program that isn't there yet makes the operator
raise its name; it is then compiled, handed over, and the operator is called again: operators only write results, so
what was launched before is launched again to the same end. A program serves every shape, so other lengths compile
nothing.

Compilation takes place in a process of its own, seconds a program: the DSL fixes its target when it is imported, and
this package imports nothing but torch. Compiled programs live as long as this process.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, Optional

import torch

from ._ops import add_op_namespace_prefix, ops

# Where a build puts kernel-src; only builds with the extension have it.
SOURCES = Path(__file__).resolve().parent / "kernel_src"
_DSL = "nvidia-cutlass-dsl"
_FLASH = "flash-attn-4"  # the main loop of dense attention on SM90 comes from there
_NEEDS = re.compile(r"m3_sparse: jit: needs (\d+) (\w+) m3s_(\w+)_0\b")

compiled: list[str] = []  # names of the programs compiled by this process, in order
_lock = threading.Lock()


def missing(op: str) -> Optional[str]:
    """Why nothing can be compiled here, as a sentence, or None."""
    if not SOURCES.is_dir():
        return "this build of m3_sparse contains no kernel sources (it is a build without a compiled extension)"
    for package in (_DSL, _FLASH) if op == "dense_attention" else (_DSL,):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{op} on jit needs {package}: pip install {package}"
    return None


def _compile(kernel: str, name: str, folder: Path) -> dict[str, Any]:
    """Compile program `name` of kernel_src/*/<kernel>.py; its cubin lies in `folder`, its manifest is returned."""
    arch = name.rsplit("_", 1)[1].replace("sm", "sm_")
    options = ["--only", kernel, "--arch", arch, "--program", name, "--out", str(folder)]
    done = subprocess.run([sys.executable, "-B", str(SOURCES / "export.py"), *options], capture_output=True, text=True)
    manifest = folder / f"{name}.json"
    if done.returncode != 0 or not manifest.exists():
        raise RuntimeError(f"m3_sparse: jit: {_DSL} could not compile {name}:\n{done.stderr[-4000:]}")
    facts: dict[str, Any] = json.loads(manifest.read_text())
    return facts


def _work_folder(name: str) -> "tempfile.TemporaryDirectory[str]":
    try:
        return tempfile.TemporaryDirectory()
    except OSError as error:
        raise RuntimeError(
            f"m3_sparse: jit: there is no folder to compile {name} in: {error}. Where temporary folders can't be written, "
            'set TMPDIR to one that can, or take what is compiled already: m3_sparse.backend("aot")'
        ) from error


def _supply(number: int, kernel: str, name: str) -> None:
    with _lock:
        if name in compiled:  # another thread was first
            return
        with _work_folder(name) as folder:
            facts = _compile(kernel, name, Path(folder))
            cubin = torch.frombuffer(bytearray((Path(folder) / f"{name}.cubin").read_bytes()), dtype=torch.uint8)
        params = torch.tensor([[p["size"], p["align"]] for p in facts["params"]], dtype=torch.int32, device="cpu")
        ops.jit_supply(number, cubin, params.flatten(), *facts["block"], facts["dynamic_smem"])
        compiled.append(name)


def _runner(op: str, built: dict[tuple[str, str], Callable[..., Any]]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        while True:
            before = ops.jit_set_active(True)
            try:
                return built[op, "aot"](*arguments, **options)
            except RuntimeError as error:
                needed = _NEEDS.search(str(error))
                if needed is None:
                    raise
            finally:
                ops.jit_set_active(before)
            _supply(int(needed[1]), needed[2], needed[3])

    return run


def register(built: dict[tuple[str, str], Any]) -> Optional[torch.library.Library]:
    """Define a `jit_<op>` beside every `aot_<op>` of `built`, with the same schema, and add it. The library returned
    must be kept: the operators go with it.
    """
    prefix = add_op_namespace_prefix("aot_")
    library = torch.library.Library(prefix.split("::")[0], "FRAGMENT")
    for op in [op for op, backend in built if backend == "aot"]:
        name = f"jit_{op}"
        if hasattr(ops, name):  # by another copy of this build in the process
            built[op, "jit"] = getattr(ops, name).default
            continue
        library.define(str(built[op, "aot"]._schema).replace(f"{prefix}{op}", name, 1))
        for key in ("CUDA", "CPU"):
            library.impl(name, _runner(op, built), key)
        torch.library.register_fake(add_op_namespace_prefix(name), lambda *arguments, **options: None, lib=library)
        built[op, "jit"] = getattr(ops, name).default
    return library
