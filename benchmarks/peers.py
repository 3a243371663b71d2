"""Other libraries' kernels for the same work, timed in the same run on the same inputs where they can be imported.

    flashinfer-cake  FlashInfer's SM90 programs, called below its public checks: attention (e4m3 caches), scores, top-k
    flashinfer-cute  its CuTe-DSL kernels of the same: e4m3 scores in decode, attention in prefill
    vllm-triton      vLLM's Triton kernels for MiniMax-M3
    flash-attn-4     its own forward over paged caches, for dense_attention

The first three want K and V as the halves of one cache [pages, heads, 128, 256] and the selection head by head: `Paged`. Each
`prepare` does what a caller does once (other layouts, workspace) and returns the call to be timed. FlashInfer scores
with queries in the dtype of the cache: e4m3 queries for an e4m3 cache, vLLM and ours bf16 (a prefill's rows with e4m3
queries are its, those with bf16 queries vLLM's). Where it has no SM90 program for a top-k, its CuTe-DSL kernel follows
the scores.
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch

BLOCK, DIM, TOPK = 128, 128, 16


class Paged(NamedTuple):
    """One attention problem as the peers take it: pages of 128 tokens, 16 blocks a row, no scales."""

    q: torch.Tensor  # [T, Hq, 128] bf16
    kv: torch.Tensor  # [pages, Hkv, 128, 256]
    ids: torch.Tensor  # [Hkv, T, 16], ascending
    table: torch.Tensor
    cu_seqlens: torch.Tensor
    used: torch.Tensor
    q_len: int  # of the longest request; of each in decode
    out: torch.Tensor


class Peer(NamedTuple):
    name: str
    prepare: Callable


def paged(q, k, v, ids, table, cu_seqlens, used, q_len):
    """`Paged` from this package's arguments; `k` may be a whole packed cache already (then v is None)."""
    kv = k if v is None else packed(k, v)
    heads_first = ids.transpose(0, 1).contiguous()
    return Paged(q, kv, heads_first, table, cu_seqlens, used, q_len, torch.empty_like(q))


def packed(k, v):
    kv = torch.empty(*k.shape[:3], 2 * DIM, dtype=k.dtype, device=k.device)
    for part, cache in ((kv[..., :DIM], k), (kv[..., DIM:], v)):
        part.view(torch.uint8).copy_(cache.view(torch.uint8))
    return kv


def _flashinfer():
    try:
        from flashinfer.msa_ops import cake_hopper_sm90
    except ImportError:
        return None
    return cake_hopper_sm90 if torch.cuda.get_device_capability() == (9, 0) else None


def _cute(name):
    """One of FlashInfer's CuTe-DSL modules, which need nvidia-cutlass-dsl to import."""
    try:
        return importlib.import_module(f"flashinfer.msa_ops.cute_dsl.{name}") if _flashinfer() else None
    except ImportError:
        return None


def _vllm():
    try:
        from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn
    except ImportError:
        return None, None
    return index_topk, sparse_attn


def _flash_attention():
    """flash-attn-4's public function; what it raises without a CUDA toolkit's parts is a reason to leave it out too."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError):
        return None
    return flash_attn_varlen_func if torch.cuda.is_available() else None


def importable():
    """Names of the peers found here."""
    found = {
        "flash-attn-4": _flash_attention(),
        "flashinfer-cake": _flashinfer(),
        "flashinfer-cute": _cute("proxy_score_decode_sm90"),
        "vllm-triton": _vllm()[0],
    }
    return [name for name, module in found.items() if module]


# ---- attention: prepare(Paged) -> call


def attention(kv_dtype, prefill=False):
    """The peers whose attention reads caches of this dtype."""
    found = []
    if kv_dtype == torch.float8_e4m3fn and _flashinfer():
        found.append(Peer("flashinfer-cake", _flashinfer_prefill if prefill else _flashinfer_decode))
    if kv_dtype == torch.float8_e4m3fn and prefill and _cute("sparse_prefill_sm90"):
        found.append(Peer("flashinfer-cute", _cute_prefill))
    if _vllm()[1]:
        found.append(Peer("vllm-triton", _vllm_prefill if prefill else _vllm_decode))
    return found


def _flashinfer_decode(p):
    run = _flashinfer().hopper_msa_sparse_decode_attention
    k, v = p.kv[..., :DIM], p.kv[..., DIM:]
    options = {"page_table": p.table, "seqused_k": p.used, "softmax_scale": DIM**-0.5, "out": p.out}
    return lambda: run(p.q, k, v, p.ids, seqlen_q=p.q_len, **options)


def _flashinfer_prefill(p):
    run = _flashinfer().hopper_msa_sparse_attention
    k, v = p.kv[..., :DIM], p.kv[..., DIM:]
    options = {"page_table": p.table, "seqused_k": p.used, "softmax_scale": DIM**-0.5, "out": p.out}
    return lambda: run(p.q, k, v, p.ids, p.cu_seqlens, **options)


def _cute_prefill(p):
    run = _cute("sparse_prefill_sm90").run
    before = (p.used - p.cu_seqlens.diff()).int()
    return lambda: run(p.q, p.kv, p.ids, p.cu_seqlens, p.table, p.used, before, p.out)


def _vllm_decode(p):
    run = _vllm()[1].minimax_m3_sparse_attn_decode
    heads = p.kv.shape[1]
    return lambda: run(p.q, p.kv, p.ids, p.table, p.used, heads, DIM**-0.5, p.out, p.q_len)


def _vllm_prefill(p):
    run = _vllm()[1].minimax_m3_sparse_attn
    heads, before = p.kv.shape[1], p.used - p.cu_seqlens.diff()
    return lambda: run(p.q, p.kv, p.ids, p.table, p.cu_seqlens, p.used, before, p.q_len, heads, DIM**-0.5, p.out)


# ---- selection in decode: prepare(index_q, index_k, table, used, q_len) -> (call, queries as the peer sees them)
# The call returns ids [T, heads, 16] in any order; a peer named "... score" (sizes without a top-k program) returns
# the scores [T, heads, blocks] alone.


def selection(key_dtype):
    found = []
    if key_dtype in (torch.bfloat16, torch.float8_e4m3fn) and _flashinfer():
        found.append(Peer("flashinfer-cake", functools.partial(_flashinfer_selection, _flashinfer_scores)))
        found.append(Peer("flashinfer-cake score", _flashinfer_scores))
    if key_dtype == torch.float8_e4m3fn and _cute("proxy_score_decode_sm90"):
        found.append(Peer("flashinfer-cute", functools.partial(_flashinfer_selection, _cute_scores)))
        found.append(Peer("flashinfer-cute score", _cute_scores))
    if _vllm()[0]:
        found.append(Peer("vllm-triton", _vllm_selection))
    return found


def _candidates(cu_seqlens, used, tokens):
    """Blocks that each row sees, int32 [T]."""
    row = torch.arange(tokens, dtype=torch.int32, device=used.device)
    request = torch.bucketize(row, cu_seqlens[1:], right=True)
    end = used[request] - cu_seqlens[request + 1] + row + 1
    return ((end + BLOCK - 1) // BLOCK).int()


def _flashinfer_scores(index_q, index_k, table, used, q_len):
    run = _flashinfer().hopper_msa_proxy_score_decode
    query = index_q if index_q.dtype == index_k.dtype else index_q.to(index_k.dtype)
    keys = index_k[:, None]
    scores = torch.empty(index_q.shape[1], table.shape[1], index_q.shape[0], device=index_q.device)
    options = {"page_table": table, "seqused_k": used, "per_head": scores}
    call = lambda: run(query, keys, max_seqlen_q=q_len, batch_size=used.numel(), **options).permute(2, 0, 1)
    return call, query.to(index_q.dtype)


def _cute_scores(index_q, index_k, table, used, q_len):
    run = _cute("proxy_score_decode_sm90").run
    query, keys = index_q.to(index_k.dtype), index_k[:, None]
    scores = torch.empty(index_q.shape[1], table.shape[1], index_q.shape[0], device=index_q.device)

    def call():
        run(query, keys, None, table, used, scores)
        return scores.permute(2, 0, 1)

    return call, query.to(index_q.dtype)


def _flashinfer_selection(prepare_scores, index_q, index_k, table, used, q_len):
    score, query = prepare_scores(index_q, index_k, table, used, q_len)
    cu_seqlens = torch.arange(used.numel() + 1, dtype=torch.int32, device=used.device) * q_len
    return _flashinfer_top_k(score, query, table, _candidates(cu_seqlens, used, index_q.shape[0])), query


def _flashinfer_top_k(score, query, table, seen):
    """The call that selects from the scores which `score` writes."""
    cake, cute = _flashinfer(), _cute("topk_select_sm90")
    tokens, heads, _ = query.shape
    shape = {"num_heads": heads, "tiles": table.shape[1], "total_q": tokens}
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    ids = torch.empty(tokens, heads, TOPK, dtype=torch.int32, device=query.device)
    if cake.topk_route_available(**shape, num_sms=sms, masked=True, nvp=True):
        select = lambda scores: cake.hopper_msa_topk_select(scores, TOPK, ids, num_valid_pages=seen, force_end_blocks=1)
    elif cute:
        heads_first = torch.empty(heads, tokens, TOPK, dtype=torch.int32, device=query.device)
        ids = heads_first.transpose(0, 1)
        select = lambda scores: cute.run(scores, None, None, heads_first, seen, 0, 1)
    else:
        raise NotImplementedError(f"no FlashInfer top-k for {shape}")

    def call():
        select(score().permute(1, 2, 0))  # as they were written: [heads, blocks, T]
        return ids

    return call


def _vllm_selection(index_q, index_k, table, used, q_len):
    run = _vllm()[0].minimax_m3_index_decode
    heads, longest = index_q.shape[1], table.shape[1] * BLOCK
    call = lambda: run(index_q, index_k, table, used, longest, TOPK, 0, 1, heads, q_len, q_len).transpose(0, 1)
    return call, index_q


# ---- selection in prefill: prepare(index_q, index_k, table, cu_seqlens, used, q_len) -> (call, queries as it sees them)
# q_len is that of the longest request; what the call returns is as in decode. In scores, a block that a row doesn't see
# may hold anything.


def prefill_selection(query_dtype, key_dtype):
    found = []
    if query_dtype == key_dtype == torch.float8_e4m3fn and _flashinfer():
        found.append(Peer("flashinfer-cake", _flashinfer_prefill_selection))
        found.append(Peer("flashinfer-cake score", _flashinfer_prefill_scores))
    if query_dtype == torch.bfloat16 and _vllm()[0]:
        found.append(Peer("vllm-triton", _vllm_prefill_selection))
    return found


def _flashinfer_prefill_scores(index_q, index_k, table, cu_seqlens, used, q_len):
    run = _flashinfer().hopper_msa_proxy_score_prefill
    keys = index_k[:, None]
    scores = torch.empty(index_q.shape[1], table.shape[1], index_q.shape[0], device=index_q.device)
    options = {"page_table": table, "seqused_k": used, "per_head": scores, "batch_size": used.numel()}
    call = lambda: run(index_q, keys, cu_seqlens, max_seqlen_q=q_len, **options).permute(2, 0, 1)
    return call, index_q


def _flashinfer_prefill_selection(index_q, index_k, table, cu_seqlens, used, q_len):
    score, query = _flashinfer_prefill_scores(index_q, index_k, table, cu_seqlens, used, q_len)
    return _flashinfer_top_k(score, query, table, _candidates(cu_seqlens, used, index_q.shape[0])), query


def _vllm_prefill_selection(index_q, index_k, table, cu_seqlens, used, q_len):
    ops = _vllm()[0]
    heads, longest, before = index_q.shape[1], table.shape[1] * BLOCK, used - cu_seqlens.diff()

    def call():
        scores = ops.minimax_m3_index_score(index_q, index_k, table, cu_seqlens, used, before, q_len, longest, heads)
        return ops.minimax_m3_index_topk(scores, cu_seqlens, before, q_len, TOPK, 0, 1).transpose(0, 1)

    return call, index_q


# ---- dense attention: prepare(q, k_cache, v_cache, table, cu_seqlens, used, causal) -> call, which returns (out, lse)


def dense(dtype):
    return [Peer("flash-attn-4", _flash_attention_dense)] if dtype != torch.float32 and _flash_attention() else []


def _flash_attention_dense(q, k, v, table, cu_seqlens, used, causal):
    """Caches in memory as [page, token, head, 128]: as theirs. Its LSE is [heads, T]."""
    run, caches = _flash_attention(), [x.transpose(1, 2) for x in (k, v)]
    options = {"cu_seqlens_q": cu_seqlens, "seqused_k": used, "page_table": table, "causal": causal}

    def call():
        out, lse = run(q, *caches, **options, return_lse=True)[:2]
        return out, lse.transpose(0, 1)

    return call


# ---- checks and timing


def check_attention(name, got, want):
    """Against our checked answer: P of a peer has bf16's rounding, hence no tighter."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < 1e-2:
        raise AssertionError(f"{name}: relative difference {error:.1e}")


def check_selection(name, got, want):
    """Scores within fp32 rounding; near ties of ids may go either way: 99 % of the ids must be the same."""
    if got.is_floating_point():
        seen = want.isfinite()
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-3, atol=1e-2)
        return
    got, want = got.sort(-1).values, want.sort(-1).values
    same = (got[..., :, None] == want[..., None, :]).any(-1).float().mean()
    if not float(same) > 0.99:
        raise AssertionError(f"{name}: only {100 * float(same):.1f} % of the ids are the same")


def add_option(parser):
    """--peers: which ones, None for all; given without a name, none."""
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="only these (default: all that can be imported)")


def each(found, chosen, run):
    """(name, run(peer)) of every chosen peer that serves the case; what one doesn't serve or gets wrong is printed."""
    results = []
    for peer in found:
        if chosen is not None and peer.name.split()[0] not in chosen:
            continue
        try:
            results.append((peer.name, run(peer)))
        except Exception as error:  # noqa: BLE001  a peer's failure must not end our run
            print(f"{peer.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return results
