"""The decode attention programs in the PTX emulator, through the public functions and the launcher, against float64.

Needs `--backend=emulated`. The cases are those of the CPU tests: hostile ids, tables and lengths, poisoned pages.
"""

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import ops

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3), (BF16, E5M2), (FP16, E5M2)]
SPLITS = (1, 2, 4, 16)  # CTAs a row


def attend(case, splits, causal=True, with_lse=True, scale=128**-0.5):
    """(out, lse) of the operator with the number of CTAs a row given."""
    (q, k_cache, v_cache, ids, table), options = case.sparse()
    out, lse = cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32) if with_lse else None
    ops.BUILT["sparse_attention", "aot"](
        out, lse, q, k_cache, v_cache, ids, table, options["cu_seqlens_q"], options["seqused_k"], scale, causal,
        options["k_scale"], options["v_scale"], splits,
    )  # fmt: skip
    return out, lse


def check(case, splits, causal=True):
    out, lse = attend(case, splits, causal)
    args, options = case.sparse()
    want, want_lse = oracle.sparse_attention(*args, **options, causal=causal)
    oracle.check_attention(out, lse, want, want_lse)
    return out, lse


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_against_float64(emulation, dtypes, splits):
    q, kv = dtypes
    for seed, (page, heads, layout, causal, topk) in enumerate([
        (128, (32, 2), "hnd", True, 16), (64, (8, 2), "packed", False, 16), (128, (3, 1), "dense", True, 5),
        (64, (16, 1), "nhd", True, 1),
    ]):  # fmt: skip
        case = cases.make(
            [1, 3], [130 + 300 * seed, 17], heads=heads, page=page, dtype=q, kv_dtype=kv, layout=layout, topk=topk,
            causal=causal, scales=[None, "scalar", "head", None][seed], pad_rows=seed % 2, seed=seed,
        )  # fmt: skip
        with emulation.policy("eager+race"):
            check(case, splits, causal)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=lambda d: str(d[1])[6:]
)
def test_more_than_16_blocks_a_row(emulation, dtypes, splits):
    q, kv = dtypes
    case = cases.make([1, 1], [5000, 4200], heads=(4, 1), dtype=q, kv_dtype=kv, topk=32, style="clean", seed=3)
    case.ids[0, 0] = torch.arange(32, dtype=torch.int32)
    check(case, splits)


@pytest.mark.parametrize("policy", ["late", "late:cp.async", "late:st.async", "random1+race", "random2+race"])
@pytest.mark.parametrize("splits", SPLITS)
def test_completion_and_schedule_change_no_bit(emulation, policy, splits):
    for kv in (BF16, E4M3):
        case = cases.make([2, 1], [900, 2100], heads=(16, 1), dtype=BF16, kv_dtype=kv, seed=splits)
        want = attend(case, splits)
        with emulation.policy(policy):
            got = attend(case, splits)
        for a, b in zip(got, want):
            oracle.check_bitwise(a, b, policy)


def test_through_the_public_function(emulation):
    case = cases.make([1, 2], [300, 700], heads=(32, 2), dtype=BF16, kv_dtype=E4M3, scales="head")
    args, options = case.sparse()
    with m3_sparse.backend("aot"):
        out, lse = cases.call_sparse(m3_sparse.sparse_attention, case)
    oracle.check_attention(out, lse, *oracle.sparse_attention(*args, **options))
    assert emulation.driver.results[-1].ctas == 3 * 2 * 16


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=lambda d: str(d[1])[6:]
)
def test_logits_that_grow(emulation, dtypes, splits):
    """Later keys outweigh all that came before: the sums so far are rescaled."""
    q, kv = dtypes
    case = cases.make([1], [2049], heads=(16, 1), dtype=q, kv_dtype=kv, style="clean", seed=4)
    case.ids[0, 0] = torch.arange(16, dtype=torch.int32)
    case.q.mul_(8)
    check(case, splits)


@pytest.mark.parametrize("step", [3, -3])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, E5M2)], ids=lambda d: str(d[1])[6:])
def test_logits_far_apart(emulation, dtypes, splits, step):
    """From block to block by more than fp32 has exponents for: what is smaller vanishes, whichever comes first."""
    q, kv = dtypes
    case = cases.make([2], [900], heads=(16, 1), dtype=q, kv_dtype=kv, topk=8, style="clean", seed=6)
    case.q.fill_(0.25)
    case.ids[:] = torch.arange(8, dtype=torch.int32)
    for i, page in enumerate(case.block_table[0, :8].tolist()):
        case.k_cache[page] = torch.full(case.k_cache[page].shape, float(step * i)).to(kv)
    args, options = case.sparse()
    want = oracle.sparse_attention(*args, **options, softmax_scale=1.0)
    oracle.check_attention(*attend(case, splits, scale=1.0), *want)


@pytest.mark.parametrize("splits", SPLITS)
def test_a_block_named_twice(emulation, splits):
    """In rows that ascend but for it, and in others."""
    case = cases.make([4], [700], heads=(16, 1), dtype=BF16, topk=5, style="clean", seed=8)
    rows = [[0, 1, 1, 3, 4], [2, 2, 2, 2, 2], [0, 3, 3, -1, -1], [4, 0, 4, 1, 0]]
    case.ids[:, 0] = torch.tensor(rows, dtype=torch.int32)
    check(case, splits)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)], ids=lambda d: str(d[1])[6:]
)
def test_scale_of_any_sign(emulation, dtypes, splits, scale):
    q, kv = dtypes
    case = cases.make([2], [300], heads=(16, 1), dtype=q, kv_dtype=kv, topk=3)
    args, options = case.sparse()
    want = oracle.sparse_attention(*args, **options, softmax_scale=scale)
    oracle.check_attention(*attend(case, splits, scale=scale), *want)


@pytest.mark.parametrize("splits", SPLITS)
def test_caches_that_no_tensor_map_holds(emulation, splits):
    case = cases.make([1, 2], [700, 130], heads=(16, 1), dtype=BF16, style="clean", poison="zero", seed=6)
    case.k_cache = case.k_cache[:1].expand(case.k_cache.shape)
    check(case, splits)


@pytest.mark.parametrize("splits", SPLITS)
def test_wrong_numbers_stay_inside(emulation, splits):
    """Lengths, offsets, pages and ids are data: whatever they hold, only the tensors given are touched."""
    for seed in range(4):
        case = cases.make([2, 2], [300, 700], heads=(8, 1), dtype=BF16, seed=seed)
        cases.spoil(cases.generator(seed), case.cu_seqlens_q, case.seqused_k, case.block_table, case.ids)
        out, lse = attend(case, splits, with_lse=bool(seed % 2))
        assert seed % 2 == 0 or not lse.isnan().any()


def test_every_block_was_executed(emulation):
    """The last test of this file."""
    emulation.check_coverage("decode")
