// The sequences of a request generate in steps. After each step, every sequence waits until all sequences have
// finished the step.
//
// The argument is "SEQUENCES STEPS LENGTH". Sequence 0 forks into SEQUENCES. STEPS times, each sequence generates
// LENGTH tokens, appends a byte to the variable "here" and suspends until all sequences have appended. All bytes
// are equal, so that the order of the appends has no effect.
#include "tokenbus.h"

static uint32_t sequences, steps, length;
static uint32_t step, tokens_of_step;
static bool forked, waiting;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!tb_read_number(&at, end, &sequences) || *at++ != ' ' ||
        !tb_read_number(&at, end, &steps) || *at++ != ' ' || !tb_read_number(&at, end, &length))
        tb_fail("the argument is \"%s\"; expected \"SEQUENCES STEPS LENGTH\"", arg);
}

tb_answer tb_pre_process(void) {
    if (!forked) return forked = true, tb_fork(sequences);
    if (!waiting) return tb_go_on();
    tb_bytes here = {0};
    tb_var_get("here", &here, 0);
    const uint32_t came = here.len;
    tb_bytes_free(&here);
    if (came < sequences * step) return tb_suspend();
    waiting = false;
    tb_log("step %u\n", step);
    return step == steps ? tb_stop() : tb_go_on();
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    return tb_sample(0);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)backtrack;
    tokens_of_step += n;
    if (tokens_of_step < length) return tb_go_on();
    tokens_of_step = 0;
    step++;
    waiting = true;
    tb_var_append("here", "x", 1);
    return tb_go_on();
}
