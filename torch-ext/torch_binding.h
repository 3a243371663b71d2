#pragma once

#include <torch/csrc/stable/tensor.h>

// out [T, H, 128] and lse [T, H] are written from outs [N, T, H, 128] and lses [N, T, H].
void aot_merge_states(torch::stable::Tensor out, torch::stable::Tensor lse, torch::stable::Tensor outs,
                      torch::stable::Tensor lses);
