/* Half precision: arithmetic in float, rounded to nearest even. */
#ifndef RUDNN_SHIM_FP16
#define RUDNN_SHIM_FP16
#include "shim.h"

static inline float rudnn_half_to_float(unsigned short h) {
  unsigned sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3FFu;
  float value;
  if (exponent == 31)
    value = rudnn_bits<float>(sign | 0x7F800000u | mantissa << 13);
  else if (exponent)
    value = rudnn_bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  else
    value = rudnn_bits<float>(sign | rudnn_bits<unsigned>((float)mantissa * 0x1p-24f));
  return value;
}
static inline unsigned short rudnn_float_to_half(float x) {
  unsigned bits = rudnn_bits<unsigned>(x), sign = bits >> 16 & 0x8000u,
           magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7FFF;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00; /* 65520 and more */
  if (magnitude < 0x38800000u) /* denormal: an integer multiple of 2**-24, rounded by rintf */
    return sign | (unsigned)rintf(rudnn_bits<float>(magnitude) * 0x1p24f);
  magnitude += 0xFFFu + (magnitude >> 13 & 1);
  return sign | (magnitude - 0x38000000u) >> 13;
}

struct __half {
  unsigned short bits;
  __half() = default;
  template <typename T>
  __half(T x) : bits(rudnn_float_to_half((float)x)) {}
  operator float() const { return rudnn_half_to_float(bits); }
};
typedef __half half;
struct __half2 {
  half x, y;
};
#define RUDNN_HALF(OP) \
  static inline half operator OP(half a, half b) { return half((float)a OP(float) b); }
RUDNN_HALF(+)
RUDNN_HALF(-) RUDNN_HALF(*) RUDNN_HALF(/)
#undef RUDNN_HALF
    static inline bool __hgt(half a, half b) {
  return (float)a > (float)b;
}
static inline bool __hlt(half a, half b) { return (float)a < (float)b; }
static inline float __half2float(half x) { return (float)x; }
static inline half __float2half(float x) { return half(x); }
static inline half __float2half_rn(float x) { return half(x); }
static inline half __short_as_half(short x) {
  half h;
  h.bits = (unsigned short)x;
  return h;
}
static inline half __ushort_as_half(unsigned short x) {
  half h;
  h.bits = x;
  return h;
}
static inline unsigned short __half_as_ushort(half x) { return x.bits; }
static inline half hsqrt(half x) { return half(sqrtf((float)x)); }
static inline half hfloor(half x) { return half(floorf((float)x)); }
static inline half __habs(half x) {
  x.bits &= 0x7FFF;
  return x;
}
static inline bool __hisnan(half x) { return (x.bits & 0x7FFF) > 0x7C00; }
#endif
