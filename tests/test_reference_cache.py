"""store_kv byte for byte, and merge_states, against the oracle."""

import math

import cases
import oracle
import pytest
import torch

import m3_sparse

INF = math.inf
SOURCES = [torch.float32, torch.bfloat16, torch.float16]


def caches(page, layout, dtype, heads=2, count=5):
    """K, V and index-K caches of NaN, so that a stray write and a missing one both show."""
    pair = cases.empty_pages(layout, count, heads, page, 2, dtype, "nan")
    index = cases.empty_pages("padded" if layout == "padded" else "hnd", count, 1, page, 1, dtype, "nan")[0][:, 0]
    return pair[0], pair[1], index


def tokens(rows, heads, dtype, seed, spread=1.0):
    gen = cases.generator(seed)
    return [
        (torch.randn(shape, generator=gen) * spread).to(dtype)
        for shape in ((rows, heads, 128), (rows, heads, 128), (rows, 128))
    ]


def slots_of(rows, page, count, seed, dtype=torch.int64):
    """Distinct slots, first and last of the cache included, with holes and slots outside."""
    slots = torch.randperm(count * page, generator=cases.generator(seed))[:rows]
    slots = slots[(slots != 0) & (slots != count * page - 1)]
    extra = torch.tensor([0, count * page - 1, -1, -1, -2, -page, count * page, count * page + 5])
    if dtype == torch.int64:
        extra = torch.cat([extra, torch.tensor([2**40, -(2**62), 2**32])])
    else:
        extra = torch.cat([extra, torch.tensor([2**31 - 1, -(2**31)])])
    both = torch.cat([slots, extra])
    return both[torch.randperm(len(both), generator=cases.generator(seed + 1))].to(dtype)


def is_nan(data, dtype):
    return torch.from_numpy(oracle.fp8_values(dtype)).isnan()[data.long()]


def check_store(k, v, index_k, k_cache, v_cache, index_cache, slots, **scales):
    want = oracle.store_kv(k, v, index_k, k_cache, v_cache, index_cache, slots, **scales)
    assert m3_sparse.store_kv(k, v, index_k, k_cache, v_cache, index_cache, slots, **scales) is None
    for what, cache, expected in zip(("k_cache", "v_cache", "index_k_cache"), (k_cache, v_cache, index_cache), want):
        if cache is None:
            continue
        got = oracle.stored_bytes(cache)
        differ = got != expected
        if cache.dtype in cases.FP8:
            differ &= ~(is_nan(got, cache.dtype) & is_nan(expected, cache.dtype))
        assert not differ.any(), f"{what}: {int(differ.sum())} bytes differ, first at {differ.nonzero()[0].tolist()}"


@pytest.mark.parametrize("layout", ["hnd", "nhd", "packed", "padded"])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("dtype", SOURCES + list(cases.FP8))
def test_same_dtype_copy(dtype, page, layout):
    slots = slots_of(40, page, 5, seed=1)
    data = tokens(len(slots), 2, torch.float32, seed=2)
    check_store(*(t.to(dtype) for t in data), *caches(page, layout, dtype), slots)


@pytest.mark.parametrize("scales", [None, "scalar", "head"])
@pytest.mark.parametrize("cache_dtype", cases.FP8)
@pytest.mark.parametrize("dtype", SOURCES)
def test_quantising_store(dtype, cache_dtype, scales):
    slots = slots_of(60, 64, 5, seed=3)
    k, v, index_k = tokens(len(slots), 2, dtype, seed=4, spread=200.0 if cache_dtype == torch.float8_e4m3fn else 2e4)
    kwargs = {}
    if scales:
        count = 1 if scales == "scalar" else 2
        kwargs = {"k_scale": torch.tensor([0.37, 1.9][:count]), "v_scale": torch.tensor([3.1, 0.11][:count])}
    check_store(k, v, index_k, *caches(64, "packed", cache_dtype), slots, **kwargs)


@pytest.mark.parametrize("cache_dtype", cases.FP8)
def test_quantisation_rounds_saturates_and_keeps_nan(cache_dtype):
    """Every code, every midpoint between codes (ties to even), around the largest value, subnormals, inf, NaN."""
    codes = torch.from_numpy(oracle.fp8_values(cache_dtype))
    finite = codes[codes.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    top = float(finite[-1])
    special = torch.tensor(
        [0.0, -0.0, INF, -INF, math.nan, top * 1.01, -top * 1.03, top * 1.0625, top * 1.5, 3e38, 1e-30, -1e-30]
    )
    data = torch.cat([finite, middles, middles * 1.0001, middles * 0.9999, special.double()]).float()
    rows = -(-len(data) // 256)
    data = torch.nn.functional.pad(data, (0, rows * 256 - len(data))).view(rows, 2, 128)
    k_cache, v_cache, index_cache = caches(64, "hnd", cache_dtype)
    check_store(data, -data, data[:, 1], k_cache, v_cache, index_cache, torch.arange(rows) * 3)
    values = torch.from_numpy(oracle.fp8_values(cache_dtype))[oracle.stored_bytes(k_cache).long()]
    stored = torch.stack([values[s // 64, :, s % 64] for s in range(0, 3 * rows, 3)])
    assert torch.equal(stored.isnan(), data.isnan()) and stored.nan_to_num(0.0).abs().max() == top


def test_scales_of_any_layout():
    """A scale for each head counts by its elements, whatever its shape and strides."""
    k, v, _ = tokens(3, 4, torch.float32, 5)
    heads = torch.tensor([0.5, 3.0, 2.0, 4.0])
    results = []
    for scale in (heads, heads.view(2, 2).t().contiguous().t(), torch.stack([heads, -heads], 1)[:, 0], heads[:, None]):
        k_cache, v_cache, _ = caches(64, "hnd", torch.float8_e4m3fn, heads=4)
        m3_sparse.store_kv(k, v, None, k_cache, v_cache, None, torch.tensor([0, 70, 5]), k_scale=scale, v_scale=scale)
        results.append(oracle.stored_bytes(k_cache))
    assert all(torch.equal(result, results[0]) for result in results)
    want = (k[1] / heads[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(results[0][1, :, 6], want.view(torch.uint8))


def test_index_key_takes_no_scale():
    k, v, index_k = tokens(4, 2, torch.bfloat16, seed=5)
    k_cache, v_cache, index_cache = caches(128, "hnd", torch.float8_e4m3fn)
    scale = torch.tensor([16.0])
    check_store(k, v, index_k, k_cache, v_cache, index_cache, torch.arange(4), k_scale=scale, v_scale=scale)
    assert torch.equal(index_cache[0, :4].float(), index_k.float().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("page", [64, 128])
def test_without_an_index_key(page):
    k, v, _ = tokens(5, 2, torch.bfloat16, seed=6)
    k_cache, v_cache, _ = caches(page, "hnd", torch.bfloat16)
    check_store(k, v, None, k_cache, v_cache, None, torch.tensor([3, -1, page, 4 * page + 1, 0]))


def test_index_cache_may_mix_dtypes_with_kv():
    """A bf16 index cache beside an fp8 KV cache."""
    k, v, index_k = tokens(5, 2, torch.bfloat16, seed=7)
    k_cache, v_cache, _ = caches(64, "nhd", torch.float8_e4m3fn)
    index_cache = caches(64, "padded", torch.bfloat16)[2]
    check_store(k, v, index_k, k_cache, v_cache, index_cache, torch.tensor([3, -1, 64, 100, 0]))


def test_slots_of_int32_and_strided_sources():
    slots = slots_of(20, 64, 5, seed=8, dtype=torch.int32)
    rows = len(slots)
    fused = torch.randn(rows, 2 * 2 + 1, 128, generator=cases.generator(9))
    k, v, index_k = fused[:, :2], fused[:, 2:4], fused[:, 4]
    assert not k.is_contiguous()
    check_store(k, v, index_k, *caches(64, "packed", torch.float32), slots)
    check_store(k.transpose(0, 1).contiguous().transpose(0, 1), v, index_k, *caches(64, "nhd", torch.float32), slots)


@pytest.mark.parametrize("slots", [[], [-1, -1, -1], [10**9, -(10**9), 640]])
def test_nothing_to_store(slots):
    k, v, index_k = tokens(len(slots), 2, torch.bfloat16, seed=10)
    target = caches(128, "hnd", torch.bfloat16)
    check_store(k, v, index_k, *target, torch.tensor(slots, dtype=torch.int64))
    assert all(t.isnan().all() for t in target)


def test_store_then_attend():
    """The whole life of a cache: written token by token through slots, then read by selection and attention."""
    case = cases.make([4, 2], [2300, 200], page=64, dtype=torch.bfloat16, kind="int", seed=11)
    pages = case.k_cache.shape[0]
    k_cache, v_cache, index_cache = caches(64, "packed", torch.bfloat16, count=pages)
    for b, kv_len in enumerate(case.kv_lens):
        where = torch.arange(kv_len)
        slots = case.block_table[b].long()[where // 64] * 64 + where % 64
        rows = [
            torch.cat([cache[int(p)].transpose(-3, -2) for p in case.block_table[b, : -(-kv_len // 64)]])[:kv_len]
            for cache in (case.k_cache, case.v_cache)
        ]
        index = torch.cat([case.index_k_cache[int(p)] for p in case.index_table[b, : -(-kv_len // 64)]])[:kv_len]
        m3_sparse.store_kv(*rows, index, k_cache, v_cache, index_cache, slots)
    args, kwargs = case.index()
    want_ids = m3_sparse.select_blocks(*args, **kwargs)
    ids = m3_sparse.select_blocks(case.index_q, index_cache, case.block_table, **kwargs)
    oracle.check_bitwise(ids, want_ids, "block_indices")
    args, kwargs = case.sparse(ids)
    want = m3_sparse.sparse_attention(*args, **kwargs)
    got = m3_sparse.sparse_attention(args[0], k_cache, v_cache, *args[3:], **kwargs)
    oracle.check_close(got, want, 2e-2, 2e-2, "out")


# --------------------------------------------------------------------------------------------------------------- merge


def states(parts, rows, heads, dtype, seed):
    gen = cases.generator(seed)
    outs = torch.randn(parts, rows, heads, 128, generator=gen).to(dtype)
    lses = 5 * torch.randn(parts, rows, heads, generator=gen)
    dead = torch.rand(parts, rows, heads, generator=gen) < 0.3
    lses[dead], outs[dead] = -INF, float("nan")
    return outs, lses


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize(
    "parts, rows, heads", [(1, 3, 2), (2, 17, 4), (3, 1, 1), (5, 9, 16), (33, 2, 3), (2, 0, 4), (2, 3, 0)]
)
def test_merge_states(parts, rows, heads, dtype):
    outs, lses = states(parts, rows, heads, dtype, seed=12)
    want, want_lse = oracle.merge_states(outs, lses)
    for arguments in (
        (outs, lses),
        (list(outs), list(lses)),
        (outs.transpose(1, 2).contiguous().transpose(1, 2), lses),
    ):
        out, lse = m3_sparse.merge_states(*arguments)
        assert out.dtype == dtype and lse.dtype == torch.float32
        oracle.check_attention(out, lse, want, want_lse)
        again, again_lse = m3_sparse.merge_states(*arguments)
        oracle.check_bitwise(again, out, "out")
        oracle.check_bitwise(again_lse, lse, "lse")


@pytest.mark.parametrize("out_dtype", SOURCES)
def test_merge_out_dtype(out_dtype):
    outs, lses = states(3, 5, 4, torch.float32, seed=13)
    out, lse = m3_sparse.merge_states(outs, lses, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    oracle.check_attention(out, lse, *oracle.merge_states(outs, lses))


def test_merge_of_extreme_lses():
    outs, lses = states(4, 3, 2, torch.float32, seed=14)
    outs = torch.randn_like(outs)
    lses[:, 0] = torch.tensor([1e4, -1e4, 1e4, -INF])[:, None]
    lses[:, 1] = torch.tensor([-3e38, -INF, -3e38, -INF])[:, None]
    lses[:, 2] = -INF
    out, lse = m3_sparse.merge_states(outs, lses)
    want, want_lse = oracle.merge_states(outs, lses)
    oracle.check_attention(out, lse, want, want_lse)
    assert (out[2] == 0).all() and (lse[2] == -INF).all() and not out.isnan().any()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_merge_shows_a_broken_lse(bad):
    outs, lses = torch.randn(3, 2, 2, 128), torch.zeros(3, 2, 2)
    lses[1, 0, 0] = bad
    out, lse = m3_sparse.merge_states(outs, lses)
    assert out[0, 0].isnan().all() and not lse[0, 0].isfinite()
    assert out[0, 1].isfinite().all() and out[1].isfinite().all() and lse[1].isfinite().all()
