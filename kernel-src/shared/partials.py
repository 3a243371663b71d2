"""Partial results of the KV-stationary prefill, and their combination by one warpgroup.

A token, KV head and slot (selected block) has a partial: `rows` (16, or 8 for at most 8 query heads a KV head) x 128
unnormalised 16-bit outputs o with fp32 (m, l) a row; true outputs are o 2^m. Slots of a row (token, KV head) lie side by
side, 8 x 128 elements are a *unit* of 2 KiB in the order of wgmma accumulators:
    [4 parts][lane = 4 g + t][4 words],  word k of part p = columns 8 (4 p + k) + 2 t, + 1 of row g

Combination of a row:  M = max m_s,  out = v_scale * sum_s 2^(m_s - M) o_s / L,  L = sum_s 2^(m_s - M) l_s,
lse = ln L + M ln 2, over the slots in the row's mask. Slots are summed in ascending order: the bits depend on nothing but
the row.

`walk` (K <= 16): 128 threads. A thread copies its own 16 bytes of each slot's unit to its own place in shared memory with
cp.async, 16 deep, and reads them back: no barrier, few registers, 32 KiB under way. Weights are made by 16 lanes a pair
of query heads, one barrier a row.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import hopper, ptx, smem, softmax

UNIT_BYTES = 2048
SLOTS = 16
BATCH = 4  # slots of a group of copies
THREADS = 128
BARRIER = 1


class Output(NamedTuple):
    """Where the rows' results go."""

    out: Int64
    lse: Int64  # 0: not wanted
    v_scale: Int64  # 0: one
    out_token: Int64  # strides in bytes
    out_head: Int64
    lse_token: Int64
    lse_head: Int64
    v_scale_head: Int64


class Chunk(NamedTuple):
    """A chunk's place among all tokens and KV heads."""

    first_token: Int32
    tokens: Int32
    first_head: Int32


class Shape(NamedTuple):
    """The rows of every chunk."""

    chunk_heads: Int32  # KV heads of a chunk
    kv_heads: Int32  # in all
    group: Int32
    width: Int32
    selective: Int32  # not 0: some sequences may not take part


class Partials:
    ring_bytes = SLOTS * THREADS * 16
    weights_bytes = 2 * 16 * SLOTS * 4

    def __init__(self, dtype, rows, fma2=None):
        """`fma2`: multiplies and adds pairs in one instruction, where there is one; the bits are the same."""
        self.fma2 = fma2
        self.rows, self.units = rows, rows // 8
        self.unpack = ptx.unpack_bf16 if dtype == "bf16" else ptx.unpack_fp16
        self.pack = ptx.pack_bf16 if dtype == "bf16" else ptx.pack_fp16
        self.value_bytes, self.sums_bytes = rows * 256, rows * 8  # of a slot

    def load_state(self, state, row, heads, ok):
        """(mask, takes part) of a row of the chunk; `state` begins with the chunk's first token and head."""
        chunk_heads, kv_heads = heads
        token = row // chunk_heads
        at = state + (Int64(token) * Int64(kv_heads) + Int64(row - token * chunk_heads)) * 8
        return ptx.load_i32_batch([(at + 4 * i, ok, 0) for i in range(2)])

    def load_sums(self, sums, local_row, width, mask, thread):
        """(m, l) of query heads 2 p and 2 p + 1 in slot s; p = thread / 16, s = thread % 16."""
        slot, pair = thread & 15, thread >> 4
        ok = Int32((slot < width) & (pair < self.rows // 2)) & (mask >> slot) & 1
        at = sums + (Int64(local_row) * Int64(width) + Int64(slot)) * self.sums_bytes + Int64(pair * 16)
        return [ptx.f32_from_bits(w) for w in ptx.load_fresh_16_bytes_if(at, ok)], ok

    def copy_batch(self, place, values, width, mask, first):
        """The slots first .. first + BATCH - 1 of a unit; those without a partial become zeros."""
        for i in range(BATCH):
            slot = first + i
            ok = Int32(slot < width) & (mask >> slot) & 1
            smem.copy_async_16(place + slot * (THREADS * 16), values + slot * self.value_bytes, ok * 16)
        smem.copies_commit()

    def add_batch(self, acc, place, weights, first):
        factors = smem.load_f32x4(weights + first * 4)
        for i in range(BATCH):
            words = smem.load_i32x4(place + (first + i) * (THREADS * 16))
            for k, word in enumerate(words):
                pair = self.unpack(word)
                if self.fma2 is not None:
                    acc[2 * k], acc[2 * k + 1] = self.fma2(pair, [factors[i]] * 2, [acc[2 * k], acc[2 * k + 1]])
                    continue
                for c, x in enumerate(pair):
                    acc[2 * k + c] = ptx.fma(x, factors[i], acc[2 * k + c])

    def over_slots(self, x, combine):
        for distance in (1, 2, 4, 8):
            x = combine(x, ptx.shuffle_xor_f32(x, distance))
        return x

    def weigh(self, numbers, ok, scale):
        """Of two query heads, by the 16 lanes that hold their slots: (factor of this slot, LSE) each."""
        result = []
        for m, l in (numbers[:2], numbers[2:]):
            m = ptx.select(ok != 0, m, Float32(softmax.EMPTY))
            top = self.over_slots(m, ptx.maximum)
            weight = ptx.exp2(m - top)
            total = self.over_slots(ptx.multiply(l, weight), lambda a, b: a + b)
            factor = ptx.multiply(weight, softmax.output_factor(total, scale))
            result.append((factor, softmax.natural_lse(top, total)))
        return result

    @cute.jit
    def some_take_part(self, state: Int64, first: Int32, stop: Int32, chunk_heads: Int32, kv_heads: Int32, lane: Int32):
        """1 if some row is of a sequence that takes part; by each warp for itself."""
        some = Int32(0)
        for row in cutlass.range(first + lane, stop, 32, unroll=1):
            _, mine = self.load_state(state, row, (chunk_heads, kv_heads), Int32(1))
            some = some | mine
        return Int32(ptx.ballot(some) != 0)

    @cute.jit
    def walk(
        self,
        ring: Int32,
        weights: Int32,
        thread: Int32,
        first: Int32,  # rows (token, KV head) of the chunk, token-major
        stop: Int32,
        partials: Int64,
        sums: Int64,
        state: Int64,
        output: Output,
        chunk: Chunk,
        shape: Shape,
    ):
        out, lse, v_scale, out_token, out_head, lse_token, lse_head, v_scale_head = output
        first_token, _, first_head = chunk
        chunk_heads, kv_heads, group, width, selective = shape
        lane = thread & 31
        state = state + (Int64(first_token) * Int64(kv_heads) + Int64(first_head)) * 8
        heads = (chunk_heads, kv_heads)
        work = Int32(first < stop)
        if (selective & work) != 0:
            work = self.some_take_part(state, first, stop, chunk_heads, kv_heads, lane)
        if work != 0:
            place = ring + thread * 16
            mask, mine = self.load_state(state, first, heads, Int32(1))
            mask_n, mine_n = self.load_state(state, first + 1, heads, Int32(first + 1 < stop))
            numbers, ok = self.load_sums(sums, first, width, mask, thread)
            row_bytes = Int64(width) * self.value_bytes
            values = partials + Int64(first) * row_bytes + Int64(thread * 16)
            for slot in cutlass.range_constexpr(0, SLOTS, BATCH):
                self.copy_batch(place, values, width, mask, slot)
            acc = cute.make_rmem_tensor(cute.make_layout(8), Float32)
            for row in cutlass.range(first, stop, 1, unroll=1):
                token = row // chunk_heads
                head = first_head + row - token * chunk_heads
                scale = ptx.load_f32_or_one(v_scale + Int64(head) * v_scale_head)
                token64 = Int64(first_token + token)
                pairs = self.weigh(numbers, ok, scale)
                buffer = weights + (row & 1) * (16 * SLOTS * 4)
                for i in cutlass.range_constexpr(2):
                    query = (thread >> 4) * 2 + i
                    if query < self.rows:
                        smem.store_f32(buffer + (query * SLOTS + (thread & 15)) * 4, pairs[i][0])
                    if ((thread & 15) == 0) & (query < group) & (lse != 0) & (mine != 0):
                        at = lse + token64 * lse_token + Int64(head * group + query) * lse_head
                        ptx.store_f32(at, pairs[i][1])
                hopper.named_barrier(BARRIER, THREADS)
                # What the next row needs, while this one is summed.
                more = Int32(row + 1 < stop)
                numbers, ok = self.load_sums(sums, row + 1, width, mask_n * more, thread)
                mask_2, mine_2 = self.load_state(state, row + 2, heads, Int32(row + 2 < stop))
                for unit in cutlass.range_constexpr(self.units):
                    for i in cutlass.range_constexpr(8):
                        acc[i] = Float32(0.0)
                    # A copy that has been added makes room for the same slot of the next unit.
                    next_row = unit + 1 == self.units
                    ahead = values + (row_bytes if next_row else (unit + 1) * UNIT_BYTES)
                    mask_ahead = mask_n * more if next_row else mask
                    heads_weights = buffer + (unit * 8 + (lane >> 2)) * (SLOTS * 4)
                    for slot in cutlass.range_constexpr(0, SLOTS, BATCH):
                        smem.copies_wait(SLOTS // BATCH - 1)
                        self.add_batch(acc, place, heads_weights, slot)
                        self.copy_batch(place, ahead, width, mask_ahead, slot)
                    words = [self.pack(acc[2 * k], acc[2 * k + 1]) for k in range(4)]
                    words = ptx.transpose_quad(words, lane & 3)
                    query = unit * 8 + (lane >> 2)
                    if (query < group) & (mine != 0):
                        at = out + token64 * out_token + Int64(head * group + query) * out_head
                        column = Int64(((thread >> 5) * 4 + (lane & 3)) * 16)
                        ptx.store_words(at + column, words)
                values = values + row_bytes
                mask, mine, mask_n, mine_n = mask_n, mine_n, mask_2, mine_2
            smem.copies_wait(0)
