#include "combine.h"

#include <cstdint>
#include <stdexcept>

#include "cubins.h"
#include "launch.h"

namespace m3_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using CombineParams =
    launch::Params<const void*, const void*, const void*, const void*,      // out, lse, outs, lses
                   std::int64_t, std::int64_t, std::int64_t,                // byte strides of outs: state, token, head
                   std::int64_t, std::int64_t, std::int64_t,                // of lses
                   std::int64_t, std::int64_t, std::int64_t, std::int64_t,  // of out, then lse: token, head
                   std::int32_t, std::int32_t, std::int32_t>;               // states, tokens, heads

static_assert(CombineParams::match_all(cubins::combine_f32_f32));
static_assert(CombineParams::match_all(cubins::combine_f32_bf16));
static_assert(CombineParams::match_all(cubins::combine_f32_f16));
static_assert(CombineParams::match_all(cubins::combine_bf16_bf16));
static_assert(CombineParams::match_all(cubins::combine_f16_f16));

constexpr int kThreads = 128, kHeadDim = 128;  // of the kernel

}  // namespace

void combine(const Tensor& out, const Tensor& lse, const Tensor& outs, const Tensor& lses) {
  const std::int64_t tokens = outs.size(1), heads = outs.size(2);
  if (tokens * heads == 0) return;
  const bool fp32 = outs.scalar_type() == ScalarType::Float;
  const std::int64_t in = fp32 ? 4 : 2, result = out.scalar_type() == ScalarType::Float ? 4 : 2;
  const unsigned rows_per_cta = kThreads / (kHeadDim * in / 16);  // a lane holds 16 bytes of a row
  const auto rows = static_cast<unsigned>(tokens * heads);
  const launch::Grid grid{(rows + rows_per_cta - 1) / rows_per_cta};
  const int device = outs.is_cpu() ? -1 : static_cast<int>(outs.get_device_index());
  const CombineParams params{{out.data_ptr(), lse.data_ptr(), outs.data_ptr(), lses.data_ptr(), outs.stride(0) * in,
                              outs.stride(1) * in, outs.stride(2) * in, lses.stride(0) * 4, lses.stride(1) * 4,
                              lses.stride(2) * 4, out.stride(0) * result, out.stride(1) * result, lse.stride(0) * 4,
                              lse.stride(1) * 4, static_cast<std::int32_t>(outs.size(0)),
                              static_cast<std::int32_t>(tokens), static_cast<std::int32_t>(heads)}};
  if (!fp32 && outs.scalar_type() == ScalarType::BFloat16)
    return launch::run(cubins::combine_bf16_bf16, grid, device, params);
  if (!fp32) return launch::run(cubins::combine_f16_f16, grid, device, params);
  switch (out.scalar_type()) {
    case ScalarType::Float:
      return launch::run(cubins::combine_f32_f32, grid, device, params);
    case ScalarType::BFloat16:
      return launch::run(cubins::combine_f32_bf16, grid, device, params);
    case ScalarType::Half:
      return launch::run(cubins::combine_f32_f16, grid, device, params);
    default:
      throw std::runtime_error("m3_sparse: combine called with an unchecked dtype");
  }
}

}  // namespace m3_sparse
