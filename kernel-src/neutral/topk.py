"""Top-k: the blocks each (token, head) row attends to, from its block scores. Ops: select_blocks, after decode_score.

Problem
    A row at position p = kv_len - q_len + i has the candidates 0 .. n-1, n = p // 128 + 1 (none if p < 0). Taken are
    the `local` newest and the `init` first candidates, whatever they score, then the best others: exact fp32 order, NaN
    as -inf, -0.0 as 0.0, the lower id among equals. Out: min(k, n) ids ascending, then -1. Rows of no request: all -1.

Tile picture
    A CTA a row (shared/select.py). Up to 32 x warps x slots scores are in its registers at once, each warp a contiguous
    share; longer rows go piece by piece.
    narrow: 4 warps of 2 slots, 256 blocks.   wide: 4 of 8, 1,024.   long: 16 of 16, 8,192.

Order
    Selection is exact, so the split over warps cannot show.

Budget
    T * Hi * n * 4 bytes; latency counts, not bandwidth. Request, length and n are found before the wait for the scoring
    kernel, which is the launch before (it has waited itself before it let this one start: lengths are settled by then).
    After the wait: one load, some 150 (narrow) to 300 instructions of a warp and five barriers, one store.

Limits
    k <= 32; local + init <= k; 2^31 rows. Lengths and offsets may be anything: n never exceeds the width of a score
    row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, select, smem
from shared.program import Kernel, Program

BLOCK = 128
REQUEST_LOADS = 4  # in flight: up to 128 requests are one latency

# name -> (warps, scores of a lane). The launch takes the first that has the row at once: see torch-ext/launch/topk.cpp.
SHAPES = {"narrow": (4, 2), "wide": (4, 8), "long": (16, 16)}


class TopK(Kernel):
    """One variant of the kernel."""

    def __init__(self, warps, slots):
        self.warps, self.slots = warps, slots
        self.threads = 32 * warps
        self.dynamic_smem = select.row_bytes(warps)

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        scores: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,  # all strides in bytes
        out_head_stride: Int64,
        out_slot_stride: Int64,
        scores_token_stride: Int64,
        scores_head_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        num_heads: Int32,
        num_blocks: Int32,  # of a score row
        reach: Int32,  # tokens that a row of the block table can hold
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
    ):
        ptx.let_next_kernel_start()  # it waits for this one, which waits for all before
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base(16)
        token = ptx.divide_u32(row, num_heads)
        head = row - token * num_heads

        # The request: as many as end at or before this token. (With bad offsets some request, and n stays bounded.)
        ended = Int32(0)
        for first in cutlass.range(0, num_requests, 32 * REQUEST_LOADS, unroll=1):
            ended = ended + self.count_ended(cu_seqlens_q, first + lane, num_requests, token)
        request = ptx.warp_sum(ended)
        mine = Int32(request < num_requests)
        stop, kv_len = ptx.load_i32_batch(
            [(cu_seqlens_q + Int64(request) * 4 + 4, mine, 0), (seqused_k + Int64(request) * 4, mine, 0)]
        )
        kv_len = ptx.clamp(kv_len, Int32(0), reach)
        visible = ptx.clamp(kv_len - stop + token + 1, Int32(0), kv_len)
        n = ptx.select(mine != 0, (visible + (BLOCK - 1)) >> 7, Int32(0))
        n = ptx.select(n > num_blocks, num_blocks, n)

        out_row = out + Int64(token) * out_token_stride + Int64(head) * out_head_stride
        score_row = scores + Int64(token) * scores_token_stride + Int64(head) * scores_head_stride

        ptx.wait_for_previous_kernel()
        if n <= topk:  # all candidates; no score is read
            if thread < topk:
                ptx.store_words(out_row + Int64(thread) * out_slot_stride, [ptx.select(thread < n, thread, Int32(-1))])
        else:
            select.select_row(
                out_row,
                out_slot_stride,
                score_row,
                n,
                topk,
                n - local_blocks,
                init_blocks,
                self.slots,
                self.warps,
                base,
                warp,
                lane,
            )

    def count_ended(self, cu_seqlens_q, at, num_requests, token):
        places = [at + 32 * i for i in range(REQUEST_LOADS)]
        ends = ptx.load_i32_batch(
            [(cu_seqlens_q + Int64(i) * 4 + 4, Int32(i < num_requests), 0x7FFFFFFF) for i in places]
        )
        count = Int32(0)
        for end in ends:
            count = count + Int32(end <= token)
        return count


def programs():
    return [Program(f"topk_{name}", TopK(*shape)) for name, shape in SHAPES.items()]
