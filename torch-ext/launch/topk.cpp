#include "topk.h"

#include <cstdint>

#include "cubins.h"
#include "launch.h"

namespace m3_sparse {
namespace {

using torch::stable::Tensor;

using TopKParams = launch::Params<const void*, const void*, const void*, const void*,  // out, scores, offsets, lengths
                                  std::int64_t, std::int64_t, std::int64_t,  // byte strides of out: token, head, slot
                                  std::int64_t, std::int64_t,                // of scores: token, head
                                  std::int32_t, std::int32_t, std::int32_t,  // tokens, requests, heads
                                  std::int32_t, std::int32_t,  // blocks of a score row, reach of the block table
                                  std::int32_t, std::int32_t, std::int32_t>;  // k, local, init

static_assert(TopKParams::match_all(cubins::topk_narrow));
static_assert(TopKParams::match_all(cubins::topk_wide));
static_assert(TopKParams::match_all(cubins::topk_long));

// Rows that a CTA has in registers at once: SHAPES in the kernel file. `long` takes all longer ones, too.
constexpr std::int64_t kNarrowBlocks = 256, kWideBlocks = 1024;

}  // namespace

void topk(const Tensor& out, const Tensor& scores, const Tensor& cu_seqlens_q, const Tensor& seqused_k,
          std::int64_t reach, std::int64_t local_blocks, std::int64_t init_blocks, int carveout) {
  const std::int64_t tokens = out.size(0), heads = out.size(1), blocks = scores.size(2);
  if (tokens * heads == 0) return;
  auto narrow = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const TopKParams params{{out.data_ptr(), scores.data_ptr(), cu_seqlens_q.data_ptr(), seqused_k.data_ptr(),
                           out.stride(0) * 4, out.stride(1) * 4, out.stride(2) * 4, scores.stride(0) * 4,
                           scores.stride(1) * 4, narrow(tokens), narrow(seqused_k.size(0)), narrow(heads),
                           narrow(blocks), narrow(reach), narrow(out.size(2)), narrow(local_blocks),
                           narrow(init_blocks)}};
  const int device = out.is_cpu() ? -1 : static_cast<int>(out.get_device_index());
  const auto rows = static_cast<unsigned>(tokens * heads);
  // Beside the scoring, which has waited itself before it lets this kernel start. That works only with the carveout of
  // the scoring; with its own the kernel made 16 requests slower (H200, bf16, 32k: 39.1 against 37.6 us).
  const launch::Options options{1, carveout >= 0, carveout};
  if (blocks <= kNarrowBlocks) return launch::run(cubins::topk_narrow, {rows}, device, params, options);
  if (blocks <= kWideBlocks) return launch::run(cubins::topk_wide, {rows}, device, params, options);
  launch::run(cubins::topk_long, {rows}, device, params, options);
}

}  // namespace m3_sparse
