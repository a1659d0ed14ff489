// Beam search: each step keeps the likeliest of all continuations of all beams.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/beams.c -o beams.wasm
//
// The argument is "WIDTH TOKENS": the number of beams and the length of the text. Each beam is a
// sequence. In each step, it reads the distribution of the next token, writes the likeliest tokens
// and its score to a variable, and suspends until all beams have written. All beams then compute the
// same choice of continuations. A beam with several chosen continuations forks, and a beam without
// one stops. After the last step, only the sequence with the result remains.
#include "tokenbus.h"

enum { MAX_WIDTH = 16 };

typedef struct candidate {
    double score;  // log-probability of the whole text
    uint32_t beam, token;
} candidate;

static uint32_t width, length, step, beam, beams = 1;
static double score;
static bool waits;
static candidate chosen[MAX_WIDTH];  // the beams of the next step, the likeliest first
static uint32_t num_chosen;
static uint32_t mine[MAX_WIDTH], num_mine;  // indexes in `chosen` of candidates of this beam

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!tb_read_number(&at, end, &width) || *at++ != ' ' || !tb_read_number(&at, end, &length) ||
        width < 1 || width > MAX_WIDTH || length < 1)
        tb_fail("the argument must be \"WIDTH TOKENS\" with WIDTH from 1 to %u, for example "
                "\"3 20\"; it is \"%s\"",
                MAX_WIDTH, arg);
    if (length >= tb_max_tokens())
        tb_fail("a text of %u tokens needs max_tokens of at least %u", length, length + 1);
}

static bool is_better(const candidate *one, const candidate *other) {
    if (one->score != other->score) return one->score > other->score;
    if (one->beam != other->beam) return one->beam < other->beam;
    return one->token < other->token;
}

// Keeps a candidate if it is among the `most` best.
static void consider(candidate one, uint32_t most) {
    uint32_t at = num_chosen < most ? num_chosen++ : most;
    if (at == most && !is_better(&one, &chosen[--at])) return;
    for (; at && is_better(&one, &chosen[at - 1]); at--) chosen[at] = chosen[at - 1];
    chosen[at] = one;
}

static const char *variable(void) {
    static tb_bytes name;
    tb_bytes_cut(&name, 0);
    tb_format(&name, "step %u", step);
    return (const char *)name.data;
}

tb_answer tb_pre_process(void) {
    if (!waits) return tb_go_on();
    static tb_bytes written;
    if (!tb_var_wait(variable(), beams, &written)) return tb_suspend();
    num_chosen = num_mine = 0;
    for (uint32_t at = 0; at < written.len; at += sizeof(candidate))
        consider(*(candidate *)(written.data + at), step + 1 == length ? 1 : width);
    for (uint32_t place = 0; place < num_chosen; place++)
        if (chosen[place].beam == beam) mine[num_mine++] = place;
    beams = num_chosen;
    if (!num_mine) return tb_stop();
    return num_mine > 1 ? tb_fork(num_mine) : tb_go_on();
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    if (!waits) return step == length ? tb_stop() : tb_look(width, 0, 0);
    uint32_t place = 0;
    while (place + 1 < n && fork_group[place] != tb_seq_id()) place++;
    beam = mine[place];
    score = chosen[beam].score;
    waits = false;
    if (++step == length) {
        const uint32_t thousandths = (uint32_t)(-score * 1000 + 0.5);
        tb_log("score -%u.%03u", thousandths / 1000, thousandths % 1000);
    }
    return tb_splice(0, &chosen[beam].token, 1);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)n, (void)backtrack;
    const tb_distribution *seen = tb_distribution_get(0);
    if (!seen) return tb_go_on();
    candidate every[MAX_WIDTH];
    for (uint32_t i = 0; i < seen->num_top; i++)
        every[i] = (candidate){score + seen->top[i].logprob, beam, seen->top[i].token};
    tb_var_append(variable(), every, seen->num_top * sizeof(candidate));
    waits = true;
    return tb_go_on();
}
