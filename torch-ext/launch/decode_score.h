#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace m3_sparse {

// How the scoring of a batch is laid out over the chip. A function of shapes and of the number of multiprocessors only;
// no choice changes a bit of the scores.
struct ScorePlan {
  int tiles;        // groups of 8 columns, (token, head) pairs of a request, that share the keys a CTA reads: 1, 2 or 4
  unsigned groups;  // further column groups, in the grid
  unsigned splits;  // CTAs that share the blocks of a request
  bool ahead;       // whether they fetch their first keys into L2 before the wait for the kernel ahead
  int carveout;     // launch::Options
};

ScorePlan plan_scores(std::int64_t tokens, std::int64_t requests, std::int64_t heads, std::int64_t blocks,
                      bool fp8_keys, int multiprocessors);

// kernel-src/neutral/decode_score.py. scores fp32 [T, Hi, blocks], index_q [T, Hi, 128], index_k [P, page, 128],
// block_table [B, M], cu_seqlens_q [B + 1], seqused_k [B]; checked by the caller. With `fill` every element of `scores`
// is written, otherwise those of the candidates. Returns the launch's carveout, or -1 if there was nothing to launch.
int decode_scores(const torch::stable::Tensor& scores, const torch::stable::Tensor& index_q,
                  const torch::stable::Tensor& index_k, const torch::stable::Tensor& block_table,
                  const torch::stable::Tensor& cu_seqlens_q, const torch::stable::Tensor& seqused_k, bool fill);

}  // namespace m3_sparse
