// Two sequences communicate through a variable. The speaker generates a short text. The listener
// waits for this text, appends the text and continues.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/talk.c -o talk.wasm
//
// The argument is the text with which the listener begins. The speaker generates up to 4 tokens and
// sets the variable "word" to their text. The listener appends this text to its beginning, and then
// generates without restrictions.
#include "tokenbus.h"

enum { SPOKEN_TOKENS = 4 };

enum { ALONE, SPEAKING, BEGINNING, LISTENING, FREE } static stage = ALONE;
static tb_bytes beginning, spoken;
static uint32_t spoken_tokens;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    if (!arg_len) tb_fail("the argument is empty; it must be the beginning of the listener's text");
    tb_bytes_append(&beginning, arg, arg_len);
    tb_trie_get();
}

tb_answer tb_pre_process(void) {
    if (stage == ALONE) return tb_fork(2);
    if (stage != LISTENING) return tb_go_on();
    tb_bytes word = {0};
    if (!tb_var_get("word", &word, 0)) return tb_suspend();
    stage = FREE;
    tb_log("heard \"%s\"\n", word.data);
    if (!word.len) return tb_go_on();
    const tb_tokens tokens = tb_tokenize(word.data, word.len);
    const tb_answer answer = tb_append(tokens.ids, tokens.n);
    tb_free(tokens.ids);
    tb_bytes_free(&word);
    return answer;
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)n;
    if (stage != ALONE) return tb_sample(0);
    if (tb_seq_id() == fork_group[0]) {
        stage = SPEAKING;
        return tb_sample(0);
    }
    stage = BEGINNING;
    const tb_tokens tokens = tb_tokenize(beginning.data, beginning.len);
    return tb_splice(0, tokens.ids, tokens.n);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)backtrack;
    if (stage == BEGINNING) stage = LISTENING;
    if (stage != SPEAKING) return tb_go_on();
    tb_token_bytes(tokens, n, &spoken);
    spoken_tokens += n;
    if (spoken_tokens < SPOKEN_TOKENS && spoken_tokens < tb_max_tokens() &&
        tokens[n - 1] != tb_special_token(TB_EOS))
        return tb_go_on();
    tb_var_set("word", spoken.data, spoken.len);
    tb_log("said \"%s\"\n", spoken.data);
    return tb_stop();
}
