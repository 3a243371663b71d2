#include "decode_select.h"

#include <algorithm>
#include <cstdint>

#include "cubins.h"
#include "decode_score.h"
#include "launch.h"

namespace m3_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using SelectParams = launch::Params<const void*, const void*, const void*, const void*,  // out, scores, q, k
                                    const void*, const void*, const void*,               // table, offsets, lengths
                                    std::int64_t, std::int64_t, std::int64_t,  // byte strides of out: token, head, slot
                                    std::int64_t, std::int64_t,                // of scores: token, head
                                    std::int64_t, std::int64_t,                // of index_q: token, head
                                    std::int64_t, std::int64_t, std::int64_t,  // of index_k: page, token; of the table
                                    std::int32_t, std::int32_t, std::int32_t,  // tokens, requests, heads
                                    std::int32_t, std::int32_t, std::int32_t,  // pages, table width, log2(page size)
                                    std::int32_t, std::int32_t, std::int32_t>;  // k, local, init

#define M3_SPARSE_CHECK(dtypes)                                                 \
  static_assert(SelectParams::match_all(cubins::decode_select_##dtypes##_n8));  \
  static_assert(SelectParams::match_all(cubins::decode_select_##dtypes##_n16)); \
  static_assert(SelectParams::match_all(cubins::decode_select_##dtypes##_n32))
M3_SPARSE_CHECK(bf16_bf16);
M3_SPARSE_CHECK(f16_f16);
M3_SPARSE_CHECK(bf16_e4m3);
M3_SPARSE_CHECK(f16_e4m3);
#undef M3_SPARSE_CHECK

constexpr int kCtasPerMultiprocessor = 2;
constexpr unsigned kMostRanks = 16;
constexpr std::int64_t kFewestRequests = 8;  // times column groups

// Warps of a CTA: TILES in the kernel file.
int warps_of(int tiles) { return tiles == 1 ? 8 : tiles == 2 ? 6 : 4; }

template <std::size_t N8, std::size_t N16, std::size_t N32>
void run_tiles(int tiles, const Image (&n8)[N8], const Image (&n16)[N16], const Image (&n32)[N32], launch::Grid grid,
               unsigned cluster, int device, const SelectParams& params) {
  const launch::Options options{cluster, true};
  if (tiles == 1) return launch::run(n8, grid, device, params, options);
  if (tiles == 2) return launch::run(n16, grid, device, params, options);
  launch::run(n32, grid, device, params, options);
}

}  // namespace

unsigned plan_cluster(std::int64_t tokens, std::int64_t requests, std::int64_t heads, std::int64_t blocks,
                      int multiprocessors) {
  const ColumnPlan columns = plan_columns(tokens, requests, heads);
  const std::int64_t walks = requests * columns.groups;
  if (walks < kFewestRequests || tokens * heads * blocks == 0) return 0;
  // The largest cluster in which every warp has a block and that does not cut the batch into more than eight waves.
  const std::int64_t resident = std::int64_t{kCtasPerMultiprocessor} * multiprocessors;
  unsigned ranks = kMostRanks;
  while (ranks > 1 && (ranks * warps_of(columns.tiles) > blocks || ranks * walks > 8 * resident)) ranks /= 2;
  return ranks;
}

void decode_select(const Tensor& out, const Tensor& scores, const Tensor& index_q, const Tensor& index_k,
                   const Tensor& block_table, const Tensor& cu_seqlens_q, const Tensor& seqused_k,
                   std::int64_t local_blocks, std::int64_t init_blocks, unsigned cluster) {
  const std::int64_t tokens = index_q.size(0), heads = index_q.size(1), requests = seqused_k.size(0);
  const bool fp8 = index_k.scalar_type() == ScalarType::Float8_e4m3fn,
             bf16 = index_q.scalar_type() == ScalarType::BFloat16;
  const std::int64_t key = fp8 ? 1 : 2, page = index_k.size(1);
  const int device = index_q.is_cpu() ? -1 : static_cast<int>(index_q.get_device_index());
  const ColumnPlan columns = plan_columns(tokens, requests, heads);
  const launch::Grid grid{cluster, static_cast<unsigned>(requests), columns.groups};
  auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const SelectParams params{{out.data_ptr(),
                             scores.data_ptr(),
                             index_q.data_ptr(),
                             index_k.data_ptr(),
                             block_table.data_ptr(),
                             cu_seqlens_q.data_ptr(),
                             seqused_k.data_ptr(),
                             out.stride(0) * 4,
                             out.stride(1) * 4,
                             out.stride(2) * 4,
                             scores.stride(0) * 4,
                             scores.stride(1) * 4,
                             index_q.stride(0) * 2,
                             index_q.stride(1) * 2,
                             index_k.stride(0) * key,
                             index_k.stride(1) * key,
                             block_table.stride(0) * 4,
                             narrow(tokens),
                             narrow(requests),
                             narrow(heads),
                             narrow(index_k.size(0)),
                             narrow(block_table.size(1)),
                             page == 64 ? 6 : 7,
                             narrow(out.size(2)),
                             narrow(local_blocks),
                             narrow(init_blocks)}};
#define M3_SPARSE_RUN(dtypes)                                                                         \
  run_tiles(columns.tiles, cubins::decode_select_##dtypes##_n8, cubins::decode_select_##dtypes##_n16, \
            cubins::decode_select_##dtypes##_n32, grid, cluster, device, params)
  if (fp8 && bf16)
    M3_SPARSE_RUN(bf16_e4m3);
  else if (fp8)
    M3_SPARSE_RUN(f16_e4m3);
  else if (bf16)
    M3_SPARSE_RUN(bf16_bf16);
  else
    M3_SPARSE_RUN(f16_f16);
#undef M3_SPARSE_RUN
}

}  // namespace m3_sparse
