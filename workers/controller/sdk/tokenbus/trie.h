// The token trie, a tree of the tokens' bytes in AICI's format (its TokTrie), and token masks.
//
// The trie is read and checked at the first use of a function below. The first use should be in
// tb_init_prompt, whose time limit is long enough. A forked sequence has a copy of the trie.
#ifndef TOKENBUS_TRIE_H
#define TOKENBUS_TRIE_H

TB_IMPORT("trie_size") uint32_t tb_host_trie_size(void);
TB_IMPORT("trie_read") uint32_t tb_host_trie_read(void *to, uint32_t offset, uint32_t n);

// A node of the trie: (token << 8) | byte, and (nodes of its subtree << 8) | num_parents. Children
// follow their parent, by ascending byte; num_parents is the number of levels that end with the
// subtree. Tokens with the same bytes have nodes that are siblings with the same byte. The first of
// these nodes has the subtree, and the others are leaves.
typedef struct tb_node {
    uint32_t token_byte, size_parents;
} tb_node;

enum { TB_TRIE_MAGIC = 0x558b6fd3, TB_TRIE_HEAD = 28, TB_LONGEST_TOKEN = 254 };

typedef struct tb_trie {
    const tb_node *nodes;  // the first is the root
    uint32_t node_count;
    const uint32_t *offsets;  // (offset << 8) | length of each token's bytes in data
    const uint8_t *data;
    uint32_t longest;  // bytes of the longest token
} tb_trie;

static inline uint8_t tb_node_byte(const tb_node *node) { return (uint8_t)node->token_byte; }

// The token that ends at a node; TB_NONE if no token ends there.
static inline uint32_t tb_node_token(const tb_node *node) {
    const uint32_t token = node->token_byte >> 8;
    return token == 0xffffff ? TB_NONE : token;
}

static inline uint32_t tb_node_size(const tb_node *node) { return node->size_parents >> 8; }

static inline uint32_t tb_node_parents(const tb_node *node) { return node->size_parents & 0xff; }

// The children of a node: for (c = tb_first_child(node); c; c = tb_next_child(node, c)).
static inline const tb_node *tb_first_child(const tb_node *node) {
    return tb_node_size(node) > 1 ? node + 1 : 0;
}

static inline const tb_node *tb_next_child(const tb_node *node, const tb_node *child) {
    child += tb_node_size(child);
    return child < node + tb_node_size(node) ? child : 0;
}

// The first child with this byte; 0 if no child has this byte.
static inline const tb_node *tb_child(const tb_node *node, uint8_t byte) {
    for (const tb_node *c = tb_first_child(node); c; c = tb_next_child(node, c))
        if (tb_node_byte(c) == byte) return c;
    return 0;
}

// --- masks ---------------------------------------------------------------------------------------

static inline uint32_t tb_mask_words(void) { return (tb_vocab_size() + 31) / 32; }

// Forbids every token.
static inline void tb_mask_clear_all(uint32_t *mask) { memset(mask, 0, 4 * tb_mask_words()); }

// Allocates a mask that forbids every token; free with tb_free.
static inline uint32_t *tb_mask_new(void) {
    uint32_t *mask = tb_alloc(4 * tb_mask_words());
    tb_mask_clear_all(mask);
    return mask;
}

// Allows every token.
static inline void tb_mask_set_all(uint32_t *mask) {
    memset(mask, 0xff, 4 * tb_mask_words());
    if (tb_vocab_size() % 32) mask[tb_vocab_size() / 32] = (1u << tb_vocab_size() % 32) - 1;
}

static inline void tb_mask_set(uint32_t *mask, uint32_t token) {
    if (token < tb_vocab_size()) mask[token / 32] |= 1u << token % 32;
}

static inline void tb_mask_clear(uint32_t *mask, uint32_t token) {
    if (token < tb_vocab_size()) mask[token / 32] &= ~(1u << token % 32);
}

static inline bool tb_mask_has(const uint32_t *mask, uint32_t token) {
    return token < tb_vocab_size() && mask[token / 32] >> token % 32 & 1;
}

// The number of tokens that a mask allows.
static inline uint32_t tb_mask_count(const uint32_t *mask) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < tb_mask_words(); i++) count += (uint32_t)__builtin_popcount(mask[i]);
    return count;
}

// --- the trie ------------------------------------------------------------------------------------

static tb_trie tb_loaded;

// Ends the sequence with an error unless the nodes are a tree in preorder, with valid sizes and
// levels. Sets the bit of each token in `seen`.
static inline void tb_trie_check_nodes(tb_trie *trie, uint32_t *seen) {
    uint32_t end[TB_LONGEST_TOKEN + 1], parents[TB_LONGEST_TOKEN + 1], last[TB_LONGEST_TOKEN + 1];
    const uint32_t count = trie->node_count;
    uint32_t depth = 0;
    if (tb_node_size(trie->nodes) != count || tb_node_parents(trie->nodes) != 0)
        tb_fail("token trie: the root's subtree does not have all %u nodes", count);
    end[0] = count;
    parents[0] = 0;
    last[0] = TB_NONE;
    for (uint32_t i = 1; i < count; i++) {
        const tb_node *node = trie->nodes + i;
        while (end[depth] <= i) depth--;
        const uint32_t size = tb_node_size(node), token = tb_node_token(node);
        if (size == 0 || size > end[depth] - i)
            tb_fail("token trie: node %u has %u nodes, more than its parent", i, size);
        const uint32_t up = i + size < end[depth] ? 1 : parents[depth] + 1;
        if (tb_node_parents(node) != up)
            tb_fail("token trie: node %u ends %u levels, but its num_parents is %u", i, up,
                    tb_node_parents(node));
        const bool again = last[depth] == tb_node_byte(node) && size == 1 && token != TB_NONE;
        if (last[depth] != TB_NONE && tb_node_byte(node) <= last[depth] && !again)
            tb_fail("token trie: node %u is not in the order of bytes", i);
        last[depth] = tb_node_byte(node);
        if (++depth > TB_LONGEST_TOKEN)
            tb_fail("token trie: a token is longer than %d bytes", TB_LONGEST_TOKEN);
        if (depth > trie->longest) trie->longest = depth;
        end[depth] = i + size;
        parents[depth] = up;
        last[depth] = TB_NONE;
        if (token == TB_NONE) continue;
        if (token >= tb_vocab_size() || tb_mask_has(seen, token))
            tb_fail("token trie: token %u at node %u is not in the vocabulary, or occurs twice",
                    token, i);
        if ((trie->offsets[token] & 0xff) != depth)
            tb_fail("token trie: token %u has %u bytes, but its node is at depth %u", token,
                    trie->offsets[token] & 0xff, depth);
        tb_mask_set(seen, token);
    }
}

// The trie, read and checked at the first call.
static inline const tb_trie *tb_trie_get(void) {
    tb_trie *trie = &tb_loaded;
    if (trie->nodes) return trie;
    const uint32_t size = tb_host_trie_size(), vocabulary = tb_vocab_size();
    if (size < TB_TRIE_HEAD) tb_fail("token trie: %u bytes, shorter than its header", size);
    uint8_t *blob = tb_alloc(size);
    const uint32_t *head = (const uint32_t *)blob;
    if (tb_host_trie_read(blob, 0, size) != size || head[0] != TB_TRIE_MAGIC ||
        head[1] != TB_TRIE_HEAD)
        tb_fail("token trie: it does not begin with 0x%x and %d", TB_TRIE_MAGIC, TB_TRIE_HEAD);
    const uint32_t node_bytes = head[2], offset_bytes = head[3], data_bytes = head[4];
    if ((uint64_t)TB_TRIE_HEAD + node_bytes + offset_bytes + data_bytes != size ||
        node_bytes % 8 || node_bytes == 0 || offset_bytes % 4)
        tb_fail("token trie: nodes, offsets and data of %u, %u and %u bytes are not its %u bytes",
                node_bytes, offset_bytes, data_bytes, size);
    if (head[5] != vocabulary || offset_bytes / 4 != vocabulary)
        tb_fail("token trie: %u tokens with %u offsets, in a vocabulary of %u", head[5],
                offset_bytes / 4, vocabulary);
    const uint32_t *offsets = (const uint32_t *)(blob + TB_TRIE_HEAD + node_bytes);
    trie->offsets = offsets;
    trie->data = blob + TB_TRIE_HEAD + node_bytes + offset_bytes;
    trie->node_count = node_bytes / 8;
    trie->nodes = (const tb_node *)(blob + TB_TRIE_HEAD);
    for (uint32_t token = 0; token < vocabulary; token++)
        if ((uint64_t)(offsets[token] >> 8) + (offsets[token] & 0xff) > data_bytes)
            tb_fail("token trie: the bytes of token %u are not in its data", token);
    uint32_t *seen = tb_mask_new();
    tb_trie_check_nodes(trie, seen);
    for (uint32_t token = 0; token < vocabulary; token++)
        if (offsets[token] & 0xff && !tb_mask_has(seen, token))
            tb_fail("token trie: token %u has bytes, but is not at a node", token);
    tb_free(seen);
    return trie;
}

static inline const tb_node *tb_trie_root(void) { return tb_trie_get()->nodes; }

// The bytes of a token, without a terminating 0. Special tokens and unknown ids have no bytes.
static inline const uint8_t *tb_token(uint32_t token, uint32_t *len) {
    const tb_trie *trie = tb_trie_get();
    const uint32_t offset = token < tb_vocab_size() ? trie->offsets[token] : 0;
    *len = offset & 0xff;
    return trie->data + (offset >> 8);
}

// Appends the bytes of tokens.
static inline void tb_token_bytes(const uint32_t *tokens, uint32_t n, tb_bytes *out) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len;
        const uint8_t *bytes = tb_token(tokens[i], &len);
        tb_bytes_append(out, bytes, len);
    }
}

// Tokenizes any bytes by longest match. The model's tokenizer (tb_tokenize) may give other tokens
// for the same text. Returns false if a byte is not the beginning of a token. Free with
// tb_free(tokens->ids).
static inline bool tb_tokenize_greedy(const uint8_t *bytes, uint32_t len, tb_tokens *tokens) {
    *tokens = (tb_tokens){tb_alloc(4 * len), 0};
    for (uint32_t at = 0; at < len;) {
        const tb_node *node = tb_trie_root();
        uint32_t token = TB_NONE, end = at;
        for (uint32_t i = at; i < len && (node = tb_child(node, bytes[i])); i++)
            if (tb_node_token(node) != TB_NONE) {
                token = tb_node_token(node);
                end = i + 1;
            }
        if (token == TB_NONE) {
            tb_free(tokens->ids);
            *tokens = (tb_tokens){0};
            return false;
        }
        tokens->ids[tokens->n++] = token;
        at = end;
    }
    return true;
}

#endif
