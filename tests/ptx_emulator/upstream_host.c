/* The CUDA runtime as an object exported by CuTe DSL knows it: launches go to a callback. Linked with that object, whose
 * host code packs its own parameters and encodes its own tensor maps (upstream_host.py). */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* cudaLaunchAttribute */
  int id, padding;
  union { unsigned cluster[3]; char bytes[64]; } value;
} Attribute;
typedef struct { /* cudaLaunchConfig_t */
  unsigned grid[3], block[3];
  size_t shared_bytes;
  void *stream;
  const Attribute *attributes;
  unsigned attribute_count;
} Config;
typedef int (*Callback)(const char *kernel, const Config *config, void **params, unsigned cluster);

static Callback on_launch;
static char names[8][256];
static int count;

void upstream_install(Callback callback) { on_launch = callback; }

int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaGetDeviceCount(int *devices) { *devices = 1; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 97 ? 232448 : attribute == 16 ? 132 : 0; /* shared memory of a block, multiprocessors */
  return 0;
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { *value = 0; return 0; }
int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  *library = &count;
  return 0;
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  char *own = names[count++ % 8];
  strncpy(own, name, sizeof names[0] - 1);
  *kernel = own;
  return 0;
}
int _cudaLaunchKernelEx(const Config *config, void *kernel, void **params) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->attribute_count; i++)
    if (config->attributes[i].id == 4) cluster = config->attributes[i].value.cluster[0];
  return on_launch(kernel, config, params, cluster);
}
