"""store_kv on a GPU: the store kernel, byte for byte."""

import pytest
import torch

import m3_sparse

DEVICE = "cuda"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("separate", "nhd", "packed")
GUARD = 0xA5
# (k and v, KV cache, index k, index cache)
DTYPES = [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2, torch.float16, torch.float8_e5m2),
    (torch.float32, torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
]


def quantise(x, scale, dtype):
    if x.dtype == dtype:
        return x
    x = x.float() if scale is None else x.float() / scale.view(-1, 1)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def raw(x):
    return x.contiguous().view(torch.uint8)


def assert_same_bytes(got, want):
    """Equal bytes; a NaN may be any NaN, since a division on this device need not keep its sign."""
    nan = got.float().isnan() & want.float().isnan()
    different = (raw(got) != raw(want)).view(*got.shape, -1).any(-1) & ~nan
    assert not different.any(), f"first difference at {different.nonzero()[0].tolist()}"


def guarded(shape, dtype, pad=0):
    """A cache full of one byte value, its rows `pad` bytes apart."""
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.full((*shape[:-1], shape[-1] * size + pad), GUARD, dtype=torch.uint8, device=DEVICE)
    return data[..., : shape[-1] * size].view(dtype)


def kv_caches(layout, pages, heads, page, dtype):
    if layout == "nhd":
        return tuple(guarded((pages, page, heads, 128), dtype).transpose(1, 2) for _ in range(2))
    if layout == "packed":
        both = guarded((pages, heads, page, 256), dtype)
        return both[..., :128], both[..., 128:]
    return tuple(guarded((pages, heads, page, 128), dtype) for _ in range(2))


def values(generator, *shape, dtype):
    """Normal numbers over many orders of magnitude, with zeros, infinities, NaN and boundary cases among them."""
    x = torch.randn(shape, device=DEVICE, generator=generator)
    x = x * torch.exp2(torch.randint(-20, 18, shape, device=DEVICE, generator=generator).float())
    special = torch.tensor(
        [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448, 464, 480, 57344, 2**-9, 2**-10, 1e-40], device=DEVICE
    )
    chosen = special[torch.randint(0, special.numel(), shape, device=DEVICE, generator=generator)]
    x = torch.where(torch.rand(shape, device=DEVICE, generator=generator) < 0.1, chosen, x)
    return x.clamp(-448, 448).to(dtype) if dtype in FP8 else x.to(dtype)


def problem(tokens, heads, page, dtypes, layout="separate", seed=0, pages=None):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    source, kept, index_source, index_kept = dtypes
    pages = pages or tokens // page + 3
    k, v = (values(generator, tokens, heads, 128, dtype=source) for _ in range(2))
    index_k = values(generator, tokens, 128, dtype=index_source)
    k_cache, v_cache = kv_caches(layout, pages, heads, page, kept)
    index_cache = guarded((pages, page, 128), index_kept)
    slots = torch.randperm(pages * page, device=DEVICE, generator=generator)[:tokens]
    slots[::5] = -1
    if tokens > 3:
        slots[1], slots[2], slots[3] = pages * page, 2**40, -(2**33)
    return k, v, index_k, k_cache, v_cache, index_cache, slots


def expected(k, v, index_k, k_cache, v_cache, index_cache, slots, k_scale, v_scale):
    pages, _, page, _ = k_cache.shape
    written = (slots >= 0) & (slots < pages * page)
    number, offset = slots[written] // page, slots[written] % page
    results = []
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale), (index_k, index_cache, None)):
        new = raw(cache).view(*cache.shape[:-1], -1).clone()
        stored = raw(quantise(x, scale, cache.dtype))[written]
        if cache.dim() == 4:
            new[number, :, offset] = stored
        else:
            new[number, offset] = stored
        results.append(new.view(cache.dtype))
    return results


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, heads, page", [(1, 4, 128), (7, 1, 64), (64, 4, 64), (333, 8, 128), (1025, 4, 128)])
def test_every_byte(dtypes, layout, tokens, heads, page):
    arguments = problem(tokens, heads, page, dtypes, layout, seed=tokens)
    scales = (torch.rand(heads, device=DEVICE) + 0.1, torch.rand(1, device=DEVICE) + 0.1)
    for k_scale, v_scale in ((None, None), scales):
        want = expected(*arguments, k_scale, v_scale)
        with m3_sparse.backend("aot"):
            m3_sparse.store_kv(*arguments, k_scale=k_scale, v_scale=v_scale)
        for got, right in zip(arguments[3:6], want):
            assert_same_bytes(got, right)
        for cache in arguments[3:6]:
            raw_view = cache.untyped_storage()
            torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(raw_view).fill_(GUARD)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", FP8)
def test_every_16_bit_input_as_on_the_cpu(source, target):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source).view(512, 1, 128)
    want = quantise(bits, None, target)
    caches = [torch.zeros(4, 1, 128, 128, device=DEVICE).to(target) for _ in range(2)]
    index_cache = torch.zeros(4, 128, 128, device=DEVICE).to(target)
    device_bits = bits.to(DEVICE)
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(
            device_bits, device_bits, device_bits[:, 0], *caches, index_cache, torch.arange(512, device=DEVICE)
        )
    nan = want.float().isnan().view(-1)
    for cache in (*caches, index_cache):
        got = raw(cache).view(-1).cpu()
        assert torch.equal(got[~nan], raw(want).view(-1)[~nan])
        assert (got[nan] & 0x7F == 0x7F).all()
        if source == torch.bfloat16:  # widening is a shift, so the sign of a NaN survives on any device
            assert torch.equal(got, raw(want).view(-1))


def test_slots_of_32_bits_and_no_index():
    k, v, _, k_cache, v_cache, _, slots = problem(50, 2, 64, DTYPES[3], seed=3)
    slots = slots.clamp(-1, 2**31 - 1).to(torch.int32)
    index = torch.zeros(50, 128, device=DEVICE, dtype=torch.bfloat16)
    want = expected(k, v, index, k_cache, v_cache, guarded((4, 64, 128), torch.bfloat16), slots.long(), None, None)
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(k, v, None, k_cache, v_cache, None, slots)
    assert_same_bytes(k_cache, want[0])
    assert_same_bytes(v_cache, want[1])


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
def test_offsets_beyond_32_bits(kept):
    pages, heads, page = 33_000, 4, 128  # packed: 4.3 G elements
    generator = torch.Generator(device=DEVICE).manual_seed(4)
    bits = torch.int16 if kept == torch.bfloat16 else torch.uint8
    both = torch.zeros(pages, heads, page, 256, dtype=bits, device=DEVICE)
    k, v = (torch.randn(3, heads, 128, device=DEVICE, generator=generator).bfloat16() for _ in range(2))
    slots = torch.tensor([32_999 * page + 127, 16_385 * page, 5], device=DEVICE)
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(k, v, None, both[..., :128].view(kept), both[..., 128:].view(kept), None, slots)
    rows = quantise(torch.cat([k, v], -1), None, kept).view(bits)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(both[slot // page, :, slot % page], rows[i])
    assert both.count_nonzero() == rows.count_nonzero()


def test_graph_replay_follows_slots_and_scales():
    k, v, index_k, k_cache, v_cache, index_cache, slots = arguments = problem(40, 4, 128, DTYPES[3], seed=5)
    scales = (torch.ones(4, device=DEVICE), torch.ones(1, device=DEVICE))
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(*arguments, k_scale=scales[0], v_scale=scales[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            m3_sparse.store_kv(*arguments, k_scale=scales[0], v_scale=scales[1])
    for seed in range(6, 10):
        fresh = problem(40, 4, 128, DTYPES[3], seed=seed)
        for i in (0, 1, 2, 6):
            arguments[i].copy_(fresh[i])
        scales[0].uniform_(0.2, 3)
        scales[1].uniform_(0.2, 3)
        want = expected(*arguments, *scales)
        graph.replay()
        for got, right in zip((k_cache, v_cache, index_cache), want):
            assert_same_bytes(got, right)


def test_back_to_back_launches_keep_their_order():
    """Launches may overlap (programmatic dependent launch): the last writer of a slot must still be the last call."""
    k_cache, v_cache = kv_caches("separate", 2, 4, 128, torch.bfloat16)
    index_cache = guarded((2, 128, 128), torch.bfloat16)
    slots = torch.arange(256, device=DEVICE)
    rows = [torch.full((256, 4, 128), float(i), dtype=torch.bfloat16, device=DEVICE) for i in range(8)]
    torch.cuda.synchronize()
    with m3_sparse.backend("aot"):
        for _ in range(25):
            for x in rows:
                m3_sparse.store_kv(x, x, x[:, 0], k_cache, v_cache, index_cache, slots)
            copies = [c.clone() for c in (k_cache, v_cache, index_cache)]
            assert all((c == 7).all() for c in copies)


def test_nothing_to_store():
    k, v, index_k, k_cache, v_cache, index_cache, slots = problem(6, 4, 64, DTYPES[0], seed=11)
    before = [raw(c).clone() for c in (k_cache, v_cache, index_cache)]
    with m3_sparse.backend("aot"):
        m3_sparse.store_kv(k[:0], v[:0], index_k[:0], k_cache, v_cache, index_cache, slots[:0])
        m3_sparse.store_kv(k, v, index_k, k_cache, v_cache, index_cache, torch.full_like(slots, -1))
    assert all(torch.equal(raw(c), b) for c, b in zip((k_cache, v_cache, index_cache), before))


def test_opcheck():
    from m3_sparse import ops

    k, v, index_k, k_cache, v_cache, index_cache, slots = problem(6, 4, 64, DTYPES[0], seed=12)
    caches = [torch.zeros(c.shape, dtype=c.dtype, device=DEVICE) for c in (k_cache, v_cache, index_cache)]
    operator = ops.BUILT["store_kv", "aot"]
    torch.library.opcheck(operator, (k.nan_to_num(), v.nan_to_num(), index_k.nan_to_num(), *caches, slots, None, None))
