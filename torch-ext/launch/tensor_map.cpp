#include "tensor_map.h"

#include <algorithm>

#include "driver.h"

namespace m3_sparse::launch {

TensorMap tensor_map(const void* base, int element_bytes, std::initializer_list<std::int64_t> extents,
                     std::initializer_list<std::int64_t> byte_strides, std::initializer_list<unsigned> box,
                     CUtensorMapL2promotion promotion) {
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank - 1];
  const cuuint32_t ones[kMaxRank] = {1, 1, 1, 1, 1};
  cuuint32_t widths[kMaxRank];
  const int rank = static_cast<int>(extents.size());
  std::copy(extents.begin(), extents.end(), sizes);
  std::copy(box.begin(), box.end(), widths);
  // The stride of a dimension with one element is never used but is checked.
  cuuint64_t last = sizes[0] * element_bytes;
  int i = 0;
  for (std::int64_t stride : byte_strides) {
    strides[i] = sizes[i + 1] == 1 ? last : static_cast<cuuint64_t>(stride);
    last = strides[i++];
  }
  const CUtensorMapDataType type =
      element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  TensorMap map{};
  check(driver().TensorMapEncodeTiled(&map, type, rank, const_cast<void*>(base), sizes, strides, widths, ones,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace m3_sparse::launch
