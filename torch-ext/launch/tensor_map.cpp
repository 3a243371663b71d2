#include "tensor_map.h"

#include <algorithm>

#include "driver.h"

namespace m3_sparse::launch {

bool can_encode(const MapShape& shape) {
  for (int i = 0; i < 2; ++i)
    if (shape.sizes[i + 1] > 1 &&
        (shape.strides[i] <= 0 || shape.strides[i] % 16 != 0 || shape.strides[i] >= std::int64_t{1} << 40))
      return false;
  return true;
}

TensorMap encode(Element element, const void* base, const MapShape& shape) {
  const CUtensorMapDataType type = element == Element::e4m3  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : element == Element::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3], steps[3] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    sizes[i] = static_cast<cuuint64_t>(std::max<std::int64_t>(shape.sizes[i], 1));
    box[i] = shape.box[i];
  }
  for (int i = 0; i < 2; ++i)  // of a single element any stride will do
    strides[i] = shape.sizes[i + 1] > 1 ? static_cast<cuuint64_t>(shape.strides[i]) : 16;
  TensorMap map;
  check(
      driver().TensorMapEncodeTiled(reinterpret_cast<CUtensorMap*>(map.bytes), type, 3, const_cast<void*>(base), sizes,
                                    strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace m3_sparse::launch
