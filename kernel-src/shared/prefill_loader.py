"""Loading warps of the KV-stationary prefill (sm90/ and sm100/prefill.py): lists in, tiles of K, V and Q to shared memory.

Warp 0 walks the CTA's tiles and reads heads and entries (invert.py) two tiles ahead. K and V of a block are copied once a run
of tiles, in turn into one ring of KV_STAGES: use 2 r is K of run r, use 2 r + 1 its V. Q is gathered into a ring of its own,
a box of `rows` query heads for each token and half of D. fp8 blocks land in two raw buffers, one for K and one for V, and
the widening warps (of SM90: 1-3) widen them into the ring.

A stage is full (mbarrier `full`) once its bytes are there or, widened, once the widening warps have arrived; the
consumers' warps free it (`empty`). Rows of V that no token sees are made zeros: 0 * NaN is NaN.

Rows that only some tokens see are those of the block that the tokens themselves lie in. Warp 0 looks through them at the end
of a run that has such tokens. If it finds a NaN or infinity, each of these tokens follows once more in a tile of its own,
with zeros behind what it sees, and its partial result is written over; to be the same thread's, after the first, it has the
same place in the tile, and the tile's number the same remainder by `turns`. The end is told by tiles, too (END).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, mma, ptx, smem, softmax, tma
from shared.partials import Chunk

CONSUMER_WARPS = 8
TILE_BYTES = 32768  # 128 x 128 x 2
HALF = TILE_BYTES // 2  # of 64 columns
RAW_BYTES = 16384
KV_STAGES = 3
HEAD_BYTES, META_BYTES = 32, 128
NEW, LAST, END = 1, 2, 4  # flags of a tile: first, last of its block in this CTA; none, behind the last one
WIDENERS = 96


class Source(NamedTuple):
    """What the tiles are made of."""

    q_map: Int64
    k_map: Int64
    v_map: Int64
    heads: Int64  # of the tiles, as entries: invert.py
    entries: Int64
    k_scale: Int64  # 0: one
    k_scale_head: Int64
    q_policy: Int64  # L2 eviction priorities: of q, of K and V
    kv_policy: Int64
    chunk_heads: Int32  # KV heads of a chunk
    group: Int32
    width: Int32
    page_bits: Int32
    softmax_scale: Float32


def step_of(number):
    """(stage, parity of its completed fills) of the n-th use of the ring of K and V."""
    turn = number // KV_STAGES
    return number - turn * KV_STAGES, turn & 1


class TileLoader:
    wideners = WIDENERS  # threads
    turns = 1  # groups of consumers that take tiles in turn

    def __init__(self, q_dtype, kv_dtype, rows, ring_bytes, weights_bytes):
        """`ring_bytes`, `weights_bytes`: shared memory of the combining warps."""
        self.dtype, self.kv_dtype, self.rows = q_dtype, kv_dtype, rows
        self.fp8 = kv_dtype in ("e4m3", "e5m2")
        self.tokens = 128 // rows  # of a tile
        self.q_stages = 2 if self.fp8 else 3
        self.kv_at = 0
        self.q_at = KV_STAGES * TILE_BYTES
        self.raw_at = self.q_at + self.q_stages * TILE_BYTES
        self.ring_at = self.raw_at + (2 * RAW_BYTES if self.fp8 else 0)
        self.mbarriers_at = self.ring_at + ring_bytes
        names = ["q_full", "q_empty", "kv_full", "kv_empty", "raw_full", "raw_empty"]
        self.mbarrier = {name: self.mbarriers_at + 32 * i for i, name in enumerate(names)}
        self.v_landed = self.mbarriers_at + 32 * len(names)
        self.raw_meta = self.v_landed + 8
        self.meta_at = self.mbarriers_at + 256
        self.weights_at = self.meta_at + self.q_stages * META_BYTES
        self.dynamic_smem = self.weights_at + weights_bytes

    def bar(self, base, name, stage):
        return base + self.mbarrier[name] + stage * 8

    def share_of(self, chunks, chunk, most_tiles, part, parts):
        """Tiles first .. stop - 1: part `part` of `parts` equal ones of a chunk."""
        at = chunks + Int64(chunk) * 4
        begin, end = ptx.load_i32_batch([(at, Int32(1), 0), (at + 4, Int32(1), 0)])
        begin = ptx.clamp(begin, Int32(0), most_tiles)
        count = ptx.clamp(end, begin, most_tiles) - begin
        first = begin + Int32(Int64(count) * Int64(part) // Int64(parts))
        return first, begin + Int32(Int64(count) * Int64(part + 1) // Int64(parts))

    # ---- warp 0 of the CTA

    def load_head(self, heads, tile, ok):
        """(number, KV head | tokens << 16, page, page, a, columns) of a tile; number -1 where `ok` is 0."""
        at = heads + Int64(tile) * HEAD_BYTES
        return ptx.load_i32_batch([(at + 4 * i, ok, -1 if i == 0 else 0) for i in range(6)])

    @cute.jit
    def produce(
        self,
        base: Int32,
        lane: Int32,
        first: Int32,
        stop: Int32,
        stage: Int32,
        q_parity: Int32,
        run: Int32,
        landed: Int32,
        source: Source,
        chunk: Chunk,
    ):
        """The tiles first .. stop - 1; returns the rings' state, which begins with `empty_rings`."""
        heads, entries, chunk_heads = source.heads, source.entries, source.chunk_heads
        first_head = chunk.first_head
        number, packed, page_a, page_b, shift, columns = self.load_head(heads, first, Int32(1))
        head_next = self.load_head(heads, first + 1, Int32(first + 1 < stop))
        number_n, packed_n, page_a_n, page_b_n, shift_n, columns_n = head_next
        entry = self.load_entry(entries, first, packed, lane, Int32(1))
        previous = Int32(-1)
        published, run_first, run_published, run_least = Int32(0), first, Int32(0), Int32(127)
        for tile in cutlass.range(first, stop, 1, unroll=1):
            entry_n = self.load_entry(entries, tile + 1, packed_n, lane, Int32(tile + 1 < stop))
            head_2 = self.load_head(heads, tile + 2, Int32(tile + 2 < stop))
            number_2, packed_2, page_a_2, page_b_2, shift_2, columns_2 = head_2

            head = ptx.clamp(packed & 0xFFFF, first_head, first_head + chunk_heads - 1)
            entry = self.sound(entry, source, chunk)
            # The consumers wait for a block at the first tile whatever its number is; a list with a gap may say -1.
            is_new = (tile == first) | (number != previous)
            is_last = (tile + 1 == stop) | (number_n != number)
            if is_new:
                run = run + 1
                run_first, run_published = tile, published
                run_least = ptx.warp_min(self.limit_of(entry, shift, columns))
            flags = ptx.select(is_new, Int32(NEW), Int32(0)) | ptx.select(is_last, Int32(LAST), Int32(0))
            tail = (flags, page_a, page_b, shift, columns, run, stage, q_parity, landed, run_least)
            landed = self.publish(False, base, lane, source, chunk, entry, head, *tail)
            stage, q_parity = self.stage_after(stage, q_parity)
            published = published + 1
            if is_last & (run_least < (columns & 0xFF)):
                if self.find_nonfinite(base, lane, run, run_least, columns & 0xFF) != 0:
                    again = (run_first, tile + 1, run_published, published)
                    state = (run, stage, q_parity, landed)
                    run, stage, q_parity, landed, published = self.publish_again(
                        base, lane, source, chunk, head, page_a, page_b, *again, *state
                    )
            previous = number
            number, packed, page_a, page_b, shift, columns = number_n, packed_n, page_a_n, page_b_n, shift_n, columns_n
            number_n, packed_n, page_a_n, page_b_n = number_2, packed_2, page_a_2, page_b_2
            shift_n, columns_n = shift_2, columns_2
            entry = entry_n
            ptx.warp_barrier()
        for _ in cutlass.range(self.turns, unroll=1):
            self.publish_end(base, lane, stage, q_parity)
            stage, q_parity = self.stage_after(stage, q_parity)
        return stage, q_parity, run, landed

    def empty_rings(self):
        """(stage of Q, parity of its freed fills, number of the newest run, parity of `v_landed`)"""
        return Int32(0), Int32(1), Int32(-1), Int32(0)

    @cute.jit
    def end_blocks(self, base: Int32, lane: Int32, run: Int32):
        """Behind the last run: lets the widening warps end."""
        if cutlass.const_expr(self.fp8):
            run = run + 1
            smem.mbarrier_wait(self.bar(base, "raw_empty", 0), (run & 1) ^ 1)
            if lane == 0:
                smem.store_i32(base + self.raw_meta, Int32(-1))
                hopper.mbarrier_arrive(self.bar(base, "raw_full", 0))

    def stage_after(self, stage, parity):
        over = stage + 1 == self.q_stages
        return ptx.select(over, Int32(0), stage + 1), ptx.select(over, parity ^ 1, parity)

    def sound(self, entry, source, chunk):
        """What a list says may be wrong; what it leads to lies within the chunk."""
        good = (entry >= 0) & ((entry >> 5) < chunk.tokens) & ((entry & 31) < source.width)
        return ptx.select(good, entry, Int32(-1))

    def limit_of(self, entry, shift, columns):
        """The last column that the lane's token sees; 127 without one."""
        return ptx.select(entry < 0, Int32(127), ptx.minimum_i32(columns & 0xFF, (entry >> 5) + shift))

    @cute.jit
    def publish_end(self, base: Int32, lane: Int32, stage: Int32, q_parity: Int32):
        """A tile without tokens, behind the last one."""
        smem.mbarrier_wait(self.bar(base, "q_empty", stage), q_parity)
        meta = base + self.meta_at + stage * META_BYTES
        if lane < self.tokens:
            smem.store_i32(meta + lane * 4, Int32(-1))
        if lane == 16:
            smem.store_i32x4(meta + 64, [Int32(END)] + [Int32(0)] * 3)
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(self.bar(base, "q_full", stage), Int32(lane == 0))
        self.ask_for_nothing(base, lane, stage)

    def ask_for_nothing(self, base, lane, stage):
        pass

    @cute.jit
    def publish(
        self,
        cut: cutlass.Constexpr,  # some rows of V are certain to be cut off
        base: Int32,
        lane: Int32,
        source: Source,
        chunk: Chunk,
        entry: Int32,  # of the lane's token
        head: Int32,
        flags: Int32,
        page_a: Int32,
        page_b: Int32,
        shift: Int32,
        columns: Int32,
        run: Int32,
        stage: Int32,
        q_parity: Int32,
        landed: Int32,
        least: Int32,  # rows of V up to here are seen by all tokens of the run; 127: not of interest
    ):
        """A tile: K and V of its block if it is the first of its run, Q, and what the consumers must know. Returns the
        parity of `v_landed`."""
        pages = (page_a, page_b, source.page_bits, source.kv_policy)
        if (flags & NEW) != 0:
            self.load_keys(base, lane, source.k_map, head, *pages, run)
        q_full = self.bar(base, "q_full", stage)
        smem.mbarrier_wait(self.bar(base, "q_empty", stage), q_parity)
        meta = base + self.meta_at + stage * META_BYTES
        if lane < self.tokens:
            smem.store_i32(meta + lane * 4, entry)
        if lane == 16:
            scale = source.softmax_scale * ptx.load_f32_or_one(source.k_scale + Int64(head) * source.k_scale_head)
            scale = ptx.f32_bits(softmax.finite_or_nan(scale * Float32(softmax.LOG2_E)))
            smem.store_i32x4(meta + 64, [flags | ((head - chunk.first_head) << 8), shift, columns, scale])
        ptx.warp_barrier()
        present = ptx.count_bits(ptx.ballot(Int32((entry >= 0) & (lane < self.tokens))))
        if lane == 0:
            smem.mbarrier_expect(q_full, present * (self.rows * 256))
        ptx.warp_barrier()
        row = (head, source.group, chunk.first_token)
        self.ask_for_queries(base, lane, stage, source.q_map, entry, *row, source.q_policy)
        if (flags & NEW) != 0:
            landed = self.load_values(cut, base, lane, source.v_map, head, *pages, run, columns & 0xFF, landed, least)
        return landed

    @cute.jit
    def find_nonfinite(self, base: Int32, lane: Int32, run: Int32, least: Int32, seen: Int32):
        """Whether V of the run has a NaN or infinity in rows least + 1 to seen; the same in all lanes."""
        found = Int32(0)
        if cutlass.const_expr(self.fp8):
            # The widening warps have looked; a next block would find the buffer free.
            smem.mbarrier_wait(self.bar(base, "raw_empty", 1), run & 1)
            for warp in cutlass.range_constexpr(self.wideners // 32):
                found = found | smem.load_i32(base + self.raw_meta + 8 + 4 * warp)
        else:
            stage, parity = step_of(2 * run + 1)
            smem.mbarrier_wait(self.bar(base, "kv_full", stage), parity)
            values = base + self.kv_at + stage * TILE_BYTES
            least, seen = ptx.maximum_i32(least, Int32(-1)), ptx.minimum_i32(seen, Int32(127))
            for at in cutlass.range((least + 1) * 8 + lane, (seen + 1) * 8, 32, unroll=1):
                for half in cutlass.range_constexpr(2):
                    for word in smem.load_i32x4(values + half * HALF + at * 16):
                        found = found | self.nonfinite_halves(word)
            ptx.warp_barrier()
        return ptx.ballot(found)

    def nonfinite_halves(self, word):
        """Not 0 if one of two 16-bit numbers has all bits of its exponent."""
        ones = 0x7F80 if self.dtype == "bf16" else 0x7C00
        return ((word & (ones * 0x10001)) + (0x8000 - ones) * 0x10001) & Int32(-0x7FFF8000)

    def nonfinite_bytes(self, word):
        """Not 0 if one of four float8 numbers is NaN, or infinite."""
        ones = 0x7F if self.kv_dtype == "e4m3" else 0x7C
        return ((word & (ones * 0x1010101)) + (0x80 - ones) * 0x1010101) & Int32(-0x7F7F7F80)

    @cute.jit
    def publish_again(
        self,
        base: Int32,
        lane: Int32,
        source: Source,
        chunk: Chunk,
        head: Int32,
        page_a: Int32,
        page_b: Int32,
        first: Int32,  # tiles of the run
        stop: Int32,
        number: Int32,  # of the first, among those published
        published: Int32,
        run: Int32,
        stage: Int32,
        q_parity: Int32,
        landed: Int32,
    ):
        """A run's tokens that don't see all rows of V, each in a run of its own. Returns what has moved on."""
        heads, entries = source.heads, source.entries
        for tile in cutlass.range(first, stop, 1, unroll=1):
            _, packed, _, _, shift, columns = self.load_head(heads, tile, Int32(1))
            entry = self.sound(self.load_entry(entries, tile, packed, lane, Int32(1)), source, chunk)
            limit = self.limit_of(entry, shift, columns)
            left = ptx.ballot(Int32(limit < (columns & 0xFF)))
            while left != 0:
                token = ptx.lowest_bit(left)
                # A tile without tokens where it is the others' turn.
                turn = ((published ^ number) & (self.turns - 1)) == 0
                only = ptx.select(turn & (lane == token), entry, Int32(-1))
                seen = (columns & ~0xFF) | (ptx.shuffle(limit, token) & 0xFF)
                run = run + 1
                tail = (Int32(NEW | LAST), page_a, page_b, shift, seen, run, stage, q_parity, landed, Int32(127))
                landed = self.publish(True, base, lane, source, chunk, only, head, *tail)
                stage, q_parity = self.stage_after(stage, q_parity)
                published = published + 1
                left = ptx.select(turn, left & (left - 1), left)
            number = number + 1
        return run, stage, q_parity, landed, published

    def ask_for_queries(self, *where):
        self.gather_queries(*where)

    @cute.jit
    def gather_queries(
        self,
        base: Int32,
        lane: Int32,
        stage: Int32,
        q_map: Int64,
        entry: Int32,
        head: Int32,
        group: Int32,
        first_token: Int32,
        q_policy: Int64,
    ):
        """Half a token's queries a lane; `entry` of the token in its lane."""
        entry_here = ptx.shuffle(entry, lane >> 1)
        if (lane < 2 * self.tokens) & (entry_here >= 0):
            target = base + self.q_at + stage * TILE_BYTES + (lane & 1) * HALF + (lane >> 1) * (self.rows * 128)
            at = [(lane & 1) * 64, head * group, first_token + (entry_here >> 5)]
            tma.tma_load(target, q_map, at, self.bar(base, "q_full", stage), q_policy)

    def load_entry(self, entries, tile, packed, lane, ok):
        present = Int32(lane < ptx.minimum_i32(packed >> 16, Int32(self.tokens))) & ok
        return ptx.load_i32_if(entries + (Int64(tile) * self.tokens + Int64(lane)) * 4, present, -1)

    @cute.jit
    def load_block(
        self, target: Int32, tensor_map: Int64, head: Int32, a: Int32, b: Int32, bits: Int32, policy: Int64, full: Int32
    ):
        """A block of K or V: boxes of 128 bytes x page."""
        if cutlass.const_expr(self.fp8):
            smem.mbarrier_expect(full, RAW_BYTES)
            tma.tma_load(target, tensor_map, [Int32(0), Int32(0), head, a], full, policy)
            if bits == 6:
                tma.tma_load(target + RAW_BYTES // 2, tensor_map, [Int32(0), Int32(0), head, b], full, policy)
        else:
            smem.mbarrier_expect(full, TILE_BYTES)
            for half in cutlass.range_constexpr(2):
                at = [Int32(64 * half), Int32(0), head]
                tma.tma_load(target + half * HALF, tensor_map, [*at, a], full, policy)
                if bits == 6:
                    tma.tma_load(target + half * HALF + HALF // 2, tensor_map, [*at, b], full, policy)

    @cute.jit
    def load_keys(
        self,
        base: Int32,
        lane: Int32,
        k_map: Int64,
        head: Int32,
        page_a: Int32,
        page_b: Int32,
        page_bits: Int32,
        policy: Int64,
        run: Int32,
    ):
        if cutlass.const_expr(self.fp8):
            smem.mbarrier_wait(self.bar(base, "raw_empty", 0), (run & 1) ^ 1)
            if lane == 0:
                smem.store_i32(base + self.raw_meta, Int32(127))
                full = self.bar(base, "raw_full", 0)
                self.load_block(base + self.raw_at, k_map, head, page_a, page_b, page_bits, policy, full)
        else:
            stage, parity = step_of(2 * run)
            smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
            if lane == 0:
                target, full = base + self.kv_at + stage * TILE_BYTES, self.bar(base, "kv_full", stage)
                self.load_block(target, k_map, head, page_a, page_b, page_bits, policy, full)

    @cute.jit
    def load_values(
        self,
        cut: cutlass.Constexpr,
        base: Int32,
        lane: Int32,
        v_map: Int64,
        head: Int32,
        page_a: Int32,
        page_b: Int32,
        page_bits: Int32,
        policy: Int64,
        run: Int32,
        seen: Int32,
        landed: Int32,
        least: Int32,
    ):
        """Rows of V past column `seen`, which no token sees, become zeros. Returns the parity of `v_landed`."""
        if cutlass.const_expr(self.fp8):
            smem.mbarrier_wait(self.bar(base, "raw_empty", 1), (run & 1) ^ 1)
            if lane == 0:
                smem.store_i32(base + self.raw_meta + 4, seen | (ptx.maximum_i32(least, Int32(-1)) << 8))
                full = self.bar(base, "raw_full", 1)
                self.load_block(base + self.raw_at + RAW_BYTES, v_map, head, page_a, page_b, page_bits, policy, full)
        else:
            stage, parity = step_of(2 * run + 1)
            target, full = base + self.kv_at + stage * TILE_BYTES, self.bar(base, "kv_full", stage)
            smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
            whole = Int32(0 if cut else seen == 127)
            if whole != 0:
                if lane == 0:
                    self.load_block(target, v_map, head, page_a, page_b, page_bits, policy, full)
            else:
                arrived = base + self.v_landed
                if lane == 0:
                    self.load_block(target, v_map, head, page_a, page_b, page_bits, policy, arrived)
                smem.mbarrier_wait(arrived, landed)
                landed = landed ^ 1
                for at in cutlass.range((seen + 1) * 8 + lane, 1024, 32, unroll=1):
                    smem.store_i32x4(target + at * 16, [Int32(0)] * 4)
                    smem.store_i32x4(target + HALF + at * 16, [Int32(0)] * 4)
                tma.fence_async()
                ptx.warp_barrier()
                if lane == 0:
                    hopper.mbarrier_arrive(full)
        return landed

    # ---- the widening warps, fp8 only

    @cute.jit
    def widen_blocks(self, base: Int32, thread: Int32, lane: Int32):
        run, going = Int32(0), Int32(1)
        while going != 0:
            smem.mbarrier_wait(self.bar(base, "raw_full", 0), run & 1)
            going = Int32(smem.load_i32(base + self.raw_meta) >= 0)
            if going != 0:
                self.widen_one(base, thread, lane, 2 * run, 0, Int32(127))
                smem.mbarrier_wait(self.bar(base, "raw_full", 1), run & 1)
                seen = smem.load_i32(base + self.raw_meta + 4)
                self.widen_one(base, thread, lane, 2 * run + 1, 1, seen & 0xFF, seen >> 8)
            run = run + 1

    @cute.jit
    def widen_one(
        self, base: Int32, thread: Int32, lane: Int32, use: Int32, raw: cutlass.Constexpr, seen: Int32, least=127
    ):
        stage, parity = step_of(use)
        smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
        self.widen_block(base + self.raw_at + raw * RAW_BYTES, base + self.kv_at + stage * TILE_BYTES, thread, seen)
        tma.fence_async()
        ptx.warp_barrier()
        if lane == 0:
            hopper.mbarrier_arrive(self.bar(base, "kv_full", stage))
        if cutlass.const_expr(raw == 1):
            self.look_through(base, thread, lane, least, ptx.minimum_i32(seen, Int32(127)))
        hopper.mbarrier_arrive_if(self.bar(base, "raw_empty", raw), Int32(lane == 0))

    @cute.jit
    def look_through(self, base: Int32, thread: Int32, lane: Int32, least: Int32, seen: Int32):
        """Rows least + 1 to seen of raw V, if any: each warp says whether it has met a NaN or infinity."""
        if least < seen:
            found = Int32(0)
            for at in cutlass.range((least + 1) * 8 + thread, (seen + 1) * 8, self.wideners, unroll=1):
                for word in smem.load_i32x4(base + self.raw_at + RAW_BYTES + at * 16):
                    found = found | self.nonfinite_bytes(word)
            votes = ptx.ballot(found)
            smem.store_i32_if(base + self.raw_meta + 8 + (thread >> 5) * 4, votes, Int32(lane == 0))
            ptx.warp_barrier()

    @cute.jit
    def widen_block(self, source: Int32, target: Int32, thread: Int32, seen: Int32):
        """128 x 128 bytes to 16-bit elements, both in the 128-byte swizzle; rows past `seen` become zeros."""
        for at in cutlass.range(thread, 1024, self.wideners, unroll=1):
            row, chunk = at >> 3, at & 7
            turn = row & 7
            words = smem.load_i32x4(source + row * 128 + ((chunk ^ turn) << 4))
            wide = [x for word in words for x in self.widen(word)]
            keep = ptx.select(row <= seen, Int32(-1), Int32(0))
            wide = [x & keep for x in wide]
            place = target + (chunk >> 2) * HALF + row * 128
            for part in cutlass.range_constexpr(2):
                column = (chunk & 3) * 2 + part
                smem.store_i32x4(place + ((column ^ turn) << 4), wide[4 * part : 4 * part + 4])

    def widen(self, word):
        """Four fp8 -> two words of the type of q; exact for both."""
        halves = mma.widen_e4m3(word) if self.kv_dtype == "e4m3" else mma.widen_e5m2(word)
        if self.dtype == "f16":
            return list(halves)
        return [ptx.pack_bf16(*ptx.unpack_fp16(half)) for half in halves]
