"""The single rules that `checks` puts together: one argument, or two that must agree.

Everything here looks at types, shapes, strides, dtypes and devices only, never at values on a device, and traces under
torch.compile: messages are built only once a rule is broken. Wrong types and dtypes raise TypeError, dtypes that the
contract knows but nothing implements NotImplementedError, the rest ValueError.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch.autograd import forward_ad

from ._autocast import without_autocast
from ._contiguous import row_stride

HEAD_DIM = 128
PAGE_SIZES = (64, 128)
MAX_BLOCKS = 16384
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INDICES = (torch.int32, torch.int64)


def has_tangent(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) goes through one of them."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def needs_grad(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether a derivative would be asked for, in either mode."""
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return grad or has_tangent(*tensors)


def apart(name: str, x: torch.Tensor) -> None:
    """Every element of a tensor that is written into has a place of its own."""
    if x.numel() and any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride())):
        raise ValueError(
            f"{name} is written into and must not be expanded, got shape {list(x.shape)} with strides {list(x.stride())}"
        )


def no_grad(name: str, x: Optional[torch.Tensor]) -> None:
    """A tensor that is written into has no history to add to."""
    if needs_grad(x):
        raise ValueError(
            f"{name} must not require grad (or be written under torch.no_grad()): no gradient would reach it"
        )


def describe(x: object) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} of shape {list(x.shape)}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (int, float, str, bool, type(None))) else type(x).__name__


def dtype_list(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).replace("torch.", "") for d in dtypes)


def tensor(
    name: str,
    x: Any,
    text: str,
    shape: Sequence[Optional[int]],
    dtypes: Sequence[torch.dtype],
    like: Optional[torch.Tensor] = None,
) -> None:
    """x must be a tensor of this shape (None: any size), one of these dtypes, on the device of `like`; `text` is the
    shape for the message.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape {text}, got {describe(x)}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a strided (dense) tensor, got layout {x.layout}")
    sizes = x.shape  # once: a tensor makes a new one each time it is asked
    if len(sizes) != len(shape):
        raise ValueError(f"{name} must have {len(shape)} dimensions {text}, got {describe(x)}")
    for dim, size in enumerate(shape):
        if size is not None and sizes[dim] != size:
            raise ValueError(f"{name} must have shape {text}: size {size} in dimension {dim}, got {describe(x)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {dtype_list(dtypes)}, got {describe(x)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other tensors, got {x.device}")


def aligned(name: str, x: torch.Tensor) -> None:
    """Rows are contiguous, and every row starts at a multiple of 16 bytes: what vector loads and tensor maps need.
    Nothing is copied to get there.
    """
    if x.numel() == 0:
        return
    sizes, strides, size = x.shape, x.stride(), x.element_size()
    if sizes[-1] > 1 and strides[-1] != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {list(strides)}")
    for dim in range(len(sizes) - 1):
        if sizes[dim] > 1 and strides[dim] * size % 16 != 0:
            raise ValueError(
                f"{name} must have strides that are multiples of 16 bytes, got {list(strides)} elements of {size} bytes"
            )
    # Dynamo cannot trace the offset; compiled calls leave this one to the launch, and the torch backend does without.
    if not torch.compiler.is_compiling() and x.storage_offset() * size % 16 != 0:
        raise ValueError(
            f"{name} must start at a multiple of 16 bytes, got a view at byte {x.storage_offset() * size} of its "
            "storage"
        )


def query(
    name: str,
    x: Any,
    like: Optional[torch.Tensor] = None,
    total: Optional[int] = None,
    heads: str = "Hq",
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> None:
    if isinstance(x, torch.Tensor) and x.dtype in FLOAT8 and x.dtype not in dtypes:
        raise NotImplementedError(
            f"{name} in {dtype_list([x.dtype])} is not implemented: expected {dtype_list(dtypes)}, got {describe(x)}"
        )
    tensor(name, x, f"[T, {heads}, {HEAD_DIM}]", (total, None, HEAD_DIM), dtypes, like)
    if x.shape[1] == 0:
        raise ValueError(f"{name} must have at least one head in [T, {heads}, {HEAD_DIM}], got {describe(x)}")
    aligned(name, x)


def cache_dtype(name: str, cache: torch.Tensor, of_query: torch.dtype) -> None:
    if cache.dtype != of_query and cache.dtype not in FLOAT8:
        raise TypeError(
            f"{name} must have the dtype of the queries ({dtype_list([of_query])}) or {dtype_list(FLOAT8)}, "
            f"got {describe(cache)}"
        )


def page_size(name: str, page: int) -> None:
    if page not in PAGE_SIZES:
        raise ValueError(
            f"{name} must have a page size of 64 or 128 tokens (blocks are 128 tokens), got pages of {page}"
        )


def rows_apart(name: str, x: torch.Tensor) -> None:
    """Rows of a contiguous cache: a whole number of tokens apart."""
    if x.numel() and row_stride(x) is None:
        raise ValueError(
            f"{name} without a block_table must have rows a whole number of tokens apart, got strides {list(x.stride())}"
        )


def kv_caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    like: torch.Tensor,
    of_query: Optional[torch.dtype] = None,
    paged: bool = True,
) -> None:
    """`paged` false: contiguous caches, one row a request, without a block_table."""
    text = f"[P, Hkv, page, {HEAD_DIM}]" if paged else f"[B, Hkv, S, {HEAD_DIM}] (block_table is None)"
    tensor("k_cache", k_cache, text, (None, None, None, HEAD_DIM), FLOATS + FLOAT8, like)
    if paged:
        page_size("k_cache", k_cache.shape[2])
    if k_cache.shape[1] == 0:
        raise ValueError(f"k_cache must have at least one head in {text}, got {describe(k_cache)}")
    tensor("v_cache", v_cache, text + " like k_cache", tuple(k_cache.shape), FLOATS + FLOAT8, like)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache must have the dtype of k_cache ({k_cache.dtype}), got {describe(v_cache)}")
    if of_query is not None:
        cache_dtype("k_cache", k_cache, of_query)
    aligned("k_cache", k_cache)
    aligned("v_cache", v_cache)
    if not paged:
        rows_apart("k_cache", k_cache)
        rows_apart("v_cache", v_cache)
        if k_cache.numel() and row_stride(k_cache) != row_stride(v_cache):
            raise ValueError(
                "k_cache and v_cache without a block_table must have rows the same number of tokens apart, got strides "
                f"{list(k_cache.stride())} and {list(v_cache.stride())}"
            )


def batch(
    block_table: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    like: torch.Tensor,
    leftpad_k: Optional[torch.Tensor] = None,
    rows: int = 0,
) -> None:
    """The page table [B, M], or without one the number of rows of the caches, sets B; the lengths must agree with it."""
    size, text = rows, "B from the caches"
    if block_table is not None:
        tensor("block_table", block_table, "[B, M]", (None, None), INDICES, like)
        size, text = block_table.shape[0], "B from block_table"
    tensor("cu_seqlens_q", cu_seqlens_q, f"[B + 1] with {text}", (size + 1,), INDICES, like)
    tensor("seqused_k", seqused_k, f"[B] with {text}", (size,), INDICES, like)
    if leftpad_k is None:
        return
    if block_table is not None:
        raise ValueError("leftpad_k must be None where there is a block_table, which can begin a request anywhere")
    tensor("leftpad_k", leftpad_k, f"[B] with {text}", (size,), INDICES, like)


def scale(name: str, x: Any, heads: int, like: torch.Tensor) -> None:
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a float32 tensor of 1 or Hkv = {heads} elements, or None, got {describe(x)}")
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must have dtype float32, got {describe(x)}")
    if x.numel() != 1 and x.numel() != heads:
        raise ValueError(f"{name} must have 1 or Hkv = {heads} elements, got {describe(x)}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other tensors, got {x.device}")
    if needs_grad(x):
        raise NotImplementedError(
            f"{name} requires grad, and gradients of scales are not implemented: expected a tensor without grad"
        )


def whole(name: str, x: Any, least: int) -> None:
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int >= {least}, got {describe(x)}")
    if x < least:
        raise ValueError(f"{name} must be >= {least}, got {x}")


def flag(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {describe(x)}")


def stored(name: str, x: torch.Tensor, cache: torch.Tensor) -> None:
    aligned(name, x)
    if x.dtype != cache.dtype and not (x.dtype in FLOATS and cache.dtype in FLOAT8):
        raise TypeError(
            f"{name} must have the dtype of its cache ({cache.dtype}), or be 16 bits or wider for a float8 cache, "
            f"got {describe(x)}"
        )


def stacked(name: str, x: object) -> torch.Tensor:
    """A tensor as it is; a sequence of tensors of one shape, dtype and device as their stack."""
    if isinstance(x, torch.Tensor):
        return x
    if not isinstance(x, (list, tuple)):
        raise TypeError(f"{name} must be a tensor or a sequence of tensors, got {describe(x)}")
    if len(x) == 0:
        raise ValueError(f"{name} must hold at least one state, got an empty {type(x).__name__}")
    for item in x:
        if not isinstance(item, torch.Tensor):
            raise TypeError(f"{name} must be a sequence of tensors, got one that holds {describe(item)}")
        if item.shape != x[0].shape or item.dtype != x[0].dtype or item.device != x[0].device:
            raise ValueError(
                f"{name} must hold tensors of one shape, dtype and device, got {describe(x[0])} and {describe(item)}"
            )
    with without_autocast(x[0].device):  # it refuses some dtypes
        return torch.stack(list(x))
