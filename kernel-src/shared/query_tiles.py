"""Query rows in tiles, and the scoring work they make, in closed form: no table, no launch that would build one.

A request's rows that need scores are its last ones (positions ascend, and only the first may have so few candidates
that all are taken). They are cut into tiles of 2^tile_shift tokens; a tile's units are the blocks that its last token
must score. Units of all requests in order make one range, of which a CTA takes a contiguous part. Everything read is
data that may be wrong: rows stay within the tensors whatever it holds.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx

BLOCK_BITS = 7
BLOCK = 1 << BLOCK_BITS


class Batch(NamedTuple):
    """The requests of a launch."""

    cu_seqlens: Int64
    seqused: Int64
    num_requests: Int32
    num_tokens: Int32


class Tiling(NamedTuple):
    """How a request's rows become tiles."""

    reach: Int32  # tokens that the page table can hold
    first_scored: Int32  # position from which on a row is scored
    tile_shift: Int32  # log2 of a tile's tokens
    free_blocks: Int32  # candidates of a row that need no score


def candidates(position):
    return (position >> BLOCK_BITS) + 1


def load_request(batch, reach, request):
    """(first token, tokens, position of the first token) of a request; past the last one, none."""
    cu_seqlens, seqused, num_requests, num_tokens = batch
    real = Int32(request < num_requests)
    start, stop, kv_len = ptx.load_i32_batch(
        [
            (cu_seqlens + Int64(request) * 4, real, 0),
            (cu_seqlens + Int64(request) * 4 + 4, real, 0),
            (seqused + Int64(request) * 4, real, 0),
        ]
    )
    start = ptx.clamp(start, Int32(0), num_tokens)
    stop = ptx.clamp(stop, start, num_tokens)
    kv_len = ptx.clamp(kv_len, Int32(0), reach)
    return start, stop - start, kv_len - (stop - start)


def scored_rows(start, tokens, position, first_scored):
    """Those of a request at positions of at least `first_scored`."""
    skipped = ptx.clamp(first_scored - position, Int32(0), tokens)
    return start + skipped, tokens - skipped, position + skipped


def units_before(tile, position, tile_shift, free_blocks):
    """Units of the tiles before `tile`, all of them full: the sum of candidates(last position) - free_blocks."""
    first_last = position - 1 + (Int32(1) << tile_shift)
    # Of at most 128 tokens, 2^bits tiles end in one block: count in tiles.
    bits = ptx.maximum_i32(BLOCK_BITS - tile_shift, Int32(0))
    total = _sum_of_quotients((first_last >> tile_shift) + tile, bits) - _sum_of_quotients(
        first_last >> tile_shift, bits
    )
    # Of 256 tokens, every tile ends two blocks after the one before.
    two = tile * (first_last >> BLOCK_BITS) + tile * (tile - 1)
    return ptx.select(tile_shift > BLOCK_BITS, two, total) + tile * (1 - free_blocks)


def _sum_of_quotients(n, bits):
    """Sum of i >> bits over 0 <= i < n."""
    q = n >> bits
    return (((q * (q - 1)) >> 1) << bits) + q * (n - (q << bits))


def units_of_request(rows, position, tile_shift, free_blocks):
    tiles = (rows + (Int32(1) << tile_shift) - 1) >> tile_shift
    full = units_before(tiles - 1, position, tile_shift, free_blocks)
    last = candidates(position + rows - 1) - free_blocks
    return ptx.select(rows > 0, full + last, Int32(0))


@cute.jit
def count_units(batch: Batch, tiling: Tiling, lane: Int32):
    """Of all requests, by a whole warp."""
    num_requests = batch.num_requests
    reach, first_scored, tile_shift, free_blocks = tiling
    total = Int32(0)
    for first in cutlass.range(0, num_requests, 32, unroll=1):
        found = load_request(batch, reach, first + lane)
        _, rows, position = scored_rows(*found, first_scored)
        total = total + ptx.warp_sum(units_of_request(rows, position, tile_shift, free_blocks))
    return total


@cute.jit
def locate_unit(
    unit: Int32,
    group: Int32,  # 32 requests to begin with, a multiple of 32
    group_base: Int32,  # units of the requests before them
    batch: Batch,
    tiling: Tiling,
    lane: Int32,
):
    """(group, group_base, request, first scored token, its position, rows, tile, units before the tile) of a unit, by a
    whole warp. No such unit: 0 rows."""
    num_requests = batch.num_requests
    reach, first_scored, tile_shift, free_blocks = tiling
    request, request_base = num_requests, Int32(0)
    while (request == num_requests) & (group < num_requests):
        found = load_request(batch, reach, group + lane)
        _, rows, position = scored_rows(*found, first_scored)
        units = units_of_request(rows, position, tile_shift, free_blocks)
        ends = ptx.warp_prefix_sum(units, lane)
        hits = ptx.ballot(Int32(group_base + ends > unit))
        if hits != 0:
            which = ptx.lowest_bit(hits)
            request = group + which
            request_base = group_base + ptx.shuffle(ends - units, which)
        else:
            group_base = group_base + ptx.shuffle(ends, Int32(31))
            group = group + 32
    found = load_request(batch, reach, request)
    token, rows, position = scored_rows(*found, first_scored)
    # The last tile with at most unit - request_base units before it: 32 probes a round.
    wanted = unit - request_base
    low = Int32(0)
    high = ((rows + (Int32(1) << tile_shift) - 1) >> tile_shift) - 1
    while low < high:
        step = (high - low + 31) >> 5
        probe = low + (lane + 1) * step
        fits = (probe <= high) & (units_before(probe, position, tile_shift, free_blocks) <= wanted)
        low = low + ptx.count_bits(ptx.ballot(Int32(fits))) * step
        high = ptx.minimum_i32(high, low + step - 1)
    tile_base = request_base + units_before(low, position, tile_shift, free_blocks)
    return group, group_base, request, token, position, rows, low, tile_base


def units_of_cta(total, ctas, least):
    """Units of a CTA's range: equal parts of all, but no fewer than `least`."""
    return ptx.maximum_i32(ptx.divide_u32(total + ctas - 1, ctas), Int32(least))
