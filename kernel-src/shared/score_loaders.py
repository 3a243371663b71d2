"""What feeds the consumers of sm90/ and sm100/prefill_score.py: shared memory, mbarriers, and the four warps that load.

Warp 0 walks the units of this CTA's range. It publishes a record of each tile, copies the tile's queries, and each
block's keys by halves of 64 tokens, with flags that say which half is on a page of the cache. Two records take turns; a
record without units is the end. Warps 1 - 3 write the rows that need no score; with fp8 keys and 16-bit queries they
first widen each stage of keys to fp16, exactly, and pass its flags on.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Int32, Int64

from shared import hopper, mma, ptx, query_tiles, ranking, smem, tma

BLOCK = query_tiles.BLOCK
DIMS = 128
HALF = 64  # keys of a TMA box
WIDENERS = 96
CONSUMER_WARPS = 8
RECORD_BYTES = 32

MMA_TYPES = {"bf16": BFloat16, "f16": Float16, "e4m3": Float8E4M3FN}
# (query, key) -> type of the MMA. fp8 keys are widened to fp16 unless the queries are fp8 as well.
DTYPES = {
    ("bf16", "bf16"): "bf16",
    ("f16", "f16"): "f16",
    ("bf16", "e4m3"): "f16",
    ("f16", "e4m3"): "f16",
    ("e4m3", "e4m3"): "e4m3",
}


class Pages(NamedTuple):
    """The page table."""

    block_table: Int64
    row_stride: Int64  # bytes
    num_pages: Int32
    width: Int32
    shift: Int32  # 6 or 7: log2 of a page's tokens

    def reach(self):
        """Tokens that a row of the table can hold."""
        return self.width << self.shift


class ScoreLoaders:
    """The loaders' half of a variant: dtypes of queries and keys, rows of a tile."""

    def __init__(self, query, key, length, tiles, least_units):
        self.query, self.key = query, key
        self.length, self.tiles = length, tiles  # of a row's list; m64 tiles of a warpgroup
        self.score_mode = length == 0
        self.mma_type = MMA_TYPES[DTYPES[query, key]]
        self.widen = key == "e4m3" and query != "e4m3"
        self.normalise = self.widen and query == "bf16"
        self.rows = 128 * self.tiles
        self.row_bits = 6 + self.tiles
        self.least_units = least_units  # of a CTA's range
        element = 1 if query == "e4m3" else 2
        self.chunks = element  # of 128 bytes, of a query or of a key as the MMA reads it
        self.stage_bytes = BLOCK * DIMS * element
        self.stored_bytes = BLOCK * DIMS * (1 if key == "e4m3" else 2)
        self.stages = 3 if self.widen else 8 if element == 1 else 4
        self.stored_stages = 2 if self.widen else 0
        self.query_bytes = self.rows * DIMS * element
        # Shared memory after the stages.
        at = self.stages * self.stage_bytes
        self.stored_at = at
        at += self.stored_stages * self.stored_bytes
        self.query_at = at
        at += self.query_bytes
        self.record_at = at
        at += 2 * RECORD_BYTES
        self.flags_at = at  # of a stage: bit h set if its half h is there
        at += 4 * self.stages
        self.stored_flags_at = at
        at += 4 * self.stored_stages
        at = (at + 15) & ~15
        self.barriers_at = at
        count = 2 * self.stages + 2 * self.stored_stages + 2
        self.dynamic_smem = at + 8 * count

    def full(self, base, stage):
        return base + self.barriers_at + stage * 8

    def empty(self, base, stage):
        return base + self.barriers_at + (self.stages + stage) * 8

    def stored(self, base, stage):
        return base + self.barriers_at + (2 * self.stages + stage) * 8

    def taken(self, base, stage):
        return base + self.barriers_at + (2 * self.stages + self.stored_stages + stage) * 8

    def query_full(self, base):
        return base + self.barriers_at + (2 * self.stages + 2 * self.stored_stages) * 8

    def query_empty(self, base):
        return self.query_full(base) + 8

    def init_barriers(self, base):
        for stage in range(self.stages):
            smem.mbarrier_init(self.full(base, stage), Int32(WIDENERS if self.widen else 1))
            smem.mbarrier_init(self.empty(base, stage), Int32(CONSUMER_WARPS))
        for stage in range(self.stored_stages):
            smem.mbarrier_init(self.stored(base, stage), Int32(1))
            smem.mbarrier_init(self.taken(base, stage), Int32(WIDENERS))
        smem.mbarrier_init(self.query_full(base), Int32(1))
        smem.mbarrier_init(self.query_empty(base), Int32(CONSUMER_WARPS))

    # ---- warps 0 - 3

    @cute.jit
    def load(
        self,
        base: Int32,
        warp: Int32,
        thread: Int32,
        maps,  # of the queries and of the keys
        pages_of: Pages,
        batch: query_tiles.Batch,
        reach: Int32,
        tile_shift: Int32,
        to: ranking.Rows,
        choice: ranking.Choice,
        cta: Int32,
        ctas: Int32,
    ):
        lane = thread & 31
        topk, local_blocks, init_blocks = choice
        if warp == 0:
            # A row of more than topk candidates is scored; its forced blocks are not.
            if cutlass.const_expr(self.score_mode):
                first_scored, free_blocks, first_block = Int32(0), Int32(0), Int32(0)
            else:
                first_scored, free_blocks, first_block = topk * BLOCK, local_blocks + init_blocks, init_blocks
            tiling = query_tiles.Tiling(pages_of.reach(), first_scored, tile_shift, free_blocks)
            self.produce(base, *maps, pages_of, batch, tiling, first_block, lane, cta, ctas)
        else:
            if cutlass.const_expr(self.widen):
                self.widen_keys(base, thread - 32)
            if cutlass.const_expr(not self.score_mode):
                worker, workers = cta * WIDENERS + thread - 32, ctas * WIDENERS
                self.write_rows_without_scores(to, batch, reach, topk, worker, workers, lane)

    # ---- the producer: warp 0

    def load_page(self, table, token, page_shift, table_width):
        entry = token >> page_shift
        return ptx.load_i32_if(table + Int64(entry) * 4, Int32(entry < table_width), -1)

    @cute.jit
    def load_keys(
        self,
        map_k: Int64,
        target: Int32,
        barrier: Int32,
        flags_at: Int32,
        pages: cute.Tensor,
        first_key: Int32,
        in_page: Int32,  # mask of the position within a page
        num_pages: Int32,
    ):
        """The two halves of a block, by one thread; a half on no page is left out."""
        bytes_half = self.stored_bytes // 2
        there = [Int32((pages[h] >= 0) & (pages[h] < num_pages)) for h in range(2)]
        smem.store_i32(flags_at, there[0] + 2 * there[1])
        smem.mbarrier_expect(barrier, (there[0] + there[1]) * bytes_half)
        for half in cutlass.range_constexpr(2):
            if there[half] != 0:
                for chunk in cutlass.range_constexpr(self.stored_bytes // (BLOCK * 128)):
                    place = target + chunk * (BLOCK * 128) + half * (HALF * 128)
                    coordinates = (Int32(chunk * 64), (first_key + HALF * half) & in_page, pages[half])
                    tma.tma_load(place, map_k, coordinates, barrier)

    @cute.jit
    def produce(
        self,
        base: Int32,
        map_q: Int64,
        map_k: Int64,
        pages_of: Pages,
        batch: query_tiles.Batch,
        tiling: query_tiles.Tiling,
        first_block: Int32,
        lane: Int32,
        cta: Int32,
        ctas: Int32,
    ):
        block_table, table_stride, num_pages, table_width, page_shift = pages_of
        tile_shift, free_blocks = tiling.tile_shift, tiling.free_blocks
        total = query_tiles.count_units(batch, tiling, lane)
        share = query_tiles.units_of_cta(total, ctas, self.least_units)
        unit = cta * share
        end = ptx.minimum_i32(unit + share, total)
        in_page = (Int32(1) << page_shift) - 1
        pages = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        next_pages = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        group, group_base, request = Int32(0), Int32(0), Int32(0)
        token, position, rows, tile, tile_base = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        stage, phase, slot = Int32(0), Int32(1), Int32(0)
        while unit < end:
            if (tile << tile_shift) >= rows:
                group, group_base, request, token, position, rows, tile, tile_base = query_tiles.locate_unit(
                    unit, group, group_base, batch, tiling, lane
                )
            done = tile << tile_shift
            count = ptx.minimum_i32(rows - done, Int32(1) << tile_shift)
            units = query_tiles.candidates(position + done + count - 1) - free_blocks
            begin = unit - tile_base
            stop = ptx.minimum_i32(units, end - tile_base)
            if (rows <= 0) | (begin < 0) | (stop <= begin):  # the lengths changed under the launch
                end = unit
            else:
                table = block_table + Int64(request) * table_stride
                block, last = first_block + begin, first_block + stop
                for half in cutlass.range_constexpr(2):
                    next_pages[half] = self.load_page(table, block * BLOCK + HALF * half, page_shift, table_width)
                smem.mbarrier_wait(self.query_empty(base), slot ^ 1)
                if lane == 0:
                    record = base + self.record_at + slot * RECORD_BYTES
                    whole = Int32((begin == 0) & (stop == units))
                    part = 2 * cta + Int32(begin == 0)
                    smem.store_i32x4(record, [token + done, count, position + done, block])
                    smem.store_i32x4(record + 16, [last, whole, part, Int32(1)])
                    smem.mbarrier_expect(self.query_full(base), Int32(self.query_bytes))
                    for chunk in cutlass.range_constexpr(self.chunks):
                        target = base + self.query_at + chunk * (self.rows * 128)
                        tma.tma_load(target, map_q, (Int32(chunk * 64), Int32(0), token + done), self.query_full(base))
                slot = slot ^ 1
                unit = tile_base + stop
                if stop == units:
                    tile = tile + 1
                    tile_base = unit
                key = block * BLOCK
                for _ in cutlass.range(block, last, unroll=1):
                    for half in cutlass.range_constexpr(2):
                        pages[half] = next_pages[half]
                        next_pages[half] = self.load_page(table, key + (BLOCK + HALF * half), page_shift, table_width)
                    if cutlass.const_expr(self.widen):
                        smem.mbarrier_wait(self.taken(base, stage), phase)
                        if lane == 0:
                            target = base + self.stored_at + stage * self.stored_bytes
                            flags = base + self.stored_flags_at + stage * 4
                            self.load_keys(
                                map_k, target, self.stored(base, stage), flags, pages, key, in_page, num_pages
                            )
                    else:
                        smem.mbarrier_wait(self.empty(base, stage), phase)
                        if lane == 0:
                            target = base + stage * self.stage_bytes
                            flags = base + self.flags_at + stage * 4
                            self.load_keys(map_k, target, self.full(base, stage), flags, pages, key, in_page, num_pages)
                    key = key + BLOCK
                    stage = stage + 1
                    if stage == (self.stored_stages if self.widen else self.stages):
                        stage = Int32(0)
                        phase = phase ^ 1
        # Nothing more to come.
        smem.mbarrier_wait(self.query_empty(base), slot ^ 1)
        if lane == 0:
            record = base + self.record_at + slot * RECORD_BYTES
            smem.store_i32x4(record + 16, [Int32(0), Int32(0), Int32(0), Int32(0)])
            hopper.mbarrier_arrive(self.query_full(base))
        if cutlass.const_expr(self.widen):
            smem.mbarrier_wait(self.taken(base, stage), phase)
            if lane == 0:
                smem.store_i32(base + self.stored_flags_at + stage * 4, Int32(-1))
                hopper.mbarrier_arrive(self.stored(base, stage))

    # ---- warps 1 - 3

    @cute.jit
    def widen_keys(self, base: Int32, worker: Int32):
        """Every stage of e4m3 keys to a stage of fp16 keys, until the producer's last."""
        source, source_phase = Int32(0), Int32(0)
        stage, phase = Int32(0), Int32(1)
        more = Int32(1)
        while more != 0:
            smem.mbarrier_wait(self.stored(base, source), source_phase)
            flags = smem.load_i32(base + self.stored_flags_at + source * 4)
            if flags < 0:
                more = Int32(0)
            else:
                smem.mbarrier_wait(self.empty(base, stage), phase)
                stored = base + self.stored_at + source * self.stored_bytes
                wide = base + stage * self.stage_bytes
                for i in cutlass.range(worker, BLOCK * 8, WIDENERS, unroll=2):
                    row, chunk = i >> 3, i & 7
                    words = smem.load_i32x4(stored + row * 128 + ((chunk ^ (row & 7)) << 4))
                    pairs = [mma.widen_e4m3(w) for w in words]
                    # 16 dims: two chunks of the row, in the first or second half of the dims.
                    place = wide + (chunk >> 2) * (BLOCK * 128) + row * 128
                    first = (chunk & 3) * 2
                    smem.store_i32x4(place + ((first ^ (row & 7)) << 4), pairs[0] + pairs[1])
                    smem.store_i32x4(place + (((first + 1) ^ (row & 7)) << 4), pairs[2] + pairs[3])
                if worker == 0:
                    smem.store_i32(base + self.flags_at + stage * 4, flags)
                tma.fence_async()
                hopper.mbarrier_arrive(self.full(base, stage))
                hopper.mbarrier_arrive(self.taken(base, source))
                source = source + 1
                if source == self.stored_stages:
                    source = Int32(0)
                    source_phase = source_phase ^ 1
                stage = stage + 1
                if stage == self.stages:
                    stage = Int32(0)
                    phase = phase ^ 1

    @cute.jit
    def write_rows_without_scores(
        self,
        to: ranking.Rows,
        batch: query_tiles.Batch,
        reach: Int32,
        topk: Int32,
        worker: Int32,
        workers: Int32,
        lane: Int32,
    ):
        """Rows with at most topk candidates take them all; rows of no request have none."""
        num_requests, num_tokens, head_shift = batch.num_requests, batch.num_tokens, to.head_shift
        for first in cutlass.range(0, num_requests + 1, 32, unroll=1):
            start, tokens, position = query_tiles.load_request(batch, reach, first + lane)
            tokens = ptx.clamp(topk * BLOCK - position, Int32(0), tokens)
            if first + lane == num_requests:
                start = ptx.clamp(ptx.load_i32(batch.cu_seqlens + Int64(num_requests) * 4), Int32(0), num_tokens)
                tokens = num_tokens - start
                position = Int32(-(1 << 31))  # no candidates at any of them
            left = ptx.ballot(Int32(tokens > 0))
            while left != 0:
                which = ptx.lowest_bit(left)
                left = left & (left - 1)
                first_token, rows = ptx.shuffle(start, which), ptx.shuffle(tokens, which) << head_shift
                first_position = ptx.shuffle(position, which)
                for r in cutlass.range(worker, rows, workers, unroll=1):
                    token = r >> head_shift
                    head = r - (token << head_shift)
                    n = query_tiles.candidates(first_position + token)
                    row = to.place(first_token + token, head)
                    for j in cutlass.range(topk, unroll=1):
                        ptx.store_words(row + Int64(j) * to.slot_stride, [ptx.select(j < n, j, Int32(-1))])
