"""Witnesses: flash-attn-4's own kernels, compiled from the installed package, launched as its host code launches them.

These are known to be right on hardware, so a reading of the instruction set that they contradict is wrong. Two kernels
for SM90 and SM100 each: dense causal attention, and packed queries over a paged cache with 16 query heads a KV head.

    python upstream.py KIND ARCH OUT    compiles one (for a process of its own: the compiler fixes its target at import)
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import struct
import subprocess
import sys
import tempfile
import types
from pathlib import Path

KINDS, ARCHS = ("dense", "paged"), ("sm_90a", "sm_100a")
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")
SHARED_BYTES = {"sm_90a": 164864, "sm_100a": 232448}
DIM = 128
LOG2_E = 1.4426950408889634


def missing():
    """Why the witnesses can't be compiled here, or None."""
    for package in PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} isn't installed"
    return None


def ptx(kind, arch, cache):
    """The PTX text of a witness; compiled once and kept in the folder `cache`."""
    versions = [importlib.metadata.version(p) for p in PACKAGES]
    digest = hashlib.sha256(repr((versions, Path(__file__).read_bytes())).encode()).hexdigest()[:12]
    path = Path(cache) / f"upstream-{kind}-{arch}-{digest}.ptx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / path.name
            done = subprocess.run([sys.executable, __file__, kind, arch, str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"flash-attn-4's {kind} kernel for {arch} doesn't compile:\n{done.stderr[-2000:]}")
            os.replace(made, path)
    return path.read_text()


# ---- compiling ----


def enter_packages():
    """Make flash_attn.cute and quack importable without their __init__, which would import Triton and host code."""
    folders = {name: importlib.util.find_spec(name).submodule_search_locations[0] for name in ("quack", "flash_attn")}
    folders["flash_attn.cute"] = os.path.join(folders["flash_attn"], "cute")
    for name, folder in folders.items():
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    importlib.import_module("quack.dsl")  # quack's __init__ does this: it extends CuTe's tensors


def compile_witness(kind, arch, out):
    number = arch[3:-1]
    with tempfile.TemporaryDirectory() as dump:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ir,ptx,cubin", CUTE_DSL_DUMP_DIR=dump)
        os.environ.update(
            FLASH_ATTENTION_ARCH=f"sm_{number}", FLASH_ATTENTION_NUM_SMS="132" if number == "90" else "148"
        )
        enter_packages()
        import cuda.bindings.driver as cuda
        import cutlass.cute as cute
        from cutlass import BFloat16, Float32, Int32
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        if kind == "dense":
            shapes = [(BFloat16, 4, 8)] * 4 + [(Float32, 3, 1)]
        else:
            shapes = [(BFloat16, 3, 8), (BFloat16, (None, 128), 8), (BFloat16, (None, 128), 8), (BFloat16, 3, 8)]
            shapes += [(Float32, 2, 1), (Int32, 1, 1), (Int32, 1, 1), (Int32, 2, 1)]

        def fake(dtype, shape, divisor):
            if isinstance(shape, tuple):  # pages of 128 tokens
                extents = (cute.sym_int(), 128, cute.sym_int(), DIM)
            else:
                extents = tuple(cute.sym_int() for _ in range(shape - 1)) + (DIM if divisor > 1 else cute.sym_int(),)
            strides = tuple(cute.sym_int64(divisibility=divisor) for _ in extents[1:]) + (1,)
            align = max(1, divisor * dtype.width // 8)
            return make_fake_tensor(dtype, extents, stride=strides, assumed_align=max(align, 4))

        kernel = make_kernel(kind, number)
        type(kernel).kernel.set_name_prefix(f"upstream_{kind}", remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = [fake(*s) for s in shapes]
        if kind == "dense":

            @cute.jit
            def entry(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, scale: Float32,
                      stream: cuda.CUstream):  # fmt: skip
                kernel(q, k, v, o, lse, scale, stream=stream)
        else:

            @cute.jit
            def entry(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, cu: cute.Tensor,
                      used: cute.Tensor, table: cute.Tensor, scale: Float32, stream: cuda.CUstream):  # fmt: skip
                kernel(q, k, v, o, lse, scale, mCuSeqlensQ=cu, mSeqUsedK=used, mPageTable=table, stream=stream)

        compiled = cute.compile(entry, *tensors, Float32(1.0), make_fake_stream())
        Path(out).write_text(compiled.artifacts.PTX)


def make_kernel(kind, number):
    paged = kind == "paged"
    heads = 16 if paged else 1
    if number == "90":
        from cutlass import BFloat16
        from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

        return FlashAttentionForwardSm90(
            BFloat16, DIM, DIM, heads, is_causal=True, is_local=False, pack_gqa=paged, tile_m=128, tile_n=128,
            num_stages=2, num_threads=384, Q_in_regs=False, intra_wg_overlap=True, mma_pv_is_rs=True, mask_mod=None,
            score_mod=None, has_aux_tensors=False, q_subtile_factor=1, paged_kv_non_tma=False,
        )  # fmt: skip
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

    return FlashAttentionForwardSm100(
        DIM, DIM, qhead_per_kvhead=heads, is_causal=True, is_local=False, pack_gqa=paged, m_block_size=128,
        n_block_size=128, q_stage=2, is_static_persistent=False, is_varlen_q=paged,
    )  # fmt: skip


# ---- parameters, in the order in which the kernels have them ----


def words(*values):
    return struct.pack(f"<{len(values)}i", *values)


def divisor(d):
    """CuTe's FastDivmodDivisor: d, multiplier, two shifts."""
    log = (d - 1).bit_length()
    multiplier = (1 << 32) * ((1 << log) - d) // d + 1
    return struct.pack("<IIBBH", d, multiplier & 0xFFFFFFFF, min(log, 1), max(log - 1, 0), 0)


def launch_dense(launch, encode, text, arch, q, k, v, out, lse, policy):
    """q, k, v, out: [B, S, H, 128]; lse: [B, H, S]."""
    (batch, rows, heads, _), keys, hopper = q.shape, k.shape[1], arch == "sm_90a"
    maps = [encode(t, (64, 128, 1, 1), 128, dims=(3, 1, 2, 0)) for t in (q, k, v, out)]
    query, key = words(rows, heads, batch), words(keys, heads, batch)
    lse_tensor = struct.pack("<Q4i2q", lse.data_ptr(), rows, heads, batch, 0, rows, heads * rows)
    blocks = -(-rows // (128 if hopper else 256))
    total = blocks * heads * batch
    fit = (50 << 20) // (keys * 512)  # heads whose K and V fit into L2
    swizzle = 1 << (fit.bit_length() - 1) if fit else 1
    whole, rest = divmod(heads * batch, swizzle)
    rest, major = max(rest, 1), swizzle * blocks
    schedule = [heads, divisor(swizzle), swizzle, divisor(major), major, divisor(rest), rest, whole, divisor(1), 1]
    scale = DIM**-0.5 * LOG2_E
    params = [query, key, key, query, lse_tensor, *maps, scale]
    if hopper:
        params += [0, 0, total, blocks, heads, batch, swizzle, divisor(heads), *schedule]
    else:
        params += [bytes(32), bytes(32), total, 1, blocks, heads, batch, swizzle, divisor(heads), *schedule, 1]
    return launch(text, None, total, 384 if hopper else 512, SHARED_BYTES[arch], params, memory=[out, lse],
                  read_only=[q, k, v], policy=policy)  # fmt: skip


def launch_paged(launch, pack, text, arch, q, k, v, out, lse, offsets, used, table, policy):
    """q, out: [T, H, 128] packed; k, v: [pages, 128, H / 16, 128]; lse: [H, T]; offsets: [B + 1]."""
    (tokens, heads, _), (pages, _, kv_heads, _), hopper = q.shape, k.shape, arch == "sm_90a"
    batch, width = table.shape
    row, page = heads * 256, kv_heads * 256
    if hopper:
        query = pack("bf16", q.data_ptr(), [128, heads, tokens], [256, row], [64, 16, 8], 128)
    else:
        query = pack("bf16", q.data_ptr(), [128, 16, tokens, kv_heads], [256, row, 4096], [64, 16, 8, 1], 128)
    caches = [
        pack("bf16", t.data_ptr(), [128, 128, kv_heads, pages], [page, 256, 128 * page], [64, 128, 1, 1], 128)
        for t in (k, v)
    ]
    lse_tensor = struct.pack("<Q2i2q", lse.data_ptr(), tokens, kv_heads, tokens, 16 * tokens)
    vectors = [struct.pack("<Q2i", t.data_ptr(), len(t), 0) for t in (offsets, used)]
    pages_of = struct.pack("<Q2iq", table.data_ptr(), batch, width, width)
    scale, l2_heads = DIM**-0.5 * LOG2_E, (50 << 20) // (256 * 2 * 128)
    head = [words(tokens, kv_heads), words(kv_heads, pages), words(kv_heads, pages)]
    if hopper:
        # The output map's base is moved back by 2^30 rows: its coordinates count from the end of a request.
        base = (out.data_ptr() - (row << 30)) & ((1 << 57) - 1)
        stored = pack("bf16", base, [128, heads, 1 << 30, (1 << 31) - 1], [256, row, row], [64, 16, 8, 1], 128)
        params = [*head, words(kv_heads), lse_tensor, *vectors, pages_of, query, *caches, stored, scale, 0, 0,
                  16 * tokens, kv_heads, batch, l2_heads, vectors[0]]  # fmt: skip
    else:
        out_tensor = struct.pack("<Q2i3q", out.data_ptr(), tokens, kv_heads, 128, heads * 128, 16 * 128)
        params = [*head, out_tensor, lse_tensor, *vectors, pages_of, query, *caches, scale, bytes(32), bytes(32),
                  16 * tokens, kv_heads, batch, 1, l2_heads, vectors[0], 1, divisor(16), 16]  # fmt: skip
    tile = 128 if hopper else 256
    grid = (16 * tokens + batch * (tile - 1)) // tile * kv_heads
    return launch(text, None, grid, 384 if hopper else 512, SHARED_BYTES[arch], params, memory=[out, lse],
                  read_only=[q, k, v, offsets, used, table], policy=policy)  # fmt: skip


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules are none of the compiler's
    compile_witness(*sys.argv[1:])
