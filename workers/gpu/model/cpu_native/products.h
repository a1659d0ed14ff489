/* Products of rows with a matrix of weights, in float32.
 *
 * An output is a sum of products. The products are added in the same order for any number of rows.
 * First, products that are LANES apart are added in one lane of a vector. Then neighbouring lanes
 * of this vector are added in pairs. So the bits of a row's result do not depend on the other
 * rows. */

#ifndef TOKENBUS_PRODUCTS_H
#define TOKENBUS_PRODUCTS_H

#include "threads.h"
#include "vectors.h"

typedef struct {
    const float *weight; /* [out, in] */
    const float *bias;   /* [out], or null */
    int64_t out, in;
} Product;

enum {
    BLOCK_OUTS = 16, /* Number of outputs computed for all rows before the next outputs. */
    TILE_OUTS = 2,   /* Number of outputs of a tile. */
    TILE_ROWS = LANES == 8 ? 4 : 8, /* Number of rows of a tile. Its sums fit in the registers. */
    MAX_SUMS = 16,                  /* Maximum number of sums of a tile; at least LANES. */
    FEW_ROWS = 2,                   /* Up to this number of rows, a product is bound by memory. */
    LINE = 16,                      /* Number of floats of a line of the processor's cache. */
    PART_FLOATS = 1 << 13,  /* Approximate minimum number of weights of a part of a product. A part
                             * is the range of outputs that a thread computes at a time. */
    MANY_PARTS = 64,        /* Approximate maximum number of parts of a product. */
    PANEL_FLOATS = 1 << 16, /* Number of floats of a panel: a group of rows of x. One panel is
                             * multiplied with all parts before the next panel. A panel occupies a
                             * fraction of the second-level cache. */
    MIN_PANEL = 64,         /* Minimum number of rows of a panel. */
};

/* The weights to prefetch, from the address `from` on. A tile prefetches `vectors` vectors for
 * every LANES columns that it multiplies. */
typedef struct {
    const float *from;
    int vectors;
} Ahead;

/* Multiplies `outs` rows of weights with `rows` rows of x. `found` gets a vector of partial sums
 * for each pair of a row of x and a row of weights, ordered by rows of x. */
INLINE void tile(const float *w, const float *x, int64_t in, Vector *found, int outs, int rows,
                 Ahead ahead) {
    /* A local array stays in registers. `found` would be written to memory in each iteration. */
    Vector sums[MAX_SUMS];
    int64_t at = 0;
    for (int i = 0; i < outs * rows; i++)
        sums[i] = (Vector){0};
    for (; at + LANES <= in; at += LANES) {
        Vector weights[TILE_OUTS];
        for (int i = 0; i < ahead.vectors * LANES; i += LINE)
            __builtin_prefetch(ahead.from + at * ahead.vectors + i, 0, 2);
        for (int o = 0; o < outs; o++)
            weights[o] = load(w + o * in + at);
        for (int t = 0; t < rows; t++) {
            Vector input = load(x + t * in + at);
            for (int o = 0; o < outs; o++)
                sums[t * outs + o] = FUSED(weights[o], input, sums[t * outs + o]);
        }
    }
    for (int t = 0; at < in && t < rows; t++) {
        Vector input = load_some(x + t * in + at, in - at);
        for (int o = 0; o < outs; o++)
            sums[t * outs + o] =
                FUSED(load_some(w + o * in + at, in - at), input, sums[t * outs + o]);
    }
    for (int i = 0; i < outs * rows; i++)
        found[i] = sums[i];
}

/* Computes `count` consecutive tiles: output n of row t is written to y[t * stride + n]. */
INLINE void tiles(const float *w, const float *x, int64_t in, float *y, int64_t stride, int count,
                  int outs, int rows, Ahead ahead) {
    Vector found[MAX_SUMS];
    for (int i = 0; i < MAX_SUMS; i++)
        found[i] = (Vector){0};
    for (int n = 0; n < count; n++, ahead.from += in * ahead.vectors)
        tile(w + n * outs * in, x, in, found + n * outs * rows, outs, rows, ahead);
    for (int first = 0; first < count * outs * rows; first += LANES) {
        Vector totals = sums_of(found + first);
        for (int i = first; i < first + LANES && i < count * outs * rows; i++)
            y[i / outs % rows * stride + i / outs / rows * outs + i % outs] = totals[i - first];
    }
}

/* Computes `count` outputs for `rows` rows of x, in tiles of `outs` outputs. */
INLINE void block(const float *w, const float *x, int64_t in, float *y, int64_t stride,
                  int64_t count, int outs, int rows, Ahead ahead) {
    const int together = LANES > outs * rows ? LANES / outs / rows : 1;
    int64_t n = 0;
    for (; n + together * outs <= count; n += together * outs) {
        tiles(w + n * in, x, in, y + n, stride, together, outs, rows, ahead);
        ahead.from += together * in * ahead.vectors;
    }
    for (; n < count; n++)
        tiles(w + n * in, x, in, y + n, stride, 1, 1, rows, (Ahead){0, 0});
}

/* Computes `count` outputs for at most TILE_ROWS rows of x. */
INLINE void some_rows(const float *w, const float *x, int64_t in, float *y, int64_t stride,
                      int64_t count, int64_t rows, Ahead ahead) {
    switch (rows) {
    case 1: block(w, x, in, y, stride, count, TILE_OUTS, 1, ahead); break;
    case 2: block(w, x, in, y, stride, count, TILE_OUTS, 2, ahead); break;
    case 3: block(w, x, in, y, stride, count, TILE_OUTS, 3, ahead); break;
    case 4: block(w, x, in, y, stride, count, TILE_OUTS, 4, ahead); break;
#if LANES != 8
    case 5: block(w, x, in, y, stride, count, TILE_OUTS, 5, ahead); break;
    case 6: block(w, x, in, y, stride, count, TILE_OUTS, 6, ahead); break;
    case 7: block(w, x, in, y, stride, count, TILE_OUTS, 7, ahead); break;
    case 8: block(w, x, in, y, stride, count, TILE_OUTS, 8, ahead); break;
#endif
    }
}

/* Computes `count` outputs for at most FEW_ROWS rows of x. A tile has one row of weights, so the
 * weights are read in an order that the hardware prefetcher predicts. */
INLINE void few_rows(const float *w, const float *x, int64_t in, float *y, int64_t stride,
                     int64_t count, int64_t rows) {
    Ahead none = {0, 0};
    switch (rows) {
    case 1: block(w, x, in, y, stride, count, 1, 1, none); break;
    case 2: block(w, x, in, y, stride, count, 1, 2, none); break;
    }
}

/* Computes `count` outputs for more than FEW_ROWS rows of x. A tile has two rows of weights, so x
 * is loaded half as often as with one row of weights.
 *
 * The rows of x are divided into groups of at most TILE_ROWS. While a block of weights is
 * multiplied with a group, weights after this block are prefetched in the order of their addresses:
 * half a block with each group, or the whole next block if there is only one group. Without this
 * prefetch, memory would be idle while a cached block is multiplied with further rows of x. */
INLINE void more_rows(const float *w, const float *x, int64_t in, float *y, int64_t stride,
                      int64_t count, int64_t rows) {
    const float *next = w + BLOCK_OUTS * in;
    int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS, some;
    if (groups == 1) {
        some_rows(w, x, in, y, stride, count, rows, (Ahead){next, 2});
        return;
    }
    for (int64_t t = 0; t < rows; t += some, groups--) {
        some = (rows - t + groups - 1) / groups;
        some_rows(w, x + t * in, in, y + t * stride, stride, count, some, (Ahead){next, 1});
        next += BLOCK_OUTS / 2 * in;
    }
}

/* Computes the outputs `first` to `end` - 1 of a product for all rows of x, with the bias. */
static void multiply(const Product *product, const float *x, int64_t rows, float *y, int64_t first,
                     int64_t end) {
    int64_t in = product->in, stride = product->out;
    for (int64_t n = first; n < end; n += BLOCK_OUTS) {
        const float *w = product->weight + n * in;
        int64_t count = end - n < BLOCK_OUTS ? end - n : BLOCK_OUTS;
        if (rows <= FEW_ROWS)
            few_rows(w, x, in, y + n, stride, count, rows);
        else
            more_rows(w, x, in, y + n, stride, count, rows);
    }
    if (product->bias)
        for (int64_t t = 0; t < rows; t++)
            for (int64_t n = first; n < end; n++)
                y[t * stride + n] += product->bias[n];
}

/* --- on all threads ------------------------------------------------------------------------------ */

typedef struct {
    const Product *product;
    const float *x;
    float *y;
    int64_t rows;
} Multiplied;

static void multiply_part(const void *given, int64_t thread, int64_t first, int64_t end) {
    const Multiplied *m = given;
    (void)thread;
    multiply(m->product, m->x, m->rows, m->y, first, end);
}

/* Number of outputs of a part. The parts are large, because each part begins without prefetched
 * weights. */
static int64_t part_of(int64_t out, int64_t in) {
    int64_t outs = PART_FLOATS / in > out / MANY_PARTS ? PART_FLOATS / in : out / MANY_PARTS;
    outs = outs / BLOCK_OUTS * BLOCK_OUTS;
    return outs > BLOCK_OUTS ? outs : BLOCK_OUTS;
}

/* Number of rows of x, of `in` floats each, that stay in the cache. */
static int64_t panel_of(int64_t in) {
    int64_t rows = PANEL_FLOATS / in / TILE_ROWS * TILE_ROWS;
    return rows > MIN_PANEL ? rows : MIN_PANEL;
}

/* y [rows, out] = x [rows, in] times the weights, plus the bias */
static void product(const Product *given, const float *x, int64_t rows, float *y) {
    int64_t panel = panel_of(given->in), some;
    for (int64_t t = 0; t < rows; t += some) {
        some = rows - t < panel ? rows - t : panel;
        Multiplied m = {given, x + t * given->in, y + t * given->out, some};
        threads_run(multiply_part, &m, given->out, part_of(given->out, given->in));
    }
}

#endif
