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
    32w+31. One mma.sync m16n8k16 per 16 keys (rows), 8 columns and 16 dims.

Keys go from global memory straight into the MMA's registers
    The order of the 128 dims inside the MMAs is free as long as keys and queries agree, so thread (g, t) of a warp
    reads the 16-byte chunks t, t+4, ... of the keys g and g+8: full sectors, no shared memory, no swizzle, no barrier,
    and as many bytes in flight as there are registers. The next block's keys of a slab (16 keys) are requested as soon
    as this block's have been used. fp8 keys are widened to fp16, exactly; a bf16 query row is then scaled by a power of
    two to fit fp16 and its score scaled back. (Elements under 2^-31 of the row's largest lose bits: 2^-40 of it at
    most.) The warps' maxima meet in shared memory, one CTA barrier a block, two buffers.

Order
    A score depends on its column and its block only, in a fixed order of accumulation: it is the same bits whatever the
    split, the batch and the number of columns.

Budget
    Bytes: 256 (16-bit) or 128 (fp8) per key, once per 32 columns. 4.3 TB/s x 1 us / 132 SMs needs 33 KB in flight per
    SM; here 16 warps x 8 KiB (16-bit) or 24 x 4 KiB (fp8) at one tile. Issue slots per 4 KiB of 16-bit keys at that
    rate: 880, used about 60 with one tile and 180 with four.

Limits
    head_dim 128; pages of 64 or 128 tokens; T * Hi < 2^31, table reach < 2^31 tokens; key and query bases and byte
    strides multiples of 16. Lengths, offsets and page numbers are data and may be anything: nothing outside the tensors
    is read or written.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import mma, ptx, smem
from shared.program import Program

WARPS = 4
THREADS = 32 * WARPS
BLOCK = 128
SLAB = 16  # keys of one MMA
NEG_INF = float("-inf")
MASKED = 1 << 30  # a first token beyond every length
# Up to this batch the first keys are fetched ahead. H200, 32k, select: one request 7.3 -> 6.7 us (bf16), 6.4 -> 5.7 (fp8);
# 16 requests 39.7 -> 38.5, 24.8 -> 22.9; 64 requests at 128k 493 -> 502: there the scan itself fills the memory bus.
WARM_REQUESTS = 16

# (query, key) dtypes; the MMA works in the first, or in fp16 with fp8 keys.
DTYPES = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3")]
# Columns / 8 -> CTAs per SM that the registers allow, for 16-bit and for fp8 keys. One tile is a plain decode step with
# up to 8 heads; two and four are verify steps of 4 and 8 tokens with 4 heads. More columns are further column groups.
TILES = {1: (4, 6), 2: (3, 3), 4: (2, 2)}


class DecodeScore:
    """One variant of the kernel."""

    def __init__(self, query, key, tiles):
        self.query, self.key, self.tiles = query, key, tiles
        self.fp8 = key == "e4m3"
        self.normalise = self.fp8 and query == "bf16"
        self.mma_kind = "bf16" if key == "bf16" else "f16"
        self.columns = 8 * tiles
        self.chunks = 2 if self.fp8 else 4  # 16-byte chunks of a key, a thread
        self.words = 2 * 4 * self.chunks  # of a slab, a thread
        self.ctas_per_sm = TILES[tiles][1 if self.fp8 else 0]
        # Shared memory: two buffers of each warp's maxima, then the columns' scales.
        self.buffer_bytes = WARPS * self.columns * 4
        self.scales_at = 2 * self.buffer_bytes
        self.dynamic_smem = self.scales_at + self.columns * 4

    # ---- straight-line parts

    def load_query(self, row, ok, t):
        """16 words: 2 s and 2 s + 1 are the pairs b0 and b1 of MMA step s."""
        if self.fp8:  # 16 dims of an fp8 chunk are two chunks of the query
            offsets = [t * 32, t * 32 + 16, t * 32 + 128, t * 32 + 144]
        else:
            offsets = [t * 16 + 64 * i for i in range(4)]
        return [w for offset in offsets for w in ptx.stream_16_bytes_if(row + Int64(offset), ok)]

    def to_fp16(self, words):
        """A bf16 row, spread over four neighbouring threads, times a power of two, as fp16; and what undoes the
        factor."""
        largest = Int32(0)
        for w in words:
            for magnitude in (w & 0x7FFF, (w >> 16) & 0x7FFF):
                finite = ptx.select(magnitude < 0x7F80, magnitude, Int32(0))
                largest = ptx.select(finite > largest, finite, largest)
        for distance in (1, 2):
            other = ptx.shuffle_xor(largest, distance)
            largest = ptx.select(other > largest, other, largest)
        # The largest element becomes 2^14 .. 2^15, unless it is so small that the factor would leave fp32.
        exponent = Int32(141) - (largest >> 7)
        exponent = ptx.select(exponent > 126, Int32(126), exponent)
        factor = ptx.f32_from_bits((exponent + 127) << 23)
        halves = []
        for w in words:
            low, high = ptx.unpack_bf16(w)
            halves.append(ptx.pack_fp16(low * factor, high * factor))
        return halves, ptx.f32_from_bits((Int32(127) - exponent) << 23)

    def operands(self, slabs, which):
        """The A operands of the eight MMA steps of slab 0 or 1."""
        at = lambda half, i, j: slabs[((2 * which + half) * self.chunks + i) * 4 + j]
        steps = []
        for i in range(self.chunks):
            if self.fp8:
                for j in range(4):
                    low, high = mma.widen_e4m3(at(0, i, j)), mma.widen_e4m3(at(1, i, j))
                    steps.append([low[0], high[0], low[1], high[1]])
            else:
                for j in (0, 2):
                    steps.append([at(0, i, j), at(1, i, j), at(0, i, j + 1), at(1, i, j + 1)])
        return steps

    def score_slab(self, slabs, which, query, best, ends, first, g):
        """best[2n + c] = max(best, score of keys g, g + 8 of slab 0 or 1 in column 2t + c of tile n); `first`: its
        first token."""
        steps = self.operands(slabs, which)
        for n in range(self.tiles):
            even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4  # two chains: half the latency
            for s in range(0, 8, 2):
                at = n * 16 + 2 * s
                even = mma.mma(even, steps[s], query[at], query[at + 1], self.mma_kind)
                odd = mma.mma(odd, steps[s + 1], query[at + 2], query[at + 3], self.mma_kind)
            for c in range(2):
                visible = ends[2 * n + c] - first
                for half in range(2):
                    score = even[2 * half + c] + odd[2 * half + c]
                    score = ptx.select(visible > g + 8 * half, score, Float32(NEG_INF))
                    best[2 * n + c] = ptx.maximum(best[2 * n + c], score)

    def reduce_rows(self, best):
        """Maxima over the eight g of a warp, in every thread."""
        result = []
        for i in range(2 * self.tiles):
            x = best[i]
            for distance in (4, 8, 16):
                x = ptx.maximum(x, ptx.shuffle_xor_f32(x, distance))
            result.append(x)
        return result

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
        if num_requests <= WARM_REQUESTS:
            _, _, hint, hint_page, hint_next = self.load_lengths_and_pages(*places, past_l1=True)
            for ahead, number in ((0, hint_page), (1, hint_next)):
                left = hint - (split + ahead * splits) * BLOCK - mine
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
        slabs = cute.make_rmem_tensor(cute.make_layout(2 * self.words), Int32)
        best = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), Float32)
        ends = cute.make_rmem_tensor(cute.make_layout(2 * self.tiles), Int32)

        kv_len = ptx.clamp(kv_len, Int32(0), table_width << page_shift)
        own_key = index_k + Int64(g + in_page) * k_token_stride + Int64(t * 16)
        first_token = split * BLOCK + mine
        self.request_keys(slabs, own_key, page, num_pages, k_page_stride, k_token_stride, kv_len - first_token, g)

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
            self.load_queries(query, ends, base, own_rows, columns, column0, num_heads, first_end, thread)
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
                for j in cutlass.range_constexpr(2 * self.tiles):
                    best[j] = Float32(NEG_INF)
                self.score_slab(slabs, 0, query, best, ends, shown, g)
                self.score_slab(slabs, 1, query, best, ends, shown + SLAB, g)
                left = kv_len - token - splits * BLOCK
                self.request_keys(slabs, own_key, next_page, num_pages, k_page_stride, k_token_stride, left, g)
                maxima = self.reduce_rows(best)
                buffer = base + (i & 1) * self.buffer_bytes
                if lane < 4:
                    self.share(buffer + (warp * self.columns + 2 * t) * 4, maxima)
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
                self.request_keys(
                    slabs, own_key, page, num_pages, k_page_stride, k_token_stride, kv_len - first_token, g
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

    def request_keys(self, slabs, own_key, page, num_pages, page_stride, token_stride, left, g):
        """Issue the loads of this warp's 32 keys on `page`, of which `left` lie before the end; the others become
        zero."""
        left = ptx.select((page >= 0) & (page < num_pages), left, Int32(0))
        row = own_key + Int64(page) * page_stride
        for half in range(4):
            ok = Int32(left > g + 8 * half)
            for i in range(self.chunks):
                words = ptx.stream_16_bytes_if(row + 64 * i, ok)
                for j in range(4):
                    slabs[(half * self.chunks + i) * 4 + j] = words[j]
            if half < 3:
                row = row + token_stride * 8

    def load_queries(self, query, ends, base, rows, columns, column0, num_heads, first_end, thread):
        index_q, token_stride, head_stride, start = rows
        lane = thread & 31
        g, t = lane >> 2, lane & 3
        for n in range(self.tiles):
            column = column0 + 8 * n + g
            token = ptx.divide_u32(column, num_heads)
            row = index_q + Int64(start + token) * token_stride + Int64(column - token * num_heads) * head_stride
            words = self.load_query(row, Int32(column < columns), t)
            if self.normalise:
                words, scale = self.to_fp16(words)
                smem.store_f32_if(base + self.scales_at + (8 * n + g) * 4, scale, Int32((thread < 32) & (t == 0)))
            for i in range(16):
                query[16 * n + i] = words[i]
            for c in range(2):
                ends[2 * n + c] = first_end + ptx.divide_u32(column0 + 8 * n + 2 * t + c, num_heads)

    def share(self, address, maxima):
        for n in range(self.tiles):
            for c in range(2):
                smem.store_f32(address + (8 * n + c) * 4, maxima[2 * n + c])

    @cute.jit
    def entry(
        self,
        scores: Int64,
        index_q: Int64,
        index_k: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
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
        num_blocks: Int32,
        fill: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            scores,
            index_q,
            index_k,
            block_table,
            cu_seqlens_q,
            seqused_k,
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
            num_blocks,
            fill,
        ).launch(
            grid=[num_blocks, num_requests, 1],
            block=[THREADS, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,
        )


def programs():
    example = [Int64(16)] * 13 + [Int32(1)] * 8
    return [
        Program(f"decode_score_{query}_{key}_n{8 * tiles}", DecodeScore(query, key, tiles), example)
        for query, key in DTYPES
        for tiles in TILES
    ]
