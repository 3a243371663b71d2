"""One call of each operation, and of each formulation, for the tests of the backend "jit"."""

import dataclasses

import cases
import torch

import m3_sparse

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def problems(device="cpu"):
    """Two problems of one kind with other lengths."""
    lengths = [([2, 3], [300, 140]), ([1, 3], [70, 513])]
    made = [cases.make(q, kv, heads=(32, 2), dtype=BF16, style="clean", topk=4, seed=5) for q, kv in lengths]
    fields = [f.name for f in dataclasses.fields(cases.Case)]
    moved = [{f: x.to(device) for f in fields if isinstance(x := getattr(case, f), torch.Tensor)} for case in made]
    return [dataclasses.replace(case, **tensors) for case, tensors in zip(made, moved)]


def attention(case, **options):
    args, given = case.sparse()
    return m3_sparse.sparse_attention(*args, **given, return_lse=True, **options)


def selection(case):
    args, options = case.index()
    return (m3_sparse.select_blocks(*args, **options, topk=4, init_blocks=1, local_blocks=1),)


def store(case):
    device = case.q.device
    k, v = torch.randn(2, 5, 2, 128, generator=torch.Generator().manual_seed(3)).to(device, BF16)
    caches = torch.zeros(2, 2, 2, 64, 128, device=device).to(E4M3)
    m3_sparse.store_kv(k, v, None, *caches, None, torch.tensor([3, -1, 70, 127, 0], device=device))
    return (caches.view(torch.uint8),)


def merge(case):
    generator = torch.Generator().manual_seed(case.q.shape[0])
    outs, lses = torch.randn(3, 4, 2, 128, generator=generator), torch.randn(3, 4, 2, generator=generator)
    return m3_sparse.merge_states(outs.to(case.q.device), lses.to(case.q.device))


def dense(case):
    args, options = case.dense()
    return m3_sparse.dense_attention(*args, **options, return_lse=True)


CALLS = {
    "decode": attention,
    "union": lambda case: attention(case, formulation="union"),
    "kv_stationary": lambda case: attention(case, formulation="kv_stationary"),
    "select": selection,
    "store": store,
    "merge": merge,
    "dense": dense,
}
