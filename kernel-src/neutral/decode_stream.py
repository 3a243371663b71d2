"""Decode, one CTA for several rows: as decode.py with one CTA a row, for batches of more rows than CTAs fit at once."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from neutral.decode import LANE_SUMS, Decode
from shared import paging, ptx, smem, softmax, tma
from shared.head_tile import KEYS
from shared.program import Program

META = 128  # where the request's numbers are staged, behind the ids; then the pages of both halves
PAGES = (160, 288)
STAGING = 416
NUMBERS = 320  # m [16], l [16][4] of a warp


class DecodeStream(Decode):
    def __init__(self, kv_dtype, slabs, ctas_per_sm, joint=None):
        super().__init__(kv_dtype, 1, slabs, ctas_per_sm, joint=joint)
        self.depth = slabs // 2  # units
        self.staging_at = self.lists_at + self.warps * 2 * 32 * paging.ENTRY_BYTES
        self.numbers_at = self.staging_at + self.warps * STAGING
        self.dynamic_smem = self.numbers_at + self.warps * NUMBERS

    # ---- the next row's list, in three steps with a unit of work between them

    @cute.jit
    def stage_ids(self, staging: Int32, row_ids: Int64, ids_slot: Int64, width: Int32, lane: Int32, meta, guess: Int32):
        cu_seqlens, seqused = meta
        if lane < width:
            smem.copy_async_4(staging + lane * 4, row_ids + Int64(lane) * ids_slot, Int32(4))
        if lane < 3:
            base = ptx.select_value(lane == 2, seqused - 8, cu_seqlens)
            smem.copy_async_4(staging + META + lane * 4, base + Int64(guess + lane) * 4, Int32(4))
        smem.copies_commit()

    @cute.jit
    def stage_pages(self, staging: Int32, page_row: Int64, page_width: Int32, block_id: Int32, end: Int32, lane: Int32, page_bits: Int32):
        inside, entry, second = paging.block_entries(block_id, end, page_bits)
        if inside:
            smem.copy_async_4(staging + PAGES[0] + lane * 4, page_row + Int64(entry) * 4, Int32(4))
        if inside & (second < page_width):
            smem.copy_async_4(staging + PAGES[1] + lane * 4, page_row + Int64(second) * 4, Int32(4))
        smem.copies_commit()

    @cute.jit
    def take_pages(self, staging: Int32, table: Int32, page_width: Int32, pages: Int32, block_id: Int32, end: Int32, lane: Int32, page_bits: Int32):
        inside, _, second = paging.block_entries(block_id, end, page_bits)
        page_a, page_b = Int32(-1), Int32(-1)
        if inside:
            page_a = smem.load_i32(staging + PAGES[0] + lane * 4)
        if inside & (second < page_width):
            page_b = smem.load_i32(staging + PAGES[1] + lane * 4)
        return paging.rank_blocks(table, pages, lane, block_id, inside, page_a, page_b)

    def staged_id(self, staging, lane, width):
        return ptx.select(lane < width, smem.load_i32(staging + lane * 4), Int32(-1))

    def await_staged(self):
        smem.copies_wait(0)
        ptx.warp_barrier()

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
        lse: Int64,
        k_scale: Int64,
        v_scale: Int64,
        q_token: Int64,
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
        width: Int32,
        page_width: Int32,
        pages: Int32,
        page_bits: Int32,
        reach: Int32,
        group: Int32,
        causal: Int32,
        bf16_query: Int32,
        softmax_scale: Float32,
        requests_per_token: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        token, kv_head, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        base = smem.base()
        head64 = Int64(kv_head)

        # -- who am I: nothing here depends on earlier kernels
        ptx.let_next_kernel_start()
        guess = paging.guess_request(token, requests, requests_per_token)
        head_ids, head_q = ids + head64 * ids_head, q + Int64(kv_head * group) * q_head
        bars = base + self.full_at + warp * (self.slabs * 8)
        maps = (tma.map_address(k_map), tma.map_address(v_map))
        if lane == 0:
            for i in cutlass.range_constexpr(self.slabs):
                smem.mbarrier_init(bars + i * 8, 1)
            for i in cutlass.range_constexpr(2):
                tma.prefetch_map(maps[i])
        ptx.warp_barrier()
        if warp == 0:
            row_pages = page_table + Int64(guess) * page_table_row
            row_ids = head_ids + Int64(token) * ids_token
            row_q = head_q + Int64(token) * q_token
            paging.warm_l2(row_ids, ids_slot, width, row_pages, page_width, row_q, q_head, group, lane)
        quarter = self.quarter_of(warp, 0)
        region = base + warp * self.region
        lists = base + self.lists_at + warp * (2 * 32 * paging.ENTRY_BYTES)
        staging = base + self.staging_at + warp * STAGING
        kv = (*maps, (quarter * KEYS) & ((1 << page_bits) - 1), kv_head)
        ptx.wait_for_previous_kernel()

        # -- the first row's blocks: two dependent round trips
        block_id = ptx.load_i32_if(
            head_ids + Int64(token) * ids_token + Int64(lane) * ids_slot, Int32(lane < width), -1
        )
        request, end = paging.find_row(cu_seqlens, seqused, token, lane, requests, guess, reach, causal)
        count = paging.list_blocks(
            lists, page_table + Int64(request) * page_table_row, page_width, pages, page_bits, end, lane, block_id
        )
        self.fill_from(Int32(0), (region, bars, lists, count, quarter, end, lane), kv)

        Q, O, state = self.registers()
        S = cute.make_rmem_tensor(cute.make_layout(16), Float32)
        outer = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        logit_scale = softmax_scale * ptx.load_f32_or_one(k_scale + head64 * k_scale_head)
        scale_v = ptx.load_f32_or_one(v_scale + head64 * v_scale_head)
        outer_at = base + self.outer_at + warp * LANE_SUMS + lane * 16
        slot, parity, entries = Int32(0), Int32(0), lists
        self.clear(state, O)

        for turn in cutlass.range((tokens - token + step - 1) // step, unroll=1):
            links = (count + 3) >> 2
            token64 = Int64(token)
            scale = self.load_query(head_q + token64 * q_token, q_head, group, lane, Q, logit_scale, bf16_query)
            # The next row: its blocks are listed while this one is computed, and asked for behind it.
            following = token + step
            more = following < tokens
            early = more & (count >= self.depth + 2)
            next_entries = lists + (lists + 32 * paging.ENTRY_BYTES - entries)
            next_row_ids = head_ids + Int64(following) * ids_token
            next_guess = paging.guess_request(following, requests, requests_per_token)
            next_request, next_end, next_count = Int32(0), Int32(0), Int32(0)
            link = Int32(0)
            for u in cutlass.range(count + 3, unroll=1):
                if more:
                    if u == 0:
                        self.stage_ids(staging, next_row_ids, ids_slot, width, lane, (cu_seqlens, seqused), next_guess)
                    if u == 1:
                        self.await_staged()
                        numbers = [smem.load_i32(staging + META + 4 * i) for i in range(3)]
                        next_request, next_end = paging.check_row(
                            cu_seqlens, seqused, following, lane, requests, next_guess, reach, causal, *numbers
                        )
                        next_id = self.staged_id(staging, lane, width)
                        next_pages = page_table + Int64(next_request) * page_table_row
                        self.stage_pages(staging, next_pages, page_width, next_id, next_end, lane, page_bits)
                    if u == 2:
                        self.await_staged()
                        next_id = self.staged_id(staging, lane, width)
                        next_count = self.take_pages(
                            staging, next_entries, page_width, pages, next_id, next_end, lane, page_bits
                        )
                if u < count:
                    _, visible = self.unit_of(entries + u * paging.ENTRY_BYTES, quarter, end)
                    self.await_slab(bars, slot, parity)
                    c = self.scores(region + slot * self.slab, lane, Q)
                    for n in cutlass.range_constexpr(16):
                        S[n] = c[n // 4][n % 4]
                    ahead = u + self.depth
                    here = ahead < count
                    next_unit = ahead - count
                    entry = ptx.select(here, entries + ahead * 16, next_entries + next_unit * 16)
                    its_end = ptx.select(here, end, next_end)
                    exists = here | (early & (next_unit < next_count))
                    place = (region, bars, entries, count, quarter, end, lane)
                    if cutlass.const_expr(not self.joint):
                        ptx.warp_barrier()
                        self.ask_box(0, entry, exists, its_end, slot, place, kv)
                    v_slot, v_parity = self.after(slot, parity)
                    values = region + v_slot * self.slab
                    loaded = None
                    if cutlass.const_expr(self.joint):
                        if visible < KEYS:
                            self.hide(values, visible, lane)
                        loaded = self.load_values(values, lane, 0)
                    if visible < KEYS:
                        self.mask(S, lane & 3, visible)
                    P, m, l = self.probabilities(S, scale)
                    factor = self.raise_reference(state, O, m[0], m[1], l[0], l[1])
                    if cutlass.const_expr(not self.joint):
                        self.await_slab(bars, v_slot, v_parity)
                        if visible < KEYS:
                            self.hide(values, visible, lane)
                    self.add_values(values, lane, P, factor, O, loaded)
                    ptx.warp_barrier()
                    if cutlass.const_expr(self.joint):
                        self.ask_box(0, entry, exists, its_end, slot, place, kv)
                    self.ask_box(1, entry, exists, its_end, v_slot, place, kv)
                    slot, parity = self.after(v_slot, v_parity)
                    link = link + 1
                    if (link == links) | (u + 1 == count):
                        if u < links:
                            self.keep_chain(outer, outer_at, state, O)
                        else:
                            self.add_chain(outer, outer_at, state, O)
                        link = Int32(0)
            if not early:
                self.fill_from(slot, (region, bars, next_entries, next_count, quarter, next_end, lane), kv)

            # -- the sum over the quarters
            if count == 0:
                self.clear_outer(outer, outer_at)
            self.store_numbers(base + self.numbers_at + warp * NUMBERS, lane, outer)
            ptx.barrier()
            out_row = out + token64 * out_token + Int64(kv_head * group) * out_head
            lse_row = lse + token64 * lse_token + Int64(kv_head * group) * lse_head
            self.finish(base, warp, lane, group, scale_v, bf16_query, out_row, out_head, lse, lse_row, lse_head)
            ptx.barrier()  # the sums may be overwritten
            token, count, end, entries = following, next_count, next_end, next_entries

    def fill_from(self, slot, place, kv):
        for i in range(self.slabs):
            at = slot + i
            self.ask(i % 2, Int32(i // 2), ptx.select(at >= self.slabs, at - self.slabs, at), place, kv)

    @cute.jit
    def store_numbers(self, at: Int32, lane: Int32, outer: cute.Tensor):
        g, t = lane >> 2, lane & 3
        for half in cutlass.range_constexpr(2):
            smem.store_f32(at + 64 + (g + 8 * half) * 16 + t * 4, outer[2 + half])
        if t == 0:
            for half in cutlass.range_constexpr(2):
                smem.store_f32(at + (g + 8 * half) * 4, outer[half])

    @cute.jit
    def finish(
        self,
        base: Int32,
        warp: Int32,
        lane: Int32,
        group: Int32,
        scale_v: Float32,
        bf16_query: Int32,
        out_row: Int64,
        out_head: Int64,
        lse: Int64,
        lse_row: Int64,
        lse_head: Int64,
    ):
        """What a lane adds up: of the four warps' sums, its own lane's, of 4 of the 16 tiles."""
        g, t = lane >> 2, lane & 3
        mine = base + self.outer_at + lane * 16 + warp * 2048
        sums = [[smem.load_f32x4(mine + w * LANE_SUMS + j * 512) for w in range(4)] for j in range(4)]
        numbers = [base + self.numbers_at + w * NUMBERS for w in range(4)]
        for half in cutlass.range_constexpr(2):
            head = g + 8 * half
            m, factors = softmax.weights([smem.load_f32(at + head * 4) for at in numbers])
            shares = [smem.load_f32x4(at + 64 + head * 16) for at in numbers]
            l = [softmax.weighted_sum([x[i] for x in shares], factors) for i in range(4)]
            total = (l[0] + l[1]) + (l[2] + l[3])
            inverse = softmax.inverse_or_zero(total) * scale_v
            o = [[softmax.weighted_sum([x[2 * half + c] for x in sums[j]], factors) * inverse for j in range(4)] for c in range(2)]
            if head < group:
                at = out_row + Int64(head) * out_head
                if cutlass.const_expr(self.fp8):
                    for c in cutlass.range_constexpr(2):
                        dim = (2 * t + c) * 16 + ((warp ^ (2 * (t & 1))) * 4)
                        words = [self.output_pair(*o[c][i : i + 2], bf16_query) for i in (0, 2)]
                        ptx.store_words(at + Int64(dim * 2), words)
                else:
                    for j in cutlass.range_constexpr(4):
                        dim = (4 * warp + j) * 8 + 2 * t
                        ptx.store_words(at + Int64(dim * 2), [self.output_pair(o[0][j], o[1][j], bf16_query)])
                if (t == 0) & (warp == 0) & (lse != 0):
                    ptx.store_f32(lse_row + Int64(head) * lse_head, softmax.natural_lse(m, total))
