"""Argument rules of the public functions, by function.

A violation raises before anything is launched and says which argument, what was expected and what came.
"""

from typing import Any, Optional

import torch

from ._arguments import (
    FLOAT8,
    FLOATS,
    HEAD_DIM,
    INDICES,
    MAX_BLOCKS,
    aligned,
    apart,
    batch,
    cache_dtype,
    describe,
    dtype_list,
    flag,
    has_tangent,
    kv_caches,
    needs_grad,
    no_grad,
    page_size,
    query,
    rows_apart,
    scale,
    stacked,
    stored,
    tensor,
    whole,
)


def block_scores(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    leftpad_k: Optional[torch.Tensor] = None,
) -> None:
    query("index_q", index_q, heads="Hi", dtypes=(*FLOATS, torch.float8_e4m3fn))
    paged = block_table is not None
    text = f"[P, page, {HEAD_DIM}]" if paged else f"[B, S, {HEAD_DIM}] (block_table is None)"
    tensor("index_k_cache", index_k_cache, text, (None, None, HEAD_DIM), FLOATS + FLOAT8, index_q)
    if paged:
        page_size("index_k_cache", index_k_cache.shape[1])
    cache_dtype("index_k_cache", index_k_cache, index_q.dtype)
    aligned("index_k_cache", index_k_cache)
    if not paged:
        rows_apart("index_k_cache", index_k_cache)
    batch(block_table, cu_seqlens_q, seqused_k, index_q, leftpad_k, index_k_cache.shape[0])
    reach = (1 if block_table is None else block_table.shape[1]) * index_k_cache.shape[1]
    blocks = (reach + HEAD_DIM - 1) // HEAD_DIM
    if blocks > MAX_BLOCKS:
        name, what = ("block_table", "a table") if paged else ("index_k_cache", "one")
        raise ValueError(
            f"{name} must reach at most {MAX_BLOCKS} blocks of 128 tokens, got {what} that reaches {blocks}"
        )


def select_blocks(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    topk: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
    leftpad_k: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    return_scores: bool = False,
) -> None:
    block_scores(
        index_q, index_k_cache, block_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, leftpad_k=leftpad_k
    )
    whole("topk", topk, 1)
    whole("local_blocks", local_blocks, 0)
    whole("init_blocks", init_blocks, 0)
    if local_blocks + init_blocks > topk:
        raise ValueError(
            f"local_blocks + init_blocks must be at most topk = {topk}, got {local_blocks} + {init_blocks}"
        )
    if out is not None:
        shape = (index_q.shape[0], index_q.shape[1], topk)
        tensor("out", out, "[T, Hi, topk]", shape, (torch.int32,), index_q)
        apart("out", out)
    flag("return_scores", return_scores)


# The numbers that the operator knows them by (torch-ext/launch/prefill.h).
FORMULATIONS = {"union": 1, "kv_stationary": 2, "decode": 3}


def dense_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = True,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    leftpad_k: Optional[torch.Tensor] = None,
) -> None:
    query("q", q)
    paged = block_table is not None
    kv_caches(k_cache, v_cache, q, q.dtype, paged)
    heads = k_cache.shape[1]
    if q.shape[1] % heads != 0:
        raise ValueError(f"q must have a multiple of the Hkv = {heads} heads of k_cache, got Hq = {q.shape[1]}")
    batch(block_table, cu_seqlens_q, seqused_k, q, leftpad_k, k_cache.shape[0])
    if softmax_scale is not None and (
        isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, torch.SymFloat))
    ):
        raise TypeError(f"softmax_scale must be a float or None (1 / sqrt({HEAD_DIM})), got {describe(softmax_scale)}")
    flag("causal", causal)
    flag("return_lse", return_lse)
    scale("k_scale", k_scale, heads, q)
    scale("v_scale", v_scale, heads, q)
    if out is not None:
        tensor("out", out, f"[T, Hq, {HEAD_DIM}] like q", tuple(q.shape), (q.dtype,), q)
        aligned("out", out)
        apart("out", out)
        no_grad("out", out)
    if lse is not None:
        tensor("lse", lse, "[T, Hq]", tuple(q.shape[:2]), (torch.float32,), q)
        apart("lse", lse)
        no_grad("lse", lse)
    if needs_grad(q, k_cache, v_cache):
        if has_tangent(q, k_cache, v_cache):
            raise NotImplementedError(
                "forward-mode derivatives of attention (torch.func.jvp, torch.func.jacfwd, torch.autograd.forward_ad) are "
                "not implemented: expected reverse mode (backward, torch.func.vjp)"
            )
        if not paged:
            raise NotImplementedError(
                "gradients of contiguous caches are not implemented: expected a block_table, or tensors without grad"
            )
        if out is not None or lse is not None:
            raise ValueError(
                "out and lse must be None where q, k_cache or v_cache requires grad, got a tensor to write into"
            )
        if k_cache.dtype in FLOAT8 and needs_grad(k_cache, v_cache):
            raise NotImplementedError(
                f"gradients of float8 caches are not implemented: expected caches without grad, got {describe(k_cache)}"
            )


def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    formulation: Optional[str] = None,
    **options: Any,
) -> None:
    dense_attention(q, k_cache, v_cache, block_table, **options)
    if formulation is not None and formulation not in FORMULATIONS:
        raise ValueError(f"formulation must be one of {', '.join(FORMULATIONS)} or None, got {formulation!r}")
    shape = (q.shape[0], k_cache.shape[1], None)
    tensor("block_indices", block_indices, "[T, Hkv, K] (T from q, Hkv from k_cache)", shape, INDICES, q)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    index_k: Optional[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    *,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
) -> None:
    text = f"[T, Hkv, {HEAD_DIM}]"
    tensor("k", k, text, (None, None, HEAD_DIM), FLOATS + FLOAT8)
    tensor("v", v, text + " like k", tuple(k.shape), FLOATS + FLOAT8, k)
    kv_caches(k_cache, v_cache, k)
    if k.shape[1] != k_cache.shape[1]:
        raise ValueError(f"k must have the Hkv = {k_cache.shape[1]} heads of k_cache in {text}, got {describe(k)}")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        stored(name, x, cache)
        apart(f"{name}_cache", cache)
    if (index_k is None) != (index_k_cache is None):
        raise ValueError(
            f"index_k and index_k_cache must both be tensors or both None, got {describe(index_k)} and "
            f"{describe(index_k_cache)}"
        )
    if index_k is not None and index_k_cache is not None:
        tensor("index_k", index_k, f"[T, {HEAD_DIM}]", (k.shape[0], HEAD_DIM), FLOATS + FLOAT8, k)
        shape = (k_cache.shape[0], k_cache.shape[2], HEAD_DIM)
        tensor(
            "index_k_cache",
            index_k_cache,
            f"[P, page, {HEAD_DIM}] with the P and page of k_cache",
            shape,
            FLOATS + FLOAT8,
            k,
        )
        aligned("index_k_cache", index_k_cache)
        stored("index_k", index_k, index_k_cache)
        apart("index_k_cache", index_k_cache)
    tensor("slot_mapping", slot_mapping, "[T]", (k.shape[0],), INDICES, k)
    scale("k_scale", k_scale, k_cache.shape[1], k)
    scale("v_scale", v_scale, k_cache.shape[1], k)
    if needs_grad(k, v, index_k, k_cache, v_cache, index_k_cache):
        raise NotImplementedError(
            "store_kv has no backward pass: expected tensors without grad (or torch.no_grad()), got one that "
            "requires grad"
        )


def merge_states(outs: torch.Tensor, lses: torch.Tensor, *, out_dtype: Optional[torch.dtype] = None) -> None:
    """`outs` and `lses` are tensors here: the public function stacks sequences."""
    tensor("outs", outs, f"[N, T, H, {HEAD_DIM}]", (None, None, None, HEAD_DIM), FLOATS)
    if outs.shape[0] == 0:
        raise ValueError(f"outs must hold at least one state, N >= 1 in [N, T, H, {HEAD_DIM}], got {describe(outs)}")
    aligned("outs", outs)
    tensor("lses", lses, "[N, T, H] like outs", tuple(outs.shape[:3]), (torch.float32,), outs)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be {dtype_list(FLOATS)} or None, got {out_dtype!r}")
    if needs_grad(outs, lses):
        raise NotImplementedError(
            "merge_states has no backward pass: expected tensors without grad (or torch.no_grad()), got one that "
            "requires grad"
        )


def problem(op: str, arguments: dict[str, Any]) -> Optional[str]:
    """What a call with these arguments would raise, as text; None if it passes or if required arguments are missing."""
    try:
        if op == "merge_states":
            arguments = dict(arguments, **{n: stacked(n, arguments[n]) for n in ("outs", "lses") if n in arguments})
        globals()[op](**arguments)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    except TypeError as error:
        # Python's own complaint about a missing argument means that the caller asked about the choice alone.
        return None if "missing" in str(error) and "required" in str(error) else f"TypeError: {error}"
    return None
