"""Tensors that end, or begin, at an unmapped page, with redzones where they don't.

An access past such an edge faults. Bytes between a tensor and the other end of its pages are a pattern that must stay;
the tensor's own bytes start as 0xFF, which is NaN in every floating-point format and -1 as an index.

`EdgeMemory` places; `HostPages` are pages of the CPU, gpu/edge_allocator.py has those of a GPU.
"""

import ctypes
import mmap

import numpy as np
import torch

REDZONE, UNWRITTEN = 0xA5, 0xFF
FLUSH = ("end", "start")


class Damaged(AssertionError):
    """A redzone was written."""


class HostPages:
    """Readable pages between two that are not."""

    granularity = mmap.PAGESIZE

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def _check(self, failed, what):
        if failed:
            raise OSError(ctypes.get_errno(), what)

    def map(self, room):
        """`room` bytes, whose address is returned, between unmapped pages."""
        base = self.libc.mmap(
            None, room + 2 * self.granularity, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )  # PROT_NONE
        self._check(base == ctypes.c_void_p(-1).value, "mmap")
        low = base + self.granularity
        self._check(self.libc.mprotect(low, room, mmap.PROT_READ | mmap.PROT_WRITE), "mprotect")
        return low

    def unmap(self, low, room):
        self._check(self.libc.munmap(low - self.granularity, room + 2 * self.granularity), "munmap")

    def fill(self, at, count, byte):
        ctypes.memset(at, byte, count)

    def read(self, at, count):
        return np.frombuffer((ctypes.c_char * count).from_address(at), np.uint8) if count else np.zeros(0, np.uint8)


class EdgeMemory:
    """Allocations on pages of their own, flush against the unmapped page behind ("end") or before them ("start")."""

    def __init__(self, pages, flush="end"):
        self.pages, self.flush, self.alignment = pages, flush, 1
        self.live = {}  # address -> (first byte of its pages, their size, its own size)
        self.damage = []  # what redzones of freed allocations showed
        self.allocated = 0

    def allocate(self, count):
        unit = self.pages.granularity
        room = max(-(-count // unit), 1) * unit
        low = self.pages.map(room)
        at = low if self.flush == "start" else low + (room - count) // self.alignment * self.alignment
        self.pages.fill(low, room, REDZONE)
        self.pages.fill(at, count, UNWRITTEN)
        self.live[at] = (low, room, count)
        self.allocated += 1
        return at

    def damage_of(self, at):
        """None, or a sentence about the redzones of a live allocation."""
        low, room, count = self.live[at]
        for first, size in ((low, at - low), (at + count, low + room - at - count)):
            changed = np.flatnonzero(self.pages.read(first, size) != REDZONE)
            if len(changed):
                where = first + int(changed[0]) - at
                return f"{len(changed)} bytes changed around {count}, the first at offset {where}"
        return None

    def free(self, at):
        found = self.damage_of(at)
        if found:
            self.damage.append(found)
        low, room, _ = self.live.pop(at)
        self.pages.unmap(low, room)

    def check(self):
        """Raises Damaged if a redzone of anything live or freed since the last check was written."""
        found, self.damage = [*self.damage, *filter(None, map(self.damage_of, self.live))], []
        if found:
            raise Damaged("; ".join(found))


class _Owner:
    """Keeps the pages of a host tensor mapped; numpy and torch hold on to it."""

    def __init__(self, memory, count):
        self.memory, self.at = memory, memory.allocate(count)
        self.__array_interface__ = {"data": (self.at, False), "shape": (count,), "typestr": "|u1", "version": 3}

    def __del__(self):
        self.memory.free(self.at)


class HostEdges:
    """What places tensors of the CPU."""

    device = "cpu"

    def __init__(self, flush):
        self.memory = EdgeMemory(HostPages(), flush)

    def bytes(self, count):
        """A uint8 tensor of `count` bytes and nothing around it."""
        return torch.from_numpy(np.asarray(_Owner(self.memory, count))) if count else torch.zeros(0, dtype=torch.uint8)

    def check(self):
        self.memory.check()


def span(x):
    """(first, last + 1) byte of a tensor in its storage."""
    first = x.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return (first * x.element_size(), (last + 1) * x.element_size()) if x.numel() else (0, 0)


def raw(storage_of, begin, end):
    """The bytes [begin, end) of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage_of.device).set_(storage_of.untyped_storage())[begin:end]


class Placed:
    """Tensors of a call on edges: those that share memory as one piece that begins and ends with them."""

    def __init__(self, tensors, edges):
        """`tensors`: name -> tensor of the CPU, or anything else, which stays as it is."""
        self.tensors, self.groups = dict(tensors), []
        shared = {}
        for name, x in tensors.items():
            if isinstance(x, torch.Tensor):
                own = () if x.numel() else (name,)
                shared.setdefault((x.untyped_storage().data_ptr(), *own), []).append(name)
        for names in shared.values():
            spans = [span(tensors[name]) for name in names]
            begin, end = min(s[0] for s in spans), max(s[1] for s in spans)
            buffer = edges.bytes(end - begin)
            before = raw(tensors[names[0]], begin, end).clone()
            buffer.copy_(before)
            for name in names:
                x = tensors[name]
                view = torch.empty(0, dtype=x.dtype, device=edges.device)
                offset = x.storage_offset() - begin // x.element_size() if x.numel() else 0
                self.tensors[name] = view.set_(buffer.untyped_storage(), offset, x.shape, x.stride())
            self.groups.append((names, begin, before, buffer))

    def results(self):
        """name -> copy on the CPU with the strides of the given tensor."""
        found = {}
        for names, begin, before, buffer in self.groups:
            after = buffer.cpu()
            for name in names:
                x = self.tensors[name]
                found[name] = torch.empty(0, dtype=x.dtype).set_(
                    after.untyped_storage(), x.storage_offset(), x.shape, x.stride()
                )
        return found

    def check_only(self, written):
        """Raises if a byte changed that belongs to no tensor named in `written`."""
        for names, _, before, buffer in self.groups:
            after = buffer.cpu()
            want = before.clone()
            for name in names:
                if name in written and self.tensors[name].numel():
                    x = self.tensors[name]
                    layout = (x.storage_offset(), x.shape, x.stride())
                    old, new = (torch.empty(0, dtype=x.dtype).set_(b.untyped_storage(), *layout) for b in (want, after))
                    old.copy_(new)
            changed = (after != want).nonzero()
            if len(changed):
                raise Damaged(f"{', '.join(names)}: {len(changed)} bytes changed, the first is {int(changed[0])}")
