// Best of n: forks write one text each, and sequence 0 ends up with the best of them.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/best_of.c -o best_of.wasm
//
// The argument is "N LENGTH WHAT": how many texts, how many tokens each may have, and what to
// prefer: longest, shortest, or any other text, which is counted. "4 20 def" takes of four texts
// the one with most def.
//
// Sequence 0 is the judge: it becomes N + 1 sequences and waits. Each of the others writes until
// the end or LENGTH, appends its score and its tokens to the variable "texts", and stops. A
// variable counts its writes, so that the judge knows that all are there when its version is N. A
// fork that fails writes nothing; where the judge then waits for nobody, the request ends with an
// error that says so.
#include "tokenbus.h"

static uint32_t wanted, length;
static tb_bytes prefer;
static uint32_t place;  // in the fork group; 0 is the judge
static tb_bytes text, tokens_written;  // what this fork has written
static tb_bytes best;                  // the tokens of the best text

enum { FORKING, WRITING, JUDGING, TOLD } static stage = FORKING;

// What "texts" has for each fork, before its tokens.
typedef struct record {
    uint32_t seq, score, tokens;
} record;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!tb_read_number(&at, end, &wanted) || *at++ != ' ' || !tb_read_number(&at, end, &length) ||
        *at++ != ' ' || at >= end || wanted < 1 || wanted > 100 || length < 1)
        tb_fail("the argument is \"N LENGTH WHAT\" with N from 1 to 100, as \"4 20 longest\"; "
                "it is \"%s\"",
                arg);
    // The judge has one token of its own before it appends the best.
    if (tb_max_tokens() < 2) tb_fail("best of needs max_tokens of at least 2");
    if (length > tb_max_tokens() - 1) length = tb_max_tokens() - 1;
    tb_bytes_append(&prefer, at, (uint32_t)(end - at));
    tb_trie_get();
}

static uint32_t score(void) {
    if (!strcmp((const char *)prefer.data, "longest")) return text.len;
    if (!strcmp((const char *)prefer.data, "shortest")) return UINT32_MAX - text.len;
    uint32_t count = 0;
    for (uint32_t at = 0;; at++, count++) {
        at = tb_find(text.data, text.len, prefer.data, prefer.len, at);
        if (at == TB_NONE) return count;
    }
}

// The judge: picks the best of the texts that are there, once they are all.
static bool all_there(void) {
    tb_bytes texts = {0};
    uint32_t version;
    if (!tb_var_get("texts", &texts, &version) || version < wanted) {
        tb_bytes_free(&texts);
        return false;
    }
    record top = {0};
    for (uint32_t at = 0; at < texts.len;) {
        record one;
        memcpy(&one, texts.data + at, sizeof one);
        at += sizeof one;
        if (at == sizeof one || one.score > top.score ||
            (one.score == top.score && one.seq < top.seq)) {
            top = one;
            tb_bytes_cut(&best, 0);
            tb_bytes_append(&best, texts.data + at, 4 * one.tokens);
        }
        at += 4 * one.tokens;
    }
    tb_log("best of %u: sequence %u with a score of %u\n", wanted, top.seq, top.score);
    tb_bytes_free(&texts);
    return true;
}

// Samples one of each `step` tokens, but no special one.
static tb_answer sample_share(uint32_t from, uint32_t step) {
    uint32_t *mask = tb_mask_new();
    for (uint32_t token = from; token < tb_vocab_size(); token += step) {
        uint32_t len;
        tb_token(token, &len);
        if (len) tb_mask_set(mask, token);
    }
    return tb_sample(mask);
}

tb_answer tb_pre_process(void) {
    if (stage == FORKING) return tb_fork(wanted + 1);
    if (stage == TOLD) return tb_stop();
    if (stage == JUDGING && !all_there()) return tb_suspend();
    return tb_go_on();
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    if (stage == WRITING) return tb_sample(0);
    if (stage == JUDGING) {
        stage = TOLD;
        return tb_splice(1, (const uint32_t *)best.data, best.len / 4);
    }
    while (place < n && fork_group[place] != tb_seq_id()) place++;
    stage = place == 0 ? JUDGING : WRITING;
    // A judge cannot suspend here: it samples a token, which it drops when it has the best.
    if (stage == JUDGING) return sample_share(0, 1);
    // Each begins with a token of its own share, so that they differ even where nothing is random.
    return sample_share(place - 1, wanted);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)backtrack;
    if (stage != WRITING) return tb_go_on();
    const bool end = tokens[n - 1] == tb_special_token(TB_EOS);
    tb_bytes_append(&tokens_written, tokens, 4 * (n - end));
    tb_token_bytes(tokens, n, &text);
    if (!end && tokens_written.len / 4 < length) return tb_go_on();
    tb_bytes entry = {0};
    const record mine = {tb_seq_id(), score(), tokens_written.len / 4};
    tb_bytes_append(&entry, &mine, sizeof mine);
    tb_bytes_append(&entry, tokens_written.data, tokens_written.len);
    tb_var_append("texts", entry.data, entry.len);
    return tb_stop();
}
