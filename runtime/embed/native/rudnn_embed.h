/* rudnn_embed: what the headers of exported operators share: status codes and argument checks.
 *
 * Plain C99 and C++. An operator's function returns 0, one of the codes below, or the status of the
 * kernel or the driver, for which rudnn_last_error() may have a text: rudnn_host.h, rudnn_cuda.h and
 * so on declare that function, and include this file.
 */
#ifndef RUDNN_EMBED_H
#define RUDNN_EMBED_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RUDNN_OK 0
#define RUDNN_NULL_POINTER (-101) /* NULL for a tensor that has elements */
#define RUDNN_NEGATIVE_DIM (-102) /* a dim below 0 */
#define RUDNN_BAD_STRIDE (-103)   /* a last stride other than 1, or an output's of 0 */
#define RUDNN_REQUIREMENT (-104)  /* a requirement listed in the operator's header does not hold */
#define RUDNN_BAD_INDEX (-105)    /* a value of an index tensor is out of its range */
#define RUDNN_NO_MEMORY (-106)    /* no memory for the workspace */

#define RUDNN_MAX(a, b) ((a) > (b) ? (a) : (b))
#define RUDNN_MIN(a, b) ((a) < (b) ? (a) : (b))

/* Division that rounds down, and what it leaves, of the divisor's sign; C's own round to 0. */
#define RUDNN_FLOORDIV(a, b) rudnn_floordiv((a), (b))
#define RUDNN_FLOORMOD(a, b) rudnn_floormod((a), (b))

static inline int64_t rudnn_floordiv(int64_t a, int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t rudnn_floormod(int64_t a, int64_t b) {
    int64_t rest = a % b;
    return rest != 0 && (a < 0) != (b < 0) ? rest + b : rest;
}

/* The code's meaning, for messages. */
static inline const char *rudnn_status_text(int32_t status) {
    switch (status) {
    case RUDNN_OK: return "success";
    case RUDNN_NULL_POINTER: return "NULL for a tensor that has elements";
    case RUDNN_NEGATIVE_DIM: return "a negative dim";
    case RUDNN_BAD_STRIDE: return "a stride the kernel cannot use";
    case RUDNN_REQUIREMENT: return "a requirement of the operator does not hold";
    case RUDNN_BAD_INDEX: return "an index out of range";
    case RUDNN_NO_MEMORY: return "no memory for the workspace";
    default: return rudnn_last_error();
    }
}

/* How a kernel takes a float scalar: its bits in the low half. */
static inline int64_t rudnn_float_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Elements of a tensor. */
static inline int64_t rudnn_count(const int64_t *shape, int rank) {
    int64_t count = 1;
    int i;
    for (i = 0; i < rank; ++i) count *= shape[i];
    return count;
}

/* Check a tensor and write its strides (in elements) to `out`; `strides` NULL means row-major.
 * `unit`: the kernel wants a last stride of 1. `written`: elements must not share memory, of which
 * strides of 0 are noticed. */
static inline int32_t rudnn_tensor(const void *data, const int64_t *shape, int rank,
                                   const int64_t *strides, int unit, int written, int64_t *out) {
    int64_t step = 1, count = rudnn_count(shape, rank);
    int i;
    if (!data && count > 0) return RUDNN_NULL_POINTER;
    for (i = rank - 1; i >= 0; --i) {
        out[i] = strides ? strides[i] : step;
        step *= shape[i] > 0 ? shape[i] : 1;
        if (count == 0 || shape[i] == 1) continue;
        if (written && out[i] == 0) return RUDNN_BAD_STRIDE;
        if (unit && i == rank - 1 && out[i] != 1) return RUDNN_BAD_STRIDE;
    }
    return RUDNN_OK;
}

/* Check that the integers of a tensor lie in 0 ... below - 1. `bytes` is the size of one, 4 or 8,
 * `is_signed` its kind. */
static inline int32_t rudnn_indices(const void *data, const int64_t *shape, int rank,
                                    const int64_t *strides, int bytes, int is_signed,
                                    int64_t below) {
    const char *base = (const char *)data;
    int64_t count = rudnn_count(shape, rank), n;
    for (n = 0; n < count; ++n) {
        int64_t rest = n, offset = 0, value;
        int i;
        for (i = rank - 1; i >= 0; --i) {
            offset += rest % shape[i] * strides[i];
            rest /= shape[i];
        }
        if (bytes == 8) {
            memcpy(&value, base + offset * 8, 8);
        } else if (is_signed) {
            int32_t narrow;
            memcpy(&narrow, base + offset * 4, 4);
            value = narrow;
        } else {
            uint32_t narrow;
            memcpy(&narrow, base + offset * 4, 4);
            value = narrow;
        }
        if (value < 0 || value >= below) return RUDNN_BAD_INDEX;
    }
    return RUDNN_OK;
}

#ifdef __cplusplus
}
#endif
#endif
