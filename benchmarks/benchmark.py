"""For `kernels benchmark m3-sparse/m3-sparse --version 1`: one decode step's attention and a merge of partial results.

The references are written here from the definitions, in plain torch.
"""

import torch
from kernels.benchmark import Benchmark


class MergeStates(Benchmark):
    """Eight partial results of 256 tokens and 64 heads."""

    seed = 0

    def setup(self) -> None:
        self.outs = torch.randn(8, 256, 64, 128, device=self.device)
        self.lses = torch.randn(8, 256, 64, device=self.device)

    def benchmark_merge(self) -> None:
        self.out, _ = self.kernel.merge_states(self.outs, self.lses)

    def verify_merge(self) -> torch.Tensor:
        weights = torch.softmax(self.lses, dim=0)
        return (weights[..., None] * self.outs).sum(0)


class SparseAttention(Benchmark):
    """A decode step of 16 requests at 4,096 tokens: 64 query heads on 4 KV heads, 16 blocks of 128 each."""

    seed = 0
    batch, length, page, heads, kv_heads, topk = 16, 4096, 128, 64, 4, 16

    def setup(self) -> None:
        pages = self.batch * self.length // self.page
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.q = torch.randn(self.batch, self.heads, 128, **options)
        self.k = torch.randn(pages, self.kv_heads, self.page, 128, **options)
        self.v = torch.randn(pages, self.kv_heads, self.page, 128, **options)
        self.table = torch.randperm(pages, device=self.device).view(self.batch, -1).int()
        scores = torch.rand(self.batch, self.kv_heads, self.length // 128, device=self.device)
        self.blocks = scores.topk(self.topk).indices.int()
        self.lengths = {
            "cu_seqlens_q": torch.arange(self.batch + 1, device=self.device, dtype=torch.int32),
            "seqused_k": torch.full((self.batch,), self.length, device=self.device, dtype=torch.int32),
        }

    def benchmark_decode(self) -> None:
        self.out = self.kernel.sparse_attention(self.q, self.k, self.v, self.blocks, self.table, **self.lengths)

    def verify_decode(self) -> torch.Tensor:
        group = self.heads // self.kv_heads
        out = torch.empty_like(self.q, dtype=torch.float32)
        for row in range(self.batch):
            for head in range(self.kv_heads):
                pages = self.table[row, self.blocks[row, head].long()].long()
                keys = self.k[pages, head].reshape(-1, 128).float()
                values = self.v[pages, head].reshape(-1, 128).float()
                q = self.q[row, head * group : (head + 1) * group].float()
                out[row, head * group : (head + 1) * group] = torch.softmax(q @ keys.T / 128**0.5, dim=-1) @ values
        return out.to(self.q.dtype)
