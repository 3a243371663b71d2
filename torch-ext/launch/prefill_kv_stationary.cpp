#include "prefill_kv_stationary.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>

#include "cache.h"
#include "cubins.h"
#include "launch.h"
#include "tensor_map.h"

namespace m3_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using I64 = std::int64_t;
using I32 = std::int32_t;
using Address = const void*;
using Map = launch::TensorMap;

using CountParams =
    launch::Params<Address, Address, Address, Address, Address,  // ids, page table, offsets, lengths, formulation
                   Address, Address,                             // counts, state
                   I64, I64, I64, I64,                           // bytes: ids token, head, slot; page table row
                   I32, I32, I32, I32, I32, I32, I32, I32, I32,
                   I32>;  // T, B, Hkv, K, M, P, log2 page, reach, blocks, causal
using ScanParams = launch::Params<Address, Address, Address, Address, Address, Address,
                                  Address,  // offsets, lengths, formulation, counts, bins, rows, counters
                                  I32, I32, I32, I32, I32, I32, I32, I32,
                                  I32>;  // T, B, Hkv, reach, blocks, log2 chunk, its heads, log2 tile, chunks
using ScatterParams =
    launch::Params<Address, Address, Address, Address, Address,           // ids, page table, offsets, lengths, state
                   Address, Address, Address, Address, Address, Address,  // counts, bins, rows, chunks, heads, entries
                   I64, I64, I64, I64,                                    // as CountParams
                   I32, I32, I32, I32, I32, I32, I32, I32, I32, I32,      // as CountParams
                   I32, I32, I32, I32, I32>;  // log2 chunk, its heads, log2 tile, segments, most tiles
using ForwardParams =
    launch::Params<Map, Map, Map,                                // q, K, V
                   Address, Address, Address, Address, Address,  // chunks, heads, entries, partials, sums
                   Address, I64, I64, I64,                       // k_scale, its stride; L2 priorities of q and KV
                   I32, I32, I32, I32, I32,            // chunk: number, first token, tokens, first head, heads
                   I32, I32, I32, I32, I32, I32, I32,  // Hkv, group, K, log2 page, most tiles, early, 0
                   float,
                   // the combination of the chunk before: as CombineParams, its first token, tokens, first head
                   Address, Address, Address, Address, Address, Address, I64, I64, I64, I64, I64, I32, I32, I32,
                   I32,  // some sequences may not take part
                   // SM90: counters; chunks that the launch computes and combines; log2 chunk, T, partials of a place
                   Address, I32, I32, I32, I32, I32>;
using CombineParams = launch::Params<Address, Address, Address, Address, Address,
                                     Address,                  // partials, sums, state, out, lse, v_scale
                                     I64, I64, I64, I64, I64,  // bytes: out token, head; lse token, head; v_scale head
                                     I32, I32, I32, I32,       // chunk: first token, tokens, first head, heads
                                     I32, I32, I32, I32>;      // Hkv, group, K; some sequences may not take part

static_assert(CountParams::match_all(cubins::invert_count));
static_assert(ScanParams::match_all(cubins::invert_scan));
static_assert(ScatterParams::match_all(cubins::invert_scatter));

struct Program {
  const Image* images;
  std::size_t count;
  template <std::size_t N>
  Program(const Image (&program)[N]) : images(program), count(N) {}
};

#define M3_FORWARD(q, kv)                                                    \
  static_assert(ForwardParams::match_all(cubins::prefill_##q##_##kv##_r16)); \
  static_assert(ForwardParams::match_all(cubins::prefill_##q##_##kv##_r8));  \
  Program forward_##q##_##kv(int rows) {                                     \
    if (rows == 16) return cubins::prefill_##q##_##kv##_r16;                 \
    return cubins::prefill_##q##_##kv##_r8;                                  \
  }
M3_FORWARD(bf16, bf16)
M3_FORWARD(f16, f16)
M3_FORWARD(bf16, e4m3)
M3_FORWARD(f16, e4m3)
M3_FORWARD(bf16, e5m2)
M3_FORWARD(f16, e5m2)
#undef M3_FORWARD

#define M3_COMBINE(q, rows)                                                              \
  static_assert(CombineParams::match_all(cubins::prefill_combine_##q##_r##rows));        \
  static_assert(CombineParams::match_all(cubins::prefill_combine_##q##_r##rows##_wide)); \
  Program combine_##q##_##rows(bool wide) {                                              \
    if (wide) return cubins::prefill_combine_##q##_r##rows##_wide;                       \
    return cubins::prefill_combine_##q##_r##rows;                                        \
  }
M3_COMBINE(bf16, 16)
M3_COMBINE(bf16, 8)
M3_COMBINE(f16, 16)
M3_COMBINE(f16, 8)
#undef M3_COMBINE

Program forward_program(ScalarType q, ScalarType kv, int rows) {
  const bool bf16 = q == ScalarType::BFloat16;
  switch (kv) {
    case ScalarType::Float8_e4m3fn:
      return bf16 ? forward_bf16_e4m3(rows) : forward_f16_e4m3(rows);
    case ScalarType::Float8_e5m2:
      return bf16 ? forward_bf16_e5m2(rows) : forward_f16_e5m2(rows);
    default:
      return bf16 ? forward_bf16_bf16(rows) : forward_f16_f16(rows);
  }
}

Program combine_program(ScalarType q, int rows, bool wide) {
  if (q == ScalarType::BFloat16) return rows == 16 ? combine_bf16_16(wide) : combine_bf16_8(wide);
  return rows == 16 ? combine_f16_16(wide) : combine_f16_8(wide);
}

template <class... Types>
void run(Program program, launch::Grid grid, int device, launch::Params<Types...> params) {
  constexpr launch::Options overlap{1, true};
  launch::run(launch::pick(program.images, program.count, device), grid, device, params.pointers().data(), overlap);
}

constexpr int kUnitBits = 8;  // UNIT_BITS of invert.py
// H200, 64/4 heads, random selections, ms for 2^10, 2^11, 2^12 tokens of one head: bf16 32k / 32k 6.31 6.10 6.22,
// 8k / 8k - 1.36 1.41, 8k / 128k - 1.87 1.71, 4k / 128k - 0.90 0.87. More tokens fill the tiles of a long context's
// many blocks; fewer leave less between writing and reading a partial.
constexpr int kChunkBits = 11, kLongChunkBits = 12;
constexpr I64 kLongBlocks = 512;
constexpr I64 kPlaces = 3;           // chunks whose partial results are kept: see sm90/prefill.py, Chunks
constexpr I64 kMostFusedSlots = 16;  // SLOTS of shared/partials.py
constexpr I64 kCombiners = 6;        // CTAs of prefill_combine.py that shared memory admits on a multiprocessor
constexpr I64 kMostPartialBytes = I64{272} << 20, kMostListBytes = I64{256} << 20;
// A CTA of the forward should have some twenty tiles of 8 tokens a launch: 512 / 64k took 0.167, 0.157 and 0.163 ms
// with 4, 2 and 1 heads a chunk.
constexpr I64 kLeastChoices = 16384;
constexpr I64 kEvictNormal = 0x1000000000000000, kEvictLast = 0x14F0000000000000;
constexpr int kHeadBytes = 32, kCounterBytes = 16;

I64 ceil_div(I64 a, I64 b) { return (a + b - 1) / b; }

I64 partial_bytes(I64 slots, int rows) { return slots * rows * 256; }
I64 sums_bytes(I64 slots, int rows) { return slots * rows * 8; }

struct Shape {
  I64 tokens, heads, requests, width, table, page, pages, blocks, group, reach;
  explicit Shape(const DecodeArguments& a)
      : tokens(a.q.size(0)),
        heads(a.k_cache.size(1)),
        requests(a.seqused_k.size(0)),
        width(a.block_indices.size(2)),
        table(a.block_table.size(1)),
        page(page_tokens(a.k_cache)),
        pages(a.k_cache.size(0)),
        blocks(ceil_div(table * page, 128)),
        group(a.q.size(1) / heads),
        reach(std::min<I64>(table * page, INT32_MAX)) {}
};

// The workspace in pieces of 256-byte multiples.
struct Workspace {
  I64 counts, state, bins, rows, chunks, counters, heads, entries, partials, sums, bytes;
  I64 place_slots;  // partials of a place
  Workspace(const Shape& s, const KvStationaryPlan& p) {
    I64 at = 0;
    auto take = [&](I64 size) {
      const I64 start = at;
      at += (size + 255) / 256 * 256;
      return start;
    };
    const I64 slots = std::min<I64>(s.tokens, I64{1} << p.chunk_bits) * p.chunk_heads * s.width;
    place_slots = (slots + 3) / 4 * 4;  // of 64 bytes or more in `sums`
    counts = take(p.units * s.heads * s.blocks * 4);
    state = take(s.tokens * s.heads * 8);
    bins = take(p.segments * s.heads * s.blocks * 8);
    rows = take(p.segments * s.heads * 4);
    chunks = take((p.chunks + 1) * 4);
    counters = take(p.chunks * kCounterBytes);
    heads = take(p.most_tiles * kHeadBytes);
    entries = take(p.most_tiles * (128 / p.rows) * 4);
    partials = take(partial_bytes(place_slots, p.rows) * std::min(p.chunks, kPlaces));
    sums = take(sums_bytes(place_slots, p.rows) * std::min(p.chunks, kPlaces));
    bytes = at;
  }
};

Address address(const std::optional<Tensor>& t) { return t.has_value() ? t->data_ptr() : nullptr; }
I64 scale_stride(const std::optional<Tensor>& t) { return t.has_value() && t->numel() > 1 ? 4 : 0; }
I32 narrow(I64 n) { return static_cast<I32>(n); }

void invert(const DecodeArguments& a, const Shape& s, const KvStationaryPlan& p, const Workspace& w, char* base,
            Address formulation, int device) {
  const I64 token = a.block_indices.stride(0) * 4, head = a.block_indices.stride(1) * 4,
            slot = a.block_indices.stride(2) * 4, row = a.block_table.stride(0) * 4;
  const I32 page_bits = s.page == 128 ? 7 : 6, tile_bits = p.rows == 16 ? 3 : 4, causal = a.causal ? 1 : 0;
  const launch::Grid units{static_cast<unsigned>(p.units), static_cast<unsigned>(s.heads)};
  const launch::Grid segments{static_cast<unsigned>(p.segments), static_cast<unsigned>(s.heads)};
  run(cubins::invert_count, units, device,
      CountParams{{a.block_indices.data_ptr(),
                   a.block_table.data_ptr(),
                   a.cu_seqlens_q.data_ptr(),
                   a.seqused_k.data_ptr(),
                   formulation,
                   base + w.counts,
                   base + w.state,
                   token,
                   head,
                   slot,
                   row,
                   narrow(s.tokens),
                   narrow(s.requests),
                   narrow(s.heads),
                   narrow(s.width),
                   narrow(s.table),
                   narrow(s.pages),
                   page_bits,
                   narrow(s.reach),
                   narrow(s.blocks),
                   causal}});
  run(cubins::invert_scan, segments, device,
      ScanParams{{a.cu_seqlens_q.data_ptr(), a.seqused_k.data_ptr(), formulation, base + w.counts, base + w.bins,
                  base + w.rows, base + w.counters, narrow(s.tokens), narrow(s.requests), narrow(s.heads),
                  narrow(s.reach), narrow(s.blocks), p.chunk_bits, p.chunk_heads, tile_bits, narrow(p.chunks)}});
  run(cubins::invert_scatter, units, device,
      ScatterParams{{a.block_indices.data_ptr(),
                     a.block_table.data_ptr(),
                     a.cu_seqlens_q.data_ptr(),
                     a.seqused_k.data_ptr(),
                     base + w.state,
                     base + w.counts,
                     base + w.bins,
                     base + w.rows,
                     base + w.chunks,
                     base + w.heads,
                     base + w.entries,
                     token,
                     head,
                     slot,
                     row,
                     narrow(s.tokens),
                     narrow(s.requests),
                     narrow(s.heads),
                     narrow(s.width),
                     narrow(s.table),
                     narrow(s.pages),
                     page_bits,
                     narrow(s.reach),
                     narrow(s.blocks),
                     causal,
                     p.chunk_bits,
                     p.chunk_heads,
                     tile_bits,
                     narrow(p.segments),
                     narrow(p.most_tiles)}});
}

}  // namespace

KvStationaryPlan plan_kv_stationary(const DecodeArguments& a, int chunk_bits, int chunk_heads) {
  const Shape s(a);
  KvStationaryPlan p{};
  const int most_bits = s.blocks > kLongBlocks ? kLongChunkBits : kChunkBits;
  p.rows = s.group > 8 ? 16 : 8;
  p.chunk_heads = chunk_heads;
  if (chunk_heads == 0) {
    // As few heads as give a launch enough tiles: the more tokens of a head a chunk holds, the fuller are its tiles.
    const I64 tokens = std::min(s.tokens, I64{1} << most_bits);
    for (p.chunk_heads = 1; p.chunk_heads < s.heads; ++p.chunk_heads)
      if (s.heads % p.chunk_heads == 0 && tokens * p.chunk_heads * s.width >= kLeastChoices) break;
  }
  p.chunk_bits = chunk_bits;
  if (chunk_bits == 0) {
    p.chunk_bits = most_bits;
    const I64 slots = p.chunk_heads * s.width;
    while (p.chunk_bits > kUnitBits && partial_bytes(slots << p.chunk_bits, p.rows) > kMostPartialBytes) --p.chunk_bits;
  }
  p.units = ceil_div(s.tokens, I64{1} << kUnitBits) + s.requests;
  p.token_chunks = ceil_div(s.tokens, I64{1} << p.chunk_bits);
  p.chunks = p.token_chunks * (s.heads / p.chunk_heads);
  p.segments = p.token_chunks + s.requests;
  // Every bin may leave one tile partly filled.
  const I64 choices = s.tokens * s.heads * s.width;
  p.most_tiles = choices / (128 / p.rows) + std::min(p.segments * s.heads * s.blocks, choices);
  p.workspace_bytes = Workspace(s, p).bytes;
  return p;
}

const char* kv_stationary_refuses(const DecodeArguments& a) {
  const Shape s(a);
  const I64 size = a.k_cache.element_size();
  if (s.pages == 0) return "the KV-stationary prefill takes a cache with at least one page";
  if (s.tokens >= 1 << 26) return "the KV-stationary prefill takes fewer than 2^26 tokens";
  if (!launch::fits_tensor_map(a.q.size(1), a.q.stride(1) * 2) || !launch::fits_tensor_map(s.tokens, a.q.stride(0) * 2))
    return "the KV-stationary prefill takes strides of q that a tensor map can hold";
  for (const Tensor* cache : {&a.k_cache, &a.v_cache})
    for (int i = 0; i < 3; ++i)
      if (!launch::fits_tensor_map(cache->size(i), cache->stride(i) * size))
        return "the KV-stationary prefill takes strides of the caches that a tensor map can hold";
  const KvStationaryPlan p = plan_kv_stationary(a);
  const I64 bins = p.segments * s.heads * s.blocks;
  if (bins >= INT32_MAX || p.most_tiles >= INT32_MAX ||
      p.units * s.heads * s.blocks * 4 + bins * 8 > kMostListBytes + s.tokens * s.heads * s.width * 16)
    return "the KV-stationary prefill would need too large lists for this many sequences and this wide a page table";
  return nullptr;
}

void prefill_kv_stationary(const DecodeArguments& a, const void* formulation, int chunk_bits, int chunk_heads) {
  const Shape s(a);
  if (s.tokens * s.heads == 0) return;
  const int device = a.q.is_cpu() ? -1 : static_cast<int>(a.q.get_device_index());
  const KvStationaryPlan p = plan_kv_stationary(a, chunk_bits, chunk_heads);
  const Workspace w(s, p);
  const I64 bytes[] = {w.bytes};
  const Tensor workspace = torch::stable::new_empty(a.q, {bytes, 1}, ScalarType::Byte);
  char* const base = static_cast<char*>(workspace.data_ptr());
  invert(a, s, p, w, base, formulation, device);

  const Map q_map = launch::tensor_map(a.q, a.q.data_ptr(), 2, {128, a.q.size(1), s.tokens},
                                       {a.q.stride(1) * 2, a.q.stride(0) * 2}, {64, static_cast<unsigned>(p.rows), 1});
  const Map k_map = cache_map(a.k_cache), v_map = cache_map(a.v_cache);
  const Program forward = forward_program(a.q.scalar_type(), a.k_cache.scalar_type(), p.rows);
  const bool fused = s.width <= kMostFusedSlots;
  const Program combine = combine_program(a.q.scalar_type(), p.rows, !fused);
  const I32 selective = formulation != nullptr ? 1 : 0;
  struct Chunk {
    I64 first_token, tokens, first_head, first_place;
  };
  auto chunk_of = [&](I64 number) {
    const I64 first = number % p.token_chunks << p.chunk_bits;
    return Chunk{first, std::min(s.tokens - first, I64{1} << p.chunk_bits), number / p.token_chunks * p.chunk_heads,
                 number % kPlaces * w.place_slots};
  };
  auto partials_of = [&](const Chunk& c) { return base + w.partials + partial_bytes(c.first_place, p.rows); };
  auto sums_of = [&](const Chunk& c) { return base + w.sums + sums_bytes(c.first_place, p.rows); };
  // Combines a chunk by itself; the forward of the next chunk has these arguments too.
  auto combine_params = [&](const Chunk& c) {
    return CombineParams{{partials_of(c), sums_of(c), base + w.state, a.out.data_ptr(), address(a.lse),
                          address(a.v_scale), a.out.stride(0) * 2, a.out.stride(1) * 2,
                          a.lse.has_value() ? a.lse->stride(0) * 4 : I64{0},
                          a.lse.has_value() ? a.lse->stride(1) * 4 : I64{0}, scale_stride(a.v_scale),
                          narrow(c.first_token), narrow(c.tokens), narrow(c.first_head), p.chunk_heads, narrow(s.heads),
                          narrow(s.group), narrow(s.width), selective}};
  };
  const I64 ctas = launch::multiprocessors(device);
  // One launch for all chunks, or one a chunk.
  const bool together = fused && launch::compute_capability(device) == 90;
  for (I64 number = 0; number < p.chunks; number += together ? p.chunks : 1) {
    const Chunk c = chunk_of(number);
    const bool beside = fused && number > 0;
    const I64 count = together ? p.chunks : 1, last = number + count - 1;
    const auto [before, before_sums, state, out, lse, v_scale, out_token, out_head, lse_token, lse_head, scale_head,
                first_token, tokens, first_head, chunk_heads, heads, group, width, some] =
        combine_params(beside ? chunk_of(number - 1) : c).values;
    run(forward, {static_cast<unsigned>(ctas)}, device,
        ForwardParams{{q_map,
                       k_map,
                       v_map,
                       base + w.chunks,
                       base + w.heads,
                       base + w.entries,
                       partials_of(c),
                       sums_of(c),
                       address(a.k_scale),
                       scale_stride(a.k_scale),
                       kEvictLast,
                       kEvictNormal,
                       narrow(number),
                       narrow(c.first_token),
                       narrow(c.tokens),
                       narrow(c.first_head),
                       chunk_heads,
                       heads,
                       group,
                       width,
                       s.page == 128 ? 7 : 6,
                       narrow(p.most_tiles),
                       number > 0 ? 1 : 0,
                       0,
                       static_cast<float>(a.softmax_scale),
                       before,
                       before_sums,
                       state,
                       out,
                       lse,
                       v_scale,
                       out_token,
                       out_head,
                       lse_token,
                       lse_head,
                       scale_head,
                       first_token,
                       beside ? tokens : 0,
                       first_head,
                       some,
                       base + w.counters + number * kCounterBytes,
                       narrow(count),
                       narrow(count - 1),
                       p.chunk_bits,
                       narrow(s.tokens),
                       narrow(w.place_slots)}});
    if (!fused || last + 1 == p.chunks) {
      const Chunk ended = chunk_of(last);
      const I64 rows = ended.tokens * p.chunk_heads;
      run(combine, {static_cast<unsigned>(fused ? std::min(rows, kCombiners * ctas) : rows)}, device,
          combine_params(ended));
    }
  }
}

}  // namespace m3_sparse
