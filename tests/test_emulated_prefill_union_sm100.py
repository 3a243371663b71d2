"""Prefill by union tiles on SM100 and SM103 in the PTX emulator, through the public function and the launcher, against
float64: sm100/prefill_union.py behind neutral/union.py. No such chip has run it.

Needs `--backend=emulated`. Problems are those of test_emulated_prefill.py with 16 query heads a KV head.
"""

import cases
import oracle
import pytest
import test_emulated_prefill as prefill
import torch
from test_emulated_prefill import BF16, DTYPES, E4M3, FP16, attend, expected, same_bits

DEVICES = ["sm_100", "sm_103"]
RACED = [(BF16, BF16), (FP16, E4M3)]
POLICIES = ["late", "late:tma", "late+race", "random1+race", "random2+race", "random3+race"]
PROBLEMS = [name for name, (_, heads, *_) in prefill.PROBLEMS.items() if heads[0] == 16 * heads[1]]

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))


@each_dtype
@pytest.mark.parametrize("name", PROBLEMS)
def test_against_float64(emulation, name, dtypes):
    """Each problem in all pairs of dtypes, half of them on each device, which has one or two multiprocessors."""
    page, heads, layout, causal, topk, scales, q_lens, kv_lens = prefill.PROBLEMS[name]
    (q, kv), number = dtypes, DTYPES.index(dtypes) + PROBLEMS.index(name)
    case = cases.make(
        q_lens, kv_lens, heads=heads, page=page, dtype=q, kv_dtype=kv, layout=layout, topk=topk, causal=causal,
        scales=scales if kv.itemsize == 1 else None, pad_rows=len(name) % 2 * 3, seed=len(name),
    )  # fmt: skip
    policy = "eager+race" if dtypes in RACED else f"random{number}"
    with emulation.device(DEVICES[number % 2], 1 + number // 2 % 2), emulation.policy(policy):
        got = attend(case, "union", causal)
    oracle.check_attention(*got, *expected(case, causal))


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
@pytest.mark.parametrize(
    "first, second", [([0, 12], range(1, 9)), (range(2, 10), [0, 1, 11]), ([0, 2, 5], [])], ids=str
)
def test_halves_of_a_tile_that_differ(emulation, device, first, second):
    for q, kv in RACED:
        case = prefill.spread(cases.make([19], [1560], heads=(16, 1), dtype=q, kv_dtype=kv), list(first), list(second))
        with emulation.device(device, 1), emulation.policy("random2+race"):
            oracle.check_attention(*attend(case, "union"), *expected(case))


@each_device
@pytest.mark.parametrize("scale", [-0.2, 0.0, 40.0])
def test_scales(emulation, device, scale):
    """Of any sign; and logits that grow from block to block, so that rows move their references and O is rescaled."""
    for q, kv in DTYPES:
        case = cases.make([11], [900], heads=(16, 1), dtype=q, kv_dtype=kv, topk=6)
        with emulation.device(device):
            got = attend(case, "union", scale=scale)
        oracle.check_attention(*got, *expected(case, scale=scale))


@each_device
def test_references_that_move(emulation, device):
    """Keys grow by the block: every block moves every row's reference."""
    for q, kv in DTYPES:
        case = cases.make([24], [1200], heads=(16, 1), dtype=q, kv_dtype=kv, topk=8, style="clean", seed=6)
        case.q.fill_(0.25)
        flat = case.k_cache
        for i, page in enumerate(case.block_table[0, :10].tolist()):
            flat[page] = (torch.ones(flat[page].shape) * (0.5 + 0.75 * i)).to(kv)
        with emulation.device(device, 1), emulation.policy("random5"):
            got = attend(case, "union", scale=1.0)
        oracle.check_attention(*got, *expected(case, scale=1.0))


@each_device
@pytest.mark.parametrize("page", [64, 128])
def test_page_numbers_outside_the_cache_contribute_nothing(emulation, device, page):
    for q, kv in DTYPES:
        case = cases.make([14], [830], heads=(16, 1), page=page, dtype=q, kv_dtype=kv, topk=8, style="clean", seed=page)
        bad = [1, 3, 6] if page == 128 else [0, 3, 6, 7, 13]
        wrong = [-1, case.k_cache.shape[0], 1 << 30, -(2**31), -5][: len(bad)]
        case.block_table[0, bad] = torch.tensor(wrong, dtype=torch.int32)
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
    """Then its tiles may be given out in pairs (shared/union_loaders.py), if it takes this formulation."""
    q, kv = dtypes
    case = cases.make([40], [900], heads=(32, 2), dtype=q, kv_dtype=kv, topk=3, style="clean")
    for first, second in (([0, 1, 4], [0, 1, 4]), ([0, 1, 4], [2, 3, 5])):
        prefill.spread(case, first, second)
        with emulation.device(device, 3):
            got = prefill.by_sequence(case)
        oracle.check_attention(*got, *expected(case))


@each_device
def test_wrong_numbers_stay_inside(emulation, device):
    wild = torch.tensor([-(2**31), -1, 0, 5, 2**30, 2**31 - 1], dtype=torch.int32)
    for seed in range(4):
        q, kv = DTYPES[seed]
        page, topk = (64, 128)[seed % 2], (8, 20)[seed % 2]
        case = cases.make([10, 10], [300, 700], heads=(16, 1), page=page, dtype=q, kv_dtype=kv, topk=topk, seed=seed)
        pick = torch.Generator().manual_seed(seed)
        for tensor in (case.seqused_k, case.block_table, case.ids, case.cu_seqlens_q):
            at = torch.rand(tensor.shape, generator=pick) < 0.4
            tensor[at] = wild[torch.randint(0, len(wild), tensor.shape, generator=pick)][at]
        with emulation.device(device, 2):
            attend(case, "union", causal=seed < 3, with_lse=bool(seed & 1))


@each_device
def test_every_block_was_executed(emulation, device):
    """The last test of this file."""
    emulation.check_coverage("prefill_union", reasons=prefill.OUT_OF_REACH, arch=device + "a")
