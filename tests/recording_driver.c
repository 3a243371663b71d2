/* A stand-in for libcuda.so.1 that hands every launch to a callback instead of a GPU (tests only).
 *
 * Loaded before the extension, it answers the extension's dlopen("libcuda.so.1") by its soname. Exporting
 * m3_sparse_host_memory makes the extension accept CPU tensors. Kernels are identified by their entry name. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const struct {
    int id, pad;
    unsigned value[16];
  }* attributes;
  unsigned num_attributes;
} LaunchConfig;
typedef int (*LaunchCallback)(const char* entry, const unsigned* grid, const unsigned* block, unsigned shared_bytes,
                              void* stream, void** params);

int m3_sparse_host_memory = 1;
static LaunchCallback on_launch;
static int capability = 90, multiprocessors, load_count, context_device = -1;
static unsigned last_cluster, last_overlap; /* of the last launch: CTAs of a cluster, programmatic dependence */
static int last_carveout;                   /* and percent of shared memory, or -1 */

static struct {
  const char* name;
  int result;
} faults[2];
static unsigned num_faults;

/* Before the extension's first launch: a call that always fails, or with result 0 one that this driver lacks. */
void recording_fail(const char* name, int result) {
  if (num_faults == sizeof faults / sizeof *faults) abort();
  faults[num_faults].name = strdup(name);
  faults[num_faults++].result = result;
}
void recording_set_callback(LaunchCallback callback) { on_launch = callback; }
void recording_set_capability(int value) { capability = value; }
void recording_set_multiprocessors(int value) { multiprocessors = value; }
int recording_load_count(void) { return load_count; }
unsigned recording_last_cluster(void) { return last_cluster; }
unsigned recording_last_overlap(void) { return last_overlap; }
int recording_last_carveout(void) { return last_carveout; }

/* The functions that fail when they are called, how often they were meanwhile, and the one that this driver lacks. */
static char broken[128], missing[64];
static int failures;

void recording_break(const char* name) { strncpy(broken, name, sizeof broken - 1), failures = 0; }
void recording_hide(const char* name) { strncpy(missing, name, sizeof missing - 1); }
int recording_failures(void) { return failures; }
static CUresult fails(const char* name) {
  if (!strstr(broken, name)) return 0;
  failures++;
  return 999; /* CUDA_ERROR_UNKNOWN */
}
#define FAIL_WHERE_BROKEN(NAME)  \
  do {                           \
    if (fails(NAME)) return 999; \
  } while (0)

static CUresult Init(unsigned flags) { return fails("cuInit"); }
static CUresult GetErrorString(CUresult error, const char** text) {
  FAIL_WHERE_BROKEN("cuGetErrorString");
  *text = "recorded error";
  return 0;
}
static CUresult CtxGetDevice(int* device) {
  FAIL_WHERE_BROKEN("cuCtxGetDevice");
  *device = context_device;
  return context_device < 0 ? 201 : 0;
}
static CUresult CtxPushCurrent(void* context) {
  FAIL_WHERE_BROKEN("cuCtxPushCurrent");
  context_device = (int)(intptr_t)context - 1;
  return 0;
}
static CUresult CtxPopCurrent(void** context) {
  context_device = -1;
  return fails("cuCtxPopCurrent");
}
static CUresult DevicePrimaryCtxRetain(void** context, int device) {
  FAIL_WHERE_BROKEN("cuDevicePrimaryCtxRetain");
  *context = (void*)(intptr_t)(device + 1);
  return 0;
}
static CUresult DeviceGetAttribute(int* value, int attribute, int device) {
  FAIL_WHERE_BROKEN("cuDeviceGetAttribute");
  /* 75 and 76: compute capability, major and minor; 16: multiprocessors, by default of an H200 or a B200 */
  const int count = multiprocessors ? multiprocessors : capability < 100 ? 132 : 148;
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : attribute == 16 ? count : 0;
  return 0;
}
static CUresult LibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                                unsigned f) {
  FAIL_WHERE_BROKEN("cuLibraryLoadData");
  if (memcmp(code, "\177ELF", 4)) return 200; /* CUDA_ERROR_INVALID_IMAGE */
  load_count++;
  *library = (void*)code;
  return 0;
}
static CUresult LibraryGetKernel(void** kernel, void* library, const char* name) {
  FAIL_WHERE_BROKEN("cuLibraryGetKernel");
  *kernel = strdup(name);
  return 0;
}
static CUresult KernelSetAttribute(int attribute, int value, void* kernel, int device) {
  return fails("cuKernelSetAttribute");
}
static CUresult LaunchKernelEx(const LaunchConfig* config, void* kernel, void** params, void** extra) {
  FAIL_WHERE_BROKEN("cuLaunchKernelEx");
  if (context_device < 0) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
  last_cluster = 1, last_overlap = 0, last_carveout = -1;
  for (unsigned i = 0; i < config->num_attributes; i++) {
    /* 4: cluster dimension; 6: programmatic stream serialization; 14: preferred carveout */
    if (config->attributes[i].id == 4) last_cluster = config->attributes[i].value[0];
    if (config->attributes[i].id == 6) last_overlap = config->attributes[i].value[0];
    if (config->attributes[i].id == 14) last_carveout = config->attributes[i].value[0];
  }
  if (on_launch == NULL) return 0;
  return on_launch(kernel, config->grid, config->block, config->shared_bytes, config->stream, params);
}

/* What the hardware's 128 bytes stand for here: the arguments of the encoding call (recording_driver.py reads it). */
typedef struct {
  uint64_t base, marks; /* the second stands for bits that only the driver knows: all set */
  uint64_t strides[4];  /* bytes, of dimensions 1.. */
  uint32_t extents[5], box[5], type, rank, swizzle, promotion;
} TensorMap;
_Static_assert(sizeof(TensorMap) <= 128, "a tensor map has 128 bytes");
static CUresult TensorMapEncodeTiled(void* map, int type, unsigned rank, void* base, const uint64_t* extents,
                                     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int promotion, int fill) {
  FAIL_WHERE_BROKEN("cuTensorMapEncodeTiled");
  if (context_device < 0) return 201; /* CUDA_ERROR_INVALID_CONTEXT */
  TensorMap m = {.base = (uint64_t)base, .type = type, .rank = rank, .swizzle = swizzle, .promotion = promotion};
  m.marks = ~(uint64_t)0;
  if (m.base % 16 || rank < 1 || rank > 5 || interleave || fill) return 1; /* CUDA_ERROR_INVALID_VALUE */
  for (unsigned i = 0; i < rank; i++) {
    m.extents[i] = (uint32_t)extents[i], m.box[i] = box[i];
    if (!extents[i] || extents[i] > UINT32_MAX || !box[i] || box[i] > 256 || element_strides[i] != 1) return 1;
    if (i && ((m.strides[i - 1] = strides[i - 1]) % 16 || strides[i - 1] >> 40)) return 1;
  }
  memset(map, 0, 128);
  memcpy(map, &m, sizeof m);
  return 0;
}

static const struct {
  const char* name;
  void* function;
} TABLE[] = {
    {"cuInit", Init},
    {"cuGetErrorString", GetErrorString},
    {"cuCtxGetDevice", CtxGetDevice},
    {"cuCtxPushCurrent", CtxPushCurrent},
    {"cuCtxPopCurrent", CtxPopCurrent},
    {"cuDevicePrimaryCtxRetain", DevicePrimaryCtxRetain},
    {"cuDeviceGetAttribute", DeviceGetAttribute},
    {"cuLibraryLoadData", LibraryLoadData},
    {"cuLibraryGetKernel", LibraryGetKernel},
    {"cuKernelSetAttribute", KernelSetAttribute},
    {"cuLaunchKernelEx", LaunchKernelEx},
    {"cuTensorMapEncodeTiled", TensorMapEncodeTiled},
};

static CUresult Fail0(void) { return faults[0].result; }
static CUresult Fail1(void) { return faults[1].result; }
static void* const FAILING[] = {Fail0, Fail1};

#ifdef RECORDING_OLD_DRIVER /* of CUDA 11 */
#define cuGetProcAddress_v2 cuGetProcAddress
#endif
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, void* status) {
  for (unsigned i = 0; i < num_faults; i++)
    if (!strcmp(faults[i].name, name)) {
      *function = faults[i].result ? FAILING[i] : NULL;
      return faults[i].result ? 0 : 500; /* CUDA_ERROR_NOT_FOUND */
    }
  for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
    if (!strcmp(TABLE[i].name, name) && strcmp(missing, name)) {
      *function = TABLE[i].function;
      return 0;
    }
  *function = NULL;
  return 500; /* CUDA_ERROR_NOT_FOUND */
}
