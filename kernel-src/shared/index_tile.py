"""The indexer's tile: dot products of a few query rows with slabs of 8 index keys, and their running maxima.

A *column* is a (token, head) pair of a request; 8 x `tiles` columns share every key that is read. mma.sync m16n8k16 has
the columns as its 16 rows and 8 keys as its columns, so that thread (g, t) of a warp, lane = 4 g + t, holds the 16-byte
chunks t, t + 4, ... of key g of a slab, straight from global memory, and two registers next to each other are an
operand: the order of the 128 dims inside the MMAs is free as long as keys and queries agree. So there are full sectors,
no shared memory, no swizzle, no barrier, no moves, and as many bytes in flight as there are registers.

With 8 columns only, the rows 8 .. 15 hold the same columns' queries of the *next* step: the even steps' sums are right in
the rows 0 .. 7 of one chain, the odd steps' in the rows 8 .. 15 of another, and 16 registers hold all queries.

fp8 keys are widened to fp16, exactly; a bf16 query row is then scaled by a power of two to fit fp16 and its score
scaled back. (Elements under 2^-31 of the row's largest lose bits: 2^-40 of it at most.)

A score depends on its column and its block only, in a fixed order of accumulation: it has the same bits whichever warp
computes it, beside whatever other columns.
"""

from cutlass import Float32, Int32, Int64

from shared import mma, ptx

BLOCK = 128
SLAB = 8  # keys of one MMA
NEG_INF = float("-inf")
MASKED = 1 << 30  # a first token beyond every length

# (query, key) dtypes; the MMA works in the first, or in fp16 with fp8 keys.
DTYPES = [("bf16", "bf16"), ("f16", "f16"), ("bf16", "e4m3"), ("f16", "e4m3")]


class IndexTile:
    """One pair of dtypes and number of columns. `slabs`: of 8 keys, in a thread's registers at a time."""

    def __init__(self, query, key, tiles, slabs):
        self.query, self.key, self.tiles, self.slabs = query, key, tiles, slabs
        self.fp8 = key == "e4m3"
        self.normalise = self.fp8 and query == "bf16"
        self.mma_kind = "bf16" if key == "bf16" else "f16"
        self.columns = 8 * tiles
        self.chunks = 2 if self.fp8 else 4  # 16-byte chunks of a key, a thread
        self.words = 4 * self.chunks * slabs  # of keys, a thread

    # ---- queries

    def load_query(self, row, ok, t):
        """16 words: 2 s and 2 s + 1 belong to MMA step s.

        Through L1: the warps of a CTA want the same rows, and with one request all warps of the chip do."""
        if self.fp8:  # 16 dims of an fp8 chunk are two chunks of the query
            offsets = [t * 32, t * 32 + 16, t * 32 + 128, t * 32 + 144]
        else:
            offsets = [t * 16 + 64 * i for i in range(4)]
        return [w for offset in offsets for w in ptx.load_fresh_16_bytes_if(row + Int64(offset), ok)]

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

    def place_query(self, query, n, words, zero):
        """The words of column 8 n + g to where the MMAs want them: rows g and g + 8 alternate, in quads.

        `zero`, a 0 that the compiler cannot see, makes new values of them. Otherwise it leaves them in the registers that
        they were loaded into and moves all four before every MMA."""
        for s in range(8):
            for half in range(2):
                if self.tiles == 1:
                    query[4 * (s // 2) + 2 * half + s % 2] = words[2 * s + half] | zero
                else:
                    query[32 * (n // 2) + 4 * s + 2 * half + n % 2] = words[2 * s + half] | zero

    def load_queries(self, query, ends, rows, columns, column0, num_heads, first_end, lane, zero):
        """Queries of a column group and the visible ends of the columns 8 n + g; returns what undoes their factors."""
        index_q, token_stride, head_stride, start = rows
        g, t = lane >> 2, lane & 3
        scales = []
        for n in range(self.tiles):
            column = column0 + 8 * n + g
            token = ptx.divide_u32(column, num_heads)
            row = index_q + Int64(start + token) * token_stride + Int64(column - token * num_heads) * head_stride
            words = self.load_query(row, Int32(column < columns), t)
            if self.normalise:
                words, scale = self.to_fp16(words)
                scales.append(scale)
            self.place_query(query, n, words, zero)
            ends[n] = first_end + token
        return scales

    # ---- keys

    def request_keys(self, keys, row, token_stride, left, g):
        """Issue the loads of the slabs' keys, of which `left` lie before the end; the others become zeros. `row`:
        this thread's first chunk of key g."""
        for slab in range(self.slabs):
            ok = Int32(left > g + SLAB * slab)
            for i in range(self.chunks):
                words = ptx.stream_16_bytes_if(row + 64 * i, ok)
                for j in range(4):
                    keys[(slab * self.chunks + i) * 4 + j] = words[j]
            if slab + 1 < self.slabs:
                row = row + token_stride * SLAB

    def operands(self, keys, slab):
        """Both registers of a slab's eight MMA steps."""
        steps = []
        for i in range(self.chunks):
            words = [keys[(slab * self.chunks + i) * 4 + j] for j in range(4)]
            steps += [mma.widen_e4m3(w) for w in words] if self.fp8 else [words[:2], words[2:]]
        return steps

    def score_slab(self, keys, slab, query, best, ends, first, t):
        """best[n] = max(best[n], scores of the slab's keys 2 t and 2 t + 1 in column 8 n + g), where visible; `first`:
        the slab's first token, `ends`: the columns'."""
        steps = self.operands(keys, slab)
        for pair in range(max(self.tiles // 2, 1)):
            even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4  # two chains: half the latency
            for s in range(0, 8, 2):
                a = [query[(4 * (s // 2) if self.tiles == 1 else 32 * pair + 4 * s) + i] for i in range(4)]
                even = mma.mma(even, a, *steps[s], self.mma_kind)
                if self.tiles > 1:
                    a = [query[32 * pair + 4 * (s + 1) + i] for i in range(4)]
                odd = mma.mma(odd, a, *steps[s + 1], self.mma_kind)
            if self.tiles == 1:
                sums = [[even[0] + odd[2], even[1] + odd[3]]]
            else:
                sums = [[even[2 * n + c] + odd[2 * n + c] for c in range(2)] for n in range(2)]
            for n, scores in enumerate(sums):
                visible = ends[2 * pair + n] - first
                for c in range(2):
                    score = ptx.select(visible > 2 * t + c, scores[c], Float32(NEG_INF))
                    best[2 * pair + n] = ptx.maximum(best[2 * pair + n], score)

    # ---- results

    def reduce_columns(self, best, lane):
        """Maxima over a warp: those of column `column_of(lane)`, in the lanes that `holds_column`."""
        values = [best[n] for n in range(self.tiles)]
        for distance in (1, 2):
            if len(values) > 1:  # each exchange halves the values that a lane is left with
                upper = (lane & distance) != 0
                pairs = list(zip(values[::2], values[1::2]))
                given = [ptx.shuffle_xor_f32(ptx.select(upper, low, high), distance) for low, high in pairs]
                values = [ptx.maximum(ptx.select(upper, high, low), other) for (low, high), other in zip(pairs, given)]
            else:
                values = [ptx.maximum(values[0], ptx.shuffle_xor_f32(values[0], distance))]
        return values[0]

    def column_of(self, lane):
        return 8 * (lane & (self.tiles - 1)) + (lane >> 2)

    def holds_column(self, lane):
        return (lane & 3) < self.tiles

    def scale_of(self, scales, lane):
        """That of column `column_of(lane)`."""
        result = scales[0]
        for n in range(1, self.tiles):
            result = ptx.select((lane & 3) == n, scales[n], result)
        return result
