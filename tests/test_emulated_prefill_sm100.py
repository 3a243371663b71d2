"""The KV-stationary prefill on SM100 and SM103 in the PTX emulator, through the public function and the launcher, against
float64: sm100/prefill.py with the neutral programs around it. No such chip has run it.

Needs `--backend=emulated`. Problems are those of prefill_problems.py. Where the device has two multiprocessors, each
CTA of the forward walks many tiles, of runs of one and of several.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import test_emulated_prefill as prefill
import torch
from prefill_problems import BF16, DTYPES, E4M3, FP16
from test_emulated_prefill import attend, expected, in_chunks, same_bits

DEVICES = ["sm_100", "sm_103"]
RACED = [(BF16, BF16), (FP16, E4M3)]  # race checks take most of the time; the other programs differ in conversions
POLICIES = ["late", "late:tma", "late+race", "random1+race", "random2+race", "random3+race"]

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", [*problems.RAGGED, *problems.STEEP])
def test_against_float64(emulation, name, number):
    """Each problem in all pairs of dtypes, half of them on each device. The rest of the grid is below."""
    at = list(problems.ATTENTION).index(name)
    problem = problems.attention(name, DTYPES[number])
    policy = "eager+race" if DTYPES[number] in RACED and name in problems.RAGGED else f"random{at}"
    with emulation.device(DEVICES[(number + at) % 2], 2 + at % 2), emulation.policy(policy):
        got = problems.attend(problem, "kv_stationary")
    oracle.check_attention(*got, *problems.expected(problem))


@each_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtypes", RACED, ids=lambda d: str(d[1])[6:])
def test_completion_and_schedule_change_no_bit(emulation, device, policy, dtypes):
    q, kv = dtypes
    case = cases.make([18, 5], [900, 77], heads=(16, 1), dtype=q, kv_dtype=kv, page=64, topk=8, seed=5)
    with emulation.device(device, 3):
        want = attend(case, "kv_stationary")
        with emulation.policy(policy):
            same_bits(attend(case, "kv_stationary"), want, policy)


@each_dtype
def test_runs_chunks_and_multiprocessors_change_no_bit(emulation, dtypes):
    """A CTA with all tiles, in one chunk and in several that are combined beside the next; and a tile or none a CTA."""
    q, kv = dtypes
    scales = "head" if kv.itemsize == 1 else None
    for heads, device in zip(((32, 2), (16, 2), (16, 2), (32, 2)), 2 * DEVICES):
        case = cases.make(
            [20, 9], [300, 140], heads=heads, dtype=q, kv_dtype=kv, topk=4, scales=scales, pad_rows=2, seed=3
        )
        with emulation.device(device):
            want = attend(case, "kv_stationary")
        oracle.check_attention(*want, *expected(case))
        with emulation.device(device, 1), emulation.policy("random1+race" if dtypes in RACED else "late"):
            same_bits(attend(case, "kv_stationary"), want, "one multiprocessor")
            same_bits(in_chunks(emulation, case), want, "chunks of a head")


@each_device
def test_chunks_of_tokens(emulation, device):
    case = cases.make([250, 3, 20], [255, 200, 270], heads=(2, 2), dtype=BF16, topk=3, seed=4)
    with emulation.device(device, 3):
        want = attend(case, "kv_stationary")
        oracle.check_attention(*want, *expected(case))
        same_bits(in_chunks(emulation, case), want, "chunks of 256 tokens")


@each_device
@pytest.mark.parametrize("heads", [(16, 1), (8, 1)], ids=["group16", "group8"])
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scale_of_any_sign(emulation, device, heads, scale):
    for dtypes in DTYPES:
        case = problems.scaled(scale, heads, *dtypes).case
        with emulation.device(device, 2):
            got = attend(case, "kv_stationary", scale=scale)
        oracle.check_attention(*got, *expected(case, scale=scale))


@each_device
@pytest.mark.parametrize("page", [64, 128])
def test_page_numbers_outside_the_cache_contribute_nothing(emulation, device, page):
    for dtypes, heads in ((d, h) for d in DTYPES for h in ((16, 1), (8, 1))):
        case = problems.outside(page, heads, *dtypes).case
        with emulation.device(device, 2), emulation.policy("random4"):
            got = attend(case, "kv_stationary")
        oracle.check_attention(*got, *expected(case))


def test_sharp_and_flat_rows(emulation):
    for device in DEVICES:
        for dtypes in DTYPES[:2]:
            for name in ("sharp", "clear", "flat"):
                problem = problems.attention(name, dtypes)
                with emulation.device(device, 1):
                    got = problems.attend(problem, "kv_stationary")
                oracle.check_attention(*got, *problems.expected(problem))


@each_device
@each_dtype
def test_requests_of_another_formulation_are_left_alone(emulation, device, dtypes):
    q, kv = dtypes
    for heads in ((32, 2), (16, 2)):
        case = cases.make([9, 5, 6], [300, 400, 200], heads=heads, dtype=q, kv_dtype=kv, topk=4, pad_rows=2)
        with emulation.device(device, 2):
            want = attend(case, "kv_stationary")
            chosen = torch.tensor([1, 0, 1], dtype=torch.int32)
            out, lse = in_chunks(emulation, case, 8, 1, chosen)
        assert out[9:14].isnan().all() and lse[9:14].isnan().all()
        for rows in (slice(0, 9), slice(14, 22)):
            same_bits((out[rows], lse[rows]), (want[0][rows], want[1][rows]), "the others")


def test_the_default_takes_it(emulation):
    """More rows than decode takes."""
    case = cases.make([70, 60], [500, 1200], heads=(64, 4), dtype=BF16, topk=2)
    before = len(emulation.driver.results)
    with emulation.device("sm_100"):
        got = attend(case, None)
    assert len(emulation.driver.results) - before == 8  # union tiles' 3, lists' 3, forward, combination
    oracle.check_attention(*got, *expected(case))


@each_device
@each_dtype
def test_what_is_not_finite_reaches_rows_that_see_it(emulation, device, dtypes):
    for page, heads in ((64, (32, 2)), (128, (16, 2)), (128, (32, 2)), (64, (16, 2))):
        problem, places = problems.blemished(page, heads, *dtypes)
        policy = "random1+race" if dtypes in RACED and (page, heads) == (64, (32, 2)) else "late"
        with emulation.device(device, 1 if page == 64 else 3), emulation.policy(policy):
            problems.check_isolation(problem, places, lambda p: attend(p.case, "kv_stationary"))


@each_device
def test_wrong_numbers_stay_inside(emulation, device):
    for seed in range(4):
        q, kv = DTYPES[seed]
        page, topk = (64, 128)[seed % 2], (8, 20)[seed % 2]
        case = cases.make([10, 10], [300, 700], heads=(16, 1), page=page, dtype=q, kv_dtype=kv, topk=topk, seed=seed)
        cases.spoil(cases.generator(seed), case.seqused_k, case.block_table, case.ids, case.cu_seqlens_q)
        with emulation.device(device, 2):
            attend(case, "kv_stationary", causal=seed < 3, with_lse=bool(seed & 1))


@each_device
def test_every_block_was_executed(emulation, device):
    """The last test of this file."""
    emulation.check_coverage("prefill", reasons=prefill.OUT_OF_REACH, arch=device + "a")
