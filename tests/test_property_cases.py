"""What the property tests found, each by name: its call, and the right answer."""

import time

import cases
import oracle
import pytest
import torch

import m3_sparse

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


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
