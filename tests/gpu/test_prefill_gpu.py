"""The KV-stationary prefill on a GPU: its operator against float64, and the bits that it promises.

A row's result has the same bits whatever the batch around it, the chunks its tokens are cut into, where a chunk is
combined, and whatever bytes no token of its sequence sees.
"""

import cases
import oracle
import pytest
import torch
from test_decode_gpu import BF16, DEVICE, DTYPES, E4M3, FP16, assert_close, assert_same, big_problem, exact, on_gpu

from m3_sparse import ops

CHUNKS = ((8, 0), (11, 1), (9, 1))  # log2 tokens, KV heads


def run(args, options, chunk=(0, 0), causal=True, formulation=None, softmax_scale=128**-0.5, with_lse=True):
    """(out, lse) of the operator; outputs start as NaN, so a row that isn't written shows."""
    q, k_cache, v_cache, ids, table = args
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE) if with_lse else None
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    scales = (options.get("k_scale"), options.get("v_scale"))
    attend = getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default
    attend(out, lse, q, k_cache, v_cache, ids, table, *lengths, softmax_scale, causal, *scales, formulation, *chunk)
    return out, lse


def check(args, options, want, causal=True, what=""):
    results = [run(args, options, chunk, causal) for chunk in CHUNKS]
    for chunk, result in zip(CHUNKS, results):
        assert_close(result, want, f"{what} chunk {chunk}")
        assert_same(result, results[0], f"{what} chunk {chunk}")


# ---- values


@pytest.mark.parametrize("q, kv", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_hostile_draws_against_the_oracle(q, kv, seed):
    """Every layout, both page sizes, ragged requests, wild selections, poison, padded rows, per-head scales."""
    (args, options), causal, what = cases.hostile([1, 40, 0, 300, 2, 17], [2049, 130, 0, 700, 700, 128], q, kv, seed)
    want = oracle.sparse_attention(*args, **options, causal=causal)
    gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
    check(*gpu, want, causal, what)


@pytest.mark.parametrize("kv", [BF16, E4M3])
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 2047, 2048, 2049, 65537, 1048576])
def test_lengths(kv, length):
    args, options = big_problem([33, 2], [length, max(length - 1, 0)], heads=(32, 2), kv=kv, seed=length)
    check(args, options, exact(args, options), what=str(length))


@pytest.mark.parametrize("q_lens", [[17, 33], [171], [256, 257], [1, 700, 0, 16, 3], [900] * 2, [5] * 60])
def test_query_lengths(q_lens):
    args, options = big_problem(q_lens, [3000 + 100 * i for i in range(len(q_lens))], heads=(16, 1), seed=len(q_lens))
    check(args, options, exact(args, options), what=str(q_lens))


@pytest.mark.parametrize("heads", [(64, 4), (32, 2), (16, 1), (8, 1), (4, 1), (2, 1), (1, 1), (5, 5), (24, 8)])
def test_head_counts(heads):
    args, options = big_problem([70, 3], [2500, 400], heads=heads, kv=E4M3, seed=heads[0])
    check(args, options, exact(args, options), what=str(heads))


def test_large_page_numbers():
    """Byte offsets beyond 2^32 in both caches: page ids up to 90,000 of 128 KiB."""
    pages = 90_000
    (q, _, _, ids, table), options = big_problem([40, 20], [4096, 4000], heads=(64, 4), kv=E4M3, pages=4)
    need = torch.randperm(pages, device=DEVICE)[: table.numel()].to(torch.int32)
    need[:3] = torch.tensor([pages - 1, 32768, 65536], dtype=torch.int32, device=DEVICE)
    table = need.view(table.shape)
    raw = torch.empty(2, pages, 4, 128, 128, dtype=torch.uint8, device=DEVICE)
    raw[:, need.long()] = torch.randint(0, 0x70, (2, need.numel(), 4, 128, 128), dtype=torch.uint8, device=DEVICE)
    args = (q, raw[0].view(E4M3), raw[1].view(E4M3), ids, table)
    options["k_scale"] = torch.tensor([0.01], device=DEVICE)
    check(args, options, exact(args, options))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [16.0, 64.0])
def test_large_logits(dtype, scale):
    args, options = big_problem([40], [1000], heads=(16, 1), q=dtype, kv=dtype)
    for x in args[:2]:
        x.mul_(scale)
    check(args, options, exact(args, options))


def test_large_values_fit_fp16_partials():
    args, options = big_problem([40], [1000], heads=(16, 1), q=FP16, kv=FP16)
    args[2].mul_(60000 / args[2].abs().max())
    want = exact(args, options)[0]
    out = run(args, options)[0].double()
    assert bool(out.isfinite().all()) and float((out - want).norm() / want.norm()) <= 5e-3


# ---- what is left alone, what is written


def test_sequences_of_another_formulation_are_left_alone():
    args, options = big_problem([40, 300, 20], [3000, 400, 1000], heads=(16, 1), seed=5)
    want = run(args, options)
    out, lse = run(args, options, formulation=torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE))
    assert bool(out[40:340].isnan().all()) and bool(lse[40:340].isnan().all())
    for rows in (slice(0, 40), slice(340, 360)):
        assert_same((out[rows], lse[rows]), (want[0][rows], want[1][rows]), "the others")


def test_lse_may_be_left_out():
    args, options = big_problem([40], [700], heads=(16, 1))
    assert_same((run(args, options, with_lse=False)[0], None), (run(args, options)[0], None), "out")


# ---- bits


def test_unseen_bytes_change_nothing():
    for kv in (BF16, E4M3):
        for layout in ("hnd", "packed", "padded"):
            results = []
            for poison in ("zero", "nan", "inf"):
                case = cases.make(
                    [30, 3], [1000, 67], heads=(16, 1), dtype=BF16, kv_dtype=kv, layout=layout, poison=poison, seed=7
                )
                args, options = case.sparse()
                gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
                results.append(run(*gpu))
            for result in results[1:]:
                assert_same(result, results[0], f"{kv} {layout}")


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_runs_repeat(kv):
    args, options = big_problem([1500], [5000], heads=(64, 4), kv=kv, seed=1)
    first = run(args, options)
    for _ in range(5):
        assert_same(run(args, options), first, "repeat")


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_a_sequence_alone_equals_itself_in_a_batch(kv):
    q_lens = [1 + 97 * i % 400 for i in range(12)]
    args, options = big_problem(q_lens, [600 + 461 * i for i in range(12)], kv=kv, seed=2)
    q, k_cache, v_cache, ids, table = args
    whole = run(args, options)
    cu, used = options["cu_seqlens_q"].tolist(), options["seqused_k"]
    for b in (0, 1, 5, 11):
        rows = slice(cu[b], cu[b + 1])
        offsets = torch.tensor([0, q_lens[b]], dtype=torch.int32, device=DEVICE)
        alone = {"cu_seqlens_q": offsets, "seqused_k": used[b : b + 1]}
        part = (q[rows], k_cache, v_cache, ids[rows], table[b : b + 1])
        assert_same(run(part, alone), (whole[0][rows], whole[1][rows]), f"sequence {b}")


def test_chunked_prompts_agree():
    """Each part of a prompt with the keys so far: the bits of the whole."""
    args, options = big_problem([1200], [3000], heads=(16, 1), seed=6)
    q, k_cache, v_cache, ids, table = args
    whole = run(args, options)
    for first, last in ((0, 500), (500, 517), (517, 1200)):
        lengths = {
            "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            "seqused_k": torch.tensor([1800 + last], dtype=torch.int32, device=DEVICE),
        }
        part = run((q[first:last], k_cache, v_cache, ids[first:last], table), lengths)
        assert_same(part, (whole[0][first:last], whole[1][first:last]), f"tokens {first} to {last}")


def test_graph_replay_follows_changes():
    args, options = big_problem([600], [2000], heads=(16, 1), seed=8)
    q, k_cache, v_cache, ids, table = args
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    attend = getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default

    def call():
        attend(out, lse, *args, options["cu_seqlens_q"], options["seqused_k"], 128**-0.5, True, None, None, None, 8)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for length in (2000, 700, 1999):
        options["seqused_k"].fill_(length)
        ids.copy_(ids.roll(3, 0))
        want = run(args, options)
        graph.replay()
        assert_same((out, lse), want, str(length))


def test_workspace_is_bounded():
    """131,072 tokens, 64/4 heads: at most 1 GiB above inputs and outputs."""
    tokens = 131072
    q = torch.zeros(tokens, 64, 128, dtype=BF16, device=DEVICE)
    cache = torch.zeros(1024, 4, 128, 128, dtype=BF16, device=DEVICE)
    ids = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(tokens, 4, 16)
    table = torch.arange(1024, dtype=torch.int32, device=DEVICE)[None]
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, tokens], [tokens])]
    out, lse = torch.empty_like(q), torch.empty(tokens, 64, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend = getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default
    attend(out, lse, q, cache, cache, ids, table, *lengths, 128**-0.5, True, None, None)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 1 << 30
    assert not out.any() and bool((lse[2047:] == lse[2047]).all())
