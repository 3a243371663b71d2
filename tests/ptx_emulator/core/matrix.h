// Matrix operands of the tensor core: descriptors of shared memory and the product itself.
#pragma once

#include "core.h"
#include "memory.h"
#include "small_float.h"
#include "tensor_map.h"

namespace ptxemu {

// An R x K operand in shared memory as a descriptor and the instruction describe it. In "K-major" order the K elements
// of a row are neighbours; in "MN-major" order the rows of one k are.
struct Operand {
  u32 start, leading, stride, span;  // bytes; span 0: no swizzle
  bool mn_major;
  Element element;

  // Byte address of element (r, k). The core matrices are 8 rows (or 8 k) of 16 bytes; the layouts with a swizzle were
  // settled by flash-attn-4's kernels, those without by the CUTLASS canonical layouts (mma_sm90_desc.hpp).
  u32 address(u32 r, u32 k) const {
    const u32 size = static_cast<u32>(size_of(element));
    u32 a;
    if (!mn_major) {
      if (span == 0) {
        const u32 t = 16 / size;
        a = start + r % 8 * 16 + r / 8 * stride + k / t * leading + k % t * size;
      } else {
        a = start + r % 8 * span + r / 8 * stride + k * size;
      }
    } else if (span == 0) {
      const u32 t = 16 / size;
      a = start + r % t * size + r / t * stride + k % 8 * 16 + k / 8 * leading;
    } else {
      const u32 n = span / size;
      a = start + r % n * size + r / n * leading + k % 8 * span + k / 8 * stride;
    }
    return swizzled(a, span);
  }
  // The 16-byte granules of rows [first, first + rows).
  std::vector<u32> granules(u32 first, u32 rows, u32 k) const;
};

Operand hopper_operand(u64 descriptor, bool mn_major, Element element);
Operand blackwell_operand(u64 descriptor, bool mn_major, Element element);

// Checks that the operand lies in shared memory and reads rows [first, first + rows) as floats, row by row.
void read_operand(Cta& cta, const Operand& o, u32 first, u32 rows, u32 k, float* to);

// d[m][n] += a[m][k] * b[n][k]^T in float; `bt` is b transposed, [k][n], and rows of d are `pitch` apart.
void multiply(const float* a, const float* bt, float* d, u32 m, u32 n, u32 k, u32 pitch);

}  // namespace ptxemu
