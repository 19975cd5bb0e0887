/* rudnn_streams: rudnn_device.h over a driver of the CUDA kind, whose library is found at run time.
 *
 * rudnn_cuda.h and rudnn_hip.h include it: they name the driver's functions and say how a device
 * becomes the thread's current one. Build with -ldl. An app that has a stream of its own puts it
 * into `stream` of the open device; memory of the same device may come from anywhere.
 */
#ifndef RUDNN_STREAMS_H
#define RUDNN_STREAMS_H

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rudnn_device.h"

#define RUDNN_MOST_BYTES 4096 /* of a kernel's parameters */
#define RUDNN_NO_DRIVER 100   /* what the drivers call "no device" */
#define RUDNN_NO_FILE 301

/* The driver's functions, in the order of `rudnn_symbols`; each returns 0 or an error code. */
typedef struct {
    int (*init)(unsigned flags);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*allocate)(void **memory, size_t bytes);
    int (*release)(void *memory);
    int (*copy_in)(void *to, const void *from, size_t bytes, void *stream);
    int (*copy_out)(void *to, const void *from, size_t bytes, void *stream);
    int (*module_load)(void **module, const void *image);
    int (*module_function)(void **function, void *module, const char *name);
    int (*module_unload)(void *module);
    int (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void *stream, void **parameters, void **extra);
    rudnn_own own; /* what the including header needs besides */
} rudnn_driver;

/* A kernel: the file that holds it, and its name there. */
struct rudnn_function {
    const char *file, *entry;
};

struct rudnn_device {
    rudnn_driver driver;
    void *library, *context, *stream, *own_stream, *scratch;
    int index;
    int64_t scratch_bytes;
};

struct rudnn_module {
    void *module;
    void *functions[1]; /* of the driver, as many as were named, in their order */
};

/* Given by the including header: the library, its symbols, and what follows. */
static int rudnn_attach(rudnn_device *d); /* get ready for device `index` */
static int rudnn_enter(rudnn_device *d);  /* make it the thread's current one */
static void rudnn_leave(rudnn_device *d); /* undo that */
static const char *rudnn_words(rudnn_device *d, int status);

static char rudnn_error[512];

static inline const char *rudnn_last_error(void) { return rudnn_error; }

/* `status`, with a text if it is a failure. */
static inline int32_t rudnn_failed(rudnn_device *d, int status, const char *format, ...) {
    va_list list;
    size_t used;
    if (!status) return RUDNN_OK;
    va_start(list, format);
    vsnprintf(rudnn_error, sizeof rudnn_error, format, list);
    va_end(list);
    used = strlen(rudnn_error);
    snprintf(rudnn_error + used, sizeof rudnn_error - used, " failed: %s (%d)",
             d ? rudnn_words(d, status) : "no driver", status);
    return status;
}

/* --- opening --- */

/* Find every function; 0, or RUDNN_NO_DRIVER. */
static inline int32_t rudnn_find_driver(rudnn_device *d) {
    size_t i, count = sizeof rudnn_symbols / sizeof *rudnn_symbols;
    for (i = 0; i < sizeof rudnn_libraries / sizeof *rudnn_libraries && !d->library; ++i)
        d->library = dlopen(rudnn_libraries[i], RTLD_NOW | RTLD_LOCAL);
    if (!d->library) return rudnn_failed(NULL, RUDNN_NO_DRIVER, "loading %s", rudnn_libraries[0]);
    for (i = 0; i < count; ++i) {
        void *found = dlsym(d->library, rudnn_symbols[i]);
        if (!found) return rudnn_failed(NULL, RUDNN_NO_DRIVER, "finding %s", rudnn_symbols[i]);
        memcpy((char *)&d->driver + i * sizeof found, &found, sizeof found);
    }
    return RUDNN_OK;
}

static inline void rudnn_close(rudnn_device *d) {
    if (!d) return;
    if (d->own_stream && !rudnn_enter(d)) {
        d->driver.stream_synchronize(d->own_stream);
        if (d->scratch) d->driver.release(d->scratch);
        d->driver.stream_destroy(d->own_stream);
        rudnn_leave(d);
    }
    free(d); /* the library stays: an app may use it too */
}

static inline int32_t rudnn_open(int index, rudnn_device **made) {
    int32_t status;
    rudnn_device *d = (rudnn_device *)calloc(1, sizeof *d);
    *made = NULL;
    if (!d) return RUDNN_NO_MEMORY;
    d->index = index;
    status = rudnn_find_driver(d);
    if (!status) status = rudnn_failed(d, d->driver.init(0), "starting the driver");
    if (!status) status = rudnn_failed(d, rudnn_attach(d), "opening device %d", index);
    if (!status) status = rudnn_failed(d, rudnn_enter(d), "entering device %d", index);
    if (!status) {
        status = rudnn_failed(d, d->driver.stream_create(&d->own_stream, 1), "making a stream");
        rudnn_leave(d);
    }
    d->stream = d->own_stream;
    if (!status) *made = d;
    else rudnn_close(d);
    return status;
}

/* --- memory --- */

static inline int32_t rudnn_alloc(rudnn_device *d, int64_t bytes, void **made) {
    int32_t status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    *made = NULL;
    if (status) return status;
    status = rudnn_failed(d, d->driver.allocate(made, bytes > 0 ? (size_t)bytes : 1),
                          "allocating %lld bytes", (long long)bytes);
    rudnn_leave(d);
    return status;
}

static inline void rudnn_free(rudnn_device *d, void *memory) {
    if (!d || !memory || rudnn_enter(d)) return;
    d->driver.release(memory); /* waits for the device */
    rudnn_leave(d);
}

static inline int32_t rudnn_wait(rudnn_device *d) {
    int32_t status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    if (status) return status;
    status = rudnn_failed(d, d->driver.stream_synchronize(d->stream), "waiting");
    rudnn_leave(d);
    return status;
}

static inline int32_t rudnn_copy_in(rudnn_device *d, void *to, const void *from, int64_t bytes) {
    int32_t status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    if (status) return status;
    if (bytes > 0)
        status = rudnn_failed(d, d->driver.copy_in(to, from, (size_t)bytes, d->stream),
                              "copying %lld bytes in", (long long)bytes);
    rudnn_leave(d);
    return status ? status : rudnn_wait(d);
}

static inline int32_t rudnn_copy_out(rudnn_device *d, void *to, const void *from, int64_t bytes) {
    int32_t status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    if (status) return status;
    if (bytes > 0)
        status = rudnn_failed(d, d->driver.copy_out(to, from, (size_t)bytes, d->stream),
                              "copying %lld bytes out", (long long)bytes);
    rudnn_leave(d);
    return status ? status : rudnn_wait(d);
}

static inline void *rudnn_scratch(rudnn_device *d, int64_t bytes) {
    if (bytes > d->scratch_bytes) {
        rudnn_free(d, d->scratch);
        d->scratch_bytes = rudnn_alloc(d, bytes, &d->scratch) ? 0 : bytes;
    }
    return d->scratch;
}

/* --- kernels --- */

static inline int32_t rudnn_read(rudnn_device *d, const char *folder, const char *file,
                                 void **image) {
    char path[4096];
    FILE *stream;
    long size;
    *image = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    stream = fopen(path, "rb");
    if (!stream) return rudnn_failed(d, RUDNN_NO_FILE, "reading %s", path);
    fseek(stream, 0, SEEK_END);
    size = ftell(stream);
    rewind(stream);
    *image = malloc((size_t)(size > 0 ? size : 0) + 1);
    if (*image && fread(*image, 1, (size_t)size, stream) != (size_t)size) size = -1;
    fclose(stream);
    if (!*image) return RUDNN_NO_MEMORY;
    return size < 0 ? rudnn_failed(d, RUDNN_NO_FILE, "reading %s", path) : RUDNN_OK;
}

static inline void rudnn_unload(rudnn_device *d, rudnn_module *module) {
    if (!d || !module) return;
    if (!rudnn_enter(d)) {
        d->driver.stream_synchronize(d->stream);
        if (module->module) d->driver.module_unload(module->module);
        rudnn_leave(d);
    }
    free(module);
}

/* All functions are in the file of the first. */
static inline int32_t rudnn_load(rudnn_device *d, const char *folder,
                                 const rudnn_function *functions, int count, rudnn_module **made) {
    void *image;
    int i;
    rudnn_module *module =
        (rudnn_module *)calloc(1, sizeof *module + (size_t)count * sizeof(void *));
    int32_t status = module ? rudnn_read(d, folder, functions[0].file, &image) : RUDNN_NO_MEMORY;
    *made = NULL;
    if (!status) status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    if (!status) {
        status = rudnn_failed(d, d->driver.module_load(&module->module, image), "loading %s",
                              functions[0].file);
        for (i = 0; i < count && !status; ++i)
            status = rudnn_failed(d, d->driver.module_function(&module->functions[i],
                                                               module->module, functions[i].entry),
                                  "finding %s", functions[i].entry);
        rudnn_leave(d);
    }
    if (module) free(image);
    if (!status) *made = module;
    else rudnn_unload(d, module);
    return status;
}

/* Parameters lie one after the other, each at a multiple of its size. */
static inline int32_t rudnn_launch(rudnn_device *d, rudnn_module *module, int function, int64_t x,
                                   int64_t y, int32_t block, const rudnn_argument *arguments,
                                   int count) {
    unsigned char bytes[RUDNN_MOST_BYTES];
    size_t used = 0;
    void *extra[5];
    int32_t status;
    int i;
    if (x <= 0 || y <= 0) return RUDNN_OK;
    for (i = 0; i < count; ++i) {
        int wide = arguments[i].kind == RUDNN_POINTER || arguments[i].kind == RUDNN_INT64;
        size_t size = wide ? 8 : 4;
        int32_t narrow = (int32_t)arguments[i].bits;
        used = (used + size - 1) / size * size;
        if (used + size > sizeof bytes) return rudnn_failed(d, 1, "passing %d arguments", count);
        memcpy(bytes + used, wide ? (const void *)&arguments[i].bits : (const void *)&narrow, size);
        used += size;
    }
    extra[0] = (void *)1; /* the parameters, their size, the end */
    extra[1] = bytes;
    extra[2] = (void *)2;
    extra[3] = &used;
    extra[4] = (void *)RUDNN_PARAM_END;
    status = rudnn_failed(d, rudnn_enter(d), "entering the device");
    if (status) return status;
    status = rudnn_failed(
        d, d->driver.launch(module->functions[function], (unsigned)x, (unsigned)y, 1,
                            (unsigned)block, 1, 1, 0, d->stream, NULL, extra),
        "starting kernel %d", function);
    rudnn_leave(d);
    return status;
}

#endif
