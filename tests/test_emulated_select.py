"""The scoring and selection programs in the PTX emulator, through the public functions and the launcher.

Needs `--backend=emulated`. Scores are judged against float64, selections exactly against the scores.
"""

import cases
import oracle
import pytest
import torch

import m3_sparse

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E4M3)]


def select(case, **options):
    tensors, lengths = case.index()
    with m3_sparse.backend("aot"):
        return m3_sparse.select_blocks(*tensors, **lengths, return_scores=True, **options)


def check(case, **options):
    """Scores within the contract's epsilon, and the selection that these very scores demand."""
    ids, scores = select(case, **options)
    tensors, lengths = case.index()
    want = oracle.block_scores(*tensors, **lengths)
    epsilon = oracle.score_epsilon(*tensors, **lengths)
    assert torch.equal(scores == -torch.inf, want == -torch.inf) and not scores.isnan().any()
    seen = want > -torch.inf
    assert ((scores.double() - want).abs() <= epsilon[..., None])[seen].all()
    counts = oracle.candidates(*lengths.values(), tensors[2], tensors[1].shape[1], tensors[0].shape[0])
    names = {"topk": "topk", "local_blocks": "local", "init_blocks": "init"}
    exact = oracle.select(scores.double(), counts, **{names[k]: v for k, v in options.items()})
    assert torch.equal(ids, exact)
    return ids, scores


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("q_lens", [[1, 2], [3, 4, 0, 4], [9, 8]], ids=["8", "16", "32"])
def test_against_float64(emulation, dtypes, page, q_lens):
    heads = (4, 4) if len(q_lens) > 2 else (2, 2)
    q, kv = dtypes
    kv_lens = [3000, 700, 64, 129][: len(q_lens)]
    case = cases.make(q_lens, kv_lens, heads=heads, page=page, dtype=q, kv_dtype=kv, pad_rows=1, seed=page)
    with emulation.policy("eager+race"):
        ids, scores = check(case)
    tensors, lengths = case.index()
    with emulation.policy("random1+race"):
        again, same = select(case)
    assert torch.equal(ids, again) and torch.equal(scores, same)
    with emulation.policy("late"), m3_sparse.backend("aot"):
        assert torch.equal(scores, m3_sparse.block_scores(*tensors, **lengths))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize(
    "heads, q_lens", [(1, [1, 1, 1, 20]), (4, [1, 12, 1, 1]), (4, [1, 1, 20])], ids=["8", "16", "32"]
)
def test_a_request_with_more_rows_than_the_average(emulation, dtypes, heads, q_lens):
    q, kv = dtypes
    case = cases.make(q_lens, [400, 300, 700, 129][: len(q_lens)], heads=(heads, heads), dtype=q, kv_dtype=kv)
    with emulation.policy("eager+race"):
        check(case)
    case = cases.make(q_lens, [1000] * len(q_lens), heads=(heads, heads), dtype=q, kv_dtype=kv)
    with emulation.device("sm_90", 1):  # a CTA goes over several blocks with each group of columns
        check(case)


@pytest.mark.parametrize("power", [-122, 100])
@pytest.mark.parametrize("kv", [BF16, E4M3], ids=["bf16", "e4m3"])
def test_queries_at_the_ends_of_bfloat16(emulation, kv, power):
    """Over float8 keys they become fp16 numbers, which have no such range."""
    case = cases.make([2], [300], heads=(2, 2), dtype=BF16, kv_dtype=kv)
    case.index_q.mul_(2.0**power)
    check(case)


def crafted(values):
    """A case of one row whose block scores are `values`: few pages, and a table that repeats them."""
    levels, where = values.to(BF16).unique(return_inverse=True)
    case = cases.make([1], [128], heads=(1, 1), dtype=BF16)
    case.index_k_cache = torch.zeros(len(levels), 128, 128, dtype=BF16)
    case.index_k_cache[:, :, 0] = levels[:, None]
    case.index_q = torch.zeros(1, 1, 128, dtype=BF16)
    case.index_q[..., 0] = 1
    case.index_table = where.to(torch.int32)[None]
    case.seqused_k = torch.tensor([128 * len(values)], dtype=torch.int32)
    return case


@pytest.mark.parametrize("blocks", [17, 33, 256, 300, 1100, 2200])
def test_ties_and_special_scores(emulation, blocks):
    generator = torch.Generator().manual_seed(blocks)
    kinds = [(torch.randn(blocks, generator=generator) * 2).round(), torch.full((blocks,), 1.5)]
    if blocks < 1000:
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, -1e38])
        kinds += [special[torch.randint(0, 6, (blocks,), generator=generator)], -torch.arange(blocks).float()]
    for values in kinds:
        case = crafted(values)
        for topk, local, init in ((16, 1, 0), (4, 0, 0), (32, 3, 5), (16, 16, 0)):
            ids, scores = select(case, topk=topk, local_blocks=local, init_blocks=init)
            assert torch.equal(ids, oracle.select(scores.double(), [blocks], topk, local, init))


@pytest.mark.parametrize("blocks", [17, 300, 2200])
def test_short_rows_of_a_wide_table(emulation, blocks):
    case = crafted(torch.zeros(blocks))
    for n in (0, 1, 15, 16, 17):
        case.seqused_k[0] = 128 * n
        ids, scores = select(case)
        assert torch.equal(ids, oracle.select(scores.double(), [n]))


def test_wrong_numbers_stay_inside(emulation):
    for seed in range(4):
        case = cases.make([2, 2], [300, 700], heads=(4, 4), dtype=BF16, seed=seed)
        cases.spoil(cases.generator(seed), case.cu_seqlens_q, case.seqused_k, case.index_table)
        select(case)


def test_every_block_was_executed(emulation):
    """The last test of this file."""
    emulation.check_coverage("decode_score")
    emulation.check_coverage("topk")
