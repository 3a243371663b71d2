// The tensor map. recording_driver.c's cuTensorMapEncodeTiled leaves its arguments in the 128 bytes: base, a word for the
// driver's own marks, 4 strides in bytes (64 bits each); 5 extents, 5 box sizes, type, rank, swizzle, promotion (32 bits each). The hardware's own
// layout is taken too; it has zeros where the rank stands. It was found by experiment (CuTe-DSL's host code writes it
// inline, and an H200's encode call gives the same): words 0-1 base; word 2: bits 4-6 rank - 1, 7-10 type, 11-12
// interleaving, 13-14 swizzle; words 3-6 strides / 16 of dimensions 1 on, word 7 their upper 4 bits each; words 8-12
// extents - 1; word 13: bits 24-31 box of dimension 0 - 1, 0-14 element strides - 1; word 14 the other boxes - 1. Out
// of bounds is zero.
#pragma once

#include "core.h"

namespace ptxemu {

struct TensorMap {
  u64 base;
  u32 type, rank, swizzle;  // CUtensorMapDataType, 1 to 5, CUtensorMapSwizzle
  u64 strides[4];           // bytes, of dimensions 1 on
  u32 last[5];              // extent - 1
  u32 box[5];

  explicit TensorMap(const u8* bytes) {
    u32 w[32];
    std::memcpy(w, bytes, sizeof w);
    if (std::all_of(w, w + 32, [](u32 x) { return x == 0; })) fail("no tensor map: these 128 bytes are zero");
    base = w[0] | u64{w[1]} << 32;
    rank = w[23];
    if (rank != 0) {
      type = w[22], swizzle = w[24];
      std::memcpy(strides, w + 4, sizeof strides);
      for (u32 i = 0; i < 5; ++i) last[i] = w[12 + i] - 1, box[i] = w[17 + i];
    } else {
      rank = (w[2] >> 4 & 7) + 1, type = w[2] >> 7 & 15, swizzle = w[2] >> 13 & 3;
      if (type == 10) type = 9;  // bf16
      if (w[2] >> 11 & 3) fail("interleaved tensor maps aren't implemented");
      if (w[13] & 0x7FFF) fail("tensor maps with element strides aren't implemented");
      for (u32 i = 0; i < 4; ++i) strides[i] = (w[3 + i] | u64{w[7] >> (4 * i) & 15} << 32) << 4;
      for (u32 i = 0; i < 5; ++i) last[i] = w[8 + i], box[i] = (i ? w[14] >> (8 * (i - 1)) & 255 : w[13] >> 24) + 1;
    }
    if (rank > 5 || swizzle > 3) fail("these 128 bytes are no tensor map (rank %u, swizzle %u)", rank, swizzle);
  }
  u32 element_size() const {
    // CUtensorMapDataType: u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16
    static constexpr u8 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    if (type >= sizeof sizes) fail("tensor map: data type %u isn't implemented", type);
    return sizes[type];
  }
  u32 span() const { return swizzle == 0 ? 0 : 16u << swizzle; }
  u32 row_bytes() const { return box[0] * element_size(); }
  u32 rows() const {
    u32 n = 1;
    for (u32 d = 1; d < rank; ++d) n *= box[d];
    return n;
  }
  u32 bytes() const { return row_bytes() * rows(); }
};

// XORs the 16-byte chunk within the span (address bits 4 to 6) with the row (bits 7 to 9) of an absolute address.
inline u32 swizzled(u32 address, u32 span) {
  return span ? address ^ ((address >> 7 & (span / 16 - 1)) << 4) : address;
}

}  // namespace ptxemu
