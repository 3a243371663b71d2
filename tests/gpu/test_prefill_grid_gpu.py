"""The grid of small problems that the emulated tests solve (tests/prefill_problems.py), on the GPU that is there.

The programs of its architecture, against float64 at the same tolerances. Only scores of fp8 queries get more room than
in the emulator: the tensor cores add their products with fewer bits than fp32 has.
"""

import functools

import cases
import oracle
import prefill_problems as problems
import pytest
import torch
from test_decode_gpu import on_gpu as place

import m3_sparse
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


def check_dense(case, causal):
    args, options = case.dense()
    want = oracle.dense_attention(*args, **options, causal=causal, softmax_scale=128**-0.5)
    args, options = [place(x) for x in args], {key: place(x) for key, x in options.items()}
    lengths, scales = (options["cu_seqlens_q"], options["seqused_k"]), (options["k_scale"], options["v_scale"])
    for splits in (1, 3):
        out = place(cases.nan_like(case.q.shape, case.q.dtype))
        lse = place(cases.nan_like(case.q.shape[:2], torch.float32))
        ops.BUILT["dense_attention", "aot"](out, lse, *args, *lengths, 128**-0.5, causal, *scales, splits)
        oracle.check_attention(out.cpu(), lse.cpu(), *want)


each_dense_dtype = pytest.mark.parametrize("dtype", [problems.BF16, problems.FP16], ids=["bf16", "fp16"])


@each_dense_dtype
@pytest.mark.parametrize("name", problems.DENSE)
def test_dense_attention(name, dtype):
    check_dense(*problems.dense(name, dtype))


@each_dense_dtype
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
def test_dense_references_that_move(falling, tokens, dtype):
    check_dense(problems.apart(tokens, dtype, falling), True)


@pytest.mark.parametrize("dtypes", problems.DTYPES, ids=problems.names)
@pytest.mark.parametrize("page", [64, 128])
def test_what_is_not_finite_reaches_rows_that_see_it(page, dtypes):
    """NaN and infinities in V and K; the bits of everything else stay."""

    def run(problem, formulation):
        return problems.attend(problem, formulation, place)

    for heads in ((32, 2), (16, 2)):
        problem, places = problems.blemished(page, heads, *dtypes)
        names = (*problem.formulations(), "decode")
        problems.check_isolation(problem, places, *(functools.partial(run, formulation=name) for name in names))


@pytest.mark.parametrize("kv", [problems.BF16, problems.E4M3], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("formulation", ["union", "kv_stationary"])
def test_a_nan_in_a_long_prompt_changes_no_other_row(formulation, kv):
    """Many tiles a CTA, all CTAs; a float8 cache widened first. One key of every third block holds a NaN in a column."""
    tokens, topk = 5000, 16
    torch.manual_seed(1)
    pages = -(-tokens // 128)
    q = torch.randn(tokens, 64, 128, device="cuda", dtype=problems.BF16)
    k, v = (torch.randn(pages, 4, 128, 128, device="cuda").to(kv) for _ in range(2))
    table = torch.randperm(pages, device="cuda").to(torch.int32)[None]
    own = torch.arange(tokens, device="cuda") // 128
    ids = (torch.rand(tokens, 4, topk, device="cuda") * (own + 1)[:, None, None]).to(torch.int32)
    ids[..., -1] = own[:, None]
    lengths = {"cu_seqlens_q": [0, tokens], "seqused_k": [tokens]}
    lengths = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in lengths.items()}
    one = torch.ones(1, device="cuda") if kv == problems.E4M3 else None

    def run():
        with m3_sparse.backend("aot"):
            return m3_sparse.sparse_attention(
                q, k, v, ids, table, **lengths, k_scale=one, v_scale=one, return_lse=True, formulation=formulation
            )

    out, lse = run()
    blocks = torch.arange(0, pages, 3, device="cuda")
    positions, columns = blocks * 128 + (blocks * 37) % 128, (blocks * 5) % 128
    hit = positions < tokens
    blocks, positions, columns = blocks[hit], positions[hit], columns[hit]
    raw, nan = (v.view(torch.uint8), 127) if kv == problems.E4M3 else (v, torch.nan)
    raw[table[0, blocks].long(), :, positions % 128, columns] = nan
    spoiled, spoiled_lse = run()
    sees = torch.zeros(tokens, 4, 128, dtype=torch.bool, device="cuda")
    for block, position, column in zip(blocks.tolist(), positions.tolist(), columns.tolist()):
        chose = (ids == block).any(-1) & (torch.arange(tokens, device="cuda") >= position)[:, None]
        sees[:, :, column] |= chose
    sees = sees.repeat_interleave(16, 1)
    assert sees.any(-1).any() and not sees.any(-1).all()
    assert torch.equal(spoiled.isnan(), sees)
    assert torch.equal(spoiled[~sees], out[~sees]) and torch.equal(spoiled_lse, lse)
