"""What feeds the consumers of sm90/ and sm100/prefill_union.py: shared memory, mbarriers, and the warps that load. They
follow the tiles that the list warp publishes (shared/union_tiles.py).

A 16-bit cache is copied by tensor map to where the products read it, K and V by a warp each. A float8 cache is copied as it
is and widened exactly to fp16 by two warps an operand; one warp then issues all copies, of Q too.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import hopper, mma, ptx, smem, tma
from shared.union_tiles import (
    ALONE,
    BLOCK,
    ENTRIES,
    FIRST,
    HEAD,
    LIST_ENTRIES,
    RECORD,
    SLOT,
    TAIL,
    TOKEN_MASK,
    Lists,
    Scales,
    UnionTiles,
)

GROUP, DIM = 16, 128
LOADER_WARPS, CONSUMERS = 4, 2
TILE = BLOCK * DIM * 2  # bytes of K or V of a block
HALF = TILE // 2  # 64 columns
RAW_STAGES, RAW_TILE = 2, BLOCK * DIM  # float8 as it comes
WIDENERS = 2  # warps an operand
LOADS_AHEAD = 2


class UnionLoaders(UnionTiles):
    """The loaders' half of a variant: KV dtype."""

    def __init__(self, kv_dtype):
        self.dtype = kv_dtype
        self.fp8 = kv_dtype in ("e4m3", "e5m2")
        self.mma_dtype = "bf16" if kv_dtype == "bf16" else "f16"
        self.stages = 2 if self.fp8 else 3
        # float8: a warpgroup between loaders and consumers widens, two warps an operand.
        self.first_consumer = LOADER_WARPS + (2 * WIDENERS if self.fp8 else 0)
        self.threads = 32 * (self.first_consumer + 4 * CONSUMERS)
        # What loaders and consumers get of the registers, which are all of them: (40 + 2 * 232) * 128 of a launch with 168
        # a thread, (2 * 48 + 2 * 208) * 128 of one with 128. The consumers use 198.
        self.registers = (48, 208) if self.fp8 else (40, 232)
        self.q_at = 0
        self.k_at = TILE
        self.v_at = self.k_at + self.stages * TILE
        at = self.v_at + self.stages * TILE
        self.raw_at = {"k": at, "v": at + RAW_STAGES * RAW_TILE}
        if self.fp8:
            at += 2 * RAW_STAGES * RAW_TILE
        self.lists_at = at
        self.records_at = at + 2 * CONSUMERS * LIST_ENTRIES * 4
        at = self.records_at + 2 * RECORD
        # Mbarriers: name -> (how many, arrivals of a phase)
        readers = 4 * CONSUMERS + (1 + 2 * WIDENERS if self.fp8 else 3)  # warps that read what is published
        names = {"q_full": (1, 1), "q_empty": (1, 4 * CONSUMERS), "list_full": (2, 1), "list_empty": (2, readers)}
        for operand in "kv":
            names[operand + "_full"] = self.stages, WIDENERS if self.fp8 else 1
            names[operand + "_empty"] = self.stages, 4 * CONSUMERS
            if self.fp8:
                names[operand + "_raw_full"], names[operand + "_raw_empty"] = (RAW_STAGES, 1), (RAW_STAGES, WIDENERS)
        if not self.fp8:
            names["edge"] = 1, 1
        self.barriers, self.arrivals = {}, {}
        for name, (count, arrivals) in names.items():
            self.barriers[name] = at
            self.arrivals.update({at + 8 * i: arrivals for i in range(count)})
            at += 8 * count
        self.dynamic_smem = at
        assert self.dynamic_smem <= 232448

    def init_barriers(self, base):
        for at, arrivals in self.arrivals.items():
            smem.mbarrier_init(base + at, arrivals)
        for buffer in range(2):  # nothing to report of a tile that there was not
            smem.store_i32(base + self.records_at + buffer * RECORD + 4 * ALONE, Int32(1))

    # ---- positions in the ring of stages; they start below 2 * stages and grow by at most 256 a tile

    def ring_of(self, position):
        """(stage, parity)"""
        rounds = (position * 171) >> 9 if self.stages == 3 else position >> 1
        return position - rounds * self.stages, rounds & 1

    def folded(self, position):
        """The same stage and parity, below 2 * stages."""
        rounds = (position * 171) >> 9 if self.stages == 3 else position >> 1
        return position - (rounds >> 1) * (2 * self.stages)

    def wait_full(self, base, name, position):
        stage, parity = self.ring_of(position)
        smem.mbarrier_wait(base + self.barriers[name] + stage * 8, parity)

    def release(self, base, name, position, lane):
        stage, _ = self.ring_of(position)
        hopper.mbarrier_arrive_if(base + self.barriers[name] + stage * 8, Int32(lane == 0))

    # ---- loaders

    @cute.jit
    def load(self, base: Int32, warp: Int32, lane: Int32, maps, lists: Lists, scales: Scales, cta: Int32, ctas: Int32):
        """What the loading warps do, each by its number."""
        q_map, k_map, v_map = maps
        if cutlass.const_expr(self.fp8):
            if warp == 0:
                self.issue_copies(base, q_map, k_map, v_map, lists, lane)
            widener = warp - LOADER_WARPS
            if (widener >= 0) & (widener < WIDENERS):
                self.widen_blocks(False, base, widener, lane)
            if widener >= WIDENERS:
                self.widen_blocks(True, base, widener - WIDENERS, lane)
        else:
            if warp == 0:
                self.load_blocks(False, base, k_map, lists, lane)
            if warp == 1:
                self.load_blocks(True, base, v_map, lists, lane)
            if warp == 3:
                self.load_queries(base, q_map, lane)
        if warp == 2:
            self.publish_lists(base, lists, scales, cta, ctas, lane)

    @cute.jit
    def load_blocks(
        self,
        is_v: cutlass.Constexpr,
        base: Int32,
        tensor_map: Int64,
        lists: Lists,
        lane: Int32,
    ):
        """Warp of K or of V: every block of every published tile."""
        name = "v" if is_v else "k"
        full, empty = base + self.barriers[name + "_full"], base + self.barriers[name + "_empty"]
        target = base + (self.v_at if is_v else self.k_at)
        stage, parity, edges = Int32(0), Int32(1), Int32(0)
        buffer, turn = Int32(0), Int32(0)
        count = self.next_count(base, buffer, turn)
        while count >= 0:
            record = base + self.records_at + buffer * RECORD
            head, slot = smem.load_i32(record + 4 * HEAD), smem.load_i32(record + 4 * SLOT)
            tail, entries = smem.load_i32(record + 4 * TAIL), smem.load_i32(record + 4 * ENTRIES)
            tokens = smem.load_i32(record + 4 * TOKEN_MASK)
            self.record_read(base, buffer, lane)
            wide = 7 - lists.page_bits
            rows = lists.rows(head, slot)
            page_a, page_b, word = self.load_pages(*rows, lane, entries, wide)
            for first in cutlass.range(0, entries, 32, unroll=1):
                next_a, next_b, next_word = self.load_pages(*rows, first + 32 + lane, entries, wide)
                votes = ptx.ballot((word >> 24) & tokens)
                while votes != 0:
                    i = ptx.lowest_bit(votes)
                    votes = votes & (votes - 1)
                    a, b = ptx.shuffle(page_a, i), ptx.shuffle(page_b, i)
                    count = count - 1
                    smem.mbarrier_wait(empty + stage * 8, parity)
                    there, bar = target + stage * TILE, full + stage * 8
                    if cutlass.const_expr(is_v):
                        partial = (count == 0) & (tail < BLOCK)
                        bar = ptx.select(partial, base + self.barriers["edge"], bar)
                    if lane == 0:
                        self.load_block(there, tensor_map, head, a, b, wide, bar)
                    if cutlass.const_expr(is_v):
                        if partial:
                            smem.mbarrier_wait(base + self.barriers["edge"], edges)
                            edges = edges ^ 1
                            self.clear_rows(there, tail, lane)
                            hopper.mbarrier_arrive_if(full + stage * 8, Int32(lane == 0))
                    stage = stage + 1
                    if stage == self.stages:
                        stage, parity = Int32(0), parity ^ 1
                page_a, page_b, word = next_a, next_b, next_word
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def load_pages(self, words, pages, at, entries, wide):
        """Of entry `at`: the page of the whole block, or those of its halves, and its word; 0 behind the last entry."""
        entry = pages + Int64(at) * Int64(4 << wide)
        valid = Int32(at < entries)
        places = [(entry, valid, -1), (entry + Int64(wide * 4), valid, -1), (words + Int64(at) * 4, valid, 0)]
        return ptx.load_i32_batch(places)

    @cute.jit
    def load_block(self, there: Int32, tensor_map: Int64, head: Int32, a: Int32, b: Int32, wide: Int32, bar: Int32):
        zero = Int32(0)
        smem.mbarrier_expect(bar, TILE)
        for half in cutlass.range_constexpr(2):
            tma.tma_load(there + half * HALF, tensor_map, [Int32(64 * half), zero, head, a], bar)
        if wide != 0:
            for half in cutlass.range_constexpr(2):
                at = there + half * HALF + HALF // 2
                tma.tma_load(at, tensor_map, [Int32(64 * half), zero, head, b], bar)

    @cute.jit
    def clear_rows(self, there: Int32, first: Int32, lane: Int32):
        """Zeros from key `first` on, before wgmma reads them."""
        for chunk in cutlass.range(first * 8 + lane, BLOCK * 8, 32, unroll=1):
            for half in cutlass.range_constexpr(2):
                smem.store_i32x4(there + half * HALF + chunk * 16, [Int32(0)] * 4)
        tma.fence_async()
        ptx.warp_barrier()

    @cute.jit
    def load_queries(self, base: Int32, tensor_map: Int64, lane: Int32):
        buffer, turn, parity = Int32(0), Int32(0), Int32(1)
        count = self.next_count(base, buffer, turn)
        while count >= 0:
            record = base + self.records_at + buffer * RECORD
            head, token = smem.load_i32(record + 4 * HEAD), smem.load_i32(record + 4 * FIRST)
            self.record_read(base, buffer, lane)
            if count > 0:
                smem.mbarrier_wait(base + self.barriers["q_empty"], parity)
                parity = parity ^ 1
                if lane == 0:
                    self.copy_queries(base, tensor_map, head, token)
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def copy_queries(self, base, tensor_map, head, token):
        full = base + self.barriers["q_full"]
        smem.mbarrier_expect(full, TILE)
        for half in range(2):
            at = base + self.q_at + half * HALF
            tma.tma_load(at, tensor_map, [Int32(64 * half), head * GROUP, token], full)

    # ---- loaders of a float8 cache

    @cute.jit
    def issue_copies(
        self,
        base: Int32,
        q_map: Int64,
        k_map: Int64,
        v_map: Int64,
        lists: Lists,
        lane: Int32,
    ):
        """One warp for all copies. Those of Q wait for the end of the tile before, so two blocks go ahead of them."""
        buffer, turn, q_parity = Int32(0), Int32(0), Int32(1)
        stage, parity = Int32(0), Int32(1)
        wide = 7 - lists.page_bits
        count = self.next_count(base, buffer, turn)
        while count >= 0:
            record = base + self.records_at + buffer * RECORD
            head, slot = smem.load_i32(record + 4 * HEAD), smem.load_i32(record + 4 * SLOT)
            token, entries = smem.load_i32(record + 4 * FIRST), smem.load_i32(record + 4 * ENTRIES)
            tokens = smem.load_i32(record + 4 * TOKEN_MASK)
            self.record_read(base, buffer, lane)
            rows = lists.rows(head, slot)
            ahead = ptx.minimum_i32(count, Int32(2))
            page_a, page_b, word = self.load_pages(*rows, lane, entries, wide)
            for first in cutlass.range(0, entries, 32, unroll=1):
                next_a, next_b, next_word = self.load_pages(*rows, first + 32 + lane, entries, wide)
                votes = ptx.ballot((word >> 24) & tokens)
                while votes != 0:
                    i = ptx.lowest_bit(votes)
                    votes = votes & (votes - 1)
                    a, b = ptx.shuffle(page_a, i), ptx.shuffle(page_b, i)
                    for operand in cutlass.range_constexpr(2):
                        name, tensor_map = ("k", "v")[operand], (k_map, v_map)[operand]
                        smem.mbarrier_wait(base + self.barriers[name + "_raw_empty"] + stage * 8, parity)
                        there = base + self.raw_at[name] + stage * RAW_TILE
                        if lane == 0:
                            self.copy_raw(there, tensor_map, head, a, b, wide, name, base, stage)
                    stage = stage + 1
                    if stage == RAW_STAGES:
                        stage, parity = Int32(0), parity ^ 1
                    ahead = ahead - 1
                    if ahead == 0:
                        smem.mbarrier_wait(base + self.barriers["q_empty"], q_parity)
                        q_parity = q_parity ^ 1
                        if lane == 0:
                            self.copy_queries(base, q_map, head, token)
                page_a, page_b, word = next_a, next_b, next_word
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def copy_raw(self, there, tensor_map, head, a, b, wide, name, base, stage):
        bar = base + self.barriers[name + "_raw_full"] + stage * 8
        self.copy_box(there, tensor_map, head, a, bar, RAW_TILE)
        self.copy_second_box(there + RAW_TILE // 2, tensor_map, head, b, bar, wide)

    def copy_box(self, there, tensor_map, head, page, bar, size):
        smem.mbarrier_expect(bar, size)
        tma.tma_load(there, tensor_map, [Int32(0), Int32(0), head, page], bar)

    @cute.jit
    def copy_second_box(self, there: Int32, tensor_map: Int64, head: Int32, page: Int32, bar: Int32, wide: Int32):
        if wide != 0:
            tma.tma_load(there, tensor_map, [Int32(0), Int32(0), head, page], bar)

    @cute.jit
    def widen_blocks(self, is_v: cutlass.Constexpr, base: Int32, part: Int32, lane: Int32):
        """Warp `part` of K or of V: its rows of every block, float8 to fp16 in the layout of a 16-bit tensor map."""
        first_row = part * (BLOCK // WIDENERS)
        name = "v" if is_v else "k"
        buffer, turn = Int32(0), Int32(0)
        stage, parity, raw, raw_parity = Int32(0), Int32(1), Int32(0), Int32(0)
        # Lanes 8 i .. 8 i + 7 take halves of two rows each, so that neither loads nor stores meet a bank twice.
        row, low = lane >> 2, lane & 3
        chunk = low | ((row & 1) << 2)
        source = (first_row + row) * 128 + ((chunk ^ row) << 4)
        target = (row & 1) * HALF + (first_row + row) * 128 + (((low << 1) ^ row) << 4)
        count = self.next_count(base, buffer, turn)
        while count >= 0:
            tail = smem.load_i32(base + self.records_at + buffer * RECORD + 4 * TAIL)
            self.record_read(base, buffer, lane)
            for i in cutlass.range(count, unroll=1):
                smem.mbarrier_wait(base + self.barriers[name + "_raw_full"] + raw * 8, raw_parity)
                smem.mbarrier_wait(base + self.barriers[name + "_empty"] + stage * 8, parity)
                come = base + self.raw_at[name] + raw * RAW_TILE + source
                go = base + (self.v_at if is_v else self.k_at) + stage * TILE + target
                rows = Int32(BLOCK)
                if cutlass.const_expr(is_v):
                    rows = ptx.select(i + 1 == count, tail, rows)
                if rows == BLOCK:
                    for n in cutlass.range(BLOCK // WIDENERS // 32, unroll=1):
                        self.widen_rows(come + n * 4096, go + n * 4096, row)
                else:
                    for n in cutlass.range(BLOCK // WIDENERS // 32, unroll=1):
                        self.widen_rows(come + n * 4096, go + n * 4096, row, rows - first_row - n * 32)
                tma.fence_async()
                ptx.warp_barrier()
                hopper.mbarrier_arrive_if(base + self.barriers[name + "_full"] + stage * 8, Int32(lane == 0))
                hopper.mbarrier_arrive_if(base + self.barriers[name + "_raw_empty"] + raw * 8, Int32(lane == 0))
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1
                raw = raw + 1
                if raw == RAW_STAGES:
                    raw, raw_parity = Int32(0), raw_parity ^ 1
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def widen_rows(self, come, go, row, left=None):
        """32 rows; zeros from row `left` on. Loads run ahead of what is made of them by as much as registers allow."""
        other = ptx.select((row & 1) != 0, Int32(-HALF), Int32(HALF))
        widen = mma.widen_e4m3 if self.dtype == "e4m3" else mma.widen_e5m2
        places = [(i, part) for i in range(4) for part in range(2)]
        load = lambda i, part: smem.load_i32x4((come ^ (64 * part)) + i * 1024)
        ahead = [load(*place) for place in places[:LOADS_AHEAD]]
        for n, (i, part) in enumerate(places):
            chunk = ahead.pop(0)
            if n + LOADS_AHEAD < len(places):
                ahead.append(load(*places[n + LOADS_AHEAD]))
            if left is not None:
                chunk = [ptx.select(left > row + 8 * i, w, Int32(0)) for w in chunk]
            wide = [x for w in chunk for x in widen(w)]
            there = go + i * 1024 + (other if part else 0)
            smem.store_i32x4(there, wide[:4])
            smem.store_i32x4(there ^ 16, wide[4:])
