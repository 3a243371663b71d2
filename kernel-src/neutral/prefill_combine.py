"""Prefill combine: the partial results of a row's blocks become its output. Third stage of the KV-stationary prefill (op
sparse_attention), after sm90/prefill.py.

Problem
    For each token of a chunk and KV head: up to 32 slots with a partial o (unnormalised, 16-bit), m (log2 units) and l.
        M = max m_s,   w_s = 2^(m_s - M),   out = v_scale * sum w_s o_s / sum w_s l_s,   lse = ln(sum w_s l_s) + M ln 2
    over the slots in the row's mask. A row with none of them, or nothing visible in them: 0 and -inf.

Tile picture
    CTA = (token, KV head): 256 threads for 16 query heads, 128 for up to 8. Thread (unit, part, lane) has 16 bytes of each
    slot's partial, in the order in which the forward's accumulators lie (sm90/prefill.py, Partials): words k = columns
    8 (4 part + k) + 2 t, + 1 of row 8 unit + g. A transposition within four lanes makes 16 bytes of a row of them.

Order
    Slots ascend. All of a token's numbers come from that token's slots: the bits depend on neither chunk nor batch.

Budget
    Bytes: 4 KiB a slot, token and KV head (16 query heads), read once; 16 slots: 64 KiB for 4 KiB of output. Loads of 16 slots
    are under way together: 64 KiB a CTA.

Limits
    K <= 32; byte strides of `out` multiples of 16.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx, softmax
from shared.partials import Partials
from shared.program import Program

BATCH = 16  # slots whose loads are under way together


class PrefillCombine:
    """One variant: dtype of partials and output, rows of a partial."""

    dynamic_smem = 0

    def __init__(self, dtype, rows):
        self.dtype, self.rows = dtype, rows
        self.threads = 16 * rows
        self.form = Partials(dtype, rows)

    @cute.kernel
    def kernel(
        self,
        partials: Int64,
        sums: Int64,
        state: Int64,
        out: Int64,
        lse: Int64,  # 0: not wanted
        v_scale: Int64,  # 0: one
        out_token: Int64,  # strides in bytes
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        v_scale_head: Int64,
        first_token: Int32,
        kv_heads: Int32,
        group: Int32,
        width: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        local, head, _ = cute.arch.block_idx()
        lane = thread & 31
        unit = thread >> 7
        token = Int64(first_token + local)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        mask, mine = ptx.load_i32_batch(
            [(state + (token * Int64(kv_heads) + Int64(head)) * 8 + 4 * i, Int32(1), 0) for i in range(2)]
        )
        if mine != 0:
            place = (Int64(local) * Int64(kv_heads) + Int64(head)) * Int64(width)
            row = unit * 8 + (lane >> 2)
            values = partials + place * (self.rows * 256) + Int64(thread * 16)
            numbers = sums + (place * self.rows + Int64(row)) * 8
            acc = cute.make_rmem_tensor(cute.make_layout(10), Float32)  # 8 columns, sum of weights, reference
            for i in cutlass.range_constexpr(9):
                acc[i] = Float32(0.0)
            acc[9] = Float32(softmax.EMPTY)
            for first in cutlass.range(0, width, BATCH, unroll=1):
                left = ptx.minimum_i32(width - first, Int32(BATCH))
                chosen = (mask >> first) & ((Int32(1) << left) - 1)
                if chosen != 0:
                    at = Int64(first)
                    self.add_slots(acc, values + at * (self.rows * 256), numbers + at * (self.rows * 8), chosen)
            total = acc[8]
            scale = ptx.load_f32_or_one(v_scale + Int64(head) * v_scale_head) * softmax.inverse_or_zero(total)
            words = [self.form.pack(acc[2 * k] * scale, acc[2 * k + 1] * scale) for k in range(4)]
            words = self.form.transpose(words, lane & 3)
            if row < group:
                query_head = Int64(head * group + row)
                part = (thread >> 5) & 3
                column = Int64((part * 4 + (lane & 3)) * 16)
                ptx.store_words(out + token * out_token + query_head * out_head + column, words)
                if ((thread & 0x63) == 0) & (lse != 0):
                    natural = softmax.natural_lse(acc[9], total)
                    ptx.store_f32(lse + token * lse_token + query_head * lse_head, natural)

    def add_slots(self, acc, values, numbers, chosen):
        """A batch of slots, those with a bit in `chosen`, onto the running sums."""
        ok = [(chosen >> s) & 1 for s in range(BATCH)]
        pairs = [ptx.load_f32x2_if(numbers + s * (self.rows * 8), ok[s], softmax.EMPTY) for s in range(BATCH)]
        loaded = [ptx.stream_16_bytes_if(values + s * (self.rows * 256), ok[s]) for s in range(BATCH)]
        top = acc[9]
        for m, _ in pairs:
            top = ptx.maximum(top, m)
        before = ptx.exp2(acc[9] - top)
        acc[9] = top
        for i in range(9):
            acc[i] = ptx.multiply(acc[i], before)
        for (m, l), words in zip(pairs, loaded):
            weight = ptx.exp2(m - top)
            acc[8] = ptx.fma(l, weight, acc[8])
            for k, word in enumerate(words):
                for c, x in enumerate(self.form.unpack(word)):
                    acc[2 * k + c] = ptx.fma(x, weight, acc[2 * k + c])

    @cute.jit
    def entry(
        self,
        partials: Int64,
        sums: Int64,
        state: Int64,
        out: Int64,
        lse: Int64,
        v_scale: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        v_scale_head: Int64,
        first_token: Int32,
        kv_heads: Int32,
        group: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            partials,
            sums,
            state,
            out,
            lse,
            v_scale,
            out_token,
            out_head,
            lse_token,
            lse_head,
            v_scale_head,
            first_token,
            kv_heads,
            group,
            width,
        ).launch(grid=[1, kv_heads, 1], block=[self.threads, 1, 1], smem=self.dynamic_smem, stream=stream)


def programs():
    example = [Int64(16)] * 11 + [Int32(1)] * 4
    return [
        Program(f"prefill_combine_{dtype}_r{rows}", PrefillCombine(dtype, rows), example)
        for dtype in ("bf16", "f16")
        for rows in (16, 8)
    ]
