// The tables of a grammar or of a regular expression, as grammars/ writes them.
//
// The tables of a regular expression are a lexer with one lexeme, without a parser. The text may
// end where the lexeme may end.
#ifndef GRAMMAR_TABLES_H
#define GRAMMAR_TABLES_H

#include "memory.h"

enum { NO_TERMINAL = 0xffff, END = 0, SKIP = 1, ERROR = 0, SHIFT = 1, REDUCE = 2, ACCEPT = 3 };

static struct {
    bool has_parser;
    uint32_t classes, lexer_states;  // bytes of one class have the same transitions
    uint32_t lexer_start;      // state before a lexeme
    uint32_t lexer_first;      // state before a text: lexer_start, or the state after a newline
    uint8_t class_of[256];
    uint8_t class_size[256];   // number of bytes in a class, counted up to 255
    uint8_t class_byte[256];   // a byte of the class, if possible a letter or digit
    bool class_dead[256];      // no lexer state has a transition with the class
    const uint16_t *next;      // [lexer_states * classes]
    const uint16_t *accepted;  // [lexer_states]

    // The tables of a parser.
    uint32_t terminals, nonterminals, states, words;
    const uint32_t *reachable;  // [lexer_states * words]
    const uint16_t *actions, *gotos, *lhs, *length;
    const uint32_t *shifted, *first;
    const uint16_t *reduced;
    const uint32_t *lookahead;
    const uint32_t *first_rest, *rest_cost, *rest_at, *shortest_at;
    const uint16_t *rest_lhs, *rest_pops, *rest;
    const uint8_t *shortest;

    // Two lexer states are of the same kind if the same terminals can still match in both.
    uint32_t kinds;
    const uint16_t *kind_of;  // [lexer_states]
    const uint32_t *kind_set; // [kinds * words]
    // [(terminals + 1) * kinds] Whether a lexeme of a kind may follow a terminal on some stack. The
    // last row, for a text before its first terminal, is all ones. Null if the table would be too
    // large.
    const uint8_t *may_begin;
    const uint32_t *follow;  // [terminals * words]
} g;

static inline bool has(const uint32_t *set, uint32_t member) {
    return set[member / 32] >> member % 32 & 1;
}

static inline bool meets(const uint32_t *one, const uint32_t *other) {
    for (uint32_t i = 0; i < g.words; i++)
        if (one[i] & other[i]) return true;
    return false;
}

// Whether the lexer can still match SKIP or one of the terminals `viable`.
static inline bool opens(const uint32_t *reachable, const uint32_t *viable) {
    return reachable[0] >> SKIP & 1 || meets(reachable, viable);
}

static inline bool plain(uint32_t byte) {
    return (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') ||
           (byte >= 'A' && byte <= 'Z');
}

static void describe_classes(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        const uint8_t c = g.class_of[byte];
        const uint8_t known = g.class_byte[c];
        if (!g.class_size[c] || (known < 32 && byte < 127) || (!plain(known) && plain(byte)))
            g.class_byte[c] = (uint8_t)byte;
        if (g.class_size[c] < 255) g.class_size[c]++;
    }
    for (uint32_t c = 0; c < g.classes; c++) {
        g.class_dead[c] = true;
        for (uint32_t s = 1; s < g.lexer_states; s++)
            if (g.next[s * g.classes + c]) g.class_dead[c] = false;
    }
}

// --- a regular expression: Dfa.to_bytes ----------------------------------------------------------

typedef struct regex_header {
    char magic[4];
    uint16_t version, kind;
    uint32_t states, classes, start, lexemes;
} regex_header;

static void open_regex(const uint8_t *blob) {
    regex_header head;
    copy(&head, blob, sizeof head);
    if (head.version != 1 || head.kind != 0) FAIL("the automaton is damaged, or not of version 1");
    if (head.states > 65535) FAIL("the automaton has more than 65,535 states");
    g.classes = head.classes;
    g.lexer_states = head.states;
    g.lexer_start = g.lexer_first = head.start;
    const uint8_t *at = blob + sizeof head;
    copy(g.class_of, at, 256);
    at += 256;
    uint16_t *accepted = stay(2 * head.states);
    for (uint32_t s = 0; s < head.states; s++) accepted[s] = at[s] ? END : NO_TERMINAL;
    at += head.states;
    uint16_t *next = stay(2 * head.states * head.classes);
    for (uint32_t i = 0; i < head.states * head.classes; i++) {
        uint32_t to;
        copy(&to, at + 4 * i, 4);
        next[i] = (uint16_t)to;
    }
    g.accepted = accepted;
    g.next = next;
}

// --- a grammar: CompiledGrammar.to_bytes ---------------------------------------------------------

typedef struct grammar_header {
    char magic[4];
    uint32_t version, bytes, crc, terminals, nonterminals, productions, states, lexer_states,
        classes;
    uint16_t lexer_start, lexer_first;
    uint32_t words, reductions, name_bytes, rests, rest_terminals;
} grammar_header;

static const void *part(const uint8_t **at, uint32_t bytes) {
    const void *here = *at;
    *at += (bytes + 7) & ~7u;
    return here;
}

static uint32_t hash_of(const uint32_t *words, uint32_t n) {
    uint32_t hash = 2166136261u;
    for (uint32_t i = 0; i < n; i++) hash = (hash ^ words[i]) * 16777619u;
    return hash ^ hash >> 15;
}

// Numbers the kinds of lexer states. Two states are of one kind if their `reachable` is equal.
static void find_kinds(void) {
    uint32_t room = 16;
    while (room < 2 * g.lexer_states) room *= 2;
    uint32_t *slots = stay(4 * room);  // kind + 1
    uint16_t *kind_of = stay(2 * g.lexer_states);
    uint32_t *sets = stay(4 * g.words * g.lexer_states);
    for (uint32_t s = 0; s < g.lexer_states; s++) {
        const uint32_t *set = g.reachable + s * g.words;
        uint32_t at = hash_of(set, g.words) & (room - 1);
        while (slots[at] && !same(sets + (slots[at] - 1) * g.words, set, g.words))
            at = (at + 1) & (room - 1);
        if (!slots[at]) {
            copy(sets + g.kinds * g.words, set, 4 * g.words);
            slots[at] = ++g.kinds;
        }
        kind_of[s] = (uint16_t)(slots[at] - 1);
    }
    g.kind_of = kind_of;
    g.kind_set = sets;
}

// For each terminal, computes the terminals that may follow it on some stack. A second terminal may
// follow if a parser state after the first terminal shifts or reduces at the second.
static void find_followers(void) {
    uint32_t *follow = stay(4 * g.terminals * g.words);
    for (uint32_t s = 0; s < g.states; s++) {
        for (uint32_t t = 0; t < g.terminals; t++) {
            const uint16_t action = g.actions[s * g.terminals + t];
            if ((action & 3) != SHIFT) continue;
            const uint32_t to = action >> 2;
            uint32_t *set = follow + t * g.words;
            for (uint32_t w = 0; w < g.words; w++) set[w] |= g.shifted[to * g.words + w];
            for (uint32_t r = g.first[to]; r < g.first[to + 1]; r++)
                for (uint32_t w = 0; w < g.words; w++) set[w] |= g.lookahead[r * g.words + w];
        }
    }
    g.follow = follow;
    if ((uint64_t)(g.terminals + 1) * g.kinds > 4u << 20) return;
    uint8_t *may = stay((g.terminals + 1) * g.kinds);
    for (uint32_t kind = 0; kind < g.kinds; kind++) {
        for (uint32_t t = 0; t < g.terminals; t++)
            may[t * g.kinds + kind] =
                opens(g.kind_set + kind * g.words, follow + t * g.words);
        may[g.terminals * g.kinds + kind] = 1;
    }
    g.may_begin = may;
}

static void open_grammar(const uint8_t *blob, uint32_t bytes) {
    grammar_header head;
    copy(&head, blob, sizeof head);
    if (head.version != 3 || head.bytes != bytes)
        FAIL("the grammar's tables are damaged, or not of version 3");
    uint8_t *kept = stay(bytes);
    copy(kept, blob, bytes);
    const uint8_t *at = kept + sizeof head;
    g.has_parser = true;
    g.classes = head.classes;
    g.lexer_states = head.lexer_states;
    g.lexer_start = head.lexer_start;
    g.lexer_first = head.lexer_first;
    g.terminals = head.terminals;
    g.nonterminals = head.nonterminals;
    g.states = head.states;
    g.words = head.words;
    copy(g.class_of, part(&at, 256), 256);
    g.next = part(&at, 2 * head.lexer_states * head.classes);
    g.accepted = part(&at, 2 * head.lexer_states);
    g.reachable = part(&at, 4 * head.lexer_states * head.words);
    g.actions = part(&at, 2 * head.states * head.terminals);
    g.gotos = part(&at, 2 * head.states * head.nonterminals);
    g.lhs = part(&at, 2 * head.productions);
    g.length = part(&at, 2 * head.productions);
    g.shifted = part(&at, 4 * head.states * head.words);
    g.first = part(&at, 4 * (head.states + 1));
    g.reduced = part(&at, 2 * head.reductions);
    g.lookahead = part(&at, 4 * head.reductions * head.words);
    g.first_rest = part(&at, 4 * (head.states + 1));
    g.rest_lhs = part(&at, 2 * head.rests);
    g.rest_pops = part(&at, 2 * head.rests);
    g.rest_cost = part(&at, 4 * head.rests);
    g.rest_at = part(&at, 4 * (head.rests + 1));
    g.rest = part(&at, 2 * head.rest_terminals);
    g.shortest_at = part(&at, 4 * (head.terminals + 1));
    g.shortest = part(&at, g.shortest_at[head.terminals]);
    find_kinds();
    find_followers();
}

static inline bool begins(const uint8_t *blob, const char *magic) {
    for (uint32_t i = 0; i < 4; i++)
        if (blob[i] != (uint8_t)magic[i]) return false;
    return true;
}

static void open_tables(const uint8_t *blob, uint32_t bytes) {
    if (bytes > sizeof(regex_header) && begins(blob, "TBDF"))
        open_regex(blob);
    else if (bytes > sizeof(grammar_header) && begins(blob, "TBYG"))
        open_grammar(blob, bytes);
    else
        FAIL("these tables are neither a grammar nor a regular expression");
    describe_classes();
}

#endif
