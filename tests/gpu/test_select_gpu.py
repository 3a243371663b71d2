"""block_scores and select_blocks on a GPU: decode_score and topk through the launcher."""

import pytest
import torch

import m3_sparse
from m3_sparse import reference

DEVICE = "cuda"
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e4m3fn),
]
KV_LENS = [0, 1, 127, 128, 129, 2047, 2048, 2049, 2176, 4095]


def cast(x, dtype):
    return x.clamp(-448, 448).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def make(q_lens, kv_lens, heads=4, page=128, dtypes=DTYPES[0], seed=0, pad_rows=0, wide=0, poison=True, padded=False):
    """Arguments of select_blocks: shuffled pages, NaN in everything that no length covers, garbage in unused table
    entries."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    query_dtype, key_dtype = dtypes
    used = [-(-n // page) for n in kv_lens]
    pages, width = sum(used) + 2, max(max(used), 1) + wide
    order = torch.randperm(pages, device=DEVICE, generator=generator).to(torch.int32)
    table = torch.full((len(kv_lens), width), 2**30, dtype=torch.int32, device=DEVICE)
    keys = cast(torch.randn(pages, page, 128, device=DEVICE, generator=generator), key_dtype)
    covered = torch.zeros(pages, page, dtype=torch.bool, device=DEVICE)
    first = 0
    for b, (count, length) in enumerate(zip(used, kv_lens)):
        mine = order[first : first + count]
        table[b, :count] = mine
        seen = torch.arange(count * page, device=DEVICE).view(count, page) < length
        covered[mine.long()] = seen
        first += count
    if poison:
        bits = keys.view(torch.uint8).view(pages, page, -1)
        bits[~covered] = 0x7F
        if key_dtype == torch.bfloat16:
            bits[~covered] = torch.tensor([0xC1, 0x7F], dtype=torch.uint8, device=DEVICE).repeat(128)
    if padded:
        size = keys.element_size()
        buffer = torch.full((pages, page * 128 + 512 // size), torch.nan, device=DEVICE).to(key_dtype)
        buffer.view(torch.uint8)[:, : page * 128 * size] = keys.view(torch.uint8).view(pages, -1)
        keys = buffer[:, : page * 128].view(pages, page, 128)
    query = torch.randn(sum(q_lens) + pad_rows, heads, 128, device=DEVICE, generator=generator).to(query_dtype)
    offsets = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    return (query, keys, table), {"cu_seqlens_q": offsets, "seqused_k": lengths}


def ends_of(tensors, lengths):
    query, keys, table = tensors
    reach = table.shape[1] * keys.shape[1]
    return reference.locate_rows(lengths["cu_seqlens_q"], lengths["seqused_k"], query.shape[0], reach)


def exact_scores(tensors, lengths):
    """float64 scores and, for each, the largest sum of |q| |k| over the block's tokens."""
    query, keys, table = tensors
    page = keys.shape[1]
    blocks = -(-table.shape[1] * page // 128)
    rows = ends_of(tensors, lengths)
    scores = torch.full((*query.shape[:2], blocks), -torch.inf, dtype=torch.float64, device=DEVICE)
    bound = torch.zeros_like(scores)
    wide = keys.float().nan_to_num(0, 0, 0).double()
    for t, (b, end) in enumerate(zip(rows.request.tolist(), rows.end.tolist())):
        if end == 0:
            continue
        count = -(-end // page)
        k = wide[table[b, :count].long()].reshape(-1, 128)[:end]
        q = query[t].double()
        missing = (-end) % 128
        pad = torch.nn.functional.pad
        n = (end + missing) // 128
        scores[t, :, :n] = pad(q @ k.T, (0, missing), value=-torch.inf).view(q.shape[0], n, 128).amax(-1)
        bound[t, :, :n] = pad(q.abs() @ k.abs().T, (0, missing)).view(q.shape[0], n, 128).amax(-1)
    return scores, bound


def assert_scores(got, tensors, lengths):
    want, bound = exact_scores(tensors, lengths)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want > -torch.inf
    assert not got.isnan().any()
    assert ((got.double() - want).abs()[seen] <= 2.0**-16 * bound[seen]).all()


def assert_selection(ids, scores, tensors, lengths, local=1, init=0):
    count = reference.block_count(ends_of(tensors, lengths).end)
    want = reference.select_from_scores(scores, count, ids.shape[-1], local, init)
    assert torch.equal(ids, want), f"first wrong row {(ids != want).any(-1).nonzero()[0].tolist()}"


def run(tensors, lengths, out=None, **options):
    with m3_sparse.backend("aot"):
        ids, scores = m3_sparse.select_blocks(*tensors, **lengths, return_scores=True, out=out, **options)
        assert torch.equal(m3_sparse.select_blocks(*tensors, **lengths, **options), ids)
    return ids, scores


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_against_float64_and_exact_selection(dtypes, page, heads):
    for seed, q_lens in enumerate([[1] * 10, [4] * 10, [8, 1, 0, 3, 16, 2, 5, 7, 1, 9], [16] * 10]):
        tensors, lengths = make(q_lens, KV_LENS, heads, page, dtypes, seed, pad_rows=2, wide=seed, padded=seed == 1)
        with m3_sparse.backend("aot"):
            scores = m3_sparse.block_scores(*tensors, **lengths)
        assert_scores(scores, tensors, lengths)
        ids, again = run(tensors, lengths)
        assert torch.equal(scores, again)
        assert_selection(ids, scores, tensors, lengths)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kv_len", [65_537, 1_048_576, 2_097_152])
def test_long_rows(dtypes, kv_len):
    tensors, lengths = make([2], [kv_len], 4, 128, dtypes, seed=9)
    ids, scores = run(tensors, lengths)
    assert_selection(ids, scores, tensors, lengths)
    want, bound = exact_scores(tensors, lengths)
    seen = want > -torch.inf
    assert ((scores.double() - want).abs()[seen] <= 2.0**-16 * bound[seen]).all()


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("q_len", [1, 3, 8, 16])
def test_ragged_batches_of_long_rows(dtypes, q_len):
    """Rows of one piece and of several, beside requests that have nothing to score."""
    kv_lens = [40_000, 1, 2048, 2049, 32_768, 32_769, 0, 70_000, 300, 9000, 3000]
    for page in (64, 128):
        tensors, lengths = make([q_len] * 11, kv_lens, 4, page, dtypes, seed=q_len, pad_rows=1)
        for options in ({}, {"topk": 32, "local_blocks": 3, "init_blocks": 2}, {"topk": 4, "local_blocks": 0}):
            ids, scores = run(tensors, lengths, **options)
            assert_selection(
                ids, scores, tensors, lengths, options.get("local_blocks", 1), options.get("init_blocks", 0)
            )


@pytest.mark.parametrize("batch", [1, 3, 17, 128, 1025])
def test_batches(batch):
    kv_lens = [(i * 37) % 700 + (i % 3 == 0) * 1500 for i in range(batch)]
    q_lens = [1 if i % 5 else 3 for i in range(batch)]
    tensors, lengths = make(q_lens, kv_lens, seed=batch)
    ids, scores = run(tensors, lengths)
    assert_selection(ids, scores, tensors, lengths)
    assert_scores(scores, tensors, lengths)


def crafted(values, batch):
    """A cache whose block scores are exactly `values` [blocks] (bf16 numbers): dim 0 carries them, the query is
    one-hot. All requests have the same pages."""
    blocks = values.numel()
    keys = torch.zeros(blocks, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    keys[:, :, 0] = values.to(torch.bfloat16)[:, None]
    query = torch.zeros(batch, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    query[..., 0] = 1
    table = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None].repeat(batch, 1)
    lengths = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=DEVICE),
        "seqused_k": torch.full((batch,), blocks * 128, dtype=torch.int32, device=DEVICE),
    }
    return (query, keys, table), lengths


@pytest.mark.parametrize("blocks", [17, 33, 256, 257, 1000, 2048, 3000, 8192, 16384])
@pytest.mark.parametrize("kind", ["equal", "ties", "rising", "falling", "special", "far", "one lane", "minus infinity"])
@pytest.mark.parametrize("batch", [1, 8])
def test_ties_and_special_scores(kind, blocks, batch):
    generator = torch.Generator(device=DEVICE).manual_seed(blocks)
    values = torch.randn(blocks, device=DEVICE, generator=generator)
    if kind == "equal":
        values.fill_(1.5)
    elif kind == "ties":
        values = (values * 2).round()
    elif kind == "rising":
        values = torch.arange(blocks, device=DEVICE).float()
    elif kind == "falling":
        values = -torch.arange(blocks, device=DEVICE).float()
    elif kind == "special":
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -1e38], device=DEVICE)
        values = special[torch.randint(0, 7, (blocks,), device=DEVICE, generator=generator)]
    elif kind == "far":
        values = -values.abs()
        values[-20:] *= -1
    elif kind == "one lane":
        values[::32] += 10
    elif kind == "minus infinity":
        values.fill_(-torch.inf)
        values[blocks // 2] = 1
    tensors, lengths = crafted(values, batch)
    for topk, local, init in ((16, 1, 0), (4, 0, 0), (8, 2, 1), (32, 3, 5), (16, 16, 0), (1, 1, 0), (17, 0, 4)):
        ids, scores = run(tensors, lengths, topk=topk, local_blocks=local, init_blocks=init)
        assert_selection(ids, scores, tensors, lengths, local, init)


def test_unread_bytes_change_nothing():
    for dtypes in DTYPES:
        for page in (64, 128):
            results = []
            for poison in (False, True):
                tensors, lengths = make(
                    [1, 4, 2, 8], [129, 2049, 1, 4000], 4, page, dtypes, seed=21, poison=poison, wide=2
                )
                if poison:
                    tensors[2][tensors[2] == 2**30] = -7
                results.append(run(tensors, lengths))
            assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_row_does_not_depend_on_its_batch_and_repeats_are_equal():
    tensors, lengths = make([1] * 24, [100 + 311 * i for i in range(24)], seed=22)
    query, keys, table = tensors
    ids, scores = run(tensors, lengths)
    for _ in range(10):
        again = run(tensors, lengths)
        assert torch.equal(ids, again[0]) and torch.equal(scores, again[1])
    one = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for i in (0, 7, 23):
        alone = run(
            (query[i : i + 1], keys, table[i : i + 1]),
            {"cu_seqlens_q": one, "seqused_k": lengths["seqused_k"][i : i + 1]},
        )
        assert torch.equal(alone[0][0], ids[i]) and torch.equal(alone[1][0], scores[i])
    # The same tokens as verify steps of other widths: another tile shape, the same bits.
    tensors, lengths = make([8], [3000], seed=23)
    query, keys, table = tensors
    _, scores = run(tensors, lengths)
    for i in range(8):
        length = torch.tensor([3000 - 7 + i], dtype=torch.int32, device=DEVICE)
        alone = run((query[i : i + 1], keys, table), {"cu_seqlens_q": one, "seqused_k": length})
        assert torch.equal(alone[1][0], scores[i])


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=["bf16", "fp8"])
def test_a_row_equals_itself_in_any_batch(dtypes):
    """The same request alone and first, in the middle or last of 3, 17, 128 and 1,025."""
    generator = torch.Generator().manual_seed(29)
    kv_lens = torch.randint(1, 4000, (1025,), generator=generator).tolist()
    (query, keys, table), lengths = make([1] * 1025, kv_lens, dtypes=dtypes, seed=29)

    def batch(index):
        cu = torch.arange(len(index) + 1, dtype=torch.int32, device=DEVICE)
        options = {"cu_seqlens_q": cu, "seqused_k": lengths["seqused_k"][index]}
        return run((query[index], keys, table[index]), options)

    for one in torch.randint(0, 1025, (6,), generator=generator).tolist():
        alone = batch(torch.tensor([one], device=DEVICE))
        for size in (3, 17, 128, 1025):
            index = torch.randperm(1025, generator=generator)[:size].to(DEVICE)
            for place in (0, size // 2, size - 1):
                index[place] = one
                ids, scores = batch(index)
                assert torch.equal(ids[place], alone[0][0]) and torch.equal(scores[place], alone[1][0]), (one, size)


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
def test_lengths_one_by_one(dtypes):
    """Each length as a batch of its own, at two query lengths; the long ones are in test_long_rows."""
    for kv_len in KV_LENS:
        for q_len in (1, 4):
            tensors, lengths = make([q_len], [kv_len], dtypes=dtypes, seed=kv_len, wide=1)
            ids, scores = run(tensors, lengths)
            assert_selection(ids, scores, tensors, lengths)
            assert_scores(scores, tensors, lengths)


def test_wrong_lengths_offsets_and_pages_stay_inside():
    generator = torch.Generator(device=DEVICE).manual_seed(24)
    for round_ in range(20):
        (query, keys, table), lengths = make([2] * 8, [700] * 8, seed=round_)
        big = 2**31 - 1
        noise = lambda shape: torch.randint(-big, big, shape, device=DEVICE, generator=generator).to(torch.int32)
        table = torch.where(
            torch.rand(table.shape, device=DEVICE, generator=generator) < 0.5, table, noise(table.shape)
        )
        lengths = {name: noise(x.shape) for name, x in lengths.items()}
        with m3_sparse.backend("aot"):
            ids, _ = m3_sparse.select_blocks(query, keys, table, **lengths, return_scores=True)
            m3_sparse.select_blocks(query, keys, table, **lengths)
        assert ((ids >= -1) & (ids < table.shape[1])).all() or ids.numel() == 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype, pages", [(torch.bfloat16, 140_000), (torch.float8_e4m3fn, 270_000)])
def test_offsets_beyond_32_bits(dtype, pages):
    """Elements beyond 2^31 and bytes beyond 2^32."""
    bits = torch.int16 if dtype == torch.bfloat16 else torch.uint8
    keys = torch.zeros(pages, 128, 128, dtype=bits, device=DEVICE)
    for page, value in ((pages - 1, 2), (70_000, 3), (3, 1)):
        keys[page] = torch.tensor(value).to(dtype).view(bits).item()
    keys = keys.view(dtype)
    table = torch.tensor([[3, pages - 1, 70_000, 4, 5]], dtype=torch.int32, device=DEVICE)
    query = torch.ones(1, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with m3_sparse.backend("aot"):
        scores = m3_sparse.block_scores(
            query, keys, table, cu_seqlens_q=offsets, seqused_k=torch.tensor([600], dtype=torch.int32, device=DEVICE)
        )
    assert scores.tolist() == [[[128.0, 256.0, 384.0, 0.0, 0.0]]]


@pytest.mark.parametrize("batch", [6, 9])
def test_graph_replay_follows_lengths_and_pages(batch):
    tensors, lengths = make([2] * batch, [4000] * batch, seed=25)
    query, keys, table = tensors
    with m3_sparse.backend("aot"):
        m3_sparse.select_blocks(*tensors, **lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ids, scores = m3_sparse.select_blocks(*tensors, **lengths, return_scores=True)
            without = m3_sparse.select_blocks(*tensors, **lengths)
    keys.copy_(torch.randn_like(keys))
    for seed in range(8):
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        lengths["seqused_k"].copy_(torch.randint(0, 4001, (batch,), device=DEVICE, generator=generator))
        table.copy_(torch.randint(0, keys.shape[0], table.shape, device=DEVICE, generator=generator))
        query.copy_(torch.randn(query.shape, device=DEVICE, generator=generator))
        ids.fill_(-9)
        without.fill_(-9)
        scores.fill_(torch.nan)
        graph.replay()
        assert torch.equal(without, ids)
        assert_selection(ids, scores, tensors, lengths)
        assert_scores(scores, tensors, lengths)


@pytest.mark.parametrize("batch", [4, 12])
def test_selection_after_a_store_sees_the_new_keys(batch):
    """The launches overlap; the scoring must wait for the store before it, and the top-k for the scoring."""
    tensors, lengths = make([1] * batch, [2304] * batch, seed=26, poison=False)
    query, keys, table = tensors
    slots = (table[:, 8].long() * 128 + 127).contiguous()
    k_cache = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16, device=DEVICE).expand(keys.shape[0], 1, 128, 128)
    k_cache = k_cache.contiguous()
    v_cache = torch.zeros_like(k_cache)
    row = torch.zeros(batch, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    with m3_sparse.backend("aot"):
        for i in range(200):
            new = query[:, 0] * (i + 1)
            m3_sparse.store_kv(row, row, new, k_cache, v_cache, keys, slots)
            without = m3_sparse.select_blocks(*tensors, **lengths)
            m3_sparse.store_kv(row, row, new, k_cache, v_cache, keys, slots)
            ids, scores = m3_sparse.select_blocks(*tensors, **lengths, return_scores=True)
            if i % 50 == 49:
                assert torch.equal(without, ids)
                assert_scores(scores, tensors, lengths)
                assert_selection(ids, scores, tensors, lengths)


@pytest.mark.parametrize("repeat", [1, 3])
def test_outputs_are_written_whole_and_nothing_else(repeat):
    tensors, lengths = make([1, 3, 0, 2] * repeat, [500, 2300, 7, 4000] * repeat, seed=27, pad_rows=3)
    rows = tensors[0].shape[0]
    buffer = torch.full((rows + 4, 4, 40), -77, dtype=torch.int32, device=DEVICE)
    out = buffer[2:-2, :, 1:33:2]
    ids, scores = run(tensors, lengths, out=out)
    assert_selection(ids, scores, tensors, lengths)
    assert (ids[-3:] == -1).all() and (scores[-3:] == -torch.inf).all()
    wanted = ids.clone()
    out.fill_(-77)
    assert (buffer == -77).all()
    with m3_sparse.backend("aot"):
        m3_sparse.select_blocks(*tensors, **lengths, out=out)
    assert torch.equal(out, wanted)
    out.fill_(-77)
    assert (buffer == -77).all()


def test_calls_on_two_streams():
    """Nothing is shared between calls that run at the same time."""
    problems = [make([1] * 16, [3000 + 700 * i for i in range(16)], seed=40 + i) for i in range(2)]
    wanted = [run(*problem)[0] for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got = [[], []]
    with m3_sparse.backend("aot"):
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i].append(m3_sparse.select_blocks(*problems[i][0], **problems[i][1]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(ids, wanted[i]) for ids in got[i])


def test_opcheck():
    from m3_sparse import ops

    (query, keys, table), lengths = make([1, 2], [300, 2100], seed=28, poison=False)
    tensors = (query, keys, table, lengths["cu_seqlens_q"], lengths["seqused_k"])
    out = torch.zeros(3, 4, 16, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(3, 4, table.shape[1], device=DEVICE)
    torch.library.opcheck(ops.BUILT["select_blocks", "aot"], (out, scores, *tensors, 1, 0))
    torch.library.opcheck(ops.BUILT["select_blocks", "aot"], (out, None, *tensors, 1, 0))
    torch.library.opcheck(ops.BUILT["block_scores", "aot"], (scores, *tensors))
