/* The decode step of a backbone and a flow head as one call, for batches of a few slots on a CPU: each frame is a latent
 * that the head makes of noise, and some frame decides when speech ends. frame.py is the reference;
 * `tests/native` compares the two.
 *
 * Everything is a pointer into the tensors of the model and of its state by slot. Nothing is allocated, and nothing is kept
 * between calls but what is in those tensors. */

#include "stack.h"

typedef struct {
    Product inner, outer;
    const float *norm, *bias;
} FlowBlock;

/* Of `kind` VELOCITY the output is a velocity that `steps` steps integrate; of OFFSET it is added to the noise. */
enum { VELOCITY, OFFSET, LATENT };

typedef struct {
    Product condition, noise, modulations, output; /* of shift, scale and gate by block, then shift and scale */
    const FlowBlock *blocks;
    const float *times, *ones, *zeros; /* [steps, width]; [width], of a norm without weight and bias */
    int64_t depth, steps, kind, width, latents;
    float eps;
} FlowHead;

typedef struct {
    float *x, *condition, *modulations, *inner, *outer, *latents;
} FlowRoom;

typedef struct {
    Stack backbone;
    Watch watch;
    Room room;
    FlowHead head;
    FlowRoom flow;
    Product projection, end, input; /* `projection` of the hidden state; without columns: none */
    const float *std, *mean;        /* [latents], from the head's latents to the codec's */
    int64_t earliest_end;
    /* State by slot. `options`: a threshold in the bits of the first, then the frames after the end. */
    bool *done;
    int64_t *length, *position, *last;
    const int64_t *options, *controls;
    float *pending, *frames;
    int64_t frames_stride;
} Flow;

EXPORT int64_t sonoro_flow_bytes(void) { return sizeof(Flow); }

/* `x` [width] = LayerNorm of `x`, scaled and shifted. */
static void modulate(const float *from, const FlowHead *head, const float *weight, const float *bias, const float *shift,
                     const float *scale, float *x) {
    layer_norm(from, weight, bias, head->eps, head->width, x);
#pragma omp simd
    for (int64_t c = 0; c < head->width; c++) x[c] = x[c] * (1 + scale[c]) + shift[c];
}

/* The head's output for `count` rows of `room->latents` into `room->outer`, given `room->condition` plus `time`. */
static void run_head(const FlowHead *head, const FlowRoom *room, int64_t count, const float *time) {
    const int64_t width = head->width, stride = (3 * head->depth + 2) * width;
    for (int64_t i = 0; i < count; i++)
#pragma omp simd
        for (int64_t c = 0; c < width; c++) {
            const float y = room->condition[i * width + c] + time[c];
            room->inner[i * width + c] = y / (1 + exp_of(-y));
        }
    multiply(&head->modulations, room->inner, count, room->modulations);
    multiply(&head->noise, room->latents, count, room->x);
    for (int64_t index = 0; index < head->depth; index++) {
        const FlowBlock *block = head->blocks + index;
        const float *shift = room->modulations + 3 * index * width, *scale = shift + width, *gates = scale + width;
        for (int64_t i = 0; i < count; i++)
            modulate(room->x + i * width, head, block->norm, block->bias, shift + i * stride, scale + i * stride,
                     room->inner + i * width);
        multiply(&block->inner, room->inner, count, room->outer);
        silu(room->outer, count * width);
        multiply(&block->outer, room->outer, count, room->inner);
        for (int64_t i = 0; i < count; i++)
#pragma omp simd
            for (int64_t c = 0; c < width; c++) room->x[i * width + c] += gates[i * stride + c] * room->inner[i * width + c];
    }
    const float *shift = room->modulations + 3 * head->depth * width, *scale = shift + width;
    for (int64_t i = 0; i < count; i++)
        modulate(room->x + i * width, head, head->ones, head->zeros, shift + i * stride, scale + i * stride,
                 room->inner + i * width);
    multiply(&head->output, room->inner, count, room->outer);
}

/* Make the noise in `room->latents` latents, given `hidden`. */
static void make_latents(const FlowHead *head, const FlowRoom *room, int64_t count, const float *hidden) {
    const int64_t numbers = count * head->latents, steps = head->kind == VELOCITY ? head->steps : 1;
    multiply(&head->condition, hidden, count, room->condition);
    for (int64_t step = 0; step < steps; step++) {
        run_head(head, room, count, head->times + step * head->width);
        for (int64_t i = 0; i < numbers; i++)
            room->latents[i] = (head->kind == LATENT ? 0 : room->latents[i]) + room->outer[i] / (float)steps;
    }
}

/* Normal noise of a slot's next frame, as in sonoro.ops.sample; the temperature is its variance. */
static void draw(const Controls *controls, int64_t frame, int64_t count, float *noise) {
    const float spread = controls->is_greedy ? 0 : sqrtf(controls->temperature);
    for (int64_t i = 0; i < count; i += 2) {
        const float distance = sqrtf(-2 * logf(uniform(controls, 0, frame, i)));
        const float angle = uniform(controls, 0, frame, i + 1) * 6.28318531f;
        noise[i] = distance * cosf(angle) * spread;
        if (i + 1 < count) noise[i + 1] = distance * sinf(angle) * spread;
    }
}

/* Append the frame `latent` to a slot, unless it ends here; `logit` may decide that it ends some frames ahead. Returns
 * whether the frame was appended. */
static bool append(const Flow *flow, int64_t slot, const float *latent, float logit) {
    const Controls *controls = (const Controls *)flow->controls + slot;
    const int64_t length = flow->length[slot], ahead = length + flow->options[2 * slot + 1], most = controls->max_frames;
    int64_t last = flow->last[slot];
    float threshold;
    memcpy(&threshold, flow->options + 2 * slot, sizeof threshold);
    if (logit > threshold && length >= flow->earliest_end && !controls->ignore_end && ahead < last) last = ahead;
    if (last <= length) {
        flow->done[slot] = true;
        return false;
    }
    float *to = flow->frames + slot * flow->frames_stride + length * flow->head.latents;
    for (int64_t i = 0; i < flow->head.latents; i++) to[i] = latent[i] * flow->std[i] + flow->mean[i];
    flow->last[slot] = last;
    flow->position[slot]++;
    flow->length[slot] = length + 1;
    flow->done[slot] = length + 1 >= (last < most ? last : most);
    return true;
}

/* One frame for each of `slots` [count] that is not done; `stepped` [count] is room. */
EXPORT void sonoro_flow(const Flow *flow, const int64_t *slots, int64_t count, int64_t *stepped) {
    const Room *room = &flow->room;
    const int64_t width = flow->backbone.width, latents = flow->head.latents;
    const unsigned before = flush_denormals();
    int64_t active = 0;
    for (int64_t i = 0; i < count; i++) {
        if (flow->done[slots[i]]) continue;
        memcpy(room->x + active * width, flow->pending + slots[i] * width, width * sizeof *room->x);
        room->positions[active] = flow->position[slots[i]];
        stepped[active++] = slots[i];
    }
    if (active) {
        const float *hidden = room->normed;
        run_stack(&flow->backbone, room, active, stepped, room->positions, flow->watch.out ? &flow->watch : NULL, false);
        if (flow->projection.columns) {
            multiply(&flow->projection, room->normed, active, room->hidden);
            hidden = room->hidden;
        }
        multiply(&flow->end, hidden, active, room->logits);
        for (int64_t i = 0; i < active; i++)
            draw((const Controls *)flow->controls + stepped[i], flow->length[stepped[i]], latents, flow->flow.latents + i * latents);
        make_latents(&flow->head, &flow->flow, active, hidden);
        multiply(&flow->input, flow->flow.latents, active, room->x);
        for (int64_t i = 0; i < active; i++)
            if (append(flow, stepped[i], flow->flow.latents + i * latents, room->logits[i]))
                memcpy(flow->pending + stepped[i] * width, room->x + i * width, width * sizeof *room->x);
    }
    restore_denormals(before);
}
