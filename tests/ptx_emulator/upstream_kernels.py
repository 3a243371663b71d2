"""More witnesses: kernels of flash-attn-4 with the host code that CuTe DSL makes for them (upstream_host.py runs both).

python upstream_kernels.py KIND ARCH FOLDER    compiles one to KIND.o, KIND.h and KIND.ptx
"""

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

DIM, TILE = 128, 128
# name -> (dtype, extents: a letter is free, a number fixed; the dimension whose stride is 1). "scale" is a float.
QKV = {"q": ("bf16", "bqhD", 3), "k": ("bf16", "bkgD", 3), "v": ("bf16", "bkgD", 3), "o": ("bf16", "bqhD", 3)}
DENSE = {**QKV, "lse": ("f32", "bhq", 2), "scale": None}
VECTORS = {"cu_q": ("i32", "n", 0), "cu_k": ("i32", "n", 0)}
PACKED = {"q": ("bf16", "thD", 2), "k": ("bf16", "ugD", 2), "v": ("bf16", "ugD", 2), "o": ("bf16", "thD", 2)}
BLOCKS = {"mask_count": ("i32", "bhm", 2), "mask_index": ("i32", "bhmn", 3)}
FULL = {"full_count": ("i32", "bhm", 2), "full_index": ("i32", "bhmn", 3)}
PARTS = {"parts": ("f32", "sbqhD", 4), "part_lses": ("f32", "sbqh", 2)}
FP8 = {name: ("e4m3", *rest) for name, (_, *rest) in QKV.items() if name != "o"}
WITNESSES = {
    "combine": {**PARTS, "o": ("bf16", "bqhD", 3), "lse": ("f32", "bqh", 1)},
    "varlen": {**PACKED, "lse": ("f32", "ht", 1), **VECTORS, "scale": None},
    "block_sparse": {**DENSE, **BLOCKS, **FULL},
    "fp8": {**FP8, "o": QKV["o"], "lse": DENSE["lse"], "scale": None},
}
ARCHS = {"combine": ("sm_90a", "sm_100a"), "varlen": ("sm_90a", "sm_100a"), "block_sparse": ("sm_90a", "sm_100a"),
         "fp8": ("sm_100a",)}  # fmt: skip


def kernel(kind, hopper):
    if kind == "combine":
        import cutlass
        from flash_attn.cute.flash_fwd_combine import FlashAttentionForwardCombine

        return FlashAttentionForwardCombine(
            cutlass.BFloat16, cutlass.Float32, DIM, 3, tile_m=8, k_block_size=128, log_max_splits=5
        )
    mask = below_diagonal() if kind == "block_sparse" else None
    causal = kind != "block_sparse"
    if hopper:
        from cutlass import BFloat16
        from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

        return FlashAttentionForwardSm90(
            BFloat16, DIM, DIM, 1, is_causal=causal, is_local=False, pack_gqa=False, tile_m=TILE, tile_n=TILE,
            num_stages=2, num_threads=384, Q_in_regs=False, intra_wg_overlap=True, mma_pv_is_rs=True, mask_mod=mask,
            score_mod=None, has_aux_tensors=False, q_subtile_factor=1, paged_kv_non_tma=False,
        )  # fmt: skip
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return FlashAttentionForwardSm100(
        DIM, DIM, qhead_per_kvhead=1, is_causal=causal, is_local=False, pack_gqa=False, m_block_size=TILE,
        n_block_size=TILE, q_stage=2, is_static_persistent=False, is_varlen_q=kind == "varlen", mask_mod=mask,
    )  # fmt: skip


def below_diagonal():
    import cutlass.cute as cute

    @cute.jit
    def mask(batch, head, row, column, lengths, tensors):
        return column <= row

    return mask


def entry_of(kind, run):
    """A function of plain arguments: the C interface takes no others."""
    import cuda.bindings.driver as cuda
    import cutlass.cute as cute
    from cutlass import Float32
    from flash_attn.cute.block_sparsity import BlockSparseTensors

    if kind == "combine":

        @cute.jit
        def entry(parts: cute.Tensor, part_lses: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, stream: cuda.CUstream):
            run(parts, part_lses, o, lse, None, None, None, None, None, stream=stream)
    elif kind == "varlen":

        @cute.jit
        def entry(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, cu_q: cute.Tensor,
                  cu_k: cute.Tensor, scale: Float32, stream: cuda.CUstream):  # fmt: skip
            run(q, k, v, o, lse, scale, mCuSeqlensQ=cu_q, mCuSeqlensK=cu_k, stream=stream)
    elif kind == "block_sparse":

        @cute.jit
        def entry(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, scale: Float32,
                  mask_count: cute.Tensor, mask_index: cute.Tensor, full_count: cute.Tensor, full_index: cute.Tensor,
                  stream: cuda.CUstream):  # fmt: skip
            blocks = BlockSparseTensors(mask_count, mask_index, full_count, full_index)
            run(q, k, v, o, lse, scale, blocksparse_tensors=blocks, stream=stream)
    else:

        @cute.jit
        def entry(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, scale: Float32,
                  stream: cuda.CUstream):  # fmt: skip
            run(q, k, v, o, lse, scale, stream=stream)

    return entry


def compile_witness(kind, arch, folder):
    number = arch[3:-1]
    with tempfile.TemporaryDirectory() as dump:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ir,ptx,cubin", CUTE_DSL_DUMP_DIR=dump)
        os.environ.update(
            FLASH_ATTENTION_ARCH=f"sm_{number}", FLASH_ATTENTION_NUM_SMS="132" if number == "90" else "148"
        )
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        importlib.import_module("ptx_emulator.upstream").enter_packages()
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        types = {"bf16": cutlass.BFloat16, "f32": cutlass.Float32, "i32": cutlass.Int32, "e4m3": cutlass.Float8E4M3FN}

        def fake(dtype, extents, lead):
            dtype = types[dtype]
            divisor = 128 // dtype.width if "D" in extents else 1  # rows are multiples of 16 bytes
            strides = [1 if i == lead else cute.sym_int64(divisibility=divisor) for i in range(len(extents))]
            shape = [DIM if letter == "D" else cute.sym_int() for letter in extents]
            align = max(4, divisor * dtype.width // 8)
            return make_fake_tensor(dtype, tuple(shape), stride=tuple(strides), assumed_align=align)

        run = kernel(kind, number == "90")
        type(run).kernel.set_name_prefix(f"upstream_{kind}", remove_cutlass_symbol=True, keep_mangled_name=False)
        arguments = [cutlass.Float32(1.0) if spec is None else fake(*spec) for spec in WITNESSES[kind].values()]
        compiled = cute.compile(entry_of(kind, run), *arguments, make_fake_stream())
        compiled.export_to_c(dump, kind, kind)
        for name in (f"{kind}.o", f"{kind}.h"):
            shutil.copy(Path(dump) / name, folder)
        (Path(folder) / f"{kind}.ptx").write_text(compiled.artifacts.PTX)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are none of the compiler's
    compile_witness(*sys.argv[1:])
