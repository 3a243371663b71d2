"""The specification of every operation, in plain torch, and at the same time the `torch` backend.

It runs on any device, reads no device value on the host, and its memory is bounded: work is cut into chunks of a few
MiB. Each function writes tensors that the caller allocated. Rules in short (full text in the functions):

* A request has q_len new queries and kv_len keys, the new ones included. Query i sits at position kv_len - q_len + i
  and sees 0 <= t <= position.
* Block b is the tokens [128 b, 128 b + 128). A row has n = position // 128 + 1 candidate blocks (none if the position
  is negative: an empty row).
* A token whose page number lies outside the cache is invisible. What is invisible changes nothing, not even as NaN.
* Rows at or past cu_seqlens_q[-1] are empty rows: output 0, LSE -inf, ids -1, scores -inf.
"""

import math
from typing import Optional

import torch

from . import _grouped
from ._paging import (
    BLOCK,
    Rows,
    block_count,
    block_pages,
    load_blocks,
    locate_rows,
    per_head,
    pick,
    tile_groups,
    visible_tokens,
)
from ._rows import INF, SCAN_BLOCKS, TILE_BYTES, gathered_rows, scanned_rows


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- scores and selection ----


def _score_rows(
    scores: torch.Tensor, index_q: torch.Tensor, index_k_cache: torch.Tensor, pages: torch.Tensor, rows: Rows
) -> None:
    """scores[i, h, b] = max over visible t of block b of dot(index_q[i, h], index_k[t]); raw logits, NaN counts as
    -inf, nothing visible is -inf.
    """
    count, heads, dim = index_q.shape
    batch, blocks, _ = pages.shape
    dtype = compute_dtype(index_q.dtype)
    size = max(1, min(BLOCK, count // batch))
    tiles = tile_groups(torch.where(rows.end > 0, rows.request, batch), batch, size)
    cache = index_k_cache.unsqueeze(1)
    best = torch.empty((*tiles.member.shape, heads, blocks), dtype=torch.float32, device=index_q.device)
    span = min(SCAN_BLOCKS, blocks)
    step = max(1, TILE_BYTES // (4 * span * BLOCK * max(dim, size * heads)))
    for t0 in range(0, tiles.group.shape[0], step):
        member, group = tiles.member[t0 : t0 + step], tiles.group[t0 : t0 + step]
        end = pick(rows.end, member)
        query = pick(index_q, member).to(dtype).reshape(group.shape[0], size * heads, dim)
        for b0 in range(0, blocks, span):
            page = pages[group, b0 : b0 + span]
            block = torch.arange(b0, b0 + page.shape[1], device=page.device)
            key = load_blocks(cache, torch.zeros_like(page[..., 0]), page, dtype).flatten(1, 2)
            score = torch.bmm(query, key.mT).view(-1, size, heads, page.shape[1], BLOCK)
            seen = visible_tokens(page[:, None], block.expand(1, 1, -1), end[..., None], index_k_cache.shape[0])
            score.masked_fill_(~seen.unsqueeze(2), -INF)
            best[t0 : t0 + step, :, :, b0 : b0 + span] = score.nan_to_num_(nan=-INF, posinf=INF, neginf=-INF).amax(-1)
    scores.copy_(pick(best.flatten(0, 1), tiles.place, -INF))


def select_from_scores(scores: torch.Tensor, count: torch.Tensor, topk: int, local: int, init: int) -> torch.Tensor:
    """scores fp32 [R, H, blocks], count [R] candidates of each row -> int32 [R, H, topk], ascending, then -1.

    Taken: the `local` newest candidates and the `init` first ones, whatever they score; then by score, descending, in
    exact fp32 order with the lower id first among equals (-0.0 equals 0.0, NaN counts as -inf). A candidate is never
    refused for its score: min(topk, count) ids come out.
    """
    blocks = scores.shape[-1]
    block = torch.arange(blocks, device=scores.device)
    count = count.view(-1, 1, 1)
    # The bits of a float, with those of negative ones mirrored, order as the floats do. Adding 0.0 turns -0.0 into 0.0.
    bits = (scores.nan_to_num(nan=-INF, posinf=INF, neginf=-INF) + 0.0).view(torch.int32)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    forced = (block >= count - local) | (block < init)
    rank = torch.where(forced, 0x7FFFFFFF, rank) * blocks + (blocks - 1 - block)  # all different: the order is total
    rank = rank.masked_fill(block >= count, torch.iinfo(torch.int64).min)
    width = min(topk, blocks)
    chosen = rank.topk(width, -1, sorted=False).indices
    chosen = torch.where(chosen < count, chosen, blocks).sort(-1).values
    chosen = torch.where(chosen < blocks, chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - width), value=-1)


def _selection_rows(index_q: torch.Tensor, blocks: int) -> int:
    return max(1, min(2048, 4 * TILE_BYTES // (8 * index_q.shape[1] * blocks)))


def _reached(pages: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The columns of the table by block that some row can see, at least one: a table is often far wider than its requests
    are long. Only for real tensors on the CPU, where a look at the lengths waits for nobody.
    """
    if type(rows.end) is not torch.Tensor or rows.end.device.type != "cpu" or rows.end.numel() == 0:
        return pages
    return pages[:, : max(1, (int(rows.end.max()) + BLOCK - 1) // BLOCK)]


def block_scores(
    scores: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
) -> None:
    """Score of every block for every row and index head, [T, Hi, blocks] fp32."""
    if index_k_cache.shape[0] * block_table.numel() == 0:
        scores.fill_(-INF)
        return
    page = index_k_cache.shape[1]
    rows = locate_rows(cu_seqlens_q, seqused_k, index_q.shape[0], block_table.shape[1] * page)
    pages = _reached(block_pages(block_table, page), rows)
    blocks = pages.shape[1]
    scores[..., blocks:] = -INF
    step = _selection_rows(index_q, blocks)
    for r0 in range(0, index_q.shape[0], step):
        part = slice(r0, r0 + step)
        _score_rows(
            scores[part, :, :blocks], index_q[part], index_k_cache, pages, Rows(rows.request[part], rows.end[part])
        )


def select_blocks(
    out: torch.Tensor,
    scores: Optional[torch.Tensor],
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    local_blocks: int,
    init_blocks: int,
) -> None:
    """The blocks each row and index head attends to, [T, Hi, topk] int32: `select_from_scores` of `block_scores`, in
    chunks of rows.

    The scores are kept only if the caller gave `scores` for them.
    """
    if index_k_cache.shape[0] == 0 and block_table.numel():  # no page to score: still positional
        index_k_cache = index_k_cache.new_zeros((1, *index_k_cache.shape[1:]))
        block_table = torch.full_like(block_table, -1)
    if block_table.numel() == 0:
        out.fill_(-1)
        if scores is not None:
            scores.fill_(-INF)
        return
    page = index_k_cache.shape[1]
    rows = locate_rows(cu_seqlens_q, seqused_k, index_q.shape[0], block_table.shape[1] * page)
    pages = _reached(block_pages(block_table, page), rows)
    blocks = pages.shape[1]
    if scores is not None:
        scores[..., blocks:] = -INF
    step = _selection_rows(index_q, blocks)
    for r0 in range(0, index_q.shape[0], step):
        part = slice(r0, r0 + step)
        chunk = Rows(rows.request[part], rows.end[part])
        shape = (chunk.end.shape[0], index_q.shape[1], blocks)
        mine = (
            torch.empty(shape, dtype=torch.float32, device=out.device) if scores is None else scores[part, :, :blocks]
        )
        _score_rows(mine, index_q[part], index_k_cache, pages, chunk)
        out[part] = select_from_scores(mine, block_count(chunk.end), out.shape[-1], local_blocks, init_blocks)


# ---- attention ----


def distinct_blocks(block_indices: torch.Tensor, end: torch.Tensor, blocks: int) -> torch.Tensor:
    """ids [R, H, K] of any order -> int64, ascending, each candidate once; everything that contributes nothing becomes
    `blocks`.
    """
    ids = block_indices.long()
    limit = block_count(end).view(-1, 1, 1).clamp(max=blocks)
    ids = torch.where((ids >= 0) & (ids < limit), ids, blocks).sort(-1).values
    repeat = torch.nn.functional.pad(ids[..., 1:] == ids[..., :-1], (1, 0))
    return torch.where(repeat, blocks, ids).sort(-1).values


def scaled_query(q: torch.Tensor, heads: int, softmax_scale: float, k_scale: Optional[torch.Tensor]) -> torch.Tensor:
    """[R, Hq, D] -> [R, Hkv, G, D] in the computing dtype, with the scales of the logits folded in: NaN where their product
    is NaN or infinite, whatever q is.
    """
    dtype = compute_dtype(q.dtype)
    softmax_scale = softmax_scale if math.isfinite(softmax_scale) else math.nan
    query: torch.Tensor = q.to(dtype).unflatten(1, (heads, -1)) * softmax_scale
    scale = per_head(k_scale, heads, dtype)
    if scale is not None:
        scale = torch.where(scale.isfinite(), scale, math.nan)
    return query if scale is None else query * scale.view(-1, 1, 1)


def store_rows(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    acc: torch.Tensor,
    norm: torch.Tensor,
    peak: torch.Tensor,
    v_scale: Optional[torch.Tensor],
) -> None:
    """Normalise acc [R, Hkv, G, D] with its sum of exponentials `norm` and their offset `peak`, both [R, Hkv, G]; norm
    0 is an empty row.
    """
    scale = per_head(v_scale, acc.shape[1], acc.dtype)
    result = acc / torch.where(norm == 0, 1, norm).unsqueeze(-1)
    if scale is not None:
        result = torch.where(norm.unsqueeze(-1) == 0, 0, result * scale.view(-1, 1, 1))
    out.copy_(result.flatten(1, 2))
    if lse is not None:
        lse.copy_((peak + norm.log()).flatten(1, 2))


def sparse_attention(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    """Softmax over the union of the visible tokens of each row's blocks; block_indices [T, Hkv, K] serves the Hq / Hkv
    query heads of a KV head.
    """
    if q.shape[0] * k_cache.shape[0] * block_table.numel() * block_indices.shape[-1] == 0:
        _fill_empty(out, lse)
        return
    page, heads, dim = k_cache.shape[2], k_cache.shape[1], q.shape[2]
    pages = block_pages(block_table, page)
    batch, blocks, _ = pages.shape
    rows = locate_rows(cu_seqlens_q, seqused_k, q.shape[0], block_table.shape[1] * page, causal)
    width = block_indices.shape[-1]
    regroup = _grouped.plan(q.shape[0], heads, q.shape[1] // heads, width, batch, blocks, dim)
    step = regroup.rows if regroup else max(1, TILE_BYTES // (4 * heads * width * BLOCK * dim))
    for r0 in range(0, q.shape[0], step):
        part = slice(r0, r0 + step)
        chunk = Rows(rows.request[part], rows.end[part])
        ids = distinct_blocks(block_indices[part], chunk.end, pages.shape[1])
        query = scaled_query(q[part], heads, softmax_scale, k_scale)
        if regroup:
            parts = _grouped.grouped_rows(query, k_cache, v_cache, ids, pages, chunk, regroup.size)
        else:
            parts = gathered_rows(query, k_cache, v_cache, ids, pages, chunk)
        store_rows(out[part], None if lse is None else lse[part], *parts, v_scale)


def dense_attention(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    """Softmax over all visible tokens: online over key ranges, for tiles of rows of one request."""
    if k_cache.shape[0] * block_table.numel() == 0:
        _fill_empty(out, lse)
        return
    page, heads = k_cache.shape[2], k_cache.shape[1]
    pages = block_pages(block_table, page)
    rows = locate_rows(cu_seqlens_q, seqused_k, q.shape[0], block_table.shape[1] * page, causal)
    step = 1024
    for r0 in range(0, q.shape[0], step):
        part = slice(r0, r0 + step)
        query = scaled_query(q[part], heads, softmax_scale, k_scale)
        parts = scanned_rows(query, k_cache, v_cache, pages, Rows(rows.request[part], rows.end[part]))
        store_rows(out[part], None if lse is None else lse[part], *parts, v_scale)


def _fill_empty(out: torch.Tensor, lse: Optional[torch.Tensor]) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-INF)


# ---- cache and merge ----


def _quantise(x: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A copy in the same dtype; to float8: x / scale, saturated (NaN stays NaN)."""
    if x.dtype == dtype:
        return x
    x = x.float() if scale is None else x.float() / scale.float().reshape(-1, 1)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _store(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: Optional[torch.Tensor]) -> None:
    """values [T, H, D] into cache [P, H, page, D]. Slots outside the cache are sent to slot 0 with what is there, so
    nothing changes.
    """
    pages, _, page, _ = cache.shape
    values = _quantise(values, scale, cache.dtype)
    size = cache.element_size()
    if size == 1:  # float8 has no indexed write on some devices
        values, cache = values.view(torch.uint8), cache.view(torch.uint8)
    inside = (slots >= 0) & (slots < pages * page)
    # Someone may write slot 0 in earnest. Rows that write nothing then repeat the first row that does write, and the
    # result is the same.
    first = inside.long().argmax() if slots.numel() else slots
    row = torch.where(inside, torch.arange(slots.shape[0], device=slots.device), first)
    slot = slots[row]
    any_inside = inside.any()
    slot = torch.where(any_inside, slot, 0)
    number, offset = slot // page, slot % page
    old = cache[number, :, offset]
    cache[number, :, offset] = torch.where(any_inside, values[row], old)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    index_k: Optional[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    """Write token rows to their slots, slot = page number * page size + offset; slots outside the cache are skipped."""
    if slot_mapping.numel() * k_cache.shape[0] == 0:
        return
    slots = slot_mapping.long()
    _store(k, k_cache, slots, k_scale)
    _store(v, v_cache, slots, v_scale)
    if index_k is not None and index_k_cache is not None:
        _store(index_k.unsqueeze(1), index_k_cache.unsqueeze(1), slots, None)


def merge_states(out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Combine N partial results: L = log sum exp(lses), out = sum exp(lses - L) outs, states in ascending order.

    A state with LSE -inf contributes nothing, even where its output is NaN; if all are -inf, out is 0 and lse -inf. NaN
    and +inf in an LSE give NaN.
    """
    dtype = compute_dtype(outs.dtype)
    lses = lses.to(dtype)
    peak = lses.amax(0)
    offset = torch.where(peak == -INF, 0, peak)
    norm = torch.zeros_like(offset)
    acc = torch.zeros(out.shape, dtype=dtype, device=out.device)
    for state in range(outs.shape[0]):
        weight = (lses[state] - offset).exp()
        norm += weight
        acc += torch.where((lses[state] == -INF).unsqueeze(-1), 0, weight.unsqueeze(-1) * outs[state].to(dtype))
    out.copy_(acc / torch.where(norm == 0, 1, norm).unsqueeze(-1))
    lse.copy_(offset + norm.log())
