/* Reductions of whole rows of logits for sampling: the most likely token, and the sum of
 * exponentials. They read each row twice. The row stays in the processor's cache. */

#include <math.h>

#include "vectors.h"

enum { TOGETHER = 64 }; /* Number of vectors whose sum is computed before it is added to the total. */

/* Vector i of a row, padded with -inf after the end of the row. */
INLINE Vector part_of_row(const float *row, int64_t size, int64_t i) {
    int64_t at = i * LANES;
    if (at + LANES <= size)
        return load(row + at);
    Vector found = all(-INFINITY);
    memcpy(&found, row + at, (size_t)(size - at) * sizeof(float));
    return found;
}

/* The index of the greatest value, the first among equals. Ignores NaN. */
static int64_t best_of(const float *row, int64_t size) {
    Vector most = all(-INFINITY);
    Integers where = {0}, here;
    for (int i = 0; i < LANES; i++)
        here[i] = i;
    for (int64_t i = 0; i * LANES < size; i++, here += LANES) {
        Vector v = part_of_row(row, size, i);
        Integers more = v > most;
        most = choose(more, v, most);
        where = (here & more) | (where & ~more);
    }
    int best = 0;
    for (int i = 1; i < LANES; i++)
        if (most[i] > most[best] || (most[i] == most[best] && where[i] < where[best]))
            best = i;
    return most[best] > -INFINITY ? where[best] : 0;
}

/* The sum of exp(value - greatest) over all values; NaN if a value is NaN. */
static float total_of(const float *row, int64_t size, float greatest) {
    int64_t count = (size + LANES - 1) / LANES;
    Vector total = {0};
    for (int64_t first = 0; first < count; first += TOGETHER) {
        int64_t end = first + TOGETHER < count ? first + TOGETHER : count;
        Vector some = {0};
        for (int64_t i = first; i < end; i++)
            some += exponential(part_of_row(row, size, i) - greatest);
        total += some;
    }
    return sum(total);
}

/* For each row of logits [rows, size], writes the index of the greatest value to `best`. Also
 * writes this index, its log-probability and 1 to `numbers` [3, rows]. */
__attribute__((visibility("default"))) void rows_reduce(const float *logits, int64_t rows,
                                                        int64_t size, int64_t *best,
                                                        double *numbers) {
    for (int64_t r = 0; r < rows; r++) {
        const float *row = logits + r * size;
        best[r] = best_of(row, size);
        numbers[r] = (double)best[r];
        numbers[rows + r] = -log((double)total_of(row, size, row[best[r]]));
        numbers[2 * rows + r] = 1;
    }
}
