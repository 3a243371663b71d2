"""The dense attention programs of SM90 and SM100 in the PTX emulator, through the public functions and the launcher, against
float64. SM103's are SM100's (test_emulated_architectures.py).

Needs `--backend=emulated`. The cases are those of the CPU tests: hostile tables and lengths, poison past every end.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import torch

import m3_sparse
from m3_sparse import ops

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True, params=["sm_90", "sm_100"])
def device(request, emulation):
    with emulation.device(request.param):
        yield request.param


def attend(case, splits=1, causal=True, scale=128**-0.5, with_lse=True):
    """(out, lse) of the operator with the number of splits given."""
    (q, k_cache, v_cache, table), options = case.dense()
    out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32) if with_lse else None
    ops.BUILT["dense_attention", "aot"](
        out, lse, q, k_cache, v_cache, table, options["cu_seqlens_q"], options["seqused_k"], scale, causal,
        options["k_scale"], options["v_scale"], splits,
    )  # fmt: skip
    return out, lse


def check(case, splits=1, causal=True, scale=128**-0.5):
    args, options = case.dense()
    want = oracle.dense_attention(*args, **options, causal=causal, softmax_scale=scale)
    oracle.check_attention(*attend(case, splits, causal, scale), *want)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", problems.DENSE)
def test_against_float64(emulation, name, dtype):
    case, causal = problems.dense(name, dtype)
    for splits in (1, 3):
        with emulation.policy("eager+race"):
            check(case, splits, causal)


@pytest.mark.parametrize("policy", ["late", "late:tma", "late:mma", "random1+race", "random2+race"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("wrong_page", [False, True], ids=["interior", "masked"])  # of the loop over key blocks
@pytest.mark.parametrize("tokens", [2, 20])
def test_completion_and_schedule_change_no_bit(emulation, device, policy, dtype, tokens, wrong_page):
    policy = policy.replace("mma", "wgmma" if device == "sm_90" else "tcgen05")
    case = cases.make([tokens, 1], [1000, 77], heads=(8, 1), dtype=dtype, page=64)
    if wrong_page:
        case.block_table[:, 0] = -1
    for splits in (1, 2):
        want = attend(case, splits)
        with emulation.policy(policy):
            got = attend(case, splits)
        for a, b in zip(got, want):
            oracle.check_bitwise(a, b, policy)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scale_of_any_sign(emulation, scale, dtype):
    for q_lens in ([2], [20]):
        with emulation.policy("eager+race"):
            check(cases.make(q_lens, [200], heads=(8, 1), dtype=dtype), 1, True, scale)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
def test_references_that_move(emulation, tokens, dtype, falling):
    """What is rescaled still counts."""
    check(problems.apart(tokens, dtype, falling))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 150])
def test_many_requests_and_pages(emulation, tokens, dtype):
    """More requests than a round of the search looks at, more page numbers than a warp holds."""
    check(
        cases.make([tokens, 0] * 70, [5, 3] * 69 + [33 * 64 + 1, 0], heads=(16 // tokens or 1, 1), dtype=dtype, page=64)
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_more_pages_than_a_warp_holds(emulation, dtype):
    check(cases.make([20], [33 * 64 + 1], heads=(8, 1), dtype=dtype, page=64))


@pytest.mark.parametrize("tokens", [1, 9])
def test_rows_past_a_full_round_of_requests(emulation, tokens):
    """The rows behind as many requests as a round of the search looks at are empty."""
    case = cases.make([0] * 126 + [tokens, 1], [0] * 126 + [30, 9], heads=(16, 1), dtype=BF16, pad_rows=tokens + 2)
    check(case)


def test_through_the_public_function(emulation, device):
    case = cases.make([1, 25], [130, 300], heads=(32, 2), dtype=BF16)
    args, options = case.dense()
    with m3_sparse.backend("aot"):
        out, lse = cases.call_dense(m3_sparse.dense_attention, case)
    oracle.check_attention(out, lse, *oracle.dense_attention(*args, **options))
    tile = {"sm_90": 8, "sm_100": 16}[device]  # tokens
    assert emulation.driver.results[-1].ctas == (26 + 3 * (tile - 1)) // tile * 2


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("page", [64, 128])
def test_page_numbers_outside_the_cache_contribute_nothing(emulation, page, dtype):
    """The tokens of a wrong page are no tokens: the same rows over caches that lack them."""
    for q_lens in ([2], [20]):
        case = cases.make(q_lens, [500], heads=(8, 1), dtype=dtype, page=page, style="clean", seed=page)
        keys, values = (
            cache[case.block_table[0, : -(-500 // page)].long(), 0].double() for cache in (case.k_cache, case.v_cache)
        )
        bad = [1, 3] if page == 128 else [0, 3, 6]
        case.block_table[0, bad] = torch.tensor([-1, case.k_cache.shape[0], 1 << 30][: len(bad)], dtype=torch.int32)
        position = torch.arange(500)
        position = position[~torch.isin(position // page, torch.tensor(bad))]
        keys, values = (x.flatten(0, 1)[position] for x in (keys, values))
        logits = torch.einsum("tgd,kd->tgk", case.q.double(), keys) * 128**-0.5
        hidden = position > 500 - q_lens[0] + torch.arange(q_lens[0])[:, None]
        logits.masked_fill_(hidden[:, None], -torch.inf)
        want = torch.einsum("tgk,kd->tgd", logits.softmax(-1), values), logits.logsumexp(-1)
        for splits in (1, 3):
            with emulation.policy("eager+race"):
                oracle.check_attention(*attend(case, splits), *want)


@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_no_split_hides_a_nan(emulation, tokens, where):
    """The part of a row that holds a NaN had an LSE of -inf, so that the merge of the splits left it out: zeros, or the
    attention over the other parts."""
    case = cases.make([tokens, 2], [1300, 77], heads=(8, 1), dtype=BF16, style="clean", seed=tokens)
    if where == "query":
        case.q[0, 3] = float("nan")
        spoiled = [(0, slice(3, 4))]
    else:
        case.k_cache[case.block_table[0, 1], 0, 5, 0] = float("nan")  # token 133 of request 0
        spoiled = [(slice(0, tokens), slice(None))]
    args, options = case.dense()
    want, want_lse = oracle.dense_attention(*args, **options)
    for splits in (0, 1, 2, 4):
        out, lse = attend(case, splits)
        for row, head in spoiled:
            assert out[row, head].isnan().all() and lse[row, head].isnan().all()
            assert want[row, head].isnan().all()
        oracle.check_attention(out.nan_to_num(7), lse.nan_to_num(7), want.nan_to_num(7), want_lse.nan_to_num(7), BF16)


@pytest.mark.parametrize("tokens", [2, 20])
def test_wrong_numbers_stay_inside(emulation, tokens):
    """Lengths, offsets and pages are data: whatever they hold, only the tensors given are touched."""
    for seed in range(6):
        case = cases.make([tokens, tokens], [300, 400], heads=(8, 1), dtype=BF16, page=(64, 128)[seed % 2], seed=seed)
        cases.spoil(cases.generator(seed), case.cu_seqlens_q, case.seqused_k, case.block_table)
        attend(case, 1 + seed % 3, with_lse=bool(seed & 1))


def test_every_block_was_executed(emulation, device):
    """The last test of this file."""
    emulation.check_coverage("dense", arch=f"{device}a")
