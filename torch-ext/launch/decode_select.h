#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace m3_sparse {

// CTAs of the cluster that takes a request, or 0 where scoring and top-k are better two launches (few requests, which
// one cluster each would leave much of the chip idle). A function of shapes and of the number of multiprocessors only;
// no choice changes an id.
unsigned plan_cluster(std::int64_t tokens, std::int64_t requests, std::int64_t heads, std::int64_t blocks,
                      int multiprocessors);

// kernel-src/neutral/decode_select.py. out int32 [T, Hi, k], scores fp32 [T, Hi, blocks] (a workspace, of which the
// kernel writes what it needs), index_q [T, Hi, 128], index_k [P, page, 128], block_table [B, M], cu_seqlens_q [B + 1],
// seqused_k [B]; checked by the caller. `cluster` from plan_cluster, not 0.
void decode_select(const torch::stable::Tensor& out, const torch::stable::Tensor& scores,
                   const torch::stable::Tensor& index_q, const torch::stable::Tensor& index_k,
                   const torch::stable::Tensor& block_table, const torch::stable::Tensor& cu_seqlens_q,
                   const torch::stable::Tensor& seqused_k, std::int64_t local_blocks, std::int64_t init_blocks,
                   unsigned cluster);

}  // namespace m3_sparse
