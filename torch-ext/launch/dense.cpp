#include "dense.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include "cache.h"
#include "combine.h"
#include "cubins.h"
#include "launch.h"
#include "tensor_map.h"

namespace m3_sparse {
namespace {

using launch::TensorMap;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Address = const void*;
using I64 = std::int64_t;
using I32 = std::int32_t;

using DenseParams =
    launch::Params<TensorMap, TensorMap, TensorMap,                                // q, k, v
                   Address, Address, Address, Address, Address, Address, Address,  // page table, offsets, lengths, out,
                                                                                   // lse, k_scale, v_scale
                   I64,                                                            // byte strides: page table row
                   I64, I64, I64,                                                  // out: split, token, head
                   I64, I64, I64,                                                  // lse
                   I64, I64,                                                       // k_scale, v_scale: head
                   I32, I32, I32, I32, I32, I32, I32, I32,  // T, B, M, P, log2 pages of a block, reach, heads a KV
                                                            // head, tokens of a tile
                   I32, I32, I32,                           // log2 neighbours, causal, splits
                   float>;                                  // softmax_scale

static_assert(DenseParams::match_all(cubins::dense_bf16_m64));
static_assert(DenseParams::match_all(cubins::dense_bf16_m128));
static_assert(DenseParams::match_all(cubins::dense_f16_m64));
static_assert(DenseParams::match_all(cubins::dense_f16_m128));
static_assert(DenseParams::match_all(cubins::dense_bf16_m256));
static_assert(DenseParams::match_all(cubins::dense_f16_m256));

constexpr I64 kKeys = 128, kHeadDim = 128;
// Below this a split's work is less than what it costs to start it and to merge its result.
constexpr I64 kLeastKeysOfASplit = 512;
// Times in halves of a key block of a tile of 64 rows, 0.52 us. Fitted to one request of 32,768 tokens in 1 to 32
// splits on an H200 (267, 139, 73.3, 42.0, 28.2, 28.2 us): 1.03 us a block, 2.6 a CTA, 2.7 + 0.4 a split for the merge.
constexpr I64 kBlock = 2, kCta = 5, kMerge = 5;
// CTAs of 64 rows that read as fast as the memory is. 69 by the figures above (64 KiB in 1.03 us, 4.4 TB/s); more,
// since a block took 1.3 us in another run. A request of 2^20 tokens takes 497 us with 104 CTAs and took 513 to 694
// with 72.
constexpr I64 kReaders = 100;
// Keys and values of the heads whose tiles take turns: they should stay in L2 from one tile to the next.
constexpr I64 kNeighbourBytes = 32 << 20;
// Partial outputs are written and read once more: they should stay in L2.
constexpr I64 kMostPartialBytes = 16 << 20;

I64 ceil_div(I64 a, I64 b) { return (a + b - 1) / b; }

Address address(const std::optional<Tensor>& t) { return t.has_value() ? t->data_ptr() : nullptr; }

I64 scale_stride(const std::optional<Tensor>& t) { return t.has_value() && t->numel() > 1 ? 4 : 0; }

// The halves of a token's 256 bytes are two boxes. Where a box fetches 256 bytes, decode of 64 requests of 32,768
// tokens takes 1031 us on an H200, of 16 requests 275; with what the box asks for 970 and 249.
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

// Queries [T, Hq, 128] in boxes of 64 columns, the heads of a KV head and `tokens` tokens.
TensorMap map_of_queries(const Tensor& q, I64 group, I64 tokens) {
  const I64 head = q.stride(1) * 2, token = q.stride(0) * 2;
  return launch::tensor_map(q, q.data_ptr(), 2, {kHeadDim, group, q.size(1) / group, q.size(0)},
                            {head, head * group, token},
                            {64, static_cast<unsigned>(group), 1, static_cast<unsigned>(tokens)});
}

}  // namespace

DensePlan dense_plan(I64 tokens, I64 requests, I64 q_heads, I64 kv_heads, I64 reach, int capability,
                     int multiprocessors) {
  const I64 group = q_heads / kv_heads;
  // The lower tile costs half the multiplies: right where it holds a request's rows, as in decode, which waits for
  // memory. Tensor memory has 128 lanes, hence SM100's heights, in stages of whole tokens. The figures below are the
  // H200's there too: nothing was measured on SM100.
  const int low = capability == 90 ? 64 : 128;
  const int rows = tokens * group <= low * requests ? low : 2 * low;
  const int stages = capability == 90 ? 1 : rows / low;
  const I64 tile_tokens = rows / stages / group * stages;
  const I64 tiles = requests * ceil_div(ceil_div(tokens, requests), tile_tokens) * kv_heads;
  const I64 partial = tokens * q_heads * (kHeadDim + 1) * 4;
  const I64 most =
      std::min({kMostDenseSplits, reach / kLeastKeysOfASplit, kMostPartialBytes / std::max<I64>(partial, 1)});
  // A CTA fills a multiprocessor; no number of them gets the keys sooner than the memory gives them.
  const I64 blocks = ceil_div(reach, kKeys), memory = kBlock * ceil_div(requests * kv_heads * blocks, kReaders);
  const auto time = [&](I64 n) {
    const I64 waves = ceil_div(tiles * n, multiprocessors);
    return std::max(waves * (kBlock * ceil_div(blocks, n) + kCta), memory) + (n > 1 ? kMerge + n : 0);
  };
  int splits = 1;
  for (int n = 2; n <= most; ++n)
    if (time(n) < time(splits)) splits = n;
  // The shortest tiles of several heads last leave a shorter end: 1 % at 16 KV heads of 8,192 tokens on an H200, where
  // all 16 at once, more than L2 holds, cost 3 %. In decode the order makes no difference.
  int neighbours_log2 = 0;
  const auto fits = [&](I64 n) { return kv_heads % n == 0 && n * reach * kHeadDim * 4 <= kNeighbourBytes; };
  while (fits(2 << neighbours_log2)) ++neighbours_log2;
  return {rows, static_cast<int>(tile_tokens), stages, neighbours_log2, splits};
}

void dense(const DenseArguments& a, I64 splits) {
  const I64 tokens = a.q.size(0), q_heads = a.q.size(1), kv_heads = a.k_cache.size(1), requests = a.seqused_k.size(0);
  if (tokens * q_heads == 0) return;
  const I64 page = page_tokens(a.k_cache),
            reach = std::min<I64>(a.block_table.size(1) * page, INT32_MAX / kKeys * kKeys);
  const int device = a.q.is_cpu() ? -1 : static_cast<int>(a.q.get_device_index());
  const DensePlan plan = dense_plan(tokens, requests, q_heads, kv_heads, reach, launch::compute_capability(device),
                                    launch::multiprocessors(device));
  if (splits == 0) splits = plan.splits;
  const I64 group = q_heads / kv_heads, tile_tokens = plan.tile_tokens;

  // What the kernel writes: the results, or fp32 states to merge into them.
  Tensor out = a.out;
  std::optional<Tensor> lse = a.lse;
  I64 out_split = 0, lse_split = 0;
  if (splits > 1) {
    const I64 states[] = {splits, tokens, q_heads, kHeadDim};
    out = torch::stable::new_empty(a.q, {states, 4}, ScalarType::Float);
    lse = torch::stable::new_empty(a.q, {states, 3}, ScalarType::Float);
    out_split = out.stride(0) * 4, lse_split = lse->stride(0) * 4;
  }
  const int first = splits > 1 ? 1 : 0;  // dimension of tokens
  const I64 out_size = splits > 1 ? 4 : 2;
  DenseParams params{{map_of_queries(a.q, group, tile_tokens / plan.stages),
                      cache_map(a.k_cache, kPromotion),
                      cache_map(a.v_cache, kPromotion),
                      a.block_table.data_ptr(),
                      a.cu_seqlens_q.data_ptr(),
                      a.seqused_k.data_ptr(),
                      out.data_ptr(),
                      address(lse),
                      address(a.k_scale),
                      address(a.v_scale),
                      a.block_table.stride(0) * 4,
                      out_split,
                      out.stride(first) * out_size,
                      out.stride(first + 1) * out_size,
                      lse_split,
                      lse.has_value() ? lse->stride(first) * 4 : I64{0},
                      lse.has_value() ? lse->stride(first + 1) * 4 : I64{0},
                      scale_stride(a.k_scale),
                      scale_stride(a.v_scale),
                      static_cast<I32>(tokens),
                      static_cast<I32>(requests),
                      static_cast<I32>(a.block_table.size(1)),
                      static_cast<I32>(a.k_cache.size(0)),
                      page == kKeys ? 0 : 1,
                      static_cast<I32>(reach),
                      static_cast<I32>(group),
                      static_cast<I32>(tile_tokens),
                      plan.neighbours_log2,
                      a.causal ? 1 : 0,
                      static_cast<I32>(splits),
                      static_cast<float>(a.softmax_scale)}};
  // The most tiles that there can be: every request, and the rows past the last one, may end in a part of one.
  const I64 tiles = (tokens + (requests + 1) * (tile_tokens - 1)) / tile_tokens;
  const launch::Grid grid{static_cast<unsigned>(tiles << plan.neighbours_log2),
                          static_cast<unsigned>(kv_heads >> plan.neighbours_log2), static_cast<unsigned>(splits)};
  const bool bf16 = a.q.scalar_type() == ScalarType::BFloat16;
  if (plan.rows == 64 && bf16)
    launch::run(cubins::dense_bf16_m64, grid, device, params);
  else if (plan.rows == 64)
    launch::run(cubins::dense_f16_m64, grid, device, params);
  else if (plan.rows == 128 && bf16)
    launch::run(cubins::dense_bf16_m128, grid, device, params);
  else if (plan.rows == 128)
    launch::run(cubins::dense_f16_m128, grid, device, params);
  else if (bf16)
    launch::run(cubins::dense_bf16_m256, grid, device, params);
  else
    launch::run(cubins::dense_f16_m256, grid, device, params);
  if (splits == 1) return;
  const I64 rows[] = {tokens, q_heads};
  const Tensor merged = a.lse.has_value() ? *a.lse : torch::stable::new_empty(a.q, {rows, 2}, ScalarType::Float);
  combine(a.out, merged, out, *lse);
}

}  // namespace m3_sparse
