"""The grid of small problems that the emulated tests solve (tests/prefill_problems.py), on the GPU that is there.

The programs of its architecture, against float64 at the same tolerances. Only scores of fp8 queries get more room than
in the emulator: the tensor cores add their products with fewer bits than fp32 has.
"""

import cases
import oracle
import prefill_problems as problems
import pytest
import torch
from test_decode_gpu import on_gpu as place

from m3_sparse import ops

STORED, FUSED = 2, 3


@pytest.mark.parametrize("dtypes", problems.DTYPES, ids=problems.names)
@pytest.mark.parametrize("name", problems.ATTENTION)
def test_sparse_attention(name, dtypes):
    problem = problems.attention(name, dtypes)
    want = problems.expected(problem)
    for formulation in (*problem.formulations(), None):
        oracle.check_attention(*problems.attend(problem, formulation, place), *want)


@pytest.mark.parametrize("dtypes", problems.SCORE_DTYPES, ids=problems.names)
@pytest.mark.parametrize("page", [64, 128])
def test_selection(page, dtypes):
    (query, keys, table), lengths = problems.scoring(page, dtypes)
    blocks = -(-table.shape[1] * page // 128)
    given = [place(x) for x in (query, keys, table, *lengths.values())]
    want = oracle.block_scores(query, keys, table, **lengths)
    epsilon = oracle.score_epsilon(query, keys, table, **lengths) * (64 if query.dtype == problems.E4M3 else 1)
    seen = want > -torch.inf
    counts = oracle.candidates(*lengths.values(), table, page, query.shape[0])

    def select(topk, way, scores=None):
        out = place(torch.full((*query.shape[:2], topk), -77, dtype=torch.int32))
        ops.BUILT["select_blocks", "aot"](out, scores, *given, 1, 0, way)
        return out.cpu()

    for topk in (topk for its_page, topk in problems.SCORE_PROBLEMS if its_page == page):
        scores = place(cases.nan_like((*query.shape[:2], blocks), torch.float32))
        ids = select(topk, STORED, scores)
        scores = scores.cpu()
        assert torch.equal(scores == -torch.inf, ~seen) and not scores.isnan().any()
        assert ((scores.double() - want).abs() <= epsilon[..., None])[seen].all()
        assert torch.equal(ids, oracle.select(scores.double(), counts, topk=topk))
        assert torch.equal(select(topk, FUSED), ids)


@pytest.mark.parametrize("dtype", [problems.BF16, problems.FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", problems.DENSE)
def test_dense_attention(name, dtype):
    case, causal = problems.dense(name, dtype)
    args, options = case.dense()
    want = oracle.dense_attention(*args, **options, causal=causal, softmax_scale=128**-0.5)
    args, options = [place(x) for x in args], {key: place(x) for key, x in options.items()}
    lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
    for splits in (1, 3):
        out = place(cases.nan_like(case.q.shape, dtype))
        lse = place(cases.nan_like(case.q.shape[:2], torch.float32))
        ops.BUILT["dense_attention", "aot"](out, lse, *args, *lengths, 128**-0.5, causal, *scales, splits)
        oracle.check_attention(out.cpu(), lse.cpu(), *want)
