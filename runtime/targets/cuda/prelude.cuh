/* Functions that generated kernels call: matrix units, asynchronous copies, atomics.
 *
 * A matrix unit ID has ID_load_a, _load_a_t, _load_b, _load_b_t, _mma, _zero and _store.
 * All 32 lanes of a warp call together. Tiles lie in shared memory; the rows of an operand's tile
 * start at multiples of 16 bytes, those of an f32 tile at multiples of 8. Fragments are local
 * arrays of a lane, aligned to 4 bytes: 8 elements of A, 4 of B, 4 of the accumulator.
 *
 * With g = lane / 4 and t = lane % 4 a lane holds (PTX ISA, mma.m16n8k16):
 *   A[g][2t], A[g][2t+1], A[g+8][2t], A[g+8][2t+1], then the same at k + 8
 *   B[2t][g], B[2t+1][g], B[2t+8][g], B[2t+9][g]
 *   C[g][2t], C[g][2t+1], C[g+8][2t], C[g+8][2t+1]
 */

#ifndef RUDNN_EMULATED  /* tests give these instructions as C++ */

#define RUDNN_LDMATRIX(NAME, FORM)                                                                 \
  static __device__ __forceinline__ void NAME##_x4(unsigned *r, const void *row) {                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" FORM ".shared.b16 {%0, %1, %2, %3}, [%4];"        \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                  \
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");                       \
  }                                                                                                \
  static __device__ __forceinline__ void NAME##_x2(unsigned *r, const void *row) {                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" FORM ".shared.b16 {%0, %1}, [%2];"                \
                 : "=r"(r[0]), "=r"(r[1])                                                          \
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");                       \
  }
RUDNN_LDMATRIX(rudnn_ldmatrix, "")
RUDNN_LDMATRIX(rudnn_ldmatrix_trans, ".trans")

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  /* nvcc reads it for the host too */
#define RUDNN_MMA(NAME, TYPE)                                                                      \
  static __device__ __forceinline__ void NAME(float *c, const unsigned *a, const unsigned *b) {    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                             \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
  }
RUDNN_MMA(rudnn_mma_sync_f16, "f16")
RUDNN_MMA(rudnn_mma_sync_bf16, "bf16")

static __device__ __forceinline__ void rudnn_copy_async_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((unsigned)__cvta_generic_to_shared(shared)),
                  "l"(__cvta_generic_to_global(global)) : "memory");
}
static __device__ __forceinline__ void rudnn_copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT>
static __device__ __forceinline__ void rudnn_copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
#endif

static __device__ __forceinline__ int rudnn_lane() { return threadIdx.x & 31; }

#endif  /* RUDNN_EMULATED */

static __device__ __forceinline__ float rudnn_atomic_add_f32(float *at, float value) {
  return atomicAdd(at, value);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  /* nvcc reads it for the host too */

/* Wait until all but the N newest groups of copies have arrived. */
static __device__ __forceinline__ void rudnn_copy_async_wait_0() { rudnn_copy_async_wait<0>(); }
static __device__ __forceinline__ void rudnn_copy_async_wait_1() { rudnn_copy_async_wait<1>(); }
static __device__ __forceinline__ void rudnn_copy_async_wait_2() { rudnn_copy_async_wait<2>(); }
static __device__ __forceinline__ void rudnn_copy_async_wait_3() { rudnn_copy_async_wait<3>(); }

/* T is half, or unsigned short for bf16. A tile is [m][k]; with _t it is [k][m]. */
template <typename T>
static __device__ __forceinline__ void rudnn_load_a(T *fragment, const T *tile, int stride) {
  const int lane = rudnn_lane();
  rudnn_ldmatrix_x4((unsigned *)fragment, tile + (lane & 15) * stride + (lane >> 4) * 8);
}
template <typename T>
static __device__ __forceinline__ void rudnn_load_a_t(T *fragment, const T *tile, int stride) {
  const int lane = rudnn_lane(), k = (lane & 7) + (lane >> 4) * 8;
  rudnn_ldmatrix_trans_x4((unsigned *)fragment, tile + k * stride + (lane & 8));
}
/* B tile is [n][k]; with _t it is [k][n]. Lanes 16 … 31 repeat the addresses of 0 … 15. */
template <typename T>
static __device__ __forceinline__ void rudnn_load_b(T *fragment, const T *tile, int stride) {
  const int lane = rudnn_lane();
  rudnn_ldmatrix_x2((unsigned *)fragment, tile + (lane & 7) * stride + (lane & 8));
}
template <typename T>
static __device__ __forceinline__ void rudnn_load_b_t(T *fragment, const T *tile, int stride) {
  rudnn_ldmatrix_trans_x2((unsigned *)fragment, tile + (rudnn_lane() & 15) * stride);
}

static __device__ __forceinline__ void rudnn_zero_c(float *c) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
}
static __device__ __forceinline__ void rudnn_store_c(float *tile, int stride, const float *c) {
  const int lane = rudnn_lane();
  float *at = tile + (lane >> 2) * stride + (lane & 3) * 2;
  *(float2 *)at = make_float2(c[0], c[1]);
  *(float2 *)(at + 8 * stride) = make_float2(c[2], c[3]);
}

#define RUDNN_MATRIX_UNIT(ID, MMA)                                                                 \
  template <typename T>                                                                            \
  static __device__ __forceinline__ void ID##_load_a(T *f, const T *tile, int stride) {            \
    rudnn_load_a(f, tile, stride);                                                                 \
  }                                                                                                \
  template <typename T>                                                                            \
  static __device__ __forceinline__ void ID##_load_a_t(T *f, const T *tile, int stride) {          \
    rudnn_load_a_t(f, tile, stride);                                                               \
  }                                                                                                \
  template <typename T>                                                                            \
  static __device__ __forceinline__ void ID##_load_b(T *f, const T *tile, int stride) {            \
    rudnn_load_b(f, tile, stride);                                                                 \
  }                                                                                                \
  template <typename T>                                                                            \
  static __device__ __forceinline__ void ID##_load_b_t(T *f, const T *tile, int stride) {          \
    rudnn_load_b_t(f, tile, stride);                                                               \
  }                                                                                                \
  template <typename T>                                                                            \
  static __device__ __forceinline__ void ID##_mma(float *c, const T *a, const T *b) {              \
    MMA(c, (const unsigned *)a, (const unsigned *)b);                                              \
  }                                                                                                \
  static __device__ __forceinline__ void ID##_zero(float *c) { rudnn_zero_c(c); }                  \
  static __device__ __forceinline__ void ID##_store(float *tile, int stride, const float *c) {     \
    rudnn_store_c(tile, stride, c);                                                                \
  }
RUDNN_MATRIX_UNIT(rudnn_m16n8k16_f16, rudnn_mma_sync_f16)
RUDNN_MATRIX_UNIT(rudnn_m16n8k16_bf16, rudnn_mma_sync_bf16)

#endif
