"""Exact selection of the k largest keys of a row, k <= 32, by the warps of a CTA or by one warp.

Keys are Int32 that order as the scores do. A key's position is its place in the order of block ids; among equal keys the
lower position wins. NONE marks an empty place, FORCED outranks every score.

How: let every key belong to one of 32 classes. The k-th largest of the 32 class maxima is a lower bound of the k-th
largest key that few keys reach (22 of a random row for k = 16). If they fit into the 32 lanes they are gathered in order
of position, one a lane, and ranked against each other (`choose`: a CTA's warps share all of it; classes are lanes).
Otherwise (many equal scores; k = 32), and for rows that do not fit into the registers of the CTA, each warp keeps a list
of its k largest in shared memory and one warp selects among the lists (`select_largest`: classes are lanes, too). There
the k-th largest of a crowd is built bit by bit from counts. All ways are exact, so the answer is.

A list: 32 pairs (key, id) in order of position, NONE after the last.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, smem

NONE = -(1 << 31)
FORCED = (1 << 31) - 1
PAIR = 8  # bytes of a list entry
LIST_BYTES = 32 * PAIR
NONE_SCORE = "0fFF800000"


def key_of(score):
    """Order-preserving: NaN as -inf, -0.0 as 0.0."""
    bits = ptx.f32_bits(ptx.canonical(score))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def larger(a, b):
    return ptx.select(a > b, a, b)


def largest_of(values):
    values = list(values)
    while len(values) > 1:
        pairs = [larger(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


def kth_of_lanes(x, k):
    """The k-th largest of the 32 x: the smallest of those with fewer than k larger ones."""
    counts = [Int32(0)] * 4  # four chains
    for lane in range(32):
        counts[lane % 4] = counts[lane % 4] + Int32(ptx.shuffle(x, Int32(lane)) > x)
    above = (counts[0] + counts[1]) + (counts[2] + counts[3])
    return ptx.warp_min(ptx.select(above < k, x, Int32(FORCED)))


def count_at_least(keys, slots, bound):
    mine = Int32(0)
    for j in range(slots):
        mine = mine + Int32(keys[j] >= bound)
    return ptx.warp_sum(mine)


def write_list(keys, ids, slots, k, kth, list_address, lane):
    """The k largest, given the k-th largest, to the list. All of it is written."""
    below = ptx.lanes_below()
    above = Int32(0)
    for j in range(slots):
        above = above + ptx.count_bits(ptx.ballot(keys[j] > kth))
    ties_left = ptx.select(kth == NONE, Int32(0), k - above)
    taken, ties = Int32(0), Int32(0)
    for j in range(slots):
        equal = keys[j] == kth
        votes = ptx.ballot(equal)
        wins = (keys[j] > kth) | (equal & (ties + ptx.count_bits(votes & below) < ties_left))
        ties = ties + ptx.count_bits(votes)
        won = ptx.ballot(wins)
        place = taken + ptx.count_bits(won & below)
        taken = taken + ptx.count_bits(won)
        smem.store_i32x2_if(list_address + place * PAIR, keys[j], ids[j], Int32(wins))
    smem.store_i32x2_if(list_address + lane * PAIR, Int32(NONE), Int32(-1), Int32(lane >= taken))


def load_piece(keys, ids, slots, row, first, last, local_from, init, lane, skip=1):
    """Ids and keys of the blocks first .. first + 32 * slots - 1 below `last` of a row of scores into the slots from `skip`
    on."""
    for j in range(slots):
        ids[skip + j] = first + j * 32 + lane
    inside = [ids[skip + j] < last for j in range(slots)]
    scores = [
        ptx.load_f32_coherent_if(row + Int64(ids[skip + j]) * 4, Int32(inside[j]), NONE_SCORE) for j in range(slots)
    ]
    for j in range(slots):
        block = ids[skip + j]
        key = ptx.select((block >= local_from) | (block < init), Int32(FORCED), key_of(scores[j]))
        keys[skip + j] = ptx.select(inside[j], key, Int32(NONE))


def load_lists(keys, ids, count, base, lane):
    """Slot j = the list of warp j."""
    for j in range(count):
        keys[j], ids[j] = smem.load_i32x2(base + j * LIST_BYTES + lane * PAIR)


# ---- a CTA a row; `board`: shared memory of board_bytes(warps)


def board_bytes(warps):
    return warps * 32 * 4 * 2 + 64 + LIST_BYTES


def share_counts(counts, x, warps, warp, lane, before):
    """For x of this lane: how many of the 32 lanes' x are larger, or equal where `before` says that lower lanes win.
    Each warp counts a part. `counts`: 128 bytes of shared memory a warp."""
    each = 32 // warps
    mine = Int32(0)
    for i in range(each):
        other = warp * each + i
        theirs = ptx.shuffle(x, other)
        ahead = (theirs > x) | ((theirs == x) & (other < lane)) if before else theirs > x
        mine = mine + Int32(ahead)
    smem.store_i32(counts + (warp * 32 + lane) * 4, mine)
    ptx.barrier()
    parts = [smem.load_i32(counts + (w * 32 + lane) * 4) for w in range(warps)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@cute.jit
def choose(
    keys: cute.Tensor,
    ids: cute.Tensor,
    slots: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    k: Int32,
    out: Int64,
    out_stride: Int64,
    board: Int32,
    warp: Int32,
    lane: Int32,
):
    """Writes the ids of the k largest of more than k keys, ascending, and returns 1; or 0, having written nothing, if too
    many keys reach the bound. The slots of a warp and the warps are in order of position. All warps come here together."""
    maxima, counts = board, board + warps * 128
    totals, pairs = board + warps * 256, board + warps * 256 + 64
    smem.store_i32(maxima + (warp * 32 + lane) * 4, largest_of(keys[j] for j in range(slots)))
    ptx.barrier()
    best = largest_of(smem.load_i32(maxima + (w * 32 + lane) * 4) for w in range(warps))
    above = share_counts(counts, best, warps, warp, lane, before=False)
    bound = ptx.warp_min(ptx.select(above < k, best, Int32(FORCED)))
    bound = ptx.select(bound == NONE, Int32(NONE + 1), bound)
    votes = [ptx.ballot(keys[j] >= bound) for j in range(slots)]
    mine = Int32(0)
    for j in cutlass.range_constexpr(slots):
        mine = mine + ptx.count_bits(votes[j])
    if lane == 0:
        smem.store_i32(totals + warp * 4, mine)
    ptx.barrier()
    place, total = Int32(0), Int32(0)
    for w in cutlass.range_constexpr(warps):
        count = smem.load_i32(totals + w * 4)
        place = place + ptx.select(warp > w, count, Int32(0))
        total = total + count
    fits = Int32(total <= 32)
    if total <= 32:
        below = ptx.lanes_below()
        for j in cutlass.range_constexpr(slots):
            at = pairs + (place + ptx.count_bits(votes[j] & below)) * PAIR
            smem.store_i32x2_if(at, keys[j], ids[j], Int32(keys[j] >= bound))
            place = place + ptx.count_bits(votes[j])
        ptx.barrier()
        pair = smem.load_i32x2(pairs + lane * PAIR)
        key = ptx.select(lane < total, pair[0], Int32(NONE))
        rank = share_counts(counts, key, warps, warp, lane, before=True)
        if warp == 0:
            wins = (lane < total) & (rank < k)
            won = ptx.ballot(wins)
            if wins:
                ptx.store_words(out + Int64(ptx.count_bits(won & below)) * out_stride, [pair[1]])
    return fits


@cute.jit
def select_row(
    out: Int64,
    out_stride: Int64,
    scores: Int64,
    n: Int32,  # candidates, more than k
    k: Int32,
    local_from: Int32,
    init: Int32,
    slots: cutlass.Constexpr,
    warps: cutlass.Constexpr,
    base: Int32,  # row_bytes(warps) of shared memory
    warp: Int32,
    lane: Int32,
):
    """The whole selection of a row by all warps of a CTA, which end at a barrier."""
    board = base + 2 * warps * LIST_BYTES
    own_list, scratch = base + warp * LIST_BYTES, base + (warps + warp) * LIST_BYTES
    keys = cute.make_rmem_tensor(cute.make_layout(max(slots + 1, warps)), Int32)
    ids = cute.make_rmem_tensor(cute.make_layout(max(slots + 1, warps)), Int32)
    chosen = Int32(0)
    if n <= 32 * slots * warps:
        share = ((n + (32 * warps - 1)) // (32 * warps)) * 32
        last = ptx.minimum_i32(warp * share + share, n)
        load_piece(keys, ids, slots, scores, warp * share, last, local_from, init, lane, skip=0)
        chosen = choose(keys, ids, slots, warps, k, out, out_stride, board, warp, lane)
    if chosen == 0:
        # Contiguous shares in whole pieces; the list so far is slot 0 of the next piece.
        piece = 32 * slots
        share = ((n + (piece * warps - 1)) // (piece * warps)) * piece
        begin = warp * share
        last = ptx.minimum_i32(begin + share, n)
        smem.store_i32x2(own_list + lane * PAIR, Int32(NONE), Int32(-1))
        ptx.warp_barrier()
        for first in cutlass.range(begin, last, piece, unroll=1):
            load_piece(keys, ids, slots, scores, first, last, local_from, init, lane)
            keys[0], ids[0] = smem.load_i32x2(own_list + lane * PAIR)
            select_largest(keys, ids, slots + 1, k, own_list, scratch, lane)
        ptx.barrier()
        if warp == 0:
            load_lists(keys, ids, warps, base, lane)
            select_largest(keys, ids, warps, k, own_list, scratch, lane)
            pair = smem.load_i32x2(own_list + lane * PAIR)
            if lane < k:
                ptx.store_words(out + Int64(lane) * out_stride, [pair[1]])
    ptx.barrier()


def row_bytes(warps):
    return 2 * warps * LIST_BYTES + board_bytes(warps)


# ---- one warp


@cute.jit
def select_largest(
    keys: cute.Tensor,
    ids: cute.Tensor,
    slots: cutlass.Constexpr,
    k: Int32,
    list_address: Int32,
    scratch: Int32,
    lane: Int32,
):
    """The list of the k largest of 32 * slots keys. `scratch`: LIST_BYTES of shared memory of this warp, not the
    list."""
    bound = kth_of_lanes(largest_of(keys[j] for j in range(slots)), k)
    bound = ptx.select(bound == NONE, Int32(NONE + 1), bound)
    below = ptx.lanes_below()
    total = Int32(0)
    for j in cutlass.range_constexpr(slots):
        takes = keys[j] >= bound
        votes = ptx.ballot(takes)
        place = total + ptx.count_bits(votes & below)
        smem.store_i32x2_if(scratch + place * PAIR, keys[j], ids[j], Int32(takes & (place < 32)))
        total = total + ptx.count_bits(votes)
    ptx.warp_barrier()
    if total <= 32:
        pair = smem.load_i32x2(scratch + lane * PAIR)
        candidate = ptx.select(lane < total, pair[0], Int32(NONE))
        write_list([candidate], [pair[1]], 1, k, kth_of_lanes(candidate, k), list_address, lane)
    else:
        kth = Int32(NONE)
        for bit in cutlass.range(32, unroll=1):
            trial = kth + (Int32(1) << (31 - bit))  # the first step leads from the lowest key to 0
            kth = ptx.select(count_at_least(keys, slots, trial) >= k, trial, kth)
        write_list(keys, ids, slots, k, kth, list_address, lane)
    ptx.warp_barrier()
