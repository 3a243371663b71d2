"""The torch backend on a GPU: the CPU's answers, without a host synchronisation, and under CUDA graphs.

torch.cuda.set_sync_debug_mode("error") makes every synchronising torch call raise.
"""

import contextlib
import dataclasses

import cases
import oracle
import pytest
import torch

import m3_sparse

LENGTHS = {"q_lens": [3, 0, 5, 1, 9], "kv_lens": [1290, 33, 2500, 1, 129], "pad_rows": 2}


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(case):
    """Each distinct buffer is moved once and its views are laid over the copy with the same strides."""
    moved = {}

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).cuda().untyped_storage()
        view = torch.empty(0, dtype=x.dtype, device="cuda")
        return view.set_(moved[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return dataclasses.replace(case, **{f.name: move(getattr(case, f.name)) for f in dataclasses.fields(case)})


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_every_operation_without_a_synchronisation(layout, page, dtype, kv_dtype):
    scales = "head" if kv_dtype in cases.FP8 else None
    case = cases.make(
        **LENGTHS, layout=layout, page=page, dtype=dtype, kv_dtype=kv_dtype, kind="int", scales=scales, seed=7
    )
    gpu = on_gpu(case)
    with m3_sparse.backend("torch"), no_synchronisation():
        args, kwargs = gpu.sparse()
        out, lse = m3_sparse.sparse_attention(*args, **kwargs, return_lse=True)
        args, kwargs = gpu.dense()
        dense, dense_lse = m3_sparse.dense_attention(*args, **kwargs, return_lse=True)
        args, kwargs = gpu.index()
        ids = m3_sparse.select_blocks(*args, **kwargs)
        scores = m3_sparse.block_scores(*args, **kwargs)
    args, kwargs = case.sparse()
    oracle.check_attention(out.cpu(), lse.cpu(), *oracle.sparse_attention(*args, **kwargs))
    args, kwargs = case.dense()
    oracle.check_attention(dense.cpu(), dense_lse.cpu(), *oracle.dense_attention(*args, **kwargs))
    args, kwargs = case.index()
    assert torch.equal(scores.cpu(), m3_sparse.block_scores(*args, **kwargs))
    assert torch.equal(ids.cpu(), m3_sparse.select_blocks(*args, **kwargs))


def test_store_without_a_synchronisation():
    pages, heads, page = 5, 2, 64
    k, v = torch.randn(9, heads, 128, dtype=torch.bfloat16), torch.randn(9, heads, 128, dtype=torch.bfloat16) * 300
    index_k = torch.randn(9, 128, dtype=torch.bfloat16)
    caches = [torch.zeros(pages, heads, page, 128).to(torch.float8_e4m3fn) for _ in range(2)]
    caches.append(torch.zeros(pages, page, 128).to(torch.float8_e4m3fn))
    slots = torch.tensor([0, -1, 319, 64, 320, 2**40, 3, 77, 65])
    gpu = [x.cuda() for x in caches]
    with m3_sparse.backend("torch"):
        m3_sparse.store_kv(k, v, index_k, *caches, slots)
        arguments = (k.cuda(), v.cuda(), index_k.cuda(), *gpu, slots.cuda())
        with no_synchronisation():
            m3_sparse.store_kv(*arguments)
    for got, want in zip(gpu, caches):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_a_graph_follows_lengths_pages_and_selection():
    case = cases.make([1, 4, 2], [1000, 2000, 300], dtype=torch.bfloat16, kind="int", seed=1)
    gpu = on_gpu(case)
    with m3_sparse.backend("torch"):
        args, kwargs = gpu.sparse()
        m3_sparse.sparse_attention(*args, **kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = m3_sparse.sparse_attention(*args, **kwargs, return_lse=True)
    for lengths in ([1000, 2000, 300], [1, 1500, 0], [640, 129, 256]):
        case.seqused_k.copy_(torch.tensor(lengths))
        gpu.seqused_k.copy_(case.seqused_k)
        out.fill_(float("nan"))
        graph.replay()
        args, kwargs = case.sparse()
        oracle.check_attention(out.cpu(), lse.cpu(), *oracle.sparse_attention(*args, **kwargs))
