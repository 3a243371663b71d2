"""What the ahead-of-time kernels refuse for its shape, where dtypes and architecture fit. Each answer is a sentence or None.

The choice of a backend and `explain` read these; nothing here looks at a value on a device.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import checks
from ._ops import ops

MOST_IDS = 32
MOST_GROUP = 16
MOST_STRIDE = 2**39  # elements of two bytes
# The decode kernel shares the keys it reads among a request's rows, eight at a time; beyond some average, a prefill,
# it would read the keys again and again and store [T, Hi, blocks] scores. The prefill kernel, for a power of two of
# heads, has no such limit.
MOST_ROWS_OF_A_REQUEST = 32
MOST_PREFILL_HEADS = 64
# What the launches count in 32 bits or put into a grid (torch-ext/torch_binding.cpp refuses the rest).
MOST_SCORED_REQUESTS = 65534
MOST_SPARSE_ROWS = 2**27 - 1
MOST_DENSE_ROWS = 2**25 - 1
MOST_STORED_HEADS = 32766


def _beyond(what: str, sizes: Sequence[tuple[int, int, str]]) -> Optional[str]:
    """The first size above its limit, (size, limit, of what). Compiled calls leave these to the launch: a guard on sizes
    that hardly exist would bound the dimensions that may change.
    """
    if not torch.compiler.is_compiling():
        for size, limit, name in sizes:
            if size > limit:
                return f"{what} on aot takes at most {limit} {name}, got {size}"
    return None


def _unmapped(x: torch.Tensor) -> bool:
    """Whether no tensor map can describe x: an expanded dimension has no stride that it could hold."""
    return any(n > 1 and not 0 < s < MOST_STRIDE for n, s in zip(x.shape, x.stride()))


def sparse_attention(q: torch.Tensor, k_cache: torch.Tensor, block_indices: torch.Tensor) -> Optional[str]:
    if block_indices.shape[2] > MOST_IDS:
        return f"sparse_attention on aot takes at most {MOST_IDS} blocks a row, got {block_indices.shape[2]}"
    if q.shape[1] > MOST_GROUP * k_cache.shape[1]:
        heads = f"{q.shape[1]} and {k_cache.shape[1]}"
        return f"sparse_attention on aot takes at most {MOST_GROUP} query heads a KV head, got {heads} heads"
    return _beyond("sparse_attention", [(q.shape[0], MOST_SPARSE_ROWS, "rows"), (k_cache.shape[1], 65535, "KV heads")])


def dense_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: Optional[torch.Tensor] = None) -> Optional[str]:
    if q.shape[1] > MOST_GROUP * k_cache.shape[1]:
        heads = f"{q.shape[1]} and {k_cache.shape[1]}"
        return f"dense_attention on aot takes at most {MOST_GROUP} query heads a KV head, got {heads} heads"
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x is not None and _unmapped(x):
            return f"dense_attention on aot takes strides above 0 and below {MOST_STRIDE}, got {x.stride()} for {name}"
    return _beyond("dense_attention", [(q.shape[0], MOST_DENSE_ROWS, "rows"), (k_cache.shape[1], 65535, "KV heads")])


def block_scores(
    index_q: torch.Tensor, batch: torch.Tensor, index_k_cache: Optional[torch.Tensor] = None
) -> Optional[str]:
    """`batch`: any of the arguments with a row a request."""
    heads = index_q.shape[1]
    many = _beyond("block scoring", [(batch.shape[0], MOST_SCORED_REQUESTS, "requests")])
    if many is not None:
        return many
    power = heads <= MOST_PREFILL_HEADS and heads & (heads - 1) == 0
    if index_q.dtype == torch.float8_e4m3fn:
        # Only the prefill kernel multiplies float8, which reads both by tensor maps.
        if not power:
            return (
                f"block scoring on aot takes float8 queries with a power of two of heads up to {MOST_PREFILL_HEADS}, "
                f"got {heads} heads"
            )
        for name, x in (("index_q", index_q), ("index_k_cache", index_k_cache)):
            if x is not None and _unmapped(x):
                return (
                    f"block scoring on aot takes float8 queries with strides above 0 and below {MOST_STRIDE}, "
                    f"got {x.stride()} for {name}"
                )
        return None
    if not power and index_q.shape[0] > MOST_ROWS_OF_A_REQUEST * batch.shape[0]:
        rows = f"{index_q.shape[0]} for {batch.shape[0]} requests"
        return f"block scoring on aot takes at most {MOST_ROWS_OF_A_REQUEST} rows a request on average, got {rows}"
    return None


def select_blocks(
    index_q: torch.Tensor, batch: torch.Tensor, topk: int = 16, index_k_cache: Optional[torch.Tensor] = None
) -> Optional[str]:
    if topk > MOST_IDS:
        return f"select_blocks on aot takes a topk of at most {MOST_IDS}, got {topk}"
    return block_scores(index_q, batch, index_k_cache)


def store_kv(
    k: torch.Tensor, k_cache: torch.Tensor, index_k: Optional[torch.Tensor], index_k_cache: Optional[torch.Tensor]
) -> Optional[str]:
    many = _beyond("store_kv", [(k.shape[1], MOST_STORED_HEADS, "heads")])
    if many is not None:
        return many
    if index_k is None or index_k_cache is None or k.dtype == k_cache.dtype or index_k.dtype == index_k_cache.dtype:
        return None
    if (index_k.dtype, index_k_cache.dtype) != (k.dtype, k_cache.dtype):
        return "store_kv on aot converts from one dtype to one in a call; index_k and k differ here"
    return None


# By the numbers of torch-ext/launch/prefill.h.
PLANS = {
    1: "union tiles",
    2: "KV-stationary",
    3: "decode",
    4: "union tiles where u(4) of a request is below 1.75 (float8: 1.5 unless widened first), else KV-stationary: chosen on the device",
}


def plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    causal: bool = True,
    formulation: Optional[str] = None,
) -> torch.Tensor:
    """The formulation that sparse_attention takes on aot, a key of PLANS, and the bytes that it allocates beside its
    results, as a tensor of the CPU. NotImplementedError if a forced one can't.
    """
    wanted = 0 if formulation is None else checks.FORMULATIONS[formulation]
    tensors = (q, k_cache, v_cache, block_indices, block_table, cu_seqlens_q, seqused_k)
    try:
        made: torch.Tensor = ops.aot_attention_plan(*tensors, causal, wanted)
        return made
    except RuntimeError as error:
        raise NotImplementedError(f"formulation {formulation!r}: {error}") from error


def explain_plan(arguments: dict[str, Any]) -> Optional[str]:
    """The formulation as a sentence; None where too few arguments are given, or fake ones."""
    needed = ("q", "k_cache", "v_cache", "block_indices", "block_table", "cu_seqlens_q", "seqused_k")
    if any(arguments.get(name) is None for name in needed):
        return None
    tensors = {name: arguments[name] for name in needed}
    for name in needed[3:]:
        tensors[name] = int32(tensors[name]) if name != "block_indices" else tensors[name].int()
    given = {name: arguments[name] for name in ("causal", "formulation") if name in arguments}
    try:
        made = plan(**tensors, **given)
        if isinstance(made, FakeTensor):
            return None
        number, workspace = made.tolist()
        return f"{PLANS[number]}; workspace {workspace / 2**20:.1f} MiB"
    except NotImplementedError as error:
        return f"none: {error}"


_DIMENSIONS = {
    **dict.fromkeys(("cu_seqlens_q", "seqused_k", "leftpad_k", "slot_mapping"), 1),
    **dict.fromkeys(("block_table", "index_k"), 2),
    **dict.fromkeys(("q", "k", "v", "index_q", "index_k_cache", "block_indices"), 3),
    **dict.fromkeys(("k_cache", "v_cache"), 4),
}


def well_formed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that have the form which rules about sizes take for granted: `explain` gets others too."""

    def fits(name: str, x: Any) -> bool:
        if name == "topk":
            return isinstance(x, int)
        if name not in _DIMENSIONS or x is None:
            return x is not None or name in ("index_k", "index_k_cache", "block_table", "leftpad_k")
        return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dim() == _DIMENSIONS[name]

    return {name: x for name, x in arguments.items() if fits(name, x)}


_NEEDED: dict[str, tuple[Callable[..., Optional[str]], tuple[str, ...], tuple[str, ...]]] = {
    "sparse_attention": (sparse_attention, ("q", "k_cache", "block_indices"), ()),
    "dense_attention": (dense_attention, ("q", "k_cache"), ("v_cache",)),
    "block_scores": (block_scores, ("index_q", "block_table"), ("index_k_cache",)),
    "select_blocks": (select_blocks, ("index_q", "block_table"), ("topk", "index_k_cache")),
    "store_kv": (store_kv, ("k", "k_cache", "index_k", "index_k_cache"), ()),
}


def outside_aot(op: str, arguments: dict[str, Any]) -> Optional[str]:
    """The limit that a call with these arguments, by name, would break; None too if too few of them are given."""
    if op not in _NEEDED:
        return None
    rule, needed, optional = _NEEDED[op]
    if any(name not in arguments or (name == "block_table" and arguments[name] is None) for name in needed):
        return None
    return rule(*[arguments[n] for n in needed], **{n: arguments[n] for n in optional if n in arguments})


def int32(x: torch.Tensor) -> torch.Tensor:
    """Indices as the kernels read them. What int32 cannot hold is valid nowhere, so its ends stand for it."""
    if x.dtype == torch.int32 and (x.shape[-1] < 2 or x.stride(-1) == 1):
        return x
    return x.clamp(-(2**31), 2**31 - 1).to(torch.int32).contiguous()


def packed(scale: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A scale with its elements next to each other, as the kernels read them; a copy only of what lies otherwise."""
    return scale if scale is None else scale.contiguous()
