// Biases: numbers that are added to the logits of the next token.
#ifndef TOKENBUS_BIAS_H
#define TOKENBUS_BIAS_H

// A bias is sparse (values for some tokens) or dense (a value for each token). tb_bias_new makes a
// sparse bias; tb_bias_values makes it dense.
typedef struct tb_bias {
    tb_bytes data;  // sparse: tb_bias_pair by ascending tokens; dense: a float for each token
    bool dense;
} tb_bias;

typedef struct tb_bias_pair {
    uint32_t token;
    float value;
} tb_bias_pair;

// A bias that adds nothing; free with tb_bias_free.
static inline tb_bias *tb_bias_new(void) {
    tb_bias *bias = tb_alloc(sizeof(tb_bias));
    *bias = (tb_bias){{0}, false};
    return bias;
}

static inline void tb_bias_free(tb_bias *bias) {
    tb_bytes_free(&bias->data);
    tb_free(bias);
}

// Resets all values to 0; a dense bias stays dense.
static inline void tb_bias_clear(tb_bias *bias) {
    if (bias->dense)
        memset(bias->data.data, 0, bias->data.len);
    else
        tb_bytes_cut(&bias->data, 0);
}

// The index of a token's pair in a sparse bias, or the index at which the pair would be inserted.
static inline uint32_t tb_bias_place(const tb_bias *bias, uint32_t token) {
    const tb_bias_pair *pairs = (const tb_bias_pair *)bias->data.data;
    uint32_t low = 0, high = bias->data.len / sizeof(tb_bias_pair);
    if (high && pairs[high - 1].token < token) return high;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (pairs[middle].token < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The value of a token; 0 if it was not set.
static inline float tb_bias_get(const tb_bias *bias, uint32_t token) {
    if (token >= tb_vocab_size()) return 0;
    if (bias->dense) return ((const float *)bias->data.data)[token];
    const tb_bias_pair *pairs = (const tb_bias_pair *)bias->data.data;
    const uint32_t place = tb_bias_place(bias, token);
    const bool here =
        place < bias->data.len / sizeof(tb_bias_pair) && pairs[place].token == token;
    return here ? pairs[place].value : 0;
}

// Sets the value of a token; -INFINITY (-__builtin_inff()) forbids the token. Setting tokens in
// ascending order is the fastest.
static inline void tb_bias_set(tb_bias *bias, uint32_t token, float value) {
    if (token >= tb_vocab_size())
        tb_fail("tb_bias_set: token %u is not in the vocabulary, which is 0 to %u", token,
                tb_vocab_size() - 1);
    if (bias->dense) {
        ((float *)bias->data.data)[token] = value;
        return;
    }
    const uint32_t place = tb_bias_place(bias, token), size = sizeof(tb_bias_pair);
    const uint32_t count = bias->data.len / size;
    const tb_bias_pair pair = {token, value};
    tb_bias_pair *pairs = (tb_bias_pair *)bias->data.data;
    if (place < count && pairs[place].token == token) {
        pairs[place] = pair;
        return;
    }
    tb_bytes_append(&bias->data, &pair, size);
    if (place == count) return;
    pairs = (tb_bias_pair *)bias->data.data;
    memmove(pairs + place + 1, pairs + place, size * (count - place));
    pairs[place] = pair;
}

// The values of all tokens, to be read and written. The bias becomes dense.
static inline float *tb_bias_values(tb_bias *bias) {
    if (bias->dense) return (float *)bias->data.data;
    const uint32_t n = 4 * tb_vocab_size(), count = bias->data.len / sizeof(tb_bias_pair);
    tb_bytes every = {0};
    tb_bytes_reserve(&every, n);
    memset(every.data, 0, n);
    every.len = n;
    const tb_bias_pair *pairs = (const tb_bias_pair *)bias->data.data;
    for (uint32_t i = 0; i < count; i++) ((float *)every.data)[pairs[i].token] = pairs[i].value;
    tb_bytes_free(&bias->data);
    *bias = (tb_bias){every, true};
    return (float *)bias->data.data;
}

// mid_process: samples a token that the mask allows (0: any token), from logits to which the bias
// is added (0: no bias). The mask and the bias must not change until the next call.
static inline tb_answer tb_sample_bias(const uint32_t *mask, const tb_bias *bias) {
    tb_answer answer = tb_sample(mask);
    if (bias && bias->data.len) {
        answer.bias = bias->data.data;
        answer.pairs = bias->dense ? 0 : bias->data.len / sizeof(tb_bias_pair);
    }
    return answer;
}

#endif
