"""Random small problems: selection bit for bit, attention and LSE within the fp32 tolerance."""

import cases
import hypothesis
import oracle
import torch
from hypothesis import strategies as st

import m3_sparse

REQUEST = st.tuples(
    st.one_of(st.integers(0, 5), st.sampled_from([8, 16, 17])),
    st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 2300])),
)
EXAMPLES = hypothesis.settings(
    max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@EXAMPLES
@hypothesis.given(
    requests=st.lists(REQUEST, min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 2)]),
    page=st.sampled_from([64, 128]),
    layout=st.sampled_from(cases.LAYOUTS),
    topk=st.sampled_from([1, 2, 3, 5, 16]),
    pad_rows=st.integers(0, 2),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_attention(requests, heads, page, layout, topk, pad_rows, causal, seed):
    q_lens, kv_lens = [q for q, _ in requests], [k for _, k in requests]
    case = cases.make(
        q_lens, kv_lens, heads=heads, page=page, layout=layout, topk=topk, pad_rows=pad_rows, causal=causal, seed=seed
    )
    args, kwargs = case.sparse()
    out, lse = cases.call_sparse(m3_sparse.sparse_attention, case, causal=causal)
    oracle.check_attention(out, lse, *oracle.sparse_attention(*args, **kwargs, causal=causal))
    args, kwargs = case.dense()
    out, lse = cases.call_dense(m3_sparse.dense_attention, case, causal=causal)
    oracle.check_attention(out, lse, *oracle.dense_attention(*args, **kwargs, causal=causal))


@EXAMPLES
@hypothesis.given(
    requests=st.lists(REQUEST, min_size=1, max_size=4),
    heads=st.integers(1, 3),
    page=st.sampled_from([64, 128]),
    layout=st.sampled_from(["hnd", "padded", "dense"]),
    forced=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    spare=st.integers(0, 12),
    zeros=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_selection(requests, heads, page, layout, forced, spare, zeros, seed):
    """`zeros` is the share of index keys that are zero: it makes groups of exact ties."""
    local, init = forced
    topk = max(1, local + init + spare)
    case = cases.make(
        [q for q, _ in requests],
        [k for _, k in requests],
        heads=(heads, heads),
        page=page,
        layout=layout,
        kind="int",
        seed=seed,
    )
    case.index_q *= torch.rand(case.index_q.shape[:2] + (1,), generator=cases.generator(seed)) >= zeros / 2
    args, kwargs = case.index()
    counts = oracle.candidates(case.cu_seqlens_q, case.seqused_k, case.index_table, page, case.q.shape[0])
    want = oracle.select(oracle.block_scores(*args, **kwargs), counts, topk, local, init)
    got = m3_sparse.select_blocks(*args, **kwargs, topk=topk, local_blocks=local, init_blocks=init)
    oracle.check_bitwise(got, want, "block_indices")
