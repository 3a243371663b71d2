// Schemas of the ahead-of-time backend's operators, and the checks that keep a direct caller inside the tensors given.
// The public Python functions check first and say more; these errors are for callers of torch.ops. One thing is theirs
// to keep: with slots for pages (launch/cache.h), a length may not reach past the last slot (m3_sparse/_contiguous.py).
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "launch/cache.h"
#include "launch/combine.h"
#include "launch/decode.h"
#include "launch/decode_score.h"
#include "launch/dense.h"
#include "launch/jit.h"
#include "launch/prefill.h"
#include "launch/prefill_kv_stationary.h"
#include "launch/prefill_score.h"
#include "launch/prefill_union.h"
#include "launch/store.h"
#include "launch/tensor_map.h"
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

// Whether the sparse attention kernels take these dtypes together.
bool takes_kv(ScalarType q, ScalarType kv) {
  return (q == ScalarType::BFloat16 || q == ScalarType::Half) && (kv == q || is_float8(kv));
}

// Whether a tensor map of 16-bit elements can describe the first `dims` dimensions of a tensor.
bool maps(const Tensor& t, int dims) {
  for (int i = 0; i < dims; ++i)
    if (!m3_sparse::launch::fits_tensor_map(t.size(i), t.stride(i) * 2)) return false;
  return true;
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
  STD_TORCH_CHECK(index_k.dim() == 3 && index_k.size(2) == 128 &&
                      (index_k.size(1) == 64 || index_k.size(1) == 128 || index_k.size(1) == 1),
                  "index_k_cache: expected [P, 64 or 128, 128], or [N, 1, 128] for slots");
  const ScalarType q = index_q.scalar_type(), k = index_k.scalar_type();
  STD_TORCH_CHECK(
      (q == ScalarType::BFloat16 || q == ScalarType::Half || q == ScalarType::Float8_e4m3fn) &&
          (k == q || k == ScalarType::Float8_e4m3fn),
      "index_q, index_k_cache: expected bfloat16 or float16 queries with keys of the same dtype or float8_e4m3fn, or "
      "both float8_e4m3fn");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  "block_table: expected int32 [B, M] with a contiguous last dimension");
  const std::int64_t requests = block_table.size(0),
                     reach = block_table.size(1) * m3_sparse::index_page_tokens(index_k);
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
      (index_q.numel() == 0 || aligned16(index_q, stored_size(q))) &&
          (index_k.numel() == 0 || aligned16(index_k, stored_size(k))),
      "index_q, index_k_cache: expected base addresses and strides in multiples of 16 bytes, and a contiguous "
      "last dimension");
}

// The way a selection takes: by shape, or the one asked for.
m3_sparse::Selection selection(const Tensor& index_q, const Tensor& index_k, const Tensor& block_table,
                               bool scores_wanted, std::int64_t asked) {
  using m3_sparse::Selection;
  const std::int64_t requests = block_table.size(0),
                     blocks = (block_table.size(1) * m3_sparse::index_page_tokens(index_k) + 127) / 128;
  const auto way = static_cast<Selection>(asked);
  STD_TORCH_CHECK(asked >= 0 && asked <= 3 && !(scores_wanted && way == Selection::fused),
                  "way: expected 0 (by shape), 1 (decode_score), 2 (prefill_score, stored) or 3 (fused, no scores)");
  if (index_q.numel() == 0) return Selection::decode;
  const Selection chosen =
      way == Selection::by_shape ? m3_sparse::choose_selection(index_q, index_k, requests, blocks, scores_wanted) : way;
  const bool fp8_queries = index_q.scalar_type() == ScalarType::Float8_e4m3fn;
  STD_TORCH_CHECK(chosen != Selection::decode || !fp8_queries,
                  "index_q: float8_e4m3fn is taken with a power of two of heads up to 64 and strides other than 0");
  STD_TORCH_CHECK(chosen == Selection::decode || way == Selection::by_shape ||
                      m3_sparse::prefill_scores_fit(index_q, index_k, requests, blocks),
                  "way: prefill_score does not take these tensors");
  return chosen;
}

void check_scores(const Tensor& scores, const Tensor& index_q, const Tensor& index_k, const Tensor& block_table) {
  const std::int64_t blocks = (block_table.size(1) * m3_sparse::index_page_tokens(index_k) + 127) / 128;
  STD_TORCH_CHECK(scores.dim() == 3 && scores.size(0) == index_q.size(0) && scores.size(1) == index_q.size(1) &&
                      scores.size(2) == blocks && scores.scalar_type() == ScalarType::Float &&
                      (blocks <= 1 || scores.stride(2) == 1) && same_device(scores, index_q),
                  "scores: expected float32 [T, Hi, ceil(M * page / 128)] with a contiguous last dimension");
}

// What sparse and dense attention have in common: all but block_indices, the cache's dtype and the limits. `of_v_cache`
// is what v_cache shares with k_cache according to the error.
template <typename Arguments>
void check_paged_attention(const Arguments& a, const char* of_v_cache) {
  const Tensor &q = a.q, &k_cache = a.k_cache, &v_cache = a.v_cache, &out = a.out, &block_table = a.block_table;
  STD_TORCH_CHECK(q.dim() == 3 && q.size(2) == 128, "q: expected [T, Hq, 128]");
  STD_TORCH_CHECK(k_cache.dim() == 4 && k_cache.size(3) == 128 &&
                      (k_cache.size(2) == 64 || k_cache.size(2) == 128 || k_cache.size(2) == 1),
                  "k_cache: expected [P, Hkv, 64 or 128, 128], or [N, Hkv, 1, 128] for slots");
  const std::int64_t t = q.size(0), hq = q.size(1), p = k_cache.size(0), hkv = k_cache.size(1), page = k_cache.size(2);
  STD_TORCH_CHECK(v_cache.dim() == 4 && v_cache.size(0) == p && v_cache.size(1) == hkv && v_cache.size(2) == page &&
                      v_cache.size(3) == 128,
                  "v_cache: expected ", of_v_cache, " of k_cache");
  STD_TORCH_CHECK(hkv >= 1 && hq % hkv == 0 && hq / hkv <= 16 && (hq >= 1 || t == 0),
                  "q: expected 1 to 16 query heads for each KV head");
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == t && out.size(1) == hq && out.size(2) == 128 &&
                      out.scalar_type() == q.scalar_type(),
                  "out: expected shape and dtype of q");
  STD_TORCH_CHECK(!a.lse.has_value() || (a.lse->dim() == 2 && a.lse->size(0) == t && a.lse->size(1) == hq &&
                                         a.lse->scalar_type() == ScalarType::Float && same_device(*a.lse, q)),
                  "lse: expected float32 [T, Hq] on q's device");
  STD_TORCH_CHECK(is_vector(a.seqused_k, ScalarType::Int), "seqused_k: expected contiguous int32 [B]");
  const std::int64_t b = a.seqused_k.size(0);
  STD_TORCH_CHECK(is_vector(a.cu_seqlens_q, ScalarType::Int) && a.cu_seqlens_q.size(0) == b + 1,
                  "cu_seqlens_q: expected contiguous int32 [B + 1]");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == b && block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) < 2 || block_table.stride(1) == 1),
                  "block_table: expected int32 [B, M], contiguous rows");
  STD_TORCH_CHECK(same_device(out, q) && same_device(k_cache, q) && same_device(v_cache, q) &&
                      same_device(block_table, q) && same_device(a.cu_seqlens_q, q) && same_device(a.seqused_k, q),
                  "all tensors: expected one device");
  check_scale(a.k_scale, q, hkv, "k_scale");
  check_scale(a.v_scale, q, hkv, "v_scale");
  STD_TORCH_CHECK(t == 0 || (aligned16(q, 2) && aligned16(out, 2)),
                  "q, out: expected 16-byte aligned bases and strides, contiguous last dimension");
  STD_TORCH_CHECK(p == 0 || (aligned16(k_cache, stored_size(k_cache.scalar_type())) &&
                             aligned16(v_cache, stored_size(v_cache.scalar_type()))),
                  "k_cache, v_cache: expected 16-byte aligned bases and strides, contiguous last dimension");
}

void check_attention(const m3_sparse::DecodeArguments& a) {
  const Tensor &q = a.q, &k_cache = a.k_cache, &block_indices = a.block_indices;
  check_paged_attention(a, "shape and dtype");
  STD_TORCH_CHECK(a.v_cache.scalar_type() == k_cache.scalar_type(), "v_cache: expected shape and dtype of k_cache");
  const std::int64_t t = q.size(0), hkv = k_cache.size(1);
  STD_TORCH_CHECK(block_indices.dim() == 3 && block_indices.size(0) == t && block_indices.size(1) == hkv &&
                      block_indices.size(2) <= 32 && block_indices.scalar_type() == ScalarType::Int &&
                      same_device(block_indices, q),
                  "block_indices: expected int32 [T, Hkv, K <= 32] on q's device");
  STD_TORCH_CHECK(takes_kv(q.scalar_type(), k_cache.scalar_type()),
                  "q, k_cache: expected bfloat16 or float16 q with a cache of q's dtype, float8_e4m3fn or float8_e5m2");
  STD_TORCH_CHECK(t <= INT32_MAX / 16 && hkv <= 65535 && a.seqused_k.size(0) < INT32_MAX &&
                      k_cache.size(0) <= INT32_MAX && a.block_table.size(1) <= INT32_MAX,
                  "expected at most 2^27 - 1 tokens, 65535 KV heads, 2^31 - 1 requests, pages and table columns");
}

void check_dense(const m3_sparse::DenseArguments& a) {
  const Tensor &q = a.q, &k_cache = a.k_cache, &v_cache = a.v_cache;
  check_paged_attention(a, "the shape");
  STD_TORCH_CHECK((q.scalar_type() == ScalarType::BFloat16 || q.scalar_type() == ScalarType::Half) &&
                      k_cache.scalar_type() == q.scalar_type() && v_cache.scalar_type() == q.scalar_type(),
                  "q, k_cache, v_cache: expected one dtype, bfloat16 or float16");
  STD_TORCH_CHECK(q.size(0) <= INT32_MAX / 64 && a.seqused_k.size(0) <= INT32_MAX / 256 && k_cache.size(1) <= 65535 &&
                      k_cache.size(0) <= INT32_MAX && a.block_table.size(1) <= INT32_MAX / 64,
                  "expected at most 2^25 - 1 tokens and table columns, 2^23 - 1 requests, 65535 KV heads and 2^31 - 1 "
                  "pages");
  STD_TORCH_CHECK(q.size(0) == 0 || (maps(q, 2) && maps(k_cache, 3) && maps(v_cache, 3)),
                  "q, k_cache, v_cache: expected strides above 0 and below 2^40 bytes");
}

// Rows that see no key.
template <typename Arguments>
void write_empty_rows(const Arguments& a) {
  Tensor out = a.out;
  torch::stable::zero_(out);
  if (a.lse.has_value()) {
    Tensor lse = *a.lse;
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
}

// Without a sequence every row lies past the last one: empty rows. True if that was so.
bool all_rows_empty(const m3_sparse::DecodeArguments& a) {
  if (a.seqused_k.size(0) != 0) return false;
  write_empty_rows(a);
  return true;
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
  if (selection(index_q, index_k_cache, block_table, true, 0) == m3_sparse::Selection::stored)
    return m3_sparse::prefill_scores(scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, true);
  m3_sparse::decode_scores(scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, true);
}

void aot_select_blocks(Tensor out, std::optional<Tensor> scores, Tensor index_q, Tensor index_k_cache,
                       Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, std::int64_t local_blocks,
                       std::int64_t init_blocks, std::int64_t way) {
  check_scoring(index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k);
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == index_q.size(0) && out.size(1) == index_q.size(1) &&
                      out.size(2) >= 1 && out.size(2) <= 32 && out.scalar_type() == ScalarType::Int &&
                      same_device(out, index_q),
                  "out: expected int32 [T, Hi, topk] with topk of at most 32");
  STD_TORCH_CHECK(local_blocks >= 0 && init_blocks >= 0 && local_blocks + init_blocks <= out.size(2),
                  "local_blocks, init_blocks: expected at most topk together");
  const bool wanted = scores.has_value();
  using m3_sparse::Selection;
  const Selection chosen = selection(index_q, index_k_cache, block_table, wanted, way);
  if (chosen == Selection::fused)
    return m3_sparse::prefill_select(out, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, local_blocks,
                                     init_blocks);
  const std::int64_t reach = block_table.size(1) * m3_sparse::index_page_tokens(index_k_cache);
  if (wanted) {
    check_scores(*scores, index_q, index_k_cache, block_table);
  } else {
    const std::int64_t shape[] = {index_q.size(0), index_q.size(1), (reach + 127) / 128};
    scores = torch::stable::new_empty(index_q, {shape, 3}, ScalarType::Float);
  }
  if (chosen == Selection::stored) {
    m3_sparse::prefill_scores(*scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, wanted);
    return m3_sparse::topk(out, *scores, cu_seqlens_q, seqused_k, reach, local_blocks, init_blocks, 100);
  }
  const int carveout =
      m3_sparse::decode_scores(*scores, index_q, index_k_cache, block_table, cu_seqlens_q, seqused_k, wanted);
  m3_sparse::topk(out, *scores, cu_seqlens_q, seqused_k, reach, local_blocks, init_blocks, carveout);
}

void aot_sparse_attention(Tensor out, std::optional<Tensor> lse, Tensor q, Tensor k_cache, Tensor v_cache,
                          Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                          double softmax_scale, bool causal, std::optional<Tensor> k_scale,
                          std::optional<Tensor> v_scale, std::int64_t splits, bool overlap, std::int64_t formulation) {
  const m3_sparse::DecodeArguments a{out,         lse,          q,         k_cache, v_cache, block_indices,
                                     block_table, cu_seqlens_q, seqused_k, k_scale, v_scale, softmax_scale,
                                     causal};
  check_attention(a);
  STD_TORCH_CHECK(
      splits == 0 || splits == 1 || splits == 2 || splits == 4 || (splits == 16 && block_indices.size(2) <= 16),
      "splits: expected 0 (chosen by shape), 1, 2, 4, or 16 for K <= 16");
  STD_TORCH_CHECK(
      formulation >= 0 && formulation <= 5,
      "formulation: expected 0 (chosen by shape), 1 (union tiles), 2 (KV-stationary), 3 (decode), 4 (1 or 2 "
      "for each sequence) or 5 (1, a float8 cache widened first)");
  if (all_rows_empty(a)) return;
  // A number of splits is one of the decode kernel.
  const auto wanted = splits == 0 ? static_cast<m3_sparse::Formulation>(formulation) : m3_sparse::Formulation::decode;
  m3_sparse::attention(a, m3_sparse::plan_attention(a, wanted), static_cast<int>(splits), overlap);
}

Tensor aot_attention_plan(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_indices, Tensor block_table,
                          Tensor cu_seqlens_q, Tensor seqused_k, bool causal, std::int64_t formulation) {
  const std::optional<Tensor> none;
  const m3_sparse::DecodeArguments a{q,         none, q,    k_cache, v_cache, block_indices, block_table, cu_seqlens_q,
                                     seqused_k, none, none, 1.0,     causal};
  check_attention(a);
  STD_TORCH_CHECK(formulation >= 0 && formulation <= 5, "formulation: expected 0 to 5");
  const auto plan = m3_sparse::plan_attention(a, static_cast<m3_sparse::Formulation>(formulation));
  const std::int64_t two[] = {2};
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  Tensor made = torch::stable::new_empty(q, two, ScalarType::Long, std::nullopt, cpu);
  auto* numbers = static_cast<std::int64_t*>(made.mutable_data_ptr());
  numbers[0] = static_cast<std::int64_t>(plan);
  numbers[1] = m3_sparse::attention_workspace(a, plan);
  return made;
}

Tensor aot_union_lists(Tensor q, Tensor k_cache, Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q,
                       Tensor seqused_k, bool causal, double threshold) {
  const std::optional<Tensor> none;
  const m3_sparse::DecodeArguments a{q,         none, q,    k_cache, k_cache, block_indices, block_table, cu_seqlens_q,
                                     seqused_k, none, none, 1.0,     causal};
  check_attention(a);
  const char* refusal = m3_sparse::union_refuses(a);
  STD_TORCH_CHECK(refusal == nullptr, refusal ? refusal : "");
  STD_TORCH_CHECK(seqused_k.size(0) >= 1, "seqused_k: expected at least one sequence");
  return m3_sparse::union_lists(a, true, threshold).memory;
}

void aot_sparse_attention_kv_stationary(Tensor out, std::optional<Tensor> lse, Tensor q, Tensor k_cache, Tensor v_cache,
                                        Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                                        double softmax_scale, bool causal, std::optional<Tensor> k_scale,
                                        std::optional<Tensor> v_scale, std::optional<Tensor> formulation,
                                        std::int64_t chunk_bits, std::int64_t chunk_heads) {
  const m3_sparse::DecodeArguments a{out,         lse,          q,         k_cache, v_cache, block_indices,
                                     block_table, cu_seqlens_q, seqused_k, k_scale, v_scale, softmax_scale,
                                     causal};
  check_attention(a);
  STD_TORCH_CHECK(
      !formulation.has_value() || (is_vector(*formulation, ScalarType::Int) &&
                                   formulation->size(0) == seqused_k.size(0) && same_device(*formulation, q)),
      "formulation: expected contiguous int32 [B] on q's device");
  STD_TORCH_CHECK(chunk_bits == 0 || (chunk_bits >= 8 && chunk_bits <= 20), "chunk_bits: expected 0 or 8 to 20");
  STD_TORCH_CHECK(chunk_heads == 0 || (chunk_heads > 0 && k_cache.size(1) % chunk_heads == 0),
                  "chunk_heads: expected 0 or a divisor of the KV heads");
  const char* refusal = m3_sparse::kv_stationary_refuses(a);
  STD_TORCH_CHECK(refusal == nullptr, refusal ? refusal : "");
  if (!all_rows_empty(a))
    m3_sparse::prefill_kv_stationary(a, formulation.has_value() ? formulation->data_ptr() : nullptr,
                                     static_cast<int>(chunk_bits), static_cast<int>(chunk_heads));
}

void aot_dense_attention(Tensor out, std::optional<Tensor> lse, Tensor q, Tensor k_cache, Tensor v_cache,
                         Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, double softmax_scale, bool causal,
                         std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, std::int64_t splits) {
  const m3_sparse::DenseArguments a{out,          lse,       q,       k_cache, v_cache,       block_table,
                                    cu_seqlens_q, seqused_k, k_scale, v_scale, softmax_scale, causal};
  check_dense(a);
  STD_TORCH_CHECK(splits >= 0 && splits <= m3_sparse::kMostDenseSplits, "splits: expected 0 (chosen by shape) to ",
                  m3_sparse::kMostDenseSplits);
  if (seqused_k.size(0) == 0 || k_cache.size(0) == 0) return write_empty_rows(a);  // no row sees a key
  m3_sparse::dense(a, splits);
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

bool jit_set_active(bool on) { return m3_sparse::launch::jit::set_active(on); }

void jit_supply(std::int64_t id, Tensor cubin, Tensor params, std::int64_t threads_x, std::int64_t threads_y,
                std::int64_t threads_z, std::int64_t dynamic_smem) {
  STD_TORCH_CHECK(is_vector(cubin, ScalarType::Byte) && is_vector(params, ScalarType::Int),
                  "cubin, params: expected a uint8 and an int32 vector");
  const auto* values = static_cast<const std::int32_t*>(params.data_ptr());
  const unsigned block[3] = {static_cast<unsigned>(threads_x), static_cast<unsigned>(threads_y),
                             static_cast<unsigned>(threads_z)};
  m3_sparse::launch::jit::supply(static_cast<int>(id), cubin.data_ptr(), static_cast<std::size_t>(cubin.size(0)),
                                 std::vector<std::int32_t>(values, values + params.size(0)), block,
                                 static_cast<unsigned>(dynamic_smem));
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
  // For measurements: `way` forces the kernels, see m3_sparse::Selection.
  ops.def(
      "aot_select_blocks(Tensor(a!) out, Tensor(b!)? scores, Tensor index_q, Tensor index_k_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seqused_k, int local_blocks, int init_blocks, int way=0) -> ()");
  // `formulation` as in launch/prefill.h. For measurements: `splits` forces the decode kernel and its number of CTAs of
  // a row (the result has the same bits for each), `overlap` false keeps that launch from starting before the kernel
  // ahead of it has ended.
  ops.def(
      "aot_sparse_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, float softmax_scale, bool causal, "
      "Tensor? k_scale, Tensor? v_scale, int splits=0, bool overlap=True, int formulation=0) -> ()");
  // For measurements and bits that don't depend on the batch: `splits` forces how many CTAs share a tile's keys.
  ops.def(
      "aot_dense_attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, Tensor "
      "block_table, Tensor cu_seqlens_q, Tensor seqused_k, float softmax_scale, bool causal, Tensor? k_scale, Tensor? "
      "v_scale, int splits=0) -> ()");
  // The formulation that such a call takes, as a number of launch/prefill.h, and the bytes that it allocates, as a
  // tensor of the CPU: numbers would become constants of a traced graph. An error if a forced one cannot take it.
  ops.def(
      "aot_attention_plan(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_indices, Tensor block_table, Tensor "
      "cu_seqlens_q, Tensor seqused_k, bool causal, int formulation=0) -> Tensor");
  // The lists of the union tiles as they lie in memory (launch/prefill_union.cpp).
  ops.def(
      "aot_union_lists(Tensor q, Tensor k_cache, Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q, "
      "Tensor seqused_k, bool causal, float threshold=0.0) -> Tensor");
  // The KV-stationary prefill by itself: `formulation` [B] leaves out the sequences without a 1, `chunk_bits` is the
  // log2 of the tokens of a chunk, `chunk_heads` its KV heads (0: by shape).
  ops.def(
      "aot_sparse_attention_kv_stationary(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k_cache, Tensor v_cache, "
      "Tensor block_indices, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, float softmax_scale, "
      "bool causal, Tensor? k_scale, Tensor? v_scale, Tensor? formulation=None, int chunk_bits=0, int chunk_heads=0) "
      "-> ()");
  ops.def("aot_merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses) -> ()");
  ops.def("jit_set_active(bool on) -> bool");
  ops.def(
      "jit_supply(int id, Tensor cubin, Tensor params, int threads_x, int threads_y, int threads_z, int dynamic_smem) "
      "-> ()");
}

template <class Library>
static void implement(Library& ops) {
  ops.impl("aot_store_kv", TORCH_BOX(&aot_store_kv));
  ops.impl("aot_block_scores", TORCH_BOX(&aot_block_scores));
  ops.impl("aot_select_blocks", TORCH_BOX(&aot_select_blocks));
  ops.impl("aot_sparse_attention", TORCH_BOX(&aot_sparse_attention));
  ops.impl("aot_dense_attention", TORCH_BOX(&aot_dense_attention));
  ops.impl("aot_attention_plan", TORCH_BOX(&aot_attention_plan));
  ops.impl("aot_union_lists", TORCH_BOX(&aot_union_lists));
  ops.impl("aot_sparse_attention_kv_stationary", TORCH_BOX(&aot_sparse_attention_kv_stationary));
  ops.impl("aot_merge_states", TORCH_BOX(&aot_merge_states));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement(ops); }

// Refused by the launcher, with a clear message, unless the driver works in host memory (the tests' emulator).
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement(ops); }

// The first has no tensor to dispatch on.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("jit_set_active", TORCH_BOX(&jit_set_active));
  ops.impl("jit_supply", TORCH_BOX(&jit_supply));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
