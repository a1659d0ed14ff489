// A watermark and its detector: watermark.py in C, with the same green tokens.
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/watermark.c -o watermark.wasm
//
// With the argument "KEY", a number, the generated text is marked: the previous token and the key
// select half of the vocabulary, the green tokens, which get a bias. With the argument "detect
// KEY", no text is generated, and the z-score of the prompt is logged. A score above 4 shows that
// the prompt is marked: only one of 30,000 texts without the watermark has such a score.
#include "tokenbus.h"

static const float delta = 3;
static uint64_t key;
static bool detects;
static uint32_t last = TB_NONE;  // the last token of the text
static tb_bias *bias;

// Whether a token is green after the token `before`. The bits of a 64-bit integer are mixed as in
// SplitMix64.
static bool green(uint32_t before, uint32_t token) {
    uint64_t mixed = token + ((uint64_t)before << 32) + key * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return !((mixed ^ mixed >> 31) >> 63);
}

// Adds a pair of tokens to a hash table for `size` pairs; `size` is a power of 2. Returns whether
// the table did not contain the pair.
static bool is_new(uint64_t *table, uint32_t size, uint64_t pair) {
    for (uint32_t at = (uint32_t)(pair * 0x9e3779b97f4a7c15u >> 32);; at++) {
        uint64_t *slot = table + (at & (size - 1));
        if (*slot == pair) return false;
        if (*slot == UINT64_MAX) return *slot = pair, true;
    }
}

// The number of standard deviations by which a text has more green tokens than the average text
// without the watermark. Equal pairs of neighbouring tokens count only once, so that
// repetitions do not distort the score.
static double z_score(const uint32_t *tokens, uint32_t n) {
    uint32_t size = 2, count = 0, hits = 0;
    while (size < 2 * n) size *= 2;
    uint64_t *table = tb_alloc(8 * size);
    memset(table, 0xff, 8 * size);
    for (uint32_t i = 1; i < n; i++) {
        if (!is_new(table, size, (uint64_t)tokens[i - 1] << 32 | tokens[i])) continue;
        count++;
        hits += green(tokens[i - 1], tokens[i]);
    }
    tb_free(table);
    return count ? (hits - 0.5 * count) / __builtin_sqrt(0.25 * count) : 0;
}

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    const char *at = arg, *end = arg + arg_len;
    detects = arg_len > 7 && !memcmp(arg, "detect ", 7);
    if (detects) at += 7;
    uint32_t number;
    if (!tb_read_number(&at, end, &number) || at != end)
        tb_fail("the argument must be a key like \"42\", or \"detect 42\"; it is \"%s\"", arg);
    key = number;
    if (n) last = prompt[n - 1];
    bias = tb_bias_new();
    tb_bias_values(bias);
    if (!detects) return;
    const double z = z_score(prompt, n);
    const uint32_t hundredths = (uint32_t)((z < 0 ? -z : z) * 100 + 0.5);
    tb_log("z %s%u.%02u\n", z < 0 ? "-" : "", hundredths / 100, hundredths % 100);
}

tb_answer tb_pre_process(void) { return detects ? tb_stop() : tb_go_on(); }

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    if (last == TB_NONE) return tb_sample(0);
    float *values = tb_bias_values(bias);
    for (uint32_t token = 0; token < tb_vocab_size(); token++)
        values[token] = green(last, token) ? delta : 0;
    return tb_sample_bias(0, bias);
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)backtrack;
    if (n) last = tokens[n - 1];
    return tb_go_on();
}
