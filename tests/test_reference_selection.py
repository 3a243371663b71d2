"""select_blocks and block_scores against the float64 oracle.

Data of small integers has exact fp32 dot products, and so exact ties: there the selection must be the oracle's, bit for
bit. With ordinary data a member may be swapped only for one whose exact score is within the contract's epsilon of it.
"""

import math

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import reference

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
    (17, 2047),
    (8, 2048),
    (1, 2049),
    (16, 2176),
]
RAGGED = {"q_lens": [q for q, _ in LENGTHS], "kv_lens": [k for _, k in LENGTHS]}


def counts_of(case):
    page = case.index_k_cache.shape[1]
    return oracle.candidates(case.cu_seqlens_q, case.seqused_k, case.index_table, page, case.index_q.shape[0])


def exact_scores(case):
    args, kwargs = case.index()
    return oracle.block_scores(*args, **kwargs)


def select(case, **options):
    """select_blocks into a poisoned out=."""
    args, kwargs = case.index()
    rows, heads, _ = case.index_q.shape
    out = torch.full((rows, heads, options.get("topk", 16)), 123456789, dtype=torch.int32)
    result = m3_sparse.select_blocks(*args, **kwargs, out=out, **options)
    got = result[0] if options.get("return_scores") else result
    assert got.data_ptr() == out.data_ptr()
    return (out, result[1]) if options.get("return_scores") else out


def check_exact(case, topk=16, local=1, init=0):
    want = oracle.select(exact_scores(case), counts_of(case), topk, local, init)
    got = select(case, topk=topk, local_blocks=local, init_blocks=init)
    oracle.check_bitwise(got, want, "block_indices")
    return got


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(
    "dtype, index_dtype",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
        (torch.float32, torch.float8_e4m3fn),
    ],
)
def test_exact_data_gives_the_oracles_selection_bit_for_bit(dtype, index_dtype, page):
    case = cases.make(**RAGGED, page=page, dtype=dtype, kv_dtype=index_dtype, kind="int", pad_rows=3, seed=1)
    got = check_exact(case)
    assert (got[-3:] == -1).all()
    args, kwargs = case.index()
    scores = m3_sparse.block_scores(*args, **kwargs)
    assert scores.dtype == torch.float32
    oracle.check_close(scores, exact_scores(case), 0, 0, "scores")


def test_float8_queries_score_as_the_same_numbers_in_bf16():
    case = cases.make(**RAGGED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, kind="int", seed=1)
    (index_q, *rest), kwargs = case.index()
    narrow = index_q.to(torch.float8_e4m3fn)
    assert torch.equal(narrow.float(), index_q.float())
    want = m3_sparse.block_scores(index_q, *rest, **kwargs)
    assert torch.equal(m3_sparse.block_scores(narrow, *rest, **kwargs), want)
    assert torch.equal(m3_sparse.select_blocks(narrow, *rest, **kwargs), check_exact(case))
    with pytest.raises(TypeError, match="index_k_cache must have the dtype of the queries"):
        m3_sparse.block_scores(narrow, rest[0].bfloat16(), *rest[1:], **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page", [64, 128])
def test_ordinary_data_within_epsilon(dtype, page):
    case = cases.make([9, 33, 1], [2700, 4111, 5000], page=page, dtype=dtype, seed=2)
    args, kwargs = case.index()
    exact, epsilon = exact_scores(case), oracle.score_epsilon(*args, **kwargs)
    got, scores = select(case, return_scores=True)
    oracle.check_selection(got, exact, epsilon, counts_of(case))
    finite = exact.isfinite()
    assert torch.equal(finite, scores.isfinite()) and (scores[~finite] == -INF).all()
    error = torch.where(finite, (scores.double() - exact).abs(), 0.0).amax(-1)
    assert (error <= epsilon).all(), f"score error {float((error - epsilon).max())} above epsilon"
    # Protocol item 1: the selection is exactly the top-k of the scores that were returned with it.
    oracle.check_bitwise(got, oracle.select(scores, counts_of(case)), "block_indices of the returned scores")
    oracle.check_selection(select(case), exact, epsilon, counts_of(case))


def test_scores_are_unscaled_raw_logits():
    case = cases.make([1], [300], kind="int", seed=3)
    args, kwargs = case.index()
    keys = torch.cat([case.index_k_cache[int(p), :n] for p, n in zip(case.index_table[0], (128, 128, 44))])
    dots = (case.index_q[0] @ keys.T).split(128, -1)
    want = torch.stack([d.amax(-1) for d in dots], -1)
    got = m3_sparse.block_scores(*args, **kwargs)
    assert torch.equal(got[0, :, :3], want) and (got[0, :, 3:] == -INF).all()


@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("local, init", [(1, 0), (0, 0), (0, 1), (1, 1), (2, 3), (5, 0), (0, 40), (30, 2)])
def test_forced_blocks(topk, local, init):
    case = cases.make([3, 5, 2], [700, 4200, 2310], kind="int", seed=4)
    if local + init > topk:
        with pytest.raises(ValueError, match="topk"):
            select(case, topk=topk, local_blocks=local, init_blocks=init)
    else:
        check_exact(case, topk, local, init)


def test_each_index_head_selects_for_itself():
    case = cases.make([4], [6000], heads=(16, 4), kind="int", seed=5)
    got = check_exact(case)
    for head in range(1, 4):
        assert not torch.equal(got[:, 0], got[:, head])


@pytest.mark.parametrize("page", [64, 128])
def test_ties_go_to_the_lower_block(page):
    case = cases.make([3, 2], [4000, 3071], page=page, kind="int", seed=6)
    case.index_q.zero_()
    got = check_exact(case)
    assert got[0, 0].tolist() == list(range(15)) + [(4000 - 3) // 128]
    case.index_q.copy_(torch.where(torch.arange(128) % 2 == 0, 0.0, -0.0))  # the same zero, signed
    assert torch.equal(check_exact(case), got)


def test_negative_zero_ties_with_zero():
    scores = torch.tensor([[[-0.0, 0.0, -0.0]], [[-1.0, -0.0, 0.0]]])
    chosen = reference.select_from_scores(scores, torch.tensor([3, 3]), 1, 0, 0)
    assert chosen.tolist() == [[[0]], [[1]]]


def test_negative_scores_are_ordered():
    scores = torch.tensor([[[-3.0, -1.0, -INF, -2.0, -1e30]]])
    for topk, want in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 3, 4])):
        assert reference.select_from_scores(scores, torch.tensor([5]), topk, 0, 0).tolist() == [[want]]


def test_few_winners_among_many_ties():
    case = cases.make([2], [16 * 128 * 5], heads=(2, 1), kind="int", seed=7)
    case.index_q.fill_(1)
    data = case.index_k_cache
    data.zero_()
    for block, value in ((79, 5), (40, 3), (41, 3), (63, 1e-30)):
        data[int(case.index_table[0, block]), 11] = value
    data[int(case.index_table[0, 7])] = -2
    assert check_exact(case)[1, 0].tolist() == list(range(7)) + list(range(8, 13)) + [40, 41, 63, 79]


def set_token(case, request, token, value):
    page = case.index_k_cache.shape[1]
    case.index_k_cache[int(case.index_table[request, token // page]), token % page] = value


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_and_nan_scores(page, dtype):
    """+inf ranks first but below forced blocks; NaN and -inf rank last, and are taken if room remains."""
    case = cases.make([2, 2], [3000, 2100], page=page, dtype=dtype, kind="int", seed=8)
    case.index_q.copy_(case.index_q.abs() + 1)  # no zeros: infinity times zero would be NaN
    for token in (0, 130, 2999, 500, 777):
        set_token(case, 0, token, INF)
    for token in range(256, 384):
        set_token(case, 0, token, -INF)
    for token in range(1024, 1152):
        set_token(case, 0, token, float("nan"))
    for token in (640, 1300, 2500):  # one NaN token takes only itself out of its block's maximum
        set_token(case, 0, token, float("nan"))
    for token in range(2100):
        set_token(case, 1, token, float("nan"))
    got = check_exact(case)
    assert {0, 1, 3, 6, 23} <= set(got[1, 0].tolist()) and not {2, 8} & set(got[1, 0].tolist())
    assert got[3, 0].tolist() == list(range(15)) + [16]
    check_exact(case, topk=32)
    check_exact(case, topk=4, local=2, init=2)
    args, kwargs = case.index()
    scores = m3_sparse.block_scores(*args, **kwargs)
    oracle.check_close(scores, exact_scores(case), 0, 0, "scores")
    assert not scores.isnan().any()


def test_infinity_minus_infinity_counts_as_minus_infinity():
    case = cases.make([1], [2400], kind="int", seed=9)
    case.index_q.fill_(1)
    mixed = torch.full((128,), INF)
    mixed[::2] = -INF
    for token in range(384, 512):
        set_token(case, 0, token, mixed)
    assert 3 not in check_exact(case)[0, 0].tolist()


def test_forced_block_outranks_infinite_scores():
    case = cases.make([1], [40 * 128], kind="int", seed=10)
    case.index_q.fill_(1)
    for block in range(2, 39):
        set_token(case, 0, block * 128 + 5, INF)
    assert check_exact(case, topk=4, local=2, init=1)[0, 0].tolist() == [0, 2, 38, 39]


def test_forced_block_that_also_wins_appears_once():
    case = cases.make([1], [3000], kind="int", seed=11)
    case.index_q.fill_(1)
    set_token(case, 0, 2999, 100.0)
    got = check_exact(case)[0, 0].tolist()
    assert got.count(23) == 1 and len(set(got)) == 16


def test_accumulation_beyond_the_fp16_range():
    case = cases.make([2], [2600], dtype=torch.float16, kind="int", seed=12)
    case.index_q.mul_(64)
    case.index_k_cache.mul_(64)
    assert exact_scores(case).amax() > 65504
    check_exact(case)


@pytest.mark.parametrize("poison", ["zero", "inf"])
@pytest.mark.parametrize("index_dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_past_the_length_change_no_bit(poison, index_dtype):
    options = {**RAGGED, "dtype": torch.float32, "kv_dtype": index_dtype, "seed": 13}
    nan, other = cases.make(**options), cases.make(**options, poison=poison)
    ids, scores = select(nan, return_scores=True)
    ids2, scores2 = select(other, return_scores=True)
    oracle.check_bitwise(ids2, ids, "block_indices")
    oracle.check_bitwise(scores2, scores, "scores")


def test_repeats_are_bitwise_equal():
    case = cases.make([40, 3], [3000, 2500], dtype=torch.bfloat16, seed=14)
    first = select(case, return_scores=True)
    for _ in range(2):
        again = select(case, return_scores=True)
        oracle.check_bitwise(again[0], first[0], "block_indices")
        oracle.check_bitwise(again[1], first[1], "scores")


@pytest.mark.parametrize("page", [64, 128])
def test_page_outside_the_cache_contributes_nothing_but_its_block_stays_a_candidate(page):
    case = cases.make([2, 1], [2600, 700], page=page, kind="int", seed=15)
    table = case.index_table
    pages = case.index_k_cache.shape[0]
    for entry, number in ((0, -1), (1, pages), (5, 2**31 - 1), (6, -(2**31)), (20, pages + 7)):
        table[0, entry] = number
    table[1] = -1
    check_exact(case)
    args, kwargs = case.index()
    scores = m3_sparse.block_scores(*args, **kwargs)
    oracle.check_close(scores, exact_scores(case), 0, 0, "scores")
    assert (scores[2] == -INF).all() and select(case)[2, 0].tolist() == list(range(6)) + [-1] * 10


@pytest.mark.parametrize("seqused", [10**6, 2**31 - 1, 2**40])
def test_kv_len_is_clamped_to_the_reach_of_the_table(seqused):
    case = cases.make([3, 2], [2560, 2304], kind="int", seed=16, offsets=torch.int64)
    case.index_table = case.index_table[:, :20]
    case.seqused_k = torch.tensor([seqused, 2304])
    got = check_exact(case)
    clamped = cases.make([3, 2], [2560, 2304], kind="int", seed=16)
    assert torch.equal(got, check_exact(clamped))
    assert case.index_table.shape[1] * 128 == 2560


def test_negative_length_is_an_empty_request():
    case = cases.make([3, 2], [300, 2304], kind="int", seed=17)
    case.seqused_k[0] = -5
    assert (check_exact(case)[:3] == -1).all()


@pytest.mark.parametrize("width", [8192, 16384])
def test_very_long_context(width):
    """2**20 and 2**21 tokens: pages are shared, so the cache is small; the winners sit far down the row."""
    gen = cases.generator(18)
    pool = torch.randint(-1, 2, (40, 128, 128), generator=gen).to(torch.bfloat16)
    pool[39] *= 3
    table = torch.randint(0, 37, (1, width), generator=gen).to(torch.int32)
    far = (width - 1, width - 2, width - 77, width // 2 + 3, 4100)
    for block in far[1:]:
        table[0, block] = 39
    query = torch.randint(-1, 2, (2, 2, 128), generator=gen).to(torch.bfloat16)
    kwargs = {"cu_seqlens_q": torch.tensor([0, 2]), "seqused_k": torch.tensor([width * 128 - 3])}
    got = m3_sparse.select_blocks(query, pool, table, **kwargs)
    counts = oracle.candidates(kwargs["cu_seqlens_q"], kwargs["seqused_k"], table, 128, 2)
    assert counts == [width, width]
    want = oracle.select(oracle.block_scores(query, pool, table, **kwargs), counts)
    oracle.check_bitwise(got, want, "block_indices")
    assert all(set(far) <= set(row) for row in got.flatten(0, 1).tolist())


def test_many_queries_cross_every_chunk():
    case = cases.make([1404, 171], [2500, 2049], heads=(1, 1), dtype=torch.bfloat16, kind="int", seed=19)
    check_exact(case)


@pytest.mark.parametrize("batch", [3, 17, 33, 1025])
def test_many_requests(batch):
    q_lens = [(b * 7) % 3 for b in range(batch)]
    kv_lens = [(b * 37) % 300 for b in range(batch)]
    check_exact(cases.make(q_lens, kv_lens, heads=(1, 1), kind="int", seed=20))


def test_wide_table_and_int64_indices():
    case = cases.make([2, 3], [2500, 300], kind="int", seed=21, offsets=torch.int64)
    wide = torch.full((2, 3000), -1, dtype=torch.int64)
    wide[:, : case.index_table.shape[1]] = case.index_table
    want = check_exact(case)
    case.index_table = wide
    assert torch.equal(check_exact(case), want)
    args, kwargs = case.index()
    assert m3_sparse.block_scores(*args, **kwargs).shape == (5, 2, 3000)


def test_odd_number_of_64_token_pages():
    case = cases.make([2], [129], page=64, kind="int", seed=22)
    case.index_table = case.index_table[:, :3]
    args, kwargs = case.index()
    scores = m3_sparse.block_scores(*args, **kwargs)
    assert scores.shape == (2, 2, 2)
    oracle.check_close(scores, exact_scores(case), 0, 0, "scores")
    check_exact(case)


def test_a_request_alone_selects_as_in_its_batch():
    lengths = [(5, 2600), (0, 9), (7, 4000), (1, 0), (2, 2300)]
    case = cases.make([q for q, _ in lengths], [k for _, k in lengths], kind="int", seed=23)
    whole, row = check_exact(case), 0
    for b, (q_len, _) in enumerate(lengths):
        alone = m3_sparse.select_blocks(
            case.index_q[row : row + q_len],
            case.index_k_cache,
            case.index_table[b : b + 1],
            cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32),
            seqused_k=case.seqused_k[b : b + 1],
        )
        oracle.check_bitwise(alone, whole[row : row + q_len], f"request {b}")
        row += q_len


def test_chunked_prefill_selects_as_the_whole():
    """Per-token extents: chunks that start inside a page, and single tokens, choose what the whole prefill chose."""
    case = cases.make([300], [2900], kind="int", seed=27)
    whole, start = check_exact(case), 0
    for size in (1, 77, 128, 91, 1, 1, 1):
        start += size
        part = m3_sparse.select_blocks(
            case.index_q[start - size : start],
            case.index_k_cache,
            case.index_table,
            cu_seqlens_q=torch.tensor([0, size]),
            seqused_k=torch.tensor([2600 + start]),
        )
        oracle.check_bitwise(part, whole[start - size : start], f"rows {start - size} to {start}")
    assert start == 300


def test_no_rows_at_all():
    case = cases.make([0, 0], [300, 5], seed=24)
    args, kwargs = case.index()
    assert m3_sparse.select_blocks(*args, **kwargs).shape == (0, 2, 16)
    assert m3_sparse.block_scores(*args, **kwargs).shape == (0, 2, case.index_table.shape[1])


def test_new_output_is_int32_and_fresh():
    case = cases.make([2], [2600], kind="int", seed=25)
    args, kwargs = case.index()
    first = m3_sparse.select_blocks(*args, **kwargs)
    again = m3_sparse.select_blocks(*args, **kwargs)
    assert first.dtype == torch.int32 and first.data_ptr() != again.data_ptr()
    assert torch.equal(first, check_exact(case))


def test_output_of_any_strides():
    case = cases.make([3, 4], [2600, 2900], kind="int", seed=26)
    want = check_exact(case)
    args, kwargs = case.index()
    for make_view in (cases.head_major, cases.unaligned):
        out = make_view(torch.full_like(want, 99))
        assert m3_sparse.select_blocks(*args, **kwargs, out=out).data_ptr() == out.data_ptr()
        oracle.check_bitwise(out, want, make_view.__name__)
