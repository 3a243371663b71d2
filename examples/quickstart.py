"""One decode step over a paged KV cache: one query token, 16 heads that share one KV head, four pages of 64 tokens.

    python examples/quickstart.py

With the published package, `m3_sparse` comes from one line:

    m3_sparse = kernels.get_kernel("m3-sparse/m3-sparse", version=1)
"""

from pathlib import Path

import torch
from kernels import get_local_kernel

# From a checkout: the variant that `make demo`, `make test` or `make build` left in build/.
BUILT = Path(__file__).resolve().parent.parent / "build" / "torch-cpu"
m3_sparse = get_local_kernel(BUILT, backend="cpu")

torch.manual_seed(0)
q = torch.randn(1, 16, 128, dtype=torch.bfloat16)
k_cache = torch.randn(4, 1, 64, 128, dtype=torch.bfloat16)
v_cache = torch.randn(4, 1, 64, 128, dtype=torch.bfloat16)
index_q = torch.randn(1, 1, 128, dtype=torch.bfloat16)
index_k_cache = torch.randn(4, 64, 128, dtype=torch.bfloat16)

# The request's pages in order, and how many of their tokens are filled: 200 tokens reach into the last page.
block_table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
lengths = {
    "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    "seqused_k": torch.tensor([200], dtype=torch.int32),
}

# Which 128-token blocks to attend to; here both of the two there are.
block_indices = m3_sparse.select_blocks(index_q, index_k_cache, block_table, topk=2, **lengths)
out, lse = m3_sparse.sparse_attention(q, k_cache, v_cache, block_indices, block_table, return_lse=True, **lengths)

print("blocks:", block_indices[0, 0].tolist())
print("output:", tuple(out.shape), out.dtype, " log-sum-exp of head 0:", round(lse[0, 0].item(), 4))

# The same from the definition: gather the pages, softmax over the 200 tokens.
keys = k_cache[block_table[0].long(), 0].reshape(256, 128)[:200].float()
values = v_cache[block_table[0].long(), 0].reshape(256, 128)[:200].float()
expected = torch.softmax(q[0].float() @ keys.T / 128**0.5, dim=-1) @ values
print("largest difference from dense attention:", round((out[0].float() - expected).abs().max().item(), 4))
assert torch.allclose(out[0].float(), expected, atol=2e-2)
