"""Store: write K, V and index-K rows of new tokens into their paged caches, one launch. Op: store_kv.

Problem
    Token i goes to slot s_i = page * page_size + offset: cache[page, head, offset] = row[i, head] for K and V, and
    cache[page, offset] = row[i] for the index K. A slot outside [0, pages * page_size) is skipped (-1 is padding).
    Same dtype: the bytes. To float8: x / scale in fp32 (IEEE division), saturated to the largest finite value, rounded
    to nearest even; NaN stays NaN, with a scale of either sign. Two tokens with one slot: which wins is undefined.

Tile picture
    grid (16 tokens, row of a token), rows = K heads, V heads, index K: a CTA works on one tensor and one head.
    8 lanes = one row of 128 elements; lane l moves the 16-byte chunks l, l + 8, l + 16, l + 24, as many as the row has,
    so every access of a row is contiguous over its lanes. Rows of 128, 256 and 512 bytes run in the same code.

Order
    The rows are loaded before the slot is looked at: a row costs two memory latencies, not three.

Budget
    Bytes read and written once. 16-bit rows: 32 B a thread in flight, 2,048 threads = 64 KiB per SM, where 4.3 TB/s x
    1 us / 132 SMs needs 33 KB. A division costs about ten instructions, an eighth of a row's issue budget at full rate;
    without a scale there is none.

Limits
    head_dim 128; pages * page_size < 2^31 slots; bases and byte strides multiples of 16. Every offset is 64-bit.
    One launch converts from one source to one target dtype; what needs no conversion may have any dtype beside it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx
from shared.program import Kernel, Program

THREADS = 128
LANES = 8  # a row
TOKENS = THREADS // LANES  # a CTA
CHUNK = 16  # bytes
MOST_CHUNKS = 4  # a lane: rows of 512 bytes

# Name -> (source, target) of what is converted; the copy converts nothing.
VARIANTS = {"copy": None}
VARIANTS.update(
    {f"{source}_{target}": (source, target) for source in ("bf16", "f16", "f32") for target in ("e4m3", "e5m2")}
)


class Store(Kernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, conversion):
        self.conversion = conversion
        self.source, self.target = conversion or (None, None)
        self.chunks = MOST_CHUNKS if self.source == "f32" else 2  # a lane, of a row that is converted

    def unpack(self, words):
        if self.source == "f32":
            return [ptx.f32_from_bits(w) for w in words]
        unpack = ptx.unpack_bf16 if self.source == "bf16" else ptx.unpack_fp16
        return [x for w in words for x in unpack(w)]

    @cute.kernel
    def kernel(
        self,
        k: Int64,
        v: Int64,
        index_k: Int64,
        k_cache: Int64,
        v_cache: Int64,
        index_cache: Int64,
        slots: Int64,
        k_scale: Int64,  # fp32, or 0: no scale
        v_scale: Int64,
        k_token_stride: Int64,  # all strides in bytes
        k_head_stride: Int64,
        v_token_stride: Int64,
        v_head_stride: Int64,
        index_token_stride: Int64,
        k_cache_page_stride: Int64,
        k_cache_head_stride: Int64,
        k_cache_token_stride: Int64,
        v_cache_page_stride: Int64,
        v_cache_head_stride: Int64,
        v_cache_token_stride: Int64,
        index_cache_page_stride: Int64,
        index_cache_token_stride: Int64,
        k_scale_stride: Int32,  # bytes from head to head: 0 or 4
        v_scale_stride: Int32,
        num_tokens: Int32,
        num_heads: Int32,
        slot_bytes: Int32,  # 4 or 8
        page_size: Int32,
        num_slots: Int32,
        index_page_size: Int32,
        index_num_slots: Int32,
        kv_chunks: Int32,  # 16-byte chunks of a source row, a lane
        index_chunks: Int32,
        kv_convert: Int32,
        index_convert: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, row, _ = cute.arch.block_idx()
        lane = thread % LANES
        token = group * TOKENS + thread // LANES

        # What this CTA works on; all of it is uniform.
        is_k, is_index = row < num_heads, row >= 2 * num_heads
        pick = lambda of_k, of_v, of_index: ptx.select_value(is_k, of_k, ptx.select_value(is_index, of_index, of_v))
        head = Int64(pick(row, row - num_heads, Int32(0)))
        rows = pick(k, v, index_k) + head * pick(k_head_stride, v_head_stride, Int64(0))
        token_stride = pick(k_token_stride, v_token_stride, index_token_stride)
        cache = pick(k_cache, v_cache, index_cache) + head * pick(k_cache_head_stride, v_cache_head_stride, Int64(0))
        cache_page_stride = pick(k_cache_page_stride, v_cache_page_stride, index_cache_page_stride)
        cache_token_stride = pick(k_cache_token_stride, v_cache_token_stride, index_cache_token_stride)
        page_tokens = ptx.select_value(is_index, index_page_size, page_size)
        end = ptx.select_value(is_index, index_num_slots, num_slots)
        chunks = ptx.select_value(is_index, index_chunks, kv_chunks)
        convert = ptx.select_value(is_index, index_convert, kv_convert)
        scale = pick(k_scale, v_scale, Int64(0))
        scale_stride = pick(k_scale_stride, v_scale_stride, Int32(0))

        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if token < num_tokens:
            source = rows + Int64(token) * token_stride + Int64(lane * CHUNK)
            words = [ptx.stream_16_bytes_if(source + i * LANES * CHUNK, Int32(i < chunks)) for i in range(MOST_CHUNKS)]
            slot_address = slots + Int64(token) * Int64(slot_bytes)
            slot = ptx.load_i32(slot_address)
            # A 32-bit slot is its own upper half as far as the test goes.
            upper = ptx.load_i32_if(slot_address + 4, Int32(slot_bytes == 8), 0)
            if (upper == 0) & (slot >= 0) & (slot < end):
                page = ptx.divide_u32(slot, page_tokens)
                offset = slot - page * page_tokens
                target = cache + Int64(page) * cache_page_stride + Int64(offset) * cache_token_stride
                if convert == 0:
                    self.store_raw(target, lane, words, chunks)
                if cutlass.const_expr(self.conversion is not None):
                    if convert != 0:
                        values = [x for w in words[: self.chunks] for x in self.unpack(w)]
                        scaled = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
                        for i in cutlass.range_constexpr(len(values)):
                            scaled[i] = values[i]
                        if scale != 0:
                            divisor = ptx.load_f32(scale + head * Int64(scale_stride))
                            for i in cutlass.range_constexpr(len(values)):
                                scaled[i] = ptx.divide(values[i], divisor)
                        self.store_float8(target, lane, scaled, len(values))

    def store_raw(self, target, lane, words, chunks):
        for i in range(MOST_CHUNKS):
            ptx.store_words_if(target + Int64((lane + i * LANES) * CHUNK), words[i], Int32(i < chunks))

    def store_float8(self, target, lane, values, count):
        """Each chunk shrinks to a half or a quarter, in its place among the row's chunks."""
        words = [ptx.pack_float8([values[4 * i + j] for j in range(4)], self.target) for i in range(count // 4)]
        each = len(words) // self.chunks
        for i in range(self.chunks):
            address = target + Int64((lane + i * LANES) * (4 * each))
            ptx.store_words(address, words[i * each : (i + 1) * each])


def programs():
    return [Program(f"store_{name}", Store(conversion)) for name, conversion in VARIANTS.items()]
