"""Dense attention over a paged KV cache on Hopper: flash-attention-4's SM90 main loop between our own ends.
Op: dense_attention.

Problem
    Row = (token, query head). out = softmax(q K^T * softmax_scale * k_scale) V * v_scale over all tokens of the request
    that the row sees, lse = ln sum exp(logits). A tile of 64 or 128 rows (the query heads of a KV head, token after
    token: row = token * group + head) and 128 keys costs 4 * rows * 128 * 128 FLOP and reads 64 KiB: with 128 rows 128
    FLOP a byte of L2, compute-bound; a decode step of 16 rows is memory-bound, and 64 rows (the least that wgmma takes)
    leave its multiplies below the memory time.

What comes from flash-attn-4 (imported, pinned): FlashAttentionForwardSm90.mma, that is the consumers' loop over key
    tiles with the products of two tiles overlapped, its online softmax, its wgmma plumbing and pipelines. Ours: the
    argument list, the schedule, the loader, the masks and the epilogue, because of what this package promises and that
    kernel doesn't: wrong lengths, offsets and page numbers stay inside the tensors, a page number outside the cache
    contributes nothing, NaN past the end of a request changes nothing, 1..16 heads a KV head in one program, pages of
    64, scales, split keys.

Roles
    warp 0          copies by tensor map: Q once, K and V of a key tile into two stages each (a page of 64 is half a tile)
    4 or 8 warps    wgmma, softmax, epilogue (one or two warpgroups of 64 rows)

Schedule: grid (tiles x neighbours, KV heads / neighbours, splits), where the neighbours are 2^n heads whose tiles take
    turns. `tiles` is the most that T tokens of B requests can have, so no length is read on the host; a CTA finds its
    request by a scan of cu_seqlens_q, and those left over return. A request's last tile, the
    longest one with a causal mask, comes first. Rows past the last request are a request of their own without keys.
    With splits > 1 a CTA takes its share of the tile's key blocks and leaves fp32 output and LSE for combine.py.

Masks: a row's visible end is computed once; the blocks that reach past the lowest end of the tile are masked, and all
    of them if a page number of the tile is not one of the cache's (scanned while the first copy is under way).

Tail: rows of V at or past the end of the request are never multiplied: its last block is copied to a barrier of the
    loader's own, cleared from the end on and only then handed over (0 * NaN is NaN). Likewise Q is negated if the
    scale of the logits is negative: the softmax keeps the maximum of the products before scaling.

Shared memory: Q (rows x 256 B), 2 x 32 KiB K, 2 x 32 KiB V, 12 mbarriers: 160 KiB with 128 rows.

Limits: head_dim 128, pages of 64 or 128 tokens, 1..16 query heads a KV head, K and V of q's dtype. Bases and byte
    strides are multiples of 16 (tensor maps), and no stride of a dimension longer than 1 is 0.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.utils import LayoutEnum
import shared.flash_attention  # noqa: F401, I001  before flash_attn and quack
from flash_attn.cute import pipeline as fa_pipeline
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack import layout_utils, sm90_utils

from shared import hopper, ptx, smem, tma
from shared.dense_tile import (
    HALF,
    KEYS,
    SLAB,
    Blocks,
    DenseTiles,
    Mask,
    OneTile,
    Output,
    Paging,
    Tile,
    changed,
    logit_scale,
    row_of,
)
from shared.program import Kernel, Program

DIM, STAGES = 128, 2
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
CONSUMER_REGISTERS = {1: (256, 56), 2: (240, 24)}  # by warpgroups of consumers: theirs and the loader's


class Dense(Kernel, DenseTiles, FlashAttentionForwardSm90):
    """One variant: dtype and rows of a tile."""

    ctas_per_sm = 1

    def __init__(self, dtype, rows):
        self.kind, self.dynamic_smem = dtype, rows * 256 + 2 * STAGES * SLAB + 96
        self.rows, self.threads = rows, 128 + 2 * rows

    def configure(self):
        """What the base class derives from its tensors; needs the compiler's context."""
        rows = self.rows
        super().__init__(
            DTYPES[self.kind],
            DIM,
            qhead_per_kvhead=1,
            is_causal=True,  # that is, with a masked part of the walk; where it starts is a number
            pack_gqa=False,
            tile_m=rows,
            tile_n=KEYS,
            num_stages=STAGES,
        )
        self.num_wg_mma = rows // 64
        self.num_mma_threads, self.num_threads_per_warp_group = 2 * rows, 128
        self.epilogue_threads = self.num_mma_threads
        self.use_block_sparsity, self.rescale_O_before_gemm = False, False
        self.use_scheduler_barrier = self.num_wg_mma == 2
        shapes = {"sQ": ((rows, DIM), None), "sK": ((KEYS, DIM), STAGES), "sV": ((KEYS, DIM), STAGES)}
        return {n: sm90_utils.make_smem_layout(self.dtype, LayoutEnum.ROW_MAJOR, *x) for n, x in shapes.items()}

    # ---- the loader: one warp

    @cute.jit
    def load(
        self,
        tile: Tile,
        lane: Int32,
        base: Int32,
        maps: tuple,
        paging: Paging,
        group: Int32,
        tile_tokens: Int32,
        change: Int32,
    ):
        q_map, k_map, v_map = maps
        page_row, page_width, page_shift = paging.row, paging.width, paging.shift
        s_k = base + self.rows * 256
        s_v = s_k + STAGES * SLAB
        bars = s_v + STAGES * SLAB
        q_full, k_full, v_full, q_own, v_own = bars, bars + 16, bars + 48, bars + 80, bars + 88
        count, first = tile.block_max - tile.block_min, tile.block_max - 1

        # Page numbers: 32 in registers, the 32 below on their way.
        chunk = (first << page_shift) >> 5
        entries = ptx.load_i32_if(page_row + Int64(chunk * 32 + lane) * 4, Int32(chunk * 32 + lane < page_width), -1)
        below = ptx.load_i32_if(page_row + Int64(chunk * 32 - 32 + lane) * 4, Int32(chunk > 0), -1)
        entry = (first << page_shift) & 31
        page_a, page_b = ptx.shuffle(entries, entry), ptx.shuffle(entries, entry + page_shift)

        if lane == 0:
            self.copy_keys(s_k, k_map, page_shift, (page_a, page_b), tile.head, k_full)
            q_bar = ptx.select(change != 0, q_own, q_full)
            smem.mbarrier_expect(q_bar, tile_tokens * group * 256)
            row = tile.first_row + tile.first_token
            for half in cutlass.range_constexpr(2):
                target = base + half * (self.rows * 128)
                tma.tma_load(target, q_map, [Int32(64 * half), Int32(0), tile.head, row], q_bar)
        if change != 0:
            smem.mbarrier_wait(q_own, Int32(0))
            for i in cutlass.range(self.rows * 256 // 512, unroll=1):
                at = base + (i * 32 + lane) * 16
                smem.store_i32x4(at, changed(smem.load_i32x4(at), change))
            tma.fence_async()
            ptx.warp_barrier()
            if lane == 0:
                hopper.mbarrier_arrive(q_full)

        tail = tile.kv_len - first * KEYS  # visible rows of the first block's V, if fewer than KEYS
        for i in cutlass.range(1, count + 1, unroll=1):
            stage, use = i & 1, i >> 1
            next_a, next_b = page_a, page_b
            if i < count:
                block = first - i
                if ((block << page_shift) >> 5) != chunk:
                    chunk, entries = chunk - 1, below
                    below = ptx.load_i32_if(page_row + Int64(chunk * 32 - 32 + lane) * 4, Int32(chunk > 0), -1)
                entry = (block << page_shift) & 31
                next_a, next_b = ptx.shuffle(entries, entry), ptx.shuffle(entries, entry + page_shift)
                smem.mbarrier_wait(k_full + 16 + stage * 8, (use & 1) ^ 1)
                if lane == 0:
                    at = s_k + stage * SLAB
                    self.copy_keys(at, k_map, page_shift, (next_a, next_b), tile.head, k_full + stage * 8)
            # V of the block before
            stage, use = (i - 1) & 1, (i - 1) >> 1
            at, full = s_v + stage * SLAB, v_full + stage * 8
            smem.mbarrier_wait(full + 16, (use & 1) ^ 1)
            cut = Int32((i == 1) & (tail < KEYS))
            if lane == 0:
                bar = ptx.select(cut != 0, v_own, full)
                self.copy_keys(at, v_map, page_shift, (page_a, page_b), tile.head, bar)
            if cut != 0:
                smem.mbarrier_wait(v_own, Int32(0))
                for j in cutlass.range(tail * 8 + lane, KEYS * 8, 32, unroll=1):
                    smem.store_i32x4(at + j * 16, [Int32(0)] * 4)
                    smem.store_i32x4(at + HALF + j * 16, [Int32(0)] * 4)
                tma.fence_async()
                ptx.warp_barrier()
                if lane == 0:
                    hopper.mbarrier_arrive(full)
            page_a, page_b = next_a, next_b

    # ---- the consumers

    @cute.jit
    def epilogue(self, acc_O, lse, mO, mLSE, sO, seqlen, *unused):
        """Rows from registers to global memory; `seqlen` is what `consume` gave as SeqlenInfoCls: an Output."""
        output, values = seqlen, layout_utils.reshape_acc_to_mn(acc_O)
        thread, _, _ = cute.arch.thread_idx()
        t = thread & 3
        pack = ptx.pack_bf16 if self.kind == "bf16" else ptx.pack_fp16
        for r in cutlass.range_constexpr(2):
            row = row_of(thread - 128, r)
            out, lse_at = output.address(row)
            exists = Int32(row < output.rows)
            # An empty row is 0 whatever the scale is, NaN and infinity included.
            factor = ptx.select(lse[r] == Float32(-Float32.inf), Float32(0.0), output.v_scale)
            for c in cutlass.range_constexpr(32):
                values[r, c] = values[r, c] * factor
            if output.splits > 1:
                for i in cutlass.range_constexpr(16):
                    words = [ptx.f32_bits(values[r, 2 * i]), ptx.f32_bits(values[r, 2 * i + 1])]
                    ptx.store_words_if(out + Int64(i * 32 + t * 8), words, exists)
            else:
                for j in cutlass.range_constexpr(4):
                    words = [pack(values[r, 8 * j + 2 * g], values[r, 8 * j + 2 * g + 1]) for g in range(4)]
                    ptx.store_words_if(out + Int64(j * 64 + t * 16), ptx.transpose_quad(words, t), exists)
            if output.lse != 0:
                # flash-attention-4 takes a row whose sum is NaN for an empty one.
                nan = (lse[r] == Float32(-Float32.inf)) & (values[r, 0] != values[r, 0])
                lse_r = ptx.select(nan, values[r, 0], lse[r])
                ptx.store_words_if(lse_at, [ptx.f32_bits(lse_r)], exists & Int32(t == 0))

    @cute.jit
    def consume(
        self,
        layouts,
        start,
        pipelines,
        tile: Tile,
        output,
        thread: Int32,
        paging: Paging,
        group: Int32,
        causal: Int32,
        scale_log2: Float32,
    ):
        lane = thread & 31
        exists = tile.block_min < tile.block_max
        bad_pages = self.any_bad_page(tile, lane, paging)
        unmasked_end = ptx.maximum_i32(tile.block_min, tile.end_of(tile.first_token, causal) // KEYS)
        blocks = Blocks(tile, ptx.select(bad_pages != 0, tile.block_min, unmasked_end))
        ends = [tile.end_of(tile.first_token + row_of(thread, r) // group, causal) - 2 * (lane & 3) for r in (0, 1)]
        mask = Mask(tuple(ends), bad_pages, paging)

        offsets = {"sQ": 0, "sK": self.rows * 256, "sV": self.rows * 256 + STAGES * SLAB}
        tensors = {}
        for name, layout in layouts.items():
            pointer = cute.recast_ptr(start + offsets[name], layout.inner, dtype=self.dtype)
            tensors[name] = cute.make_tensor(pointer, layout.outer)
        pipeline_q, pipeline_k, pipeline_v = pipelines
        self.mma(
            *self._get_tiled_mma(),
            None,
            None,
            tensors["sQ"],
            tensors["sK"],
            layout_utils.transpose_view(tensors["sV"]),
            None,
            None,
            None,
            pipeline_k,
            pipeline_v,
            pipeline_q,
            None,
            None,
            thread,
            scale_log2,
            None,
            blocks,
            lambda batch: output,
            lambda seqlen: mask,
            lambda: OneTile(exists),
            None,
        )
        if tile.block_min >= tile.block_max:
            self.fill_empty(output, thread)

    def make_pipelines(self, start):
        """mbarriers: Q full, empty; K full 0, full 1, empty 0, empty 1; V likewise; the loader's own for Q and V."""
        bars = cute.recast_ptr(start + self.rows * 256 + 2 * STAGES * SLAB, dtype=Int64)
        group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
        create = partial(
            fa_pipeline.PipelineTmaAsync.create,
            producer_group=group(1),
            consumer_group=group(self.num_mma_threads // 32),
            tx_count=SLAB,
            defer_sync=True,
        )
        pipelines = [create(barrier_storage=bars + at, num_stages=n) for at, n in ((0, 1), (2, STAGES), (6, STAGES))]
        return pipelines, Int32((bars + 10).toint())

    # ---- the kernel

    @cute.kernel
    def kernel(
        self,
        q_map: cute.CopyAtom,
        k_map: cute.CopyAtom,
        v_map: cute.CopyAtom,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        out: Int64,  # q's dtype, or with splits fp32
        lse: Int64,  # 0: not wanted
        k_scale: Int64,  # 0: one
        v_scale: Int64,
        page_table_row: Int64,  # all strides in bytes
        out_split: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_split: Int64,
        lse_token: Int64,
        lse_head: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        tokens: Int32,
        requests: Int32,
        page_width: Int32,  # of the page table
        pages: Int32,
        page_shift: Int32,  # pages of a block: 0 for 1 (128 tokens), 1 for 2 (64 tokens)
        reach: Int32,  # tokens that the page table can hold
        group: Int32,  # query heads a KV head
        tile_tokens: Int32,  # rows // group
        neighbours_log2: Int32,  # KV heads whose tiles take turns
        causal: Int32,
        splits: Int32,
        softmax_scale: Float32,
    ):
        layouts = self.configure()
        thread, _, _ = cute.arch.thread_idx()
        index, head, split = cute.arch.block_idx()
        head = (head << neighbours_log2) | (index & ((Int32(1) << neighbours_log2) - 1))
        index = index >> neighbours_log2
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        start = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        maps = tuple(tma.map_address(m) for m in (q_map, k_map, v_map))
        if warp == 0:
            for m in maps:
                tma.prefetch_map(m)
        pipelines, own = self.make_pipelines(start)
        if thread == 0:
            smem.mbarrier_init(own, Int32(1))
            smem.mbarrier_init(own + 8, Int32(1))
        cute.arch.mbarrier_init_fence()

        found = self.find_tile(index, lane, cu_seqlens, seqused, tokens, requests, reach, tile_tokens)
        tile = self.tile_of(found, head, split, tile_tokens, causal, splits)
        page_row = page_table + Int64(tile.request) * page_table_row
        paging = Paging(page_row, page_width, pages, page_shift)
        head64 = Int64(head)
        scale = softmax_scale * ptx.load_f32_or_one(k_scale + head64 * k_scale_head)
        scale_log2, change = logit_scale(scale)
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(CONSUMER_REGISTERS[self.num_wg_mma][1])
            if (warp == 0) & (tile.block_min < tile.block_max):
                base = Int32(start.toint())
                self.load(tile, lane, base, maps, paging, group, tile_tokens, change)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS[self.num_wg_mma][0])
            token = Int64(tile.first_row + tile.first_token)
            out_at = out + Int64(split) * out_split + token * out_token + Int64(head * group) * out_head
            lse_at = lse + Int64(split) * lse_split + token * lse_token + Int64(head * group) * lse_head
            lse_at = ptx.select(lse != 0, lse_at, Int64(0))
            strides = (out_token, out_head, lse_token, lse_head)
            rows = ptx.maximum_i32(tile.tokens, Int32(0)) * group
            scale_v = ptx.load_f32_or_one(v_scale + head64 * v_scale_head)
            output = Output(out_at, lse_at, *strides, group, rows, splits, scale_v)
            self.consume(layouts, start, pipelines, tile, output, thread - 128, paging, group, causal, scale_log2)


def programs():
    return [Program(f"dense_{dtype}_m{rows}", Dense(dtype, rows)) for dtype in DTYPES for rows in (64, 128)]
