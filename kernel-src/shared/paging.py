"""From a query token to the keys it sees: its request, its visible end, and the pages of its selected blocks.

Everything read here (offsets, lengths, ids, page numbers) is data that may be wrong. Whatever it holds, the results lie
within the tensors: a request in [0, B), an end in [0, reach], pages in [0, P) or -1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, smem

BLOCK_BITS = 7  # a selectable block has 128 tokens
NO_BLOCK = 2147483647
ENTRY_BYTES = 16  # of the table in shared memory: block id, page of its first half, page of its second half, unused


def guess_request(token, requests, requests_per_token):
    """The request of a token if all requests have the same number of tokens."""
    return ptx.minimum_i32(Int32(cutlass.Float32(token) * requests_per_token + cutlass.Float32(0.001)), requests - 1)


@cute.jit
def search_request(cu_seqlens: Int64, token: Int32, requests: Int32, lane: Int32):
    """Number of i in 1..B with cu_seqlens[i] <= token, by the whole warp: 32 probes a round, log32(B) rounds.

    It is the request of the token, or B if the token lies past the last one.
    """
    low, high = Int32(0), requests
    while low < high:
        step = (high - low + 31) >> 5
        probe = low + (lane + 1) * step
        inside = probe <= high
        offset = ptx.load_i32_if(cu_seqlens + Int64(ptx.select(inside, probe, low)) * 4, Int32(inside), 2147483647)
        hits = ptx.count_bits(ptx.ballot(Int32(offset <= token)))
        low = low + hits * step
        high = ptx.minimum_i32(high, low + step - 1)
    return low


@cute.jit
def find_row(
    cu_seqlens: Int64,
    seqused: Int64,
    token: Int32,
    lane: Int32,
    requests: Int32,
    guess: Int32,
    reach: Int32,
    causal: Int32,
):
    """(request, end) of a token. Uniform batches take one round trip; others add log32(B) + 1."""
    first = ptx.load_i32(cu_seqlens + Int64(guess) * 4)
    stop = ptx.load_i32(cu_seqlens + Int64(guess) * 4 + 4)
    used = ptx.load_i32(seqused + Int64(guess) * 4)
    request = guess
    if (first > token) | (stop <= token):
        found = search_request(cu_seqlens, token, requests, lane)
        exists = Int32(found < requests)
        request = ptx.minimum_i32(found, requests - 1)
        stop = ptx.load_i32(cu_seqlens + Int64(request) * 4 + 4)
        used = ptx.load_i32_if(seqused + Int64(request) * 4, exists, 0)
    used = ptx.maximum_i32(ptx.minimum_i32(used, reach), Int32(0))
    # Position of the token: used - q_len + (token - first) = used - stop + token.
    end = ptx.select(causal != 0, ptx.minimum_i32(used, used - stop + token + 1), used)
    return request, ptx.maximum_i32(end, Int32(0))


@cute.jit
def warm_l2(
    ids: Int64,
    slot: Int64,
    width: Int32,
    page_row: Int64,
    page_width: Int32,
    q: Int64,
    q_head: Int64,
    group: Int32,
    lane: Int32,
):
    """What the first dependent loads will ask for. It touches no value, so it needs no order with earlier kernels."""
    if lane < width:
        ptx.prefetch_l2(ids + Int64(lane) * slot)
    if lane * 32 < page_width:
        ptx.prefetch_l2(page_row + Int64(lane) * 128)
    if (lane >> 1) < group:
        ptx.prefetch_l2(q + Int64(lane >> 1) * q_head + Int64((lane & 1) * 128))


@cute.jit
def list_blocks(
    table: Int32,  # where in shared memory this warp's list goes: ENTRY_BYTES for each of up to 32 blocks
    page_row: Int64,  # the request's row of the page table
    page_width: Int32,  # of the page table
    pages: Int32,
    page_bits: Int32,  # 7 or 6
    end: Int32,
    lane: Int32,
    block_id: Int32,  # of the lane's slot of the selection; -1 past its width
):
    """The row's valid blocks, each once, ascending. One lane is one slot. Returns how many there are.

    A page number outside the cache becomes -1; a block with no page at all is left out.
    """
    inside, entry, second = block_entries(block_id, end, page_bits)
    page_a = ptx.load_i32_if(page_row + Int64(entry) * 4, Int32(inside), -1)
    page_b = ptx.load_i32_if(page_row + Int64(second) * 4, Int32(inside & (second < page_width)), -1)
    return rank_blocks(table, pages, lane, block_id, inside, page_a, page_b)


def block_entries(block_id, end, page_bits):
    """Whether a block begins before `end`, and the page-table entries of its halves."""
    inside = (block_id >= 0) & (block_id < ((end + 127) >> BLOCK_BITS))
    entry = block_id << (BLOCK_BITS - page_bits)
    return inside, entry, entry + (1 - (page_bits - 6))  # a page of 128 holds both halves


@cute.jit
def rank_blocks(
    table: Int32, pages: Int32, lane: Int32, block_id: Int32, inside: cutlass.Boolean, page_a: Int32, page_b: Int32
):
    """As `list_blocks`, of what has been read for the lane's block."""
    key = ptx.select(inside, block_id, Int32(NO_BLOCK))
    before = ptx.shuffle_up(key, 1)
    unordered = ptx.ballot(Int32((lane > 0) & (before >= key) & inside))
    page_a = ptx.select(page_a < pages, ptx.maximum_i32(page_a, Int32(-1)), Int32(-1))
    page_b = ptx.select(page_b < pages, ptx.maximum_i32(page_b, Int32(-1)), Int32(-1))
    listed = Int32(inside & ((page_a & page_b) != -1))
    lower = ptx.lanes_below()
    rank = ptx.count_bits(ptx.ballot(listed) & lower)  # right if ids ascend, holes or not behind them
    if unordered != 0:
        listed = ptx.select((ptx.lanes_with_the_same(key) & lower) == 0, listed, Int32(0))
        key = ptx.select(listed != 0, key, Int32(NO_BLOCK))
        rank = Int32(0)
        for slot in cutlass.range_constexpr(32):
            rank = rank + Int32(ptx.shuffle(key, slot) < key)
    if listed != 0:
        smem.store_i32x4(table + rank * ENTRY_BYTES, [block_id, page_a, page_b, Int32(0)])
    votes = ptx.ballot(listed)
    ptx.warp_barrier()
    return ptx.count_bits(votes)
