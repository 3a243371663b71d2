"""transformers' key caches, [B, heads, S, 128], as the package's functions read them: as they lie, without a copy.

Two cases copy. With gradients, tokens go into pages of their own. And rows that are no whole number of tokens apart, or
keys and values whose rows are not the same number apart (both only without a cache, or in odd views), become contiguous.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from ._contiguous import row_stride

PAGE = 128


class Cached(NamedTuple):
    # One for each given tensor: [B, heads, S, 128] or, with a table, [pages, heads, 128, 128].
    caches: tuple[torch.Tensor, ...]
    block_table: Optional[torch.Tensor]  # int32 [B, M], or None: contiguous
    leftpad: Optional[torch.Tensor]  # [B], of contiguous caches


def read_states(states: Sequence[torch.Tensor], pad: Optional[torch.Tensor], grad: bool) -> Cached:
    """Caches of one or more tensors [B, heads, S, D] of equal shape.

    `pad` [B] is the number of slots before each row's content, None if there are none. `grad`: of the states or of the
    queries that attend to them.
    """
    if grad:
        return separate_pages(states, pad)
    strides = {row_stride(x) for x in states}
    if len(strides) > 1 or None in strides:
        states = [x.contiguous() for x in states]
    return Cached(tuple(states), None, pad)


def separate_pages(states: Sequence[torch.Tensor], pad: Optional[torch.Tensor]) -> Cached:
    """A copy in pages, for training: contiguous caches have no gradient."""
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
    return Cached(tuple(pages), table, None)
