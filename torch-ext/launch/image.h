// What the generated tables say of a compiled kernel.
#pragma once

namespace m3_sparse {

struct ParamSpec {
  int size, align;
};

// One cubin: a kernel variant for exactly one compute capability (10 * major + minor).
struct Image {
  int id;
  int capability;
  const char* entry;
  const unsigned long long* data;
  const ParamSpec* params;
  int num_params;
  unsigned block[3];
  unsigned dynamic_smem;
  const char* kernel;  // stem of its file in kernel-src
};

}  // namespace m3_sparse
