// tcgen05: tensor memory, seen by its loads, stores and copies and by the matrix multiplication.
//
// Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. A warp reaches the 32 lanes
// of its quarter, index % 4.
#pragma once

#include "matrix.h"

namespace ptxemu {

constexpr u32 kColumns = 512, kRows = 128;

inline Race* detector(Warp& w) { return w.cta->cluster->race.get(); }

void require_allocated(const Cta& cta, u32 column, u32 count, const char* what);

// An operand in shared memory that the tensor core's pipe reads: bounds, proxy and race checks.
void touch_operand(Warp& w, u32 agent, const Operand& o, u32 rows, u32 k, const char* what);

}  // namespace ptxemu
