/* A decoder stack over a paged KV cache, one row per new position: the layers of every decode step here; and the random
 * numbers of a step. Follows sonoro.nn.transformer, sonoro.nn.gelu and sonoro.ops.sample. */

#ifndef SONORO_STACK_H
#define SONORO_STACK_H

#include "kernels.h"

/* A pre-norm layer, and its part of a paged cache [pages, page positions, kv heads, D]. `gate_up` has 2 * inner rows, for
 * SwiGLU, or `inner`, for GELU in its tanh form. A norm with a bias is a LayerNorm, else an RMS norm; heads without a norm
 * have NULL. */
typedef struct {
    Product qkv, out, gate_up, down;
    const float *input_norm, *query_norm, *key_norm, *inner_norm, *input_bias, *inner_bias;
    float *keys, *values;
    const int64_t *watched; /* query heads whose attention is recorded, [watched_count] */
    int64_t watched_count;
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm, *bias, *cos, *sin; /* of the final norm; cos and signed sin by position, [positions, D] */
    const int32_t *page_table;            /* [slots, pages per slot] */
    int64_t pages_per_slot, page_positions;
    int64_t count, width, inner, heads, kv_heads, head_width;
    float eps;
} Stack;

/* Attention of the watched heads to a span of positions, `out` [slots, heads, columns], as `sonoro.nn.watch`. */
typedef struct {
    const int64_t *spans; /* start and count by slot */
    float *out;
    int64_t heads, columns;
} Watch;

/* Room for intermediate results of `rows` rows; `scores` has some for each head and position. */
typedef struct {
    float *x, *normed, *wide, *inner, *attended, *scores, *logits, *hidden;
    int64_t *slots, *positions;
} Room;

/* A row of sonoro.runtime.sampling: how a frame is sampled, and random numbers addressed. */
typedef struct {
    int64_t seed, segment, max_frames, top_k, is_greedy, ignore_end;
    float temperature, top_p, penalty, unused;
} Controls;

/* Uniform number `id` in (0, 1): Philox4x32-10 of (id / 4, book, frame, segment), keyed by seed. */
static inline float uniform(const Controls *controls, int64_t book, int64_t frame, int64_t id) {
    uint32_t a = (uint32_t)(id / 4), b = (uint32_t)book, c = (uint32_t)frame, d = (uint32_t)controls->segment;
    uint32_t left = (uint32_t)controls->seed, right = (uint32_t)((uint64_t)controls->seed >> 32);
    for (int round = 0; round < 10; round++, left += 0x9E3779B9u, right += 0xBB67AE85u) {
        const uint64_t first = (uint64_t)a * 0xD2511F53u, second = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(second >> 32) ^ b ^ left;
        c = (uint32_t)(first >> 32) ^ d ^ right;
        b = (uint32_t)second;
        d = (uint32_t)first;
    }
    const uint32_t words[4] = {a, b, c, d};
    return ((float)(words[id % 4] >> 9) + 0.5f) * 0x1p-23f;
}

/* The place of `position` of a slot with `pages` in a layer's cache. */
static inline int64_t place_of(const Stack *stack, const int32_t *pages, int64_t position) {
    return (pages[position / stack->page_positions] * stack->page_positions + position % stack->page_positions)
         * stack->kv_heads * stack->head_width;
}

/* Record a watched head's attention, whose `scores` [position + 1] come before the softmax, over the slot's span alone. */
static inline void record(const Watch *watch, int64_t row, int64_t slot, const float *scores, int64_t position) {
    float *out = watch->out + (slot * watch->heads + row) * watch->columns;
    const int64_t start = watch->spans[2 * slot], count = watch->spans[2 * slot + 1];
    int64_t live = position + 1 - start < count ? position + 1 - start : count;
    live = live < 0 ? 0 : live > watch->columns ? watch->columns : live;
    if (live) {
        memcpy(out, scores + start, live * sizeof *out);
        softmax(out, live);
    }
    memset(out + live, 0, (watch->columns - live) * sizeof *out);
}

/* Rotate the heads of `qkv`, a new position of one slot, and write its keys and values. */
static inline void keep_position(const Stack *stack, const Layer *layer, float *qkv, int64_t position, int64_t own) {
    const int64_t width = stack->head_width, heads = stack->heads, kv_heads = stack->kv_heads;
    const float *cos = stack->cos + position * width, *sin = stack->sin + position * width;
    for (int64_t head = 0; head < heads + kv_heads; head++) {
        float *of = qkv + head * width;
        const float *norm = head < heads ? layer->query_norm : layer->key_norm;
        if (norm) rms_norm(of, norm, stack->eps, width, of);
        rotate(of, cos, sin, width);
    }
    memcpy(layer->keys + own, qkv + heads * width, kv_heads * width * sizeof *qkv);
    memcpy(layer->values + own, qkv + (heads + kv_heads) * width, kv_heads * width * sizeof *qkv);
}

/* Attention of the query heads in `qkv`, a new position of one slot, to that position and all before it. Keys and values
 * are read in the order that they have in memory: there may be more of them than a cache holds. */
static inline void attend(const Stack *stack, const Layer *layer, float *qkv, int64_t slot, int64_t position,
                          const Watch *watch, int64_t first_watched, float *scores, float *out) {
    const int64_t width = stack->head_width, heads = stack->heads, kv_heads = stack->kv_heads, group = heads / kv_heads;
    const int64_t count = position + 1, size = stack->page_positions, stride = kv_heads * width;
    const int32_t *pages = stack->page_table + slot * stack->pages_per_slot;
    const float scale = 1 / sqrtf((float)width);
    keep_position(stack, layer, qkv, position, place_of(stack, pages, position));
    for (int64_t begin = 0; begin < count; begin += size) {
        const float *keys = layer->keys + place_of(stack, pages, begin);
        for (int64_t at = begin; at < count && at < begin + size; at++, keys += stride)
            for (int64_t head = 0; head < heads; head++)
                scores[head * count + at] = scale * dot(qkv + head * width, keys + head / group * width, width);
    }
    for (int64_t i = 0; watch && i < layer->watched_count; i++)
        record(watch, first_watched + i, slot, scores + layer->watched[i] * count, position);
    for (int64_t head = 0; head < heads; head++) softmax(scores + head * count, count);
    memset(out, 0, heads * width * sizeof *out);
    for (int64_t begin = 0; begin < count; begin += size) {
        const float *values = layer->values + place_of(stack, pages, begin);
        for (int64_t at = begin; at < count && at < begin + size; at++, values += stride)
            for (int64_t head = 0; head < heads; head++) {
                const float weight = scores[head * count + at], *from = values + head / group * width;
                float *restrict to = out + head * width;
#pragma omp simd
                for (int64_t d = 0; d < width; d++) to[d] += weight * from[d];
            }
    }
}

/* The feed-forward part of a layer, from `room->normed` to `room->normed`. */
static inline void feed_forward(const Stack *stack, const Layer *layer, const Room *room, int64_t count) {
    const int64_t inner = stack->inner;
    float *to = layer->gate_up.rows == inner ? room->inner : room->wide;
    multiply(&layer->gate_up, room->normed, count, to);
    if (to == room->inner) gelu_tanh(to, count * inner);
    else
        for (int64_t i = 0; i < count; i++) gate(room->wide + 2 * i * inner, inner, room->inner + i * inner);
    multiply(&layer->down, room->inner, count, room->normed);
}

/* Run `count` rows of `room->x`, at `positions` of `slots`, through all layers and the final norm: into `room->normed`. Rows
 * of one slot are in order of positions. With `fills_cache`, only keys and values are of use. */
static inline void run_stack(const Stack *stack, const Room *room, int64_t count, const int64_t *slots,
                             const int64_t *positions, const Watch *watch, bool fills_cache) {
    const int64_t width = stack->width, wide = (stack->heads + 2 * stack->kv_heads) * stack->head_width;
    int64_t first_watched = 0;
    for (int64_t index = 0; index < stack->count; index++) {
        const Layer *layer = stack->layers + index;
        norm_rows(room->x, count, layer->input_norm, layer->input_bias, stack->eps, width, room->normed);
        multiply(&layer->qkv, room->normed, count, room->wide);
        for (int64_t i = 0; i < count; i++)
            attend(stack, layer, room->wide + i * wide, slots[i], positions[i], watch, first_watched, room->scores,
                   room->attended + i * stack->heads * stack->head_width);
        if (fills_cache && index == stack->count - 1) return;
        first_watched += layer->watched_count;
        multiply(&layer->out, room->attended, count, room->normed);
        add(room->x, room->normed, count * width);
        norm_rows(room->x, count, layer->inner_norm, layer->inner_bias, stack->eps, width, room->normed);
        feed_forward(stack, layer, room, count);
        add(room->x, room->normed, count * width);
    }
    norm_rows(room->x, count, stack->norm, stack->bias, stack->eps, width, room->normed);
}

#endif
