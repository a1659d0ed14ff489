// The SDK for controllers in C. Include this file in the only .c file of a module:
//
//     #include "tokenbus.h"
//
//     tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) { ... }
//
//     python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry \
//         -Wl,-z,stack-size=65536 -I SDK_FOLDER my.c -o my.wasm
//
// The files of the SDK:
//
//     tokenbus.h        the four calls, and the exports of the ABI
//     memory.h          an allocator and growable buffers
//     text.h            formats, the log and errors
//     host.h            actions, tokenize, variables and the call block
//     bias.h            biases
//     tools.h           calls of tools
//     distribution.h    the distributions that tokens were sampled from
//     trie.h            the token trie and masks
//     recognizer.h      constraints on bytes: the byte stack and the functional layer
//     strings.h         constraints on strings: the string layer
//
// The layers are modelled on AICI's aici_abi. The guide is docs/controllers.md.
#ifndef TOKENBUS_H
#define TOKENBUS_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TB_NONE 0xffffffffu  // no token, no node, not found

#include "tokenbus/memory.h"
#include "tokenbus/text.h"
#include "tokenbus/host.h"
#include "tokenbus/tools.h"
#include "tokenbus/bias.h"
#include "tokenbus/distribution.h"
#include "tokenbus/trie.h"
#include "tokenbus/recognizer.h"
#include "tokenbus/strings.h"

// --- the four calls ------------------------------------------------------------------------------
//
// Define the calls that you need. By default pre_process continues, mid_process allows every token
// and post_process continues. After tb_use_recognizer, the recognizer answers mid_process and
// post_process if you do not define them. Arguments are valid during the call only. Limits are CPU
// time, and the operator can change them.

// Called once, before all other calls, with the tokens of the prompt and the user's argument. A 0
// byte, which arg_len does not count, follows the argument. Prepare your data here. Limit: 1000 ms.
__attribute__((weak)) void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg,
                                          uint32_t arg_len);

// Called before each token. Returns tb_go_on, tb_stop, tb_suspend, tb_fork or tb_append. Limit:
// 1 ms.
__attribute__((weak)) tb_answer tb_pre_process(void);

// Decides which tokens may come next. Returns tb_sample, tb_sample_bias, tb_look, tb_splice or
// tb_stop.
// After a fork, this is the first call of each resulting sequence, and fork_group has the ids of
// all these sequences; otherwise fork_group has only this sequence's id (tb_seq_id). Limit: 20 ms.
__attribute__((weak)) tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n);

// Called after `backtrack` tokens were dropped and `tokens` were appended. Returns tb_go_on or
// tb_stop. After a sampled end-of-sequence token the sequence ends, unless the controller then
// appends, splices, forks or suspends, or the request has ignore_eos. Limit: 1 ms.
__attribute__((weak)) tb_answer tb_post_process(const uint32_t *tokens, uint32_t n,
                                                uint32_t backtrack);

// --- the exports of the native ABI, version 1 ----------------------------------------------------

#define TB_EXPORT(name) __attribute__((export_name(name), used, visibility("default")))

enum { TB_INBOX_BYTES = 4096 };

// The inbox is the memory into which the host writes the arguments of a call. tb_first_inbox is
// used until tokenbus_grow replaces it by a larger inbox. Each inbox has four bytes more than the
// host may use, so that a 0 byte can follow the user's argument.
static uint32_t tb_first_inbox[TB_INBOX_BYTES / 4 + 1];

static inline uint32_t *tb_inbox(void) { return (uint32_t *)(uintptr_t)tb_block[TB_BLOCK_INBOX]; }

TB_EXPORT("tokenbus_abi_v1") uint32_t *tb_export_abi(void) {
    tb_block[TB_BLOCK_VERSION] = 1;
    tb_block[TB_BLOCK_INBOX] = (uint32_t)(uintptr_t)tb_first_inbox;
    tb_block[TB_BLOCK_INBOX_SIZE] = TB_INBOX_BYTES;
    return tb_block;
}

TB_EXPORT("tokenbus_grow") int32_t tb_export_grow(uint32_t bytes) {
    void *larger = bytes < 0xfffffff0u ? tb_try_alloc(bytes + 4) : 0;
    if (!larger) return 0;
    if (tb_inbox() != tb_first_inbox) tb_free(tb_inbox());
    tb_block[TB_BLOCK_INBOX] = (uint32_t)(uintptr_t)larger;
    tb_block[TB_BLOCK_INBOX_SIZE] = bytes;
    return 1;
}

// Writes an answer to the call block. `may` has a bit for each kind of answer that the call `call`
// may return. `choices` has the names of these kinds, for the error.
static inline int32_t tb_give(tb_answer answer, uint32_t may, const char *call,
                              const char *choices) {
    if (!(may >> answer.then & 1))
        tb_fail("%s must return %s; it returned %s", call, choices, tb_answer_names[answer.then]);
    tb_block[TB_BLOCK_N] = answer.then == TB_FORK ? answer.forks : tb_answer_tokens.len / 4;
    tb_block[TB_BLOCK_LIST] = (uint32_t)(uintptr_t)tb_answer_tokens.data;
    tb_block[TB_BLOCK_DROP] = answer.backtrack;
    tb_block[TB_BLOCK_MASK] = (uint32_t)(uintptr_t)answer.mask;
    tb_block[TB_BLOCK_BIAS] = (uint32_t)(uintptr_t)answer.bias;
    tb_block[TB_BLOCK_PAIRS] = answer.pairs;
    if (answer.then == TB_SAMPLE) return TB_GO_ON;
    if (answer.then == TB_APPEND) return TB_SPLICE;
    return (int32_t)answer.then;
}

TB_EXPORT("tokenbus_init_prompt") int32_t tb_export_init(void) {
    const uint32_t n = tb_block[TB_BLOCK_COUNT], arg_len = tb_block[TB_BLOCK_ARG];
    char *arg = (char *)(tb_inbox() + n);
    arg[arg_len] = 0;
    if (tb_init_prompt) tb_init_prompt(tb_inbox(), n, arg, arg_len);
    return 1;
}

TB_EXPORT("tokenbus_pre_process") int32_t tb_export_pre(void) {
    const tb_answer answer = tb_pre_process ? tb_pre_process() : tb_go_on();
    return tb_give(answer,
                   1 << TB_STOP | 1 << TB_GO_ON | 1 << TB_SUSPEND | 1 << TB_FORK | 1 << TB_APPEND,
                   "tb_pre_process", "tb_go_on, tb_stop, tb_suspend, tb_fork or tb_append");
}

TB_EXPORT("tokenbus_mid_process") int32_t tb_export_mid(void) {
    const tb_answer answer = tb_mid_process ? tb_mid_process(tb_inbox(), tb_block[TB_BLOCK_COUNT])
                             : tb_used      ? tb_recognizer_mid(tb_used)
                                            : tb_sample(0);
    return tb_give(answer, 1 << TB_STOP | 1 << TB_SAMPLE | 1 << TB_SPLICE | 1 << TB_LOOK,
                   "tb_mid_process", "tb_sample, tb_look, tb_splice or tb_stop");
}

TB_EXPORT("tokenbus_post_process") int32_t tb_export_post(void) {
    const uint32_t n = tb_block[TB_BLOCK_COUNT];
    const tb_answer answer = tb_post_process
                                 ? tb_post_process(tb_inbox(), n, tb_block[TB_BLOCK_BACKTRACK])
                             : tb_used ? tb_recognizer_post(tb_used, tb_inbox(), n)
                                       : tb_go_on();
    return tb_give(answer, 1 << TB_STOP | 1 << TB_GO_ON, "tb_post_process", "tb_go_on or tb_stop");
}

#endif
