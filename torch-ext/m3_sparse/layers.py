"""Pure layers for `kernels.kernelize`: no state, only `forward`, which calls the public functions."""

from typing import Any, Optional

import torch
from torch import nn

from .attention import dense_attention, sparse_attention
from .selection import select_blocks


class SparseAttention(nn.Module):
    """Select 16 blocks per row with the indexer's queries and keys, then attend to them; arguments as in
    `select_blocks` and `sparse_attention`.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        index_q: torch.Tensor,
        index_k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        softmax_scale: Optional[float] = None,
    ) -> torch.Tensor:
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
        ids: torch.Tensor = select_blocks(index_q, index_k_cache, block_table, **lengths)  # type: ignore[assignment]
        return sparse_attention(  # type: ignore[return-value]
            q, k_cache, v_cache, ids, block_table, softmax_scale=softmax_scale, **lengths
        )


class DenseAttention(nn.Module):
    """Attend to everything visible; arguments as in `dense_attention`."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        softmax_scale: Optional[float] = None,
    ) -> torch.Tensor:
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
        return dense_attention(  # type: ignore[return-value]
            q, k_cache, v_cache, block_table, softmax_scale=softmax_scale, **lengths
        )
