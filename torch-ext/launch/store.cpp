#include "store.h"

#include <cstdint>
#include <stdexcept>

#include "cubins.h"
#include "launch.h"

namespace m3_sparse {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using StoreParams = launch::Params<
    const void*, const void*, const void*, const void*, const void*, const void*,  // k, v, index_k and their caches
    const void*, const void*, const void*,                                         // slots, k_scale, v_scale
    std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,  // byte strides of k, v: token, head; index_k
    std::int64_t, std::int64_t, std::int64_t,                              // of k_cache: page, head, token
    std::int64_t, std::int64_t, std::int64_t,                              // of v_cache
    std::int64_t, std::int64_t,                                            // of index_k_cache: page, token
    std::int32_t, std::int32_t,                                            // of k_scale, v_scale
    std::int32_t, std::int32_t, std::int32_t,                              // tokens, heads, bytes of a slot number
    std::int32_t, std::int32_t, std::int32_t,
    std::int32_t,  // page size and slots of the KV caches and of the index cache
    std::int32_t, std::int32_t, std::int32_t,
    std::int32_t>;  // bytes of a source element and whether to convert: KV, index

static_assert(StoreParams::match_all(cubins::store_copy));
static_assert(StoreParams::match_all(cubins::store_bf16_e4m3));
static_assert(StoreParams::match_all(cubins::store_bf16_e5m2));
static_assert(StoreParams::match_all(cubins::store_f16_e4m3));
static_assert(StoreParams::match_all(cubins::store_f16_e5m2));
static_assert(StoreParams::match_all(cubins::store_f32_e4m3));
static_assert(StoreParams::match_all(cubins::store_f32_e5m2));

constexpr unsigned kTokens = 16;  // of a CTA

std::int32_t size_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    default:
      return 1;
  }
}

const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

std::int32_t scale_stride(const std::optional<Tensor>& scale) {
  return scale && scale->numel() > 1 ? static_cast<std::int32_t>(scale->stride(0) * 4) : 0;
}

std::int32_t narrow(std::int64_t n) { return static_cast<std::int32_t>(n); }

// The kernel waits for the one before it, after finding its place in the grid.
constexpr launch::Options kOverlap{1, true};

void launch_conversion(ScalarType source, ScalarType target, launch::Grid grid, int device, const StoreParams& params) {
  const bool e4m3 = target == ScalarType::Float8_e4m3fn;
  switch (source) {
    case ScalarType::BFloat16:
      return e4m3 ? launch::run(cubins::store_bf16_e4m3, grid, device, params, kOverlap)
                  : launch::run(cubins::store_bf16_e5m2, grid, device, params, kOverlap);
    case ScalarType::Half:
      return e4m3 ? launch::run(cubins::store_f16_e4m3, grid, device, params, kOverlap)
                  : launch::run(cubins::store_f16_e5m2, grid, device, params, kOverlap);
    case ScalarType::Float:
      return e4m3 ? launch::run(cubins::store_f32_e4m3, grid, device, params, kOverlap)
                  : launch::run(cubins::store_f32_e5m2, grid, device, params, kOverlap);
    default:
      throw std::runtime_error("m3_sparse: store_kv called with an unchecked dtype");
  }
}

}  // namespace

void store_kv(const Tensor& k, const Tensor& v, const std::optional<Tensor>& index_k, const Tensor& k_cache,
              const Tensor& v_cache, const std::optional<Tensor>& index_k_cache, const Tensor& slots,
              const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const std::int64_t tokens = k.size(0), heads = k.size(1);
  if (tokens == 0 || (heads == 0 && !index_k)) return;
  const std::int64_t in = size_of(k.scalar_type()), kept = size_of(k_cache.scalar_type());
  const bool convert = k.scalar_type() != k_cache.scalar_type();
  const bool index_convert = index_k && index_k->scalar_type() != index_k_cache->scalar_type();
  const std::int64_t index_in = index_k ? size_of(index_k->scalar_type()) : 0;
  const std::int64_t index_kept = index_k ? size_of(index_k_cache->scalar_type()) : 0;
  const std::int64_t page = k_cache.size(2), index_page = index_k ? index_k_cache->size(1) : 1;
  const std::int32_t slot_bytes = slots.scalar_type() == ScalarType::Long ? 8 : 4;
  const StoreParams params{{k.data_ptr(),
                            v.data_ptr(),
                            pointer(index_k),
                            k_cache.data_ptr(),
                            v_cache.data_ptr(),
                            pointer(index_k_cache),
                            slots.data_ptr(),
                            pointer(k_scale),
                            pointer(v_scale),
                            k.stride(0) * in,
                            k.stride(1) * in,
                            v.stride(0) * in,
                            v.stride(1) * in,
                            index_k ? index_k->stride(0) * index_in : 0,
                            k_cache.stride(0) * kept,
                            k_cache.stride(1) * kept,
                            k_cache.stride(2) * kept,
                            v_cache.stride(0) * kept,
                            v_cache.stride(1) * kept,
                            v_cache.stride(2) * kept,
                            index_k ? index_k_cache->stride(0) * index_kept : 0,
                            index_k ? index_k_cache->stride(1) * index_kept : 0,
                            scale_stride(k_scale),
                            scale_stride(v_scale),
                            narrow(tokens),
                            narrow(heads),
                            slot_bytes,
                            narrow(page),
                            narrow(k_cache.size(0) * page),
                            narrow(index_page),
                            index_k ? narrow(index_k_cache->size(0) * index_page) : 0,
                            narrow(in),
                            narrow(index_in),
                            convert,
                            index_convert}};
  const launch::Grid grid{static_cast<unsigned>((tokens + kTokens - 1) / kTokens),
                          static_cast<unsigned>(2 * heads + (index_k ? 1 : 0))};
  const int device = k.is_cpu() ? -1 : static_cast<int>(k.get_device_index());
  if (convert) return launch_conversion(k.scalar_type(), k_cache.scalar_type(), grid, device, params);
  if (index_convert)
    return launch_conversion(index_k->scalar_type(), index_k_cache->scalar_type(), grid, device, params);
  launch::run(cubins::store_copy, grid, device, params, kOverlap);
}

}  // namespace m3_sparse
