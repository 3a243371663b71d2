"""What the property tests found, each by name: its call, and the right answer."""

import time

import cases
import field_helpers
import oracle
import pytest
import torch

import m3_sparse

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")
ATTENTION_DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2)]


def attended(backend, dtypes, dense, change=None, **options):
    """{formulation: (out, lse)} of a head that `change` may spoil and one beside it, and which rows see something."""
    case = cases.make(
        [9, 4, 2, 1], [4, 300, 50, 700], heads=(32, 2), dtype=dtypes[0], kv_dtype=dtypes[1], page=64, pad_rows=1,
        poison="zero", seed=5,
    )  # fmt: skip
    case.ids[:, :, 0] = 0
    case.block_table[2, 0] = -1  # rows that see nothing but would
    if change is not None:
        change(case)
    positions = {row: position for row, kv_len, position in case.rows() if kv_len != 50}
    sees = torch.tensor([positions.get(row, -1) >= 0 for row in range(len(case.q))])
    names = [name for name in backend.formulations(case) if name] or [None]
    found = {None: backend.dense(case, **options)} if dense else backend.every(case, names, **options)
    return found, sees


def scales(k, v, of_q=None):
    """Sets the scales of the first head, and rows of its queries to NaN."""

    def change(case):
        case.k_scale, case.v_scale = torch.tensor([k, 0.5]), torch.tensor([v, 0.5])
        if of_q is not None:
            case.q[of_q, :16:2] = NAN

    return change


def check_what_is_not_finite(backend, dtypes, dense, values):
    """Union, KV-stationary and dense kernels took a k_scale of NaN for 0, which gave finite rows; an infinite one gave empty
    rows in all kernels, and in torch, where all products of a row had one sign. And a row whose query is NaN had an LSE of
    -inf in dense attention: a merge with other parts lost it."""
    clean, sees = attended(backend, dtypes, dense, scales(0.5, 0.5))
    some_rows = torch.tensor([8, 10, 15])  # one a request; the keys of the last one may be split
    nan_queries, _ = attended(backend, dtypes, dense, scales(0.5, 0.5, some_rows))
    for name, (out, lse) in nan_queries.items():
        assert out[some_rows, :16:2].isnan().all() and lse[some_rows, :16:2].isnan().all(), name
        for got, want in zip((out, lse), clean[name]):
            got[some_rows, :16:2] = want[some_rows, :16:2]
        field_helpers.same((out, lse), clean[name], name)
    for value in values:
        of_keys, _ = attended(backend, dtypes, dense, scales(value, 0.5))
        of_values, _ = attended(backend, dtypes, dense, scales(0.5, value))
        of_all, _ = attended(backend, dtypes, dense, softmax_scale=value)
        for name, (out, lse) in clean.items():
            for found, heads in ((of_keys, 16), (of_all, 32)):
                assert found[name][0][sees, :heads].isnan().all(), (name, value)
                assert found[name][1][sees, :heads].isnan().all(), (name, value)
            assert not of_values[name][0][sees, :16].isfinite().any(), (name, value)
            assert torch.equal(of_values[name][1], lse), "v_scale changes lse"
            for found in (of_keys, of_values):
                assert torch.equal(found[name][0][:, 16:], out[:, 16:])
                assert torch.equal(found[name][1][:, 16:], lse[:, 16:])
            for found in (of_keys, of_values, of_all):
                assert field_helpers.is_empty(*(x[~sees] for x in found[name])), (name, value)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("dtypes", ATTENTION_DTYPES, ids=str)
def test_what_is_not_finite_stays_visible(dtypes, dense):
    check_what_is_not_finite(field_helpers.Backend("torch"), dtypes, dense, (NAN, INF, -INF))


def test_an_infinite_scale_over_products_of_one_sign():
    """All logits were -inf, as those of an empty row."""
    case = cases.make([1], [300], heads=(2, 1), dtype=BF16, poison="zero")
    case.q.fill_(-1), case.k_cache.fill_(1)
    case.k_scale = torch.tensor([INF])
    for out, lse in (field_helpers.Backend("torch").sparse(case), field_helpers.Backend("torch").dense(case)):
        assert out.isnan().all() and lse.isnan().all()


def test_a_wide_table_costs_what_its_requests_are_long():
    """select_blocks and block_scores of torch on the CPU took 108 s for 1,024 rows under a table of 8,192 columns."""
    case = cases.make([1024], [1200], heads=(4, 4), dtype=BF16, topk=1, style="clean")
    case.index_table = torch.nn.functional.pad(case.index_table, (0, 8192 - case.index_table.shape[1]), value=-1)
    args, lengths = case.index()
    started = time.process_time()
    ids, scores = m3_sparse.select_blocks(*args, **lengths, topk=4, return_scores=True)
    assert time.process_time() - started < 20
    assert (scores[..., 10:] == -torch.inf).all() and (scores[-1, :, :9] > -torch.inf).all()
    counts = oracle.candidates(*lengths.values(), args[2][:, :10], 128, 1024)
    assert torch.equal(ids, oracle.select(scores[..., :10].double(), counts, topk=4))


@pytest.mark.parametrize("reach", ["keys", "queries"])
def test_explain_knows_what_float8_scoring_refuses(reach):
    """Float8 queries over tensors with a stride of 0 passed the choice of the backend and failed in the operator."""
    from m3_sparse import _limits

    query, keys = torch.zeros(2, 4, 128).to(E4M3), torch.zeros(3, 128, 128).to(E4M3)
    table = torch.zeros(1, 3, dtype=torch.int32)
    assert _limits.block_scores(query, table, keys) is None and _limits.select_blocks(query, table, 16, keys) is None
    if reach == "keys":
        keys = keys[:1].expand(keys.shape)
    else:
        query = query[:1].expand(query.shape)
    for refusal in (_limits.block_scores(query, table, keys), _limits.select_blocks(query, table, 16, keys)):
        assert "strides above 0" in refusal
    assert "strides above 0" in m3_sparse.explain("block_scores", index_q=query, index_k_cache=keys, block_table=table)
