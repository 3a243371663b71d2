"""A CUDA allocator for torch that gives each tensor, workspaces of operators included, pages of its own between unmapped
ones, and the run of safety_problems.py under it.

    python edge_allocator.py VARIANT COUNT FIRST SECONDS

runs the problems from number FIRST on and prints a JSON line a problem and placement: "run" before and "ok" or "failed"
after it. An access past an edge kills the context, so the process ends after it: the caller starts another one behind.

    python edge_allocator.py control FLUSH

shows that the edges hold: it writes a redzone, which must be found, and then reads past the edge, which must fault.
"""

import ctypes
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_memory import FLUSH, UNWRITTEN, Damaged, EdgeMemory

OPERATORS = 256  # alignment of what operators allocate; torch promises more


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


ON_DEVICE, PINNED, READ_WRITE = 1, 1, 3
ILLEGAL_ADDRESS = 700


class CudaPages:
    """Physical pages of device 0 in the middle of reserved addresses. Freed ones are kept and mapped anew."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.properties = _Properties(type=PINNED, location=_Location(ON_DEVICE, 0))
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self.properties), 0)
        self.granularity = size.value
        self.spare, self.handles = {}, {}

    def _call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def code(self):
        """What the driver says once everything launched has ended: 0, or the error that killed the context."""
        return self.cuda.cuCtxSynchronize()

    def map(self, room):
        whole = room + 2 * self.granularity
        base, size = ctypes.c_uint64(), ctypes.c_size_t
        self._call(
            "cuMemAddressReserve", ctypes.byref(base), size(whole), size(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        )
        kept = self.spare.setdefault(room, [])
        if kept:
            handle = kept.pop()
        else:
            handle = ctypes.c_uint64()
            self._call(
                "cuMemCreate", ctypes.byref(handle), size(room), ctypes.byref(self.properties), ctypes.c_uint64(0)
            )
        low = base.value + self.granularity
        self._call("cuMemMap", ctypes.c_uint64(low), size(room), size(0), handle, ctypes.c_uint64(0))
        access = _Access(_Location(ON_DEVICE, 0), READ_WRITE)
        self._call("cuMemSetAccess", ctypes.c_uint64(low), size(room), ctypes.byref(access), size(1))
        self.handles[low] = handle
        return low

    def unmap(self, low, room):
        self._call("cuCtxSynchronize")
        self._call("cuMemUnmap", ctypes.c_uint64(low), ctypes.c_size_t(room))
        whole = room + 2 * self.granularity
        self._call("cuMemAddressFree", ctypes.c_uint64(low - self.granularity), ctypes.c_size_t(whole))
        self.spare[room].append(self.handles.pop(low))

    def fill(self, at, count, byte):
        if count:
            self._call("cuMemsetD8_v2", ctypes.c_uint64(at), ctypes.c_ubyte(byte), ctypes.c_size_t(count))

    def read(self, at, count):
        data = np.empty(count, np.uint8)
        if count:
            self._call(
                "cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(at), ctypes.c_size_t(count)
            )
        return data


class CudaEdges:
    """What places tensors on the GPU: torch's allocator, from `install` on."""

    device = "cuda"

    def __init__(self):
        self.memory, self.error = None, None

    def install(self):
        """Before torch initialises CUDA, which fixes the allocator."""
        import torch

        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        # The context that torch will use.
        codes = cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)
        if any(codes):
            raise RuntimeError(f"no CUDA context: {codes}")
        self.memory = EdgeMemory(CudaPages())
        self.memory.alignment = OPERATORS
        size, address = ctypes.c_ssize_t, ctypes.c_void_p
        self.callbacks = (
            ctypes.CFUNCTYPE(address, size, ctypes.c_int, address)(self._allocate),
            ctypes.CFUNCTYPE(None, address, size, ctypes.c_int, address)(self._free),
        )
        pointers = [ctypes.cast(f, ctypes.c_void_p).value for f in self.callbacks]
        self.allocator = torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(*pointers))
        torch.cuda.memory.change_current_allocator(self.allocator)
        torch.cuda.init()
        torch.cuda.set_device(0)

    def _allocate(self, size, device, stream):
        try:
            return self.memory.allocate(size)
        except BaseException as error:  # noqa: BLE001  a callback from C can't raise
            self.error = self.error or error
            return None

    def _free(self, at, size, device, stream):
        try:
            self.memory.free(at)
        except BaseException as error:  # noqa: BLE001  as above
            self.error = self.error or error

    def bytes(self, count):
        import torch

        self.memory.alignment = 1
        try:
            return torch.empty(count, dtype=torch.uint8, device="cuda")
        finally:
            self.memory.alignment = OPERATORS

    def check(self):
        import torch

        torch.cuda.synchronize()
        if self.error is not None:
            raise self.error
        self.memory.check()


def say(**facts):
    print(json.dumps(facts), flush=True)


def control(flush):
    """Prints a word for each thing that must happen."""
    import torch

    edges = CudaEdges()
    edges.install()
    edges.memory.flush = flush

    def at(address, count):
        storage = torch._C._construct_storage_from_data_pointer(address, torch.device("cuda", 0), count)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)

    x = edges.bytes(64)
    edges.memory.alignment = 1
    assert int((x == UNWRITTEN).sum()) == 64
    x.zero_()
    edges.check()
    say(state="inside")
    outside = x.data_ptr() + (64 if flush == "start" else -1)
    at(outside, 1).fill_(1)
    try:
        edges.check()
    except Damaged:
        say(state="damaged")
    first = x.data_ptr() - (16 if flush == "start" else 0)
    text = None
    try:
        at(first, 80).sum()
    except Exception as error:  # noqa: BLE001  the driver's code decides
        text = str(error)
    code = edges.memory.pages.code()
    say(state="fault" if code == ILLEGAL_ADDRESS else f"code {code}", text=text)


def calls(count):
    """(backend, what makes the problem): all for aot, some for torch."""
    from safety_problems import problems

    yield from (("aot", make) for make in problems(True, count))
    yield from (("torch", make) for make in itertools.islice(problems(False, 2), 0, None, 2))


def main(count, first, seconds):
    start = time.monotonic()
    edges = CudaEdges()
    edges.install()
    for number, (backend, make) in enumerate(calls(count)):
        if number < first:
            continue
        problem = make()
        for flush in FLUSH:
            facts = {"number": number, "name": problem.name, "backend": backend, "flush": flush}
            if time.monotonic() - start > seconds:
                say(state="no time left", **facts)
                return
            say(state="run", **facts)
            edges.memory.flush = flush
            before = edges.memory.allocated
            try:
                problem.run(backend, edges)
            except Exception as error:  # noqa: BLE001  told with the problem's name
                # The exception alone doesn't tell: a callback that frees during it may replace it.
                code = edges.memory.pages.code()
                text, fault = f"driver's code {code}, {type(error).__name__}: {error}", code != 0
                say(state="fault" if fault else "failed", text=text[:2000], **facts)
                if fault:
                    return
                del error
                gc.collect()  # what the traceback held goes, and with it what it did to redzones
                edges.memory.damage.clear()
                continue
            say(state="ok", allocations=edges.memory.allocated - before, **facts)
    say(state="end", seconds=round(time.monotonic() - start, 1))


if __name__ == "__main__":
    if sys.argv[1] == "control":
        control(sys.argv[2])
        sys.stdout.flush()
        os._exit(0)

    import importlib.util

    folder = sys.argv[1]
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    sys.modules["m3_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    main(*map(int, sys.argv[2:5]))
    sys.stdout.flush()
    os._exit(0)  # without torch's destructors, which would call an allocator of a dead interpreter
