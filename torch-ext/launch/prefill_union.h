#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "decode.h"

namespace m3_sparse {

// u(4) of a sequence (kernel-src/neutral/union.py) from which its tokens take the KV-stationary formulation. On an H200
// the two take equally long at 1.7 to 1.8 for a 16-bit cache and one widened to it (8k to 128k keys, 4k queries and
// more) and at 1.45 to 1.6 for float8, where union tiles widen K and V once for 8 tokens and KV-stationary once for
// all: docs/prefill.md. On SM100 and SM103 a tile multiplies for all 8 tokens what one of them chose, some 1.3 times
// u(4), and partial results cost less beside it; by the clocks in kernel-src/sm100/*.py they meet at 1.25. Nothing
// there is measured.
constexpr double union_threshold(bool is_float8, int capability) {
  if (capability >= 100) return 1.25;
  return is_float8 ? 1.5 : 1.75;
}

// Where the lists of all tiles lie: neutral/union.py says what they hold.
struct UnionLists {
  std::int64_t slots, capacity;
  bool by_entry;  // `pages` counts entries of the page table
  void *tiles, *counts, *words, *pages;
  void* choice;                  // int32 [B]: 1 where a sequence takes the KV-stationary formulation
  torch::stable::Tensor memory;  // all of the above
};

// Bytes of the lists, by shapes alone.
std::int64_t union_workspace_bytes(const DecodeArguments& a);

// And of the widened copies of a float8 cache, which live as long as the call of prefill_union.
std::int64_t union_copies_bytes(const DecodeArguments& a);

// Why the union formulation cannot take this call, or null. Shapes, dtypes and strides only; the arguments have passed
// the checks of aot_sparse_attention.
const char* union_refuses(const DecodeArguments& a);

// Whether the forward takes a copy of a float8 cache that is widened once (sm90/prefill_widen.py): by shapes.
bool union_widens(const DecodeArguments& a);

// neutral/union.py: the lists, and with `choose` the choice for each sequence. `threshold` 0: union_threshold.
// `by_entry`: for a widened copy.
UnionLists union_lists(const DecodeArguments& a, bool choose, double threshold = 0, bool by_entry = false);

// sm90/prefill_union.py, after sm90/prefill_widen.py for lists by entry. Writes the rows of sequences that take this
// formulation (all without a choice, and those past the last sequence in any case).
void prefill_union(const DecodeArguments& a, const UnionLists& lists, bool by_choice);

}  // namespace m3_sparse
