// Launching an embedded kernel. A kernel's host code calls
//     launch::run<Params>(cubins::program, grid, device, {argument, ...});
// with `Params` the C++ types of the kernel's parameters in order; that they are what the compiled kernel has is
// checked at compile time, for every architecture.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <utility>

#include "image.h"

namespace m3_sparse::launch {

struct Grid {
  unsigned x, y = 1, z = 1;
};

struct Options {
  unsigned cluster = 1;  // CTAs of a cluster, along x; more than 8 is not portable
  // The kernel may start before the one ahead of it in the stream has ended (programmatic dependent launch). Only for
  // kernels that wait for that one before they touch what others write or read (ptx.wait_for_previous_kernel).
  bool overlap = false;
  // Percent of the L1's memory that is to be shared memory, or -1: what the kernel needs. Kernels that want different
  // shares don't run on one multiprocessor at a time: it has to fall idle between them.
  int carveout = -1;
};

// Carveouts of the kernels that need little shared memory. The rest is L1, which holds the lines of loads under way.
constexpr int kLeastShared = 8;   // what they need
constexpr int kMostShared = 100;  // that of the attention kernels

template <class... Types>
struct Params {
  std::tuple<Types...> values;

  static constexpr bool match(const Image& image) {
    constexpr int sizes[] = {sizeof(Types)...}, aligns[] = {alignof(Types)...};
    if (image.num_params != sizeof...(Types)) return false;
    for (int i = 0; i < image.num_params; ++i)
      if (sizes[i] != image.params[i].size || aligns[i] < image.params[i].align) return false;
    return true;
  }

  template <std::size_t N>
  static constexpr bool match_all(const Image (&program)[N]) {
    for (const Image& image : program)
      if (!match(image)) return false;
    return true;
  }

  std::array<void*, sizeof...(Types)> pointers() {
    return std::apply([](auto&... value) { return std::array<void*, sizeof...(Types)>{&value...}; }, values);
  }
};

// The image of a program for the device's compute capability; throws, naming what there is, if none fits.
const Image& pick(const Image* program, std::size_t count, int device);

// Whether the program has an image for the device's compute capability.
bool available(const Image* program, std::size_t count, int device);

template <std::size_t N>
bool available(const Image (&program)[N], int device) {
  return available(program, N, device);
}

// Launches on the device's current torch stream, without synchronising. `device` is the tensors' device index, which
// need not be the current one; -1 means host memory.
void run(const Image& image, Grid grid, int device, void** params, Options options = {});

template <std::size_t N, class... Types>
void run(const Image (&program)[N], Grid grid, int device, Params<Types...> params, Options options = {}) {
  run(pick(program, N, device), grid, device, params.pointers().data(), options);
}

// Makes the device's context current while it lives; device -1 is host memory. A thread that has made no CUDA runtime
// call has none, and both launches and tensor maps need one.
class CurrentContext {
 public:
  explicit CurrentContext(int device);
  ~CurrentContext();
  // Ahead of the destructor, which can't report an error.
  void restore();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

// Compute capability of the device, 10 * major + minor.
int compute_capability(int device);

// Multiprocessors of the device.
int multiprocessors(int device);

}  // namespace m3_sparse::launch
