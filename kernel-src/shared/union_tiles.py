"""The list warp of sm90/ and sm100/prefill_union.py: which tiles a CTA takes, and what its other warps must know of each.

It looks at 32 tiles at a time, leaves out empty ones and those of requests that take the other formulation, and publishes
one tile after the other. Where a CTA has few tiles, it takes every second one by its number of blocks, so that all CTAs end
at about the same time. What is published: a record and, for each consumer warpgroup, the blocks that one of its 4 tokens
chose. Two records and lists take turns. Everybody else follows what is published; a negative number of blocks is the end.

A NaN or infinity in V reaches, as 0 * NaN, tokens of the tile that don't see it. Consumers therefore report tokens whose
results are NaN in the record that they give back, and the list warp publishes the tile once more for each of these alone:
the blocks that it chose, V's rows behind what it sees zero. What a token then gets are the bits of a tile without the NaN,
unless it sees it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, ptx, smem, softmax

TOKENS, BLOCK = 8, 128
LIST_ENTRIES = 128  # 4 tokens x 32
RECORD = 96
# Tiles given out in pairs: at most so many rounds of one tile a CTA. Keys of a round: blocks << 8 | CTA, 5 a lane.
PAIRED_ROUNDS, PER_LANE, KEY_BITS = 16, 5, 18
# Words of a record in shared memory.
COUNT, COUNT_A, COUNT_B, FIRST, TOKEN_MASK, END, LENGTH, SCALE, V_SCALE, TAIL, HEAD, SLOT, ENTRIES, ALONE = range(14)
REPORTS = 16  # the first of 8: not 0 where a token got a NaN
# Of a list entry: position | tokens << 8 | no first half << 12 | no second half << 13 | look closer << 14 | block << 16
EDGE_BITS = 7 << 12


class Lists(NamedTuple):
    """What neutral/union.py wrote, and of which shape."""

    tiles: Int64
    counts: Int64
    words: Int64
    pages: Int64
    choice: Int64  # 0: all requests are this kernel's
    slots: Int32
    heads: Int32
    requests: Int32
    page_bits: Int32  # 7 or 6
    capacity: Int32
    causal: Int32

    def rows(self, head, slot):
        """(words, pages) of a tile and KV head."""
        item = (Int64(head) * Int64(self.slots) + Int64(slot)) * Int64(self.capacity) * 4
        return self.words + item, self.pages + (item << Int64(7 - self.page_bits))


class Scales(NamedTuple):
    k_scale: Int64  # 0: one
    v_scale: Int64
    k_scale_head: Int64  # bytes
    v_scale_head: Int64
    softmax_scale: Float32


class UnionTiles:
    """What a kernel does with lists and records; `barriers`, `lists_at` and `records_at` are set by UnionLoaders."""

    # ---- published tiles

    def next_count(self, base, buffer, turn):
        """Blocks of the next tile; negative: there is none."""
        smem.mbarrier_wait(base + self.barriers["list_full"] + buffer * 8, turn)
        return smem.load_i32(base + self.records_at + buffer * RECORD)

    def has_nan(self, values):
        """Or infinities of both signs."""
        total = softmax.tree_sum(values)
        return Int32(total != total)

    def report(self, record, token, lane, bad):
        """The token's result has a NaN. Before `record_read`."""
        smem.store_i32_if(record + 4 * (REPORTS + token), Int32(1), Int32((lane == 0) & (bad != 0)))

    def record_read(self, base, buffer, lane):
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(base + self.barriers["list_empty"] + buffer * 8, Int32(lane == 0))

    # ---- the list warp

    @cute.jit
    def publish_lists(
        self,
        base: Int32,
        lists: Lists,
        scales: Scales,
        cta: Int32,
        ctas: Int32,
        lane: Int32,
    ):
        buffer, turn = Int32(0), Int32(1)
        counts, slots = lists.counts, lists.slots
        total = slots * lists.heads
        rounds = (total + ctas - 1) // ctas
        paired = self.is_paired(lists.choice, total, lists.requests, ctas)
        step = ptx.select(paired != 0, Int32(1), Int32(32))  # rounds
        for first_round in cutlass.range(0, rounds + step, step, unroll=1):
            # -- 32 tiles at once, or one: which of them are this kernel's. At last two without tokens, the end in the
            # second, so that both records of tiles have come back with what is to be published again.
            ending = Int32(first_round >= rounds)
            position = first_round * ctas + cta
            if (paired & first_round & (ending ^ 1)) != 0:  # an odd one
                position = first_round * ctas + self.partner(counts, slots, total, first_round * ctas, cta, ctas, lane)
            valid = Int32((lane < step) & (position + lane * ctas < total))
            votes = ptx.ballot(self.is_mine(lists, position + lane * ctas, valid))
            votes = ptx.select(ending != 0, Int32(3), votes)
            while votes != 0:
                x = ptx.select(ending != 0, Int32(0), position + ptx.lowest_bit(votes) * ctas)
                votes = votes & (votes - 1)
                head = ptx.divide_u32(x, slots)
                slot = slots - 1 - (x - head * slots)
                facts = self.facts(lists, scales, head, slot)
                buffer, turn = self.settle(base, lists, scales, buffer, turn, lane)
                first, tile_tokens, end, length, entries, scale, scale_v = facts
                if ending != 0:
                    entries, tile_tokens = Int32(0), Int32(0)
                facts = (first, tile_tokens, end, length, entries, scale, scale_v)
                least = ptx.select((ending != 0) & (votes == 0), Int32(-1), Int32(0))
                self.publish(base, lists, head, slot, *facts, Int32(255), Int32(-1), least, buffer, lane)
                buffer = buffer ^ 1
                turn = turn ^ (buffer ^ 1)

    def facts(self, lists, scales, head, slot):
        """Of a tile: first token, tokens, end, length, entries of its list, scale of logits to log2 units and of V."""
        k_scale, v_scale, k_scale_head, v_scale_head, softmax_scale = scales
        record = ptx.load_fresh_16_bytes_if(lists.tiles + Int64(slot) * 32, Int32(1))
        entries = ptx.load_i32(lists.counts + (Int64(head) * Int64(lists.slots) + Int64(slot)) * 4) & 1023
        scale = ptx.load_f32_or_one(k_scale + Int64(head) * k_scale_head) * softmax_scale
        scale = softmax.finite_or_nan(scale * Float32(softmax.LOG2_E))
        return (*record, entries, scale, ptx.load_f32_or_one(v_scale + Int64(head) * v_scale_head))

    @cute.jit
    def settle(
        self,
        base: Int32,
        lists: Lists,
        scales: Scales,
        buffer: Int32,
        turn: Int32,
        lane: Int32,
    ):
        """Waits for a record to come back. Tokens that it reports are published again, each alone, and so are those of the
        other record, which comes back meanwhile. Returns where the next tile goes: (buffer, turn)."""
        again, head, slot = self.came_back(base, buffer, turn, lane)
        later, later_head, later_slot = Int32(0), Int32(0), Int32(0)
        while again != 0:
            token = ptx.lowest_bit(again)
            again = again & (again - 1)
            facts = self.facts(lists, scales, head, slot)
            self.publish(base, lists, head, slot, *facts, Int32(1) << token, token, Int32(0), buffer, lane)
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            more, more_head, more_slot = self.came_back(base, buffer, turn, lane)
            if more != 0:
                later, later_head, later_slot = more, more_head, more_slot
            if again == 0:
                again, head, slot = later, later_head, later_slot
                later = Int32(0)
        return buffer, turn

    def came_back(self, base, buffer, turn, lane):
        """(tokens to be published again, head, slot) of a record, once everybody has read it."""
        smem.mbarrier_wait(base + self.barriers["list_empty"] + buffer * 8, turn)
        record = base + self.records_at + buffer * RECORD
        reported = smem.load_i32(record + 4 * REPORTS + (lane & (TOKENS - 1)) * 4)
        alone = smem.load_i32(record + 4 * ALONE)
        again = ptx.select(alone != 0, Int32(0), ptx.ballot(reported) & smem.load_i32(record + 4 * TOKEN_MASK))
        return again, smem.load_i32(record + 4 * HEAD), smem.load_i32(record + 4 * SLOT)

    @cute.jit
    def publish(
        self,
        base: Int32,
        lists: Lists,
        head: Int32,
        slot: Int32,
        first: Int32,
        tile_tokens: Int32,
        end: Int32,
        length: Int32,
        entries: Int32,
        scale: Float32,
        scale_v: Float32,
        tokens: Int32,  # a bit each
        alone: Int32,  # the token, if there is but one, which is published again; or -1
        least: Int32,  # published where there is no block
        buffer: Int32,
        lane: Int32,
    ):
        """A record and lists, into a buffer that is free."""
        wide = 7 - lists.page_bits
        words_row, pages_row = lists.rows(head, slot)
        count, count_a, count_b, tail = Int32(0), Int32(0), Int32(0), Int32(BLOCK)
        sees = ptx.select(lists.causal != 0, end, length)  # what the first token sees; the others see more
        # What is seen by some token at all.
        seen = ptx.select((alone >= 0) & (lists.causal != 0), ptx.clamp(end + alone, Int32(0), length), length)
        for i in cutlass.range(0, entries, 32, unroll=1):
            at = i + lane
            here = Int32(at < entries)
            word = ptx.load_i32_if(words_row + Int64(at) * 4, here, 0)
            bad = Int32(0)
            if wide != 0:
                page_a, page_b = ptx.load_i32_batch([(pages_row + Int64(at) * 8 + 4 * k, here, 0) for k in range(2)])
                bad = ptx.select(page_a < 0, Int32(1 << 12), Int32(0))
                bad = bad | ptx.select(page_b < 0, Int32(1 << 13), Int32(0))
            block, chosen = word & 0xFFFF, (word >> 24) & tokens
            special = ((block << 7) + BLOCK > sees) | (Int32(scale >= Float32(0.0)) == 0)
            edge = ptx.select(special, Int32(1 << 14), Int32(0))
            votes = ptx.ballot(chosen)
            entry = (count + ptx.count_bits(votes & ptx.lanes_below())) | bad | edge | (block << 16)
            tail = ptx.minimum_i32(tail, ptx.select(chosen != 0, seen - (block << 7), Int32(BLOCK)))
            halves = [chosen & 15, chosen >> 4]
            count_a = self.append(base, buffer * 2, count_a, entry | (halves[0] << 8), halves[0])
            count_b = self.append(base, buffer * 2 + 1, count_b, entry | (halves[1] << 8), halves[1])
            count = count + ptx.count_bits(votes)
        tail = ptx.warp_min(tail)
        if lane == 0:
            there = base + self.records_at + buffer * RECORD
            tokens = tokens & ((Int32(1) << tile_tokens) - 1)
            smem.store_i32x4(there, [count | least, count_a, count_b, first])
            smem.store_i32x4(there + 16, [tokens, sees, length, ptx.f32_bits(scale)])
            smem.store_i32x4(there + 32, [ptx.f32_bits(scale_v), tail, head, slot])
            smem.store_i32x2(there + 48, entries, Int32(alone >= 0))
            for half in cutlass.range_constexpr(2):
                smem.store_i32x4(there + 4 * REPORTS + 16 * half, [Int32(0)] * 4)
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(base + self.barriers["list_full"] + buffer * 8, Int32(lane == 0))

    @cute.jit
    def is_paired(self, choice: Int64, total: Int32, requests: Int32, ctas: Int32):
        """Whether tiles are given out in pairs; the same for all CTAs. Not where another formulation may take some."""
        paired = Int32((total <= PAIRED_ROUNDS * ctas) & (total > ctas) & (ctas <= 32 * PER_LANE))
        if choice != 0:
            paired = ptx.select(requests == 1, paired, Int32(0)) & (ptx.load_i32(choice) ^ 1)
        return paired

    def costs(self, counts, slots, total, first, ctas, lane):
        """Of the tiles of a round: what they take, above their numbers; -1 in a lane that has none."""
        places = []
        for i in range(PER_LANE):
            x = first + i * 32 + lane
            valid = Int32((i * 32 + lane < ctas) & (x < total))
            head = ptx.divide_u32(ptx.select(valid != 0, x, Int32(0)), slots)
            slot = slots - 1 - (x - head * slots)
            item = Int64(head) * Int64(slots) + Int64(slot)
            places.append((counts + item * 4, valid, 0))
        words = ptx.load_i32_batch(places)
        keys = [((((w >> 10) & 1023) + (w & 1023)) << 8) | (i * 32 + lane) for i, w in enumerate(words)]
        return [ptx.select(i * 32 + lane < ctas, key, Int32(-1)) for i, key in enumerate(keys)]

    @cute.jit
    def partner(self, counts: Int64, slots: Int32, total: Int32, first: Int32, cta: Int32, ctas: Int32, lane: Int32):
        """Which tile of the round that starts at `first` this CTA takes: after the n-th lightest of the round before,
        the n-th heaviest."""
        before = self.costs(counts, slots, total, first - ctas, ctas, lane)
        keys = self.costs(counts, slots, total, first, ctas, lane)
        own = Int32(-1)
        for i in cutlass.range_constexpr(PER_LANE):
            own = ptx.select(i * 32 + lane == cta, before[i], own)
        own = -ptx.warp_min(-own)
        lighter = Int32(0)
        for key in before:
            lighter = lighter + Int32((key >= 0) & (key < own))
        rank = ptx.warp_sum(lighter)
        # The largest number that more than `rank` keys reach: one of them.
        found = Int32(0)
        for i in cutlass.range(KEY_BITS, unroll=1):
            candidate = found | (Int32(1 << (KEY_BITS - 1)) >> i)
            reach = Int32(0)
            for key in keys:
                reach = reach + Int32(key >= candidate)
            found = ptx.select(ptx.warp_sum(reach) > rank, candidate, found)
        return found & 255

    def is_mine(self, lists, x, valid):
        """Whether a tile has tokens and their request takes this formulation."""
        slots, choice = lists.slots, lists.choice
        x = ptx.select(valid != 0, x, Int32(0))
        record = lists.tiles + Int64(slots - 1 - (x - ptx.divide_u32(x, slots) * slots)) * 32
        tile_tokens, request = ptx.load_i32_batch([(record + at, valid, 0) for at in (4, 16)])
        listens = (choice != 0) & (request < lists.requests)
        at = choice + Int64(ptx.select(listens, request, Int32(0))) * 4
        other = ptx.load_i32_if(at, Int32(listens), 0)
        return Int32((tile_tokens > 0) & (other == 0))

    def append(self, base, which, count, entry, chosen):
        votes = ptx.ballot(Int32(chosen != 0))
        position = count + ptx.count_bits(votes & ptx.lanes_below())
        smem.store_i32_if(base + self.lists_at + which * (LIST_ENTRIES * 4) + position * 4, entry, Int32(chosen != 0))
        return count + ptx.count_bits(votes)
