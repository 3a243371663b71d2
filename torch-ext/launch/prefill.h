#pragma once

#include "decode.h"

namespace m3_sparse {

// How sparse_attention computes its rows. The formulations agree up to rounding; a row's bits depend on the formulation
// and on nothing else around the row.
enum class Formulation {
  automatic = 0,      // by `plan_attention`
  union_tiles = 1,    // prefill_union.h
  kv_stationary = 2,  // prefill_kv_stationary.h
  decode = 3,         // decode.h
  by_sequence = 4,    // union tiles or KV-stationary, for each sequence, chosen on the device
  union_widened = 5,  // union tiles of a float8 cache that is widened first, whatever the shape: for tests
};

// What a call takes, by shapes, dtypes, strides and device alone. `wanted` automatic or one that is forced; throws,
// with the reason, if that cannot take the call.
Formulation plan_attention(const DecodeArguments& a, Formulation wanted);

// Bytes that `attention` allocates by this plan, by shapes and device alone.
std::int64_t attention_workspace(const DecodeArguments& a, Formulation plan);

// By `plan`, which is not automatic. `splits` and `overlap` as in decode.h.
void attention(const DecodeArguments& a, Formulation plan, int splits, bool overlap);

}  // namespace m3_sparse
