#include "launch.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cubins.h"
#include "driver.h"
#include "jit.h"

namespace m3_sparse::launch {
namespace {

constexpr int kMaxDevices = 64;

// A cubin is loaded once a process (the driver copies it to a device when it is first launched there); attributes are
// set once a device.
struct Loaded {
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  std::atomic<std::uint64_t> ready_devices{0};
};

Loaded loaded[2 * cubins::kNumImages];  // the embedded images, then those compiled at run time (jit.h)
std::mutex load_mutex;

int ordinal(int device) { return device < 0 ? 0 : device; }

int attribute(CUdevice_attribute what, int device) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, what, ordinal(device)), "cuDeviceGetAttribute");
  return value;
}

// A device's facts are asked for once a process. A driver of host memory (device -1) may pretend another device at each
// launch.
template <class Query>
int cached(std::atomic<int>* cache, int device, Query query) {
  if (device < 0) return query();
  int value = cache[device].load(std::memory_order_relaxed);
  if (value == 0) cache[device].store(value = query(), std::memory_order_relaxed);
  return value;
}

CUkernel prepare(const Image& image, int device, unsigned cluster) {
  Loaded& state = loaded[image.id];
  const std::uint64_t bit = std::uint64_t{1} << device;
  if (state.ready_devices.load(std::memory_order_acquire) & bit) return state.kernel;
  std::lock_guard<std::mutex> guard(load_mutex);
  const Driver& d = driver();
  if (state.library == nullptr)
    check(d.LibraryLoadData(&state.library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  if (state.kernel == nullptr)
    check(d.LibraryGetKernel(&state.kernel, state.library, image.entry), "cuLibraryGetKernel");
  const auto set = [&](CUfunction_attribute attribute, int value) {
    check(d.KernelSetAttribute(attribute, value, state.kernel, device), "cuKernelSetAttribute");
  };
  // 48 KiB of dynamic shared memory need no attribute.
  if (image.dynamic_smem > 48 * 1024)
    set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(image.dynamic_smem));
  // A kernel that wants much is laid out for several CTAs an SM, which the default split between L1 and shared memory
  // would not admit.
  if (image.dynamic_smem > 32 * 1024)
    set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_SHARED);
  if (cluster > 8) set(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
  state.ready_devices.fetch_or(bit, std::memory_order_release);
  return state.kernel;
}

// torch's current stream of a device. libtorch_cuda is not linked either, so that the extension loads beside a CPU
// build of torch; with CUDA tensors about, it is in the process.
CUstream current_stream(int device) {
  if (device < 0) return nullptr;
  using Get = std::int32_t (*)(std::int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (symbol == nullptr)
      throw std::runtime_error("m3_sparse: libtorch_cuda.so with a stable stream query is not loaded");
    return reinterpret_cast<Get>(symbol);
  }();
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("m3_sparse: torch gave no current CUDA stream");
  return static_cast<CUstream>(stream);
}

}  // namespace

CurrentContext::CurrentContext(int device) {
  CUdevice current = -1;
  const Driver& d = driver();
  const CUresult result = d.CtxGetDevice(&current);
  if (result == CUDA_SUCCESS && current == ordinal(device)) return;
  if (result != CUDA_ERROR_INVALID_CONTEXT) check(result, "cuCtxGetDevice");
  // Retained for the life of the process, as torch itself does.
  static std::atomic<CUcontext> contexts[kMaxDevices];
  CUcontext context = contexts[ordinal(device)].load(std::memory_order_acquire);
  if (context == nullptr) {
    check(d.DevicePrimaryCtxRetain(&context, ordinal(device)), "cuDevicePrimaryCtxRetain");
    contexts[ordinal(device)].store(context, std::memory_order_release);
  }
  check(d.CtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext context;
  if (pushed_) driver().CtxPopCurrent(&context);
}

void CurrentContext::restore() {
  CUcontext context;
  if (pushed_) {
    pushed_ = false;
    check(driver().CtxPopCurrent(&context), "cuCtxPopCurrent");
  }
}

const Image& pick(const Image* program, std::size_t count, int device) {
  if (device < 0 && !driver().host_memory)
    throw std::runtime_error("m3_sparse: backend 'aot' expects CUDA tensors, got CPU tensors");
  if (device >= kMaxDevices) throw std::runtime_error("m3_sparse: device index " + std::to_string(device) + " > 63");
  const int wanted = compute_capability(device);
  std::string available;
  for (std::size_t i = 0; i < count; ++i) {
    if (program[i].capability == wanted) return program[i];
    available +=
        (i ? ", " : "") + std::to_string(program[i].capability / 10) + "." + std::to_string(program[i].capability % 10);
  }
  throw std::runtime_error("m3_sparse: backend 'aot' has this kernel for compute capabilities " + available +
                           "; the device has " + std::to_string(wanted / 10) + "." + std::to_string(wanted % 10) +
                           ": let torch compute, m3_sparse.backend(\"torch\")");
}

bool available(const Image* program, std::size_t count, int device) {
  if ((device < 0 && !driver().host_memory) || device >= kMaxDevices) return false;
  const int wanted = compute_capability(device);
  for (std::size_t i = 0; i < count; ++i)
    if (program[i].capability == wanted) return true;
  return false;
}

int compute_capability(int device) {
  static std::atomic<int> cache[kMaxDevices];
  return cached(cache, device, [device] {
    return 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) +
           attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  });
}

int multiprocessors(int device) {
  static std::atomic<int> cache[kMaxDevices];
  return cached(cache, device, [device] { return attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device); });
}

void run(const Image& embedded, Grid grid, int device, void** params, Options options) {
  const Image& image = jit::active() ? jit::supplied(embedded) : embedded;
  CurrentContext context(device);
  CUkernel kernel = prepare(image, ordinal(device), options.cluster);
  CUlaunchConfig config{};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = image.block[0];
  config.blockDimY = image.block[1];
  config.blockDimZ = image.block[2];
  config.sharedMemBytes = image.dynamic_smem;
  config.hStream = current_stream(device);
  CUlaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (options.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = options.cluster;
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  }
  if (options.overlap) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  if (options.carveout >= 0) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
    attribute.value.sharedMemCarveout = static_cast<unsigned>(options.carveout);
  }
  check(driver().LaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), params, nullptr), "cuLaunchKernelEx");
  context.restore();
}

}  // namespace m3_sparse::launch
