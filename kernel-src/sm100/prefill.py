"""Prefill forward, KV-stationary, on SM100 and SM103: the same stage as sm90/prefill.py, with its arguments, its lists, its
partials and its combination of the chunk before, on tcgen05.

Problem, chunks, partials, limits
    sm90/prefill.py. A tile is one block of 128 keys of one KV head and up to 8 tokens x 16 query heads (or 16 x 8) that
    chose it; its partial result is o = sum of p v, unnormalised, and (m, l) of each row.

Tile picture
    M = 128 rows (token, head), N = 128 keys, D = 128: one tcgen05 product of M 128, N 128, in 8 k steps, each way.
        S = Q K^T    both operands in shared memory, S in tensor memory
        P = 2^(S - m) row by row in registers, rounded to the 16-bit type of q, back to tensor memory over S
        O = P V      P from tensor memory, V as MN-major operand, O in tensor memory
    A tile sees one block, so nothing is rescaled and O is never corrected. A row is a lane of tensor memory and a thread of
    the softmax: its maximum and sum need no exchange.
    Tensor memory (512 columns): S or P and O of two tiles, 4 x 128. Two tiles are in flight: while the tensor core
    multiplies for one, the softmax of the other runs.

Roles (512 threads, one CTA an SM; a CTA takes an equal contiguous range of the chunk's tiles)
    warp 0        lists, K and V, and with an fp8 cache Q, to shared memory (shared/prefill_loader.py)
    warp 1        issues the products: Q K of a tile, two tiles behind it P V; owns the tensor memory
    warps 2, 3    fp8: widen K and V; otherwise warp 3 gathers Q, so that its instructions are another scheduler's
    warps 4-7     combine an earlier chunk (shared/partials.py)
    warps 8-11    softmax of the CTA's tiles 0, 2, ... and their partials out; warps 12-15: of tiles 1, 3, ...

Hand-over (mbarriers; b = parity of the tile's number)
    q_full, kv_full  -> products -> s_full[b] -> softmax -> p_ready[b] -> products -> o_full[b] -> partials
    The tensor core runs products in order, so Q K of tile i + 2 may overwrite P of tile i, issued behind its P V. Warps say
    p_ready for tile i + 2 when they have read O of tile i, so that needs no mbarrier of its own. Stages of Q, K and V are
    freed by commits; of Q also by the softmax warps, which read what the loader says of the tile.

Partials out
    Tensor memory is read as wgmma accumulators lie in a warp (16x256b): the order of the partials is theirs, so that a
    store is a full 512 bytes of a warp, without a shuffle and without a pass through shared memory, whose bandwidth the
    products' operands need (a staged bulk store would write and read another 32 KiB of it a tile).

Exponentials
    16,384 a tile are 1,024 clocks of SM100's special-function units at 16 a clock, as many as the tile's two products
    take. POLYNOMIAL of 8 pairs therefore go through FMAs (shared/blackwell.py); more would cost issue slots, which bind
    sooner. SM103's units have twice the rate.

Budget (a tile, clocks of an SM at B200's rates; counted in the machine code, not measured)
    Products 1,024. Exponentials 896. L2: 32 KiB of Q in, 32 of partials out, 32 of the chunk before in, 64 of K and V a run:
    1,120 at 24 TB/s. Instructions of a scheduler: softmax and output 632, combination 430; beside them, each on
    another, the loader's 170, the multiplier's 180 and the gatherer's 170 (fp8: the loader's 330).
"""

import os

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import blackwell, hopper, ptx, smem, softmax, tma
from shared.partials import UNIT_BYTES, Chunk, Output, Partials, Shape
from shared.prefill_loader import END, HALF, KV_STAGES, LAST, META_BYTES, NEW, TILE_BYTES, Source, TileLoader, step_of
from shared.program import Kernel, Program

MULTIPLIER, FIRST_WIDENER, GATHERER, FIRST_COMBINER, FIRST_CONSUMER = 1, 2, 3, 4, 8  # warps
WIDENERS = 2  # warps
GROUP_WARPS = 4  # of the softmax of a tile
REGISTERS = (32, 80, 200)  # a thread: loading and multiplying, combining, softmax; of 65,536 / 128 in all
TILE_COLUMNS = 128
O_COLUMN = 2 * TILE_COLUMNS  # behind S of two tiles
PIECE = 32  # columns of a row whose exponentials are made together
POLYNOMIAL = 1  # of 8 pairs


class Prefill(Kernel, TileLoader):
    """One variant: dtype of q (and of the products) and of KV, rows a token."""

    threads, ctas_per_sm = 512, 1
    wideners = WIDENERS * 32
    turns = 2

    def __init__(self, q_dtype, kv_dtype, rows):
        self.combine = Partials(q_dtype, rows, blackwell.fma2)
        super().__init__(q_dtype, kv_dtype, rows, self.combine.ring_bytes, self.combine.weights_bytes)
        self.pack = ptx.pack_bf16 if q_dtype == "bf16" else ptx.pack_fp16
        self.lift = 7.0 if q_dtype == "f16" else 0.0
        self.polynomial = POLYNOMIAL if os.environ.get("CUTE_DSL_ARCH") == "sm_100a" else 0
        self.tile_bars = {name: self.dynamic_smem + 16 * i for i, name in enumerate(["s_full", "p_ready", "o_full"])}
        self.drained, self.slot = self.dynamic_smem + 48, self.dynamic_smem + 56
        self.mbarrier["q_asked"] = self.dynamic_smem + 64
        self.dynamic_smem += 96

    def tile_bar(self, base, name, which):
        return base + self.tile_bars[name] + which * 8

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
        chunk: Int32,  # in the list of chunks
        first_token: Int32,
        tokens: Int32,  # of the chunk
        first_head: Int32,
        chunk_heads: Int32,  # KV heads of the chunk
        kv_heads: Int32,  # in all
        group: Int32,
        width: Int32,
        page_bits: Int32,
        most_tiles: Int32,
        early: Int32,  # 1: the lists were finished by a kernel before the one ahead of this
        opaque: Int32,  # SM90's
        softmax_scale: Float32,
        # the combination of the chunk before; combine_tokens 0: none
        combine_partials: Int64,
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
        combine_token: Int32,
        combine_tokens: Int32,
        combine_head: Int32,
        selective: Int32,
        # SM90's: a launch of this kernel computes one chunk
        counters: Int64,
        chunk_count: Int32,
        combined_chunks: Int32,
        chunk_bits: Int32,
        all_tokens: Int32,
        place_slots: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base()
        if thread == 0:
            self.make_mbarriers(base)
        if warp == MULTIPLIER:
            blackwell.allocate(base + self.slot, blackwell.COLUMNS)
        ptx.barrier()
        memory = smem.load_i32(base + self.slot)
        if (warp >= FIRST_COMBINER) & (warp < FIRST_CONSUMER):
            hopper.give_registers(REGISTERS[1])
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
            rows = combine_tokens * chunk_heads
            self.combine.walk(
                base + self.ring_at,
                base + self.weights_at,
                thread - FIRST_COMBINER * 32,
                Int32(Int64(rows) * Int64(cta) // Int64(ctas)),
                Int32(Int64(rows) * Int64(cta + 1) // Int64(ctas)),
                combine_partials,
                combine_sums,
                state,
                Output(out, lse, v_scale, out_token, out_head, lse_token, lse_head, v_scale_head),
                Chunk(combine_token, combine_tokens, combine_head),
                Shape(chunk_heads, kv_heads, group, width, selective),
            )
        else:
            if early == 0:
                ptx.wait_for_previous_kernel()
            first, stop = self.share_of(chunks, chunk, most_tiles, cta, ctas)
            if warp < FIRST_COMBINER:
                hopper.give_registers(REGISTERS[0])
                if warp == MULTIPLIER:
                    if first < stop:
                        self.multiply(base, memory)
                    blackwell.free(memory, blackwell.COLUMNS)
                elif first < stop:
                    if warp == 0:
                        maps = [tma.map_address(m) for m in (q_map, k_map, v_map)]
                        lists, k_scales, policies = (heads, entries), (k_scale, k_scale_head), (q_policy, kv_policy)
                        shape = (chunk_heads, group, width)
                        source = Source(*maps, *lists, *k_scales, *policies, *shape, page_bits, softmax_scale)
                        here = Chunk(first_token, tokens, first_head)
                        ring = self.produce(base, lane, first, stop, *self.empty_rings(), source, here)
                        self.end_blocks(base, lane, ring[2])
                    if cutlass.const_expr(self.fp8):
                        if warp >= FIRST_WIDENER:
                            self.widen_blocks(base, thread - FIRST_WIDENER * 32, lane)
                    else:
                        if warp == GATHERER:
                            where = (first_head, first_token, group)
                            self.gather(base, lane, tma.map_address(q_map), *where, q_policy)
            else:
                hopper.take_registers(REGISTERS[2])
                if first < stop:
                    self.transform(
                        base,
                        memory,
                        (warp - FIRST_CONSUMER) & (GROUP_WARPS - 1),
                        lane,
                        (warp - FIRST_CONSUMER) // GROUP_WARPS,
                        partials,
                        sums,
                        chunk_heads * width,
                        width,
                    )

    def make_mbarriers(self, base):
        for stage in range(self.q_stages):
            if not self.fp8:
                smem.mbarrier_init(self.bar(base, "q_asked", stage), 1)
            smem.mbarrier_init(self.bar(base, "q_full", stage), 1 if self.fp8 else 2)
            smem.mbarrier_init(self.bar(base, "q_empty", stage), 1 + GROUP_WARPS)
        for stage in range(KV_STAGES):
            smem.mbarrier_init(self.bar(base, "kv_full", stage), WIDENERS if self.fp8 else 1)
            smem.mbarrier_init(self.bar(base, "kv_empty", stage), 1)
        for which in range(2):
            smem.mbarrier_init(self.bar(base, "raw_full", which), 1)
            smem.mbarrier_init(self.bar(base, "raw_empty", which), WIDENERS)
            smem.mbarrier_init(self.tile_bar(base, "s_full", which), 1)
            smem.mbarrier_init(self.tile_bar(base, "p_ready", which), GROUP_WARPS)
            smem.mbarrier_init(self.tile_bar(base, "o_full", which), 1)
        smem.mbarrier_init(base + self.v_landed, 1)
        smem.mbarrier_init(base + self.drained, 2 * GROUP_WARPS)

    # ---- warp 3 of a 16-bit cache: Q

    def ask_for_queries(self, base, lane, stage, *where):
        """Of warp 0, once it has said what lies in a stage."""
        if self.fp8:
            return self.gather_queries(base, lane, stage, *where)
        hopper.mbarrier_arrive_if(self.bar(base, "q_asked", stage), Int32(lane == 0))

    def ask_for_nothing(self, base, lane, stage):
        if not self.fp8:
            hopper.mbarrier_arrive_if(self.bar(base, "q_asked", stage), Int32(lane == 0))

    @cute.jit
    def gather(
        self,
        base: Int32,
        lane: Int32,
        q_map: Int64,
        first_head: Int32,
        first_token: Int32,
        group: Int32,
        q_policy: Int64,
    ):
        stage, parity, ends = Int32(0), Int32(0), Int32(0)
        while ends < self.turns * END:
            smem.mbarrier_wait(self.bar(base, "q_asked", stage), parity)
            meta = base + self.meta_at + stage * META_BYTES
            entry = smem.load_i32(meta + (lane & (self.tokens - 1)) * 4)
            flags = smem.load_i32(meta + 64)
            head = first_head + (flags >> 8)
            ends = ends + (flags & END)
            self.gather_queries(base, lane, stage, q_map, entry, head, group, first_token, q_policy)
            ptx.warp_barrier()
            hopper.mbarrier_arrive_if(self.bar(base, "q_full", stage), Int32(lane == 0))
            stage, parity = self.next_stage(stage, parity, 1)

    # ---- warp 1: products

    def next_stage(self, stage, parity, distance):
        """Of the ring of Q, `distance` (1 or 2) tiles on."""
        stage = stage + distance
        over = stage >= self.q_stages
        return ptx.select(over, stage - self.q_stages, stage), ptx.select(over, parity ^ 1, parity)

    @cute.jit
    def multiply_keys(self, base: Int32, memory: Int32, which: Int32, stage: Int32, parity: Int32, use: Int32):
        """S of a tile; returns (flags of the tile, use of the ring of K and V that its keys are)."""
        smem.mbarrier_wait(self.bar(base, "q_full", stage), parity)
        flags = smem.load_i32(base + self.meta_at + stage * META_BYTES + 64)
        if (flags & NEW) != 0:
            use = use + 2
            self.wait_for_block(base, use)
        if (flags & END) == 0:
            k_stage = step_of(use)[0]
            steps = [blackwell.k_major_step(i, HALF) for i in range(blackwell.K_STEPS)]
            q = blackwell.descriptor(base + self.q_at + stage * TILE_BYTES)
            k = blackwell.descriptor(base + self.kv_at + k_stage * TILE_BYTES)
            kind = blackwell.instruction(self.dtype, TILE_COLUMNS)
            blackwell.multiply(memory + which * TILE_COLUMNS, q, k, kind, steps, steps)
            blackwell.commit(self.tile_bar(base, "s_full", which))
            blackwell.commit(self.bar(base, "q_empty", stage))
            blackwell.commit_if(self.bar(base, "kv_empty", k_stage), flags & LAST)
        return flags, use

    @cute.jit
    def multiply_values(self, base: Int32, memory: Int32, which: Int32, parity: Int32, flags: Int32, use: Int32):
        """O of a tile; returns the use of the ring that its values are."""
        smem.mbarrier_wait(self.tile_bar(base, "p_ready", which), parity)
        blackwell.fence_after()
        if (flags & NEW) != 0:
            use = use + 2
            self.wait_for_block(base, use)
        v_stage = step_of(use)[0]
        p_steps = [8 * i for i in range(blackwell.K_STEPS)]
        v_steps = [blackwell.mn_major_step(i) for i in range(blackwell.K_STEPS)]
        v = blackwell.descriptor(base + self.kv_at + v_stage * TILE_BYTES, HALF)
        kind = blackwell.instruction(self.dtype, TILE_COLUMNS, b_mn_major=True)
        o = memory + O_COLUMN + which * TILE_COLUMNS
        blackwell.multiply(o, memory + which * TILE_COLUMNS, v, kind, p_steps, v_steps)
        blackwell.commit(self.tile_bar(base, "o_full", which))
        blackwell.commit_if(self.bar(base, "kv_empty", v_stage), flags & LAST)
        return use

    def wait_for_block(self, base, use):
        stage, parity = step_of(use)
        smem.mbarrier_wait(self.bar(base, "kv_full", stage), parity)

    @cute.jit
    def multiply(self, base: Int32, memory: Int32):
        stage, parity, which, p_parity = Int32(0), Int32(0), Int32(0), Int32(0)
        k_use, v_use = Int32(-2), Int32(-1)
        flags, k_use = self.multiply_keys(base, memory, Int32(0), stage, parity, k_use)
        stage, parity = self.next_stage(stage, parity, 1)
        flags_1, k_use = self.multiply_keys(base, memory, Int32(1), stage, parity, k_use)
        stage, parity = self.next_stage(stage, parity, 1)
        while (flags & END) == 0:
            v_use = self.multiply_values(base, memory, which, p_parity, flags, v_use)
            flags = flags_1
            if (flags & END) == 0:
                flags_1, k_use = self.multiply_keys(base, memory, which, stage, parity, k_use)
                stage, parity = self.next_stage(stage, parity, 1)
            p_parity = p_parity ^ which
            which = which ^ 1
        smem.mbarrier_wait(base + self.drained, 0)
        blackwell.fence_after()

    # ---- warps 8-15: softmax, partials

    @cute.jit
    def transform(
        self,
        base: Int32,
        memory: Int32,
        warp: Int32,  # of the four that share a tile
        lane: Int32,
        which: Int32,
        partials: Int64,
        sums: Int64,
        token_slots: Int32,
        width: Int32,
    ):
        quarter = memory + (warp << 21)
        s_at, o_at = quarter + which * TILE_COLUMNS, quarter + O_COLUMN + which * TILE_COLUMNS
        row = warp * 32 + lane
        stage, q_parity, parity = which, Int32(0), Int32(0)
        smem.mbarrier_wait(self.bar(base, "q_full", stage), q_parity)
        meta = base + self.meta_at + stage * META_BYTES
        entry = smem.load_i32(meta + row // self.rows * 4)
        flags, shift, columns, scale = smem.load_i32x4(meta + 64)
        while (flags & END) == 0:
            ptx.warp_barrier()
            hopper.mbarrier_arrive_if(self.bar(base, "q_empty", stage), Int32(lane == 0))
            place = (entry >> 5) * token_slots + (flags >> 8) * width + (entry & 31)
            place = ptx.select(entry < 0, Int32(-1), place)

            smem.mbarrier_wait(self.tile_bar(base, "s_full", which), parity)
            blackwell.fence_after()
            self.probabilities(s_at, row, entry, shift, columns, ptx.f32_from_bits(scale), place, sums)
            blackwell.fence_before()
            ptx.warp_barrier()
            hopper.mbarrier_arrive_if(self.tile_bar(base, "p_ready", which), Int32(lane == 0))

            smem.mbarrier_wait(self.tile_bar(base, "o_full", which), parity)
            blackwell.fence_after()
            for half in cutlass.range_constexpr(2):
                self.store_partial(o_at + (half << 20), lane, half, place, partials)
            stage, q_parity = self.next_stage(stage, q_parity, 2)
            parity = parity ^ 1
            smem.mbarrier_wait(self.bar(base, "q_full", stage), q_parity)
            meta = base + self.meta_at + stage * META_BYTES
            entry = smem.load_i32(meta + row // self.rows * 4)
            flags, shift, columns, scale = smem.load_i32x4(meta + 64)
        blackwell.fence_before()
        ptx.warp_barrier()
        hopper.mbarrier_arrive_if(base + self.drained, Int32(lane == 0))

    @cute.jit
    def probabilities(
        self,
        at: Int32,
        row: Int32,
        entry: Int32,
        shift: Int32,
        columns: Int32,
        scale: Float32,
        place: Int32,
        sums: Int64,
    ):
        """S of a row becomes P; writes its m and l."""
        S = cute.make_rmem_tensor(cute.make_layout(TILE_COLUMNS), Float32)
        for i, x in enumerate(blackwell.load_row(at, TILE_COLUMNS)):
            S[i] = x
        seen, hidden = columns & 0xFF, columns >> 8
        limit = ptx.select(entry < 0, Int32(127), ptx.minimum_i32(seen, (entry >> 5) + shift))
        if (limit < 127) | (hidden > 0):
            for i in cutlass.range_constexpr(TILE_COLUMNS):
                S[i] = ptx.select((i <= limit) & (i >= hidden), S[i], Float32(softmax.NEG_INF))
        if Int32(scale >= Float32(0.0)) == 0:
            sign = softmax.sign_of(scale)
            for i in cutlass.range_constexpr(TILE_COLUMNS):
                S[i] = ptx.select(S[i] == Float32(softmax.NEG_INF), S[i], ptx.multiply(S[i], sign))
        scale = ptx.maximum(ptx.absolute(scale), Float32(softmax.SMALLEST))
        logits = [S[i] for i in range(TILE_COLUMNS)]
        top = ptx.maximum(ptx.multiply(blackwell.row_maximum(logits), scale), Float32(softmax.EMPTY))
        top = top + Float32(self.lift)
        totals = [(Float32(0.0), Float32(0.0))] * 2
        for piece in cutlass.range_constexpr(TILE_COLUMNS // PIECE):
            first = piece * PIECE
            words, totals = blackwell.probabilities(
                logits[first : first + PIECE], scale, top, totals, self.dtype, self.polynomial
            )
            blackwell.store_row(at + first // 2, words)
        total = blackwell.add2(totals[0], totals[1])
        words = [ptx.f32_bits(top), ptx.f32_bits(total[0] + total[1])]
        target = sums + (Int64(place) * self.rows + Int64(row & (self.rows - 1))) * 8
        ptx.store_words_if(target, words, Int32(place >= 0))
        blackwell.wait_stores()

    @cute.jit
    def store_partial(self, at: Int32, lane: Int32, half: cutlass.Constexpr, place: Int32, partials: Int64):
        """16 rows of O: a token's, or 8 of one and 8 of the next."""
        O = blackwell.load_fragments(at, TILE_COLUMNS)
        for part in cutlass.range_constexpr(2):
            of_token = ptx.shuffle(place, Int32(16 * half + 8 * part))
            unit = Int64(of_token) * (self.rows // 8) + Int64(part if self.rows == 16 else 0)
            target = partials + unit * UNIT_BYTES + Int64(lane * 16)
            if of_token >= 0:
                for quarter in cutlass.range_constexpr(4):
                    tiles = [4 * (4 * quarter + k) + 2 * part for k in range(4)]
                    ptx.store_words(target + 512 * quarter, [self.pack(O[i], O[i + 1]) for i in tiles])


def programs():
    pairs = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3"), ("bf16", "e5m2"), ("f16", "e5m2")]
    return [Program(f"prefill_{q}_{kv}_r{rows}", Prefill(q, kv, rows)) for q, kv in pairs for rows in (16, 8)]
