"""Prefill score on Blackwell: block scores of many query rows, and the best blocks of each without a score in memory. Ops:
select_blocks, block_scores.

Problem
    That of sm90/prefill_score.py, with the same arguments, tiles, ranges and results: `top16` and `top32` keep each row's best
    blocks in registers, `scores` writes the scores. T (L + 1) / 2 * Hi * 256 operations for T rows over L causal keys: bound
    by the MMA (2 PFLOP/s at 16 bits: 0.28 ms at 4 heads and 32k), with fp8 queries by the maxima.

Tile picture
    As on SM90: a tile is 256 rows (128 for `top32`) of one request, tokens x heads with heads fastest; a unit is (tile,
    block), and every CTA takes a contiguous range of units. Of a unit, S of 128 rows x 128 keys goes to tensor memory, where
    a row is a lane: a thread has a whole row, so that its maximum needs no exchange and its list stays with it.

Roles (384 or 512 threads)
    warp 0        page numbers, TMA: keys by 64 tokens into a ring of stages, queries once a tile; and a record of each tile.
    warps 1 - 3   rows without scores; with fp8 keys and 16-bit queries they widen each key stage to fp16, exactly.
    warps 4 on    four or eight: a thread a row. Where bf16 queries meet fp8 keys they first scale the tile's queries into fp16,
                  in place; then per unit: maximum of 128 columns, three at a time, and the row's list (ranking.py).
    next warp     MMA: queries and keys from shared memory, into two buffers of tensor memory in turns; so one unit's maxima
                  are found under the next one's products. Its commits hand over S, the key stage and, at the end of a tile, the
                  queries. The three warps after it only give their registers away.

Order
    A score depends on its row and block only. Selection is exact in (fp32 score, lower id), so neither the cut nor the
    batch can show.

Budget
    Shared memory: that of SM90 (queries 64 KiB, keys 4 x 32 KiB, fp8 8 x 16, widened 3 x 32 and 2 x 16).
    Tensor memory: 2 buffers x 128 columns x m128 tiles of a unit: 512 columns (`top32` 256).
    Cycles of a unit of 256 rows: MMA 1,024 (fp8 512); a scheduler's two warps 2 x 64 maxima of three, and 2 x 80 of an insertion
    where a row has a better block.

Limits
    Those of sm90/prefill_score.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import blackwell, fit_fp16, hopper, ptx, query_tiles, ranking, select, smem, tma
from shared.program import Kernel, Program
from shared.score_fold import LEAST_UNITS, PrefillFold, finish_tile
from shared.score_loaders import BLOCK, DTYPES, RECORD_BYTES, WIDENERS, Pages, ScoreLoaders

NEG_INF = float("-inf")
# name -> (length of a row's list, m128 tiles of a unit); rows as on SM90, whose lists the fold takes too
VARIANTS = {"top16": (16, 2), "top32": (32, 1), "scores": (0, 2)}
LOADER_WARPS = 4
# By m128 tiles: of 512 threads that start with 128, of 384 with 168.
OTHER_REGISTERS, CONSUMER_REGISTERS = 40, {2: 208, 1: 240}
ROWS = 128  # lanes of tensor memory
LOADED = 32  # columns of S in registers at a time


class PrefillScore(Kernel, ScoreLoaders):
    """One variant of the kernel."""

    ctas_per_sm = 1

    def __init__(self, query, key, variant):
        length, tiles = VARIANTS[variant]
        super().__init__(query, key, length, tiles, LEAST_UNITS if length else 1)
        self.operands = DTYPES[query, key]
        self.consumer_warps = 4 * tiles
        self.mma_warp = LOADER_WARPS + self.consumer_warps
        self.threads = 32 * (self.mma_warp + 4)  # whole warpgroups, which trade registers
        self.columns = 2 * ROWS * tiles
        # mbarriers behind the loaders': S full and empty, two buffers each; queries scaled; the address of tensor memory.
        self.more_at = self.dynamic_smem
        self.dynamic_smem += 8 * 5 + 8

    def scores_full(self, base, buffer):
        return base + self.more_at + buffer * 8

    def scores_empty(self, base, buffer):
        return base + self.more_at + 16 + buffer * 8

    def query_scaled(self, base):
        return base + self.more_at + 32

    def init_barriers(self, base):
        for stage in range(self.stages):
            smem.mbarrier_init(self.full(base, stage), Int32(WIDENERS if self.widen else 1))
            smem.mbarrier_init(self.empty(base, stage), Int32(self.consumer_warps + 1))
        for stage in range(self.stored_stages):
            smem.mbarrier_init(self.stored(base, stage), Int32(1))
            smem.mbarrier_init(self.taken(base, stage), Int32(WIDENERS))
        smem.mbarrier_init(self.query_full(base), Int32(1))
        smem.mbarrier_init(self.query_empty(base), Int32(self.consumer_warps + 1))
        for buffer in range(2):
            smem.mbarrier_init(self.scores_full(base, buffer), Int32(1))
            smem.mbarrier_init(self.scores_empty(base, buffer), Int32(self.consumer_warps))
        smem.mbarrier_init(self.query_scaled(base), Int32(self.consumer_warps))

    # ---- the products' warp

    @cute.jit
    def multiply(self, base: Int32, columns: Int32):
        """S of every unit of the range, in the order of the producer's records."""
        steps = range(4 * self.chunks)
        a_steps = [blackwell.k_major_step(k, self.rows * 128) for k in steps]
        b_steps = [blackwell.k_major_step(k, BLOCK * 128) for k in steps]
        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        buffer, turn = Int32(0), Int32(1)
        more = Int32(1)
        while more != 0:
            smem.mbarrier_wait(self.query_full(base), slot)
            record = base + self.record_at + slot * RECORD_BYTES
            _, _, _, block = smem.load_i32x4(record)
            last, _, _, more = smem.load_i32x4(record + 16)
            if more != 0:
                if cutlass.const_expr(self.normalise):
                    smem.mbarrier_wait(self.query_scaled(base), slot)
                for _b in cutlass.range(block, last, unroll=1):
                    smem.mbarrier_wait(self.full(base, stage), phase)
                    smem.mbarrier_wait(self.scores_empty(base, buffer), turn)
                    blackwell.fence_after()
                    keys = blackwell.descriptor(base + stage * self.stage_bytes)
                    for i in cutlass.range_constexpr(self.tiles):
                        queries = blackwell.descriptor(base + self.query_at + i * (ROWS * 128))
                        d = columns + buffer * (ROWS * self.tiles) + i * ROWS
                        self.product(d, queries, keys, a_steps, b_steps)
                    blackwell.commit(self.scores_full(base, buffer))
                    blackwell.commit(self.empty(base, stage))
                    turn = turn ^ buffer
                    buffer = buffer ^ 1
                    stage = stage + 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                blackwell.commit(self.query_empty(base))
            slot = slot ^ 1

    def product(self, d, queries, keys, a_steps, b_steps):
        if self.operands == "e4m3":
            kind = (1 << 4) | (BLOCK // 8 << 17) | (ROWS // 16 << 24)  # e4m3 is format 0 of this instruction
            blackwell.multiply(d, queries, keys, kind, a_steps, b_steps, elements="f8f6f4")
        else:
            blackwell.multiply(d, queries, keys, blackwell.instruction(self.operands, BLOCK), a_steps, b_steps)

    # ---- the rows' warps

    def scale_row(self, base, row):
        """A row of bf16 queries becomes fp16 in place; returns what undoes the factor."""
        places, words = [], []
        for chunk in range(16):
            place = base + self.query_at + (chunk >> 3) * (self.rows * 128) + row * 128
            places.append(place + (((chunk & 7) ^ (row & 7)) << 4))
            words += smem.load_i32x4(places[-1])
        pairs, undo = fit_fp16.fit(words, ())
        for chunk in range(16):
            smem.store_i32x4(places[chunk], pairs[4 * chunk : 4 * chunk + 4])
        tma.fence_async()
        return undo

    @cute.jit
    def largest(self, best: cute.Tensor, s: Int32, visible: Int32, flags: Int32, masked: cutlass.Constexpr):
        """The maximum of the thread's row in tensor memory, of its first `visible` columns on pages that are there."""
        found = []
        for start in cutlass.range_constexpr(0, BLOCK, LOADED):
            values = blackwell.load_row(s + start, LOADED)
            if cutlass.const_expr(masked):
                there = (flags & (1 + start // 64)) != 0
                limit = ptx.select(there, visible, Int32(0))
                values = [ptx.select(limit > start + c, x, Float32(NEG_INF)) for c, x in enumerate(values)]
            chains = [blackwell.maximum3(*values[3 * i : 3 * i + 3]) for i in range(4)]
            for c in cutlass.range_constexpr(12, LOADED, 2):
                i = (c // 2) % 4
                chains[i] = blackwell.maximum3(chains[i], values[c], values[c + 1])
            found.append(ptx.maximum(blackwell.maximum3(*chains[:3]), chains[3]))
        best[0] = ptx.maximum(blackwell.maximum3(*found[:3]), found[3])

    @cute.jit
    def consume(
        self,
        base: Int32,
        columns: Int32,
        warp: Int32,
        lane: Int32,
        to: ranking.Rows,
        parts: Int64,
        choice: ranking.Choice,
    ):
        local_blocks = choice.local_blocks
        best_keys = cute.make_rmem_tensor(cute.make_layout(max(self.length, 1)), Int32)
        best_ids = cute.make_rmem_tensor(cute.make_layout(max(self.length, 1)), Int32)
        value = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        undo = Float32(1.0)
        row = (warp - LOADER_WARPS) * 32 + lane
        token = row >> to.head_shift  # of the tile
        own = columns + ((warp & 3) << 21) + ((warp - LOADER_WARPS) >> 2) * ROWS
        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        buffer, turn = Int32(0), Int32(0)
        more = Int32(1)
        while more != 0:
            smem.mbarrier_wait(self.query_full(base), slot)
            record = base + self.record_at + slot * RECORD_BYTES
            first_token, count, position, block = smem.load_i32x4(record)
            last, _, _, more = smem.load_i32x4(record + 16)
            if more != 0:
                if cutlass.const_expr(self.normalise):
                    undo = self.scale_row(base, row)
                ptx.warp_barrier()
                if lane == 0:
                    if cutlass.const_expr(self.normalise):
                        hopper.mbarrier_arrive(self.query_scaled(base))
                    hopper.mbarrier_arrive(self.query_empty(base))
                limit = query_tiles.candidates(position + token) - local_blocks
                # Blocks before the first row's own are seen whole by all rows.
                whole_end = (position + 1) >> 7
                score_row, writes = Int64(0), token < count
                if cutlass.const_expr(self.score_mode):
                    score_row = to.address(first_token, row)
                else:
                    ranking.clear(best_keys, best_ids, self.length)
                for b in cutlass.range(block, last, unroll=1):
                    # The loaders' flags come with the stage, S with the products.
                    smem.mbarrier_wait(self.full(base, stage), phase)
                    flags = smem.load_i32(base + self.flags_at + stage * 4)
                    smem.mbarrier_wait(self.scores_full(base, buffer), turn)
                    blackwell.fence_after()
                    s = own + buffer * (ROWS * self.tiles)
                    if (b < whole_end) & (flags == 3):
                        self.largest(value, s, Int32(0), Int32(0), False)
                    else:
                        self.largest(value, s, position + 1 + token - b * BLOCK, flags, True)
                    blackwell.fence_before()
                    ptx.warp_barrier()
                    if lane == 0:
                        hopper.mbarrier_arrive(self.scores_empty(base, buffer))
                        hopper.mbarrier_arrive(self.empty(base, stage))
                    score = value[0] * undo if cutlass.const_expr(self.normalise) else value[0]
                    if cutlass.const_expr(self.score_mode):
                        if writes:
                            ptx.store_f32(score_row + Int64(b) * 4, ptx.canonical(score))
                    else:
                        key = ptx.select(b < limit, select.key_of(score), Int32(select.NONE))
                        if key > best_keys[self.length - 1]:
                            ranking.insert(best_keys, best_ids, self.length, key, b)
                    turn = turn ^ buffer
                    buffer = buffer ^ 1
                    stage = stage + 1
                    if stage == self.stages:
                        stage = Int32(0)
                        phase = phase ^ 1
                if cutlass.const_expr(not self.score_mode):
                    finish_tile(record, best_keys, best_ids, self.length, row, self.rows, to, parts, choice)
            slot = slot ^ 1

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        map_q: cute.CopyAtom,
        map_k: cute.CopyAtom,
        out: Int64,  # ids or scores
        parts: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,  # all strides in bytes
        out_head_stride: Int64,
        out_slot_stride: Int64,
        table_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        head_shift: Int32,  # log2(heads)
        num_pages: Int32,
        table_width: Int32,
        page_shift: Int32,  # 6 or 7
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
        vectors: Int32,  # ranking.write_selection
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base(1024)
        slot = base + self.more_at + 40
        q_map, k_map = tma.map_address(map_q), tma.map_address(map_k)
        if thread == 0:
            tma.prefetch_map(q_map)
            tma.prefetch_map(k_map)
            self.init_barriers(base)
        if warp == self.mma_warp:
            blackwell.allocate(slot, self.columns)
        blackwell.fence_before()
        ptx.barrier()
        blackwell.fence_after()
        columns = smem.load_i32(slot)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        tile_shift = Int32(self.row_bits) - head_shift
        reach = table_width << page_shift
        batch = query_tiles.Batch(cu_seqlens_q, seqused_k, num_requests, num_tokens)
        to = ranking.Rows(out, out_token_stride, out_head_stride, out_slot_stride, head_shift, vectors)
        choice = ranking.Choice(topk, local_blocks, init_blocks)

        if warp < LOADER_WARPS:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            pages = Pages(block_table, table_stride, num_pages, table_width, page_shift)
            self.load(base, warp, thread, (q_map, k_map), pages, batch, reach, tile_shift, to, choice, cta, ctas)
        else:
            if warp < self.mma_warp:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.tiles])
                self.consume(base, columns, warp, lane, to, parts, choice)
            else:
                cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
                if warp == self.mma_warp:
                    self.multiply(base, columns)
        blackwell.fence_before()
        ptx.barrier()
        if warp == self.mma_warp:
            blackwell.fence_after()
            blackwell.free(columns, self.columns)


def programs():
    scoring = [
        Program(f"prefill_score_{query}_{key}_{variant}", PrefillScore(query, key, variant))
        for query, key in DTYPES
        for variant in VARIANTS
    ]
    return scoring + [Program(f"prefill_fold_{name}", PrefillFold(*VARIANTS[name])) for name in ("top16", "top32")]
