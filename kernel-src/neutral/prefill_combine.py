"""Prefill combine: the partial results of a row's blocks become its output. Third stage of the KV-stationary prefill (op
sparse_attention), after sm90/ or sm100/prefill.py, for chunks that no forward launch combines beside its own work: the
last one, and all where a selection is wider than 16.

Problem, order
    shared/partials.py: for each token of a chunk and KV head, up to 32 slots with a partial o, m and l; slots ascend. A row
    with none, or with nothing visible in them: 0 and -inf.

Two kernels
    K <= 16   `walk` of shared/partials.py, as in the forward kernel and with its bits: 128 threads, 34 KiB of shared memory,
              6 CTAs an SM with 32 KiB under way each; a CTA takes an equal contiguous range of rows
    wide      CTA = row: 256 threads for 16 query heads, 128 for up to 8. A thread has 16 bytes of each slot's partial, 16
              slots loaded together, in registers; the reference m may grow from one such batch to the next

Budget
    Bytes: 4 KiB a slot, token and KV head (16 query heads), read once; 16 slots: 64 KiB for 4 KiB of output.

Limits
    K <= 32; byte strides of `out` multiples of 16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import partials as form
from shared import ptx, smem, softmax
from shared.program import Kernel, Program

BATCH = 16  # slots whose loads are under way together


class PrefillCombine(Kernel):
    """One variant: dtype of partials and output, rows of a partial, whether for K > 16."""

    def __init__(self, dtype, rows, wide):
        self.rows, self.wide = rows, wide
        self.partials = form.Partials(dtype, rows)
        self.threads = 16 * rows if wide else form.THREADS
        self.dynamic_smem = 0 if wide else self.partials.ring_bytes + self.partials.weights_bytes

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
        tokens: Int32,
        first_head: Int32,
        chunk_heads: Int32,
        kv_heads: Int32,
        group: Int32,
        width: Int32,
        selective: Int32,  # not 0: some sequences may not take part
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        output = form.Output(out, lse, v_scale, out_token, out_head, lse_token, lse_head, v_scale_head)
        chunk = form.Chunk(first_token, tokens, first_head)
        shape = form.Shape(chunk_heads, kv_heads, group, width, selective)
        if cutlass.const_expr(self.wide):
            self.combine_row(thread, cta, partials, sums, state, output, chunk, shape)
        else:
            base = smem.base(128)
            rows = tokens * chunk_heads
            self.partials.walk(
                base,
                base + self.partials.ring_bytes,
                thread,
                Int32(Int64(rows) * Int64(cta) // Int64(ctas)),
                Int32(Int64(rows) * Int64(cta + 1) // Int64(ctas)),
                partials,
                sums,
                state,
                output,
                chunk,
                shape,
            )

    @cute.jit
    def combine_row(
        self,
        thread: Int32,
        local_row: Int32,  # of the chunk, token-major
        partials: Int64,
        sums: Int64,
        state: Int64,
        output: form.Output,
        chunk: form.Chunk,
        shape: form.Shape,
    ):
        out, lse, v_scale, out_token, out_head, lse_token, lse_head, v_scale_head = output
        first_token, _, first_head = chunk
        chunk_heads, kv_heads, group, width, _ = shape
        lane = thread & 31
        unit = thread >> 7
        local = local_row // chunk_heads
        head = first_head + local_row - local * chunk_heads
        token = Int64(first_token + local)
        state = state + (Int64(first_token) * Int64(kv_heads) + Int64(first_head)) * 8
        mask, mine = self.partials.load_state(state, local_row, (chunk_heads, kv_heads), Int32(1))
        if mine != 0:
            place = Int64(local_row) * Int64(width)
            row = unit * 8 + (lane >> 2)
            values = partials + place * self.partials.value_bytes + Int64(thread * 16)
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
                    values_here = values + at * self.partials.value_bytes
                    self.add_slots(acc, values_here, numbers + at * self.partials.sums_bytes, chosen)
            total = acc[8]
            scale = softmax.output_factor(total, ptx.load_f32_or_one(v_scale + Int64(head) * v_scale_head))
            words = [self.partials.pack(acc[2 * k] * scale, acc[2 * k + 1] * scale) for k in range(4)]
            words = ptx.transpose_quad(words, lane & 3)
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
        form = self.partials
        pairs = [ptx.load_f32x2_if(numbers + s * form.sums_bytes, ok[s], softmax.EMPTY) for s in range(BATCH)]
        loaded = [ptx.stream_16_bytes_if(values + s * form.value_bytes, ok[s]) for s in range(BATCH)]
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
                for c, x in enumerate(form.unpack(word)):
                    acc[2 * k + c] = ptx.fma(x, weight, acc[2 * k + c])


def programs():
    return [
        Program(f"prefill_combine_{dtype}_r{rows}{'_wide' if wide else ''}", PrefillCombine(dtype, rows, wide))
        for dtype in ("bf16", "f16")
        for rows in (16, 8)
        for wide in (False, True)
    ]
