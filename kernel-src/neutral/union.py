"""Union lists: which blocks a tile of 8 neighbouring query tokens attends to, and which tokens chose which block.

Problem
    A tile is up to 8 consecutive tokens of ONE request. For each tile and KV head: the union of the tokens' selections
    without what is no visible block of its token or has no page, ascending, each block once with the mask of its tokens.
    Sequence b has its tiles at slots cu[b] / 8 + b ..., so a slot finds its request by a search and no scan is needed;
    T / 8 + B + 1 slots are enough for any lengths, some stay empty. The tokens past the last request are request B.
    Sum over the groups of 4 tokens of their distinct blocks over the number of (token, block) pairs, times 4, is u(4):
    the work that a union kernel issues over the work that is asked for. `choice` sums it up per request and picks the
    formulation that its tokens take.

Output, S slots, H heads; item = head * S + slot
    tiles     [S, 8] int32       first token, tokens, end, length, request: token j sees the positions below
                                 min(max(end + j, 0), length), or below length if not causal
    counts    [H * S] int32      n | distinct << 10 | pairs << 20
    words     [H * S, C] int32   the n entries: block | tokens << 24
    pages     [H * S, C, 1 or 2] int32   page of the block, or of its two halves; -1: no page (of 64-token pages only).
              With `by_entry`, the number of the page table's entry instead, for K and V that lie in the table's order.
    choice    [B] int32          0 union tiles, 1 KV-stationary

Tile picture
    A warp = one slot and head, 8 warps a CTA. Lane = slot of the selection, 8 tokens in registers: one load latency for
    the ids. A window of 2,048 blocks is a byte a block (bit = token) in shared memory: atomic OR in, compaction by votes
    out, 128 blocks at a time. Windows that no id lies in cost one vote.

Order
    All results are integers and do not depend on any order.

Budget
    Read: T * H * K ids; written: 8 bytes an entry. Four dependent round trips (request, lengths, ids, pages): some 3 us, then
    the throughput of 64 warps an SM. 32k tokens and 4 heads: 16,384 warps, two waves.

Limits
    K <= 32; blocks < 2^16; T * H * K < 2^31. Ids, pages, lengths and offsets may hold anything.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import ptx, smem
from shared.program import Kernel, Program

TOKENS = 8  # a tile
WARPS = 8
WINDOW = 2048  # blocks
MOST_ENTRIES = TOKENS * 32
WARP_BYTES = WINDOW + 4 * MOST_ENTRIES
TILE_BYTES = 32  # of a record
CHOICE_THREADS = 512
CHOICE_LOADS = 8  # in flight a thread


@cute.jit
def find_request(cu_seqlens: Int64, slot: Int32, requests: Int32, lane: Int32):
    """Number of b in 1..B with cu[b] / 8 + b <= slot, by the whole warp."""
    low, high = Int32(0), requests
    while low < high:
        step = (high - low + 31) >> 5
        probe = low + (lane + 1) * step
        inside = probe <= high
        offset = ptx.load_i32_if(cu_seqlens + Int64(ptx.select(inside, probe, low)) * 4, Int32(inside), 0)
        hits = ptx.count_bits(ptx.ballot(Int32(inside & ((offset >> 3) + probe <= slot))))
        low = low + hits * step
        high = ptx.minimum_i32(high, low + step - 1)
    return low


class UnionLists(Kernel):
    """The lists of all tiles."""

    threads = 32 * WARPS
    dynamic_smem = WARPS * WARP_BYTES

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        tiles: Int64,
        counts: Int64,
        words: Int64,
        pages_out: Int64,
        ids_token: Int64,  # strides in bytes
        ids_head: Int64,
        ids_slot: Int64,
        page_table_row: Int64,
        tokens: Int32,
        requests: Int32,
        width: Int32,  # of the selection
        page_width: Int32,  # of the page table
        pages: Int32,
        page_bits: Int32,  # 7 or 6
        reach: Int32,  # tokens that the page table can hold
        causal: Int32,
        slots: Int32,
        capacity: Int32,  # entries of an item
        by_entry: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, head, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        masks = smem.base(16) + warp * WARP_BYTES
        listed = masks + WINDOW
        slot = group * WARPS + warp
        ptx.let_next_kernel_start()
        ptx.wait_for_previous_kernel()
        if slot < slots:
            # -- whose tokens: two round trips
            request = find_request(cu_seqlens, slot, requests, lane)
            exists = Int32(request < requests)
            own = ptx.minimum_i32(request, requests - 1)
            start, stop, used = ptx.load_i32_batch(
                [
                    (cu_seqlens + Int64(request) * 4, Int32(1), 0),
                    (cu_seqlens + Int64(own) * 4 + 4, exists, 0),
                    (seqused + Int64(own) * 4, exists, 0),
                ]
            )
            stop = ptx.minimum_i32(ptx.select(exists != 0, stop, tokens), tokens)
            used = ptx.clamp(used, Int32(0), reach)
            index = slot - ((start >> 3) + request)
            first = start + index * TOKENS
            sound = (start >= 0) & (index >= 0) & (first >= 0) & (first < stop)
            first = ptx.select(sound, first, Int32(0))
            count = ptx.select(sound, ptx.minimum_i32(stop - first, Int32(TOKENS)), Int32(0))
            end = ptx.select(causal != 0, used - stop + first + 1, used)
            if (lane == 0) & (head == 0):
                record = tiles + Int64(slot) * TILE_BYTES
                ptx.store_words(record, [first, count, end, used])
                ptx.store_words(record + 16, [request, Int32(0), Int32(0), Int32(0)])

            # -- the ids of all tokens; what is no visible block becomes -1
            row = ids + Int64(first) * ids_token + Int64(head) * ids_head + Int64(lane) * ids_slot
            block = ptx.load_i32_batch(
                [(row + j * ids_token, Int32((lane < width) & (j < count)), -1) for j in range(TOKENS)]
            )
            for j in cutlass.range_constexpr(TOKENS):
                visible = ptx.select(causal != 0, ptx.clamp(end + j, Int32(0), used), used)
                block[j] = ptx.select((block[j] >= 0) & (block[j] < ((visible + 127) >> 7)), block[j], Int32(-1))

            # -- union, ascending
            total = self.unite(masks, listed, block, used, lane)
            ptx.warp_barrier()

            # -- pages; blocks without any are dropped
            item = Int64(head) * Int64(slots) + Int64(slot)
            words_row = words + item * Int64(capacity) * 4
            wide = 7 - page_bits
            pages_row = pages_out + item * Int64(capacity) * Int64(4 << wide)
            table_row = page_table + Int64(own) * page_table_row
            kept, distinct, pairs = Int32(0), Int32(0), Int32(0)
            for i in cutlass.range(0, total, 32, unroll=1):
                at = i + lane
                valid = at < total
                word = smem.load_i32(listed + ptx.select(valid, at, Int32(0)) * 4)
                entry = (word & 0xFFFFFF) << wide
                second = entry + wide
                page_a, page_b = ptx.load_i32_batch(
                    [
                        (table_row + Int64(entry) * 4, Int32(valid), -1),
                        (table_row + Int64(second) * 4, Int32(valid & (second < page_width)), -1),
                    ]
                )
                page_a = ptx.select(page_a < pages, ptx.maximum_i32(page_a, Int32(-1)), Int32(-1))
                page_b = ptx.select(page_b < pages, ptx.maximum_i32(page_b, Int32(-1)), Int32(-1))
                good = Int32(valid & ((page_a & page_b) != -1))
                first_entry = own * page_width
                page_a = ptx.select((by_entry != 0) & (page_a >= 0), first_entry + entry, page_a)
                page_b = ptx.select((by_entry != 0) & (page_b >= 0), first_entry + second, page_b)
                votes = ptx.ballot(good)
                position = kept + ptx.count_bits(votes & ptx.lanes_below())
                if good != 0:
                    ptx.store_words(words_row + Int64(position) * 4, [word])
                    if wide == 0:
                        ptx.store_words(pages_row + Int64(position) * 4, [page_a])
                    else:
                        ptx.store_words(pages_row + Int64(position) * 8, [page_a, page_b])
                    chosen = (word >> 24) & 255
                    distinct = distinct + Int32((chosen & 15) != 0) + Int32((chosen >> 4) != 0)
                    pairs = pairs + ptx.count_bits(chosen)
                kept = kept + ptx.count_bits(votes)
            distinct, pairs = ptx.warp_sum(distinct), ptx.warp_sum(pairs)
            if lane == 0:
                ptx.store_words(counts + item * 4, [kept | (distinct << 10) | (pairs << 20)])

    @cute.jit
    def unite(self, masks: Int32, listed: Int32, block: list, used: Int32, lane: Int32):
        """Lists the blocks that some token chose; `block`: each token's in the lane's slot. Returns how many."""
        total = Int32(0)
        for first_block in cutlass.range(0, (used + 127) >> 7, WINDOW, unroll=1):
            window = first_block >> 11
            mine = [(block[j] >> 11) == window for j in range(TOKENS)]
            some = mine[0]
            for j in cutlass.range_constexpr(1, TOKENS):
                some = some | mine[j]
            if ptx.ballot(Int32(some)) != 0:
                for i in cutlass.range_constexpr(WINDOW // 512):
                    smem.store_i32x4(masks + i * 512 + lane * 16, [Int32(0)] * 4)
                ptx.warp_barrier()
                for j in cutlass.range_constexpr(TOKENS):
                    inside = block[j] & (WINDOW - 1)
                    bit = Int32(1 << j) << ((inside & 3) * 8)
                    smem.or_i32_if(masks + (inside & -4), bit, Int32(mine[j]))
                ptx.warp_barrier()
                total = self.compact(masks, listed, first_block, total, lane)
        return total

    @cute.jit
    def compact(self, masks: Int32, listed: Int32, first_block: Int32, total: Int32, lane: Int32):
        """Appends the window's blocks to the list; returns its new length."""
        lower = ptx.lanes_below()
        for i in cutlass.range(WINDOW // 128, unroll=1):
            word = smem.load_i32(masks + i * 128 + lane * 4)
            if ptx.ballot(Int32(word != 0)) != 0:
                chosen = [(word >> (8 * k)) & 255 for k in range(4)]
                votes = [ptx.ballot(Int32(c != 0)) for c in chosen]
                position = total
                for k in cutlass.range_constexpr(4):
                    position = position + ptx.count_bits(votes[k] & lower)
                    total = total + ptx.count_bits(votes[k])
                for k in cutlass.range_constexpr(4):
                    present = Int32(chosen[k] != 0)
                    entry = (first_block + i * 128 + lane * 4 + k) | (chosen[k] << 24)
                    smem.store_i32_if(listed + position * 4, entry, present)
                    position = position + present
        return total


class UnionChoice(Kernel):
    """The formulation of each request, a CTA a request."""

    threads = CHOICE_THREADS
    dynamic_smem = 256

    @cute.kernel
    def kernel(
        self,
        cu_seqlens: Int64,
        counts: Int64,
        choice: Int64,
        requests: Int32,
        slots: Int32,
        heads: Int32,
        threshold: Float32,  # u(4) from which KV-stationary is taken
    ):
        thread, _, _ = cute.arch.thread_idx()
        request, _, _ = cute.arch.block_idx()
        base = smem.base(16)
        lane, warp = thread & 31, thread >> 5
        ptx.let_next_kernel_start()
        ptx.wait_for_previous_kernel()
        start = ptx.load_i32(cu_seqlens + Int64(request) * 4)
        stop = ptx.load_i32(cu_seqlens + Int64(request) * 4 + 4)
        low = ptx.clamp((start >> 3) + request, Int32(0), slots)
        high = ptx.clamp((stop >> 3) + request + 1, low, slots)
        distinct, pairs = Int32(0), Int32(0)
        for head in cutlass.range(heads, unroll=1):
            row = counts + Int64(head) * Int64(slots) * 4
            for slot in cutlass.range(low + thread, high, CHOICE_THREADS * CHOICE_LOADS, unroll=1):
                places = [slot + i * CHOICE_THREADS for i in range(CHOICE_LOADS)]
                found = ptx.load_i32_batch([(row + Int64(p) * 4, Int32(p < high), 0) for p in places])
                for word in found:
                    distinct = distinct + ((word >> 10) & 1023)
                    pairs = pairs + ((word >> 20) & 1023)
        distinct, pairs = ptx.warp_sum(distinct), ptx.warp_sum(pairs)
        if lane == 0:
            smem.store_i32x2(base + warp * 8, distinct, pairs)
        ptx.barrier()
        if warp == 0:
            distinct, pairs = Int32(0), Int32(0)
            if lane < CHOICE_THREADS // 32:
                distinct, pairs = smem.load_i32x2(base + lane * 8)
            distinct, pairs = ptx.warp_sum(distinct), ptx.warp_sum(pairs)
            if lane == 0:
                dense = Float32(distinct) * Float32(4.0) >= threshold * Float32(pairs)
                ptx.store_words(choice + Int64(request) * 4, [Int32(dense & (pairs > 0))])


def programs():
    return [Program("union_lists", UnionLists()), Program("union_choice", UnionChoice())]
