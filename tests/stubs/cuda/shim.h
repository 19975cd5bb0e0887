/* CUDA C++ on the CPU: a thread of a block is a fiber, blocks run one after the other.
 *
 * Fibers run in turn until they come to a barrier or to an exchange between the lanes of a warp. What
 * a real device leaves undefined is NaN or an error: shared memory at a block's start, lanes that
 * take no part, copies not waited for, misaligned rows, barriers that not all threads come to.
 */
#ifndef RUDNN_SHIM
#define RUDNN_SHIM
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <ucontext.h>

#define RUDNN_EMULATED
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("rudnn_shared")))

template <typename To, typename From> static inline To rudnn_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

/* --- fibers --- */

struct uint3 { unsigned x, y, z; };
static uint3 blockIdx, blockDim, gridDim;

namespace rudnn {
enum State { READY, BARRIER, EXCHANGE, DONE };
enum Exchange { SYNC, SHUFFLE, SHUFFLE_DOWN, MATRICES, PRODUCT };
enum { WARP = 32, MOST = 1024, STACK = 256 * 1024 };
struct Copy { char *to; const char *from; };
struct Fiber {
  ucontext_t context;
  State state;
  uint3 thread;
  int kind;  /* of exchange that it waits at */
  unsigned mask;
  std::vector<std::vector<Copy>> copies;  /* groups, the newest last and still open */
};
struct Deposit { bool there; uint64_t words[4]; };

static Fiber fibers[MOST];
static Deposit given[MOST], taken[MOST];
static char *stacks;
static ucontext_t scheduler;
static Fiber *current;
static const char *failure;
static bool backwards;

static inline void yield(State state) {
  current->state = state;
  swapcontext(&current->context, &scheduler);
}
static inline void fail(const char *what) {
  failure = what;
  setcontext(&scheduler);
}
static inline unsigned index() { return current->thread.x; }
static inline unsigned lane() { return index() % WARP; }

/* Every lane of `mask` gives `words`; afterwards all see what the others gave. */
static inline const Deposit *exchange(int kind, unsigned mask, const void *words, size_t size) {
  Deposit &mine = given[index()];
  memset(&mine, 0, sizeof mine);
  memcpy(mine.words, words, size);
  if (!(mask >> lane() & 1)) fail("a lane that its own mask does not name");
  current->kind = kind;
  current->mask = mask;
  yield(EXCHANGE);
  return taken + (index() - lane());
}

/* Lets an exchange happen if all of its lanes that still run have come; whether it did. */
static bool release_exchange(unsigned first, unsigned count, const char **error) {
  for (unsigned i = first; i < first + count; ++i) {
    if (fibers[i].state != EXCHANGE) continue;
    unsigned mask = fibers[i].mask;
    bool all = true;
    for (unsigned j = first; j < first + count; ++j) {
      if (!(mask >> (j - first) & 1) || fibers[j].state == DONE) continue;
      all &= fibers[j].state == EXCHANGE && fibers[j].kind == fibers[i].kind;
      if (all && fibers[j].mask != mask) *error = "lanes of one exchange name different masks";
    }
    if (!all) continue;
    for (unsigned j = first; j < first + WARP; ++j) {
      bool named = mask >> (j - first) & 1, running = j < first + count && fibers[j].state != DONE;
      if (!named) continue;
      taken[j].there = running;
      if (running) {
        memcpy(taken[j].words, given[j].words, sizeof given[j].words);
        fibers[j].state = READY;
      } else {
        memset(taken[j].words, 0xFF, sizeof taken[j].words);
      }
    }
    return true;
  }
  return false;
}

extern "C" char __start_rudnn_shared[] __attribute__((weak));
extern "C" char __stop_rudnn_shared[] __attribute__((weak));

template <typename Run> static void block(unsigned threads, Run run) {
  static Run *body;
  body = &run;
  if (!stacks) stacks = (char *)malloc((size_t)MOST * STACK);
  memset(__start_rudnn_shared, 0xFF, __stop_rudnn_shared - __start_rudnn_shared);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber &fiber = fibers[i];
    fiber.state = READY;
    fiber.thread = {i, 0, 0};
    fiber.copies.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = NULL;
    makecontext(&fiber.context, (void (*)())(+[] {
      (*body)();
      for (auto &group : current->copies)
        if (!group.empty()) fail("a thread ends before its copies have arrived");
      yield(DONE);
    }), 0);
  }
  while (true) {
    unsigned done = 0, waiting = 0;
    for (unsigned n = 0; n < threads; ++n) {
      Fiber &fiber = fibers[backwards ? threads - 1 - n : n];
      if (fiber.state == READY) {
        current = &fiber;
        swapcontext(&scheduler, &fiber.context);
        if (failure) return;
      }
    }
    bool moved = false;
    for (unsigned first = 0; first < threads; first += WARP)
      while (release_exchange(first, std::min<unsigned>(WARP, threads - first), &failure)) moved = true;
    for (unsigned i = 0; i < threads; ++i) {
      done += fibers[i].state == DONE;
      waiting += fibers[i].state == BARRIER;
    }
    if (failure || done == threads) return;
    if (waiting && done + waiting == threads) {
      for (unsigned i = 0; i < threads; ++i)
        if (fibers[i].state == BARRIER) fibers[i].state = READY;
      moved = true;
    }
    if (!moved) {
      failure = "threads wait for others that never come: a barrier or an exchange in a branch";
      return;
    }
  }
}

/* Parameters lie one after the other, each at a multiple of its size. */
template <typename T> static T parameter(const char *base, size_t &offset) {
  typename std::remove_const<T>::type value;
  offset = (offset + alignof(T) - 1) / alignof(T) * alignof(T);
  memcpy((void *)&value, base + offset, sizeof value);
  offset += sizeof value;
  return value;
}
template <typename... A>
static const char *launch(void (*kernel)(A...), const void *params, unsigned gx, unsigned gy,
                          unsigned gz, unsigned threads) {
  size_t offset = 0;
  std::tuple<A...> values{parameter<A>((const char *)params, offset)...};
  failure = NULL;
  backwards = getenv("STUB_BACKWARDS") != NULL;
  gridDim = {gx, gy, gz};
  blockDim = {threads, 1, 1};
  for (unsigned z = 0; z < gz && !failure; ++z)
    for (unsigned y = 0; y < gy && !failure; ++y)
      for (unsigned x = 0; x < gx && !failure; ++x) {
        blockIdx = {x, y, z};
        block(threads, [&] { std::apply(kernel, values); });
      }
  return failure;
}
}  // namespace rudnn

#define RUDNN_KERNEL(NAME)                                                                       \
  extern "C" const char *NAME##__run(const void *params, unsigned gx, unsigned gy, unsigned gz,  \
                                     unsigned threads) {                                         \
    return rudnn::launch(NAME, params, gx, gy, gz, threads);                                     \
  }
#define threadIdx (rudnn::current->thread)

/* --- barriers, exchanges, atomics --- */

static inline void __syncthreads() { rudnn::yield(rudnn::BARRIER); }
static inline unsigned __activemask() {
  unsigned first = rudnn::index() - rudnn::lane(), mask = 0;
  for (unsigned i = 0; i < 32 && first + i < blockDim.x; ++i)
    mask |= (rudnn::fibers[first + i].state != rudnn::DONE) << i;
  return mask;
}
static inline void __syncwarp(unsigned mask = ~0u) { rudnn::exchange(rudnn::SYNC, mask, "", 0); }
template <typename T> static inline T rudnn_shuffle(int kind, unsigned mask, T value, int from, int low, int high) {
  static_assert(sizeof(T) >= 2 && sizeof(T) <= 8, "no shuffle of this type");
  const rudnn::Deposit *all = rudnn::exchange(kind, mask, &value, sizeof value);
  if (from < low || from >= high) return value;
  memcpy((void *)&value, all[from].words, sizeof value);
  if (!(mask >> from & 1)) memset((void *)&value, 0xFF, sizeof value);
  return value;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  int low = (int)rudnn::lane() / width * width;
  return rudnn_shuffle(rudnn::SHUFFLE, mask, value, low + (lane & (width - 1)), low, low + width);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  int lane = (int)rudnn::lane(), low = lane / width * width;
  return rudnn_shuffle(rudnn::SHUFFLE_DOWN, mask, value, lane + (int)by, low, low + width);
}
static inline float atomicAdd(float *at, float value) {
  float before = *at;
  *at = before + value;
  return before;
}

/* --- what prelude.cuh does in assembly: PTX ISA, ldmatrix and mma.m16n8k16 --- */

static inline int rudnn_lane() { return (int)rudnn::lane(); }

/* Register i of a lane: two elements of row lane / 4 of matrix i, whose rows lanes 8i … 8i+7 name;
 * with `trans` of column lane / 4. */
template <int COUNT, bool TRANS> static inline void rudnn_matrices(unsigned *r, const void *row) {
  if ((uintptr_t)row % 16) rudnn::fail("ldmatrix of a row that is not at a multiple of 16 bytes");
  const rudnn::Deposit *all = rudnn::exchange(rudnn::MATRICES, ~0u, &row, sizeof row);
  int lane = rudnn_lane();
  unsigned short parts[COUNT][2];
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < 2; ++j) {
      int major = lane / 4, minor = lane % 4 * 2 + j;
      if (TRANS) std::swap(major, minor);
      if (!all[8 * i + major].there) rudnn::fail("ldmatrix without all lanes of a warp");
      const unsigned short *elements;
      memcpy(&elements, all[8 * i + major].words, sizeof elements);
      parts[i][j] = elements[minor];
    }
  memcpy(r, parts, sizeof parts);
}
static inline void rudnn_ldmatrix_x4(unsigned *r, const void *row) { rudnn_matrices<4, false>(r, row); }
static inline void rudnn_ldmatrix_x2(unsigned *r, const void *row) { rudnn_matrices<2, false>(r, row); }
static inline void rudnn_ldmatrix_trans_x4(unsigned *r, const void *row) { rudnn_matrices<4, true>(r, row); }
static inline void rudnn_ldmatrix_trans_x2(unsigned *r, const void *row) { rudnn_matrices<2, true>(r, row); }

static inline float rudnn_half_to_float(unsigned short h);
static inline float rudnn_bf16_to_float(unsigned short h) { return rudnn_bits<float>((unsigned)h << 16); }
static inline void rudnn_mma(float *c, const unsigned *a, const unsigned *b, float (*decode)(unsigned short)) {
  unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const rudnn::Deposit *all = rudnn::exchange(rudnn::PRODUCT, ~0u, mine, sizeof mine);
  float A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    unsigned short elements[12];
    if (!all[lane].there) rudnn::fail("mma without all lanes of a warp");
    memcpy(elements, all[lane].words, sizeof elements);
    for (int i = 0; i < 8; ++i) /* a0 … a7 */
      A[lane / 4 + (i % 4 >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)] = decode(elements[i]);
    for (int i = 0; i < 4; ++i) /* b0 … b3 */
      B[lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0)][lane / 4] = decode(elements[8 + i]);
  }
  int lane = rudnn_lane();
  for (int i = 0; i < 4; ++i) { /* c0 … c3 */
    int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 16; ++k) c[i] += A[row][k] * B[k][column];
  }
}
static inline void rudnn_mma_sync_f16(float *c, const unsigned *a, const unsigned *b) {
  rudnn_mma(c, a, b, rudnn_half_to_float);
}
static inline void rudnn_mma_sync_bf16(float *c, const unsigned *a, const unsigned *b) {
  rudnn_mma(c, a, b, rudnn_bf16_to_float);
}

/* cp.async: nothing arrives before it is waited for. */
static inline void rudnn_copy_async_16(void *to, const void *from) {
  if (((uintptr_t)to | (uintptr_t)from) % 16) rudnn::fail("a copy that is not at a multiple of 16 bytes");
  rudnn::current->copies.back().push_back({(char *)to, (const char *)from});
}
static inline void rudnn_copy_async_commit() { rudnn::current->copies.emplace_back(); }
template <int LEFT> static inline void rudnn_copy_async_wait() {
  auto &groups = rudnn::current->copies;
  for (size_t i = 0; i + 1 + LEFT < groups.size(); ++i) {
    for (const rudnn::Copy &copy : groups[i]) memcpy(copy.to, copy.from, 16);
    groups[i].clear();
  }
}

/* --- types and functions of the language --- */

#define RUDNN_VECTOR(T, NAME, ALIGN)                                                                  \
  struct __attribute__((aligned(2 * sizeof(T)))) NAME##2 { T x, y; };                                 \
  struct NAME##3 { T x, y, z; };                                                                      \
  struct __attribute__((aligned(ALIGN))) NAME##4 { T x, y, z, w; };                                   \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                   \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                           \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
RUDNN_VECTOR(signed char, char, 4)
RUDNN_VECTOR(unsigned char, uchar, 4)
RUDNN_VECTOR(short, short, 8)
RUDNN_VECTOR(unsigned short, ushort, 8)
RUDNN_VECTOR(int, int, 16)
RUDNN_VECTOR(float, float, 16)
RUDNN_VECTOR(long long, longlong, 16)
RUDNN_VECTOR(unsigned long long, ulonglong, 16)
struct __attribute__((aligned(8))) uint2 { unsigned x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
template <typename T> static inline typename std::enable_if<std::is_integral<T>::value, T>::type max(T a, T b) {
  return a > b ? a : b;
}
template <typename T> static inline typename std::enable_if<std::is_integral<T>::value, T>::type min(T a, T b) {
  return a < b ? a : b;
}
static inline float __int_as_float(int x) { return rudnn_bits<float>(x); }
static inline int __float_as_int(float x) { return rudnn_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return rudnn_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return rudnn_bits<unsigned>(x); }
using std::isfinite;
using std::isinf;
using std::isnan;
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#endif
