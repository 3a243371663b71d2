"""prefill_score of SM90 and SM100 and its fold in the PTX emulator, through the operator and the launcher. SM103's programs are
SM100's (test_emulated_architectures.py).

Needs `--backend=emulated`. Scores are judged against float64, selections exactly against the scores. The emulator adds
fp8 products in float32, so here they keep the bound of the other dtypes.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import torch
from prefill_problems import SCORE_DTYPES as DTYPES

from m3_sparse import ops

STORED, FUSED = 2, 3
AT_LEAST_1 = (17,)  # prefill_score's parameter topk (torch_binding.cpp)
RACED = DTYPES[0], DTYPES[2], DTYPES[4]  # SM100's other programs differ in conversions alone


@pytest.fixture(autouse=True, params=["sm_90", "sm_100"])
def device(request, emulation):
    with emulation.device(request.param):
        yield request.param


each_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))


def select(tensors, lengths, way, scores=None, topk=16, local=1, init=0):
    """The operator with its way forced, into an output full of garbage."""
    query, keys, table = tensors
    out = torch.full((*query.shape[:2], topk), -77, dtype=torch.int32)
    call = ops.BUILT["select_blocks", "aot"]
    call(out, scores, query, keys, table, lengths["cu_seqlens_q"], lengths["seqused_k"], local, init, way)
    return out


def check(tensors, lengths, **options):
    """Both ways from scores within the contract's epsilon to the selection that these very scores demand."""
    query, keys, table = tensors
    scores = cases.nan_like((*query.shape[:2], -(-table.shape[1] * keys.shape[1] // 128)), torch.float32)
    ids = select(tensors, lengths, STORED, scores, **options)
    want = oracle.block_scores(*tensors, **lengths)
    epsilon = oracle.score_epsilon(*tensors, **lengths)
    assert torch.equal(scores == -torch.inf, want == -torch.inf) and not scores.isnan().any()
    seen = want > -torch.inf
    assert ((scores.double() - want).abs() <= epsilon[..., None])[seen].all()
    counts = oracle.candidates(*lengths.values(), table, keys.shape[1], query.shape[0])
    assert torch.equal(ids, oracle.select(scores.double(), counts, **options))
    assert torch.equal(select(tensors, lengths, FUSED, **options), ids)
    return scores, ids


def make(q_lens, kv_lens, heads=4, dtypes=DTYPES[0], **options):
    case = cases.make(q_lens, kv_lens, heads=(heads, heads), dtype=dtypes[0], kv_dtype=dtypes[1], **options)
    return case.index()


@each_dtype
@pytest.mark.parametrize("page, topk", problems.SCORE_PROBLEMS)
def test_against_float64(emulation, device, dtypes, page, topk):
    tensors, lengths = problems.scoring(page, dtypes)
    race = "+race" if device == "sm_90" or dtypes in RACED else ""
    with emulation.policy("eager" + race):
        scores, ids = check(tensors, lengths, topk=topk)
    for policy in ("late", "random1" + race)[: 2 if race else 1]:
        with emulation.policy(policy):
            assert torch.equal(select(tensors, lengths, FUSED, topk=topk), ids)
            again = torch.empty_like(scores)
            select(tensors, lengths, STORED, again, topk=topk)
            assert torch.equal(again, scores)


@each_dtype
@pytest.mark.parametrize("topk", [4, 17])
def test_scores_below_zero_and_nan(emulation, dtypes, topk):
    """The maxima by integer bits are taken again in floating point where a result has its sign bit or is a NaN."""
    (query, keys, table), lengths = make([40], [1500 if topk < 17 else 2600], 2, dtypes, layout="dense", seed=3)
    query.copy_(query.float().abs().to(query.dtype))
    ahead = torch.arange(keys.shape[0])[:, None, None] % 3
    signs = torch.where(ahead == 0, -keys.float().abs(), keys.float())
    keys.copy_(torch.where(ahead == 2, torch.zeros_like(signs), signs).to(keys.dtype))
    query[7, 1, 5] = torch.nan  # a row of NaN scores
    keys[table[0, 1:4].long(), 9, 5] = torch.nan  # a block's other keys still count
    with emulation.policy("eager+race"):
        check((query, keys, table), lengths, topk=topk)


@pytest.mark.parametrize("below", [slice(0, 8), slice(8, 16)], ids=["first", "second"])
@pytest.mark.parametrize("topk", [4, 17])
def test_one_of_a_threads_rows_is_below_zero(emulation, topk, below):
    """A thread has the rows of heads h and h + 8, and looks again if one of the two maxima has its sign bit."""
    (query, keys, table), lengths = make([5], [128 * topk + 700], 16, layout="dense", seed=topk)
    query.copy_(query.abs()), keys.copy_(keys.abs())
    query[:, below] *= -1
    check((query, keys, table), lengths, topk=topk)


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
@pytest.mark.parametrize("topk, local, init", [(4, 0, 0), (8, 2, 1), (3, 3, 0), (17, 1, 2), (1, 1, 0)])
def test_heads_and_options(emulation, device, heads, topk, local, init):
    if device == "sm_100" and heads in (2, 8):
        pytest.skip("1 and 64 heads show the same there")
    tensors, lengths = make([30, 9], [2600, 1100], heads, seed=heads)
    check(tensors, lengths, topk=topk, local=local, init=init)


def test_pages_outside_the_cache_contribute_nothing(emulation):
    for dtypes in DTYPES:
        (query, keys, table), lengths = make([50], [1900], 4, dtypes, page=64, seed=5)
        table[0, 3], table[0, 8], table[0, 9] = -5, keys.shape[0], 2**31 - 1
        table[0, 28] = -7  # half of a block that the causal mask cuts
        with emulation.policy("eager+race"):
            check((query, keys, table), lengths, topk=4)


def test_ties_prefer_the_lower_block(emulation):
    (query, keys, table), lengths = make([150], [2500], 4, kind="int", seed=6)
    for topk in (5, 18):
        check((query, keys, table), lengths, topk=topk, local=1, init=1)


@pytest.mark.parametrize("topk", [3, 16, 32])
def test_all_blocks_are_ties(emulation, device, topk):
    """The first ones win: in the list of a CTA that has the tile for itself, and in what is folded of several CTAs'."""
    (query, keys, table), lengths = make([5], [128 * (topk + 9)], 4, kind="int")
    keys.copy_(keys[table[0, 0], :1].expand(keys.shape))
    for multiprocessors in (1, 0):
        with emulation.device(device, multiprocessors):
            _, ids = check((query, keys, table), lengths, topk=topk, local=0)
            assert torch.equal(ids, torch.arange(topk, dtype=torch.int32).expand(ids.shape))


def test_many_requests(emulation):
    q_lens = [(i * 37) % 50 for i in range(70)]
    tensors, lengths = make(q_lens, [q + (i * 131) % 900 for i, q in enumerate(q_lens)], 2, seed=7)
    check(tensors, lengths, topk=3)


@pytest.mark.parametrize("requests", [32, 33])
def test_rows_past_a_full_round_of_requests(emulation, requests):
    """The rows behind as many requests as a round looks at have no blocks."""
    lengths_of = [0] * (requests - 2)
    check(*make(lengths_of + [1, 3], lengths_of + [600, 200], 2, pad_rows=5), topk=3)


def test_requests_that_end_with_a_block(emulation):
    """Their last rows see all of the block and none of a next one."""
    check(*make([3, 2, 9, 1], [640, 768, 1152, 900], 2), topk=3)
    with emulation.device(emulation.architecture, 2):
        check(*make([130, 2, 140, 1], [640, 768, 1152, 900], 2), topk=3, local=0)


@pytest.mark.parametrize("topk", [3, 17])
def test_tiny_queries_over_float8(emulation, topk):
    """bf16 queries are made fp16 by a power of two, which itself must not leave fp32."""
    (query, keys, table), lengths = make([20], [128 * topk + 700], 4, DTYPES[2], seed=2)
    query.mul_(2.0**-118)
    check((query, keys, table), lengths, topk=topk)


def test_ids_with_gaps(emulation):
    tensors, lengths = make([40], [1300], 2, seed=8)
    query, keys, table = tensors
    want = select(tensors, lengths, FUSED, topk=4)
    out = torch.full((40, 2, 9), -77, dtype=torch.int32)
    call = ops.BUILT["select_blocks", "aot"]
    call(out[:, :, 1:9:2], None, query, keys, table, *lengths.values(), 1, 0, FUSED)
    assert torch.equal(out[:, :, 1:9:2], want) and (out[:, :, ::2] == -77).all()


@each_dtype
@pytest.mark.parametrize("topk", [16, 32])
def test_tiles_whole_and_cut(emulation, device, dtypes, topk):
    """A CTA with tile after tile, and tiles cut between CTAs; ids side by side and with gaps; more requests than lanes."""
    if device == "sm_90":
        pytest.skip("its blocks are reached by the tests below")
    blocks = topk + 5
    q_lens = [33, 3, 2] + [0] * 34 + [40]
    kv_lens = [128 * blocks, 140, 900] + [0] * 34 + [128 * blocks + 90]
    tensors, lengths = make(q_lens, kv_lens, 8, dtypes, seed=topk, pad_rows=2)
    call, (query, keys, table) = ops.BUILT["select_blocks", "aot"], tensors
    for gaps, local in ((1, 1), (2, 0)):
        want = select(tensors, lengths, STORED, topk=topk, local=local)
        for multiprocessors in (2, 0):
            with emulation.device(device, multiprocessors):
                out = torch.full((*query.shape[:2], topk * gaps), -77, dtype=torch.int32)[..., ::gaps]
                call(out, None, query, keys, table, *lengths.values(), local, 0, FUSED)
                assert torch.equal(out, want)


def test_wrong_numbers_stay_inside(emulation):
    for seed in range(4):
        (query, keys, table), lengths = make([40, 30], [1300, 700], dtypes=DTYPES[seed], seed=seed)
        cases.spoil(cases.generator(seed), *lengths.values(), table)
        for way in (STORED, FUSED):
            select((query, keys, table), lengths, way, topk=4)


def check_strided(tensors, lengths, topk, local, init):
    """The selection as `check` has it, into slots that lie apart: written in words, not by fours."""
    _, ids = check(tensors, lengths, topk=topk, local=local, init=init)
    query, keys, table = tensors
    out = torch.full((*query.shape[:2], 2 * topk + 1), -77, dtype=torch.int32)
    call = ops.BUILT["select_blocks", "aot"]
    call(out[:, :, 1::2], None, query, keys, table, *lengths.values(), local, init, FUSED)
    assert torch.equal(out[:, :, 1::2], ids) and (out[:, :, ::2] == -77).all()


@each_dtype
@pytest.mark.parametrize("topk, local, init", [(16, 8, 7), (32, 16, 15)])
def test_tiles_of_one_cta(emulation, dtypes, topk, local, init):
    """Nearly all blocks are forced: so few units a tile that one CTA has them all and writes the ids. 40 requests are
    more than a round of the search looks at."""
    kv_len = 128 * (topk + 1) - 50
    tensors, lengths = make([0] * 36 + [3, 1, 0, 2], [0] * 36 + [kv_len, kv_len, 0, kv_len + 128], 1, dtypes)
    check_strided(tensors, lengths, topk, local, init)


@pytest.mark.parametrize("topk", [16, 32])
def test_tiles_of_several_ctas(emulation, topk):
    """Ids of every slot, written by the fold."""
    check_strided(*make([2], [128 * (topk + 9)], 1), topk, 1, 0)


@each_dtype
@pytest.mark.parametrize("topk", [3, 17])
def test_masked_blocks(emulation, dtypes, topk):
    """Without forced blocks a row's own is scored too, and a tile's rows lie in several, more than one of which a CTA
    takes after others."""
    kv_lens = [128 * (topk + 3) + 9, 128 * (topk + 4) + 70]
    tensors, lengths = make([300, 270], kv_lens, 1, dtypes, page=64, seed=topk)
    check(tensors, lengths, topk=topk, local=0)
    tensors, lengths = make([140], kv_lens[:1], 1, dtypes, page=64, seed=topk)
    check(tensors, lengths, topk=topk, local=0)


def test_every_block_was_executed(emulation, device):
    """The last test of this file."""
    emulation.check_coverage("prefill_score", AT_LEAST_1, arch=f"{device}a")
