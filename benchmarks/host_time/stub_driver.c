/* A CUDA driver that does nothing and always succeeds: with it Triton's own launcher runs without a GPU.
 *
 * It reports an H200: compute capability 9.0, 132 multiprocessors, 227 KiB of shared memory for a block.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static long launches;

long stub_launches(void) { return launches; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "stub"; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
  case 8: case 81: case 97: *value = 227 << 10; break; /* shared memory: block, multiprocessor, opt-in */
  case 10: *value = 32; break;
  case 12: case 82: *value = 65536; break;
  case 16: *value = 132; break;
  case 75: *value = 9; break;
  case 76: *value = 0; break;
  default: *value = 1024;
  }
  return 0;
}

int cuCtxGetCurrent(void **context) { *context = &launches; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &launches; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = &launches; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &launches; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { launches++; return 0; }

int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  memcpy(data, &pointer, sizeof pointer);
  return 0;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t pointer) {
  memcpy(data[0], &pointer, sizeof pointer);
  return 0;
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  return 0;
}

int cuStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return 0; }
int cuTensorMapEncodeIm2col(void *map) { return 0; }
