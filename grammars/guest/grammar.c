// The guest engine of grammars and regular expressions: it runs their tables over the token trie.
//
// A worker has one instance for each pair of a grammar and a vocabulary. The sequences of this
// grammar share the instance's cache of masks. Each sequence has a slot with its lexer state and
// its stack.
#include "closing.h"

// Arguments and results of the calls. The host writes `arg`, `count` and `eos` before a call.
static struct {
    uint32_t inbox, inbox_bytes;
    uint32_t arg;  // a sequence, a size or an offset, as the call says
    uint32_t count;
    uint32_t trie, tables, table_bytes, eos;
    // Results.
    uint32_t mask, found, out;
} block;

enum { INBOX_BYTES = 1 << 18, MAX_FORCED = 4096 };

static uint8_t inbox[INBOX_BYTES] __attribute__((aligned(16)));
static uint8_t forced[MAX_FORCED];
static uint32_t forced_bytes;

EXPORT("grammar_block") uint32_t export_block(void) {
    block.inbox = (uint32_t)(uintptr_t)inbox;
    block.inbox_bytes = INBOX_BYTES;
    block.out = (uint32_t)(uintptr_t)forced;
    return (uint32_t)(uintptr_t)&block;
}

static uint8_t *loading;
static uint32_t loading_bytes, slot_room, trie_room;

// Reserves memory for a token trie of `arg` bytes, followed by tables of `count` bytes.
EXPORT("grammar_reserve") uint32_t export_reserve(void) {
    const uint32_t trie = (block.arg + 15) & ~15u, nodes = block.arg / 8;
    for (slot_room = 1024; slot_room < nodes; slot_room *= 2) {
    }
    trie_room = trie;
    const uint32_t tables = (block.count + 15) & ~15u;
    const uint32_t merging = merging_bytes(nodes, nodes, slot_room);
    loading_bytes = (trie + tables + merging + CHUNK) / CHUNK * CHUNK;
    loading = take_pages(loading_bytes);
    if (!loading) FAIL("the vocabulary does not fit into the memory");
    block.trie = (uint32_t)(uintptr_t)loading;
    block.tables = block.trie + trie;
    block.table_bytes = block.count;
    return 1;
}

// Reads the trie and the tables, which the host has written to the reserved memory.
EXPORT("grammar_open") uint32_t export_open(void) {
    open_tables(loading + trie_room, block.table_bytes);
    uint8_t *scratch = loading + trie_room + ((block.table_bytes + 15) & ~15u);
    open_vocabulary(loading, block.eos, scratch, slot_room);
    open_parser();
    open_spellings();
    open_masks();
    open_closing();
    arena_give(loading, loading_bytes);
    return 1;
}

// Called after a snapshot was restored: marks all slots of sequences as free.
EXPORT("grammar_wake") uint32_t export_wake(void) {
    for (uint32_t i = 0; i < sequence_count; i++) sequences[i]->used = false;
    return 1;
}

// Returns a free slot for a new sequence; negative if no slot is free. If the memory is full, the
// mask cache is emptied, and gives some of its memory to new slots.
static int32_t new_place(void) {
    const int32_t place = free_place();
    if (place != NO_ROOM || chunk_count <= MIN_CHUNKS) return place;
    forget();
    arena_to_stay();
    return free_place();
}

EXPORT("grammar_start") int32_t export_start(void) {
    const int32_t place = new_place();
    if (place >= 0) begin(sequences[place]);
    return place;
}

EXPORT("grammar_fork") int32_t export_fork(void) {
    const sequence *parent = at_place(block.arg);
    const int32_t place = new_place();
    if (place >= 0) assign(sequences[place], parent);
    return place;
}

EXPORT("grammar_end") uint32_t export_end(void) {
    at_place(block.arg)->used = false;
    return 1;
}

// Appends a token if it can follow; returns whether it can. Always copies the state of the sequence
// before the token to `scratch_sequence`.
static bool add_token(sequence *s, uint32_t token) {
    assign(&scratch_sequence, s);
    const uint32_t place = token < v.size ? v.offsets[token] : 0;
    bool fits = (place & 0xff) != 0;
    for (uint32_t b = 0; fits && b < (place & 0xff); b++)
        fits = add_class(s, g.class_of[v.data[(place >> 8) + b]]);
    if (fits) fits = can_go_on(s);
    if (!fits) assign(s, &scratch_sequence);
    return fits;
}

// Appends the tokens in the inbox, and stops before a token that cannot follow. Returns the number
// of appended tokens.
EXPORT("grammar_append") uint32_t export_append(void) {
    sequence *s = at_place(block.arg);
    const uint32_t *tokens = (const uint32_t *)inbox;
    for (uint32_t i = 0; i < block.count; i++)
        if (!add_token(s, tokens[i])) return i;
    return block.count;
}

// `token`: a token that may follow the sequence. Returns whether the text after this token is
// forced: only one byte may follow it, and the text may not end.
static bool forced_after(const sequence *s, uint32_t token) {
    static sequence after;
    assign(&after, s);
    const uint32_t place = v.offsets[token];
    for (uint32_t b = 0; b < (place & 0xff); b++)
        if (!add_class(&after, g.class_of[v.data[(place >> 8) + b]])) return false;
    const outlook seen = look(&after, g.has_parser ? stand_on(&after) : 0);
    return !seen.complete && seen.only >= 0;
}

// Whether the mask `found` is the whole result of a sequence's round. The host must run the round
// if no token is allowed, or if several tokens are forced. If exactly one token is forced, the mask
// is sufficient, because it allows only this token.
static bool only_masks(const sequence *s, const result *found) {
    if (!(found->flags & MASK_ANY)) return false;
    if (!(found->flags & MASK_FORCED)) return true;
    return found->flags & MASK_SINGLE && !forced_after(s, found->single);
}

// Tries to run the rounds of `count` sequences without their host code. The inbox has pairs of a
// sequence and its sampled token. Three conditions must hold: the token can follow, the next mask
// is in the cache, and the mask is the whole result (`only_masks`). If they hold, the token is
// appended, and the mask's address replaces the token in the inbox. If they do not hold, the
// sequence is unchanged, and 0 replaces the token.
EXPORT("grammar_rounds") uint32_t export_rounds(void) {
    uint32_t *pairs = (uint32_t *)inbox;
    for (uint32_t i = 0; i < block.count; i++, pairs += 2) {
        sequence *s = at_place(pairs[0]);
        const uint32_t token = pairs[1];
        pairs[1] = 0;
        if (!add_token(s, token)) continue;
        const result *found = known(s);
        if (found && only_masks(s, found))
            pairs[1] = (uint32_t)(uintptr_t)found->mask->words;
        else
            assign(s, &scratch_sequence);
    }
    return 1;
}

// Computes the mask of a sequence, and stores its address in `block.mask`. Returns the MASK_ flags,
// or -1 if the sequence's text is nested too deeply.
EXPORT("grammar_mask") int32_t export_mask(void) {
    const result *found = mask_of(at_place(block.arg));
    if (!found) return -1;
    block.mask = (uint32_t)(uintptr_t)found->mask->words;
    block.found = found_masks;
    return (int32_t)found->flags;
}

// Whether the text so far is complete.
EXPORT("grammar_complete") uint32_t export_complete(void) {
    const sequence *s = at_place(block.arg);
    return look(s, g.has_parser ? stand_on(s) : 0).complete;
}

// Writes the forced bytes to `block.out`: the bytes that must follow, because no other text is
// possible. Returns the number of bytes.
EXPORT("grammar_forced") uint32_t export_forced(void) {
    assign(&scratch_sequence, at_place(block.arg));
    sequence *s = &scratch_sequence;
    for (forced_bytes = 0; forced_bytes < MAX_FORCED; forced_bytes++) {
        const outlook seen = look(s, g.has_parser ? stand_on(s) : 0);
        if (seen.complete || seen.only < 0) break;
        forced[forced_bytes] = g.class_byte[seen.only];
        if (!add_class(s, (uint32_t)seen.only)) break;
    }
    return forced_bytes;
}

// Finds few bytes that complete the text, and writes them to `block.out`. Returns their number, or
// -1 if such bytes were not found.
EXPORT("grammar_closing") int32_t export_closing(void) {
    if (!close_text(at_place(block.arg))) return -1;
    copy(forced, closing, closing_bytes);
    return (int32_t)closing_bytes;
}

// Called after grammar_forced. Returns whether a token that begins with the forced bytes from index
// `arg` on, and has further bytes after them, may be allowed.
EXPORT("grammar_overhang") uint32_t export_overhang(void) {
    uint32_t node = 0;
    for (uint32_t at = block.arg; at < forced_bytes; at++) {
        const uint32_t class = g.class_of[forced[at]], end = node + v.subtree[node];
        uint32_t child = node + 1;
        while (child < end && v.class_of[child] != class) child += v.subtree[child];
        if (child >= end) return 0;
        node = child;
    }
    const sequence *s = &scratch_sequence;
    const uint32_t end = node + v.subtree[node];
    for (uint32_t child = node + 1; child < end; child += v.subtree[child]) {
        static sequence longer;
        assign(&longer, s);
        if (add_class(&longer, v.class_of[child]) && can_go_on(&longer)) return 1;
    }
    return 0;
}
