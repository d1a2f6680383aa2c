/* Transformer layers with causal sliding-window attention, of a codec, over rows that are columns of time, [T, C]; and how
 * a codec's layers keep their left context by slot. Follows sonoro.nn.window, sonoro.nn.gelu and sonoro.nn.history. */

#ifndef SONORO_WINDOW_H
#define SONORO_WINDOW_H

#include "kernels.h"

/* `gate_up` has twice as many outputs as `down` has inputs, for SwiGLU, or as many, for GELU in its tanh form. */
typedef struct {
    Conv qkv, out, gate_up, down;
    const float *input_norm, *inner_norm, *out_scale, *down_scale, *input_bias, *inner_bias; /* biases: of LayerNorm */
    float *ring; /* [slots, window - 1, 2 * kv heads * D]: rotated keys and values, position p at p % (window - 1) */
} WindowLayer;

typedef struct {
    const WindowLayer *layers;
    const float *frequencies; /* of the rotary embedding, [D / 2] */
    const int64_t *seen;      /* by slot: columns so far; the caller advances it */
    int64_t count, width, heads, kv_heads, head_width, window;
    float eps;
} Windows;

/* The kept rows of `slot` into the head of `joined`; the caller writes `rows` rows of `width` behind them. */
static inline float *join(const float *history, int64_t kept, int64_t width, int64_t slot, float *joined) {
    memcpy(joined, history + slot * kept * width, kept * width * sizeof *joined);
    return joined + kept * width;
}

static inline void keep(float *history, int64_t kept, int64_t width, int64_t slot, const float *joined, int64_t rows) {
    memcpy(history + slot * kept * width, joined + rows * width, kept * width * sizeof *joined);
}

/* `conv` of `x` [rows, conv->in] behind what it kept, by way of `joined`. */
static inline void convolve_kept(const Conv *conv, const float *x, int64_t rows, int64_t slot, float *joined, float *y) {
    float *own = join(conv->history, conv->kept, conv->in, slot, joined);
    memcpy(own, x, rows * conv->in * sizeof *x);
    keep(conv->history, conv->kept, conv->in, slot, joined, rows);
    convolve(conv, joined, rows, y, false);
}

/* Attention of `rows` new rows `qkv` to the window before each; `pairs` [window - 1 + rows, 2 * kv heads * D] is room. */
static inline void attend_window(const Windows *windows, const WindowLayer *layer, float *qkv, int64_t rows, int64_t slot,
                                 float *pairs, float *out) {
    const int64_t width = windows->head_width, heads = windows->heads, kv_heads = windows->kv_heads, group = heads / kv_heads;
    const int64_t pair = 2 * kv_heads * width, wide = heads * width + pair, length = windows->window - 1;
    const int64_t seen = windows->seen[slot];
    float *ring = layer->ring + slot * length * pair, scores[windows->window], cos[width], sin[width];
    const float scale = 1 / sqrtf((float)width);
    for (int64_t back = length; back > 0; back--)
        if (seen >= back) memcpy(pairs + (length - back) * pair, ring + (seen - back) % length * pair, pair * sizeof *ring);
    for (int64_t i = 0; i < rows; i++) {
        float *row = qkv + i * wide;
        for (int64_t d = 0; d < width / 2; d++) {
            const float angle = (float)(seen + i) * windows->frequencies[d];
            cos[d] = cos[d + width / 2] = cosf(angle);
            sin[d + width / 2] = sinf(angle);
            sin[d] = -sin[d + width / 2];
        }
        for (int64_t head = 0; head < heads + kv_heads; head++) rotate(row + head * width, cos, sin, width);
        memcpy(pairs + (length + i) * pair, row + heads * width, pair * sizeof *row);
    }
    for (int64_t i = rows > length ? rows - length : 0; i < rows; i++)
        memcpy(ring + (seen + i) % length * pair, pairs + (length + i) * pair, pair * sizeof *ring);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t first = seen + i < length ? length - seen : i, count = length + i + 1 - first;
        for (int64_t head = 0; head < heads; head++) {
            const float *query = qkv + i * wide + head * width, *keys = pairs + first * pair + head / group * width;
            const float *values = keys + kv_heads * width;
            float *restrict to = out + (i * heads + head) * width;
            for (int64_t k = 0; k < count; k++) scores[k] = scale * dot(query, keys + k * pair, width);
            softmax(scores, count);
            memset(to, 0, width * sizeof *to);
            for (int64_t k = 0; k < count; k++)
                for (int64_t d = 0; d < width; d++) to[d] += scores[k] * values[k * pair + d];
        }
    }
}

/* `x` [rows, width] += `scale` by channel * `y`. */
static inline void add_scaled(float *restrict x, const float *scale, const float *y, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t c = 0; c < width; c++) x[i * width + c] += scale[c] * y[i * width + c];
}

/* All layers: `x` [rows, width] in place. `normed`, `wide` and `other` are room. */
static inline void run_windows(const Windows *windows, float *x, int64_t rows, int64_t slot, float *normed, float *wide,
                               float *other) {
    const int64_t width = windows->width;
    for (int64_t index = 0; index < windows->count; index++) {
        const WindowLayer *layer = windows->layers + index;
        const int64_t inner = layer->down.in;
        norm_rows(x, rows, layer->input_norm, layer->input_bias, windows->eps, width, normed);
        convolve(&layer->qkv, normed, rows, wide, false);
        attend_window(windows, layer, wide, rows, slot, other, normed);
        convolve(&layer->out, normed, rows, wide, false);
        add_scaled(x, layer->out_scale, wide, rows, width);
        norm_rows(x, rows, layer->inner_norm, layer->inner_bias, windows->eps, width, normed);
        convolve(&layer->gate_up, normed, rows, wide, false);
        if (layer->gate_up.out == inner) gelu_tanh(wide, rows * inner);
        else
            for (int64_t i = 0; i < rows; i++) gate(wide + 2 * i * inner, inner, other + i * inner);
        convolve(&layer->down, layer->gate_up.out == inner ? wide : other, rows, normed, false);
        add_scaled(x, layer->down_scale, normed, rows, width);
    }
}

#endif
