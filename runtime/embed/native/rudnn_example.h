/* rudnn_example: what the example hosts of exported operators share: inputs, files, printing.
 * An app needs none of it.
 */
#ifndef RUDNN_EXAMPLE_H
#define RUDNN_EXAMPLE_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum {
    RUDNN_F16, RUDNN_BF16, RUDNN_F32, RUDNN_F64, RUDNN_BOOL,
    RUDNN_I8, RUDNN_I16, RUDNN_I32, RUDNN_I64, RUDNN_U8, RUDNN_U16, RUDNN_U32, RUDNN_U64
} rudnn_dtype;

static const int rudnn_dtype_bytes[] = {2, 2, 4, 8, 1, 1, 2, 4, 8, 1, 2, 4, 8};

static inline void rudnn_die(const char *what, const char *which) {
    fprintf(stderr, "%s: %s\n", what, which);
    exit(2);
}

/* The number in the argument NAME=NUMBER if `arg` is that, else the former value. */
static inline double rudnn_number(const char *arg, const char *name, double former, int *used) {
    size_t n = strlen(name);
    char *end;
    double value;
    if (strncmp(arg, name, n) != 0 || arg[n] != '=') return former;
    value = strtod(arg + n + 1, &end);
    if (end == arg + n + 1 || *end) rudnn_die("needs a number", arg);
    *used = 1;
    return value;
}

/* The same for a whole number of at least 0. */
static inline int64_t rudnn_size(const char *arg, const char *name, int64_t former, int *used) {
    size_t n = strlen(name);
    char *end;
    long long value;
    if (strncmp(arg, name, n) != 0 || arg[n] != '=') return former;
    value = strtoll(arg + n + 1, &end, 10);
    if (end == arg + n + 1 || *end || value < 0) rudnn_die("needs a size of at least 0", arg);
    *used = 1;
    return value;
}

/* The file in the argument NAME=@FILE if `arg` is that, else the former value. */
static inline const char *rudnn_file(const char *arg, const char *name, const char *former,
                                     int *used) {
    size_t n = strlen(name);
    if (strncmp(arg, name, n) != 0 || arg[n] != '=' || arg[n + 1] != '@') return former;
    *used = 1;
    return arg + n + 2;
}

/* Element i of example tensor number `seed`, as 64 random bits (splitmix64). */
static inline uint64_t rudnn_random(uint64_t seed, uint64_t i) {
    uint64_t z = ((seed << 32) + i) * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* A multiple of 1/128 as f16 bits; it is exact. */
static inline uint16_t rudnn_to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value == 0) return (uint16_t)(bits >> 16);
    return (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10)));
}

static inline double rudnn_from_f16(uint16_t half) {
    int exponent = half >> 10 & 31;
    double mantissa = half & 1023, value;
    int i;
    if (exponent == 31) {
        value = mantissa != 0 ? strtod("nan", NULL) : strtod("inf", NULL);
    } else {
        value = exponent ? mantissa + 1024 : mantissa;
        for (i = exponent ? exponent : 1; i < 25; ++i) value /= 2;
        for (i = 25; i < exponent; ++i) value *= 2;
    }
    return half & 0x8000 ? -value : value;
}

/* Element i of a contiguous array as a number. */
static inline double rudnn_value(const void *data, rudnn_dtype dtype, int64_t i) {
    float narrow;
    uint32_t bits;
    switch (dtype) {
    case RUDNN_F16: return rudnn_from_f16(((const uint16_t *)data)[i]);
    case RUDNN_BF16:
        bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        memcpy(&narrow, &bits, 4);
        return narrow;
    case RUDNN_F32: return ((const float *)data)[i];
    case RUDNN_F64: return ((const double *)data)[i];
    case RUDNN_I8: return ((const int8_t *)data)[i];
    case RUDNN_I16: return ((const int16_t *)data)[i];
    case RUDNN_I32: return ((const int32_t *)data)[i];
    case RUDNN_I64: return (double)((const int64_t *)data)[i];
    case RUDNN_U16: return ((const uint16_t *)data)[i];
    case RUDNN_U32: return ((const uint32_t *)data)[i];
    case RUDNN_U64: return (double)((const uint64_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

/* Fill an array: floats in -1 ... 1 that are exact in every float type, integers in 0 ... below - 1
 * (8 if below is 0). */
static inline void rudnn_fill(void *data, rudnn_dtype dtype, int64_t count, int seed,
                              int64_t below) {
    int64_t i;
    for (i = 0; i < count; ++i) {
        uint64_t z = rudnn_random((uint64_t)seed, (uint64_t)i);
        float value = (float)((int)(z >> 56) - 128) / 128;
        int64_t whole = (int64_t)((z >> 33) % (uint64_t)(below > 0 ? below : 8));
        uint32_t bits;
        memcpy(&bits, &value, 4);
        switch (dtype) {
        case RUDNN_F16: ((uint16_t *)data)[i] = rudnn_to_f16(value); break;
        case RUDNN_BF16: ((uint16_t *)data)[i] = (uint16_t)(bits >> 16); break;
        case RUDNN_F32: ((float *)data)[i] = value; break;
        case RUDNN_F64: ((double *)data)[i] = value; break;
        case RUDNN_BOOL: ((uint8_t *)data)[i] = (uint8_t)(z >> 63); break;
        case RUDNN_I8: case RUDNN_U8: ((uint8_t *)data)[i] = (uint8_t)whole; break;
        case RUDNN_I16: case RUDNN_U16: ((uint16_t *)data)[i] = (uint16_t)whole; break;
        case RUDNN_I32: case RUDNN_U32: ((uint32_t *)data)[i] = (uint32_t)whole; break;
        default: ((int64_t *)data)[i] = whole;
        }
    }
}

/* A new array. One element more than needed, so that an empty one is not NULL. */
static inline void *rudnn_array(rudnn_dtype dtype, int64_t count) {
    void *data = calloc((size_t)count + 1, (size_t)rudnn_dtype_bytes[dtype]);
    if (!data) rudnn_die("out of memory", "an array");
    return data;
}

/* An input: the raw little-endian content of a file, or example values where `file` is NULL. */
static inline void *rudnn_input(const char *name, rudnn_dtype dtype, int64_t count, int seed,
                                int64_t below, const char *file) {
    void *data = rudnn_array(dtype, count);
    size_t bytes = (size_t)count * (size_t)rudnn_dtype_bytes[dtype];
    FILE *stream;
    if (!file) {
        rudnn_fill(data, dtype, count, seed, below);
        return data;
    }
    stream = fopen(file, "rb");
    if (!stream) rudnn_die("cannot read", file);
    if (fread(data, 1, bytes, stream) != bytes || fgetc(stream) != EOF)
        rudnn_die("the file's size does not fit the shape of", name);
    fclose(stream);
    return data;
}

/* Print an output, and write it raw to FOLDER/NAME.bin if there is a folder. The last figure is
 * FNV-1a of its bytes. */
static inline void rudnn_output(const char *name, rudnn_dtype dtype, const void *data,
                                int64_t count, const char *folder) {
    size_t bytes = (size_t)count * (size_t)rudnn_dtype_bytes[dtype], b;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    double sum = 0;
    int64_t i;
    printf("%s[0:%d] =", name, (int)(count < 4 ? count : 4));
    for (i = 0; i < count; ++i) {
        double value = rudnn_value(data, dtype, i);
        if (i < 4) printf(" %.7g", value);
        sum += value;
    }
    for (b = 0; b < bytes; ++b)
        hash = (hash ^ ((const unsigned char *)data)[b]) * UINT64_C(0x100000001b3);
    printf("; %" PRId64 " elements, sum %.9g, hash %016" PRIx64 "\n", count, sum, hash);
    if (folder) {
        char path[4096];
        FILE *stream;
        if (snprintf(path, sizeof path, "%s/%s.bin", folder, name) >= (int)sizeof path)
            rudnn_die("the path is too long", folder);
        stream = fopen(path, "wb");
        if (!stream || fwrite(data, 1, bytes, stream) != bytes || fclose(stream))
            rudnn_die("cannot write", path);
    }
}

#endif
