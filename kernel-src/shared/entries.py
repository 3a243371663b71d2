"""How kernels that exist for SM90 and again for SM100 are launched: one list of parameters, so one call from the launcher.

For the kernel class: `entry`, which wants `kernel`, `threads` and `dynamic_smem` of it, and `example` (shared/program.py).
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from shared import tma


class PrefillEntry:
    """KV-stationary forward: tensor maps of q, K and V, then what torch-ext/launch/prefill_kv_stationary.cpp packs."""

    example = (
        [Int64(16)] * 9
        + [Int32(1)] * 12
        + [Float32(1.0)]
        + [Int64(16)] * 11
        + [Int32(1)] * 4
        + [Int64(16)]
        + [Int32(1)] * 5
    )

    @cute.jit
    def entry(
        self,
        chunks: Int64,
        heads: Int64,
        entries: Int64,
        partials: Int64,
        sums: Int64,
        k_scale: Int64,
        k_scale_head: Int64,
        q_policy: Int64,
        kv_policy: Int64,
        chunk: Int32,
        first_token: Int32,
        tokens: Int32,
        first_head: Int32,
        chunk_heads: Int32,
        kv_heads: Int32,
        group: Int32,
        width: Int32,
        page_bits: Int32,
        most_tiles: Int32,
        early: Int32,
        opaque: Int32,
        softmax_scale: Float32,
        combine_partials: Int64,
        combine_sums: Int64,
        state: Int64,
        out: Int64,
        lse: Int64,
        v_scale: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        v_scale_head: Int64,
        combine_token: Int32,
        combine_tokens: Int32,
        combine_head: Int32,
        selective: Int32,
        counters: Int64,
        chunk_count: Int32,
        combined_chunks: Int32,
        chunk_bits: Int32,
        all_tokens: Int32,
        place_slots: Int32,
        stream: cuda.CUstream,
    ):
        maps = [tma.example_map(BFloat16) for _ in range(3)]
        self.kernel(
            *maps,
            chunks,
            heads,
            entries,
            partials,
            sums,
            k_scale,
            k_scale_head,
            q_policy,
            kv_policy,
            chunk,
            first_token,
            tokens,
            first_head,
            chunk_heads,
            kv_heads,
            group,
            width,
            page_bits,
            most_tiles,
            early,
            opaque,
            softmax_scale,
            combine_partials,
            combine_sums,
            state,
            out,
            lse,
            v_scale,
            out_token,
            out_head,
            lse_token,
            lse_head,
            v_scale_head,
            combine_token,
            combine_tokens,
            combine_head,
            selective,
            counters,
            chunk_count,
            combined_chunks,
            chunk_bits,
            all_tokens,
            place_slots,
        ).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], smem=self.dynamic_smem, stream=stream, min_blocks_per_mp=1)


class UnionEntry:
    """Union tiles: tensor maps of q, K and V, then what torch-ext/launch/prefill_union.cpp packs."""

    example = [Int64(16)] * 15 + [Int32(1)] * 7 + [Float32(1.0)]

    @cute.jit
    def entry(
        self,
        tiles: Int64,
        counts: Int64,
        words: Int64,
        pages: Int64,
        choice: Int64,
        out: Int64,
        lse: Int64,
        k_scale: Int64,
        v_scale: Int64,
        out_token: Int64,
        out_head: Int64,
        lse_token: Int64,
        lse_head: Int64,
        k_scale_head: Int64,
        v_scale_head: Int64,
        slots: Int32,
        heads: Int32,
        requests: Int32,
        page_bits: Int32,
        capacity: Int32,
        causal: Int32,
        bf16_query: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        tensor_map = tma.example_map(BFloat16)
        self.kernel(
            tensor_map,
            tensor_map,
            tensor_map,
            tiles,
            counts,
            words,
            pages,
            choice,
            out,
            lse,
            k_scale,
            v_scale,
            out_token,
            out_head,
            lse_token,
            lse_head,
            k_scale_head,
            v_scale_head,
            slots,
            heads,
            requests,
            page_bits,
            capacity,
            causal,
            bf16_query,
            softmax_scale,
        ).launch(
            grid=[slots, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=1,
        )


class ScoreEntry:
    """Scoring: tensor maps of the queries and keys, then what torch-ext/launch/prefill_score.cpp packs."""

    example = [Int64(16)] * 11 + [Int32(1)] * 10

    @cute.jit
    def entry(
        self,
        q: Int64,
        k: Int64,
        out: Int64,
        parts: Int64,
        block_table: Int64,
        cu_seqlens_q: Int64,
        seqused_k: Int64,
        out_token_stride: Int64,
        out_head_stride: Int64,
        out_slot_stride: Int64,
        table_stride: Int64,
        num_tokens: Int32,
        num_requests: Int32,
        head_shift: Int32,
        num_pages: Int32,
        table_width: Int32,
        page_shift: Int32,
        topk: Int32,
        local_blocks: Int32,
        init_blocks: Int32,
        vectors: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            tma.example_map(self.query_type),
            tma.example_map(self.key_type),
            out,
            parts,
            block_table,
            cu_seqlens_q,
            seqused_k,
            out_token_stride,
            out_head_stride,
            out_slot_stride,
            table_stride,
            num_tokens,
            num_requests,
            head_shift,
            num_pages,
            table_width,
            page_shift,
            topk,
            local_blocks,
            init_blocks,
            vectors,
        ).launch(
            grid=[num_requests, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=1,
        )


class DenseEntry:
    """Dense attention: tensor maps of q, K and V, then what torch-ext/launch/dense.cpp packs."""

    example = [Int64(16)] * 16 + [Int32(1)] * 11 + [Float32(1.0)]

    @cute.jit
    def entry(
        self,
        page_table: Int64,
        cu_seqlens: Int64,
        seqused: Int64,
        out: Int64,
        lse: Int64,
        k_scale: Int64,
        v_scale: Int64,
        page_table_row: Int64,
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
        page_width: Int32,
        pages: Int32,
        page_shift: Int32,
        reach: Int32,
        group: Int32,
        tile_tokens: Int32,
        neighbours_log2: Int32,  # KV heads whose tiles take turns
        causal: Int32,
        splits: Int32,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            *[tma.example_map(self.element) for _ in range(3)],
            page_table,
            cu_seqlens,
            seqused,
            out,
            lse,
            k_scale,
            v_scale,
            page_table_row,
            out_split,
            out_token,
            out_head,
            lse_split,
            lse_token,
            lse_head,
            k_scale_head,
            v_scale_head,
            tokens,
            requests,
            page_width,
            pages,
            page_shift,
            reach,
            group,
            tile_tokens,
            neighbours_log2,
            causal,
            splits,
            softmax_scale,
        ).launch(
            grid=[1, 1, 1],  # the launcher's own: torch-ext/launch/dense.cpp
            block=[self.threads, 1, 1],
            smem=self.dynamic_smem,
            stream=stream,
            min_blocks_per_mp=1,
        )
