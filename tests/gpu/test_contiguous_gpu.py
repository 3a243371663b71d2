"""Contiguous caches on a GPU: the bits of the paged call by every kernel, and no copy in the adapter."""

import types

import cases
import pytest
import torch
from contiguous import LAYOUTS, contiguous
from test_decode_gpu import BF16, DEVICE, E4M3, E5M2, FP16, on_gpu

import m3_sparse


def problem(layout, **options):
    case = cases.make([40, 1, 33, 300], [1031, 7, 261, 800], topk=5, seed=3, **options)
    caches = [on_gpu(x) for x in contiguous(case, 0, [0, 1024, 3, 231], layout)]
    return case, caches


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (FP16, E5M2), (BF16, E4M3)], ids=str)
@pytest.mark.parametrize("formulation", ["decode", "union", "kv_stationary", None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_attention(layout, formulation, dtypes):
    q, kv = dtypes
    scales = "head" if kv.itemsize == 1 else None
    case, (k, v, _, pad) = problem(layout, heads=(32, 2), dtype=q, kv_dtype=kv, scales=scales)
    args, options = case.sparse()
    args, options = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
    options["return_lse"], options["formulation"] = True, formulation
    with m3_sparse.backend("aot"):
        want = m3_sparse.sparse_attention(*args, **options)
        got = m3_sparse.sparse_attention(args[0], k, v, args[3], None, **options, leftpad_k=pad)
    for a, b in zip(got, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_selection(layout, dtypes):
    q, k = dtypes
    case, (_, _, keys, pad) = problem(layout, heads=(4, 2), kind="int", dtype=BF16, kv_dtype=k)
    (index_q, paged, table), options = case.index()
    index_q, paged, table = on_gpu(index_q.to(q)), on_gpu(paged), on_gpu(table)
    options = {name: on_gpu(x) for name, x in options.items()}
    with m3_sparse.backend("aot"):
        want = m3_sparse.select_blocks(index_q, paged, table, **options, topk=3)
        got = m3_sparse.select_blocks(index_q, keys, None, **options, topk=3, leftpad_k=pad)
        scores = m3_sparse.block_scores(index_q, keys, None, **options, leftpad_k=pad)
        want_scores = m3_sparse.block_scores(index_q, paged, table, **options)
    assert torch.equal(got, want) and torch.equal(scores, want_scores[..., : scores.shape[2]])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("q_len", [1, 700])
def test_the_adapter_copies_nothing(q_len, padded):
    """Above what it returns, a layer takes less than a tenth of its K."""
    from m3_sparse import transformers as adapter

    batch, length = 2, 65536 - 77
    k, v = (torch.randn(batch, 4, length, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    index_k = torch.randn(batch, 1, length, 128, device=DEVICE, dtype=BF16)
    query = torch.randn(batch, 64, q_len, 128, device=DEVICE, dtype=BF16)
    index = adapter.IndexStates(torch.randn(batch, 4, q_len, 128, device=DEVICE, dtype=BF16), index_k)
    indexer = types.SimpleNamespace(block_size=128, head_dim=128, num_heads=4, topk_blocks=16, local_blocks=1)
    layer = types.SimpleNamespace(indexer=indexer, layer_idx=1)
    columns = [torch.full((batch,), length - q_len), torch.full((batch,), length), torch.tensor([0, 1234])]
    mask = torch.stack(columns[: 3 if padded else 1], -1)[:, None, None, :].to(DEVICE)

    def call():
        with m3_sparse.backend("aot"), torch.no_grad():
            return adapter.flash_attn_forward(layer, query, k, v, mask, block_indices=index)[0]

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    # q_len 1: nothing but tables. Else: queries token by token, lists and partial results of the prefill.
    assert used < (k.numel() * 2 // 10 if q_len == 1 else 2**30), used
