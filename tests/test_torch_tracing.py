"""Tracing: torch.compile where sizes change, AOTAutograd, make_fx and export, fake and meta tensors.

On the torch backend; the aot backend's are in test_emulated_torch_integration.py and tests/gpu, each operator by itself in
test_ops.py.
"""

import cases
import pytest
import torch
from test_ops import Problem, counting_backend, equal, public_calls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map_only

import m3_sparse

# ---- torch.compile: sizes that change ----


def grid():
    """Problems that differ in every size that a server changes: rows, requests, pages and table width."""
    for q_lens, kv_lens in (
        # All sizes change between the first two. Inside one of them no two are equal, nor equal to a number of heads:
        # torch would take them for one.
        ((3, 0, 6, 1, 1, 0), (900, 50, 260, 3, 7, 1)), ((5, 2, 1, 2, 3), (300, 1300, 20, 500, 3)),
        ((2, 3, 1, 7, 4, 1, 2), (9, 80, 70, 200, 1000, 50, 60)), ((6, 4), (140, 130)),
    ):  # fmt: skip
        yield Problem(q_lens=q_lens, kv_lens=kv_lens)


@pytest.fixture
def fresh():
    """No memory of sizes that earlier tests changed."""
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic, most", [(True, 1), (None, 2)])
def test_other_sizes_share_a_graph(fresh, dynamic, most):
    """One graph where all sizes are declared dynamic, and two where torch has to see that they change."""
    backend, graphs = counting_backend()
    compiled = None
    for p in grid():
        function, arguments = public_calls(p)["all of them"]
        compiled = compiled or torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
        assert equal(compiled(*arguments), function(*arguments))
    assert len(graphs) == most


@pytest.mark.parametrize("dynamic, most", [(True, 1), (None, 2)])
def test_stores_of_other_sizes_share_a_graph(fresh, dynamic, most):
    backend, graphs = counting_backend()

    def store(k, v, index_k, k_cache, v_cache, index_k_cache, slots):
        m3_sparse.store_kv(k, v, index_k, k_cache, v_cache, index_k_cache, slots)
        return k_cache * 1

    compiled = torch.compile(store, fullgraph=True, backend=backend, dynamic=dynamic)
    for p in grid():
        new = (p.q[:, :2].contiguous(), p.q[:, 2:].contiguous(), p.index_q[:, 0].contiguous())
        slots = torch.arange(p.q.shape[0]) * 5 - 1
        a, b = ([x.clone() for x in (p.k_cache, p.v_cache, p.index_k_cache)] for _ in range(2))
        assert torch.equal(compiled(*new, *a, slots), store(*new, *b, slots)) and equal(a, b)
    assert len(graphs) == most


def test_contiguous_caches_of_other_lengths_share_a_graph(fresh):
    backend, graphs = counting_backend()

    def attend(q, k, v, index_k, cu, used, pad):
        lengths = {"cu_seqlens_q": cu, "seqused_k": used, "leftpad_k": pad}
        ids = m3_sparse.select_blocks(q[:, :2].contiguous(), index_k, None, topk=2, **lengths)
        return m3_sparse.sparse_attention(q, k, v, ids, None, **lengths), m3_sparse.dense_attention(
            q, k, v, None, **lengths
        )

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=True)
    for batch, length, rows in ((6, 300, 8), (5, 301, 2), (9, 77, 4)):
        q, (k, v) = torch.randn(batch * rows, 4, 128), torch.randn(2, batch, 2, length, 128)
        cu, used = torch.arange(batch + 1).int() * rows, torch.full((batch,), length - 9).int()
        arguments = (q, k, v, torch.randn(batch, length, 128), cu, used, torch.arange(batch).int())
        assert equal(compiled(*arguments), attend(*arguments))
    assert len(graphs) == 1


def test_training_of_other_sizes_shares_a_graph(fresh):
    """AOTAutograd with symbolic sizes: forward and backward are traced once."""
    from torch._dynamo.backends.common import aot_autograd

    traced = []

    def count(graph, example_inputs):
        traced.append(graph)
        return graph

    def loss(q, k, v, ids, table, cu, used):
        lengths = {"cu_seqlens_q": cu, "seqused_k": used}
        out, lse = m3_sparse.sparse_attention(q, k, v, ids, table, return_lse=True, **lengths)
        return out.square().sum() + lse.sum() + m3_sparse.dense_attention(q, k, v, table, **lengths).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=count))
    for p in grid():
        p.ids[:, :, 0] = 0  # no empty row, whose LSE would make the loss infinite
        grads = []
        for f in (loss, compiled):
            inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
            grads.append(torch.autograd.grad(f(*inputs, p.ids, *p.tail), inputs))
        assert equal(*grads)
    assert len(traced) == 2


def test_compiled_under_autocast():
    p = Problem()
    function, arguments = public_calls(p)["all of them"]

    def mixed(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*arguments)

    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    assert equal(compiled(*arguments), function(*arguments))


def test_make_fx_and_export():
    p = Problem()
    function, arguments = public_calls(p)["all of them"]
    traced = make_fx(function, tracing_mode="symbolic")(*arguments)
    assert equal(traced(*arguments), function(*arguments))

    class Module(torch.nn.Module):
        def forward(self, *arguments):
            return function(*arguments)

    rows = torch.export.Dim.AUTO
    sizes = ({0: rows}, {0: rows}, None, None, None, None, None, None)
    exported = torch.export.export(Module(), arguments, dynamic_shapes=(sizes,), strict=False).module()
    for q_lens in ((3, 0, 6), (11, 2, 9)):
        other = public_calls(Problem(q_lens=q_lens))["all of them"][1]
        assert equal(exported(*other), function(*other))


# ---- fake and meta tensors ----


def described(x):
    return tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), x.requires_grad


def calls_of(case):
    """Public calls on a case, each returning what it makes or writes."""
    args, kwargs = case.sparse()
    dense, dense_kwargs = case.dense()
    index, index_kwargs = case.index()
    lengths = torch.zeros(2, *case.q.shape[:2])
    return {
        "sparse": (lambda *a, **k: m3_sparse.sparse_attention(*a, return_lse=True, **k), args, kwargs),
        "dense": (lambda *a, **k: m3_sparse.dense_attention(*a, return_lse=True, **k), dense, dense_kwargs),
        "select": (lambda *a, **k: m3_sparse.select_blocks(*a, topk=3, return_scores=True, **k), index, index_kwargs),
        "scores": (m3_sparse.block_scores, index, index_kwargs),
        "merge": (m3_sparse.merge_states, (torch.stack([case.q, case.q]), lengths), {}),
        "merge to fp32": (
            lambda *a: m3_sparse.merge_states(*a, out_dtype=torch.float32),
            ([case.q, case.q], list(lengths)),
            {},
        ),
    }


FAKE_CASES = [
    (layout, page, dtype, kv_dtype)
    for layout in cases.LAYOUTS
    for page in (64, 128)
    for dtype, kv_dtype in (
        (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float8_e5m2), (torch.float32, torch.float8_e4m3fn),
    )
]  # fmt: skip


@pytest.mark.parametrize("layout, page, dtype, kv_dtype", FAKE_CASES)
def test_fake_and_meta_results_look_like_the_real_ones(layout, page, dtype, kv_dtype):
    for q_lens, kv_lens, pad in (([2, 0, 1], [130, 20, 70], 2), ([0], [40], 0), ([1], [1], 0)):
        case = cases.make(
            q_lens, kv_lens, layout=layout, page=page, dtype=dtype, kv_dtype=kv_dtype, pad_rows=pad,
            scales="head" if kv_dtype in cases.FP8 else None,
        )  # fmt: skip
        for name, (function, args, kwargs) in calls_of(case).items():
            real = tree_flatten(function(*args, **kwargs))[0]
            with FakeTensorMode() as mode:
                fake = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                made = tree_flatten(function(*fake[0], **fake[1]))[0]
            meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
            made_meta = tree_flatten(function(*meta[0], **meta[1]))[0]
            assert list(map(described, made)) == list(map(described, real)), name
            assert list(map(described, made_meta)) == list(map(described, real)), name
            assert all(x.device.type == "cpu" for x in made) and all(x.device.type == "meta" for x in made_meta)


def test_fake_gradients_look_like_the_real_ones():
    p = Problem()

    def grads(q, k, v, ids, table, cu, used):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = m3_sparse.sparse_attention(*inputs, ids, table, cu_seqlens_q=cu, seqused_k=used)
        return (out.detach(), *torch.autograd.grad(out.sum(), inputs))

    arguments = (p.q, p.k_cache.transpose(1, 2).contiguous().transpose(1, 2), p.v_cache, p.ids, *p.tail)
    with FakeTensorMode() as mode:
        fake = grads(*(mode.from_tensor(x) for x in arguments))
    assert list(map(described, fake)) == list(map(described, grads(*arguments)))


def test_fake_tensors_of_a_gpu_that_is_not_there():
    with FakeTensorMode():
        q, cache = torch.empty(4, 8, 128, device="cuda"), torch.empty(4, 2, 128, 128, device="cuda")
        indices = [torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((4, 2, 3), (2, 2), (3,), (2,))]
        lengths = {"cu_seqlens_q": indices[2], "seqused_k": indices[3]}
        out = m3_sparse.sparse_attention(q, cache, cache, indices[0], indices[1], **lengths)
        assert out.device.type == "cuda" and out.shape == q.shape
