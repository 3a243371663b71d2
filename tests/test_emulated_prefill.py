"""The prefill attention programs in the PTX emulator, through the public function and the launcher, against float64.

Needs `--backend=emulated`. The cases are those of the CPU tests: hostile ids, tables and lengths, poison past every end.
Union tiles take 16 query heads a KV head; the KV-stationary pipeline takes the other cases too.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import torch
from prefill_problems import BF16, DTYPES, E4M3, E5M2, FP16

import m3_sparse
from m3_sparse import ops

POLICIES = ["late", "late:tma", "late:wgmma", "random1+race", "random2+race"]
FORMULATIONS = ["union", "kv_stationary"]
RACED = DTYPES[0], DTYPES[2]  # the other programs differ in conversions alone; race checks take most of the time
BY_SEQUENCE, WIDENED = (
    4,
    5,
)  # of launch/prefill.h: chosen for each request, or a float8 cache widened, whatever the shape

each_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
each_formulation = pytest.mark.parametrize("formulation", FORMULATIONS)


def outputs(case, with_lse):
    return cases.nan_like(case.q.shape, case.q.dtype), cases.nan_like(
        case.q.shape[:2], torch.float32
    ) if with_lse else None


def attend(case, formulation, causal=True, scale=None, with_lse=True, ids=None):
    """(out, lse) of the public function."""
    args, options = case.sparse(ids)
    out, lse = outputs(case, with_lse)
    with m3_sparse.backend("aot"):
        m3_sparse.sparse_attention(
            *args, **options, causal=causal, softmax_scale=scale, out=out, lse=lse, return_lse=with_lse,
            formulation=formulation,
        )  # fmt: skip
    return out, lse


def by_sequence(case, causal=True, formulation=BY_SEQUENCE):
    """(out, lse) of the operator with the choice on the device, for shapes that are too small for it by default."""
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    out, lse = outputs(case, True)
    lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
    ops.BUILT["sparse_attention", "aot"](
        out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, causal, *scales, 0, True, formulation
    )
    return out, lse


def in_chunks(emulation, case, bits=8, heads=1, formulation=None, with_lse=True):
    """(out, lse) of the KV-stationary pipeline, cut into chunks of 2^bits tokens and so many KV heads."""
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    out, lse = outputs(case, with_lse)
    lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
    call = emulation.wrapped(getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default)
    call(out, lse, q, k_cache, v_cache, ids, table, *lengths, 128**-0.5, True, *scales, formulation, bits, heads)
    return out, lse


def expected(case, causal=True, scale=None, ids=None):
    args, options = case.sparse(ids)
    return oracle.sparse_attention(*args, **options, causal=causal, softmax_scale=scale)


def watched(dtypes):
    return "eager+race" if dtypes in RACED else "late"


def same_bits(got, want, what):
    for a, b in zip(got, want):
        if a is not None and b is not None:
            oracle.check_bitwise(a, b, what)


@each_dtype
@pytest.mark.parametrize("name", [*problems.RAGGED, *problems.STEEP])
def test_against_float64(emulation, name, dtypes):
    """The rest of the grid, under more policies, is below."""
    problem = problems.attention(name, dtypes)
    want = problems.expected(problem)
    for formulation in problem.formulations():
        with emulation.policy(watched(dtypes) if name in problems.RAGGED else "late"):
            oracle.check_attention(*problems.attend(problem, formulation), *want)


@each_dtype
@pytest.mark.parametrize("first, second", problems.HALVES, ids=str)
def test_gaps_of_union_tiles(emulation, dtypes, first, second):
    case = problems.halves(first, second, *dtypes).case
    for policy in ("eager+race", "random2+race") if dtypes in RACED else ("random2",):
        with emulation.policy(policy):
            oracle.check_attention(*attend(case, "union"), *expected(case))


@pytest.mark.parametrize("dtypes", DTYPES[2:], ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("name", problems.OF_16)
def test_a_cache_that_is_widened_first_changes_no_bit(emulation, name, dtypes):
    case, _, causal, _ = problems.attention(name, dtypes)
    want = attend(case, "union", causal)
    with emulation.policy(watched(dtypes)):
        same_bits(by_sequence(case, causal, WIDENED), want, name)
    entry = next(i for i, n in enumerate(case.kv_lens) if n > 0)
    case.block_table[entry, 0] = case.k_cache.shape[0]
    with emulation.policy("random1"):
        same_bits(by_sequence(case, causal, WIDENED), attend(case, "union", causal), "a page outside the cache")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtypes", RACED, ids=lambda d: str(d[1])[6:])
@each_formulation
def test_completion_and_schedule_change_no_bit(emulation, policy, dtypes, formulation):
    q, kv = dtypes
    case = cases.make([18, 5], [900, 77], heads=(16, 1), dtype=q, kv_dtype=kv, page=64, topk=8, seed=5)
    want = attend(case, formulation)
    with emulation.policy(policy):
        same_bits(attend(case, formulation), want, policy)


@each_dtype
@pytest.mark.parametrize("group", [16, 8])
def test_chunks_change_no_bit(emulation, dtypes, group):
    """Four chunks, one after the other combined beside the next; one chunk; with a scale a head and without a LSE."""
    q, kv = dtypes
    scales = "head" if kv.itemsize == 1 else None
    case = cases.make(
        [6, 7], [300, 140], heads=(4 * group, 4), dtype=q, kv_dtype=kv, topk=4, scales=scales, pad_rows=2, seed=3
    )
    want = attend(case, "kv_stationary")
    oracle.check_attention(*want, *expected(case))
    with emulation.policy("random1+race" if dtypes in RACED else "late"):
        same_bits(in_chunks(emulation, case), want, "chunks of a head")
    same_bits(in_chunks(emulation, case, heads=2, with_lse=False), want, "without a LSE")


@pytest.mark.parametrize("group", [16, 8])
def test_more_than_16_blocks_a_row_of_several_heads(emulation, group):
    case = cases.make(
        [5, 2], [2900, 130], heads=(2 * group, 2), dtype=BF16, kv_dtype=E4M3, topk=20, scales="head", seed=11
    )
    want = attend(case, "kv_stationary")
    oracle.check_attention(*want, *expected(case))
    same_bits(in_chunks(emulation, case), want, "chunks of a head")


@each_dtype
@pytest.mark.parametrize("group", [9, 2])
def test_several_tiles_a_cta(emulation, dtypes, group):
    """More tiles than multiprocessors: a CTA goes from tile to tile, within a block and to the next one."""
    q, kv = dtypes
    case = cases.make([16], [2100], heads=(16 * group, 16), dtype=q, kv_dtype=kv, topk=6, style="clean", seed=9)
    oracle.check_attention(*attend(case, "kv_stationary", scale=-0.1), *expected(case, scale=-0.1))
    with emulation.policy("random2+race" if dtypes in RACED else "late"):
        oracle.check_attention(*attend(case, "kv_stationary"), *expected(case))


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=lambda d: str(d[1])[6:]
)
def test_several_union_tiles_a_cta(emulation, dtypes):
    q, kv = dtypes
    case = cases.make([60, 9], [330, 9], heads=(256, 16), dtype=q, kv_dtype=kv, topk=2, seed=9)
    with emulation.policy("random2+race" if dtypes in RACED else "late"):
        got = attend(case, "union")
    assert emulation.driver.results[-1].ctas == 132 < 11 * 16
    oracle.check_attention(*got, *expected(case))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, E5M2)], ids=lambda d: str(d[1])[6:])
def test_tiles_are_given_out_once(emulation, dtypes):
    """Three rounds, the last one not full, tiles of different lengths; with a choice and without."""
    q, kv = dtypes
    case = cases.make([150], [300], heads=(256, 16), dtype=q, kv_dtype=kv, topk=2, seed=150)
    case.ids[::3, ::2, 1:] = -1
    case.ids[-40:, 5:8] = -1
    want = expected(case)
    got = attend(case, "union")
    oracle.check_attention(*got, *want)
    case.ids[:] = case.ids[:1] % 2  # all tokens the same: union tiles are chosen
    with emulation.policy("random1"):
        chosen = by_sequence(case)
    same_bits(chosen, attend(case, "union"), "chosen")


@pytest.mark.parametrize("kv", [BF16, E4M3], ids=lambda d: str(d)[6:])
def test_chunks_of_tokens(emulation, kv):
    """More than one unit, segment and chunk, with requests across their borders."""
    case = cases.make([250, 3, 20], [255, 200, 270], heads=(2, 2), dtype=BF16, kv_dtype=kv, topk=3, seed=4)
    want = attend(case, "kv_stationary")
    oracle.check_attention(*want, *expected(case))
    with emulation.policy("eager+race"):
        same_bits(in_chunks(emulation, case), want, "chunks of 256 tokens")


@each_dtype
def test_requests_of_another_formulation_are_left_alone(emulation, dtypes):
    q, kv = dtypes
    for heads in ((32, 2), (8, 4)):
        case = cases.make([9, 5, 6], [300, 400, 200], heads=heads, dtype=q, kv_dtype=kv, topk=4, pad_rows=2)
        want = attend(case, "kv_stationary")
        for chunk_heads in (1, heads[1]):
            with emulation.policy(watched(dtypes)):
                chosen = torch.tensor([1, 0, 1], dtype=torch.int32)
                out, lse = in_chunks(emulation, case, 8, chunk_heads, chosen)
            assert out[9:14].isnan().all() and lse[9:14].isnan().all()
            for rows in (slice(0, 9), slice(14, 22)):
                same_bits((out[rows], lse[rows]), (want[0][rows], want[1][rows]), "the others")


def two_kinds(q_lens, kv_lens, heads, kv, topk=4):
    """The tokens of even requests agree on their blocks, those of odd ones don't: u(4) is 1 and about 4."""
    case = cases.make(q_lens, kv_lens, heads=heads, dtype=BF16, kv_dtype=kv, topk=topk, style="clean")
    cu, pick = case.cu_seqlens_q.tolist(), torch.Generator().manual_seed(1)
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens)):
        old = (kv_len - q_len) // 128  # candidates of every token
        for row in range(cu[b], cu[b + 1]):
            chosen = torch.randperm(old, generator=pick)[:topk] if b % 2 else torch.arange(min(old, topk))
            case.ids[row] = torch.nn.functional.pad(chosen, (0, topk - len(chosen)), value=-1)
    return case


def check_choice(got, case, policy):
    want = [attend(case, name) for name in FORMULATIONS]
    oracle.check_attention(*got, *expected(case))
    cu = case.cu_seqlens_q.tolist()
    for b in range(len(cu) - 1):
        rows = slice(cu[b], cu[b + 1])
        for a, b_ in zip(got, want[b % 2]):
            oracle.check_bitwise(a[rows], b_[rows], f"{policy}: request {b} is another formulation's")
    assert not torch.equal(want[0][0], want[1][0]), "the formulations can be told apart"


@pytest.mark.parametrize("kv", [BF16, E4M3], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("policy", ["eager+race", "late", "random1+race", "random2+race"])
def test_each_request_takes_its_formulation(emulation, kv, policy):
    case = two_kinds([12, 9, 10], [600, 2500, 900], (32, 2), kv)
    with emulation.policy(policy):
        got = by_sequence(case)
    check_choice(got, case, policy)


def test_a_request_of_one_tile_takes_its_formulation(emulation):
    case = two_kinds([8, 7, 10], [600, 2500, 900], (32, 2), BF16)
    check_choice(by_sequence(case), case, "a tile")


def test_all_heads_and_tokens_decide(emulation):
    """The first head and the first half of each tile agree on their blocks; what makes the choice lies in the others."""
    case = two_kinds([16, 16], [600, 9000], (64, 4), BF16, 8)
    first = torch.arange(8, dtype=torch.int32)
    case.ids[16:, 0] = first
    case.ids[16:20] = case.ids[24:28] = first
    check_choice(by_sequence(case), case, "heads that differ")


def test_the_default_chooses_by_request(emulation):
    """Enough rows for the choice to be taken without being asked for."""
    case = two_kinds([70, 60], [500, 1200], (64, 4), BF16, 2)
    with emulation.policy("eager+race"):
        got = attend(case, None)
    launched = {emulation.driver.manifests[e]["kernel"] for e in emulation.driver.programs}
    assert {"union", "invert", "prefill_union", "prefill"} <= launched
    check_choice(got, case, "by default")


@each_formulation
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=lambda d: str(d[1])[6:]
)
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scale_of_any_sign(emulation, formulation, dtypes, scale):
    case = problems.scaled(scale, (16, 1), *dtypes).case
    with emulation.policy("eager+race"):
        oracle.check_attention(*attend(case, formulation, scale=scale), *expected(case, scale=scale))


@each_dtype
def test_scale_below_zero_with_8_heads(emulation, dtypes):
    case = problems.scaled(-0.2, (8, 1), *dtypes).case
    with emulation.policy("eager+race"):
        oracle.check_attention(*attend(case, "kv_stationary", scale=-0.2), *expected(case, scale=-0.2))


@each_formulation
def test_lse_may_be_left_out(emulation, formulation):
    for q, kv in DTYPES[:4]:
        for topk in (4, 20):
            case = cases.make([11], [300], heads=(16, 1), dtype=q, kv_dtype=kv, topk=topk)
            same_bits(attend(case, formulation, with_lse=False), attend(case, formulation), "out")


@each_dtype
@pytest.mark.parametrize("page", [64, 128])
def test_page_numbers_outside_the_cache_contribute_nothing(emulation, page, dtypes):
    for heads in ((16, 1), (8, 1)):
        case = problems.outside(page, heads, *dtypes).case
        for formulation in FORMULATIONS[0 if heads[0] == 16 else 1 :]:
            with emulation.policy(watched(dtypes)):
                oracle.check_attention(*attend(case, formulation), *expected(case))


@each_formulation
def test_long_page_tables(emulation, formulation):
    """More blocks than a window of the list builds holds, in windows that no row chose from too."""
    case = cases.make([9, 3], [640, 200], heads=(16, 1), dtype=BF16, topk=6, style="clean")
    blocks, own = 5000, case.block_table[0, :5]
    table = torch.full((2, blocks), -1, dtype=torch.int32)
    table[0], table[1, :2] = own[torch.arange(blocks) % 5], case.block_table[1, :2]
    case.block_table, case.seqused_k = table, torch.tensor([blocks * 128 - 31, 200], dtype=torch.int32)
    pick = torch.Generator().manual_seed(2)
    case.ids[:9] = torch.randint(0, 1900, (9, 1, 6), generator=pick, dtype=torch.int32)
    case.ids[:4, :, :2] = torch.tensor([blocks - 1, 4200], dtype=torch.int32)
    with emulation.policy("eager+race"):
        oracle.check_attention(*attend(case, formulation), *expected(case))


@each_formulation
def test_many_requests(emulation, formulation):
    """More than a round of the search for a request looks at."""
    q_lens = [(i * 5) % 4 for i in range(70)]
    kv_lens = [q + (i * 131) % 290 for i, q in enumerate(q_lens)]
    case = cases.make(q_lens, kv_lens, heads=(16, 1), dtype=BF16, topk=3, pad_rows=9)
    oracle.check_attention(*attend(case, formulation), *expected(case))


@each_formulation
def test_rows_of_no_ids(emulation, formulation):
    case = cases.make([5, 3], [300, 9], heads=(16, 1), dtype=BF16)
    out, lse = attend(case, formulation, ids=case.ids[..., :0])
    assert (out == 0).all() and (lse == -torch.inf).all()


@each_dtype
@pytest.mark.parametrize("page, group", [(64, 16), (128, 16), (64, 8), (128, 8)])
def test_what_is_not_finite_reaches_rows_that_see_it(emulation, page, group, dtypes):
    """All tiles in one CTA, and few; for union tiles with a cache widened first, too."""
    problem, places = problems.blemished(page, (2 * group, 2), *dtypes)
    runs = [lambda p: attend(p.case, "kv_stationary")]
    runs += [lambda p: attend(p.case, "union")] if group == 16 else []
    runs += [lambda p: by_sequence(p.case, True, WIDENED)] if group == 16 and dtypes[1].itemsize == 1 else []
    with emulation.device("sm_90", 1 if page == 64 else 3), emulation.policy(watched(dtypes)):
        problems.check_isolation(problem, places, *runs)


@pytest.mark.parametrize("position", [261, 269])
@pytest.mark.parametrize("kv", [BF16, E5M2], ids=lambda d: str(d)[6:])
def test_one_value_in_the_queries_block_is_not_finite(emulation, kv, position):
    """The first row of V that the first token does not see, and the last one: of the ten tokens' block nothing else."""
    case = cases.make([10], [270], heads=(16, 1), dtype=BF16, kv_dtype=kv, topk=2, style="clean")
    case.ids[:] = torch.tensor([0, 2], dtype=torch.int32)
    runs = [lambda p, name=name: attend(p.case, name) for name in FORMULATIONS]
    problems.check_isolation(problems.Problem(case, case.ids), {0: [(position, 3)]}, *runs)


@each_formulation
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16)], ids=lambda d: str(d[1])[6:])
def test_all_logits_far_below_zero(emulation, dtypes, formulation):
    """A slot without a block is no logit of 0."""
    q, kv = dtypes
    case = cases.make([9], [300], heads=(16, 1), dtype=q, kv_dtype=kv, topk=6, style="clean")
    case.q.fill_(1), case.k_cache.fill_(-1)
    oracle.check_attention(*attend(case, formulation, scale=3.0), *expected(case, scale=3.0))


@each_formulation
@pytest.mark.parametrize("group", [16, 8])
def test_values_near_the_largest_fp16(emulation, formulation, group):
    """128 keys of equal weight, whose sum before it is divided is far above what fp16 holds."""
    if group != 16 and formulation == "union":
        pytest.skip("union tiles are of 16 query heads")
    case = cases.make([9], [300], heads=(group, 1), dtype=FP16, topk=3, style="clean")
    case.q.zero_(), case.v_cache.mul_(0).sub_(60000)
    oracle.check_attention(*attend(case, formulation), *expected(case))


@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=lambda d: str(d)[6:])
@each_formulation
def test_tiny_queries_over_float8(emulation, formulation, kv):
    """bf16 queries are made fp16 by a power of two, which itself must not leave fp32."""
    case = cases.make([9, 4], [300, 140], heads=(16, 1), dtype=BF16, kv_dtype=kv, topk=3, style="clean")
    case.q.mul_(2.0**-118)
    scale = 0.1 * 2.0**118
    oracle.check_attention(*attend(case, formulation, scale=scale), *expected(case, scale=scale))


def test_a_cache_that_is_widened_first_may_have_two_layouts(emulation):
    case = cases.make([9, 4], [300, 140], heads=(32, 2), dtype=BF16, kv_dtype=E4M3, page=64, topk=3)
    case.v_cache = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    want = attend(case, "union")
    oracle.check_attention(*want, *expected(case))
    same_bits(by_sequence(case, True, WIDENED), want, "V's strides")


def test_wrong_numbers_stay_inside(emulation):
    """Lengths, pages and ids are data: whatever they hold, only the tensors given are touched. For union tiles, the
    offsets too."""
    for seed in range(8):
        q, kv = DTYPES[seed % 6]
        case = cases.make(
            [10, 10], [300, 700], heads=(16, 1), page=(64, 128)[seed % 2], dtype=q, kv_dtype=kv, topk=(8, 20)[seed % 2],
            seed=seed,
        )  # fmt: skip
        gen, options = cases.generator(seed), {"causal": seed < 6, "with_lse": bool(seed & 1)}
        cases.spoil(gen, case.seqused_k, case.block_table, case.ids)
        attend(case, "kv_stationary", **options)
        by_sequence(case)
        if kv.itemsize == 1:
            by_sequence(case, seed < 6, WIDENED)
        cases.spoil(gen, case.cu_seqlens_q)
        attend(case, "union", **options)


# By the start of a block's first instruction.
OUT_OF_REACH = {
    "bra": "a jump for a warp that there is not",
    "...div.s64": "a division of numbers beyond 32 bits",
    "nanosleep": "what keeps the compiler from moving a wait (sm90/prefill.py)",
}


@pytest.mark.parametrize("kernel", ["union", "invert", "prefill", "prefill_combine", "prefill_union", "prefill_widen"])
def test_every_block_was_executed(emulation, kernel):
    """The last test of this file."""
    emulation.check_coverage(kernel, reasons=OUT_OF_REACH)
