"""16 query heads against 32 keys: the tile of the decode kernels, by one warp.

The query heads that share a KV head are the rows of mma.sync m16n8k16; fewer than 16 leave zero rows. A *unit* is 32
keys of K and of V, each a slab of shared memory: rows of 128 bytes (fp8: a key; 16-bit: half a key, and the other halves
of all keys behind them), in the 128-byte swizzle of tensor maps: chunk c of row r lies at c ^ (r & 7). So a slab can come
by tensor map or by cp.async.
Column c of a tile of 8 keys is key c ^ 4 (c & 1): then no read below meets a bank twice, in the swizzle as it is.
    K   lane (g, t) reads 16 bytes of column g's key at chunks t, t + 4, ...
    V   16-bit: ldmatrix; fp8: lane (g, t) reads chunk g of the keys of columns 2t and 2t + 1
Which k index of the product a dim gets is free as long as q and K agree, and so is which column of the output a dim
gets. The 16-byte reads therefore need no shuffling: 16 bytes of a key in a lane are operands of two (16-bit) or four
(fp8) k steps, and q is loaded to match. With fp8, output tile j has dims 16 c + (j ^ 8 ((c / 2) & 1)) as its columns c:
half of the lanes read the upper 8 bytes of their chunk first, away from the others' banks. fp8 is widened exactly to fp16;
P is rounded to the 16-bit type of the product. Registers g = lane / 4, t = lane % 4 as in mma.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import mma, ptx, smem, softmax

ROWS, DIM = 16, 128
KEYS = 32  # of a unit
SLAB_ROW = 128  # bytes
HALF = KEYS * SLAB_ROW  # what lies between the halves of a key of 256 bytes
SIGN_BITS = -2147450880  # 0x80008000
KV_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


class HeadTile:
    """The arithmetic for one KV dtype."""

    def __init__(self, kv_dtype):
        self.kv_dtype = kv_dtype
        self.fp8 = KV_BYTES[kv_dtype] == 1
        self.mma_dtype = "bf16" if kv_dtype == "bf16" else "f16"
        self.key_bytes = DIM * KV_BYTES[kv_dtype]
        self.slab = KEYS * self.key_bytes  # K or V of a unit, bytes
        self.lanes_per_key = self.key_bytes // 16
        self.keys_per_copy = 32 // self.lanes_per_key
        self.steps_per_chunk = 4 // KV_BYTES[kv_dtype]  # k steps served by 16 bytes
        self.widen = mma.widen_e4m3 if kv_dtype == "e4m3" else mma.widen_e5m2
        # Row of a partial result in shared memory, in floats. fp8 leaves a lane 32 neighbouring dims, which start 36
        # floats apart; the strides keep the 16-byte accesses of both layouts off each other's banks.
        self.partial_row = 144 if self.fp8 else 136
        self.partial_bytes = ROWS * self.partial_row * 4
        self.sums_bytes = self.partial_bytes + 320  # with m and l behind it

    # ---- loads of KV

    def load_unit(self, target, source, token_stride, visible, lane):
        """A slab by cp.async; `source` is this lane's part of its first key. Keys from `visible` on are not read: they
        become zeros."""
        key = lane // self.lanes_per_key
        chunk = lane % self.lanes_per_key
        base = target + (chunk >> 3) * HALF + key * SLAB_ROW + ((chunk & 7) ^ (key & 7)) * 16
        left = visible - key
        step = self.keys_per_copy
        for i in range(KEYS // step):
            address = (base ^ (((step * i) & 7) * 16)) + i * step * SLAB_ROW
            smem.copy_async_16(address, source, ptx.select(left > i * step, Int32(16), Int32(0)))
            if i + 1 < KEYS // step:
                source = source + token_stride * step

    @cute.jit
    def clear_keys(self, slab: Int32, visible: Int32, lane: Int32):
        """Zeros for the keys from `visible` on: P is 0 there, but what a tensor map brought may be NaN."""
        if lane >= visible:
            for i in cutlass.range_constexpr(self.key_bytes // 16):
                at = slab + lane * SLAB_ROW + (i >> 3) * HALF + (i & 7) * 16
                smem.store_i32x4(at, [Int32(0)] * 4)

    # ---- the query

    def load_query(self, row, q_head, group, lane, Q, logit_scale, bf16_query):
        """Q: 32 words, word 4 j + r = A register r of k step j; heads from `group` on are zeros.

        Returns, for rows g and g + 8, the factor > 0 from raw logits to log2 units: a negative `logit_scale` turns
        the query, one that is NaN or infinite makes NaN of it.
        """
        g, t = lane >> 2, lane & 3
        to_log2 = softmax.finite_or_nan(logit_scale * Float32(softmax.LOG2_E))
        spoilt = ptx.select(softmax.is_finite(to_log2), Int32(0), Int32(softmax.NAN_PAIR))
        turn = ptx.select(to_log2 < Float32(0.0), Int32(SIGN_BITS), Int32(0))
        scale = []
        for half in range(2):
            head = g + 8 * half
            address = row + Int64(head) * q_head + Int64(t * (256 // self.lanes_per_key))
            words = []
            for i in range(4):
                # The query's elements that stand where 16 bytes of a key stand: 16 or, for fp8, 32 bytes.
                at = 128 * (i >> 1) + 16 * (i & 1) if self.fp8 else 64 * i
                words += ptx.load_fresh_16_bytes_if(address + Int64(at), Int32(head < group))
            x = ptx.absolute(to_log2)
            if self.fp8:
                words, grow = self.to_fp16(words, bf16_query != 0)
                x = x * grow
            scale.append(ptx.maximum(x, Float32(softmax.SMALLEST)))
            for j in range(8):
                for k in range(2):
                    Q[4 * j + 2 * k + half] = (words[2 * j + k] ^ turn) | spoilt
        return scale

    def to_fp16(self, words, q_is_bf16):
        """bf16 words as fp16, exactly: the row is scaled so that its largest element lies in [2^14, 2^15).

        An element may then be 2^29 times smaller before a bit is lost; bf16 as such would overflow fp16 at 65,520.
        """
        pairs = [ptx.unpack_bf16(w) for w in words]
        top = softmax.row_maximum([ptx.absolute(x) for pair in pairs for x in pair])
        exponent = ptx.maximum_i32(ptx.f32_bits(top) >> 23, Int32(15))  # biased
        shrink = ptx.select(q_is_bf16, ptx.f32_from_bits((268 - exponent) << 23), Float32(1.0))
        grow = ptx.select(q_is_bf16, ptx.f32_from_bits((exponent - 14) << 23), Float32(1.0))
        scaled = [ptx.pack_fp16(a * shrink, b * shrink) for a, b in pairs]
        return [ptx.select(q_is_bf16, s, w) for s, w in zip(scaled, words)], grow

    # ---- one unit

    def scores(self, keys, lane, Q):
        """16 x 32 raw logits as C fragments of 4 key tiles. A lane reads 16 bytes of a key of each tile at a time."""
        g, t = lane >> 2, lane & 3
        key = g ^ ((g & 1) << 2)
        base = keys + key * SLAB_ROW + (t ^ key) * 16
        c = [None] * 4
        for i in range(self.lanes_per_key // 4):
            chunks = (base ^ (64 * (i & 1))) + HALF * (i >> 1)
            words = [smem.load_i32x4(chunks + n * 8 * SLAB_ROW) for n in range(4)]
            for k in range(self.steps_per_chunk):
                step = self.steps_per_chunk * i + k
                a = [Q[4 * step + r] for r in range(4)]
                for n in range(4):
                    b0, b1 = self.widen(words[n][k]) if self.fp8 else words[n][2 * k : 2 * k + 2]
                    c[n] = mma.mma(c[n], a, b0, b1, self.mma_dtype)
        return c

    def mask(self, S, t, visible):
        left = [visible - 2 * t, visible - (2 * t ^ 5)]  # of columns 2t and 2t + 1 of a tile
        for n in range(4):
            for k in range(2):
                seen = left[k] > n * 8
                for row in range(2):
                    i = 4 * n + 2 * row + k
                    S[i] = ptx.select(seen, S[i], Float32(softmax.NEG_INF))

    def probabilities(self, S, scale):
        """P as A fragments of 2 k steps, with m and l of rows g and g + 8."""
        fragments = [[None] * 4 for _ in range(2)]
        pack = ptx.pack_bf16 if self.mma_dtype == "bf16" else ptx.pack_fp16
        m, l = [], []
        for row in range(2):
            logits = [S[4 * n + 2 * row + k] for n in range(4) for k in range(2)]
            reference, p, total = softmax.piece(logits, scale[row])
            m.append(reference)
            l.append(total)
            for n in range(4):
                fragments[n // 2][2 * (n % 2) + row] = pack(p[2 * n], p[2 * n + 1])
        return fragments, m, l

    def load_values(self, values, lane, tiles):
        """fp8: the words of eight keys for output tiles 8 `tiles` .. 8 `tiles` + 7."""
        g, t = lane >> 2, lane & 3
        even, odd = 2 * t, 2 * t ^ 5  # keys of columns 2t and 2t + 1
        part = ((g & 2) << 2) ^ (8 * tiles)
        places = [values + key * SLAB_ROW + (g ^ key) * 16 + part for key in (even, odd)]
        return [[smem.load_i32x2(a + 8 * SLAB_ROW * i) for a in places] for i in range(4)]

    def add_values(self, values, lane, P, factor, O):
        """O += factor * (P V), with P V from zero: a unit's product does not depend on what came before it."""
        if self.fp8:
            for pair in range(2):  # 8 of the lane's 16 dims at a time: 16 registers of bytes
                words = self.load_values(values, lane, pair)
                for i in range(2):
                    b = [self.value_operands(words, step, i) for step in range(2)]
                    for k in range(4):
                        tile = 8 * pair + 4 * i + k
                        c = mma.mma(None, P[0], b[0][0][k], b[0][1][k], self.mma_dtype)
                        self.accumulate(O, tile, factor, mma.mma(c, P[1], b[1][0][k], b[1][1][k], self.mma_dtype))
        else:
            matrix, r = lane >> 3, lane & 7
            key = r ^ ((r & 1) << 2)
            base = values + ((matrix & 1) * 8 + key) * SLAB_ROW + ((matrix >> 1) ^ key) * 16
            for jj in range(8):
                at = (base ^ (32 * (jj & 3))) + HALF * (jj >> 2)
                b = [mma.load_matrices(at + 16 * SLAB_ROW * step, True) for step in range(2)]
                for k in range(2):
                    c = mma.mma(None, P[0], b[0][2 * k], b[0][2 * k + 1], self.mma_dtype)
                    c = mma.mma(c, P[1], b[1][2 * k], b[1][2 * k + 1], self.mma_dtype)
                    self.accumulate(O, 2 * jj + k, factor, c)

    def value_operands(self, words, step, i):
        """B words of tiles 4 i .. 4 i + 3 from word i of four keys: bytes of two keys are paired, then widened."""
        result = []
        for keys in (2 * step, 2 * step + 1):
            even, odd = words[keys]
            pairs = [ptx.permute_bytes(even[i], odd[i], selector) for selector in (0x5140, 0x7362)]
            result.append([*self.widen(pairs[0]), *self.widen(pairs[1])])
        return result

    def accumulate(self, O, tile, factor, c):
        for k in range(4):
            O[4 * tile + k] = ptx.fma(c[k], factor[k >> 1], O[4 * tile + k])

    # ---- sums in shared memory: 16 x 128 fp32, then m [16] and l [16][4]

    @cute.jit
    def store_sums(self, at: Int32, lane: Int32, state: cute.Tensor, O: cute.Tensor):
        g, t = lane >> 2, lane & 3
        for half in cutlass.range_constexpr(2):
            row = at + (g + 8 * half) * (self.partial_row * 4)
            if cutlass.const_expr(self.fp8):
                for w in range(4):
                    at_w = row + t * 144 + (((w >> 1) ^ (t & 1)) << 5) + (w & 1) * 16
                    for c in range(2):
                        words = [O[4 * (4 * w + k) + 2 * half + c] for k in range(4)]
                        smem.store_f32x4(at_w + c * 64, words)
            else:
                for j in range(16):
                    smem.store_f32x2(row + t * 8 + j * 32, O[4 * j + 2 * half], O[4 * j + 2 * half + 1])
            smem.store_f32(at + self.partial_bytes + 64 + (g + 8 * half) * 16 + t * 4, state[2 + half])
        if t == 0:
            for half in cutlass.range_constexpr(2):
                smem.store_f32(at + self.partial_bytes + (g + 8 * half) * 4, state[half])

    def fold(self, places, head, part, load=smem.load_f32, load_x4=smem.load_f32x4, first=0, count=4):
        """Of the stored sums, in the order of `places`, for dims 4 part + 32 (first + k), k < `count`, of a head:
        (m, l[4], o[4 count])."""
        numbers = [at + self.partial_bytes for at in places]
        m, factors = softmax.weights([load(at + head * 4) for at in numbers])
        row = [load_x4(at + 64 + head * 16) for at in numbers]
        l = [softmax.weighted_sum([x[i] for x in row], factors) for i in range(4)]
        o = []
        for k in range(count):
            offset = head * (self.partial_row * 4) + part * 16 + (144 if self.fp8 else 128) * (first + k)
            row = [load_x4(at + offset) for at in places]
            o += [softmax.weighted_sum([x[i] for x in row], factors) for i in range(4)]
        return m, l, o

    # ---- running sums

    def registers(self):
        """Q as A fragments; O, 64 fp32; state: m of rows g and g + 8, then this lane's share of their l."""
        sizes = ((32, Int32), (64, Float32), (4, Float32))
        return [cute.make_rmem_tensor(cute.make_layout(size), dtype) for size, dtype in sizes]

    def clear(self, state, O):
        for i in range(2):
            state[i], state[2 + i] = Float32(softmax.EMPTY), Float32(0.0)
        for i in range(64):
            O[i] = Float32(0.0)

    @cute.jit
    def raise_reference(
        self,
        state: cute.Tensor,
        O: cute.Tensor,
        m0: Float32,
        m1: Float32,
        l0: Float32,
        l1: Float32,
        first: cutlass.Constexpr = False,
    ):
        """Adds a unit's l and rescales what was there if a row's reference grows; `first`: nothing was. Returns the
        factors of the unit."""
        new0, new1 = ptx.maximum(state[0], m0), ptx.maximum(state[1], m1)
        if cutlass.const_expr(not first):
            empty = Float32(softmax.EMPTY)  # nothing to rescale yet
            grows = ((new0 > state[0]) & (state[0] > empty)) | ((new1 > state[1]) & (state[1] > empty))
            if ptx.ballot(Int32(grows)) != 0:
                shrink = [softmax.power_of_two(state[0] - new0), softmax.power_of_two(state[1] - new1)]
                for half in cutlass.range_constexpr(2):
                    state[2 + half] = ptx.multiply(state[2 + half], shrink[half])
                for i in cutlass.range_constexpr(64):
                    O[i] = ptx.multiply(O[i], shrink[(i >> 1) & 1])
        factor0, factor1 = softmax.power_of_two(m0 - new0), softmax.power_of_two(m1 - new1)
        state[0], state[1] = new0, new1
        state[2], state[3] = ptx.fma(l0, factor0, state[2]), ptx.fma(l1, factor1, state[3])
        return factor0, factor1

    # ---- a sum over groups in shared memory: 64 floats a lane, each lane its own

    def clear_outer(self, outer, mine):
        for i in range(2):
            outer[i], outer[2 + i] = Float32(softmax.EMPTY), Float32(0.0)
        for i in range(16):
            smem.store_f32x4(mine + i * 512, [Float32(0.0)] * 4)

    @cute.jit
    def add_chain(self, outer: cute.Tensor, mine: Int32, state: cute.Tensor, O: cute.Tensor):
        """outer += a finished chain, which starts anew."""
        old0, old1, new0, new1 = self.join(outer, state)
        if ptx.ballot(Int32((old0 + new0 < Float32(2.0)) | (old1 + new1 < Float32(2.0)))) != 0:
            old, new = [old0, old1], [new0, new1]
            for i in cutlass.range_constexpr(16):
                before = smem.load_f32x4(mine + i * 512)
                scaled = [ptx.multiply(x, old[k >> 1]) for k, x in enumerate(before)]
                smem.store_f32x4(mine + i * 512, [ptx.fma(O[4 * i + k], new[k >> 1], scaled[k]) for k in range(4)])
        else:  # the usual case, with the same bits: factors of 1
            for i in cutlass.range_constexpr(16):
                before = smem.load_f32x4(mine + i * 512)
                smem.store_f32x4(mine + i * 512, [O[4 * i + k] + before[k] for k in range(4)])
        self.clear(state, O)

    def join(self, outer, state):
        """outer's m and l with those of a chain; returns the factors of both, (outer's) x 2, (the chain's) x 2."""
        old, new = [None] * 2, [None] * 2
        for half in range(2):
            top, (old[half], new[half]) = softmax.weights([outer[half], state[half]])
            outer[half] = top
            outer[2 + half] = ptx.fma(state[2 + half], new[half], ptx.multiply(outer[2 + half], old[half]))
        return *old, *new

    def keep_chain(self, outer, mine, state, O):
        """outer = a finished chain, and the next starts."""
        for i in range(4):
            outer[i] = state[i]
        for i in range(16):
            smem.store_f32x4(mine + i * 512, [O[4 * i + k] for k in range(4)])
        self.clear(state, O)

    def take_outer(self, outer, mine, state, O):
        for i in range(4):
            state[i] = outer[i]
        for i in range(16):
            words = smem.load_f32x4(mine + i * 512)
            for k in range(4):
                O[4 * i + k] = words[k]

    # ---- the result

    def write_row(self, at, l, o, v_scale, bf16_query):
        """This thread's part of a head's output; returns the head's l."""
        total = (l[0] + l[1]) + (l[2] + l[3])
        factor = softmax.output_factor(total, v_scale)
        self.store_out(at, [x * factor for x in o], bf16_query)
        return total

    def store_out(self, at, values, bf16_query):
        if len(values) == 1:
            ptx.store_low_half(at, self.output_pair(values[0], Float32(0.0), bf16_query))
        for k in range(len(values) // 4):
            w = values[4 * k : 4 * k + 4]
            pair = [self.output_pair(w[0], w[1], bf16_query), self.output_pair(w[2], w[3], bf16_query)]
            ptx.store_words(at + Int64(64 * k), pair)

    def output_pair(self, low, high, bf16_query):
        if self.kv_dtype == "bf16":
            return ptx.pack_bf16(low, high)
        if self.kv_dtype == "f16":
            return ptx.pack_fp16(low, high)
        return ptx.select(bf16_query != 0, ptx.pack_bf16(low, high), ptx.pack_fp16(low, high))
