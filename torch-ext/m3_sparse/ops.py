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

OPERATIONS = ("block_scores", "select_blocks", "sparse_attention", "dense_attention", "store_kv", "merge_states")


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` outside autocast."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with without_autocast(arguments[0].device):
            return function(*arguments)

    return run


def _writes(*arguments: object, **options: object) -> None:
    """The fake of an operator that writes its results into arguments."""


def _gradients(
    grad_out: torch.Tensor,
    grad_lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *rest: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cache, v_cache))
    return grad_q, grad_k, grad_v


# The torch backend: the functions of the specification, whose signatures are the schemas.
for _function, _mutated, _fake in (
    (reference.block_scores, ("scores",), _writes),
    (reference.select_blocks, ("out", "scores"), _writes),
    (reference.sparse_attention, ("out", "lse"), _writes),
    (reference.dense_attention, ("out", "lse"), _writes),
    (_backward.attention_backward, (), _gradients),
    (reference.store_kv, ("k_cache", "v_cache", "index_k_cache"), _writes),
    (reference.merge_states, ("out", "lse"), _writes),
):
    _name = add_op_namespace_prefix(f"torch_{_function.__name__}")
    torch.library.custom_op(_name, mutates_args=_mutated)(_exact(_function))
    torch.library.register_fake(_name)(_fake)


def _plan(*arguments: object) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def _lists(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    causal: bool,
    threshold: float = 0.0,
) -> torch.Tensor:
    """Of the size that launch/prefill_union.cpp lays out."""
    page, requests = k_cache.shape[2], seqused_k.shape[0]
    slots = q.shape[0] // 8 + requests + 1
    blocks = torch.sym_max((torch.sym_min(block_table.shape[1] * page, 2**31 - 1) + 127) // 128, 1)
    items = slots * k_cache.shape[1]
    records = items * torch.sym_min(8 * block_indices.shape[2], blocks)
    sizes = (slots * 32, items * 4, records * 4, records * (512 // page), requests * 4)
    return q.new_empty(sum((size + 255) // 256 * 256 for size in sizes), dtype=torch.uint8)


# The operators of the C++ extension, where this build has it.
if hasattr(ops, "aot_merge_states"):
    for _operation in (*OPERATIONS, "sparse_attention_kv_stationary"):
        torch.library.register_fake(add_op_namespace_prefix(f"aot_{_operation}"))(_writes)
    torch.library.register_fake(add_op_namespace_prefix("aot_attention_plan"))(_plan)
    torch.library.register_fake(add_op_namespace_prefix("aot_union_lists"))(_lists)

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
