// Contrastive sampling: if the model is uncertain, chooses the token that repeats the text least.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/contrastive.c -o contrastive.wasm
//
// The argument is "ENTROPY PENALTY", for example "1.0 1.0". If the entropy is above ENTROPY nats,
// one of the likeliest tokens replaces the sampled token: the token with the greatest score. The
// score is the log-probability minus PENALTY for each token that would be repeated. contrastive.py
// is the same in Python.
#include "tokenbus.h"

enum { TOP = 8, MAX_REPEATED = 4 };

static float bound, penalty;
static tb_bytes text;                   // the tokens so far
static uint32_t instead = TB_NONE;  // replaces the last token

// Reads a decimal number with or without a point.
static bool read_decimal(const char **at, const char *end, float *number) {
    uint32_t whole;
    if (!tb_read_number(at, end, &whole)) return false;
    *number = (float)whole;
    if (*at == end || **at != '.') return true;
    float place = 1;
    for (++*at; *at < end && **at >= '0' && **at <= '9'; ++*at)
        *number += (float)(**at - '0') * (place /= 10);
    return true;
}

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    const char *at = arg, *end = arg + arg_len;
    if (!read_decimal(&at, end, &bound) || *at++ != ' ' || !read_decimal(&at, end, &penalty))
        tb_fail("the argument must be like \"1.0 1.0\" (ENTROPY PENALTY); it is \"%s\"", arg);
    tb_bytes_append(&text, prompt, 4 * n);
    tb_query(TOP, 0, 0);
}

// The penalty of a token after the text, in multiples of PENALTY. The penalty is 0 if the token has
// not occurred. Otherwise it is the length of the longest repetition that the token would complete,
// including the token itself.
static uint32_t repeated(uint32_t token) {
    const uint32_t *tokens = (const uint32_t *)text.data, n = text.len / 4;
    uint32_t longest = 0;
    for (uint32_t place = 0; place < n; place++) {
        if (tokens[place] != token) continue;
        uint32_t same = 0;
        while (same < MAX_REPEATED && same < place &&
               tokens[place - 1 - same] == tokens[n - 1 - same])
            same++;
        if (same + 1 > longest) longest = same + 1;
    }
    return longest;
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    if (instead == TB_NONE) return tb_sample(0);
    const uint32_t token = instead;
    instead = TB_NONE;
    return tb_splice(1, &token, 1);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    tb_bytes_cut(&text, text.len - 4 * backtrack);
    const tb_distribution *seen = tb_distribution_get(0);
    if (seen && seen->entropy > bound) {
        float most = 0;
        for (uint32_t i = 0; i < seen->num_top; i++) {
            const float value = seen->top[i].logprob - penalty * (float)repeated(seen->top[i].token);
            if (i && value <= most) continue;
            most = value;
            instead = seen->top[i].token;
        }
        if (instead == tokens[0]) instead = TB_NONE;
    }
    tb_bytes_append(&text, tokens, 4 * n);
    return tb_go_on();
}
