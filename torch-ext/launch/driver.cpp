#include "driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace m3_sparse::launch {
namespace {

std::string failure(const Driver& driver, CUresult result, const char* call) {
  const char* text = nullptr;
  if (driver.GetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  return std::string("m3_sparse: ") + call + " failed with error " + std::to_string(result) + ": " +
         (text ? text : "unknown");
}

// `version` is the CUDA release that brought this form of the function.
template <class Function>
void resolve(decltype(&cuGetProcAddress) get, Function& function, const char* name, int version) {
  CUdriverProcAddressQueryResult status{};
  void* address = nullptr;
  if (get(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS || address == nullptr)
    throw std::runtime_error(std::string("m3_sparse: the NVIDIA driver lacks ") + name +
                             "; CUDA 12.0 or newer is needed");
  function = reinterpret_cast<Function>(address);
}

Driver load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error("m3_sparse: libcuda.so.1 not found: this machine has no NVIDIA driver");
  auto get = reinterpret_cast<decltype(&cuGetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) throw std::runtime_error("m3_sparse: the NVIDIA driver is older than CUDA 12.0");
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
