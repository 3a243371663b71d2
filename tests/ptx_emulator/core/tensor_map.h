// The tensor map as the emulated driver's cuTensorMapEncodeTiled leaves it: the arguments of that call, not the layout
// of any GPU. recording_driver.c writes it.
#pragma once

#include "core.h"

namespace ptxemu {

constexpr u32 kTensorMapMagic = 0x70614D54;  // "TMap"

struct TensorMap {
  u32 magic;
  u8 type, rank, interleave, swizzle;  // CUtensorMapDataType, 1 to 5, CUtensorMapInterleave, CUtensorMapSwizzle
  u64 base;
  u64 strides[4];  // bytes, of dimensions 1 on
  u32 last[5];     // extent - 1
  u16 box[5];
  u8 step[5];  // element strides
  u8 fill;     // CUtensorMapFloatOOBfill
  u8 unused[44];

  u32 element_size() const {
    // CUtensorMapDataType: u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32 ftz, tf32, tf32 ftz
    static constexpr u8 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if (type >= sizeof sizes) fail("tensor map: data type %u isn't implemented", type);
    return sizes[type];
  }
  u32 span() const {
    if (swizzle > 3) fail("tensor map: swizzle mode %u isn't implemented", swizzle);
    return swizzle == 0 ? 0 : 16u << swizzle;
  }
  u32 row_bytes() const { return box[0] * element_size(); }
  u32 rows() const {
    u32 n = 1;
    for (u32 d = 1; d < rank; ++d) n *= box[d];
    return n;
  }
  u32 bytes() const { return row_bytes() * rows(); }
};
static_assert(sizeof(TensorMap) == 128);

// XORs the 16-byte chunk within the span (address bits 4 to 6) with the row (bits 7 to 9) of an absolute address.
inline u32 swizzled(u32 address, u32 span) {
  return span ? address ^ ((address >> 7 & (span / 16 - 1)) << 4) : address;
}

}  // namespace ptxemu
