#include "decode_score.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "cache.h"
#include "cubins.h"
#include "launch.h"

namespace m3_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using ScoreParams = launch::Params<const void*, const void*, const void*, const void*, const void*,
                                   const void*,                                // scores, q, k, table, offsets, lengths
                                   std::int64_t, std::int64_t,                 // byte strides of scores: token, head
                                   std::int64_t, std::int64_t,                 // of index_q: token, head
                                   std::int64_t, std::int64_t, std::int64_t,   // of index_k: page, token; of the table
                                   std::int32_t, std::int32_t, std::int32_t,   // tokens, requests, heads
                                   std::int32_t, std::int32_t, std::int32_t,   // pages, table width, log2(page size)
                                   std::int32_t, std::int32_t, std::int32_t>;  // blocks of a row, ahead, fill

#define M3_SPARSE_CHECK(dtypes)                                               \
  static_assert(ScoreParams::match_all(cubins::decode_score_##dtypes##_n8));  \
  static_assert(ScoreParams::match_all(cubins::decode_score_##dtypes##_n16)); \
  static_assert(ScoreParams::match_all(cubins::decode_score_##dtypes##_n32))
M3_SPARSE_CHECK(bf16_bf16);
M3_SPARSE_CHECK(f16_f16);
M3_SPARSE_CHECK(bf16_e4m3);
M3_SPARSE_CHECK(f16_e4m3);

// CTAs that the registers allow on a multiprocessor: TILES in the kernel file.
int ctas_per_multiprocessor(int tiles) { return tiles == 1 ? 4 : tiles == 2 ? 3 : 2; }

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <std::size_t N8, std::size_t N16, std::size_t N32>
void run_tiles(int tiles, const Image (&n8)[N8], const Image (&n16)[N16], const Image (&n32)[N32], launch::Grid grid,
               int device, const ScoreParams& params, launch::Options options) {
  if (tiles == 1) return launch::run(n8, grid, device, params, options);
  if (tiles == 2) return launch::run(n16, grid, device, params, options);
  launch::run(n32, grid, device, params, options);
}

}  // namespace

ScorePlan plan_scores(std::int64_t tokens, std::int64_t requests, std::int64_t heads, std::int64_t blocks,
                      bool fp8_keys, int multiprocessors) {
  ScorePlan plan{};
  // Lengths of queries stay on the device: the average serves as a guess. A request with more columns is walked again
  // for them, one with fewer leaves column groups idle.
  const std::int64_t columns = ceil_div(tokens, std::max<std::int64_t>(requests, 1)) * heads;
  plan.tiles = columns <= 8 ? 1 : columns <= 16 ? 2 : 4;
  plan.groups = static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(columns, 8 * plan.tiles), 1, 16));
  const std::int64_t walks = std::max<std::int64_t>(requests, 1) * plan.groups;
  const std::int64_t resident = static_cast<std::int64_t>(multiprocessors) * ctas_per_multiprocessor(plan.tiles);
  const std::int64_t work = walks * blocks;
  // Once over the chip; or up to eight times with at least so many blocks each, which evens out what the
  // multiprocessors get of the memory's bandwidth, and ragged batches. Where a request has fewer blocks than CTAs some
  // are started for nothing: hence the limit. H200, us of select_blocks, blocks of a CTA: bf16 32k B=16 8: 34.3,
  // 4: 34.3, 2: 34.1, 1: 35.5; 128k B=64 32: 484, 8: 474; 32k B=64 16: 125.2, 8: 125.5, 4: 124.1. fp8 32k B=16 8: 20.3,
  // 4: 20.2, 2: 20.8; 128k B=1 4: 8.9, 2: 8.5. With more columns a CTA has more queries to fetch: 32k B=16 4 tokens
  // 11: 34.5 (fp8 21.4), 4: 35.4 (24.0); 8 tokens 16: 35.4 (24.7), 8: 36.9 (27.4); B=4 8 tokens 4 (once over the
  // chip): 12.3 (10.3), 8: 14.3 (12.7), 2: 15.0 (13.2).
  const std::int64_t least = plan.tiles > 1 ? 16 : fp8_keys && work > 8 * std::int64_t{multiprocessors} ? 4 : 2;
  const std::int64_t once = std::max<std::int64_t>(resident / walks, 1);
  const std::int64_t often = std::min(ceil_div(8 * resident, walks), blocks / least);
  std::int64_t splits = std::min(std::max(once, often), blocks);
  // No CTA is to have a block more than the others if the table is full.
  splits = ceil_div(blocks, ceil_div(blocks, splits));
  plan.splits = static_cast<unsigned>(splits);
  // Where all CTAs run at once; of one tile, where they have a block each. H200, 32k, us of select_blocks with and
  // without, bf16 / fp8: B=1 5.0, 5.7 / 4.4, 4.7; B=4, two blocks each, 12.6, 11.9 / 8.9, 8.4; B=16 35.4, 34.3
  // / 19.5, 20.3, but the whole step 57.3, 55.0 / 34.6, 34.1; 8 tokens, B=16 35.4, 36.5 / 24.7, 25.3, B=4 12.3, 13.3
  // / 10.3, 10.7.
  plan.ahead = walks * splits <= resident && (plan.tiles > 1 ? walks <= 16 : splits == blocks);
  // The carveout of the attention kernel that follows lets the launches of a step overlap: whole step, 32k, B=1 14.6 ->
  // 12.0 us (bf16), 13.9 -> 10.8 (fp8). But it leaves 28 KB of L1 for the loads under way: B=4 21.5 -> 23.5 us (bf16;
  // fp8 17.9 -> 17.2), select_blocks of B=16 35.3 -> 44.6.
  plan.carveout =
      work <= (fp8_keys ? 8 : 2) * std::int64_t{multiprocessors} ? launch::kMostShared : launch::kLeastShared;
  return plan;
}

int decode_scores(const Tensor& scores, const Tensor& index_q, const Tensor& index_k, const Tensor& block_table,
                  const Tensor& cu_seqlens_q, const Tensor& seqused_k, bool fill) {
  const std::int64_t tokens = index_q.size(0), heads = index_q.size(1), blocks = scores.size(2);
  const std::int64_t requests = seqused_k.size(0), page = index_page_tokens(index_k);
  const bool fp8 = index_k.scalar_type() == ScalarType::Float8_e4m3fn,
             bf16 = index_q.scalar_type() == ScalarType::BFloat16;
  if (tokens * heads * blocks == 0 || (requests == 0 && !fill)) return -1;
  const std::int64_t key = fp8 ? 1 : 2;
  const int device = index_q.is_cpu() ? -1 : static_cast<int>(index_q.get_device_index());
  const ScorePlan plan = plan_scores(tokens, requests, heads, blocks, fp8, launch::multiprocessors(device));
  const launch::Grid grid{plan.splits, static_cast<unsigned>(requests + (fill ? 1 : 0)), plan.groups};
  auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const ScoreParams params{{scores.data_ptr(),
                            index_q.data_ptr(),
                            index_k.data_ptr(),
                            block_table.data_ptr(),
                            cu_seqlens_q.data_ptr(),
                            seqused_k.data_ptr(),
                            scores.stride(0) * 4,
                            scores.stride(1) * 4,
                            index_q.stride(0) * 2,
                            index_q.stride(1) * 2,
                            index_k.stride(0) * key,
                            token_stride(index_k) * key,
                            block_table.stride(0) * 4,
                            narrow(tokens),
                            narrow(requests),
                            narrow(heads),
                            narrow(index_k.size(0)),
                            narrow(block_table.size(1)),
                            page == 64 ? 6 : 7,
                            narrow(blocks),
                            plan.ahead,
                            fill}};
  const launch::Options options{1, true, plan.carveout};
#define M3_SPARSE_RUN(dtypes)                                                                    \
  run_tiles(plan.tiles, cubins::decode_score_##dtypes##_n8, cubins::decode_score_##dtypes##_n16, \
            cubins::decode_score_##dtypes##_n32, grid, device, params, options)
  if (fp8 && bf16)
    M3_SPARSE_RUN(bf16_e4m3);
  else if (fp8)
    M3_SPARSE_RUN(f16_e4m3);
  else if (bf16)
    M3_SPARSE_RUN(bf16_bf16);
  else
    M3_SPARSE_RUN(f16_f16);
  return plan.carveout;
}

}  // namespace m3_sparse
