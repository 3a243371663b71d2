#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace m3_sparse {

// kernel-src/neutral/topk.py. out int32 [T, Hi, k], scores fp32 [T, Hi, blocks] with a contiguous last dimension,
// cu_seqlens_q [B + 1], seqused_k [B], `reach` tokens of a block-table row; checked by the caller.
// `carveout`: what decode_scores, the launch before it in the stream, returned.
void topk(const torch::stable::Tensor& out, const torch::stable::Tensor& scores,
          const torch::stable::Tensor& cu_seqlens_q, const torch::stable::Tensor& seqused_k, std::int64_t reach,
          std::int64_t local_blocks, std::int64_t init_blocks, int carveout);

}  // namespace m3_sparse
