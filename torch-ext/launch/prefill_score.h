#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace m3_sparse {

// The ways from queries and keys to a selection.
enum class Selection {
  by_shape,
  decode,  // decode_score.py, the scores of every row in memory, topk.py
  stored,  // prefill_score.py in its `scores` variant, topk.py
  fused,   // prefill_score.py and its fold: no score in memory
};

// Whether prefill_score.py of kernel-src/sm90 or sm100 can take the tensors: architecture, heads, size, strides. Says
// nothing of speed.
bool prefill_scores_fit(const torch::stable::Tensor& index_q, const torch::stable::Tensor& index_k,
                        std::int64_t requests, std::int64_t blocks);

// The choice, from shapes, dtypes and strides alone.
Selection choose_selection(const torch::stable::Tensor& index_q, const torch::stable::Tensor& index_k,
                           std::int64_t requests, std::int64_t blocks, bool scores_wanted);

// Scores fp32 [T, Hi, blocks] of all candidates. With `fill` all other elements are -inf. Arguments as those of
// decode_scores.
void prefill_scores(const torch::stable::Tensor& scores, const torch::stable::Tensor& index_q,
                    const torch::stable::Tensor& index_k, const torch::stable::Tensor& block_table,
                    const torch::stable::Tensor& cu_seqlens_q, const torch::stable::Tensor& seqused_k, bool fill);

// out int32 [T, Hi, topk], topk <= 32.
void prefill_select(const torch::stable::Tensor& out, const torch::stable::Tensor& index_q,
                    const torch::stable::Tensor& index_k, const torch::stable::Tensor& block_table,
                    const torch::stable::Tensor& cu_seqlens_q, const torch::stable::Tensor& seqused_k,
                    std::int64_t local_blocks, std::int64_t init_blocks);

}  // namespace m3_sparse
