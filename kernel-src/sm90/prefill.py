"""Prefill forward, KV-stationary: every selected block of K and V comes into shared memory once a chunk, and all its
queries run past it. Second stage of the KV-stationary prefill (op sparse_attention), after neutral/invert.py.

Problem
    For a chunk of tokens, a list of tiles (heads, entries of invert.py), in order of (sequence, KV head, block). A tile is
    one block of 128 keys of one KV head and up to 8 tokens x 16 query heads (or 16 x 8) that chose it. For each of them a
    partial result: unnormalised o = sum of p v with p = 2^(logit - m), and (m, l = sum of p), m in log2 units. Partials
    lie at (token, KV head, slot) of the chunk, so nothing about the lists comes back in the combination.

Tile picture
    M = 128 rows (token, head) = 2 warpgroups x 64; N = 128 keys; D = 128.
        S = Q K^T    wgmma m64n128k16, both operands in shared memory, 8 k steps
        P = 2^(S - m) in registers, rounded to the 16-bit type of q
        O = P V      wgmma with P from registers, V as MN-major operand
    A group of more than 8 query heads takes 16 rows a token, a smaller one 8; rows past the group are computed and ignored.
    A token's rows lie in one warp: 16 rows are the warp's, 8 rows one half of its accumulators.
    fp8 K and V are widened exactly to the type of q, once a block.

Roles (512 threads, one CTA an SM; a CTA takes units: an equal contiguous range of a chunk's tiles)
    warp 0        takes units and publishes them, reads the lists two tiles ahead, copies K, V (TMA; once a run of tiles of
                  one block) and gathers Q (a box for each token and half of D); zeroes rows of V past the sequence's end
                  (0 * NaN is NaN). It runs ahead of the consumers into the next unit.
    warps 1-3     fp8: widen K and V; otherwise idle
    warps 4-7     combine earlier chunks (shared/partials.py), in units of their own: the traffic of one chunk's combination
                  runs under the products of the next
    warps 8-15    two consumer warpgroups of 64 rows: QK of the next tile runs while the tile's PV does, softmax behind

Chunks
    A launch goes through `chunk_count` chunks, in units that its CTAs take (shared/prefill_units.py). Partials of PLACES
    chunks are kept, so that nothing but the combining warps waits for what the chunk before computes.
    With `early` the products begin before the launch ahead of this one has ended. That is for launches of one chunk each,
    with PLACES places: launch c + 1 is allowed to start once the combining warps of every CTA have passed their wait.

Shared memory (bytes)
    K and V 3 x 32,768 in turn, Q 3 x 32,768 (fp8: 2, and raw K and V of 16,384 each), combine 32,768
    then mbarriers, for each stage of Q what the consumers must know of the tile, the weights of a combined row, and the
    numbers of two units

Partials
    In the order of the accumulators (shared/partials.py): a store is a full 512 bytes of a warp and needs no shuffle. fp16
    partials are taken 2^-7 smaller (m larger by 7), so that they cannot overflow: |o| <= max |v|.

Budget (H200)
    Tile: 8.4 MFLOP = 1.42 us of an SM at 780 TFLOP/s over 132; 16,384 ex2 = 0.58 us at 16 a clock. Bytes through L2: 32 KiB
    of Q in and 32 KiB of partials out a tile, 64 KiB of K and V a run, 32 KiB of partials in for the combination.
    32k tokens, 64/4 heads, K 16: 2.7 ms of products, 17 GB of partials out and in = 4.0 ms at 4.3 TB/s if none stays in L2.

Limits
    head_dim 128, block 128, page 64 or 128, at most 16 query heads a KV head. Bases and strides of q, K, V multiples of 16
    bytes (tensor maps). Lists may hold anything: tokens and slots outside the chunk are left out, pages outside the cache
    read as zeros. Bytes past a sequence's length don't matter; what isn't finite within it reaches the rows that see it and no
    other (shared/prefill_loader.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, progress, ptx, smem, softmax, tma
from shared.partials import UNIT_BYTES, Output, Partials, Shape
from shared.prefill_loader import (
    CONSUMER_WARPS,
    END,
    HALF,
    KV_STAGES,
    LAST,
    META_BYTES,
    NEW,
    TILE_BYTES,
    Source,
    step_of,
)
from shared.prefill_units import COMBINED, DONE, PLACES, PROGRESS_BYTES, Units
from shared.program import Kernel, Program

FIRST_COMBINER, FIRST_CONSUMER = 4, 8  # warps
REGISTERS = (32, 80, 200)  # a thread: loading, combining, consuming warps; of 65,536 / 128 in all


class Prefill(Kernel, Units):
    """One variant: dtype of q (and of the products) and of KV."""

    threads, ctas_per_sm = 512, 1

    def __init__(self, q_dtype, kv_dtype, rows):
        self.combine = Partials(q_dtype, rows)
        super().__init__(q_dtype, kv_dtype, rows, self.combine.ring_bytes, self.combine.weights_bytes)
        self.pack = ptx.pack_bf16 if q_dtype == "bf16" else ptx.pack_fp16
        self.lift = 7.0 if q_dtype == "f16" else 0.0
        self.place_units()

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        chunks: Int64,
        heads: Int64,
        entries: Int64,
        partials: Int64,
        sums: Int64,  # (m, l) of the partials
        k_scale: Int64,  # 0: one
        k_scale_head: Int64,
        q_policy: Int64,  # L2 eviction priorities: of q, of K and V
        kv_policy: Int64,
        chunk: Int32,  # the launch's first in the list of chunks
        first_token: Int32,  # of the chunk; SM100's, as the next two: here a launch has several chunks
        tokens: Int32,
        first_head: Int32,
        chunk_heads: Int32,  # KV heads of the chunk
        kv_heads: Int32,  # in all
        group: Int32,
        width: Int32,
        page_bits: Int32,
        most_tiles: Int32,
        early: Int32,  # 1: the lists were finished by a kernel before the one ahead of this
        opaque: Int32,  # 0
        softmax_scale: Float32,
        # the combination
        combine_partials: Int64,  # SM100's, as sums
        combine_sums: Int64,
        state: Int64,
        out: Int64,
        lse: Int64,
        v_scale: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        v_scale_head: Int64,
        combine_token: Int32,  # SM100's, as the next two
        combine_tokens: Int32,
        combine_head: Int32,
        selective: Int32,
        counters: Int64,  # of the launch's first chunk
        chunk_count: Int32,
        combined_chunks: Int32,  # of them that this launch combines
        chunk_bits: Int32,
        all_tokens: Int32,
        place_slots: Int32,  # partials of a place
    ):
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base()
        if thread == 0:
            self.make_mbarriers(base)
        ptx.barrier()
        if (warp >= FIRST_COMBINER) & (warp < FIRST_CONSUMER):
            hopper.give_registers(REGISTERS[1])
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
            self.combine_units(
                base,
                thread - FIRST_COMBINER * 32,
                counters,
                combined_chunks,
                ctas,
                chunk,
                chunk_bits,
                all_tokens,
                place_slots,
                partials,
                sums,
                state,
                Output(out, lse, v_scale, out_token, out_head, lse_token, lse_head, v_scale_head),
                Shape(chunk_heads, kv_heads, group, width, selective),
            )
        else:
            if early == 0:
                ptx.wait_for_previous_kernel()
            if warp < FIRST_COMBINER:
                hopper.give_registers(REGISTERS[0])
                if warp == 0:
                    maps = [tma.map_address(m) for m in (q_map, k_map, v_map)]
                    lists, k_scales, policies = (heads, entries), (k_scale, k_scale_head), (q_policy, kv_policy)
                    shape = (chunk_heads, group, width)
                    self.produce_units(
                        base,
                        lane,
                        counters,
                        chunk_count,
                        ctas,
                        chunk,
                        chunk_bits,
                        all_tokens,
                        chunks,
                        most_tiles,
                        Source(*maps, *lists, *k_scales, *policies, *shape, page_bits, softmax_scale),
                    )
                if cutlass.const_expr(self.fp8):
                    if warp > 0:
                        self.widen_blocks(base, thread - 32, lane)
            else:
                hopper.take_registers(REGISTERS[2])
                self.consume(
                    base,
                    warp - FIRST_CONSUMER,
                    lane,
                    counters,
                    ctas,
                    place_slots,
                    partials,
                    sums,
                    chunk_heads * width,
                    width,
                    opaque,
                )

    def make_mbarriers(self, base):
        for stage in range(self.q_stages):
            smem.mbarrier_init(self.bar(base, "q_full", stage), 1)
            smem.mbarrier_init(self.bar(base, "q_empty", stage), CONSUMER_WARPS)
        for stage in range(KV_STAGES):
            smem.mbarrier_init(self.bar(base, "kv_full", stage), 3 if self.fp8 else 1)
            smem.mbarrier_init(self.bar(base, "kv_empty", stage), CONSUMER_WARPS)
        for stage in range(2):
            smem.mbarrier_init(self.bar(base, "raw_full", stage), 1)
            smem.mbarrier_init(self.bar(base, "raw_empty", stage), 3)
            smem.mbarrier_init(self.bar(base, "unit_full", stage), 1)
            smem.mbarrier_init(self.bar(base, "unit_empty", stage), CONSUMER_WARPS)
        smem.mbarrier_init(base + self.v_landed, 1)

    # ---- consumers

    def read_meta(self, base, stage, warp):
        """(entry of the first 8 rows, of the others, flags | head of the chunk << 8, shift, columns, factor to log2 units)"""
        meta = base + self.meta_at + stage * META_BYTES
        if self.rows == 16:
            entry = smem.load_i32(meta + warp * 4)
            entries = [entry, entry]
        else:
            entries = smem.load_i32x2(meta + warp * 8)
        flags, shift, columns, scale = smem.load_i32x4(meta + 64)
        return (*entries, flags, shift, columns, ptx.f32_from_bits(scale))

    def multiply_keys(self, S, q, k):
        hopper.fence()
        for step in range(8):
            offset = (step >> 2) * HALF + (step & 3) * 32
            a, b = hopper.descriptor(q + offset), hopper.descriptor(k + offset)
            hopper.wgmma_ss(S, a, b, step > 0, self.dtype)
        hopper.commit()

    def multiply_values(self, O, P, v):
        hopper.fence()
        for step in range(8):
            a = [P[4 * step + i] for i in range(4)]
            hopper.wgmma_rs(O, a, hopper.descriptor(v + step * 2048, HALF), step > 0, self.dtype, True)
        hopper.commit()

    @cute.jit
    def consume(
        self,
        base: Int32,
        warp: Int32,
        lane: Int32,
        counters: Int64,
        ctas: Int32,
        place_slots: Int32,
        partials: Int64,
        sums: Int64,
        token_slots: Int32,
        width: Int32,
        opaque: Int32,
    ):
        """All units of the CTA."""
        S = cute.make_rmem_tensor(cute.make_layout(64), Float32)
        O = cute.make_rmem_tensor(cute.make_layout(64), Float32)
        P = cute.make_rmem_tensor(cute.make_layout(32), Int32)
        k_use, v_use = Int32(-2), Int32(-1)  # of the ring: even uses are K, odd ones V
        stage, parity = Int32(0), Int32(0)
        which, turn = Int32(0), Int32(0)
        number = self.next_unit(base, lane, which, turn)
        while number >= 0:
            chunk_counters = counters + Int64(number) * PROGRESS_BYTES
            if number >= PLACES:
                progress.wait_for(chunk_counters - PLACES * PROGRESS_BYTES + COMBINED, ctas)
            first_place = self.place_of(number) * place_slots
            k_use, v_use, stage, parity = self.consume_unit(
                base, warp, lane, k_use, v_use, stage, parity, S, O, P, partials, sums, first_place,
                token_slots, width, opaque,
            )  # fmt: skip
            ptx.warp_barrier()
            progress.add_if(chunk_counters + DONE, Int32(1), lane == 0)
            which = which ^ 1
            turn = turn ^ (which ^ 1)
            number = self.next_unit(base, lane, which, turn)

    @cute.jit
    def consume_unit(
        self,
        base: Int32,
        warp: Int32,
        lane: Int32,
        k_use: Int32,
        v_use: Int32,
        stage: Int32,
        parity: Int32,
        S: cute.Tensor,
        O: cute.Tensor,
        P: cute.Tensor,
        partials: Int64,
        sums: Int64,
        first_place: Int32,
        token_slots: Int32,
        width: Int32,
        opaque: Int32,
    ):
        group_at = (warp >> 2) * 8192  # a warpgroup's 64 rows in a half of Q
        smem.mbarrier_wait(self.bar(base, "q_full", stage), parity)
        entry0, entry1, flags, shift, columns, scale = self.read_meta(base, stage, warp)
        k_use = k_use + 2
        self.wait_for_block(base, k_use)
        k_stage = step_of(k_use)[0]
        q = base + self.q_at + stage * TILE_BYTES + group_at
        self.multiply_keys(S, q, base + self.kv_at + k_stage * TILE_BYTES)
        hopper.wait(0, S)
        self.release(base, lane, "q_empty", stage, Int32(1))
        self.release(base, lane, "kv_empty", k_stage, flags & LAST)
        place0, place1 = self.places(entry0, entry1, flags, first_place, token_slots, width)
        self.probabilities(S, lane, entry0, entry1, shift, columns, scale, place0, place1, sums)
        self.round_probabilities(S, P)
        stage, parity = self.stage_after(stage, parity)
        done0, done1 = Int32(-1), Int32(-1)
        for i in cutlass.range_constexpr(64):
            O[i] = Float32(0.0)
        smem.mbarrier_wait(self.bar(base, "q_full", stage), parity)
        entry0, entry1, flags_n, shift, columns, scale = self.read_meta(base, stage, warp)
        while (flags_n & END) == 0:
            if (flags_n & NEW) != 0:
                k_use = k_use + 2
                self.wait_for_block(base, k_use)
            k_stage = step_of(k_use)[0]
            q = base + self.q_at + stage * TILE_BYTES + group_at
            self.multiply_keys(S, q, base + self.kv_at + k_stage * TILE_BYTES)
            # The tile before last goes out while the keys are multiplied; its registers then take the next product.
            self.store_partial(O, lane, done0, done1, partials)
            hopper.pin(O)
            if (flags & NEW) != 0:
                v_use = v_use + 2
                self.wait_for_block(base, v_use)
            v_stage = step_of(v_use)[0]
            self.multiply_values(O, P, base + self.kv_at + v_stage * TILE_BYTES)
            hopper.wait(1, S)
            self.release(base, lane, "q_empty", stage, Int32(1))
            self.release(base, lane, "kv_empty", k_stage, flags_n & LAST)
            next0, next1 = self.places(entry0, entry1, flags_n, first_place, token_slots, width)
            self.probabilities(S, lane, entry0, entry1, shift, columns, scale, next0, next1, sums)
            hopper.pin(S)
            # Keeps ptxas from moving the wait ahead of the exponentials, which would end the overlap.
            ptx.asm(
                "{ .reg .pred p; setp.eq.s32 p, $0, 0; @p bra behind; nanosleep.u32 1; behind: }", "", "r", [opaque]
            )
            ptx.warp_barrier()
            hopper.wait(0, O)
            self.release(base, lane, "kv_empty", v_stage, flags & LAST)
            self.round_probabilities(S, P)
            done0, done1 = place0, place1
            place0, place1, flags = next0, next1, flags_n
            stage, parity = self.stage_after(stage, parity)
            smem.mbarrier_wait(self.bar(base, "q_full", stage), parity)
            entry0, entry1, flags_n, shift, columns, scale = self.read_meta(base, stage, warp)
        ptx.warp_barrier()
        self.release(base, lane, "q_empty", stage, Int32(1))
        stage, parity = self.stage_after(stage, parity)
        self.store_partial(O, lane, done0, done1, partials)
        hopper.pin(O)
        if (flags & NEW) != 0:
            v_use = v_use + 2
            self.wait_for_block(base, v_use)
        v_stage = step_of(v_use)[0]
        self.multiply_values(O, P, base + self.kv_at + v_stage * TILE_BYTES)
        hopper.wait(0, O)
        self.release(base, lane, "kv_empty", v_stage, Int32(1))
        self.store_partial(O, lane, place0, place1, partials)
        return k_use, v_use, stage, parity

    def wait_for_block(self, base, use):
        stage, parity = step_of(use)
        smem.mbarrier_wait(self.bar(base, "kv_full", stage), parity)

    def places(self, entry0, entry1, flags, first_place, token_slots, width):
        """Number of the partial of each half of the rows; -1: none."""
        head_slots = first_place + (flags >> 8) * width
        numbers = [(entry >> 5) * token_slots + head_slots + (entry & 31) for entry in (entry0, entry1)]
        return [ptx.select(entry < 0, Int32(-1), n) for entry, n in zip((entry0, entry1), numbers)]

    @cute.jit
    def probabilities(
        self,
        S: cute.Tensor,
        lane: Int32,
        entry0: Int32,
        entry1: Int32,
        shift: Int32,
        columns: Int32,
        scale: Float32,
        place0: Int32,
        place1: Int32,
        sums: Int64,
    ):
        """S becomes P, unrounded; writes m and l."""
        column = (lane & 3) * 2
        seen, hidden = columns & 0xFF, columns >> 8
        limits = [ptx.minimum_i32(seen, (entry >> 5) + shift) for entry in (entry0, entry1)]
        limits = [ptx.select(entry < 0, Int32(127), x) for entry, x in zip((entry0, entry1), limits)]
        if (limits[0] < 127) | (limits[1] < 127) | (hidden > 0):
            for i in cutlass.range_constexpr(64):
                at = column + (8 * (i // 4) + (i & 1))
                visible = (at <= limits[(i >> 1) & 1]) & (at >= hidden)
                S[i] = ptx.select(visible, S[i], Float32(softmax.NEG_INF))
        if Int32(scale >= Float32(0.0)) == 0:
            sign = softmax.sign_of(scale)
            for i in cutlass.range_constexpr(64):
                S[i] = ptx.select(S[i] == Float32(softmax.NEG_INF), S[i], ptx.multiply(S[i], sign))
        scale = ptx.maximum(ptx.absolute(scale), Float32(softmax.SMALLEST))
        places = (place0, place1)
        for half in cutlass.range_constexpr(2):
            top, total = self.exponentials(S, half, scale)
            row = (lane >> 2) + (8 * half if self.rows == 16 else 0)
            at = sums + (Int64(places[half]) * self.rows + Int64(row)) * 8
            words = [ptx.f32_bits(top), ptx.f32_bits(total)]
            ptx.store_words_if(at, words, Int32((column == 0) & (places[half] >= 0)))

    def exponentials(self, S, half, scale):
        """Of the accumulators of one half, in place: (m, l) of the row."""
        at = [4 * n + 2 * half + k for n in range(16) for k in range(2)]
        logits = [S[i] for i in at]
        top = ptx.maximum(ptx.multiply(self.row_maximum(logits), scale), Float32(softmax.EMPTY))
        top = top + Float32(self.lift)
        p = [ptx.exp2(ptx.fma(x, scale, -top)) for x in logits]
        totals = p[:2]
        for i in range(2, 32):
            totals[i & 1] = totals[i & 1] + p[i]
        for i, x in zip(at, p):
            S[i] = x
        total = totals[0] + totals[1]
        total = total + ptx.shuffle_xor_f32(total, 1)
        return top, total + ptx.shuffle_xor_f32(total, 2)

    def row_maximum(self, values):
        """Four chains, then the lanes that share the row."""
        chains = values[:4]
        for i in range(4, len(values), 4):
            chains = [ptx.maximum(a, b) for a, b in zip(chains, values[i : i + 4])]
        top = ptx.maximum(ptx.maximum(chains[0], chains[1]), ptx.maximum(chains[2], chains[3]))
        top = ptx.maximum(top, ptx.shuffle_xor_f32(top, 1))
        return ptx.maximum(top, ptx.shuffle_xor_f32(top, 2))

    def round_probabilities(self, S, P):
        for j in range(32):
            P[j] = self.pack(S[2 * j], S[2 * j + 1])

    @cute.jit
    def store_partial(self, O: cute.Tensor, lane: Int32, place0: Int32, place1: Int32, partials: Int64):
        places = (place0, place1)
        for half in cutlass.range_constexpr(2):
            unit = Int64(places[half]) * (self.rows // 8) + Int64(half if self.rows == 16 else 0)
            at = partials + unit * UNIT_BYTES + Int64(lane * 16)
            if places[half] >= 0:
                for part in cutlass.range_constexpr(4):
                    tiles = [4 * (4 * part + k) + 2 * half for k in range(4)]
                    ptx.store_words(at + 512 * part, [self.pack(O[i], O[i + 1]) for i in tiles])


def programs():
    pairs = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3"), ("bf16", "e5m2"), ("f16", "e5m2")]
    return [Program(f"prefill_{q}_{kv}_r{rows}", Prefill(q, kv, rows)) for q, kv in pairs for rows in (16, 8)]
