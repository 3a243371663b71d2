"""A float8 cache as fp16, in the order of the page table, for the union tiles of a long prefill. SM90.

Problem
    sm90/prefill_union.py widens a block of a float8 cache each time a tile of 8 tokens loads it. Where the tokens are many
    and the cache they see is not, a block is loaded hundreds of times; it is then cheaper to widen all of it once, with
    K and V of entry n of request b's page table (M entries) at page b * M + n of the copy.
    Entries that reach no token, pages outside the cache and requests that take the other formulation are left alone.

Tile picture
    A CTA = one entry and head; a thread turns 8 bytes at a time into 16, so that a warp's accesses are contiguous.

Budget
    Read once, written twice as large: 3 x the bytes of K and V in the cache, at the bandwidth of memory. Four loads of 8
    bytes a thread are under way: 64 KiB an SM, where 1.4 TB/s of reading x 1 us / 132 SMs need 11 KB.

Limits
    head_dim 128, pages of 64 or 128; strides multiples of 16 bytes.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import mma, ptx
from shared.program import Kernel, Program

DIM, THREADS = 128, 256
LANES = DIM // 8  # of a row
ROWS = THREADS // LANES  # at a time
BATCH = 4  # loads under way


class PrefillWiden(Kernel):
    """One variant: the cache's dtype."""

    threads = THREADS

    def __init__(self, dtype):
        self.widen = mma.widen_e4m3 if dtype == "e4m3" else mma.widen_e5m2

    @cute.kernel
    def kernel(
        self,
        k: Int64,
        v: Int64,
        k_out: Int64,  # [B * M, H, page, 128] fp16
        v_out: Int64,
        page_table: Int64,
        seqused: Int64,
        choice: Int64,  # 0: all requests
        k_page: Int64,  # strides in bytes
        k_head: Int64,
        k_token: Int64,
        v_page: Int64,
        v_head: Int64,
        v_token: Int64,
        page_table_row: Int64,
        page_width: Int32,
        pages: Int32,
        page_bits: Int32,  # 7 or 6
        heads: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, head, _ = cute.arch.block_idx()
        request = ptx.divide_u32(item, page_width)
        entry = item - request * page_width
        ptx.let_next_kernel_start()
        ptx.wait_for_previous_kernel()
        table = page_table + Int64(request) * page_table_row + Int64(entry) * 4
        listens = Int32(choice != 0)
        page, used, other = ptx.load_i32_batch(
            [
                (table, Int32(1), -1),
                (seqused + Int64(request) * 4, Int32(1), 0),
                (ptx.select_value(choice != 0, choice, seqused) + Int64(request) * 4, listens, 0),
            ]
        )
        if (page >= 0) & (page < pages) & ((entry << page_bits) < used) & (other == 0):
            row, part = thread // LANES, thread % LANES
            k_from = k + Int64(page) * k_page + Int64(head) * k_head + Int64(row) * k_token + Int64(part * 8)
            v_from = v + Int64(page) * v_page + Int64(head) * v_head + Int64(row) * v_token + Int64(part * 8)
            to = ((Int64(item) * Int64(heads) + Int64(head)) << Int64(page_bits)) + Int64(row)
            to = to * (2 * DIM) + Int64(part * 16)
            for first in cutlass.range(0, Int32(1) << page_bits, BATCH * ROWS, unroll=1):
                self.batch(k_from + Int64(first) * k_token, k_token, k_out + to + Int64(first) * (2 * DIM))
                self.batch(v_from + Int64(first) * v_token, v_token, v_out + to + Int64(first) * (2 * DIM))

    def batch(self, source, stride, target):
        loaded = [ptx.load_8_bytes(source + Int64(ROWS * i) * stride) for i in range(BATCH)]
        for i, words in enumerate(loaded):
            ptx.store_words(target + Int64(ROWS * i * 2 * DIM), [half for word in words for half in self.widen(word)])


def programs():
    return [Program(f"prefill_widen_{dtype}", PrefillWiden(dtype)) for dtype in ("e4m3", "e5m2")]
