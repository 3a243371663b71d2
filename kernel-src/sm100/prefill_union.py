"""Prefill by union tiles on SM100 and SM103: the same stage as sm90/prefill_union.py, with its arguments and lists, on tcgen05.

Problem
    sm90/prefill_union.py: 8 neighbouring query tokens x 16 query heads = 128 rows, over the union of their blocks.

Tile picture
    M = 128 rows, N = 128 keys, D = 128: a product each way a block, for all 8 tokens; what a token did not choose is
    masked. S = Q K^T in tensor memory, two blocks in turn, P in 16 bits over S, O += P V in tensor memory (384 of 512
    columns). A row is a lane and a thread: its maximum and sum need no exchange.

Roles (3 warpgroups; a CTA takes tiles cta, cta + grid, ... of the list)
    warps 0-3     loaders (shared/union_loaders.py); warps 4-7: widen float8, two an operand
    warp 4, or 3 with a float8 cache: products. Q K of the next block is issued ahead of P V of this one
    warps 8-11    softmax of the 128 rows, rescaling of O, output

Order of the sums, bits
    Ascending blocks. A row's reference m moves when a logit is more than 2^8 above it, which rows do seldom; its O is then
    rescaled in tensor memory. Rows that a block doesn't concern add 0 * V. So a row's bits depend on its own blocks alone.

Float8 caches, ends of requests, deadlocks
    As on SM90; there are no lists of half tiles, so no block is passed on unread.

Shared memory
    As on SM90 (a list of 256 blocks a tile instead of two of 128).

Budget a block (B200: 4,096 bf16 FMA, 16 exp2 a clock and SM)
    Products 2 x 512 clocks; exponentials 1,024, of which POLYNOMIAL of 8 pairs go through FMAs; 64 KiB from L2 (float8: 32).
    Against the KV-stationary kernel: no partial results (64 KiB through L2 a tile and block), but products for what
    tokens did not choose, of 8 tokens at a time.
"""

import os

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import blackwell, hopper, ptx, smem, softmax, tma
from shared.program import Kernel, Program
from shared.union_tiles import (
    BLOCK,
    EDGE_BITS,
    END,
    FIRST,
    HEAD,
    LENGTH,
    LIST_ENTRIES,
    RECORD,
    SCALE,
    TOKEN_MASK,
    V_SCALE,
    Lists,
    Scales,
)
from shared.union_loaders import GROUP, HALF, LOADER_WARPS, TILE, WIDENERS, UnionLoaders

FIRST_CONSUMER = 8  # warp
REGISTERS = (120, 240)  # a thread: loading, widening and multiplying; softmax. Of 65,536 / 128 in all
O_COLUMN = 2 * BLOCK  # behind S of two blocks
PIECE = 32  # columns whose exponentials are made together
SMALL_PIECE = 16  # of O, while S is in registers
POLYNOMIAL = 2  # of 8 pairs
GROWTH = 8.0  # log2 of what a p may reach before its row's reference moves


class PrefillUnion(Kernel, UnionLoaders):
    """One variant: KV dtype."""

    ctas_per_sm = 1

    def __init__(self, kv_dtype):
        super().__init__(kv_dtype)
        self.threads = 384
        self.multiplier = LOADER_WARPS - 1 if self.fp8 else LOADER_WARPS  # warp
        self.polynomial = POLYNOMIAL if os.environ.get("CUTE_DSL_ARCH") == "sm_100a" else 0
        # Stages are freed by commits. Published tiles are read by loaders, wideners, multiplier and softmax warps.
        readers = (1 + 2 * WIDENERS if self.fp8 else 3) + 1 + 4
        for name, count, arrivals in (
            ("k_empty", self.stages, 1), ("v_empty", self.stages, 1), ("q_empty", 1, 1), ("list_empty", 2, readers)
        ):  # fmt: skip
            self.arrivals.update({self.barriers[name] + 8 * i: arrivals for i in range(count)})
        at = self.dynamic_smem
        for name, count, arrivals in (
            ("s_full", 2, 1), ("p_ready", 2, 4), ("o_done", 2, 1), ("q_ready", 1, 4), ("drained", 1, 4)
        ):  # fmt: skip
            self.barriers[name] = at
            self.arrivals.update({at + 8 * i: arrivals for i in range(count)})
            at += 8 * count
        self.slot = at
        self.dynamic_smem = at + 8
        assert self.dynamic_smem <= 232448
        self.first_half = None

    def append(self, base, which, count, entry, chosen):
        """Of the two calls for the tokens' halves the second stores what the first was told, too: one list of all blocks,
        tokens | edge bits | block << 16, in place of SM90's lists of what a half chose."""
        if self.first_half is None:
            self.first_half = chosen
            return count
        tokens, self.first_half = self.first_half | (chosen << 4), None
        at = base + self.lists_at + (which - 1) * (LIST_ENTRIES * 4) + (entry & 255) * 4
        smem.store_i32_if(at, (entry & ~0xFFF) | tokens, tokens)
        return count

    # ---- products, by one warp; `number` counts blocks over all tiles, modulo 4

    def bar_of(self, base, name, number):
        return base + self.barriers[name] + (number & 1) * 8

    @cute.jit
    def scores(self, base: Int32, memory: Int32, position: Int32, number: Int32, is_last: Int32):
        stage, _ = self.ring_of(position)
        self.wait_full(base, "k_full", position)
        steps = [blackwell.k_major_step(i, HALF) for i in range(blackwell.K_STEPS)]
        q, k = blackwell.descriptor(base + self.q_at), blackwell.descriptor(base + self.k_at + stage * TILE)
        kind = blackwell.instruction(self.mma_dtype, BLOCK)
        blackwell.multiply(memory + (number & 1) * BLOCK, q, k, kind, steps, steps)
        blackwell.commit(self.bar_of(base, "s_full", number))
        blackwell.commit(base + self.barriers["k_empty"] + stage * 8)
        blackwell.commit_if(base + self.barriers["q_empty"], is_last)

    @cute.jit
    def values(self, base: Int32, memory: Int32, position: Int32, number: Int32, accumulate: Int32):
        stage, _ = self.ring_of(position)
        smem.mbarrier_wait(self.bar_of(base, "p_ready", number), (number >> 1) & 1)
        blackwell.fence_after()
        self.wait_full(base, "v_full", position)
        p_steps = [8 * i for i in range(blackwell.K_STEPS)]
        v_steps = [blackwell.mn_major_step(i) for i in range(blackwell.K_STEPS)]
        v = blackwell.descriptor(base + self.v_at + stage * TILE, HALF)
        kind = blackwell.instruction(self.mma_dtype, BLOCK, b_mn_major=True)
        p = memory + (number & 1) * BLOCK
        blackwell.multiply(memory + O_COLUMN, p, v, kind, p_steps, v_steps, accumulate)
        blackwell.commit(self.bar_of(base, "o_done", number))
        blackwell.commit(base + self.barriers["v_empty"] + stage * 8)

    @cute.jit
    def multiply(self, base: Int32, memory: Int32, lane: Int32):
        buffer, turn, q_parity, start, done = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        total = self.next_count(base, buffer, turn)
        while total >= 0:
            self.record_read(base, buffer, lane)
            if total > 0:
                smem.mbarrier_wait(base + self.barriers["q_ready" if self.fp8 else "q_full"], q_parity)
                q_parity = q_parity ^ 1
                self.scores(base, memory, start, done, Int32(total == 1))
                for k in cutlass.range(total, unroll=1):
                    if k + 1 < total:
                        self.scores(base, memory, start + k + 1, done + k + 1, Int32(k + 2 == total))
                    self.values(base, memory, start + k, done + k, Int32(k > 0))
                start = self.folded(start + total)
                done = (done + total) & 3
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            total = self.next_count(base, buffer, turn)
        smem.mbarrier_wait(base + self.barriers["drained"], 0)
        blackwell.fence_after()

    # ---- softmax and output

    @cute.jit
    def transform(
        self,
        base: Int32,
        memory: Int32,
        out: Int64,
        lse: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        bf16_query: Int32,
        warp: Int32,
        lane: Int32,
    ):
        state = cute.make_rmem_tensor(cute.make_layout(3), Float32)  # m (log2 units), l, factor to log2 units
        quarter, row = memory + (warp << 21), warp * 32 + lane
        token = row >> 4
        buffer, turn, q_parity, done = Int32(0), Int32(0), Int32(0), Int32(0)
        total = self.next_count(base, buffer, turn)
        while total >= 0:
            record = base + self.records_at + buffer * RECORD
            first, tokens = smem.load_i32(record + 4 * FIRST), smem.load_i32(record + 4 * TOKEN_MASK)
            scale, v_scale = smem.load_f32(record + 4 * SCALE), smem.load_f32(record + 4 * V_SCALE)
            head = smem.load_i32(record + 4 * HEAD)
            high = smem.load_i32(record + 4 * END) + token
            high = ptx.clamp(high, Int32(0), smem.load_i32(record + 4 * LENGTH))
            sign = softmax.sign_of(scale)
            state[0], state[1] = Float32(softmax.EMPTY), Float32(0.0)
            state[2] = ptx.maximum(ptx.absolute(scale), Float32(softmax.SMALLEST))
            if total > 0:
                if cutlass.const_expr(self.fp8):
                    smem.mbarrier_wait(base + self.barriers["q_full"], q_parity)
                    q_parity = q_parity ^ 1
                    if bf16_query != 0:
                        self.widen_query(base + self.q_at + row * 128, row & 7, state)
                    self.arrive(base + self.barriers["q_ready"], lane)
                for k in cutlass.range(total, unroll=1):
                    number = done + k
                    entry = smem.load_i32(base + self.lists_at + buffer * (2 * LIST_ENTRIES * 4) + k * 4)
                    smem.mbarrier_wait(self.bar_of(base, "s_full", number), (number >> 1) & 1)
                    blackwell.fence_after()
                    self.softmax(base, quarter, warp, token, entry, high, sign, number, Int32(k > 0), state)
                    blackwell.fence_before()
                    self.arrive(self.bar_of(base, "p_ready", number), lane)
                self.wait_for_o(base, done + total - 1)
                done = (done + total) & 3
            at = out + Int64(first + token) * out_token + Int64(head * GROUP + (row & 15)) * out_head
            lse_at = lse + Int64(first + token) * lse_token + Int64(head * GROUP + (row & 15)) * lse_head
            here = (tokens >> token) & 1
            bad = self.write(quarter + O_COLUMN, at, here, total, v_scale, bf16_query, state)
            votes = ptx.ballot(bad)  # of the warp's two tokens, 16 rows each
            self.report(record, token, lane & 15, (votes >> (lane & 16)) & 0xFFFF)
            self.record_read(base, buffer, lane)
            if (here != 0) & (lse != 0):
                ptx.store_f32(lse_at, softmax.natural_lse(state[0], state[1]))
            buffer = buffer ^ 1
            turn = turn ^ (buffer ^ 1)
            total = self.next_count(base, buffer, turn)
        blackwell.fence_before()
        self.arrive(base + self.barriers["drained"], lane)

    def wait_for_o(self, base, number):
        """Until P V of that block is done. Two mbarriers in turn: of the block before, it may still be under way."""
        smem.mbarrier_wait(self.bar_of(base, "o_done", number), (number >> 1) & 1)
        blackwell.fence_after()

    def arrive(self, bar, lane):
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(bar, Int32(lane == 0))

    @cute.jit
    def softmax(
        self,
        base: Int32,
        quarter: Int32,  # the warp's lanes of tensor memory
        warp: Int32,
        token: Int32,
        entry: Int32,
        high: Int32,  # the token sees positions below it
        sign: Float32,
        number: Int32,
        has_o: Int32,
        state: cute.Tensor,
    ):
        at = quarter + (number & 1) * BLOCK
        pair = (entry >> (2 * warp)) & 3  # the warp's two tokens
        if pair == 0:
            for piece in cutlass.range_constexpr(2):
                blackwell.store_row(at + 32 * piece, [Int32(0)] * 32)
        else:
            S = cute.make_rmem_tensor(cute.make_layout(BLOCK), Float32)
            for i, x in enumerate(blackwell.load_row(at, BLOCK)):
                S[i] = x
            if ((entry & EDGE_BITS) != 0) | (pair != 3):
                self.mask(S, entry, token, high, sign)
            logits, scale = [S[i] for i in range(BLOCK)], state[2]
            top = ptx.multiply(blackwell.row_maximum(logits), scale)
            grows = top > state[0] + Float32(GROWTH)
            m = ptx.select(grows, top, state[0])
            factor = ptx.select(grows, ptx.exp2(state[0] - m), Float32(1.0))
            if (ptx.ballot(Int32(factor != Float32(1.0))) != 0) & (has_o != 0):
                self.rescale(base, quarter + O_COLUMN, number, factor)
            totals = [(Float32(0.0), Float32(0.0))] * 2
            for piece in cutlass.range_constexpr(BLOCK // PIECE):
                words, totals = blackwell.probabilities(
                    logits[piece * PIECE : (piece + 1) * PIECE], scale, m, totals, self.mma_dtype, self.polynomial
                )
                blackwell.store_row(at + piece * (PIECE // 2), words)
            total = blackwell.add2(totals[0], totals[1])
            state[0], state[1] = m, ptx.fma(state[1], factor, total[0] + total[1])
        blackwell.wait_stores()

    def mask(self, S, entry, token, high, sign):
        """-inf outside of what the token sees, all where it did not choose the block; a negative scale turns the logits."""
        high = high - (((entry >> 16) & 0xFFFF) << 7)
        high = ptx.select((entry & (1 << 13)) != 0, ptx.minimum_i32(high, Int32(64)), high)
        high = ptx.select((entry >> token) & 1 != 0, high, Int32(0))
        low = ptx.select((entry & (1 << 12)) != 0, Int32(64), Int32(0))
        for i in range(BLOCK):
            S[i] = ptx.select((low <= i) & (high > i), ptx.multiply(S[i], sign), Float32(softmax.NEG_INF))

    @cute.jit
    def rescale(self, base: Int32, at: Int32, number: Int32, factor: Float32):
        """Of what the blocks before gave: P V of the last one may still be under way."""
        self.wait_for_o(base, number - 1)
        for piece in cutlass.range_constexpr(BLOCK // SMALL_PIECE):
            O = blackwell.load_row(at + piece * SMALL_PIECE, SMALL_PIECE)
            pairs = [blackwell.multiply2(O[2 * i : 2 * i + 2], (factor, factor)) for i in range(SMALL_PIECE // 2)]
            blackwell.store_row(at + piece * SMALL_PIECE, [ptx.f32_bits(x) for pair in pairs for x in pair])

    @cute.jit
    def widen_query(self, at: Int32, turn: Int32, state: cute.Tensor):
        """A row of bf16 becomes fp16, times a power of two; the scale of its logits makes up for it."""
        places = [at + half * HALF + ((chunk ^ turn) << 4) for half in range(2) for chunk in range(8)]
        pairs = [ptx.unpack_bf16(word) for place in places for word in smem.load_i32x4(place)]
        top = blackwell.row_maximum([ptx.absolute(x) for pair in pairs for x in pair])
        exponent = ptx.maximum_i32(ptx.f32_bits(top) >> 23, Int32(15))  # biased
        shrink = ptx.f32_from_bits((268 - exponent) << 23)
        grow = ptx.f32_from_bits((exponent - 14) << 23)
        words = [ptx.pack_fp16(a * shrink, b * shrink) for a, b in pairs]
        for i, place in enumerate(places):
            smem.store_i32x4(place, words[4 * i : 4 * i + 4])
        state[2] = ptx.maximum(state[2] * grow, Float32(softmax.SMALLEST))
        tma.fence_async()

    @cute.jit
    def write(
        self,
        o_at: Int32,
        target: Int64,
        here: Int32,
        total: Int32,
        v_scale: Float32,
        bf16_query: Int32,
        state: cute.Tensor,
    ):
        """The row; returns whether it has a NaN."""
        factor = softmax.output_factor(state[1], v_scale)
        sums = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        for i in cutlass.range_constexpr(4):
            sums[i] = Float32(0.0)
        for piece in cutlass.range_constexpr(BLOCK // PIECE):
            words = cute.make_rmem_tensor(cute.make_layout(PIECE // 2), Int32)
            for i in cutlass.range_constexpr(PIECE // 2):
                words[i] = Int32(0)
            if total > 0:
                O = [ptx.multiply(x, factor) for x in blackwell.load_row(o_at + piece * PIECE, PIECE)]
                self.add_pairs(sums, O)
                for i in cutlass.range_constexpr(PIECE // 2):
                    words[i] = self.pair(O[2 * i : 2 * i + 2], bf16_query)
            if here != 0:
                for i in cutlass.range_constexpr(PIECE // 8):
                    at = target + piece * (PIECE * 2) + i * 16
                    ptx.store_words(at, [words[4 * i + j] for j in range(4)])
        return self.has_nan([sums[i] for i in range(4)])

    def add_pairs(self, sums, values):
        for i in range(0, len(values), 2):
            at = i & 2
            sums[at], sums[at + 1] = blackwell.add2((sums[at], sums[at + 1]), values[i : i + 2])

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
        if warp == self.multiplier:
            blackwell.allocate(base + self.slot, blackwell.COLUMNS)
        ptx.barrier()
        memory = smem.load_i32(base + self.slot)
        ptx.wait_for_previous_kernel()
        if warp < FIRST_CONSUMER:
            hopper.give_registers(REGISTERS[0])
            if warp == self.multiplier:
                self.multiply(base, memory, lane)
                blackwell.free(memory, blackwell.COLUMNS)
            else:
                maps = [tma.map_address(m) for m in (q_map, k_map, v_map)]
                shape = (slots, heads, requests, page_bits, capacity, causal)
                lists = Lists(tiles, counts, words, pages, choice, *shape)
                scales = Scales(k_scale, v_scale, k_scale_head, v_scale_head, softmax_scale)
                self.load(base, warp, lane, maps, lists, scales, cta, ctas)
        else:
            hopper.take_registers(REGISTERS[1])
            strides = (out_token, out_head, lse_token, lse_head)
            self.transform(base, memory, out, lse, *strides, bf16_query, warp - FIRST_CONSUMER, lane)


def programs():
    return [Program(f"prefill_union_{dtype}", PrefillUnion(dtype)) for dtype in ("bf16", "f16", "e4m3", "e5m2")]
