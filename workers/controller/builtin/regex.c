// The built-in "regex": the text matches a regular expression, all of it.
//
// The argument is the expression's automaton as grammars/regex writes it (Dfa.to_bytes); the worker
// compiles the user's pattern and puts it in the pattern's place.
#include "tokenbus.h"

typedef struct header {
    char magic[4];
    uint16_t version, kind;
    uint32_t states, classes, start, lexemes;
} header;

static header dfa;
static uint8_t *class_of, *accepting;
static uint32_t *transitions;

static uint32_t regex_initial(void) { return dfa.start; }

static uint32_t regex_append(uint32_t state, uint8_t byte) {
    return transitions[state * dfa.classes + class_of[byte]];
}

static bool regex_byte_allowed(uint32_t state, uint8_t byte) {
    return regex_append(state, byte) != 0;
}

static bool regex_special_allowed(uint32_t state, tb_special token) {
    return token == TB_EOS && accepting[state];
}

TB_FUNCTIONAL_RECOGNIZER(regex, uint32_t)

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    if (arg_len < sizeof dfa) tb_fail("regex: the automaton has %u bytes", arg_len);
    memcpy(&dfa, arg, sizeof dfa);
    const uint32_t cells = dfa.states * dfa.classes;
    const uint32_t needed = (uint32_t)sizeof dfa + 256 + dfa.states + 4 * cells + 4;
    if (memcmp(dfa.magic, "TBDF", 4) || dfa.version != 1 || dfa.kind != 0 || arg_len != needed)
        tb_fail("regex: this is no automaton of version 1");
    arg += sizeof dfa;
    class_of = tb_alloc(256);
    memcpy(class_of, arg, 256);
    accepting = tb_alloc(dfa.states);
    memcpy(accepting, arg + 256, dfa.states);
    transitions = tb_alloc(4 * cells);
    memcpy(transitions, arg + 256 + dfa.states, 4 * cells);
    tb_use_recognizer(regex_recognizer());
}
