"""The merge programs in the PTX emulator, through the public function and the launcher, against float64.

Needs `--backend=emulated`.
"""

import oracle
import pytest
import torch

import m3_sparse

DTYPES = [
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{str(d[0])[6:]}-{str(d[1])[6:]}")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (5, 7, 3), (17, 2, 5), (40, 3, 1)])
def test_against_float64(emulation, dtypes, shape):
    generator = torch.Generator().manual_seed(sum(shape))
    outs = torch.randn(*shape, 128, generator=generator).to(dtypes[0])
    lses = torch.randn(*shape, generator=generator) * 8
    lses[torch.rand(shape, generator=generator) < 0.3] = float("-inf")
    lses[:, shape[1] // 2, shape[2] // 2] = float("-inf")
    outs[lses == float("-inf")] = float("nan")
    with emulation.policy("eager+race"), m3_sparse.backend("aot"):
        out, lse = m3_sparse.merge_states(outs, lses, out_dtype=dtypes[1])
    oracle.check_attention(out, lse, *oracle.merge_states(outs, lses))
    with emulation.policy("random5+race"), m3_sparse.backend("aot"):
        again, _ = m3_sparse.merge_states(outs, lses, out_dtype=dtypes[1])
    oracle.check_bitwise(again, out, "random5")


def test_nan_and_infinite_lses_are_not_hidden(emulation):
    outs, lses = torch.randn(3, 4, 1, 128), torch.zeros(3, 4, 1)
    lses[1, 0], lses[1, 1] = float("nan"), float("inf")
    with m3_sparse.backend("aot"):
        out, lse = m3_sparse.merge_states(outs, lses)
    want, want_lse = oracle.merge_states(outs, lses)
    assert torch.equal(out.isnan().any(-1), want.isnan().any(-1)) and torch.equal(lse.isnan(), want_lse.isnan())


@pytest.mark.parametrize("states", [2, 5, 9])
def test_lses_far_apart(emulation, states):
    """Without the largest of all LSEs, of whichever state, the weights leave fp32."""
    outs = torch.randn(states, states, 1, 128, generator=torch.Generator().manual_seed(states))
    lses = torch.full((states, states, 1), -500.0)
    lses[range(states), range(states)] = 500.0
    lses[0, -1] = 499.0
    with m3_sparse.backend("aot"):
        got = m3_sparse.merge_states(outs, lses)
    oracle.check_attention(*got, *oracle.merge_states(outs, lses))


@pytest.mark.parametrize("far", ["states", "tokens"])
def test_rows_far_apart(emulation, far):
    """The third is more than 2^31 bytes behind the first; what lies between is never touched."""
    strides = {"states": (2**28 + 512, 256), "tokens": (256, 2**28 + 512)}[far]
    outs = torch.empty(2 * 2**28 + 4096).as_strided((3, 3, 2, 128), (*strides, 128, 1))
    generator = torch.Generator().manual_seed(1)
    outs.copy_(torch.randn(outs.shape, generator=generator))
    lses = torch.randn(3, 3, 2, generator=generator)
    with m3_sparse.backend("aot"):
        got = m3_sparse.merge_states(outs, lses)
    oracle.check_attention(*got, *oracle.merge_states(outs, lses))


def test_every_block_was_executed(emulation):
    """The last test of this file."""
    emulation.check_coverage("combine")
