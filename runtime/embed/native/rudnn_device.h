/* rudnn_device: what exported operators ask of a device. Plain C99 and C++.
 *
 * rudnn_cuda.h, rudnn_hip.h and rudnn_vulkan.h each include this file and define the functions
 * below and the three structs, whose contents are theirs. Functions return 0, a code of
 * rudnn_embed.h, or the driver's own status, for which rudnn_last_error() has a text. One thread at
 * a time may use a device.
 */
#ifndef RUDNN_DEVICE_H
#define RUDNN_DEVICE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rudnn_device rudnn_device;     /* an open device and the queue of its work */
typedef struct rudnn_module rudnn_module;     /* loaded kernels */
typedef struct rudnn_function rudnn_function; /* where one kernel is found, and what it needs */

enum { RUDNN_POINTER, RUDNN_INT64, RUDNN_INT32, RUDNN_FLOAT32 };

/* A kernel's argument: a pointer, a whole number, or the bits of a float in the low half. */
typedef struct {
    int32_t kind;
    int64_t bits;
} rudnn_argument;

/* What the last failing call said, or "". */
static const char *rudnn_last_error(void);

/* The device number `index`, with a queue of its own; NULL into `made` on failure. */
static int32_t rudnn_open(int index, rudnn_device **made);
static void rudnn_close(rudnn_device *device);

/* Memory of the device; `from` and `to` of copies are addresses on either side. copy_out waits for
 * all work before it. */
static int32_t rudnn_alloc(rudnn_device *device, int64_t bytes, void **made);
static void rudnn_free(rudnn_device *device, void *memory);
static int32_t rudnn_copy_in(rudnn_device *device, void *to, const void *from, int64_t bytes);
static int32_t rudnn_copy_out(rudnn_device *device, void *to, const void *from, int64_t bytes);

/* Memory lent for the work that is started next, at least 64-byte aligned; NULL if there is none. */
static void *rudnn_scratch(rudnn_device *device, int64_t bytes);

/* Wait for all work. */
static int32_t rudnn_wait(rudnn_device *device);

static int32_t rudnn_load(rudnn_device *device, const char *folder,
                          const rudnn_function *functions, int count, rudnn_module **made);
static void rudnn_unload(rudnn_device *device, rudnn_module *module);

/* Start kernel number `function` on a grid of x * y blocks of `block` threads; with none, nothing
 * is done. */
static int32_t rudnn_launch(rudnn_device *device, rudnn_module *module, int function, int64_t x,
                            int64_t y, int32_t block, const rudnn_argument *arguments, int count);

#ifdef __cplusplus
}
#endif

#include "rudnn_embed.h"
#endif
