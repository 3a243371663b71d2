"""sparse_attention and dense_attention against the float64 oracle; every output is prefilled with NaN."""

import math

import cases
import oracle
import pytest
import torch

import m3_sparse

INF = math.inf
LENGTHS = [
    (1, 1),
    (2, 127),
    (4, 128),
    (3, 129),
    (0, 300),
    (0, 0),
    (5, 2),
    (4, 0),
    (9, 2047),
    (8, 2048),
    (1, 2049),
    (16, 2176),
]
RAGGED = {"q_lens": [q for q, _ in LENGTHS], "kv_lens": [k for _, k in LENGTHS]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = list(cases.FP8)


def check_sparse(case, ids=None, **options):
    args, kwargs = case.sparse(ids)
    want, want_lse = oracle.sparse_attention(*args, **kwargs, **options)
    out, lse = cases.call_sparse(m3_sparse.sparse_attention, case, ids, **options)
    oracle.check_attention(out, lse, want, want_lse)
    return out, lse


def check_dense(case, **options):
    args, kwargs = case.dense()
    want, want_lse = oracle.dense_attention(*args, **kwargs, **options)
    out, lse = cases.call_dense(m3_sparse.dense_attention, case, **options)
    oracle.check_attention(out, lse, want, want_lse)
    return out, lse


def is_empty(out, lse):
    return bool((out == 0).all() and (lse == -INF).all())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_ragged(dtype, page, causal):
    case = cases.make(**RAGGED, dtype=dtype, page=page, causal=causal, pad_rows=3, seed=1)
    out, lse = check_sparse(case, causal=causal)
    assert is_empty(out[-3:], lse[-3:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_ragged(dtype, page, causal):
    case = cases.make(**RAGGED, dtype=dtype, page=page, pad_rows=3, seed=2)
    out, lse = check_dense(case, causal=causal)
    assert is_empty(out[-3:], lse[-3:])


@pytest.mark.parametrize("scales", [None, "scalar", "head"])
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_cache_with_scales(dtype, kv_dtype, scales):
    case = cases.make([3, 5, 0, 2], [700, 2500, 40, 1], dtype=dtype, kv_dtype=kv_dtype, scales=scales, seed=3)
    check_sparse(case)
    check_dense(case)


def test_scales_of_every_accepted_shape():
    case = cases.make([3], [700], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, seed=4)
    case.k_scale, case.v_scale = torch.tensor(0.37), torch.tensor([2.5])
    check_sparse(case)
    case.k_scale, case.v_scale = None, torch.tensor([2.5, 0.125])
    check_sparse(case)
    case.k_scale, case.v_scale = torch.tensor([0.37, 1.5]), None
    check_sparse(case)
    check_dense(case)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 2), (64, 4), (4, 4), (6, 2)])
def test_head_ratios(heads):
    check_sparse(cases.make([3, 2], [1500, 130], heads=heads, seed=5))


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 33])
def test_query_lengths(q_len):
    check_sparse(cases.make([q_len, 1, q_len], [2176, 129, q_len], heads=(4, 1), seed=6))


def test_many_queries_cross_every_chunk():
    case = cases.make([700, 171], [2500, 2049], heads=(2, 1), seed=7)
    check_sparse(case)
    check_dense(case)


def test_long_context():
    case = cases.make([2], [65537], heads=(2, 1), seed=8)
    check_sparse(case)
    check_dense(case)


def test_a_million_tokens():
    """2**20 tokens over a table of 8,192 shared pages: the selected blocks lie anywhere in it, the last included."""
    gen = cases.generator(36)
    keys, values = (cases.values((24, 1, 128, 128), "normal", torch.float32, gen) for _ in range(2))
    table = torch.randint(0, 24, (1, 8192), generator=gen).to(torch.int32)
    q = cases.values((3, 4, 128), "normal", torch.float32, gen)
    ids = torch.randint(0, 8192, (3, 1, 16), generator=gen).to(torch.int32)
    ids[:, 0, 5], ids[:, 0, 9] = 8191, 8192
    kwargs = {"cu_seqlens_q": torch.tensor([0, 3]), "seqused_k": torch.tensor([2**20 - 1])}
    out, lse = m3_sparse.sparse_attention(q, keys, values, ids, table, **kwargs, return_lse=True)
    oracle.check_attention(out, lse, *oracle.sparse_attention(q, keys, values, ids, table, **kwargs))


@pytest.mark.parametrize("batch", [17, 33, 1025])
def test_many_requests(batch):
    q_lens = [(b * 7) % 3 for b in range(batch)]
    kv_lens = [(b * 37) % 300 for b in range(batch)]
    case = cases.make(q_lens, kv_lens, heads=(2, 1), seed=9)
    check_sparse(case)
    check_dense(case)


@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 32])
def test_selection_widths(topk):
    check_sparse(cases.make([3, 4], [5000, 300], topk=topk, seed=10))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes(index_dtype):
    case = cases.make([3, 4], [2500, 300], seed=11, offsets=index_dtype)
    case.ids, case.block_table = case.ids.to(index_dtype), case.block_table.to(index_dtype)
    if index_dtype == torch.int64:
        case.ids[case.ids == -5] = 2**40
        case.ids[0, 0, 0] = -(2**62)
        case.block_table[1, -1] = 2**50
    check_sparse(case)
    check_dense(case)


@pytest.mark.parametrize("scale, kind", [(0.05, "normal"), (0.25, "int"), (1.0, "int"), (0.0, "int"), (-0.25, "int")])
def test_softmax_scale(scale, kind):
    case = cases.make([3], [600], kind=kind, seed=12)
    check_sparse(case, softmax_scale=scale)
    check_dense(case, softmax_scale=scale)


# -------------------------------------------------------------------------------------------------- selection semantics


@pytest.mark.parametrize("slots", [[0], [7], [15], [0, 5, 15], list(range(15)), list(range(16))])
def test_holes_anywhere(slots):
    case = cases.make([2], [2048 + 300], heads=(4, 2), style="clean", seed=13)
    case.ids[:] = torch.arange(16, dtype=torch.int32).flip(0) + 1
    case.ids[:, :, slots] = -1
    out, lse = check_sparse(case)
    assert is_empty(out, lse) == (len(slots) == 16)


def test_exactly_the_given_blocks_and_never_the_local_one():
    case = cases.make([1], [1000], heads=(2, 1), seed=14)
    case.ids.fill_(-1)
    case.ids[0, 0, 3] = 2
    page = int(case.block_table[0, 2])
    logits = (case.k_cache[page, 0] @ case.q[0].T).T / math.sqrt(128)
    out, _ = check_sparse(case)
    oracle.check_close(out[0], logits.softmax(-1) @ case.v_cache[page, 0], 1e-5, 1e-5, "out")


def test_ids_outside_the_row_contribute_nothing():
    case = cases.make([3], [400], heads=(4, 2), seed=15)  # rows at 397..399: four candidates
    width = case.block_table.shape[1]
    for bad in (4, 5, width - 1, width, width + 1, 2**24, 2**24 + 1, 2**25 - 1, 2**31 - 1, -1, -2, -128, -(2**31)):
        case.ids.fill_(bad)
        out, lse = check_sparse(case)
        assert is_empty(out, lse), bad
        case.ids[:, :, 9] = 1
        check_sparse(case)


def test_future_block_of_an_early_row_is_the_present_of_a_later_one():
    case = cases.make([200], [300], heads=(2, 1), seed=16)
    case.ids.fill_(-1)
    case.ids[:, :, 0], case.ids[:, :, 1] = 2, 1
    out, lse = check_sparse(case)
    assert is_empty(out[:28], lse[:28]) and not (lse[28:] == -INF).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_order_holes_and_duplicates_do_not_matter(dtype):
    case = cases.make([8, 3, 2], [2900, 130, 600], dtype=dtype, seed=17)
    clean = cases.canonical(case, case.ids)
    assert not torch.equal(clean, case.ids)
    out, lse = check_sparse(case)
    other, other_lse = check_sparse(case, clean)
    oracle.check_attention(out, lse, other.double(), other_lse.double())
    doubled = torch.cat([clean, clean.flip(-1), clean], -1)
    again, again_lse = check_sparse(case, doubled)
    oracle.check_attention(again, again_lse, other.double(), other_lse.double())


def test_all_blocks_selected_is_dense_attention():
    case = cases.make([5, 300], [1900, 300], seed=18)
    case.ids[:] = torch.arange(15, -1, -1, dtype=torch.int32)
    out, lse = check_sparse(case)
    dense, dense_lse = check_dense(case)
    oracle.check_attention(out, lse, dense.double(), dense_lse.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_prefill_is_the_whole_prefill(dtype):
    """A prompt of 300 in chunks that start inside pages and blocks, and one token at a time at the end."""
    case = cases.make([300], [2348], heads=(4, 2), dtype=dtype, seed=37)
    whole, whole_lse = check_sparse(case)
    whole_dense, _ = check_dense(case)
    start = 0
    for size in (1, 77, 128, 91, 1, 1, 1):
        rows = slice(start, start + size)
        start += size
        lengths = {"cu_seqlens_q": torch.tensor([0, size]), "seqused_k": torch.tensor([2048 + start])}
        args = (case.q[rows], case.k_cache, case.v_cache)
        out, lse = m3_sparse.sparse_attention(*args, case.ids[rows], case.block_table, **lengths, return_lse=True)
        oracle.check_attention(out, lse, whole[rows].double(), whole_lse[rows].double())
        oracle.check_attention(
            m3_sparse.dense_attention(*args, case.block_table, **lengths), None, whole_dense[rows].double(), None
        )
    assert start == 300


# ------------------------------------------------------------------------------------------------------- poisoned bytes


@pytest.mark.parametrize("poison", ["zero", "inf"])
@pytest.mark.parametrize("dtype, kv_dtype", [(d, d) for d in DTYPES] + [(torch.bfloat16, d) for d in FP8])
def test_bytes_past_the_length_change_no_bit(dtype, kv_dtype, poison):
    options = {**RAGGED, "dtype": dtype, "kv_dtype": kv_dtype, "seed": 19}
    nan, other = cases.make(**options), cases.make(**options, poison=poison)
    for call, function in (
        (cases.call_sparse, m3_sparse.sparse_attention),
        (cases.call_dense, m3_sparse.dense_attention),
    ):
        for causal in (True, False):
            out, lse = call(function, nan, causal=causal)
            out2, lse2 = call(function, other, causal=causal)
            oracle.check_bitwise(out2, out, f"out, causal={causal}")
            oracle.check_bitwise(lse2, lse, f"lse, causal={causal}")
            assert not out.isnan().any()


@pytest.mark.parametrize("page", [64, 128])
def test_unselected_blocks_may_hold_nan(page):
    case = cases.make([3, 2, 4], [2900, 260, 5000], page=page, seed=20)
    ids = cases.canonical(case, case.ids)
    before = check_sparse(case, ids)
    cases.poison_unselected(case, ids)
    assert case.k_cache.isnan().any()
    after = check_sparse(case, ids)
    oracle.check_bitwise(after[0], before[0], "out")
    oracle.check_bitwise(after[1], before[1], "lse")


def test_table_entries_past_the_length_are_not_followed():
    """Garbage there, and also the number of a page of NaN, which a bounds check alone would let through."""
    case = cases.make(**RAGGED, seed=21)
    before = check_sparse(case)
    used = {int(p) for b, n in enumerate(case.kv_lens) for p in case.block_table[b, : -(-n // 128)]}
    unused = next(p for p in range(case.k_cache.shape[0]) if p not in used)
    assert case.k_cache[unused].isnan().all()
    for b, kv_len in enumerate(case.kv_lens):
        case.block_table[b, -(-kv_len // 128) :] = unused
    after = check_sparse(case)
    oracle.check_bitwise(after[0], before[0], "out")
    check_dense(case)


@pytest.mark.parametrize("page", [64, 128])
def test_page_outside_the_cache_contributes_nothing(page):
    case = cases.make([3, 2], [1000, 300], page=page, seed=22)
    pages = case.k_cache.shape[0]
    for entry, number in ((0, -1), (1, pages), (3, 2**31 - 1), (4, -(2**31)), (6, pages + 3)):
        case.block_table[0, entry] = number
    case.block_table[1] = -3
    for out, lse in (check_sparse(case), check_dense(case)):
        assert is_empty(out[3:], lse[3:])


def test_kv_len_is_clamped_to_the_reach_of_the_table():
    case = cases.make([3, 2], [2560, 300], seed=23, offsets=torch.int64)
    want = check_sparse(case)
    want_dense = check_dense(case)
    case.block_table = case.block_table[:, :20]
    for length in (2561, 10**6, 2**31 - 1, 2**40):
        case.seqused_k[0] = length
        oracle.check_bitwise(check_sparse(case)[0], want[0], "out")
        oracle.check_bitwise(check_dense(case)[0], want_dense[0], "dense out")


def test_negative_length_is_an_empty_request():
    case = cases.make([3, 2], [300, 2304], seed=24)
    case.seqused_k[0] = -200
    for causal in (True, False):
        for out, lse in (check_sparse(case, causal=causal), check_dense(case, causal=causal)):
            assert is_empty(out[:3], lse[:3])


def test_no_rows_at_all():
    case = cases.make([0, 0], [300, 5], seed=25)
    args, kwargs = case.sparse()
    out, lse = m3_sparse.sparse_attention(*args, **kwargs, return_lse=True)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)
    args, kwargs = case.dense()
    assert m3_sparse.dense_attention(*args, **kwargs).shape == (0, 8, 128)


def test_rows_past_the_last_offset_when_every_request_is_empty():
    case = cases.make([0], [0], pad_rows=5, seed=26)
    for out, lse in (check_sparse(case), check_dense(case)):
        assert is_empty(out, lse)


@pytest.mark.parametrize("function", ["sparse", "dense"])
def test_repeats_are_bitwise_equal(function):
    case = cases.make([40, 3], [3000, 2500], dtype=torch.bfloat16, seed=27)
    call = cases.call_sparse if function == "sparse" else cases.call_dense
    first = call(getattr(m3_sparse, function + "_attention"), case)
    for _ in range(2):
        again = call(getattr(m3_sparse, function + "_attention"), case)
        oracle.check_bitwise(again[0], first[0], "out")
        oracle.check_bitwise(again[1], first[1], "lse")


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_selection_of_a_huge_pool(kv_dtype):
    """Offsets past 2**31 elements: 16,600 pages of packed K|V at four heads, of which only three are ever touched."""
    count, heads = 16600, 4
    both = torch.empty(count, heads, 128, 256, dtype=kv_dtype)
    assert both.stride(0) * (count - 1) > 2**31
    case = cases.make([2], [384], heads=(8, heads), dtype=torch.bfloat16, kv_dtype=kv_dtype, seed=28)
    numbers = [count - 1, 16390, 0]
    for j, number in enumerate(numbers):
        old = int(case.block_table[0, j])
        both[number, :, :, :128] = case.k_cache[old]
        both[number, :, :, 128:] = case.v_cache[old]
    before = check_sparse(case)
    case.k_cache, case.v_cache = both[..., :128], both[..., 128:]
    case.block_table[0, :3] = torch.tensor(numbers)
    after = check_sparse(case)
    oracle.check_bitwise(after[0], before[0], "out")
    check_dense(case)


# ---------------------------------------------------------------------------------------------------------- value range


@pytest.mark.parametrize("factor", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(dtype, factor):
    """q and k of magnitude 16 and 64. Integer data and a power-of-two scale keep the logits exact in every dtype."""
    case = cases.make([5, 2], [2600, 129], dtype=dtype, kind="int", seed=29)
    case.q.mul_(factor)
    case.k_cache.mul_(factor)
    args, kwargs = case.sparse()
    for function, oracle_function, inputs in (
        (cases.call_sparse, oracle.sparse_attention, args),
        (cases.call_dense, oracle.dense_attention, case.dense()[0]),
    ):
        name = oracle_function.__name__
        out, lse = function(getattr(m3_sparse, name), case, softmax_scale=0.125)
        want, want_lse = oracle_function(*inputs, **kwargs, softmax_scale=0.125)
        assert want_lse.amax() > 100 * factor and out.isfinite().all()
        oracle.check_attention(out, lse, want, want_lse)


def test_logits_far_below_zero_still_have_an_lse():
    case = cases.make([2], [500], kind="int", seed=30)
    case.q.fill_(-64)
    case.k_cache.abs_().add_(64)
    _, lse = check_sparse(case, softmax_scale=0.125)
    assert lse[1].amax() < -60000 or (case.ids[1] == -1).all()


# ---------------------------------------------------------------------------------------------------------------- merge


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_list", [True, False])
def test_merge_of_parts_equals_the_whole(dtype, as_list):
    case = cases.make([6, 0, 4, 3], [2900, 7, 100, 1], dtype=dtype, pad_rows=2, seed=31)
    ids = cases.canonical(case, case.ids)
    whole, whole_lse = check_sparse(case, ids)
    outs, lses = [], []
    for part in range(3):
        mine = torch.where((ids >= 0) & (ids % 3 == part), ids, -1)
        out, lse = check_sparse(case, mine)
        outs.append(
            out.masked_fill((lse == -INF)[..., None], float("nan"))
        )  # what an empty state holds must not matter
        lses.append(lse)
    parts = (outs, lses) if as_list else (torch.stack(outs), torch.stack(lses))
    merged, merged_lse = m3_sparse.merge_states(*parts)
    assert merged.dtype == dtype
    oracle.check_attention(merged, merged_lse, whole.double(), whole_lse.double())
    args, kwargs = case.sparse(ids)
    oracle.check_attention(merged, merged_lse, *oracle.sparse_attention(*args, **kwargs))


# ------------------------------------------------------------------------------------------------------------- returned


def test_what_is_returned():
    case = cases.make([3], [300], dtype=torch.bfloat16, seed=32)
    args, kwargs = case.sparse()
    out = m3_sparse.sparse_attention(*args, **kwargs)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and out.shape == case.q.shape
    pair = m3_sparse.sparse_attention(*args, **kwargs, return_lse=True)
    assert isinstance(pair, tuple) and pair[1].dtype == torch.float32 and pair[1].shape == (3, 8)
    lse = cases.nan_like((3, 8), torch.float32)
    alone = m3_sparse.sparse_attention(*args, **kwargs, lse=lse)
    assert isinstance(alone, torch.Tensor)
    oracle.check_bitwise(lse, pair[1], "lse")
    oracle.check_bitwise(alone, out, "out")


# ------------------------------------------------------------------------------------------------------------- gradient


def gradients(function, leaves, args, kwargs, weight):
    """Gradients of a loss in out and lse with respect to q, k_cache and v_cache (None where one is fp8)."""
    out, lse = function(*leaves, *args[3:], **kwargs)
    loss = (out.float() * weight).sum() + (torch.where(lse.isfinite(), lse, 0) * weight[..., 0]).sum()
    loss.backward()
    return [leaf.grad for leaf in leaves]


def check_gradients(case, name, error, **options):
    args, kwargs = case.sparse() if name == "sparse_attention" else case.dense()
    weight = torch.randn(case.q.shape, generator=cases.generator(34))
    ours = [t.clone().requires_grad_(t.dtype not in FP8) for t in args[:3]]
    theirs = [t.double().requires_grad_() for t in args[:3]]
    got = gradients(getattr(m3_sparse, name), ours, args, {**kwargs, **options, "return_lse": True}, weight)
    want = gradients(getattr(oracle, name), theirs, args, {**kwargs, **options}, weight)
    unseen = (want[2] == 0).all(-1)  # V of a token that some row sees has a gradient
    for what, leaf, mine, right in zip(("q", "k_cache", "v_cache"), ours, got, want):
        if leaf.dtype in FP8:
            continue
        assert mine.dtype == leaf.dtype
        assert not mine.isnan().any(), f"gradient of {what} is NaN where poison lies"
        assert (mine.double() - right).norm() <= error * right.norm(), f"gradient of {what}"
        oracle.check_close(mine, right, 10 * error, 10 * error, f"gradient of {what}")
        if what != "q":
            assert not mine[unseen].any(), f"{what} has a gradient where nothing was seen"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["sparse_attention", "dense_attention"])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 3e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_gradients_are_those_of_the_oracle(name, causal, page, dtype, error):
    lengths = ([4, 0, 3, 2], [700, 5, 2, 130])
    case = cases.make(*lengths, page=page, causal=causal, dtype=dtype, pad_rows=2, seed=33)
    check_gradients(case, name, error, causal=causal)


@pytest.mark.parametrize("name", ["sparse_attention", "dense_attention"])
def test_gradient_of_queries_over_an_fp8_cache(name):
    options = {"kv_dtype": torch.float8_e4m3fn, "scales": "head", "seed": 38}
    check_gradients(cases.make([4, 0, 3], [700, 5, 2], **options), name, 3e-6)


@pytest.mark.parametrize("name", ["sparse_attention", "dense_attention"])
def test_gradient_over_many_rows(name):
    check_gradients(cases.make([300], [500], heads=(4, 2), seed=39), name, 3e-6)


def test_gradient_of_strided_caches():
    case = cases.make([4, 3], [300, 130], layout="packed", seed=35)
    args, kwargs = case.sparse()
    both = torch.cat([case.k_cache, case.v_cache], -1)
    grads = []
    for function in (m3_sparse.sparse_attention, oracle.sparse_attention):
        leaf = both.clone().requires_grad_()
        result = function(args[0], leaf[..., :128], leaf[..., 128:], *args[3:], **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        out.square().sum().backward()
        grads.append(leaf.grad)
    oracle.check_close(grads[0], grads[1], 3e-5, 3e-5, "gradient of the packed cache")


def test_what_has_no_gradient_says_so():
    case = cases.make([2], [300], kv_dtype=torch.float8_e4m3fn, scales="scalar", seed=40)
    args, kwargs = case.sparse()
    kwargs["k_scale"] = kwargs["k_scale"].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="k_scale.*grad"):
        m3_sparse.sparse_attention(*args, **kwargs)
    args[0].requires_grad_()
    with pytest.raises(ValueError, match="out.*grad"):
        m3_sparse.sparse_attention(*args, **case.lengths(), out=torch.empty(2, 8, 128))
    with torch.no_grad():
        m3_sparse.sparse_attention(*args, **kwargs, out=torch.empty(2, 8, 128))
