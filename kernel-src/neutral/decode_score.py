"""Decode score: the indexer's score of every 128-token block for a few new tokens per request. Op: block_scores,
select_blocks.

Problem
    score[i, h, block] = max over the visible tokens t of the block of dot(index_q[i, h], index_k[t]), fp32, raw logits.
    Visible: t < kv_len and t <= position of token i (bottom-right causal). A NaN dot product counts as -inf; a block
    with nothing visible scores -inf. Index keys are paged, one key head for all Hi index query heads.

Tile picture
    grid (split, request, column group), CTA = 4 warps. A column is a (token, head) pair of the request, COLUMNS = 8 x
    tiles of them side by side: they share every key that is read. CTA `split` takes the blocks split, split + splits,
    ...: the split depends on shapes alone, and any length keeps all CTAs busy. Of a block, warp w has the tokens 32w ..
    32w+31. Columns are the rows of mma.sync m16n8k16, keys its columns.

Keys (shared/index_tile.py)
    go from global memory straight into the MMA's registers. The next block's keys of a slab (8 keys) are requested as
    soon as this block's have been used. The warps' maxima meet in shared memory, one CTA barrier a block, two buffers.

Order
    A score depends on its column and its block only, in a fixed order of accumulation: it is the same bits whatever the
    split, the batch and the number of columns.

Budget
    Bytes: 256 (16-bit) or 128 (fp8) per key, once per 32 columns. 4.3 TB/s x 1 us / 132 SMs needs 33 KB in flight per
    SM; here 16 warps x 8 KiB (16-bit) or 4 KiB (fp8) at one tile, for which L1 needs lines: the carveout matters
    (torch-ext/launch/decode_score.cpp). Issue slots per 4 KiB of keys at that rate: 880, used about 100 with one tile,
    170 with four, 235 with fp8 keys and one tile.

Limits
    head_dim 128; pages of 64 or 128 tokens; T * Hi < 2^31, table reach < 2^31 tokens; key and query bases and byte
    strides multiples of 16. Lengths, offsets and page numbers are data and may be anything: nothing outside the tensors
    is read or written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx, smem
from shared.index_tile import BLOCK, DTYPES, MASKED, NEG_INF, SLAB, IndexTile
from shared.program import Kernel, Program

WARPS = 4
THREADS = 32 * WARPS
# Columns / 8 -> CTAs per SM that the registers allow, for 16-bit and for fp8 keys. One tile is a plain decode step with
# up to 8 heads; two and four are verify steps of 4 and 8 tokens with 4 heads. More columns are further column groups.
TILES = {1: (4, 4), 2: (3, 3), 4: (2, 2)}


class DecodeScore(Kernel, IndexTile):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, query, key, tiles):
        super().__init__(query, key, tiles, slabs=BLOCK // WARPS // SLAB)
        self.ctas_per_sm = TILES[tiles][1 if self.fp8 else 0]
        # Shared memory: two buffers of each warp's maxima, then the columns' scales.
        self.buffer_bytes = WARPS * self.columns * 4
        self.scales_at = 2 * self.buffer_bytes
        self.dynamic_smem = self.scales_at + self.columns * 4

    def fold_warps(self, buffer, lane):
        values = [smem.load_f32(buffer + (w * self.columns + lane) * 4) for w in range(WARPS)]
        return ptx.maximum(ptx.maximum(values[0], values[1]), ptx.maximum(values[2], values[3]))

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        scores: Int64,
        index_q: Int64,
        index_k: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        scores_token_stride: Int64,  # all strides in bytes
        scores_head_stride: Int64,
        q_token_stride: Int64,
        q_head_stride: Int64,
        k_page_stride: Int64,
        k_token_stride: Int64,
        table_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        num_heads: Int32,
        num_pages: Int32,
        table_width: Int32,
        page_shift: Int32,  # log2(page size): 6 or 7
        num_blocks: Int32,  # of a score row
        ahead: Int32,  # 1: fetch the first keys before the wait
        fill: Int32,  # 1: write -inf where a row has no candidate and in rows of no request (request num_requests)
    ):
        thread, _, _ = cute.arch.thread_idx()
        split, request, first_group = cute.arch.block_idx()
        splits, _, group_step = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        g, t = lane >> 2, lane & 3
        base = smem.base(16)

        real = Int32(request < num_requests)
        table = block_table + Int64(request) * table_stride
        mine = warp * (BLOCK // WARPS)  # of a block
        first_entry = (split * BLOCK + mine) >> page_shift
        entry_step = splits << (7 - page_shift)  # a block is 1 or 2 entries
        entry = first_entry + entry_step
        places = (cu_seqlens_q, seqused_k, Int64(request) * 4, real, table, first_entry, entry, table_width)

        # Before the wait nothing counts that is read, for the kernel ahead may be writing it. But it most likely is what
        # it will be: the first two blocks' keys are fetched into L2 on its word.
        in_page = mine & ((1 << page_shift) - 1)
        if ahead != 0:
            _, _, hint, hint_page, hint_next = self.load_lengths_and_pages(*places, past_l1=True)
            for turn, number in ((0, hint_page), (1, hint_next)):
                left = hint - (split + turn * splits) * BLOCK - mine
                ok = Int32((number >= 0) & (number < num_pages) & (lane < left))
                row = index_k + Int64(number) * k_page_stride + Int64(in_page + lane) * k_token_stride
                for line in range(self.chunks // 2):  # of 128 bytes
                    ptx.prefetch_l2_if(row + 128 * line, ok)

        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()

        # Lengths and the first two pages: one round trip. Then the keys at once; all else is worked out while they
        # come.
        start, stop, kv_len, page, next_page = self.load_lengths_and_pages(*places)

        query = cute.make_rmem_tensor(cute.make_layout(16 * self.tiles), Int32)
        keys = cute.make_rmem_tensor(cute.make_layout(self.words), Int32)
        best = cute.make_rmem_tensor(cute.make_layout(self.tiles), Float32)
        ends = cute.make_rmem_tensor(cute.make_layout(self.tiles), Int32)

        kv_len = ptx.clamp(kv_len, Int32(0), table_width << page_shift)
        own_key = index_k + Int64(g + in_page) * k_token_stride + Int64(t * 16)
        first_token = split * BLOCK + mine
        self.request_page(keys, own_key, page, num_pages, k_page_stride, k_token_stride, kv_len - first_token, g)

        start = ptx.clamp(start, Int32(0), num_tokens)
        stop = ptx.clamp(stop, start, num_tokens)
        columns = (stop - start) * num_heads
        first_end = kv_len - (stop - start) + 1  # of the request's first token
        blocks = (kv_len + (BLOCK - 1)) >> 7
        rounds = ptx.select(split < blocks, ptx.divide_u32(blocks - split + splits - 1, splits), Int32(0))
        groups = (columns + (self.columns - 1)) // self.columns

        for group in cutlass.range(first_group, groups, group_step, unroll=1):
            column0 = group * self.columns
            own_rows = (index_q, q_token_stride, q_head_stride, start)
            scales = self.load_queries(
                query, ends, own_rows, columns, column0, num_heads, first_end, lane, page_shift >> 3
            )
            if cutlass.const_expr(self.normalise):
                at = base + self.scales_at + self.column_of(lane) * 4
                smem.store_f32_if(at, self.scale_of(scales, lane), Int32((warp == 0) & self.holds_column(lane)))
            # The column whose scores this lane writes.
            column = column0 + lane
            in_request = ptx.divide_u32(column, num_heads)
            score_row = (
                scores
                + Int64(start + in_request) * scores_token_stride
                + Int64(column - in_request * num_heads) * scores_head_stride
            )
            writes = (lane < self.columns) & (column < columns)

            for i in cutlass.range(rounds, unroll=1):
                block = split + i * splits
                token = block * BLOCK + mine
                entry += entry_step
                later_page = self.load_page(table, entry, table_width, real)
                shown = ptx.select((page >= 0) & (page < num_pages), token, Int32(MASKED))
                for j in cutlass.range_constexpr(self.tiles):
                    best[j] = Float32(NEG_INF)
                for slab in range(self.slabs):
                    self.score_slab(keys, slab, query, best, ends, shown + slab * SLAB, t)
                left = kv_len - token - splits * BLOCK
                self.request_page(keys, own_key, next_page, num_pages, k_page_stride, k_token_stride, left, g)
                maximum = self.reduce_columns(best, lane)
                buffer = base + (i & 1) * self.buffer_bytes
                if self.holds_column(lane):
                    smem.store_f32(buffer + (warp * self.columns + self.column_of(lane)) * 4, maximum)
                ptx.barrier()
                if warp == (i & (WARPS - 1)):  # the warps take turns
                    if writes:
                        score = self.fold_warps(buffer, lane)
                        if cutlass.const_expr(self.normalise):
                            score = score * smem.load_f32(base + self.scales_at + lane * 4)
                        ptx.store_f32(score_row + Int64(block) * 4, score)
                page = next_page
                next_page = later_page

            if fill != 0:
                if writes:
                    for block in cutlass.range(split + (rounds + warp) * splits, num_blocks, WARPS * splits, unroll=1):
                        ptx.store_f32(score_row + Int64(block) * 4, Float32(NEG_INF))

            if group + group_step < groups:  # more columns than the grid foresaw: over the same keys again
                ptx.barrier()  # the scales have been read
                page = self.load_page(table, first_entry, table_width, real)
                entry = first_entry + entry_step
                next_page = self.load_page(table, entry, table_width, real)
                self.request_page(
                    keys, own_key, page, num_pages, k_page_stride, k_token_stride, kv_len - first_token, g
                )

    # ---- parts with addresses

    def load_lengths_and_pages(
        self, offsets, lengths, at, real, table, first_entry, second_entry, table_width, past_l1=False
    ):
        """First row, row after the last, kv_len and the first two page numbers of a request."""
        return ptx.load_i32_batch(
            [
                (offsets + at, Int32(1), 0),
                (offsets + at + 4, real, 0x7FFFFFFF),
                (lengths + at, real, 0),
                (table + Int64(first_entry) * 4, real & Int32(first_entry < table_width), -1),
                (table + Int64(second_entry) * 4, real & Int32(second_entry < table_width), -1),
            ],
            past_l1,
        )

    def load_page(self, table, entry, table_width, real):
        return ptx.load_i32_if(table + Int64(entry) * 4, real & Int32(entry < table_width), -1)

    def request_page(self, keys, own_key, page, num_pages, page_stride, token_stride, left, g):
        """Issue the loads of this warp's 32 keys on `page`, of which `left` lie before the end; the others become
        zero."""
        left = ptx.select((page >= 0) & (page < num_pages), left, Int32(0))
        self.request_keys(keys, own_key + Int64(page) * page_stride, token_stride, left, g)


def programs():
    return [
        Program(f"decode_score_{query}_{key}_n{8 * tiles}", DecodeScore(query, key, tiles))
        for query, key in DTYPES
        for tiles in TILES
    ]
