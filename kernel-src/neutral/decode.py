"""Decode: sparse attention of few query tokens a request over a paged KV cache. Op: sparse_attention.

Problem
    Row = (token, KV head): up to 16 query heads that share a KV head, one selection of K <= 32 blocks, a visible end.
        out = softmax(q K^T * softmax_scale * k_scale) V * v_scale,   lse = ln sum exp(logits)
    over the visible tokens of the selected blocks of 128. Each KV byte is used once: memory-bound, 16 (16-bit) or 32
    (fp8) FLOP a byte at 16 heads.

Tile picture (shared/head_tile.py)
    The 16 query heads are the rows of mma.sync m16n8k16. A *unit* is 32 keys, a quarter of a block: 8 KiB (16-bit) or
    4 KiB (fp8) of K and as much of V. A row of 16 blocks has 64 units = 16 (list position) x 4 (quarter).

Roles
    `splits` CTAs (a cluster) a row; 4 warps a CTA, 8 with splits = 2. A warp owns its units from the load to the
    product: it waits only for its own ring, so the main loop has no CTA barrier. Every warp reads the selection itself
    (32 lanes = 32 slots): no CTA waits for one warp's page look-ups.
    The ring has two slabs, K and V of a unit; each is asked for again as soon as the warp has read it. Lane 0 asks for
    boxes of 32 tokens by tensor map (shared/tma.py), and an mbarrier a slab says that they have come. With splits = 4
    all lanes copy by address (cp.async): any stride, also those that no tensor map holds.

Order of the sums (why the bits are the same whatever the batch, the grid and `splits` are)
    The row's blocks are listed in ascending order. With c = ceil(blocks / 4), position = c * group + link, link < c,
    a unit has (group, link, quarter), and
        unit (MMA from zero) -> chain over links -> sum over the 4 groups -> sum over the 4 quarters, all ascending.
    Factors between partial sums are powers of two (shared/softmax.py), hence exact. The levels fall on
        splits    a warp computes              the CTA's warps are    the cluster's CTAs are
        1         chains of all groups         quarters               -
        2         one chain                    2 (quarter) x groups   pairs of quarters
        4         one chain                    groups                 quarters
        16        one unit (c <= 4)            links of a chain       4 quarter + group
    With splits = 1 a warp keeps the sum over its groups in shared memory while a chain is in registers. With splits = 2
    the CTAs exchange their two quarters as they are: ((q0 + q1) + q2) + q3 needs them one by one.

Shared memory (bytes a CTA)
    regions   a warp's ring, 16 KiB (16-bit) or 8 KiB (fp8); at the end its partial, m and l (9.3 KiB)
    outer     splits = 1: 4 x 8 KiB, the sums over groups
    received  splits > 1: the cluster's sums for the 16 / splits heads that this CTA finishes, and an mbarrier for them
              (splits = 2: the two quarters of the other CTA)
    full      the rings' mbarriers
    lists     4 or 8 warps x 32 x 16

Budget (H200: 4.3 TB/s, 132 SMs, 1.755 GHz)
    16-bit: a unit's 16 KiB take an SM 882 cycles, fp8: 8 KiB, 441. A unit costs a warp 64 MMA and some 400 (16-bit)
    or 500 (fp8) other instructions, and alone it takes 1,400 cycles: with 8 warps an SM a third of the issue slots are
    used, and what counts is latency. 4.3 TB/s x 1.5 us / 132 SMs need 49 KB under way; 8 rings have 128 (16-bit) or 64
    KiB. Longer rings are no faster, for two and four CTAs a row slower. With one unit a warp (splits = 16) the time is
    latency: ids, pages, KV, one unit, one exchange in the cluster.

Limits
    head_dim 128, block 128, pages of 64 or 128 tokens, 1..16 query heads a KV head; K <= 32 (<= 16 with splits = 16).
    Base addresses and byte strides of q, K, V and out are multiples of 16; offsets have 64 bits. |logit| below
    2^27. Of K and V only tokens of selected blocks are read; by tensor map those behind the visible end come along, up
    to a multiple of 32, and whatever they hold is masked. Ids, pages, lengths and offsets may hold anything.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from shared import paging, ptx, smem, softmax, tma
from shared.head_tile import DIM, KEYS, ROWS, HeadTile
from shared.program import Kernel, Program

# To each CTA of a cluster: 16 / splits rows of 128 + 4 + 1 floats from `splits` CTAs, or of 2 quarters from one.
SENT_BYTES = 16 * (DIM * 4 + 20)
LANE_SUMS = ROWS * DIM * 4  # a warp's 16 x 128 floats, each lane's own 64


class Decode(Kernel, HeadTile):
    """One variant: KV dtype, CTAs a row, CTAs an SM."""

    def __init__(self, kv_dtype, splits, ctas_per_sm):
        super().__init__(kv_dtype)
        self.splits, self.cluster, self.ctas_per_sm = splits, splits, ctas_per_sm
        self.by_map = splits != 4  # K and V come by tensor map
        self.warps = 8 if splits == 2 else 4
        self.threads = 32 * self.warps
        self.rows_per_rank = ROWS // splits
        # Shared memory map. A warp's region is its ring, then its partial with the numbers behind it; the swizzle of
        # the slabs flips address bits, so it starts at a multiple of 1 KiB.
        self.region = -(-max(self.slab * 2, self.sums_bytes) // 1024) * 1024
        self.outer_at = self.warps * self.region
        self.received_at = self.outer_at + (self.warps * LANE_SUMS if splits == 1 else 0)
        self.rank_bytes = self.rows_per_rank * (DIM * 4 + 32)  # what one CTA sends to one other: rows, then l[4] and m
        self.mbarrier_at = self.received_at + (splits * self.rank_bytes if splits > 1 else 0)
        self.full_at = self.mbarrier_at + 16  # the rings' mbarriers, one a slab
        self.lists_at = self.full_at + self.warps * 16
        self.dynamic_smem = self.lists_at + self.warps * 32 * paging.ENTRY_BYTES

    # ---- what a warp works on

    def quarter_of(self, warp, rank):
        return {1: warp, 2: rank * 2 + (warp >> 2), 4: rank, 16: rank >> 2}[self.splits]

    def share_of(self, warp, rank, listed):
        """(first list position, number of positions, links of a chain) of a warp."""
        links = (listed + 3) >> 2
        if self.splits == 1:
            return Int32(0), listed, links
        if self.splits == 16:
            first = (rank & 3) * links + warp
            return first, Int32((warp < links) & (first < listed)), links
        first = (warp & 3) * links
        return first, ptx.maximum_i32(ptx.minimum_i32(listed - first, links), Int32(0)), links

    def unit_of(self, entry, quarter, end):
        """(page, visible keys) of a listed block's quarter."""
        block = smem.load_i32(entry)
        page = smem.load_i32(entry + 4 + 4 * (quarter >> 1))
        visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS
        return page, ptx.select(page < 0, Int32(0), visible)

    # ---- sums over warps and over the cluster

    def place_at(self, base, rank, head):
        """Where the sum from `rank` goes in the CTA that finishes a head: its 128 floats, l[4] and m, the mbarrier."""
        row, finisher = head % self.rows_per_rank, head // self.rows_per_rank
        there = smem.of_rank(base + self.received_at + rank * self.rank_bytes, finisher)
        numbers = there + self.rows_per_rank * (DIM * 4) + row * 32
        return there + row * (DIM * 4), numbers, smem.of_rank(base + self.mbarrier_at, finisher)

    def fold_cluster(self, base, row, dims):
        """Sum over the ranks of a quarter, then over the quarters: (m, l[4], o[rows_per_rank])."""
        areas = [base + self.received_at + rank * self.rank_bytes for rank in range(self.splits)]
        at = self.rows_per_rank * (DIM * 4) + row * 32
        m, factors = softmax.weights([smem.load_f32(a + at + 16) for a in areas])
        width = self.rows_per_rank
        load = smem.load_f32x4 if width == 4 else lambda a: [smem.load_f32(a)]
        values = [smem.load_f32x4(a + at) + load(a + row * (DIM * 4) + dims * 4) for a in areas]
        groups = self.splits // 4
        sums = []
        for i in range(4 + width):
            terms = []
            for quarter in range(4):
                ranks = range(quarter * groups, (quarter + 1) * groups)
                terms.append(softmax.weighted_sum([values[r][i] for r in ranks], [factors[r] for r in ranks]))
            sums.append(((terms[0] + terms[1]) + terms[2]) + terms[3])
        return m, sums[:4], sums[4:]

    def fold_quarter(self, base, which, head, thread):
        """splits = 2: the sum over the groups of the CTA's first or second quarter, for 4 dims of a head."""
        places = [base + (4 * which + group) * self.region for group in range(4)]
        return self.fold(places, head, thread % 8, first=thread % 32 // 8, count=1)

    def exchange_pair(self, base, thread, rank):
        """splits = 2: this CTA's two quarters of the heads that the other finishes go there, its own stay in
        registers until the other's two have come: (m, l[4], o[4])."""
        row, part, other = thread // 32, thread % 32, 1 - rank
        mbarrier = smem.of_rank(base + self.mbarrier_at, other)
        areas = [base + self.received_at + which * self.rank_bytes for which in range(2)]
        at_values, at_numbers = row * (DIM * 4) + part * 16, self.rows_per_rank * (DIM * 4) + row * 32
        for which in range(2):
            m, l, o = self.fold_quarter(base, which, other * self.rows_per_rank + row, thread)
            there = smem.of_rank(areas[which], other)
            smem.send_f32x4(there + at_values, o, mbarrier)
            self.send_numbers(there + at_numbers, l, m, mbarrier, part)
        own = [self.fold_quarter(base, which, rank * self.rows_per_rank + row, thread) for which in range(2)]
        own = [[m, *l, *o] for m, l, o in own]
        smem.mbarrier_wait(base + self.mbarrier_at, 0, "cluster")
        came = []
        for a in areas:
            numbers = smem.load_f32x4(a + at_numbers)
            came.append([smem.load_f32(a + at_numbers + 16), *numbers, *smem.load_f32x4(a + at_values)])
        low = rank == 0
        quarters = [[ptx.select(low, x, y) for x, y in zip(own[i], came[i])] for i in range(2)]
        quarters += [[ptx.select(low, y, x) for x, y in zip(own[i], came[i])] for i in range(2)]
        m, factors = softmax.weights([x[0] for x in quarters])
        sums = [softmax.weighted_sum([x[i] for x in quarters], factors) for i in range(1, 9)]
        return m, sums[:4], sums[4:]

    @cute.jit
    def expect_sums(self, base: Int32, thread: Int32):
        """Others' bytes may have come before: the phase waits for this arrival."""
        if thread == 0:
            smem.mbarrier_expect(base + self.mbarrier_at, SENT_BYTES)

    @cute.jit
    def send_numbers(self, at: Int32, l, m: Float32, mbarrier: Int32, part: Int32):
        if part == 0:
            smem.send_f32x4(at, l, mbarrier)
            smem.send_f32(at + 16, m, mbarrier)

    def place_of(self, thread, rank):
        """(head, first dim) that a thread finishes."""
        if self.splits == 1:
            return thread // 8, (thread % 8) * 4
        threads = self.threads // self.rows_per_rank  # a head
        return rank * self.rows_per_rank + thread // threads, (thread % threads) * (DIM // threads)

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        q: Int64,
        k: Int64,
        v: Int64,
        ids: Int64,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        out: Int64,
        lse: Int64,  # 0: not wanted
        k_scale: Int64,  # 0: one
        v_scale: Int64,
        q_token: Int64,  # all strides in bytes
        q_head: Int64,
        k_page: Int64,
        k_head: Int64,
        k_token: Int64,
        v_page: Int64,
        v_head: Int64,
        v_token: Int64,
        ids_token: Int64,
        ids_head: Int64,
        ids_slot: Int64,
        page_table_row: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        tokens: Int32,
        requests: Int32,
        width: Int32,  # of the selection
        page_width: Int32,  # of the page table
        pages: Int32,
        page_bits: Int32,  # 7 or 6
        reach: Int32,  # tokens that the page table can hold
        group: Int32,  # query heads a KV head
        causal: Int32,
        bf16_query: Int32,
        softmax_scale: Float32,
        requests_per_token: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        position, kv_head, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        rank, token = position % self.splits, position // self.splits
        base = smem.base()
        head64, token64 = Int64(kv_head), Int64(token)

        # -- who am I: nothing here depends on earlier kernels
        ptx.let_next_kernel_start()
        guess = paging.guess_request(token, requests, requests_per_token)
        row_ids = ids + token64 * ids_token + head64 * ids_head
        row_q = q + token64 * q_token + Int64(kv_head * group) * q_head
        bars = base + self.full_at + warp * 16
        maps = (Int64(0), Int64(0))
        if cutlass.const_expr(self.by_map):
            maps = (tma.map_address(k_map), tma.map_address(v_map))
            if lane == 0:
                for i in cutlass.range_constexpr(2):
                    smem.mbarrier_init(bars + i * 8, 1)
                    tma.prefetch_map(maps[i])
            ptx.warp_barrier()
        if (warp == 0) & (rank == 0):
            row_pages = page_table + Int64(guess) * page_table_row
            paging.warm_l2(row_ids, ids_slot, width, row_pages, page_width, row_q, q_head, group, lane)
        if cutlass.const_expr(self.splits > 1):
            if thread == 0:
                smem.mbarrier_init(base + self.mbarrier_at, 1)
            ptx.warp_barrier()
            smem.cluster_arrive_relaxed()
        quarter = self.quarter_of(warp, rank)
        first_key = (quarter * KEYS) & ((1 << page_bits) - 1)
        chunk = Int64((lane % self.lanes_per_key) * 16)
        lane_key = Int64(first_key + lane // self.lanes_per_key)
        k_lane = k + head64 * k_head + lane_key * k_token + chunk
        v_lane = v + head64 * v_head + lane_key * v_token + chunk
        region = base + warp * self.region
        lists = base + self.lists_at + warp * (32 * paging.ENTRY_BYTES)
        ptx.wait_for_previous_kernel()

        # -- which blocks: two dependent round trips
        block_id = ptx.load_i32_if(row_ids + Int64(lane) * ids_slot, Int32(lane < width), -1)
        request, end = paging.find_row(cu_seqlens, seqused, token, lane, requests, guess, reach, causal)
        listed = paging.list_blocks(
            lists, page_table + Int64(request) * page_table_row, page_width, pages, page_bits, end, lane, block_id
        )
        first, count, links = self.share_of(warp, rank, listed)
        entries = lists + first * paging.ENTRY_BYTES

        place = (region, bars, entries, count, quarter, end, lane)
        if cutlass.const_expr(self.by_map):
            kv = (*maps, first_key, kv_head)
        else:
            kv = (k_lane, k_page, k_token, v_lane, v_page, v_token)
        unit = self.unit_of(entries, quarter, end)
        for i in cutlass.range_constexpr(2):
            self.ask(i, Int32(count > 0), unit, place, kv)

        # -- the query, while the keys are under way
        Q, O, state = self.registers()
        logit_scale = softmax_scale * ptx.load_f32_or_one(k_scale + head64 * k_scale_head)
        scale_v = ptx.load_f32_or_one(v_scale + head64 * v_scale_head)
        scale = self.load_query(row_q, q_head, group, lane, Q, logit_scale, bf16_query)
        outer_at = base + self.outer_at + warp * LANE_SUMS + lane * 16
        self.walk(place, kv, links, Q, scale, state, O, outer_at)

        # -- the sum of the warps, then of the cluster
        self.store_sums(region, lane, state, O)
        ptx.barrier()
        head, dim = self.place_of(thread, rank)
        m, l, o = self.sum_up(base, thread, rank, dim)
        if head < group:
            query_head = Int64(kv_head * group + head)
            at = out + token64 * out_token + query_head * out_head + Int64(dim) * 2
            total = self.write_row(at, l, o, scale_v, bf16_query)
            if (dim == 0) & (lse != 0):
                ptx.store_f32(lse + token64 * lse_token + query_head * lse_head, softmax.natural_lse(m, total))

    @cute.jit
    def sum_up(self, base: Int32, thread: Int32, rank: Int32, dim: Int32):
        """(m, l, o) of this thread's head and columns, over the warps' sums and the cluster's."""
        if cutlass.const_expr(self.splits == 2):
            smem.cluster_wait()  # the other CTA has begun, its mbarrier exists
            self.expect_sums(base, thread)
            m, l, o = self.exchange_pair(base, thread, rank)
        else:
            m, l, o = self.fold([base + w * self.region for w in range(4)], thread // 8, thread % 8)
        if cutlass.const_expr(self.splits > 2):
            smem.cluster_wait()  # every CTA of the cluster has begun, its mbarrier exists
            self.expect_sums(base, thread)
            values_there, numbers_there, mbarrier_there = self.place_at(base, rank, thread // 8)
            for i in cutlass.range_constexpr(4):
                smem.send_f32x4(values_there + thread % 8 * 16 + 128 * i, o[4 * i : 4 * i + 4], mbarrier_there)
            self.send_numbers(numbers_there, l, m, mbarrier_there, thread % 8)
            smem.mbarrier_wait(base + self.mbarrier_at, 0, "cluster")
            m, l, o = self.fold_cluster(base, thread // (self.threads // self.rows_per_rank), dim)
        return m, l, o

    # ---- the ring: a slab for K of a unit and one for V

    @cute.jit
    def ask(self, i: int, exists: Int32, unit, place, kv):
        """Starts the copy of K (i = 0) or V (i = 1) of a unit into its slab, if there is such a unit."""
        region, bars, _, _, _, _, lane = place
        page, visible = unit
        slab = region + i * self.slab
        if cutlass.const_expr(self.by_map):
            k_map, v_map, first_key, kv_head = kv
            if (exists != 0) & (lane == 0):
                page = ptx.select(visible > 0, page, Int32(-1))  # outside of the tensor: zeros
                at = [Int32(0), first_key] + ([] if self.fp8 else [Int32(0)]) + [kv_head, page]
                smem.mbarrier_expect(bars + i * 8, self.slab)
                tma.tma_load(slab, [k_map, v_map][i], at, bars + i * 8)
        else:
            if exists != 0:
                source, page_bytes, token = kv[3 * i : 3 * i + 3]
                self.load_unit(slab, source + Int64(page) * page_bytes, token, visible, lane)
            smem.copies_commit()

    def await_slab(self, i, bars, parity):
        if self.by_map:
            smem.mbarrier_wait(bars + i * 8, parity)
        else:
            smem.copies_wait(1)  # the other slab may be under way
            ptx.warp_barrier()

    @cute.jit
    def walk(self, place, kv, links: Int32, Q: cute.Tensor, scale, state: cute.Tensor, O: cute.Tensor, outer_at: Int32):
        """The warp's units, one after the other; state and O are their sums in the end, and the ring is free."""
        region, bars, entries, count, quarter, end, lane = place
        S = cute.make_rmem_tensor(cute.make_layout(16), Float32)
        outer = cute.make_rmem_tensor(cute.make_layout(4), Float32)  # as state, of the sums in shared memory
        self.clear(state, O)
        link = Int32(0)
        refilled = self.splits < 16  # with 16 CTAs a row a warp has one unit
        keys, values = region, region + self.slab
        visible = self.unit_of(entries, quarter, end)[1]
        for u in cutlass.range(count, unroll=1):
            # The next unit's place is read before the wait: asking for the unit then costs no latency.
            more = Int32(u + 1 < count)
            following = self.unit_of(entries + (u + more) * paging.ENTRY_BYTES, quarter, end)
            self.await_slab(0, bars, u & 1)
            c = self.scores(keys, lane, Q)
            for n in cutlass.range_constexpr(16):
                S[n] = c[n // 4][n % 4]
            if cutlass.const_expr(refilled):
                ptx.warp_barrier()  # all lanes have read the slab
                self.ask(0, more, following, place, kv)
            if visible < KEYS:
                self.mask(S, lane & 3, visible)
            P, m, l = self.probabilities(S, scale)
            factor = self.raise_reference(state, O, m[0], m[1], l[0], l[1], not refilled)
            self.await_slab(1, bars, u & 1)
            if cutlass.const_expr(self.by_map):
                if visible < KEYS:
                    self.clear_keys(values, visible, lane)
                    tma.fence_async()
                    ptx.warp_barrier()
            self.add_values(values, lane, P, factor, O)
            if cutlass.const_expr(refilled):
                ptx.warp_barrier()
                self.ask(1, more, following, place, kv)
            visible = following[1]
            if cutlass.const_expr(self.splits == 1):
                link = link + 1
                if (link == links) | (u + 1 == count):
                    if u < links:
                        self.keep_chain(outer, outer_at, state, O)
                    else:
                        self.add_chain(outer, outer_at, state, O)
                    link = Int32(0)
        if cutlass.const_expr(self.splits == 1):
            if count > 0:
                self.take_outer(outer, outer_at, state, O)
        if cutlass.const_expr(not self.by_map):
            smem.copies_wait(0)
        ptx.warp_barrier()


# (CTAs a row, CTAs an SM), from sweeps on an H200: docs/decode.md. A register cap costs more than a CTA more gives.
GEOMETRIES = [(1, 2), (2, 1), (4, 2), (16, 2)]
VARIANTS = [(dtype, *g) for dtype in ("bf16", "f16", "e4m3", "e5m2") for g in GEOMETRIES]


def programs():
    return [Program(f"decode_{v[0]}_s{v[1]}", Decode(*v)) for v in VARIANTS]
