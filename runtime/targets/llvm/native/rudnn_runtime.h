/* rudnn_runtime: the few services a compiled rudnn kernel needs: a thread pool, scratch memory,
 * error text.
 *
 * Plain C11 and pthreads; neither Python nor TVM. Compile rudnn_runtime.c together with the
 * kernel's object file. Kernels reach these functions through pointer variables that the object
 * declares weak and rudnn_runtime.c defines strong and initialised, so no set-up call is needed.
 * (Link rudnn_runtime.o as an object, not from a static archive: a weak definition does not pull a
 * member out of an archive, unless something else refers to it, such as rudnn_abi_version().)
 *
 * Every function may be called from any thread. Nested and concurrent launches run on their calling
 * thread.
 */
#ifndef RUDNN_RUNTIME_H
#define RUDNN_RUNTIME_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RUDNN_ABI_VERSION 1

/* How a parallel loop is split: task i of num_task runs its share of the loop. */
typedef struct {
    void *sync_handle; /* unused, NULL */
    int32_t num_task;
} rudnn_task_env;

typedef int (*rudnn_task_fn)(int task_id, rudnn_task_env *env, void *cdata);

/* RUDNN_ABI_VERSION of the compiled runtime. */
int rudnn_abi_version(void);

/* Call fn(0..num_task-1) on the pool, the caller taking part; return when all have ended. num_task
 * 0: the runtime chooses. Returns 0, or the first non-zero result of a task (tasks not yet begun
 * are then skipped). */
int rudnn_parallel_launch(rudnn_task_fn fn, void *cdata, int num_task);

/* Tasks are claimed dynamically and may share a thread, so they cannot wait for each other: -1
 * unless num_task is 1. */
int rudnn_parallel_barrier(int task_id, rudnn_task_env *env);

/* Threads used by a launch: RUDNN_NUM_THREADS, else the cores this process may run on. n <= 0
 * restores that. */
int rudnn_num_threads(void);
void rudnn_set_num_threads(int n);

/* Cap the threads of launches made by the calling thread, 0 for no cap; returns the former cap. */
int rudnn_thread_limit(int n);

/* A compiled operator; and its call with the calling thread's launches capped at `threads` (0: no
 * cap but the thread's own), which spares small work the price of waking the pool. */
typedef int32_t (*rudnn_entry_fn)(const int64_t *args);
int rudnn_call(rudnn_entry_fn entry, const int64_t *args, int threads);

/* Scratch memory, 64-byte aligned, cached by each thread; NULL when memory is out. Device and dtype
 * are ignored. */
void *rudnn_workspace_alloc(int device_type, int device_id, uint64_t nbytes, int dtype_code,
                            int dtype_bits);
int rudnn_workspace_free(int device_type, int device_id, void *ptr);

/* On non-zero, fill each block handed out with 0xFF bytes (NaN in every float format). */
void rudnn_workspace_poison(int on);

/* Bytes: out[0] handed out now, out[1] reserved (handed out or cached), out[2] the greatest out[1]
 * so far. */
void rudnn_workspace_stats(int64_t out[3]);
void rudnn_workspace_reset_peak(void);

/* Return the calling thread's cached blocks to the system. */
void rudnn_workspace_trim(void);

/* The message of the last failed launch or assertion on this thread, "" when there is none. */
const char *rudnn_last_error(void);
void rudnn_set_error(const char *kind, const char *const *parts, int32_t num_parts);

#ifdef __cplusplus
}
#endif
#endif
