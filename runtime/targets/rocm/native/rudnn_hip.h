/* rudnn_hip: exported operators on AMD devices. Build with -ldl. Plain C99 and C++.
 *
 * Implements rudnn_device.h through HIP, libamdhip64.so, which is looked for at run time: neither
 * its headers nor a compiler is needed. Memory from hipMalloc serves, and a hipStream_t may be put
 * into `stream` of the device.
 */
#ifndef RUDNN_HIP_H
#define RUDNN_HIP_H

#include <stddef.h>

#define RUDNN_PARAM_END 3

/* First as the app has it, then by the versions whose functions are these. */
static const char *const rudnn_libraries[] = {
    "libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
    "/opt/rocm/lib/libamdhip64.so",
};
static const char *const rudnn_symbols[] = {
    "hipInit", "hipStreamCreateWithFlags", "hipStreamDestroy", "hipStreamSynchronize",
    "hipMalloc", "hipFree", "hipMemcpyHtoDAsync", "hipMemcpyDtoHAsync", "hipModuleLoadData",
    "hipModuleGetFunction", "hipModuleUnload", "hipModuleLaunchKernel", "hipGetDevice",
    "hipSetDevice", "hipGetErrorString",
};

typedef struct {
    int (*current)(int *device);
    int (*select)(int device);
    const char *(*words)(int status);
} rudnn_own;

#include "rudnn_streams.h"

static inline int rudnn_enter(rudnn_device *d) {
    int former = 0, status = d->driver.own.current(&former);
    if (!status) status = d->driver.own.select(d->index);
    if (!status) d->context = (void *)(intptr_t)former;
    return status;
}

static inline void rudnn_leave(rudnn_device *d) {
    d->driver.own.select((int)(intptr_t)d->context);
}

static inline int rudnn_attach(rudnn_device *d) {
    int status = rudnn_enter(d); /* fails for an index without a device */
    if (!status) rudnn_leave(d);
    return status;
}

static inline const char *rudnn_words(rudnn_device *d, int status) {
    const char *text = d->driver.own.words(status);
    return text ? text : "unknown error";
}

#endif
