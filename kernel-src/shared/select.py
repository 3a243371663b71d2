"""Exact selection of the k largest of the keys that a warp holds, k <= 32. Straight-line for all but crowded inputs.

Keys are Int32 that order as the scores do. Key j of lane l has position 32 j + l; among equal keys the lower position
wins, so positions must ascend with block ids. NONE marks an empty place, FORCED outranks every score. What is selected
goes to a list in shared memory: 32 pairs (key, id) in order of position, NONE after the last.

How: the k-th largest of the 32 lane maxima is a lower bound of the k-th largest key that few keys reach (22 of 256 on
average for k = 16). If they fit into the 32 lanes they are gathered, one a lane, and ranked against each other.
Otherwise (many equal scores; k = 32) the k-th largest key is built bit by bit from counts. Both ways are exact, so the
answer is.
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


def load_piece(keys, ids, slots, row, first, last, local_from, init, lane):
    """Ids and keys of the blocks first .. first + 32 * slots - 1 below `last` of a row of scores into the slots 1 ..; slot 0
    is the list's."""
    for j in range(1, slots + 1):
        ids[j] = first + (j - 1) * 32 + lane
    inside = [ids[j] < last for j in range(1, slots + 1)]
    scores = [ptx.load_f32_coherent_if(row + Int64(ids[1 + j]) * 4, Int32(inside[j]), NONE_SCORE) for j in range(slots)]
    for j in range(slots):
        block = ids[1 + j]
        key = ptx.select((block >= local_from) | (block < init), Int32(FORCED), key_of(scores[j]))
        keys[1 + j] = ptx.select(inside[j], key, Int32(NONE))


def load_lists(keys, ids, count, base, lane):
    """Slot j = the list of warp j."""
    for j in range(count):
        keys[j], ids[j] = smem.load_i32x2(base + j * LIST_BYTES + lane * PAIR)


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
