// The two forms of a cache, and its tensor map.
//
// Pages [P, Hkv, 64 or 128, 128]: an entry of the page table is a page. Slots [N, Hkv, 1, 128]: the tokens one by one,
// and an entry is the slot of the first of a run of tokens in slots that follow one another: 128 of them for attention,
// 64 for index keys [N, 1, 128]. The last run may reach past the last slot: nothing is read there. The kernels see runs
// as pages that overlap.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "tensor_map.h"

namespace m3_sparse {

inline bool has_slots(const torch::stable::Tensor& cache) { return cache.size(cache.dim() - 2) == 1; }

// Tokens that an entry of the page table stands for.
inline std::int64_t page_tokens(const torch::stable::Tensor& kv_cache) {
  return has_slots(kv_cache) ? 128 : kv_cache.size(2);
}
inline std::int64_t index_page_tokens(const torch::stable::Tensor& index_k) {
  return has_slots(index_k) ? 64 : index_k.size(1);
}

// From a token to the one behind it, in elements.
inline std::int64_t token_stride(const torch::stable::Tensor& cache) {
  return has_slots(cache) ? cache.stride(0) : cache.stride(cache.dim() - 2);
}

// Of K or V: boxes of all tokens of a page and 128 bytes of a head. A kernel asks for them at {dim, 0, head, page}.
// With slots the second coordinate has nothing to count, and the box extends along the last one, where the map ends at
// the last slot.
launch::TensorMap cache_map(const torch::stable::Tensor& cache,
                            CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

}  // namespace m3_sparse
