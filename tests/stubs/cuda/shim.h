/* CUDA C++ on the CPU: a thread of a block is a fiber, blocks run one after the other (fibers.cc).
 *
 * What a real device leaves undefined is NaN or an error: shared memory at a block's start, lanes
 * that take no part, copies not waited for, misaligned rows, barriers that not all threads come to.
 * No header of C++ is included: kernels are many, and each would take three times as long.
 */
#ifndef RUDNN_SHIM
#define RUDNN_SHIM
#include <stdint.h>
#include <string.h>
#include "fibers.h"

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

template <typename To, typename From>
static inline To rudnn_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

/* --- launches --- */

extern "C" char __start_rudnn_shared[] __attribute__((weak));
extern "C" char __stop_rudnn_shared[] __attribute__((weak));

namespace rudnn {
/* Parameters lie one after the other, each at a multiple of its size. */
template <typename T>
static T parameter(const char *base, size_t &offset) {
  T value;
  offset = (offset + sizeof(T) - 1) / sizeof(T) * sizeof(T);
  memcpy((void *)&value, base + offset, sizeof value);
  offset += sizeof value;
  return value;
}
template <typename... A>
struct Kernel {
  void (*kernel)(A...);
  const char *parameters;
  struct Call {
    Call(void (*kernel)(A...), A... values) { kernel(values...); }
  };
  static void body(const void *data) {
    const Kernel *self = (const Kernel *)data;
    size_t offset = 0;
    Call{self->kernel, parameter<A>(self->parameters, offset)...}; /* braces: from left to right */
  }
};
template <typename... A>
static const char *launch(void (*kernel)(A...), const void *parameters, const unsigned *grid,
                          unsigned threads) {
  Kernel<A...> call = {kernel, (const char *)parameters};
  return run(Kernel<A...>::body, &call, grid, threads, __start_rudnn_shared,
             __stop_rudnn_shared - __start_rudnn_shared);
}
}  // namespace rudnn

#define RUDNN_KERNEL(NAME)                                                             \
  extern "C" const char *NAME##__run(const void *parameters, unsigned gx, unsigned gy, \
                                     unsigned gz, unsigned threads) {                  \
    const unsigned grid[3] = {gx, gy, gz};                                             \
    return rudnn::launch(NAME, parameters, grid, threads);                             \
  }
using rudnn::blockIdx;
using rudnn::threadIdx;

/* --- barriers, exchanges, atomics --- */

static inline void __syncthreads() { rudnn::barrier(); }
static inline unsigned __activemask() { return rudnn::running(); }
static inline void __syncwarp(unsigned mask = ~0u) { rudnn::exchange(rudnn::SYNC, mask, "", 0); }
template <typename T>
static inline T rudnn_shuffle(rudnn::Exchange kind, unsigned mask, T value, int from, int low,
                              int high) {
  static_assert(sizeof(T) >= 2 && sizeof(T) <= 8, "no shuffle of this type");
  const rudnn::Deposit *all = rudnn::exchange(kind, mask, &value, sizeof value);
  if (from < low || from >= high) return value;
  memcpy((void *)&value, all[from].words, sizeof value);
  if (!(mask >> from & 1)) memset((void *)&value, 0xFF, sizeof value);
  return value;
}
template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  int low = (int)(threadIdx.x % 32) / width * width;
  return rudnn_shuffle(rudnn::SHUFFLE, mask, value, low + (lane & (width - 1)), low, low + width);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  int lane = (int)(threadIdx.x % 32), low = lane / width * width;
  return rudnn_shuffle(rudnn::SHUFFLE_DOWN, mask, value, lane + (int)by, low, low + width);
}
static inline float atomicAdd(float *at, float value) {
  float before = *at;
  *at = before + value;
  return before;
}

/* --- what prelude.cuh does in assembly: PTX ISA, ldmatrix and mma.m16n8k16 --- */

// A store that writes back: here as any other.
template <typename T>
static inline void __stwb(T *at, T value) { *at = value; }
static inline int rudnn_lane() { return (int)(threadIdx.x % 32); }

/* Register i of a lane: two elements of row lane / 4 of matrix i, whose rows lanes 8i … 8i+7 name;
 * with `trans` of column lane / 4. */
template <int COUNT, bool TRANS>
static inline void rudnn_matrices(unsigned *r, const void *row) {
  if ((uintptr_t)row % 16) rudnn::fail("ldmatrix of a row that is not at a multiple of 16 bytes");
  const rudnn::Deposit *all = rudnn::exchange(rudnn::MATRICES, ~0u, &row, sizeof row);
  int lane = rudnn_lane();
  unsigned short parts[COUNT][2];
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < 2; ++j) {
      int major = lane / 4, minor = lane % 4 * 2 + j;
      if (TRANS) major = lane % 4 * 2 + j, minor = lane / 4;
      if (!all[8 * i + major].there) rudnn::fail("ldmatrix without all lanes of a warp");
      const unsigned short *elements;
      memcpy(&elements, all[8 * i + major].words, sizeof elements);
      parts[i][j] = elements[minor];
    }
  memcpy(r, parts, sizeof parts);
}
static inline void rudnn_ldmatrix_x4(unsigned *r, const void *row) {
  rudnn_matrices<4, false>(r, row);
}
static inline void rudnn_ldmatrix_x2(unsigned *r, const void *row) {
  rudnn_matrices<2, false>(r, row);
}
static inline void rudnn_ldmatrix_trans_x4(unsigned *r, const void *row) {
  rudnn_matrices<4, true>(r, row);
}
static inline void rudnn_ldmatrix_trans_x2(unsigned *r, const void *row) {
  rudnn_matrices<2, true>(r, row);
}

static inline float rudnn_half_to_float(unsigned short h);
static inline float rudnn_bf16_to_float(unsigned short h) {
  return rudnn_bits<float>((unsigned)h << 16);
}
static inline void rudnn_mma(float *c, const unsigned *a, const unsigned *b,
                             float (*decode)(unsigned short)) {
  unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const rudnn::Deposit *all = rudnn::exchange(rudnn::PRODUCT, ~0u, mine, sizeof mine);
  float A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    unsigned short elements[12];
    if (!all[lane].there) rudnn::fail("mma without all lanes of a warp");
    memcpy(elements, all[lane].words, sizeof elements);
    for (int i = 0; i < 8; ++i) /* a0 … a7 */
      A[lane / 4 + (i % 4 >= 2 ? 8 : 0)][lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)] =
          decode(elements[i]);
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
  if (((uintptr_t)to | (uintptr_t)from) % 16)
    rudnn::fail("a copy that is not at a multiple of 16 bytes");
  rudnn::copy_later(to, from, 16);
}
static inline void rudnn_copy_async_commit() { rudnn::close_copies(); }
template <int LEFT>
static inline void rudnn_copy_async_wait() {
  rudnn::await_copies(LEFT);
}

/* --- types and functions of the language --- */

#define RUDNN_VECTOR(T, NAME, ALIGN)                                        \
  struct __attribute__((aligned(2 * sizeof(T)))) NAME##2 { T x, y; };       \
  struct NAME##3 { T x, y, z; };                                            \
  struct __attribute__((aligned(ALIGN))) NAME##4 { T x, y, z, w; };         \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
RUDNN_VECTOR(signed char, char, 4)
RUDNN_VECTOR(unsigned char, uchar, 4)
RUDNN_VECTOR(short, short, 8)
RUDNN_VECTOR(unsigned short, ushort, 8)
RUDNN_VECTOR(int, int, 16)
RUDNN_VECTOR(float, float, 16)
RUDNN_VECTOR(long long, longlong, 16)
RUDNN_VECTOR(unsigned long long, ulonglong, 16)
struct __attribute__((aligned(8))) uint2 {
  unsigned x, y;
};
struct __attribute__((aligned(16))) uint4 {
  unsigned x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

#define RUDNN_MATH(NAME) extern "C" float NAME(float);
RUDNN_MATH(sqrtf)
RUDNN_MATH(floorf) RUDNN_MATH(ceilf) RUDNN_MATH(truncf) RUDNN_MATH(rintf) RUDNN_MATH(fabsf)
    RUDNN_MATH(expf) RUDNN_MATH(logf) RUDNN_MATH(erff) RUDNN_MATH(tanf)
        RUDNN_MATH(atanf) extern "C" float powf(float, float);
extern "C" double erf(double);
static inline bool isnan(float x) { return x != x; }
static inline bool isinf(float x) { return x - x != x - x && x == x; }
static inline bool isfinite(float x) { return x - x == x - x; }

/* A NaN gives way to a number, as on the device. */
template <typename T>
static inline T max(T a, T b) {
  return a > b || b != b ? a : b;
}
template <typename T>
static inline T min(T a, T b) {
  return a < b || b != b ? a : b;
}
static inline float __int_as_float(int x) { return rudnn_bits<float>(x); }
static inline int __float_as_int(float x) { return rudnn_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return rudnn_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return rudnn_bits<unsigned>(x); }
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#endif
