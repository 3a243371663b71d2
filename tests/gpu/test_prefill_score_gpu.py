"""select_blocks and block_scores for many rows a request on a GPU: prefill_score and its fold.

Scores are compared with float64; selections exactly with what the specification makes of the scores that the same
kernel writes in its `scores` variant.
"""

import pytest
import torch
from test_select_gpu import assert_selection, crafted, ends_of, exact_scores, make, run

import m3_sparse
from m3_sparse import ops, reference

DEVICE = "cuda"
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP8, FP8)]
STORED, FUSED = 2, 3

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3)),
    reason="kernels for SM90, SM100 and SM103",
)


def select(tensors, lengths, way, topk=16, local=1, init=0, scores=None):
    """The operator with its way forced, into an output full of garbage."""
    query, keys, table = tensors
    out = torch.full((*query.shape[:2], topk), -77, dtype=torch.int32, device=DEVICE)
    rows = (lengths["cu_seqlens_q"], lengths["seqused_k"])
    ops.BUILT["select_blocks", "aot"](out, scores, query, keys, table, *rows, local, init, way)
    return out


def stored(tensors, lengths, *options):
    query, keys, table = tensors
    blocks = -(-table.shape[1] * keys.shape[1] // 128)
    scores = torch.full((*query.shape[:2], blocks), torch.nan, device=DEVICE)
    return select(tensors, lengths, STORED, *options, scores=scores), scores


def assert_all_ways(tensors, lengths, topk=16, local=1, init=0):
    ids, scores = stored(tensors, lengths, topk, local, init)
    assert_selection(ids, scores, tensors, lengths, local, init)
    for way in (STORED, FUSED):
        assert torch.equal(select(tensors, lengths, way, topk, local, init), ids)
    return ids, scores


def assert_scores(got, tensors, lengths):
    """fp8 queries: the MMA adds 32 products at a time with fewer bits than fp32 has."""
    want, bound = exact_scores(tensors, lengths)
    assert torch.equal(got == -torch.inf, want == -torch.inf) and not got.isnan().any()
    seen = want > -torch.inf
    epsilon = 2.0**-10 if tensors[0].dtype == FP8 else 2.0**-16
    assert ((got.double() - want).abs()[seen] <= epsilon * bound[seen]).all()


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("heads", [1, 2, 4, 16])
def test_against_float64_and_exact_selection(dtypes, page, heads):
    cases = [([17, 0, 130, 64], [17, 300, 2700, 2111]), ([65, 3, 40], [4001, 3, 2048]), ([300], [300])]
    for seed, (q_lens, kv_lens) in enumerate(cases):
        tensors, lengths = make(q_lens, kv_lens, heads, page, dtypes, seed, pad_rows=2, wide=seed, padded=seed == 1)
        _, scores = assert_all_ways(tensors, lengths)
        assert_scores(scores, tensors, lengths)
        if sum(q_lens) * heads > 128 * len(q_lens):
            with m3_sparse.backend("aot"):
                assert torch.equal(m3_sparse.block_scores(*tensors, **lengths), scores)


@pytest.mark.parametrize(
    "topk, local, init", [(4, 0, 0), (8, 2, 1), (32, 1, 0), (16, 16, 0), (17, 0, 4), (1, 1, 0), (6, 1, 1)]
)
def test_options(topk, local, init):
    for seed, dtypes in enumerate(DTYPES):
        tensors, lengths = make([200, 90, 10], [9000, 4100, 2500], 4, 128, dtypes, seed)
        assert_all_ways(tensors, lengths, topk, local, init)


@pytest.mark.parametrize("kind", ["equal", "ties", "rising", "falling", "special"])
def test_ties_and_special_scores(kind):
    blocks, generator = 300, torch.Generator(device=DEVICE).manual_seed(5)
    values = torch.randn(blocks, device=DEVICE, generator=generator)
    if kind == "equal":
        values.fill_(1.5)
    elif kind == "ties":
        values = (values * 2).round()
    elif kind == "rising":
        values = torch.arange(blocks, device=DEVICE).float()
    elif kind == "falling":
        values = -torch.arange(blocks, device=DEVICE).float()
    else:
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1e38], device=DEVICE)
        values = special[torch.randint(0, 7, (blocks,), device=DEVICE, generator=generator)]
    (query, keys, table), lengths = crafted(values, 1)
    query = query.expand(500, 4, 128).contiguous()
    lengths["cu_seqlens_q"][1] = 500
    for topk, local, init in ((16, 1, 0), (8, 0, 2), (32, 3, 5)):
        assert_all_ways((query, keys, table), lengths, topk, local, init)


@pytest.mark.parametrize("kv_len", [65_537, 1_048_576, 2_097_152])
def test_long_rows(kv_len):
    tensors, lengths = make([130], [kv_len], 4, 128, DTYPES[0], seed=9)
    assert_all_ways(tensors, lengths)


def test_a_long_prompt_keeps_no_scores():
    tensors, lengths = make([16384], [16384], seed=10, poison=False)
    with m3_sparse.backend("aot"):
        ids = m3_sparse.select_blocks(*tensors, **lengths)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        m3_sparse.select_blocks(*tensors, **lengths, out=ids)
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    assert torch.equal(ids, stored(tensors, lengths)[0])


@pytest.mark.parametrize("q_len, kv_len", [(512, 65536), (2000, 33024), (4096, 131072)])
def test_workspace_is_bounded(q_len, kv_len):
    """Stored scores, or the parts of tiles that two CTAs share: 64 MiB at most, whatever the length."""
    tensors, lengths = make([q_len], [kv_len], seed=21, poison=False)
    with m3_sparse.backend("aot"):
        ids = m3_sparse.select_blocks(*tensors, **lengths)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        m3_sparse.select_blocks(*tensors, **lengths, out=ids)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20


def test_many_requests():
    q_lens = [(i * 37) % 90 for i in range(300)]
    kv_lens = [q + (i * 131) % 2600 for i, q in enumerate(q_lens)]
    tensors, lengths = make(q_lens, kv_lens, seed=11)
    assert_all_ways(tensors, lengths)


def test_a_row_does_not_depend_on_its_batch_its_chunk_or_the_run():
    q_lens, kv_lens = [300, 70, 129], [4000, 2600, 9000]
    tensors, lengths = make(q_lens, kv_lens, seed=12)
    query, keys, table = tensors
    ids, scores = assert_all_ways(tensors, lengths)
    for _ in range(20):
        assert torch.equal(select(tensors, lengths, FUSED), ids)
    offset = lambda *n: torch.tensor([0, *n], dtype=torch.int32, device=DEVICE)
    first = 0
    for b, count in enumerate(q_lens):
        for taken in (count, count - 33):  # the whole request, and its last tokens as a chunk of their own
            rows = slice(first + count - taken, first + count)
            alone = (query[rows], keys, table[b : b + 1])
            one = {"cu_seqlens_q": offset(taken), "seqused_k": lengths["seqused_k"][b : b + 1]}
            assert torch.equal(select(alone, one, FUSED), ids[rows])
            assert torch.equal(stored(alone, one)[1], scores[rows])
        first += count


def test_unread_bytes_change_nothing():
    for dtypes in DTYPES:
        for page in (64, 128):
            results = []
            for poison in (False, True):
                tensors, lengths = make([100, 64], [2049, 4000], 4, page, dtypes, seed=13, poison=poison, wide=2)
                if poison:
                    tensors[2][tensors[2] == 2**30] = -7
                results.append(assert_all_ways(tensors, lengths))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_pages_outside_the_cache_contribute_nothing():
    for page in (64, 128):
        tensors, lengths = make([150], [4000], 4, page, seed=14)
        tensors[2][0, 3], tensors[2][0, 8], tensors[2][0, 9] = -5, tensors[1].shape[0], 2**31 - 1
        _, scores = assert_all_ways(tensors, lengths)
        assert (scores[:, :, 3 * page // 128] == -torch.inf).all() == (page == 128)


def test_wrong_lengths_offsets_and_pages_stay_inside():
    generator = torch.Generator(device=DEVICE).manual_seed(15)
    for seed in range(20):
        (query, keys, table), lengths = make([80] * 6, [2700] * 6, seed=seed)
        big = 2**31 - 1
        noise = lambda shape: torch.randint(-big, big, shape, device=DEVICE, generator=generator).to(torch.int32)
        table = torch.where(
            torch.rand(table.shape, device=DEVICE, generator=generator) < 0.5, table, noise(table.shape)
        )
        lengths = {name: noise(x.shape) for name, x in lengths.items()}
        for way in (STORED, FUSED):
            select((query, keys, table), lengths, way)
    torch.cuda.synchronize()


def test_offsets_beyond_32_bits():
    pages = 140_000  # 4.6 GB of bf16 keys
    keys = torch.zeros(pages, 128, 128, dtype=BF16, device=DEVICE)
    keys[-1], keys[70_000], keys[3] = 2, 3, 1
    table = torch.arange(10, 40, dtype=torch.int32, device=DEVICE)[None]
    table[0, 5], table[0, 9], table[0, 11] = pages - 1, 70_000, 3
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 100], dtype=torch.int32, device=DEVICE),
        "seqused_k": torch.tensor([3800], dtype=torch.int32, device=DEVICE),
    }
    tensors = (torch.ones(100, 4, 128, dtype=BF16, device=DEVICE), keys, table)
    ids = select(tensors, lengths, FUSED, topk=4)
    assert ids[-1].tolist() == [[5, 9, 11, 29]] * 4


def test_graph_replay_follows_lengths_and_pages():
    tensors, lengths = make([300] * 2, [4000] * 2, seed=16, poison=False)
    query, keys, table = tensors
    table.clamp_(0, keys.shape[0] - 1)
    ids = {}
    for way in (STORED, FUSED):
        select(tensors, lengths, way)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ids[way] = select(tensors, lengths, way)
        ids[way] = (graph, ids[way])
    for seed in range(8):
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        lengths["seqused_k"].copy_(torch.randint(0, 4001, (2,), device=DEVICE, generator=generator))
        table.copy_(torch.randint(0, keys.shape[0], table.shape, device=DEVICE, generator=generator))
        query.copy_(torch.randn(query.shape, device=DEVICE, generator=generator))
        want, _ = assert_all_ways(tensors, lengths)
        for graph, out in ids.values():
            graph.replay()
            assert torch.equal(out, want)


def test_outputs_are_written_whole_and_nothing_else():
    tensors, lengths = make([100, 60, 0, 90], [500, 2300, 7, 4000], seed=17, pad_rows=3)
    rows = tensors[0].shape[0]
    want, _ = assert_all_ways(tensors, lengths)
    buffer = torch.full((rows + 4, 4, 40), -77, dtype=torch.int32, device=DEVICE)
    out = buffer[2:-2, :, 1:33:2]
    data = (*tensors, lengths["cu_seqlens_q"], lengths["seqused_k"])
    for way in (STORED, FUSED):
        ops.BUILT["select_blocks", "aot"](out, None, *data, 1, 0, way)
        assert torch.equal(out, want)
        out.fill_(-77)
        assert (buffer == -77).all()


def test_the_public_function_and_its_scores_agree():
    for q_len, dtypes in ((40, DTYPES[0]), (700, DTYPES[2]), (3000, DTYPES[4])):
        tensors, lengths = make([q_len], [5000], 4, 128, dtypes, seed=18)
        ids, scores = run(tensors, lengths)
        assert_selection(ids, scores, tensors, lengths)
        with m3_sparse.backend("aot"):
            assert torch.equal(m3_sparse.select_blocks(*tensors, **lengths), ids)
        count = reference.block_count(ends_of(tensors, lengths).end)
        assert ((ids >= 0).sum(-1) == count.clamp(max=16)[:, None]).all()


def test_opcheck():
    (query, keys, table), lengths = make([100, 200], [300, 2100], seed=19, poison=False)
    tensors = (query, keys, table, lengths["cu_seqlens_q"], lengths["seqused_k"])
    out = torch.zeros(300, 4, 16, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(300, 4, table.shape[1], device=DEVICE)
    for way in (STORED, FUSED):
        torch.library.opcheck(ops.BUILT["select_blocks", "aot"], (out, None, *tensors, 1, 0, way))
    torch.library.opcheck(ops.BUILT["block_scores", "aot"], (scores, *tensors))


def test_queries_fit_fp16_beside_fp8_keys():
    """bf16 queries are scaled by rows to fp16: rows of very different sizes keep their scores."""
    (query, keys, table), lengths = make([200], [3000], 4, 128, DTYPES[2], seed=20)
    exponents = torch.arange(200, device=DEVICE) % 120 - 60
    query = (query.float() * torch.exp2(exponents.float())[:, None, None]).to(BF16)
    _, scores = assert_all_ways((query, keys, table), lengths)
    assert_scores(scores, (query, keys, table), lengths)
