"""flash-attn-4's own SM90 and SM100 kernels in the PTX emulator reproduce float64 attention, whatever the schedule."""

from pathlib import Path

import pytest
import torch
from ptx_emulator import upstream
from ptx_emulator.launch import launch
from ptx_emulator.tensor_map import encode, pack

CACHE = Path(__file__).resolve().parent.parent / "build" / "ptx_emulator"
POLICIES = ("eager+race", "late+race", "random1+race", "random2+race")
pytestmark = pytest.mark.skipif(upstream.missing() is not None, reason=f"{upstream.missing()}")


def attention(q, k, v):
    """float64, causal to the bottom right; [S, H, 128]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * 128**-0.5
    seen = torch.arange(len(k))[None] <= torch.arange(len(q))[:, None] + len(k) - len(q)
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), torch.logsumexp(logits, -1)


def judge(out, lse, want, want_lse):
    assert (out.double() - want).norm() <= 3e-3 * want.norm()  # the rounding of bf16 alone is 1.7e-3
    assert (lse.double() - want_lse).abs().max() <= 1e-4  # SM100's kernel computes exp2 by a polynomial


@pytest.mark.parametrize("arch", upstream.ARCHS)
def test_dense(arch):
    text = upstream.ptx("dense", arch, CACHE)
    for policy in POLICIES:
        for batch, rows, keys, heads in ((1, 128, 128, 1), (1, 256, 300, 2), (2, 200, 333, 1)):
            generator = torch.Generator().manual_seed(rows)
            q, k, v = (torch.randn(batch, n, heads, 128, generator=generator).bfloat16() for n in (rows, keys, keys))
            out, lse = torch.full_like(q, torch.nan), torch.full((batch, heads, rows), torch.nan)
            result = upstream.launch_dense(launch, encode, text, arch, q, k, v, out, lse, policy)
            assert result.reports == []
            for b in range(batch):
                judge(out[b], lse[b], *attention(q[b], k[b], v[b]))


@pytest.mark.parametrize("arch", upstream.ARCHS)
def test_paged(arch):
    text = upstream.ptx("paged", arch, CACHE)
    for policy in POLICIES:
        for q_lens, kv_lens, heads in (([40, 9], [40, 200], 16), ([1, 20], [300, 33], 32)):
            generator = torch.Generator().manual_seed(heads)
            pages = [-(-n // 128) for n in kv_lens]
            q = torch.randn(sum(q_lens), heads, 128, generator=generator).bfloat16()
            k, v = (
                torch.randn(sum(pages) + 2, 128, heads // 16, 128, generator=generator).bfloat16() for _ in range(2)
            )
            order = torch.randperm(len(k), generator=generator).int()
            table = torch.full((2, max(pages) + 1), 10**6, dtype=torch.int32)
            table[0, : pages[0]], table[1, : pages[1]] = order[: pages[0]], order[pages[0] : sum(pages)]
            offsets = torch.tensor([0, q_lens[0], sum(q_lens)], dtype=torch.int32)
            used = torch.tensor(kv_lens, dtype=torch.int32)
            keys = [k[table[b, : pages[b]].long()].flatten(0, 1)[: kv_lens[b]].clone() for b in range(2)]
            values = [v[table[b, : pages[b]].long()].flatten(0, 1)[: kv_lens[b]].clone() for b in range(2)]
            for b in range(2):  # what lies behind a request's end must not matter
                if kv_lens[b] % 128:
                    k[table[b, pages[b] - 1], kv_lens[b] % 128 :] = 1e30
                    v[table[b, pages[b] - 1], kv_lens[b] % 128 :] = 2.0
            out, lse = torch.full_like(q, torch.nan), torch.full((heads, len(q)), torch.nan)
            tensors = (q, k, v, out, lse, offsets, used, table)
            result = upstream.launch_paged(launch, pack, text, arch, *tensors, policy)
            assert result.reports == []
            for b in range(2):
                rows = slice(int(offsets[b]), int(offsets[b + 1]))
                judge(out[rows], lse[:, rows], *attention(q[rows], keys[b], values[b]))
