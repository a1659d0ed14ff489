// Classifier-free guidance: the text follows its prompt more than a second, negative prompt.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/guidance.c -o guidance.wasm
//
// The argument is "SCALE TEMPERATURE PROMPT". Sequence 0 is the text. Its fork, the guide, has
// PROMPT after the request's prompt, and then the tokens of the text. A token has the
// log-probability c in the text and u in the guide. The logits for sampling are
// SCALE * c + (1 - SCALE) * u. Sampling from c with the bias (1 - SCALE) / SCALE * u, at the
// temperature TEMPERATURE / SCALE, gives the same result. guidance.py is the same in Python.
#include "tokenbus.h"

static float scale, temperature;
static tb_tokens second;
static uint32_t length, step;
static enum { NEW, TEXT, GUIDE } role;
static bool undo;   // in the text: its first token was sampled without the guide
static bool waits;  // in the guide: the likeliest tokens have been written
static tb_bytes read;  // from the other sequence: tb_scored of the guide, or tokens of the text
static tb_bias *bias;

// Reads a decimal number with or without a point, and the space after it.
static bool read_decimal(const char **at, const char *end, float *number) {
    uint32_t whole;
    if (!tb_read_number(at, end, &whole)) return false;
    *number = (float)whole;
    float place = 1;
    if (*at < end && **at == '.')
        for (++*at; *at < end && **at >= '0' && **at <= '9'; ++*at)
            *number += (float)(**at - '0') * (place /= 10);
    return *at < end && *(*at)++ == ' ';
}

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!read_decimal(&at, end, &scale) || !read_decimal(&at, end, &temperature) || scale <= 0)
        tb_fail("the argument must be like \"1.5 0.8 # a\" (SCALE TEMPERATURE PROMPT); it is \"%s\"",
                arg);
    second = tb_tokenize(at, (uint32_t)(end - at));
    // The guide has the second prompt and the whole text, and both count towards max_tokens.
    if (second.n + 2 > tb_max_tokens()) tb_fail("max_tokens must be at least %u", second.n + 2);
    length = tb_max_tokens() - second.n - 1;
    bias = tb_bias_new();
}

tb_answer tb_pre_process(void) {
    if (role == NEW) return tb_fork(2);
    if (step >= length) return tb_stop();
    if (role == GUIDE && !waits) return tb_go_on();
    uint32_t version;
    if (!tb_var_get(role == TEXT ? "guide" : "text", &read, &version) || version <= step)
        return tb_suspend();
    const bool ends = role == GUIDE && ((uint32_t *)read.data)[step] == tb_special_token(TB_EOS);
    return ends ? tb_stop() : tb_go_on();
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    if (role == NEW) {
        role = n && fork_group[0] == tb_seq_id() ? TEXT : GUIDE;
        undo = role == TEXT;
        // A fork begins with mid_process, which cannot suspend.
        return undo ? tb_sample(0) : tb_splice(0, second.ids, second.n);
    }
    if (role == GUIDE) {
        if (waits) return tb_splice(1, (uint32_t *)read.data + step, 1);
        tb_query(TB_MAX_QUERY_TOP, 0, 0);
        return tb_sample(0);
    }
    if (undo) return tb_splice(1, 0, 0);
    const tb_scored *top = (const tb_scored *)read.data;
    const uint32_t count = read.len / sizeof(tb_scored);
    tb_bias_clear(bias);
    // The least likely token that the guide has written, and all tokens that it has not written,
    // get the bias 0.
    for (uint32_t i = 0; i < count; i++)
        tb_bias_set(bias, top[i].token,
                    (1 - scale) / scale * (top[i].logprob - top[count - 1].logprob));
    tb_override_temperature(temperature / scale);
    return tb_sample_bias(0, bias);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    if (role == TEXT) {
        if (undo) return undo = !backtrack, tb_go_on();
        tb_var_append("text", tokens, 4 * n);
        step += n;
        return tokens[0] == tb_special_token(TB_EOS) ? tb_stop() : tb_go_on();
    }
    const tb_distribution *seen = tb_distribution_get(0);
    if (seen) tb_var_set("guide", seen->top, seen->num_top * sizeof(tb_scored));
    step += backtrack;
    waits = seen != 0;
    return tb_go_on();
}
