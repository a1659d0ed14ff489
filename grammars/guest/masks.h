// Token masks, which are computed once and then cached.
//
// Without a parser, a mask depends only on the lexer state. With a parser, a mask also depends on
// the top part of the stack, as far down as the computation of the mask has read. So the cache is a
// tree: the first edge of a path is a lexer state, and the further edges are parser states, from
// the top of the stack down. A path ends where the computation stopped reading.
#ifndef GRAMMAR_MASKS_H
#define GRAMMAR_MASKS_H

#include "spellings.h"

enum {
    MASK_ANY = 1,       // some token other than the end of the sequence is allowed
    MASK_FORCED = 2,    // only one byte may follow, the text is not complete, and each allowed
                        // token is a prefix of the longest one
    MASK_COMPLETE = 4,  // the text may end here
    MASK_SINGLE = 8,    // MASK_FORCED, and only one token is allowed
    EDGES = 1 << 17,
    MAX_EDGES = EDGES / 4 * 3,
    BUCKETS = 4096,
    DEEPEST_KEPT = 512,
};

typedef struct kept_mask {
    struct kept_mask *next;  // the next mask of the bucket
    uint32_t hash, pad[2];
    lanes words[];
} kept_mask;

typedef struct result {
    const kept_mask *mask;
    uint32_t flags;
    uint32_t single;  // the allowed token, if the flags have MASK_SINGLE
} result;

typedef struct edge {
    uint32_t from, state;  // from: a lexer state, or 65535 + an inner node (1 or more); 0 if free
    uint32_t place;        // the inner node to which the edge leads; 0 if it leads to `result`
    result *result;
} edge;

static spellings **spellings_of;   // [lexer_states]
static result **result_of;         // [lexer_states] without a parser
static edge *edges;                // [EDGES] with a parser
static uint32_t edge_count, place_count;
static kept_mask *buckets[BUCKETS];
static uint32_t *work;             // the mask that is being computed
static uint32_t *viable_sets;      // [LONGEST + 3][words]
static uint32_t found_masks;       // number of results that were not in the cache

static void open_masks(void) {
    work = stay(4 * v.mask_words);
    if (g.has_parser) {
        spellings_of = stay(sizeof *spellings_of * g.lexer_states);
        edges = stay(sizeof *edges * EDGES);
        viable_sets = stay(4 * g.words * (LONGEST + 3));
    } else {
        result_of = stay(sizeof *result_of * g.lexer_states);
    }
}

// Drops all masks and spellings from the cache, to make room.
static void forget(void) {
    arena_empty();
    zero(buckets, sizeof buckets);
    if (g.has_parser) {
        zero(spellings_of, sizeof *spellings_of * g.lexer_states);
        zero(edges, sizeof *edges * EDGES);
        edge_count = place_count = 0;
    } else {
        zero(result_of, sizeof *result_of * g.lexer_states);
    }
}

// --- one mask ------------------------------------------------------------------------------------

// Adds tokens to `work`, if the parser can accept them: the tokens of a spelling, and of all
// spellings that begin with this spelling. `stack`: the stack after the terminals of the spelling.
static void add_spelled(const spellings *from, uint32_t spelled, uint32_t stack, uint32_t level) {
    const spelling *node = from->tree + spelled;
    uint32_t *set = viable_sets + level * g.words;
    viable(stack, set);
    for (uint32_t i = node->first; i < node->end; i++)
        if (opens(g.kind_set + from->groups[i].kind * g.words, set))
            add_group(work, from->groups + i);
    for (uint32_t child = node->child; child; child = from->tree[child].sibling) {
        const uint32_t terminal = from->tree[child].terminal;
        if (!has(set, terminal)) continue;
        const uint32_t before = stack_node_count, on = push(stack, terminal);
        if (on != NO_STACK) add_spelled(from, child, on, level + 1);
        stack_node_count = before;
    }
}

// The stack after the current lexeme; NO_STACK if the lexeme cannot end here.
static uint32_t ended(const sequence *s, uint32_t stack) {
    if (s->lexer == g.lexer_start) return stack;
    const uint32_t terminal = g.accepted[s->lexer];
    if (terminal == NO_TERMINAL) return NO_STACK;
    return terminal == SKIP ? stack : push(stack, terminal);
}

// The possible continuations of a text. `complete`: whether the text may end. `only`: the class of
// the next byte if only one byte may follow, and -1 if not.
typedef struct outlook {
    bool complete;
    int32_t only;
} outlook;

// `stack`: the stack of the sequence, if there is a parser.
static outlook look(const sequence *s, uint32_t stack) {
    static uint32_t inside[128], after[128];
    outlook seen = {false, -1};
    uint32_t end = NO_STACK;
    if (g.has_parser) {
        viable(stack, inside);
        end = ended(s, stack);
        if (end != NO_STACK) viable(end, after);
        seen.complete = end != NO_STACK && has(after, END);
    } else {
        seen.complete = g.accepted[s->lexer] != NO_TERMINAL;
    }
    for (uint32_t c = 0; c < g.classes; c++) {
        if (g.class_dead[c]) continue;
        uint32_t next = g.next[s->lexer * g.classes + c];
        if (g.has_parser) {
            if (next) {
                if (!opens(g.reachable + next * g.words, inside)) continue;
            } else {
                if (end == NO_STACK || s->lexer == g.lexer_start) continue;
                next = g.next[g.lexer_start * g.classes + c];
                if (!next || !opens(g.reachable + next * g.words, after)) continue;
            }
        } else if (!next) {
            continue;
        }
        if (seen.only >= 0 || g.class_size[c] != 1) {
            seen.only = -1;
            break;
        }
        seen.only = (int32_t)c;
    }
    return seen;
}

// Adds the tokens that a regular expression allows in the lexer state `lexer`.
static void add_walk(uint32_t lexer) {
    uint16_t path[LONGEST + 2];
    path[0] = (uint16_t)lexer;
    for (uint32_t i = 1; i < v.nodes;) {
        const uint32_t d = v.depth[i];
        const uint16_t next = g.next[path[d - 1] * g.classes + v.class_of[i]];
        if (!next) {
            i += v.subtree[i];
            continue;
        }
        path[d] = next;
        if (v.first[i] != v.first[i + 1]) add_node(work, i);
        i++;
    }
}

// --- the cache -----------------------------------------------------------------------------------

// Stores the computed mask in the cache, and returns it; 0 if the cache is full. Equal masks are
// stored only once.
static const kept_mask *keep_work(void) {
    const uint32_t lanes_of = v.mask_words / 4;
    lanes mixed = {2166136261u, 0x9e3779b1u, 2654435761u, 40503u};
    const lanes *from = (const lanes *)work;
    for (uint32_t i = 0; i < lanes_of; i++) mixed = (mixed ^ from[i]) * 16777619u ^ mixed >> 15;
    const uint32_t hash = mixed[0] ^ mixed[1] * 3 ^ mixed[2] * 5 ^ mixed[3] * 7;
    kept_mask **bucket = buckets + (hash ^ hash >> 12) % BUCKETS;
    for (kept_mask *mask = *bucket; mask; mask = mask->next)
        if (mask->hash == hash && same((const uint32_t *)mask->words, work, v.mask_words))
            return mask;
    kept_mask *mask = arena_take(sizeof *mask + 4 * v.mask_words);
    if (!mask) return 0;
    mask->next = *bucket;
    mask->hash = hash;
    copy(mask->words, work, 4 * v.mask_words);
    *bucket = mask;
    return mask;
}

// The flags of the mask in `work`, for a text after which only one byte may follow. If all allowed
// tokens are prefixes of the longest allowed token, the flags contain MASK_FORCED. If not, the
// flags are 0: two allowed tokens differ after the forced bytes, so the model must choose one of
// them.
static uint32_t forced_flags(uint32_t *single) {
    uint32_t longest = 0, count = 0;
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < v.mask_words; i++)
            for (uint32_t word = work[i]; word; word &= word - 1) {
                const uint32_t token = 32 * i + (uint32_t)__builtin_ctz(word);
                const uint32_t place = v.offsets[token];
                if (!pass) {
                    count++;
                    *single = token;
                    if ((place & 0xff) > (longest & 0xff)) longest = place;
                    continue;
                }
                for (uint32_t b = 0; b < (place & 0xff); b++)
                    if (v.data[(place >> 8) + b] != v.data[(longest >> 8) + b]) return 0;
            }
    return count == 1 ? MASK_FORCED | MASK_SINGLE : MASK_FORCED;
}

static result *keep_result(outlook seen) {
    uint32_t single = 0, flags = seen.complete ? MASK_COMPLETE : 0;
    if (!seen.complete && seen.only >= 0) flags = forced_flags(&single);
    for (uint32_t i = 0; i < v.mask_words; i++)
        if (work[i]) {
            flags |= MASK_ANY;
            break;
        }
    if (seen.complete && v.eos < v.size) add_tokens(work, &v.eos, 1);
    result *found = arena_take(sizeof *found);
    const kept_mask *mask = found ? keep_work() : 0;
    if (!mask) return 0;
    *found = (result){mask, flags, single};
    found_masks++;
    return found;
}

static edge *edge_from(uint32_t from, uint32_t state) {
    uint32_t at = (from * 2654435761u ^ state * 0x9e3779b1u) >> 9 & (EDGES - 1);
    while (edges[at].from && (edges[at].from != from || edges[at].state != state))
        at = (at + 1) & (EDGES - 1);
    return edges + at;
}

// The cached result for a sequence; 0 if the cache does not have it.
static const result *known(const sequence *s) {
    if (!g.has_parser) return result_of[s->lexer];
    uint32_t from = s->lexer;
    for (uint32_t at = s->depth; at--;) {
        const edge *next = edge_from(from, s->stack[at]);
        if (!next->from) return 0;
        if (!next->place) return next->result;
        from = next->place + 65535;
    }
    return 0;
}

// Adds a result to the cache's tree. The path to the result consists of the lexer state and the
// parser states that were read. Returns false if the tree is full.
static bool hang(const sequence *s, uint32_t read_from, result *found) {
    uint32_t from = s->lexer;
    for (uint32_t at = s->depth; at-- > read_from;) {
        edge *next = edge_from(from, s->stack[at]);
        if (!next->from) {
            if (edge_count == MAX_EDGES) return false;
            edge_count++;
            *next = (edge){from, s->stack[at], at == read_from ? 0 : ++place_count, found};
        }
        from = next->place + 65535;
    }
    return true;
}

static const result *find_result(const sequence *s) {
    zero(work, 4 * v.mask_words);
    if (!g.has_parser) {
        add_walk(s->lexer);
        return result_of[s->lexer] = keep_result(look(s, 0));
    }
    spellings *from = spellings_of[s->lexer];
    if (!from) {
        find(s->lexer);
        from = spellings_of[s->lexer] = keep_found();
        if (!from) return 0;
    }
    const uint32_t stack = stand_on(s);
    add_spelled(from, 0, stack, 0);
    const outlook seen = look(s, stack);
    if (out_of_nodes) return 0;
    result *found = keep_result(seen);
    // A result that depends on more than DEEPEST_KEPT states of a stack is not cached, because its
    // path would fill the tree.
    if (found && s->depth - lowest > DEEPEST_KEPT) return found;
    return found && hang(s, lowest, found) ? found : 0;
}

// The mask of a sequence, with the mask's flags; 0 if the sequence's text is nested too deeply.
static const result *mask_of(const sequence *s) {
    const result *found = known(s);
    if (found) return found;
    out_of_nodes = false;  // an earlier call may have set it
    found = find_result(s);
    if (found || out_of_nodes) return found;
    forget();
    found = find_result(s);
    if (!found && !out_of_nodes) FAIL("the masks of this grammar do not fit into the memory");
    return found;
}

#endif
