/* What the compiled decode step and codec are built of: products with one or a few rows, norms, exp, sin.
 *
 * One source for every processor: it is compiled once per instruction set, each into a library of its own, and `LANES` is
 * the number of floats of one vector there. Everything is in float32; sums are in another order than torch's.
 *
 * A weight is read in the order that a product needs it, from memory, so its size decides the time of one row:
 *
 *   as float32   [columns][rows], which is how sonoro.nn.linear keeps it on a CPU: no copy
 *   as int8      [rows / BLOCK][columns][BLOCK] and a scale per row: a copy, a quarter of the size */

#ifndef SONORO_KERNELS_H
#define SONORO_KERNELS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define BLOCK 64             /* rows of an int8 weight that are summed together: as many vectors as hide a product's latency */
#define VECTORS (BLOCK / LANES)
#define SETS (LANES == 16 ? 2 : 1) /* of such sums, as many as registers hold */
#define PAIR 2                     /* vectors of a row that are summed together where several rows are */
#define FEW 4                      /* rows for which an int8 weight is widened once */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

#define EXPORT __attribute__((visibility("default")))

/* y = W x + bias: `weight` and `packed` are alternatives, the other is NULL; so may be `bias`. */
typedef struct {
    const float *weight;     /* [columns][rows] */
    const int8_t *packed;    /* [ceil(rows / BLOCK)][columns][BLOCK] */
    const float *scale;      /* [rows], of `packed` */
    const float *bias;       /* [rows] */
    int64_t rows, columns;
} Product;

static inline floats load(const float *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float *to, floats value) { memcpy(to, &value, sizeof value); }

/* `LANES` int8 as floats. By intrinsics where there are: gcc takes a conversion of vectors apart into single bytes. */
static inline floats widen(const int8_t *from) {
#if LANES == 16
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    bytes narrow;
    memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, ints), floats);
#endif
}

/* `vectors` of a block of an int8 weight, from `first` on, by `height` rows of `x`: `y` [height, BLOCK]. The order of the
 * sums does not depend on the height, so a row is the same in any batch. */
static inline __attribute__((always_inline)) void block_product(const int8_t *block, const int first, const int vectors,
                                                                 const float *x, int64_t columns, const int height, float *y) {
    floats sums[SETS][height][vectors];
    memset(sums, 0, sizeof sums);
    int64_t column = 0;
    for (block += first * LANES; column + SETS <= columns; column += SETS)
        for (int set = 0; set < SETS; set++, block += BLOCK)
            for (int v = 0; v < vectors; v++) {
                const floats weight = widen(block + v * LANES);
                for (int i = 0; i < height; i++) sums[set][i][v] += weight * x[i * columns + column + set];
            }
    for (; column < columns; column++, block += BLOCK)
        for (int v = 0; v < vectors; v++) {
            const floats weight = widen(block + v * LANES);
            for (int i = 0; i < height; i++) sums[0][i][v] += weight * x[i * columns + column];
        }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < vectors; v++)
            store(y + i * BLOCK + (first + v) * LANES, SETS == 2 ? sums[0][i][v] + sums[SETS - 1][i][v] : sums[0][i][v]);
}

/* `y` [count, rows] = W x + bias for `x` [count, columns]. The weight is read once, whatever the count. */
static inline void multiply(const Product *product, const float *x, int64_t count, float *y) {
    const int64_t rows = product->rows, columns = product->columns;
    const float *bias = product->bias;
    if (product->packed) {
        for (int64_t first = 0; first < rows; first += BLOCK) {
            const int8_t *block = product->packed + first * columns;
            const int64_t used = rows - first < BLOCK ? rows - first : BLOCK;
            for (int64_t i = 0; i < count;) {
                float sums[FEW * BLOCK];
                const int64_t taken = count - i < FEW ? 1 : FEW;
                if (taken == 1) block_product(block, 0, VECTORS, x + i * columns, columns, 1, sums);
                else
                    for (int v = 0; v < VECTORS; v += PAIR) block_product(block, v, PAIR, x + i * columns, columns, FEW, sums);
                for (int64_t end = i + taken, of = 0; i < end; i++, of++)
                    for (int64_t row = 0; row < used; row++)
                        y[i * rows + first + row] =
                            sums[of * BLOCK + row] * product->scale[first + row] + (bias ? bias[first + row] : 0);
            }
        }
        return;
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t row = 0; row < rows; row++) y[i * rows + row] = bias ? bias[row] : 0;
    int64_t column = 0;
    for (; column + 7 < columns; column += 8) {
        const float *w = product->weight + column * rows;
        for (int64_t i = 0; i < count; i++) {
            const float *of = x + i * columns + column;
            float *restrict to = y + i * rows;
            for (int64_t row = 0; row < rows; row++)
                to[row] += ((w[row] * of[0] + w[rows + row] * of[1]) + (w[2 * rows + row] * of[2] + w[3 * rows + row] * of[3]))
                         + ((w[4 * rows + row] * of[4] + w[5 * rows + row] * of[5])
                            + (w[6 * rows + row] * of[6] + w[7 * rows + row] * of[7]));
        }
    }
    for (; column < columns; column++)
        for (int64_t i = 0; i < count; i++) {
            const float *w = product->weight + column * rows, of = x[i * columns + column];
            float *restrict to = y + i * rows;
            for (int64_t row = 0; row < rows; row++) to[row] += w[row] * of;
        }
}

/* Products of many rows: a causal convolution of kernel `taps` over rows [., in], a linear layer if that is 1. The weight is
 * packed as [ceil(out / BLOCK)][taps * in][BLOCK], in float32 or in int8; a tile of it by TALL rows is summed in registers. */
#define TALL (LANES == 16 ? 12 : 6)

typedef struct {
    const float *weight;       /* one of these two; the other is NULL */
    const int8_t *packed;
    const float *scale, *bias; /* padded to blocks; `scale` of `packed` */
    float *history;            /* [slots, kept, in]: the rows before the next call's */
    int64_t in, out, taps, dilation, kept;
} Conv;

/* A tile: `out` [height, PAIR * LANES], the columns from `first` on, = bias + rows of `in` times the weight, plus what `out`
 * holds if `adds`. */
static inline __attribute__((always_inline)) void tile(const Conv *conv, int64_t first, const float *in, const int height,
                                                        const bool is_packed, float *out, bool adds) {
    floats sums[TALL][PAIR];
    const int64_t width = conv->in, used = conv->out - first;
    const float *weight = conv->weight;
    const int8_t *packed = conv->packed;
    int64_t at = first / BLOCK * BLOCK * conv->taps * width + first % BLOCK;
    memset(sums, 0, sizeof sums);
    for (int64_t tap = 0; tap < conv->taps; tap++) {
        const float *rows = in + tap * conv->dilation * width;
        for (int64_t c = 0; c < width; c++, at += BLOCK) {
            floats w[PAIR];
            for (int v = 0; v < PAIR; v++) w[v] = is_packed ? widen(packed + at + v * LANES) : load(weight + at + v * LANES);
            for (int i = 0; i < height; i++)
                for (int v = 0; v < PAIR; v++) sums[i][v] += w[v] * rows[i * width + c];
        }
    }
    for (int i = 0; i < height; i++) {
        float *to = out + i * conv->out, row[PAIR * LANES];
        for (int v = 0; v < PAIR; v++) {
            const floats bias = load(conv->bias + first + v * LANES);
            const floats sum = is_packed ? sums[i][v] * load(conv->scale + first + v * LANES) + bias : sums[i][v] + bias;
            if (used >= PAIR * LANES) store(to + v * LANES, adds ? load(to + v * LANES) + sum : sum);
            else store(row + v * LANES, sum);
        }
        for (int64_t n = 0; n < used && used < PAIR * LANES; n++) to[n] = adds ? to[n] + row[n] : row[n];
    }
}

/* `out` [rows, conv->out] of `in` [(taps - 1) * dilation + rows, conv->in]; added to what it holds if `adds`. */
static inline __attribute__((always_inline)) void convolve_as(const Conv *conv, const float *in, int64_t rows, float *out,
                                                               bool adds, const bool is_packed) {
    for (int64_t first = 0; first < conv->out; first += PAIR * LANES)
        for (int64_t row = 0; row < rows;) {
            const float *from = in + row * conv->in;
            float *to = out + row * conv->out + first;
            const int64_t left = rows - row;
            if (left >= TALL) tile(conv, first, from, TALL, is_packed, to, adds), row += TALL;
            else if (left >= 4) tile(conv, first, from, 4, is_packed, to, adds), row += 4;
            else if (left >= 2) tile(conv, first, from, 2, is_packed, to, adds), row += 2;
            else tile(conv, first, from, 1, is_packed, to, adds), row += 1;
        }
}

static inline void convolve(const Conv *conv, const float *in, int64_t rows, float *out, bool adds) {
    if (conv->packed) convolve_as(conv, in, rows, out, adds, true);
    else convolve_as(conv, in, rows, out, adds, false);
}

static inline float dot(const float *a, const float *b, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* `y` = `x` over its root mean square, times `weight`; `y` may be `x`. */
static inline void rms_norm(const float *x, const float *weight, float eps, int64_t count, float *y) {
    const float factor = 1 / sqrtf(dot(x, x, count) / (float)count + eps);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = x[i] * factor * weight[i];
}

/* `y` = `x` less its mean, over its standard deviation, times `weight`, plus `bias`; `y` may be `x`. */
static inline void layer_norm(const float *x, const float *weight, const float *bias, float eps, int64_t count, float *y) {
    float sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i];
    const float mean = sum / (float)count;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < count; i++) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1 / sqrtf(square / (float)count + eps);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

/* `y` [rows, count]: the LayerNorm of each row of `x`, or without a `bias` its RMS norm. */
static inline void norm_rows(const float *x, int64_t rows, const float *weight, const float *bias, float eps, int64_t count,
                             float *y) {
    for (int64_t i = 0; i < rows * count; i += count) {
        if (bias) layer_norm(x + i, weight, bias, eps, count, y + i);
        else rms_norm(x + i, weight, eps, count, y + i);
    }
}

static inline void add(float *restrict to, const float *restrict from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

/* e^x, within 2 units in the last place, for compilers to vectorise: 2^n times a polynomial of the rest, |rest| < ln 2 / 2. */
static inline float exp_of(float x) {
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
    const float shifted = bounded * 1.44269504f + rounder, whole = shifted - rounder;
    const float rest = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits; /* not from `whole` by a cast, which is undefined for NaN */
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

static inline void silu(float *x, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) x[i] = x[i] / (1 + exp_of(-x[i]));
}

/* `y` [count] = silu of the first half of `x` [2 * count], times the second. */
static inline void gate(const float *x, int64_t count, float *restrict y) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = x[i] / (1 + exp_of(-x[i])) * x[count + i];
}

/* GELU in its tanh form: x * (1 + tanh z) / 2 is x / (1 + e^(-2 z)). */
static inline void gelu_tanh(float *x, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] / (1 + exp_of(-1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}

/* Rotary embedding of one head `x` [D], whose pairs are (i, i + D / 2); `sin` is negated in its first half. */
static inline void rotate(float *x, const float *cos, const float *sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] + high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

/* Softmax of `scores` [count] in place. */
static inline void softmax(float *scores, int64_t count) {
    float most = scores[0], sum = 0;
    for (int64_t i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += scores[i] = exp_of(scores[i] - most);
    const float factor = 1 / sum;
    for (int64_t i = 0; i < count; i++) scores[i] *= factor;
}

/* sin(x)^2, within 3e-7 for |x| < 1e4 and 2e-6 for |x| < 1e5: sine of the rest after whole multiples of pi. */
static inline float sin_squared(float x) {
    const float rounder = 12582912.0f;
    const float whole = (x * 0.318309886f + rounder) - rounder;
    const float rest = ((x - whole * 3.140625f) - whole * 9.67502593994140625e-4f) - whole * 1.509957990978376432e-7f;
    const float square = rest * rest;
    float sum = -2.3889859e-8f;
    sum = sum * square + 2.7525562e-6f;
    sum = sum * square - 1.9840874e-4f;
    sum = sum * square + 8.3333310e-3f;
    sum = sum * square - 1.6666667e-1f;
    const float sine = sum * square * rest + rest;
    return sine * sine;
}

/* Flush denormals to zero, which a processor multiplies a hundred times slower; returns what was set before. */
static inline unsigned flush_denormals(void) {
#if defined(__SSE2__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

static inline void restore_denormals(unsigned before) {
#if defined(__SSE2__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

#endif
