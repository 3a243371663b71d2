"""Contiguous caches in the PTX emulator: through the public functions and every kernel that reads them, against the
paged call and float64. The emulator refuses an access outside of a tensor, and these caches end where the last row does.

Needs `--backend=emulated`.
"""

import cases
import oracle
import pytest
import torch
from contiguous import contiguous

import m3_sparse
from m3_sparse import ops

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
PROBLEMS = {
    "to the last slot": ([9, 3, 14], [129, 40, 300], 0, None, "HND"),
    "left padding": ([11, 2, 9], [130, 7, 261], 0, [131, 254, 0], "HND"),
    "other rows between": ([10, 6], [200, 331], 5, [0, 3], "NHD"),
    "shorter than a block": ([5], [70], 0, [9], "packed"),
}
each_problem = pytest.mark.parametrize("name", PROBLEMS)


def make(name, **options):
    q_lens, kv_lens, spare, pads, layout = PROBLEMS[name]
    case = cases.make(q_lens, kv_lens, seed=len(name), topk=3, **options)
    return case, contiguous(case, spare, pads, layout)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, E5M2)], ids=["bf16", "fp16-e5m2"])
@pytest.mark.parametrize("formulation", ["decode", "union", "kv_stationary"])
@each_problem
def test_sparse_attention(emulation, name, formulation, dtypes):
    q, kv = dtypes
    case, (k, v, _, pad) = make(
        name, heads=(16, 1), dtype=q, kv_dtype=kv, scales="scalar" if kv.itemsize == 1 else None
    )
    args, options = case.sparse()
    results = []
    for caches, table, more in ((args[1:3], case.block_table, {}), ((k, v), None, {"leftpad_k": pad})):
        out, lse = cases.nan_like(case.q.shape, q), cases.nan_like(case.q.shape[:2], torch.float32)
        with m3_sparse.backend("aot"), emulation.policy("late"):
            m3_sparse.sparse_attention(
                case.q, *caches, case.ids, table, **options, **more, out=out, lse=lse, formulation=formulation
            )
        results.append((out, lse))
    for paged, found in zip(*results):
        oracle.check_bitwise(found, paged, "contiguous")
    oracle.check_attention(*results[1], *oracle.sparse_attention(*args, **options))


@pytest.mark.parametrize("heads", [(16, 1), (4, 2)])
@each_problem
def test_dense_attention(emulation, name, heads):
    case, (k, v, _, pad) = make(name, heads=heads, dtype=BF16)
    args, options = case.dense()
    out, lse = cases.nan_like(case.q.shape, BF16), cases.nan_like(case.q.shape[:2], torch.float32)
    with m3_sparse.backend("aot"), emulation.policy("late"):
        m3_sparse.dense_attention(case.q, k, v, None, **options, leftpad_k=pad, out=out, lse=lse)
    oracle.check_attention(out, lse, *oracle.dense_attention(*args, **options))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, E4M3), (E4M3, E4M3)], ids=["bf16", "bf16-e4m3", "e4m3"])
@pytest.mark.parametrize("way", [1, 2, 3], ids=["decode", "stored", "fused"])
@each_problem
def test_selection(emulation, name, way, dtypes):
    q, k = dtypes
    if way == 1 and q == E4M3:
        pytest.skip("e4m3 queries are prefill_score's")
    case, (_, _, keys, pad) = make(name, heads=(4, 2), kind="int", dtype=BF16, kv_dtype=k)
    from m3_sparse import _contiguous

    rows = _contiguous.rows_of(keys, case.seqused_k, pad)
    table = rows.table(_contiguous.SCORING_RUN)
    out = torch.full((case.q.shape[0], 2, 16), -7, dtype=torch.int32)
    call = ops.BUILT["select_blocks", "aot"]
    with emulation.policy("late"):
        call(out, None, case.index_q.to(q), _contiguous.slots(keys), table, case.cu_seqlens_q, rows.seqused, 1, 0, way)
    args, options = case.index()
    scores = oracle.block_scores(*args, **options)
    counts = oracle.candidates(*options.values(), args[2], case.page, case.q.shape[0])
    oracle.check_selection(out, scores, torch.zeros_like(scores), counts)


def test_public_selection(emulation):
    case, (_, _, keys, pad) = make("left padding", heads=(4, 2), kind="int", dtype=BF16)
    args, options = case.index()
    want = m3_sparse.block_scores(*args, **options)
    with m3_sparse.backend("aot"):
        options["leftpad_k"] = pad
        got = m3_sparse.block_scores(case.index_q, keys, None, **options)
        chosen = m3_sparse.select_blocks(case.index_q, keys, None, **options, topk=2)
    assert torch.equal(got, want[..., : got.shape[2]])
    with m3_sparse.backend("torch"):
        assert torch.equal(m3_sparse.select_blocks(case.index_q, keys, None, **options, topk=2), chosen)


@pytest.mark.parametrize("length", [1, 40, 129, 300])
def test_the_adapter_hands_the_cache_itself_to_the_kernels(emulation, length):
    """A sparse layer of transformers, prefill of a padded batch and a decode step: everything that the operators get is
    a view of the model's states, of any length."""
    import types

    from m3_sparse import transformers as adapter

    batch, states, seen = 2, {}, []
    for name, heads in (("key", 1), ("value", 1), ("index", 1)):
        states[name] = torch.randn(batch, heads, length, 128).to(BF16)
    originals = {op: ops.BUILT[op, "aot"] for op in ("select_blocks", "sparse_attention")}

    def watched(function):
        def call(*args, **options):
            seen.extend(x.untyped_storage().data_ptr() for x in args if torch.is_tensor(x) and x.dtype == BF16)
            return function(*args, **options)

        return call

    indexer = types.SimpleNamespace(block_size=128, head_dim=128, num_heads=1, topk_blocks=16, local_blocks=1)
    layer = types.SimpleNamespace(indexer=indexer, layer_idx=1)
    for op, function in originals.items():
        ops.BUILT[op, "aot"] = watched(function)
    try:
        for q_len in sorted({1, min(length, 20)}):
            for pad in (None, torch.tensor([0, length // 2])):
                columns = [torch.full((batch,), length - q_len), torch.full((batch,), length)]
                mask = torch.stack(columns + ([pad] if pad is not None else []), -1)[:, None, None, :]
                query = torch.randn(batch, 16, q_len, 128).to(BF16)
                index = adapter.IndexStates(torch.randn(batch, 1, q_len, 128).to(BF16), states["index"])
                del seen[:]
                arguments = (layer, query, states["key"], states["value"], mask)
                with m3_sparse.backend("aot"), torch.no_grad():
                    got, _ = adapter.flash_attn_forward(*arguments, block_indices=index)
                for name, x in states.items():
                    assert x.data_ptr() in seen, name
                with m3_sparse.backend("torch"), torch.no_grad():
                    want, _ = adapter.flash_attn_forward(*arguments, block_indices=index)
                assert (got.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    finally:
        for op, function in originals.items():
            ops.BUILT[op, "aot"] = function
