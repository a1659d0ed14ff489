// The distributions from which tokens are sampled, and the sampling parameters.
#ifndef TOKENBUS_DISTRIBUTION_H
#define TOKENBUS_DISTRIBUTION_H

TB_IMPORT("query") void tb_host_query(uint32_t top, const uint32_t *tokens, uint32_t n);
TB_IMPORT("override") void tb_host_override(uint32_t which, uint64_t value);
TB_IMPORT("distribution") int32_t tb_host_distribution(uint32_t place, void *into, uint32_t most);

typedef struct tb_scored {
    uint32_t token;
    float logprob;
} tb_scored;

// The distribution that the model computed for a token, before biases, penalties, the mask and the
// temperature are applied.
typedef struct tb_distribution {
    float logprob;  // of the sampled token, as a natural logarithm; 0 after tb_look
    uint32_t rank;  // 1 plus the number of more likely tokens; 0 after tb_look
    float entropy;  // in nats
    uint32_t num_top, num_scores;
    const tb_scored *top;     // the most likely tokens, the most likely first
    const tb_scored *scores;  // the tokens that the query named, in its order
} tb_distribution;

enum { TB_MAX_QUERY_TOP = 64, TB_MAX_QUERY_TOKENS = 256 };

// Queries the distribution of sampled tokens: the `top` most likely tokens, and `n` given tokens. A
// query in tb_init_prompt applies to every token, a query in another call to the next token only.
static inline void tb_query(uint32_t top, const uint32_t *tokens, uint32_t n) {
    tb_host_query(top, tokens, n);
}

// mid_process: reads the distribution of the next token without sampling. The arguments are those
// of tb_query. tb_post_process follows without tokens, and tb_distribution_get(0) has the answer.
// The next tb_sample or tb_look does not run the model again, unless the sequence has appended or
// dropped tokens or was suspended.
static inline tb_answer tb_look(uint32_t top, const uint32_t *tokens, uint32_t n) {
    tb_host_query(top, tokens, n);
    return (tb_answer){.then = TB_LOOK};
}

// The distribution from which a token was sampled. `place` is the token's index in the tokens that
// tb_post_process received last. Returns 0 if the distribution was not queried, or if the
// controller appended the token. The result is valid until the next call of this function.
static inline const tb_distribution *tb_distribution_get(uint32_t place) {
    static struct {
        float logprob;
        uint32_t rank;
        float entropy;
        uint32_t num_top, num_scores;
        tb_scored pairs[TB_MAX_QUERY_TOP + TB_MAX_QUERY_TOKENS];
    } answer;
    static tb_distribution found;
    if (tb_host_distribution(place, &answer, sizeof answer) < 0) return 0;
    found = (tb_distribution){answer.logprob,    answer.rank,  answer.entropy,
                              answer.num_top,    answer.num_scores,
                              answer.pairs,      answer.pairs + answer.num_top};
    return &found;
}

static inline uint32_t tb_float_bits(float value) {
    union {
        float number;
        uint32_t bits;
    } both = {value};
    return both.bits;
}

// These functions set a sampling parameter for the next token only, in place of the request's
// parameter.
static inline void tb_override_temperature(float temperature) {
    tb_host_override(0, tb_float_bits(temperature));
}

static inline void tb_override_top_p(float top_p) { tb_host_override(1, tb_float_bits(top_p)); }

static inline void tb_override_seed(uint64_t seed) { tb_host_override(2, seed); }

#endif
