// Groups the tokens that may follow in a lexer state by their effect on the parser. The *spelling*
// of a token is the list of the terminals that the token completes. The *kind* of a token is the
// kind of the lexeme that is unfinished after the token (tables.h). Spelling and kind do not depend
// on the parser's stack.
//
// Tokens with the same spelling and the same kind form a group. On each stack, either all tokens of
// a group are allowed, or none is. Most tokens do not complete a terminal, so there are few groups.
// The computation of a mask checks each group once. The spellings form a tree, so that common
// beginnings are parsed only once.
#ifndef GRAMMAR_SPELLINGS_H
#define GRAMMAR_SPELLINGS_H

#include "parser.h"
#include "vocabulary.h"

enum { MAX_SPELLINGS = 65535, MAX_GROUPS = 65536, GROUP_SLOTS = 4 * MAX_GROUPS };

typedef struct group {
    uint32_t kind;
    uint32_t count;  // number of `tokens`
    uint32_t *tokens, *mask;  // a list or a mask, whichever is smaller; the other is 0
} group;

// A node of the tree of spellings. Node 0 is the empty spelling.
typedef struct spelling {
    uint32_t terminal, child, sibling;  // 0: no more
    uint32_t first, end;                // its groups
} spelling;

typedef struct spellings {
    spelling *tree;
    group *groups;
} spellings;

// A slot of the hash table of groups. A slot is in use if its `search` is `f.search`, the number of
// the current search.
typedef struct group_slot {
    uint32_t search, spelling, kind, group;
} group_slot;

static struct {
    spelling *tree;    // [MAX_SPELLINGS]
    uint32_t spelled;  // number of nodes of `tree`
    struct {
        uint32_t spelling, kind, tokens, to;
    } *groups;  // [MAX_GROUPS]
    uint32_t group_count;
    struct {
        uint32_t node, group;
    } *found;  // [v.nodes]
    uint32_t found_count;
    group_slot *slots;
    uint32_t search;
} f;

static void open_spellings(void) {
    if (!g.has_parser) return;
    f.tree = stay(sizeof *f.tree * MAX_SPELLINGS);
    f.groups = stay(sizeof *f.groups * MAX_GROUPS);
    f.found = stay(sizeof *f.found * v.nodes);
    f.slots = stay(sizeof *f.slots * GROUP_SLOTS);
}

static uint32_t spelled_on(uint32_t before, uint32_t terminal) {
    for (uint32_t s = f.tree[before].child; s; s = f.tree[s].sibling)
        if (f.tree[s].terminal == terminal) return s;
    if (f.spelled == MAX_SPELLINGS)
        FAIL("the tokens of this vocabulary spell more than 65,535 sequences of lexemes at once");
    const uint32_t s = f.spelled++;
    f.tree[s] = (spelling){terminal, 0, f.tree[before].child, 0, 0};
    f.tree[before].child = s;
    return s;
}

static uint32_t group_of(uint32_t spelled, uint32_t kind) {
    uint32_t at = (spelled * 2654435761u ^ kind * 0x9e3779b1u) >> 8 & (GROUP_SLOTS - 1);
    for (; f.slots[at].search == f.search; at = (at + 1) & (GROUP_SLOTS - 1))
        if (f.slots[at].spelling == spelled && f.slots[at].kind == kind) return f.slots[at].group;
    if (f.group_count == MAX_GROUPS)
        FAIL("the tokens of this vocabulary fall into more than 65,536 groups at once");
    const uint32_t number = f.group_count++;
    f.slots[at] = (group_slot){f.search, spelled, kind, number};
    f.groups[number].spelling = spelled;
    f.groups[number].kind = kind;
    f.groups[number].tokens = 0;
    return number;
}

// Walks the vocabulary tree from a lexer state.
static void find(uint32_t lexer) {
    struct {
        uint32_t lexer, spelling;
    } path[LONGEST + 2];
    f.spelled = 1;
    f.tree[0] = (spelling){g.terminals, 0, 0, 0, 0};
    f.group_count = f.found_count = 0;
    f.search++;
    path[0].lexer = lexer;
    path[0].spelling = 0;
    for (uint32_t i = 1; i < v.nodes;) {
        const uint32_t d = v.depth[i], class = v.class_of[i], from = path[d - 1].lexer;
        uint32_t spelled = path[d - 1].spelling;
        uint32_t next = g.next[from * g.classes + class];
        if (!next) {
            const uint32_t terminal = g.accepted[from];
            next = terminal == NO_TERMINAL ? 0 : g.next[g.lexer_start * g.classes + class];
            if (next && terminal != SKIP) {
                const uint32_t last = f.tree[spelled].terminal;
                if (spelled && !has(g.follow + last * g.words, terminal))
                    next = 0;
                else
                    spelled = spelled_on(spelled, terminal);
            }
        }
        const uint32_t kind = g.kind_of[next];
        if (!next || (g.may_begin && !g.may_begin[f.tree[spelled].terminal * g.kinds + kind])) {
            i += v.subtree[i];
            continue;
        }
        path[d].lexer = next;
        path[d].spelling = spelled;
        const uint32_t tokens = v.first[i + 1] - v.first[i];
        if (tokens) {
            const uint32_t to = group_of(spelled, kind);
            f.groups[to].tokens += tokens;
            f.found[f.found_count].node = i;
            f.found[f.found_count++].group = to;
        }
        i++;
    }
}

// Copies the result of the search to the arena; 0 if there is no room.
static spellings *keep_found(void) {
    spellings *kept = arena_take(sizeof *kept);
    spelling *tree = arena_take(sizeof *tree * f.spelled);
    group *groups = arena_take(sizeof *groups * (f.group_count + 1));
    if (!kept || !tree || !groups) return 0;
    copy(tree, f.tree, sizeof *tree * f.spelled);
    kept->tree = tree;
    kept->groups = groups;
    // The groups of a spelling are consecutive.
    for (uint32_t i = 0; i < f.group_count; i++) tree[f.groups[i].spelling].end++;
    uint32_t at = 0;
    for (uint32_t s = 0; s < f.spelled; s++) {
        tree[s].first = at;
        at += tree[s].end;
        tree[s].end = tree[s].first;
    }
    const uint32_t mask_bytes = 4 * v.mask_words;
    for (uint32_t i = 0; i < f.group_count; i++) {
        const uint32_t to = f.groups[i].to = tree[f.groups[i].spelling].end++;
        const uint32_t list_bytes = 4 * f.groups[i].tokens;
        group *one = groups + to;
        *one = (group){f.groups[i].kind, 0, 0, 0};
        if (list_bytes < mask_bytes) {
            one->tokens = arena_take(list_bytes);
        } else {
            one->mask = arena_take(mask_bytes);
            if (one->mask) zero(one->mask, mask_bytes);
        }
        if (!one->tokens && !one->mask) return 0;
    }
    for (uint32_t i = 0; i < f.found_count; i++) {
        group *one = groups + f.groups[f.found[i].group].to;
        const uint32_t node = f.found[i].node;
        if (one->mask) {
            add_node(one->mask, node);
            continue;
        }
        for (uint32_t t = v.first[node]; t < v.first[node + 1]; t++)
            one->tokens[one->count++] = v.tokens[t];
    }
    return kept;
}

static void add_group(uint32_t *mask, const group *one) {
    if (one->mask)
        add_mask(mask, (const lanes *)one->mask);
    else
        add_tokens(mask, one->tokens, one->count);
}

#endif
