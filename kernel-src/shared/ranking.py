"""The best blocks of a row as a list in one thread's registers: (key, id) in descending order, the lower id first among
equal keys. Keys are those of shared/select.py.

Blocks must be offered in ascending order of ids: an equal key then never passes one that is listed.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, select

NO_ID = 2147483647


class Rows(NamedTuple):
    """Where ids or scores go. A row of a tile is token << head_shift | head."""

    out: Int64
    token_stride: Int64  # bytes
    head_stride: Int64
    slot_stride: Int64
    head_shift: Int32  # log2 of the heads
    vectors: Int32  # 1: ids are contiguous, 16-byte aligned, and topk is a multiple of 4

    def place(self, token, head):
        return self.out + Int64(token) * self.token_stride + Int64(head) * self.head_stride

    def address(self, first_token, row):
        token = row >> self.head_shift
        head = row - (token << self.head_shift)
        return self.place(first_token + token, head)


class Choice(NamedTuple):
    topk: Int32
    local_blocks: Int32
    init_blocks: Int32


def clear(keys, ids, length):
    for j in range(length):
        keys[j] = Int32(select.NONE)
        ids[j] = Int32(NO_ID)


def insert(keys, ids, length, key, block):
    """Offer a block with key > keys[length - 1]."""
    above = [key > keys[j] for j in range(length)]
    new_keys, new_ids = [ptx.maximum_i32(keys[0], key)], [ptx.select(above[0], block, ids[0])]
    for j in range(1, length):
        new_keys.append(ptx.maximum_i32(keys[j], ptx.minimum_i32(keys[j - 1], key)))
        new_ids.append(ptx.select(above[j - 1], ids[j - 1], ptx.select(above[j], block, ids[j])))
    for j in range(length):
        keys[j], ids[j] = new_keys[j], new_ids[j]


def merge(keys, ids, other_keys, other_ids, length):
    """keys, ids = the best of both lists. Every id of the other list is above every id of this one."""
    pairs = []
    for j in range(length):
        stays = keys[j] >= other_keys[length - 1 - j]
        pairs.append(
            (
                ptx.select(stays, keys[j], other_keys[length - 1 - j]),
                ptx.select(stays, ids[j], other_ids[length - 1 - j]),
            )
        )
    # Bitonic: a falling and a rising run. Half-cleaners put it in order.
    distance = length // 2
    while distance:
        for j in range(length):
            if j & distance == 0:
                (key, block), (far_key, far_block) = pairs[j], pairs[j + distance]
                ordered = (key > far_key) | ((key == far_key) & (block < far_block))
                pairs[j] = ptx.select(ordered, key, far_key), ptx.select(ordered, block, far_block)
                pairs[j + distance] = ptx.select(ordered, far_key, key), ptx.select(ordered, far_block, block)
        distance //= 2
    for j in range(length):
        keys[j], ids[j] = pairs[j]


def sorting_network(n):
    """Comparators (low, high) of Batcher's odd-even merge sort, n a power of two."""
    comparators, p = [], 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        comparators.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return comparators


@cute.jit
def write_selection(
    rows: Rows,
    place: Int64,  # of the row
    ids: cute.Tensor,
    length: cutlass.Constexpr,
    candidates: Int32,
    choice: Choice,
):
    """The ids of a row with more than topk candidates, ascending: the forced ones and as many of the list as there is
    room for."""
    topk, local_blocks, init_blocks = choice
    room = topk - local_blocks - init_blocks
    chosen = []
    for j in cutlass.range_constexpr(length):
        forced = Int32(j) - room
        block = ptx.select(forced < init_blocks, forced, candidates - local_blocks + (forced - init_blocks))
        block = ptx.select(forced < init_blocks + local_blocks, block, Int32(NO_ID))
        chosen.append(ptx.select(forced < 0, ids[j], block))
    for low, high in sorting_network(length):
        a, b = chosen[low], chosen[high]
        chosen[low], chosen[high] = ptx.minimum_i32(a, b), ptx.maximum_i32(a, b)
    if rows.vectors != 0:
        for j in cutlass.range_constexpr(0, length, 4):
            if j < topk:
                ptx.store_words(place + Int64(4 * j), chosen[j : j + 4])
    else:
        for j in cutlass.range_constexpr(length):
            if j < topk:
                ptx.store_words(place + Int64(j) * rows.slot_stride, [chosen[j]])
