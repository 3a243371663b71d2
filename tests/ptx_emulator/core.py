"""Builds the execution core (core/*.cpp) once a machine and loads it.

The library lies in build/ptx_emulator, named by a digest of its sources and the compiler's flags.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SOURCES = Path(__file__).resolve().parent / "core"
BUILD = Path(__file__).resolve().parents[2] / "build" / "ptx_emulator"
# Each rounding is the instruction's: the compiler may not fuse a multiplication with an addition.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden"]

INSTRUCTION = np.dtype([("handler", "i4"), ("guard", "i4"), ("negated", "i4"), ("line", "i4"), ("first", "i4"),
                        ("count", "i4"), ("imm", "i8")])  # fmt: skip
SPECIAL = np.dtype([("kind", "i4"), ("offset", "i4"), ("value", "i8")])
RANGE = np.dtype([("base", "u8"), ("size", "u8"), ("writable", "u8")])

EAGER, LATE, RANDOM = range(3)
# Kinds of asynchronous operations, in the order of AsyncClass.
ASYNC_KINDS = ("cp.async", "tma", "bulk store", "wgmma", "tcgen05", "tcgen05.st", "st.async")


class LaunchSpec(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
        ("param_bytes", ctypes.c_uint64),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_uint64),
        ("policy", ctypes.c_int32),
        ("starved", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("race", ctypes.c_int32),
        ("max_resident", ctypes.c_int32),
        ("max_instructions", ctypes.c_uint64),
        ("instructions", ctypes.c_uint64),
        ("matrix_instructions", ctypes.c_uint64),
        ("ctas", ctypes.c_uint64),
    ]


def compiler():
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise RuntimeError("the PTX emulator needs a C++ compiler: neither g++ nor c++ is on the PATH")
    return found


def machine():
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


def build():
    """Path of the shared library; compiles what isn't there, in one of the processes that ask for it."""
    digest = hashlib.sha256(" ".join([compiler(), machine(), *FLAGS]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    library = BUILD / f"core-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=BUILD) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library

        def compile_one(path):
            made = os.path.join(work, path.stem + ".o")
            command = [compiler(), *FLAGS, "-c", str(path), "-o", made]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{path.name} doesn't compile:\n{done.stderr[-4000:]}")
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
        made = os.path.join(work, library.name)
        subprocess.run([compiler(), "-shared", *objects, "-o", made], check=True)
        os.replace(made, library)
    return library


@functools.cache
def load():
    library = ctypes.CDLL(str(build()))
    library.ptxemu_program.restype = ctypes.c_void_p
    library.ptxemu_hits.restype = ctypes.POINTER(ctypes.c_uint64)
    library.ptxemu_hits.argtypes = [ctypes.c_void_p]
    library.ptxemu_free.argtypes = [ctypes.c_void_p]
    library.ptxemu_real_waits.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.ptxemu_real_waits.restype = ctypes.c_uint64
    library.ptxemu_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
    return library


@functools.cache
def handler(name):
    """The number of a handler of the core, or -1."""
    return load().ptxemu_handler(name.encode())


class Program:
    """The core's copy of an encoded program."""

    def __init__(self, code, operands, image, specials, blocks, local_bytes, shared_bytes):
        self.blocks = blocks
        code = np.array(code, INSTRUCTION)
        operands = np.array(operands, np.int32)
        specials = np.array(specials, SPECIAL)
        size, pointer = ctypes.c_uint64, ctypes.c_void_p
        self.pointer = load().ptxemu_program(
            pointer(code.ctypes.data), size(len(code)), pointer(operands.ctypes.data), size(len(operands)),
            pointer(image.ctypes.data), size(len(image)), pointer(specials.ctypes.data), size(len(specials)),
            size(blocks), ctypes.c_uint32(local_bytes), ctypes.c_uint32(shared_bytes),
        )  # fmt: skip

    def __del__(self):
        if getattr(self, "pointer", None):
            load().ptxemu_free(self.pointer)

    def hits(self):
        """How often each basic block was entered, over all launches."""
        return np.ctypeslib.as_array(load().ptxemu_hits(self.pointer), (self.blocks,)).copy()

    def real_waits(self):
        """PTX lines of the mbarrier waits that ever came through because a phase had completed. The others were for the
        phase before the first, which counts as complete.
        """
        lines = np.zeros(4096, np.int32)
        count = load().ptxemu_real_waits(self.pointer, ctypes.c_void_p(lines.ctypes.data), ctypes.c_uint64(len(lines)))
        return set(lines[:count].tolist())

    def launch(self, spec):
        """(status, text) of ptxemu_launch."""
        text = ctypes.create_string_buffer(1 << 16)
        status = load().ptxemu_launch(self.pointer, ctypes.byref(spec), text, len(text))
        return status, text.value.decode()
