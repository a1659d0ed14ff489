/* Attention of the tokens of a step over keys and values in blocks, which are read in place.
 *
 * The weights and the weighted values of a query are added in an order that depends only on the
 * positions. So the bits of a token's result do not depend on the other tokens of the step, on the
 * size of the blocks or on the number of threads. */

#ifndef TOKENBUS_ATTENTION_H
#define TOKENBUS_ATTENTION_H

#include <math.h>

#include "layers.h"
#include "threads.h"

enum {
    RUN = 8,    /* Maximum number of tokens of one sequence that are computed together. */
    SCORED = 4, /* Number of queries whose scores are computed together. */
    MAX_QUERIES = LANES == 8 ? 4 : 8, /* Maximum number of query heads of a token in a call of
                                       * attend, and of queries in a call of weigh. */
};

typedef struct {
    const Layer *layer;
    const Step *step;
    int64_t block_size;
    const float *queries; /* The query heads of token t begin at t * stride. */
    int64_t stride;
    float *y;        /* [tokens, heads * dim] */
    float *scores;   /* [threads, RUN * MAX_QUERIES, longest] */
    int64_t longest; /* Greatest number of positions that a token may attend to. */
    const int64_t *runs; /* The first token of each run, and the end of the last run. */
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

/* Softmax: replaces scores by weights whose sum is 1. */
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

/* Number of positions from `at` to the end of its block, or to `end` if `end` comes first. */
static int64_t together(int64_t at, int64_t end, int64_t size) {
    int64_t rest = size - at % size;
    return end - at < rest ? end - at : rest;
}

/* Keys or values of one key head, in blocks. An entry has `dim` floats, the next entry of the same
 * block begins `row` floats later, and a block has `size` entries. */
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

/* Prefetches the entries of up to LANES positions from `position` on, in the same block. */
INLINE void fetch(const Kept *kept, int64_t position, int64_t end) {
    if (position >= end)
        return;
    int64_t count = together(position, end, kept->size);
    const float *from = entry(kept, position);
    for (int64_t i = 0; i < count && i < LANES; i++)
        for (int64_t at = 0; at < kept->dim; at += LINE)
            __builtin_prefetch(from + i * kept->row + at, 0, 3);
}

/* One query, which attends to the positions from first to end - 1. */
typedef struct {
    const float *query;
    float *scores; /* The score of each position, which softmax replaces by its weight. */
    float *result; /* The weighted sum of values. */
    int64_t first, end;
} Query;

/* Transposes `count` consecutive keys, at most LANES: vector i of `turned` contains component i of
 * each key. If there are fewer than LANES keys, the first key fills the other lanes. */
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

/* The scores of `count` queries at the positions of transposed keys. The results have the same bits
 * as those of `scores_of`, because the products are added in the same order. First, each product is
 * added to one of LANES sums; products that are LANES apart are added to the same sum. Then
 * neighbouring sums are added in pairs. */
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

/* The scores of all queries, which are ordered by position. Keys are transposed only for SCORED or
 * more queries, because transposing takes as long as computing the scores of a few queries. The
 * constant LANES is passed where possible, because the compiler makes faster code for it. */
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

/* `found` has the sums of `count` queries. For each query, adds to its sum the values at the
 * positions first to end - 1, times their weights. Only `vectors` vectors of each value are added,
 * from component `at` on. If `lanes` is less than LANES, `vectors` is 1, and only `lanes`
 * components are added. */
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

/* The weighted sums of values over all positions of each query. The queries are ordered by
 * position. So all queries attend to the positions from the first position of the last query to the
 * end of the first query. These shared positions are added for all queries together. Earlier and
 * later positions are added for each query alone. Each sum is computed in the order of the
 * positions, so it does not depend on the other queries. */
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
        memcpy(queries[q].result + at, found + q * vectors,
               (size_t)((vectors - 1) * LANES + lanes) * sizeof(float));
}

/* Divides queries into groups of constant sizes for weigh_all. */
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

/* The attention of the tokens of a run, for `heads` query heads of one key head. `head` is the
 * index of the first of these heads within the key head's query heads. */
static void attend(const Attention *a, float *scores, int64_t run, int64_t kv_head, int64_t head,
                   int64_t heads) {
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
                a->queries + t * a->stride + (kv_head * group + g) * dim,
                scores + count * a->longest,
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
            FOR_EACH(queries[i].scores, length, v, hyperbolic(v) * layer->softcap);
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

/* A Loop (threads.h) whose items are the pairs of a run and a key head. */
static void attend_part(const void *given, int64_t thread, int64_t first, int64_t end) {
    const Attention *a = given;
    float *scores = a->scores + thread * RUN * MAX_QUERIES * a->longest;
    int64_t kv_heads = a->layer->kv_heads, group = a->layer->heads / kv_heads, some;
    for (int64_t i = first; i < end; i++)
        for (int64_t head = 0; head < group; head += some) {
            some = group - head < MAX_QUERIES ? group - head : MAX_QUERIES;
            attend(a, scores, i / kv_heads, i % kv_heads, head, some);
        }
}

/* The attention of all runs. A part of the loop has about PART_FLOATS products. */
static void attend_runs(const Attention *a, int64_t num_runs) {
    const Layer *layer = a->layer;
    int64_t units = num_runs * layer->kv_heads;
    int64_t work = a->step->num_tokens * a->longest * layer->heads * layer->dim;
    threads_run(attend_part, a, units, 1 + units * PART_FLOATS / work);
}

/* Number of floats of the scores of all threads. */
static int64_t score_floats(int64_t threads, int64_t longest) {
    return threads_bounded(threads) * RUN * MAX_QUERIES * longest;
}

#endif
