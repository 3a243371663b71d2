"""The plan of the KV-stationary prefill: how many pieces, bins and tiles the lists of neutral/invert.py are sized for.

Nothing about a problem but its shapes reaches the host, so the sizes must hold whatever the lengths and the selection are.
Here the pieces of kernel-src/shared/pieces.py and the tiles are counted in Python for random lengths and selections and
compared with what the C++ side packs. What the kernels write is tested in tests/gpu/test_prefill_gpu.py.
"""

import random

import pytest
from launch_checks import LaunchChecks, needs_variant, operators

check = LaunchChecks(__file__)
UNIT_BITS = 8


def first_pieces(cu, bits):
    """Number of the first piece of every sequence, the tokens past the last one included."""
    return [(offset >> bits) + b for b, offset in enumerate(cu)]


def find(cu, tokens, piece, bits):
    """(span, sequence, first, last) as pieces.find."""
    sequence = max(b for b, first in enumerate(first_pieces(cu, bits)) if first <= piece)
    span = piece - sequence
    stop = cu[sequence + 1] if sequence + 1 < len(cu) else tokens
    return span, sequence, max(cu[sequence], span << bits), min(stop, (span + 1) << bits)


def offsets(rng, sequences, longest):
    cu = [0]
    for _ in range(sequences):
        cu.append(cu[-1] + rng.choice((0, 1, rng.randrange(longest), rng.randrange(longest))))
    return cu


@pytest.mark.parametrize("seed", range(40))
def test_every_token_lies_in_one_piece(seed):
    rng = random.Random(seed)
    cu = offsets(rng, rng.randrange(1, 12), 700)
    tokens, bits = cu[-1] + rng.choice((0, 5, 300)), rng.choice((3, 8, 9))
    count = -(-tokens // (1 << bits)) + len(cu) - 1
    seen = []
    for piece in range(count):
        span, sequence, first, last = find(cu, tokens, piece, bits)
        if first < last:
            assert first >> bits == (last - 1) >> bits == span
            assert all(cu[sequence] <= t for t in (first, last - 1))
            seen += range(first, last)
    assert seen == list(range(tokens))


@pytest.mark.parametrize("seed", range(20))
def test_units_of_a_segment_are_consecutive(seed):
    """invert_scan sums over the units first .. last of a segment."""
    rng = random.Random(100 + seed)
    cu = offsets(rng, rng.randrange(1, 9), 1500)
    tokens, bits = cu[-1], rng.choice((8, 9, 10))
    units = -(-tokens // 256) + len(cu) - 1
    for segment in range(-(-tokens // (1 << bits)) + len(cu) - 1):
        _, sequence, first, last = find(cu, tokens, segment, bits)
        if first < last:
            own = [u for u in range(units) if find(cu, tokens, u, 8)[1] == sequence]
            own = [u for u in own if first <= find(cu, tokens, u, 8)[2] < find(cu, tokens, u, 8)[3] <= last]
            assert own == list(range((first >> 8) + sequence, ((last - 1) >> 8) + sequence + 1))


def tiles_needed(rng, tokens, heads, width, blocks, chunk, tile):
    """Of one sequence with a random selection."""
    total = 0
    for first in range(0, tokens, chunk):
        for _ in range(heads):
            counts = [0] * blocks
            for _ in range(first, min(tokens, first + chunk)):
                for block in rng.sample(range(blocks), min(width, blocks)):
                    counts[block] += 1
            total += sum(-(-count // tile) for count in counts)
    return total


@check
def lists_are_large_enough(driver):
    import torch

    rng = random.Random(1)
    for tokens, heads, group, width, blocks, bits in (
        (300, 2, 16, 4, 9, 8), (700, 1, 8, 16, 300, 8), (40, 4, 16, 1, 64, 9), (513, 3, 2, 8, 5, 8),
    ):  # fmt: skip
        q = torch.zeros(tokens, heads * group, 128, dtype=torch.bfloat16)
        cache = torch.zeros(1, heads, 128, 128, dtype=torch.bfloat16)
        ids = torch.zeros(tokens, heads, width, dtype=torch.int32)
        table, used = torch.zeros(1, blocks, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        cu = torch.zeros(2, dtype=torch.int32)
        arguments = (
            torch.empty_like(q),
            None,
            q,
            cache,
            cache,
            ids,
            table,
            cu,
            used,
            1.0,
            True,
            None,
            None,
            None,
            bits,
        )
        operators().aot_sparse_attention_kv_stationary(*arguments)
        scatter = next(x for x in driver.launches if "invert_scatter" in x.entry)
        driver.launches.clear()
        tile = 8 if group > 8 else 16
        assert scatter.params[-1] >= tiles_needed(rng, tokens, heads, width, blocks, 1 << bits, tile)
        # Never more than a tile for every choice, and none for what cannot be.
        assert scatter.params[-1] <= tokens * heads * width * (1 + 1 / tile)


@needs_variant
def test_sizes():
    check.run("lists_are_large_enough")


if __name__ == "__main__":
    check.main()
