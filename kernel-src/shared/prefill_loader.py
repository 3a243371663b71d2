"""Loading warps of the KV-stationary prefill (sm90/prefill.py): lists in, tiles of K, V and Q out to shared memory.

Warp 0 walks the CTA's tiles and reads heads and entries (invert.py) two tiles ahead. A tile has one block or the two of a
pair. Blocks are numbered in the order in which the CTA first needs them; block n lies in the stages 2 (n & 1), K, and
2 (n & 1) + 1, V, until a tile that needs it is followed by one that doesn't. The lists' order (tiles of a pair's first
block, of both, of its second) thus loads each block once. Q is gathered into a ring of its own, a box of `rows` query heads
for each token and half of D. fp8 blocks land in the upper half of their stage, and warps 1-3 widen them in place.

A stage is full (mbarrier `full`) once its bytes are there or, widened, once the three widening warps have arrived; the
consumers' warps free it (`empty`). Rows of V that no token sees are made zeros: 0 * NaN is NaN.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, mma, ptx, smem, softmax, tma

CONSUMER_WARPS, WIDENING_WARPS = 8, 3
TILE_BYTES = 32768  # 128 x 128 x 2
HALF = TILE_BYTES // 2  # of 64 columns
RAW_BYTES = 16384
KV_STAGES, Q_STAGES = 4, 2
HEAD_BYTES, META_BYTES = 32, 128
# Flags of a tile: first and last of its first block in this CTA; the same of its second; whether it has a second.
NEW, LAST, NEW_SECOND, LAST_SECOND, BOTH = 1, 2, 4, 8, 16
BLOCK_BIT, HEAD_BIT = 5, 8  # in the same word: number of the first block, two bits; KV head of the chunk


def stage_of(block):
    """(stage of K of the block with this number, parity of its fill). V has the next stage."""
    return (block & 1) * 2, (block >> 1) & 1


# A bin's number is 4 * pair + kind (invert.py): 0 the tokens of the pair's first block alone, 1 of both, 2 of the second.


def is_both(number):
    return Int32((number & 3) == 1)


def first_block(number):
    return ((number >> 2) << 1) | ((number >> 1) & 1)


class TileLoader:
    def __init__(self, q_dtype, kv_dtype, rows, ring_bytes, weights_bytes):
        """`ring_bytes`, `weights_bytes`: shared memory of the combining warps."""
        self.dtype, self.kv_dtype, self.rows = q_dtype, kv_dtype, rows
        self.fp8 = kv_dtype in ("e4m3", "e5m2")
        self.tokens = 128 // rows  # of a tile
        self.kv_at = 0
        self.q_at = KV_STAGES * TILE_BYTES
        self.ring_at = self.q_at + Q_STAGES * TILE_BYTES
        self.mbarriers_at = self.ring_at + ring_bytes
        names = ["q_full", "q_empty", "kv_full", "kv_empty", "raw_full"]
        self.mbarrier = {name: self.mbarriers_at + 32 * i for i, name in enumerate(names)}
        self.v_landed = self.mbarriers_at + 32 * len(names)
        self.raw_meta = self.v_landed + 16
        self.meta_at = self.mbarriers_at + 256
        self.weights_at = self.meta_at + Q_STAGES * META_BYTES
        self.dynamic_smem = self.weights_at + weights_bytes

    def bar(self, base, name, stage):
        return base + self.mbarrier[name] + stage * 8

    # ---- warp 0 of the CTA

    def load_head(self, heads, tile, lane, ok):
        """A tile's head, word i in lane i: (bin, KV head | tokens << 16, pages of the first block, a, columns, pages of the
        second block); zeros where `ok` is 0."""
        return ptx.load_i32_if(heads + Int64(tile) * HEAD_BYTES + Int64(lane * 4), Int32(lane < 8) & ok, 0)

    def kept(self, number, next_number, more):
        """Whether the next tile has the first block of a tile, and the second, where it expects them."""
        block, both = first_block(number), is_both(number)
        next_block, next_both = first_block(next_number), is_both(next_number)
        same = more & Int32(next_block == block)
        first = same & (next_both | (1 - both))
        second = both & ptx.select(next_both != 0, same, more & Int32(next_block == block + 1))
        return first, second

    @cute.jit
    def produce(
        self,
        base: Int32,
        lane: Int32,
        first: Int32,
        stop: Int32,
        q_map: Int64,
        k_map: Int64,
        v_map: Int64,
        heads: Int64,
        entries: Int64,
        k_scale: Int64,
        k_scale_head: Int64,
        q_policy: Int64,
        kv_policy: Int64,
        first_token: Int32,
        chunk_tokens: Int32,
        first_head: Int32,
        chunk_heads: Int32,
        group: Int32,
        width: Int32,
        page_bits: Int32,
        softmax_scale: Float32,
    ):
        word = self.load_head(heads, first, lane, Int32(1))
        word_n = self.load_head(heads, first + 1, lane, Int32(first + 1 < stop))
        entry = self.load_entry(entries, first, word, lane, Int32(1))
        stage, q_parity = Int32(0), Int32(1)
        blocks, landed = Int32(0), Int32(0)  # blocks loaded
        new, new_second = Int32(1), Int32(1)
        for tile in cutlass.range(first, stop, 1, unroll=1):
            more = Int32(tile + 1 < stop)
            entry_n = self.load_entry(entries, tile + 1, word_n, lane, more)
            word_2 = self.load_head(heads, tile + 2, lane, Int32(tile + 2 < stop))

            head = ptx.clamp(ptx.shuffle(word, Int32(1)) & 0xFFFF, first_head, first_head + chunk_heads - 1)
            # What a list says may be wrong; what it leads to lies within the chunk.
            local, slot = entry >> 5, entry & 31
            good = Int32((entry >= 0) & (local < chunk_tokens) & (slot < width))
            entry = ptx.select(good != 0, entry, Int32(-1))
            number, number_n = ptx.shuffle(word, Int32(0)), ptx.shuffle(word_n, Int32(0))
            both = is_both(number)
            keep, keep_second = self.kept(number, number_n, more)
            new_second = both & new_second
            block = blocks - (1 - new) - (both & (1 - new_second))
            blocks = blocks + new + new_second
            columns = ptx.shuffle(word, Int32(5))
            if new != 0:
                self.load_keys(base, lane, k_map, head, word, 2, page_bits, kv_policy, block)

            # Q and what the consumers must know
            q_full = self.bar(base, "q_full", stage)
            smem.mbarrier_wait(self.bar(base, "q_empty", stage), q_parity)
            meta = base + self.meta_at + stage * META_BYTES
            if lane < self.tokens:
                smem.store_i32(meta + lane * 4, entry)
            shift = ptx.shuffle(word, Int32(4))
            if lane == 16:
                scale = softmax_scale * ptx.load_f32_or_one(k_scale + Int64(head) * k_scale_head)
                flags = new * NEW | (1 - keep) * LAST | new_second * NEW_SECOND | both * BOTH
                flags = flags | (both & (1 - keep_second)) * LAST_SECOND
                flags = flags | ((block & 3) << BLOCK_BIT) | ((head - first_head) << HEAD_BIT)
                scale = ptx.f32_bits(scale * Float32(softmax.LOG2_E))
                smem.store_i32x4(meta + 64, [flags, shift, columns, scale])
            ptx.warp_barrier()
            present = ptx.count_bits(ptx.ballot(Int32((entry >= 0) & (lane < self.tokens))))
            if lane == 0:
                smem.mbarrier_expect(q_full, present * (self.rows * 256))
            ptx.warp_barrier()
            entry_here = ptx.shuffle(entry, lane >> 1)
            if (lane < 2 * self.tokens) & (entry_here >= 0):
                target = base + self.q_at + stage * TILE_BYTES + (lane & 1) * HALF + (lane >> 1) * (self.rows * 128)
                at = [(lane & 1) * 64, head * group, first_token + (entry_here >> 5)]
                tma.tma_load(target, q_map, at, q_full, q_policy)

            if new != 0:
                landed = self.load_values(
                    base, lane, v_map, head, word, 2, page_bits, kv_policy, block, columns & 0xFF, landed
                )
            if new_second != 0:
                self.load_keys(base, lane, k_map, head, word, 6, page_bits, kv_policy, block + 1)
                landed = self.load_values(
                    base, lane, v_map, head, word, 6, page_bits, kv_policy, block + 1, (columns >> 16) & 0xFF, landed
                )
            new = 1 - ptx.select((both != 0) & (is_both(number_n) == 0), keep_second, keep)
            new_second = 1 - keep_second
            word, word_n, entry = word_n, word_2, entry_n
            stage = stage ^ 1
            q_parity = q_parity ^ Int32(stage == 0)
            ptx.warp_barrier()
        if cutlass.const_expr(self.fp8):
            stage, parity = stage_of(blocks)
            smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
            if lane == 0:
                smem.store_i32(base + self.raw_meta + stage * 4, Int32(-1))
                hopper.mbarrier_arrive(self.bar(base, "raw_full", stage))

    def load_entry(self, entries, tile, word, lane, ok):
        count = (ptx.shuffle(word, Int32(1)) >> 16) & 0xFF
        present = Int32(lane < ptx.minimum_i32(count, Int32(self.tokens))) & ok
        return ptx.load_i32_if(entries + (Int64(tile) * self.tokens + Int64(lane)) * 4, present, -1)

    @cute.jit
    def load_block(
        self, target: Int32, tensor_map: Int64, head: Int32, a: Int32, b: Int32, bits: Int32, policy: Int64, full: Int32
    ):
        """A block of K or V: boxes of 128 bytes x page."""
        if cutlass.const_expr(self.fp8):
            target = target + HALF
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
        word: Int32,  # of the tile's head
        pages: cutlass.Constexpr,  # which of its words has the first page
        page_bits: Int32,
        policy: Int64,
        block: Int32,
    ):
        a, b = ptx.shuffle(word, Int32(pages)), ptx.shuffle(word, Int32(pages + 1))
        stage, parity = stage_of(block)
        smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
        if lane == 0:
            target = base + self.kv_at + stage * TILE_BYTES
            if cutlass.const_expr(self.fp8):
                smem.store_i32(base + self.raw_meta + stage * 4, Int32(127))
            full = self.bar(base, "raw_full" if self.fp8 else "kv_full", stage)
            self.load_block(target, k_map, head, a, b, page_bits, policy, full)

    @cute.jit
    def load_values(
        self,
        base: Int32,
        lane: Int32,
        v_map: Int64,
        head: Int32,
        word: Int32,
        pages: cutlass.Constexpr,
        page_bits: Int32,
        policy: Int64,
        block: Int32,
        seen: Int32,
        landed: Int32,
    ):
        """Rows of V past column `seen`, which no token sees, become zeros. Returns the parity of `v_landed`."""
        a, b = ptx.shuffle(word, Int32(pages)), ptx.shuffle(word, Int32(pages + 1))
        stage, parity = stage_of(block)
        stage = stage + 1
        target = base + self.kv_at + stage * TILE_BYTES
        smem.mbarrier_wait(self.bar(base, "kv_empty", stage), parity ^ 1)
        if cutlass.const_expr(self.fp8):
            if lane == 0:
                smem.store_i32(base + self.raw_meta + stage * 4, seen)
                self.load_block(target, v_map, head, a, b, page_bits, policy, self.bar(base, "raw_full", stage))
        else:
            full = self.bar(base, "kv_full", stage)
            if seen == 127:
                if lane == 0:
                    self.load_block(target, v_map, head, a, b, page_bits, policy, full)
            else:
                arrived = base + self.v_landed
                if lane == 0:
                    self.load_block(target, v_map, head, a, b, page_bits, policy, arrived)
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

    # ---- warps 1-3, fp8 only

    @cute.jit
    def widen_blocks(self, base: Int32, warp: Int32, lane: Int32):
        fill, going = Int32(0), Int32(1)  # fills of the four stages in turn
        while going != 0:
            stage = fill & 3
            smem.mbarrier_wait(self.bar(base, "raw_full", stage), (fill >> 2) & 1)
            seen = smem.load_i32(base + self.raw_meta + stage * 4)
            going = Int32(seen >= 0)
            if going != 0:
                self.widen_block(base + self.kv_at + stage * TILE_BYTES, warp, lane, seen)
                tma.fence_async()
                ptx.warp_barrier()
                if lane == 0:
                    hopper.mbarrier_arrive(self.bar(base, "kv_full", stage))
            fill = fill + 1

    @cute.jit
    def widen_block(self, stage: Int32, warp: Int32, lane: Int32, seen: Int32):
        """128 x 128 bytes in the upper half of a stage to 16-bit elements in all of it, both in the 128-byte swizzle; rows
        past `seen` become zeros. A row's bytes give way to its upper 64 elements: eight lanes read it, then write."""
        for first in cutlass.range(warp * 4, 128, WIDENING_WARPS * 4, unroll=1):
            row, chunk = first + (lane >> 3), lane & 7
            turn = row & 7
            place = stage + row * 128
            words = smem.load_i32x4(place + HALF + ((chunk ^ turn) << 4))
            wide = [x for word in words for x in self.widen(word)]
            keep = ptx.select(row <= seen, Int32(-1), Int32(0))
            wide = [x & keep for x in wide]
            ptx.warp_barrier()
            place = place + (chunk >> 2) * HALF
            for part in cutlass.range_constexpr(2):
                column = (chunk & 3) * 2 + part
                smem.store_i32x4(place + ((column ^ turn) << 4), wide[4 * part : 4 * part + 4])

    def widen(self, word):
        """Four fp8 -> two words of the type of q; exact for both."""
        halves = mma.widen_e4m3(word) if self.kv_dtype == "e4m3" else mma.widen_e5m2(word)
        if self.dtype == "f16":
            return list(halves)
        return [ptx.pack_bf16(*ptx.unpack_fp16(half)) for half in halves]
