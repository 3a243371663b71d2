"""Copies into shared memory by tensor map (TMA): one thread asks for a box, an mbarrier (smem.py) counts its bytes.

A tensor map holds base, extents, byte strides, box and swizzle. The host encodes it for the tensors of a call, and the
kernel gets it by value: a parameter of type cute.CopyAtom. The kernel's trace needs one of the right type only.
"""

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync

from shared.ptx import asm


def example_map(dtype):
    """A tensor map for `entry` to pass to the kernel: 128 bytes of parameter. The host encodes the real one."""
    elements = 128 // (dtype.width // 8)
    pointer = cute.make_ptr(dtype, Int64(1024), cute.AddressSpace.gmem, assumed_align=16)
    tile = cute.make_layout((8, elements), stride=(elements, 1))
    tensor = cute.make_tensor(pointer, tile)
    atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, (8, elements))
    return atom


def map_address(tensor_map):
    """The generic address of a kernel's tensor map."""
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    pointer = cute_nvgpu.get_tma_desc_addr(kind, cute_nvgpu.atom_make_exec_tma(tensor_map._trait.value))
    return Int64(pointer.toint())


def prefetch_map(address):
    asm("prefetch.tensormap [$0];", "", "l", [address])


def tma_load(target, address, coordinates, mbarrier, policy=None):
    """The box at `coordinates` (innermost first) to shared memory, by one thread. Zeros come from outside of the
    tensor. `policy`: an L2 cache policy."""
    n = len(coordinates)
    at = ", ".join(f"${3 + i}" for i in range(n))
    hint, last, letter = ("", "", "") if policy is None else (".L2::cache_hint", f", ${3 + n}", "l")
    text = (
        f"cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} "
        f"[$0], [$1, {{{at}}}], [$2]{last};"
    )
    arguments = [target, address, mbarrier, *coordinates] + ([] if policy is None else [Int64(policy)])
    asm(text, "", "rlr" + "r" * n + letter, arguments)


def fence_async():
    """Orders this thread's plain accesses to shared memory before later ones by the async proxy: TMA, wgmma, bulk
    stores (with a barrier between where another thread starts those)."""
    asm("fence.proxy.async.shared::cta;", "", "", [])
