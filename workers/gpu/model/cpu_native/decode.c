/* The forward of a decoder for few tokens, in float32, in one call.
 *
 * For one token of a small model, calls of small operations take longer than the arithmetic, and
 * the product of one row and a matrix is bound by memory bandwidth. So the weights are read once
 * for all tokens, in the order of their addresses, and the operations between the products are
 * fused. Keys and values are read from their blocks in place. The result is that of FusedDecoder
 * (fused/decoder.py). The structures must match those of decoder.py in this folder. */

#include <math.h>
#include <stdlib.h>

#include "products.h"
#include "threads.h"
#include "vectors.h"

typedef struct {
    const float *gain; /* Null: the layer does not have this norm. */
    int64_t size;
    float eps;
} Norm;

enum { SILU, GELU_TANH };

typedef struct {
    Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
    Product qkv, output, gate_up, down;
    float *keys, *values; /* [blocks, block_size, kv_heads, dim] */
    int64_t heads, kv_heads, dim;
    int64_t window;   /* 0: no window */
    int64_t rotation; /* Index in the step's rotations; -1: no rotation */
    int64_t activation;
    float scale, softcap, residual_scale; /* softcap 0: no cap */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t num_layers, hidden, block_size;
    int64_t num_embeddings;
    const float *embeddings; /* [num_embeddings, hidden] */
    float embedding_scale;
    Norm norm;
    Product head;
} Decoder;

typedef struct {
    const float *cos, *sin; /* [.., dim]; the first half of the sines is negated. */
    int64_t dim;
    int64_t by_position; /* 1: a row for each position; 0: a row for each token of the step. */
} Rotation;

typedef struct {
    int64_t num_tokens, num_rows, threads;
    const int64_t *ids, *positions, *slots; /* [num_tokens] */
    const int64_t *const *blocks;     /* [num_tokens]: the blocks of each token's sequence */
    const int64_t *rows;              /* [num_rows]: the tokens whose logits are computed */
    const Rotation *rotations;
    float *logits; /* [num_rows, vocab] */
} Step;

enum {
    PART_FLOATS = 1 << 13, /* Approximate number of weights of a part of a product, */
    MANY_PARTS = 64,       /* except that a product has at most about this number. */
    RUN = 8,               /* Tokens of one sequence whose attention is computed together. */
    SCORED = 4,            /* Queries whose scores are computed together. */
    MAX_QUERIES = LANES == 8 ? 4 : 8, /* Queries whose values are summed up together. */
};

static int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* --- products ------------------------------------------------------------------------------------ */

typedef struct {
    const Product *product;
    const float *x;
    float *y;
    int64_t tokens;
} Multiplied;

static void multiply_part(const void *given, int64_t first, int64_t end) {
    const Multiplied *m = given;
    multiply(m->product, m->x, m->tokens, m->y, first, end);
}

/* Outputs of a part. Parts are few, because no weights have been prefetched when a part begins. */
static int64_t part_of(int64_t out, int64_t in) {
    int64_t outs = most(PART_FLOATS / in, out / MANY_PARTS) / BLOCK_OUTS * BLOCK_OUTS;
    return most(outs, BLOCK_OUTS);
}

static void product(const Product *given, const float *x, int64_t tokens, float *y) {
    Multiplied m = {given, x, y, tokens};
    threads_run(multiply_part, &m, given->out, part_of(given->out, given->in));
}

/* --- the gated MLP ------------------------------------------------------------------------------- */

typedef struct {
    const Layer *layer;
    const float *x;
    float *both; /* [tokens, 2 * size]: gate and up */
    float *y;    /* [tokens, size] */
    int64_t tokens;
} Gated;

static void gated_part(const void *given, int64_t first, int64_t end) {
    const Gated *g = given;
    const Product *gate_up = &g->layer->gate_up;
    int64_t size = gate_up->out / 2, count = end - first;
    multiply(gate_up, g->x, g->tokens, g->both, first, end);
    multiply(gate_up, g->x, g->tokens, g->both, size + first, size + end);
    for (int64_t t = 0; t < g->tokens; t++) {
        float *gate = g->both + t * 2 * size + first, *up = gate + size, *to = g->y + t * size + first;
        if (g->layer->activation == SILU)
            FOR_EACH(gate, count, v, v / (exponential(-v) + 1.0f));
        else
            FOR_EACH(gate, count, v,
                     v / (exponential((v + v * v * v * 0.044715f) * -1.5957691216f) + 1.0f));
        for (int64_t i = 0; i < count; i++)
            to[i] = gate[i] * up[i];
    }
}

/* --- norms and rotation -------------------------------------------------------------------------- */

static void normalize(const Norm *norm, const float *x, float *y) {
    int64_t size = norm->size;
    float factor = 1.0f / sqrtf(dot(x, x, size) / (float)size + norm->eps);
    for (int64_t i = 0; i < size; i++)
        y[i] = x[i] * factor * norm->gain[i];
}

/* y = the norm of each token's x, or x if the layer has no such norm. */
static const float *normalized(const Norm *norm, const float *x, float *y, int64_t tokens) {
    if (!norm->gain)
        return x;
    for (int64_t t = 0; t < tokens; t++)
        normalize(norm, x + t * norm->size, y + t * norm->size);
    return y;
}

/* hidden += scale * norm(update) */
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

/* --- attention ----------------------------------------------------------------------------------- */

typedef struct {
    const Layer *layer;
    const Step *step;
    int64_t block_size;
    const float *qkv; /* [tokens, (heads + 2 * kv_heads) * dim] */
    float *y;         /* [tokens, heads * dim] */
    float *scores;    /* [tokens * kv_heads, heads / kv_heads, longest] */
    int64_t longest;
    const int64_t *runs; /* The first token of each run, and the end of the last. */
} Attention;

/* Divides the tokens of a step into runs: consecutive tokens of one sequence, whose queries read
 * the same keys and values. Returns the number of runs. */
static int64_t find_runs(const Step *step, int64_t *runs) {
    int64_t count = 0;
    for (int64_t t = 0; t < step->num_tokens; t++)
        if (!t || step->blocks[t] != step->blocks[t - 1] || t - runs[count - 1] == RUN ||
            step->positions[t] != step->positions[t - 1] + 1)
            runs[count++] = t;
    runs[count] = step->num_tokens;
    return count;
}

/* Softmax: turns scores into weights whose sum is 1. */
static void softmax(float *scores, int64_t count) {
    float greatest = -INFINITY, total = 0;
    Vector most_of = all(-INFINITY), total_of = {0};
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        Vector v = load(scores + i);
        most_of = choose(v > most_of, v, most_of);
    }
    for (int i = 0; i < LANES; i++)
        greatest = most_of[i] > greatest ? most_of[i] : greatest;
    for (int64_t i = whole; i < count; i++)
        greatest = scores[i] > greatest ? scores[i] : greatest;
    FOR_EACH(scores, count, v, exponential(v - greatest));
    for (int64_t i = 0; i < whole; i += LANES)
        total_of += load(scores + i);
    for (int64_t i = whole; i < count; i++)
        total += scores[i];
    float factor = 1.0f / (total + sum(total_of));
    for (int64_t i = 0; i < count; i++)
        scores[i] *= factor;
}

/* Number of positions from `at` to `end` or to the end of its block, whichever comes first. */
static int64_t together(int64_t at, int64_t end, int64_t size) {
    int64_t rest = size - at % size;
    return end - at < rest ? end - at : rest;
}

/* Keys or values of one key head, in blocks. */
typedef struct {
    const float *entries;
    const int64_t *blocks;
    int64_t row, size, dim;
} Kept;

INLINE const float *entry(const Kept *kept, int64_t position) {
    int64_t block = position / kept->size;
    return kept->entries +
           (kept->blocks[block] * kept->size + position - block * kept->size) * kept->row;
}

/* Prefetches the entries of up to LANES positions from this one on, in the same block. */
INLINE void fetch(const Kept *kept, int64_t position, int64_t end) {
    if (position >= end)
        return;
    int64_t count = together(position, end, kept->size);
    const float *from = entry(kept, position);
    for (int64_t i = 0; i < count && i < LANES; i++)
        for (int64_t at = 0; at < kept->dim; at += LINE)
            __builtin_prefetch(from + i * kept->row + at, 0, 3);
}

/* One query: its scores, later its weights, at the positions from first to end - 1. */
typedef struct {
    const float *query;
    float *scores, *found;
    int64_t first, end;
} Query;

/* Transposes LANES contiguous keys: vector i contains entry i of each key. The first key replaces
 * missing ones. */
INLINE void turn(const Kept *keys, const float *from, int64_t count, Vector *turned) {
    for (int64_t at = 0; at < keys->dim; at += LANES) {
        int64_t lanes = keys->dim - at < LANES ? keys->dim - at : LANES;
        Vector some[LANES];
        for (int i = 0; i < LANES; i++) {
            const float *key = from + (i < count ? i : 0) * keys->row + at;
            some[i] = lanes == LANES ? load(key) : load_some(key, lanes);
        }
        transpose(some);
        for (int i = 0; i < LANES; i++)
            turned[at + i] = some[i];
    }
}

/* The scores of some queries at the positions of transposed keys. The sums are added in the order
 * of `scores_of`, so that the results have equal bits: entries that are LANES apart in turn, then
 * neighbours. */
INLINE void turned_scores(const Vector *keys, const Query *queries, int count, int64_t dim,
                          Vector *found) {
    enum { PART = LANES / 4 };
    Vector parts[SCORED][4];
    for (int part = 0; part < 4; part++) {
        Vector sums[SCORED][PART] = {{{0}}};
        for (int64_t at = part * PART; at < dim; at += LANES)
            for (int i = 0; i < PART && at + i < dim; i++)
                for (int q = 0; q < count; q++)
                    sums[q][i] = FUSED(keys[at + i], all(queries[q].query[at + i]), sums[q][i]);
        for (int q = 0; q < count; q++) {
            for (int half = PART / 2; half; half /= 2)
                for (int i = 0; i < half; i++)
                    sums[q][i] = sums[q][2 * i] + sums[q][2 * i + 1];
            parts[q][part] = sums[q][0];
        }
    }
    for (int q = 0; q < count; q++)
        found[q] = (parts[q][0] + parts[q][1]) + (parts[q][2] + parts[q][3]);
}

/* The scores of one query at up to LANES contiguous positions. Unused lanes have the score of the
 * first position. */
INLINE Vector scores_of(const Kept *keys, const float *from, int64_t count, const float *query) {
    Vector found[LANES];
    for (int i = 0; i < LANES; i++)
        found[i] = (Vector){0};
    int64_t at = 0;
    for (; at + LANES <= keys->dim; at += LANES) {
        Vector part = load(query + at);
        for (int i = 0; i < LANES; i++)
            found[i] = FUSED(part, load(from + (i < count ? i : 0) * keys->row + at), found[i]);
    }
    if (at < keys->dim) {
        int64_t lanes = keys->dim - at;
        Vector part = load_some(query + at, lanes);
        for (int i = 0; i < LANES; i++)
            found[i] = FUSED(
                part, load_some(from + (i < count ? i : 0) * keys->row + at, lanes), found[i]);
    }
    return sums_of(found);
}

/* Stores the scores of a query at `count` positions, if the query attends to them. */
INLINE void keep_scores(const Query *query, int64_t at, int64_t count, Vector scores) {
    int64_t skipped = query->first > at ? query->first - at : 0;
    int64_t wanted = (query->end < at + count ? query->end - at : count) - skipped;
    if (wanted > 0)
        memcpy(query->scores + at + skipped - query->first, (float *)&scores + skipped,
               (size_t)wanted * sizeof(float));
}

/* The scores of all queries. Transposing keys takes as long as computing some queries' scores. */
static void score(const Kept *keys, const Query *queries, int64_t count, float scale) {
    int64_t first = queries[0].first, end = queries[count - 1].end, dim = keys->dim, some;
    Vector turned[dim + LANES], found[SCORED];
    for (int64_t at = first; at < end; at += some) {
        some = together(at, end, keys->size);
        some = some < LANES ? some : LANES;
        const float *from = entry(keys, at);
        int64_t i = 0;
        fetch(keys, at + some, end);
        if (count >= SCORED) {
            if (some == LANES)
                turn(keys, from, LANES, turned);
            else
                turn(keys, from, some, turned);
        }
        for (; i + SCORED <= count; i += SCORED) {
            turned_scores(turned, queries + i, SCORED, dim, found);
            for (int k = 0; k < SCORED; k++)
                keep_scores(queries + i + k, at, some, found[k] * scale);
        }
        for (; i < count; i++) {
            Vector own = some == LANES ? scores_of(keys, from, LANES, queries[i].query)
                                       : scores_of(keys, from, some, queries[i].query);
            keep_scores(queries + i, at, some, own * scale);
        }
    }
}

/* Adds the values at the positions first to end - 1, times their weights, to the sums of `count`
 * queries. Only `vectors` vectors of each value are added, from entry `at` on. If `lanes` is less
 * than LANES, only this number of lanes is read. */
INLINE void weigh(const Kept *values, const Query *queries, int count, int64_t at, int vectors,
                  int64_t lanes, int64_t first, int64_t end, Vector *found) {
    Vector total[2 * MAX_QUERIES];
    for (int i = 0; i < count * vectors; i++)
        total[i] = found[i];
    int64_t some;
    for (int64_t position = first; position < end; position += some) {
        const float *weights[MAX_QUERIES], *from = entry(values, position) + at;
        some = together(position, end, values->size);
        fetch(values, position + some, end);
        for (int q = 0; q < count; q++)
            weights[q] = queries[q].scores + position - queries[q].first;
        for (int64_t i = 0; i < some; i++, from += values->row)
            for (int v = 0; v < vectors; v++) {
                Vector part = lanes == LANES ? load(from + v * LANES) : load_some(from, lanes);
                for (int q = 0; q < count; q++)
                    total[q * vectors + v] =
                        FUSED(part, all(weights[q][i]), total[q * vectors + v]);
            }
    }
    for (int i = 0; i < count * vectors; i++)
        found[i] = total[i];
}

/* The weighted sums of values over all positions of each query. Each sum is in the order of the
 * positions, so that it does not depend on the other queries. */
INLINE void weigh_all(const Kept *values, const Query *queries, int count, int64_t at, int vectors,
                      int64_t lanes) {
    Vector found[2 * MAX_QUERIES] = {{0}};
    int64_t first = queries[count - 1].first, end = queries[0].end;
    if (first > end)
        first = end;
    for (int q = 0; q < count && queries[q].first < first; q++)
        weigh(values, queries + q, 1, at, vectors, lanes, queries[q].first, first,
              found + q * vectors);
    weigh(values, queries, count, at, vectors, lanes, first, end, found);
    for (int q = 0; q < count; q++)
        if (queries[q].end > end)
            weigh(values, queries + q, 1, at, vectors, lanes,
                  queries[q].first > end ? queries[q].first : end, queries[q].end,
                  found + q * vectors);
    for (int q = 0; q < count; q++)
        memcpy(queries[q].found + at, found + q * vectors,
               (size_t)((vectors - 1) * LANES + lanes) * sizeof(float));
}

INLINE void weigh_some(const Kept *values, const Query *queries, int64_t count, int64_t at,
                       int vectors, int64_t lanes) {
    int64_t q = 0;
#if LANES != 8
    for (; q + 8 <= count; q += 8)
        weigh_all(values, queries + q, 8, at, vectors, lanes);
#endif
    for (; q + 4 <= count; q += 4)
        weigh_all(values, queries + q, 4, at, vectors, lanes);
    for (; q + 2 <= count; q += 2)
        weigh_all(values, queries + q, 2, at, vectors, lanes);
    if (q < count)
        weigh_all(values, queries + q, 1, at, vectors, lanes);
}

/* The attention of the tokens of a run, for some query heads that share one key head. */
static void attend(const Attention *a, int64_t run, int64_t kv_head, int64_t head, int64_t heads) {
    const Layer *layer = a->layer;
    const Step *step = a->step;
    int64_t dim = layer->dim, group = layer->heads / layer->kv_heads;
    int64_t row = layer->kv_heads * dim, count = 0;
    Query queries[RUN * MAX_QUERIES];
    for (int64_t t = a->runs[run]; t < a->runs[run + 1]; t++) {
        int64_t end = step->positions[t] + 1;
        int64_t first = layer->window && end > layer->window ? end - layer->window : 0;
        for (int64_t g = head; g < head + heads; g++, count++)
            queries[count] = (Query){
                a->qkv + t * (layer->heads * dim + 2 * row) + (kv_head * group + g) * dim,
                a->scores + ((t * layer->kv_heads + kv_head) * group + g) * a->longest,
                a->y + (t * layer->heads + kv_head * group + g) * dim,
                first,
                end,
            };
    }
    const int64_t *blocks = step->blocks[a->runs[run]];
    Kept keys = {layer->keys + kv_head * dim, blocks, row, a->block_size, dim};
    Kept values = {layer->values + kv_head * dim, blocks, row, a->block_size, dim};
    score(&keys, queries, count, layer->softcap ? layer->scale / layer->softcap : layer->scale);
    for (int64_t i = 0; i < count; i++) {
        int64_t length = queries[i].end - queries[i].first;
        if (layer->softcap)
            FOR_EACH(queries[i].scores, length, v,
                     (1.0f - 2.0f / (exponential(v + v) + 1.0f)) * layer->softcap);
        softmax(queries[i].scores, length);
    }
    int64_t at = 0;
    for (; at + 2 * LANES <= dim; at += 2 * LANES)
        weigh_some(&values, queries, count, at, 2, LANES);
    if (at + LANES <= dim) {
        weigh_some(&values, queries, count, at, 1, LANES);
        at += LANES;
    }
    if (at < dim)
        weigh_some(&values, queries, count, at, 1, dim - at);
}

static void attend_part(const void *given, int64_t first, int64_t end) {
    const Attention *a = given;
    int64_t kv_heads = a->layer->kv_heads, group = a->layer->heads / kv_heads, some;
    for (int64_t i = first; i < end; i++)
        for (int64_t head = 0; head < group; head += some) {
            some = group - head < MAX_QUERIES ? group - head : MAX_QUERIES;
            attend(a, i / kv_heads, i % kv_heads, head, some);
        }
}

/* Normalizes and rotates the queries and keys of each token, and writes keys and values. */
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

/* The buffers of a forward, which the next forward reuses. */
typedef struct {
    int64_t *runs, num_runs;
    float *hidden, *x, *y, *wide, *narrow, *scores;
} Buffers;

static void layer_forward(const Decoder *decoder, const Layer *layer, const Step *step,
                          const Buffers *b, int64_t longest) {
    int64_t tokens = step->num_tokens, hidden = decoder->hidden;
    const float *x = normalized(&layer->before_attention, b->hidden, b->x, tokens);
    product(&layer->qkv, x, tokens, b->wide);
    write_keys(layer, step, b->wide);
    Attention a = {layer,     step,    decoder->block_size, b->wide, b->narrow,
                   b->scores, longest, b->runs};
    int64_t units = b->num_runs * layer->kv_heads;
    int64_t work = tokens * longest * layer->heads * layer->dim;
    threads_run(attend_part, &a, units, 1 + units * PART_FLOATS / work);
    product(&layer->output, b->narrow, tokens, b->y);
    add(b->hidden, b->y, &layer->after_attention, layer->residual_scale, tokens, hidden);
    x = normalized(&layer->before_mlp, b->hidden, b->x, tokens);
    Gated gated = {layer, x, b->wide, b->narrow, tokens};
    int64_t size = layer->gate_up.out / 2;
    threads_run(gated_part, &gated, size, part_of(size, 2 * hidden));
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

static float *floats(int64_t count) {
    return aligned_alloc(64, (size_t)(count + 63) / 64 * 64 * sizeof(float));
}

/* Computes a step. Returns 0, -1 if memory is exhausted, or -2 if an id has no embedding. */
__attribute__((visibility("default"))) int decoder_forward(const Decoder *decoder, const Step *step) {
    int64_t wide = 0, narrow = 0, scores = 0, longest = 0, tokens = step->num_tokens;
    for (int64_t t = 0; t < tokens; t++)
        longest = most(longest, step->positions[t] + 1);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const Layer *layer = decoder->layers + i;
        wide = most(wide, most(layer->qkv.out, layer->gate_up.out));
        narrow = most(narrow, most(layer->output.in, layer->down.in));
        scores = most(scores, layer->heads * longest);
    }
    int64_t hidden = decoder->hidden;
    int64_t runs = (tokens * 2 + 64) / 64 * 64; /* In floats; an int64_t takes two. */
    float *all = floats(runs + tokens * (3 * hidden + wide + narrow + scores) + 6 * 64);
    if (!all)
        return -1;
    Buffers b;
    b.runs = (int64_t *)all;
    b.num_runs = find_runs(step, b.runs);
    b.hidden = all + runs;
    b.x = b.hidden + tokens * hidden;
    b.y = b.x + tokens * hidden;
    b.wide = b.y + tokens * hidden;
    b.narrow = b.wide + tokens * wide;
    b.scores = b.narrow + tokens * narrow;
    if (!embed(decoder, step, b.hidden)) {
        free(all);
        return -2;
    }
    threads_begin(step->threads);
    for (int64_t i = 0; i < decoder->num_layers; i++)
        layer_forward(decoder, decoder->layers + i, step, &b, longest);
    for (int64_t r = 0; r < step->num_rows; r++) {
        const float *from = b.hidden + step->rows[r] * hidden;
        if (decoder->norm.gain)
            normalize(&decoder->norm, from, b.x + r * hidden);
        else
            memcpy(b.x + r * hidden, from, (size_t)hidden * sizeof(float));
    }
    if (step->num_rows)
        product(&decoder->head, b.x, step->num_rows, step->logits);
    threads_end();
    free(all);
    return 0;
}
