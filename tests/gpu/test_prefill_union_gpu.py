"""Sparse prefill attention by union tiles on a GPU, against float64, and the choice between the formulations.

What union tiles promise beyond tolerance: a row has the same bits whatever tile, prompt chunk or batch it lies in, for
every order of its selection and every content of bytes that no row sees.
"""

import sys
from pathlib import Path

import cases
import oracle
import pytest
import test_decode_gpu as decode
import torch
from test_decode_gpu import BF16, DTYPES, E4M3, E5M2, FP16, assert_close, assert_same, exact, on_gpu

import m3_sparse
from m3_sparse import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import selections

DEVICE = "cuda"
UNION, KV_STATIONARY, DECODE, BY_SEQUENCE, WIDENED = 1, 2, 3, 4, 5
THRESHOLD = 2.0
NAN = float("nan")


def operators():
    return getattr(ops, "ops", ops)


pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3)),
    reason="union tiles are compiled for SM90, SM100 and SM103",
)


def run(args, options, formulation=UNION, causal=True, softmax_scale=128**-0.5, with_lse=True):
    """(out, lse) of the operator; outputs start as NaN, so a row that isn't written shows."""
    q, k_cache, v_cache, ids, table = args
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], NAN, device=DEVICE) if with_lse else None
    lengths = (options["cu_seqlens_q"], options["seqused_k"])
    scales = (options.get("k_scale"), options.get("v_scale"))
    attend = operators().aot_sparse_attention.default
    attend(out, lse, q, k_cache, v_cache, ids, table, *lengths, softmax_scale, causal, *scales, 0, True, formulation)
    return out, lse


def problem(q_lens, kv_lens, kinds="correlated", heads=4, kv=BF16, q=BF16, page=128, pages=512, seed=0):
    """Requests over a small pool whose pages they share; selections as benchmarks/selections.py draws them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (pages, heads, page, 128)
    k_cache, v_cache = (torch.randn(shape, device=DEVICE, generator=generator).to(kv) for _ in range(2))
    query = torch.randn(sum(q_lens), heads * 16, 128, device=DEVICE, generator=generator).to(q)
    width = max(1, -(-max(kv_lens) // page))
    table = torch.randint(0, pages, (len(q_lens), width), device=DEVICE, generator=generator, dtype=torch.int32)
    kinds = [kinds] * len(q_lens) if isinstance(kinds, str) else kinds
    some = [i for i, n in enumerate(q_lens) if n]
    ids = torch.cat([selections.batch(kinds[i], heads, [q_lens[i]], [kv_lens[i]], seed + i) for i in some])
    cu = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).to(torch.int32)
    used = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    return (query, k_cache, v_cache, ids, table), {"cu_seqlens_q": cu, "seqused_k": used}


# ---- the lists


def lists_of(args, options, causal=True, threshold=THRESHOLD):
    """{(head, first token): [(block, tokens, pages)]} and the choice, as aot_union_lists leaves them."""
    q, k_cache, _, ids, table = args
    cu, used = options["cu_seqlens_q"], options["seqused_k"]
    memory = operators().aot_union_lists(q, k_cache, ids, table, cu, used, causal, threshold).cpu()
    heads, page, requests, width = k_cache.shape[1], k_cache.shape[2], used.numel(), ids.shape[2]
    slots = q.shape[0] // 8 + requests + 1
    capacity = min(8 * width, max(-(-table.shape[1] * page // 128), 1))
    wide = 1 if page == 128 else 2
    parts, at = [], 0
    for shape in [(slots, 8), (heads, slots), (heads, slots, capacity), (heads, slots, capacity, wide), (requests,)]:
        count = 4 * torch.Size(shape).numel()
        parts.append(memory[at : at + count].view(torch.int32).view(shape))
        at += -(-count // 256) * 256
    tiles, counts, words, pages, choice = parts
    found = {}
    for slot in (tiles[:, 1] > 0).nonzero().flatten().tolist():
        for head in range(heads):
            n = int(counts[head, slot]) & 1023
            entries = zip(words[head, slot, :n].tolist(), pages[head, slot, :n].tolist())
            found[head, int(tiles[slot, 0])] = [(w & 0xFFFFFF, (w >> 24) & 255, p) for w, p in entries]
    return found, choice.tolist()


def choice_here(args, options):
    """The choice under this device's threshold (launch/prefill_union.h); SM100's may not admit "correlated"."""
    return lists_of(args, options, threshold=THRESHOLD if torch.cuda.get_device_capability() == (9, 0) else 1.25)[1]


def expected_lists(args, options, causal=True):
    q, k_cache, _, ids, table = (x.cpu() for x in args)
    cu, used = options["cu_seqlens_q"].tolist(), options["seqused_k"].tolist()
    page, heads, pages, reach = k_cache.shape[2], k_cache.shape[1], k_cache.shape[0], table.shape[1] * k_cache.shape[2]
    wide, lists, stats = 128 // page, {}, []
    for b in range(len(used) + 1):
        low, high = cu[b], cu[b + 1] if b < len(used) else q.shape[0]
        length = max(0, min(used[b], reach)) if b < len(used) else 0
        distinct = pairs = 0
        for first in range(low, high, 8):
            for head in range(heads):
                masks = {}
                for j in range(min(8, high - first)):
                    end = max(0, min(length - high + first + j + 1, length)) if causal else length
                    for x in set(ids[first + j, head].tolist()):
                        if 0 <= x and x * 128 < end:
                            masks[x] = masks.get(x, 0) | 1 << j
                entries = []
                for x in sorted(masks):
                    at = [x * wide + i for i in range(wide)]
                    own = [int(table[b, i]) if i < table.shape[1] else -1 for i in at]
                    own = [p if 0 <= p < pages else -1 for p in own]
                    if max(own) >= 0:
                        entries.append((x, masks[x], own))
                        distinct += (masks[x] & 15 > 0) + (masks[x] >> 4 > 0)
                        pairs += masks[x].bit_count()
                lists[head, first] = entries
        stats.append((distinct, pairs))
    return lists, [int(4 * d >= THRESHOLD * n and n > 0) for d, n in stats[:-1]]


@pytest.mark.parametrize("seed", range(6))
def test_lists(seed):
    case = cases.make(
        [[11, 0, 30, 3], [1, 64, 9], [17], [8, 8, 8], [40, 2], [5, 100]][seed],
        [[700, 5, 2049, 3], [65537, 3000, 9], [1300], [129, 128, 127], [20, 4000], [40000, 110]][seed],
        heads=[(16, 1), (32, 2), (64, 4), (16, 1), (32, 2), (16, 1)][seed],
        page=64 if seed % 2 else 128,
        topk=[16, 8, 4, 32, 16, 16][seed],
        causal=seed != 4,
        pad_rows=5 if seed % 3 == 0 else 0,
        dtype=BF16,
        seed=seed,
    )
    ids = [case.ids, cases.head_major(case.ids), cases.unaligned(case.ids)][seed % 3]
    args, options = case.sparse(ids)
    want, choice = expected_lists(args, options, seed != 4)
    gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
    found, chosen = lists_of(*gpu, causal=seed != 4)
    assert found == want
    assert chosen == choice


# ---- values


@pytest.mark.parametrize("q, kv", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_hostile_draws_against_the_oracle(q, kv, seed):
    """Every layout, both page sizes, ragged requests, wild selections, poison, padded rows, per-head scales."""
    layout = cases.LAYOUTS[seed % len(cases.LAYOUTS)]
    causal = seed != 4
    case = cases.make(
        [3, 20, 0, 9, 2, 1],
        [2049, 130, 0, 7, 700, 128],
        heads=(16, 1) if seed % 2 else (32, 2),
        page=64 if seed % 2 else 128,
        dtype=q,
        kv_dtype=kv,
        layout=layout,
        topk=[16, 4, 8, 32, 16, 16][seed],
        causal=causal,
        pad_rows=3 if seed % 3 == 0 else 0,
        scales=[None, "scalar", "head"][seed % 3] if kv.itemsize == 1 else None,
        seed=200 + seed,
    )
    ids = [case.ids, cases.head_major(case.ids), cases.unaligned(case.ids)][seed % 3]
    args, options = case.sparse(ids)
    want = oracle.sparse_attention(*args, **options, causal=causal)
    gpu = [on_gpu(x) for x in args], {name: on_gpu(x) for name, x in options.items()}
    assert_close(run(*gpu, causal=causal), want, layout)


@pytest.mark.parametrize("kv", [BF16, E4M3])
@pytest.mark.parametrize("kind", ["random", "correlated"])
def test_prompts(kv, kind):
    args, options = problem([1000, 0, 17, 171, 1], [1000, 300, 65537, 30000, 2049], kind, kv=kv, seed=3)
    assert_close(run(args, options), exact(args, options), kind)


@pytest.mark.parametrize("kv", [BF16, FP16, E4M3])
def test_a_long_prompt(kv):
    args, options = problem([16384], [16384], heads=1, kv=kv, q=FP16 if kv == FP16 else BF16, seed=5)
    assert_close(run(args, options), exact(args, options))


def test_a_million_tokens_and_high_page_numbers():
    args, options = problem([33, 40], [1048576, 1048576 - 77], "random", heads=1, pages=40000, seed=6)
    table = args[4]
    table[:, ::3] = torch.randint(32768, 40000, table[:, ::3].shape, device=DEVICE, dtype=torch.int32)
    assert_close(run(args, options), exact(args, options))


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_a_pool_beyond_two_to_the_31_elements(kv):
    """Pages at its ends and around 2^15 and 2^16: 4.6 GB (bf16) of each cache, of which few bytes are set."""
    args, options = problem([40, 25], [4096, 3000], "random", heads=1, kv=kv, pages=64, seed=15)
    pages = 2**31 // (128 * 128) + 64
    places = torch.tensor([pages - 1, 0, 32767, 32768, 65535, 65536, pages - 2], device=DEVICE)
    places = torch.cat([places, pages - 70 + torch.arange(57, device=DEVICE)])
    far = [torch.empty(pages, 1, 128, 128, dtype=kv, device=DEVICE) for _ in range(2)]
    for new, old in zip(far, args[1:3]):
        new.view(torch.uint8)[places] = old.view(torch.uint8)
    table = places[args[4].long()].int()
    far_args = (args[0], *far, args[3], table)
    for formulation in (UNION, KV_STATIONARY, DECODE):
        assert_same(run(far_args, options, formulation), run(args, options, formulation), str(formulation))
    assert_close(run(far_args, options), exact(args, options))


@pytest.mark.parametrize("name", ["union", "kv_stationary", "decode", None])
def test_workspace_is_what_is_reported(name):
    """131,072 tokens, 64/4 heads: at most 1 GiB above inputs and outputs, and no more than explain() says."""
    tokens = 131072
    q = torch.zeros(tokens, 64, 128, dtype=BF16, device=DEVICE)
    cache = torch.zeros(1024, 4, 128, 128, dtype=BF16, device=DEVICE)
    ids = torch.arange(16, dtype=torch.int32, device=DEVICE).expand(tokens, 4, 16)
    table = torch.arange(1024, dtype=torch.int32, device=DEVICE)[None]
    lengths = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, tokens], [tokens])]
    number = 0 if name is None else {"union": UNION, "kv_stationary": KV_STATIONARY, "decode": DECODE}[name]
    _, reported = operators().aot_attention_plan(q, cache, cache, ids, table, *lengths, True, number).tolist()
    out = torch.empty_like(q)
    options = dict(zip(("cu_seqlens_q", "seqused_k"), lengths), formulation=name)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    m3_sparse.sparse_attention(q, cache, cache, ids, table, **options, out=out)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert reported <= used <= reported + (1 << 20) and used <= 1 << 30
    given = dict(q=q, k_cache=cache, v_cache=cache, block_indices=ids, block_table=table, **options)
    assert f"workspace {reported / 2**20:.1f} MiB" in m3_sparse.explain("sparse_attention", **given)


@pytest.mark.parametrize("scale", [-0.05, 0.0, 2.0])
def test_softmax_scales(scale):
    args, options = problem([40], [3000], heads=1, seed=7)
    want = oracle.sparse_attention(
        *[x.cpu() for x in args], **{n: x.cpu() for n, x in options.items()}, softmax_scale=scale
    )
    assert_close(run(args, options, softmax_scale=scale), want)


def test_without_lse():
    args, options = problem([40], [3000], heads=1, seed=8)
    assert_same(run(args, options, with_lse=False), (run(args, options)[0], None), "without lse")


# ---- bits


@pytest.mark.parametrize("kv", [BF16, E4M3])
def test_repeats_batches_and_chunks_have_the_same_bits(kv):
    q_lens, kv_lens = [100, 37, 61], [5000, 37, 800]
    args, options = problem(q_lens, kv_lens, kv=kv, heads=2, seed=9)
    whole = run(args, options)
    for _ in range(3):
        assert_same(run(args, options), whole, "repeat")
    query, k_cache, v_cache, ids, table = args
    start = 0
    for b, (n, kv_len) in enumerate(zip(q_lens, kv_lens)):
        for first, last in ((0, n), (0, 13), (13, n)):
            rows = slice(start + first, start + last)
            cu = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
            used = torch.tensor([kv_len - n + last], dtype=torch.int32, device=DEVICE)
            part = (query[rows], k_cache, v_cache, ids[rows], table[b : b + 1])
            got = run(part, {"cu_seqlens_q": cu, "seqused_k": used})
            assert_same(got, tuple(x[rows] for x in whole), f"request {b} rows {first} to {last}")
        start += n


def test_order_holes_and_duplicates_change_no_bit():
    args, options = problem([50], [4000], heads=2, seed=10)
    want = run(args, options)
    ids = args[3]
    wide = torch.cat([ids, ids[..., :8], torch.full_like(ids[..., :8], -1)], -1)
    shuffled = wide.gather(-1, torch.rand(wide.shape, device=DEVICE).argsort(-1))
    assert_same(run((*args[:3], shuffled, args[4]), options), want, "shuffled")


@pytest.mark.parametrize("kv", [BF16, E4M3])
@pytest.mark.parametrize("page", [64, 128])
def test_bytes_past_the_length_change_no_bit(kv, page):
    args, options = problem([30, 9], [715, 200], heads=2, kv=kv, page=page, pages=40, seed=11)
    args[4][:] = torch.randperm(40, device=DEVICE)[: args[4].numel()].view(args[4].shape)
    want = run(args, options)
    for fill in (0.0, NAN):
        caches = [x.clone() for x in args[1:3]]
        seen = torch.zeros(40, page, dtype=torch.bool, device=DEVICE)
        for b, n in enumerate([715, 200]):
            for i in range(-(-n // page)):
                seen[args[4][b, i], : min(page, n - i * page)] = True
        for x in caches:
            integer = torch.uint8 if x.itemsize == 1 else torch.int16
            byte = int(torch.full((1,), fill).to(kv).view(integer))
            x.view(integer).transpose(1, 2)[~seen] = byte
        assert_same(run((args[0], *caches, *args[3:]), options), want, f"tail of {fill}")


# ---- a float8 cache that is widened first


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("kv", [E4M3, E5M2])
@pytest.mark.parametrize("q", [BF16, FP16])
def test_a_cache_that_is_widened_first_changes_no_bit(q, kv, page):
    """Fewer than 1,024 tokens are too few for it unless it is forced."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only SM90's kernels widen a cache first")
    args, options = problem([900, 0, 70, 9], [5000, 300, 9001, 9], kv=kv, q=q, page=page, heads=2, seed=14)
    args[4][0, 3], args[4][2, 5] = -1, 512
    want = run(args, options)
    for _ in range(2):
        assert_same(run(args, options, WIDENED), want, "widened")
    assert_close(want, exact(args, options))


@pytest.mark.parametrize("kv", [E4M3, E5M2])
def test_a_cache_is_widened_for_the_requests_that_take_union_tiles(kv):
    q_lens, kv_lens = [900, 700], [10000, 10000]
    args, options = problem(q_lens, kv_lens, ["random", "correlated"], kv=kv, heads=2, seed=15)
    parts = [run(args, options, f) for f in (UNION, KV_STATIONARY, BY_SEQUENCE)]
    assert_close(parts[2], exact(args, options))
    second = 0 if torch.cuda.get_device_capability() == (9, 0) else choice_here(args, options)[1]
    for (first, last), want in (((0, 900), parts[1]), ((900, 1600), parts[second])):
        assert_same(tuple(x[first:last] for x in parts[2]), tuple(x[first:last] for x in want), f"rows from {first}")


# ---- the choice


def test_each_request_takes_its_formulation():
    q_lens, kv_lens = [300, 256, 64], [20000, 30000, 64]
    args, options = problem(q_lens, kv_lens, ["correlated", "random", "correlated"], heads=2, seed=12)
    assert lists_of(args, options)[1] == [0, 1, 0]
    choice = choice_here(args, options)
    assert choice[1:] == [1, 0]
    parts = [run(args, options, f) for f in (UNION, KV_STATIONARY, BY_SEQUENCE)]
    assert_close(parts[2], exact(args, options))
    for b, (first, last) in enumerate([(0, 300), (300, 556), (556, 620)]):
        want = parts[choice[b]]
        assert_same(tuple(x[first:last] for x in parts[2]), tuple(x[first:last] for x in want), f"request {b}")


def test_the_public_function_names_and_takes_formulations():
    args, options = problem([300], [20000], heads=2, seed=13)
    by_default = m3_sparse.sparse_attention(*args, **options)
    for name, number in (("union", UNION), ("kv_stationary", KV_STATIONARY), ("decode", DECODE)):
        got = m3_sparse.sparse_attention(*args, **options, formulation=name, return_lse=True)
        assert_same(got, run(args, options, number), name)
        if name == ("union", "kv_stationary")[choice_here(args, options)[0]]:
            assert decode.same_bits(by_default, got[0])
    names = ("q", "k_cache", "v_cache", "block_indices", "block_table")
    given = {**dict(zip(names, args)), **options}
    assert "union tiles where u(4)" in m3_sparse.explain("sparse_attention", **given)
    assert "formulation: decode" in m3_sparse.explain("sparse_attention", **given, formulation="decode")
    small = args[0][:, :16].contiguous()
    with pytest.raises(NotImplementedError, match="16 query heads"):
        m3_sparse.sparse_attention(small, *args[1:], **options, formulation="union")


@pytest.mark.parametrize("formulation", [UNION, BY_SEQUENCE])
def test_a_graph_follows_what_changes_in_place(formulation):
    args, options = problem([200, 56], [9000, 4000], heads=1, seed=14)
    out = torch.full(args[0].shape, NAN, dtype=BF16, device=DEVICE)
    attend = operators().aot_sparse_attention.default

    def call():
        lengths = (options["cu_seqlens_q"], options["seqused_k"])
        attend(out, None, *args, *lengths, 128**-0.5, True, None, None, 0, True, formulation)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed, (q_lens, kv_lens) in enumerate(
        [([200, 56], [9000, 4000]), ([13, 243], [700, 8000]), ([256, 0], [300, 1])]
    ):
        fresh, lengths = problem(q_lens, kv_lens, "random" if seed == 1 else "correlated", heads=1, seed=20 + seed)
        args[3].copy_(fresh[3])
        for name, x in lengths.items():
            options[name].copy_(x)
        out.fill_(NAN)
        graph.replay()
        want, _ = exact(args, options)
        assert_close((out, torch.zeros(1)), (want, torch.zeros(1)), str(q_lens))
