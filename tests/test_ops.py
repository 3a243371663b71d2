"""The operators: opcheck, torch.compile, gradients, host reads, and the two ways of the torch backend."""

from unittest import mock

import pytest
import torch

import m3_sparse
from m3_sparse import _grouped, _paging, _rows, attention, capability, reference
from m3_sparse._ops import ops

INF = float("inf")
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


class Problem:
    """A small paged problem: three requests, one of them without queries; pages in random order."""

    def __init__(
        self,
        dtype=torch.float32,
        cache_dtype=None,
        page=128,
        q_lens=(3, 0, 6),
        kv_lens=(300, 50, 260),
        heads=(4, 2),
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)
        batch, total = len(q_lens), sum(q_lens)
        width = -(-max(kv_lens) // page) + 1
        pages = batch * width + 2

        def draw(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        cache_dtype = cache_dtype or dtype
        self.q = draw(total, heads[0], 128).to(dtype)
        self.index_q = draw(total, heads[1], 128).to(dtype)
        self.k_cache, self.v_cache = (draw(pages, heads[1], page, 128).to(cache_dtype) for _ in range(2))
        self.index_k_cache = draw(pages, page, 128).to(cache_dtype)
        self.block_table = torch.randperm(pages, generator=g)[: batch * width].view(batch, width).int()
        self.cu_seqlens_q = torch.tensor([0, *q_lens]).cumsum(0).int()
        self.seqused_k = torch.tensor(kv_lens).int()
        blocks = -(-width * page // 128)
        self.ids = torch.rand(total, heads[1], blocks, generator=g).argsort(-1)[..., :2].int()
        self.k_scale, self.v_scale = torch.tensor([0.5]), torch.rand(heads[1], generator=g) + 0.5

    @property
    def lengths(self):
        return {"cu_seqlens_q": self.cu_seqlens_q, "seqused_k": self.seqused_k}

    @property
    def tail(self):
        return self.block_table, self.cu_seqlens_q, self.seqused_k


def calls():
    """Operator name -> its arguments on a small problem, with optional tensors given and left out."""
    p = Problem()
    total, heads = p.q.shape[:2]
    blocks = p.block_table.shape[1]
    out, lse = torch.empty_like(p.q), torch.empty(total, heads)
    ids, scores = torch.empty(total, 2, 4, dtype=torch.int32), torch.empty(total, 2, blocks)
    kv = (p.q, p.k_cache, p.v_cache)
    slots = torch.tensor([3, -1, 0, 700, 10**9, 5, 6, 7, 8])
    new = (p.q[:, :2], p.q[:, 2:], p.q[:, 0])
    fp8 = [x.to(torch.float8_e4m3fn) for x in (p.k_cache, p.v_cache, p.index_k_cache)]
    return {
        "block_scores": ("torch_block_scores", (scores, p.index_q, p.index_k_cache, *p.tail)),
        "select_blocks": ("torch_select_blocks", (ids, None, p.index_q, p.index_k_cache, *p.tail, 1, 1)),
        "select_blocks with scores": ("torch_select_blocks", (ids, scores, p.index_q, p.index_k_cache, *p.tail, 1, 0)),
        "sparse_attention": (
            "torch_sparse_attention",
            (out, lse, *kv, p.ids, *p.tail, 0.1, True, p.k_scale, p.v_scale),
        ),
        "sparse_attention bare": ("torch_sparse_attention", (out, None, *kv, p.ids, *p.tail, 0.1, False, None, None)),
        "dense_attention": ("torch_dense_attention", (out, lse, *kv, *p.tail, 0.1, True, p.k_scale, p.v_scale)),
        "dense_attention bare": ("torch_dense_attention", (out, None, *kv, *p.tail, 0.1, False, None, None)),
        "backward": (
            "torch_attention_backward",
            (out.normal_(), lse.normal_(), *kv, p.ids, *p.tail, 0.1, True, p.k_scale, p.v_scale),
        ),
        "backward of dense": ("torch_attention_backward", (out, None, *kv, None, *p.tail, 0.1, True, None, None)),
        "store_kv": (
            "torch_store_kv",
            (*new, p.k_cache.clone(), p.v_cache.clone(), p.index_k_cache.clone(), slots, None, None),
        ),
        "store_kv fp8": ("torch_store_kv", (*new, *fp8, slots, p.k_scale, p.v_scale)),
        "store_kv without index": (
            "torch_store_kv",
            (*new[:2], None, p.k_cache.clone(), p.v_cache.clone(), None, slots, None, None),
        ),
        "merge_states": ("torch_merge_states", (out, lse, torch.stack([p.q, p.q]), torch.randn(2, total, heads))),
    }


CALLS = list(calls())


def opcheck(operator, arguments, options=None):
    """All utilities. The schema test compares by allclose, which float8 doesn't have: there the bytes are compared."""
    allclose = torch.allclose

    def close(a, b, *rest, **tolerances):
        if a.dtype.is_floating_point and a.element_size() == 1:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *rest, **tolerances)

    with mock.patch.object(torch, "allclose", close):
        return torch.library.opcheck(operator, arguments, options, test_utils=OPCHECKS)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    op, arguments = calls()[name]
    assert set(opcheck(getattr(ops, op).default, arguments).values()) == {"SUCCESS"}


def test_opcheck_sees_what_is_written_to_float8():
    """An operator that writes an argument which its schema doesn't mark."""

    def write(x):
        x.view(torch.uint8).add_(1)

    with torch.library._scoped_library("m3_sparse_bad", "FRAGMENT") as library:
        library.define("write(Tensor x) -> ()")
        library.impl("write", write, "CPU")
        library.impl("write", lambda x: None, "Meta")
        with pytest.raises(Exception, match="test_schema failed with Argument x is not defined as mutable"):
            opcheck(torch.ops.m3_sparse_bad.write.default, (torch.zeros(4).to(torch.float8_e4m3fn),))


def test_every_operator_is_checked():
    names = {op for op, _ in calls().values()}
    assert {f"torch_{op}" for op in capability.OPERATIONS} | {"torch_attention_backward"} == names
    assert all((op, "torch") in capability.BUILT for op in capability.OPERATIONS)


# ---- torch.compile ----


def public_calls(p):
    """Public function -> call on the problem, returning everything it makes."""
    new = (p.q[:, :2].contiguous(), p.q[:, 2:].contiguous(), p.index_q[:, 0].contiguous())
    slots = torch.arange(p.q.shape[0]) * 3 - 1

    def store(k, v, index_k, *caches):
        caches = [x.clone() for x in caches]
        m3_sparse.store_kv(k, v, index_k, *caches, slots)
        return caches

    def pipeline(q, index_q, k_cache, v_cache, index_k_cache, table, cu, used):
        ids = m3_sparse.select_blocks(index_q, index_k_cache, table, cu_seqlens_q=cu, seqused_k=used, topk=2)
        a, b = m3_sparse.sparse_attention(
            q, k_cache, v_cache, ids, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True
        )
        c, d = m3_sparse.dense_attention(q, k_cache, v_cache, table, cu_seqlens_q=cu, seqused_k=used, return_lse=True)
        return ids, a, b, *m3_sparse.merge_states([a, c], [b, d], out_dtype=torch.bfloat16)

    index = (p.index_q, p.index_k_cache, *p.tail)
    return {
        "block_scores": (lambda a, b, t, c, u: m3_sparse.block_scores(a, b, t, cu_seqlens_q=c, seqused_k=u), index),
        "select_blocks": (
            lambda a, b, t, c, u: m3_sparse.select_blocks(
                a, b, t, cu_seqlens_q=c, seqused_k=u, topk=2, return_scores=True
            ),
            index,
        ),
        "sparse_attention": (
            lambda q, k, v, i, t, c, u: m3_sparse.sparse_attention(q, k, v, i, t, cu_seqlens_q=c, seqused_k=u),
            (p.q, p.k_cache, p.v_cache, p.ids, *p.tail),
        ),
        "dense_attention": (
            lambda q, k, v, t, c, u: m3_sparse.dense_attention(q, k, v, t, cu_seqlens_q=c, seqused_k=u),
            (p.q, p.k_cache, p.v_cache, *p.tail),
        ),
        "store_kv": (store, (*new, p.k_cache, p.v_cache, p.index_k_cache)),
        "merge_states": (
            lambda o, s: m3_sparse.merge_states(o, s),
            (torch.stack([p.q, -p.q]), torch.randn(2, *p.q.shape[:2])),
        ),
        "all of them": (pipeline, (p.q, p.index_q, p.k_cache, p.v_cache, p.index_k_cache, *p.tail)),
    }


def equal(a, b):
    pairs = zip(a, b) if isinstance(a, (tuple, list)) else [(a, b)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(public_calls(Problem())))
def test_compiles_in_one_graph(name, dynamic):
    function, arguments = public_calls(Problem())[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert equal(compiled(*arguments), function(*arguments))


def counting_backend():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    return backend, graphs


def test_other_lengths_do_not_recompile():
    p = Problem()
    backend, graphs = counting_backend()
    function, arguments = public_calls(p)["all of them"]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    compiled(*arguments)
    for used in ([1, 0, 7], [299, 20, 255]):
        p.seqused_k.copy_(torch.tensor(used))
        assert equal(compiled(*arguments), function(*arguments))
    assert len(graphs) == 1


def test_dynamic_sizes_share_a_graph():
    backend, graphs = counting_backend()
    compiled = None
    for q_lens in ((3, 0, 6), (5, 2, 1), (17, 3, 20)):
        function, arguments = public_calls(Problem(q_lens=q_lens))["all of them"]
        compiled = compiled or torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        assert equal(compiled(*arguments), function(*arguments))
    assert len(graphs) == 1


def test_packed_cache_halves_compile():
    """K and V as halves of one tensor: two written views of one base in one graph."""
    p = Problem(page=64)
    packed = torch.cat([p.k_cache, p.v_cache], -1)
    slots = torch.arange(p.q.shape[0]) * 5

    def write(k, v, cache):
        m3_sparse.store_kv(k, v, None, cache[..., :128], cache[..., 128:], None, slots)
        return cache * 1

    k, v = p.q[:, :2], p.q[:, 2:]
    a, b = packed.clone(), packed.clone()
    compiled = torch.compile(write, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(k, v, a), write(k, v, b)) and torch.equal(a, b) and not torch.equal(a, packed)


def test_backend_choice_compiles():
    p = Problem()

    def function(q, k, v, ids):
        with m3_sparse.backend("torch"):
            return m3_sparse.sparse_attention(q, k, v, ids, p.block_table, **p.lengths)

    arguments = (p.q, p.k_cache, p.v_cache, p.ids)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert equal(compiled(*arguments), function(*arguments))
    assert capability._forced is None


# ---- gradients ----


def plain_attention(p, q, k_cache, v_cache, sparse, scale, causal=True):
    """Attention from dense masked scores in the inputs' dtype, by autograd; loops over rows."""
    outs, lses = [], []
    group = q.shape[1] // k_cache.shape[1]
    row = 0
    for b in range(len(p.seqused_k)):
        kv_len, q_len = int(p.seqused_k[b]), int(p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b])
        k, v = (x[p.block_table[b].long()].transpose(1, 2).flatten(0, 1) for x in (k_cache, v_cache))
        for i in range(q_len):
            end = kv_len - q_len + i + 1 if causal else kv_len
            for h in range(q.shape[1]):
                seen = torch.arange(k.shape[0]) < end
                if sparse:
                    seen &= torch.isin(torch.arange(k.shape[0]) // 128, p.ids[row, h // group].long())
                s = (k[:, h // group] @ q[row, h] * scale).masked_fill(~seen, -INF)
                if seen.any():
                    lses.append(s.logsumexp(0))
                    outs.append(s.softmax(0) @ v[:, h // group])
                else:
                    lses.append(s.new_tensor(-INF))
                    outs.append(torch.zeros_like(q[row, h]))
            row += 1
    return torch.stack(outs).view(q.shape), torch.stack(lses).view(q.shape[:2])


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_match_plain_autograd(page, sparse, causal):
    p = Problem(page=page)
    p.ids[0, 0] = torch.tensor([-1, 9999])  # one empty row
    p.ids[1, 0] = 1
    grad_out, grad_lse = torch.randn_like(p.q), torch.randn(p.q.shape[:2])
    grad_lse[0] = 0  # the LSE of an empty row has no gradient
    results = []
    for double in (False, True):
        q, k, v = (x.double() if double else x.clone() for x in (p.q, p.k_cache, p.v_cache))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        if double:
            out, lse = plain_attention(p, q, k, v, sparse, 0.1, causal)
        elif sparse:
            out, lse = m3_sparse.sparse_attention(
                q, k, v, p.ids, p.block_table, **p.lengths, softmax_scale=0.1, causal=causal, return_lse=True
            )
        else:
            out, lse = m3_sparse.dense_attention(
                q, k, v, p.block_table, **p.lengths, softmax_scale=0.1, causal=causal, return_lse=True
            )
        lse = lse.masked_fill(lse == -INF, 0)
        grads = torch.autograd.grad((out, lse), inputs, (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))
        results.append((out, lse, *grads))
    for mine, plain in zip(*results):
        torch.testing.assert_close(mine.double(), plain, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sparse", [True, False])
def test_gradcheck(sparse):
    """Against finite differences, in float64, which the torch backend computes in though the public functions do not
    take it.
    """
    p = Problem(torch.float64, page=64, q_lens=(1, 1), kv_lens=(70, 3), heads=(2, 1))
    some = {"q": p.q, "k": p.k_cache[p.block_table[0, 1].long()], "v": p.v_cache[p.block_table[0, 1].long()]}

    def function(q, k, v):
        page = p.block_table[0, 1:2].long()
        k_cache, v_cache = (x.index_copy(0, page, y.unsqueeze(0)) for x, y in ((p.k_cache, k), (p.v_cache, v)))
        ids = p.ids if sparse else None
        return attention._TorchAttention.apply(q, k_cache, v_cache, ids, *p.tail, 0.3, True, None, p.v_scale[:1])[0]

    inputs = [x.clone().requires_grad_() for x in some.values()]
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_gradients_with_scales_are_those_of_scaled_caches():
    p = Problem(seed=3)
    grads = []
    for scaled in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache))
        if scaled:
            out = m3_sparse.sparse_attention(
                q, k, v, p.ids, p.block_table, **p.lengths, k_scale=p.k_scale, v_scale=p.v_scale
            )
        else:
            out = m3_sparse.sparse_attention(
                q, k * p.k_scale, v * p.v_scale.view(1, -1, 1, 1), p.ids, p.block_table, **p.lengths
            )
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_backward_compiles_in_one_graph():
    p = Problem()

    def function(q, k, v):
        out, lse = m3_sparse.sparse_attention(q, k, v, p.ids, p.block_table, **p.lengths, return_lse=True)
        return out.square().sum() + lse.sum() + m3_sparse.dense_attention(q, k, v, p.block_table, **p.lengths).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grads = []
    for f in (function, compiled):
        inputs = [x.clone().requires_grad_() for x in (p.q, p.k_cache, p.v_cache)]
        grads.append(torch.autograd.grad(f(*inputs), inputs))
    assert equal(*grads)


def test_selection_gives_no_gradient():
    p = Problem()
    p.index_q.requires_grad_()
    ids, scores = m3_sparse.select_blocks(p.index_q, p.index_k_cache, *p.tail[:1], **p.lengths, return_scores=True)
    assert not ids.requires_grad and not scores.requires_grad
    assert not m3_sparse.block_scores(p.index_q, p.index_k_cache, p.block_table, **p.lengths).requires_grad


@pytest.mark.parametrize("name", ["out", "lse"])
def test_gradients_into_given_tensors_are_refused(name):
    p = Problem()
    given = {"out": torch.empty_like(p.q), "lse": torch.empty(p.q.shape[:2])}[name]
    p.q.requires_grad_()
    arguments = (p.q, p.k_cache, p.v_cache, p.ids, p.block_table)
    with pytest.raises(ValueError, match="out and lse must be None"):
        m3_sparse.sparse_attention(*arguments, **p.lengths, **{name: given})
    with torch.no_grad():
        m3_sparse.sparse_attention(*arguments, **p.lengths, **{name: given})


def test_gradients_that_do_not_exist_are_refused():
    p = Problem(torch.bfloat16, torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="k_scale requires grad"):
        m3_sparse.dense_attention(
            p.q, p.k_cache, p.v_cache, p.block_table, **p.lengths, k_scale=p.k_scale.requires_grad_()
        )
    with pytest.raises(NotImplementedError, match="merge_states has no backward"):
        m3_sparse.merge_states(p.q[None].clone().requires_grad_(), torch.zeros(1, *p.q.shape[:2]))
    k = torch.zeros(9, 2, 128, requires_grad=True)
    q = Problem()
    with pytest.raises(NotImplementedError, match="store_kv has no backward"):
        m3_sparse.store_kv(k, k, None, q.k_cache, q.v_cache, None, torch.arange(9))


# ---- the two ways of the torch backend ----


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "q_lens, kv_lens", [((40, 0, 90), (300, 9, 200)), ((200,), (200,)), ((64,), (1000,)), ((30, 5), (10, 250))]
)
@pytest.mark.parametrize("size", [1, 8, 64])
def test_regrouping_changes_nothing(page, causal, q_lens, kv_lens, size):
    p = Problem(page=page, q_lens=q_lens, kv_lens=kv_lens, heads=(6, 2))
    p.block_table[0, 0] = -1  # a page that is missing inside a block
    p.seqused_k[-1] -= 1
    p.ids[::3, :, 1] = -1
    p.ids[1::7] = 1 << 20
    pages = _paging.block_pages(p.block_table, page)
    rows = _paging.locate_rows(p.cu_seqlens_q, p.seqused_k, p.q.shape[0], p.block_table.shape[1] * page, causal)
    ids = reference.distinct_blocks(p.ids, rows.end, pages.shape[1])
    query = reference.scaled_query(p.q, 2, 0.1, None)
    plain = _rows.gathered_rows(query, p.k_cache, p.v_cache, ids, pages, rows)
    other = _grouped.grouped_rows(query, p.k_cache, p.v_cache, ids, pages, rows, size)
    results = [
        (acc / torch.where(norm == 0, 1, norm).unsqueeze(-1), peak + norm.log()) for acc, norm, peak in (plain, other)
    ]
    for mine, want in zip(*results):
        torch.testing.assert_close(mine, want, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_a_broken_value_stays_with_the_rows_that_see_it(bad):
    p = Problem(q_lens=(200,), kv_lens=(200,), heads=(2, 1))
    assert _grouped.plan(200, 1, 2, 2, *_paging.block_pages(p.block_table, 128).shape[:2], 128)
    p.ids[:] = torch.tensor([0, 1])
    clean = m3_sparse.sparse_attention(p.q, p.k_cache, p.v_cache, p.ids, p.block_table, **p.lengths)
    p.v_cache[p.block_table[0, 1].long(), 0, 150 - 128, 7] = bad
    out = m3_sparse.sparse_attention(p.q, p.k_cache, p.v_cache, p.ids, p.block_table, **p.lengths)
    assert torch.equal(out[:150], clean[:150])
    want = torch.tensor(bad).expand(50, 2)
    assert torch.equal(out[150:, :, 7].nan_to_num(9.0, 8.0, 7.0), want.nan_to_num(9.0, 8.0, 7.0))
    out[150:, :, 7] = clean[150:, :, 7]
    assert torch.equal(out, clean)


@pytest.mark.parametrize(
    "total, heads, group, batch, blocks, expected",
    [
        (1, 4, 16, 1, 128, None),  # one decode step
        (128, 4, 16, 128, 64, None),  # a decode batch: every row has its own blocks
        (16384, 4, 2, 1, 128, True),
        (16384, 4, 16, 1, 128, True),
        (16384, 4, 2, 1, 1024, True),
        (16384, 4, 16, 1, 8192, None),  # a table for a million tokens: most tiles would stay empty
        (8, 1, 1, 1, 1, True),
    ],
)
def test_plan(total, heads, group, batch, blocks, expected):
    plan = _grouped.plan(total, heads, group, 16, batch, blocks, 128)
    assert (plan is None) == (expected is None)
    if plan:
        pairs = plan.rows * heads * 16
        places = pairs + min(pairs, heads * min(batch, plan.rows) * blocks) * (plan.size - 1)
        assert places * group * 128 * 4 <= _grouped.PARTIAL_BYTES + (1 << 20) or plan.rows > total


def test_tiles_hold_one_group_each_and_lose_nobody():
    g = torch.Generator().manual_seed(1)
    for count, groups, size in ((1, 1, 1), (100, 7, 8), (100, 1, 64), (5, 1000, 4), (257, 50, 16)):
        key = torch.randint(0, groups + 1, (count,), generator=g)
        tiles = _paging.tile_groups(key, groups, size)
        placed = tiles.member.flatten()
        for item in range(count):
            if key[item] == groups:
                assert tiles.place[item] == placed.numel() and not (placed == item).any()
            else:
                assert placed[tiles.place[item]] == item and tiles.group[tiles.place[item] // size] == key[item]
        assert ((placed < count).sum() == (key < groups).sum()).item()


def test_inconsistent_lengths_stay_inside():
    """Offsets that no batch has, found only on the device: any numbers may come out, but no access outside."""
    p = Problem(q_lens=(50, 40, 60), kv_lens=(400, 300, 200))
    for offsets in ([0, 90, 10, 150], [5, 2**31 - 1, -(2**31), 150], [-7, -7, -7, -7], [150, 0, 0, 1 << 30]):
        for used in ([2**31 - 1, -5, 0], [-(2**31), 10**6, 3]):
            lengths = {
                "cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32),
                "seqused_k": torch.tensor(used, dtype=torch.int32),
            }
            for q_rows in (3, 150):
                q, ids = p.q[:q_rows], p.ids[:q_rows]
                ids = m3_sparse.select_blocks(p.index_q[:q_rows], p.index_k_cache, p.block_table, **lengths)
                m3_sparse.sparse_attention(q, p.k_cache, p.v_cache, ids, p.block_table, **lengths)
                m3_sparse.dense_attention(q, p.k_cache, p.v_cache, p.block_table, **lengths)


# ---- no host reads ----


@pytest.mark.parametrize("name", CALLS)
def test_the_torch_backend_reads_nothing_on_the_host(name):
    """Under FakeTensor any read of a value raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    op, arguments = calls()[name]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        function = "attention_backward" if op == "torch_attention_backward" else op[len("torch_") :]
        if function == "attention_backward":
            from m3_sparse import _backward as reference_module
        else:
            reference_module = reference
        getattr(reference_module, function)(*fakes)


def test_regrouping_reads_nothing_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, cache = torch.empty(4096, 8, 128), torch.empty(32, 4, 128, 128)
        ids, table = torch.empty(4096, 4, 16, dtype=torch.int32), torch.empty(1, 32, dtype=torch.int32)
        assert _grouped.plan(4096, 4, 2, 16, 1, 32, 128)
        lengths = (torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int32))
        reference.sparse_attention(
            torch.empty_like(q), None, q, cache, cache, ids, table, *lengths, 0.1, True, None, None
        )


# ---- bit-exact ops ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cache_dtype, limit", [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_store_kv_is_the_saturating_cast(dtype, cache_dtype, limit):
    p = Problem(dtype, cache_dtype)
    k = torch.randn(9, 2, 128) * torch.logspace(-6, 6, 128)
    k[0, 0, :6] = torch.tensor([float("nan"), INF, -INF, limit, -limit * 1.06, 0.0])
    k = k.to(dtype)
    scale = torch.tensor([0.5, 3.0])
    slots = torch.tensor([0, 5, 127, 128, 300, 301, -1, 10**6, 640])
    before = p.k_cache.clone(), p.v_cache.clone(), p.index_k_cache.clone()
    m3_sparse.store_kv(k, k, k[:, 0], p.k_cache, p.v_cache, p.index_k_cache, slots, v_scale=scale)
    for cache, old, values in zip(
        (p.k_cache, p.v_cache, p.index_k_cache.unsqueeze(1)),
        (before[0], before[1], before[2].unsqueeze(1)),
        (k.float(), k.float() / scale.view(1, 2, 1), k[:, :1].float()),
    ):
        want = old.clone().view(torch.uint8)
        for row, slot in enumerate(slots.tolist()):
            if 0 <= slot < cache.shape[0] * 128:
                want[slot // 128, :, slot % 128] = values[row].clamp(-limit, limit).to(cache_dtype).view(torch.uint8)
        assert torch.equal(cache.view(torch.uint8), want)


def test_merge_states_rules():
    outs = torch.randn(3, 5, 2, 128)
    lses = torch.randn(3, 5, 2)
    lses[1, 0], outs[1, 0] = -INF, float("nan")
    lses[:, 1] = -INF
    lses[0, 2, 0] = float("nan")
    lses[0, 3, 1] = INF
    out, lse = m3_sparse.merge_states(outs, lses)
    assert out[0].isfinite().all() and lse[0].isfinite().all()
    torch.testing.assert_close(out[0], (outs[[0, 2], 0] * lses[[0, 2], 0].softmax(0).unsqueeze(-1)).sum(0))
    assert (out[1] == 0).all() and (lse[1] == -INF).all()
    assert out[2, 0].isnan().all() and lse[2, 0].isnan() and out[2, 1].isfinite().all()
    assert out[3, 1].isnan().all() and not lse[3, 1].isfinite() and out[3, 0].isfinite().all()
    torch.testing.assert_close(lse[4], lses[:, 4].logsumexp(0))
    again, lse_again = m3_sparse.merge_states(list(outs), list(lses))
    assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0)) and torch.equal(
        lse_again.nan_to_num(7.0), lse.nan_to_num(7.0)
    )
