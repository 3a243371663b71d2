#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

// out [T, H, 128] and lse [T, H] are written from outs [N, T, H, 128] and lses [N, T, H].
void aot_merge_states(torch::stable::Tensor out, torch::stable::Tensor lse, torch::stable::Tensor outs,
                      torch::stable::Tensor lses);

// Rows of k, v [T, Hkv, 128] and index_k [T, 128] go to their slots of the caches.
void aot_store_kv(torch::stable::Tensor k, torch::stable::Tensor v, std::optional<torch::stable::Tensor> index_k,
                  torch::stable::Tensor k_cache, torch::stable::Tensor v_cache,
                  std::optional<torch::stable::Tensor> index_k_cache, torch::stable::Tensor slot_mapping,
                  std::optional<torch::stable::Tensor> k_scale, std::optional<torch::stable::Tensor> v_scale);

// scores [T, Hi, blocks] is written.
void aot_block_scores(torch::stable::Tensor scores, torch::stable::Tensor index_q, torch::stable::Tensor index_k_cache,
                      torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                      torch::stable::Tensor seqused_k);

// out [T, Hi, topk] is written, and scores if given.
void aot_select_blocks(torch::stable::Tensor out, std::optional<torch::stable::Tensor> scores,
                       torch::stable::Tensor index_q, torch::stable::Tensor index_k_cache,
                       torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                       torch::stable::Tensor seqused_k, std::int64_t local_blocks, std::int64_t init_blocks,
                       std::int64_t way);

// out [T, Hq, 128] and, if given, lse [T, Hq] are written. As the public sparse_attention; K <= 32, Hq / Hkv <= 16.
void aot_sparse_attention(torch::stable::Tensor out, std::optional<torch::stable::Tensor> lse, torch::stable::Tensor q,
                          torch::stable::Tensor k_cache, torch::stable::Tensor v_cache,
                          torch::stable::Tensor block_indices, torch::stable::Tensor block_table,
                          torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, double softmax_scale,
                          bool causal, std::optional<torch::stable::Tensor> k_scale,
                          std::optional<torch::stable::Tensor> v_scale, std::int64_t splits, bool overlap,
                          std::int64_t formulation);

// out [T, Hq, 128] and, if given, lse [T, Hq] are written. As the public dense_attention; one 16-bit dtype.
void aot_dense_attention(torch::stable::Tensor out, std::optional<torch::stable::Tensor> lse, torch::stable::Tensor q,
                         torch::stable::Tensor k_cache, torch::stable::Tensor v_cache,
                         torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                         torch::stable::Tensor seqused_k, double softmax_scale, bool causal,
                         std::optional<torch::stable::Tensor> k_scale, std::optional<torch::stable::Tensor> v_scale,
                         std::int64_t splits);

torch::stable::Tensor aot_attention_plan(torch::stable::Tensor q, torch::stable::Tensor k_cache,
                                         torch::stable::Tensor v_cache, torch::stable::Tensor block_indices,
                                         torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                         torch::stable::Tensor seqused_k, bool causal, std::int64_t formulation);

// The lists of the union tiles (launch/prefill_union.h), as bytes.
torch::stable::Tensor aot_union_lists(torch::stable::Tensor q, torch::stable::Tensor k_cache,
                                      torch::stable::Tensor block_indices, torch::stable::Tensor block_table,
                                      torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, bool causal,
                                      double threshold);

// The KV-stationary prefill by itself (launch/prefill_kv_stationary.h).
void aot_sparse_attention_kv_stationary(torch::stable::Tensor out, std::optional<torch::stable::Tensor> lse,
                                        torch::stable::Tensor q, torch::stable::Tensor k_cache,
                                        torch::stable::Tensor v_cache, torch::stable::Tensor block_indices,
                                        torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                        torch::stable::Tensor seqused_k, double softmax_scale, bool causal,
                                        std::optional<torch::stable::Tensor> k_scale,
                                        std::optional<torch::stable::Tensor> v_scale,
                                        std::optional<torch::stable::Tensor> formulation, std::int64_t chunk_bits,
                                        std::int64_t chunk_heads);

// For the backend "jit" (launch/jit.h): whether this thread's launches take programs compiled at run time, returning
// what was so before; and one such program, its cubin as bytes and its parameters' sizes and alignments in turns, on
// the host.
bool jit_set_active(bool on);
void jit_supply(std::int64_t id, torch::stable::Tensor cubin, torch::stable::Tensor params, std::int64_t threads_x,
                std::int64_t threads_y, std::int64_t threads_z, std::int64_t dynamic_smem);
