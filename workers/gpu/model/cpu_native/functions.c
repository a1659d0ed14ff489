/* Single operations of a forward, whose results have the same bits as in decode.c. */

#include <stdlib.h>

#include "attention.h"

#define EXPORTED __attribute__((visibility("default")))

/* y [rows, out] = x [rows, in] times the weights [out, in], plus the bias, if there is one. */
EXPORTED void function_product(const float *weight, const float *bias, const float *x, float *y,
                               const int64_t *sizes, int64_t threads) {
    Product given = {weight, bias, sizes[1], sizes[2]};
    threads_begin(threads);
    product(&given, x, sizes[0], y);
    threads_end();
}

/* y [rows, size] = the norm of each row of x. */
EXPORTED void function_norm(const float *gain, const float *x, float *y, int64_t rows, int64_t size,
                            float eps) {
    Norm norm = {gain, size, eps};
    for (int64_t t = 0; t < rows; t++)
        normalize(&norm, x + t * size, y + t * size);
}

/* Applies an activation to rows of values, in place. */
EXPORTED void function_activate(int64_t activation, float *values, int64_t count) {
    activate(activation, values, count);
}

/* The attention among the tokens of one text: y and queries [tokens, heads, dim], keys and values
 * [tokens, kv_heads, dim]. `sizes`: tokens, heads, kv_heads, dim, window. Returns 0, or -1 if
 * memory is exhausted. */
EXPORTED int function_attention(const float *queries, const float *keys, const float *values,
                                float *y, const int64_t *sizes, float scale, float softcap,
                                int64_t threads) {
    int64_t tokens = sizes[0], block = 0, runs;
    Layer layer = {.keys = (float *)keys, .values = (float *)values, .heads = sizes[1]};
    layer.kv_heads = sizes[2];
    layer.dim = sizes[3];
    layer.window = sizes[4];
    layer.scale = scale;
    layer.softcap = softcap;
    int64_t *positions = malloc((size_t)(2 * tokens + 1) * sizeof(int64_t));
    const int64_t **blocks = malloc((size_t)tokens * sizeof *blocks);
    float *scores = malloc((size_t)score_floats(threads, tokens) * sizeof(float));
    if (positions && blocks && scores) {
        for (int64_t t = 0; t < tokens; t++) {
            positions[t] = t;
            blocks[t] = &block;
        }
        Step step = {.num_tokens = tokens, .positions = positions, .blocks = blocks};
        runs = find_runs(&step, positions + tokens);
        Attention a = {&layer, &step,  tokens, queries,           sizes[1] * sizes[3],
                       y,      scores, tokens, positions + tokens};
        threads_begin(threads);
        attend_runs(&a, runs);
        threads_end();
    }
    int failed = !positions || !blocks || !scores;
    free(positions);
    free(blocks);
    free(scores);
    return -failed;
}
