"""Derivatives beyond backward(): torch.func in reverse mode, and what is refused or noticed: second and forward-mode
derivatives, vmap, results into tensors that require grad, writes to what a backward pass has saved."""

import pytest
import torch
from test_ops import Problem, calls, equal, public_calls

import m3_sparse
from m3_sparse._ops import ops

FUNCTIONS = list(public_calls(Problem()))


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
