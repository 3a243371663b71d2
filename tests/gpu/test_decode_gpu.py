"""Sparse decode attention on a GPU: the decode kernels through the launcher, against float64.

The kernels promise more than tolerance: the result has the same bits for every number of splits, every batch around a row,
every order of the selection and every content of bytes that no row sees.
"""

import itertools

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import ops

DEVICE = "cuda"
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2), (FP16, E5M2)]
SPLITS = (1, 2, 4, 16)  # CTAs a row
INF = float("inf")


def operator():
    return getattr(ops, "ops", ops).aot_sparse_attention.default


def on_gpu(x):
    """The same view of a copy of the whole storage, so that strides and gaps arrive as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(DEVICE).untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=DEVICE).set_(storage, x.storage_offset(), x.shape, x.stride())


def run(args, options, splits=0, causal=True, softmax_scale=128**-0.5, with_lse=True):
    """(out, lse) of the operator; outputs start as NaN, so a row that isn't written shows."""
    q, k_cache, v_cache, ids, table = args
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE) if with_lse else None
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    scales = (options.get("k_scale"), options.get("v_scale"))
    operator()(out, lse, q, k_cache, v_cache, ids, table, *lengths, softmax_scale, causal, *scales, splits)
    return out, lse


def same_bits(a, b):
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_same(one, other, what):
    assert same_bits(one[0], other[0]), f"{what}: outputs differ"
    assert one[1] is None or same_bits(one[1], other[1]), f"{what}: LSEs differ"


def assert_close(got, want, what=""):
    """Section 9 of the contract: 16-bit math, float64 oracle on the stored values."""
    out, lse = got[0].double().cpu(), got[1].double().cpu()
    want_out, want_lse = want[0].double().cpu(), want[1].double().cpu()
    assert not out.isnan().any() and not lse.isnan().any(), what
    error = (out - want_out).abs()
    assert bool((error <= 2e-2 + 2e-2 * want_out.abs()).all()), f"{what}: {error.max()}"
    norm = want_out.norm()
    assert norm == 0 or float((out - want_out).norm() / norm) <= 5e-3, f"{what}: {(out - want_out).norm() / norm}"
    assert torch.equal(lse == -INF, want_lse == -INF), what
    gap = torch.where(want_lse == -INF, 0.0, (lse - want_lse).abs() / want_lse.abs().clamp(min=100) * 100)
    assert float(gap.max() if gap.numel() else 0) <= 1e-3, f"{what}: lse {gap.max()}"


def exact(args, options, causal=True, chunk=32):
    """float64 on the GPU, by gathering: for problems on which the oracle's loops take too long."""
    q, k_cache, v_cache, ids, table = args
    cu, used = options["cu_seqlens_q"].tolist(), options["seqused_k"].tolist()
    page, pages, heads = k_cache.shape[2], k_cache.shape[0], k_cache.shape[1]
    group, tokens = q.shape[1] // heads, q.shape[0]
    reach = table.shape[1] * page
    request = torch.zeros(tokens, dtype=torch.long, device=DEVICE)
    end = torch.zeros(tokens, dtype=torch.long, device=DEVICE)
    for b in range(len(used)):
        length = max(0, min(used[b], reach))
        rows = torch.arange(cu[b], cu[b + 1], device=DEVICE)
        request[rows] = b
        end[rows] = (length - cu[b + 1] + rows + 1).clamp(min=0) if causal else length
    out = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64, device=DEVICE)
    k_scale = options.get("k_scale")
    v_scale = options.get("v_scale")
    k_scale = torch.ones(1, device=DEVICE) if k_scale is None else k_scale
    v_scale = torch.ones(1, device=DEVICE) if v_scale is None else v_scale
    for first in range(0, tokens, chunk):
        t = slice(first, first + chunk)
        stop = end[t, None, None]
        block = torch.where((ids[t] >= 0) & (ids[t].long() * 128 < stop), ids[t].long(), 1 << 40).sort(-1).values
        again = torch.nn.functional.pad(block[..., 1:] == block[..., :-1], (1, 0))
        block = torch.where(again, 1 << 40, block)
        position = block[..., None] * 128 + torch.arange(128, device=DEVICE)
        seen = position < stop[..., None]
        entry = torch.where(seen, position // page, 0)
        number = table[request[t][:, None, None, None], entry].long()
        seen &= (number >= 0) & (number < pages)
        number = torch.where(seen, number, 0)
        head = torch.arange(heads, device=DEVICE)[None, :, None, None].expand_as(number)
        where = (number, head, torch.where(seen, position % page, 0))
        keys, values = (
            torch.where(seen[..., None], taken(cache, where), 0.0).flatten(2, 3)
            * scale.double().expand(heads)[None, :, None, None]
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        seen = seen.flatten(2, 3)
        query = q[t].double().unflatten(1, (heads, group))
        logits = torch.einsum("thgd,thkd->thgk", query, keys) * 128**-0.5
        logits = logits.masked_fill(~seen[:, :, None], -INF)
        total = torch.logsumexp(logits, -1)
        weight = torch.exp(logits - torch.where(total == -INF, 0.0, total)[..., None])
        lse[t] = total.flatten(1, 2)
        out[t] = torch.einsum("thgk,thkd->thgd", weight, values).flatten(1, 2)
    return out, lse


def taken(cache, where):
    """cache[where] in float64; float8 tensors cannot be indexed as such."""
    raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    return raw[where].view(cache.dtype).double()


def big_problem(q_lens, kv_lens, heads=(64, 4), kv=BF16, q=BF16, pages=512, topk=16, page=128, seed=0, ascending=True):
    """Requests of any length over a small pool: pages are shared and repeat, so 1M-token tables cost nothing."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    tokens = sum(q_lens)
    shape = (pages, heads[1], page, 128)
    k_cache, v_cache = (torch.randn(shape, device=DEVICE, generator=generator).to(kv) for _ in range(2))
    query = torch.randn(tokens, heads[0], 128, device=DEVICE, generator=generator).to(q)
    width = max(1, -(-max(kv_lens) // page))
    table = torch.randint(0, pages, (len(q_lens), width), device=DEVICE, generator=generator, dtype=torch.int32)
    cu = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32, device=DEVICE)
    used = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    ids = torch.full((tokens, heads[1], topk), -1, dtype=torch.int32, device=DEVICE)
    host = torch.Generator().manual_seed(seed)
    for b, (start, count) in enumerate(zip(cu.tolist(), q_lens)):
        for i in range(count):
            blocks = max(0, (kv_lens[b] - count + i) // 128 + 1)
            for h in range(heads[1]):
                some = torch.randint(0, max(blocks, 1), (4 * topk,), generator=host).unique()
                some = some[torch.randperm(len(some), generator=host)][: topk - 1].tolist()
                chosen = sorted({*some, blocks - 1}) if blocks else []
                if not ascending:
                    chosen = [chosen[j] for j in torch.randperm(len(chosen), generator=host).tolist()]
                ids[start + i, h, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return (query, k_cache, v_cache, ids, table), {"cu_seqlens_q": cu, "seqused_k": used}


def check_all_splits(args, options, want, causal=True, what=""):
    choices = [splits for splits in SPLITS if splits < 16 or args[3].shape[2] <= 16]
    results = [run(args, options, splits, causal) for splits in choices]
    for splits, result in zip(choices, results):
        assert_close(result, want, f"{what} splits {splits}")
        assert_same(result, results[0], f"{what} splits {splits} against {choices[0]}")


# ---- values


@pytest.mark.parametrize("q, kv", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_hostile_draws_against_the_oracle(q, kv, seed):
    """Every layout, both page sizes, ragged requests, wild selections, poison, padded rows, per-head scales."""
    (args, options), causal, what = cases.hostile([1, 4, 0, 3, 2, 1], [2049, 130, 0, 3, 700, 128], q, kv, seed)
    want = oracle.sparse_attention(*args, **options, causal=causal)
    gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
    check_all_splits(*gpu, want, causal, what)


@pytest.mark.parametrize("kv", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 2047, 2048, 2049, 65537, 1048576])
def test_lengths(kv, length):
    args, options = big_problem([1, 2], [length, max(length - 1, 0)], kv=kv, seed=length)
    check_all_splits(args, options, exact(args, options), what=str(length))


@pytest.mark.parametrize("kv, heads", [(E4M3, (16, 1)), (BF16, (32, 2)), (E5M2, (8, 1))])
@pytest.mark.parametrize("batch", [1, 3, 17, 128, 1025])
def test_batches(batch, kv, heads):
    generator = torch.Generator().manual_seed(batch)
    kv_lens = torch.randint(1, 6000, (batch,), generator=generator).tolist()
    args, options = big_problem([1] * batch, kv_lens, heads=heads, kv=kv, seed=batch)
    check_all_splits(args, options, exact(args, options), what=str(batch))


@pytest.mark.parametrize("q_lens", [[1], [2] * 5, [4] * 16, [8] * 3, [16] * 2, [1, 7, 0, 16, 3], [17, 33], [171]])
def test_query_lengths(q_lens):
    """Above 16 queries a request the kernel is still right."""
    args, options = big_problem(q_lens, [3000 + 100 * i for i in range(len(q_lens))], heads=(16, 2), seed=len(q_lens))
    check_all_splits(args, options, exact(args, options), what=str(q_lens))


@pytest.mark.parametrize("heads", [(64, 4), (32, 2), (16, 1), (8, 1), (4, 1), (2, 1), (1, 1), (5, 5), (24, 8)])
def test_head_counts(heads):
    args, options = big_problem([1, 3], [2500, 400], heads=heads, kv=E4M3, seed=heads[0])
    check_all_splits(args, options, exact(args, options), what=str(heads))


@pytest.mark.parametrize("kv, pages", [(E4M3, 90_000), (BF16, 35_000)])
def test_large_page_numbers(kv, pages):
    """Elements beyond 2^31 and bytes beyond 2^32 in both caches: pages of 64 Ki elements."""
    (q, _, _, ids, table), options = big_problem([1, 1], [4096, 4000], heads=(64, 4), kv=kv, pages=4)
    need = torch.randperm(pages, device=DEVICE)[: table.numel()].to(torch.int32)
    need[:3] = torch.tensor([pages - 1, 32768, pages - 20_000], dtype=torch.int32, device=DEVICE)
    table = need.view(table.shape)
    bits = torch.uint8 if kv.itemsize == 1 else torch.int16
    raw = torch.empty(2, pages, 4, 128, 128, dtype=bits, device=DEVICE)
    for cache in raw:
        cache[need.long()] = torch.randn(need.numel(), 4, 128, 128, device=DEVICE).to(kv).view(bits)
    args = (q, raw[0].view(kv), raw[1].view(kv), ids, table)
    check_all_splits(args, options, exact(args, options))


@pytest.mark.parametrize("kv", [E4M3, E5M2])
def test_large_bf16_queries_do_not_overflow_fp16(kv):
    args, options = big_problem([2], [1000], heads=(16, 1), kv=kv)
    args[0].mul_(1e6)
    options["k_scale"] = torch.tensor([1e-6], device=DEVICE)
    assert float(args[0].abs().max()) > 70000
    check_all_splits(args, options, exact(args, options))


@pytest.mark.parametrize("scale", [16.0, 64.0])
def test_large_logits(scale):
    args, options = big_problem([2], [1000], heads=(16, 1))
    for x in args[:2]:
        x.mul_(scale)
    check_all_splits(args, options, exact(args, options))


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_caches_that_no_tensor_map_holds(kv):
    """Strides of 0: the keys and values come by address, with the bits of the same cache laid out in full."""
    args, options = big_problem([2, 1], [2500, 130], heads=(32, 2), kv=kv, seed=15)
    q, k_cache, v_cache, ids, table = args
    one_page, one_head = k_cache[:1].expand(k_cache.shape), v_cache[:, :1].expand(v_cache.shape)
    for k, v in ((one_page, v_cache), (k_cache, one_head), (one_page, one_head)):
        laid_out = (q, k.contiguous(), v.contiguous(), ids, table)
        want = run(laid_out, options, 1)
        assert_close(want, exact(laid_out, options))
        for splits in SPLITS:
            assert_same(run((q, k, v, ids, table), options, splits), want, f"splits {splits}")


# ---- bits


def test_unseen_bytes_change_nothing():
    for kv, layout in itertools.product((BF16, E4M3), ("hnd", "packed", "padded")):
        results = []
        for poison in ("zero", "nan", "inf"):
            case = cases.make(
                [1, 3], [1000, 67], heads=(16, 1), dtype=BF16, kv_dtype=kv, layout=layout, poison=poison, seed=7
            )
            args, options = case.sparse()
            gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
            results.append(run(*gpu))
        for result in results[1:]:
            assert_same(result, results[0], f"{kv} {layout}")


@pytest.mark.parametrize("kv", [BF16, FP16, E4M3, E5M2])
@pytest.mark.parametrize("page", [64, 128])
def test_pages_that_are_not_selected_change_nothing(kv, page):
    """NaN in every block that no row selects, in the tails of the last ones, and garbage in the table behind them."""
    q = FP16 if kv == FP16 else BF16
    # Two blocks of the second request, all of the third, none of the last are selected.
    args, options = big_problem([1, 2, 1, 1], [6100, 5001, 700, 0], heads=(16, 2), kv=kv, q=q, page=page, seed=13)
    query, k_cache, v_cache, ids, table = args
    table.copy_(torch.randperm(k_cache.shape[0])[: table.numel()].view(table.shape))  # no page twice
    ids[1:3, :, 2:] = -1
    clean = {splits: run(args, options, splits) for splits in SPLITS}
    keep = torch.zeros(k_cache.shape[:3], dtype=torch.bool, device=DEVICE)
    for t, (b, end) in enumerate(((0, 6100), (1, 5000), (1, 5001), (2, 700))):
        for h in range(2):
            block = ids[t, h][ids[t, h] >= 0].long()
            seen = (block[:, None] * 128 + torch.arange(128, device=DEVICE)).flatten()
            seen = seen[seen < end]
            keep[table[b, seen // page].long(), h, seen % page] = True
    for cache in (k_cache, v_cache):
        raw = cache.view(torch.uint8 if cache.itemsize == 1 else torch.int16)
        raw[~keep] = 0x7F if cache.itemsize == 1 else 0x7FFF
    reached = (
        torch.tensor([6100, 5001, 700, 0], device=DEVICE)[:, None] > torch.arange(table.shape[1], device=DEVICE) * page
    )
    table.copy_(torch.where(reached, table, 2**30))
    for splits in SPLITS:
        assert_same(run(args, options, splits), clean[splits], f"splits {splits}")
        assert bool(clean[splits][1][:4].isfinite().all()) and not clean[splits][0][4].any()


@pytest.mark.parametrize("kv", [BF16, FP16, E4M3, E5M2])
def test_what_only_later_tokens_see_changes_nothing(kv):
    """Draft tokens share loads; NaN in the keys and values of the later ones must not reach the earlier ones."""
    q = FP16 if kv == FP16 else BF16
    args, options = big_problem([4, 3], [1026, 259], heads=(16, 1), kv=kv, q=q, seed=9)
    args[4].copy_(torch.arange(args[4].numel()).view(args[4].shape))  # no page twice
    clean = {splits: run(args, options, splits) for splits in SPLITS}
    query, k_cache, v_cache, ids, table = args
    for b, (length, count) in enumerate(((1026, 4), (259, 3))):
        for position in range(length - count + 1, length):
            for cache in (k_cache, v_cache):
                raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache.view(torch.int16)
                raw[table[b, position // 128].long(), :, position % 128] = 0x7F if cache.itemsize == 1 else 0x7FFF
    for splits in SPLITS:
        out, lse = run(args, options, splits)
        for row in (0, 4):
            assert_same(
                (out[row], lse[row]), (clean[splits][0][row], clean[splits][1][row]), f"splits {splits} row {row}"
            )
        assert bool(out[3].isnan().all())


def test_runs_repeat():
    args, options = big_problem([1] * 40, [5000] * 40, seed=1)
    for splits in SPLITS:
        first = run(args, options, splits)
        for _ in range(5):
            assert_same(run(args, options, splits), first, f"splits {splits}")


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_a_row_alone_equals_the_row_in_a_batch(kv):
    """By shape alone the batch takes another splits than the row: the bits are the same all the same."""
    q_lens = [1 + i % 3 for i in range(150)]
    args, options = big_problem(q_lens, [300 + 61 * i for i in range(150)], kv=kv, seed=2)
    q, k_cache, v_cache, ids, table = args
    whole = run(args, options)
    cu, used = options["cu_seqlens_q"].tolist(), options["seqused_k"]
    for b in (0, 1, 7, 64, 149):
        rows = slice(cu[b], cu[b + 1])
        offsets = torch.tensor([0, q_lens[b]], dtype=torch.int32, device=DEVICE)
        alone = {"cu_seqlens_q": offsets, "seqused_k": used[b : b + 1]}
        part = (q[rows], k_cache, v_cache, ids[rows], table[b : b + 1])
        assert_same(run(part, alone), (whole[0][rows], whole[1][rows]), f"request {b}")


@pytest.mark.parametrize("kv", [BF16, E4M3, E5M2])
def test_a_row_equals_itself_in_any_batch(kv):
    """The same request alone and first, in the middle or last of 3, 17, 128 and 1,025."""
    generator = torch.Generator().manual_seed(14)
    kv_lens = torch.randint(1, 5000, (1025,), generator=generator).tolist()
    args, options = big_problem([1] * 1025, kv_lens, heads=(16, 1), kv=kv, seed=14)
    q, k_cache, v_cache, ids, table = args

    def batch(index):
        cu = torch.arange(len(index) + 1, dtype=torch.int32, device=DEVICE)
        lengths = {"cu_seqlens_q": cu, "seqused_k": options["seqused_k"][index]}
        return run((q[index], k_cache, v_cache, ids[index], table[index]), lengths)

    for one in torch.randint(0, 1025, (6,), generator=generator).tolist():
        alone = batch(torch.tensor([one], device=DEVICE))
        for size in (3, 17, 128, 1025):
            index = torch.randperm(1025, generator=generator)[:size].to(DEVICE)
            for place in (0, size // 2, size - 1):
                index[place] = one
                out, lse = batch(index)
                row = slice(place, place + 1)
                assert_same((out[row], lse[row]), alone, f"request {one}, place {place} of {size}")


def test_the_order_of_the_selection_does_not_matter():
    args, options = big_problem([2, 1], [4000, 2600], heads=(16, 1), seed=3)
    q, k_cache, v_cache, ids, table = args
    want = run(args, options)
    holes = torch.full((*ids.shape[:2], 32), -1, dtype=torch.int32, device=DEVICE)
    holes[..., ::2] = ids  # the same blocks, every second slot a hole
    for variant in (ids.flip(-1), ids.roll(5, -1), holes, torch.cat([ids, ids], -1)):
        assert_same(run((q, k_cache, v_cache, variant, table), options), want, "order")


def test_page_64_equals_page_128():
    args, options = big_problem([2, 1], [4000, 2600], heads=(16, 1), seed=4)
    q, k_cache, v_cache, ids, table = args
    halves = [x.view(-1, 1, 2, 64, 128).transpose(1, 2).reshape(-1, 1, 64, 128) for x in (k_cache, v_cache)]
    small = (table[..., None] * 2 + torch.arange(2, dtype=torch.int32, device=DEVICE)).flatten(1)
    assert_same(run((q, *halves, ids, small), options), run(args, options), "page 64")


# ---- data that may be wrong


def test_garbage_stays_inside_the_tensors():
    """Lengths, offsets, ids and pages of any value: no fault, and rows of sane requests are right."""
    args, options = big_problem([1] * 8, [3000] * 8, heads=(16, 1), seed=5)
    q, k_cache, v_cache, ids, table = args
    generator = torch.Generator().manual_seed(6)
    wild = torch.tensor([-(2**31), -1, 0, 1, 7, 5000, 2**31 - 1], dtype=torch.int32)

    def some(shape):
        return wild[torch.randint(0, len(wild), shape, generator=generator)].to(DEVICE)

    for splits in SPLITS:
        for _ in range(20):
            lengths = {"cu_seqlens_q": some((9,)), "seqused_k": some((8,))}
            run((q, k_cache, v_cache, some(ids.shape), some(table.shape)), lengths, splits)
            run((q, k_cache, v_cache, ids, some(table.shape)), {**options, "seqused_k": some((8,))}, splits)
            run((q, k_cache, v_cache, ids, table), {**options, "cu_seqlens_q": some((9,))}, splits)
        torch.cuda.synchronize()
    assert_close(run(args, options), exact(args, options))


def test_empty_problems():
    args, options = big_problem([1, 1], [500, 500], heads=(16, 1))
    q, k_cache, v_cache, ids, table = args
    nothing = [
        ((q, k_cache, v_cache, ids[..., :0], table), options),
        ((q, k_cache, v_cache, ids, table[:, :0]), options),
        ((q, k_cache[:0], v_cache[:0], ids, table), options),
        (
            (q, k_cache, v_cache, ids, table[:0]),
            {"cu_seqlens_q": options["cu_seqlens_q"][:1], "seqused_k": options["seqused_k"][:0]},
        ),
    ]
    for arguments in nothing:
        out, lse = run(*arguments)
        assert not out.any() and bool((lse == -INF).all())
    out, lse = run((q[:0], k_cache, v_cache, ids[:0], table), options)
    assert out.shape == (0, 16, 128)


def test_outputs_of_any_stride_and_no_lse():
    args, options = big_problem([2, 1], [900, 40], heads=(16, 1), seed=8)
    want = run(args, options)
    wide = torch.full((3, 2, 24, 160), 7.0, dtype=BF16, device=DEVICE)
    out = wide[:, 1, 4:20, 16:144]
    lse = torch.full((16, 7), 7.0, device=DEVICE).t()[2:5]
    q, k_cache, v_cache, ids, table = args
    rest = (options["cu_seqlens_q"], options["seqused_k"], 128**-0.5, True, None, None)
    operator()(out, lse, q, k_cache, v_cache, ids, table, *rest)
    assert_same((out, lse), want, "strided outputs")
    rim = wide.clone()
    rim[:, 1, 4:20, 16:144] = 7.0
    assert bool((rim == 7.0).all()), "bytes beside the output were written"
    assert_same((run(args, options, with_lse=False)[0], None), (want[0], None), "no lse")


# ---- streams and graphs


def test_the_next_kernel_and_the_one_before():
    """Launches may overlap their neighbours: inputs written just before and outputs read just after must be right."""
    left, right = (big_problem([1] * 6, [4000] * 6, seed=s) for s in (10, 11))
    want = [run(*x) for x in (left, right)]
    live_args, live_options = [x.clone() for x in left[0]], {n: x.clone() for n, x in left[1].items()}
    results = []
    for i in range(200):
        args, options = (left, right)[i % 2]
        for target, source in zip(live_args, args):
            target.copy_(source)
        for name, target in live_options.items():
            target.copy_(options[name])
        out, lse = run(live_args, live_options, SPLITS[i % len(SPLITS)])
        results.append((out + 0, lse + 0))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert_same(result, want[i % 2], f"call {i}")


def test_back_to_back_calls_of_one_stream():
    """Each call reads what the one before wrote: out becomes the next query."""
    args, options = big_problem([1] * 4, [3000] * 4, heads=(16, 1), seed=12)
    q, *rest = args

    def chain(wait):
        x = q
        for i in range(64):
            x, _ = run((x, *rest), options, SPLITS[i % len(SPLITS)])
            if wait:
                torch.cuda.synchronize()
        return x

    assert same_bits(chain(False), chain(True))


def test_two_streams():
    problems = [big_problem([1] * 16, [5000] * 16, seed=20 + i) for i in range(2)]
    want = [run(*problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for i in range(60):
        for stream, problem, result in zip(streams, problems, results):
            with torch.cuda.stream(stream):
                result.append(run(*problem, SPLITS[i % len(SPLITS)]))
    torch.cuda.synchronize()
    for result, right in zip(results, want):
        for one in result:
            assert_same(one, right, "streams")


def test_graph_follows_its_inputs():
    """Captured at one size of the lengths; replayed with others, growing and shrinking."""
    args, options = big_problem([1, 4, 2], [4096, 3000, 2000], kv=E4M3, seed=30)
    options.update(k_scale=torch.tensor([0.5], device=DEVICE), v_scale=torch.tensor([2.0], device=DEVICE))
    run(args, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(args, options)
        again = run(args, options)
    q, k_cache, v_cache, ids, table = args
    for step, lengths in enumerate(([4096, 3000, 2000], [1, 5, 0], [2600, 4, 4090], [4096, 4096, 4096])):
        options["seqused_k"].copy_(torch.tensor(lengths, dtype=torch.int32))
        options["k_scale"].fill_(0.3 + step)
        options["v_scale"].fill_(1.7 * step)
        table.copy_(table.flip(1))
        ids.copy_(torch.randint(-1, 32, ids.shape, dtype=torch.int32))
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, again, "the two calls of a graph")
        assert_close(captured, exact(args, options), str(lengths))


def test_public_function_and_compile():
    args, options = big_problem([1, 2], [1500, 700], seed=40)
    with m3_sparse.backend("aot"):
        out, lse = m3_sparse.sparse_attention(*args, **options, return_lse=True)
        assert_same((out, lse), run(args, options), "public")
        q, k_cache, v_cache, ids, table = args
        wide = (q, k_cache, v_cache, ids.long(), table.long())
        lengths = {name: x.long() for name, x in options.items()}
        assert same_bits(m3_sparse.sparse_attention(*wide, **lengths), out)
        torch._dynamo.reset()
        compiled = torch.compile(m3_sparse.sparse_attention, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(*args, **options), out)
        with pytest.raises(NotImplementedError, match="at most 32 blocks"):
            m3_sparse.sparse_attention(q, k_cache, v_cache, ids.repeat(1, 1, 3), table, **options)
