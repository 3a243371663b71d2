"""Tensor maps as kernel arguments and the copies they describe.

A kernel declares a map as `cute.CopyAtom`; its `entry` gives the atom a type with `argument`, and the launch passes 128
bytes that the driver encoded. Boxes, coordinates and the layout in shared memory are then between the launch code and
the kernel: `load` only needs the map's address.
"""

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync, warpgroup

from shared.ptx import asm


def argument(address, dtype):
    """A copy atom of the right kind; which box it stands for does not show in a kernel that calls `load`."""
    width = 128 // (dtype.width // 8)  # of a row under the 128-byte swizzle
    rows = cute.make_layout((8, width), stride=(width, 1))
    tensor = cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16), rows)
    layout = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (8, width))
    return atom


def address(atom):
    """Of a kernel argument's 128 bytes."""
    live = cute_nvgpu.atom_make_exec_tma(atom._trait.value)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    return Int64(cute_nvgpu.get_tma_desc_addr(kind, live).toint())


def prefetch(map_address):
    asm("prefetch.tensormap [$0];", "", "l", [map_address])


def load(target, map_address, coordinates, mbarrier):
    """One box to shared memory by one thread; `mbarrier` counts its bytes. What lies outside the tensor becomes
    zeros."""
    n = len(coordinates)
    place = ", ".join(f"${i + 2}" for i in range(n))
    text = f"cp.async.bulk.tensor.{n}d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {{{place}}}], [${n + 2}];"
    asm(text, "", "rl" + "r" * n + "r", [target, map_address, *coordinates, mbarrier])
