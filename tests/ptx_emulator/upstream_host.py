"""Runs a witness of upstream_kernels.py: its own host code packs the launch, the emulator executes it."""

import ctypes
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from . import launch as emulator
from .upstream import PACKAGES
from .upstream_kernels import WITNESSES

HERE = Path(__file__).resolve().parent


class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_size_t)]


Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Config), ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint
)


def build(kind, arch, cache):
    """The folder with a witness's PTX, header and host library; compiled once and kept below `cache`."""
    versions = [importlib.metadata.version(p) for p in PACKAGES]
    sources = [(HERE / name).read_bytes() for name in ("upstream_kernels.py", "upstream_host.c")]
    digest = hashlib.sha256(repr((versions, sources)).encode()).hexdigest()[:12]
    folder = Path(cache) / f"upstream-{kind}-{arch}-{digest}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(dir=folder.parent)
        command = [sys.executable, str(HERE / "upstream_kernels.py"), kind, arch, work]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"flash-attn-4's {kind} kernel for {arch} doesn't compile:\n{done.stderr[-2000:]}")
        compiler = os.environ.get("CC", "cc")
        made = [str(HERE / "upstream_host.c"), f"{work}/{kind}.o", "-o", f"{work}/host.so"]
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", *made], check=True)
        os.replace(work, folder)
    return folder


class Witness:
    """A compiled kernel of flash-attn-4."""

    def __init__(self, kind, arch, cache):
        folder = build(kind, arch, cache)
        self.kind, self.arguments = kind, WITNESSES[kind]
        self.program = emulator.load((folder / f"{kind}.ptx").read_text(), None)
        self.library = ctypes.CDLL(str(folder / "host.so"))
        self.callback = Callback(self._on_launch)  # kept alive as long as the host code may call it
        self.library.upstream_install(self.callback)
        [entry] = set(re.findall(rf"\b_mlir_{kind}__mlir_ciface_\w+", (folder / f"{kind}.h").read_text()))
        self.entry = self.library[entry]
        self.module, device, status = ctypes.c_void_p(), ctypes.c_int32(0), ctypes.c_int32(0)
        for name, *values in (("init",), ("load_to_device", device)):
            function = self.library[f"_mlir_{kind}_cuda_{name}"]
            function(self._addresses([ctypes.pointer(self.module), *values, status]))

    @staticmethod
    def _addresses(values):
        """An array of pointers to the values."""
        return (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))

    def _on_launch(self, kernel, config, params, cluster):
        try:
            c, declared = config.contents, self.program.entry.params
            values = [ctypes.string_at(params[i], size) for i, (_, size, _) in enumerate(declared)]
            # Of a tensor map the host code leaves the upper half as its stack had it.
            maps = [size == 128 and align == 64 for _, size, align in declared]
            values = [data[:64].ljust(128, b"\0") if is_map else data for data, is_map in zip(values, maps)]
            self.result = emulator.launch(
                self.program, None, tuple(c.grid), tuple(c.block), c.shared_bytes, emulator.pack(self.program, values),
                (cluster, 1, 1), memory=self.written, read_only=self.read, policy=self.policy,
            )  # fmt: skip
            return 0
        except Exception as error:  # noqa: BLE001  a callback from C can't raise
            self.error = error
            return 719  # cudaErrorLaunchFailure

    def __call__(self, policy, written, **given):
        """`given`: tensors, and numbers, by the names of WITNESSES; `written`: names of the outputs."""
        values = []
        for name, spec in self.arguments.items():
            x = given[name]
            if spec is None:
                values.append(ctypes.c_float(x))
                continue
            _, extents, lead = spec
            shape = [n for n, letter in zip(x.shape, extents) if letter != "D"]
            strides = [s for i, s in enumerate(x.stride()) if i != lead]
            assert x.dim() == len(extents) and x.stride(lead) == 1

            class Tensor(ctypes.Structure):
                _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int32 * len(shape)),
                            ("strides", ctypes.c_int64 * len(strides))]  # fmt: skip

            values.append(Tensor(x.data_ptr(), tuple(shape), tuple(strides)))
        status = ctypes.c_int32(0)
        self.policy, self.result, self.error = policy, None, None
        self.written = [given[name] for name in written]
        self.read = [x for name, x in given.items() if name not in written and self.arguments[name] is not None]
        self.entry(self._addresses([*values, ctypes.c_void_p(0), status]), len(values) + 2)
        if self.error is not None:
            raise self.error
        if status.value:
            raise RuntimeError(f"the host code of {self.kind} returned {status.value}")
        return self.result
