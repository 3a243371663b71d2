"""Invert: the selection turned around, from blocks of a query to queries of a block. First stage of the KV-stationary
prefill (op sparse_attention).

Problem
    block_indices [T, Hkv, K] gives each (query token, KV head) up to 32 blocks. Wanted is, for each chunk of 2^chunk_bits
    tokens, KV head, sequence and bin, the ascending list of the chunk's tokens in the bin, cut into tiles of `tile` tokens.
    A choice counts once a row (the first slot that names it), and only if the block begins before the token's visible end
    and has a page. Nothing returns to the host: all arrays are sized by shapes.

Pairs
    Blocks 2 p and 2 p + 1 are a pair. Its bins: tokens that chose the first block alone, both, the second alone. Those of
    both have one partial result instead of two, in the slot of the first block; the second's slot leaves the row's mask.
    Tokens that see more than `pair_blocks` blocks take the two blocks apart: of many blocks, few are chosen in pairs, and a
    third bin costs a tile partly filled. What a row does follows from its own position and selection.

Pieces (shared/pieces.py)
    unit     the tokens of one sequence in an aligned span of 256; a CTA of 256 threads is a unit and KV head, a thread a
             token
    segment  the tokens of one sequence in 2^chunk_bits tokens. Row = (segment, KV head)
    A chunk of the later stages is 2^chunk_bits tokens x `chunk_heads` KV heads; its rows, and so its tiles, lie side by
    side. Chunks are counted by heads first: all of the first heads, then all of the next. Heads from `tail_head` on may be
    cut finer (2^tail_bits tokens x tail_heads), so that little is left to combine behind the last chunk.

Three launches
    count    a bitmap of 256 tokens for each block, in shared memory, filled by atomic or; population counts of pairs of
             bitmaps are the unit's share of every bin. Writes `state` [T, Hkv] = (mask of the slots that count, 1 if the
             sequence takes part).
    scan     a CTA a row: prefix sums over the units of a bin, tiles of the bins, prefix sums of those
    scatter  the bitmap again; a choice's place is its bin's start + choices of units before + bits below its own. The
             first choice of a tile also writes the tile's head. Takes the slots without a partial out of `state`.
    Which lane comes first decides nothing: the bitmap is the same in any order, and ranks are counted from it.

Arrays (int32; bins = 3 for each pair of blocks)
    counts   [units, Hkv, bins]          count; after scan: choices of the bin in earlier units
    bins     [rows, bins, 2]             first tile within the row, choices
    rows     [rows]                      tiles of a row
    chunks   [chunks] + 1                first tile of a chunk
    heads    [tiles, 8]                  bin number = 4 (row * pairs + pair) + kind (0 first, 1 both, 2 second), KV head |
                                         tokens << 16, page of the first half, of the second half, a + (0), last visible
                                         column | first visible column << 8, pages of the second block's halves
             A token at `local` in its chunk sees the block's columns up to min(local + a, last). A page outside the cache
             is -1 and its columns are not visible. The columns of a second block: 16 bits higher, and its a is 128 less.
    entries  [tiles, tile]               local token << 5 | slot; behind the last token of a tile: unspecified

Budget
    Choices are read twice (8 B), counts written, read and written, 32 + 4 tile bytes a tile written: at 32k tokens, 4 heads
    and 16 slots 25 MB, 6 us at 4.3 TB/s; a CTA's chain of dependent steps (offsets, ids, pages, bitmap) is about 3 us.

Limits
    K <= 32; tokens < 2^26; rows * bins < 2^30. Bitmaps cover WINDOW blocks at a time; longer tables take several rounds.
    Offsets, lengths, ids and pages may hold anything: no access outside the arrays. Where offsets descend, segments and
    units need not match: lists then have gaps (heads and entries as they were) and tiles may be lost.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import pieces, ptx, smem
from shared.program import Program

THREADS = 256
UNIT_BITS = 8
WINDOW = 1024  # blocks of a bitmap
BITMAP_BYTES = WINDOW * THREADS // 8
PAGES_AT = BITMAP_BYTES  # in shared memory: pages of the window
PAIRING_AT = PAGES_AT + 2 * WINDOW * 4  # a bit for each token: takes its pairs together
BINS_AT = PAIRING_AT + THREADS // 8  # 8 bytes for each bin of the window: place of the unit's first choice, end of the bin
SUMS_AT = BINS_AT + WINDOW // 2 * 3 * 8
SLOTS = 16  # slots whose ids are loaded together
UNITS = 8  # units whose counts are loaded together
BATCH = 4  # pages, or bins, of a thread that are loaded together
NEVER = 1 << 24  # added to a local token: past every last visible column
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


@cute.jit
def fetch_pages(
    base: Int32,
    thread: Int32,
    page_row: Int64,
    window: Int32,
    size: Int32,  # blocks
    page_width: Int32,
    pages: Int32,
    page_bits: Int32,
):
    """Pages of a window's blocks to shared memory, -1 where there is none."""
    shift = 7 - page_bits
    first, count = window << shift, size << shift
    for at in cutlass.range(thread, count, THREADS * BATCH, unroll=1):
        here = [at + THREADS * i for i in range(BATCH)]
        ok = [Int32((x < count) & (first + x < page_width)) for x in here]
        found = ptx.load_i32_batch([(page_row + Int64(first + x) * 4, there, -1) for x, there in zip(here, ok)])
        for x, page in zip(here, found):
            page = ptx.select((page >= 0) & (page < pages), page, Int32(-1))
            smem.store_i32_if(base + PAGES_AT + x * 4, page, Int32(x < count))


def pages_of(base, place, page_bits):
    """Pages of the halves of the block at a place in the window."""
    entry = place << (7 - page_bits)
    return smem.load_i32(base + PAGES_AT + entry * 4), smem.load_i32(base + PAGES_AT + (entry + 7 - page_bits) * 4)


def visible_columns(block, pages, used):
    """last visible column | first visible column << 8 of a block that ends or doesn't with the sequence."""
    seen = ptx.minimum_i32(used - 1 - (block << 7), Int32(127))
    seen = ptx.select(pages[1] < 0, ptx.minimum_i32(seen, Int32(63)), seen)
    return seen | ptx.select(pages[0] < 0, Int32(64 << 8), Int32(0))


@cute.jit
def takes_part(formulation: Int64, sequence: Int32, requests: Int32):
    """1 if the KV-stationary pipeline computes a sequence. Tokens of no sequence are always its own."""
    chosen = ptx.load_i32_if(formulation + Int64(sequence) * 4, Int32((formulation != 0) & (sequence < requests)), 1)
    return Int32(chosen == 1)


def cut_of(head, requests, tokens, chunk_bits, chunk_heads, tail_head, tail_bits, tail_heads):
    """How a KV head is cut: (log2 tokens of a chunk, its heads, which of them this one is, number of the first chunk and of
    the first row of its heads, segments)."""
    tail = Int32(head >= tail_head)
    bits, together = ptx.select_value(tail, tail_bits, chunk_bits), ptx.select_value(tail, tail_heads, chunk_heads)
    main_chunks, chunks = count_of(tokens, chunk_bits), count_of(tokens, bits)
    before = tail * tail_head
    group = (head - before) // together
    first_chunk = before // chunk_heads * main_chunks + group * chunks
    first_row = before * (main_chunks + requests) + group * together * (chunks + requests)
    return bits, together, head - before - group * together, first_chunk, first_row, chunks + requests


def count_of(tokens, bits):
    return (tokens + (Int32(1) << bits) - 1) >> bits


@cute.jit
def clear_bitmap(base: Int32, thread: Int32, blocks: Int32):
    """Of whole pairs."""
    for at in cutlass.range(thread, (blocks + 1 >> 1) * 4, THREADS, unroll=1):
        smem.store_i32x4(base + at * 16, [Int32(0)] * 4)


def bits_of(base, block):
    """A block's 8 words of the bitmap."""
    return smem.load_i32x4(base + block * 32) + smem.load_i32x4(base + block * 32 + 16)


def bins_of(blocks):
    return (blocks + 1 >> 1) * 3


@cute.jit
def note_pairing(base: Int32, lane: Int32, warp: Int32, pairing: Int32):
    """Which tokens take their pairs together; to be read behind a barrier."""
    word = ptx.ballot(pairing)
    if lane == 0:
        smem.store_i32(base + PAIRING_AT + warp * 4, word)


def load_pairing(base):
    return smem.load_i32x4(base + PAIRING_AT) + smem.load_i32x4(base + PAIRING_AT + 16)


def alone(own, other, pairing):
    """Of the tokens with a block, those whose bin is not that of both."""
    return [a & ~(b & c) for a, b, c in zip(own, other, pairing)]


def together(own, other, pairing):
    return [a & b & c for a, b, c in zip(own, other, pairing)]


def below(words, warp):
    """The bits of tokens before this thread's."""
    masks = [ptx.select(warp > w, Int32(-1), Int32(0)) for w in range(THREADS // 32)]
    masks = [ptx.select(warp == w, ptx.lanes_below(), m) for w, m in enumerate(masks)]
    return [word & m for word, m in zip(words, masks)]


def total_bits(words):
    counts = [ptx.count_bits(w) for w in words]
    while len(counts) > 1:
        counts = [counts[i] + counts[i + 1] for i in range(0, len(counts), 2)]
    return counts[0]


def prefix_in_warp(x, lane):
    """Sum over the lanes up to and including this one."""
    for distance in (1, 2, 4, 8, 16):
        before = ptx.shuffle_up(x, distance)
        x = x + ptx.select(lane >= distance, before, Int32(0))
    return x


class Count:
    dynamic_smem = BINS_AT

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
        pair_blocks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        unit, head, _ = cute.arch.block_idx()
        lane, warp = thread & 31, thread >> 5
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
            sees = visible_blocks(token, stop, used, causal)
            visible = ptx.select(inside, ptx.minimum_i32(sees, row_blocks), Int32(0))
            note_pairing(base, lane, warp, Int32(sees <= pair_blocks))
            safe = ptx.select(inside, token, first)
            row = ids + Int64(safe) * ids_token + Int64(head) * ids_head
            page_row = page_table + Int64(ptx.select(real, sequence, Int32(0))) * page_table_row
            word, bit = warp * 4, Int32(1) << lane
            mask = Int32(0)
            loaded = cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32)
            load_choices(row, ids_slot, Int32(0), width, Int32(-1), visible, loaded)
            for window in cutlass.range(0, row_blocks, WINDOW, unroll=1):
                size = ptx.minimum_i32(row_blocks - window, Int32(WINDOW))
                fetch_pages(base, thread, page_row, window, size, page_width, pages, page_bits)
                clear_bitmap(base, thread, size)
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    if width > SLOTS:
                        load_choices(row, ids_slot, slot, width, Int32(-1), visible, loaded)
                    for i in cutlass.range_constexpr(SLOTS):
                        place = loaded[i] - window
                        if (place >= 0) & (place < size):
                            halves = pages_of(base, place, page_bits)
                            if (halves[0] & halves[1]) != -1:
                                before = smem.atomic_or(base + place * 32 + word, bit)
                                if (before & bit) == 0:
                                    mask = mask | (Int32(1) << (slot + i))
                ptx.barrier()
                pairing = load_pairing(base)
                out = counts + (Int64(unit) * Int64(heads) + Int64(head)) * Int64(bins_of(blocks)) * 4
                for at in cutlass.range(thread, size + 1 >> 1, THREADS, unroll=1):
                    a, b = bits_of(base, 2 * at), bits_of(base, 2 * at + 1)
                    here = out + Int64((window >> 1) + at) * 12
                    bins = [alone(a, b, pairing), together(a, b, pairing), alone(b, a, pairing)]
                    for kind in cutlass.range_constexpr(3):
                        ptx.store_words(here + 4 * kind, [total_bits(bins[kind])])
                ptx.barrier()
            if inside:
                ptx.store_words(state + (Int64(token) * Int64(heads) + Int64(head)) * 8, [mask, mine])

    @cute.jit
    def entry(
        self,
        ids: Int64,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        formulation: Int64,
        counts: Int64,
        state: Int64,
        ids_token: Int64,
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
        pair_blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            ids,
            page_table,
            cu_seqlens,
            seqused,
            formulation,
            counts,
            state,
            ids_token,
            ids_head,
            ids_slot,
            page_table_row,
            tokens,
            requests,
            heads,
            width,
            page_width,
            pages,
            page_bits,
            reach,
            blocks,
            causal,
            pair_blocks,
        ).launch(grid=[1, heads, 1], block=[THREADS, 1, 1], smem=self.dynamic_smem, stream=stream)


class Scan:
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
        tokens: Int32,
        requests: Int32,
        heads: Int32,
        reach: Int32,
        blocks: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tail_head: Int32,
        tail_bits: Int32,
        tail_heads: Int32,
        tile_bits: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        segment, head, _ = cute.arch.block_idx()
        lane, warp = thread & 31, thread >> 5
        base = smem.base(128)
        cut = cut_of(head, requests, tokens, chunk_bits, chunk_heads, tail_head, tail_bits, tail_heads)
        bits, together, which, _, first_row, segments = cut
        piece = pieces.find(cu_seqlens, seqused, segment, bits, requests, tokens, lane)
        span, sequence, first, last, stop, used = piece
        used = ptx.clamp(used, Int32(0), reach) * takes_part(formulation, sequence, requests)
        used = ptx.select(first < last, used, Int32(0))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row_bins, bins_of_row = bins_of(ptx.minimum_i32((used + 127) >> 7, blocks)), bins_of(blocks)
        first_unit = (first >> UNIT_BITS) + sequence
        last_unit = ((last - 1) >> UNIT_BITS) + sequence
        row = Int64(first_row + segment * together + which)
        unit_step = Int64(heads) * Int64(bins_of_row) * 4
        done = Int32(0)  # tiles of the bins before this round's
        for at in cutlass.range(0, row_bins, THREADS, unroll=1):
            bin_here = at + thread
            inside = Int32(bin_here < row_bins)
            place = counts + Int64(first_unit) * unit_step + (Int64(head) * Int64(bins_of_row) + Int64(bin_here)) * 4
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
            upto = prefix_in_warp(tiles, lane)
            if lane == 31:
                smem.store_i32(base + warp * 4, upto)
            ptx.barrier()
            sums = smem.load_i32x4(base) + smem.load_i32x4(base + 16)
            before, all_tiles = done, done
            for w in cutlass.range_constexpr(THREADS // 32):
                before = before + ptx.select(warp > w, sums[w], Int32(0))
                all_tiles = all_tiles + sums[w]
            if inside != 0:
                at_bin = bins + (row * Int64(bins_of_row) + Int64(bin_here)) * 8
                ptx.store_words(at_bin, [before + upto - tiles, total])
            done = all_tiles
            ptx.barrier()
        # The grid is as wide as the head with the most segments needs.
        if (thread == 0) & (segment < segments):
            ptx.store_words(rows + row * 4, [done])

    @cute.jit
    def entry(
        self,
        cu_seqlens: Int64,
        seqused: Int64,
        formulation: Int64,
        counts: Int64,
        bins: Int64,
        rows: Int64,
        tokens: Int32,
        requests: Int32,
        heads: Int32,
        reach: Int32,
        blocks: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tail_head: Int32,
        tail_bits: Int32,
        tail_heads: Int32,
        tile_bits: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            cu_seqlens,
            seqused,
            formulation,
            counts,
            bins,
            rows,
            tokens,
            requests,
            heads,
            reach,
            blocks,
            chunk_bits,
            chunk_heads,
            tail_head,
            tail_bits,
            tail_heads,
            tile_bits,
        ).launch(grid=[1, heads, 1], block=[THREADS, 1, 1], smem=self.dynamic_smem, stream=stream)


class Scatter:
    dynamic_smem = SUMS_AT + 64

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
        pair_blocks: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tail_head: Int32,
        tail_bits: Int32,
        tail_heads: Int32,
        tile_bits: Int32,
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
            cut = cut_of(head, requests, tokens, chunk_bits, chunk_heads, tail_head, tail_bits, tail_heads)
            bits, together, which, number, first_row, _ = cut
            chunk = span >> (bits - UNIT_BITS)
            row = first_row + (chunk + sequence) * together + which
            first_tile = self.tiles_before(rows, row, base + SUMS_AT, thread, lane, warp)
            number = number + chunk
            if (thread == 0) & (which == 0) & (first == (chunk << bits)):
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
            pairing = Int32(visible_blocks(token, stop, used, causal) <= pair_blocks)
            note_pairing(base, lane, warp, pairing)
            unit_counts = counts + (Int64(unit) * Int64(heads) + Int64(head)) * Int64(bins_of(blocks)) * 4
            row_bins = bins + Int64(row) * Int64(bins_of(blocks)) * 8
            first_pair = row * (blocks + 1 >> 1)
            local = token - (chunk << bits)
            shift = ptx.select(causal != 0, (chunk << bits) + used - stop, Int32(NEVER))
            tile = Int32(1) << tile_bits
            word, bit = warp * 4, Int32(1) << lane
            merged = Int32(0)  # slots without a partial of their own
            loaded = cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32)
            load_choices(row_ids, ids_slot, Int32(0), width, mask, row_blocks, loaded)
            for window in cutlass.range(0, row_blocks, WINDOW, unroll=1):
                size = ptx.minimum_i32(row_blocks - window, Int32(WINDOW))
                fetch_pages(base, thread, page_row, window, size, page_width, pages, page_bits)
                first_bin, bins_here = (window >> 1) * 3, bins_of(size)
                self.fetch_bins(base, thread, unit_counts, row_bins, first_bin, bins_here, tile_bits)
                clear_bitmap(base, thread, size)
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    if width > SLOTS:
                        load_choices(row_ids, ids_slot, slot, width, mask, row_blocks, loaded)
                    for i in cutlass.range_constexpr(SLOTS):
                        place = loaded[i] - window
                        smem.or_i32_if(base + place * 32 + word, bit, Int32((place >= 0) & (place < size)))
                ptx.barrier()
                for slot in cutlass.range(0, width, SLOTS, unroll=1):
                    if width > SLOTS:
                        load_choices(row_ids, ids_slot, slot, width, mask, row_blocks, loaded)
                    for i in cutlass.range_constexpr(SLOTS):
                        place = loaded[i] - window
                        if (place >= 0) & (place < size):
                            own, other = bits_of(base, place), bits_of(base, place ^ 1)
                            partner = smem.load_i32(base + (place ^ 1) * 32 + word) & bit
                            both = ptx.select(partner != 0, pairing, Int32(0))
                            if (both & place) != 0:
                                merged = merged | (Int32(1) << (slot + i))
                            else:
                                kind = ptx.select(both != 0, Int32(1), (place & 1) * 2)
                                flip, all_pairing = both - 1, load_pairing(base)
                                words = [a & ((b & c) ^ flip) for a, b, c in zip(own, other, all_pairing)]
                                first_place, end = smem.load_i32x2(base + BINS_AT + ((place >> 1) * 3 + kind) * 8)
                                there = first_place + total_bits(below(words, warp))
                                at = first_tile + (there >> tile_bits)
                                # Either bound can fail where offsets descend: a bin that nobody scanned begins anywhere.
                                if (at >= 0) & (at < most_tiles):
                                    entry_at = (Int64(at) << Int64(tile_bits)) + Int64(there & (tile - 1))
                                    ptx.store_words(entries + entry_at * 4, [(local << 5) | (slot + i)])
                                    if (there & (tile - 1)) == 0:
                                        left = ptx.minimum_i32(end - there, tile)
                                        number = (first_pair + (loaded[i] >> 1)) * 4 + kind
                                        self.write_head(
                                            heads_out + Int64(at) * HEAD_BYTES,
                                            base,
                                            place,
                                            page_bits,
                                            [number, head | (left << 16)],
                                            shift - (loaded[i] << 7),
                                            loaded[i],
                                            used,
                                        )
                ptx.barrier()
            if inside & (merged != 0):
                ptx.store_words(state + (Int64(token) * Int64(heads) + Int64(head)) * 8, [mask & ~merged])

    def write_head(self, at, base, place, page_bits, names, shift, block, used):
        first, second = pages_of(base, place, page_bits), pages_of(base, place | 1, page_bits)
        # Where there is no second block, what is said of it is not looked at.
        columns = visible_columns(block, first, used) | (visible_columns(block | 1, second, used) << 16)
        ptx.store_words(at, [*names, *first])
        ptx.store_words(at + 16, [shift, columns, *second])

    @cute.jit
    def fetch_bins(
        self,
        base: Int32,
        thread: Int32,
        unit_counts: Int64,
        row_bins: Int64,
        first: Int32,
        count: Int32,
        tile_bits: Int32,
    ):
        """Of a window's bins: where in the row's tiles the unit's first choice goes, and where the bin ends."""
        for at in cutlass.range(thread, count, THREADS * BATCH, unroll=1):
            here = [at + THREADS * i for i in range(BATCH)]
            places = []
            for x in here:
                ok, number = Int32(x < count), Int64(first + x)
                places += [(unit_counts + number * 4, ok, 0), (row_bins + number * 8, ok, 0)]
                places.append((row_bins + number * 8 + 4, ok, 0))
            found = ptx.load_i32_batch(places)
            for i in cutlass.range_constexpr(BATCH):
                before, tile, choices = found[3 * i : 3 * i + 3]
                start = tile << tile_bits
                words = [start + before, start + choices]
                smem.store_i32x2_if(base + BINS_AT + here[i] * 8, *words, Int32(here[i] < count))

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

    @cute.jit
    def entry(
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
        ids_token: Int64,
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
        pair_blocks: Int32,
        chunk_bits: Int32,
        chunk_heads: Int32,
        tail_head: Int32,
        tail_bits: Int32,
        tail_heads: Int32,
        tile_bits: Int32,
        most_tiles: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            ids,
            page_table,
            cu_seqlens,
            seqused,
            state,
            counts,
            bins,
            rows,
            chunks,
            heads_out,
            entries,
            ids_token,
            ids_head,
            ids_slot,
            page_table_row,
            tokens,
            requests,
            heads,
            width,
            page_width,
            pages,
            page_bits,
            reach,
            blocks,
            causal,
            pair_blocks,
            chunk_bits,
            chunk_heads,
            tail_head,
            tail_bits,
            tail_heads,
            tile_bits,
            most_tiles,
        ).launch(
            grid=[1, heads, 1],
            block=[THREADS, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
        )


def programs():
    return [
        Program("invert_count", Count(), [Int64(16)] * 11 + [Int32(1)] * 11),
        Program("invert_scan", Scan(), [Int64(16)] * 6 + [Int32(1)] * 11),
        Program("invert_scatter", Scatter(), [Int64(16)] * 15 + [Int32(1)] * 18),
    ]
