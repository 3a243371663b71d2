#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace m3_sparse {

// What `dense` is called with; checked by the caller. Shapes: q, out [T, Hq, 128]; lse [T, Hq]; k_cache, v_cache
// [P, Hkv, page, 128]; block_table [B, M]; cu_seqlens_q [B + 1]; seqused_k [B]; k_scale, v_scale one or Hkv elements.
// B >= 1, P >= 1.
struct DenseArguments {
  const torch::stable::Tensor& out;
  const std::optional<torch::stable::Tensor>& lse;
  const torch::stable::Tensor& q;
  const torch::stable::Tensor& k_cache;
  const torch::stable::Tensor& v_cache;
  const torch::stable::Tensor& block_table;
  const torch::stable::Tensor& cu_seqlens_q;
  const torch::stable::Tensor& seqused_k;
  const std::optional<torch::stable::Tensor>& k_scale;
  const std::optional<torch::stable::Tensor>& v_scale;
  double softmax_scale;
  bool causal;
};

constexpr std::int64_t kMostDenseSplits = 32;

// How a problem is cut, from shapes and the device alone: rows of a tile (query heads of a KV head times tokens), KV
// heads whose tiles take turns, and CTAs that share a tile's keys. The bits of a result depend on rows and splits.
struct DensePlan {
  int rows;  // 64 or 128 on SM90, else 128 or 256
  int tile_tokens;
  int stages;  // parts of a tile that are copied by themselves
  int neighbours_log2;
  int splits;
};
DensePlan dense_plan(std::int64_t tokens, std::int64_t requests, std::int64_t q_heads, std::int64_t kv_heads,
                     std::int64_t reach, int capability, int multiprocessors);

// dense.py of kernel-src/sm90 or sm100, then, with splits, combine.py. `splits` 0: those of `dense_plan`.
void dense(const DenseArguments& a, std::int64_t splits);

}  // namespace m3_sparse
