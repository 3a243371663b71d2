"""transformers' key caches, [B, heads, S, 128], as the paged caches that the package's functions read.

A dense cache is a paged one whose pages overlap: a page may start at any token, the next one a token later. A row's
left padding then lives in its block table alone, and in most cases nothing is copied.
"""

from typing import NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F

PAGE = 128


class Paged(NamedTuple):
    caches: tuple  # of [pages, heads, 128, 128], one for each given tensor
    block_table: torch.Tensor  # int32 [B, M]


def page_states(states: Sequence[torch.Tensor], pad: Optional[torch.Tensor]) -> Paged:
    """Pages of one or more tensors [B, heads, S, D] of equal shape, under one block table.

    `pad` [B] is the number of slots before each row's content, None if there are none.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        return separate_pages(states, pad)
    return overlapping_pages(states, pad)


def overlapping_pages(states: Sequence[torch.Tensor], pad: Optional[torch.Tensor]) -> Paged:
    """Pages that start at every token.

    Only the last row's last page can reach past the tensor, which no view may. Whether it does depends on the padding,
    a device value; so the shapes decide, and a tensor without room behind its last block is copied into a longer one.
    """
    batch, _, length, _ = states[0].shape
    room = PAGE - 1 if pad is not None else -length % PAGE
    if room:
        states = [F.pad(x, (0, 0, 0, room)) for x in states]
    strides = {row_stride(x) for x in states}
    if len(strides) > 1 or None in strides:
        states = [x.contiguous() for x in states]
    pages_per_row = row_stride(states[0])
    rows = torch.arange(batch, device=states[0].device) * pages_per_row
    if pad is not None:
        rows = rows + pad
    blocks = torch.arange(-(-length // PAGE), device=rows.device) * PAGE
    table = (rows[:, None] + blocks).to(torch.int32)
    return Paged(tuple(view_pages(x, pages_per_row) for x in states), table)


def row_stride(x: torch.Tensor) -> Optional[int]:
    """Tokens from one row to the next, or None if that is no whole number (or channels are apart)."""
    if x.shape[0] == 1:
        return 0 if x.stride(3) == 1 else None
    if x.stride(3) != 1 or x.stride(0) % x.stride(2):
        return None
    return x.stride(0) // x.stride(2)


def view_pages(x: torch.Tensor, pages_per_row: int) -> torch.Tensor:
    batch, heads, length, dim = x.shape
    pages = (batch - 1) * pages_per_row + length - PAGE + 1
    return x.as_strided((pages, heads, PAGE, dim), (x.stride(2), x.stride(1), x.stride(2), x.stride(3)))


def separate_pages(states: Sequence[torch.Tensor], pad: Optional[torch.Tensor]) -> Paged:
    """A copy in pages of its own, for training: the gradient of overlapping pages would be 128 times the cache."""
    batch, heads, length, dim = states[0].shape
    blocks = -(-length // PAGE)
    if pad is None:
        states = [F.pad(x, (0, 0, 0, blocks * PAGE - length)).transpose(1, 2) for x in states]
    else:
        # Slots past the end are clamped; they lie past kv_len, where nothing is read.
        slots = (torch.arange(blocks * PAGE, device=pad.device) + pad[:, None]).clamp(max=length - 1)
        index = slots[:, :, None, None].expand(-1, -1, heads, dim)
        states = [x.transpose(1, 2).gather(1, index) for x in states]
    pages = [x.reshape(batch * blocks, PAGE, heads, dim).transpose(1, 2) for x in states]
    table = torch.arange(batch * blocks, dtype=torch.int32, device=states[0].device).view(batch, blocks)
    return Paged(tuple(pages), table)
