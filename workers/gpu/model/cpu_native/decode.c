/* The forward of a decoder in float32, in one call.
 *
 * For one token of a small model, calls of small operations take longer than the arithmetic. So the
 * operations between the products are fused. The product of one row and a matrix is bound by memory
 * bandwidth. So the weights are read in the order of their addresses, once for each panel (a group
 * of tokens). Keys and values are read from their blocks in place. The result is the same as that
 * of FusedDecoder (fused/decoder.py). The bits of a token's logits depend only on the token's own
 * sequence, unless the rotary embedding depends on the whole step. */

#include <stdlib.h>

#include "attention.h"

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* --- the gated MLP ------------------------------------------------------------------------------- */

typedef struct {
    const Layer *layer;
    const float *x;
    float *both; /* [tokens, 2 * size]: gate and up */
    float *y;    /* [tokens, size] */
    int64_t tokens;
} Gated;

static void gated_part(const void *given, int64_t thread, int64_t first, int64_t end) {
    const Gated *g = given;
    const Product *gate_up = &g->layer->gate_up;
    int64_t size = gate_up->out / 2, count = end - first;
    (void)thread;
    multiply(gate_up, g->x, g->tokens, g->both, first, end);
    multiply(gate_up, g->x, g->tokens, g->both, size + first, size + end);
    for (int64_t t = 0; t < g->tokens; t++) {
        float *gate = g->both + t * 2 * size + first, *up = gate + size, *to = g->y + t * size + first;
        activate(g->layer->activation, gate, count);
        for (int64_t i = 0; i < count; i++)
            to[i] = gate[i] * up[i];
    }
}

/* y = activation(gate) * up, computed in panels: groups of tokens whose x stays in the processor's
 * cache. */
static void gated(const Layer *layer, const float *x, int64_t tokens, float *both, float *y) {
    int64_t in = layer->gate_up.in, size = layer->gate_up.out / 2, panel = panel_of(in), some;
    for (int64_t t = 0; t < tokens; t += some) {
        some = tokens - t < panel ? tokens - t : panel;
        Gated g = {layer, x + t * in, both, y + t * size, some};
        threads_run(gated_part, &g, size, part_of(size, 2 * in));
    }
}

/* --- norms and rotation -------------------------------------------------------------------------- */

/* Writes the norm of each token's x to y. Returns y, or x if the layer does not have this norm. */
static const float *normalized(const Norm *norm, const float *x, float *y, int64_t tokens) {
    if (!norm->gain)
        return x;
    for (int64_t t = 0; t < tokens; t++)
        normalize(norm, x + t * norm->size, y + t * norm->size);
    return y;
}

/* hidden += scale * norm(update). The norm is computed in place. */
static void add(float *hidden, float *update, const Norm *norm, float scale, int64_t tokens,
                int64_t size) {
    for (int64_t t = 0; t < tokens; t++) {
        float *to = hidden + t * size, *from = update + t * size;
        if (norm->gain)
            normalize(norm, from, from);
        for (int64_t i = 0; i < size; i++)
            to[i] += scale * from[i];
    }
}

static void rotate(float *head, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[half + i];
        head[i] = low * cos[i] + high * sin[i];
        head[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

/* Normalizes and rotates the queries and keys of each token, and writes the keys and values to
 * their slots of the KV cache. */
static void write_keys(const Layer *layer, const Step *step, float *qkv) {
    int64_t dim = layer->dim, heads = layer->heads, kv_heads = layer->kv_heads;
    int64_t width = (heads + 2 * kv_heads) * dim, row = kv_heads * dim;
    for (int64_t t = 0; t < step->num_tokens; t++) {
        float *query = qkv + t * width, *key = query + heads * dim, *value = key + row;
        for (int64_t i = 0; layer->query_norm.gain && i < heads * dim; i += layer->query_norm.size)
            normalize(&layer->query_norm, query + i, query + i);
        for (int64_t i = 0; layer->key_norm.gain && i < row; i += layer->key_norm.size)
            normalize(&layer->key_norm, key + i, key + i);
        if (layer->rotation >= 0) {
            const Rotation *r = step->rotations + layer->rotation;
            int64_t at = (r->by_position ? step->positions[t] : t) * r->dim;
            for (int64_t h = 0; h < heads + kv_heads; h++)
                rotate(query + h * dim, r->cos + at, r->sin + at, r->dim);
        }
        memcpy(layer->keys + step->slots[t] * row, key, (size_t)row * sizeof(float));
        memcpy(layer->values + step->slots[t] * row, value, (size_t)row * sizeof(float));
    }
}

/* --- the forward --------------------------------------------------------------------------------- */

/* The buffers of a forward, which all layers use. */
typedef struct {
    int64_t *runs, num_runs, longest;
    float *hidden, *x, *y, *wide, *narrow, *scores;
} Buffers;

static float *floats(int64_t count) {
    return aligned_alloc(64, (size_t)(count + 63) / 64 * 64 * sizeof(float));
}

/* Allocates the buffers in one block of memory, which begins with `runs`. Returns whether there was
 * enough memory. */
static int allocate(const Decoder *decoder, const Step *step, Buffers *b) {
    int64_t wide = 0, narrow = 0, tokens = step->num_tokens, hidden = tokens * decoder->hidden;
    b->longest = 0;
    for (int64_t t = 0; t < tokens; t++)
        b->longest = most(b->longest, step->positions[t] + 1);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const Layer *layer = decoder->layers + i;
        wide = most(wide, most(layer->qkv.out, layer->gate_up.out));
        narrow = most(narrow, most(layer->output.in, layer->down.in));
    }
    int64_t runs = (tokens * 2 + 64) / 64 * 64; /* In floats; an int64_t takes two. */
    int64_t scores = score_floats(step->threads, b->longest);
    float *all = floats(runs + 3 * hidden + tokens * (wide + narrow) + scores);
    if (!all)
        return 0;
    b->runs = (int64_t *)all;
    b->hidden = all + runs;
    b->x = b->hidden + hidden;
    b->y = b->x + hidden;
    b->wide = b->y + hidden;
    b->narrow = b->wide + tokens * wide;
    b->scores = b->narrow + tokens * narrow;
    return 1;
}

static void layer_forward(const Decoder *decoder, const Layer *layer, const Step *step,
                          const Buffers *b) {
    int64_t tokens = step->num_tokens, hidden = decoder->hidden;
    const float *x = normalized(&layer->before_attention, b->hidden, b->x, tokens);
    product(&layer->qkv, x, tokens, b->wide);
    write_keys(layer, step, b->wide);
    Attention a = {layer,     step,      decoder->block_size, b->wide, layer->qkv.out,
                   b->narrow, b->scores, b->longest,          b->runs};
    attend_runs(&a, b->num_runs);
    product(&layer->output, b->narrow, tokens, b->y);
    add(b->hidden, b->y, &layer->after_attention, layer->residual_scale, tokens, hidden);
    x = normalized(&layer->before_mlp, b->hidden, b->x, tokens);
    gated(layer, x, tokens, b->wide, b->narrow);
    product(&layer->down, b->narrow, tokens, b->y);
    add(b->hidden, b->y, &layer->after_mlp, layer->residual_scale, tokens, hidden);
}

/* Copies the embeddings of a step's tokens. Returns whether all ids have an embedding. */
static int embed(const Decoder *decoder, const Step *step, float *hidden) {
    int64_t size = decoder->hidden;
    for (int64_t t = 0; t < step->num_tokens; t++, hidden += size) {
        if (step->ids[t] < 0 || step->ids[t] >= decoder->num_embeddings)
            return 0;
        const float *from = decoder->embeddings + step->ids[t] * size;
        for (int64_t i = 0; i < size; i++)
            hidden[i] = from[i] * decoder->embedding_scale;
    }
    return 1;
}

/* The logits of normalized hidden states. They are scaled and capped as the model does. */
static void head(const Decoder *decoder, const float *x, int64_t rows, float *logits) {
    int64_t count = rows * decoder->head.out;
    product(&decoder->head, x, rows, logits);
    if (decoder->logits_scale != 1.0f)
        FOR_EACH(logits, count, v, v * decoder->logits_scale);
    if (decoder->logits_cap)
        FOR_EACH(logits, count, v, hyperbolic(v / decoder->logits_cap) * decoder->logits_cap);
}

/* Computes a step. Returns 0, -1 if memory is exhausted, or -2 if an id has no embedding. */
__attribute__((visibility("default"))) int decoder_forward(const Decoder *decoder, const Step *step) {
    Buffers b;
    if (!allocate(decoder, step, &b))
        return -1;
    if (!embed(decoder, step, b.hidden)) {
        free(b.runs);
        return -2;
    }
    int64_t hidden = decoder->hidden;
    b.num_runs = find_runs(step, b.runs);
    threads_begin(step->threads);
    for (int64_t i = 0; i < decoder->num_layers; i++)
        layer_forward(decoder, decoder->layers + i, step, &b);
    for (int64_t r = 0; r < step->num_rows; r++) {
        const float *from = b.hidden + step->rows[r] * hidden;
        if (decoder->norm.gain)
            normalize(&decoder->norm, from, b.x + r * hidden);
        else
            memcpy(b.x + r * hidden, from, (size_t)hidden * sizeof(float));
    }
    if (step->num_rows)
        head(decoder, b.x, step->num_rows, step->logits);
    threads_end();
    free(b.runs);
    return 0;
}
