"""Build and load recording_driver.c, and read what the extension's launcher packed.

Use it in a process of its own and before torch is imported: the process then has this driver and no other.
"""

import ctypes
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

FORMATS = {"i64": "q", "i32": "i", "f32": "f", "pointer": "Q"}
TENSOR_MAP = "<6Q14I"  # recording_driver.c
Callback = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult of the launch
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)


@dataclass
class TensorMap:
    """The arguments of the call that encoded a tensor map; innermost dimension first, strides in bytes."""

    base: int
    extents: tuple
    strides: tuple
    box: tuple
    type: int
    swizzle: int
    promotion: int
    marks: int  # where the driver's own bits stand; all were 1

    @classmethod
    def decode(cls, data):
        words = struct.unpack_from(TENSOR_MAP, data)
        kind, rank, swizzle, promotion = words[16:]
        shape = words[6 : 6 + rank], words[2 : 1 + rank], words[11 : 11 + rank]
        return cls(words[0], *shape, kind, swizzle, promotion, words[1])


@dataclass
class Launch:
    entry: str
    grid: tuple
    block: tuple
    shared_bytes: int
    stream: int
    params: list
    cluster: int = 1  # CTAs
    overlap: int = 0  # may start before its predecessor in the stream has ended
    carveout: int = -1  # percent of shared memory asked for, or -1


class RecordingDriver:
    """`manifests` maps an entry name to its manifest; `launches` grows with every launch. `old`: a driver of CUDA 11."""

    def __init__(self, folder: Path, manifests: dict, old: bool = False):
        library = Path(folder) / "libcuda.so.1"
        source = Path(__file__).with_suffix(".c")
        compiler = os.environ.get("CC", "cc")
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", *(["-DRECORDING_OLD_DRIVER"] if old else [])]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))
        self.manifests = manifests
        self.launches = []
        self._callback = Callback(self._on_launch)  # kept alive as long as the driver may call it
        self.library.recording_set_callback(self._callback)

    def fail(self, call: str, result: int = 0) -> None:
        """Before the first launch: this call always returns `result`, or the driver lacks it."""
        self.library.recording_fail(call.encode(), result)

    def set_capability(self, value: int) -> None:
        """Of the pretended device, 10 * major + minor; the extension asks at each launch that works in host memory."""
        self.library.recording_set_capability(value)

    def set_multiprocessors(self, count: int) -> None:
        """Of the pretended device; 0: as many as an H200 or a B200 has, by the capability."""
        self.library.recording_set_multiprocessors(count)

    def break_functions(self, *names: str) -> None:
        """These driver functions fail from now on, and no others."""
        self.library.recording_break(",".join(names).encode())

    @property
    def failures(self) -> int:
        """How often they were called."""
        return self.library.recording_failures()

    def hide_function(self, name: str) -> None:
        """The driver lacks this function; "" for none."""
        self.library.recording_hide(name.encode())

    @property
    def load_count(self) -> int:
        return self.library.recording_load_count()

    @property
    def last_cluster(self) -> int:
        """CTAs of a cluster in the last launch."""
        return self.library.recording_last_cluster()

    @property
    def last_overlap(self) -> int:
        """Whether the last launch may start before its predecessor in the stream has ended."""
        return self.library.recording_last_overlap()

    def _on_launch(self, entry, grid, block, shared_bytes, stream, params):
        manifest = self.manifests[entry.decode()]
        values = []
        for i, param in enumerate(manifest["params"]):
            data = ctypes.string_at(params[i], param["size"])
            if param["kind"] == "tensor_map":
                values.append(TensorMap.decode(data))
            else:
                values.append(struct.unpack("<" + FORMATS[param["kind"]], data)[0])
        launch = Launch(entry.decode(), tuple(grid[:3]), tuple(block[:3]), shared_bytes, stream, values)
        launch.cluster, launch.overlap = self.last_cluster, self.last_overlap
        launch.carveout = self.library.recording_last_carveout()
        self.launches.append(launch)
        return 0
