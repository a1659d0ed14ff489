// The interface to the host: the call block, answers, tokenize, the variables of a request.
#ifndef TOKENBUS_HOST_H
#define TOKENBUS_HOST_H

TB_IMPORT("seq_id") uint32_t tb_host_seq_id(void);
TB_IMPORT("special_token") uint32_t tb_host_special_token(uint32_t token);
TB_IMPORT("take_drafts") void tb_host_take_drafts(void);
TB_IMPORT("tokenize")
uint32_t tb_host_tokenize(const void *text, uint32_t n, uint32_t *tokens, uint32_t most);
TB_IMPORT("send") void tb_host_send(const void *text, uint32_t n);
TB_IMPORT("receive") int32_t tb_host_receive(void *text, uint32_t most);
TB_IMPORT("var_get")
int32_t tb_host_var_get(const char *name, uint32_t name_len, void *value, uint32_t most,
                        uint32_t *version);
TB_IMPORT("var_wait")
int32_t tb_host_var_wait(const char *name, uint32_t name_len, void *value, uint32_t most,
                         uint32_t version);
TB_IMPORT("var_set")
int32_t tb_host_var_set(const char *name, uint32_t name_len, const void *value, uint32_t n,
                        int32_t when_version, uint32_t *version);
TB_IMPORT("var_append")
int32_t tb_host_var_append(const char *name, uint32_t name_len, const void *value, uint32_t n,
                           int32_t when_version, uint32_t *version);

// --- the call block (documented in docs/controllers-reference.md) --------------------------------
//
// In this block, the host writes the arguments of a call and reads the answer.

enum {
    TB_BLOCK_VERSION,
    TB_BLOCK_INBOX,
    TB_BLOCK_INBOX_SIZE,
    TB_BLOCK_COUNT,
    TB_BLOCK_BACKTRACK,
    TB_BLOCK_SEQ,
    TB_BLOCK_ARG,
    TB_BLOCK_VOCABULARY,
    TB_BLOCK_N,
    TB_BLOCK_LIST,
    TB_BLOCK_DROP,
    TB_BLOCK_MASK,
    TB_BLOCK_EOS,
    TB_BLOCK_MAX_TOKENS,
    TB_BLOCK_BIAS,
    TB_BLOCK_PAIRS,
    TB_BLOCK_WORDS = 16
};

static uint32_t tb_block[TB_BLOCK_WORDS];

// The id of this sequence. Each sequence of a request has a different id.
static inline uint32_t tb_seq_id(void) { return tb_block[TB_BLOCK_SEQ]; }

// The number of tokens in the vocabulary. All token ids are smaller than this number.
static inline uint32_t tb_vocab_size(void) { return tb_block[TB_BLOCK_VOCABULARY]; }

// Maximum tokens of this sequence after its prompt, including appended tokens.
static inline uint32_t tb_max_tokens(void) { return tb_block[TB_BLOCK_MAX_TOKENS]; }

// If this is called in tb_init_prompt, a copy of the instance may run the rounds of a draft's
// tokens before they are sampled. One step of the model can then verify the draft. Drafts save time
// if a copy and a round are much cheaper than a step. The decisions must depend only on the prompt,
// the argument and the tokens. The copy is dropped before a round that uses a variable or the log.
static inline void tb_take_drafts(void) { tb_host_take_drafts(); }

// The first five special tokens have AICI's numbers. TB_TURN_START and TB_TURN_END begin and end a
// turn of the assistant in the model's chat template.
typedef enum tb_special {
    TB_UNK,
    TB_PAD,
    TB_SEP,
    TB_BOS,
    TB_EOS,
    TB_CLS,
    TB_MASK,
    TB_TURN_START,
    TB_TURN_END
} tb_special;

// The id of a special token; TB_NONE if the model does not have it.
static inline uint32_t tb_special_token(tb_special token) {
    return token == TB_EOS ? tb_block[TB_BLOCK_EOS] : tb_host_special_token(token);
}

// --- answers -------------------------------------------------------------------------------------

enum { TB_STOP, TB_GO_ON, TB_SUSPEND, TB_FORK, TB_SPLICE, TB_SAMPLE, TB_APPEND, TB_LOOK = 10 };

static const char *const tb_answer_names[] = {
    [TB_STOP] = "tb_stop",     [TB_GO_ON] = "tb_go_on",   [TB_SUSPEND] = "tb_suspend",
    [TB_FORK] = "tb_fork",     [TB_SPLICE] = "tb_splice", [TB_SAMPLE] = "tb_sample",
    [TB_APPEND] = "tb_append", [TB_LOOK] = "tb_look"};

typedef struct tb_answer {
    uint32_t then, forks, backtrack;
    const uint32_t *mask;
    const void *bias;
    uint32_t pairs;  // number of pairs of the bias; 0: the bias is dense
} tb_answer;

static tb_bytes tb_answer_tokens;

static inline tb_answer tb_stop(void) { return (tb_answer){.then = TB_STOP}; }

static inline tb_answer tb_go_on(void) { return (tb_answer){.then = TB_GO_ON}; }

// pre_process: suspends the sequence. pre_process is called again when another sequence of the
// request has sampled a token, has written a variable or has ended. If all sequences are suspended,
// pre_process is called again after 10 ms or later, unless one of them waits for an input or a
// tool. After a tb_receive that found no input, pre_process is called again only when an input
// arrives.
static inline tb_answer tb_suspend(void) { return (tb_answer){.then = TB_SUSPEND}; }

// pre_process: forks into `in_all` sequences, including this sequence. Each of them continues with
// a copy of this sequence's memory. A sequence finds its position among them by looking for its
// tb_seq_id in the fork_group of mid_process. tb_fork(1) changes nothing; tb_fork(0) is an error.
static inline tb_answer tb_fork(uint32_t in_all) {
    if (!in_all)
        tb_fail("tb_fork(0): the number counts this sequence too; expected 2 or more for a "
                "fork, or tb_stop() for the end");
    return (tb_answer){.then = TB_FORK, .forks = in_all};
}

// mid_process: drops the last `backtrack` tokens that this sequence has beyond its prompt and
// appends `tokens`, which are copied. The call does not sample; post_process and pre_process
// follow.
static inline tb_answer tb_splice(uint32_t backtrack, const uint32_t *tokens, uint32_t n) {
    if (n > UINT32_MAX / 4) tb_fail("a splice of %u tokens is too long", n);
    tb_bytes_cut(&tb_answer_tokens, 0);
    tb_bytes_append(&tb_answer_tokens, tokens, 4 * n);
    return (tb_answer){.then = TB_SPLICE, .backtrack = backtrack};
}

// pre_process: appends `tokens`, which are copied; post_process and pre_process follow.
static inline tb_answer tb_append(const uint32_t *tokens, uint32_t n) {
    tb_answer answer = tb_splice(0, tokens, n);
    answer.then = TB_APPEND;
    return answer;
}

// mid_process: samples a token that the mask allows (tb_mask_new); 0 allows any token. The mask
// must not change until the next call.
static inline tb_answer tb_sample(const uint32_t *mask) {
    return (tb_answer){.then = TB_SAMPLE, .mask = mask};
}

// --- tokenize ------------------------------------------------------------------------------------

typedef struct tb_tokens {
    uint32_t *ids;
    uint32_t n;
} tb_tokens;

// Tokenizes UTF-8 text with the model's tokenizer, without special tokens; the bytes of the tokens
// are always exactly the text. The sequence ends with an error if the vocabulary cannot represent
// the text. Free with tb_free(ids).
static inline tb_tokens tb_tokenize(const void *text, uint32_t len) {
    uint32_t room = len + 8;
    for (;;) {
        tb_tokens tokens = {tb_alloc(4 * room), 0};
        tokens.n = tb_host_tokenize(text, len, tokens.ids, room);
        if (tokens.n <= room) return tokens;
        tb_free(tokens.ids);
        room = tokens.n;
    }
}

// --- variables -----------------------------------------------------------------------------------
//
// Variables are shared by the sequences of one request, and are not visible to other requests.
// Names are UTF-8. The version of a variable is the number of its writes; 0 means that the variable
// does not exist.

// Implements tb_var_get and, with `waits`, tb_var_wait.
static inline bool tb_var_read(const char *name, tb_bytes *value, uint32_t *version, bool waits) {
    tb_bytes_cut(value, 0);
    tb_bytes_reserve(value, 255);
    for (;;) {
        const uint32_t len = strlen(name), most = value->room - 1;
        const int32_t n = waits ? tb_host_var_wait(name, len, value->data, most, *version)
                                : tb_host_var_get(name, len, value->data, most, version);
        if (n < 0) return false;
        if ((uint32_t)n < value->room) {
            value->len = (uint32_t)n;
            value->data[n] = 0;
            return true;
        }
        tb_bytes_reserve(value, (uint32_t)n);
    }
}

// Reads a variable into `value`, whose content is replaced. Returns false if the variable does not
// exist. `version` receives the variable's version; it may be a null pointer.
static inline bool tb_var_get(const char *name, tb_bytes *value, uint32_t *version) {
    return tb_var_read(name, value, version, false);
}

// Reads a variable into `value` if its version is `version` or higher. Otherwise returns false; if
// tb_pre_process then returns tb_suspend, it is called again when the variable has this version, and
// not at other changes.
static inline bool tb_var_wait(const char *name, uint32_t version, tb_bytes *value) {
    return tb_var_read(name, value, &version, true);
}

// Writes a variable; returns its new version.
static inline uint32_t tb_var_set(const char *name, const void *value, uint32_t n) {
    uint32_t version = 0;
    tb_host_var_set(name, strlen(name), value, n, -1, &version);
    return version;
}

// Appends to a variable, which is created if it does not exist; returns its new version.
static inline uint32_t tb_var_append(const char *name, const void *value, uint32_t n) {
    uint32_t version = 0;
    tb_host_var_append(name, strlen(name), value, n, -1, &version);
    return version;
}

// Writes a variable only if its version is *version (0: the variable does not exist). Returns
// whether the variable was written. Sets *version to the current version in both cases.
static inline bool tb_var_set_when(const char *name, const void *value, uint32_t n,
                                   uint32_t *version) {
    return tb_host_var_set(name, strlen(name), value, n, (int32_t)*version, version) == 1;
}

static inline bool tb_var_append_when(const char *name, const void *value, uint32_t n,
                                      uint32_t *version) {
    return tb_host_var_append(name, strlen(name), value, n, (int32_t)*version, version) == 1;
}

// --- the dialogue with the client ----------------------------------------------------------------

enum { TB_MAX_INPUT = 32768 };

// Sends a text of at most TB_MAX_INPUT bytes to the client; it is not part of the generated text.
static inline void tb_send(const void *text, uint32_t n) { tb_host_send(text, n); }

// Receives the client's next input into `text`, whose content is replaced. Returns false if no
// input has arrived. In this case, return tb_suspend from tb_pre_process, which is called again
// when an input arrives.
static inline bool tb_receive(tb_bytes *text) {
    tb_bytes_cut(text, 0);
    tb_bytes_reserve(text, TB_MAX_INPUT);
    const int32_t n = tb_host_receive(text->data, TB_MAX_INPUT);
    if (n < 0) return false;
    text->len = (uint32_t)n;
    text->data[n] = 0;
    return true;
}

#endif
