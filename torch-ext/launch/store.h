#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace m3_sparse {

// kernel-src/neutral/store.py. k, v [T, Hkv, 128], k_cache, v_cache [P, Hkv, page, 128], index_k [T, 128] and
// index_k_cache [P', page', 128] or neither, slots [T] int32 or int64, scales fp32 with 1 or Hkv elements; checked by
// the caller. One launch converts from one dtype to one: if both KV and index K are converted, their dtypes agree.
void store_kv(const torch::stable::Tensor& k, const torch::stable::Tensor& v,
              const std::optional<torch::stable::Tensor>& index_k, const torch::stable::Tensor& k_cache,
              const torch::stable::Tensor& v_cache, const std::optional<torch::stable::Tensor>& index_k_cache,
              const torch::stable::Tensor& slots, const std::optional<torch::stable::Tensor>& k_scale,
              const std::optional<torch::stable::Tensor>& v_scale);

}  // namespace m3_sparse
