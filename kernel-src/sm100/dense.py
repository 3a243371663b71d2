"""Dense attention over a paged KV cache on Blackwell: flash-attention-4's SM100 loops between our own ends. Op:
dense_attention.

Problem
    That of sm90/dense.py, with the same arguments and the same promises: wrong lengths, offsets and page numbers stay inside
    the tensors, a page number outside the cache contributes nothing, NaN past the end of a request changes nothing, 1..16
    heads a KV head in one program, pages of 64, scales of any sign, split keys. 128 rows x 128 keys cost 8.4 MFLOP and
    16,384 exponentials.

Tile picture
    A tile is one or two stages of 128 rows; a stage takes 128 // group whole tokens, row = token * group + head, so its last
    rows may stand empty. Both stages walk the same key blocks; one's softmax runs under the other's products. Q of a stage is
    one box, K and V of a block share one ring.

What comes from flash-attn-4 (imported, pinned): of FlashAttentionForwardSm100 the loops of the MMA warp, the softmax warps
    and the correction warps, that is the products through tensor memory, the online softmax whose maximum may lag by 8, the
    polynomial exp2 for a quarter of the exponentials, and the pipelines between them. Ours: that polynomial, the argument
    list, the schedule, the loader, the masks and the epilogue. SM103 gets the same program (flash-attention-4 would leave
    out the polynomial there and take the maximum in the load; that was not tried).

Roles (16 warps)
    0 - 3, 4 - 7    softmax of the stages (4 - 7 idle with one stage): a thread a row
    8 - 11          rescale O in tensor memory, epilogue
    12              MMA: Q K^T into S, P V into O, and the tensor memory's allocation
    14              copies by tensor map
    13, 15          idle

Tensor memory: S 0 and 1 (columns 0, 128; P takes the upper half of its S), O 0 and 1 (256, 384): all 512 columns, so there
    is one CTA a multiprocessor.

Shared memory: Q 32 KiB a stage, a ring of 5 (one stage: 6) key or value tiles of 32 KiB, 2 KiB of maxima and sums, mbarriers:
    at most 227 KiB.

Tail: rows of V at or past the end of the request are never multiplied: its last block is copied to a barrier of the
    loader's own, cleared from the end on and only then handed over (0 * NaN is NaN). Likewise Q is negated if the scale of the
    logits is negative.

Limits: those of sm90/dense.py.
"""

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as cutlass_sm100
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
import shared.flash_attention  # noqa: F401, I001  before flash_attn and quack
from flash_attn.cute import pipeline as fa_pipeline
from flash_attn.cute import utils as fa_utils
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from flash_attn.cute.mask import mask_r2p_lambda, r2p_bitmask_below
from flash_attn.cute.named_barrier import NamedBarrierFwdSm100

from shared import blackwell, hopper, ptx, smem, tma
from shared.dense_tile import HALF, KEYS, SLAB, Blocks, DenseTiles, OneTile, Output, Paging, Tile, changed, logit_scale
from shared.program import Kernel, Program
from shared.softmax import LN_2

# What the softmax loop calls for its polynomial exponentials: the one there takes a NaN for -127.
fa_utils.ex2_emulation_2 = partial(blackwell.exp2_pair, degree=3)

DIM, ROWS = 128, 128  # of a stage
DTYPES = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
COPIED = 32  # columns of O that the epilogue holds at a time


@dataclass(frozen=True)
class RowMask:
    """The mask of one thread's row, as the softmax loop asks for it."""

    end: Int32  # of the row's visible keys
    bad_pages: Int32  # of the tile: 0 if all are the cache's
    paging: Paging

    @cute.jit
    def apply_mask_sm100(self, acc_S, n_block, **unused):
        limit = ptx.clamp(self.end - n_block * KEYS, Int32(0), Int32(KEYS))
        mask_r2p_lambda(acc_S, lambda s: r2p_bitmask_below(limit, s), rank1=True)
        if self.bad_pages != 0:
            for part in cutlass.range_constexpr(2):
                if self.paging.is_missing(n_block, part):
                    for c in cutlass.range_constexpr(64):
                        acc_S[64 * part + c] = -Float32.inf


@dataclass(frozen=True)
class Sums(Output):
    """An Output with what a row's LSE is made of."""

    sums: Int32  # shared memory: the rows' sums by stage, then their maxima
    scale_log2: Float32


@dataclass(frozen=True)
class Lengths:
    """What stands for the sequence lengths, and for the output and its tile in shared memory, of which it gives the Output."""

    output: Output
    seqlen_q: int = 0
    seqlen_k: int = 1
    has_cu_seqlens_q: bool = True

    def offset_batch_Q(self, unused, batch, dim):  # noqa: N802
        return self

    def __getitem__(self, index):
        return self.output


class Dense(Kernel, DenseTiles, FlashAttentionForwardSm100):
    """One variant: dtype and stages of 128 rows."""

    threads, ctas_per_sm = 512, 1
    epilogue_threads = ROWS

    def __init__(self, dtype, stages):
        self.kind, self.stages = dtype, stages
        self.ring = 7 - stages
        self.key_at = stages * SLAB
        self.sums_at = self.key_at + self.ring * SLAB
        self.bars_at = self.sums_at + stages * ROWS * 8
        # mbarriers: Q and ring, full and empty; four pipelines between the roles; two of the loader's own; an address.
        self.dynamic_smem = self.bars_at + 8 * (2 * stages + 2 * self.ring + 8 * stages + 2) + 8

    def configure(self):
        """What the base class derives from its tensors; needs the compiler's context."""
        super().__init__(
            DIM,
            qhead_per_kvhead=1,
            is_causal=True,  # that is, with a masked part of the walk; where it starts is a number
            pack_gqa=True,
            q_stage=self.stages,
            is_static_persistent=False,
            is_varlen_q=True,
        )
        dtype = DTYPES[self.kind]
        self.q_dtype = self.k_dtype = self.v_dtype = self.o_dtype = dtype
        self.kv_stage, self.s_stage, self.uneven_kv_smem = self.ring, 2, False
        self.use_block_sparsity, self.cluster_shape_mnk = False, (1, 1, 1)
        # The same program for SM103.
        self.is_sm103, self.use_ldred_rowmax, self.enable_ex2_emu = False, False, True
        self.ex2_emu_freq, self.ex2_emu_start_frg = 16, 1
        self.num_regs_softmax, self.num_regs_correction = 192, 72
        self.num_regs_other = min((512 - 192 * self.stages - 72) // (3 - self.stages) // 8 * 8, 128)
        group = tcgen05.CtaGroup.ONE
        make = cutlass_sm100.make_trivial_tiled_mma
        major = OperandMajorMode
        qk = make(dtype, dtype, major.K, major.K, Float32, group, self.mma_tiler_qk[:2])
        source = tcgen05.OperandSource.TMEM
        pv = make(dtype, dtype, major.K, major.MN, Float32, group, self.mma_tiler_pv[:2], source)
        return qk, pv

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
        q_full = base + self.bars_at
        ring_full = q_full + 16 * self.stages
        ring_empty = ring_full + 8 * self.ring
        q_own = ring_empty + 8 * self.ring + 64 * self.stages
        v_own = q_own + 8
        count, first = tile.block_max - tile.block_min, tile.block_max - 1
        stage_tokens = tile_tokens // self.stages

        # Page numbers: 32 in registers, the 32 below on their way.
        chunk = (first << page_shift) >> 5
        entries = ptx.load_i32_if(page_row + Int64(chunk * 32 + lane) * 4, Int32(chunk * 32 + lane < page_width), -1)
        below = ptx.load_i32_if(page_row + Int64(chunk * 32 - 32 + lane) * 4, Int32(chunk > 0), -1)

        if lane == 0:
            for stage in cutlass.range_constexpr(self.stages):
                bar = ptx.select(change != 0, q_own, q_full + 8 * stage)
                if cutlass.const_expr(stage == 0):
                    expected = ptx.select(change != 0, Int32(self.stages), Int32(1))
                    smem.mbarrier_expect(bar, stage_tokens * group * 256 * expected)
                else:
                    if change == 0:
                        smem.mbarrier_expect(bar, stage_tokens * group * 256)
                row = tile.first_row + tile.first_token + stage * stage_tokens
                for half in cutlass.range_constexpr(2):
                    target = base + stage * SLAB + half * HALF
                    tma.tma_load(target, q_map, [Int32(64 * half), Int32(0), tile.head, row], bar)
        if change != 0:
            smem.mbarrier_wait(q_own, Int32(0))
            for i in cutlass.range(self.stages * SLAB // 512, unroll=1):
                at = base + (i * 32 + lane) * 16
                smem.store_i32x4(at, changed(smem.load_i32x4(at), change))
            tma.fence_async()
            ptx.warp_barrier()
            if lane == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    hopper.mbarrier_arrive(q_full + 8 * stage)

        tail = tile.kv_len - first * KEYS  # visible rows of the first block's V, if fewer than KEYS
        place, phase = Int32(0), Int32(1)
        for i in cutlass.range(count, unroll=1):
            block = first - i
            if ((block << page_shift) >> 5) != chunk:
                chunk, entries = chunk - 1, below
                below = ptx.load_i32_if(page_row + Int64(chunk * 32 - 32 + lane) * 4, Int32(chunk > 0), -1)
            entry = (block << page_shift) & 31
            pages = ptx.shuffle(entries, entry), ptx.shuffle(entries, entry + page_shift)
            for value in cutlass.range_constexpr(2):
                smem.mbarrier_wait(ring_empty + place * 8, phase)
                at, full = base + self.key_at + place * SLAB, ring_full + place * 8
                if cutlass.const_expr(value == 0):
                    if lane == 0:
                        self.copy_keys(at, k_map, page_shift, pages, tile.head, full)
                else:
                    cut = Int32((i == 0) & (tail < KEYS))
                    if lane == 0:
                        self.copy_keys(at, v_map, page_shift, pages, tile.head, ptx.select(cut != 0, v_own, full))
                    if cut != 0:
                        smem.mbarrier_wait(v_own, Int32(0))
                        for j in cutlass.range(tail * 8 + lane, KEYS * 8, 32, unroll=1):
                            smem.store_i32x4(at + j * 16, [Int32(0)] * 4)
                            smem.store_i32x4(at + HALF + j * 16, [Int32(0)] * 4)
                        tma.fence_async()
                        ptx.warp_barrier()
                        if lane == 0:
                            hopper.mbarrier_arrive(full)
                place = place + 1
                if place == self.ring:
                    place, phase = Int32(0), phase ^ 1

    # ---- the epilogue: rows from tensor memory to global memory

    @cute.jit
    def correction_epilogue(self, thr_mma, tOtO, tidx, stage, m_block, seqlen_q, scale, sO, mO_cur, *unused, **more):  # noqa: N803
        """Called by the correction loop, a thread a row, once O of the stage is complete; `mO_cur` is an Output."""
        output = mO_cur
        rows = (ROWS // output.group) * output.group
        row = stage * rows + tidx
        out, lse_at = output.address(row)
        exists = Int32((tidx < rows) & (row < output.rows))
        total = smem.load_f32(output.sums + (stage * ROWS + tidx) * 4)
        # An empty row is 0 whatever the scale is, NaN and infinity included.
        factor = ptx.select(total == Float32(0.0), Float32(0.0), scale * output.v_scale)
        pack = ptx.pack_bf16 if self.kind == "bf16" else ptx.pack_fp16
        lanes = (tidx & 96) << 16
        for start in cutlass.range_constexpr(0, DIM, COPIED):
            values = blackwell.load_row(lanes + self.tmem_o_offset[stage] + start, COPIED)
            values = [x * factor for x in values]
            if output.splits > 1:
                for i in cutlass.range_constexpr(0, COPIED, 4):
                    words = [ptx.f32_bits(x) for x in values[i : i + 4]]
                    ptx.store_words_if(out + Int64(4 * (start + i)), words, exists)
            else:
                for i in cutlass.range_constexpr(0, COPIED, 8):
                    words = [pack(values[i + 2 * j], values[i + 2 * j + 1]) for j in range(4)]
                    ptx.store_words_if(out + Int64(2 * (start + i)), words, exists)
        if output.lse != 0:
            largest = smem.load_f32(output.sums + ((self.stages + stage) * ROWS + tidx) * 4)
            lse = (largest * output.scale_log2 + ptx.log2(total)) * LN_2
            lse = ptx.select(total == 0.0, Float32(-Float32.inf), lse)
            ptx.store_words_if(lse_at, [ptx.f32_bits(lse)], exists)

    # ---- the kernel

    def make_pipelines(self, bars, layout):
        """Q, ring, S full / P and O ready, P's last part, O full, maxima and sums; `bars`: where their mbarriers are."""
        group = partial(pipeline.CooperativeGroup, pipeline.Agent.Thread)
        softmax, correction = 4, 4  # warps
        n, at, made = self.stages, 0, []

        def create(kind, count, producers, consumers, **more):
            nonlocal at
            made.append(
                kind.create(
                    barrier_storage=bars + at,
                    num_stages=count,
                    producer_group=group(producers),
                    consumer_group=group(consumers),
                    defer_sync=True,
                    **more,
                )
            )
            at += 2 * count

        umma = {"cta_layout_vmnk": layout}
        create(fa_pipeline.PipelineTmaUmma, n, 1, 1, tx_count=SLAB, **umma)
        create(fa_pipeline.PipelineTmaUmma, self.ring, 1, 1, tx_count=SLAB, **umma)
        create(fa_pipeline.PipelineUmmaAsync, n, 1, 32 * (softmax + correction), **umma)
        create(fa_pipeline.PipelineAsyncUmma, n, softmax, 1, **umma)
        create(fa_pipeline.PipelineUmmaAsync, n, 1, 32 * correction, **umma)
        create(fa_pipeline.PipelineAsync, n, 32 * softmax, 32 * correction)
        return made

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
        tile_tokens: Int32,  # stages * (128 // group)
        neighbours_log2: Int32,  # KV heads whose tiles take turns
        causal: Int32,
        splits: Int32,
        softmax_scale: Float32,
    ):
        tiled_qk, tiled_pv = self.configure()
        thread, _, _ = cute.arch.thread_idx()
        index, head, split = cute.arch.block_idx()
        head = (head << neighbours_log2) | (index & ((Int32(1) << neighbours_log2) - 1))
        index = index >> neighbours_log2
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        start = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
        base = Int32(start.toint())
        maps = tuple(tma.map_address(m) for m in (q_map, k_map, v_map))
        if warp == 0:
            for m in maps:
                tma.prefetch_map(m)
        bars = cute.recast_ptr(start + self.bars_at, dtype=Int64)
        layout = cute.tiled_divide(cute.make_layout(self.cluster_shape_mnk), (tiled_qk.thr_id.shape,))
        pipelines = self.make_pipelines(bars, layout)
        own = base + self.bars_at + 8 * (10 * self.stages + 2 * self.ring)
        if thread == 0:
            smem.mbarrier_init(own, Int32(1))
            smem.mbarrier_init(own + 8, Int32(1))
        cute.arch.mbarrier_init_fence()
        if warp == self.mma_warp_id:
            blackwell.allocate(own + 16, blackwell.COLUMNS)  # all of it, so its address is 0

        found = self.find_tile(index, lane, cu_seqlens, seqused, tokens, requests, reach, tile_tokens)
        tile = self.tile_of(found, head, split, tile_tokens, causal, splits)
        page_row = page_table + Int64(tile.request) * page_table_row
        paging = Paging(page_row, page_width, pages, page_shift)
        head64 = Int64(head)
        scale = softmax_scale * ptx.load_f32_or_one(k_scale + head64 * k_scale_head)
        scale_log2, change = logit_scale(scale)
        cute.arch.sync_threads()

        # Branches inside of branches: a value that a later one needs does not live through the softmax.
        operands = self.operands(start, tiled_qk, tiled_pv)
        if warp < 4 * self.stages:
            cute.arch.setmaxregister_increase(self.num_regs_softmax)
            self.soften(tile, thread, warp >> 2, operands, pipelines, paging, group, tile_tokens, causal, scale_log2)
        else:
            if (warp >= 8) & (warp < self.mma_warp_id):
                cute.arch.setmaxregister_decrease(self.num_regs_correction)
                addresses = (out, out_split, out_token, out_head), (lse, lse_split, lse_token, lse_head)
                scale_v = ptx.load_f32_or_one(v_scale + head64 * v_scale_head)
                output = self.output_of(tile, addresses, group, split, splits, scale_v, base + self.sums_at, scale_log2)
                self.correct(tile, output, operands, pipelines)
                if tile.block_min >= tile.block_max:
                    self.fill_empty(output, thread & 127)
            else:
                cute.arch.setmaxregister_decrease(self.num_regs_other)
                if warp == self.mma_warp_id:
                    self.multiply(tile, tiled_qk, tiled_pv, operands, pipelines)
                if (warp == self.load_warp_ids[0]) & (tile.block_min < tile.block_max):
                    self.load(tile, lane, base, maps, paging, group, tile_tokens, change)

        cute.arch.sync_threads()
        if warp == self.mma_warp_id:
            blackwell.free(Int32(0), blackwell.COLUMNS)

    def output_of(self, tile, addresses, group, split, splits, scale_v, sums, scale_log2):
        (out, out_split, *out_strides), (lse, lse_split, *lse_strides) = addresses
        token, head = Int64(tile.first_row + tile.first_token), Int64(tile.head * group)
        out_at = out + Int64(split) * out_split + token * out_strides[0] + head * out_strides[1]
        lse_at = lse + Int64(split) * lse_split + token * lse_strides[0] + head * lse_strides[1]
        lse_at = ptx.select(lse != 0, lse_at, Int64(0))
        rows = ptx.maximum_i32(tile.tokens, Int32(0)) * group
        return Sums(out_at, lse_at, *out_strides, *lse_strides, group, rows, splits, scale_v, sums, scale_log2)

    def operands(self, start, tiled_qk, tiled_pv):
        """Operands and accumulators in the forms that the loops take."""
        dtype = self.q_dtype
        make_a, make_b = cutlass_sm100.make_smem_layout_a, cutlass_sm100.make_smem_layout_b
        q_layout = make_a(tiled_qk, self.mma_tiler_qk, dtype, self.stages)
        k_layout = make_b(tiled_qk, self.mma_tiler_qk, dtype, self.ring)
        p_layout = make_a(tiled_pv, self.mma_tiler_pv, dtype, self.s_stage)
        v_layout = make_b(tiled_pv, self.mma_tiler_pv, dtype, self.ring)

        def in_shared(layout, at):
            return cute.make_tensor(cute.recast_ptr(start + at, layout.inner, dtype=dtype), layout.outer)

        s_q, s_k, s_v = (in_shared(*x) for x in ((q_layout, 0), (k_layout, self.key_at), (v_layout, self.key_at)))
        thr_qk, thr_pv = tiled_qk.get_slice(0), tiled_pv.get_slice(0)
        s_acc = thr_qk.make_fragment_C(cute.append(thr_qk.partition_shape_C(self.mma_tiler_qk[:2]), self.s_stage))
        o_acc = thr_pv.make_fragment_C(cute.append(thr_pv.partition_shape_C(self.mma_tiler_pv[:2]), self.stages))
        o_acc = cute.make_tensor(o_acc.iterator + self.tmem_o_offset[0], o_acc.layout)
        p = thr_pv.make_fragment_A(cute.make_tensor(s_acc.iterator, p_layout.outer))[None, None, None, 0]
        per_column = Float32.width // dtype.width
        stride = (self.tmem_p_offset[1] - self.tmem_p_offset[0]) * per_column
        p_layout = cute.append(p.layout, cute.make_layout((self.s_stage,), stride=(stride,)))
        p = cute.make_tensor(p.iterator + self.tmem_p_offset[0] * per_column, p_layout)
        sums = cute.recast_ptr(start + self.sums_at, dtype=Float32)
        sums = cute.make_tensor(sums, cute.make_layout(2 * self.stages * ROWS))
        return (thr_qk, thr_pv), (s_q, s_k, s_v), (s_acc, o_acc, p), sums

    # ---- the roles that work on tensor memory

    @cute.jit
    def multiply(self, tile: Tile, tiled_qk, tiled_pv, operands: tuple, pipelines: list):
        _, (s_q, s_k, s_v), (s_acc, o_acc, p), _ = operands
        pipe_q, pipe_ring, pipe_s, pipe_p, pipe_o, _ = pipelines
        self.mma(
            tiled_qk,
            tiled_pv,
            s_q,
            s_k,
            s_v,
            s_acc,
            o_acc,
            p,
            pipe_q,
            pipe_ring,
            pipe_s,
            pipe_p,
            pipe_o,
            True,
            Blocks(tile, Int32(0)),
            Int32(1),
            lambda batch: Lengths(None),
            None,
            tile_scheduler=OneTile(tile.block_min < tile.block_max),
        )

    @cute.jit
    def soften(
        self,
        tile: Tile,
        thread: Int32,
        stage: Int32,
        operands: tuple,
        pipelines: list,
        paging: Paging,
        group: Int32,
        tile_tokens: Int32,
        causal: Int32,
        scale_log2: Float32,
    ):
        (thr_qk, _), _, (s_acc, _, _), sums = operands
        _, _, pipe_s, pipe_p, _, pipe_sums = pipelines
        bad_pages = self.any_bad_page(tile, thread & 31, paging)
        unmasked_end = ptx.maximum_i32(tile.block_min, tile.end_of(tile.first_token, causal) // KEYS)
        blocks = Blocks(tile, ptx.select(bad_pages != 0, tile.block_min, unmasked_end))
        token = tile.first_token + stage * (tile_tokens // self.stages) + (thread & 127) // group
        mask = RowMask(tile.end_of(token, causal), bad_pages, paging)
        self.softmax_loop(
            stage=stage,
            tStS=s_acc,
            softmax_scale_log2=scale_log2,
            softmax_scale=None,
            descale_tensors=None,
            thr_mma_qk=thr_qk,
            sScale=sums,
            mLSE=sums,  # wanted: the maxima go to shared memory too
            pipeline_s_p_o=pipe_s,
            pipeline_p_lastsplit=pipe_p,
            pipeline_sm_stats=pipe_sums,
            sm_stats_barrier=self.ready(),
            pipeline_s0_s1_sequence=None,
            learnable_sink=None,
            block_info=blocks,
            num_splits=Int32(1),
            SeqlenInfoCls=lambda batch: Lengths(None),
            AttentionMaskCls=lambda seqlen: mask,
            tile_scheduler=OneTile(tile.block_min < tile.block_max),
        )

    @cute.jit
    def correct(self, tile: Tile, output, operands: tuple, pipelines: list):
        (thr_qk, thr_pv), _, (s_acc, o_acc, _), sums = operands
        _, _, pipe_s, _, pipe_o, pipe_sums = pipelines
        lengths = Lengths(output)
        self.correction_loop(
            thr_qk,
            thr_pv,
            s_acc,
            o_acc,
            sums,
            None,
            None,
            lengths,
            pipe_s,
            pipe_o,
            pipe_sums,
            self.ready(),
            None,
            None,
            None,
            None,
            None,
            None,
            output.scale_log2,
            Blocks(tile, Int32(0)),
            Int32(1),
            lambda batch: lengths,
            tile_scheduler=OneTile(tile.block_min < tile.block_max),
        )

    def ready(self):
        """Maxima of a warp's rows, for the correction warp of the same rows."""
        return fa_pipeline.NamedBarrier(barrier_id=int(NamedBarrierFwdSm100.SoftmaxStatsW0), num_threads=64)

    def process_work_tile(self, *unused):
        return True  # OneTile has none without blocks


def programs():
    return [Program(f"dense_{dtype}_m{ROWS * stages}", Dense(dtype, stages)) for dtype in DTYPES for stages in (1, 2)]
