"""Attention over paged KV caches: over the selected blocks, over everything, and the merge of partial results."""

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from . import _contiguous, _limits, checks
from ._arguments import HEAD_DIM, needs_grad, stacked
from ._ops import ops
from .capability import choose
from .ops import BUILT, refuse_vmap, writing

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]
Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]  # the latter with return_lse


class _TorchAttention(torch.autograd.Function):
    """Attention on the torch backend with gradients for q, k_cache and v_cache; dense if `block_indices` is None."""

    @staticmethod
    def forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        _launch("torch", out, lse, q, *rest)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.softmax_scale, ctx.causal, k_scale, v_scale = inputs
        ctx.save_for_backward(*tensors, k_scale, v_scale)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return refuse_vmap(info, in_dims, *inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        *tensors, k_scale, v_scale = ctx.saved_tensors
        # Dynamo can't trace a function inside a backward pass, and needs none: no torch.func is about there.
        gradients = ops.torch_attention_backward if torch.compiler.is_compiling() else _TorchAttentionBackward.apply
        options = (ctx.softmax_scale, ctx.causal, k_scale, v_scale)
        grads = gradients(grad_out, grad_lse, *tensors, *options)
        return (*grads, *[None] * (len(tensors) + len(options) - len(grads)))


class _TorchAttentionBackward(torch.autograd.Function):
    """The gradients, as a function of their own: torch.func differentiates what runs inside a backward pass as well."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return ops.torch_attention_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return refuse_vmap(info, in_dims, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("m3_sparse has no second derivatives of attention: expected create_graph=False")


def _launch(
    backend: str,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: Optional[torch.Tensor],
    *rest: Any,
) -> None:
    if block_indices is None:
        BUILT["dense_attention", backend](out, lse, q, k_cache, v_cache, *rest)
    else:
        BUILT["sparse_attention", backend](out, lse, q, k_cache, v_cache, block_indices, *rest)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: Optional[torch.Tensor],
    table: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: Optional[float],
    causal: bool,
    k_scale: Optional[torch.Tensor],
    v_scale: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    lse: Optional[torch.Tensor],
    return_lse: bool,
    leftpad_k: Optional[torch.Tensor],
    formulation: Optional[str] = None,
) -> Result:
    rows = None
    if table is None:
        rows = _contiguous.rows_of(k_cache, seqused_k, leftpad_k)
        k_cache, v_cache, seqused_k = _contiguous.slots(k_cache), _contiguous.slots(v_cache), rows.seqused
    grad = needs_grad(q, k_cache, v_cache)
    op = "dense_attention" if block_indices is None else "sparse_attention"
    if block_indices is None:
        outside = _limits.dense_attention(q, k_cache, v_cache)
    else:
        outside = _limits.sparse_attention(q, k_cache, block_indices)
    backend = choose(op, q.device, q.dtype, k_cache.dtype, grad, outside)
    if rows is not None:
        table = _contiguous.table_for(backend, rows, _contiguous.ATTENTION_RUN)
    assert table is not None  # given, or made of the rows
    if backend != "torch":
        # The selection has free strides; the rest is read as contiguous rows.
        if block_indices is not None and block_indices.dtype != torch.int32:
            block_indices = _limits.int32(block_indices)
        table, cu_seqlens_q, seqused_k = (_limits.int32(x) for x in (table, cu_seqlens_q, seqused_k))
        k_scale, v_scale = _limits.packed(k_scale), _limits.packed(v_scale)
        if k_cache.shape[0] == 0:
            formulation = None  # no token at all: every formulation gives empty rows, and some take no empty cache
        # Compiled calls leave a refusal to the launch: a plan is a number of the host.
        if formulation is not None and block_indices is not None and not torch.compiler.is_compiling():
            _limits.plan(q, k_cache, v_cache, block_indices, table, cu_seqlens_q, seqused_k, causal, formulation)
    softmax_scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    inputs = (q, k_cache, v_cache, block_indices, table, cu_seqlens_q, seqused_k)
    options = (softmax_scale, causal, k_scale, v_scale)
    if grad:
        out, lse = _TorchAttention.apply(*inputs, *options)  # type: ignore[no-untyped-call]
    else:
        given = (out, lse)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        writing(backend, given)
        # The operator's arguments behind the inputs: splits and overlap (of measurements), formulation.
        forced = () if formulation is None or backend == "torch" else (0, True, checks.FORMULATIONS[formulation])
        _launch(backend, out, lse, *inputs, *options, *forced)
    return (out, lse) if return_lse and lse is not None else out


def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_indices: torch.Tensor,
    block_table: Optional[torch.Tensor],
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = True,
    k_scale: Optional[torch.Tensor] = None,
    v_scale: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    formulation: Optional[str] = None,
) -> Result:
    """Softmax attention of each query row over the visible tokens of the blocks selected for it.

    Query i of a request sits at position seqused_k - q_len + i. Block b is the tokens 128 b to 128 b + 127 of the
    request. T query rows in all, B requests, Hq query and Hkv KV heads (Hq % Hkv == 0; query head h uses KV head h //
    (Hq / Hkv)), P pages of 64 or 128 tokens, tables M pages wide.

    Args:
        q: [T, Hq, 128], bf16, fp16 or fp32; the queries of all requests, one after the other.
        k_cache, v_cache: [P, Hkv, page, 128], the dtype of q or float8 (e4m3fn, e5m2). Any strides with last stride 1,
            base and strides multiples of 16 bytes: HND, a transposed NHD cache, halves of a packed cache, overlapping
            pages.
        block_indices: [T, Hkv, K] int32 or int64, any strides and order. -1 and every other id that is no candidate
            block of its row contributes nothing; a duplicate counts once. The local block is not added.
        block_table: [B, M] int32 or int64, page numbers. Entries outside [0, P) contribute nothing. None: the caches are
            contiguous, k_cache and v_cache [B, Hkv, S, 128] with a row a request; S may be any number, and the rows of
            both lie the same whole number of tokens apart. Nothing is copied.
        cu_seqlens_q: [B + 1] int32 or int64, ascending from 0 to at most T. Rows at or past its last entry are empty rows.
            Of other offsets nothing is promised but that no memory outside the tensors is touched.
        seqused_k: [B] int32 or int64, tokens in the cache, the new ones included; clamped to what the table, or the row,
            reaches.
        softmax_scale: factor of the logits, default 1 / sqrt(128). The kernels take logits up to 10^8 in magnitude.
        causal: a row sees tokens up to its own position; if False, all seqused_k tokens of its blocks.
        k_scale, v_scale: fp32 with 1 or Hkv elements, or None for 1; true value = stored value * scale. Of any sign. One
            that is NaN or infinite spoils the rows of its head that see a token, and nothing else: k_scale (and
            softmax_scale, for all heads) makes their out and lse NaN, v_scale makes no element of their out finite.
        leftpad_k: [B] int32 or int64, without a block_table only: slots of a row before its first token. seqused_k does
            not count them, blocks begin behind them.
        out: [T, Hq, 128] in q's dtype to write into. lse: [T, Hq] fp32 to write into. Neither with gradients.
        return_lse: return (out, lse).
        formulation: how the aot backend computes the rows; all agree up to rounding, and no other backend looks at it.
            "decode": a row for itself. "union": 8 neighbouring rows at a time, over the union of their blocks.
            "kv_stationary": a block at a time, with all rows that chose it. None, the default: by shape, and for long
            queries by how much the selections of neighbouring rows overlap, which is found on the device for each
            request. A row's bits depend on its own inputs and on the formulation: name one where results must not
            change with what is around a row (explain() tells what a call takes). "union" takes 16 query heads a KV
            head.

    Returns:
        out [T, Hq, 128] in q's dtype, or (out, lse); lse [T, Hq] fp32 is the natural log of the sum of exp(scaled
        logits). An empty row (nothing visible) is output 0 and lse -inf.

    Differentiable in q, k_cache and v_cache on the torch backend, with a block_table. Specification: `reference.sparse_attention`.

    Raises:
        TypeError, ValueError: an argument breaks one of the rules above.
        NotImplementedError: nothing runs these dtypes, or the backend asked for by name cannot.
    """
    checks.sparse_attention(
        q,
        k_cache,
        v_cache,
        block_indices,
        block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        k_scale=k_scale,
        v_scale=v_scale,
        leftpad_k=leftpad_k,
        out=out,
        lse=lse,
        return_lse=return_lse,
        formulation=formulation,
    )
    lengths = (block_table, cu_seqlens_q, seqused_k)
    scales = (k_scale, v_scale)
    return _attend(
        q, k_cache, v_cache, block_indices, *lengths, softmax_scale, causal, *scales, out, lse, return_lse, leftpad_k,
        formulation,
    )  # fmt: skip


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
    leftpad_k: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
) -> Result:
    """Softmax attention of each query row over all tokens it may see: the model's dense layers, on the same caches.

    Arguments, results, gradients and errors are those of `sparse_attention`, without `block_indices`. No [T, seqused_k]
    matrix is ever built. Bytes past seqused_k change nothing, NaN included; a value inside it must be finite, though,
    even for rows before its token. Specification: `reference.dense_attention`.
    """
    checks.dense_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        k_scale=k_scale,
        v_scale=v_scale,
        leftpad_k=leftpad_k,
        out=out,
        lse=lse,
        return_lse=return_lse,
    )
    lengths = (block_table, cu_seqlens_q, seqused_k)
    scales = (k_scale, v_scale)
    return _attend(q, k_cache, v_cache, None, *lengths, softmax_scale, causal, *scales, out, lse, return_lse, leftpad_k)


def merge_states(
    outs: Tensors, lses: Tensors, *, out_dtype: Optional[torch.dtype] = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine N partial attention results of the same queries over disjoint sets of keys.

    lse = log(sum_i exp(lses[i])), out = sum_i exp(lses[i] - lse) * outs[i], summed in fp32, states in ascending order.

    Args:
        outs: [N, T, H, 128], bf16, fp16 or fp32, last stride 1, the others and the base multiples of 16 bytes; or a
            sequence of N tensors [T, H, 128], which are stacked.
        lses: [N, T, H] fp32, any strides; or a sequence of N tensors [T, H].
        out_dtype: dtype of the result, default that of outs.

    Returns:
        (out [T, H, 128], lse [T, H] fp32). A state with LSE -inf contributes nothing, even where its output is NaN; if
        all of a row are -inf, the row is output 0 and lse -inf. NaN or +inf in an LSE makes the row NaN.

    No gradients. Specification: `reference.merge_states`.

    Raises:
        TypeError, ValueError: an argument breaks one of the rules above. NotImplementedError: an input requires grad,
            or the backend cannot run it.
    """
    outs, lses = stacked("outs", outs), stacked("lses", lses)
    checks.merge_states(outs, lses, out_dtype=out_dtype)
    dtype = outs.dtype if out_dtype is None else out_dtype
    backend = choose("merge_states", outs.device, outs.dtype, dtype)
    out = outs.new_empty(outs.shape[1:], dtype=dtype)
    lse = lses.new_empty(lses.shape[1:])
    BUILT["merge_states", backend](out, lse, outs, lses)
    return out, lse
