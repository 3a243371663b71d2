#include "prefill.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache.h"
#include "cubins.h"
#include "launch.h"
#include "prefill_kv_stationary.h"
#include "prefill_union.h"

namespace m3_sparse {
namespace {

using I64 = std::int64_t;

// A row of decode costs a CTA of its own; a tile of a prefill takes as long for one token as for eight, and the choice
// takes launches. H200, 64/4 heads, bf16, ms for decode, union tiles and KV-stationary, random and then correlated:
//   1 x 128 tokens at 64k   0.073 0.119 0.093   0.059 0.055 0.068
//   1 x 256                 0.131 0.224 0.125   0.115 0.093 0.109
//   8 x 32 at 32k           0.163 0.242 0.221   0.117 0.102 0.120
//   8 x 64                  0.254 0.325 0.288   0.225 0.143 0.197
constexpr I64 kDecodeTokens = 32;  // of a request, on average
constexpr I64 kDecodeRows = 512;   // (token, KV head)

bool is_decode(const DecodeArguments& a) {
  const I64 tokens = a.q.size(0), requests = a.seqused_k.size(0), heads = a.k_cache.size(1);
  return tokens <= kDecodeTokens * requests || tokens * heads <= kDecodeRows;
}

void require(const char* refusal) {
  if (refusal != nullptr) throw std::runtime_error(std::string("m3_sparse: ") + refusal);
}

}  // namespace

Formulation plan_attention(const DecodeArguments& a, Formulation wanted) {
  if (a.q.size(0) * a.k_cache.size(1) == 0) return Formulation::decode;
  const int device = a.q.is_cpu() ? -1 : static_cast<int>(a.q.get_device_index());
  const char* unions_refuse = launch::available(cubins::prefill_union_bf16, device)
                                  ? union_refuses(a)
                                  : "union tiles aren't compiled for this compute capability";
  const char* kv_stationary_refuse = launch::available(cubins::prefill_bf16_bf16_r16, device)
                                         ? kv_stationary_refuses(a)
                                         : "the KV-stationary prefill isn't compiled for this compute capability";
  switch (wanted) {
    case Formulation::union_widened:
      require(launch::available(cubins::prefill_widen_e4m3, device) ? nullptr
                                                                    : "only kernels of SM90 widen a cache first");
      require(a.k_cache.element_size() == 1 && !has_slots(a.k_cache) ? nullptr
                                                                     : "only a float8 cache of pages is widened");
      [[fallthrough]];
    case Formulation::union_tiles:
      require(unions_refuse);
      return wanted;
    case Formulation::kv_stationary:
      require(kv_stationary_refuse);
      return wanted;
    case Formulation::by_sequence:
      require(unions_refuse);
      require(kv_stationary_refuse);
      return wanted;
    case Formulation::decode:
      return wanted;
    case Formulation::automatic:
      break;
  }
  if (is_decode(a)) return Formulation::decode;
  const bool unions = unions_refuse == nullptr, kv_stationary = kv_stationary_refuse == nullptr;
  if (unions && kv_stationary) return Formulation::by_sequence;
  if (unions) return Formulation::union_tiles;
  return kv_stationary ? Formulation::kv_stationary : Formulation::decode;
}

std::int64_t attention_workspace(const DecodeArguments& a, Formulation plan) {
  const bool lists = plan != Formulation::kv_stationary && plan != Formulation::decode;
  const bool partials = plan == Formulation::kv_stationary || plan == Formulation::by_sequence;
  if (a.q.size(0) * a.k_cache.size(1) == 0) return 0;
  const bool copies = plan == Formulation::union_widened || (lists && union_widens(a));
  // The copies are given back before the partial results are asked for.
  return (lists ? union_workspace_bytes(a) : 0) +
         std::max(copies ? union_copies_bytes(a) : 0, partials ? plan_kv_stationary(a).workspace_bytes : 0);
}

void attention(const DecodeArguments& a, Formulation plan, int splits, bool overlap) {
  switch (plan) {
    case Formulation::union_tiles:
      return prefill_union(a, union_lists(a, false, 0, union_widens(a)), false);
    case Formulation::union_widened:
      return prefill_union(a, union_lists(a, false, 0, true), false);
    case Formulation::kv_stationary:
      return prefill_kv_stationary(a, nullptr);
    case Formulation::by_sequence: {
      const UnionLists lists = union_lists(a, true, 0, union_widens(a));
      prefill_union(a, lists, true);
      return prefill_kv_stationary(a, lists.choice);
    }
    default:
      return decode(a, splits, overlap);
  }
}

}  // namespace m3_sparse
