// Schemas of the ahead-of-time backend's operators, and the checks that keep a direct caller inside the tensors given.
// The public Python functions check first and say more; these errors are for callers of torch.ops.
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "launch/combine.h"
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

}  // namespace

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
  STD_TORCH_CHECK(in != 0 && result != 0 && (in == 4 || out.scalar_type() == outs.scalar_type()),
                  "outs, out: expected float32 states with a float32, bfloat16 or float16 result, or one 16-bit dtype for both");
  STD_TORCH_CHECK(same_device(out, outs) && same_device(lse, outs) && same_device(lses, outs),
                  "out, lse, outs, lses: expected one device");
  STD_TORCH_CHECK(t * h == 0 || (aligned16(outs, in) && aligned16(out, result)),
                  "outs, out: expected base addresses and strides in multiples of 16 bytes, and a contiguous last dimension");
  m3_sparse::combine(out, lse, outs, lses);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("aot_merge_states(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("aot_merge_states", TORCH_BOX(&aot_merge_states));
}

// Refused by the launcher, with a clear message, unless the driver works in host memory (the tests' emulator).
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("aot_merge_states", TORCH_BOX(&aot_merge_states));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
