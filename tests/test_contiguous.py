"""Contiguous caches, without a block_table: on the torch backend the bits of the paged call, and the rules."""

import cases
import oracle
import pytest
import torch
from contiguous import LAYOUTS, contiguous

import m3_sparse

PROBLEMS = {
    "one row": ([3], [131], 0, None),
    "exactly to the last slot": ([5, 2, 1], [129, 300, 1], 0, None),
    "a longer buffer": ([5, 0, 9], [129, 64, 517], 45, None),
    "left padding": ([5, 2, 7], [129, 300, 261], 0, [171, 0, 39]),
    "left padding and room": ([1, 1], [1, 1000], 3, [999, 0]),
    "shorter than a block": ([2, 1], [7, 3], 0, [0, 4]),
    "whole blocks": ([128, 16], [256, 128], 0, None),
}
case_of = pytest.mark.parametrize("name", PROBLEMS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make(name, layout, **options):
    q_lens, kv_lens, spare, pads = PROBLEMS[name]
    case = cases.make(q_lens, kv_lens, heads=(8, 2), seed=len(name), topk=3, **options)
    return case, contiguous(case, spare, pads, layout)


@each_layout
@case_of
def test_attention(name, layout):
    case, (k, v, _, pad) = make(name, layout, pad_rows=2)
    args, options = case.sparse()
    want = m3_sparse.sparse_attention(*args, **options, return_lse=True)
    got = m3_sparse.sparse_attention(case.q, k, v, case.ids, None, **options, leftpad_k=pad, return_lse=True)
    for a, b in zip(got, want):
        oracle.check_bitwise(a, b, "contiguous")
    for causal in (True, False):
        args, options = case.dense()
        want = oracle.dense_attention(*args, **options, causal=causal)
        options = {**options, "leftpad_k": pad, "causal": causal}
        oracle.check_attention(*m3_sparse.dense_attention(case.q, k, v, None, **options, return_lse=True), *want)


@each_layout
@case_of
def test_selection(name, layout):
    case, (_, _, keys, pad) = make(name, layout, kind="int")
    args, options = case.index()
    want, want_scores = m3_sparse.select_blocks(*args, **options, topk=3, return_scores=True)
    options["leftpad_k"] = pad
    got, scores = m3_sparse.select_blocks(case.index_q, keys, None, **options, topk=3, return_scores=True)
    assert torch.equal(got, want)
    blocks = -(-keys.shape[1] // 128)
    assert scores.shape[2] == blocks and torch.equal(
        m3_sparse.block_scores(case.index_q, keys, None, **options), scores
    )
    both = min(blocks, want_scores.shape[2])
    assert torch.equal(scores[..., :both], want_scores[..., :both]) and bool((scores[..., both:] == -torch.inf).all())


@pytest.mark.parametrize("length", [5000, 2**31 - 1, -3])
def test_a_wrong_length_stays_within_its_row(length):
    """Clamped to the row's slots behind its padding, never into the next row."""
    case, (k, v, keys, _) = make("left padding", "HND")
    pad = torch.tensor([171, 2**31 - 1, -5])
    used = torch.full((3,), length)
    right = {
        "leftpad_k": torch.tensor([171, 300, 0]),
        "seqused_k": torch.tensor([129, 0, 300]).clamp(max=max(length, 0)),
    }
    results = []
    for options in ({"leftpad_k": pad, "seqused_k": used}, right):
        options["cu_seqlens_q"] = case.cu_seqlens_q
        attend = m3_sparse.sparse_attention(case.q, k, v, case.ids, None, **options)
        results.append((attend, m3_sparse.select_blocks(case.index_q, keys, None, **options, topk=3)))
    for a, b in zip(*results):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_rows_that_share_memory_or_have_a_single_token():
    case, (k, v, _, _) = make("one row", "HND")
    cu, used = torch.tensor([0, 2, 3]), torch.tensor([131, 131])
    options = {"cu_seqlens_q": cu, "seqused_k": used}
    twice = [x.expand(2, -1, -1, -1) for x in (k, v)]
    both = [x.repeat(2, 1, 1, 1) for x in (k, v)]
    want, got = (m3_sparse.dense_attention(case.q, *caches, None, **options) for caches in (both, twice))
    assert torch.equal(got, want)
    k, v = torch.randn(3, 2, 1, 128), torch.randn(3, 1, 2, 128).transpose(1, 2)
    options = {"cu_seqlens_q": torch.arange(4), "seqused_k": torch.ones(3)}
    options["seqused_k"] = options["seqused_k"].int()
    assert torch.equal(m3_sparse.dense_attention(torch.randn(3, 2, 128), k, v, None, **options), v[:, :, 0])


def test_an_empty_cache():
    q, k = torch.randn(2, 4, 128), torch.empty(2, 2, 0, 128)
    options = {"cu_seqlens_q": torch.arange(3), "seqused_k": torch.zeros(2, dtype=torch.int32), "return_lse": True}
    out, lse = m3_sparse.dense_attention(q, k, k, None, **options)
    assert not out.any() and bool((lse == -torch.inf).all())


def test_no_storage_but_the_given_one_is_read():
    """The operators get views of the caches."""
    from m3_sparse import _contiguous

    _, (k, v, keys, pad) = make("left padding", "NHD")
    for x in (k, v, keys):
        slots = _contiguous.slots(x)
        assert slots.data_ptr() == x.data_ptr() and slots.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert slots.shape[-2] == 1


def test_rules():
    case, (k, v, keys, pad) = make("left padding", "HND")
    options = case.lengths()
    attend = lambda k, v, table=None, **more: m3_sparse.dense_attention(case.q, k, v, table, **{**options, **more})
    with pytest.raises(ValueError, match="the same number of tokens apart"):
        attend(k, v.transpose(1, 2).contiguous().transpose(1, 2))
    odd = torch.randn(3, k[0].numel() + 4)[:, : k[0].numel()].unflatten(1, k.shape[1:])
    with pytest.raises(ValueError, match="a whole number of tokens apart"):
        attend(odd, odd)
    with pytest.raises(ValueError, match="a whole number of tokens apart"):
        m3_sparse.block_scores(case.index_q, odd[:, 0], None, **options)
    with pytest.raises(ValueError, match=r"B from the caches: size 3"):
        attend(k, v, seqused_k=options["seqused_k"][:2])
    with pytest.raises(ValueError, match="leftpad_k must have shape"):
        attend(k, v, leftpad_k=pad[:1])
    with pytest.raises(TypeError, match="leftpad_k must have dtype"):
        attend(k, v, leftpad_k=pad.float())
    args, paged = case.dense()
    with pytest.raises(ValueError, match="leftpad_k must be None where there is a block_table"):
        m3_sparse.dense_attention(*args, **paged, leftpad_k=pad)
    with pytest.raises(NotImplementedError, match="gradients of contiguous caches"):
        attend(k.requires_grad_(), v)


def test_explain():
    case, (k, v, keys, pad) = make("left padding", "HND")
    options = {**case.lengths(), "leftpad_k": pad}
    call = dict(q=case.q, k_cache=k, v_cache=v, block_indices=case.ids, block_table=None, **options)
    for op, arguments in (
        ("sparse_attention", call),
        ("select_blocks", dict(index_q=case.index_q, index_k_cache=keys, block_table=None, **options)),
    ):
        text = m3_sparse.explain(op, **arguments)
        assert "-> torch" in text and "bad input" not in text
