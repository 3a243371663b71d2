#include "cache.h"

namespace m3_sparse {

launch::TensorMap cache_map(const torch::stable::Tensor& cache, CUtensorMapL2promotion promotion) {
  const std::int64_t size = cache.element_size(), page = cache.size(2);
  const auto tokens = static_cast<unsigned>(page_tokens(cache));
  const bool slots = has_slots(cache);
  return launch::tensor_map(cache, cache.data_ptr(), static_cast<int>(size), {128, page, cache.size(1), cache.size(0)},
                            {cache.stride(2) * size, cache.stride(1) * size, cache.stride(0) * size},
                            {size == 1 ? 128u : 64u, slots ? 1u : tokens, 1, slots ? tokens : 1u}, promotion);
}

}  // namespace m3_sparse
