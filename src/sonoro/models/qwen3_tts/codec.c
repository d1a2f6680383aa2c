/* A codec's decoder as one call: frames of codes to samples, as decoder.py, which is the reference.
 *
 * It reads and writes the same left context by slot (sonoro.nn.history), so that either may decode the next chunk. Rows are
 * columns of time, [T, C]. A layer with left context writes its input behind the rows that it kept: `joined`. */

#include "window.h"

/* Snake activation: x + scale * sin(rate * x)^2 by channel. */
typedef struct {
    const float *rate, *scale;
} Snake;

/* Upsample by a transposed convolution, here one product with `rate` outputs a row, then a ConvNeXt block. */
typedef struct {
    Conv up, inner, outer;
    const float *taps, *bias, *norm, *norm_bias, *gamma; /* depthwise convolution [taps, C] */
    float *history;
    int64_t rate, kept;
} UpLayer;

typedef struct {
    Snake first, second;
    Conv conv, point;
} Unit;

typedef struct {
    Snake snake;
    Conv up;
    Unit units[3];
    int64_t rate;
} Block;

typedef struct {
    const float *tables; /* [books, codes, width] of the latent */
    int64_t books, codes;
    Conv before, input, output, first, last;
    Windows windows;
    const float *norm;
    const UpLayer *ups;
    const Block *blocks;
    Snake snake;
    int64_t *seen;
    float *room[4];
    int64_t up_count, block_count;
    float norm_eps;
} Codec;

EXPORT int64_t sonoro_codec_bytes(void) { return sizeof(Codec); }

static void activate(const Snake *snake, const float *x, int64_t rows, int64_t width, float *y) {
    for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t c = 0; c < width; c++)
            y[i * width + c] = x[i * width + c] + snake->scale[c] * sin_squared(snake->rate[c] * x[i * width + c]);
}

/* `conv` of snake(x) behind what it kept, by way of `joined`. */
static void convolve_snake(const Conv *conv, const Snake *snake, const float *x, int64_t rows, int64_t slot, float *joined,
                           float *y) {
    activate(snake, x, rows, conv->in, join(conv->history, conv->kept, conv->in, slot, joined));
    keep(conv->history, conv->kept, conv->in, slot, joined, rows);
    convolve(conv, joined, rows, y, false);
}

/* Upsample `x` [rows, C] in place to [rows * rate, C]; returns the new number of rows. */
static int64_t run_up(const Codec *codec, const UpLayer *layer, float *x, int64_t rows, int64_t slot) {
    const int64_t width = layer->up.in, taps = layer->kept + 1, count = rows * layer->rate;
    float *joined = codec->room[1], *y = codec->room[2], *inner = codec->room[3];
    memcpy(joined, x, rows * width * sizeof *x);
    convolve(&layer->up, joined, rows, x, false);
    float *own = join(layer->history, layer->kept, width, slot, joined);
    memcpy(own, x, count * width * sizeof *x);
    keep(layer->history, layer->kept, width, slot, joined, count);
    for (int64_t i = 0; i < count; i++) {
        float *restrict to = y + i * width;
        memcpy(to, layer->bias, width * sizeof *to);
        for (int64_t tap = 0; tap < taps; tap++)
            for (int64_t c = 0; c < width; c++) to[c] += layer->taps[tap * width + c] * joined[(i + tap) * width + c];
        layer_norm(to, layer->norm, layer->norm_bias, codec->norm_eps, width, to);
    }
    convolve(&layer->inner, y, count, inner, false);
    for (int64_t i = 0; i < count * layer->inner.out; i++) inner[i] *= 0.5f * (1 + erff(inner[i] * 0.707106781f));
    convolve(&layer->outer, inner, count, y, false);
    add_scaled(x, layer->gamma, y, count, width);
    return count;
}

/* One block of the vocoder: `x` [rows, C] to [rows * rate, C / 2], in place. */
static int64_t run_block(const Codec *codec, const Block *block, float *x, int64_t rows, int64_t slot) {
    const int64_t count = rows * block->rate, width = block->up.out / block->rate;
    float *joined = codec->room[1], *y = codec->room[2];
    convolve_snake(&block->up, &block->snake, x, rows, slot, joined, x);
    for (int unit = 0; unit < 3; unit++) {
        const Unit *of = block->units + unit;
        convolve_snake(&of->conv, &of->first, x, count, slot, joined, y);
        activate(&of->second, y, count, width, y);
        convolve(&of->point, y, count, x, true);
    }
    return count;
}

/* The next `rows` of `frames` [rows, books] of a slot as `samples`. */
static void decode(const Codec *codec, const int64_t *frames, int64_t rows, int64_t slot, float *samples) {
    float *x = codec->room[0], *joined = codec->room[1], *y = codec->room[2];
    const int64_t latent = codec->before.in;
    memset(y, 0, rows * latent * sizeof *y);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t book = 0; book < codec->books; book++)
            add(y + i * latent, codec->tables + (book * codec->codes + frames[i * codec->books + book]) * latent, latent);
    convolve_kept(&codec->before, y, rows, slot, joined, y);
    convolve(&codec->input, y, rows, x, false);
    run_windows(&codec->windows, x, rows, slot, joined, y, codec->room[3]);
    norm_rows(x, rows, codec->norm, NULL, codec->windows.eps, codec->windows.width, x);
    codec->seen[slot] += rows;
    convolve(&codec->output, x, rows, y, false);
    memcpy(x, y, rows * codec->output.out * sizeof *x);
    int64_t count = rows;
    for (int64_t i = 0; i < codec->up_count; i++) count = run_up(codec, codec->ups + i, x, count, slot);
    convolve_kept(&codec->first, x, count, slot, joined, x);
    for (int64_t i = 0; i < codec->block_count; i++) count = run_block(codec, codec->blocks + i, x, count, slot);
    const Conv *last = &codec->last;
    activate(&codec->snake, x, count, last->in, join(last->history, last->kept, last->in, slot, joined));
    keep(last->history, last->kept, last->in, slot, joined, count);
    for (int64_t i = 0; i < count; i++) {
        /* One channel: the rows of all taps are side by side. */
        const float sample = last->bias[0] + dot(joined + i * last->in, last->weight, last->taps * last->in);
        samples[i] = sample < -1 ? -1 : sample > 1 ? 1 : sample;
    }
}

/* Decode `frames` [count, rows, books] of `slots` [count] to `samples` [count, rows * hop], advancing their history. */
EXPORT void sonoro_decode(const Codec *codec, const int64_t *frames, const int64_t *slots, int64_t count, int64_t rows,
                          int64_t hop, float *samples) {
    const unsigned before = flush_denormals();
    for (int64_t i = 0; i < count; i++)
        decode(codec, frames + i * rows * codec->books, rows, slots[i], samples + i * rows * hop);
    restore_denormals(before);
}
