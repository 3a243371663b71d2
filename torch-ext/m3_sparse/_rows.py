"""Attention of a chunk of query rows on the torch backend: over each row's own blocks, or over everything.

Both return sums that are not normalised yet: acc [R, Hkv, G, D], the sum of exp(logit - peak) * v; norm [R, Hkv, G],
the sum of exp(logit - peak); and the offset peak [R, Hkv, G].
"""

import torch

from ._paging import BLOCK, Rows, load_blocks, pick, tile_groups, visible_tokens

INF = float("inf")
# Bytes of one temporary, small enough for a CPU's last-level cache. 4,096 tokens on one core: 2 to 8 MiB within 12 %,
# 16 MiB slower by 25 %.
TILE_BYTES = 4 << 20
# The block range of one step of a scan over all keys: 2048 keys. 4 to 32 blocks measured within 6 %.
SCAN_BLOCKS = 16


def finite_peak(score: torch.Tensor) -> torch.Tensor:
    """Row maximum as an offset for exp: 0 where nothing is visible, so that -inf - (-inf) never happens."""
    peak = score.amax(-1)
    return torch.where(peak == -INF, 0, peak)


def gathered_rows(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    ids: torch.Tensor,
    pages: torch.Tensor,
    rows: Rows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of query [R, Hkv, G, D] over its own blocks ids [R, Hkv, K] -> acc, norm, peak: the plain way, each row
    loads its blocks.
    """
    count, heads, group, dim = query.shape
    num_pages = k_cache.shape[0]
    block = ids.clamp(max=pages.shape[1] - 1)
    page = pages[rows.request.view(-1, 1, 1), block]
    head = torch.arange(heads, device=query.device).view(1, -1, 1).expand_as(ids)
    seen = visible_tokens(page, block, rows.end.view(-1, 1, 1), num_pages) & (ids < pages.shape[1]).unsqueeze(-1)
    key = load_blocks(k_cache, head, page, query.dtype).view(count * heads, -1, dim)
    score = torch.bmm(query.reshape(-1, group, dim), key.mT)
    score.masked_fill_(~seen.view(count * heads, 1, -1), -INF)
    peak = finite_peak(score)
    weight = score.sub_(peak.unsqueeze(-1)).exp_()
    # A weight of 0 does not silence a NaN: what is not visible is zeroed in V as well.
    value = (
        load_blocks(v_cache, head, page, query.dtype).masked_fill_(~seen.unsqueeze(-1), 0).view(count * heads, -1, dim)
    )
    acc = torch.bmm(weight, value)
    shape = (count, heads, group)
    return acc.view(*shape, dim), weight.sum(-1).view(shape), peak.view(shape)


def scanned_rows(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of query [R, Hkv, G, D] over all its tokens -> acc, norm, peak."""
    count, heads, group, dim = query.shape
    batch, blocks, _ = pages.shape
    size = max(1, min(BLOCK, count // batch))
    tiles = tile_groups(torch.where(rows.end > 0, rows.request, batch), batch, size)
    span = min(SCAN_BLOCKS, blocks)
    step = max(1, TILE_BYTES // (4 * span * BLOCK * heads * max(dim, size * group)))
    head = torch.arange(heads, device=query.device).view(1, -1, 1)
    results = []
    for t0 in range(0, tiles.group.shape[0], step):
        member, request = tiles.member[t0 : t0 + step], tiles.group[t0 : t0 + step]
        end = pick(rows.end, member)
        mine = pick(query, member).permute(0, 2, 1, 3, 4).reshape(-1, size * group, dim)  # [tiles * Hkv, size * G, D]
        acc = torch.zeros_like(mine)
        norm = mine.new_zeros(mine.shape[:2])
        peak = mine.new_full(mine.shape[:2], -INF)
        for b0 in range(0, blocks, span):
            page = pages[request, None, b0 : b0 + span].expand(-1, heads, -1, -1)
            block = torch.arange(b0, b0 + page.shape[2], device=page.device)
            head_of = head.expand(page.shape[:3])
            seen = visible_tokens(page[:, :1], block.view(1, 1, -1), end[..., None], k_cache.shape[0]).flatten(
                2
            )  # [tiles, size, keys]
            key = load_blocks(k_cache, head_of, page, query.dtype).view(mine.shape[0], -1, dim)
            score = torch.bmm(mine, key.mT)
            score.view(-1, heads, size, group, score.shape[-1]).masked_fill_(~seen[:, None, :, None], -INF)
            higher = torch.maximum(peak, score.amax(-1))
            offset = torch.where(higher == -INF, 0, higher)
            weight = score.sub_(offset.unsqueeze(-1)).exp_()
            # Invisible to the whole tile (past kv_len, or no page): zero, as in gathered_rows.
            value = load_blocks(v_cache, head_of, page, query.dtype)
            value.masked_fill_(~seen.any(1).view(page.shape[0], 1, page.shape[2], BLOCK, 1), 0)
            fade = (peak - offset).exp_()
            norm = norm * fade + weight.sum(-1)
            acc = torch.baddbmm(acc * fade.unsqueeze(-1), weight, value.view(mine.shape[0], -1, dim))
            peak = higher
        results.append(
            [
                x.unflatten(1, (size, group)).unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
                for x in (acc, norm, peak)
            ]
        )
    acc, norm, peak = (torch.cat(x) for x in zip(*results))
    peak = pick(peak, tiles.place, -INF)
    return pick(acc, tiles.place), pick(norm, tiles.place), torch.where(peak == -INF, 0, peak)
