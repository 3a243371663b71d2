#include "decode.h"

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

using DecodeParams =
    launch::Params<launch::TensorMap,
                   launch::TensorMap,                   // k_cache, v_cache; unused with 4 CTAs a row
                   Address, Address, Address,           // q, k_cache, v_cache
                   Address, Address, Address, Address,  // block_indices, block_table, cu_seqlens_q, seqused_k
                   Address, Address, Address, Address,  // out, lse (null: not wanted), k_scale, v_scale (null: one)
                   I64, I64, I64, I64, I64, I64, I64,
                   I64,                           // bytes: q token, head; K page, head, token; V page, head, token
                   I64, I64, I64, I64,            // block_indices token, head, slot; block_table row
                   I64, I64, I64, I64, I64, I64,  // out token, head; lse token, head; k_scale, v_scale head
                   I32, I32, I32, I32, I32, I32, I32, I32, I32,
                   I32,            // T, B, K, M, P, log2 page, reach, heads a KV head, causal, q is bf16
                   float, float>;  // softmax_scale, B / T

struct Program {
  const Image* images;
  std::size_t count;
  template <std::size_t N>
  Program(const Image (&program)[N]) : images(program), count(N) {}
};

#define M3_DECODE(dtype)                                                \
  static_assert(DecodeParams::match_all(cubins::decode_##dtype##_s1));  \
  static_assert(DecodeParams::match_all(cubins::decode_##dtype##_s2));  \
  static_assert(DecodeParams::match_all(cubins::decode_##dtype##_s4));  \
  static_assert(DecodeParams::match_all(cubins::decode_##dtype##_s16)); \
  Program program_##dtype(int splits) {                                 \
    if (splits == 1) return cubins::decode_##dtype##_s1;                \
    if (splits == 2) return cubins::decode_##dtype##_s2;                \
    if (splits == 4) return cubins::decode_##dtype##_s4;                \
    return cubins::decode_##dtype##_s16;                                \
  }
M3_DECODE(bf16)
M3_DECODE(f16)
M3_DECODE(e4m3)
M3_DECODE(e5m2)
#undef M3_DECODE

Program program_for(ScalarType kv, int splits) {
  switch (kv) {
    case ScalarType::BFloat16:
      return program_bf16(splits);
    case ScalarType::Half:
      return program_f16(splits);
    case ScalarType::Float8_e4m3fn:
      return program_e4m3(splits);
    case ScalarType::Float8_e5m2:
      return program_e5m2(splits);
    default:
      throw std::runtime_error("m3_sparse: decode called with an unchecked dtype");
  }
}

Address address(const std::optional<Tensor>& t) { return t.has_value() ? t->data_ptr() : nullptr; }

// The program's boxes are 32 tokens of a head in a page; in shared memory a row has 128 bytes, so a 16-bit token is
// two. L2 fetches 128 bytes at a time: 256 cost 2 (B = 256, fp8) to 7 % (bf16).
launch::TensorMap map_of(const Tensor& cache) {
  const int size = static_cast<int>(cache.element_size());
  const I64 pages = cache.size(0), heads = cache.size(1), page = cache.size(2);
  const I64 by_page = cache.stride(0) * size, by_head = cache.stride(1) * size, by_token = cache.stride(2) * size;
  if (size == 1)
    return launch::tensor_map(cache, cache.data_ptr(), 1, {128, page, heads, pages}, {by_token, by_head, by_page},
                              {128, 32, 1, 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  return launch::tensor_map(cache, cache.data_ptr(), 2, {64, page, 2, heads, pages}, {by_token, 128, by_head, by_page},
                            {64, 32, 2, 1, 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

bool has_map(const Tensor& cache) {
  bool fits = cache.size(0) > 0;
  for (int i = 0; i < 3; ++i)
    fits = fits && launch::fits_tensor_map(cache.size(i), cache.stride(i) * static_cast<I64>(cache.element_size()));
  return fits;
}

// A scale has one element for all heads or one for each.
I64 scale_stride(const std::optional<Tensor>& t) { return t.has_value() && t->numel() > 1 ? 4 : 0; }

}  // namespace

// Thresholds in rows on 132 multiprocessors, from sweeps on an H200 (kv 32k, cold, us for 16, 4, 2 and 1 CTAs a row):
//             fp8                     bf16
//     4 rows   4.6  6.9  8.8    -      5.0  7.2  8.7    -
//     7        4.9  7.1  8.9    -
//     8        7.0  7.2  9.0    -      7.3  7.8  8.9    -
//    16        8.5  8.4  9.3    -      9.5  9.4  9.8    -
//    20          -  8.9  9.5    -        - 10.5 10.6    -
//    24          -  9.6  9.7    -        - 11.8 11.8    -
//    32          - 10.6 10.2 18.5        - 13.9 13.2 20.3
//    64          -    - 14.1 20.8        -    - 20.8 24.1
//    67          -    - 21.0 20.9        -    - 26.8 24.7   (68 rows)
//   128          -    - 25.2 23.8        -    - 38.8 37.4
// The steps are where the CTAs no longer fit at one an SM: 7 clusters of 16, 66 of 2.
// Mirrored by `decode_splits` in tests/test_decode.py.
int decode_splits(std::int64_t rows, std::int64_t width, int multiprocessors) {
  if (18 * rows <= multiprocessors && width <= 16) return 16;
  if (6 * rows <= multiprocessors) return 4;
  if (2 * rows <= multiprocessors) return 2;
  return 1;  // the prologue and the merges are paid once a row
}

void decode(const DecodeArguments& a, int splits, bool overlap) {
  const I64 tokens = a.q.size(0), heads = a.k_cache.size(1), requests = a.seqused_k.size(0);
  if (tokens * heads == 0) return;
  const I64 q_size = 2, kv_size = a.k_cache.element_size(), page = page_tokens(a.k_cache),
            width = a.block_table.size(1);
  const int device = a.q.is_cpu() ? -1 : static_cast<int>(a.q.get_device_index());
  if (splits == 0) splits = decode_splits(tokens * heads, a.block_indices.size(2), launch::multiprocessors(device));
  // Copies by address: any stride, and the same bits. This kernel's boxes are a quarter of a page, so no map of slots
  // would end with them.
  if (has_slots(a.k_cache) || !has_map(a.k_cache) || !has_map(a.v_cache)) splits = 4;
  const Program program = program_for(a.k_cache.scalar_type(), splits);
  DecodeParams params{{splits != 4 ? map_of(a.k_cache) : launch::TensorMap{},
                       splits != 4 ? map_of(a.v_cache) : launch::TensorMap{},
                       a.q.data_ptr(),
                       a.k_cache.data_ptr(),
                       a.v_cache.data_ptr(),
                       a.block_indices.data_ptr(),
                       a.block_table.data_ptr(),
                       a.cu_seqlens_q.data_ptr(),
                       a.seqused_k.data_ptr(),
                       a.out.data_ptr(),
                       address(a.lse),
                       address(a.k_scale),
                       address(a.v_scale),
                       a.q.stride(0) * q_size,
                       a.q.stride(1) * q_size,
                       a.k_cache.stride(0) * kv_size,
                       a.k_cache.stride(1) * kv_size,
                       token_stride(a.k_cache) * kv_size,
                       a.v_cache.stride(0) * kv_size,
                       a.v_cache.stride(1) * kv_size,
                       token_stride(a.v_cache) * kv_size,
                       a.block_indices.stride(0) * 4,
                       a.block_indices.stride(1) * 4,
                       a.block_indices.stride(2) * 4,
                       a.block_table.stride(0) * 4,
                       a.out.stride(0) * q_size,
                       a.out.stride(1) * q_size,
                       a.lse.has_value() ? a.lse->stride(0) * 4 : I64{0},
                       a.lse.has_value() ? a.lse->stride(1) * 4 : I64{0},
                       scale_stride(a.k_scale),
                       scale_stride(a.v_scale),
                       static_cast<I32>(tokens),
                       static_cast<I32>(requests),
                       static_cast<I32>(a.block_indices.size(2)),
                       static_cast<I32>(width),
                       static_cast<I32>(a.k_cache.size(0)),
                       page == 128 ? 7 : 6,
                       static_cast<I32>(std::min<I64>(width * page, INT32_MAX)),
                       static_cast<I32>(a.q.size(1) / heads),
                       a.causal ? 1 : 0,
                       a.q.scalar_type() == ScalarType::BFloat16 ? 1 : 0,
                       static_cast<float>(a.softmax_scale),
                       static_cast<float>(requests) / static_cast<float>(tokens)}};
  // Tokens along x: the CTAs of a request's tokens run side by side and find each other's pages in L2.
  const launch::Grid grid{static_cast<unsigned>(tokens * splits), static_cast<unsigned>(heads)};
  const launch::Options options{static_cast<unsigned>(splits), overlap};
  launch::run(launch::pick(program.images, program.count, device), grid, device, params.pointers().data(), options);
}

}  // namespace m3_sparse
