"""The ahead-of-time operators among torch's other features, on the emulator: opcheck, torch.compile, fake tensors, the
versions that autograd keeps, modes, torch.func.

Needs `--backend=emulated`. The torch backend's are in test_ops.py and test_torch_integration.py, the GPU's in tests/gpu.
"""

import copy
import pickle

import cases
import pytest
import torch
from test_ops import counting_backend, equal, opcheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only

import m3_sparse
from m3_sparse import ops

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def operators(emulation):
    torch.compiler.reset()
    with emulation.dispatched(m3_sparse) as found:
        yield found


def small(q_lens=(1, 2), kv_lens=(140, 300), dtype=BF16, kv_dtype=None, heads=(16, 1), **options):
    return cases.make(list(q_lens), list(kv_lens), dtype=dtype, kv_dtype=kv_dtype, heads=heads, topk=4, **options)


def operator_calls():
    """Operator -> (arguments, options) of calls with all optional tensors, and with none."""
    case, fp8 = small(), small(kv_dtype=E4M3, scales="head")
    total, heads = case.q.shape[:2]
    out, lse = torch.zeros_like(case.q), torch.zeros(total, heads)
    (index_q, index_k, table), lengths = case.index()
    tail = (table, lengths["cu_seqlens_q"], lengths["seqused_k"])
    ids, scores = torch.zeros(total, 1, 4, dtype=torch.int32), torch.zeros(total, 1, table.shape[1])

    def attention(c, *, given=True, sparse=True):
        (q, k, v, chosen, pages), _ = c.sparse()
        lengths = (pages, c.cu_seqlens_q, c.seqused_k)
        return (out.clone(), lse.clone() if given else None, q, k, v, *([chosen] if sparse else []), *lengths, 0.1, True,
                c.k_scale, c.v_scale)  # fmt: skip

    plan = (*attention(case)[2:9], True)
    new = (case.q[:, :1], case.q[:, 1:2], case.index_q[:, 0])
    caches = [x.clone() for x in (case.k_cache, case.v_cache, case.index_k_cache)]
    slots = torch.tensor([3, -1, 130])
    return [
        ("aot_block_scores", (scores, index_q, index_k, *tail), {}),
        ("aot_select_blocks", (ids, scores, index_q, index_k, *tail, 1, 0), {}),
        ("aot_select_blocks", (ids, None, index_q, index_k, *tail, 1, 1), {"way": 1}),
        ("aot_sparse_attention", attention(case), {}),
        ("aot_sparse_attention", attention(case, given=False), {"splits": 2}),
        ("aot_sparse_attention", attention(fp8), {}),
        ("aot_sparse_attention", attention(case), {"formulation": 1}),
        ("aot_sparse_attention_kv_stationary", attention(case), {}),
        ("aot_dense_attention", attention(case, sparse=False), {}),
        ("aot_dense_attention", attention(case, given=False, sparse=False), {"splits": 2}),
        ("aot_attention_plan", plan, {}),
        ("aot_union_lists", (*plan[:2], *plan[3:]), {}),
        ("aot_store_kv", (*new, *caches, slots, None, None), {}),
        ("aot_store_kv", (*new[:2], None, *caches[:2], None, slots, None, None), {}),
        ("aot_merge_states", (out, lse, torch.stack([case.q, case.q]), torch.randn(2, total, heads)), {}),
    ]


@pytest.mark.parametrize("number", range(len(operator_calls())))
def test_opcheck(operators, number):
    name, arguments, options = operator_calls()[number]
    assert set(opcheck(operators[name], arguments, options).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "heads, page, rows", [((16, 1), 128, (3, 0, 9)), ((64, 4), 64, (40,)), ((32, 2), 128, (8,) * 5)]
)
def test_union_lists_have_the_size_of_their_fake(operators, heads, page, rows):
    for width in (70, 900, 9000):
        case = small(rows, [width - i for i in range(len(rows))], heads=heads, page=page)
        (q, k, _, ids, table), lengths = case.sparse()
        arguments = (q, k, ids, table, lengths["cu_seqlens_q"], lengths["seqused_k"], True)
        with FakeTensorMode() as mode:
            fake = operators["aot_union_lists"](*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        assert fake.shape == operators["aot_union_lists"](*arguments).shape


def test_every_operator_is_checked(operators):
    assert set(operators) == {name for name, _, _ in operator_calls()}
    assert {key for key in ops.BUILT if key[1] == "aot"} == {(op, "aot") for op in ops.OPERATIONS}


def public_calls(case):
    """Public function -> call and its tensors, which the aot backend takes."""
    (q, k, v, ids, table), lengths = case.sparse()
    (index_q, index_k, index_table), _ = case.index()
    cu, used = lengths["cu_seqlens_q"], lengths["seqused_k"]

    def attend(q, k, v, ids, table, cu, used, **options):
        return m3_sparse.sparse_attention(
            q, k, v, ids, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True, **options
        )

    def select(q, k, table, cu, used):
        return m3_sparse.select_blocks(q, k, table, cu_seqlens_q=cu, seqused_k=used, topk=3, return_scores=True)

    def scores(q, k, table, cu, used):
        return m3_sparse.block_scores(q, k, table, cu_seqlens_q=cu, seqused_k=used)

    def dense(q, k, v, table, cu, used):
        return m3_sparse.dense_attention(q, k, v, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True)

    def store(k, v, index_k, *caches):
        caches = [x.clone() for x in caches]
        m3_sparse.store_kv(k, v, index_k, *caches[:3], caches[3])
        return caches[:3]

    slots = torch.arange(q.shape[0]) * 3 - 1
    heads = k.shape[1]
    new = (q[:, :heads].contiguous(), q[:, -heads:].contiguous(), index_q[:, 0].contiguous())
    return {
        "sparse": (attend, (q, k, v, ids, table, cu, used)),
        "select": (select, (index_q, index_k, index_table, cu, used)),
        "scores": (scores, (index_q, index_k, index_table, cu, used)),
        "dense": (dense, (q, k, v, table, cu, used)),
        "store": (store, (*new, k, v, case.index_k_cache, slots)),
        "merge": (lambda o, s: m3_sparse.merge_states(o, s), (torch.stack([q, q]), torch.ones(2, *q.shape[:2]))),
        **{
            form: (lambda *a, form=form: attend(*a, formulation=form), (q, k, v, ids, table, cu, used))
            for form in ("decode", "union", "kv_stationary")
        },
    }


FUNCTIONS = list(public_calls(small()))


def on_aot(function, arguments):
    with m3_sparse.backend("aot"):
        return tree_flatten(function(*arguments))[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_in_one_graph_whatever_the_sizes(operators, name):
    backend, graphs = counting_backend()
    compiled = None
    for q_lens, kv_lens in (((3, 0, 1, 0, 2), (700, 50, 140, 3, 7)), ((1, 2), (140, 300))):
        case = small(q_lens, kv_lens, heads=(16, 1), poison="zero")
        function, arguments = public_calls(case)[name]
        compiled = compiled or torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        assert equal(on_aot(compiled, arguments), on_aot(function, arguments))
        if case.seqused_k.numel() == 5:  # other lengths, same sizes
            case.seqused_k.copy_(torch.tensor([300, 50, 20, 0, 7]))
            assert equal(on_aot(compiled, arguments), on_aot(function, arguments))
    assert len(graphs) == 1


def test_a_refused_formulation_is_an_error_in_compiled_code_too(operators):
    case = small(heads=(8, 1))  # union tiles take 16 query heads a KV head
    function, arguments = public_calls(case)["union"]
    with pytest.raises(NotImplementedError, match="16 query heads"):
        on_aot(function, arguments)
    with pytest.raises(RuntimeError, match="16 query heads"):
        on_aot(torch.compile(function, fullgraph=True, backend="aot_eager"), arguments)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_fake_results_look_like_the_real_ones(operators, layout):
    for page, kv_dtype in ((128, BF16), (64, E4M3)):
        case = small(layout=layout, page=page, kv_dtype=kv_dtype, pad_rows=1, heads=(8, 2))
        for name, (function, arguments) in public_calls(case).items():
            if name == "union" or (name == "dense" and kv_dtype == E4M3) or (name == "store" and layout == "dense"):
                continue  # not with these heads, with float8, with pages of two kinds
            real = on_aot(function, arguments)
            with FakeTensorMode() as mode:
                fake = on_aot(function, tree_map_only(torch.Tensor, mode.from_tensor, arguments))
            facts = [[(x.shape, x.stride(), x.dtype, x.device) for x in made] for made in (fake, real)]
            assert facts[0] == facts[1], name


def everything(case):
    return [x for f, arguments in public_calls(case).values() for x in on_aot(f, arguments)]


@pytest.mark.parametrize("mode", ["inference", "autocast", "deterministic", "dtype", "device"])
def test_modes_change_nothing(operators, mode):
    case = small(poison="zero")
    want = everything(case)
    prepared = public_calls(case)

    def again():
        return [x for f, arguments in prepared.values() for x in on_aot(f, arguments)]

    if mode == "inference":
        with torch.inference_mode():
            got = again()
    elif mode == "autocast":
        with torch.autocast("cpu", dtype=torch.float16):
            got = again()
    elif mode == "deterministic":  # every output starts as NaN
        torch.use_deterministic_algorithms(True)
        try:
            got = again()
        finally:
            torch.use_deterministic_algorithms(False)
    elif mode == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            got = again()
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        torch.set_default_device("meta")
        try:
            got = again()
        finally:
            torch.set_default_device(None)
    assert equal(got, want) and [x.dtype for x in got] == [x.dtype for x in want]


def test_writes_are_seen_by_autograd(emulation):
    """A tensor that a backward pass has saved, written here, has another version; without that the gradient would be
    wrong in silence."""
    case = small()
    (q, k, v, ids, table), lengths = case.sparse()[0], case.lengths()
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    (index_q, index_k, index_table), _ = case.index()
    chosen = torch.zeros(*index_q.shape[:2], 4, dtype=torch.int32)
    new = (q[:, :1].contiguous(), q[:, 1:2].contiguous(), index_q[:, 0].contiguous())

    def store(index):
        caches = (k, v, index_k if index else None)
        m3_sparse.store_kv(*new[:2], new[2] if index else None, *caches, torch.arange(3))

    written = (
        (lambda: m3_sparse.sparse_attention(q, k, v, ids, table, **lengths, out=out, lse=lse), (out, lse)),
        (lambda: m3_sparse.dense_attention(q, k, v, table, **lengths, out=out), (out,)),
        (lambda: m3_sparse.select_blocks(index_q, index_k, index_table, **lengths, topk=4, out=chosen), (chosen,)),
        (lambda: store(False), (k, v)),
        (lambda: store(True), (k, v, index_k)),
    )
    tensors = (q, k, v, ids, table, out, lse, index_q, index_k, chosen, *lengths.values(), *new)
    with m3_sparse.backend("aot"):
        for call, changed in written:
            before = [x._version for x in tensors]
            call()
            for x, old in zip(tensors, before):
                assert (x._version > old) == any(x is y for y in changed)
    scale = out.clone().requires_grad_()
    loss = (scale * out).sum()
    with m3_sparse.backend("aot"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        m3_sparse.dense_attention(q, k, v, table, **lengths, out=out)
        loss.backward()


def test_gradients_go_to_the_torch_backend_or_are_refused(operators):
    case = small(dtype=BF16)
    (q, k, v, ids, table), lengths = case.sparse()
    q = q.requires_grad_()
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="no backward pass"):
        m3_sparse.sparse_attention(q, k, v, ids, table, **lengths)
    grad = torch.func.grad(lambda q: m3_sparse.sparse_attention(q, k, v, ids, table, **lengths).float().sum())(
        q.detach()
    )
    m3_sparse.sparse_attention(q, k, v, ids, table, **lengths).float().sum().backward()
    assert torch.equal(grad, q.grad)
    out = torch.zeros_like(q).requires_grad_()
    with pytest.raises(ValueError, match="out must not require grad"):
        m3_sparse.sparse_attention(q.detach(), k, v, ids, table, **lengths, out=out)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda q: m3_sparse.sparse_attention(q, k, v, ids, table, **lengths), (q,), (q.detach(),))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_refused(operators, name):
    function, arguments = public_calls(small(poison="zero"))[name]
    dims = tuple(0 if i == 0 else None for i in range(len(arguments)))
    with m3_sparse.backend("aot"), pytest.raises(NotImplementedError, match="no batching rule for torch.vmap"):
        torch.vmap(function, dims)(torch.stack([arguments[0]] * 2), *arguments[1:])


def test_copies_of_a_layer(emulation):
    case = small(heads=(16, 1), poison="zero")
    (q, k, v, _, table), lengths = case.sparse()[0], case.lengths()
    layer = m3_sparse.layers.DenseAttention()
    with m3_sparse.backend("aot"):
        want = layer(q, k, v, table, *lengths.values())
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(q, k, v, table, *lengths.values()), want)
