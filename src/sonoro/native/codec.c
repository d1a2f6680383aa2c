/* A codec's decoder as one call: frames of codes to samples, as sonoro.models.qwen3_tts.decoder, which is the reference.
 *
 * It reads and writes the same left context by slot (sonoro.nn.history), so that either may decode the next chunk. Rows are
 * columns of time, [T, C]. A layer with left context writes its input behind the rows that it kept: `joined`. */

#include "kernels.h"

/* Snake activation: x + scale * sin(rate * x)^2 by channel. */
typedef struct {
    const float *rate, *scale;
} Snake;

typedef struct {
    Conv qkv, out, gate_up, down;
    const float *input_norm, *inner_norm, *out_scale, *down_scale;
    float *ring; /* [slots, window - 1, 2 * kv heads * D]: rotated keys and values, position p at p % (window - 1) */
} WindowLayer;

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
    const WindowLayer *layers;
    const float *norm, *frequencies; /* of the rotary embedding, [D / 2] */
    const UpLayer *ups;
    const Block *blocks;
    Snake snake;
    int64_t *seen;
    float *room[4];
    int64_t layer_count, up_count, block_count, heads, kv_heads, head_width, window;
    float eps, norm_eps;
} Codec;

EXPORT int64_t sonoro_codec_bytes(void) { return sizeof(Codec); }

/* The kept rows of `slot` into the head of `joined`; the caller writes `rows` rows of `width` behind them. */
static float *join(const float *history, int64_t kept, int64_t width, int64_t slot, float *joined) {
    memcpy(joined, history + slot * kept * width, kept * width * sizeof *joined);
    return joined + kept * width;
}

static void keep(float *history, int64_t kept, int64_t width, int64_t slot, const float *joined, int64_t rows) {
    memcpy(history + slot * kept * width, joined + rows * width, kept * width * sizeof *joined);
}

static void activate(const Snake *snake, const float *x, int64_t rows, int64_t width, float *y) {
    for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t c = 0; c < width; c++)
            y[i * width + c] = x[i * width + c] + snake->scale[c] * sin_squared(snake->rate[c] * x[i * width + c]);
}

/* `conv` of `x` [rows, conv->in] behind what it kept, by way of `joined`. */
static void convolve_kept(const Conv *conv, const float *x, int64_t rows, int64_t slot, float *joined, float *y) {
    float *own = join(conv->history, conv->kept, conv->in, slot, joined);
    memcpy(own, x, rows * conv->in * sizeof *x);
    keep(conv->history, conv->kept, conv->in, slot, joined, rows);
    convolve(conv, joined, rows, y, false);
}

/* The same of snake(x). */
static void convolve_snake(const Conv *conv, const Snake *snake, const float *x, int64_t rows, int64_t slot, float *joined,
                           float *y) {
    activate(snake, x, rows, conv->in, join(conv->history, conv->kept, conv->in, slot, joined));
    keep(conv->history, conv->kept, conv->in, slot, joined, rows);
    convolve(conv, joined, rows, y, false);
}

/* Attention of `rows` new rows `qkv` to the window before each; `pairs` [window - 1 + rows, 2 * kv heads * D] is room. */
static void attend(const Codec *codec, const WindowLayer *layer, float *qkv, int64_t rows, int64_t slot, float *pairs,
                   float *out) {
    const int64_t width = codec->head_width, heads = codec->heads, kv_heads = codec->kv_heads, group = heads / kv_heads;
    const int64_t pair = 2 * kv_heads * width, wide = heads * width + pair, length = codec->window - 1;
    const int64_t seen = codec->seen[slot];
    float *ring = layer->ring + slot * length * pair, scores[codec->window], cos[width], sin[width];
    const float scale = 1 / sqrtf((float)width);
    for (int64_t back = length; back > 0; back--)
        if (seen >= back) memcpy(pairs + (length - back) * pair, ring + (seen - back) % length * pair, pair * sizeof *ring);
    for (int64_t i = 0; i < rows; i++) {
        float *row = qkv + i * wide;
        for (int64_t d = 0; d < width / 2; d++) {
            const float angle = (float)(seen + i) * codec->frequencies[d];
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

/* The window transformer: `x` [rows, width] in place. */
static void run_window(const Codec *codec, float *x, int64_t rows, int64_t slot) {
    const int64_t width = codec->input.out;
    float *normed = codec->room[1], *wide = codec->room[2], *other = codec->room[3];
    for (int64_t index = 0; index < codec->layer_count; index++) {
        const WindowLayer *layer = codec->layers + index;
        const int64_t inner = layer->down.in;
        for (int64_t i = 0; i < rows; i++) rms_norm(x + i * width, layer->input_norm, codec->eps, width, normed + i * width);
        convolve(&layer->qkv, normed, rows, wide, false);
        attend(codec, layer, wide, rows, slot, other, normed);
        convolve(&layer->out, normed, rows, wide, false);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < width; c++) x[i * width + c] += layer->out_scale[c] * wide[i * width + c];
        for (int64_t i = 0; i < rows; i++) rms_norm(x + i * width, layer->inner_norm, codec->eps, width, normed + i * width);
        convolve(&layer->gate_up, normed, rows, wide, false);
        for (int64_t i = 0; i < rows; i++) {
            const float *gate = wide + 2 * i * inner, *up = gate + inner;
#pragma omp simd
            for (int64_t d = 0; d < inner; d++) other[i * inner + d] = gate[d] / (1 + exp_of(-gate[d])) * up[d];
        }
        convolve(&layer->down, other, rows, wide, false);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < width; c++) x[i * width + c] += layer->down_scale[c] * wide[i * width + c];
    }
    for (int64_t i = 0; i < rows; i++) rms_norm(x + i * width, codec->norm, codec->eps, width, x + i * width);
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
        float mean = 0, square = 0;
        for (int64_t c = 0; c < width; c++) mean += to[c];
        mean /= (float)width;
        for (int64_t c = 0; c < width; c++) square += (to[c] - mean) * (to[c] - mean);
        const float factor = 1 / sqrtf(square / (float)width + codec->norm_eps);
        for (int64_t c = 0; c < width; c++) to[c] = (to[c] - mean) * factor * layer->norm[c] + layer->norm_bias[c];
    }
    convolve(&layer->inner, y, count, inner, false);
    for (int64_t i = 0; i < count * layer->inner.out; i++) inner[i] *= 0.5f * (1 + erff(inner[i] * 0.707106781f));
    convolve(&layer->outer, inner, count, y, false);
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c++) x[i * width + c] += layer->gamma[c] * y[i * width + c];
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
    run_window(codec, x, rows, slot);
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
