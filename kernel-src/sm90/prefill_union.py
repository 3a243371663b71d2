"""Prefill by union tiles: sparse attention of 8 neighbouring query tokens over the union of their blocks. SM90.

Problem
    Row = (token, query head), 16 query heads a KV head. out = softmax(q K^T * softmax_scale * k_scale) V * v_scale and
    lse over the visible tokens of the row's blocks of 128. Neighbouring tokens mostly pick the same blocks: a tile of 8
    tokens x 16 heads = 128 rows loads each block of its union once (neutral/union.py lists them).

Tile picture
    S = Q K^T: m64n128k16, 64 rows = 4 tokens; a warp's 16 rows are one token, so what a token may see is the same for a
    warp. O += P V with P from registers. Two such warpgroups share K and V.

Roles (3 warpgroups, 4 for a float8 cache; a CTA takes tiles cta, cta + grid, ... of the list "last tile first, one KV head
       after the other"; where they are few, every second one by its number of blocks: shared/union_tiles.py)
    loaders      4 warps, and 4 that widen float8: shared/union_loaders.py.
    consumers    2 x 4 warps. Q K of the next block is under way while the softmax of this one waits for P V.
                 Blocks that none of a warpgroup's tokens chose are passed on: it waits for "full" and releases.

Order of the sums
    Ascending blocks, one rescaling a block. A block that a token did not choose multiplies by 1 and adds 0 * V: a row's
    bits depend on its own blocks alone, not on the tile, the grid or the batch around it.

What may hold anything
    K past the length: its columns are set to -inf. V past the length: the V warp makes zeros of those rows (0 * NaN).
    A NaN or infinity in V that a token sees is for the tile's others 0 * NaN: shared/union_tiles.py has these computed again.
    A page outside the cache is a coordinate outside the tensor map: zeros. Rows of Q behind a tile's last token belong
    to other requests and are not written.

Float8 caches
    Widened to fp16, here or before (sm90/prefill_widen.py), so Q is fp16 too: the consumers turn bf16 rows into fp16 in
    place, each by a power of two.

Deadlock rule
    Q K of the next block is issued before P V of this one. Over a gap of more positions than there are stages the K
    loader waits for V's release and back; the warpgroup then finishes P V first and passes the stages on after it.

Shared memory
    16-bit       Q 32 KiB, K and V 3 stages of 32 KiB each, lists 2 x 2 x 512 bytes, records, mbarriers
    float8       Q 32 KiB, K and V 2 stages of 32 KiB each and 2 of 16 KiB before them

Budget (H200: 2,048 bf16 FMA and 16 exp2 a clock and SM, 1.755 GHz; some 32 bytes of L2)
    A block that both warpgroups need costs 2 x 128^3 FMA = 2,048 clocks of the tensor cores, 16,384 exp2 = 1,024 clocks
    and 64 KiB (float8: 32) from L2 = 2,048 clocks. What is issued for tokens that did not choose a block is u(4) of
    neutral/union.py.

Limits
    head_dim 128, 16 query heads a KV head, pages of 64 or 128, K <= 32, blocks < 2^16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, ptx, smem, softmax, tma
from shared.program import Kernel, Program
from shared.union_tiles import (
    COUNT_A,
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
from shared.union_loaders import GROUP, HALF, TILE, UnionLoaders


class PrefillUnion(Kernel, UnionLoaders):
    """One variant: KV dtype."""

    ctas_per_sm = 1

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
            hopper.clear(S)
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
        sign = softmax.sign_of(smem.load_f32(record + 4 * SCALE))
        high = ptx.clamp(end + token, Int32(0), length) - (((entry >> 16) & 0xFFFF) << 7)
        high = ptx.select((entry & (1 << 13)) != 0, ptx.minimum_i32(high, Int32(64)), high)
        low = ptx.select((entry & (1 << 12)) != 0, Int32(64), Int32(0))
        # Against constants: the columns' numbers would take 32 registers throughout the loop.
        column = (lane & 3) * 2
        low, high = low - column, high - column
        for i in range(64):
            at = (i >> 2) * 8 + (i & 1)
            S[i] = ptx.select((low <= at) & (high > at), ptx.multiply(S[i], sign), Float32(softmax.NEG_INF))

    def pack(self, S, P):
        pack = ptx.pack_bf16 if self.mma_dtype == "bf16" else ptx.pack_fp16
        for i in range(32):
            P[i] = pack(S[2 * i], S[2 * i + 1])

    @cute.jit
    def rescale(self, O: cute.Tensor, state: cute.Tensor):
        """Once the maxima have settled there is nothing to do for most blocks."""
        if ptx.ballot(Int32((state[4] != Float32(1.0)) | (state[5] != Float32(1.0)))) != 0:
            for i in cutlass.range_constexpr(64):
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
            tokens = smem.load_i32(record + 4 * TOKEN_MASK)
            scale, v_scale = smem.load_f32(record + 4 * SCALE), smem.load_f32(record + 4 * V_SCALE)
            head = smem.load_i32(record + 4 * HEAD)
            token = group * 4 + warp
            self.begin(O, state, scale)
            if total > 0:
                smem.mbarrier_wait(base + self.barriers["q_full"], q_parity)
                q_parity = q_parity ^ 1
                if cutlass.const_expr(self.mma_dtype == "f16"):
                    if bf16_query != 0:
                        self.widen_query(base + self.q_at + token * GROUP * 128, state, lane)
                        hopper.named_barrier(group + 1, 128)
                behind = start
                if count > 0:
                    list_at = base + self.lists_at + (buffer * 2 + group) * (LIST_ENTRIES * 4)
                    behind = self.walk(base, list_at, count, start, q, S, O, P, state, record, token, lane)
                    # One of the 16 rows: a NaN that came as 0 * NaN is in all of them.
                    bad = ptx.ballot(self.has_nan([O[4 * i + c] for i in range(16) for c in range(2)]))
                    self.report(record, token, lane, bad)
                else:
                    hopper.mbarrier_arrive_if(base + self.barriers["q_empty"], Int32(lane == 0))
                self.pass_on(("k", "v"), base, behind, start + total, lane)
                start = self.folded(start + total)
            self.record_read(base, buffer, lane)
            if (tokens >> token) & 1 != 0:
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
        tma.fence_async()

    def begin(self, O, state, scale):
        size = ptx.maximum(ptx.absolute(scale), Float32(softmax.SMALLEST))
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
            factor = softmax.output_factor(l, v_scale)
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
        if warp < self.first_consumer:
            hopper.give_registers(self.registers[0])
            maps = [tma.map_address(m) for m in (q_map, k_map, v_map)]
            shape = (slots, heads, requests, page_bits, capacity, causal)
            lists = Lists(tiles, counts, words, pages, choice, *shape)
            scales = Scales(k_scale, v_scale, k_scale_head, v_scale_head, softmax_scale)
            self.load(base, warp, lane, maps, lists, scales, cta, ctas)
        else:
            hopper.take_registers(self.registers[1])
            group = (warp - self.first_consumer) >> 2
            strides = (out_token, out_head, lse_token, lse_head)
            self.consume(base, out, lse, *strides, bf16_query, group, warp & 3, lane)


def programs():
    return [Program(f"prefill_union_{dtype}", PrefillUnion(dtype)) for dtype in ("bf16", "f16", "e4m3", "e5m2")]
