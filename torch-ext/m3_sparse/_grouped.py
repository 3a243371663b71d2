"""Sparse attention with the rows regrouped by block: each block is loaded once for a tile of rows, not once per row.

A (row, block) pair is one partial softmax. Pairs of one block fill tiles, a tile is two matrix products, and a row
joins its partial results as `merge_states` does. Loading is what the plain way (`_rows.gathered_rows`) spends its time
on: 128 KiB per pair in fp32, for 2 to 16 query rows.
"""

from typing import NamedTuple, Optional

import torch

from ._paging import BLOCK, Rows, Tiles, load_blocks, tile_groups, visible_tokens
from ._rows import INF

# Cost of loading one block of K and V, in rows of one tile; measured on one AVX-512 core: about 95 us against 2.3 us.
LOAD_COST = 40
# The partial results of one chunk of rows; all other temporaries are smaller.
PARTIAL_BYTES = 256 << 20
# K, V, queries, scores and results of one step stay in a 32 MiB cache.
STEP_BYTES = 2 << 20


class Plan(NamedTuple):
    rows: int  # query rows of one chunk
    size: int  # (row, block) pairs of one tile


def plan(total: int, heads: int, group: int, width: int, batch: int, blocks: int, dim: int) -> Optional[Plan]:
    """The cheapest way to regroup, from sizes known on the host; None where the plain way costs less (decode, and
    tables far wider than the rows fill).
    """
    best, best_cost = None, float(heads * width * (LOAD_COST + 2 * group))
    for rows in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16):
        if rows > 16 and rows >= 2 * total:
            continue
        pairs = min(rows, total) * heads * width
        groups = heads * min(batch, rows) * blocks
        for size in (64, 32, 16, 8):
            tiles = (pairs + min(groups, pairs) * (size - 1)) // size
            cost = tiles * (LOAD_COST + size * group) / min(rows, total)
            # A little dearer but in smaller chunks is preferred: less memory, and the caches hold more of it.
            if tiles * size * group * dim * 4 <= PARTIAL_BYTES and cost < best_cost * (1.0 if best is None else 1.1):
                best, best_cost = Plan(rows, size), min(cost, best_cost)
    return best


class _Partials:
    """Results of all tiles of a chunk by place; the last place is that of dropped pairs and contributes nothing."""

    def __init__(self, places: int, like: torch.Tensor):
        group, dim = like.shape[-2:]
        self.acc = like.new_empty((places + 1, group, dim))
        self.norm = like.new_empty((places + 1, group))
        self.peak = like.new_empty((places + 1, group))
        self.acc[places:] = 0
        self.norm[places:] = 0
        self.peak[places:] = -INF

    def join(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """place [rows, slots] -> acc, norm, peak of every row: slots in ascending order."""
        peak = self.peak[place]
        top = peak.amax(1)
        top = torch.where(top == -INF, 0, top)
        fade = (peak - top.unsqueeze(1)).exp_()
        norm = (fade * self.norm[place]).sum(1)
        acc = torch.zeros((place.shape[0], *self.acc.shape[1:]), dtype=self.acc.dtype, device=self.acc.device)
        for slot in range(place.shape[1]):
            acc.addcmul_(self.acc[place[:, slot]], fade[:, slot].unsqueeze(-1))
        return acc, norm, top


def grouped_rows(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of query [R, Hkv, G, D] over its own distinct blocks ids [R, Hkv, K] -> acc, norm, peak. Same results
    as `_rows.gathered_rows`.
    """
    count, heads, group, dim = query.shape
    batch, blocks, _ = pages.shape
    groups = heads * batch * blocks
    request, head = rows.request.view(-1, 1, 1), torch.arange(heads, device=query.device).view(1, -1, 1)
    first = (head * batch + request) * blocks
    # At most one block of a row is partly visible, the one that holds its end. Those pairs need masks, the others none.
    edge = (rows.end // BLOCK).view(-1, 1, 1)
    on_edge = (ids == edge) & (rows.end % BLOCK != 0).view(-1, 1, 1)
    page = pages[request, ids.clamp(max=blocks - 1)]
    inside = ((page >= 0) & (page < k_cache.shape[0])).any(-1) & (ids < blocks)
    pairs = tile_groups(torch.where(inside & ~on_edge, first + ids, groups).flatten(), groups, size)
    edge_group = torch.where((inside & on_edge).any(-1, keepdim=True), first + edge, groups).flatten()
    # Consecutive rows of a request share their edge block, so few groups have members: one per 128 rows, two more per
    # request that the chunk cuts.
    edges = tile_groups(edge_group, groups, 32, heads * (count // BLOCK + 2 * min(batch, count)))

    whole, partly = pairs.member.numel(), edges.member.numel()
    partials = _Partials(whole + partly, query)
    padded = torch.cat([query.flatten(0, 1), query.new_zeros((1, group, dim))])
    _attend_tiles(partials, 0, padded, k_cache, v_cache, pages, pairs, pairs.member // ids.shape[-1], None)
    _attend_tiles(
        partials, whole, padded, k_cache, v_cache, pages, edges, edges.member, rows.end.repeat_interleave(heads)
    )
    place = torch.cat(
        [
            torch.where(pairs.place < whole, pairs.place, whole + partly).view(count * heads, -1),
            (edges.place + whole).view(-1, 1),
        ],
        1,
    )
    shape = (count, heads, group)
    acc, norm, peak = partials.join(place)
    return acc.view(*shape, dim), norm.view(shape), peak.view(shape)


def _attend_tiles(
    partials: _Partials,
    start: int,
    padded: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    tiles: Tiles,
    rows: torch.Tensor,
    ends: Optional[torch.Tensor],
) -> None:
    """Fill the places from `start`: tile i attends with the queries padded[rows[i]] to the block of its group, up to
    `ends` where that is given.
    """
    batch, blocks, parts = pages.shape
    size, group, dim = rows.shape[1], *padded.shape[1:]
    if ends is not None:
        ends = torch.cat([ends, ends.new_zeros(1)])
    step = max(1, STEP_BYTES // (4 * dim * max(BLOCK, size * group)))
    for t0 in range(0, rows.shape[0], step):
        row, key_of = rows[t0 : t0 + step], tiles.group[t0 : t0 + step]
        head, request, block = key_of // (batch * blocks), key_of // blocks % batch, key_of % blocks
        page = pages[request, block]
        key = load_blocks(k_cache, head, page, padded.dtype)
        value = load_blocks(v_cache, head, page, padded.dtype)
        score = torch.bmm(padded[row.flatten()].view(row.shape[0], size * group, dim), key.mT)
        seen = None
        if ends is not None:
            seen = visible_tokens(page.unsqueeze(1), block.unsqueeze(1), ends[row], k_cache.shape[0])
            score.view(-1, size, group, BLOCK).masked_fill_(~seen.unsqueeze(2), -INF)
        elif parts > 1:  # one of the pages of a block may be missing
            exists = visible_tokens(page, block, (block + 1) * BLOCK, k_cache.shape[0])
            score.masked_fill_(~exists.unsqueeze(1), -INF)
            value.masked_fill_(~exists.unsqueeze(-1), 0)
        peak = score.amax(-1)
        weight = score.sub_(torch.where(peak == -INF, 0, peak).unsqueeze(-1)).exp_()
        acc = torch.bmm(weight, value) if seen is None else _masked_product(weight, value, seen, group)
        part = slice(start + t0 * size, start + (t0 + row.shape[0]) * size)
        partials.acc[part] = acc.view(-1, group, dim)
        partials.norm[part] = weight.sum(-1).view(-1, group)
        partials.peak[part] = peak.view(-1, group)


def _masked_product(weight: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, group: int) -> torch.Tensor:
    """weight @ value where a value that is not finite reaches only the rows that see its token: a weight of 0 would not
    silence it.

    Which rows see what differs inside the tile, so those values are counted by two more products, upwards and
    downwards; NaN is both, and inf - inf is NaN.
    """
    finite = value.isfinite()
    up = (~finite & (value != -INF)).to(value.dtype)
    down = (~finite & (value != INF)).to(value.dtype)
    sees = seen.to(value.dtype)
    above, below = torch.bmm(sees, up) > 0, torch.bmm(sees, down) > 0
    extra = torch.where(above, INF, 0.0) + torch.where(below, -INF, 0.0)
    return torch.bmm(weight, torch.where(finite, value, 0)) + extra.repeat_interleave(group, 1).to(weight.dtype)
