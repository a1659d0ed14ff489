// Best of n: each fork generates one text, and sequence 0 appends the best text.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/best_of.c -o best_of.wasm
//
// The argument is "N LENGTH WHAT": the number of texts, the maximum number of tokens of a text, and
// the criterion. The criterion "longest" chooses the longest text, and "shortest" the shortest
// text. Any other string chooses the text in which the string occurs most often: "4 20 def"
// generates four texts and chooses the text with the most occurrences of "def".
//
// Sequence 0 is the judge: it forks into N + 1 sequences and suspends. Each other sequence
// generates a text of at most LENGTH tokens, stores it in its variable ("text 1" to "text N") and
// stops. The judge appends the best text when all these variables exist. A fork that fails does not
// store a text. The request then ends with a deadlock error when all other forks have stopped.
#include "tokenbus.h"

static uint32_t wanted, length;
static tb_bytes prefer;
static uint32_t place;       // this sequence's index in the fork group; 0 is the judge
static tb_bytes text;        // the text that this fork has generated
static uint32_t text_tokens; // the number of tokens of this text
static tb_bytes best;        // in the judge: the best text

enum { FORKING, WRITING, JUDGING, TOLD } static stage = FORKING;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    const char *at = arg, *end = arg + arg_len;
    if (!tb_read_number(&at, end, &wanted) || *at++ != ' ' || !tb_read_number(&at, end, &length) ||
        *at++ != ' ' || at >= end || wanted < 1 || wanted > 100 || length < 1)
        tb_fail("the argument must be \"N LENGTH WHAT\" with N from 1 to 100, for example "
                "\"4 20 longest\"; it is \"%s\"",
                arg);
    // The judge samples one token before it appends the best text.
    if (tb_max_tokens() < 2) tb_fail("max_tokens must be at least 2");
    if (length > tb_max_tokens() - 1) length = tb_max_tokens() - 1;
    tb_bytes_append(&prefer, at, (uint32_t)(end - at));
    tb_trie_get();
}

static uint32_t score(const tb_bytes *written) {
    if (!strcmp((const char *)prefer.data, "longest")) return written->len;
    if (!strcmp((const char *)prefer.data, "shortest")) return UINT32_MAX - written->len;
    uint32_t count = 0;
    for (uint32_t at = 0;; at++, count++) {
        at = tb_find(written->data, written->len, prefer.data, prefer.len, at);
        if (at == TB_NONE) return count;
    }
}

// The name of the variable that stores the text of the fork at this index of the fork group.
static const char *variable(uint32_t fork) {
    static tb_bytes name;
    tb_bytes_cut(&name, 0);
    tb_format(&name, "text %u", fork);
    return (const char *)name.data;
}

// In the judge: stores the best text in `best`. Returns false if a text is still missing.
static bool all_there(void) {
    static uint32_t found;  // the number of forks whose texts have been compared
    static uint32_t top, top_score;
    tb_bytes one = {0};
    while (found < wanted && tb_var_get(variable(found + 1), &one, 0)) {
        found++;
        if (found > 1 && score(&one) <= top_score) continue;
        top = found;
        top_score = score(&one);
        tb_bytes_cut(&best, 0);
        tb_bytes_append(&best, one.data, one.len);
    }
    tb_bytes_free(&one);
    if (found < wanted) return false;
    tb_log("best of %u: text %u with a score of %u\n", wanted, top, top_score);
    return true;
}

// Samples one of the tokens with the ids `from`, `from + step`, `from + 2 * step` and so on, except
// special tokens.
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
        const tb_tokens tokens = tb_tokenize(best.data, best.len);
        return tb_splice(1, tokens.ids, tokens.n);
    }
    while (place < n && fork_group[place] != tb_seq_id()) place++;
    stage = place == 0 ? JUDGING : WRITING;
    // mid_process cannot suspend, so the judge samples a token. It drops this token when it appends
    // the best text.
    if (stage == JUDGING) return sample_share(0, 1);
    // The first token of each fork is from a separate share of the vocabulary, so that the texts
    // differ even with greedy sampling.
    return sample_share(place - 1, wanted);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)backtrack;
    if (stage != WRITING) return tb_go_on();
    tb_token_bytes(tokens, n, &text);
    text_tokens += n;
    if (tokens[n - 1] != tb_special_token(TB_EOS) && text_tokens < length) return tb_go_on();
    tb_var_set(variable(place), text.data, text.len);
    return tb_stop();
}
