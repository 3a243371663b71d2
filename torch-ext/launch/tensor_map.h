// Tensor maps: how a strided array in global memory is described to the hardware that copies boxes of it (TMA).
#pragma once

#include <cuda.h>  // types only
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>

namespace m3_sparse::launch {

// What a kernel takes for a `cute.CopyAtom`. Goes into launch::Params like any other argument.
using TensorMap = CUtensorMap;

// An array of `element_bytes` (1 or 2) a piece, on the device of the tensor `where`; extents and box innermost first,
// strides in bytes for all dimensions but the innermost. Boxes lie in shared memory in the 128-byte swizzle; what
// reaches outside the array is read as zeros. Needs: base and strides multiples of 16, a box at most 128 bytes wide. A
// dimension of extent 1 may have any stride. `promotion`: bytes that L2 fetches at a time.
TensorMap tensor_map(const torch::stable::Tensor& where, const void* base, int element_bytes,
                     std::initializer_list<std::int64_t> extents, std::initializer_list<std::int64_t> byte_strides,
                     std::initializer_list<unsigned> box,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

// Whether `tensor_map` can describe a dimension with this stride and extent.
constexpr bool fits_tensor_map(std::int64_t extent, std::int64_t byte_stride) {
  return extent == 1 || (byte_stride > 0 && byte_stride % 16 == 0 && byte_stride < (std::int64_t{1} << 40));
}

}  // namespace m3_sparse::launch
