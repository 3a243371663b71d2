#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace m3_sparse::launch {
namespace {

constexpr const char* kUpdate =
    ": update it to release 580 (CUDA 13.0) or newer, or let torch compute: m3_sparse.backend(\"torch\")";

// What to do about an error, where the driver's own text doesn't say it.
std::string remedy(CUresult result) {
  switch (result) {
    case CUDA_ERROR_NOT_INITIALIZED:
      return ". A process that was forked after CUDA had been used can't use it: start workers by multiprocessing's "
             "method \"spawn\"";
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return std::string(". The NVIDIA driver is too old for these kernels, or doesn't fit the device") + kUpdate;
    case CUDA_ERROR_NO_DEVICE:
      return ". No NVIDIA device is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES";
    default:
      return "";
  }
}

std::string failure(const Driver& driver, CUresult result, const char* call) {
  const char* text = nullptr;
  if (driver.GetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  return std::string("m3_sparse: ") + call + " failed with error " + std::to_string(result) + ": " +
         (text ? text : "unknown") + remedy(result);
}

// `version` is the CUDA release that brought this form of the function.
template <class Function>
void resolve(decltype(&cuGetProcAddress) get, Function& function, const char* name, int version) {
  CUdriverProcAddressQueryResult status{};
  void* address = nullptr;
  if (get(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS || address == nullptr)
    throw std::runtime_error(std::string("m3_sparse: the NVIDIA driver lacks ") + name + kUpdate);
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(
        "m3_sparse: libcuda.so.1 not found: this machine has no NVIDIA driver. Install one, or let torch compute: "
        "m3_sparse.backend(\"torch\")");
  auto get = reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr)
    throw std::runtime_error(std::string("m3_sparse: the NVIDIA driver is older than CUDA 12.0") + kUpdate);
  Driver d{};
  resolve(get, d.Init, "cuInit", 2000);
  resolve(get, d.GetErrorString, "cuGetErrorString", 6000);
  resolve(get, d.CtxGetDevice, "cuCtxGetDevice", 2000);
  resolve(get, d.CtxPushCurrent, "cuCtxPushCurrent", 4000);
  resolve(get, d.CtxPopCurrent, "cuCtxPopCurrent", 4000);
  resolve(get, d.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000);
  resolve(get, d.DeviceGetAttribute, "cuDeviceGetAttribute", 2000);
  resolve(get, d.LibraryLoadData, "cuLibraryLoadData", 12000);
  resolve(get, d.LibraryGetKernel, "cuLibraryGetKernel", 12000);
  resolve(get, d.KernelSetAttribute, "cuKernelSetAttribute", 12000);
  resolve(get, d.LaunchKernelEx, "cuLaunchKernelEx", 11060);
  resolve(get, d.TensorMapEncodeTiled, "cuTensorMapEncodeTiled", 12000);
  d.host_memory = dlsym(library, "m3_sparse_host_memory") != nullptr;
  if (CUresult result = d.Init(0); result != CUDA_SUCCESS) throw std::runtime_error(failure(d, result, "cuInit"));
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver instance = load();
  return instance;
}

void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(failure(driver(), result, call));
}

}  // namespace m3_sparse::launch
