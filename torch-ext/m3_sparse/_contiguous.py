"""Contiguous caches, [B, Hkv, S, 128] or [B, S, 128], as the operators read them: without a copy, whatever S is.

All rows' tokens lie in *slots* one token apart, [N, Hkv, 1, 128]: row b begins at slot b * (batch stride / token stride), and
left padding moves it on. A table in place of the page table names the slot where each run of tokens begins. Runs may
begin anywhere and the last one may be shorter than the others, which pages of a view cannot be. A run has 128 tokens for
the kernels' attention, 64 for their scoring (launch/cache.h), and 1 for the torch backend: slots are its pages then.

Lengths are values on a device. Here they are clamped to the row's slots, so that no run is read past its row.
"""

from typing import Any, NamedTuple, Optional

import torch

ATTENTION_RUN, SCORING_RUN = 128, 64


class Rows(NamedTuple):
    """Where the rows of a batch lie among the slots of its caches."""

    first: torch.Tensor  # int64 [B]: slot of the row's token 0
    length: int  # S
    seqused: torch.Tensor  # [B], clamped

    def table(self, run: int) -> torch.Tensor:
        """int32 [B, ceil(S / run)]: where each run of tokens begins."""
        starts = torch.arange(0, self.length, run, device=self.first.device)
        return (self.first[:, None] + starts).to(torch.int32)


def token_stride(cache: torch.Tensor) -> int:
    """Elements from one slot to the next. Rows of a single token may have any stride inside; they are the slots then."""
    alone = cache.shape[-2] == 1 and cache.shape[0] > 1 and cache.stride(0) > 0
    return cache.stride(0) if alone else cache.stride(-2)


def row_stride(cache: torch.Tensor) -> Optional[int]:
    """Slots from one row to the next; None if that is no whole number, or channels are apart."""
    rows, tokens, channels = cache.stride(0), token_stride(cache), cache.stride(-1)
    if channels != 1:
        return None
    if cache.shape[0] <= 1:
        return 0
    if tokens == 0 or rows % tokens:
        return None
    return rows // tokens


def slots(cache: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, S, 128] as [N, Hkv, 1, 128], or [B, S, 128] as [N, 1, 128]; `row_stride` is not None."""
    batch, length, dim = cache.shape[0], cache.shape[-2], cache.shape[-1]
    count = (batch - 1) * (row_stride(cache) or 0) + length if batch * length else 0
    heads = zip(cache.shape[1:-2], cache.stride()[1:-2])
    sizes, strides = [count], [token_stride(cache)]
    for size, stride in heads:
        sizes.append(size)
        strides.append(stride)
    return cache.as_strided((*sizes, 1, dim), (*strides, token_stride(cache), 1))


def rows_of(cache: torch.Tensor, seqused_k: torch.Tensor, leftpad_k: Optional[torch.Tensor]) -> Rows:
    batch, length = cache.shape[0], cache.shape[-2]
    first = torch.arange(batch, device=cache.device) * (row_stride(cache) or 0)
    used = seqused_k.long().clamp(min=0)
    if leftpad_k is None:
        return Rows(first, length, used.clamp(max=length).to(torch.int32))
    pad = leftpad_k.long().clamp(0, length)
    return Rows(first + pad, length, used.clamp(max=length - pad).to(torch.int32))


def table_for(backend: str, rows: Rows, run: int) -> torch.Tensor:
    return rows.table(1 if backend == "torch" else run)


def paged_arguments(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as its operator on aot gets them: with a table where there was none. For `explain`."""
    given = "block_table" in arguments and arguments["block_table"] is None and "seqused_k" in arguments
    names = [n for n in ("k_cache", "v_cache", "index_k_cache") if isinstance(arguments.get(n), torch.Tensor)]
    if not given or not names or any(row_stride(arguments[n]) is None for n in names):
        return arguments
    rows = rows_of(arguments[names[0]], arguments["seqused_k"], arguments.get("leftpad_k"))
    run = SCORING_RUN if "index_k_cache" in names else ATTENTION_RUN
    caches = {name: slots(arguments[name]) for name in names}
    return {**arguments, **caches, "block_table": rows.table(run), "seqused_k": rows.seqused}
