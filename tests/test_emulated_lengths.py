"""Inconsistent lengths in the PTX emulator: offsets that descend, go negative or pass the tokens, lengths of any size.

Needs `--backend=emulated`. What such a batch's rows hold is open; every program must end, inside its tensors. The emulator
fills workspaces with bits of -1, raises on an access outside the tensors and on warps that wait for nobody.
"""

import cases
import pytest
import torch

from m3_sparse import ops

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
POLICIES = ("eager", "late")
DRAWS = 20
FORMULATIONS = {"union": 1, "kv_stationary": 2, "decode": 3, "by request": 4}
WILD = (INT_MIN, INT_MIN + 7, -129, -1, 0, 1, 5, 30, 300, 2**30, INT_MAX - 7, INT_MAX)
# Offsets of 50 tokens and lengths that once made loader and consumers wait for each other, and their like.
KNOWN = [
    ([0, 20, 5], [300, 700]), ([20, 0, 50], [300, 700]), ([0, 60, 50], [INT_MAX, 700]), ([INT_MAX, 20, INT_MIN], [300, -1]),
    ([-5, 20, 50], [300, INT_MIN]), ([50, 50, 50], [300, 700]), ([0, INT_MAX, 0], [300, 700]), ([30, 10, 40], [1, 2**30]),
]  # fmt: skip


def draws(seed, tokens=50):
    """Pairs (cu_seqlens, seqused) for two requests: the known ones, then random ones, most of them inconsistent."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        return int(values[int(torch.randint(0, len(values), (), generator=generator))])

    yield from KNOWN
    for _ in range(DRAWS):
        near = list(range(-3, tokens + 4, 7))
        yield [pick(near + list(WILD)) for _ in range(3)], [pick((*WILD, 129, 700)) for _ in range(2)]


def spoiled(policy, dtypes, **options):
    """Cases of two requests with 20 and 30 tokens whose lengths, and some of whose ids and pages, are wrong."""
    for n, (offsets, used) in enumerate(draws(POLICIES.index(policy))):
        case = cases.make([20, 30], [300, 700], dtype=dtypes[0], kv_dtype=dtypes[1], seed=n, **options)
        case.cu_seqlens_q.copy_(torch.tensor(offsets))
        case.seqused_k.copy_(torch.tensor(used))
        generator = torch.Generator().manual_seed(n)
        for tensor in (case.ids, case.block_table, case.index_table):
            wild = torch.tensor(WILD, dtype=torch.int32)[torch.randint(0, len(WILD), tensor.shape, generator=generator)]
            at = torch.rand(tensor.shape, generator=generator) < 0.2 * (n % 3)
            tensor[at] = wild[at]
        yield case


def outputs(q):
    return cases.nan_like(q.shape, q.dtype), cases.nan_like(q.shape[:2], torch.float32)


def lengths_of(options):
    return options["cu_seqlens_q"], options["seqused_k"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heads", [(8, 1), (16, 1)], ids=["group8", "group16"])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, E4M3)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_sparse_attention(emulation, formulation, dtypes, heads, policy):
    if heads[0] != 16 and formulation in ("union", "by request"):
        pytest.skip("union tiles are of 16 query heads")
    with emulation.policy(policy):
        for case in spoiled(policy, dtypes, heads=heads):
            (q, *rest), options = case.sparse()
            ops.BUILT["sparse_attention", "aot"](
                *outputs(q), q, *rest, *lengths_of(options), 128**-0.5, True, None, None, 0, True,
                FORMULATIONS[formulation],
            )  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", [2, 3], ids=["stored", "fused"])
def test_select_blocks(emulation, way, policy):
    with emulation.policy(policy):
        for case in spoiled(policy, (BF16, BF16), heads=(4, 4)):
            tensors, lengths = case.index()
            out = torch.full((*tensors[0].shape[:2], 16), -77, dtype=torch.int32)
            ops.BUILT["select_blocks", "aot"](out, None, *tensors, *lengths.values(), 1, 0, way)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("splits", [1, 3])
def test_dense(emulation, splits, policy):
    with emulation.policy(policy):
        for case in spoiled(policy, (BF16, BF16), heads=(8, 1)):
            (q, *rest), options = case.dense()
            ops.BUILT["dense_attention", "aot"](
                *outputs(q), q, *rest, *lengths_of(options), 128**-0.5, True, None, None, splits
            )
