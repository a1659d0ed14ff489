// LR parsing on stacks. Each sequence has its own stack. Other stacks are built on this stack, and
// share its lower part.
//
// A stack is identified by its top. A number below DEEPEST is an index in the sequence's own stack.
// A larger number is a node on top of another stack. `lowest` records the lowest index of the
// sequence's own stack that was read. So a result is valid for every stack that has the same states
// at this index and above.
#ifndef GRAMMAR_PARSER_H
#define GRAMMAR_PARSER_H

#include "sequences.h"

enum { NODES = 65536, NO_STACK = 0xffffffff };

typedef struct stack_node {
    uint32_t below;
    uint16_t state;
} stack_node;

static const uint16_t *base;  // the sequence's own stack
static uint32_t lowest;       // the lowest index of `base` that was read
static stack_node *stack_nodes;  // [NODES]
static uint32_t stack_node_count;
static bool out_of_nodes;

static uint32_t *pending_stacks, *pending_sets;  // [terminals], [terminals * words]

static void open_parser(void) {
    if (!g.has_parser) return;
    stack_nodes = stay(sizeof(stack_node) * NODES);
    pending_stacks = stay(4 * (g.terminals + 1));
    pending_sets = stay(4 * (g.terminals + 1) * g.words);
}

// Frees all nodes, and returns the top of a sequence's own stack, on which other stacks are built.
static uint32_t stand_on(const sequence *s) {
    base = s->stack;
    lowest = s->depth;
    stack_node_count = 0;
    out_of_nodes = false;
    return s->depth - 1;
}

static inline uint32_t state_of(uint32_t stack) {
    if (stack >= DEEPEST) return stack_nodes[stack - DEEPEST].state;
    if (stack < lowest) lowest = stack;
    return base[stack];
}

static inline uint32_t below(uint32_t stack) {
    return stack >= DEEPEST ? stack_nodes[stack - DEEPEST].below : stack - 1;
}

static inline uint32_t put(uint32_t stack, uint32_t state) {
    if (stack_node_count == NODES) {
        out_of_nodes = true;
        stack_node_count = 0;
    }
    stack_nodes[stack_node_count] = (stack_node){stack, (uint16_t)state};
    return DEEPEST + stack_node_count++;
}

static inline uint32_t reduced_by(uint32_t stack, uint32_t production) {
    for (uint32_t n = g.length[production]; n; n--) stack = below(stack);
    const uint32_t to = g.gotos[state_of(stack) * g.nonterminals + g.lhs[production]];
    return put(stack, to);
}

// Moves the top node of a stack to the first free node, so that a long chain of reductions needs
// few nodes. The nodes in use are the other nodes of the stack and the first `kept` nodes. Other
// stacks must not be built on the top node.
static inline uint32_t settled(uint32_t stack, uint32_t kept) {
    const stack_node top = stack_nodes[stack - DEEPEST];
    uint32_t to = top.below < DEEPEST ? 0 : top.below - DEEPEST + 1;
    if (to < kept) to = kept;
    if (DEEPEST + to >= stack) return stack;
    stack_nodes[to] = top;
    stack_node_count = to + 1;
    return DEEPEST + to;
}

// Pushes a terminal on a stack. Returns the new stack; NO_STACK if the terminal cannot follow, or
// if all nodes are in use.
static uint32_t push(uint32_t stack, uint32_t terminal) {
    const uint32_t before = stack_node_count;
    while (!out_of_nodes) {
        const uint32_t action = g.actions[state_of(stack) * g.terminals + terminal];
        if ((action & 3) == SHIFT) return put(stack, action >> 2);
        if ((action & 3) == ACCEPT) return stack;
        if ((action & 3) != REDUCE) return NO_STACK;
        stack = settled(reduced_by(stack, action >> 2), before);
    }
    return NO_STACK;
}

// Writes the set of terminals that can follow a stack to `out`. The set includes terminals that can
// be shifted only after reductions.
static void viable(uint32_t stack, uint32_t *out) {
    const uint32_t words = g.words, before = stack_node_count;
    uint32_t state = state_of(stack);
    copy(out, g.shifted + state * words, 4 * words);
    if (g.first[state] == g.first[state + 1]) return;
    pending_stacks[0] = stack;
    for (uint32_t w = 0; w < words; w++) pending_sets[w] = 0xffffffff;
    uint32_t count = 1;
    uint32_t set[128];
    while (count && !out_of_nodes) {
        const uint32_t others = --count;
        stack = pending_stacks[count];
        copy(set, pending_sets + count * words, 4 * words);
        state = state_of(stack);
        for (uint32_t w = 0; w < words; w++) out[w] |= g.shifted[state * words + w] & set[w];
        for (uint32_t r = g.first[state]; r < g.first[state + 1]; r++) {
            const uint32_t *ahead = g.lookahead + r * words;
            if (!meets(ahead, set)) continue;
            uint32_t *to = pending_sets + count * words;
            for (uint32_t w = 0; w < words; w++) to[w] = ahead[w] & set[w];
            pending_stacks[count++] = reduced_by(stack, g.reduced[r]);
        }
        // The top node of the last pending stack was allocated last, so it can be moved down.
        if (count == others + 1) {
            const uint32_t kept = others ? pending_stacks[others - 1] - DEEPEST + 1 : before;
            pending_stacks[others] = settled(pending_stacks[others], kept);
        }
    }
    stack_node_count = before;
}

// --- a sequence's own stack ----------------------------------------------------------------------

// Pushes a terminal on the sequence's own stack. Returns false if the terminal cannot follow or the
// stack would be too deep. The stack may then be modified.
static bool push_own(sequence *s, uint32_t terminal) {
    for (;;) {
        const uint32_t state = s->stack[s->depth - 1];
        const uint32_t action = g.actions[state * g.terminals + terminal];
        uint32_t to;
        if ((action & 3) == SHIFT) {
            to = action >> 2;
        } else if ((action & 3) == REDUCE) {
            s->depth -= g.length[action >> 2];
            to = g.gotos[s->stack[s->depth - 1] * g.nonterminals + g.lhs[action >> 2]];
        } else {
            return (action & 3) == ACCEPT;
        }
        if (s->depth == DEEPEST) return false;
        s->stack[s->depth++] = (uint16_t)to;
        if ((action & 3) == SHIFT) return true;
    }
}

// Adds a byte of a class. Does not check whether the text can be continued after the byte
// (`can_go_on`).
static bool add_class(sequence *s, uint32_t class) {
    uint32_t next = g.next[s->lexer * g.classes + class];
    if (!next) {
        const uint32_t terminal = g.accepted[s->lexer];
        if (!g.has_parser || terminal == NO_TERMINAL) return false;
        if (terminal != SKIP && !push_own(s, terminal)) return false;
        next = g.next[g.lexer_start * g.classes + class];
        if (!next) return false;
    }
    s->lexer = (uint16_t)next;
    return true;
}

// Whether there is a terminal that the lexer can still match and that the parser can accept.
static bool can_go_on(const sequence *s) {
    if (!g.has_parser || s->lexer == g.lexer_start) return true;
    uint32_t set[128];
    viable(stand_on(s), set);
    return opens(g.reachable + s->lexer * g.words, set);
}

#endif
