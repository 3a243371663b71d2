"""Combine: merge N attention states (partial outputs with their log-sum-exp) into one. Op: merge_states.

Problem
    For every row (token t, head h) and states i = 0..N-1, each a normalised output o_i[128] and l_i = LSE_i:
        m = max_i l_i,  w_i = exp(l_i - m),  out = sum_i w_i o_i / sum_i w_i,  lse = m + ln(sum_i w_i).
    A state with l_i = -inf has no visible token: its o_i never enters, whatever its bits (NaN included). If every state
    is empty, out = 0 and lse = -inf. A NaN or +inf l_i makes the row NaN: the kernel hides no broken input.

Tile picture (16 bytes a lane and load)
    fp32 states:    one warp    = one row  (32 lanes x 4 elements)
    16-bit states:  half a warp = one row  (16 lanes x 8 elements)
    CTA = 128 threads = 4 or 8 consecutive rows of the flattened (token, head) axis; the grid covers the rows. No shared
    memory, no barrier, no communication: every lane repeats the N weights of its row.

Order
    Weights and outputs are accumulated in ascending i, in fp32: the result depends on neither grid nor batch.

Budget
    Bytes: N*T*H*(128*e_in + 4) read, T*H*(128*e_out + 4) written; about 1.5 FLOP per byte, so memory-bound. Two passes
    over l (the second hits L1). CHUNK states are in flight at once: 4 x 16 B x 2048 threads = 128 KiB per SM, where
    4.3 TB/s x 1 us / 132 SMs needs 33 KB.

Limits
    head_dim 128; T*H < 2^31 rows; base addresses and byte strides of `outs` and `out` multiples of 16. Every offset is
    64-bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx
from shared.program import Kernel, Program

HEAD_DIM = 128
THREADS = 128
CHUNK = 4  # states whose loads are issued before the first is used
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NEG_INF = float("-inf")
NEG_INF_BITS = "0fFF800000"

BYTES = {"f32": 4, "bf16": 2, "f16": 2}
# (states, output): fp32 partials to any dtype, 16-bit states to their own.
VARIANTS = [("f32", "f32"), ("f32", "bf16"), ("f32", "f16"), ("bf16", "bf16"), ("f16", "f16")]


class Combine(Kernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, states_dtype, out_dtype):
        self.states_dtype, self.out_dtype = states_dtype, out_dtype
        self.elements = 16 // BYTES[states_dtype]  # per lane
        self.lanes = HEAD_DIM // self.elements  # per row
        self.rows_per_cta = THREADS // self.lanes

    def unpack(self, words):
        if self.states_dtype == "f32":
            return [ptx.f32_from_bits(w) for w in words]
        unpack = ptx.unpack_bf16 if self.states_dtype == "bf16" else ptx.unpack_fp16
        return [x for w in words for x in unpack(w)]

    def pack(self, values):
        if self.out_dtype == "f32":
            return [ptx.f32_bits(x) for x in values]
        pack = ptx.pack_bf16 if self.out_dtype == "bf16" else ptx.pack_fp16
        return [pack(values[i], values[i + 1]) for i in range(0, len(values), 2)]

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        lse: Int64,
        outs: Int64,
        lses: Int64,
        outs_state_stride: Int64,  # all strides in bytes
        outs_token_stride: Int64,
        outs_head_stride: Int64,
        lses_state_stride: Int64,
        lses_token_stride: Int64,
        lses_head_stride: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        lse_token_stride: Int64,
        lse_head_stride: Int64,
        num_states: Int32,
        num_tokens: Int32,
        num_heads: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % self.lanes
        row = block * self.rows_per_cta + thread // self.lanes
        if row < num_tokens * num_heads:
            token = row // num_heads
            head = Int64(row - token * num_heads)
            token = Int64(token)
            states = outs + token * outs_token_stride + head * outs_head_stride + Int64(lane * 16)
            weights = lses + token * lses_token_stride + head * lses_head_stride

            # The first states are on their way while the LSEs are reduced: with N <= CHUNK a row costs one memory latency.
            values = self.load_states(states, outs_state_stride, Int32(0), num_states)
            first_lses = self.load_lses(weights, lses_state_stride, Int32(0), num_states)
            top = cute.make_rmem_tensor(cute.make_layout(1), Float32)
            top[0] = self.largest(first_lses)
            for first in cutlass.range(CHUNK, num_states, CHUNK, unroll=1):
                lses_here = self.load_lses(weights, lses_state_stride, first, num_states)
                top[0] = ptx.maximum(top[0], self.largest(lses_here))
            # An all-empty row keeps m = -inf; 0 in its place avoids -inf - (-inf).
            m = ptx.select(top[0] == Float32(NEG_INF), Float32(0.0), top[0])

            acc = cute.make_rmem_tensor(cute.make_layout(self.elements + 1), Float32)  # last: sum of the weights
            for i in cutlass.range_constexpr(self.elements + 1):
                acc[i] = Float32(0.0)
            self.accumulate(acc, m, first_lses, values)
            for first in cutlass.range(CHUNK, num_states, CHUNK, unroll=1):
                values_here = self.load_states(states, outs_state_stride, first, num_states)
                lses_here = self.load_lses(weights, lses_state_stride, first, num_states)
                self.accumulate(acc, m, lses_here, values_here)

            total = acc[self.elements]
            scale = ptx.select(total == Float32(0.0), Float32(0.0), ptx.reciprocal(total))
            row_out = out + token * out_token_stride + head * out_head_stride
            words = self.pack([acc[i] * scale for i in range(self.elements)])
            ptx.store_words(row_out + Int64(lane * (4 * len(words))), words)
            if lane == 0:
                ptx.store_f32(lse + token * lse_token_stride + head * lse_head_stride, m + ptx.log2(total) * LN_2)

    def largest(self, lses):
        result = lses[0]
        for l in lses[1:]:
            result = ptx.maximum(result, l)
        return result

    def load_lses(self, weights, stride, first, num_states):
        """LSEs of states first..first+CHUNK-1; past the last state -inf, that is: no state."""
        return [
            ptx.load_f32_if(weights + Int64(first + i) * stride, Int32(first + i < num_states), NEG_INF_BITS)
            for i in range(CHUNK)
        ]

    def load_states(self, states, stride, first, num_states):
        return [
            ptx.load_16_bytes_if(states + Int64(first + i) * stride, Int32(first + i < num_states))
            for i in range(CHUNK)
        ]

    def accumulate(self, acc, m, lses, values):
        for l, words in zip(lses, values):
            empty = l == Float32(NEG_INF)
            weight = ptx.exp2((l - m) * LOG2_E)
            acc[self.elements] = acc[self.elements] + weight
            for i, x in enumerate(self.unpack(words)):
                # 0 * NaN is NaN, hence a select and not the weight alone.
                acc[i] = ptx.fma(weight, ptx.select(empty, Float32(0.0), x), acc[i])


def programs():
    return [Program(f"combine_{states}_{out}", Combine(states, out)) for states, out in VARIANTS]
