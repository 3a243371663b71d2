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
from field_helpers import (
    BARE,
    BF16,
    INF,
    Backend,
    counts_of,
    crafted,
    draw_again,
    is_empty,
    make,
    moved,
    same,
    same_everywhere,
    with_ids,
)  # fmt: skip

import m3_sparse

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INDEX4 = (4, 4)  # four index heads


@pytest.fixture(scope="module")
def backend():
    return Backend("torch")


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
    with pytest.raises(ValueError, match="16384"):
        backend.select(case)


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
    for call in (backend.select, backend.sparse):
        with pytest.raises(ValueError, match="64 or 128"):
            call(case)


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
    case = make([1], [tokens], heads=(4, 4), poison="zero")
    case.index_q = torch.randn(tokens, 4, 128).to(BF16)
    case.cu_seqlens_q = torch.tensor([0, tokens], dtype=torch.int32)
    case.index_table = torch.nn.functional.pad(case.index_table, (0, 8192 - case.index_table.shape[1]), value=-1)
    args, lengths = moved(case, backend.device).index()
    with m3_sparse.backend(backend.name):
        most = backend.peak(lambda: m3_sparse.select_blocks(*args, **lengths))
    assert 0 < most < 2**28  # of the 2 GiB


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


# ------------------------------------------------------------------------------------------------ 2. attention: values


def test_V1_padded_rows(backend):
    """V1, vllm-project/vllm#49054: NaN from a padded row of a graph, where the merge forms -inf - (-inf)."""
    case = make([2, 0, 1], [300, 0, 130], pad_rows=3, seed=20)
    case.ids[1] = -1
    for out, lse in backend.check(case).values():
        assert is_empty(out[1], lse[1]) and is_empty(out[-3:], lse[-3:])
    out, lse = backend.check_dense(case)
    assert is_empty(out[-3:], lse[-3:])


def test_V2_minus_one_anywhere(backend):
    """V2, vllm-project/vllm#54597: -1 dereferenced."""
    rows = [[-1, 0, 3], [0, -1, -1, 3], [0, 3, -1], [-1] * 16]
    for out, lse in backend.check(with_ids(make([4], [4 * 128 + 3], seed=21), *rows)).values():
        assert is_empty(out[3], lse[3])


def test_V3_invalid_entries_first(backend):
    """V3, vLLM's common/ops/sparse_attn.py: the first entries trusted, a first block that is masked as a whole."""
    case = with_ids(make([3], [3 * 128 + 2], seed=22), [3, 0], [7, 1, 2], [2**31 - 1, -5, 0])
    assert case.kv_lens[0] - 3 == 383  # row 0 sees none of block 3
    backend.check(case)
    case.block_table[0, 0] = -1
    backend.check(case)
    case.block_table[0, 0] = len(case.k_cache)
    backend.check(case)


def test_V4_invalid_ids_change_no_bit(backend):
    """V4, vllm-project/vllm-ascend#13391: invalid pages or the tail of a partial block loaded unmasked."""
    case = make([2, 3], [300, 150], seed=23)
    width = case.block_table.shape[1]
    wrong = [width, width + 1, 2**31 - 1, -(2**31), 4096]
    clean = backend.check(with_ids(case, [0, 1], [1]))
    same_everywhere(clean, backend.check(with_ids(case, [0, 1, *wrong], [1, *wrong])))


@pytest.mark.parametrize("kv, page", [(BF16, 128), (BF16, 64), (E4M3, 64), (E5M2, 128)])
def test_V5_bytes_past_the_length_change_no_bit(backend, kv, page):
    """V5, MSA's test_tail_garbage, flashinfer-ai/flashinfer#5090: 0 * NaN in the product with V, exp(0) of a zero key."""
    results = []
    for poison in ("zero", "nan", "inf"):
        case = make([9, 3, 2], [300, 37, 129], kv_dtype=kv, page=page, poison=poison, seed=24)
        results.append(backend.check(case))
        if kv == BF16:
            results[-1]["dense"] = backend.check_dense(case)
        if kv == E4M3 and poison == "nan":
            for cache in (case.k_cache, case.v_cache):
                codes = cache.view(torch.uint8)
                codes[codes == 0x7F] = 0xFF
            results.append(backend.check(case))
    for other in results[1:]:
        same_everywhere(results[0], other)


def test_V5_a_visible_nan_stays_in_the_rows_that_see_it(backend):
    """V5: a NaN in V inside the length is in the rows that see it, and in no other row of any request."""
    case = with_ids(make([9, 9], [300, 200], seed=25), [0], [1])
    clean = backend.check(case)
    case.v_cache[case.block_table[0, 0], 0, 5] = float("nan")
    for name, (out, lse) in backend.every(case).items():
        same([out[9:], lse[9:]], [x[9:] for x in clean[name]], f"the other request, {name}")
        assert out[:9:2].isnan().all()
        oracle.check_bitwise(lse, clean[name][1], f"lse, {name}")
        oracle.check_bitwise(out[1:9:2], clean[name][0][1:9:2], f"rows that don't see it, {name}")


def test_V6_verification_of_drafts(backend):
    """V6, sgl-project/sglang#40214, #33383, #36659, vllm-project/vllm#47984: kv_len includes the drafts. Also P1."""
    case = make([4, 8, 2, 0, 4], [260, 131, 2, 77, 3], pad_rows=4, seed=26)  # the last: more drafts than tokens
    out, lse = backend.check(case)[None]
    assert is_empty(out[14], lse[14])  # the row before the first token
    case = make([4, 8, 2, 0, 4], [260, 131, 2, 77, 4], heads=(8, 2), pad_rows=4, seed=27)
    case.ids, _ = backend.check_select(case)
    backend.check(case)


@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", ["scalar", "head"])
def test_V7_V8_scales_that_are_not_one(backend, scales, kv):
    """V7, V8, vllm-project/vllm#45562, #52060, lightseekorg/tokenspeed#764: fp8 KV with bf16 q, scales ignored."""
    case = make([3, 5], [260, 100], heads=(32, 2), kv_dtype=kv, scales=scales, seed=28)
    scaled = backend.check(case)
    case.k_scale = case.v_scale = None
    assert not torch.equal(scaled[None][0], backend.check(case)[None][0])


def test_V7_scales_of_other_shapes_are_refused(backend):
    """V7, vllm-project/vllm#45562: scales per token and head."""
    case = make([1], [100], heads=(32, 2), kv_dtype=E4M3, seed=29)
    case.k_scale = torch.ones(len(case.k_cache), 2, 128)
    with pytest.raises(ValueError, match="k_scale must have 1 or Hkv = 2 elements"):
        backend.sparse(case)


def test_V9_scales_are_read_by_each_call(backend):
    """V9, NVIDIA/TensorRT-LLM#17985, #19422: scale views at +4 and +8 bytes, host copies kept after a reload."""
    case = make([3], [260], heads=(32, 2), kv_dtype=E4M3, seed=30)
    buffer = torch.tensor([9.0, 0.5, 2.0, 0.75, 9.0])
    case.k_scale, case.v_scale = buffer[1:3], buffer[2:4]
    device = moved(case, backend.device)
    first = backend.check(case)
    backend.every(device)
    for x in (case, device):  # in place, where the calls read them
        x.k_scale.copy_(torch.tensor([0.75, 3.0]))
        x.v_scale.copy_(torch.tensor([3.0, 1.25]))
    args, lengths = case.sparse()
    want = oracle.sparse_attention(*args, **lengths)
    for name, again in backend.every(device).items():
        oracle.check_attention(*again, *want)
        assert not torch.equal(first[name][0], again[0])


def test_V10_head_counts_that_do_not_divide_are_refused(backend):
    """V10, NVIDIA/TensorRT-LLM#18008: rows never written."""
    case = make([1], [100], heads=(8, 2))
    case.q = case.q[:, :7]
    with pytest.raises(ValueError, match="Hq"):
        backend.sparse(case)


def test_V10_duplicates_count_once(backend):
    """V10, NVIDIA/TensorRT-LLM#18008: repeated block ids counted twice."""
    case = make([9], [4 * 128 + 50], seed=31)
    once = backend.check(with_ids(case, [0, 1, 3], [2]))
    same_everywhere(once, backend.check(with_ids(case, [0, 1, 1, 0, 3, 0, 3, 1], [2] * 16)))
    backend.check(with_ids(case, [3, 0, 3, 1, 0, 3, 1, 1], [2] * 16))


@pytest.mark.parametrize("page", [64, 128])
def test_V12_offsets_of_64_bits(backend, page):
    """V12, vllm-project/vllm#50427, #47671, syv-ai/qwen38-27b-rtx3090#86: 32-bit offsets into a paged cache."""
    case = make([3, 9], [300, 150], page=page, seed=32)
    args, lengths = case.sparse()
    want = oracle.sparse_attention(*args, **lengths)
    count = 2**31 // (page * 128) + 64
    places = [count - 1, 32768, 65536, 0, 32767, count - 2, 65535, 7768, 50000, 1, count - 64, 9, 16384]
    numbers = torch.tensor(places[: len(case.k_cache)])
    used = (case.block_table >= 0) & (case.block_table < len(numbers))
    case.block_table[used] = numbers[case.block_table[used].long()].to(torch.int32)
    for name in ("k_cache", "v_cache"):  # address space that is hardly touched
        pool = torch.empty(count, 1, page, 128, dtype=BF16, device=backend.device)
        pool[numbers.to(backend.device)] = getattr(case, name).to(backend.device)
        setattr(case, name, pool)
    for out, lse in backend.every(case).values():
        oracle.check_attention(out, lse, *want)


def test_V13_offsets_that_disagree_with_the_rows(backend):
    """V13, flashinfer-ai/flashinfer#3655: last cu_seqlens unequal to total_q; q_len 0 with kv_len 0."""
    case = make([0, 3, 0, 2], [0, 200, 0, 130], pad_rows=4, seed=33)
    for out, lse in backend.check(case).values():
        assert is_empty(out[5:], lse[5:])
    case.cu_seqlens_q[-1] = 1000
    case = moved(case, backend.device)
    for name in backend.formulations(case):
        out = torch.full((11, *case.q.shape[1:]), 7.0, dtype=BF16, device=backend.device)
        lse = torch.full((11, case.q.shape[1]), 7.0, device=backend.device)
        with m3_sparse.backend(backend.name):
            given = {"out": out[1:-1], "lse": lse[1:-1], "formulation": name}
            cases.call_sparse(m3_sparse.sparse_attention, case, **given)
        for x in (out, lse):
            assert (x[[0, -1]] == 7).all(), f"written outside of the rows, {name}"


def test_V14_masks_are_fp32(backend):
    """V14, NVIDIA-NeMo/Automodel#2551, #2617, #2624: masks in bf16 let masked tokens through where logits are low."""
    case = with_ids(make([3], [128 + 50], poison="zero", seed=34), [0, 1])
    case.q.fill_(32.0)
    case.k_cache.fill_(-32.0)
    last = case.block_table[0, 1]
    case.k_cache[last, :, 48:50] = 32.0  # later than row 0, 23,000 above all that it sees
    backend.check(case)
    backend.check_dense(case)


def test_V15_one_documented_layout(backend):
    """V15, MSA's cute/README.md: [pages, page_size, Hkv, D] documented, [pages, Hkv, page_size, D] checked."""
    case = make([2], [300], heads=(32, 2), layout="nhd", seed=35)
    plain = make([2], [300], heads=(32, 2), seed=35)
    same_everywhere(backend.check(case), backend.check(plain))
    case.k_cache, case.v_cache = case.k_cache.transpose(1, 2), case.v_cache.transpose(1, 2)
    with pytest.raises(ValueError, match="page size of 64 or 128"):
        backend.sparse(case)


@pytest.mark.parametrize("batch", [17, 33])
def test_V16_more_than_16_requests(backend, batch):
    """V16, FlashInfer 0.7.4 SM90 sources: metadata of 16 requests at most."""
    case = make([1 + b % 3 for b in range(batch)], [9 + 37 * b % 290 for b in range(batch)], topk=4, seed=36)
    backend.check(case)
    backend.check_dense(case)
    backend.check_select(case)


@pytest.mark.parametrize("factor", [16, 64])
@pytest.mark.parametrize("q, kv", [(BF16, BF16), (torch.float16, torch.float16), (BF16, E4M3)])
def test_V17_large_operands(backend, q, kv, factor):
    """V17, FlashInfer 0.7.4 SM90 sources: exponentials without a running maximum overflow."""
    case = make([9], [300], dtype=q, kv_dtype=kv, kind="int", poison="zero", seed=37)
    case.q.mul_(factor)
    case.k_cache = (case.k_cache.float() * factor).to(kv)
    for out, lse in backend.check(case).values():
        assert out.isfinite().all() and not lse.isnan().any()


# ---------------------------------------------------------------------------------------- 3. plans, graphs, workspaces


FIELDS = ("q", "k_cache", "v_cache", "block_table", "index_q", "seqused_k", "ids")


def test_G1_G3_a_replay_follows_its_inputs(backend):
    """G1, G3, sgl-project/sglang#28715, NVIDIA/TensorRT-LLM#16291: stale plans, workspaces that moved after capture."""
    longest = [700, 300, 150]
    case = make([1, 9, 2], longest, pad_rows=2, poison="zero", seed=40)
    case.q[-2:] = case.index_q[-2:] = 0
    device = moved(case, backend.device)
    names = backend.formulations(case)
    ids = torch.full(case.ids.shape, -7, dtype=torch.int32, device=backend.device)
    out = cases.nan_like((len(names), *case.q.shape), BF16).to(backend.device)
    lse = cases.nan_like((len(names), *case.q.shape[:2]), torch.float32).to(backend.device)

    def step():
        args, lengths = device.index()
        with m3_sparse.backend(backend.name):
            m3_sparse.select_blocks(*args, **lengths, out=ids)
            for n, name in enumerate(names):
                cases.call_sparse(m3_sparse.sparse_attention, device, out=out[n], lse=lse[n], formulation=name)

    repeat = backend.captured(step)
    for seed, kv_lens in enumerate([[130, 20, 3], longest, [0, 0, 0], [129, 300, 1]]):
        draw_again(case, seed, kv_lens)
        for name in FIELDS:
            getattr(device, name).copy_(getattr(case, name))
        results = []
        for _ in range(2):
            out.fill_(float("nan")), lse.fill_(float("nan")), ids.fill_(-7)
            repeat()
            results.append([x.cpu().clone() for x in (out, lse, ids)])
            # A call of another shape in between takes, and gives back, a workspace of another size.
            backend.sparse(make([20, 30], [400, 300], topk=4, seed=41), formulation=names[seed % len(names)])
        same(*results, "the second replay")
        args, lengths = case.sparse()
        want = oracle.sparse_attention(*args, **lengths)
        for n in range(len(names)):
            oracle.check_attention(results[0][0][n], results[0][1][n], *want)
        args, lengths = case.index()
        scores, epsilon = oracle.block_scores(*args, **lengths), oracle.score_epsilon(*args, **lengths)
        oracle.check_selection(results[0][2], scores, epsilon, counts_of(case))


def test_G2_nothing_is_kept_from_another_shape(backend):
    """G2, NVIDIA/TensorRT-LLM#17721, #18262, #18273: planned state reused for other shapes."""
    shapes = [
        make([3, 2], [300, 150], seed=42),
        make([40], [200], heads=(8, 2), topk=3, seed=43),
        make([1] * 5, [700, 1, 0, 64, 129], page=64, kv_dtype=E4M3, scales="head", seed=44),
    ]
    first = [backend.check(case) for case in shapes]
    for case, before in zip(shapes[::-1], first[::-1]):
        same_everywhere(before, backend.every(case))


def test_G4_decodes_beside_a_long_chunk(backend):
    """G4, FlashInfer 0.7.4 SM90 sources: a batch padded to its longest request. Lengths are data here, so the memory
    that a call takes follows from the number of rows alone.
    """
    kv_lens = [200, 260, 129, 1, 64, 130]
    ragged = make([70, 1, 1, 1, 1, 1], kv_lens, topk=3, seed=45)
    backend.check(ragged)
    if backend.name == "aot":
        even = make([13, 13, 13, 12, 12, 12], kv_lens, topk=3, seed=45)
        for name in ("union", "kv_stationary"):
            sizes = [backend.peak(lambda x=x, name=name: backend.sparse(x, formulation=name)) for x in (ragged, even)]
            assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------------------------------- 4. performance reports


def test_P3_index_keys_are_not_copied(backend):
    """P3, ai-dynamo/aiconfigurator#1509: index K copied in each forward. Here: halves of packed tokens."""
    case = make([1, 2], [700, 300], heads=INDEX4, seed=50)
    want, scores = backend.check_select(case)
    pool = torch.empty(4096, 128, 256, dtype=BF16)  # hardly touched; a copy of the keys takes 128 MiB
    pool[: len(case.index_k_cache), :, 128:] = case.index_k_cache
    case.index_k_cache = pool.to(backend.device)[..., 128:]
    args, lengths = moved(case, backend.device).index()
    with m3_sparse.backend(backend.name):
        got = m3_sparse.select_blocks(*args, **lengths, return_scores=True)
        assert torch.equal(got[0].cpu(), want) and torch.equal(got[1].cpu(), scores)
        assert backend.peak(lambda: m3_sparse.select_blocks(*args, **lengths)) < 2**25


def test_P4_no_read_back(backend):
    """P4, ROCm/ATOM#1480 and a tokenspeed report: one host read-back per layer."""
    if backend.device == "cpu":
        pytest.skip("a synchronisation shows on a GPU")
    case = moved(make([9, 1], [700, 300], seed=51), backend.device)
    for name in backend.formulations(case):
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                with m3_sparse.backend(backend.name):
                    args, lengths = case.index()
                    ids = m3_sparse.select_blocks(*args, **lengths)
                    args, lengths = case.sparse(ids)
                    m3_sparse.sparse_attention(*args, **lengths, formulation=name)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_P5_tables_wider_than_256_columns(backend):
    """P5, vllm-project/vllm#56932: splits beyond a table of 256 columns; few CTAs at B 1 (P2)."""
    case = make([1], [300 * 128 + 7], topk=16, seed=52)
    case.ids[0, 0] = torch.tensor([0, 255, 256, 257, 300, 299, 31, 64, 128, 192, 250, 260, 270, 280, 290, 13])
    backend.check(case)
    backend.check_dense(case)
    backend.check_select(case)


def test_P6_packed_caches_and_callers_outputs(backend):
    """P6, flashinfer-ai/flashinfer#5094, vllm-project/vllm#56483: transposes and copies around the kernel."""
    plain = make([3, 2], [300, 150], heads=(32, 2), seed=53)
    packed = make([3, 2], [300, 150], heads=(32, 2), layout="packed", seed=53)
    assert packed.k_cache.stride() == (2 * 128 * 256, 128 * 256, 256, 1)
    same_everywhere(backend.check(plain), backend.check(packed))  # `out` and `lse` are the caller's


def test_P8_nothing_is_compiled_or_imported_at_run_time(backend):
    """P8, vllm-project/vllm#49005, #56980: JIT that breaks with its dependencies."""
    folder = m3_sparse.__file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", BARE, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_P10_lengths_of_any_alignment(backend):
    """P10, vLLM's Triton kernels: recompilation on the first alignment of sliced lengths."""
    case = make([3, 0, 9], [300, 17, 150], seed=54)
    plain, selection = backend.check(case), backend.check_select(case)
    for offset in (1, 2, 3):
        for name in ("cu_seqlens_q", "seqused_k"):
            x = getattr(case, name)
            setattr(case, name, torch.nn.functional.pad(x, (offset, 0), value=2**30)[offset:])
        for name in ("block_table", "index_table"):
            x = getattr(case, name)
            setattr(case, name, torch.nn.functional.pad(x, (offset, 0), value=2**30)[:, offset:])
        same_everywhere(plain, backend.check(case))
        same(selection, backend.check_select(case), "selection")
