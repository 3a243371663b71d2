#include "prefill_union.h"

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

using ListsParams = launch::Params<Address, Address, Address, Address,  // ids, page table, offsets, lengths
                                   Address, Address, Address, Address,  // tiles, counts, words, pages
                                   I64, I64, I64, I64,                  // bytes: ids token, head, slot; page table row
                                   I32, I32, I32, I32, I32, I32, I32, I32, I32, I32,
                                   I32>;  // T, B, K, M, P, log2 page, reach, causal, slots, capacity, by entry
using ChoiceParams = launch::Params<Address, Address, Address,  // offsets, counts, choice
                                    I32, I32, I32, float>;      // B, slots, Hkv, threshold
using WidenParams = launch::Params<Address, Address, Address, Address, Address, Address,
                                   Address,                       // K, V, copies, page table, lengths, choice
                                   I64, I64, I64, I64, I64, I64,  // bytes: K page, head, token; V
                                   I64,                           // page table row
                                   I32, I32, I32, I32>;           // M, P, log2 page, Hkv
using ForwardParams =
    launch::Params<Map, Map, Map,                                // q, K, V
                   Address, Address, Address, Address, Address,  // tiles, counts, words, pages, choice (null: all)
                   Address, Address, Address, Address,  // out, lse (null: not wanted), k_scale, v_scale (null: one)
                   I64, I64, I64, I64, I64, I64,       // bytes: out token, head; lse token, head; k_scale, v_scale head
                   I32, I32, I32, I32, I32, I32, I32,  // slots, Hkv, B, log2 page, capacity, causal, q is bf16
                   float>;                             // softmax_scale

static_assert(ListsParams::match_all(cubins::union_lists));
static_assert(ChoiceParams::match_all(cubins::union_choice));
static_assert(WidenParams::match_all(cubins::prefill_widen_e4m3));
static_assert(WidenParams::match_all(cubins::prefill_widen_e5m2));
static_assert(ForwardParams::match_all(cubins::prefill_union_bf16));
static_assert(ForwardParams::match_all(cubins::prefill_union_f16));
static_assert(ForwardParams::match_all(cubins::prefill_union_e4m3));
static_assert(ForwardParams::match_all(cubins::prefill_union_e5m2));

constexpr I64 kTileTokens = 8, kWarps = 8, kGroup = 16, kRecordBytes = 32;
constexpr I64 kMostWorkspaceBytes = I64{1} << 30;
// When a float8 cache is widened ahead of the forward instead of in it: at least so many query tokens, at most so many
// tokens of page table for each of them. H200, ms in it and ahead: 1k / 8k 0.195 0.186, 8k / 8k 1.110 1.001, 32k / 32k
// 5.19 4.61, 2k / 32k 0.381 0.368, 8k / 128k 1.425 1.362, but 4k / 128k 0.727 0.753.
constexpr I64 kLeastTokensWidened = 1024, kEntryTokensWidened = 16;
constexpr I64 kMostWidenedBytes = I64{256} << 20;
constexpr launch::Options kOverlap{1, true};

I32 narrow(I64 n) { return static_cast<I32>(n); }
Address address(const std::optional<Tensor>& t) { return t.has_value() ? t->data_ptr() : nullptr; }
I64 scale_stride(const std::optional<Tensor>& t) { return t.has_value() && t->numel() > 1 ? 4 : 0; }

struct Shape {
  I64 tokens, heads, requests, width, table, page, pages, reach, blocks, slots, capacity;
  explicit Shape(const DecodeArguments& a)
      : tokens(a.q.size(0)),
        heads(a.k_cache.size(1)),
        requests(a.seqused_k.size(0)),
        width(a.block_indices.size(2)),
        table(a.block_table.size(1)),
        page(page_tokens(a.k_cache)),
        pages(a.k_cache.size(0)),
        reach(std::min<I64>(table * page, INT32_MAX)),
        blocks((reach + 127) / 128),
        slots(tokens / kTileTokens + requests + 1),  // whatever the lengths are: see neutral/union.py
        capacity(std::min(kTileTokens * width, std::max<I64>(blocks, 1))) {}
};

// Offsets of the parts in the workspace, each a multiple of 256 bytes.
struct Layout {
  I64 tiles, counts, words, pages, choice, bytes;
  explicit Layout(const Shape& s) {
    I64 at = 0;
    auto take = [&](I64 size) {
      const I64 start = at;
      at += (size + 255) / 256 * 256;
      return start;
    };
    const I64 items = s.slots * s.heads;
    tiles = take(s.slots * kRecordBytes);
    counts = take(items * 4);
    words = take(items * s.capacity * 4);
    pages = take(items * s.capacity * (s.page == 128 ? 4 : 8));
    choice = take(s.requests * 4);
    bytes = at;
  }
};

int device_of(const DecodeArguments& a) { return a.q.is_cpu() ? -1 : static_cast<int>(a.q.get_device_index()); }

bool is_float8(const DecodeArguments& a) { return a.k_cache.element_size() == 1; }

// Of the fp16 copies of K and V, a page for each entry of the page table.
I64 widened_bytes(const Shape& s) { return 2 * s.requests * s.table * s.heads * s.page * 128 * 2; }

Map copy_map(const Tensor& copies, const void* base, const Shape& s) {
  return launch::tensor_map(copies, base, 2, {128, s.page, s.heads, s.requests * s.table},
                            {256, s.page * 256, s.heads * s.page * 256}, {64, static_cast<unsigned>(s.page), 1, 1});
}

// [2 * B * M, Hkv, page, 128]: K, then V.
Tensor widen(const DecodeArguments& a, const Shape& s, Address choice) {
  const I64 entries = s.requests * s.table;
  const I64 sizes[] = {2 * entries, s.heads, s.page, 128};
  const Tensor copies = torch::stable::new_empty(a.q, {sizes, 4}, ScalarType::Half);
  char* const base = static_cast<char*>(copies.data_ptr());
  const auto& program =
      a.k_cache.scalar_type() == ScalarType::Float8_e4m3fn ? cubins::prefill_widen_e4m3 : cubins::prefill_widen_e5m2;
  launch::run(program, {static_cast<unsigned>(entries), static_cast<unsigned>(s.heads)}, device_of(a),
              WidenParams{{a.k_cache.data_ptr(), a.v_cache.data_ptr(), base, base + widened_bytes(s) / 2,
                           a.block_table.data_ptr(), a.seqused_k.data_ptr(), choice, a.k_cache.stride(0),
                           a.k_cache.stride(1), a.k_cache.stride(2), a.v_cache.stride(0), a.v_cache.stride(1),
                           a.v_cache.stride(2), a.block_table.stride(0) * 4, narrow(s.table), narrow(s.pages),
                           s.page == 128 ? 7 : 6, narrow(s.heads)}},
              kOverlap);
  return copies;
}

}  // namespace

std::int64_t union_workspace_bytes(const DecodeArguments& a) { return Layout(Shape(a)).bytes; }
std::int64_t union_copies_bytes(const DecodeArguments& a) { return widened_bytes(Shape(a)); }

const char* union_refuses(const DecodeArguments& a) {
  const Shape s(a);
  const I64 size = a.k_cache.element_size();
  if (a.q.size(1) != kGroup * s.heads) return "union tiles take 16 query heads a KV head";
  if (s.blocks > 65535) return "union tiles take a page table that reaches at most 65,535 blocks of 128 tokens";
  if (s.tokens * s.heads * s.width > INT32_MAX || s.slots * s.heads > INT32_MAX || s.requests > INT32_MAX / 2)
    return "union tiles take fewer than 2^31 selected blocks in all";
  if (s.pages == 0) return "union tiles take at least one page";
  if (!launch::fits_tensor_map(a.q.size(1), a.q.stride(1) * 2) || !launch::fits_tensor_map(s.tokens, a.q.stride(0) * 2))
    return "union tiles take strides of q that a tensor map can hold";
  for (const Tensor* cache : {&a.k_cache, &a.v_cache})
    for (int i = 0; i < 3; ++i)
      if (!launch::fits_tensor_map(cache->size(i), cache->stride(i) * size))
        return "union tiles take strides of the caches that a tensor map can hold";
  if (Layout(s).bytes > kMostWorkspaceBytes) return "the lists of the union tiles would take more than 1 GiB";
  return nullptr;
}

bool union_widens(const DecodeArguments& a) {
  const Shape s(a);
  return is_float8(a) && !has_slots(a.k_cache) && launch::available(cubins::prefill_widen_e4m3, device_of(a)) &&
         s.tokens >= kLeastTokensWidened && s.tokens * kEntryTokensWidened >= s.requests * s.table * s.page &&
         widened_bytes(s) <= kMostWidenedBytes;
}

UnionLists union_lists(const DecodeArguments& a, bool choose, double threshold, bool by_entry) {
  const Shape s(a);
  const Layout layout(s);
  const int device = device_of(a);
  const I64 bytes[] = {layout.bytes};
  UnionLists lists{s.slots, s.capacity, by_entry,
                   nullptr, nullptr,    nullptr,
                   nullptr, nullptr,    torch::stable::new_empty(a.q, {bytes, 1}, ScalarType::Byte)};
  char* const base = static_cast<char*>(lists.memory.data_ptr());
  lists.tiles = base + layout.tiles;
  lists.counts = base + layout.counts;
  lists.words = base + layout.words;
  lists.pages = base + layout.pages;
  lists.choice = base + layout.choice;
  const launch::Grid grid{static_cast<unsigned>((s.slots + kWarps - 1) / kWarps), static_cast<unsigned>(s.heads)};
  launch::run(cubins::union_lists, grid, device,
              ListsParams{{a.block_indices.data_ptr(),
                           a.block_table.data_ptr(),
                           a.cu_seqlens_q.data_ptr(),
                           a.seqused_k.data_ptr(),
                           lists.tiles,
                           lists.counts,
                           lists.words,
                           lists.pages,
                           a.block_indices.stride(0) * 4,
                           a.block_indices.stride(1) * 4,
                           a.block_indices.stride(2) * 4,
                           a.block_table.stride(0) * 4,
                           narrow(s.tokens),
                           narrow(s.requests),
                           narrow(s.width),
                           narrow(s.table),
                           narrow(s.pages),
                           s.page == 128 ? 7 : 6,
                           narrow(s.reach),
                           a.causal ? 1 : 0,
                           narrow(s.slots),
                           narrow(s.capacity),
                           by_entry ? 1 : 0}},
              kOverlap);
  if (threshold == 0) threshold = union_threshold(is_float8(a) && !by_entry, launch::compute_capability(device));
  if (choose)
    launch::run(cubins::union_choice, {static_cast<unsigned>(s.requests)}, device,
                ChoiceParams{{a.cu_seqlens_q.data_ptr(), lists.counts, lists.choice, narrow(s.requests),
                              narrow(s.slots), narrow(s.heads), static_cast<float>(threshold)}},
                kOverlap);
  return lists;
}

void prefill_union(const DecodeArguments& a, const UnionLists& lists, bool by_choice) {
  const Shape s(a);
  const int device = device_of(a);
  const Address choice = by_choice ? lists.choice : nullptr;
  // Holds its memory until the launches below are in the stream.
  std::optional<Tensor> copies;
  Map k_map, v_map;
  if (lists.by_entry) {
    copies = widen(a, s, choice);
    char* const base = static_cast<char*>(copies->data_ptr());
    k_map = copy_map(*copies, base, s);
    v_map = copy_map(*copies, base + widened_bytes(s) / 2, s);
  } else {
    k_map = cache_map(a.k_cache);
    v_map = cache_map(a.v_cache);
  }
  ForwardParams params{{launch::tensor_map(a.q, a.q.data_ptr(), 2, {128, a.q.size(1), s.tokens},
                                           {a.q.stride(1) * 2, a.q.stride(0) * 2}, {64, kGroup, kTileTokens}),
                        k_map,
                        v_map,
                        lists.tiles,
                        lists.counts,
                        lists.words,
                        lists.pages,
                        choice,
                        a.out.data_ptr(),
                        address(a.lse),
                        address(a.k_scale),
                        address(a.v_scale),
                        a.out.stride(0) * 2,
                        a.out.stride(1) * 2,
                        a.lse.has_value() ? a.lse->stride(0) * 4 : I64{0},
                        a.lse.has_value() ? a.lse->stride(1) * 4 : I64{0},
                        scale_stride(a.k_scale),
                        scale_stride(a.v_scale),
                        narrow(s.slots),
                        narrow(s.heads),
                        narrow(s.requests),
                        s.page == 128 ? 7 : 6,
                        narrow(s.capacity),
                        a.causal ? 1 : 0,
                        a.q.scalar_type() == ScalarType::BFloat16 ? 1 : 0,
                        static_cast<float>(a.softmax_scale)}};
  // One CTA fills a multiprocessor; more tiles than that are walked by the CTAs there are.
  const launch::Grid grid{static_cast<unsigned>(std::min<I64>(s.slots * s.heads, launch::multiprocessors(device)))};
  switch (lists.by_entry ? ScalarType::Half : a.k_cache.scalar_type()) {
    case ScalarType::BFloat16:
      return launch::run(cubins::prefill_union_bf16, grid, device, params, kOverlap);
    case ScalarType::Half:
      return launch::run(cubins::prefill_union_f16, grid, device, params, kOverlap);
    case ScalarType::Float8_e4m3fn:
      return launch::run(cubins::prefill_union_e4m3, grid, device, params, kOverlap);
    case ScalarType::Float8_e5m2:
      return launch::run(cubins::prefill_union_e5m2, grid, device, params, kOverlap);
    default:
      throw std::runtime_error("m3_sparse: prefill_union called with an unchecked dtype");
  }
}

}  // namespace m3_sparse
