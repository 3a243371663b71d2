"""The registered operators: one per operation and backend, `<backend>_<operation>` in the namespace of this build.

Operators write tensors that the caller allocated (`out`, `lse`, `scores`, the caches) and return nothing; the backward
passes return gradients. Arguments were checked by the public functions. The operators of the `aot` backend are defined
by the C++ extension where the build has one.
"""

import functools
from collections.abc import Iterable
from typing import Any, Callable, Optional

import torch

from . import _backward, _jit, reference
from ._autocast import without_autocast
from ._ops import add_op_namespace_prefix, ops


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside autocast."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with without_autocast(arguments[0].device):
            return function(*arguments)

    return run


@torch.library.custom_op(add_op_namespace_prefix("torch_block_scores"), mutates_args=("scores",))
@_exact
def torch_block_scores(
    scores: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
) -> None:
    reference.block_scores(scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k)


@torch.library.register_fake(add_op_namespace_prefix("torch_block_scores"))
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op(add_op_namespace_prefix("torch_select_blocks"), mutates_args=("out", "scores"))
@_exact
def torch_select_blocks(
    out: torch.Tensor,
    scores: Optional[torch.Tensor],
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    local_blocks: int,
    init_blocks: int,
) -> None:
    reference.select_blocks(
        out, scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, local_blocks, init_blocks
    )


@torch.library.register_fake(add_op_namespace_prefix("torch_select_blocks"))
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op(add_op_namespace_prefix("torch_sparse_attention"), mutates_args=("out", "lse"))
@_exact
def torch_sparse_attention(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    reference.sparse_attention(
        out,
        lse,
        q,
        k_cache,
        v_cache,
        block_indices,
        block_table,
        cu_seqlens_q,
        seqused_k,
        softmax_scale,
        causal,
        k_scale,
        v_scale,
    )


@torch.library.register_fake(add_op_namespace_prefix("torch_sparse_attention"))
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op(add_op_namespace_prefix("torch_dense_attention"), mutates_args=("out", "lse"))
@_exact
def torch_dense_attention(
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    reference.dense_attention(
        out, lse, q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, softmax_scale, causal, k_scale, v_scale
    )


@torch.library.register_fake(add_op_namespace_prefix("torch_dense_attention"))
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op(add_op_namespace_prefix("torch_attention_backward"), mutates_args=())
@_exact
def torch_attention_backward(
    grad_out: torch.Tensor,
    grad_lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: Optional[torch.Tensor],
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward.attention_backward(
        grad_out,
        grad_lse,
        q,
        k_cache,
        v_cache,
        block_indices,
        block_table,
        cu_seqlens_q,
        seqused_k,
        softmax_scale,
        causal,
        k_scale,
        v_scale,
    )


@torch.library.register_fake(add_op_namespace_prefix("torch_attention_backward"))
def _(
    grad_out: torch.Tensor,
    grad_lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: Optional[torch.Tensor],
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cache, v_cache))
    return grad_q, grad_k, grad_v


@torch.library.custom_op(
    add_op_namespace_prefix("torch_store_kv"), mutates_args=("k_cache", "v_cache", "index_k_cache")
)
def torch_store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    index_k: Optional[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: Optional[torch.Tensor],
    slot_mapping: torch.Tensor,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
) -> None:
    reference.store_kv(k, v, index_k, k_cache, v_cache, index_k_cache, slot_mapping, k_scale, v_scale)


@torch.library.register_fake(add_op_namespace_prefix("torch_store_kv"))
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op(add_op_namespace_prefix("torch_merge_states"), mutates_args=("out", "lse"))
@_exact
def torch_merge_states(out: torch.Tensor, lse: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    reference.merge_states(out, lse, outs, lses)


@torch.library.register_fake(add_op_namespace_prefix("torch_merge_states"))
def _(*arguments: object) -> None:
    return None


# The operators of the C++ extension, where this build has it. All of them write their results into arguments.
if hasattr(ops, "aot_merge_states"):

    @torch.library.register_fake(add_op_namespace_prefix("aot_block_scores"))
    def _(*arguments: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_select_blocks"))
    def _(*arguments: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_sparse_attention"))
    def _(*arguments: object, **options: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_dense_attention"))
    def _(*arguments: object, **options: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_attention_plan"))
    def _(*arguments: object) -> torch.Tensor:
        return torch.empty(2, dtype=torch.int64, device="cpu")

    # Of the size that launch/prefill_union.cpp lays out.
    @torch.library.register_fake(add_op_namespace_prefix("aot_union_lists"))
    def _(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_indices: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        causal: bool,
        threshold: float = 0.0,
    ) -> torch.Tensor:
        page, requests = k_cache.shape[2], seqused_k.shape[0]
        slots = q.shape[0] // 8 + requests + 1
        blocks = torch.sym_max((torch.sym_min(block_table.shape[1] * page, 2**31 - 1) + 127) // 128, 1)
        items = slots * k_cache.shape[1]
        records = items * torch.sym_min(8 * block_indices.shape[2], blocks)
        sizes = (slots * 32, items * 4, records * 4, records * (512 // page), requests * 4)
        return q.new_empty(sum((size + 255) // 256 * 256 for size in sizes), dtype=torch.uint8)

    @torch.library.register_fake(add_op_namespace_prefix("aot_sparse_attention_kv_stationary"))
    def _(*arguments: object, **options: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_store_kv"))
    def _(*arguments: object) -> None:
        return None

    @torch.library.register_fake(add_op_namespace_prefix("aot_merge_states"))
    def _(*arguments: object) -> None:
        return None


OPERATIONS = ("block_scores", "select_blocks", "sparse_attention", "dense_attention", "store_kv", "merge_states")
BUILT = {
    (op, backend): getattr(ops, f"{backend}_{op}").default
    for op in OPERATIONS
    for backend in ("torch", "aot")
    if hasattr(ops, f"{backend}_{op}")
}
_jit_operators = _jit.register(BUILT)


def writing(backend: str, tensors: Iterable[Optional[torch.Tensor]]) -> None:
    """Tell autograd that an operator is about to write the caller's tensors: what a backward pass has saved of them is
    not what it was. The torch backend's operators do this themselves.
    """
    if backend != "torch" and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])


def refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise NotImplementedError(
        "m3_sparse has no batching rule for torch.vmap: its functions take the rows of all requests packed in one call "
        "(cu_seqlens_q says whose they are)"
    )


_INNER = ("torch_attention_backward", "aot_attention_plan", "aot_union_lists", "aot_sparse_attention_kv_stationary")
for _operator in (*BUILT.values(), *(getattr(ops, name).default for name in _INNER if hasattr(ops, name))):
    torch.library.register_vmap(_operator, refuse_vmap)
