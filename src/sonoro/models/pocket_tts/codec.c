/* A codec's decoder as one call: latents to samples, by convolutions with ELU. decoder.py is the
 * reference.
 *
 * It reads and writes the same left context by slot (sonoro.nn.history), so that either may decode the next chunk. Rows are
 * columns of time, [T, C]. A layer with left context writes its input behind the rows that it kept: `joined`. */

#include "window.h"

/* Upsample by a transposed convolution, here one product with `rate` outputs a row, then a residual unit. */
typedef struct {
    Conv up, conv, point;
    int64_t rate;
} EluBlock;

typedef struct {
    Conv input, first, last;
    const float *taps; /* [2, rate, width]: of the depthwise upsampling, for a row and the one before */
    float *before;     /* [slots, width]: its row before the next call's */
    Windows windows;
    const EluBlock *blocks;
    int64_t *seen;
    float *began; /* [slots]: 1 once a slot has begun; its first `fade` samples rise */
    float *room[4];
    int64_t rate, block_count, fade;
} LatentCodec;

EXPORT int64_t sonoro_latent_codec_bytes(void) { return sizeof(LatentCodec); }

/* x, or e^x - 1 below 0. */
static void elu(const float *x, int64_t count, float *y) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = x[i] > 0 ? x[i] : exp_of(x[i]) - 1;
}

/* `conv` of elu(x) behind what it kept, by way of `joined`. */
static void convolve_elu(const Conv *conv, const float *x, int64_t rows, int64_t slot, float *joined, float *y) {
    elu(x, rows * conv->in, join(conv->history, conv->kept, conv->in, slot, joined));
    keep(conv->history, conv->kept, conv->in, slot, joined, rows);
    convolve(conv, joined, rows, y, false);
}

/* `y` [rows, width] upsampled by channel: `x` [rows * rate, width]. */
static void upsample(const LatentCodec *codec, const float *y, int64_t rows, int64_t slot, float *restrict x) {
    const int64_t width = codec->windows.width;
    float *before = codec->before + slot * width;
    for (int64_t i = 0; i < rows; i++) {
        const float *row = y + i * width, *last = i ? row - width : before;
        for (int64_t j = 0; j < codec->rate; j++) {
            const float *now = codec->taps + j * width, *then = now + codec->rate * width;
#pragma omp simd
            for (int64_t c = 0; c < width; c++) x[(i * codec->rate + j) * width + c] = row[c] * now[c] + last[c] * then[c];
        }
    }
    memcpy(before, y + (rows - 1) * width, width * sizeof *y);
}

/* One block: `x` [rows, C] to [rows * rate, C / 2], in place. */
static int64_t run_block(const LatentCodec *codec, const EluBlock *block, float *x, int64_t rows, int64_t slot) {
    const int64_t count = rows * block->rate;
    float *joined = codec->room[1], *y = codec->room[2];
    convolve_elu(&block->up, x, rows, slot, joined, x);
    convolve_elu(&block->conv, x, count, slot, joined, y);
    elu(y, count * block->conv.out, y);
    convolve(&block->point, y, count, x, true);
    return count;
}

/* The next `rows` of `latents` [rows, D] of a slot as `samples` [rows * hop]. */
static void decode(const LatentCodec *codec, const float *latents, int64_t rows, int64_t slot, int64_t hop, float *samples) {
    float *x = codec->room[0], *joined = codec->room[1], *y = codec->room[2];
    const Conv *last = &codec->last;
    convolve(&codec->input, latents, rows, y, false);
    upsample(codec, y, rows, slot, x);
    int64_t count = rows * codec->rate;
    run_windows(&codec->windows, x, count, slot, joined, y, codec->room[3]);
    codec->seen[slot] += count;
    convolve_kept(&codec->first, x, count, slot, joined, x);
    for (int64_t i = 0; i < codec->block_count; i++) count = run_block(codec, codec->blocks + i, x, count, slot);
    elu(x, count * last->in, join(last->history, last->kept, last->in, slot, joined));
    keep(last->history, last->kept, last->in, slot, joined, count);
    /* One channel: the rows of all taps are side by side. */
    for (int64_t i = 0; i < count; i++) samples[i] = last->bias[0] + dot(joined + i * last->in, last->weight, last->taps * last->in);
    if (!codec->began[slot])
        for (int64_t i = 0; i < codec->fade && i < hop; i++) samples[i] *= (float)i / (float)(codec->fade - 1);
    codec->began[slot] = 1;
}

/* Decode `latents` [count, rows, D] of `slots` [count] to `samples` [count, rows * hop], advancing their history. */
EXPORT void sonoro_decode_latents(const LatentCodec *codec, const float *latents, const int64_t *slots, int64_t count,
                                  int64_t rows, int64_t hop, float *samples) {
    const unsigned before = flush_denormals();
    for (int64_t i = 0; i < count; i++)
        decode(codec, latents + i * rows * codec->input.in, rows, slots[i], hop, samples + i * rows * hop);
    restore_denormals(before);
}
