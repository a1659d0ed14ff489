// The sequences of this guest, each with the states of its lexer and its parser.
#ifndef GRAMMAR_SEQUENCES_H
#define GRAMMAR_SEQUENCES_H

#include "tables.h"

enum { DEEPEST = 8192, MAX_SEQUENCES = 4096, TOO_MANY = -1, NO_ROOM = -2 };

typedef struct sequence {
    bool used;
    uint16_t lexer;
    uint32_t depth;           // of the stack; 0 without a parser
    uint16_t stack[DEEPEST];  // parser states, the start state first
} sequence;

static sequence *sequences[MAX_SEQUENCES];
static uint32_t sequence_count;  // slots that have memory
static sequence scratch_sequence;

static void begin(sequence *s) {
    s->used = true;
    s->lexer = (uint16_t)g.lexer_first;
    s->depth = g.has_parser ? 1 : 0;
    s->stack[0] = 0;
}

static void assign(sequence *to, const sequence *from) {
    to->used = true;
    to->lexer = from->lexer;
    to->depth = from->depth;
    copy(to->stack, from->stack, 2 * from->depth);
}

// A free slot; TOO_MANY if all MAX_SEQUENCES slots are used, NO_ROOM if a new slot does not fit
// into the memory.
static int32_t free_place(void) {
    for (uint32_t i = 0; i < sequence_count; i++)
        if (!sequences[i]->used) return (int32_t)i;
    if (sequence_count == MAX_SEQUENCES) return TOO_MANY;
    sequences[sequence_count] = stay_if_room(sizeof(sequence));
    return sequences[sequence_count] ? (int32_t)sequence_count++ : NO_ROOM;
}

static sequence *at_place(uint32_t place) {
    if (place >= sequence_count || !sequences[place]->used) FAIL("no such sequence");
    return sequences[place];
}

#endif
