// Fuzz target: the operators' argument checks and the planning of their launches, on tensors of any shape, stride,
// dtype and alignment. An input is read as a valid call with some of its values changed. The call may be refused by an
// exception; what it may not do is crash, break a rule of C++ (the sanitizers), touch memory outside a tensor that the
// host writes, or launch what no device takes (`on_launch`).
//
// No memory stands behind the tensors: nothing but the kernels, which recording_driver.c does not run, reads them.
// Those that the host may fill are kept small. tests/test_fuzz.py and `make fuzz` (tools/fuzz.py) build it.
#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "torch_binding.h"

using torch::stable::Tensor;
using I64 = std::int64_t;

extern "C" {
// recording_driver.c
using LaunchCallback = int (*)(const char*, const unsigned*, const unsigned*, unsigned, void*, void**);
void recording_set_callback(LaunchCallback callback);
void recording_set_capability(int value);
unsigned recording_last_cluster(void);
// The module of the extension is never made here.
void* PyModule_Create2(void*, int) { return nullptr; }
}

namespace {

void require(bool holds, const char* what, const char* entry) {
  if (holds) return;
  std::fprintf(stderr, "launch of %s: %s\n", entry, what);
  std::abort();
}

unsigned long long launches = 0;

int on_launch(const char* entry, const unsigned* grid, const unsigned* block, unsigned shared, void*, void** params) {
  ++launches;
  require(grid[0] >= 1 && grid[1] >= 1 && grid[2] >= 1, "an empty grid", entry);
  require(grid[0] <= 0x7fffffffu && grid[1] <= 65535 && grid[2] <= 65535, "a grid that CUDA does not take", entry);
  require(block[0] * block[1] * block[2] <= 1024 && block[0] >= 32, "a block that CUDA does not take", entry);
  require(shared <= 227 * 1024, "more shared memory than there is", entry);
  require(grid[0] % recording_last_cluster() == 0, "a grid that is no multiple of its cluster", entry);
  require(params != nullptr, "no arguments", entry);
  return 0;
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}
  unsigned byte() { return data_ < end_ ? *data_++ : 0; }
  I64 below(I64 n) { return static_cast<I64>(byte()) % n; }
  bool some() { return byte() & 1; }
  bool spent() const { return data_ >= end_; }
  I64 value() {
    static constexpr I64 kValues[] = {
        0,          1,          2,          3,         4,         7,         8,         15,      16,  17,
        31,         32,         33,         63,        64,        65,        127,       128,     129, 255,
        256,        1000,       4096,       16384,     65535,     65536,     1 << 20,   1 << 25, -1,  0x7ffffffe,
        0x7fffffff, 0x80000000, 0xffffffff, 1LL << 32, 1LL << 39, 1LL << 40, 1LL << 47, -128,    120, 2048};
    return kValues[below(std::size(kValues))];
  }

 private:
  const std::uint8_t *data_, *end_;
};

// Addresses for tensors, with pages behind them only where something is written.
char* room() {
  static char* const memory = static_cast<char*>(
      mmap(nullptr, std::size_t{1} << 40, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return memory;
}

using Dtype = std::int32_t (*)();
constexpr Dtype kDtypes[] = {aoti_torch_dtype_bfloat16, aoti_torch_dtype_float16,     aoti_torch_dtype_float8_e4m3fn,
                             aoti_torch_dtype_float32,  aoti_torch_dtype_float8_e5m2, aoti_torch_dtype_int32,
                             aoti_torch_dtype_int64};
enum { kBf16, kF16, kE4m3, kF32, kE5m2, kI32, kI64 };

struct Shape {
  std::vector<I64> sizes, strides;
  int dtype = kBf16;
  I64 offset = 0;  // bytes from an aligned address

  Shape(std::initializer_list<I64> dims, int type) : sizes(dims), strides(dims.size()), dtype(type) {
    I64 step = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
      strides[i] = step;
      if (__builtin_mul_overflow(step, sizes[i] > 1 ? sizes[i] : 1, &step)) step = I64{1} << 60;
    }
  }
  void change(Input& in) {
    const I64 dims = static_cast<I64>(sizes.size());
    switch (in.below(6)) {
      case 0:
        if (dims) sizes[static_cast<std::size_t>(in.below(dims))] = in.value();
        break;
      case 1:
        if (dims) strides[static_cast<std::size_t>(in.below(dims))] = in.value();
        break;
      case 2:
        dtype = static_cast<int>(in.below(std::size(kDtypes)));
        break;
      case 3:
        offset = in.below(17);
        break;
      case 4:
        if (in.some() && dims) {
          sizes.pop_back(), strides.pop_back();
        } else {
          sizes.push_back(in.value()), strides.push_back(1);
        }
        break;
      default:
        if (dims) {
          const I64 factor = 1 + in.below(3);
          I64& stride = strides[static_cast<std::size_t>(in.below(dims))];
          if (__builtin_mul_overflow(stride, factor, &stride)) stride = I64{1} << 60;
        }
    }
  }
  // Whether a filled tensor would stay within a few MiB.
  bool small() const {
    I64 span = 1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      I64 reach = 0;
      if (sizes[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(sizes[i], strides[i], &reach) ||
          __builtin_add_overflow(span, reach, &span))
        return false;
    }
    return span < (1 << 21);
  }
  // Whether torch takes it: what it refuses itself never reaches an operator.
  bool possible() const {
    I64 span = 8;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      I64 reach = 0;
      if (sizes[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(sizes[i], strides[i], &reach) ||
          __builtin_add_overflow(span, reach, &span))
        return false;
    }
    I64 elements = 8;
    for (const I64 size : sizes)
      if (__builtin_mul_overflow(elements, size > 1 ? size : 1, &elements)) return false;
    return span < (I64{1} << 58);
  }
  Tensor tensor() const {
    AtenTensorHandle handle = nullptr;
    const auto code = aoti_torch_create_tensor_from_blob(room() + offset, static_cast<I64>(sizes.size()), sizes.data(),
                                                         strides.data(), 0, kDtypes[static_cast<std::size_t>(dtype)](),
                                                         aoti_torch_device_type_cpu(), 0, &handle);
    if (code != 0) throw std::runtime_error("no such tensor");
    return Tensor(handle);
  }
};

struct Call {
  std::vector<Shape> shapes;
  std::vector<bool> given;
  I64 number[3] = {0, 0, 0};
  bool flag = true;
  Tensor operator[](std::size_t i) const { return shapes[i].tensor(); }
  std::optional<Tensor> maybe(std::size_t i) const {
    return given[i] ? std::optional<Tensor>(shapes[i].tensor()) : std::nullopt;
  }
};

// Arguments of a plausible call: `out, lse, q, k_cache, v_cache, ids, table, cu, used, k_scale, v_scale, formulation`.
Call attention(Input& in) {
  const I64 tokens = in.value(), kv = 1 + in.below(8), heads = kv * (1 + in.below(17)), pages = in.value();
  const I64 page = in.some() ? 128 : in.some() ? 64 : 1, batch = in.some() ? 1 + in.below(9) : in.value();
  const I64 width = in.value(), ids = in.below(34);
  const int q = in.some() ? kBf16 : kF16, cache = in.some() ? q : in.some() ? kE4m3 : kE5m2;
  Call call;
  call.shapes = {{{tokens, heads, 128}, q},
                 {{tokens, heads}, kF32},
                 {{tokens, heads, 128}, q},
                 {{pages, kv, page, 128}, cache},
                 {{pages, kv, page, 128}, cache},
                 {{tokens, kv, ids}, kI32},
                 {{batch, width}, kI32},
                 {{batch + 1}, kI32},
                 {{batch}, kI32},
                 {{in.some() ? kv : 1}, kF32},
                 {{in.some() ? kv : 1}, kF32},
                 {{batch}, kI32}};
  return call;
}

// `out, scores, index_q, index_k_cache, table, cu, used`.
Call scoring(Input& in) {
  const I64 tokens = in.value(), heads = 1 + in.below(65), pages = in.value(),
            batch = in.some() ? 1 + in.below(9) : in.value();
  const I64 page = in.some() ? 128 : in.some() ? 64 : 1, width = in.value(), topk = 1 + in.below(33);
  const int q = in.some() ? kBf16 : in.some() ? kF16 : kE4m3, k = in.some() ? q : kE4m3;
  I64 reach = 0;
  if (__builtin_mul_overflow(width, page, &reach)) reach = 0;
  Call call;
  call.shapes = {{{tokens, heads, topk}, kI32},
                 {{tokens, heads, (reach + 127) / 128}, kF32},
                 {{tokens, heads, 128}, q},
                 {{pages, page, 128}, k},
                 {{batch, width}, kI32},
                 {{batch + 1}, kI32},
                 {{batch}, kI32}};
  return call;
}

// `k, v, index_k, k_cache, v_cache, index_k_cache, slots, k_scale, v_scale`.
Call storing(Input& in) {
  const I64 tokens = in.value(), heads = in.below(9), pages = in.value(), page = in.some() ? 128 : 64;
  const int from = static_cast<int>(in.below(5)), to = in.some() ? from : in.some() ? kE4m3 : kE5m2;
  Call call;
  call.shapes = {{{tokens, heads, 128}, from},
                 {{tokens, heads, 128}, from},
                 {{tokens, 128}, from},
                 {{pages, heads, page, 128}, to},
                 {{pages, heads, page, 128}, to},
                 {{pages, page, 128}, to},
                 {{tokens}, in.some() ? kI64 : kI32},
                 {{1}, kF32},
                 {{1}, kF32}};
  return call;
}

// `out, lse, outs, lses`.
Call merging(Input& in) {
  const I64 states = in.value(), tokens = in.value(), heads = in.value();
  const int from = in.some() ? kF32 : in.some() ? kBf16 : kF16;
  Call call;
  call.shapes = {{{tokens, heads, 128}, in.some() ? from : kBf16},
                 {{tokens, heads}, kF32},
                 {{states, tokens, heads, 128}, from},
                 {{states, tokens, heads}, kF32}};
  return call;
}

void make(unsigned what, Input& in) {
  Call c = what <= 3   ? attention(in)
           : what <= 5 ? scoring(in)
           : what == 6 ? storing(in)
           : what == 7 ? merging(in)
                       : attention(in);
  for (std::size_t i = 0; i < c.shapes.size(); ++i) c.given.push_back(true);
  c.flag = in.some();
  for (I64& number : c.number) number = in.some() ? 0 : in.value();
  const unsigned optional = in.byte();
  const auto drop = [&](std::size_t i, unsigned bit) { c.given[i] = !(optional >> bit & 1); };
  for (I64 n = in.below(5); n > 0 && !in.spent(); --n)
    c.shapes[static_cast<std::size_t>(in.below(static_cast<I64>(c.shapes.size())))].change(in);
  for (const Shape& shape : c.shapes)
    if (!shape.possible()) return;
  // What the host fills: rows that see nothing.
  if (what != 6 && !(c.shapes[0].small() && c.shapes[1].small())) return;
  const double scale = 0.125;
  switch (what) {
    case 0:
      drop(1, 0), drop(9, 1), drop(10, 2);
      return aot_sparse_attention(c[0], c.maybe(1), c[2], c[3], c[4], c[5], c[6], c[7], c[8], scale, c.flag, c.maybe(9),
                                  c.maybe(10), c.number[0], optional & 8, c.number[1]);
    case 1:
      drop(1, 0), drop(9, 1), drop(10, 2), drop(11, 3);
      return aot_sparse_attention_kv_stationary(c[0], c.maybe(1), c[2], c[3], c[4], c[5], c[6], c[7], c[8], scale,
                                                c.flag, c.maybe(9), c.maybe(10), c.maybe(11), c.number[0], c.number[1]);
    case 2:
      drop(1, 0), drop(9, 1), drop(10, 2);
      return aot_dense_attention(c[0], c.maybe(1), c[2], c[3], c[4], c[6], c[7], c[8], scale, c.flag, c.maybe(9),
                                 c.maybe(10), c.number[0]);
    case 3:
      aot_attention_plan(c[2], c[3], c[4], c[5], c[6], c[7], c[8], c.flag, c.number[0]);
      return;
    case 4:
      drop(1, 0);
      return aot_select_blocks(c[0], c.maybe(1), c[2], c[3], c[4], c[5], c[6], c.number[0], c.number[1], c.number[2]);
    case 5:
      return aot_block_scores(c[1], c[2], c[3], c[4], c[5], c[6]);
    case 6:
      drop(2, 0), drop(5, 0), drop(7, 1), drop(8, 2);
      if (optional & 8) drop(5, 4);
      return aot_store_kv(c[0], c[1], c.maybe(2), c[3], c[4], c.maybe(5), c[6], c.maybe(7), c.maybe(8));
    case 7:
      return aot_merge_states(c[0], c[1], c[2], c[3]);
    default:
      aot_union_lists(c[2], c[3], c[5], c[6], c[7], c[8], c.flag, scale);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  recording_set_callback(on_launch);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  const unsigned what = in.byte() % 9;
  static constexpr int kCapabilities[] = {90, 90, 100, 103};
  recording_set_capability(kCapabilities[in.below(4)]);
  try {
    make(what, in);
  } catch (const std::exception&) {  // refused
  }
  return 0;
}

#ifdef M3_REPLAY
// Runs the files named, and prints how many launches they made.
int main(int count, char** names) {
  LLVMFuzzerInitialize(nullptr, nullptr);
  for (int i = 1; i < count; ++i) {
    std::FILE* file = std::fopen(names[i], "rb");
    if (file == nullptr) return 2;
    std::uint8_t data[4096];
    const std::size_t size = std::fread(data, 1, sizeof data, file);
    std::fclose(file);
    // A copy of its own size, so that a sanitizer sees a read past its end.
    const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[size]);
    for (std::size_t j = 0; j < size; ++j) exact[j] = data[j];
    LLVMFuzzerTestOneInput(exact.get(), size);
  }
  std::printf("%d inputs, %llu launches\n", count - 1, launches);
  return 0;
}
#endif
