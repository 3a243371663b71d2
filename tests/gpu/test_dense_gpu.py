"""dense_attention on a GPU: the dense kernels through the launcher, against float64.

Beside tolerance: the bits of a row depend on the number of splits alone, not on the batch around it nor on bytes that no
row sees.
"""

import itertools

import cases
import oracle
import pytest
import torch

import m3_sparse
from m3_sparse import ops

DEVICE = "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
INF = float("inf")


def operator():
    return getattr(ops, "ops", ops).aot_dense_attention.default


def generator(seed):
    return torch.Generator(device=DEVICE).manual_seed(seed)


def make(q_lens, kv_lens, heads=(64, 4), dtype=BF16, page=128, layout="nhd", extra=0, seed=0, pages=None):
    """(q, k_cache, v_cache, table), lengths. Every page of a request is its own if `pages` is None; all bytes past the
    end of a request, unused pages and unused table entries are poisoned."""
    needed = [-(-max(n, 0) // page) for n in kv_lens]
    count = pages or sum(needed) + 2
    rand = generator(seed)
    shape = {
        "nhd": (count, page, heads[1], 128),
        "hnd": (count, heads[1], page, 128),
        "packed": (count, heads[1], page, 256),
    }[layout]
    stored = [
        torch.randn(shape, device=DEVICE, generator=rand).to(dtype) for _ in range(1 if layout == "packed" else 2)
    ]
    if layout == "packed":
        k_cache, v_cache = stored[0][..., :128], stored[0][..., 128:]
    else:
        k_cache, v_cache = (x.transpose(1, 2) if layout == "nhd" else x for x in stored)
    table = torch.full((len(q_lens), max([*needed, 1]) + 3), 1 << 30, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(count, device=DEVICE, generator=rand).to(torch.int32)
    used = torch.zeros(count, page, dtype=torch.bool, device=DEVICE)
    first = 0
    for b, n in enumerate(needed):
        mine = order[first : first + n] if pages is None else torch.randint(
            0, count, (n,), device=DEVICE, generator=rand, dtype=torch.int32
        )  # fmt: skip
        table[b, :n] = mine
        used[mine.long()] = True
        if pages is None and kv_lens[b] % page:
            used[mine[-1].long(), kv_lens[b] % page :] = False
        first += n
    for cache in (k_cache, v_cache):
        cache.masked_fill_(~used[:, None, :, None], float("nan"))
    tokens = sum(q_lens) + extra
    q = torch.randn(tokens, heads[0], 128, device=DEVICE, generator=rand).to(dtype)
    lengths = {
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32, device=DEVICE),
        "seqused_k": torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
    }
    return (q, k_cache, v_cache, table), lengths


def run(args, lengths, splits=0, causal=True, softmax_scale=128**-0.5, k_scale=None, v_scale=None, with_lse=True):
    """(out, lse) of the operator; outputs start as NaN, so a row that isn't written shows."""
    q, k_cache, v_cache, table = args
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
    lse = torch.full(q.shape[:2], float("nan"), device=DEVICE) if with_lse else None
    where = (table, lengths["cu_seqlens_q"], lengths["seqused_k"])
    operator()(out, lse, q, k_cache, v_cache, *where, softmax_scale, causal, k_scale, v_scale, splits)
    return out, lse


def exact(args, lengths, causal=True, softmax_scale=128**-0.5, k_scale=None, v_scale=None):
    """float64 on the GPU, a request, a KV head and some rows at a time."""
    q, k_cache, v_cache, table = args
    cu, used = lengths["cu_seqlens_q"].tolist(), lengths["seqused_k"].tolist()
    pages, heads, page, _ = k_cache.shape
    group = q.shape[1] // heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    lse = torch.full(q.shape[:2], -INF, dtype=torch.float64, device=DEVICE)
    for b in range(len(used)):
        length = max(0, min(used[b], table.shape[1] * page))
        position = torch.arange(length, device=DEVICE)
        number = table[b, position // page].long()
        position, number = (x[(number >= 0) & (number < pages)] for x in (position, number))
        step = max(1, (1 << 26) // max(1, len(position) * group))
        for h, first in itertools.product(range(heads), range(cu[b], cu[b + 1], step)):
            rows = torch.arange(first, min(first + step, cu[b + 1]), device=DEVICE)
            keys, values = (cache[number, h, position % page].double() for cache in (k_cache, v_cache))
            if k_scale is not None:
                keys = keys * k_scale.double().expand(heads)[h]
            if v_scale is not None:
                values = values * v_scale.double().expand(heads)[h]
            part = slice(h * group, (h + 1) * group)
            logits = torch.einsum("tgd,kd->tgk", q[rows, part].double(), keys) * softmax_scale
            if causal:
                hidden = position > (length - cu[b + 1] + rows)[:, None]
                logits.masked_fill_(hidden[:, None], -INF)
            total = torch.logsumexp(logits, -1)
            weight = (logits - torch.where(total == -INF, 0.0, total)[..., None]).exp_()
            lse[rows, part] = total
            out[rows, part] = torch.einsum("tgk,kd->tgd", weight, values)
    return out, lse


def assert_close(got, want, what=""):
    """Section 9 of the contract: 16-bit math, float64 oracle on the stored values."""
    out, lse = got[0].double(), got[1].double()
    want_out, want_lse = want
    assert not out.isnan().any() and not lse.isnan().any(), what
    error = (out - want_out).abs()
    assert bool((error <= 2e-2 + 2e-2 * want_out.abs()).all()), f"{what}: {error.max()}"
    norm = want_out.norm()
    assert norm == 0 or float((out - want_out).norm() / norm) <= 5e-3, f"{what}: {(out - want_out).norm() / norm}"
    empty = want_lse == -INF
    assert torch.equal(lse == -INF, empty) and not bool(out[empty].any()), what
    gap = torch.where(empty, 0.0, (lse - want_lse).abs() / want_lse.abs().clamp(min=100) * 100)
    assert float(gap.max() if gap.numel() else 0) <= 1e-3, f"{what}: lse {gap.max()}"


def assert_same(one, other, what):
    for a, b in zip(one, other):
        integer = torch.int32 if a.dtype == torch.float32 else torch.int16
        assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer)), what


PROBLEMS = {
    "prefill": ([300], [300], (64, 4)),
    "chunked": ([171, 40], [2049, 700], (32, 2)),
    "ragged": ([3, 0, 129, 1, 16, 8], [700, 5, 129, 2, 0, 4000], (16, 2)),
    "mha": ([513], [1025], (4, 4)),
    "mqa": ([70, 3], [333, 64], (8, 1)),
    "group 5": ([65, 130], [200, 131], (10, 2)),
    "group 12": ([33], [1000], (12, 1)),
    "decode": ([1] * 9, [1, 127, 128, 129, 2047, 2048, 2049, 5000, 0], (64, 4)),
    "verify": ([4] * 5, [4, 130, 1000, 4097, 3], (64, 4)),
    "more queries than keys": ([200], [60], (16, 1)),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("page", [128, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_against_float64(name, dtype, page, causal):
    q_lens, kv_lens, heads = PROBLEMS[name]
    args, lengths = make(q_lens, kv_lens, heads, dtype, page, extra=5)
    want = exact(args, lengths, causal)
    for splits in (0, 1, 3):
        assert_close(run(args, lengths, splits, causal), want, f"{name}, {splits} splits")


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
def test_layouts(layout):
    args, lengths = make([40, 1], [900, 77], (32, 4), layout=layout)
    assert_close(run(args, lengths), exact(args, lengths), layout)


def test_contiguous_caches():
    """As transformers has them, of a length that is no multiple of a block."""
    rand = generator(3)
    k, v = (torch.randn(3, 4, 1000, 128, device=DEVICE, generator=rand).bfloat16() for _ in range(2))
    q = torch.randn(3 * 20, 64, 128, device=DEVICE, generator=rand).bfloat16()
    pad = torch.tensor([0, 17, 300], device=DEVICE)
    lengths = {
        "cu_seqlens_q": torch.arange(4, dtype=torch.int32, device=DEVICE) * 20,
        "seqused_k": (1000 - pad).int(),
    }
    with m3_sparse.backend("aot"):
        found = m3_sparse.dense_attention(q, k, v, None, **lengths, leftpad_k=pad, return_lse=True)
    # The same tokens in pages.
    pages = torch.zeros(2, 3, 8, 4, 128, 128, device=DEVICE, dtype=BF16)
    for x, new in zip((k, v), pages):
        for b, skip in enumerate(pad.tolist()):
            row = torch.nn.functional.pad(x[b, :, skip:], (0, 0, 0, 24 + skip))
            new[b] = row.unflatten(1, (8, 128)).transpose(0, 1)
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(3, 8)
    args = (q, *(x.flatten(0, 1) for x in pages), table)
    assert_close(found, exact(args, lengths))


def on_gpu(x):
    """The same view of a copy of the whole storage, so that strides and gaps arrive as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(DEVICE).untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=DEVICE).set_(storage, x.storage_offset(), x.shape, x.stride())


@pytest.mark.parametrize("page", [128, 64])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_public_function_against_the_oracle(layout, page):
    case = cases.make(
        [3, 0, 5, 1, 9], [1290, 33, 2500, 1, 129], layout=layout, page=page, dtype=BF16, pad_rows=2, seed=7
    )
    args, options = case.dense()
    with m3_sparse.backend("aot"):
        out, lse = m3_sparse.dense_attention(
            *map(on_gpu, args), **{name: on_gpu(x) for name, x in options.items()}, return_lse=True
        )
    oracle.check_attention(out.cpu(), lse.cpu(), *oracle.dense_attention(*args, **options))


@pytest.mark.parametrize("page", [128, 64])
def test_page_numbers_outside_the_cache_contribute_nothing(page):
    args, lengths = make([200, 3, 1], [2000, 900, 640], (16, 2), page=page)
    table, pages = args[3], args[1].shape[0]
    bad = torch.tensor([-1, -7, pages, pages + 5, 1 << 30, -(1 << 31)], dtype=torch.int64, device=DEVICE).int()
    for b, columns in enumerate(([0, 3, 7, 15], [2, 6], range(table.shape[1]))):
        for i, column in enumerate(columns):
            table[b, column] = bad[i % len(bad)]
    for causal in (True, False):
        want = exact(args, lengths, causal)
        for splits in (1, 4):
            assert_close(run(args, lengths, splits, causal), want, f"{causal} {splits}")


def test_wrong_lengths_stay_inside():
    args, lengths = make([9, 30], [256, 300], (16, 1))
    args = (*args[:3], args[3][:, :3].contiguous())
    for used in ([(1 << 31) - 1, 300], [-5, 300], [256, -(1 << 31)]):
        some = {**lengths, "seqused_k": torch.tensor(used, dtype=torch.int32, device=DEVICE)}
        assert_close(run(args, some), exact(args, some), str(used))
    for cu in ([0, 100000, 39], [0, -4, 39], [0, 20, 10], [5, 9, 1 << 30]):
        some = {**lengths, "cu_seqlens_q": torch.tensor(cu, dtype=torch.int32, device=DEVICE)}
        run(args, some)
    torch.cuda.synchronize()


def test_scales():
    args, lengths = make([50, 2], [400, 1300], (16, 4))
    rand = torch.rand(4, device=DEVICE) + 0.25
    for scale, k_scale, v_scale in (
        (0.1, rand, rand.flip(0).contiguous()), (-0.2, None, None), (0.0, None, None), (0.1, -rand[:1], rand[:1]),
    ):  # fmt: skip
        options = {"softmax_scale": scale, "k_scale": k_scale, "v_scale": v_scale}
        want = exact(args, lengths, **options)
        for splits in (1, 2):
            assert_close(run(args, lengths, splits, **options), want, f"{scale} {splits}")


@pytest.mark.parametrize("splits", [1, 5])
def test_bits_of_a_row_do_not_depend_on_the_batch_nor_on_unseen_bytes(splits):
    q_lens, kv_lens = [1, 200, 4, 33, 1], [3000, 2500, 129, 33, 777]
    args, lengths = make(q_lens, kv_lens)
    whole = run(args, lengths, splits)
    assert_same(whole, run(args, lengths, splits), "run to run")
    q, k_cache, v_cache, table = args
    first = 0
    for b, n in enumerate(q_lens):
        alone = {
            "cu_seqlens_q": torch.tensor([0, n], dtype=torch.int32, device=DEVICE),
            "seqused_k": lengths["seqused_k"][b : b + 1].clone(),
        }
        got = run((q[first : first + n], k_cache, v_cache, table[b : b + 1]), alone, splits)
        if splits == 1:  # with more, a tile's rows set what each split has of its keys
            assert_same(got, [x[first : first + n] for x in whole], f"request {b}")
        first += n
    for value in (0.0, INF):
        clean = [cache.masked_fill(cache.isnan(), value) for cache in (k_cache, v_cache)]
        assert_same(whole, run((q, *clean, table), lengths, splits), f"tail {value}")


def test_chunks_of_a_prompt_have_the_bits_of_the_whole():
    """With one split, as a prompt that fills the card has; with more, in tolerance."""
    args, lengths = make([700], [2500], (32, 2))
    q, k_cache, v_cache, table = args
    whole = {splits: run(args, lengths, splits) for splits in (1, 3)}
    for first, last in ((0, 300), (300, 317), (317, 700)):
        part = {
            "cu_seqlens_q": torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            "seqused_k": torch.tensor([1800 + last], dtype=torch.int32, device=DEVICE),
        }
        chunk = (q[first:last], k_cache, v_cache, table)
        assert_same(run(chunk, part, 1), [x[first:last] for x in whole[1]], f"tokens {first} to {last}")
        assert_close(run(chunk, part, 3), [x[first:last].double() for x in whole[3]], f"tokens {first} to {last}")


@pytest.mark.parametrize("q_len, batch", [(1, 1), (1, 64), (131072, 1)])
def test_workspace_is_bounded(q_len, batch):
    """Partial states of split keys: 16 MiB, and none for a long prompt."""
    q = torch.zeros(batch * q_len, 64, 128, dtype=BF16, device=DEVICE)
    cache = torch.zeros(1, 4, 128, 128, dtype=BF16, device=DEVICE)
    table = torch.zeros(batch, 256, dtype=torch.int32, device=DEVICE)
    used = torch.full((batch,), 512, dtype=torch.int32, device=DEVICE)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * q_len
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    operator()(out, lse, q, cache, cache, table, cu, used, 0.1, True, None, None)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (0 if q_len > 1 else (16 << 20) + 2048)


def test_graph_replay_follows_lengths_and_pages():
    args, lengths = make([1, 1, 4], [5000, 130, 2000], (64, 4))
    q, k_cache, v_cache, table = args
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device=DEVICE)
    where = (table, lengths["cu_seqlens_q"], lengths["seqused_k"])

    def call():
        operator()(out, lse, q, k_cache, v_cache, *where, 0.1, True, None, None)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    table[2, :8] = table[0, :8].clone()
    for used in ([5000, 130, 1000], [1, 0, 4], [2500, 77, 1024]):
        lengths["seqused_k"].copy_(torch.tensor(used))
        graph.replay()
        torch.cuda.synchronize()
        assert_close((out, lse), exact(args, lengths, softmax_scale=0.1), str(used))


def test_a_million_tokens_and_high_page_numbers():
    args, lengths = make([2, 1], [1 << 20, 1000003], (16, 1), pages=40000, seed=9)
    assert int(args[3].clamp(max=40000).max()) >= 32768
    assert_close(run(args, lengths), exact(args, lengths))


def test_elements_beyond_32_bits():
    pages = 2**31 // (4 * 128 * 128) + 64
    k_cache, v_cache = (torch.zeros(pages, 4, 128, 128, dtype=BF16, device=DEVICE) for _ in range(2))
    last = torch.arange(pages - 8, pages, dtype=torch.int32, device=DEVICE)
    for cache in (k_cache, v_cache):
        cache[pages - 8 :].normal_(generator=generator(4))
    q = torch.randn(20, 64, 128, device=DEVICE, generator=generator(5)).to(BF16)
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 20], dtype=torch.int32, device=DEVICE),
        "seqused_k": torch.tensor([1000], dtype=torch.int32, device=DEVICE),
    }
    args = (q, k_cache, v_cache, last[None])
    assert_close(run(args, lengths), exact(args, lengths))
