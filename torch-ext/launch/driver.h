// The CUDA driver, found at run time: nothing links against libcuda, so the extension loads on a machine without one.
#pragma once

#include <cuda.h>  // types only

namespace m3_sparse::launch {

struct Driver {
  decltype(&cuInit) Init;
  decltype(&cuGetErrorString) GetErrorString;
  decltype(&cuCtxGetDevice) CtxGetDevice;
  decltype(&cuCtxPushCurrent) CtxPushCurrent;
  decltype(&cuCtxPopCurrent) CtxPopCurrent;
  decltype(&cuDevicePrimaryCtxRetain) DevicePrimaryCtxRetain;
  decltype(&cuDeviceGetAttribute) DeviceGetAttribute;
  decltype(&cuLibraryLoadData) LibraryLoadData;
  decltype(&cuLibraryGetKernel) LibraryGetKernel;
  decltype(&cuKernelSetAttribute) KernelSetAttribute;
  decltype(&cuLaunchKernelEx) LaunchKernelEx;
  decltype(&cuTensorMapEncodeTiled) TensorMapEncodeTiled;
  // A driver that executes kernels in host memory (the tests' emulator) exports `m3_sparse_host_memory`. Only then are
  // CPU tensors accepted.
  bool host_memory;
};

// Loads libcuda.so.1 on first use. Throws std::runtime_error; a later call tries again.
const Driver& driver();

// Throws with the driver's own text unless `result` is CUDA_SUCCESS.
void check(CUresult result, const char* call);

}  // namespace m3_sparse::launch
