"""Decode select: block scores and top-k in one launch, a cluster of CTAs a request. Op: select_blocks.

Problem
    As decode_score followed by topk: the score of every 128-token block for a few new tokens of a request, then for
    each (token, head) row the `local` newest, the `init` first and the best other blocks. For batches that fill the chip
    with one cluster a request; with fewer requests the two launches spread a request over all multiprocessors.

Tile picture
    grid (rank, request, column group), cluster = the ranks of a request: 1, 2, 4, 8 or 16 CTAs.
    scan    A warp takes whole blocks, warp * ranks + rank first, then every (warps * ranks)-th, a step of 32 (16-bit) or
            64 (fp8) keys at a time: 8 KiB, 64 registers of a thread (shared/index_tile.py). The next step's keys are
            requested as soon as this step's have been used. Nothing is shared between warps: no barrier in the scan.
    top-k   Scores go through global memory (L2) and one cluster barrier, then a CTA takes a row (shared/select.py).

Order
    A score depends on its column and block only, and selection is exact: ids do not depend on the cluster or the batch,
    and are those of decode_score and topk.

Budget
    Bytes: 256 (16-bit) or 128 (fp8) per key, once per 32 columns. In flight: 16 warps x 8 KiB an SM at one tile, where
    4.3 TB/s x 1 us / 132 SMs needs 33 KB. Issue slots of an SM per 8 KiB at that rate: 1,700; used about 200 (16-bit)
    and 330 (fp8) with one tile.

Limits
    head_dim 128; pages of 64 or 128 tokens; T * Hi < 2^31, table reach < 2^31 tokens; k <= 32; key and query bases and
    byte strides multiples of 16. Lengths, offsets and page numbers are data and may be anything: nothing outside the
    tensors is read or written.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx, select, smem
from shared.index_tile import BLOCK, DTYPES, MASKED, NEG_INF, SLAB, IndexTile
from shared.program import Program

HALF = BLOCK // 2  # a page of 64 tokens
CTAS_PER_SM = 2
# Columns / 8 -> warps of a CTA, two of which fit the registers of an SM.
TILES = {1: 8, 2: 6, 4: 4}
SLOTS = 4  # scores of a lane in the selection
# Up to this batch the first keys are fetched ahead: there is one wave of CTAs, and their start is a good part of the time.
WARM_REQUESTS = 32


class DecodeSelect(IndexTile):
    """One variant of the kernel."""

    def __init__(self, query, key, tiles):
        super().__init__(query, key, tiles, slabs=8 if key == "e4m3" else 4)
        self.warps = TILES[tiles]
        self.threads = 32 * self.warps
        self.step_keys = SLAB * self.slabs
        self.steps = HALF // self.step_keys
        self.dynamic_smem = select.row_bytes(self.warps)

    # ---- straight-line parts

    def load_page(self, table, token, table_width, page_shift):
        entry = token >> page_shift
        return ptx.load_i32_if(table + Int64(entry) * 4, Int32(entry < table_width), -1)

    def request_step(self, keys, own_key, page, token, cache, end, g):
        """Issue the loads of the keys from `token` on, which lie on `page`; those from `end` on become zeros."""
        num_pages, page_stride, token_stride, page_mask = cache
        left = ptx.select((page >= 0) & (page < num_pages), end - token, Int32(0))
        row = own_key + Int64(page) * page_stride + Int64(token & page_mask) * token_stride
        self.request_keys(keys, row, token_stride, left, g)

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        scores: Int64,
        index_q: Int64,
        index_k: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,  # all strides in bytes
        out_head_stride: Int64,
        out_slot_stride: Int64,
        scores_token_stride: Int64,
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
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
    ):
        ptx.let_next_kernel_start()  # it waits for this one, which waits for all before
        thread, _, _ = cute.arch.thread_idx()
        rank, request, first_group = cute.arch.block_idx()
        ranks, _, group_step = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        g, t = lane >> 2, lane & 3
        base = smem.base(16)
        table = block_table + Int64(request) * table_stride
        first_block, block_step = warp * ranks + rank, ranks * self.warps
        first_token = first_block * BLOCK
        cache = (num_pages, k_page_stride, k_token_stride, (Int32(1) << page_shift) - 1)
        places = (cu_seqlens_q, seqused_k, Int64(request) * 4, table, first_token >> page_shift, table_width)

        # Before the wait nothing counts that is read, for the kernel ahead may be writing it. But it most likely is what
        # it will be: the first half block's keys are fetched into L2 on its word.
        if num_requests <= WARM_REQUESTS:
            _, _, hint, hint_page = self.load_lengths_and_page(*places, past_l1=True)
            for i in range(HALF // 32):
                key = i * 32 + lane
                ok = Int32((hint_page >= 0) & (hint_page < num_pages) & (key < hint - first_token))
                at = Int64((first_token & cache[3]) + key) * k_token_stride
                for line in range(self.chunks // 2):  # of 128 bytes
                    ptx.prefetch_l2_if(index_k + Int64(hint_page) * k_page_stride + at + 128 * line, ok)

        ptx.wait_for_previous_kernel()

        # Lengths and the first page: one round trip. Then the keys at once; all else is worked out while they come.
        start, stop, kv_len, page = self.load_lengths_and_page(*places)

        query = cute.make_rmem_tensor(cute.make_layout(16 * self.tiles), Int32)
        keys = cute.make_rmem_tensor(cute.make_layout(self.words), Int32)
        best = cute.make_rmem_tensor(cute.make_layout(self.tiles), Float32)
        ends = cute.make_rmem_tensor(cute.make_layout(self.tiles), Int32)

        kv_len = ptx.clamp(kv_len, Int32(0), table_width << page_shift)
        # With no more blocks than are to be chosen, no score is needed.
        scanned = ptx.select(kv_len > topk * BLOCK, kv_len, Int32(0))
        own_key = index_k + Int64(g) * k_token_stride + Int64(t * 16)
        self.request_step(keys, own_key, page, first_token, cache, scanned, g)

        start = ptx.clamp(start, Int32(0), num_tokens)
        stop = ptx.clamp(stop, start, num_tokens)
        columns = (stop - start) * num_heads
        first_end = kv_len - (stop - start) + 1  # of the request's first token
        blocks = (scanned + (BLOCK - 1)) >> 7
        rounds = ptx.select(
            first_block < blocks, ptx.divide_u32(blocks - first_block + block_step - 1, block_step), Int32(0)
        )
        groups = (columns + (self.columns - 1)) // self.columns
        own_column = self.column_of(lane)

        for group in cutlass.range(first_group, groups, group_step, unroll=1):
            column0 = group * self.columns
            own_rows = (index_q, q_token_stride, q_head_stride, start)
            scales = self.load_queries(
                query, ends, own_rows, columns, column0, num_heads, first_end, lane, page_shift >> 3
            )
            # The column whose scores this lane writes.
            column = column0 + own_column
            in_request = ptx.divide_u32(column, num_heads)
            own_scores = (
                scores
                + Int64(start + in_request) * scores_token_stride
                + Int64(column - in_request * num_heads) * scores_head_stride
            )
            writes = self.holds_column(lane) & (column < columns)
            if cutlass.const_expr(self.normalise):
                scale = self.scale_of(scales, lane)

            token = first_token
            for i in cutlass.range(2 * rounds, unroll=1):  # halves of blocks
                second = i & 1
                following = token + HALF + second * (block_step - 1) * BLOCK
                next_page = self.load_page(table, following, table_width, page_shift)
                shown = ptx.select((page >= 0) & (page < num_pages), token, Int32(MASKED))
                for n in cutlass.range_constexpr(self.tiles):
                    best[n] = ptx.select(second == 0, Float32(NEG_INF), best[n])
                for step in cutlass.range_constexpr(self.steps):
                    for slab in range(self.slabs):
                        first = shown + (step * self.step_keys + slab * SLAB)
                        self.score_slab(keys, slab, query, best, ends, first, t)
                    if cutlass.const_expr(step + 1 < self.steps):
                        later = token + (step + 1) * self.step_keys
                        self.request_step(keys, own_key, page, later, cache, scanned, g)
                    else:
                        self.request_step(keys, own_key, next_page, following, cache, scanned, g)
                if second == 1:
                    score = self.reduce_columns(best, lane)
                    if cutlass.const_expr(self.normalise):
                        score = score * scale
                    if writes:
                        ptx.store_f32(own_scores + Int64(token >> 7) * 4, score)
                token = following
                page = next_page

            smem.cluster_arrive()
            smem.cluster_wait()
            left = columns - column0
            rows = ptx.select(left < self.columns, left, Int32(self.columns))
            for row in cutlass.range(rank, rows, ranks, unroll=1):
                row_token = ptx.divide_u32(column0 + row, num_heads)
                head = Int64(column0 + row - row_token * num_heads)
                row_token64 = Int64(start + row_token)
                out_row = out + row_token64 * out_token_stride + head * out_head_stride
                n = (ptx.clamp(first_end + row_token, Int32(0), kv_len) + (BLOCK - 1)) >> 7
                if n <= topk:  # all candidates; no score is read
                    if thread < topk:
                        at = out_row + Int64(thread) * out_slot_stride
                        ptx.store_words(at, [ptx.select(thread < n, thread, Int32(-1))])
                else:
                    select.select_row(
                        out_row,
                        out_slot_stride,
                        scores + row_token64 * scores_token_stride + head * scores_head_stride,
                        n,
                        topk,
                        n - local_blocks,
                        init_blocks,
                        SLOTS,
                        self.warps,
                        base,
                        warp,
                        lane,
                    )

            if group + group_step < groups:  # more columns than the grid foresaw: over the same keys again
                page = self.load_page(table, first_token, table_width, page_shift)
                self.request_step(keys, own_key, page, first_token, cache, scanned, g)

        # Rows of no request: those after the last.
        if (request == num_requests - 1) & (first_group == 0):
            if lane < topk:
                for row in cutlass.range(stop * num_heads + first_block, num_tokens * num_heads, block_step, unroll=1):
                    row_token = ptx.divide_u32(row, num_heads)
                    head = row - row_token * num_heads
                    at = out + Int64(row_token) * out_token_stride + Int64(head) * out_head_stride
                    ptx.store_words(at + Int64(lane) * out_slot_stride, [Int32(-1)])

    def load_lengths_and_page(self, offsets, lengths, at, table, entry, table_width, past_l1=False):
        """First row, row after the last, kv_len of a request and one of its page numbers."""
        return ptx.load_i32_batch(
            [
                (offsets + at, Int32(1), 0),
                (offsets + at + 4, Int32(1), 0),
                (lengths + at, Int32(1), 0),
                (table + Int64(entry) * 4, Int32(entry < table_width), -1),
            ],
            past_l1,
        )

    @cute.jit
    def entry(
        self,
        out: Int64,
        scores: Int64,
        index_q: Int64,
        index_k: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        out_slot_stride: Int64,
        scores_token_stride: Int64,
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
        page_shift: Int32,
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            out,
            scores,
            index_q,
            index_k,
            block_table,
            cu_seqlens_q,
            seqused_k,
            out_token_stride,
            out_head_stride,
            out_slot_stride,
            scores_token_stride,
            scores_head_stride,
            q_token_stride,
            q_head_stride,
            k_page_stride,
            k_token_stride,
            table_stride,
            num_tokens,
            num_requests,
            num_heads,
            num_pages,
            table_width,
            page_shift,
            topk,
            local_blocks,
            init_blocks,
        ).launch(
            grid=[16, num_requests, 1],  # the launcher chooses the cluster
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=0,
        )


def programs():
    example = [Int64(16)] * 17 + [Int32(1)] * 9
    return [
        Program(f"decode_select_{query}_{key}_n{8 * tiles}", DecodeSelect(query, key, tiles), example)
        for query, key in DTYPES
        for tiles in TILES
    ]
