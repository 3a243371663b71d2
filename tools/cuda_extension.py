"""Compile the CUDA variant's extension: sources and cubins in, one portable shared library out.

No CUDA toolkit and no GPU is needed. What is: a C++ compiler with libstdc++ (g++), Python's headers, and from PyPI
torch, cmake, ninja and nvidia-cuda-runtime (for cuda.h).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from project import Project
from source_tree import export_kernels, write_source_tree

# Error text of a failed build that is shown; the whole log is in the build folder.
SHOWN_LINES = 60

# Named by kernel-builder's convention; it writes a file of this name too, so the binding includes it in both builds.
REGISTRATION_H = """// Generated. Macros that expand their arguments, and the empty Python module whose import loads the ops.
#pragma once

#include <Python.h>

#define M3_JOIN_(A, B) A##B
#define M3_JOIN(A, B) M3_JOIN_(A, B)
#define M3_TEXT_(A) #A
#define M3_TEXT(A) M3_TEXT_(A)

#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

#define REGISTER_EXTENSION(NAME)                                                                         \\
  PyMODINIT_FUNC M3_JOIN(PyInit_, NAME)() {                                                              \\
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, M3_TEXT(NAME), nullptr, 0, nullptr,       \\
                                        nullptr, nullptr, nullptr, nullptr};                             \\
    return PyModule_Create(&module);                                                                     \\
  }
"""


def missing_tools() -> str | None:
    """Why the extension can't be compiled here, or None."""
    if find_compiler() is None:
        named = os.environ.get("CXX")
        return f"no C++ compiler: {f'CXX={named} was not found' if named else 'neither g++ nor c++ is on the PATH'}"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"Python's headers are missing: no Python.h in {headers}"
    return None


def find_compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")


def build(project: Project, namespace: str, out: Path) -> Path:
    """Export, lay out <out>/source and compile it in <out>/cmake."""
    tree = write_source_tree(project, export_kernels(project, out), out / "source")
    return compile_tree(project, tree, namespace, out / "cmake")


def compile_tree(project: Project, tree: Path, namespace: str, work: Path, *options: str) -> Path:
    """Compile a source tree with the source list of its build.toml; `options` go to CMake."""
    if reason := missing_tools():
        raise RuntimeError(f"The CUDA variant can't be built: {reason}.")
    write_registration(tree)
    sources = [name for name in project.cuda_sources if name.endswith(".cpp")]
    definitions = {
        "CMAKE_CXX_COMPILER": find_compiler(),
        "CMAKE_MAKE_PROGRAM": program("ninja"),
        "M3_NAMESPACE": namespace,
        "M3_TREE": tree,
        "M3_SOURCES": ";".join(sources),
        "M3_BINDING": ";".join(name for name in project.config["torch"]["src"] if name.endswith(".cpp")),
        "M3_INCLUDES": ";".join(name for kernel in project.cuda_kernels for name in kernel.get("include", [])),
        "M3_TORCH": torch_folder(),
        "M3_TORCH_TARGET": torch_target(project.stable_abi),
        "M3_CUDA_INCLUDE": cuda_headers(),
        "M3_PYTHON_INCLUDE": sysconfig.get_path("include"),
    }
    work.mkdir(parents=True, exist_ok=True)
    arguments = [f"-D{name}={value}" for name, value in definitions.items()]
    lists = str(Path(__file__).resolve().parent)
    run_logged([program("cmake"), "-S", lists, "-B", str(work), "-G", "Ninja", *arguments, *options], work)
    run_logged([program("cmake"), "--build", str(work)], work)
    return work / f"{namespace}.abi3.so"


def write_registration(tree: Path) -> None:
    path = tree / "torch-ext" / "registration.h"
    if not path.exists() or path.read_text() != REGISTRATION_H:
        path.write_text(REGISTRATION_H)


def run_logged(command: list[str], work: Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (work / "build.log").write_text(done.stdout)
    if done.returncode != 0:
        shown = "\n".join(done.stdout.splitlines()[-SHOWN_LINES:])
        raise RuntimeError(f"{Path(command[0]).name} failed with status {done.returncode}:\n{shown}")


def program(name: str) -> str:
    """cmake or ninja as installed from PyPI; the system's may be too old."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        raise RuntimeError(f"The CUDA variant can't be built: {name} isn't installed (it is on PyPI).") from None
    return str(Path(module.CMAKE_BIN_DIR if name == "cmake" else module.BIN_DIR) / name)


def torch_folder() -> Path:
    """Found without importing torch, which takes seconds."""
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def torch_target(version: str) -> str:
    """ "2.11" as TORCH_TARGET_VERSION spells it."""
    major, minor = (int(part) for part in version.split("."))
    return f"0x{(major << 56) | (minor << 48):016x}"


def cuda_headers() -> Path:
    """The folder of cuda.h in the installed nvidia-cuda-runtime."""
    try:
        files = importlib.metadata.files("nvidia-cuda-runtime") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuda.h":
            return Path(str(file.locate())).resolve().parent
    raise RuntimeError("The CUDA variant can't be built: no cuda.h, install nvidia-cuda-runtime 13.0 from PyPI.")
