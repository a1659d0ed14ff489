// Replaces a word by another word as soon as the model has generated the word.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/backtrack.c -o backtrack.wasm
//
// The argument is "WORD=OTHER". WORD is also replaced inside a longer word.
#include "tokenbus.h"

static tb_bytes word, other;
static tb_bytes text;  // the generated text
static tb_bytes ends;  // u32 for each generated token: the position of its end in the text
static uint32_t searched;  // no WORD begins before this position

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const uint32_t at = tb_find(arg, arg_len, "=", 1, 0);
    if (at == TB_NONE || at == 0) tb_fail("the argument must be \"WORD=OTHER\"; it is \"%s\"", arg);
    tb_bytes_append(&word, arg, at);
    tb_bytes_append(&other, arg + at + 1, arg_len - at - 1);
    if (tb_find(other.data, other.len, word.data, word.len, 0) != TB_NONE)
        tb_fail("\"%s\" contains \"%s\", so it would be replaced forever", other.data, word.data);
    tb_trie_get();
}

static uint32_t token_count(void) { return ends.len / 4; }

// The position in the text where token i begins.
static uint32_t begin_of(uint32_t i) { return i ? ((uint32_t *)ends.data)[i - 1] : 0; }

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    const uint32_t at = tb_find(text.data, text.len, word.data, word.len, searched);
    if (at == TB_NONE) {
        if (text.len >= word.len) searched = text.len - word.len + 1;
        return tb_sample(0);
    }
    // Drop the token in which WORD begins and all later tokens. Append their text again, with OTHER
    // in place of WORD.
    uint32_t first = token_count() - 1;
    while (begin_of(first) > at) first--;
    tb_bytes again = {0};
    tb_bytes_append(&again, text.data + begin_of(first), at - begin_of(first));
    tb_bytes_append(&again, other.data, other.len);
    tb_bytes_append(&again, text.data + at + word.len, text.len - at - word.len);
    tb_log("\"%s\" at byte %u was taken back\n", word.data, at);
    const tb_tokens tokens = tb_tokenize(again.data, again.len);
    const tb_answer answer = tb_splice(token_count() - first, tokens.ids, tokens.n);
    tb_free(tokens.ids);
    tb_bytes_free(&again);
    return answer;
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    tb_bytes_cut(&ends, 4 * (token_count() - backtrack));
    tb_bytes_cut(&text, begin_of(token_count()));
    // WORD may begin in the remaining text and end in the new tokens.
    const uint32_t whole = text.len + 1 > word.len ? text.len + 1 - word.len : 0;
    if (searched > whole) searched = whole;
    for (uint32_t i = 0; i < n; i++) {
        tb_token_bytes(tokens + i, 1, &text);
        tb_bytes_append(&ends, &text.len, 4);
    }
    return tb_go_on();
}
