#pragma once

#include <cstdint>

#include "decode.h"

namespace m3_sparse {

// How the KV-stationary prefill cuts its work; by shapes and device alone.
struct KvStationaryPlan {
  int rows;  // of a token in a tile: 16, or 8 for up to 8 query heads a KV head
  // A chunk, whose partial results are kept at a time: 2^chunk_bits tokens x chunk_heads KV heads (a divisor of Hkv).
  int chunk_bits, chunk_heads;
  std::int64_t units, segments, token_chunks, chunks, most_tiles;
  std::int64_t workspace_bytes;
};

KvStationaryPlan plan_kv_stationary(const DecodeArguments& a, int chunk_bits = 0, int chunk_heads = 0);

// Why `prefill_kv_stationary` cannot take this call, or null. It looks at shapes, dtypes and strides; the arguments
// have passed the checks of aot_sparse_attention. The device's architecture is checked by the launch.
const char* kv_stationary_refuses(const DecodeArguments& a);

// neutral/invert.py, sm90/prefill.py, neutral/prefill_combine.py. `formulation`: int32 [B] on the device; only
// sequences with a 1 are computed, rows of others are not written. Null: all. Rows past the last sequence are written
// as empty rows in either case, unless no sequence takes part. `chunk_bits`, `chunk_heads` 0: the plan's.
void prefill_kv_stationary(const DecodeArguments& a, const void* formulation, int chunk_bits = 0, int chunk_heads = 0);

}  // namespace m3_sparse
