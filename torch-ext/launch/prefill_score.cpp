#include "prefill_score.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cache.h"
#include "cubins.h"
#include "launch.h"
#include "tensor_map.h"

namespace m3_sparse {
namespace {

using launch::TensorMap;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using ScoreParams = launch::Params<TensorMap, TensorMap,                      // index_q, index_k
                                   const void*, const void*,                  // out (ids or scores), parts
                                   const void*, const void*, const void*,     // table, offsets, lengths
                                   std::int64_t, std::int64_t, std::int64_t,  // byte strides of out: token, head, slot
                                   std::int64_t,                              // of the table
                                   std::int32_t, std::int32_t, std::int32_t,  // tokens, requests, log2(heads)
                                   std::int32_t, std::int32_t, std::int32_t,  // pages, table width, log2(page size)
                                   std::int32_t, std::int32_t, std::int32_t,  // k, local, init
                                   std::int32_t>;                             // ids may be stored as vectors

using FoldParams = launch::Params<const void*, const void*, const void*, const void*,  // out, parts, offsets, lengths
                                  std::int64_t, std::int64_t, std::int64_t,            // byte strides of out
                                  std::int32_t, std::int32_t, std::int32_t,            // tokens, requests, log2(heads)
                                  std::int32_t,                                        // reach of the block table
                                  std::int32_t, std::int32_t, std::int32_t,            // k, local, init
                                  std::int32_t>;                                       // vectors

#define M3_SPARSE_CHECK(dtypes)                                                  \
  static_assert(ScoreParams::match_all(cubins::prefill_score_##dtypes##_top16)); \
  static_assert(ScoreParams::match_all(cubins::prefill_score_##dtypes##_top32)); \
  static_assert(ScoreParams::match_all(cubins::prefill_score_##dtypes##_scores))
M3_SPARSE_CHECK(bf16_bf16);
M3_SPARSE_CHECK(f16_f16);
M3_SPARSE_CHECK(bf16_e4m3);
M3_SPARSE_CHECK(f16_e4m3);
M3_SPARSE_CHECK(e4m3_e4m3);
static_assert(FoldParams::match_all(cubins::prefill_fold_top16));
static_assert(FoldParams::match_all(cubins::prefill_fold_top32));

// VARIANTS in the kernel file.
enum class Variant { top16, top32, scores };
constexpr std::int64_t rows_of(Variant variant) { return variant == Variant::top32 ? 128 : 256; }
// A row's list and two parts a CTA.
constexpr std::int64_t kPartBytes = 256 * 16 * 8;
static_assert(kPartBytes == 128 * 32 * 8);

constexpr std::int64_t kMostHeads = 64;
// decode_score reads a request's keys once for every 32 (token, head) columns, at the pace of memory; prefill_score
// once for 256, at the pace of the MMA and with a larger fixed cost. One pass is always ahead (128k keys: 17 against 20
// us for 32 columns). More are while there are few keys: two over 32k (9.2 against 9.8 us), four over 8k (7.2
// against 7.3); three over 32k are not (10.9 against 9.6), nor two over 128k (24 against 20). H200, 4 heads, bf16.
constexpr std::int64_t kDecodeColumns = 32;
constexpr std::int64_t kMostDecodePasses = 4;
constexpr std::int64_t kDecodeBlocks = 512;     // of all requests, times passes
constexpr std::int64_t kMostStored = 64 << 20;  // bytes of scores

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
int device_of(const Tensor& t) { return t.is_cpu() ? -1 : static_cast<int>(t.get_device_index()); }
bool is_fp8(const Tensor& t) { return t.scalar_type() == ScalarType::Float8_e4m3fn; }
int element_size(const Tensor& t) { return is_fp8(t) ? 1 : 2; }

int log2_of(std::int64_t n) {
  int bits = 0;
  while (std::int64_t{1} << bits < n) ++bits;
  return bits;
}

TensorMap query_map(const Tensor& q, std::int64_t rows) {
  const int size = element_size(q);
  const std::int64_t heads = q.size(1);
  return launch::tensor_map(q, q.data_ptr(), size, {128, heads, q.size(0)}, {q.stride(1) * size, q.stride(0) * size},
                            {128u / size, static_cast<unsigned>(heads), static_cast<unsigned>(rows / heads)});
}

// Of half a block; of slots as cache_map has it. Without a page nothing is loaded through the map, but there must be
// one.
TensorMap key_map(const Tensor& k, const void* any) {
  const int size = element_size(k);
  const bool slots = has_slots(k);
  return launch::tensor_map(
      k, k.numel() ? k.data_ptr() : any, size, {128, k.size(1), std::max<std::int64_t>(k.size(0), 1)},
      {k.stride(1) * size, k.stride(0) * size}, {128u / size, slots ? 1u : 64u, slots ? 64u : 1u});
}

// Of the two outer dimensions.
bool has_map(const Tensor& t) {
  return launch::fits_tensor_map(t.size(1), t.stride(1) * element_size(t)) &&
         launch::fits_tensor_map(t.size(0), t.stride(0) * element_size(t));
}

struct Problem {
  const Tensor &out, &index_q, &index_k, &block_table, &cu_seqlens_q, &seqused_k;
};

bool vector_ids(const Tensor& ids) {
  if (ids.scalar_type() != ScalarType::Int || ids.stride(2) != 1 || ids.size(2) % 4 != 0) return false;
  return reinterpret_cast<std::uintptr_t>(ids.data_ptr()) % 16 == 0 && ids.stride(0) % 4 == 0 && ids.stride(1) % 4 == 0;
}

template <std::size_t N>
void score(const Image (&program)[N], Variant variant, const Problem& p, const void* parts, unsigned ctas,
           std::int64_t topk, std::int64_t local_blocks, std::int64_t init_blocks) {
  auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const Tensor &q = p.index_q, &k = p.index_k;
  const ScoreParams params{{query_map(q, rows_of(variant)),
                            key_map(k, q.data_ptr()),
                            p.out.data_ptr(),
                            parts,
                            p.block_table.data_ptr(),
                            p.cu_seqlens_q.data_ptr(),
                            p.seqused_k.data_ptr(),
                            p.out.stride(0) * 4,
                            p.out.stride(1) * 4,
                            p.out.stride(2) * 4,
                            p.block_table.stride(0) * 4,
                            narrow(q.size(0)),
                            narrow(p.seqused_k.size(0)),
                            log2_of(q.size(1)),
                            narrow(k.size(0)),
                            narrow(p.block_table.size(1)),
                            index_page_tokens(k) == 64 ? 6 : 7,
                            narrow(topk),
                            narrow(local_blocks),
                            narrow(init_blocks),
                            vector_ids(p.out)}};
  launch::run(program, {ctas}, device_of(q), params, launch::Options{1, true});
}

void score(Variant variant, const Problem& p, const void* parts, unsigned ctas, std::int64_t topk,
           std::int64_t local_blocks, std::int64_t init_blocks) {
#define M3_SPARSE_RUN(dtypes)                                                                                         \
  do {                                                                                                                \
    if (variant == Variant::top16)                                                                                    \
      return score(cubins::prefill_score_##dtypes##_top16, variant, p, parts, ctas, topk, local_blocks, init_blocks); \
    if (variant == Variant::top32)                                                                                    \
      return score(cubins::prefill_score_##dtypes##_top32, variant, p, parts, ctas, topk, local_blocks, init_blocks); \
    return score(cubins::prefill_score_##dtypes##_scores, variant, p, parts, ctas, topk, local_blocks, init_blocks);  \
  } while (0)
  const bool bf16 = p.index_q.scalar_type() == ScalarType::BFloat16;
  if (is_fp8(p.index_q)) M3_SPARSE_RUN(e4m3_e4m3);
  if (is_fp8(p.index_k) && bf16) M3_SPARSE_RUN(bf16_e4m3);
  if (is_fp8(p.index_k)) M3_SPARSE_RUN(f16_e4m3);
  if (bf16) M3_SPARSE_RUN(bf16_bf16);
  M3_SPARSE_RUN(f16_f16);
}

}  // namespace

bool prefill_scores_fit(const Tensor& index_q, const Tensor& index_k, std::int64_t requests, std::int64_t blocks) {
  const std::int64_t tokens = index_q.size(0), heads = index_q.size(1);
  if (heads < 1 || heads > kMostHeads || (heads & (heads - 1)) != 0) return false;
  if (tokens < 1 || tokens >= std::int64_t{1} << 30) return false;
  // Units, and what the last CTA's range reaches beyond them, in 32 bits.
  if ((ceil_div(tokens * heads, 128) + requests) * blocks >= (std::int64_t{1} << 31) - (1 << 20)) return false;
  if (!has_map(index_q) || !has_map(index_k)) return false;
  return launch::available(cubins::prefill_score_bf16_bf16_top16, device_of(index_q));
}

Selection choose_selection(const Tensor& index_q, const Tensor& index_k, std::int64_t requests, std::int64_t blocks,
                           bool scores_wanted) {
  const std::int64_t rows = index_q.size(0) * index_q.size(1);
  const std::int64_t passes = ceil_div(rows, kDecodeColumns * std::max<std::int64_t>(requests, 1));
  const bool few = passes <= 1 || (passes <= kMostDecodePasses && passes * requests * blocks <= kDecodeBlocks);
  if (few && !is_fp8(index_q)) return Selection::decode;
  if (!prefill_scores_fit(index_q, index_k, requests, blocks)) return Selection::decode;
  if (scores_wanted) return Selection::stored;
  // A tile that more than four CTAs share is folded slower than its scores are stored and ranked.
  const int ctas = launch::multiprocessors(device_of(index_q));
  const bool few_tiles = 4 * ceil_div(rows, 256) <= ctas;
  return few_tiles && rows * blocks * 4 <= kMostStored ? Selection::stored : Selection::fused;
}

void prefill_scores(const Tensor& scores, const Tensor& index_q, const Tensor& index_k, const Tensor& block_table,
                    const Tensor& cu_seqlens_q, const Tensor& seqused_k, bool fill) {
  if (scores.numel() == 0) return;
  if (fill) torch::stable::fill_(scores, -std::numeric_limits<double>::infinity());
  const auto ctas = static_cast<unsigned>(launch::multiprocessors(device_of(index_q)));
  score(Variant::scores, {scores, index_q, index_k, block_table, cu_seqlens_q, seqused_k}, nullptr, ctas, 0, 0, 0);
}

void prefill_select(const Tensor& out, const Tensor& index_q, const Tensor& index_k, const Tensor& block_table,
                    const Tensor& cu_seqlens_q, const Tensor& seqused_k, std::int64_t local_blocks,
                    std::int64_t init_blocks) {
  const int device = device_of(index_q);
  const auto ctas = static_cast<unsigned>(launch::multiprocessors(device));
  const std::int64_t topk = out.size(2);
  const Variant variant = topk <= 16 ? Variant::top16 : Variant::top32;
  const std::int64_t size[] = {2 * ctas * kPartBytes / 4};
  const Tensor parts = torch::stable::new_empty(index_q, {size, 1}, ScalarType::Int);
  const Problem problem{out, index_q, index_k, block_table, cu_seqlens_q, seqused_k};
  score(variant, problem, parts.data_ptr(), ctas, topk, local_blocks, init_blocks);
  auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const FoldParams params{{out.data_ptr(), parts.data_ptr(), cu_seqlens_q.data_ptr(), seqused_k.data_ptr(),
                           out.stride(0) * 4, out.stride(1) * 4, out.stride(2) * 4, narrow(index_q.size(0)),
                           narrow(seqused_k.size(0)), log2_of(index_q.size(1)),
                           narrow(block_table.size(1) * index_page_tokens(index_k)), narrow(topk), narrow(local_blocks),
                           narrow(init_blocks), vector_ids(out)}};
  const launch::Grid grid{ctas, static_cast<unsigned>(rows_of(variant) / 128)};
  const launch::Options overlap{1, true};
  if (variant == Variant::top16) return launch::run(cubins::prefill_fold_top16, grid, device, params, overlap);
  launch::run(cubins::prefill_fold_top32, grid, device, params, overlap);
}

}  // namespace m3_sparse
