"""Gradients of the torch backend's attention.

They are recomputed in chunks of rows: nothing but the inputs is kept between the passes.
"""

from typing import Optional

import torch

from ._paging import BLOCK, Rows, block_pages, load_blocks, locate_rows, per_head, visible_tokens
from ._rows import INF, TILE_BYTES, finite_peak
from .reference import compute_dtype, distinct_blocks, scaled_query


def _all_blocks(rows: Rows, heads: int, blocks: int) -> torch.Tensor:
    return torch.arange(blocks, device=rows.end.device).expand(rows.end.shape[0], heads, blocks)


def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: Optional[torch.Tensor],
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of sparse attention, or of dense attention if block_indices is None, with respect to q, k_cache and
    v_cache.

    A page that several rows or requests share collects the sum of their gradients. The cache gradients have the shape
    of the caches and are summed in fp32, so views with overlapping pages, whose logical size is far above their
    storage, are better copied first.
    """
    dtype = compute_dtype(q.dtype)
    grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    grad_k = torch.zeros(k_cache.shape, dtype=dtype, device=q.device)
    grad_v = torch.zeros(v_cache.shape, dtype=dtype, device=q.device)
    if k_cache.shape[0] * block_table.numel() * (1 if block_indices is None else block_indices.shape[-1]) > 0:
        num_pages, heads, page, dim = k_cache.shape
        pages = block_pages(block_table, page)
        rows = locate_rows(cu_seqlens_q, seqused_k, q.shape[0], block_table.shape[1] * page, causal)
        width = pages.shape[1] if block_indices is None else block_indices.shape[-1]
        step = max(1, TILE_BYTES // (4 * heads * width * BLOCK * dim))
        for r0 in range(0, q.shape[0], step):
            part = slice(r0, r0 + step)
            chunk = Rows(rows.request[part], rows.end[part])
            given = _all_blocks(chunk, heads, width) if block_indices is None else block_indices[part]
            ids = distinct_blocks(given, chunk.end, pages.shape[1])
            block = ids.clamp(max=pages.shape[1] - 1)
            where = pages[chunk.request.view(-1, 1, 1), block]
            seen = visible_tokens(where, block, chunk.end.view(-1, 1, 1), num_pages) & (ids < pages.shape[1]).unsqueeze(
                -1
            )
            head = torch.arange(heads, device=q.device).view(1, -1, 1).expand_as(ids)
            key = load_blocks(k_cache, head, where, dtype).masked_fill_(~seen.unsqueeze(-1), 0).flatten(2, 3)
            value = load_blocks(v_cache, head, where, dtype).masked_fill_(~seen.unsqueeze(-1), 0).flatten(2, 3)
            # An empty row is padding: whatever its query and gradient hold, NaN included, reaches no cache.
            empty = (chunk.end == 0).view(-1, 1, 1, 1)
            query = scaled_query(q[part], heads, softmax_scale, k_scale).masked_fill(empty, 0)
            upstream = grad_out[part].to(dtype).unflatten(1, (heads, -1)).masked_fill(empty, 0)
            factor = per_head(v_scale, heads, dtype)
            if factor is not None:
                upstream = upstream * factor.view(-1, 1, 1)

            score = (query @ key.mT).masked_fill_(~seen.flatten(2).unsqueeze(2), -INF)
            weight = (score - finite_peak(score).unsqueeze(-1)).exp_()
            norm = weight.sum(-1, keepdim=True)
            weight = weight / torch.where(norm == 0, 1, norm)
            change = upstream @ value.mT
            change = change - (weight * change).sum(-1, keepdim=True)
            if grad_lse is not None:
                change = change + grad_lse[part].to(dtype).unflatten(1, (heads, -1)).unsqueeze(-1)
            change = weight * change

            grad_q[part] = (scaled_gradient(change @ key, softmax_scale, k_scale)).flatten(1, 2)
            index = (where.clamp(0, num_pages - 1), head.unsqueeze(-1))
            shape = (*where.shape, page, dim)
            grad_k.index_put_(index, (change.mT @ query).view(shape), accumulate=True)
            grad_v.index_put_(index, (weight.mT @ upstream).view(shape), accumulate=True)
    return grad_q.to(q.dtype), grad_k.to(k_cache.dtype), grad_v.to(v_cache.dtype)


def scaled_gradient(grad: torch.Tensor, softmax_scale: float, k_scale: Optional[torch.Tensor]) -> torch.Tensor:
    grad = grad * softmax_scale
    scale = per_head(k_scale, grad.shape[1], grad.dtype)
    return grad if scale is None else grad * scale.view(-1, 1, 1)
