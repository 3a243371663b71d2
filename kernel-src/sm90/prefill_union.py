"""Prefill by union tiles: sparse attention of 8 neighbouring query tokens over the union of their blocks. SM90.

Problem
    Row = (token, query head), 16 query heads a KV head. out = softmax(q K^T * softmax_scale * k_scale) V * v_scale and
    lse over the visible tokens of the row's blocks of 128. Neighbouring tokens mostly pick the same blocks: a tile of 8
    tokens x 16 heads = 128 rows loads each block of its union once (neutral/union.py lists them).

Tile picture
    S = Q K^T: m64n128k16, 64 rows = 4 tokens; a warp's 16 rows are one token, so what a token may see is the same for a
    warp. O += P V with P from registers. Two such warpgroups share K and V.

Roles (3 warpgroups; a CTA takes tiles cta, cta + grid, ... of the list "last tile first, one KV head after the other")
    loader       warp 0 K, warp 1 V, warp 2 lists, warp 3 Q. The list warp looks at 32 tiles at a time, leaves out empty
                 ones and those of requests that take the other formulation, and publishes, for each warpgroup, the
                 positions that one of its tokens chose; all others follow what it publishes.
    consumers    2 x 4 warps. Q K of the next block is under way while the softmax of this one waits for P V.
                 Blocks that none of a warpgroup's tokens chose are passed on: it waits for "full" and releases.

Order of the sums
    Ascending blocks, one rescaling a block. A block that a token did not choose multiplies by 1 and adds 0 * V: a row's
    bits depend on its own blocks alone, not on the tile, the grid or the batch around it.

What may hold anything
    K past the length: its columns are set to -inf. V past the length: the V warp makes zeros of those rows (0 * NaN).
    A page outside the cache is a coordinate outside the tensor map: zeros. Rows of Q behind a tile's last token belong
    to other requests and are not written.

Deadlock rule
    Q K of the next block is issued before P V of this one. Over a gap of more positions than there are stages the K
    loader waits for V's release and back; the warpgroup then finishes P V first and passes the stages on after it.

Shared memory    Q 32 KiB, K and V `stages` x 32 KiB each (3), lists 2 x 2 x 512, records, mbarriers

Budget (H200, 4,096 bf16 FMA a clock and SM, 1.755 GHz)
    A block costs a tile 128 x 128 x 128 x 2 products = 1,024 clocks of the tensor core (if both warpgroups need it) and
    64 KiB from L2, 64 bytes a clock; exp2: 16,384 / 16 a clock = 1,024 clocks. Masked work is u(4) of neutral/union.py.

Limits
    head_dim 128, 16 query heads a KV head, pages of 64 or 128, K <= 32, blocks < 2^16.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, mma, ptx, smem, softmax
from shared.program import Program

GROUP, TOKENS, DIM, BLOCK = 16, 8, 128, 128
LOADER_WARPS, CONSUMERS = 4, 2
TILE = BLOCK * DIM * 2  # bytes of K or V of a block
HALF = TILE // 2  # 64 columns
LIST_ENTRIES = 128  # 4 tokens x 32
RECORD = 64
LIST_READERS = 4 * CONSUMERS + 3  # warps that read what is published
RAW_STAGES, RAW_TILE = 2, BLOCK * DIM  # float8 as it comes
# Words of a record in shared memory.
COUNT, COUNT_A, COUNT_B, FIRST, TILE_TOKENS, END, LENGTH, SCALE, V_SCALE, TAIL, HEAD, SLOT = range(12)
# Of a list entry: position | tokens << 8 | no first half << 12 | no second half << 13 | look closer << 14 | block << 16
EDGE_BITS = 7 << 12


class PrefillUnion:
    """One variant: KV dtype."""

    def __init__(self, kv_dtype):
        self.dtype = kv_dtype
        self.fp8 = kv_dtype in ("e4m3", "e5m2")
        self.mma_dtype = "bf16" if kv_dtype == "bf16" else "f16"
        self.stages = 2 if self.fp8 else 3
        self.threads = 128 * (1 + CONSUMERS)
        # What the loaders and the consumers get of 168 registers a thread: 24 + 2 * 240 or 40 + 2 * 232 is all of them.
        self.registers = (40, 232) if self.fp8 else (24, 240)
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
        names = {"q_full": (1, 1), "q_empty": (1, 4 * CONSUMERS), "list_full": (2, 1), "list_empty": (2, LIST_READERS)}
        for operand in "kv":
            names[operand + "_full"] = self.stages, 1
            names[operand + "_empty"] = self.stages, 4 * CONSUMERS
            if self.fp8:
                names[operand + "_raw_full"] = names[operand + "_raw_empty"] = RAW_STAGES, 1
        if not self.fp8:
            names["edge"] = 1, 1
        self.barriers, self.arrivals = {}, {}
        for name, (count, arrivals) in names.items():
            self.barriers[name] = at
            self.arrivals.update({at + 8 * i: arrivals for i in range(count)})
            at += 8 * count
        self.dynamic_smem = at
        assert self.dynamic_smem <= 232448

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

    # ---- published tiles

    def next_count(self, base, buffer, turn):
        """Blocks of the next tile; negative: there is none."""
        smem.mbarrier_wait(base + self.barriers["list_full"] + buffer * 8, turn)
        return smem.load_i32(base + self.records_at + buffer * RECORD)

    def record_read(self, base, buffer, lane):
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(base + self.barriers["list_empty"] + buffer * 8, Int32(lane == 0))

    # ---- loaders

    @cute.jit
    def load_blocks(
        self,
        is_v: cutlass.Constexpr,
        base: Int32,
        tensor_map: Int64,
        pages: Int64,
        slots: Int32,
        capacity: Int32,
        page_bits: Int32,
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
            tail = smem.load_i32(record + 4 * TAIL)
            self.record_read(base, buffer, lane)
            wide = 7 - page_bits
            row = pages + (Int64(head) * Int64(slots) + Int64(slot)) * Int64(capacity) * Int64(4 << wide)
            page_a, page_b = self.load_pages(row, lane, count, wide)
            for first in cutlass.range(0, count, 32, unroll=1):
                next_a, next_b = self.load_pages(row, first + 32 + lane, count, wide)
                for i in cutlass.range(ptx.minimum_i32(count - first, Int32(32)), unroll=1):
                    a, b = ptx.shuffle(page_a, i), ptx.shuffle(page_b, i)
                    smem.mbarrier_wait(empty + stage * 8, parity)
                    there, bar = target + stage * TILE, full + stage * 8
                    if cutlass.const_expr(is_v):
                        partial = (first + i + 1 == count) & (tail < BLOCK)
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
                page_a, page_b = next_a, next_b
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def load_pages(self, row, at, count, wide):
        """Pages of entry `at`: of the whole block, or of its halves."""
        entry = row + Int64(at) * Int64(4 << wide)
        valid = Int32(at < count)
        return ptx.load_i32_batch([(entry, valid, -1), (entry + Int64(wide * 4), valid, -1)])

    @cute.jit
    def load_block(self, there: Int32, tensor_map: Int64, head: Int32, a: Int32, b: Int32, wide: Int32, bar: Int32):
        zero = Int32(0)
        smem.mbarrier_expect(bar, TILE)
        for half in cutlass.range_constexpr(2):
            hopper.tma_load(there + half * HALF, tensor_map, [Int32(64 * half), zero, head, a], bar)
        if wide != 0:
            for half in cutlass.range_constexpr(2):
                at = there + half * HALF + HALF // 2
                hopper.tma_load(at, tensor_map, [Int32(64 * half), zero, head, b], bar)

    @cute.jit
    def clear_rows(self, there: Int32, first: Int32, lane: Int32):
        """Zeros from key `first` on, before wgmma reads them."""
        for chunk in cutlass.range(first * 8 + lane, BLOCK * 8, 32, unroll=1):
            for half in cutlass.range_constexpr(2):
                smem.store_i32x4(there + half * HALF + chunk * 16, [Int32(0)] * 4)
        hopper.fence_async()
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
            hopper.tma_load(at, tensor_map, [Int32(64 * half), head * GROUP, token], full)

    # ---- loaders of a float8 cache

    @cute.jit
    def issue_copies(
        self,
        base: Int32,
        q_map: Int64,
        k_map: Int64,
        v_map: Int64,
        pages: Int64,
        slots: Int32,
        capacity: Int32,
        page_bits: Int32,
        lane: Int32,
    ):
        """One warp for all copies. Those of Q wait for the end of the tile before, so two blocks go ahead of them."""
        buffer, turn, q_parity = Int32(0), Int32(0), Int32(1)
        stage, parity = Int32(0), Int32(1)
        wide = 7 - page_bits
        count = self.next_count(base, buffer, turn)
        while count >= 0:
            record = base + self.records_at + buffer * RECORD
            head, slot = smem.load_i32(record + 4 * HEAD), smem.load_i32(record + 4 * SLOT)
            token = smem.load_i32(record + 4 * FIRST)
            self.record_read(base, buffer, lane)
            row = pages + (Int64(head) * Int64(slots) + Int64(slot)) * Int64(capacity) * Int64(4 << wide)
            page_a, page_b = self.load_pages(row, lane, count, wide)
            for first in cutlass.range(0, count, 32, unroll=1):
                next_a, next_b = self.load_pages(row, first + 32 + lane, count, wide)
                for i in cutlass.range(ptx.minimum_i32(count - first, Int32(32)), unroll=1):
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
                    if first + i == ptx.minimum_i32(count, Int32(2)) - 1:
                        smem.mbarrier_wait(base + self.barriers["q_empty"], q_parity)
                        q_parity = q_parity ^ 1
                        if lane == 0:
                            self.copy_queries(base, q_map, head, token)
                page_a, page_b = next_a, next_b
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            count = self.next_count(base, buffer, turn)

    def copy_raw(self, there, tensor_map, head, a, b, wide, name, base, stage):
        bar = base + self.barriers[name + "_raw_full"] + stage * 8
        self.copy_box(there, tensor_map, head, a, bar, RAW_TILE)
        self.copy_second_box(there + RAW_TILE // 2, tensor_map, head, b, bar, wide)

    def copy_box(self, there, tensor_map, head, page, bar, size):
        smem.mbarrier_expect(bar, size)
        hopper.tma_load(there, tensor_map, [Int32(0), Int32(0), head, page], bar)

    @cute.jit
    def copy_second_box(self, there: Int32, tensor_map: Int64, head: Int32, page: Int32, bar: Int32, wide: Int32):
        if wide != 0:
            hopper.tma_load(there, tensor_map, [Int32(0), Int32(0), head, page], bar)

    @cute.jit
    def widen_blocks(self, is_v: cutlass.Constexpr, base: Int32, lane: Int32):
        """Warp of K or of V: every block, float8 to fp16 in the layout of a 16-bit tensor map."""
        name = "v" if is_v else "k"
        buffer, turn = Int32(0), Int32(0)
        stage, parity, raw, raw_parity = Int32(0), Int32(1), Int32(0), Int32(0)
        # Lanes 8 i .. 8 i + 7 take halves of two rows each, so that neither loads nor stores meet a bank twice.
        row, low = lane >> 2, lane & 3
        chunk = low | ((row & 1) << 2)
        source = row * 128 + ((chunk ^ row) << 4)
        target = (row & 1) * HALF + row * 128 + (((low << 1) ^ row) << 4)
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
                    for part in cutlass.range(8, unroll=1):
                        self.widen_rows(come + part * 2048, go + part * 2048, row)
                else:
                    for part in cutlass.range(8, unroll=1):
                        self.widen_rows(come + part * 2048, go + part * 2048, row, rows - part * 16)
                hopper.fence_async()
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
        """16 rows; zeros from row `left` on."""
        other = ptx.select((row & 1) != 0, Int32(-HALF), Int32(HALF))
        widen = mma.widen_e4m3 if self.dtype == "e4m3" else mma.widen_e5m2
        places = [(i, part) for i in range(2) for part in range(2)]
        words = [smem.load_i32x4((come ^ (64 * part)) + i * 1024) for i, part in places]
        for (i, part), chunk in zip(places, words):
            if left is not None:
                chunk = [ptx.select(left > row + 8 * i, w, Int32(0)) for w in chunk]
            wide = [x for w in chunk for x in widen(w)]
            there = go + i * 1024 + (other if part else 0)
            smem.store_i32x4(there, wide[:4])
            smem.store_i32x4(there ^ 16, wide[4:])

    @cute.jit
    def publish_lists(
        self,
        base: Int32,
        tiles: Int64,
        counts: Int64,
        words: Int64,
        pages: Int64,
        choice: Int64,
        k_scale: Int64,
        v_scale: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        slots: Int32,
        heads: Int32,
        requests: Int32,
        page_bits: Int32,
        capacity: Int32,
        causal: Int32,
        softmax_scale: Float32,
        cta: Int32,
        ctas: Int32,
        lane: Int32,
    ):
        buffer, turn = Int32(0), Int32(1)
        wide = 7 - page_bits
        total = slots * heads
        for position in cutlass.range(cta, total, 32 * ctas, unroll=1):
            # -- 32 tiles at once: which of them are this kernel's
            votes = ptx.ballot(self.is_mine(tiles, choice, position + lane * ctas, slots, total, requests))
            while votes != 0:
                x = position + ptx.count_bits((votes & -votes) - 1) * ctas
                votes = votes & (votes - 1)
                head = ptx.divide_u32(x, slots)
                slot = slots - 1 - (x - head * slots)
                item = Int64(head) * Int64(slots) + Int64(slot)
                first, tile_tokens, end, length = ptx.load_fresh_16_bytes_if(tiles + Int64(slot) * 32, Int32(1))
                count = ptx.load_i32(counts + item * 4) & 1023
                scale = ptx.load_f32_or_one(k_scale + Int64(head) * k_scale_head) * softmax_scale
                scale_v = ptx.load_f32_or_one(v_scale + Int64(head) * v_scale_head)
                words_row = words + item * Int64(capacity) * 4
                pages_row = pages + item * Int64(capacity) * Int64(4 << wide)
                smem.mbarrier_wait(base + self.barriers["list_empty"] + buffer * 8, turn)
                count_a, count_b, tail = Int32(0), Int32(0), Int32(BLOCK)
                sees = ptx.select(causal != 0, end, length)  # what the first token sees; the others see more
                for i in cutlass.range(0, count, 32, unroll=1):
                    at = i + lane
                    here = Int32(at < count)
                    word = ptx.load_i32_if(words_row + Int64(at) * 4, here, 0)
                    bad = Int32(0)
                    if wide != 0:
                        page_a, page_b = ptx.load_i32_batch(
                            [(pages_row + Int64(at) * 8 + 4 * k, here, 0) for k in range(2)]
                        )
                        bad = ptx.select(page_a < 0, Int32(1 << 12), Int32(0))
                        bad = bad | ptx.select(page_b < 0, Int32(1 << 13), Int32(0))
                    block = word & 0xFFFF
                    special = ((block << 7) + BLOCK > sees) | (scale < Float32(0.0))
                    edge = ptx.select(special, Int32(1 << 14), Int32(0))
                    entry = at | bad | edge | (block << 16)
                    if at + 1 == count:
                        tail = ptx.minimum_i32(length - (block << 7), Int32(BLOCK))
                    chosen = [(word >> 24) & 15, (word >> 28) & 15]
                    count_a = self.append(base, buffer * 2, count_a, entry | (chosen[0] << 8), chosen[0])
                    count_b = self.append(base, buffer * 2 + 1, count_b, entry | (chosen[1] << 8), chosen[1])
                tail = ptx.warp_min(tail)
                if lane == 0:
                    there = base + self.records_at + buffer * RECORD
                    smem.store_i32x4(there, [count, count_a, count_b, first])
                    smem.store_i32x4(there + 16, [tile_tokens, sees, length, ptx.f32_bits(scale)])
                    smem.store_i32x4(there + 32, [ptx.f32_bits(scale_v), tail, head, slot])
                ptx.warp_barrier()
                hopper.mbarrier_arrive_if(base + self.barriers["list_full"] + buffer * 8, Int32(lane == 0))
                buffer = buffer ^ 1
                turn = turn ^ (buffer ^ 1)
        smem.mbarrier_wait(base + self.barriers["list_empty"] + buffer * 8, turn)
        if lane == 0:
            smem.store_i32x4(base + self.records_at + buffer * RECORD, [Int32(-1)] * 4)
            hopper.mbarrier_arrive(base + self.barriers["list_full"] + buffer * 8)

    def is_mine(self, tiles, choice, x, slots, total, requests):
        """Whether a tile has tokens and their request takes this formulation."""
        valid = x < total
        x = ptx.select(valid, x, Int32(0))
        record = tiles + Int64(slots - 1 - (x - ptx.divide_u32(x, slots) * slots)) * 32
        tile_tokens, request = ptx.load_i32_batch([(record + at, Int32(valid), 0) for at in (4, 16)])
        listens = (choice != 0) & (request < requests)
        at = choice + Int64(ptx.select(listens, request, Int32(0))) * 4
        other = ptx.load_i32_if(at, Int32(listens), 0)
        return Int32((tile_tokens > 0) & (other == 0))

    def append(self, base, which, count, entry, chosen):
        votes = ptx.ballot(Int32(chosen != 0))
        position = count + ptx.count_bits(votes & ptx.lanes_below())
        smem.store_i32_if(base + self.lists_at + which * (LIST_ENTRIES * 4) + position * 4, entry, Int32(chosen != 0))
        return count + ptx.count_bits(votes)

    # ---- consumers: pieces of the main loop

    def scores(self, base, S, q, position):
        stage, _ = self.ring_of(position)
        k = hopper.descriptor(base + self.k_at) + Int64(stage * (TILE >> 4))
        hopper.fence()
        for step in range(8):
            offset = (step & 3) * 2 + (step >> 2) * (HALF >> 4)
            hopper.wgmma_ss(S, q + Int64(offset), k + Int64(offset), step > 0, self.mma_dtype)
        hopper.commit()

    def values(self, base, O, P, position):
        stage, _ = self.ring_of(position)
        v = hopper.descriptor(base + self.v_at, HALF) + Int64(stage * (TILE >> 4))
        for step in range(8):
            words = [P[4 * step + i] for i in range(4)]
            hopper.wgmma_rs(O, words, v + Int64(step * 128), True, self.mma_dtype, b_mn_major=True)
        hopper.commit()

    @cute.jit
    def scores_alone(self, base: Int32, S: cute.Tensor, q: Int64, position: Int32, lane: Int32):
        self.wait_full(base, "k_full", position)
        self.scores(base, S, q, position)
        hopper.wait(0, S)
        self.release(base, "k_empty", position, lane)

    @cute.jit
    def values_alone(self, base: Int32, O: cute.Tensor, P: cute.Tensor, position: Int32, lane: Int32):
        self.wait_full(base, "v_full", position)
        hopper.pin(O)
        hopper.fence()
        self.values(base, O, P, position)
        hopper.wait(0, O)
        self.release(base, "v_empty", position, lane)

    @cute.jit
    def pass_on(self, names: cutlass.Constexpr, base: Int32, first: Int32, last: Int32, lane: Int32):
        """Blocks that nobody here chose: released as soon as they are there."""
        for position in cutlass.range(first, last, unroll=1):
            for name in names:
                self.wait_full(base, name + "_full", position)
                self.release(base, name + "_empty", position, lane)

    @cute.jit
    def softmax(
        self,
        S: cute.Tensor,
        state: cute.Tensor,
        entry: Int32,
        record: Int32,
        token: Int32,
        lane: Int32,
    ):
        """S -> P, not normalised. state: m of rows g, g + 8 (log2 units), this lane's l, the last factors, the scales."""
        if (entry >> (8 + (token & 3))) & 1 == 0:
            state[4], state[5] = Float32(1.0), Float32(1.0)
            for i in cutlass.range_constexpr(64):
                S[i] = Float32(0.0)
        else:
            if entry & EDGE_BITS != 0:
                self.mask(S, entry, record, token, lane)
            for h in cutlass.range_constexpr(2):
                scale = state[6 + h]
                top = [S[4 * i + 2 * h + c] for i in range(16) for c in range(2)]
                m = ptx.maximum(ptx.multiply(softmax.row_maximum(top), scale), state[h])
                state[4 + h] = ptx.exp2(state[h] - m)
                state[h] = m
                p = [ptx.exp2(ptx.fma(x, scale, -m)) for x in top]
                state[2 + h] = ptx.fma(state[2 + h], state[4 + h], softmax.tree_sum(p))
                for i in cutlass.range_constexpr(32):
                    S[4 * (i // 2) + 2 * h + i % 2] = p[i]

    def mask(self, S, entry, record, token, lane):
        """-inf outside what the token sees; a negative scale turns the logits."""
        end, length = smem.load_i32(record + 4 * END), smem.load_i32(record + 4 * LENGTH)
        sign = ptx.select(smem.load_f32(record + 4 * SCALE) < Float32(0.0), Float32(-1.0), Float32(1.0))
        high = ptx.clamp(end + token, Int32(0), length) - (((entry >> 16) & 0xFFFF) << 7)
        high = ptx.select((entry & (1 << 13)) != 0, ptx.minimum_i32(high, Int32(64)), high)
        low = ptx.select((entry & (1 << 12)) != 0, Int32(64), Int32(0))
        column = (lane & 3) * 2
        for i in range(64):
            at = column + (i >> 2) * 8 + (i & 1)
            S[i] = ptx.select((at >= low) & (at < high), ptx.multiply(S[i], sign), Float32(softmax.NEG_INF))

    def pack(self, S, P):
        pack = ptx.pack_bf16 if self.mma_dtype == "bf16" else ptx.pack_fp16
        for i in range(32):
            P[i] = pack(S[2 * i], S[2 * i + 1])

    def rescale(self, O, state):
        for i in range(64):
            O[i] = ptx.multiply(O[i], state[4 + ((i >> 1) & 1)])

    @cute.jit
    def walk(
        self,
        base: Int32,
        list_at: Int32,
        count: Int32,  # of the warpgroup's list
        start: Int32,  # position of the tile's first block in the ring
        q: Int64,
        S: cute.Tensor,
        O: cute.Tensor,
        P: cute.Tensor,
        state: cute.Tensor,
        record: Int32,
        token: Int32,  # of the tile
        lane: Int32,
    ):
        """All of the warpgroup's blocks of a tile; returns the position behind the last one."""
        entry = smem.load_i32(list_at)
        at = start + (entry & 255)
        self.pass_on(("k", "v"), base, start, at, lane)
        self.scores_alone(base, S, q, at, lane)
        self.softmax(S, state, entry, record, token, lane)
        self.pack(S, P)
        for k in cutlass.range(1, count, unroll=1):
            entry = smem.load_i32(list_at + k * 4)
            following = start + (entry & 255)
            if following - at > self.stages:
                self.values_alone(base, O, P, at, lane)
                self.pass_on(("k", "v"), base, at + 1, following, lane)
                self.scores_alone(base, S, q, following, lane)
                self.softmax(S, state, entry, record, token, lane)
            else:
                self.pass_on(("k",), base, at + 1, following, lane)
                self.wait_full(base, "k_full", following)
                hopper.pin(O)
                self.scores(base, S, q, following)
                self.wait_full(base, "v_full", at)
                self.values(base, O, P, at)
                hopper.wait(1, S)
                self.release(base, "k_empty", following, lane)
                self.softmax(S, state, entry, record, token, lane)
                hopper.wait(0, O)
                self.release(base, "v_empty", at, lane)
                self.pass_on(("v",), base, at + 1, following, lane)
            self.rescale(O, state)
            self.pack(S, P)
            at = following
        hopper.mbarrier_arrive_if(base + self.barriers["q_empty"], Int32(lane == 0))
        self.values_alone(base, O, P, at, lane)
        return at + 1

    @cute.jit
    def consume(
        self,
        base: Int32,
        out: Int64,
        lse: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        bf16_query: Int32,
        group: Int32,
        warp: Int32,
        lane: Int32,
    ):
        S = cute.make_rmem_tensor(cute.make_layout(64), Float32)
        O = cute.make_rmem_tensor(cute.make_layout(64), Float32)
        P = cute.make_rmem_tensor(cute.make_layout(32), Int32)
        state = cute.make_rmem_tensor(cute.make_layout(8), Float32)
        q = hopper.descriptor(base + self.q_at + group * (HALF // 2))
        buffer, turn, q_parity, start = Int32(0), Int32(0), Int32(0), Int32(0)
        total = self.next_count(base, buffer, turn)
        while total >= 0:
            record = base + self.records_at + buffer * RECORD
            count = smem.load_i32(record + 4 * COUNT_A + 4 * group)
            first = smem.load_i32(record + 4 * FIRST)
            tile_tokens = smem.load_i32(record + 4 * TILE_TOKENS)
            scale, v_scale = smem.load_f32(record + 4 * SCALE), smem.load_f32(record + 4 * V_SCALE)
            head = smem.load_i32(record + 4 * HEAD)
            token = group * 4 + warp
            self.begin(O, state, scale)
            if total > 0:
                smem.mbarrier_wait(base + self.barriers["q_full"], q_parity)
                q_parity = q_parity ^ 1
                if cutlass.const_expr(self.fp8):
                    if bf16_query != 0:
                        self.widen_query(base + self.q_at + token * GROUP * 128, state, lane)
                        hopper.named_barrier(group + 1, 128)
                behind = start
                if count > 0:
                    list_at = base + self.lists_at + (buffer * 2 + group) * (LIST_ENTRIES * 4)
                    behind = self.walk(base, list_at, count, start, q, S, O, P, state, record, token, lane)
                else:
                    hopper.mbarrier_arrive_if(base + self.barriers["q_empty"], Int32(lane == 0))
                self.pass_on(("k", "v"), base, behind, start + total, lane)
                start = self.folded(start + total)
            self.record_read(base, buffer, lane)
            if token < tile_tokens:
                row = out + Int64(first + token) * out_token + Int64(head * GROUP + (lane >> 2)) * out_head
                lse_row = lse + Int64(first + token) * lse_token + Int64(head * GROUP + (lane >> 2)) * lse_head
                self.write(row, out_head, lse, lse_row, lse_head, O, state, v_scale, bf16_query, lane)
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            total = self.next_count(base, buffer, turn)

    @cute.jit
    def widen_query(self, at: Int32, state: cute.Tensor, lane: Int32):
        """The warp's 16 rows of bf16 become fp16, each times a power of two; the scales of the logits make up for it."""
        for h in cutlass.range_constexpr(2):
            row = at + ((lane >> 2) + 8 * h) * 128 + (lane & 3) * 16 + (lane & 4) * 16
            places = [(row ^ (64 * part)) + half * HALF for half in range(2) for part in range(2)]
            loaded = [w for place in places for w in smem.load_i32x4(place)]
            pairs = [ptx.unpack_bf16(w) for w in loaded]
            top = softmax.row_maximum([ptx.absolute(x) for pair in pairs for x in pair])
            exponent = ptx.maximum_i32(ptx.f32_bits(top) >> 23, Int32(15))  # biased
            shrink = ptx.f32_from_bits((268 - exponent) << 23)
            grow = ptx.f32_from_bits((exponent - 14) << 23)
            scaled = [ptx.pack_fp16(a * shrink, b * shrink) for a, b in pairs]
            for i in cutlass.range_constexpr(4):
                smem.store_i32x4(places[i], scaled[4 * i : 4 * i + 4])
            state[6 + h] = ptx.maximum(state[6 + h] * grow, Float32(softmax.SMALLEST))
        hopper.fence_async()

    def begin(self, O, state, scale):
        to_log2 = scale * Float32(softmax.LOG2_E)
        size = ptx.maximum(ptx.absolute(to_log2), Float32(softmax.SMALLEST))
        for i in range(2):
            state[i], state[2 + i] = Float32(softmax.EMPTY), Float32(0.0)
            state[4 + i], state[6 + i] = Float32(1.0), size
        for i in range(64):
            O[i] = Float32(0.0)

    @cute.jit
    def write(
        self,
        row: Int64,
        out_head: Int64,
        lse: Int64,
        lse_row: Int64,
        lse_head: Int64,
        O: cute.Tensor,
        state: cute.Tensor,
        v_scale: Float32,
        bf16_query: Int32,
        lane: Int32,
    ):
        """Rows g and g + 8 of the warp's token. Lanes exchange halves of two column tiles, so that a store fills sectors."""
        t, odd = lane & 3, (lane & 1) != 0
        for h in cutlass.range_constexpr(2):
            l = state[2 + h] + ptx.shuffle_xor_f32(state[2 + h], 1)
            l = l + ptx.shuffle_xor_f32(l, 2)
            factor = softmax.inverse_or_zero(l) * v_scale
            at = row + Int64(h * 8) * out_head + Int64((t >> 1) * 8 + (t & 1) * 16)
            for i in cutlass.range_constexpr(8):
                values = [ptx.multiply(O[8 * i + 4 * n + 2 * h + c], factor) for n in range(2) for c in range(2)]
                even_tile, odd_tile = self.pair(values[:2], bf16_query), self.pair(values[2:], bf16_query)
                came = ptx.shuffle_xor(ptx.select(odd, even_tile, odd_tile), 1)
                pair = [ptx.select(odd, came, even_tile), ptx.select(odd, odd_tile, came)]
                ptx.store_words(at + Int64(i * 32), pair)
            if (t == 0) & (lse != 0):
                ptx.store_f32(lse_row + Int64(h * 8) * lse_head, softmax.natural_lse(state[h], l))

    def pair(self, values, bf16_query):
        if self.dtype == "bf16":
            return ptx.pack_bf16(*values)
        if self.dtype == "f16":
            return ptx.pack_fp16(*values)
        return ptx.select(bf16_query != 0, ptx.pack_bf16(*values), ptx.pack_fp16(*values))

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,  # [T, Hq, 128], box 8 x 16 x 64
        k_map: cute.CopyAtom,  # [P, Hkv, page, 128], box 1 x 1 x page x 64
        v_map: cute.CopyAtom,
        tiles: Int64,
        counts: Int64,
        words: Int64,
        pages: Int64,
        choice: Int64,  # 0: all requests are this kernel's
        out: Int64,
        lse: Int64,  # 0: not wanted
        k_scale: Int64,  # 0: one
        v_scale: Int64,
        out_token: Int64,  # strides in bytes
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        slots: Int32,
        heads: Int32,
        requests: Int32,
        page_bits: Int32,  # 7 or 6
        capacity: Int32,
        causal: Int32,
        bf16_query: Int32,
        softmax_scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base()
        ptx.let_next_kernel_start()
        if thread == 0:
            self.init_barriers(base)
        ptx.barrier()
        ptx.wait_for_previous_kernel()
        if warp < LOADER_WARPS:
            hopper.give_registers(self.registers[0])
            where = (pages, slots, capacity, page_bits)
            q_at, k_at, v_at = [hopper.map_address(m) for m in (q_map, k_map, v_map)]
            if cutlass.const_expr(self.fp8):
                if warp == 0:
                    self.issue_copies(base, q_at, k_at, v_at, *where, lane)
                if warp == 1:
                    self.widen_blocks(False, base, lane)
                if warp == 3:
                    self.widen_blocks(True, base, lane)
            else:
                if warp == 0:
                    self.load_blocks(False, base, k_at, *where, lane)
                if warp == 1:
                    self.load_blocks(True, base, v_at, *where, lane)
                if warp == 3:
                    self.load_queries(base, q_at, lane)
            if warp == 2:
                sources = (tiles, counts, words, pages, choice, k_scale, v_scale, k_scale_head, v_scale_head)
                shape = (slots, heads, requests, page_bits, capacity, causal, softmax_scale)
                self.publish_lists(base, *sources, *shape, cta, ctas, lane)
        else:
            hopper.take_registers(self.registers[1])
            group = (warp >> 2) - 1
            strides = (out_token, out_head, lse_token, lse_head)
            self.consume(base, out, lse, *strides, bf16_query, group, warp & 3, lane)

    def init_barriers(self, base):
        for at, arrivals in self.arrivals.items():
            smem.mbarrier_init(base + at, arrivals)

    @cute.jit
    def entry(
        self,
        tiles: Int64,
        counts: Int64,
        words: Int64,
        pages: Int64,
        choice: Int64,
        out: Int64,
        lse: Int64,
        k_scale: Int64,
        v_scale: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        slots: Int32,
        heads: Int32,
        requests: Int32,
        page_bits: Int32,
        capacity: Int32,
        causal: Int32,
        bf16_query: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        tensor_map = hopper.example_map(cutlass.BFloat16)
        self.kernel(
            tensor_map,
            tensor_map,
            tensor_map,
            tiles,
            counts,
            words,
            pages,
            choice,
            out,
            lse,
            k_scale,
            v_scale,
            out_token,
            out_head,
            lse_token,
            lse_head,
            k_scale_head,
            v_scale_head,
            slots,
            heads,
            requests,
            page_bits,
            capacity,
            causal,
            bf16_query,
            softmax_scale,
        ).launch(
            grid=[slots, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=1,
        )


def programs():
    example = [Int64(16)] * 15 + [Int32(1)] * 7 + [Float32(1.0)]
    return [Program(f"prefill_union_{dtype}", PrefillUnion(dtype), example) for dtype in ("bf16", "f16", "e4m3", "e5m2")]
