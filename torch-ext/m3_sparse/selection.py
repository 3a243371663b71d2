"""Block selection: the indexer's scores and the blocks that each query row attends to."""

from typing import Optional, Union

import torch

from . import _contiguous, _limits, checks
from .capability import choose
from .ops import BUILT, writing


def _reach(index_k_cache: torch.Tensor, block_table: Optional[torch.Tensor]) -> int:
    """Tokens that a request can have."""
    return (1 if block_table is None else block_table.shape[1]) * index_k_cache.shape[1]


def _scores_like(index_q: torch.Tensor, reach: int) -> torch.Tensor:
    return torch.empty(
        (index_q.shape[0], index_q.shape[1], (reach + 127) // 128), dtype=torch.float32, device=index_q.device
    )


def _operands(
    backend: str,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    leftpad_k: Optional[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """What the operators of both functions take; no gradient passes through a selection."""
    if block_table is None:
        rows = _contiguous.rows_of(index_k_cache, seqused_k, leftpad_k)
        index_k_cache, seqused_k = _contiguous.slots(index_k_cache.detach()), rows.seqused
        block_table = _contiguous.table_for(backend, rows, _contiguous.SCORING_RUN)
    indices = [block_table, cu_seqlens_q, seqused_k]
    if backend != "torch":
        indices = [_limits.int32(x) for x in indices]
    return (index_q.detach(), index_k_cache.detach(), *indices)


def block_scores(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    leftpad_k: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Score of every 128-token block for every query row and index head: the maximum of the dot products with the
    visible index keys.

    Args:
        index_q: [T, Hi, 128], bf16, fp16, fp32 or, with keys of that dtype, float8_e4m3fn; packed as the queries of
            `sparse_attention` are.
        index_k_cache: [P, page, 128] shared by all heads, pages of 64 or 128 tokens, the dtype of index_q or float8;
            last stride 1, base and strides multiples of 16 bytes, pages may overlap.
            Without a block_table: [B, S, 128], a row a request, any S.
        block_table, cu_seqlens_q, seqused_k, leftpad_k: as in `sparse_attention`; at most 16384 blocks a request.

    Returns:
        fp32 [T, Hi, blocks], blocks = ceil(M * page / 128), or ceil(S / 128): raw logits, unscaled. A block without a
        visible token is -inf; a NaN product counts as -inf.

    No gradients. Specification: `reference.block_scores`.

    Raises:
        TypeError, ValueError: an argument breaks one of the rules above. NotImplementedError: the dtypes or the backend
            asked for are not implemented.
    """
    checks.block_scores(
        index_q, index_k_cache, block_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, leftpad_k=leftpad_k
    )
    outside = _limits.block_scores(index_q, seqused_k, index_k_cache)
    backend = choose("block_scores", index_q.device, index_q.dtype, index_k_cache.dtype, outside_aot=outside)
    scores = _scores_like(index_q, _reach(index_k_cache, block_table))
    tensors = _operands(backend, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, leftpad_k)
    BUILT["block_scores", backend](scores, *tensors)
    return scores


def select_blocks(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    topk: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
    leftpad_k: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_scores: bool = False,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The blocks that each query row and index head attends to.

    A row at position p has n = p // 128 + 1 candidates. The `local_blocks` newest and the `init_blocks` first are
    always taken and count inside topk; the rest go by score (see `block_scores`), in exact fp32 order, the lower id
    first among equal scores.

    Args:
        index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, leftpad_k: as in `block_scores`.
        topk: blocks per row and head, >= 1. local_blocks, init_blocks: >= 0, together at most topk.
        out: [T, Hi, topk] int32 of any strides to write into.
        return_scores: also return the scores, fp32 [T, Hi, ceil(M * page / 128)]. Without it the torch backend never
            stores them as a whole, and the prefill kernel only up to 64 MiB; the decode kernel does, which takes up to
            32 (row, head) pairs a request on average, up to 128 over few blocks, and what the prefill kernel can't.
            The selection is the same with and without it.

    Returns:
        int32 [T, Hi, topk]: the min(topk, n) chosen ids, ascending, then -1; or (ids, scores).

    No gradients. Specification: `reference.select_blocks`.

    Raises:
        TypeError, ValueError: an argument breaks one of the rules above. NotImplementedError: the dtypes or the backend
            asked for are not implemented.
    """
    checks.select_blocks(
        index_q,
        index_k_cache,
        block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        topk=topk,
        local_blocks=local_blocks,
        init_blocks=init_blocks,
        leftpad_k=leftpad_k,
        out=out,
        return_scores=return_scores,
    )
    outside = _limits.select_blocks(index_q, seqused_k, topk, index_k_cache)
    backend = choose("select_blocks", index_q.device, index_q.dtype, index_k_cache.dtype, outside_aot=outside)
    writing(backend, (out,))
    if out is None:
        out = torch.empty((index_q.shape[0], index_q.shape[1], topk), dtype=torch.int32, device=index_q.device)
    scores = _scores_like(index_q, _reach(index_k_cache, block_table)) if return_scores else None
    tensors = _operands(backend, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, leftpad_k)
    BUILT["select_blocks", backend](out, scores, *tensors, local_blocks, init_blocks)
    return out if scores is None else (out, scores)
