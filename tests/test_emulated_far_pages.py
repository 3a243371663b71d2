"""Pages far into a pool of more than 2^31 elements, and page numbers above 32,768, in the PTX emulator: every kernel that
reads a cache, against float64, and the one that writes it. The pool is address space that is never touched outside of a few pages.

Needs `--backend=emulated`.
"""

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ELEMENTS = 2**31


def far(cache, numbers, count):
    """`count` pages of the same strides inside a page, of which those of `cache` lie at `numbers`."""
    pool = torch.empty(count, *cache.shape[1:], dtype=cache.dtype)
    pool[numbers] = cache
    return pool


def make(heads=(16, 1), **options):
    """A case whose pages lie at both ends of pools beyond 2^31 elements, and at numbers around 2^15 and 2^16."""
    case = cases.make([9, 12], [300, 150], heads=heads, topk=3, seed=5, **options)
    for names, table in ((("k_cache", "v_cache"), case.block_table), (("index_k_cache",), case.index_table)):
        old = getattr(case, names[0])
        count = max(ELEMENTS // old[0].numel() + 64, 66000)
        places = [count - 1, 32768, 65536, 0, 32767, count - 2, 65535, count - 33, 50000, 1, count - 64, 9]
        assert len(old) <= len(places)
        numbers = torch.tensor(places[: len(old)])
        for name in names:
            setattr(case, name, far(getattr(case, name), numbers, count))
        used = (table >= 0) & (table < len(old))
        table[used] = numbers[table[used].long()].to(torch.int32)
    return case


@pytest.mark.parametrize("page", [128, 64])
@pytest.mark.parametrize("kv", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("formulation", ["union", "kv_stationary", "decode"])
def test_sparse_attention(emulation, formulation, kv, page):
    case = make(dtype=BF16, kv_dtype=kv, page=page)
    args, options = case.sparse()
    with m3_sparse.backend("aot"):
        got = m3_sparse.sparse_attention(*args, **options, return_lse=True, formulation=formulation)
    oracle.check_attention(*got, *oracle.sparse_attention(*args, **options))


def test_a_float8_cache_that_is_widened_first(emulation):
    case = make(dtype=BF16, kv_dtype=E4M3)
    (q, *rest), options = case.sparse()
    out, lse = cases.nan_like(q.shape, BF16), cases.nan_like(q.shape[:2], torch.float32)
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    widened = 5  # of launch/prefill.h
    ops.BUILT["sparse_attention", "aot"](out, lse, q, *rest, *lengths, 128**-0.5, True, None, None, 0, True, widened)
    oracle.check_attention(out, lse, *oracle.sparse_attention(q, *rest, **options))


@pytest.mark.parametrize("splits", [1, 3])
def test_dense_attention(emulation, splits):
    case = make(dtype=BF16)
    (q, *rest), options = case.dense()
    out, lse = cases.nan_like(q.shape, BF16), cases.nan_like(q.shape[:2], torch.float32)
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    ops.BUILT["dense_attention", "aot"](out, lse, q, *rest, *lengths, 128**-0.5, True, None, None, splits)
    oracle.check_attention(out, lse, *oracle.dense_attention(q, *rest, **options))


@pytest.mark.parametrize("kv", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("way", [1, 2, 3], ids=["decode", "stored", "fused"])
def test_selection(emulation, way, kv):
    case = make(heads=(4, 4), dtype=BF16, kv_dtype=kv, kind="int")
    args, options = case.index()
    out = torch.full((*args[0].shape[:2], 16), -7, dtype=torch.int32)
    ops.BUILT["select_blocks", "aot"](out, None, *args, *options.values(), 1, 0, way)
    scores = oracle.block_scores(*args, **options)
    counts = oracle.candidates(*options.values(), args[2], case.page, len(out))
    oracle.check_selection(out, scores, torch.zeros_like(scores), counts)


@pytest.mark.parametrize("kv", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_store(emulation, kv):
    page, numbers, count = 64, torch.tensor([0, 65536, ELEMENTS // (64 * 128) + 63]), ELEMENTS // (64 * 128) + 64
    generator = torch.Generator().manual_seed(6)
    rows = [torch.randn(20, *heads, 128, generator=generator).to(BF16) for heads in ((1,), (1,), ())]
    near = [torch.zeros(3, *heads, page, 128).to(kv) for heads in ((1,), (1,), ())]
    slots = torch.randperm(3 * page, generator=generator)[:20]
    want = oracle.store_kv(*rows, *near, slots)
    pools = [far(cache, numbers, count) for cache in near]
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(*rows, *pools, numbers[slots // page] * page + slots % page)
    for pool, expected in zip(pools, want):
        assert torch.equal(oracle.stored_bytes(pool[numbers]), expected)
