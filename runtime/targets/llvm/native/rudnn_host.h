/* rudnn_host: calling an exported kernel of the host's processor. Plain C99 and C++. */
#ifndef RUDNN_HOST_H
#define RUDNN_HOST_H

#include "rudnn_runtime.h"

#include "rudnn_embed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Call a kernel. Its workspace, of `bytes`, goes into the last argument: the caller's, or with NULL
 * the runtime's scratch memory for the time of the call. `threads` 1 keeps small work on the
 * calling thread. */
static inline int32_t rudnn_invoke(rudnn_entry_fn entry, int64_t *args, int slot, void *workspace,
                                   int64_t bytes, int threads) {
    void *scratch = NULL;
    int32_t status;
    if (slot >= 0 && !workspace && bytes > 0) {
        scratch = workspace = rudnn_workspace_alloc(1, 0, (uint64_t)bytes, 1, 8);
        if (!scratch) return RUDNN_NO_MEMORY;
    }
    if (slot >= 0) args[slot] = (int64_t)(intptr_t)workspace;
    status = rudnn_call(entry, args, threads);
    if (scratch) rudnn_workspace_free(1, 0, scratch);
    return status;
}

#ifdef __cplusplus
}
#endif
#endif
