/* A driver of one or more pretended devices, whose memory is the host's.
 *
 * Calls are written to a log; any function can be made to fail. A module is a shared library that
 * emulates its kernels (cuda/shim.h): launches run it. Any other image that starts with "\x7f"
 * "ELF" loads too, its kernels found by their names, and launches of it do nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef const char *(*run_t)(const void *, unsigned, unsigned, unsigned, unsigned);
typedef struct {
    void *library;
    char *image;
    size_t size;
} module_t;
typedef struct {
    char name[256];
    run_t run;
} function_t;
typedef struct {
    function_t *function;
    unsigned grid[3], block;
    char *params;
    size_t size;
} launch_t;
typedef struct {
    launch_t *launches;
    size_t count;
} graph_t;
typedef struct {
    graph_t *recording;
    int alive;
} stream_t;
typedef struct {
    struct timespec at;
} event_t;
typedef struct block {
    struct block *next;
    void *base;
    size_t size;
} block_t;

#ifndef STUB_CONTEXTS /* libhip_stub.c has neither contexts nor this tag */
#define STUB_CONTEXTS 1
#define STUB_PARAM_END NULL
#endif

enum { SHARED_OBJECT = 3, MACHINE_CUDA = 190, MACHINE_AMD = 224 };

static char log_text[1 << 20];
static size_t log_size;
static char fail_name[64];
static int fail_code, fail_after, sticky, late, initialised;
static size_t memory_total = (size_t)1 << 30, memory_used;
static block_t *blocks;
static __thread void *contexts[16];
static __thread int depth;
static int context_of_device[8];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- for the tests --- */

const char *stub_log(void) { return log_text; }
void stub_clear(void) {
    log_size = 0;
    log_text[0] = 0;
}
/* The call of `name` after `after` others fails with `code`; "" lifts what was set. */
void stub_fail(const char *name, int code, int after) {
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_code = code;
    fail_after = after;
    if (!*name) sticky = late = 0;
}
/* The next kernel breaks the context: later calls return `code`. */
void stub_break(int code) { late = code; }
void stub_memory(size_t total) { memory_total = total; }
size_t stub_used(void) { return memory_used; }
int stub_depth(void) { return depth; }

static void note(const char *format, ...) {
    va_list list;
    va_start(list, format);
    if (log_size + 512 < sizeof log_text)
        log_size += vsnprintf(log_text + log_size, 512, format, list);
    va_end(list);
}

static int enter(const char *name, int needs_context) {
    note("%s\n", name);
    if (strcmp(name, fail_name) == 0 && fail_after-- == 0) {
        fail_name[0] = 0;
        return fail_code;
    }
    if (!initialised) return 3;
    if (sticky) return sticky;
    return STUB_CONTEXTS && needs_context && depth == 0 ? 201 : 0;
}
#define ENTER(needs)                       \
    do {                                   \
        int code = enter(__func__, needs); \
        if (code) return code;             \
    } while (0)

/* --- devices and contexts --- */

int cuInit(unsigned flags) {
    (void)flags;
    initialised = 1;
    ENTER(0);
    return 0;
}
int cuGetErrorName(int code, const char **text) {
    *text = code == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                          : "CUDA_ERROR_SOME";
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 2     ? "out of memory"
            : code == 700 ? "an illegal memory access was encountered"
                          : "some error";
    return 0;
}
int cuDeviceGetCount(int *count) {
    const char *text = getenv("STUB_DEVICES");
    ENTER(0);
    *count = text ? atoi(text) : 1;
    return 0;
}
int cuDeviceGet(int *device, int index) {
    ENTER(0);
    *device = index;
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    ENTER(0);
    snprintf(name, size, "Stub %d", device);
    return 0;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    ENTER(0);
    *value = which == 75 ? 9 : 0; /* compute capability 9.0 */
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(0);
    *context = &context_of_device[device];
    return 0;
}
int cuDeviceGetDefaultMemPool(void **pool, int device) {
    ENTER(0);
    *pool = &context_of_device[device];
    return 0;
}
int cuMemPoolSetAttribute(void *pool, int which, void *value) {
    (void)pool, (void)which, (void)value;
    ENTER(0);
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    contexts[depth++] = context;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = contexts[--depth];
    return 0;
}
int cuCtxSynchronize(void) {
    ENTER(1);
    return 0;
}

/* --- modules and launches --- */

int cuModuleLoadData(module_t **out, const unsigned char *image) {
    char path[] = "/tmp/rudnn_stub_XXXXXX";
    module_t *module;
    uint64_t size;
    int file;
    ENTER(1);
    if (memcmp(image,
               "\x7f"
               "ELF",
               4) != 0)
        return 200;
    memcpy(&size, image + 40, 8); /* section headers come last */
    size += (uint64_t)(image[58] | image[59] << 8) * (image[60] | image[61] << 8);
    module = calloc(1, sizeof *module);
    if (image[16] == SHARED_OBJECT && image[18] != MACHINE_CUDA && image[18] != MACHINE_AMD) {
        file = mkstemp(path);
        if (write(file, image, size) != (ssize_t)size) return 999;
        close(file);
        module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!module->library) fprintf(stderr, "%s\n", dlerror());
        unlink(path);
        if (!module->library) return 200;
    }
    module->size = size;
    module->image = memcpy(malloc(size), image, size);
    *out = module;
    return 0;
}
int cuModuleGetFunction(function_t **out, module_t *module, const char *name) {
    function_t *function = calloc(1, sizeof *function);
    char symbol[300];
    ENTER(1);
    snprintf(function->name, sizeof function->name, "%s", name);
    snprintf(symbol, sizeof symbol, "%s__run", name);
    if (module->library) function->run = (run_t)dlsym(module->library, symbol);
    if (!function->run && !memmem(module->image, module->size, name, strlen(name) + 1)) return 500;
    *out = function;
    return 0;
}
int cuModuleUnload(module_t *module) {
    ENTER(1);
    if (module->library) dlclose(module->library);
    free(module->image);
    free(module);
    return 0;
}

static int start(const launch_t *launch) {
    const char *error;
    note("  %s grid=%u,%u block=%u params=", launch->function->name, launch->grid[0],
         launch->grid[1], launch->block);
    for (size_t i = 0; i < launch->size; ++i) note("%02x", (unsigned char)launch->params[i]);
    note("\n");
    if (late) {
        sticky = late;
        late = 0;
        return 0;
    }
    if (!launch->function->run) return 0;
    pthread_mutex_lock(&lock);
    error = launch->function->run(launch->params, launch->grid[0], launch->grid[1], launch->grid[2],
                                  launch->block);
    pthread_mutex_unlock(&lock);
    if (error) {
        fprintf(stderr, "%s: %s\n", launch->function->name, error);
        sticky = 719;
    }
    return 0;
}

int cuLaunchKernel(function_t *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, stream_t *stream, void **params,
                   void **extra) {
    launch_t launch = {function, {gx, gy, gz}, bx, NULL, 0};
    ENTER(1);
    (void)shared;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || bx > 1024 || by != 1 || bz != 1)
        return 1;
    if (params || extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != STUB_PARAM_END)
        return 1;
    launch.size = *(size_t *)extra[3];
    launch.params = memcpy(malloc(launch.size + 1), extra[1], launch.size);
    if (stream && stream->recording) {
        graph_t *graph = stream->recording;
        graph->launches = realloc(graph->launches, (graph->count + 1) * sizeof launch);
        graph->launches[graph->count++] = launch;
        return 0;
    }
    int code = start(&launch);
    free(launch.params);
    return code;
}

/* --- streams, graphs, events --- */

int cuStreamCreate(stream_t **stream, unsigned flags) {
    (void)flags;
    ENTER(1);
    *stream = calloc(1, sizeof **stream);
    (*stream)->alive = 1;
    return 0;
}
int cuStreamDestroy_v2(stream_t *stream) {
    ENTER(1);
    free(stream);
    return 0;
}
int cuStreamSynchronize(stream_t *stream) {
    ENTER(1);
    return stream && stream->recording ? 900 : 0;
}
int cuStreamBeginCapture_v2(stream_t *stream, int mode) {
    (void)mode;
    ENTER(1);
    if (stream->recording) return 401;
    stream->recording = calloc(1, sizeof(graph_t));
    return 0;
}
int cuStreamEndCapture(stream_t *stream, graph_t **graph) {
    ENTER(1);
    *graph = stream->recording;
    stream->recording = NULL;
    return 0;
}
int cuGraphInstantiateWithFlags(graph_t **executable, graph_t *graph, unsigned long long flags) {
    (void)flags;
    ENTER(1);
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    return 0;
}
int cuGraphDestroy(graph_t *graph) {
    ENTER(1);
    free(graph);
    return 0;
}
int cuGraphExecDestroy(graph_t *graph) {
    ENTER(1);
    for (size_t i = 0; i < graph->count; ++i) free(graph->launches[i].params);
    free(graph->launches);
    free(graph);
    return 0;
}
int cuGraphLaunch(graph_t *graph, stream_t *stream) {
    (void)stream;
    ENTER(1);
    for (size_t i = 0; i < graph->count; ++i) start(&graph->launches[i]);
    return 0;
}
int cuEventCreate(event_t **event, unsigned flags) {
    (void)flags;
    ENTER(1);
    *event = calloc(1, sizeof **event);
    return 0;
}
int cuEventRecord(event_t *event, stream_t *stream) {
    (void)stream;
    ENTER(1);
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    return 0;
}
int cuEventSynchronize(event_t *event) {
    (void)event;
    ENTER(1);
    return 0;
}
int cuEventElapsedTime(float *milliseconds, event_t *a, event_t *b) {
    ENTER(1);
    *milliseconds =
        (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) / 1e6);
    return 0;
}
int cuEventDestroy_v2(event_t *event) {
    ENTER(1);
    free(event);
    return 0;
}

/* --- memory: each block poisoned when it comes and when it goes --- */

static int allocate(uint64_t *address, size_t size) {
    block_t *block;
    if (memory_used + size > memory_total) return 2;
    block = malloc(sizeof *block);
    block->size = size;
    if (posix_memalign(&block->base, 256, size)) return 2;
    memset(block->base, 0xFF, size);
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    memory_used += size;
    pthread_mutex_unlock(&lock);
    *address = (uint64_t)(uintptr_t)block->base;
    return 0;
}
static int release(uint64_t address) {
    int code = 1;
    pthread_mutex_lock(&lock);
    for (block_t **at = &blocks; *at; at = &(*at)->next) {
        block_t *block = *at;
        if ((uint64_t)(uintptr_t)block->base != address) continue;
        *at = block->next;
        memory_used -= block->size;
        memset(block->base, 0xFF, block->size);
        free(block->base);
        free(block);
        code = 0;
        break;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
/* Whether a range lies in one block. */
static int inside(uint64_t address, size_t size) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (block_t *block = blocks; block; block = block->next) {
        uint64_t base = (uint64_t)(uintptr_t)block->base;
        found |= address >= base && address + size <= base + block->size;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int cuMemAllocAsync(uint64_t *address, size_t size, void *stream) {
    (void)stream;
    ENTER(1);
    return getenv("STUB_NO_POOLS") ? 801 : allocate(address, size);
}
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    ENTER(1);
    return allocate(address, size);
}
int cuMemFreeAsync(uint64_t address, void *stream) {
    (void)stream;
    ENTER(1);
    return release(address);
}
int cuMemFree_v2(uint64_t address) {
    ENTER(1);
    return release(address);
}
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(1);
    *available = memory_total - memory_used;
    *total = memory_total;
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    (void)stream;
    ENTER(1);
    if (!inside(to, size)) return 1;
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    (void)stream;
    ENTER(1);
    if (!inside(from, size)) return 1;
    memcpy(to, (const void *)(uintptr_t)from, size);
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    (void)stream;
    ENTER(1);
    if (!inside(to, size) || !inside(from, size)) return 1;
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *stream) {
    (void)stream;
    ENTER(1);
    if (!inside(to, size)) return 1;
    memset((void *)(uintptr_t)to, value, size);
    return 0;
}
