"""Where each row of a batch stands in its cache: what the adapter's attention function needs from transformers' masks.

transformers tells an attention function neither how many cache slots are filled nor how a row is padded. The adapter
registers `compact_mask`, which puts both into a tiny tensor in the mask's place; `read_rows` reads it back. On the
hub path, where transformers keeps its own mask function, `read_rows` finds the same figures in a None or in a boolean
[B, 1, Sq, Sk] mask.

Nothing here reads a device value on the host, except on the CPU, where that is free.
"""

from typing import Any, NamedTuple, Optional, Union

import torch

# A row whose padding has real tokens on both sides has no single content range; this value of `end` marks it.
HOLES = -1

PACKED = (
    "m3_sparse: packed sequences are not supported; expected consecutive position_ids over each row's tokens, "
    "but those of row {row} restart or jump"
)
HOLED = (
    "m3_sparse: expected an attention_mask with at most left and right padding, but row {row} has masked tokens "
    "between real ones"
)
CUSTOM = "m3_sparse: expected the causal mask, with at most left and right padding, but got {what}"


class Rows(NamedTuple):
    """Slots are positions in the key cache. `pad` and `end` are None where they are known to be 0 and unlimited."""

    offset: torch.Tensor  # int64 [B]: slot of the row's first query
    end: Optional[torch.Tensor]  # int64 [B]: one past the row's last real token, or HOLES
    pad: Optional[torch.Tensor]  # int64 [B]: number of slots before the row's first real token

    def kv_lengths(self, q_length: int) -> torch.Tensor:
        """int32 [B]: keys up to and including the last query, padding on the left not counted."""
        lengths = self.offset + q_length
        if self.pad is not None:
            lengths = (lengths - self.pad).clamp(min=0)
        return lengths.to(torch.int32)


def host_readable(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Union[int, torch.Tensor] = 0,
    kv_offset: Union[int, torch.Tensor] = 0,
    attention_mask: Optional[torch.Tensor] = None,
    mask_function: Any = None,
    device: Union[str, torch.device, None] = None,
    **_: object,
) -> torch.Tensor:
    """transformers' mask function: int64 [B, 1, 1, n] with n of the columns offset, end, pad.

    The width is how later code knows, from the shape alone, that no row is padded (1) or that none is padded on the
    left (2). Four dimensions, because transformers hands on a 4-D mask untouched and reads a 2-D one as padding.
    """
    from transformers.masking_utils import causal_mask_function

    # While compiling without a cache transformers always wraps the function, since it cannot look for packing then;
    # flash_attn_forward looks at the positions itself.
    if mask_function is not causal_mask_function and not torch.compiler.is_compiling():
        raise NotImplementedError(CUSTOM.format(what="packed sequences or a custom mask function"))
    if isinstance(kv_offset, int) and kv_offset != 0:
        raise NotImplementedError(CUSTOM.format(what=f"a sliding window that starts at key {kv_offset}"))
    offset = torch.zeros(batch_size, dtype=torch.int64, device=device) + q_offset
    if attention_mask is None:
        return offset[:, None, None, None]
    width = attention_mask.shape[-1]
    if isinstance(q_offset, int) and width < q_offset + q_length:
        raise ValueError(
            f"m3_sparse: expected an attention_mask of at least {q_offset + q_length} columns "
            f"({q_offset} cached tokens and {q_length} new ones), but got {width}"
        )
    real = attention_mask.to(torch.int32)
    first, end, holes = content_range(real)
    if host_readable(real):
        if bool(holes.any()):
            raise NotImplementedError(HOLED.format(row=int(holes.nonzero()[0])))
        if bool((real != 0).all()):
            return offset[:, None, None, None]
        if not bool((first > 0).any()):
            return torch.stack([offset, end], -1)[:, None, None, :]
    columns = [offset, torch.where(holes, HOLES, end), first]
    return torch.stack(columns, -1)[:, None, None, :]


def content_range(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First real token, one past the last, and whether any between them is masked; `real` is 0/1 int32 [B, S].

    A row without any real token gets the empty range (S, 0).
    """
    width = real.shape[-1]
    count = real.sum(-1)
    first = torch.where(count > 0, real.argmax(-1), width)
    end = torch.where(count > 0, width - real.flip(-1).argmax(-1), 0)
    return first, end, (count > 0) & (count != end - first)


def read_rows(
    attention_mask: Optional[torch.Tensor], position_ids: Optional[torch.Tensor], query: torch.Tensor, key: torch.Tensor
) -> Rows:
    """Row layout from the adapter's own mask, from None, or from transformers' boolean [B, 1, Sq, Sk] mask."""
    batch, _, q_length, _ = query.shape
    kv_length = key.shape[2]
    if attention_mask is None:
        # Without any padding a position is a slot, and it is the only sign of how far a static cache is filled.
        if position_ids is None:
            offset = torch.full((1,), kv_length - q_length, dtype=torch.int64, device=query.device)
        else:
            offset = position_ids.reshape(-1, q_length)[:, 0].clamp(max=kv_length - q_length)
        return Rows(offset.expand(batch), None, None)
    if attention_mask.dim() == 4 and attention_mask.dtype == torch.int64:
        offset, *more = attention_mask[:, 0, 0, :].unbind(-1)
        end, pad = [*more, None, None][:2]
        return Rows(offset, end, pad)
    expected = (q_length, kv_length)
    if attention_mask.dim() != 4 or attention_mask.shape[1] != 1 or tuple(attention_mask.shape[2:]) != expected:
        raise ValueError(
            f"m3_sparse: expected attention_mask to be None or [{batch}, 1, {q_length}, {kv_length}], "
            f"but got {list(attention_mask.shape)}"
        )
    if attention_mask.dtype != torch.bool:
        raise TypeError(f"m3_sparse: expected a boolean attention_mask, but got {attention_mask.dtype}")
    return rows_of_boolean_mask(attention_mask.expand(batch, -1, -1, -1)[:, 0])


def rows_of_boolean_mask(mask: torch.Tensor) -> Rows:
    """Row layout from a causal mask with padding, [B, Sq, Sk]: two of its query rows tell everything.

    All rows of a batch share one offset. A query that is a real token sees itself last, so the offset shows in the
    first query of any row without padding on the left, and in the last one of any row without padding on the right.
    """
    q_length, kv_length = mask.shape[1:]
    _, seen_by_first, _ = content_range(mask[:, 0].to(torch.int32))
    pad, seen_by_last, holes = content_range(mask[:, -1].to(torch.int32))
    offset = torch.maximum(seen_by_first.amax() - 1, seen_by_last.amax() - q_length)
    offset = offset.clamp(0, kv_length - q_length)
    return Rows(offset.expand(mask.shape[0]), torch.where(holes, HOLES, seen_by_last), pad)


def unsupported_rows(
    rows: Rows, attention_mask: Optional[torch.Tensor], position_ids: Optional[torch.Tensor], q_length: int
) -> Optional[torch.Tensor]:
    """Boolean [B]: rows whose mask or positions say something else than one padded sequence; None if none can."""
    batch = rows.offset.shape[0]
    slots = rows.offset[:, None] + torch.arange(q_length, device=rows.offset.device)
    real = torch.ones_like(slots, dtype=torch.bool)
    bad = []
    if rows.end is not None:
        bad.append(rows.end == HOLES)
        real = real & (slots < rows.end[:, None])
    if rows.pad is not None:
        real = real & (slots >= rows.pad[:, None])
    if position_ids is not None and q_length > 1:
        positions = position_ids.reshape(-1, q_length).expand(batch, -1)
        jumps = positions[:, 1:] != positions[:, :-1] + 1
        bad.append((jumps & real[:, 1:] & real[:, :-1]).any(-1))
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        assert rows.pad is not None and rows.end is not None  # both are read from such a mask
        keys = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
        content = (keys >= rows.pad[:, None]) & (keys < rows.end[:, None])
        expected = (keys <= slots[..., None]) & content[:, None]
        # Padding queries too: those of a packed row's earlier sequences would pass for padding otherwise.
        bad.append((attention_mask[:, 0] != expected).any(-1).any(-1))
    if not bad:
        return None
    return torch.stack(bad).any(0)


def check_rows(
    rows: Rows, attention_mask: Optional[torch.Tensor], position_ids: Optional[torch.Tensor], q_length: int
) -> Optional[torch.Tensor]:
    """Raise for an unsupported row; where its sign is on a device, return which rows to make NaN instead."""
    bad = unsupported_rows(rows, attention_mask, position_ids, q_length)
    if bad is None or not host_readable(bad):
        return bad
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            raise NotImplementedError(CUSTOM.format(what=f"another mask, or restarting position_ids, in row {row}"))
        raise NotImplementedError(PACKED.format(row=row))
    return None
