"""Invert: the selection turned around, from blocks of a query to queries of a block. First stage of the KV-stationary
prefill (op sparse_attention).

Problem
    block_indices [T, Hkv, K] gives each (query token, KV head) up to 32 blocks. Wanted is, for each chunk of 2^chunk_bits
    tokens, KV head, sequence and block, the ascending list of the chunk's tokens that chose the block, cut into tiles of
    `tile` tokens. A choice counts once a row (the first slot that names it), and only if the block begins before the
    token's visible end and has a page. Nothing returns to the host: all arrays are sized by shapes.

Pieces (shared/pieces.py)
    unit     the tokens of one sequence in an aligned span of 256; a CTA of 256 threads is a unit and KV head, a thread a
             token
    segment  the tokens of one sequence in 2^chunk_bits tokens. Row = (segment, KV head), bin = (row, block)
    A chunk of the later stages is 2^chunk_bits tokens x `chunk_heads` KV heads (a divisor of Hkv); its rows, and so its
    tiles, lie side by side. Chunks are counted by heads first: all of the first heads, then all of the next.

Three launches
    count    a bitmap of 256 tokens for each block, in shared memory, filled by atomic or; its population counts are the
             unit's share of every bin. Writes `state` [T, Hkv] = (mask of the slots that count, 1 if the sequence takes
             part).
    scan     a CTA a row: prefix sums over the units of a bin, tiles of the bins, prefix sums of those. The first CTA also
             sets the counters by which the forward's CTAs share out chunks (sm90/prefill.py): to 0, or, where no sequence
             takes part, to a number past all units
    scatter  the bitmap again; a choice's place is its bin's start + choices of units before + bits below its own. The
             first choice of a tile also writes the tile's head.
    Which lane comes first decides nothing: the bitmap is the same in any order, and ranks are counted from it.

Arrays (int32)
    counts   [units, Hkv, blocks]        count; after scan: choices of the bin in earlier units
    bins     [segments, Hkv, blocks, 2]  first tile within the row, choices
    rows     [segments, Hkv]             tiles of a row
    chunks   [Hkv / chunk_heads, chunks of tokens] + 1   first tile of a chunk
    heads    [tiles, 8]                  bin number, KV head | tokens << 16, page of the first half, of the second half,
                                         a + (0), last visible column | first visible column << 8, sequence, block
             A token at `local` in its chunk sees the block's columns up to min(local + a, last). A page outside the cache
             is -1 and its columns are not visible.
    counters [chunks, 4]                 for sm90/prefill.py
    entries  [tiles, tile]               local token << 5 | slot; behind the last token of a tile: unspecified

Budget
    Choices are read twice (8 B), counts written, read and written, 32 + 4 tile bytes a tile written: at 32k tokens, 4 heads
    and 16 slots 25 MB, 6 us at 4.3 TB/s; a CTA's chain of dependent steps (offsets, ids, pages, bitmap) is about 3 us.

Limits
    K <= 32; tokens < 2^26; bins < 2^31. Bitmaps cover WINDOW blocks at a time; longer tables take several rounds.
    Offsets, lengths, ids and pages may hold anything: no access outside the arrays. Where offsets descend, segments and
    units need not match: lists then have gaps (heads and entries as they were) and tiles may be lost.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import pieces, ptx, smem
from shared.program import Kernel, Program

THREADS = 256
UNIT_BITS = 8
WINDOW = 1024  # blocks of a bitmap
BITMAP_BYTES = WINDOW * THREADS // 8
SLOTS = 16  # slots whose ids and pages are loaded together
UNITS = 8  # units whose counts are loaded together
NEVER = 1 << 24  # added to a local token: past every last visible column
NOBODY = 1 << 30  # a number of a unit past all of them
HEAD_BYTES = 32


@cute.jit
def load_choices(
    row: Int64,
    ids_slot: Int64,
    first: Int32,
    width: Int32,
    mask: Int32,
    visible: Int32,
    ids: cute.Tensor,
):
    """Ids of the slots first .. first + SLOTS - 1 of a row: those in `mask` and in [0, visible), else -1."""
    places = [
        (row + Int64(first + i) * ids_slot, Int32(first + i < width) & ((mask >> (first + i)) & 1), -1)
        for i in range(SLOTS)
    ]
    loaded = ptx.load_i32_batch(places)
    for i in cutlass.range_constexpr(SLOTS):
        ids[i] = ptx.select((loaded[i] >= 0) & (loaded[i] < visible), loaded[i], Int32(-1))


def visible_blocks(token, stop, used, causal):
    """Blocks that begin before a token's visible end."""
    end = ptx.select(causal != 0, ptx.minimum_i32(used, used - stop + token + 1), used)
    return (ptx.maximum_i32(end, Int32(0)) + 127) >> 7


def load_pages(page_row, blocks, page_width, pages, page_bits, ok):
    """Pages of the halves of some blocks, (-1, ...) where there is none. `ok`: Int32s."""
    places = []
    for block, there in zip(blocks, ok):
        entry = block << (7 - page_bits)
        second = entry + (7 - page_bits)
        places.append((page_row + Int64(entry) * 4, there & Int32(entry < page_width), -1))
        places.append((page_row + Int64(second) * 4, there & Int32(second < page_width), -1))
    found = [ptx.select((x >= 0) & (x < pages), x, Int32(-1)) for x in ptx.load_i32_batch(places)]
    return list(zip(found[::2], found[1::2]))


@cute.jit
def takes_part(formulation: Int64, sequence: Int32, requests: Int32):
    """1 if the KV-stationary pipeline computes a sequence. Tokens of no sequence are always its own."""
    chosen = ptx.load_i32_if(formulation + Int64(sequence) * 4, Int32((formulation != 0) & (sequence < requests)), 1)
    return Int32(chosen == 1)


def row_of(segment, head, segments, chunk_heads):
    """Rows in the order of the tiles: (group of `chunk_heads` KV heads, segment, head)."""
    group = head // chunk_heads
    return (group * segments + segment) * chunk_heads + head - group * chunk_heads


@cute.jit
def clear_bitmap(base: Int32, thread: Int32, blocks: Int32):
    for at in cutlass.range(thread, blocks * 2, THREADS, unroll=1):
        smem.store_i32x4(base + at * 16, [Int32(0)] * 4)


def bits_of(base, block):
    """A block's 8 words of the bitmap."""
    return smem.load_i32x4(base + block * 32) + smem.load_i32x4(base + block * 32 + 16)


def bits_below(base, block, warp):
    """Those of tokens before this thread's."""
    masks = [ptx.select(warp > w, Int32(-1), Int32(0)) for w in range(THREADS // 32)]
    masks = [ptx.select(warp == w, ptx.lanes_below(), m) for w, m in enumerate(masks)]
    return [word & m for word, m in zip(bits_of(base, block), masks)]


def total_bits(words):
    counts = [ptx.count_bits(w) for w in words]
    while len(counts) > 1:
        counts = [counts[i] + counts[i + 1] for i in range(0, len(counts), 2)]
    return counts[0]


class Count(Kernel):
    threads = THREADS
    dynamic_smem = BITMAP_BYTES

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        formulation: Int64,  # 0: every sequence takes part
        counts: Int64,
        state: Int64,
        ids_token: Int64,  # strides in bytes
        ids_head: Int64,
        ids_slot: Int64,
        page_table_row: Int64,
        tokens: Int32,
        requests: Int32,
        heads: Int32,
        width: Int32,
        page_width: Int32,
        pages: Int32,
        page_bits: Int32,
        reach: Int32,
        blocks: Int32,  # of a row of the page table
        causal: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        unit, head, _ = cute.arch.block_idx()
        lane = thread & 31
        base = smem.base(128)
        ptx.wait_for_previous_kernel()
        # Not before the wait: the kernels that follow read offsets, lengths and ids ahead of theirs.
        ptx.let_next_kernel_start()
        piece = pieces.find(cu_seqlens, seqused, unit, Int32(UNIT_BITS), requests, tokens, lane)
        span, sequence, first, last, stop, used = piece
        if first < last:
            real = sequence < requests
            used = ptx.clamp(used, Int32(0), reach)
            mine = takes_part(formulation, sequence, requests)
            row_blocks = ptx.minimum_i32((used + 127) >> 7, blocks)
            row_blocks = ptx.select(mine != 0, row_blocks, Int32(0))
            token = (span << UNIT_BITS) + thread
            inside = (token >= first) & (token < last)
            visible = ptx.minimum_i32(visible_blocks(token, stop, used, causal), row_blocks)
            visible = ptx.select(inside, visible, Int32(0))
            safe = ptx.select(inside, token, first)
            row = ids + Int64(safe) * ids_token + Int64(head) * ids_head
            page_row = page_table + Int64(ptx.select(real, sequence, Int32(0))) * page_table_row
            word, bit = (thread >> 5) * 4, Int32(1) << lane
            mask = Int32(0)
            loaded = cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32)
            for window in cutlass.range(0, row_blocks, WINDOW, unroll=1):
                size = ptx.minimum_i32(row_blocks - window, Int32(WINDOW))
                clear_bitmap(base, thread, size)
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    load_choices(row, ids_slot, slot, width, Int32(-1), visible, loaded)
                    here = [Int32((loaded[i] >= window) & (loaded[i] < window + size)) for i in range(SLOTS)]
                    blocks_here = [loaded[i] for i in range(SLOTS)]
                    halves = load_pages(page_row, blocks_here, page_width, pages, page_bits, here)
                    for i in cutlass.range_constexpr(SLOTS):
                        if (here[i] != 0) & ((halves[i][0] & halves[i][1]) != -1):
                            before = smem.atomic_or(base + (loaded[i] - window) * 32 + word, bit)
                            if (before & bit) == 0:
                                mask = mask | (Int32(1) << (slot + i))
                ptx.barrier()
                out = counts + (Int64(unit) * Int64(heads) + Int64(head)) * Int64(blocks) * 4
                for at in cutlass.range(thread, size, THREADS, unroll=1):
                    ptx.store_words(out + Int64(window + at) * 4, [total_bits(bits_of(base, at))])
                ptx.barrier()
            if inside:
                ptx.store_words(state + (Int64(token) * Int64(heads) + Int64(head)) * 8, [mask, mine])


class Scan(Kernel):
    threads = THREADS
    dynamic_smem = 64

    @cute.kernel
    def kernel(
        self,
        cu_seqlens: Int64,
        seqused: Int64,
        formulation: Int64,
        counts: Int64,
        bins: Int64,
        rows: Int64,
        counters: Int64,
        tokens: Int32,
        requests: Int32,
        heads: Int32,
        reach: Int32,
        blocks: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tile_bits: Int32,
        chunks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        segment, head, _ = cute.arch.block_idx()
        lane, warp = thread & 31, thread >> 5
        base = smem.base(128)
        piece = pieces.find(cu_seqlens, seqused, segment, chunk_bits, requests, tokens, lane)
        span, sequence, first, last, stop, used = piece
        used = ptx.clamp(used, Int32(0), reach) * takes_part(formulation, sequence, requests)
        used = ptx.select(first < last, used, Int32(0))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row_blocks = ptx.minimum_i32((used + 127) >> 7, blocks)
        first_unit = (first >> UNIT_BITS) + sequence
        last_unit = ((last - 1) >> UNIT_BITS) + sequence
        segments, _, _ = cute.arch.grid_dim()
        row = Int64(row_of(segment, head, segments, chunk_heads))
        unit_step = Int64(heads) * Int64(blocks) * 4
        done = Int32(0)  # tiles of the bins before this round's
        for at in cutlass.range(0, row_blocks, THREADS, unroll=1):
            block = at + thread
            inside = Int32(block < row_blocks)
            place = counts + Int64(first_unit) * unit_step + (Int64(head) * Int64(blocks) + Int64(block)) * 4
            total = Int32(0)
            for unit in cutlass.range(first_unit, last_unit + 1, UNITS, unroll=1):
                ok = [inside & Int32(unit + i <= last_unit) for i in range(UNITS)]
                there = [place + unit_step * i for i in range(UNITS)]
                found = ptx.load_i32_batch([(x, y, 0) for x, y in zip(there, ok)])
                for i in cutlass.range_constexpr(UNITS):
                    ptx.store_words_if(there[i], [total], ok[i])
                    # Where offsets descend, a unit may be nobody's and its counts unwritten.
                    total = total + ptx.clamp(found[i], Int32(0), Int32(THREADS))
                place = place + unit_step * UNITS
            tiles = (total + (Int32(1) << tile_bits) - 1) >> tile_bits
            upto = ptx.warp_prefix_sum(tiles, lane)
            if lane == 31:
                smem.store_i32(base + warp * 4, upto)
            ptx.barrier()
            sums = smem.load_i32x4(base) + smem.load_i32x4(base + 16)
            before, all_tiles = done, done
            for w in cutlass.range_constexpr(THREADS // 32):
                before = before + ptx.select(warp > w, sums[w], Int32(0))
                all_tiles = all_tiles + sums[w]
            if inside != 0:
                ptx.store_words(bins + (row * Int64(blocks) + Int64(block)) * 8, [before + upto - tiles, total])
            done = all_tiles
            ptx.barrier()
        if thread == 0:
            ptx.store_words(rows + row * 4, [done])
        if (segment == 0) & (head == 0):
            self.begin_counters(counters, chunks, formulation, requests, thread, lane)

    @cute.jit
    def begin_counters(
        self, counters: Int64, chunks: Int32, formulation: Int64, requests: Int32, thread: Int32, lane: Int32
    ):
        some = Int32(formulation == 0)
        if formulation != 0:
            for at in cutlass.range(lane, requests, 32, unroll=1):
                some = some | Int32(ptx.load_i32(formulation + Int64(at) * 4) == 1)
        start = ptx.select(ptx.ballot(some) != 0, Int32(0), Int32(NOBODY))
        for chunk in cutlass.range(thread, chunks, THREADS, unroll=1):
            ptx.store_words(counters + Int64(chunk) * 16, [start, start, Int32(0), Int32(0)])


class Scatter(Kernel):
    threads = THREADS
    dynamic_smem = BITMAP_BYTES + 64

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        state: Int64,
        counts: Int64,
        bins: Int64,
        rows: Int64,
        chunks: Int64,
        heads_out: Int64,
        entries: Int64,
        ids_token: Int64,  # strides in bytes
        ids_head: Int64,
        ids_slot: Int64,
        page_table_row: Int64,
        tokens: Int32,
        requests: Int32,
        heads: Int32,
        width: Int32,
        page_width: Int32,
        pages: Int32,
        page_bits: Int32,
        reach: Int32,
        blocks: Int32,
        causal: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tile_bits: Int32,
        segments: Int32,
        most_tiles: Int32,  # that `heads_out` and `entries` hold
    ):
        thread, _, _ = cute.arch.thread_idx()
        unit, head, _ = cute.arch.block_idx()
        lane, warp = thread & 31, thread >> 5
        base = smem.base(128)
        piece = pieces.find(cu_seqlens, seqused, unit, Int32(UNIT_BITS), requests, tokens, lane)
        span, sequence, first, last, stop, used = piece
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if first < last:
            real = sequence < requests
            used = ptx.clamp(used, Int32(0), reach)
            chunk = span >> (chunk_bits - UNIT_BITS)
            row = row_of(chunk + sequence, head, segments, chunk_heads)
            first_tile = self.tiles_before(rows, row, base + BITMAP_BYTES, thread, lane, warp)
            group = head // chunk_heads
            number = group * ((tokens + (Int32(1) << chunk_bits) - 1) >> chunk_bits) + chunk
            if (thread == 0) & (head == group * chunk_heads) & (first == (chunk << chunk_bits)):
                ptx.store_words(chunks + Int64(number) * 4, [first_tile])
            if (thread == 0) & (head == heads - 1) & (last == tokens):
                own = ptx.load_i32(rows + Int64(row) * 4)
                ptx.store_words(chunks + Int64(number + 1) * 4, [first_tile + own])

            token = (span << UNIT_BITS) + thread
            inside = (token >= first) & (token < last)
            safe = ptx.select(inside, token, first)
            mask, mine = ptx.load_i32_batch(
                [
                    (state + (Int64(safe) * Int64(heads) + Int64(head)) * 8, Int32(inside), 0),
                    (state + (Int64(first) * Int64(heads) + Int64(head)) * 8 + 4, Int32(1), 0),
                ]
            )
            row_blocks = ptx.minimum_i32((used + 127) >> 7, blocks)
            row_blocks = ptx.select(mine != 0, row_blocks, Int32(0))
            row_ids = ids + Int64(safe) * ids_token + Int64(head) * ids_head
            page_row = page_table + Int64(ptx.select(real, sequence, Int32(0))) * page_table_row
            unit_counts = counts + (Int64(unit) * Int64(heads) + Int64(head)) * Int64(blocks) * 4
            row_bins = bins + Int64(row) * Int64(blocks) * 8
            local = token - (chunk << chunk_bits)
            shift = ptx.select(causal != 0, (chunk << chunk_bits) + used - stop, Int32(NEVER))
            tile = Int32(1) << tile_bits
            word, bit = (thread >> 5) * 4, Int32(1) << lane
            loaded = cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32)
            for window in cutlass.range(0, row_blocks, WINDOW, unroll=1):
                size = ptx.minimum_i32(row_blocks - window, Int32(WINDOW))
                clear_bitmap(base, thread, size)
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    load_choices(row_ids, ids_slot, slot, width, mask, row_blocks, loaded)
                    for i in cutlass.range_constexpr(SLOTS):
                        if (loaded[i] >= window) & (loaded[i] < window + size):
                            smem.atomic_or(base + (loaded[i] - window) * 32 + word, bit)
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    load_choices(row_ids, ids_slot, slot, width, mask, row_blocks, loaded)
                    here = [Int32((loaded[i] >= window) & (loaded[i] < window + size)) for i in range(SLOTS)]
                    places = self.look_up(unit_counts, row_bins, [loaded[i] for i in range(SLOTS)], here)
                    for i in cutlass.range_constexpr(SLOTS):
                        block = loaded[i]
                        if here[i] != 0:
                            before, start, count = places[i]
                            rank = before + total_bits(bits_below(base, block - window, warp))
                            at = first_tile + start + (rank >> tile_bits)
                            # Either bound can fail where offsets descend: a bin that nobody scanned begins anywhere.
                            if (at >= 0) & (at < most_tiles):
                                place = (Int64(at) << Int64(tile_bits)) + Int64(rank & (tile - 1))
                                ptx.store_words(entries + place * 4, [(local << 5) | (slot + i)])
                                if (rank & (tile - 1)) == 0:
                                    [(a, b)] = load_pages(page_row, [block], page_width, pages, page_bits, [Int32(1)])
                                    seen = ptx.minimum_i32(used - 1 - (block << 7), Int32(127))
                                    seen = ptx.select(b < 0, ptx.minimum_i32(seen, Int32(63)), seen)
                                    hidden = ptx.select(a < 0, Int32(64 << 8), Int32(0))
                                    left = ptx.minimum_i32(count - rank, tile)
                                    head_at = heads_out + Int64(at) * HEAD_BYTES
                                    ptx.store_words(head_at, [row * blocks + block, head | (left << 16), a, b])
                                    shift_here = shift - (block << 7)
                                    ptx.store_words(head_at + 16, [shift_here, seen | hidden, sequence, block])
                ptx.barrier()

    def look_up(self, unit_counts, row_bins, blocks, ok):
        """Of each block: (choices in earlier units, first tile of the bin within the row, choices of the bin)."""
        places = []
        for block, there in zip(blocks, ok):
            at = row_bins + Int64(block) * 8
            places += [(unit_counts + Int64(block) * 4, there, 0), (at, there, 0), (at + 4, there, 0)]
        found = ptx.load_i32_batch(places)
        return [found[3 * i : 3 * i + 3] for i in range(len(blocks))]

    @cute.jit
    def tiles_before(self, rows: Int64, row: Int32, scratch: Int32, thread: Int32, lane: Int32, warp: Int32):
        """Tiles of all rows before one."""
        total = Int32(0)
        for at in cutlass.range(thread, row, THREADS, unroll=1):
            total = total + ptx.load_i32(rows + Int64(at) * 4)
        total = ptx.warp_sum(total)
        if lane == 0:
            smem.store_i32(scratch + warp * 4, total)
        ptx.barrier()
        sums = smem.load_i32x4(scratch) + smem.load_i32x4(scratch + 16)
        result = sums[0]
        for w in cutlass.range_constexpr(1, THREADS // 32):
            result = result + sums[w]
        return result


def programs():
    return [
        Program("invert_count", Count()),
        Program("invert_scan", Scan()),
        Program("invert_scatter", Scatter()),
    ]
