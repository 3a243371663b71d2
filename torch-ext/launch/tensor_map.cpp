#include "tensor_map.h"

#include <algorithm>

#include "driver.h"
#include "launch.h"

namespace m3_sparse::launch {

TensorMap tensor_map(const torch::stable::Tensor& where, const void* base, int element_bytes,
                     std::initializer_list<std::int64_t> extents, std::initializer_list<std::int64_t> byte_strides,
                     std::initializer_list<unsigned> box, CUtensorMapL2promotion promotion) {
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
  const int device = where.is_cpu() ? -1 : static_cast<int>(where.get_device_index());
  CurrentContext context(device);
  TensorMap map{};
  check(driver().TensorMapEncodeTiled(&map, type, rank, const_cast<void*>(base), sizes, strides, widths, ones,
                                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  context.restore();
  // Bit 21 of the second word must be 0 for a tensor below 128 KiB on Blackwell; drivers set it, and copies then fault
  // now and then. CUTLASS and Triton clear it too, and CuTe-DSL's host code never sets it there.
  constexpr cuuint64_t kSmall = 128 << 10;
  cuuint64_t span = sizes[0] * element_bytes;
  for (int dimension = 1; dimension < rank; ++dimension) span += (sizes[dimension] - 1) * strides[dimension - 1];
  if (span < kSmall && compute_capability(device) >= 100) map.opaque[1] &= ~(cuuint64_t{1} << 21);
  return map;
}

}  // namespace m3_sparse::launch
