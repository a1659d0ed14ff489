/* The forward of a decoder for few tokens, in float32, in one call.
 *
 * A token of a small model costs more in calls of small operations than in arithmetic, and one row
 * times a matrix is bound by how fast memory gives the matrix. So here the weights are read once for
 * all tokens, in the order in which they lie in memory, and what is between the products is done on
 * the way. Keys and values are read from their blocks in place. It computes what FusedDecoder
 * (fused.py) computes; the structures are those of native_decoder.py. */

#include <math.h>
#include <stdlib.h>

#include "products.h"
#include "threads.h"
#include "vectors.h"

typedef struct {
    const float *gain; /* Null: there is no such norm. */
    int64_t size;
    float eps;
} Norm;

enum { SILU, GELU_TANH };

typedef struct {
    Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
    Product qkv, output, gate_up, down;
    float *keys, *values; /* [blocks, block_size, kv_heads, dim] */
    int64_t heads, kv_heads, dim;
    int64_t window;   /* 0: none */
    int64_t rotation; /* Which of the step's; -1: none */
    int64_t activation;
    float scale, softcap, residual_scale; /* softcap 0: none */
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
    int64_t by_position; /* A row for each position; 0: one for each token of the step. */
} Rotation;

typedef struct {
    int64_t num_tokens, num_rows, threads;
    const int64_t *ids, *positions, *slots; /* [num_tokens] */
    const int64_t *const *blocks;     /* [num_tokens]: the blocks of each one's sequence */
    const int64_t *rows;              /* [num_rows]: the tokens whose logits are wanted */
    const Rotation *rotations;
    float *logits; /* [num_rows, vocab] */
} Step;

enum {
    PART_FLOATS = 1 << 13, /* Weights of a part of a product, about, */
    MANY_PARTS = 64,       /* unless there would be more parts than that. */
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

/* Outputs of a part: not too many parts, as at the beginning of each no weights were fetched. */
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

/* y = the norm of each token's x, or x where there is no norm. */
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
} Attention;

/* The scores of one query at positions that lie together, as many as there are lanes; of fewer, the
 * others are those of the first. */
INLINE Vector scores_of(const float *query, const float *const *keys, int64_t dim) {
    Vector found[LANES];
    for (int i = 0; i < LANES; i++)
        found[i] = (Vector){0};
    int64_t at = 0;
    for (; at + LANES <= dim; at += LANES) {
        Vector part = load(query + at);
        for (int i = 0; i < LANES; i++)
            found[i] += part * load(keys[i] + at);
    }
    if (at < dim) {
        Vector part = load_some(query + at, dim - at);
        for (int i = 0; i < LANES; i++)
            found[i] += part * load_some(keys[i] + at, dim - at);
    }
    return sums_of(found);
}

/* Scores become weights that sum up to 1. */
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

/* How many positions from this one on lie together in a block. */
static int64_t together(int64_t at, int64_t end, int64_t size) {
    int64_t rest = size - at % size;
    return end - at < rest ? end - at : rest;
}

typedef struct {
    const float *values;
    const int64_t *blocks;
    int64_t row, size, first, end, longest;
} Weighed;

/* A vector of each of some queries' sums of values, from entry at on. */
INLINE void weigh(const Weighed *w, const float *scores, int64_t at, int64_t lanes, float *found,
                  int64_t dim, int queries) {
    Vector total[4] = {{0}};
    int64_t count;
    for (int64_t position = w->first; position < w->end; position += count) {
        count = together(position, w->end, w->size);
        const float *value =
            w->values + (w->blocks[position / w->size] * w->size + position % w->size) * w->row + at;
        const float *own = scores + position - w->first;
        for (int64_t i = 0; i < count; i++) {
            const float *from = value + i * w->row;
            Vector part = lanes == LANES ? load(from) : load_some(from, lanes);
            for (int g = 0; g < queries; g++)
                total[g] += part * own[g * w->longest + i];
        }
    }
    for (int g = 0; g < queries; g++)
        memcpy(found + g * dim + at, &total[g], (size_t)lanes * sizeof(float));
}

/* One token's queries of one key head, over all positions that it attends to. */
static void attend(const Attention *a, int64_t t, int64_t kv_head, float *scores) {
    const Layer *layer = a->layer;
    int64_t dim = layer->dim, group = layer->heads / layer->kv_heads;
    int64_t row = layer->kv_heads * dim, size = a->block_size;
    int64_t end = a->step->positions[t] + 1;
    int64_t first = layer->window && end > layer->window ? end - layer->window : 0;
    const int64_t *blocks = a->step->blocks[t];
    const float *queries =
        a->qkv + t * (layer->heads + 2 * layer->kv_heads) * dim + kv_head * group * dim;
    float *found = a->y + t * layer->heads * dim + kv_head * group * dim;
    float scale = layer->softcap ? layer->scale / layer->softcap : layer->scale;
    int64_t count;
    for (int64_t at = first; at < end; at += count) {
        const float *keys[LANES];
        count = together(at, end, size);
        count = count < LANES ? count : LANES;
        const float *base = layer->keys + (blocks[at / size] * size + at % size) * row + kv_head * dim;
        for (int64_t i = 0; i < LANES; i++)
            keys[i] = base + (i < count ? i : 0) * row;
        for (int64_t g = 0; g < group; g++) {
            Vector several = scores_of(queries + g * dim, keys, dim) * scale;
            memcpy(scores + g * a->longest + at - first, &several, (size_t)count * sizeof(float));
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *own = scores + g * a->longest;
        if (layer->softcap)
            FOR_EACH(own, end - first, v,
                     (1.0f - 2.0f / (exponential(v + v) + 1.0f)) * layer->softcap);
        softmax(own, end - first);
    }
    Weighed w = {layer->values + kv_head * dim, blocks, row, size, first, end, a->longest};
    for (int64_t at = 0; at < dim; at += LANES) {
        int64_t lanes = dim - at < LANES ? dim - at : LANES, g = 0;
        for (; g + 4 <= group; g += 4)
            weigh(&w, scores + g * a->longest, at, lanes, found + g * dim, dim, 4);
        for (; g + 2 <= group; g += 2)
            weigh(&w, scores + g * a->longest, at, lanes, found + g * dim, dim, 2);
        if (g < group)
            weigh(&w, scores + g * a->longest, at, lanes, found + g * dim, dim, 1);
    }
}

static void attend_part(const void *given, int64_t first, int64_t end) {
    const Attention *a = given;
    int64_t kv_heads = a->layer->kv_heads, group = a->layer->heads / kv_heads;
    for (int64_t i = first; i < end; i++)
        attend(a, i / kv_heads, i % kv_heads, a->scores + i * group * a->longest);
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

/* The buffers of a forward, which are kept for the next one. */
typedef struct {
    float *hidden, *x, *y, *wide, *narrow, *scores;
} Buffers;

static void layer_forward(const Decoder *decoder, const Layer *layer, const Step *step,
                          const Buffers *b, int64_t longest) {
    int64_t tokens = step->num_tokens, hidden = decoder->hidden;
    const float *x = normalized(&layer->before_attention, b->hidden, b->x, tokens);
    product(&layer->qkv, x, tokens, b->wide);
    write_keys(layer, step, b->wide);
    Attention a = {layer, step, decoder->block_size, b->wide, b->narrow, b->scores, longest};
    int64_t work = longest * layer->heads * layer->dim;
    threads_run(attend_part, &a, tokens * layer->kv_heads, 1 + layer->kv_heads * PART_FLOATS / work);
    product(&layer->output, b->narrow, tokens, b->y);
    add(b->hidden, b->y, &layer->after_attention, layer->residual_scale, tokens, hidden);
    x = normalized(&layer->before_mlp, b->hidden, b->x, tokens);
    Gated gated = {layer, x, b->wide, b->narrow, tokens};
    int64_t size = layer->gate_up.out / 2;
    threads_run(gated_part, &gated, size, part_of(size, 2 * hidden));
    product(&layer->down, b->narrow, tokens, b->y);
    add(b->hidden, b->y, &layer->after_mlp, layer->residual_scale, tokens, hidden);
}

/* The embeddings of a step's tokens; whether there are any of each. */
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

/* Computes a step; 0, or -1 where there is no memory, -2 where an id has no embedding. */
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
    float *all = floats(tokens * (3 * hidden + wide + narrow + scores) + 6 * 64);
    if (!all)
        return -1;
    Buffers b;
    b.hidden = all;
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
