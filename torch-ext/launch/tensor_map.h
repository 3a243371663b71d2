// Tensor maps: what the tensor memory accelerator is told of a tensor. They are passed to kernels by value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace m3_sparse::launch {

// A CUtensorMap. A kernel wants it aligned to 64 bytes, the driver's encoder (CUDA 13) to 128.
struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

enum class Element { e4m3, f16, bf16 };

// The first dimension is contiguous; `strides` are those of the others, in bytes.
struct MapShape {
  std::array<std::int64_t, 3> sizes;
  std::array<std::int64_t, 2> strides;
  std::array<std::uint32_t, 3> box;
};

// Whether a tensor can be described: a dimension of several elements needs a stride that is a positive multiple of 16
// bytes below 2^40.
bool can_encode(const MapShape& shape);

// Boxes land in shared memory with the 128-byte swizzle; what lies outside the tensor reads as zero. Throws if the
// driver refuses.
TensorMap encode(Element element, const void* base, const MapShape& shape);

}  // namespace m3_sparse::launch
