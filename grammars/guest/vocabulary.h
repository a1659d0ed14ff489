// The vocabulary of a grammar: a tree of tokens by the classes of their bytes.
//
// From each lexer state, two bytes of the same class lead to the same state. So tokens whose bytes
// have the same classes are always allowed together, and share a node. The tree leaves out tokens
// with a byte for which no lexer state has a transition.
#ifndef GRAMMAR_VOCABULARY_H
#define GRAMMAR_VOCABULARY_H

#include "tables.h"

enum { LONGEST = 254, TRIE_HEAD = 28, MANY = 1024 };

typedef uint32_t lanes __attribute__((vector_size(16)));

static struct {
    uint32_t size, eos, mask_words;  // mask_words: u32 words of a mask, a multiple of 4
    const uint32_t *offsets;         // [size] offset of the token's bytes << 8 | their number
    const uint8_t *data;

    // Nodes in preorder; node 0 is the root.
    uint32_t nodes;
    const uint8_t *class_of, *depth;  // [nodes]
    const uint32_t *subtree;          // [nodes] number of nodes of the subtree, including its root
    const uint32_t *first;            // [nodes + 1] where the node's tokens start in `tokens`
    const uint32_t *tokens;
    const uint32_t *set_at;  // [nodes] 1 + index in `sets`; 0 for a node with few tokens
    const lanes *sets;
} v;

static inline void add_tokens(uint32_t *mask, const uint32_t *tokens, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) mask[tokens[i] / 32] |= 1u << tokens[i] % 32;
}

static inline void add_mask(uint32_t *mask, const lanes *more) {
    lanes *to = (lanes *)mask;
    for (uint32_t i = 0; i < v.mask_words / 4; i++) to[i] |= more[i];
}

// Adds the tokens of a node.
static inline void add_node(uint32_t *mask, uint32_t node) {
    if (v.set_at[node])
        add_mask(mask, v.sets + (v.set_at[node] - 1) * (v.mask_words / 4));
    else
        add_tokens(mask, v.tokens + v.first[node], v.first[node + 1] - v.first[node]);
}

// --- building the tree ---------------------------------------------------------------------------

typedef struct merging {
    uint32_t count, room;  // room: number of `slots`, a power of two
    uint32_t *slots;       // hash table by parent and class: node + 1
    uint32_t *parent, *child, *sibling, *token;
    uint32_t *next_token;  // [size]
    uint8_t *class_of;
} merging;

// Bytes that `merge` needs for `nodes` nodes, `tokens` tokens and `room` slots of the hash table.
static uint32_t merging_bytes(uint32_t nodes, uint32_t tokens, uint32_t room) {
    return 4 * room + 17 * nodes + 4 * tokens + 64;
}

static uint32_t merged_child(merging *m, uint32_t parent, uint8_t class) {
    uint32_t at = (parent * 2654435761u ^ class * 0x9e3779b1u) >> 3 & (m->room - 1);
    for (; m->slots[at]; at = (at + 1) & (m->room - 1)) {
        const uint32_t node = m->slots[at] - 1;
        if (m->parent[node] == parent && m->class_of[node] == class) return node;
    }
    const uint32_t node = m->count++;
    m->slots[at] = node + 1;
    m->parent[node] = parent;
    m->class_of[node] = class;
    m->child[node] = m->token[node] = 0;
    m->sibling[node] = m->child[parent];
    m->child[parent] = node;
    return node;
}

// Merges AICI's tree into `m`. All children whose bytes have the same class become one node. A node
// of AICI's tree is (token << 8 | byte, size of the subtree << 8 | ...).
static void merge(merging *m, const uint32_t *nodes, uint32_t count) {
    uint32_t merged[LONGEST + 2], end[LONGEST + 2], depth = 0;
    m->count = 1;
    m->child[0] = m->token[0] = m->sibling[0] = m->parent[0] = 0;
    m->class_of[0] = 0;
    merged[0] = 0;
    end[0] = count;
    for (uint32_t i = 1; i < count;) {
        const uint32_t head = nodes[2 * i], size = nodes[2 * i + 1] >> 8, token = head >> 8;
        while (depth && end[depth] <= i) depth--;
        const uint8_t class = g.class_of[head & 0xff];
        if (size == 0 || depth >= LONGEST) FAIL("the token trie is damaged");
        if (g.class_dead[class]) {
            i += size;
            continue;
        }
        const uint32_t node = merged_child(m, merged[depth], class);
        if (token != 0xffffff) {
            if (token >= v.size) FAIL("the token trie has a token beyond the vocabulary");
            m->next_token[token] = m->token[node];
            m->token[node] = token + 1;
        }
        depth++;
        merged[depth] = node;
        end[depth] = i + size;
        i++;
    }
}

// Writes the nodes of `m` to `v` in preorder.
static void lay_out(merging *m) {
    const uint32_t count = m->count;
    uint8_t *class_of = stay(count), *depth = stay(count);
    uint32_t *subtree = stay(4 * count), *first = stay(4 * (count + 1));
    uint32_t *tokens = stay(4 * v.size), *set_at = stay(4 * count);
    uint32_t path[LONGEST + 2], d = 0, at = 0, used = 0, sets = 0, many = 0;
    uint32_t node = 0;
    for (;;) {
        class_of[at] = m->class_of[node];
        depth[at] = (uint8_t)d;
        first[at] = used;
        for (uint32_t token = m->token[node]; token; token = m->next_token[token - 1])
            tokens[used++] = token - 1;
        many += used - first[at] >= MANY;
        path[d] = at++;
        uint32_t next = m->child[node];
        if (next) {
            // Each node is entered once, from its parent or from the sibling before it.
            d++;
            node = next;
            continue;
        }
        subtree[path[d]] = 1;
        while (node && !m->sibling[node]) {
            node = m->parent[node];
            d--;
            subtree[path[d]] = at - path[d];
        }
        if (!node) break;
        node = m->sibling[node];
    }
    first[at] = used;
    v.nodes = count;
    v.class_of = class_of;
    v.depth = depth;
    v.subtree = subtree;
    v.first = first;
    v.tokens = tokens;
    v.set_at = set_at;
    lanes *masks = many ? stay(4 * v.mask_words * many) : 0;
    v.sets = masks;
    for (uint32_t i = 0; i < count; i++) {
        if (first[i + 1] - first[i] < MANY) continue;
        uint32_t *mask = (uint32_t *)(masks + sets * (v.mask_words / 4));
        add_tokens(mask, tokens + first[i], first[i + 1] - first[i]);
        set_at[i] = ++sets;
    }
}

// Reads the vocabulary from the token trie `blob`; `scratch` has room for `merging_bytes`.
static void open_vocabulary(const uint8_t *blob, uint32_t eos, uint8_t *scratch, uint32_t room) {
    uint32_t head[TRIE_HEAD / 4];
    copy(head, blob, TRIE_HEAD);
    const uint32_t count = head[2] / 8;
    v.size = head[5];
    v.eos = eos;
    v.mask_words = (v.size + 127) / 128 * 4;
    uint32_t *offsets = stay(4 * v.size);
    copy(offsets, blob + TRIE_HEAD + head[2], 4 * v.size);
    uint8_t *data = stay(head[4]);
    copy(data, blob + TRIE_HEAD + head[2] + head[3], head[4]);
    v.offsets = offsets;
    v.data = data;
    merging m = {.room = room};
    m.slots = (uint32_t *)scratch;
    m.parent = m.slots + room;
    m.child = m.parent + count;
    m.sibling = m.child + count;
    m.token = m.sibling + count;
    m.next_token = m.token + count;
    m.class_of = (uint8_t *)(m.next_token + v.size);
    zero(m.slots, 4 * room);
    merge(&m, (const uint32_t *)(blob + TRIE_HEAD), count);
    lay_out(&m);
}

#endif
