/* The structures of a decoder and of a step. They must match those of decoder.py in this folder. */

#ifndef TOKENBUS_DECODER_H
#define TOKENBUS_DECODER_H

#include "products.h"

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
    float logits_scale, logits_cap; /* logits_cap 0: no cap */
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

#endif
