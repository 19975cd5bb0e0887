/* See rudnn_runtime.h for the contract. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "rudnn_runtime.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

enum {
    MAX_THREADS = 256,
    TASKS_PER_THREAD = 16, /* balances a loop of any extent to some 5 %, and costs under 1 us */
    SPIN_NS = 50000,       /* longer than the gap between two calls made back to back from Python */
    STACK_BYTES = 8 << 20, /* kernels keep tiles on the stack; some systems default to 128 KiB */
    ERROR_BYTES = 256
};

/* ---- machine ---- */

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Workers take the caller's rounding and flush-to-zero modes: the bits must not depend on who runs
 * a task. */
static inline uint64_t fp_mode(void) {
#if defined(__x86_64__)
    return _mm_getcsr() & ~0x3fu; /* without the sticky exception flags */
#elif defined(__aarch64__)
    uint64_t v;
    __asm__ volatile("mrs %0, fpcr" : "=r"(v));
    return v;
#else
    return 0;
#endif
}

static inline void set_fp_mode(uint64_t v) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)v);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(v));
#else
    (void)v;
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int usable_cores(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* Sleep while *word == seen; wake every sleeper. Spurious wake-ups are allowed. */
#ifdef __linux__
static void word_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void word_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
static void word_reset(void) {}
#else
static pthread_mutex_t word_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t word_cond = PTHREAD_COND_INITIALIZER;
static void word_wait(_Atomic uint32_t *word, uint32_t seen) {
    pthread_mutex_lock(&word_lock);
    while (atomic_load(word) == seen) pthread_cond_wait(&word_cond, &word_lock);
    pthread_mutex_unlock(&word_lock);
}
static void word_wake(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&word_lock);
    pthread_cond_broadcast(&word_cond);
    pthread_mutex_unlock(&word_lock);
}
static void word_reset(void) {
    word_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    word_cond = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}
#endif

/* ---- errors ---- */

static _Thread_local char last_error[ERROR_BYTES];

const char *rudnn_last_error(void) {
    return last_error;
}

void rudnn_set_error(const char *kind, const char *const *parts, int32_t num_parts) {
    size_t n = (size_t)snprintf(last_error, ERROR_BYTES, "%s: ", kind ? kind : "error");
    for (int32_t i = 0; i < num_parts && n < ERROR_BYTES; ++i)
        n += (size_t)snprintf(last_error + n, ERROR_BYTES - n, "%s", parts[i] ? parts[i] : "");
}

/* ---- thread pool ---- */

/* One job at a time. Task ids are dealt out in one contiguous range a thread, so a core meets the
 * same rows in successive kernels, and a thread that has emptied its range takes from the others'.
 */
typedef struct {
    _Alignas(64) _Atomic int next;
    int end;
} range_t;

#define GATE_OPEN 0x80000000u /* the other bits count the workers inside the job */

static struct {
    range_t ranges[MAX_THREADS];
    _Alignas(64) _Atomic uint32_t gate;
    _Alignas(64) _Atomic uint32_t generation; /* workers sleep on it */
    _Alignas(64) _Atomic int sleepers;
    _Atomic int busy, caller_waits;
    _Atomic uint32_t departures; /* the caller sleeps on it */
    int workers;                 /* started so far; guarded by busy */
    /* the job: written by the caller while the gate is shut */
    rudnn_task_fn fn;
    void *cdata;
    int num_task, threads;
    int64_t spin_ns;
    uint64_t fp;
    _Atomic int rc;
    char error[ERROR_BYTES];
} pool;

static _Atomic int wanted_threads; /* 0 before start-up */
static int default_threads, cores;
static _Thread_local int inside, limit;

static void run_task(int id, rudnn_task_env *env) {
    int rc = pool.fn(id, env, pool.cdata), none = 0;
    if (rc != 0 && atomic_compare_exchange_strong(&pool.rc, &none, rc))
        memcpy(pool.error, last_error, ERROR_BYTES);
}

static void run_share(int self) {
    rudnn_task_env env = {NULL, pool.num_task};
    for (int k = 0; k < pool.threads; ++k) {
        range_t *r = &pool.ranges[(self + k) % pool.threads];
        int id;
        /* look before adding: an emptied range is only read, and next cannot run away */
        while (atomic_load_explicit(&r->next, memory_order_relaxed) < r->end &&
               (id = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed)) < r->end)
            if (atomic_load_explicit(&pool.rc, memory_order_relaxed) == 0) run_task(id, &env);
    }
}

static int gate_enter(void) {
    uint32_t g = atomic_load(&pool.gate);
    while (g & GATE_OPEN)
        if (atomic_compare_exchange_weak(&pool.gate, &g, g + 1)) return 1;
    return 0;
}

static void gate_leave(void) {
    if (atomic_fetch_sub(&pool.gate, 1) == 1 && atomic_load(&pool.caller_waits)) {
        atomic_fetch_add(&pool.departures, 1);
        word_wake(&pool.departures);
    }
}

static int still(_Atomic uint32_t *word, uint32_t value, int64_t spin_ns) {
    int64_t end = spin_ns > 0 ? now_ns() + spin_ns : 0;
    do {
        for (int i = 0; i < 64; ++i) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return 0;
            cpu_pause();
        }
    } while (spin_ns > 0 && now_ns() < end);
    return 1;
}

static void *worker_main(void *arg) {
    int self = (int)(intptr_t)arg;
    uint32_t seen = 0;
    int64_t spin_ns = 0;
    inside = 1;
    for (;;) {
        if (still(&pool.generation, seen, spin_ns)) {
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.generation) == seen) word_wait(&pool.generation, seen);
            atomic_fetch_sub(&pool.sleepers, 1);
        }
        seen = atomic_load(&pool.generation);
        if (!gate_enter()) continue;
        if (self < pool.threads) {
            if (fp_mode() != pool.fp) set_fp_mode(pool.fp);
            run_share(self);
            spin_ns = pool.spin_ns;
        } else {
            spin_ns = 0;
        }
        gate_leave();
    }
    return NULL;
}

/* Signals belong to the host program's threads. Returns how many workers there are, up to n. */
static int start_workers(int n) {
    sigset_t all, old;
    pthread_attr_t attr;
    if (pool.workers >= n) return n;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    for (pthread_t t; pool.workers < n; ++pool.workers)
        if (pthread_create(&t, &attr, worker_main, (void *)(intptr_t)(pool.workers + 1)) != 0)
            break;
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return pool.workers < n ? pool.workers : n;
}

static void await_workers(void) {
    atomic_fetch_and(&pool.gate, ~GATE_OPEN);
    int64_t end = now_ns() + pool.spin_ns;
    for (uint32_t g; (g = atomic_load(&pool.gate)) != 0;) {
        if (now_ns() < end) {
            for (int i = 0; i < 16; ++i) cpu_pause();
            continue;
        }
        uint32_t seen = atomic_load(&pool.departures);
        atomic_store(&pool.caller_waits, 1);
        if (atomic_load(&pool.gate) != 0) word_wait(&pool.departures, seen);
        atomic_store(&pool.caller_waits, 0);
    }
}

static int run_serial(rudnn_task_fn fn, void *cdata, int num_task) {
    rudnn_task_env env = {NULL, num_task > 0 ? num_task : 1};
    int rc = 0;
    for (int id = 0; id < env.num_task && rc == 0; ++id) rc = fn(id, &env, cdata);
    return rc;
}

static void start_up(void);
static pthread_once_t started = PTHREAD_ONCE_INIT;

int rudnn_parallel_launch(rudnn_task_fn fn, void *cdata, int num_task) {
    int threads = rudnn_num_threads(), idle = 0;
    if (limit > 0 && threads > limit) threads = limit;
    if (num_task > 0 && threads > num_task) threads = num_task;
    if (threads <= 1 || inside || atomic_load_explicit(&pool.busy, memory_order_relaxed) ||
        !atomic_compare_exchange_strong(&pool.busy, &idle, 1))
        return run_serial(fn, cdata, num_task);

    threads = start_workers(threads - 1) + 1;
    if (num_task <= 0) num_task = threads * TASKS_PER_THREAD;
    pool.fn = fn, pool.cdata = cdata, pool.num_task = num_task, pool.threads = threads;
    pool.spin_ns = threads <= cores ? SPIN_NS : 0;
    pool.fp = fp_mode();
    atomic_store_explicit(&pool.rc, 0, memory_order_relaxed);
    for (int t = 0; t < threads; ++t) {
        pool.ranges[t].end = (int)((int64_t)num_task * (t + 1) / threads);
        atomic_store_explicit(&pool.ranges[t].next, (int)((int64_t)num_task * t / threads),
                              memory_order_relaxed);
    }
    atomic_store(&pool.gate, GATE_OPEN);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers) > 0) word_wake(&pool.generation);

    inside = 1;
    run_share(0);
    inside = 0;
    await_workers();
    int rc = atomic_load_explicit(&pool.rc, memory_order_relaxed);
    if (rc != 0) memcpy(last_error, pool.error, ERROR_BYTES);
    atomic_store(&pool.busy, 0);
    return rc;
}

int rudnn_parallel_barrier(int task_id, rudnn_task_env *env) {
    static const char *const why[] = {"kernels with barriers between tasks are not supported"};
    (void)task_id;
    if (env->num_task == 1) return 0;
    rudnn_set_error("RuntimeError", why, 1);
    return -1;
}

int rudnn_num_threads(void) {
    int n = atomic_load_explicit(&wanted_threads, memory_order_relaxed);
    if (n > 0) return n;
    pthread_once(&started, start_up);
    return atomic_load_explicit(&wanted_threads, memory_order_relaxed);
}

void rudnn_set_num_threads(int n) {
    pthread_once(&started, start_up);
    if (n <= 0) n = default_threads;
    atomic_store(&wanted_threads, n < MAX_THREADS ? n : MAX_THREADS);
}

int rudnn_thread_limit(int n) {
    int former = limit;
    limit = n > 0 ? n : 0;
    return former;
}

/* ---- workspaces ---- */

enum { ALIGN = 64, SLOTS = 4, ROUND = 4096 };

/* The header sits in the 64 bytes before the block it describes. */
typedef struct {
    size_t bytes;
} header_t;

typedef struct arena {
    _Atomic int64_t live; /* negative where blocks of another thread were freed here */
    header_t *cached[SLOTS];
    struct arena *next, **prev;
} arena_t;

static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;
static arena_t *arenas;
static int64_t departed_live; /* of threads that have ended; under arenas_lock */
static _Atomic int64_t reserved, peak;
static _Atomic int poison;
static pthread_key_t arena_key;
static _Thread_local arena_t *arena;

static void release(header_t *h) {
    atomic_fetch_sub(&reserved, (int64_t)h->bytes);
    free(h);
}

static void trim(arena_t *a) {
    for (int i = 0; i < SLOTS; ++i) {
        if (a->cached[i]) release(a->cached[i]);
        a->cached[i] = NULL;
    }
}

static void arena_end(void *p) {
    arena_t *a = p;
    trim(a);
    pthread_mutex_lock(&arenas_lock);
    departed_live += atomic_load(&a->live);
    *a->prev = a->next;
    if (a->next) a->next->prev = a->prev;
    pthread_mutex_unlock(&arenas_lock);
    arena = NULL;
    free(a);
}

static arena_t *my_arena(void) {
    if (arena) return arena;
    pthread_once(&started, start_up);
    arena_t *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    pthread_mutex_lock(&arenas_lock);
    a->next = arenas, a->prev = &arenas;
    if (arenas) arenas->prev = &a->next;
    arenas = a;
    pthread_mutex_unlock(&arenas_lock);
    pthread_setspecific(arena_key, a);
    return arena = a;
}

static void count_live(arena_t *a,
                       int64_t bytes) { /* only the owner writes: no locked instruction needed */
    int64_t live = atomic_load_explicit(&a->live, memory_order_relaxed);
    atomic_store_explicit(&a->live, live + bytes, memory_order_relaxed);
}

static header_t *fresh(size_t bytes) {
    static const char *const why[] = {"no memory for a workspace"};
    void *p;
    if (posix_memalign(&p, ALIGN, ALIGN + bytes) != 0)
        return rudnn_set_error("MemoryError", why, 1), NULL;
    int64_t now = atomic_fetch_add(&reserved, (int64_t)bytes) + (int64_t)bytes,
            top = atomic_load(&peak);
    while (now > top && !atomic_compare_exchange_weak(&peak, &top, now)) {
    }
    ((header_t *)p)->bytes = bytes;
    return p;
}

void *rudnn_workspace_alloc(int device_type, int device_id, uint64_t nbytes, int dtype_code,
                            int dtype_bits) {
    (void)device_type, (void)device_id, (void)dtype_code, (void)dtype_bits;
    arena_t *a = my_arena();
    if (!a || nbytes > SIZE_MAX / 2) return NULL;
    size_t bytes = nbytes < ROUND ? ROUND : ((size_t)nbytes + ROUND - 1) / ROUND * ROUND;
    int best = -1;
    for (int i = 0; i < SLOTS; ++i)
        if (a->cached[i] && a->cached[i]->bytes >= bytes &&
            (best < 0 || a->cached[i]->bytes < a->cached[best]->bytes))
            best = i;
    header_t *h = best >= 0 ? a->cached[best] : fresh(bytes);
    if (best >= 0) a->cached[best] = NULL;
    if (!h) return NULL;
    count_live(a, (int64_t)h->bytes);
    if (atomic_load_explicit(&poison, memory_order_relaxed))
        memset((char *)h + ALIGN, 0xff, h->bytes);
    return (char *)h + ALIGN;
}

int rudnn_workspace_free(int device_type, int device_id, void *ptr) {
    (void)device_type, (void)device_id;
    if (!ptr) return 0;
    header_t *h = (header_t *)((char *)ptr - ALIGN);
    arena_t *a = my_arena();
    if (!a) return release(h), 0;
    count_live(a, -(int64_t)h->bytes);
    int smallest = 0;
    for (int i = 0; i < SLOTS; ++i) {
        if (!a->cached[i]) return a->cached[i] = h, 0;
        if (a->cached[i]->bytes < a->cached[smallest]->bytes) smallest = i;
    }
    header_t *out = h;
    if (a->cached[smallest]->bytes < h->bytes) out = a->cached[smallest], a->cached[smallest] = h;
    release(out);
    return 0;
}

void rudnn_workspace_poison(int on) {
    atomic_store(&poison, on);
}

void rudnn_workspace_stats(int64_t out[3]) {
    pthread_mutex_lock(&arenas_lock);
    out[0] = departed_live;
    for (arena_t *a = arenas; a; a = a->next)
        out[0] += atomic_load_explicit(&a->live, memory_order_relaxed);
    pthread_mutex_unlock(&arenas_lock);
    out[1] = atomic_load(&reserved), out[2] = atomic_load(&peak);
}

void rudnn_workspace_reset_peak(void) {
    atomic_store(&peak, atomic_load(&reserved));
}

void rudnn_workspace_trim(void) {
    if (arena) trim(arena);
}

/* ---- start and fork ---- */

static void before_fork(void) {
    pthread_mutex_lock(&arenas_lock);
}
static void after_fork_parent(void) {
    pthread_mutex_unlock(&arenas_lock);
}

/* Only the forking thread lives on in the child: forget the workers, the next launch starts new
 * ones. */
static void after_fork_child(void) {
    pthread_mutex_unlock(&arenas_lock);
    word_reset();
    atomic_store(&pool.gate, 0);
    atomic_store(&pool.generation, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_waits, 0);
    pool.workers = 0;
    atomic_store(&pool.busy, 0);
    arenas = arena, departed_live = 0;
    if (arena) arena->next = NULL, arena->prev = &arenas;
}

static void start_up(void) {
    const char *text = getenv("RUDNN_NUM_THREADS");
    long n = text ? strtol(text, NULL, 10) : 0;
    cores = usable_cores();
    default_threads = n > 0 ? (n < MAX_THREADS ? (int)n : MAX_THREADS)
                            : (cores < MAX_THREADS ? cores : MAX_THREADS);
    pthread_key_create(&arena_key, arena_end);
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    atomic_store(&wanted_threads, default_threads);
}

int rudnn_abi_version(void) {
    return RUDNN_ABI_VERSION;
}

/* ---- what a kernel's object refers to ---- */

int (*__TVMBackendParallelLaunch)(rudnn_task_fn, void *, int) = rudnn_parallel_launch;
int (*__TVMBackendParallelBarrier)(int, rudnn_task_env *) = rudnn_parallel_barrier;
void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = rudnn_workspace_alloc;
int (*__TVMBackendFreeWorkspace)(int, int, void *) = rudnn_workspace_free;

#ifndef RUDNN_SHARED /* in the library for Python each kernel brings its own, from rudnn_kernel.h \
                      */
#include "rudnn_kernel.h"
#endif

int rudnn_call(rudnn_entry_fn entry, const int64_t *args, int threads) {
    int former = limit;
    if (threads > 0 && (former == 0 || threads < former)) limit = threads;
    int status = entry(args);
    limit = former;
    return status;
}
