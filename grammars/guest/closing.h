// Completes a text with few bytes.
//
// Under a regular expression, the bytes are a shortest path from the current state to a match.
// Under a grammar, the unfinished lexeme is completed first, and then the rules on the parser's
// stack. A *rest* of a parser state is a list of terminals that completes one unfinished rule of
// this state (grammars/yacc/closing.py). A search finds the cheapest rests that together complete
// the whole stack. Then the shortest text of each terminal of these rests is appended. If such a
// text would continue the lexeme before it, a text that SKIP matches (for example a space) is
// inserted between the two.
#ifndef GRAMMAR_CLOSING_H
#define GRAMMAR_CLOSING_H

#include "masks.h"

enum { MAX_CLOSING = 4096, MAX_PLACES = 1 << 18, FAR = 0xffffffff };

static uint8_t closing[MAX_CLOSING];
static uint32_t closing_bytes;

// For a search through the lexer. For each lexer state: the previous state on the shortest path to
// this state, and the class of the byte between the two states.
static uint16_t *way_from, *way_queue;
static uint8_t *way_class, *way_seen;
// A node of the search over the stack. Each pair of a stack index and a nonterminal is a place.
typedef struct closing_place {
    uint32_t cost;  // of the cheapest known way to this place; FAR if no way is known
    uint32_t from;  // the previous place on that way; FAR for the first place
    uint32_t rest;  // the rest that leads here; the highest bit is set when the place is finished
} closing_place;
static closing_place *closing_places;

static void open_closing(void) {
    way_from = stay(2 * g.lexer_states);
    way_queue = stay(2 * g.lexer_states);
    way_class = stay(g.lexer_states);
    way_seen = stay(g.lexer_states);
    if (g.has_parser) closing_places = stay(sizeof *closing_places * MAX_PLACES);
}

static bool close_with(sequence *s, uint32_t class) {
    if (closing_bytes == MAX_CLOSING || !add_class(s, class)) return false;
    closing[closing_bytes++] = g.class_byte[class];
    return true;
}

// Adds the shortest text that leads from the lexer state `from` to a match of a terminal in
// `wanted`. If `wanted` is 0, any terminal may match. If `apart` is not 0, the text must not
// continue the lexeme of the lexer state `apart`.
static bool close_lexeme(sequence *s, uint32_t from, const uint32_t *wanted, uint32_t apart) {
    uint32_t head = 0, count = 0, found = 0;
    zero(way_seen, g.lexer_states);
    way_queue[count++] = (uint16_t)from;
    way_seen[from] = 1;
    while (head < count && !found) {
        const uint32_t state = way_queue[head++];
        for (uint32_t c = 0; c < g.classes; c++) {
            const uint32_t next = g.next[state * g.classes + c];
            if (!next || way_seen[next]) continue;
            if (apart && head == 1 && g.next[apart * g.classes + c]) continue;
            way_seen[next] = 1;
            way_from[next] = (uint16_t)state;
            way_class[next] = (uint8_t)c;
            way_queue[count++] = (uint16_t)next;
            const uint32_t terminal = g.accepted[next];
            if (terminal != NO_TERMINAL && (!wanted || has(wanted, terminal))) {
                found = next;
                break;
            }
        }
    }
    if (!found) return false;
    // The queue is not needed any more. It receives the classes of the path, the last class first.
    uint32_t length = 0;
    for (uint32_t at = found; at != from; at = way_from[at]) way_queue[length++] = way_class[at];
    while (length--)
        if (!close_with(s, way_queue[length])) return false;
    return true;
}

// Adds a terminal's shortest text. If this text would continue the last lexeme, a text that SKIP
// matches (for example a space) is added first.
static bool close_terminal(sequence *s, uint32_t terminal) {
    const uint32_t first = g.shortest_at[terminal], end = g.shortest_at[terminal + 1];
    if (first == end) return false;
    const uint32_t class = g.class_of[g.shortest[first]];
    if (s->lexer != g.lexer_start && g.next[s->lexer * g.classes + class]) {
        static const uint32_t set[128] = {1u << SKIP};
        if (!close_lexeme(s, g.lexer_start, set, s->lexer)) return false;
        if (g.next[s->lexer * g.classes + class]) return false;
    }
    for (uint32_t i = first; i < end; i++)
        if (!close_with(s, g.class_of[g.shortest[i]])) return false;
    return g.accepted[s->lexer] == terminal;
}

// --- the stack -----------------------------------------------------------------------------------

// Records the places to which the rests of `state` lead. Skips a place if a way to it that is at
// most as expensive is known. `from` is the place from which `state` was reached, and `cost` is the
// cost of all rests up to `from`. `top` is the number of states below `state` on the stack.
static void reach(uint32_t depth, uint32_t from, uint32_t cost, uint32_t top, uint32_t state) {
    for (uint32_t r = g.first_rest[state]; r < g.first_rest[state + 1]; r++) {
        const uint32_t pops = g.rest_pops[r];
        if (pops > top) continue;
        const uint32_t at = top - pops;
        if (at >= depth) continue;
        closing_place *to = closing_places + at * g.nonterminals + g.rest_lhs[r];
        if (cost + g.rest_cost[r] < to->cost)
            *to = (closing_place){cost + g.rest_cost[r], from, r};
    }
}

// Finds the cheapest rests that complete a stack, and writes them to `rests` in reverse order.
// Returns the number of rests; 0 if no rests complete the stack, or if more than `most` are needed.
static uint32_t find_closing(const uint16_t *stack, uint32_t depth, uint32_t *rests,
                             uint32_t most) {
    if (depth * g.nonterminals > MAX_PLACES) return 0;
    for (uint32_t i = 0; i < depth * g.nonterminals; i++) closing_places[i].cost = FAR;
    reach(depth, FAR, 0, depth - 1, stack[depth - 1]);
    for (uint32_t at = depth; at-- > 0;) {
        // A rest leads to a lower index of the stack, or to another nonterminal at the same index.
        closing_place *row = closing_places + at * g.nonterminals;
        for (;;) {
            uint32_t nearest = FAR, cost = FAR;
            for (uint32_t n = 0; n < g.nonterminals; n++)
                if (row[n].cost != FAR && !(row[n].rest >> 31) && row[n].cost < cost) {
                    nearest = n;
                    cost = row[n].cost;
                }
            if (nearest == FAR) break;
            row[nearest].rest |= 1u << 31;
            const uint32_t state = g.gotos[stack[at] * g.nonterminals + nearest];
            if (!state || (at == 0 && nearest == 0)) continue;
            reach(depth, at * g.nonterminals + nearest, cost, at + 1, state);
        }
    }
    if (closing_places[0].cost == FAR) return 0;
    uint32_t count = 0;
    for (uint32_t at = 0; at != FAR; at = closing_places[at].from) {
        if (count == most) return 0;
        rests[count++] = closing_places[at].rest & ~(1u << 31);
    }
    return count;
}

// Completes a sequence's text under a grammar: its unfinished lexeme, then its stack.
static bool close_grammar(sequence *s) {
    static uint32_t rests[MAX_CLOSING];
    static uint32_t set[128];
    static sequence parsed;
    if (s->lexer != g.lexer_start) {
        viable(stand_on(s), set);
        const uint32_t terminal = g.accepted[s->lexer];
        const bool ends = terminal != NO_TERMINAL && (terminal == SKIP || has(set, terminal));
        set[0] |= 1u << SKIP;
        if (!ends && !close_lexeme(s, s->lexer, set, 0)) return false;
    }
    assign(&parsed, s);
    if (s->lexer != g.lexer_start && g.accepted[s->lexer] != SKIP &&
        !push_own(&parsed, g.accepted[s->lexer]))
        return false;
    uint32_t count = find_closing(parsed.stack, parsed.depth, rests, MAX_CLOSING);
    if (!count) return false;
    while (count--)
        for (uint32_t i = g.rest_at[rests[count]]; i < g.rest_at[rests[count] + 1]; i++)
            if (!close_terminal(s, g.rest[i])) return false;
    return true;
}

// Fills `closing` with bytes that complete a sequence's text. Returns false if no such bytes were
// found.
static bool close_text(const sequence *from) {
    static sequence s;
    assign(&s, from);
    closing_bytes = 0;
    if (!g.has_parser) {
        if (g.accepted[s.lexer] == NO_TERMINAL && !close_lexeme(&s, s.lexer, 0, 0)) return false;
    } else if (!close_grammar(&s)) {
        return false;
    }
    return look(&s, g.has_parser ? stand_on(&s) : 0).complete;
}

#endif
