/* rudnn_cuda: exported operators on NVIDIA devices. Build with -ldl. Plain C99 and C++.
 *
 * Implements rudnn_device.h through the driver, libcuda.so.1, which is looked for at run time: no
 * toolkit is needed. The context is the primary one, as of the CUDA runtime: memory from
 * cudaMalloc serves, and a cudaStream_t may be put into `stream` of the device.
 */
#ifndef RUDNN_CUDA_H
#define RUDNN_CUDA_H

#include <stddef.h>

#define RUDNN_PARAM_END 0

static const char *const rudnn_libraries[] = {"libcuda.so.1"};
static const char *const rudnn_symbols[] = {
    "cuInit", "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuMemAlloc_v2",
    "cuMemFree_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuModuleLoadData",
    "cuModuleGetFunction", "cuModuleUnload", "cuLaunchKernel", "cuDeviceGet",
    "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGetErrorString",
};

typedef struct {
    int (*device)(int *device, int index);
    int (*retain)(void **context, int device);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*words)(int status, const char **text);
} rudnn_own;

#include "rudnn_streams.h"

static inline int rudnn_attach(rudnn_device *d) {
    int device = 0, status = d->driver.own.device(&device, d->index);
    return status ? status : d->driver.own.retain(&d->context, device);
}

static inline int rudnn_enter(rudnn_device *d) { return d->driver.own.push(d->context); }

static inline void rudnn_leave(rudnn_device *d) {
    void *popped;
    d->driver.own.pop(&popped);
}

static inline const char *rudnn_words(rudnn_device *d, int status) {
    const char *text = NULL;
    d->driver.own.words(status, &text);
    return text ? text : "unknown error";
}

#endif
