/* The decode step of a backbone and a depth model as one call: what frame.py does in a thousand operations, for
 * batches of a few slots on a CPU. That is the reference; `tests/native` compares the two.
 *
 * Everything is a pointer into the tensors of the model and of its state by slot. Nothing is allocated (but by qsort, for
 * top-p), and nothing is kept between calls but what is in those tensors. */

#include "stack.h"

#include <stdlib.h>

typedef struct {
    Stack backbone, depth;
    Watch watch;
    Room room;
    Product head, projection; /* `projection` of the hidden state to the depth model's width; without columns: none */
    const Product *depth_heads;
    /* Tables: inputs of the depth model by codebook [books, depth_codes, depth width], embeddings of the text, and of all
     * codes, those of codebook k from row `code_starts[k]` on. */
    const float *depth_inputs, *text_table, *code_table;
    const int64_t *code_starts;
    int64_t depth_codes, books, codes, end, min_frames;
    const bool *suppressed; /* [end + 1]: ids of codebook 0 that are never sampled */
    /* State by slot. */
    bool *done, *seen;
    int64_t *length, *position, *frames;
    float *pending;
    const int64_t *text_ids, *first_controls, *rest_controls;
    int64_t frames_stride, text_stride;
} Frame;

EXPORT int64_t sonoro_frame_bytes(void) { return sizeof(Frame); }

/* Gumbel noise of `id`, addressed as in sonoro.ops.sample. */
static float gumbel(const Controls *controls, int64_t book, int64_t frame, int64_t id) {
    return -logf(-logf(uniform(controls, book, frame, id)));
}

/* In ascending order, NaN last. */
static int compare(const void *left, const void *right) {
    const float a = *(const float *)left, b = *(const float *)right;
    return (a > b || isnan(a)) - (a < b || isnan(b));
}

/* The `k`-th largest of `values` [count], which are copied to `room`; 1 <= k <= count. Quickselect. */
static float kth_largest(const float *values, int64_t count, int64_t k, float *room) {
    memcpy(room, values, count * sizeof *room);
    int64_t low = 0, high = count - 1, wanted = k - 1;
    while (low < high) {
        const float pivot = room[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (room[i] > pivot) i++;
            while (room[j] < pivot) j--;
            if (i <= j) {
                const float swapped = room[i];
                room[i++] = room[j];
                room[j--] = swapped;
            }
        }
        if (wanted <= j) high = j;
        else if (wanted >= i) low = i;
        else break;
    }
    return room[wanted];
}

/* The smallest of `values` [count] that top-p keeps; `room` [count]. */
static float smallest_of_top_p(const float *values, int64_t count, float top_p, float *room) {
    memcpy(room, values, count * sizeof *room);
    qsort(room, count, sizeof *room, compare);
    const float most = room[count - 1];
    double sum = 0, below = 0; /* as torch sums on a CPU */
    for (int64_t i = 0; i < count; i++) sum += expf(room[i] - most);
    int64_t dropped = 0;
    while (dropped < count && (float)(below += expf(room[dropped] - most) / sum) <= 1 - top_p) dropped++;
    return room[dropped < count ? dropped : count - 1];
}

/* Sample an id from `logits` [count], which are overwritten: top-k and top-p of logits / temperature, then the argmax with
 * Gumbel noise. As in torch, ties go to the lowest id, and NaN is the largest. `room` [count]. */
static int64_t sample(const Controls *controls, int64_t book, int64_t frame, float *logits, int64_t count, float *room) {
    float smallest = -INFINITY;
    for (int64_t i = 0; i < count; i++) logits[i] /= controls->temperature;
    if (controls->top_k > 0) {
        smallest = kth_largest(logits, count, controls->top_k < count ? controls->top_k : count, room);
        for (int64_t i = 0; i < count; i++)
            if (logits[i] < smallest) logits[i] = -INFINITY;
    }
    if (controls->top_p < 1) {
        smallest = smallest_of_top_p(logits, count, controls->top_p, room);
        for (int64_t i = 0; i < count; i++)
            if (logits[i] < smallest) logits[i] = -INFINITY;
    }
    int64_t best = 0;
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        if (logits[i] == -INFINITY) continue;
        if (isnan(logits[i])) return i;
        const float value = controls->is_greedy ? logits[i] : logits[i] + gumbel(controls, book, frame, i);
        if (value > most) most = value, best = i;
    }
    return best;
}

/* Sample codebook 0 of a slot from the backbone's `logits`: the last of the ids considered is the end of speech. */
static int64_t sample_first(const Frame *frame, const Controls *controls, int64_t slot, float *logits) {
    const int64_t end = frame->end, length = frame->length[slot];
    const bool *seen = frame->seen + slot * (end + 1), is_endless = controls->ignore_end || length < frame->min_frames;
    for (int64_t id = 0; id <= end; id++) {
        if (seen[id]) logits[id] = logits[id] < 0 ? logits[id] * controls->penalty : logits[id] / controls->penalty;
        if (frame->suppressed[id] || (id == end && is_endless)) logits[id] = -INFINITY;
    }
    return sample(controls, 0, length, logits, end + 1, frame->room.scores);
}

/* Codebooks 1 to K - 1 of `count` slots, whose hidden states are in `room.normed` and whose code 0 is in `codes` [., K]. */
static void run_depth(const Frame *frame, const int64_t *slots, int64_t count, int64_t *codes) {
    const Stack *depth = &frame->depth;
    const Room *room = &frame->room;
    const int64_t width = depth->width, books = frame->books, logits = frame->depth_heads[0].rows;
    if (frame->projection.columns) multiply(&frame->projection, room->normed, count, room->hidden);
    else memcpy(room->hidden, room->normed, count * width * sizeof *room->hidden);
    memcpy(room->x, room->hidden, count * width * sizeof *room->x);
    for (int64_t i = 0; i < count; i++) room->positions[i] = 0;
    for (int64_t book = 1; book < books; book++) {
        /* The hidden state and code 0 are known together: the first pass has two rows for each slot. */
        const int64_t before = book == 1 ? count : 0, rows = before + count;
        for (int64_t i = 0; i < count; i++) {
            const int64_t code = codes[i * books + book - 1], row = code < (book == 1 ? frame->codes : logits) ? code : 0;
            memcpy(room->x + (before + i) * width, frame->depth_inputs + ((book - 1) * frame->depth_codes + row) * width,
                   width * sizeof *room->x);
            room->positions[before + i] = book;
            room->slots[i] = slots[i];
            room->slots[before + i] = slots[i];
        }
        run_stack(depth, room, rows, room->slots, room->positions, NULL, false);
        multiply(frame->depth_heads + book - 1, room->normed + before * width, count, room->logits);
        for (int64_t i = 0; i < count; i++) {
            const Controls *controls = (const Controls *)frame->rest_controls + slots[i];
            codes[i * books + book] =
                sample(controls, book, frame->length[slots[i]], room->logits + i * logits, logits, room->scores);
        }
    }
}

/* Append the frame `codes` [K] to a slot, and write the next input of its backbone; a slot at its end changes `done` alone. */
static void append(const Frame *frame, int64_t slot, const int64_t *codes) {
    const Controls *controls = (const Controls *)frame->first_controls + slot;
    const int64_t width = frame->backbone.width, length = frame->length[slot];
    if (codes[0] == frame->end) {
        frame->done[slot] = true;
        return;
    }
    memcpy(frame->frames + slot * frame->frames_stride + length * frame->books, codes, frame->books * sizeof *codes);
    float *pending = frame->pending + slot * width;
    memset(pending, 0, width * sizeof *pending);
    for (int64_t book = 0; book < frame->books; book++)
        add(pending, frame->code_table + (frame->code_starts[book] + codes[book]) * width, width);
    frame->seen[slot * (frame->end + 1) + codes[0]] = true;
    frame->position[slot]++;
    frame->length[slot] = length + 1;
    frame->done[slot] = length + 1 >= controls->max_frames;
}

/* One frame for each of `slots` [count] that is not done; the room has `most` slots, more are taken in turns. */
EXPORT void sonoro_frame(const Frame *frame, const int64_t *slots, int64_t count, int64_t *codes, int64_t *stepped) {
    const Room *room = &frame->room;
    const int64_t width = frame->backbone.width, books = frame->books;
    const unsigned before = flush_denormals();
    int64_t active = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = slots[i], length = frame->length[slot];
        if (frame->done[slot]) continue;
        float *x = room->x + active * width;
        memcpy(x, frame->pending + slot * width, width * sizeof *x);
        if (length) {
            const int64_t at = length - 1 < frame->text_stride ? length - 1 : frame->text_stride - 1;
            add(x, frame->text_table + frame->text_ids[slot * frame->text_stride + at] * width, width);
        }
        room->positions[active] = frame->position[slot];
        stepped[active++] = slot;
    }
    if (active) {
        const int64_t logits = frame->head.rows;
        run_stack(&frame->backbone, room, active, stepped, room->positions, frame->watch.out ? &frame->watch : NULL, false);
        multiply(&frame->head, room->normed, active, room->logits);
        for (int64_t i = 0; i < active; i++) {
            const Controls *controls = (const Controls *)frame->first_controls + stepped[i];
            codes[i * books] = sample_first(frame, controls, stepped[i], room->logits + i * logits);
        }
        run_depth(frame, stepped, active, codes);
        for (int64_t i = 0; i < active; i++) append(frame, stepped[i], codes + i * books);
    }
    restore_denormals(before);
}
