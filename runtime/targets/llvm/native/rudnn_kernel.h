/* Functions a kernel's object calls by name, to report failed assertions and calls that only a
 * compiler's runtime could serve. Hidden, so that they never stand in for another library's in the
 * same process. Compiled by itself (cc -x c), it is linked into each kernel library, whose loader
 * sets rudnn_error_hook; rudnn_runtime.c includes it for those who link statically.
 */
#include "rudnn_runtime.h"

#include <stddef.h>

#define HIDDEN __attribute__((visibility("hidden")))

#ifdef RUDNN_KERNEL_LIBRARY
void (*rudnn_error_hook)(const char *, const char *const *, int32_t) = NULL;
#else
static void (*const rudnn_error_hook)(const char *, const char *const *, int32_t) = rudnn_set_error;
#endif

HIDDEN void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts,
                                              int32_t num_parts) {
    if (rudnn_error_hook) rudnn_error_hook(kind, (const char *const *)parts, num_parts);
}

HIDDEN void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
    if (rudnn_error_hook) rudnn_error_hook(kind, &message, 1);
}

static int refuse(void) {
    TVMFFIErrorSetRaisedFromCStr(
        "RuntimeError", "the kernel calls a packed function, which needs the compiler's runtime");
    return -1;
}

/* Packed calls: an object that makes them runs, up to the call. */
HIDDEN int TVMFFIFunctionCall(void *f, void *args, int32_t n, void *out) {
    return (void)f, (void)args, (void)n, (void)out, refuse();
}
HIDDEN int TVMFFIEnvModLookupFromImports(void *library, const char *name, void **out) {
    return (void)library, (void)name, (void)out, refuse();
}
HIDDEN int TVMFFIHandleInitOnce(void **handle, int (*init)(void **out)) {
    return (void)handle, (void)init, refuse();
}

int (*__TVMFFIFunctionCall)(void *, void *, int32_t, void *) = TVMFFIFunctionCall;
int (*__TVMFFIEnvModLookupFromImports)(void *, const char *,
                                       void **) = TVMFFIEnvModLookupFromImports;
int (*__TVMFFIHandleInitOnce)(void **, int (*)(void **)) = TVMFFIHandleInitOnce;
void (*__TVMFFIErrorSetRaisedFromCStr)(const char *, const char *) = TVMFFIErrorSetRaisedFromCStr;
