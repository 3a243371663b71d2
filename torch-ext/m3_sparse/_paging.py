"""How the torch backend reads a paged cache: which row sees what, which bytes a block is, which rows share a block.

Nothing here reads a device value on the host, so all of it runs under FakeTensor and without a CUDA synchronisation.
Sizes that depend on data are replaced by bounds that follow from shapes (see `tile_groups`).
"""

from typing import NamedTuple, Optional

import torch

BLOCK = 128


class Rows(NamedTuple):
    """What each packed query row may see; both int64 [T]."""

    request: torch.Tensor  # in [0, B)
    end: torch.Tensor  # the row sees tokens 0 <= t < end; 0 for an empty row


def locate_rows(
    cu_seqlens_q: torch.Tensor, seqused_k: torch.Tensor, total: int, reach: int, causal: bool = True
) -> Rows:
    """Query i of a request sits at position kv_len - q_len + i (bottom-right causal); kv_len is clamped to the table's
    reach.
    """
    row = torch.arange(total, device=cu_seqlens_q.device)
    ends = cu_seqlens_q.long()[1:].contiguous()
    request = torch.searchsorted(ends, row, right=True).clamp_(max=seqused_k.shape[0] - 1)
    kv_len = seqused_k.long().clamp(0, reach)[request]
    end = kv_len
    if causal:
        # Bad offsets, seen only on the device, must not reach past kv_len: hence the minimum.
        end = torch.minimum(kv_len - ends[request] + row + 1, kv_len).clamp_(min=0)
    return Rows(request, torch.where(row < ends[-1], end, 0))


def block_count(end: torch.Tensor) -> torch.Tensor:
    """Candidate blocks of a row: those that hold a visible position."""
    return (end + BLOCK - 1) // BLOCK


def block_pages(block_table: torch.Tensor, page: int) -> torch.Tensor:
    """The table by block: int64 [B, blocks, BLOCK // page]; what a last odd page lacks is -1."""
    parts = BLOCK // page
    table = block_table.long()
    if table.shape[1] % parts:
        table = torch.nn.functional.pad(table, (0, parts - table.shape[1] % parts), value=-1)
    return table.reshape(table.shape[0], -1, parts)


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """The cache as wide elements: gathers move the same bytes up to twice as fast (16 against 8 or 2 bytes), and float8
    has no gather on some devices.
    """
    size = cache.element_size()
    for word in (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8):
        ratio = word.itemsize // size
        if ratio and all(n % ratio == 0 for n in (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])):
            return cache.view(word)
    return cache


def load_blocks(cache: torch.Tensor, head: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cache [P, H, page, D], head [...], pages [..., parts] -> [..., BLOCK, D]. Pages outside the cache give some
    page's bytes: mask them.
    """
    raw = _as_words(cache)[pages.clamp(0, cache.shape[0] - 1), head.unsqueeze(-1)]
    return raw.view(cache.dtype).to(dtype).flatten(-3, -2)


def visible_tokens(pages: torch.Tensor, block: torch.Tensor, end: torch.Tensor, num_pages: int) -> torch.Tensor:
    """bool [..., BLOCK]: the tokens of `block` [...] below `end` [...] that lie on a page of the cache, pages [...,
    parts].
    """
    token = torch.arange(BLOCK, device=pages.device)
    inside = ((pages >= 0) & (pages < num_pages)).repeat_interleave(BLOCK // pages.shape[-1], -1)
    return inside & (block.unsqueeze(-1) * BLOCK + token < end.unsqueeze(-1))


class Tiles(NamedTuple):
    """Items regrouped so that each tile of `size` places holds items of one group only."""

    member: torch.Tensor  # int64 [tiles, size]: the item, or the number of items at an unused place
    group: torch.Tensor  # int64 [tiles]
    place: torch.Tensor  # int64 [items]: flat place of each item, or tiles * size for a dropped one


def tile_groups(key: torch.Tensor, groups: int, size: int, most: Optional[int] = None) -> Tiles:
    """Sort items by key, 0 <= key < groups (larger: dropped), and pad every group to whole tiles.

    How full a group is stays on the device. The number of tiles is therefore a bound: each group that has a member
    wastes less than one tile. `most` is the caller's bound for the number of such groups; items beyond it, which only
    inconsistent lengths can cause, are dropped.
    """
    count, device = key.numel(), key.device
    some = min(groups, count) if most is None else min(groups, count, most)
    tiles = (count + some * (size - 1)) // size
    ordered, order = key.sort(stable=True)
    start = torch.searchsorted(ordered, torch.arange(groups + 1, device=device))
    last = ((start[1:] - start[:-1] + size - 1) // size).cumsum(0)
    first = torch.cat([last.new_zeros(1), last[:-1]])
    group = ordered.clamp(max=groups - 1)
    rank = torch.arange(count, device=device) - start[group]
    spot = torch.where(ordered < groups, first[group] * size + rank, tiles * size).clamp_(max=tiles * size)
    member = torch.full((tiles * size + 1,), count, device=device).scatter_(0, spot, order)
    return Tiles(
        member[:-1].view(tiles, size),
        torch.searchsorted(last, torch.arange(tiles, device=device), right=True).clamp_(max=groups - 1),
        torch.empty_like(order).scatter_(0, order, spot),
    )


def pick(rows: torch.Tensor, index: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """rows[index] where index may be len(rows), which gives `fill`."""
    extra = torch.full_like(rows[:1], fill) if rows.shape[0] else rows.new_full((1, *rows.shape[1:]), fill)
    return torch.cat([rows, extra])[index]


def per_head(scale: Optional[torch.Tensor], heads: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """A scale of one element or one per head as [heads]; None stays None."""
    return None if scale is None else scale.to(dtype).reshape(-1).expand(heads)
