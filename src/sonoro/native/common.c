/* What the compiled code of all families calls besides their own. */

#include "stack.h"

/* What this library was compiled from, for build.py to find in it. */
__attribute__((used)) static const char sources[] = SONORO_SOURCES;

/* Write the keys and values of prompt tokens, whose inputs are `rows` [count, width], to the pages of `slots`; `most` rows
 * fit into the room. */
EXPORT void sonoro_prefill(const Stack *stack, const Room *room, const float *rows, const int64_t *slots,
                           const int64_t *positions, int64_t count, int64_t most) {
    const int64_t width = stack->width;
    const unsigned before = flush_denormals();
    for (int64_t first = 0; first < count; first += most) {
        const int64_t taken = count - first < most ? count - first : most;
        memcpy(room->x, rows + first * width, taken * width * sizeof *rows);
        run_stack(stack, room, taken, slots + first, positions + first, NULL, true);
    }
    restore_denormals(before);
}

/* Pack row `row` of a weight [columns][rows] in steps of `scale`. Returns whether that is exact. */
static bool pack_row(const float *weight, int64_t rows, int64_t columns, int64_t row, float scale, int8_t *packed) {
    int8_t *to = packed + row / BLOCK * BLOCK * columns + row % BLOCK;
    for (int64_t column = 0; column < columns; column++) {
        const float value = weight[column * rows + row], steps = scale > 0 ? rintf(value / scale) : 0;
        if (steps * scale != value || fabsf(steps) > 127) return false;
        to[column * BLOCK] = (int8_t)steps;
    }
    return true;
}

/* Pack the float32 weight [columns][rows] as int8 with a scale per row, as `Product` has them; `packed` is zeroed.
 * Returns whether that is exact: each number is the scale of its row times an integer up to 127, rounded once. */
EXPORT bool sonoro_pack(const float *weight, int64_t rows, int64_t columns, int8_t *packed, float *scale) {
    for (int64_t row = 0; row < rows; row++) {
        float most = 0;
        for (int64_t column = 0; column < columns; column++) {
            const float size = fabsf(weight[column * rows + row]);
            most = size > most ? size : most;
        }
        /* The largest number is 127 times the scale, rounded: the scale is its 127th part, or a neighbour of that. */
        const float middle = most / 127, near[3] = {middle, nextafterf(middle, 0), nextafterf(middle, INFINITY)};
        int tried = 0;
        while (tried < 3 && !pack_row(weight, rows, columns, row, near[tried], packed)) tried++;
        if (tried == 3) return false;
        scale[row] = near[tried];
    }
    return true;
}
