"""Top-k: the blocks each (token, head) row attends to, from its block scores. Ops: select_blocks, after decode_score.

Problem
    A row at position p = kv_len - q_len + i has the candidates 0 .. n-1, n = p // 128 + 1 (none if p < 0). Taken are
    the `local` newest and the `init` first candidates, whatever they score, then the best others: exact fp32 order, NaN
    as -inf, -0.0 as 0.0, the lower id among equals. Out: min(k, n) ids ascending, then -1. Rows of no request: all -1.

Tile picture
    narrow: a warp = a row of one piece of 256 scores (more pieces: one after the other), 4 rows a CTA.
    wide:   4 warps = a row, each warp a contiguous quarter of the candidates in pieces of 256.
    long:   16 warps = a row, pieces of 512: 16,384 blocks are two pieces a warp.
    A warp keeps its k best so far, as (key, id) in ascending ids, in a list in shared memory; the list is the first
    slot of the next piece, so that positions ascend with ids. Then warp 0 selects among the lists. All of it is
    shared/select.py.

Order
    Selection is exact, so the split over warps cannot show.

Budget
    T * Hi * n * 4 bytes; latency counts, not bandwidth. Request, length and n are found before the wait for the scoring
    kernel, which is the launch before (it has waited itself before it let this one start: lengths are settled by then).
    After the wait: one load, about 400 clocks of selection a piece, one store.

Limits
    k <= 32; local + init <= k; 2^31 rows. Lengths and offsets may be anything: n never exceeds the width of a score
    row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, select, smem
from shared.program import Program

BLOCK = 128
REQUEST_LOADS = 4  # in flight: up to 128 requests are one latency

# name -> (warps of a row, scores of a lane and piece, rows of a CTA). The launch takes the first whose rows are wide
# enough: see torch-ext/launch/topk.cpp.
SHAPES = {"narrow": (1, 8, 4), "wide": (4, 8, 1), "long": (16, 16, 1)}


class TopK:
    """One variant of the kernel."""

    def __init__(self, warps, slots, rows):
        self.warps, self.slots, self.rows = warps, slots, rows
        self.threads = 32 * warps * rows
        self.piece = 32 * slots
        # Per warp its list and the scratch of the selection.
        self.scratch_at = warps * rows * select.LIST_BYTES
        self.dynamic_smem = 2 * self.scratch_at

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
        cta, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base(16)
        own_list = base + warp * select.LIST_BYTES
        scratch = base + self.scratch_at + warp * select.LIST_BYTES

        row = cta * self.rows + (warp if self.warps == 1 else 0)
        real = row < num_tokens * num_heads
        token = ptx.divide_u32(ptx.select(real, row, Int32(0)), num_heads)
        head = ptx.select(real, row, Int32(0)) - token * num_heads

        # The request: as many as end at or before this token. (With bad offsets some request, and n stays bounded.)
        ended = Int32(0)
        for first in cutlass.range(0, num_requests, 32 * REQUEST_LOADS, unroll=1):
            ended = ended + self.count_ended(cu_seqlens_q, first + lane, num_requests, token)
        request = ptx.warp_sum(ended)
        mine = Int32(request < num_requests) & Int32(real)
        stop, kv_len = ptx.load_i32_batch(
            [(cu_seqlens_q + Int64(request) * 4 + 4, mine, 0), (seqused_k + Int64(request) * 4, mine, 0)]
        )
        kv_len = ptx.clamp(kv_len, Int32(0), reach)
        visible = ptx.clamp(kv_len - stop + token + 1, Int32(0), kv_len)
        n = ptx.select(mine != 0, (visible + (BLOCK - 1)) >> 7, Int32(0))
        n = ptx.select(n > num_blocks, num_blocks, n)
        local_from = n - local_blocks

        out_row = out + Int64(token) * out_token_stride + Int64(head) * out_head_stride
        score_row = scores + Int64(token) * scores_token_stride + Int64(head) * scores_head_stride
        keys = cute.make_rmem_tensor(cute.make_layout(self.slots + 1), Int32)
        ids = cute.make_rmem_tensor(cute.make_layout(self.slots + 1), Int32)

        ptx.wait_for_previous_kernel()
        if n <= topk:  # all candidates; no score is read
            if (warp < self.rows) & real & (lane < topk):
                ptx.store_words(out_row + Int64(lane) * out_slot_stride, [ptx.select(lane < n, lane, Int32(-1))])
        else:
            # This warp's candidates: a contiguous share in whole pieces.
            pieces = (n + (self.piece - 1)) // self.piece
            share = ((pieces + (self.warps - 1)) // self.warps) * self.piece
            begin = (warp * share) if self.warps > 1 else Int32(0)
            last = ptx.select(begin + share < n, begin + share, n)
            smem.store_i32x2(own_list + lane * select.PAIR, Int32(select.NONE), Int32(-1))
            ptx.warp_barrier()
            for first in cutlass.range(begin, last, self.piece, unroll=1):
                select.load_piece(keys, ids, self.slots, score_row, first, last, local_from, init_blocks, lane)
                keys[0], ids[0] = smem.load_i32x2(own_list + lane * select.PAIR)
                select.select_largest(keys, ids, self.slots + 1, topk, own_list, scratch, lane)
            if cutlass.const_expr(self.warps > 1):
                ptx.barrier()
            if warp < self.rows:  # of a row with several warps, the first
                if cutlass.const_expr(self.warps > 1):
                    select.load_lists(keys, ids, self.warps, base, lane)
                    select.select_largest(keys, ids, self.warps, topk, own_list, scratch, lane)
                chosen = smem.load_i32x2(own_list + lane * select.PAIR)
                if lane < topk:
                    ptx.store_words(out_row + Int64(lane) * out_slot_stride, [chosen[1]])

    def count_ended(self, cu_seqlens_q, at, num_requests, token):
        places = [at + 32 * i for i in range(REQUEST_LOADS)]
        ends = ptx.load_i32_batch(
            [(cu_seqlens_q + Int64(i) * 4 + 4, Int32(i < num_requests), 0x7FFFFFFF) for i in places]
        )
        count = Int32(0)
        for end in ends:
            count = count + Int32(end <= token)
        return count

    @cute.jit
    def entry(
        self,
        out: Int64,
        scores: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        out_slot_stride: Int64,
        scores_token_stride: Int64,
        scores_head_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        num_heads: Int32,
        num_blocks: Int32,
        reach: Int32,
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            out,
            scores,
            cu_seqlens_q,
            seqused_k,
            out_token_stride,
            out_head_stride,
            out_slot_stride,
            scores_token_stride,
            scores_head_stride,
            num_tokens,
            num_requests,
            num_heads,
            num_blocks,
            reach,
            topk,
            local_blocks,
            init_blocks,
        ).launch(
            grid=[cute.ceil_div(num_tokens * num_heads, self.rows), 1, 1],
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
        )


def programs():
    example = [Int64(16)] * 9 + [Int32(1)] * 8
    return [Program(f"topk_{name}", TopK(*shape), example) for name, shape in SHAPES.items()]
