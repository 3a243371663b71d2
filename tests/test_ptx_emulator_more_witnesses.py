"""More of flash-attn-4's kernels in the PTX emulator, launched by the host code that CuTe DSL makes for them.

Compiling all but the combination takes minutes, so they wait for `pytest tests/test_ptx_emulator_more_witnesses.py
--witnesses`; what was compiled is kept in build/ptx_emulator.
"""

from pathlib import Path

import pytest
import torch
from ptx_emulator import upstream
from ptx_emulator.upstream_host import Witness
from ptx_emulator.upstream_kernels import ARCHS

CACHE = Path(__file__).resolve().parent.parent / "build" / "ptx_emulator"
POLICIES = ("eager+race", "late+race", "random1+race", "random2+race")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OUTPUTS = ("o", "lse")
pytestmark = pytest.mark.skipif(upstream.missing() is not None, reason=f"{upstream.missing()}")


def on_each(kind):
    return pytest.mark.parametrize("arch", ARCHS[kind])


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outputs(o_shape, lse_shape):
    return {"o": torch.full(o_shape, torch.nan, dtype=BF16), "lse": torch.full(lse_shape, torch.nan)}


def check(o, lse, q, k, v, keep, tolerance=3e-3):
    """Against float64; [rows, heads, 128], keep [rows, keys]."""
    q, k, v = (x.float().double() for x in (q, k, v))
    logits = (torch.einsum("qhd,khd->hqk", q, k) * 128**-0.5).masked_fill(~keep, -torch.inf)
    want = torch.einsum("hqk,khd->qhd", logits.softmax(-1).nan_to_num(0.0), v)
    assert (o.double() - want).norm() <= tolerance * want.norm()
    assert (lse.double() - logits.logsumexp(-1)).abs().max() <= 1e-4


def below_diagonal(rows, keys):
    return torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows


@on_each("combine")
def test_combination(arch):
    """cp.async. 13 * 3 rows: a last tile of seven; a split without keys."""
    witness = Witness("combine", arch, CACHE)
    parts = normal(5, 2, 13, 3, 128, dtype=torch.float32)
    part_lses = normal(5, 2, 3, 13, dtype=torch.float32, seed=1).mul(4).transpose(2, 3)
    part_lses[2, 0] = -torch.inf
    for policy in POLICIES:
        results = outputs((2, 13, 3, 128), (2, 3, 13))
        results["lse"] = results["lse"].transpose(1, 2)
        assert witness(policy, OUTPUTS, parts=parts, part_lses=part_lses, **results).reports == []
        lse = part_lses.double().logsumexp(0)
        want = (parts.double() * (part_lses.double() - lse).exp()[..., None]).sum(0)
        assert (results["o"].double() - want).norm() <= 3e-3 * want.norm()
        assert (results["lse"] - lse).abs().max() <= 1e-5


@pytest.mark.witnesses
@on_each("varlen")
def test_packed_queries_and_keys(arch):
    witness = Witness("varlen", arch, CACHE)
    q_lens, k_lens = torch.tensor([70, 9, 130]), torch.tensor([200, 9, 333])
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (q_lens, k_lens))
    q, k, v = normal(int(q_lens.sum()), 2, 128), *(normal(int(k_lens.sum()), 2, 128, seed=i) for i in (1, 2))
    for policy in POLICIES:
        results = outputs(q.shape, (2, len(q)))
        assert witness(policy, OUTPUTS, q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, scale=128**-0.5, **results).reports == []
        for b in range(3):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            seen = below_diagonal(int(q_lens[b]), int(k_lens[b]))
            check(results["o"][rows], results["lse"][:, rows], q[rows], k[keys], v[keys], seen)


@pytest.mark.witnesses
@on_each("block_sparse")
def test_block_sparse(arch):
    """Blocks on the diagonal are masked, some of those below it are left out."""
    witness, size = Witness("block_sparse", arch, CACHE), 512
    rows = 128 if arch == "sm_90a" else 256
    tiles, blocks = size // rows, size // 128
    counts = {name: torch.zeros(1, 1, tiles, dtype=torch.int32) for name in ("mask_count", "full_count")}
    indices = {name: torch.zeros(1, 1, tiles, blocks, dtype=torch.int32) for name in ("mask_index", "full_index")}
    seen = torch.zeros(size, size, dtype=torch.bool)
    for i in range(tiles):
        for j in range(min(blocks, (i + 1) * rows // 128)):
            kind = "mask" if (j + 1) * 128 > i * rows else "full"
            if kind == "full" and (i + j) % 3 == 0:
                continue
            place = (slice(i * rows, (i + 1) * rows), slice(j * 128, (j + 1) * 128))
            seen[place] = below_diagonal(size, size)[place] if kind == "mask" else True
            indices[f"{kind}_index"][0, 0, i, counts[f"{kind}_count"][0, 0, i]] = j
            counts[f"{kind}_count"][0, 0, i] += 1
    q, k, v = (normal(1, size, 1, 128, seed=i) for i in range(3))
    for policy in POLICIES:
        results = outputs(q.shape, (1, 1, size))
        given = {**results, **counts, **indices}
        assert witness(policy, OUTPUTS, q=q, k=k, v=v, scale=128**-0.5, **given).reports == []
        check(results["o"][0], results["lse"][0], q[0], k[0], v[0], seen)


@pytest.mark.witnesses
@on_each("fp8")
@pytest.mark.parametrize("size", [0.0, 1.0])
def test_fp8(arch, size):
    """kind::f8f6f4, with both operands in shared memory and with one in tensor memory. The kernel rounds its weights to
    e4m3 too; where the queries are 0 all weights are 1."""
    witness = Witness("fp8", arch, CACHE)
    q, k, v = (
        normal(1, n, 1, 128, seed=i).mul(size if i == 0 else 1.0).to(E4M3) for i, n in enumerate((256, 300, 300))
    )
    for policy in POLICIES:
        results = outputs(q.shape, (1, 1, 256))
        assert witness(policy, OUTPUTS, q=q, k=k, v=v, scale=128**-0.5, **results).reports == []
        tolerance = 3e-2 if size else 3e-3
        check(results["o"][0], results["lse"][0], q[0], k[0], v[0], below_diagonal(256, 300), tolerance)
