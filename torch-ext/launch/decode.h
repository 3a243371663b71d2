#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace m3_sparse {

// What `decode` is called with; checked by the caller. Shapes: q, out [T, Hq, 128]; lse [T, Hq]; k_cache, v_cache
// [P, Hkv, page, 128]; block_indices [T, Hkv, K]; block_table [B, M]; cu_seqlens_q [B + 1]; seqused_k [B];
// k_scale, v_scale one or Hkv elements. B >= 1.
struct DecodeArguments {
  const torch::stable::Tensor& out;
  const std::optional<torch::stable::Tensor>& lse;
  const torch::stable::Tensor& q;
  const torch::stable::Tensor& k_cache;
  const torch::stable::Tensor& v_cache;
  const torch::stable::Tensor& block_indices;
  const torch::stable::Tensor& block_table;
  const torch::stable::Tensor& cu_seqlens_q;
  const torch::stable::Tensor& seqused_k;
  const std::optional<torch::stable::Tensor>& k_scale;
  const std::optional<torch::stable::Tensor>& v_scale;
  double softmax_scale;
  bool causal;
};

// CTAs of a row (token and KV head), a cluster: 1, 2, 4 or 16 (selections of at most 16 blocks). By shape and device
// alone; the result has the same bits for each, only the time differs.
int decode_splits(std::int64_t rows, std::int64_t width, int multiprocessors);

// kernel-src/neutral/decode.py. `splits` 0: those of `decode_splits`. `overlap`: the launch may start before the kernel
// ahead of it in the stream has ended.
void decode(const DecodeArguments& a, int splits, bool overlap);

}  // namespace m3_sparse
