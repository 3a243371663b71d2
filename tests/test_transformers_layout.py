"""The adapter's two translations: dense caches into pages, and masks into row offsets and padding."""

import importlib

import pytest
import torch

import m3_sparse  # noqa: F401

cache = importlib.import_module("m3_sparse._transformers_cache")
rows = importlib.import_module("m3_sparse._transformers_rows")

PAGE = 128


def states(batch, heads, length, layout):
    generator = torch.Generator().manual_seed(length)
    if layout == "HND":
        return torch.randn(batch, heads, length, 128, generator=generator)
    if layout == "NHD":
        return torch.randn(batch, length, heads, 128, generator=generator).transpose(1, 2)
    if layout == "one row for all":
        return torch.randn(1, heads, length, 128, generator=generator).expand(batch, -1, -1, -1)
    # A slice of a longer buffer, whose batch stride is no multiple of anything useful.
    buffer = torch.randn(batch, (heads * length + 3) * 128 + 4, generator=generator)
    return buffer[:, : heads * length * 128].unflatten(1, (heads, length, 128))


def check_pages(paged, originals, pad):
    batch = originals[0].shape[0]
    if paged.block_table is None:
        for cached, original in zip(paged.caches, originals):
            assert torch.equal(cached, original) and paged.leftpad is pad
        return
    for pages, original in zip(paged.caches, originals):
        for row in range(batch):
            start = 0 if pad is None else int(pad[row])
            for j, page in enumerate(paged.block_table[row].tolist()):
                expected = original[row, :, start + j * PAGE : start + (j + 1) * PAGE]
                if expected.shape[1]:
                    assert 0 <= page < len(pages)
                    assert torch.equal(pages[page, :, : expected.shape[1]], expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 384])
@pytest.mark.parametrize("batch, heads", [(1, 4), (3, 4), (3, 1), (1, 1)])
def test_pages_hold_the_rows(batch, heads, length, padded, grad):
    pad = torch.tensor([0, length // 2, length - 1][:batch]) if padded else None
    originals = [states(batch, heads, length, layout) for layout in ("HND", "NHD", "one row for all", "odd")]
    for x in originals:
        check_pages(cache.read_states((x,), pad, grad), (x,), pad)
    # Keys and values share a table whatever their layouts.
    pair = tuple(originals[:2])
    check_pages(cache.read_states(pair, pad, grad), pair, pad)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 127, 128, 300, 384])
@pytest.mark.parametrize("layout", ["HND", "NHD", "one row for all"])
def test_nothing_is_copied(layout, length, padded):
    pad = torch.tensor([0, length // 2]) if padded else None
    pair = tuple(states(2, 4, length, layout) for _ in range(2))
    cached = cache.read_states(pair, pad, False)
    assert [x.data_ptr() for x in cached.caches] == [x.data_ptr() for x in pair]
    assert [x.stride() for x in cached.caches] == [x.stride() for x in pair]


def test_a_gradient_has_the_size_of_the_cache():
    x = states(2, 4, 300, "HND").requires_grad_()
    paged = cache.read_states((x,), torch.tensor([0, 7]), True)
    assert paged.caches[0].numel() < 2 * x.numel()
    paged.caches[0].sum().backward()
    # Slots before the content are in no page.
    assert (x.grad[0] > 0).all() and (x.grad[1, :, 7:] > 0).all() and (x.grad[1, :, :7] == 0).all()


def mask_2d(*ranges, width):
    slots = torch.arange(width)
    return torch.stack([(slots >= first) & (slots < end) for first, end in ranges])


def boolean_mask(real, offset, q_length):
    slots = offset + torch.arange(q_length)
    return (torch.arange(real.shape[1]) <= slots[:, None])[None, None] & real[:, None, None, :]


CASES = {
    "plain": ((0, 9), (0, 9)),
    "left": ((0, 9), (4, 9)),
    "left in every row": ((3, 9), (8, 9)),
    "right": ((0, 9), (0, 5)),
    "right in every row": ((0, 8), (0, 1)),
    "both": ((0, 9), (2, 6)),
}


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("tail", [0, 6])
@pytest.mark.parametrize("case", CASES)
def test_both_masks_tell_the_same(case, offset, tail):
    """Nine slots, the first `offset` of them cached before; a static cache has `tail` unused ones behind."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    real = mask_2d(*CASES[case], width=9)
    q_length = 9 - offset
    call = dict(
        batch_size=2,
        q_length=q_length,
        kv_length=9 + tail,
        q_offset=offset,
        attention_mask=real,
        mask_function=causal_mask_function,
        device="cpu",
    )
    theirs = sdpa_mask(**call, allow_is_causal_skip=False)
    assert torch.equal(theirs, boolean_mask(torch.nn.functional.pad(real, (0, tail)), offset, q_length))
    ours = rows.compact_mask(**call, use_vmap=False)
    assert ours.shape[:3] == (2, 1, 1) and ours.dtype == torch.int64
    q, k = torch.zeros(2, 8, q_length, 128), torch.zeros(2, 4, 9 + tail, 128)
    for mask in (ours, theirs):
        found = rows.read_rows(mask, None, q, k)
        assert found.offset.tolist() == [offset, offset]
        pad = [0, 0] if found.pad is None else found.pad.tolist()
        for row, (first, end) in enumerate(CASES[case]):
            # From the boolean mask alone a row that no query of this chunk sees can't be told from an empty one.
            if mask is ours or end > offset:
                assert pad[row] == first
        lengths = found.kv_lengths(q_length)
        assert lengths.dtype == torch.int32 and lengths.tolist() == [9 - p for p in pad]
        assert rows.check_rows(found, mask, None, q_length) is None


def test_the_shape_says_which_padding_there_is():
    from transformers.masking_utils import causal_mask_function

    def columns(real):
        mask = rows.compact_mask(2, 9, 9, attention_mask=real, mask_function=causal_mask_function, device="cpu")
        return mask.shape[-1]

    widths = {name: columns(mask_2d(*ranges, width=9)) for name, ranges in CASES.items()}
    assert widths == {
        "plain": 1,
        "left": 3,
        "left in every row": 3,
        "right": 2,
        "right in every row": 2,
        "both": 3,
    }
    assert columns(None) == 1


def test_without_a_mask_positions_tell_the_offset():
    q, k = torch.zeros(2, 8, 3, 128), torch.zeros(2, 4, 20, 128)
    assert rows.read_rows(None, None, q, k).offset.tolist() == [17, 17]
    assert rows.read_rows(None, torch.tensor([[4, 5, 6]]), q, k).offset.tolist() == [4, 4]
    # Positions that count on from somewhere else can't reach past the cache.
    assert rows.read_rows(None, torch.tensor([[40, 41, 42]]), q, k).offset.tolist() == [17, 17]


def test_an_offset_on_the_device():
    """As a static cache gives it: a tensor, which is not read."""
    from transformers.masking_utils import causal_mask_function

    mask = rows.compact_mask(
        2, 1, 50, q_offset=torch.tensor(9), mask_function=causal_mask_function, device="cpu", attention_mask=None
    )
    assert mask.tolist() == [[[[9]]], [[[9]]]]


def test_content_range():
    rows = importlib.import_module("m3_sparse._transformers_rows")
    real = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.int32)
    first, end, holes = rows.content_range(real)
    assert first.tolist() == [0, 1, 4, 0, 3] and end.tolist() == [4, 3, 0, 3, 4]  # (4, 0): nothing real
    assert holes.tolist() == [False, False, False, True, False]
