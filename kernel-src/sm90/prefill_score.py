"""Prefill score: block scores of many query rows, and the best blocks of each without a score in memory. Ops:
select_blocks, block_scores.

Problem
    score[i, h, block] = max over the visible tokens t of the block of dot(index_q[i, h], index_k[t]), fp32, and the top-k
    of topk.py over each row. Two variants of one kernel: `top16` and `top32` keep each row's best blocks in registers,
    `scores` writes the scores (semantics of decode_score.py, but only candidates and their tile's blocks are written).
    Same instructions, same bits in both.
    T (L + 1) / 2 * Hi * 256 operations for T rows over L causal keys; at 4 heads and 32k that is 0.55 TFLOP for 8 MiB
    of keys: bound by the MMA (bf16: 0.70 ms at 790 TFLOP/s).

Tile picture
    A tile is ROWS = 256 rows (128 for `top32`) of one request: tokens x heads, heads fastest. Of a tile's blocks those
    are scored that its last row needs: no forced ones, so with a local block there is no mask either. A unit is (tile,
    block). All units in order (query_tiles.py) are cut into equal contiguous ranges, one a CTA and one CTA a
    multiprocessor. What a tile cut in two leaves, two lists a row, is folded by score_fold.py.
    Rows that have no more candidates than topk need no score. They are written by three otherwise idle warps.

Roles (384 threads)
    warp 0        page numbers, TMA: keys by 64 tokens into a ring of stages, queries once a tile; and a record of each
                  tile, from which the consumers learn all they know of it.
    warps 1 - 3   rows without scores; with fp8 keys and 16-bit queries they widen each key stage to fp16, exactly.
    warps 4 - 11  two warpgroups of 128 rows (64). Queries stay in registers as the A operand; a block is two (one) wgmma
                  chains m64n128 over 128 dims into their own accumulators. The warpgroups take turns: one's maxima
                  under the other's MMAs. The maximum over 128 keys: 32 columns in the thread, by their bits and three
                  at a time, then two exchanges, after which every thread has one row. It keeps that row's list
                  (ranking.py). A warp inserts where one of its 32 rows has a better block, which in a list's first
                  hundreds of blocks is nearly always; fp8 lists insert when a row has a third one waiting.

Order
    A score depends on its row and block only. Selection is exact in (fp32 score, lower id), so neither the cut nor the
    batch can show.

Budget
    Shared memory: queries 64 KiB, key stages 4 x 32 KiB (fp8: 8 x 16; widened: 3 x 32 and 2 x 16 as stored).
    Registers: 128 accumulators, 64 of queries, 32 of the list; 232 of a consumer, 40 of
    the others: together the 168 of a thread that a launch of 384 gets, and not one more.
    Issue slots of a block: MMA 2,048 clocks (fp8 1,024) a multiprocessor; of a warp 64 instructions of maxima, 80 of an
    insertion, 70 others. Two warps share a scheduler, and the ALU takes an instruction every second clock: with lists
    about 750 of fp8's 1,024 clocks.

Limits
    head_dim 128; pages of 64 or 128; a power of two of heads up to 64; T < 2^30, T * heads < 2^31; fewer than 2^31 units
    by shape; what tensor maps need (bases and strides multiples of 16 bytes, no stride of 0). Lengths, offsets and pages
    are data and may be anything. A page outside the cache contributes nothing.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from shared import fit_fp16, hopper, mma, ptx, query_tiles, ranking, select, smem, tma
from shared.program import Kernel, Program
from shared.score_fold import LEAST_UNITS, PrefillFold, finish_tile
from shared.score_loaders import BLOCK, DIMS, DTYPES, RECORD_BYTES, Pages, ScoreLoaders

# Taken from what the launch gave, 384 x 168: a request for more than that would never be met.
OTHER_REGISTERS, CONSUMER_REGISTERS = 40, 232
NEG_INF = float("-inf")
# name -> (length of a row's list, m64 tiles of a warpgroup)
VARIANTS = {"top16": (16, 2), "top32": (32, 1), "scores": (0, 2)}


class Consumer(NamedTuple):
    """Who a thread of the consumers is, and its registers."""

    base: Int32  # of shared memory
    lane: Int32
    group: Int32  # warpgroup, 0 or 1
    t: Int32  # lane % 4
    odd: cutlass.Boolean
    upper: cutlass.Boolean
    first_row: Int32  # of the tile, of this warp's first 16
    row: Int32  # whose list this thread keeps
    head_shift: Int32
    tiled: Any
    keys: Any
    queries: list  # of the m64 tiles, as are the accumulators
    accumulators: list
    best_keys: cute.Tensor
    best_ids: cute.Tensor
    maxima: cute.Tensor  # of two rows a tile
    waiting: cute.Tensor  # (key, id) of two blocks not yet in the list, the second only beside a first
    undo: cute.Tensor  # factor of the row's scores


class PrefillScore(Kernel, ScoreLoaders):
    """One variant of the kernel."""

    threads, ctas_per_sm = 384, 1

    def __init__(self, query, key, variant):
        length, tiles = VARIANTS[variant]
        super().__init__(query, key, length, tiles, LEAST_UNITS if length else 1)
        fp8_lists = query == "e4m3" and not self.score_mode
        # A block's maximum enters the list under the next block's MMA. 16-bit MMAs are long enough without, and their
        # operands leave no registers for it.
        self.late = fp8_lists
        self.waits = fp8_lists

    def load_queries(self, base, first_row, lane):
        """The A operand of 64 rows, this warp's 16 of them from `first_row` on, as words."""
        words = []
        row = first_row + (lane & 15)
        for step in range(4 * self.chunks):
            chunk = 2 * step + (lane >> 4)
            place = base + self.query_at + (chunk >> 3) * (self.rows * 128) + row * 128
            words += mma.load_matrices(place + (((chunk & 7) ^ (lane & 7)) << 4))
        return words

    def issue(self, tiled, accumulator, queries, keys):
        warpgroup.fence()
        atom = cute.make_mma_atom(tiled.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(cute.size(queries.shape[2])):
            cute.gemm(atom, accumulator, queries[None, None, k], keys[None, None, k], accumulator)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def largest(self, maxima, tile, accumulator, flags, visible):
        """Maxima over the block's keys of this thread's two rows, in floating point.

        `visible`: None, or for both rows the number of visible keys less this thread's first."""
        for row in range(2):
            halves = []
            for half in range(2):
                values = []
                for n in range(8 * half, 8 * half + 8):
                    for c in range(2):
                        value = accumulator[c + 2 * row + 4 * n]
                        if visible is not None:
                            value = ptx.select(visible[row] > 8 * n + c, value, Float32(NEG_INF))
                        values.append(value)
                values = [ptx.maximum_in_order(values[i], values[i + 8]) for i in range(8)]
                while len(values) > 1:
                    values = [ptx.maximum(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]
                halves.append(ptx.select((flags & (1 + half)) != 0, values[0], Float32(NEG_INF)))
            maxima[2 * tile + row] = ptx.maximum(*halves)

    def largest_bits(self, maxima, tile, accumulator):
        """The same by the bits as integers, three at a time: half the instructions. Right where the result is a number
        that is not negative; else the result has its sign bit or is a NaN, which stands above all numbers."""
        # Three chains a row: the accumulator stays live, so few registers are left.
        chains = []
        for row in range(2):
            values = [accumulator[c + 2 * row + 4 * n] for n in range(16) for c in range(2)] + [accumulator[2 * row]]
            chains += [values[11 * i : 11 * i + 11] for i in range(3)]
        best = [ptx.maximum3_of_bits_in_order(*chain[:3]) for chain in chains]
        for j in range(3, 11, 2):
            best = [ptx.maximum3_with_bits_in_order(m, *chain[j : j + 2]) for m, chain in zip(best, chains)]
        for row in range(2):
            maxima[2 * tile + row] = ptx.f32_from_bits(ptx.maximum3_i32(*best[3 * row : 3 * row + 3]))

    def doubtful(self, first, second):
        """Whether one of the results of `largest_bits` may be wrong."""
        return ptx.above_u32(ptx.maximum_u32(ptx.f32_bits(first), ptx.f32_bits(second)), 0x7F800000)

    @cute.jit
    def settle(
        self,
        maxima: cute.Tensor,  # of this thread's rows and columns
        block: Int32,
        limit: Int32,  # of the blocks that are candidates of this row, if not all are
        limited: cutlass.Constexpr,
        best_keys: cute.Tensor,
        best_ids: cute.Tensor,
        waiting: cute.Tensor,  # (key, id) of two blocks not yet in the list
        undo: cute.Tensor,
        odd: cutlass.Boolean,
        upper: cutlass.Boolean,
        score_row: Int64,
        writes: cutlass.Boolean,
    ):
        """Exchanges after which every thread has one row's maximum, which is stored or offered to the row's list."""
        mine = []
        for i in cutlass.range_constexpr(self.tiles):
            first, second = maxima[2 * i], maxima[2 * i + 1]
            keep, send = ptx.select(odd, second, first), ptx.select(odd, first, second)
            mine.append(ptx.maximum(keep, ptx.shuffle_xor_f32(send, 1)))
        value = mine[0]
        if cutlass.const_expr(self.tiles == 2):
            keep, send = ptx.select(upper, mine[1], mine[0]), ptx.select(upper, mine[0], mine[1])
            value = ptx.maximum(keep, ptx.shuffle_xor_f32(send, 2))
        else:
            value = ptx.maximum(value, ptx.shuffle_xor_f32(value, 2))
        if cutlass.const_expr(self.normalise):
            value = value * undo[0]
        if cutlass.const_expr(self.score_mode):
            if writes:
                ptx.store_f32(score_row + Int64(block) * 4, ptx.canonical(value))
        else:
            key = select.key_of(value)
            if cutlass.const_expr(limited):
                key = ptx.select(block < limit, key, Int32(select.NONE))
            if cutlass.const_expr(self.waits):
                # A warp inserts when one of its rows has a third block waiting, then the first one of all rows.
                better = key > best_keys[self.length - 1]
                if ptx.any_lane(better & (waiting[2] != select.NONE)):
                    ranking.insert(best_keys, best_ids, self.length, waiting[0], waiting[1])
                    waiting[0], waiting[1], waiting[2] = waiting[2], waiting[3], Int32(select.NONE)
                empty = waiting[0] == select.NONE
                if better:
                    waiting[2], waiting[3] = ptx.select(empty, Int32(select.NONE), key), block
                    waiting[0], waiting[1] = ptx.select(empty, key, waiting[0]), ptx.select(empty, block, waiting[1])
            elif key > best_keys[self.length - 1]:
                ranking.insert(best_keys, best_ids, self.length, key, block)

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
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.mma_type)
        layout = cute.tile_to_shape(atom, (BLOCK, DIMS, self.stages), (0, 1, 2))
        key_stages = cutlass.utils.SmemAllocator().allocate_tensor(
            self.mma_type, layout.outer, 1024, swizzle=layout.inner
        )
        base = smem.base(1024)  # the allocator's first address
        q_map, k_map = tma.map_address(map_q), tma.map_address(map_k)
        if thread == 0:
            tma.prefetch_map(q_map)
            tma.prefetch_map(k_map)
            self.init_barriers(base)
        ptx.barrier()
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        tile_shift = Int32(self.row_bits) - head_shift
        reach = table_width << page_shift
        batch = query_tiles.Batch(cu_seqlens_q, seqused_k, num_requests, num_tokens)
        to = ranking.Rows(out, out_token_stride, out_head_stride, out_slot_stride, head_shift, vectors)
        choice = ranking.Choice(topk, local_blocks, init_blocks)

        if warp < 4:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            pages = Pages(block_table, table_stride, num_pages, table_width, page_shift)
            self.load(base, warp, thread, (q_map, k_map), pages, batch, reach, tile_shift, to, choice, cta, ctas)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = self.make_consumer(base, thread, warp, lane, head_shift, key_stages)
            if consumer.group == 1:
                hopper.named_barrier_arrive(Int32(1), 256)
            self.consume(consumer, to, parts, choice)

    # ---- the consumers: two warpgroups

    def make_consumer(self, base, thread, warp, lane, head_shift, key_stages):
        group = (warp >> 2) - 1
        tiled = cutlass.utils.hopper_helpers.make_trivial_tiled_mma(
            self.mma_type,
            self.mma_type,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            tiler_mn=(64, BLOCK),
            a_source=warpgroup.OperandSource.RMEM,
        )
        keys = tiled.make_fragment_B(tiled.get_slice(thread & 127).partition_B(key_stages))
        shapes = tiled.partition_shape_A((64, DIMS)), tiled.partition_shape_C((64, BLOCK))
        queries = [cute.make_rmem_tensor(shapes[0], self.mma_type) for _ in range(self.tiles)]
        accumulators = [cute.make_rmem_tensor(shapes[1], Float32) for _ in range(self.tiles)]
        sizes = ((max(self.length, 1), Int32), (max(self.length, 1), Int32), (2 * self.tiles, Float32), (4, Int32))
        registers = [cute.make_rmem_tensor(cute.make_layout(n), x) for n, x in (*sizes, (1, Float32))]
        t = lane & 3
        odd, upper = (t & 1) == 1, t > 1
        first_row = group * (64 * self.tiles) + (warp & 3) * 16
        row = first_row + (lane >> 2) + (t & 1) * 8 + (t >> 1) * (64 if self.tiles == 2 else 0)
        place = (base, lane, group, t, odd, upper, first_row, row, head_shift)
        return Consumer(*place, tiled, keys, queries, accumulators, *registers)

    @cute.jit
    def consume(
        self,
        own,
        to: ranking.Rows,
        parts: Int64,
        choice: ranking.Choice,
    ):
        """Every tile that the producer has a record of."""
        local_blocks = choice.local_blocks
        base, row, head_shift = own.base, own.row, own.head_shift
        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        more = Int32(1)
        while more != 0:
            smem.mbarrier_wait(self.query_full(base), slot)
            record = base + self.record_at + slot * RECORD_BYTES
            first_token, count, position, block = smem.load_i32x4(record)
            last, _, _, more = smem.load_i32x4(record + 16)
            slot = slot ^ 1
            if more != 0:
                self.take_queries(own)
                cute.arch.sync_warp()
                if own.lane == 0:
                    hopper.mbarrier_arrive(self.query_empty(base))
                if cutlass.const_expr(not self.score_mode):
                    ranking.clear(own.best_keys, own.best_ids, self.length)
                    own.waiting[0], own.waiting[2] = Int32(select.NONE), Int32(select.NONE)
                # Blocks before the first row's own are seen whole by all rows; those before its forced ones are
                # candidates of all rows.
                whole_end = (position + 1) >> 7
                if cutlass.const_expr(self.score_mode):
                    score_row = to.address(first_token, row)
                    writes = (row >> head_shift) < count
                else:
                    whole_end = ptx.minimum_i32(whole_end, query_tiles.candidates(position) - local_blocks)
                    score_row, writes = Int64(0), own.odd
                whole_end = ptx.clamp(whole_end, block, last)
                settle = (own.best_keys, own.best_ids, own.waiting, own.undo, own.odd, own.upper, score_row, writes)
                for masked in cutlass.range_constexpr(2):
                    begin, end, limit = block, whole_end, whole_end
                    if cutlass.const_expr(masked):  # read again: no register holds these meanwhile
                        _, _, position, _ = smem.load_i32x4(record)
                        begin, end = whole_end, smem.load_i32(record + 16)
                        limit = query_tiles.candidates(position + (row >> head_shift)) - local_blocks
                    stage, phase = self.score_blocks(
                        own, settle, masked, begin, end, block, limit, position, stage, phase
                    )
                if cutlass.const_expr(self.late):
                    self.settle(own.maxima, last - 1, limit, True, *settle)
                if cutlass.const_expr(self.waits):
                    for i in cutlass.range_constexpr(2):
                        waiting = (own.waiting[2 * i], own.waiting[2 * i + 1])
                        ranking.insert(own.best_keys, own.best_ids, self.length, *waiting)
                if cutlass.const_expr(not self.score_mode):
                    others = own.upper if self.tiles == 1 else None
                    lists = (own.best_keys, own.best_ids, self.length, row, self.rows)
                    finish_tile(record, *lists, to, parts, choice, others)

    def take_queries(self, own):
        """The tile's queries as A operands; 16-bit ones beside fp8 keys as fp16, with what undoes their factors."""
        scales = []
        for i in range(self.tiles):
            words = self.load_queries(own.base, own.first_row + 64 * i, own.lane)
            if self.normalise:
                for j in range(2):
                    pairs, scale = fit_fp16.fit([words[4 * k + j + 2 * h] for k in range(8) for h in range(2)])
                    scales.append(scale)
                    for n in range(16):
                        words[4 * (n >> 1) + j + 2 * (n & 1)] = pairs[n]
            operand = cute.recast_tensor(own.queries[i], Int32)
            for k in range(len(words)):
                operand[k] = words[k]
        if self.normalise:
            own.undo[0] = ptx.select(own.odd, scales[1], scales[0])
            if self.tiles == 2:
                own.undo[0] = ptx.select(own.upper, ptx.select(own.odd, scales[3], scales[2]), own.undo[0])

    @cute.jit
    def score_blocks(
        self,
        own,
        settle,  # the last arguments of `settle`
        masked: cutlass.Constexpr,  # whether a row may see a part of a block, or not have it as a candidate
        begin: Int32,
        end: Int32,
        block: Int32,  # the tile's first one
        limit: Int32,
        position: Int32,
        stage: Int32,
        phase: Int32,
    ):
        """Blocks [begin, end) of a tile. Returns (stage, phase) behind them."""
        base, lane = own.base, own.lane
        for b in cutlass.range(begin, end, unroll=1):
            hopper.named_barrier(own.group + 1, 256)
            smem.mbarrier_wait(self.full(base, stage), phase)
            for i in cutlass.range_constexpr(self.tiles):
                self.issue(own.tiled, own.accumulators[i], own.queries[i], own.keys[None, None, None, stage])
            hopper.named_barrier_arrive(2 - own.group, 256)
            flags = smem.load_i32(base + self.flags_at + stage * 4)
            if cutlass.const_expr(self.late):
                if b > block:
                    self.settle(own.maxima, b - 1, limit, masked, *settle)
            for i in cutlass.range_constexpr(self.tiles):
                warpgroup.wait_group(self.tiles - 1 - i)
                if cutlass.const_expr(i == self.tiles - 1):
                    cute.arch.sync_warp()  # all lanes have read the flags
                    if lane == 0:
                        hopper.mbarrier_arrive(self.empty(base, stage))
                if cutlass.const_expr(not masked):
                    self.largest_bits(own.maxima, i, own.accumulators[i])
                    # The branch also keeps a tile's maxima ahead of the wait for the next one.
                    if self.doubtful(own.maxima[2 * i], own.maxima[2 * i + 1]) | (flags != 3):
                        self.largest(own.maxima, i, own.accumulators[i], flags, None)
                else:
                    visible = self.visible_keys(own, i, position + 1 - b * BLOCK - 2 * own.t)
                    self.largest(own.maxima, i, own.accumulators[i], flags, visible)
            if cutlass.const_expr(not self.late):
                self.settle(own.maxima, b, limit, masked, *settle)
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
                phase = phase ^ 1
        return stage, phase

    def visible_keys(self, own, tile, before):
        """Of a block, for this thread's two rows, less its first key; `before`: what the tile's first token sees."""
        first = (own.first_row + 64 * tile + (own.lane >> 2)) >> own.head_shift
        second = (own.first_row + 64 * tile + 8 + (own.lane >> 2)) >> own.head_shift
        return [before + first, before + second]


def programs():
    scoring = [
        Program(f"prefill_score_{query}_{key}_{variant}", PrefillScore(query, key, variant))
        for query, key in DTYPES
        for variant in VARIANTS
    ]
    return scoring + [Program(f"prefill_fold_{name}", PrefillFold(*VARIANTS[name])) for name in ("top16", "top32")]
