"""The functions among torch's other features: shapes that change under torch.compile, fake and meta tensors, inference
mode, autocast, torch.func, deterministic mode, default device and dtype, copies of modules, forks and threads.

On CPU tensors, which the torch backend takes. The aot backend has the same questions in test_emulated_torch_integration.py
and tests/gpu; opcheck of the torch operators, and their compilation and gradients, are in test_ops.py.
"""

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
import traceback

import cases
import pytest
import torch
from test_ops import Problem, calls, counting_backend, equal, public_calls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map_only

import m3_sparse
from m3_sparse._ops import ops

FUNCTIONS = list(public_calls(Problem()))


def results(p=None):
    """Everything that the public functions make of one problem, in one list."""
    return [x for f, arguments in public_calls(p or Problem()).values() for x in tree_flatten(f(*arguments))[0]]


def seeded_results(p):
    torch.manual_seed(0)  # merge_states draws its LSEs
    return results(p)


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


# ---- modes ----


def test_inference_mode():
    p = Problem()
    with torch.inference_mode():
        torch.manual_seed(0)
        made = results(Problem())
        assert all(x.is_inference() for x in made)
        out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2])
        m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths, out=out, lse=lse)
    assert equal(made, seeded_results(p))
    # Tensors of inference mode are read outside it, as everywhere in torch.
    k_cache = made[1].new_zeros(p.k_cache.shape)
    with torch.inference_mode():
        k_cache = p.k_cache.clone()
    out = m3_sparse.dense_attention(p.q, k_cache, p.v_cache, p.block_table, **p.lengths)
    assert torch.equal(out, m3_sparse.dense_attention(p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, autocast):
    """What a call computes follows from its arguments: float32 products stay float32, those of the gradients too."""
    p = Problem(dtype)
    prepared = public_calls(p)

    def everything():
        made = [x for function, arguments in prepared.values() for x in tree_flatten(function(*arguments))[0]]
        inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
        out = m3_sparse.sparse_attention(*inputs, p.ids, p.block_table, **p.lengths)
        return [*made, *torch.autograd.grad(out.float().square().sum(), inputs)]

    want = everything()
    with torch.autocast("cpu", dtype=autocast):
        got = everything()
    assert equal(got, want) and [x.dtype for x in got] == [x.dtype for x in want]


def test_deterministic_mode_changes_nothing():
    """It also fills what torch.empty returns with NaN, so a byte that an operator left would show."""
    p = Problem()
    torch.manual_seed(0)
    want, lse = results(p), torch.randn(p.q.shape[:2])
    inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
    out = m3_sparse.dense_attention(*inputs, p.block_table, **p.lengths)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
        assert equal(seeded_results(p), want) and lse.isfinite().all()
        out = m3_sparse.dense_attention(*inputs, p.block_table, **p.lengths)
        assert equal(torch.autograd.grad(out.square().sum(), inputs), grads)
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default(set_default, value, back):
    set_default(value)
    try:
        yield
    finally:
        set_default(back)


def fixed_calls():
    """Public calls whose own tensors are made here, before a default is changed."""
    p = Problem()
    made = dict(public_calls(p))
    new = (p.q[:, :2].contiguous(), p.q[:, 2:].contiguous(), p.index_q[:, 0].contiguous())
    slots = torch.arange(p.q.shape[0]) * 3 - 1

    def store(k, v, index_k, *caches):
        caches = [x.clone() for x in caches]
        m3_sparse.store_kv(k, v, index_k, *caches, slots)
        return caches

    def train(q, k, v):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = m3_sparse.sparse_attention(*inputs, p.ids, p.block_table, **p.lengths, return_lse=True)
        return torch.autograd.grad((out, lse), inputs, (out.detach(), torch.zeros_like(lse)))

    def no_pages(q, table, cu, used):
        empty = q.new_zeros(0, 2, 128, 128)
        return m3_sparse.dense_attention(q, empty, empty, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True)

    def contiguous(q, k, v, cu, used):
        lengths = {"cu_seqlens_q": cu, "seqused_k": used}
        return m3_sparse.dense_attention(q, k, v, None, **lengths, leftpad_k=used * 0 + 1)

    made["store_kv"] = (store, (*new, p.k_cache, p.v_cache, p.index_k_cache))
    made["train"] = (train, (p.q, p.k_cache, p.v_cache))
    made["no pages"] = (no_pages, (p.q, *p.tail))
    made["contiguous"] = (contiguous, (p.q, p.k_cache[:3], p.v_cache[:3], *p.tail[1:]))
    made["scaled"] = (
        lambda q, k, v, i, t, c, u, a, b: m3_sparse.sparse_attention(
            q, k, v, i, t, cu_seqlens_q=c, seqused_k=u, k_scale=a, v_scale=b
        ),
        (p.q, p.k_cache, p.v_cache, p.ids, *p.tail, p.k_scale, p.v_scale),
    )
    return made


@pytest.mark.parametrize(
    "set_default, value, back",
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_dtype, torch.bfloat16, torch.float32),
        (torch.set_default_dtype, torch.float16, torch.float32),
        (torch.set_default_device, "meta", None),
    ],
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_defaults_of_device_and_dtype_change_nothing(set_default, value, back):
    prepared = fixed_calls()
    want = {name: tree_flatten(f(*arguments))[0] for name, (f, arguments) in prepared.items()}
    with default(set_default, value, back):
        for name, (function, arguments) in prepared.items():
            got = tree_flatten(function(*arguments))[0]
            assert [described(x) for x in got] == [described(x) for x in want[name]], name
            assert all(x.device.type == "cpu" for x in got) and equal(got, want[name]), name


# ---- autograd beyond backward() ----


def attend_with(p, sparse=True):
    def function(q, k, v):
        if sparse:
            return m3_sparse.sparse_attention(q, k, v, p.ids, p.block_table, **p.lengths)
        return m3_sparse.dense_attention(q, k, v, p.block_table, **p.lengths)

    return function


@pytest.mark.parametrize("sparse", [True, False])
def test_torch_func_in_reverse_mode(sparse):
    p = Problem()
    function, inputs = attend_with(p, sparse), (p.q, p.k_cache, p.v_cache)
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    assert equal(torch.func.grad(lambda *x: function(*x).square().sum(), argnums=(0, 1, 2))(*inputs), want)
    out, pull = torch.func.vjp(function, *inputs)
    assert equal(pull(2 * out), want) and torch.equal(out, function(*inputs))
    grads, value = torch.func.grad_and_value(lambda q: function(q, *inputs[1:]).square().sum())(p.q)
    assert torch.equal(grads, want[0]) and torch.equal(value, function(*inputs).square().sum())


def test_functional_call_of_a_layer():
    p = Problem()
    layer = m3_sparse.layers.DenseAttention()
    out = torch.func.functional_call(layer, {}, (p.q, p.k_cache, p.v_cache, *p.tail))
    assert torch.equal(out, layer(p.q, p.k_cache, p.v_cache, *p.tail))


def test_second_derivatives_are_refused():
    p = Problem()
    function = attend_with(p)
    q = p.q.clone().requires_grad_()
    [grad] = torch.autograd.grad(function(q, p.k_cache, p.v_cache).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        grad.sum().backward()
    first = torch.func.grad(lambda q: function(q, p.k_cache, p.v_cache).square().sum())
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.func.grad(lambda q: first(q).sum())(p.q)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("sparse", [True, False])
def test_forward_mode_is_refused(place, sparse):
    """It would pass an operator by and give a derivative of zero."""
    p = Problem()
    inputs = [p.q, p.k_cache, p.v_cache]

    def function(x):
        return attend_with(p, sparse)(*inputs[:place], x, *inputs[place + 1 :])

    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(function, (inputs[place],), (inputs[place],))
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            function(forward_ad.make_dual(inputs[place], inputs[place]))
        function(inputs[place])  # without a tangent nothing is asked for
        with pytest.raises(NotImplementedError, match="merge_states has no backward"):
            m3_sparse.merge_states(forward_ad.make_dual(p.q[None], p.q[None]), torch.zeros(1, *p.q.shape[:2]))
        with pytest.raises(NotImplementedError, match="store_kv has no backward"):
            k = forward_ad.make_dual(p.q[:, :2], p.q[:, :2])
            m3_sparse.store_kv(k, k, None, p.k_cache, p.v_cache, None, torch.arange(9))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_refused(name):
    function, arguments = public_calls(Problem())[name]
    for place, x in enumerate(arguments):
        if isinstance(x, torch.Tensor):
            dims = tuple(0 if i == place else None for i in range(len(arguments)))
            stacked = [torch.stack([y, y]) if i == place else y for i, y in enumerate(arguments)]
            with pytest.raises(NotImplementedError, match="no batching rule for torch.vmap: .* packed in one call"):
                torch.vmap(function, dims)(*stacked)


@pytest.mark.parametrize("name", list(calls()))
def test_every_operator_refuses_vmap(name):
    op, arguments = calls()[name]
    dims = [None if not isinstance(x, torch.Tensor) else 0 for x in arguments]
    stacked = [torch.stack([x, x]) if isinstance(x, torch.Tensor) else x for x in arguments]
    with pytest.raises(NotImplementedError, match="no batching rule for torch.vmap"):
        torch.vmap(getattr(ops, op).default, tuple(dims))(*stacked)


def test_vmap_over_a_gradient_is_refused():
    p = Problem()
    with pytest.raises(NotImplementedError, match="no batching rule"):
        torch.func.jacrev(lambda q: attend_with(p)(q, p.k_cache, p.v_cache).sum((1, 2)))(p.q)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_results_into_a_tensor_that_requires_grad_are_refused(name):
    p = Problem()
    given = {"out": torch.empty_like(p.q), "lse": torch.empty(p.q.shape[:2])}[name].requires_grad_()
    for function, arguments in (
        (m3_sparse.sparse_attention, (p.q, p.k_cache, p.v_cache, p.ids, p.block_table)),
        (m3_sparse.dense_attention, (p.q, p.k_cache, p.v_cache, p.block_table)),
    ):
        with pytest.raises(ValueError, match=f"{name} must not require grad"):
            function(*arguments, **p.lengths, **{name: given})
        with torch.no_grad():
            function(*arguments, **p.lengths, **{name: given})


def test_a_write_to_what_backward_saved_is_noticed():
    p = Problem()
    for write in (
        lambda: m3_sparse.store_kv(p.q[:, :2], p.q[:, 2:], None, p.k_cache, p.v_cache, None, torch.arange(9)),
        lambda: m3_sparse.sparse_attention(p.q, p.k_cache, p.v_cache, p.ids, p.block_table, **p.lengths, out=scale),
        lambda: m3_sparse.select_blocks(p.index_q, p.index_k_cache, p.block_table, **p.lengths, topk=2, out=p.ids),
    ):
        q, scale = p.q.clone().requires_grad_(), p.q.clone()
        out = (m3_sparse.sparse_attention(q, p.k_cache, p.v_cache, p.ids, p.block_table, **p.lengths) * scale).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


# ---- copies of modules ----


class Block(torch.nn.Module):
    """A model of its own around the layers."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(128, 128)
        self.sparse, self.dense = m3_sparse.layers.SparseAttention(), m3_sparse.layers.DenseAttention()

    def forward(self, q, k, v, index_q, index_k, *tail):
        q = self.project(q)
        return self.sparse(q, k, v, index_q, index_k, *tail) + self.dense(q, k, v, *tail)


def test_modules_are_copied_pickled_and_saved():
    p, block = Problem(), Block()
    inputs = (p.q, p.k_cache, p.v_cache, p.index_q, p.index_k_cache, *p.tail)
    want = block(*inputs)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(*inputs), want) and twin.project.weight is not block.project.weight
        twin(*inputs).sum().backward()
        assert twin.project.weight.grad is not None
    assert list(block.state_dict()) == ["project.weight", "project.bias"]
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), want)


def test_a_transformers_model_is_copied_pickled_and_saved(tmp_path):
    tiny_models = pytest.importorskip("tiny_models")
    pytest.importorskip("transformers")
    m3_sparse.register_transformers()
    model = tiny_models.load(tiny_models.save_text_model(tmp_path), "m3_sparse")
    ids = tiny_models.prompt(1, 300)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        want = model(ids).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert torch.equal(twin(ids).logits, want)


def test_a_transformers_model_under_autocast(tmp_path):
    """As close to float32 as transformers' own attention is, in the forward and in the loss's gradient."""
    tiny_models = pytest.importorskip("tiny_models")
    pytest.importorskip("transformers")
    m3_sparse.register_transformers()
    folder = tiny_models.save_text_model(tmp_path, num_hidden_layers=2, mlp_layer_types=["dense", "dense"])
    ids = tiny_models.prompt(1, 300)
    found = {}
    for name in ("sdpa", "m3_sparse"):
        model = tiny_models.load(folder, name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
            new = tiny_models.greedy(model, tokens=3, input_ids=ids)
        loss.backward()
        grads = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        found[name] = loss.item(), grads, new
    assert abs(found["sdpa"][0] - found["m3_sparse"][0]) < 0.02 * found["sdpa"][0]
    assert torch.nn.functional.cosine_similarity(found["sdpa"][1], found["m3_sparse"][1], 0) > 0.98
    assert found["m3_sparse"][2].shape == (1, 3)


# ---- processes and threads ----


def in_a_fork(function):
    """Runs it in a forked child; its output if it fails."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            function()
        except BaseException:  # noqa: BLE001  told by the parent
            text = traceback.format_exc()
        os.write(write, text.encode()[-4000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0 and not text, text


def test_a_forked_child_uses_what_its_parent_imported():
    p = Problem()
    want = seeded_results(p)

    def child():
        assert equal(seeded_results(Problem()), want)
        assert not torch.cuda.is_initialized()

    for _ in range(2):
        in_a_fork(child)
    assert equal(seeded_results(p), want)


def test_a_forked_child_imports(variant_folder):
    """The parent has torch only: first import in the child, in several of them, and then in the parent."""
    code = """
import importlib.util, os, sys, torch
def load():
    place = sys.argv[1] + "/__init__.py"
    spec = importlib.util.spec_from_file_location("m3_sparse", place, submodule_search_locations=[sys.argv[1]])
    module = sys.modules["m3_sparse"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, lse = module.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
    assert abs(lse.item() - 0.6931) < 1e-3 and not torch.cuda.is_initialized()
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        load()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
load()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(variant_folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_threads_call_at_once():
    problems = [Problem(q_lens=(3 + i, 0, 6), seed=i) for i in range(4)]

    def made(p):
        calls = {name: c for name, c in public_calls(p).items() if name != "merge_states"}
        return [x for f, arguments in calls.values() for x in tree_flatten(f(*arguments))[0]]

    want = [made(p) for p in problems]
    wrong = []
    start = threading.Barrier(len(problems))

    def work(i):
        start.wait()
        for _ in range(3):
            if not equal(made(problems[i]), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
