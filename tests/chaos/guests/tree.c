// Makes a tree of forks: DEPTH times, each sequence generates LENGTH tokens and forks into two.
//
// The argument is "DEPTH LENGTH". The first token of one fork has an even id, and that of the other an odd id, so
// that the forks differ with greedy sampling too.
#include "tokenbus.h"

static uint32_t depth, length, generated;
static bool forks;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!tb_read_number(&at, end, &depth) || *at++ != ' ' || !tb_read_number(&at, end, &length))
        tb_fail("the argument is \"%s\"; expected \"DEPTH LENGTH\"", arg);
}

tb_answer tb_pre_process(void) {
    if (generated < length) return tb_go_on();
    if (!depth) return tb_stop();
    depth--;
    generated = 0;
    forks = true;
    return tb_fork(2);
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    if (!forks) return tb_sample(0);
    forks = false;
    const uint32_t parity = n > 1 && fork_group[1] == tb_seq_id();
    tb_log("%u more\n", depth);
    uint32_t *mask = tb_mask_new();
    for (uint32_t token = 2 + parity; token < tb_vocab_size(); token += 2) tb_mask_set(mask, token);
    return tb_sample(mask);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)backtrack;
    generated += n;
    return tb_go_on();
}
