"""Tiles of prefill_score.py (sm90, sm100) that were cut between CTAs: where each leaves its lists, and what folds them.

Part 2 cta is the list of the tile that a CTA's range ends in, if it began before; part 2 cta + 1 that of the tile it
begins. A part is written only for a tile that this CTA does not score whole.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import ptx, query_tiles, ranking, smem
from shared.program import Kernel

# A CTA's least share of a topk variant: a tile cut into many parts costs more to fold than to score.
LEAST_UNITS = 4


def part_address(parts, part, rows, length, row):
    """A part is [2 length / 4][rows] groups of four words: the keys, then the ids."""
    return parts + Int64(part) * (rows * length * 8) + Int64(row) * 16


@cute.jit
def finish_tile(
    record: Int32,
    best_keys: cute.Tensor,
    best_ids: cute.Tensor,
    length: cutlass.Constexpr,
    row: Int32,
    rows: cutlass.Constexpr,  # of a tile
    to: ranking.Rows,
    parts: Int64,
    choice: ranking.Choice,
    others=None,  # whether the row is another thread's, where some are
):
    """The row's selection if this CTA has scored all of its blocks, else its list for the fold."""
    first_token, count, position, _ = smem.load_i32x4(record)
    _, whole, part, _ = smem.load_i32x4(record + 16)
    token = row >> to.head_shift
    if cutlass.const_expr(others is not None):
        if others:
            count = Int32(0)
            whole = Int32(1)
    if whole != 0:
        if token < count:
            n = query_tiles.candidates(position + token)
            ranking.write_selection(to, to.address(first_token, row), best_ids, length, n, choice)
    else:
        place = part_address(parts, part, rows, length, row)
        for j in cutlass.range_constexpr(0, length, 4):
            ptx.store_words(place, [best_keys[j + i] for i in range(4)])
            ptx.store_words(place + rows * 4 * length, [best_ids[j + i] for i in range(4)])
            place = place + rows * 16


class PrefillFold(Kernel):
    """The tiles that were cut: the lists of their parts, in the order of blocks, into one selection. CTA (c, y) has the
    rows 128 y ... of the tile that begins in the range of CTA c and ends in another's."""

    threads = 128

    def __init__(self, length, tiles):
        self.length = length
        self.rows = 128 * tiles
        self.row_bits = 6 + tiles

    def load_part(self, parts, part, row, keys, ids):
        place = part_address(parts, part, self.rows, self.length, row)
        for j in range(0, self.length, 4):
            found = ptx.load_fresh_16_bytes_if(place + self.rows * 4 * j, Int32(1))
            found_ids = ptx.load_fresh_16_bytes_if(place + self.rows * 4 * (self.length + j), Int32(1))
            for i in range(4):
                keys[j + i], ids[j + i] = found[i], found_ids[i]

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        parts: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        out_slot_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        head_shift: Int32,
        reach: Int32,
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
        vectors: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, part_of_rows, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        row = part_of_rows * 128 + thread
        tile_shift = Int32(self.row_bits) - head_shift
        free_blocks = local_blocks + init_blocks
        batch = query_tiles.Batch(cu_seqlens_q, seqused_k, num_requests, num_tokens)
        tiling = query_tiles.Tiling(reach, topk * query_tiles.BLOCK, tile_shift, free_blocks)
        total = query_tiles.count_units(batch, tiling, lane)
        share = query_tiles.units_of_cta(total, ctas, LEAST_UNITS)
        end = (cta + 1) * share
        count, last_part = Int32(0), cta
        token, position = Int32(0), Int32(0)
        if (end < total) & (end > 0):
            _, _, _, token, position, rows, tile, tile_base = query_tiles.locate_unit(
                end - 1, Int32(0), Int32(0), batch, tiling, lane
            )
            done = tile << tile_shift
            token, position = token + done, position + done
            in_tile = ptx.minimum_i32(rows - done, Int32(1) << tile_shift)
            stop = tile_base + query_tiles.candidates(position + in_tile - 1) - free_blocks
            if (rows > 0) & (tile_base >= end - share) & (stop > end):
                count = in_tile
                last_part = ptx.minimum_i32(ptx.divide_u32(stop - 1, share), ctas - 1)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        own = row >> head_shift
        if own < count:
            keys, ids, next_keys, next_ids = [
                cute.make_rmem_tensor(cute.make_layout(self.length), Int32) for _ in range(4)
            ]
            self.load_part(parts, 2 * cta + 1, row, keys, ids)
            self.load_part(parts, 2 * cta + 2, row, next_keys, next_ids)  # there is at least one more
            for c in cutlass.range(cta + 1, last_part + 1, unroll=1):
                other_keys = [next_keys[j] for j in range(self.length)]
                other_ids = [next_ids[j] for j in range(self.length)]
                self.load_part(parts, 2 * ptx.minimum_i32(c + 1, last_part), row, next_keys, next_ids)
                ranking.merge(keys, ids, other_keys, other_ids, self.length)
            n = query_tiles.candidates(position + own)
            to = ranking.Rows(out, out_token_stride, out_head_stride, out_slot_stride, head_shift, vectors)
            choice = ranking.Choice(topk, local_blocks, init_blocks)
            ranking.write_selection(to, to.address(token, row), ids, self.length, n, choice)
