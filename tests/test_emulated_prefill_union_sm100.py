"""Prefill by union tiles on SM100 and SM103 in the PTX emulator, through the public function and the launcher, against
float64: sm100/prefill_union.py behind neutral/union.py. No such chip has run it.

Needs `--backend=emulated`. Problems are those of prefill_problems.py with 16 query heads a KV head.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import test_emulated_prefill as prefill
import torch
from prefill_problems import BF16, DTYPES, E4M3, FP16
from test_emulated_prefill import attend, expected, same_bits

DEVICES = ["sm_100", "sm_103"]
RACED = [(BF16, BF16), (FP16, E4M3)]
POLICIES = ["late", "late:tma", "late+race", "random1+race", "random2+race", "random3+race"]

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))


@each_dtype
@pytest.mark.parametrize("name", [*problems.OF_16, "sharp", "clear", "flat"])
def test_against_float64(emulation, name, dtypes):
    """Each problem in all pairs of dtypes, half of them on each device, which has one or two multiprocessors. The rest of
    the grid is below."""
    number = DTYPES.index(dtypes) + list(problems.ATTENTION).index(name)
    problem = problems.attention(name, dtypes)
    policy = "eager+race" if dtypes in RACED and name in problems.RAGGED else f"random{number}"
    with emulation.device(DEVICES[number % 2], 1 + number // 2 % 2), emulation.policy(policy):
        got = problems.attend(problem, "union")
    oracle.check_attention(*got, *problems.expected(problem))


@each_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtypes", RACED, ids=lambda d: str(d[1])[6:])
def test_completion_and_schedule_change_no_bit(emulation, device, policy, dtypes):
    q, kv = dtypes
    case = cases.make([18, 5], [900, 77], heads=(16, 1), dtype=q, kv_dtype=kv, page=64, topk=8, seed=5)
    with emulation.device(device, 2):
        want = attend(case, "union")
        with emulation.policy(policy):
            same_bits(attend(case, "union"), want, policy)


@each_device
@each_dtype
def test_neighbours_change_no_bit(emulation, device, dtypes):
    """A row's bits with other selections of the tile's other tokens: blocks more and fewer, before, between and behind."""
    q, kv = dtypes
    case = cases.make([16], [1500], heads=(16, 1), dtype=q, kv_dtype=kv, topk=4, style="clean", seed=2)
    other = case.ids.clone()
    pick = torch.Generator().manual_seed(3)
    for row in range(1, 16, 2):
        other[row, 0] = torch.randperm(11, generator=pick)[:4]
    other[[5, 13]] = -1
    with emulation.device(device, 1):
        want, got = attend(case, "union", scale=0.5), attend(case, "union", scale=0.5, ids=other)
    oracle.check_attention(*want, *expected(case, scale=0.5))
    same_bits([x[::2] for x in got], [x[::2] for x in want], "rows whose selection stayed")


@each_device
@pytest.mark.parametrize("first, second", problems.HALVES, ids=str)
def test_halves_of_a_tile_that_differ(emulation, device, first, second):
    for dtypes in RACED:
        case = problems.halves(first, second, *dtypes).case
        with emulation.device(device, 1), emulation.policy("random2+race"):
            oracle.check_attention(*attend(case, "union"), *expected(case))


@each_device
@pytest.mark.parametrize("scale", [-0.2, 0.0, 40.0])
def test_scales(emulation, device, scale):
    for dtypes in DTYPES:
        case = problems.steep(scale, *dtypes).case
        with emulation.device(device):
            got = attend(case, "union", scale=scale)
        oracle.check_attention(*got, *expected(case, scale=scale))


@each_device
def test_references_that_move(emulation, device):
    for dtypes in DTYPES:
        case = problems.growing(*dtypes).case
        with emulation.device(device, 1), emulation.policy("random5"):
            got = attend(case, "union", scale=1.0)
        oracle.check_attention(*got, *expected(case, scale=1.0))


@each_device
@pytest.mark.parametrize("page", [64, 128])
def test_page_numbers_outside_the_cache_contribute_nothing(emulation, device, page):
    for dtypes in DTYPES:
        case = problems.outside(page, (16, 1), *dtypes).case
        with emulation.device(device, 1), emulation.policy("random4"):
            got = attend(case, "union")
        oracle.check_attention(*got, *expected(case))


@each_device
def test_rows_of_no_ids_and_no_lse(emulation, device):
    for q, kv in DTYPES[:4]:
        case = cases.make([5, 3], [300, 9], heads=(16, 1), dtype=q, kv_dtype=kv)
        with emulation.device(device):
            out, lse = attend(case, "union", ids=case.ids[..., :0])
            same_bits(attend(case, "union", with_lse=False), attend(case, "union"), "out")
        assert (out == 0).all() and (lse == -torch.inf).all()


@each_device
@pytest.mark.parametrize("kv", [BF16, E4M3], ids=lambda d: str(d)[6:])
def test_each_request_takes_its_formulation(emulation, device, kv):
    case = prefill.two_kinds([12, 9, 10], [600, 2500, 900], (32, 2), kv)
    with emulation.device(device, 2):
        with emulation.policy("random1+race"):
            got = prefill.by_sequence(case)
        prefill.check_choice(got, case, "random1")


@each_device
@each_dtype
def test_one_request_chooses(emulation, device, dtypes):
    """Then its tiles may be given out in pairs (shared/union_tiles.py), if it takes this formulation."""
    q, kv = dtypes
    case = cases.make([40], [900], heads=(32, 2), dtype=q, kv_dtype=kv, topk=3, style="clean")
    for first, second in (([0, 1, 4], [0, 1, 4]), ([0, 1, 4], [2, 3, 5])):
        problems.spread(case, first, second)
        with emulation.device(device, 3):
            got = prefill.by_sequence(case)
        oracle.check_attention(*got, *expected(case))


@each_device
@pytest.mark.parametrize("page", [64, 128])
def test_what_is_not_finite_reaches_rows_that_see_it(emulation, device, page):
    for dtypes in DTYPES:
        problem, places = problems.blemished(page, (32, 2), *dtypes)
        policy = "random1+race" if dtypes in RACED else "late"
        with emulation.device(device, 1 if page == 64 else 3), emulation.policy(policy):
            problems.check_isolation(problem, places, lambda p: attend(p.case, "union"))


@each_device
def test_wrong_numbers_stay_inside(emulation, device):
    for seed in range(4):
        q, kv = DTYPES[seed]
        page, topk = (64, 128)[seed % 2], (8, 20)[seed % 2]
        case = cases.make([10, 10], [300, 700], heads=(16, 1), page=page, dtype=q, kv_dtype=kv, topk=topk, seed=seed)
        cases.spoil(cases.generator(seed), case.seqused_k, case.block_table, case.ids, case.cu_seqlens_q)
        with emulation.device(device, 2):
            attend(case, "union", causal=seed < 3, with_lse=bool(seed & 1))


@each_device
def test_every_block_was_executed(emulation, device):
    """The last test of this file."""
    emulation.check_coverage("prefill_union", reasons=prefill.OUT_OF_REACH, arch=device + "a")
