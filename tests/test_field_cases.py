"""Failures that users of MiniMax-M3 kernels and their relatives met, as tests: a row's id, its source, the right value.

The expected value is always the float64 oracle's. The same tests run for the AOT kernels in the PTX emulator
(test_emulated_field_cases.py) and on a GPU (gpu/test_field_cases_gpu.py); here for torch on the CPU.

Reports without a test here, and why:

* P1, P2, P7 (speed of verification, of the decode indexer and of fp8 index keys), P9 (speed on Hopper): figures, not
  results; benchmarks/ measures them. What of P1, P2 and P7 can go wrong is in V6, P5 and S12.
* P4 (a read-back per layer): here on a GPU, where a synchronisation can be seen; for torch on the CPU it is
  test_ops.py::test_the_torch_backend_reads_nothing_on_the_host.
* V9's and V5's NVFP4 scales: there is no NVFP4 cache. Their scalar and fp8 halves are tests.
* V7's scales per token: refused, which is the test.
* G2's and G3's plans: there is no plan and no workspace of the caller's; what could be stale between calls is tested.
"""

import subprocess
import sys

import cases
import oracle
import pytest
import torch
from field_backend import Backend, moved

import m3_sparse

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
INF = float("inf")
GROUP16 = (16, 1)  # heads that every formulation takes
INDEX4 = (4, 4)  # four index heads


@pytest.fixture(scope="module")
def backend():
    return Backend("torch")


def make(q_lens, kv_lens, heads=GROUP16, **options):
    return cases.make(q_lens, kv_lens, heads=heads, **{"dtype": BF16, **options})


def is_empty(out, lse):
    return bool((out == 0).all() and (lse == -INF).all())


def same(one, other, what):
    for a, b in zip(one, other):
        oracle.check_bitwise(a, b, what)


def same_everywhere(ones, others):
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        same(one, others[name], f"formulation {name}")


def with_ids(case, *rows):
    """The same ids in every row and head for each of `rows`, cyclically, -1 behind them."""
    case.ids.fill_(-1)
    for t in range(len(case.ids)):
        ids = rows[t % len(rows)]
        case.ids[t, :, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return case


def crafted(values):
    """One row whose block scores are `values`: few pages, and a table that repeats them."""
    levels, where = values.to(BF16).unique(return_inverse=True)
    case = make([1], [128], heads=(1, 1))
    case.index_k_cache = torch.zeros(len(levels), 128, 128, dtype=BF16)
    case.index_k_cache[:, :, 0] = levels[:, None]
    case.index_q = torch.zeros(1, 1, 128, dtype=BF16)
    case.index_q[..., 0] = 1
    case.index_table = where.to(torch.int32)[None]
    case.kv_lens = [128 * len(values)]
    case.seqused_k = torch.tensor(case.kv_lens, dtype=torch.int32)
    return case


# ------------------------------------------------------------------------------------------------------- 1. selection


def test_S1_every_index_head_selects_for_itself(backend):
    """S1, huggingface/transformers#46762, #46600: index heads collapsed into one selection beyond 16 blocks."""
    case = make([2], [128 * 24 + 5], heads=INDEX4, seed=1)
    ids, _ = backend.check_select(case)
    for head in range(1, 4):
        assert not torch.equal(ids[:, 0], ids[:, head]), "the draw is to have heads that differ"


@pytest.mark.parametrize("view", [cases.head_major, cases.unaligned])
def test_S2_a_selection_of_any_strides(backend, view):
    """S2, vllm-project/vllm#46214: a selection that isn't contiguous was refused."""
    case = make([3, 2], [700, 300], seed=2)
    plain = backend.check(case)
    case.ids = view(case.ids)
    same_everywhere(plain, backend.check(case))


def test_S2_a_slice_of_a_persistent_buffer(backend):
    """S2, vllm-project/vllm#46214: `[:, :n]` of `[Hkv, max_tokens, K]`, written by select_blocks, read by attention."""
    case = make([3], [900], heads=(8, 2), seed=3)
    want, _ = backend.select(case)
    buffer = torch.full((2, 9, 16), 77, dtype=torch.int32, device=backend.device)
    args, lengths = moved(case, backend.device).index()
    view = buffer[:, :3].transpose(0, 1)
    with m3_sparse.backend(backend.name):
        assert m3_sparse.select_blocks(*args, **lengths, out=view) is view
    assert torch.equal(view.cpu(), want) and (buffer[:, 3:] == 77).all()
    case.ids = buffer.cpu()[:, :3].transpose(0, 1)
    backend.check(case)


def test_S3_the_mask_goes_by_position_not_by_slot(backend):
    """S3, sgl-project/sglang#30971: front-packed ids that don't ascend put the causal mask on the wrong block."""
    case = with_ids(make([3], [5 * 128 + 40], seed=4), [5, 0, 3], [3, 5, 1], [0, 4, 5, 2])
    backend.check(case)


def test_S4_bounds_are_a_rows_own(backend):
    """S4, flashinfer-ai/flashinfer#4324: one bound for a batch of mixed lengths, or for a chunk of a prefill."""
    case = make(
        [2, 1, 9], [260, 2100, 131], heads=INDEX4, seed=5
    )  # the last: 122 tokens before it, so a block boundary
    case.ids, _ = backend.check_select(case, local_blocks=1)
    backend.check(case)


def test_S5_a_context_of_a_million_tokens(backend):
    """S5, sgl-project/sglang#38615, #36560: blocks beyond 4,096 were never selected."""
    blocks = 8192
    values = -torch.ones(blocks)
    high = [0, 4095, 4096, 4097, blocks - 2, blocks - 40]
    values[high] = torch.arange(1.0, 7.0)
    case = crafted(values)
    ids, scores = backend.select(case, topk=8)
    assert torch.equal(ids, oracle.select(scores.double(), [blocks], topk=8))
    assert set(high) < set(ids[0, 0].tolist())
    attended = make([1], [128], seed=6)
    attended.block_table = torch.zeros(1, blocks, dtype=torch.int32) + attended.block_table[0, 0]
    attended.kv_lens, attended.seqused_k = case.kv_lens, case.seqused_k
    attended.ids[0, 0, :8] = ids[0, 0]
    backend.check(attended)


def test_S5_beyond_the_limit_is_an_error(backend):
    """S5, sgl-project/sglang#38615: a limit that is passed says so."""
    case = make([1], [128], heads=(1, 1))
    case.index_table = torch.zeros(1, 16385, dtype=torch.int32)
    args, lengths = moved(case, backend.device).index()
    with m3_sparse.backend(backend.name), pytest.raises(ValueError, match="16384"):
        m3_sparse.select_blocks(*args, **lengths)


@pytest.mark.parametrize("topk", [4, 8, 16, 32])
def test_S6_any_topk_with_few_candidates(backend, topk):
    """S6, vllm-project/vllm-ascend#12734, #12417, #13177: top-k above 16, fewer candidates than k."""
    case = make([1, 1, 2], [100, 17 * 128, 130], heads=(2, 2), seed=6)
    ids, _ = backend.check_select(case, topk=topk)
    assert ids.shape[-1] == topk and (ids[0, :, 1:] == -1).all()


def test_S6_too_large_a_topk_is_refused_or_right(backend):
    """S6, vllm-project/vllm-ascend#12734: fixed arrays must not overflow."""
    case = make([1], [40 * 128], heads=(1, 1), seed=7)
    if backend.name == "torch":
        backend.check_select(case, topk=33)
        return
    with pytest.raises(NotImplementedError, match="topk of at most 32, got 33"):
        backend.select(case, topk=33)


@pytest.mark.parametrize("size", [1, 16, 32, 256])
def test_S7_other_page_sizes_are_refused(backend, size):
    """S7, sgl-project/sglang-jax#1376; V11, NVIDIA/TensorRT-LLM#16021: page sizes that change what a block is."""
    case = make([1], [128], heads=(1, 1))
    case.index_k_cache = torch.zeros(4, size, 128, dtype=BF16)
    case.k_cache = case.v_cache = torch.zeros(4, 1, size, 128, dtype=BF16)
    device = moved(case, backend.device)
    args, lengths = device.index()
    with m3_sparse.backend(backend.name), pytest.raises(ValueError, match="64 or 128"):
        m3_sparse.select_blocks(*args, **lengths)
    args, lengths = device.sparse()
    with m3_sparse.backend(backend.name), pytest.raises(ValueError, match="64 or 128"):
        m3_sparse.sparse_attention(*args, **lengths)


def test_S7_blocks_over_pages_of_64(backend):
    """S7, sgl-project/sglang-jax#1376: -1 divided by the page size; a chunk that begins in the middle of a page."""
    case = make([5, 3], [128 * 3 + 70, 64 + 35], heads=(2, 2), page=64, seed=8)  # begin at 449 and 96
    backend.check_select(case, topk=4)
    case.ids[:, :, ::3] = -1
    backend.check(case)
    case.index_table[0, 1] = case.block_table[0, 1] = -1  # half of a block is nowhere
    backend.check_select(case, topk=4)
    backend.check(case)


SPECIAL = {
    "equal": torch.full((40,), 1.5),
    "few above -inf": torch.tensor([-INF] * 20 + [1.0, 2.0, 3.0] + [-INF] * 17),
    "all -inf": torch.full((40,), -INF),
    "+inf": torch.tensor([INF, 1.0] * 20),
    "all +inf": torch.full((40,), INF),
    "nan": torch.tensor([float("nan"), 1.0, -1.0, INF] * 10),
    "all nan": torch.full((40,), float("nan")),
    "zeros": torch.tensor([0.0, -0.0] * 20),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_S8_ties_and_special_scores(backend, kind):
    """S8, sgl-project/sglang#30645, #35257, #37625, vllm-project/vllm#55314: -1 in the valid prefix, wrong members."""
    case = crafted(SPECIAL[kind])
    for topk in (4, 16):
        ids, scores = backend.select(case, topk=topk)
        chosen = ids[0, 0].tolist()
        assert len(set(chosen)) == topk and min(chosen) >= 0
        want = oracle.block_scores(*case.index()[0], **case.index()[1])
        assert torch.equal(scores.double(), want)  # products with one term are exact
        assert torch.equal(ids, oracle.select(want, [40], topk=topk))


def test_S9_the_lowest_id_wins_everywhere(backend):
    """S9, vllm-project/vllm#55122, #51782, ROCm/aiter#4376, #4415: ties decided by the order of atomics."""
    case = make([2, 1], [35 * 128 + 3, 30 * 128], heads=(2, 2), kind="int", seed=9)
    case.index_q[..., 3:] = 0  # few values, so many ties
    ids, scores = backend.select(case)
    args, lengths = case.index()
    want = oracle.block_scores(*args, **lengths)
    assert torch.equal(scores.double(), want)
    assert all(len(set(row.tolist())) < 30 for row in want.flatten(0, 1)), "the draw is to have ties"
    assert torch.equal(ids, oracle.select(want, oracle.candidates(*lengths.values(), args[2], 128, 3)))
    again, _ = backend.select(case)
    assert torch.equal(ids, again)
    case.index_q = case.index_q[2:]
    case.index_table, case.seqused_k = case.index_table[1:], case.seqused_k[1:]
    case.cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32)
    alone, _ = backend.select(case)
    assert torch.equal(alone, ids[2:])


def test_S10_no_table_of_scores(backend):
    """S10, vLLM's M3 indexer: fp32 [H, total_q, max_blocks] in a call, 2 GiB for a long context."""
    if backend.device == "cpu" or backend.name == "torch":
        pytest.skip("16,384 rows: on a GPU with aot; test_memory.py bounds the whole process for torch on the CPU")
    tokens = 16384
    case = make([tokens], [tokens], heads=(4, 4), poison="zero")
    case.index_table = torch.nn.functional.pad(case.index_table, (0, 8192 - case.index_table.shape[1]), value=-1)
    args, lengths = moved(case, backend.device).index()
    with m3_sparse.backend(backend.name):
        most = backend.peak(lambda: m3_sparse.select_blocks(*args, **lengths))
    assert 0 < most <= 4 * tokens * 8192 * 4 // 2


def test_S11_index_keys_travel_with_keys_and_values(backend):
    """S11, ROCm/ATOM#1368, #2140: the index keys' cache was left behind, which shows beyond 16 blocks only."""
    case = make([2], [128 * 19 + 9], heads=(8, 2), seed=10)
    n, table = case.kv_lens[0], case.block_table[0].long()
    case.index_k_cache = torch.full((len(case.k_cache), 128, 128), float("nan"), dtype=BF16)
    gen = cases.generator(11)
    k, v = (cases.values((n, 2, 128), "normal", BF16, gen) for _ in range(2))
    index_k = cases.values((n, 128), "normal", BF16, gen)
    for cache in (case.k_cache, case.v_cache):
        cache.fill_(float("nan"))
    case.index_table = case.block_table
    at = torch.arange(n)
    slots = table[at // 128] * 128 + at % 128
    expected = oracle.store_kv(k, v, index_k, case.k_cache, case.v_cache, case.index_k_cache, slots)
    device = moved(case, backend.device)
    given = [x.to(backend.device) for x in (k, v, index_k)]
    caches = (device.k_cache, device.v_cache, device.index_k_cache)
    with m3_sparse.backend(backend.name):
        m3_sparse.store_kv(*given, *caches, slots.to(backend.device))
    for cache, want in zip(caches, expected):
        assert torch.equal(oracle.stored_bytes(cache.cpu()), want)
    stored = moved(device, "cpu")
    stored.ids, _ = backend.check_select(stored)
    assert (stored.ids >= 0).all() and (stored.ids > 15).any()
    backend.check(stored, formulations=(None,))


@pytest.mark.parametrize("page", [64, 128])
def test_S12_several_heads_over_fp8_index_keys(backend, page):
    """S12, FlashInfer 0.7.4 SM90 sources: several fp8 index heads read wrong pages. Also P7's fp8 index keys."""
    case = make([1, 4], [2300, 400], heads=INDEX4, kv_dtype=E4M3, page=page, seed=12)
    backend.check_select(case)
    case.index_q = case.index_q.to(E4M3)
    backend.check_select(case)
