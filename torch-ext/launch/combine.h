#pragma once

#include <torch/csrc/stable/tensor.h>

namespace m3_sparse {

// kernel-src/neutral/combine.py. outs [N, T, H, 128], lses [N, T, H], out [T, H, 128], lse [T, H]; checked by the
// caller.
void combine(const torch::stable::Tensor& out, const torch::stable::Tensor& lse, const torch::stable::Tensor& outs,
             const torch::stable::Tensor& lses);

}  // namespace m3_sparse
