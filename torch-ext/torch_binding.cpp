// Schemas of the ahead-of-time backend's operators, and the checks that keep a direct caller inside the tensors given.
// The public Python functions check first and say more; these errors are for callers of torch.ops.
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "launch/combine.h"
#include "launch/decode.h"
#include "launch/decode_score.h"
#include "launch/store.h"
#include "launch/topk.h"
#include "registration.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

bool aligned16(const Tensor& t, std::int64_t element_size) {
  if (reinterpret_cast<std::uintptr_t>(t.data_ptr()) % 16 != 0) return false;
  for (int i = 0; i + 1 < t.dim(); ++i)
    if (t.size(i) > 1 && t.stride(i) * element_size % 16 != 0) return false;
  return t.stride(t.dim() - 1) == 1;
}

bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

std::int64_t float_size(ScalarType type) {
  if (type == ScalarType::Float) return 4;
  return type == ScalarType::BFloat16 || type == ScalarType::Half ? 2 : 0;
}

bool is_float8(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2; }

std::int64_t stored_size(ScalarType type) { return is_float8(type) ? 1 : float_size(type); }

bool is_vector(const Tensor& t, ScalarType type) {
  return t.dim() == 1 && t.scalar_type() == type && (t.size(0) <= 1 || t.stride(0) == 1);
}

// Rows [..., 128] of `from` are stored into `to`: the same dtype, or a wider one into float8.
bool stores(const Tensor& from, const Tensor& to) {
  return stored_size(from.scalar_type()) != 0 && stored_size(to.scalar_type()) != 0 &&
         (from.scalar_type() == to.scalar_type() || (is_float8(to.scalar_type()) && !is_float8(from.scalar_type())));
}

// Bytes of a KV element that the decode kernels take together with this query dtype, or 0.
std::int64_t kv_size(ScalarType q, ScalarType kv) {
  if (q != ScalarType::BFloat16 && q != ScalarType::Half) return 0;
  if (kv == ScalarType::Float8_e4m3fn || kv == ScalarType::Float8_e5m2) return 1;
  return kv == q ? 2 : 0;
}

void check_scale(const std::optional<Tensor>& scale, const Tensor& like, std::int64_t heads, const char* what) {
  if (!scale) return;
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && (scale->numel() == 1 || scale->numel() == heads) &&
                      scale->is_contiguous() && same_device(*scale, like),
                  what, ": expected float32, contiguous, with 1 or Hkv elements on the device of the other tensors");
}

// What block_scores and select_blocks have in common.
void check_scoring(const Tensor& index_q, const Tensor& index_k, const Tensor& block_table, const Tensor& cu_seqlens_q,
                   const Tensor& seqused_k) {
  STD_TORCH_CHECK(index_q.dim() == 3 && index_q.size(2) == 128, "index_q: expected [T, Hi, 128]");
  STD_TORCH_CHECK(index_k.dim() == 3 && index_k.size(2) == 128 && (index_k.size(1) == 64 || index_k.size(1) == 128),
                  "index_k_cache: expected [P, 64 or 128, 128]");
  const ScalarType q = index_q.scalar_type(), k = index_k.scalar_type();
  STD_TORCH_CHECK(
      (q == ScalarType::BFloat16 || q == ScalarType::Half) && (k == q || k == ScalarType::Float8_e4m3fn),
      "index_q, index_k_cache: expected bfloat16 or float16 queries with keys of the same dtype or float8_e4m3fn");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  "block_table: expected int32 [B, M] with a contiguous last dimension");
  const std::int64_t requests = block_table.size(0), reach = block_table.size(1) * index_k.size(1);
  STD_TORCH_CHECK(is_vector(seqused_k, ScalarType::Int) && seqused_k.size(0) == requests,
                  "seqused_k: expected int32 [B]");
  STD_TORCH_CHECK(is_vector(cu_seqlens_q, ScalarType::Int) && cu_seqlens_q.size(0) == requests + 1,
                  "cu_seqlens_q: expected int32 [B + 1]");
  STD_TORCH_CHECK(requests < 65535, "block_table: expected fewer than 65,535 requests");
  STD_TORCH_CHECK(reach <= 128 * 16384, "block_table: expected a reach of at most 16,384 blocks of 128 tokens");
  STD_TORCH_CHECK(index_q.size(0) * index_q.size(1) < INT32_MAX && index_k.size(0) < INT32_MAX,
                  "index_q, index_k_cache: expected fewer than 2^31 rows and pages");
  STD_TORCH_CHECK(same_device(index_k, index_q) && same_device(block_table, index_q) &&
                      same_device(seqused_k, index_q) && same_device(cu_seqlens_q, index_q),
                  "index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k: expected one device");
  STD_TORCH_CHECK(
      (index_q.numel() == 0 || aligned16(index_q, 2)) && (index_k.numel() == 0 || aligned16(index_k, stored_size(k))),
      "index_q, index_k_cache: expected base addresses and strides in multiples of 16 bytes, and a contiguous "
      "last dimension");
}

void check_scores(const Tensor& scores, const Tensor& index_q, const Tensor& index_k, const Tensor& block_table) {
  const std::int64_t blocks = (block_table.size(1) * index_k.size(1) + 127) / 128;
  STD_TORCH_CHECK(scores.dim() == 3 && scores.size(0) == index_q.size(0) && scores.size(1) == index_q.size(1) &&
                      scores.size(2) == blocks && scores.scalar_type() == ScalarType::Float &&
                      (blocks <= 1 || scores.stride(2) == 1) && same_device(scores, index_q),
                  "scores: expected float32 [T, Hi, ceil(M * page / 128)] with a contiguous last dimension");
}

}  // namespace

void aot_store_kv(Tensor k, Tensor v, std::optional<Tensor> index_k, Tensor k_cache, Tensor v_cache,
                  std::optional<Tensor> index_k_cache, Tensor slot_mapping, std::optional<Tensor> k_scale,
                  std::optional<Tensor> v_scale) {
  STD_TORCH_CHECK(k.dim() == 3 && k.size(2) == 128, "k: expected [T, Hkv, 128]");
  STD_TORCH_CHECK(v.dim() == 3 && v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == 128,
                  "v: expected the shape of k");
  STD_TORCH_CHECK(k_cache.dim() == 4 && k_cache.size(1) == k.size(1) && k_cache.size(3) == 128 && k_cache.size(2) >= 1,
                  "k_cache: expected [P, Hkv, page, 128]");
  STD_TORCH_CHECK(v_cache.dim() == 4 && v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == k.size(1) &&
                      v_cache.size(2) == k_cache.size(2) && v_cache.size(3) == 128,
                  "v_cache: expected the shape of k_cache");
  STD_TORCH_CHECK(
      v.scalar_type() == k.scalar_type() && v_cache.scalar_type() == k_cache.scalar_type() && stores(k, k_cache),
      "k, v, k_cache, v_cache: expected one dtype, or bfloat16, float16 or float32 into float8");
  STD_TORCH_CHECK(
      slot_mapping.dim() == 1 && slot_mapping.size(0) == k.size(0) &&
          (slot_mapping.scalar_type() == ScalarType::Long || slot_mapping.scalar_type() == ScalarType::Int) &&
          (k.size(0) <= 1 || slot_mapping.stride(0) == 1),
      "slot_mapping: expected int64 or int32 [T], contiguous");
  STD_TORCH_CHECK(k.size(0) < INT32_MAX && k.size(1) < 32767 && k_cache.size(0) * k_cache.size(2) < INT32_MAX,
                  "k, k_cache: expected fewer than 2^31 tokens and slots and fewer than 32,767 heads");
  STD_TORCH_CHECK(
      same_device(v, k) && same_device(k_cache, k) && same_device(v_cache, k) && same_device(slot_mapping, k),
      "k, v, k_cache, v_cache, slot_mapping: expected one device");
  const std::int64_t in = stored_size(k.scalar_type()), kept = stored_size(k_cache.scalar_type());
  STD_TORCH_CHECK(
      k.numel() == 0 || k_cache.numel() == 0 ||
          (aligned16(k, in) && aligned16(v, in) && aligned16(k_cache, kept) && aligned16(v_cache, kept)),
      "k, v, k_cache, v_cache: expected base addresses and strides in multiples of 16 bytes, and a contiguous "
      "last dimension");
  check_scale(k_scale, k, k.size(1), "k_scale");
  check_scale(v_scale, k, k.size(1), "v_scale");
  STD_TORCH_CHECK(index_k.has_value() == index_k_cache.has_value(), "index_k, index_k_cache: expected both or neither");
  if (index_k) {
    const Tensor& cache = *index_k_cache;
    STD_TORCH_CHECK(index_k->dim() == 2 && index_k->size(0) == k.size(0) && index_k->size(1) == 128,
                    "index_k: expected [T, 128]");
    STD_TORCH_CHECK(cache.dim() == 3 && cache.size(1) >= 1 && cache.size(2) == 128,
                    "index_k_cache: expected [P, page, 128]");
    STD_TORCH_CHECK(cache.size(0) * cache.size(1) < INT32_MAX, "index_k_cache: expected fewer than 2^31 slots");
    STD_TORCH_CHECK(stores(*index_k, cache),
                    "index_k, index_k_cache: expected one dtype, or bfloat16, float16 or float32 "
                    "into float8");
    STD_TORCH_CHECK(k.scalar_type() == k_cache.scalar_type() || index_k->scalar_type() == cache.scalar_type() ||
                        (index_k->scalar_type() == k.scalar_type() && cache.scalar_type() == k_cache.scalar_type()),
                    "index_k, index_k_cache: expected the conversion of k and k_cache, or none");
    STD_TORCH_CHECK(same_device(*index_k, k) && same_device(cache, k),
                    "index_k, index_k_cache: expected the device of k");
    STD_TORCH_CHECK(
        index_k->numel() == 0 || cache.numel() == 0 ||
            (aligned16(*index_k, stored_size(index_k->scalar_type())) &&
             aligned16(cache, stored_size(cache.scalar_type()))),
        "index_k, index_k_cache: expected base addresses and strides in multiples of 16 bytes, and a contiguous "
        "last dimension");
  }
  m3_sparse::store_kv(k, v, index_k, k_cache, v_cache, index_k_cache, slot_mapping, k_scale, v_scale);
}

void aot_block_scores(Tensor scores, Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q,
                      Tensor seqused_k) {
  check_scoring(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k);
  check_scores(scores, index_q, index_k_cache, block_table);
  m3_sparse::decode_scores(scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, true);
}

void aot_select_blocks(Tensor out, std::optional<Tensor> scores, Tensor index_q, Tensor index_k_cache,
                       Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, std::int64_t local_blocks,
                       std::int64_t init_blocks) {
  check_scoring(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k);
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == index_q.size(0) && out.size(1) == index_q.size(1) &&
                      out.size(2) >= 1 && out.size(2) <= 32 && out.scalar_type() == ScalarType::Int &&
                      same_device(out, index_q),
                  "out: expected int32 [T, Hi, topk] with topk of at most 32");
  STD_TORCH_CHECK(local_blocks >= 0 && init_blocks >= 0 && local_blocks + init_blocks <= out.size(2),
                  "local_blocks, init_blocks: expected at most topk together");
  const bool wanted = scores.has_value();
  const std::int64_t reach = block_table.size(1) * index_k_cache.size(1);
  if (wanted) {
    check_scores(*scores, index_q, index_k_cache, block_table);
  } else {
    const std::int64_t shape[] = {index_q.size(0), index_q.size(1), (reach + 127) / 128};
    scores = torch::stable::new_empty(index_q, {shape, 3}, ScalarType::Float);
  }
  const int carveout =
      m3_sparse::decode_scores(*scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, wanted);
  m3_sparse::topk(out, *scores, cu_seqlens_q, seqused_k, reach, local_blocks, init_blocks, carveout);
}

void aot_sparse_attention(Tensor out, std::optional<Tensor> lse, Tensor q, Tensor k_cache, Tensor v_cache,
                          Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                          double softmax_scale, bool causal, std::optional<Tensor> k_scale,
                          std::optional<Tensor> v_scale, std::int64_t splits, bool overlap) {
  STD_TORCH_CHECK(q.dim() == 3 && q.size(2) == 128, "q: expected [T, Hq, 128]");
  STD_TORCH_CHECK(k_cache.dim() == 4 && k_cache.size(3) == 128 && (k_cache.size(2) == 64 || k_cache.size(2) == 128),
                  "k_cache: expected [P, Hkv, 64 or 128, 128]");
  const std::int64_t t = q.size(0), hq = q.size(1), p = k_cache.size(0), hkv = k_cache.size(1), page = k_cache.size(2);
  STD_TORCH_CHECK(v_cache.dim() == 4 && v_cache.size(0) == p && v_cache.size(1) == hkv && v_cache.size(2) == page &&
                      v_cache.size(3) == 128 && v_cache.scalar_type() == k_cache.scalar_type(),
                  "v_cache: expected shape and dtype of k_cache");
  STD_TORCH_CHECK(hkv >= 1 && hq % hkv == 0 && hq / hkv <= 16 && (hq >= 1 || t == 0),
                  "q: expected 1 to 16 query heads for each KV head");
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == t && out.size(1) == hq && out.size(2) == 128 &&
                      out.scalar_type() == q.scalar_type(),
                  "out: expected shape and dtype of q");
  STD_TORCH_CHECK(!lse.has_value() || (lse->dim() == 2 && lse->size(0) == t && lse->size(1) == hq &&
                                       lse->scalar_type() == ScalarType::Float && same_device(*lse, q)),
                  "lse: expected float32 [T, Hq] on q's device");
  STD_TORCH_CHECK(block_indices.dim() == 3 && block_indices.size(0) == t && block_indices.size(1) == hkv &&
                      block_indices.size(2) <= 32 && block_indices.scalar_type() == ScalarType::Int,
                  "block_indices: expected int32 [T, Hkv, K <= 32]");
  STD_TORCH_CHECK(is_vector(seqused_k, ScalarType::Int), "seqused_k: expected contiguous int32 [B]");
  const std::int64_t b = seqused_k.size(0);
  STD_TORCH_CHECK(is_vector(cu_seqlens_q, ScalarType::Int) && cu_seqlens_q.size(0) == b + 1,
                  "cu_seqlens_q: expected contiguous int32 [B + 1]");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == b && block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) < 2 || block_table.stride(1) == 1),
                  "block_table: expected int32 [B, M], contiguous rows");
  const std::int64_t size = kv_size(q.scalar_type(), k_cache.scalar_type());
  STD_TORCH_CHECK(size != 0,
                  "q, k_cache: expected bfloat16 or float16 q with a cache of q's dtype, float8_e4m3fn or float8_e5m2");
  STD_TORCH_CHECK(
      t <= INT32_MAX / 16 && hkv <= 65535 && b < INT32_MAX && p <= INT32_MAX && block_table.size(1) <= INT32_MAX,
      "expected at most 2^27 - 1 tokens, 65535 KV heads, 2^31 - 1 requests, pages and table columns");
  STD_TORCH_CHECK(same_device(out, q) && same_device(k_cache, q) && same_device(v_cache, q) &&
                      same_device(block_indices, q) && same_device(block_table, q) && same_device(cu_seqlens_q, q) &&
                      same_device(seqused_k, q),
                  "all tensors: expected one device");
  check_scale(k_scale, q, hkv, "k_scale");
  check_scale(v_scale, q, hkv, "v_scale");
  STD_TORCH_CHECK(t == 0 || (aligned16(q, 2) && aligned16(out, 2)),
                  "q, out: expected 16-byte aligned bases and strides, contiguous last dimension");
  STD_TORCH_CHECK(p == 0 || (aligned16(k_cache, size) && aligned16(v_cache, size)),
                  "k_cache, v_cache: expected 16-byte aligned bases and strides, contiguous last dimension");
  STD_TORCH_CHECK(splits == 0 || splits == 1 || splits == 2 || splits == 4 ||
                      (splits == 16 && block_indices.size(2) <= 16),
                  "splits: expected 0 (chosen by shape), 1, 2, 4, or 16 for K <= 16");
  if (b == 0) {  // every row lies past the last request
    torch::stable::zero_(out);
    if (lse.has_value()) torch::stable::fill_(*lse, -std::numeric_limits<double>::infinity());
    return;
  }
  m3_sparse::decode({out, lse, q, k_cache, v_cache, block_indices, block_table, cu_seqlens_q, seqused_k, k_scale,
                     v_scale, softmax_scale, causal},
                    static_cast<int>(splits), overlap);
}

void aot_merge_states(Tensor out, Tensor lse, Tensor outs, Tensor lses) {
  STD_TORCH_CHECK(outs.dim() == 4 && outs.size(0) >= 1 && outs.size(3) == 128, "outs: expected [N >= 1, T, H, 128]");
  const std::int64_t n = outs.size(0), t = outs.size(1), h = outs.size(2);
  STD_TORCH_CHECK(lses.dim() == 3 && lses.size(0) == n && lses.size(1) == t && lses.size(2) == h,
                  "lses: expected [N, T, H] of outs");
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == t && out.size(1) == h && out.size(2) == 128,
                  "out: expected [T, H, 128] of outs");
  STD_TORCH_CHECK(lse.dim() == 2 && lse.size(0) == t && lse.size(1) == h, "lse: expected [T, H] of outs");
  STD_TORCH_CHECK(n < INT32_MAX && t < INT32_MAX && h < INT32_MAX && t * h < INT32_MAX,
                  "outs: expected fewer than 2^31 states and T * H rows");
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lses.scalar_type() == ScalarType::Float,
                  "lse, lses: expected float32");
  const std::int64_t in = float_size(outs.scalar_type()), result = float_size(out.scalar_type());
  STD_TORCH_CHECK(
      in != 0 && result != 0 && (in == 4 || out.scalar_type() == outs.scalar_type()),
      "outs, out: expected float32 states with a float32, bfloat16 or float16 result, or one 16-bit dtype for both");
  STD_TORCH_CHECK(same_device(out, outs) && same_device(lse, outs) && same_device(lses, outs),
                  "out, lse, outs, lses: expected one device");
  STD_TORCH_CHECK(
      t * h == 0 || (aligned16(outs, in) && aligned16(out, result)),
      "outs, out: expected base addresses and strides in multiples of 16 bytes, and a contiguous last dimension");
  m3_sparse::combine(out, lse, outs, lses);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "aot_store_kv(Tensor k, Tensor v, Tensor? index_k, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? "
      "index_k_cache, "
      "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale) -> ()");
  ops.def(
      "aot_block_scores(Tensor(a!) scores, Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor "
      "cu_seqlens_q, "
      "Tensor seqused_k) -> ()");
  ops.def(
      "aot_select_blocks(Tensor(a!) out, Tensor(b!)? scores, Tensor index_q, Tensor index_k_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seqused_k, int local_blocks, int init_blocks) -> ()");
  // For measurements: `splits` forces the number of CTAs of a row (the result has the same bits for each), `overlap`
  // false keeps the launch from starting before the kernel ahead of it has ended.
  ops.def(
      "aot_sparse_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, float softmax_scale, bool causal, "
      "Tensor? k_scale, Tensor? v_scale, int splits=0, bool overlap=True) -> ()");
  ops.def("aot_merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("aot_store_kv", TORCH_BOX(&aot_store_kv));
  ops.impl("aot_block_scores", TORCH_BOX(&aot_block_scores));
  ops.impl("aot_select_blocks", TORCH_BOX(&aot_select_blocks));
  ops.impl("aot_sparse_attention", TORCH_BOX(&aot_sparse_attention));
  ops.impl("aot_merge_states", TORCH_BOX(&aot_merge_states));
}

// Refused by the launcher, with a clear message, unless the driver works in host memory (the tests' emulator).
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("aot_store_kv", TORCH_BOX(&aot_store_kv));
  ops.impl("aot_block_scores", TORCH_BOX(&aot_block_scores));
  ops.impl("aot_select_blocks", TORCH_BOX(&aot_select_blocks));
  ops.impl("aot_sparse_attention", TORCH_BOX(&aot_sparse_attention));
  ops.impl("aot_merge_states", TORCH_BOX(&aot_merge_states));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
