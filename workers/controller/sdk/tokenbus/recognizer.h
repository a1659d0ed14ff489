// Constraints on bytes. The byte stack (AICI's Recognizer) is a stack of states; a walk over the
// token trie computes its mask. The functional layer makes a byte stack from functions.
#ifndef TOKENBUS_RECOGNIZER_H
#define TOKENBUS_RECOGNIZER_H

// A constraint on bytes: a stack of states. Make it the first member of your own struct.
typedef struct tb_recognizer tb_recognizer;
struct tb_recognizer {
    // Pushes the state to which a byte leads from the top state. Only called with an allowed byte.
    void (*push_byte)(tb_recognizer *self, uint8_t byte);
    // Pops n states.
    void (*pop_bytes)(tb_recognizer *self, uint32_t n);
    // Removes all states but the top one.
    void (*collapse)(tb_recognizer *self);
    // Whether a byte is allowed in the top state.
    bool (*byte_allowed)(tb_recognizer *self, uint8_t byte);
    // Whether a special token is allowed in the top state.
    bool (*special_allowed)(tb_recognizer *self, tb_special token);
    // Called after a walk; the stack is as it was before the walk. May be 0.
    void (*trie_finished)(tb_recognizer *self);
    // Does the work of byte_allowed and, if the byte is allowed, of push_byte. May be 0; then these
    // two functions are called.
    bool (*try_push_byte)(tb_recognizer *self, uint8_t byte);
    // The walk over the trie with this recognizer's functions inlined. May be 0; then the generic
    // walk is used.
    void (*walk)(tb_recognizer *self, uint32_t *mask);
};

// Allows the token of a node in the mask; 0xffffff means that the node has no token. This case has
// no branch, because the branch would often be mispredicted.
static inline void tb_mask_add(uint32_t *mask, uint32_t token) {
    const bool some = token != 0xffffff;
    mask[some ? token / 32 : 0] |= (uint32_t)some << token % 32;
}

// AICI's walk over the trie: enters the subtree of an allowed byte, and skips the subtree of any
// other byte.
__attribute__((always_inline)) static inline void tb_walk_with(
    tb_recognizer *recognizer, bool (*try_push_byte)(tb_recognizer *, uint8_t),
    void (*pop_bytes)(tb_recognizer *, uint32_t), uint32_t *mask) {
    const tb_node *node = tb_trie_root() + 1;
    const tb_node *const end = tb_trie_root() + tb_trie_get()->node_count;
    while (node < end) {
        const uint32_t token = node->token_byte >> 8, size = node->size_parents >> 8;
        if (try_push_byte(recognizer, (uint8_t)node->token_byte)) {
            tb_mask_add(mask, token);
            if (size == 1) pop_bytes(recognizer, node->size_parents & 0xff);
            node++;
        } else {
            const uint32_t up = (node->size_parents & 0xff) - 1;
            if (up) pop_bytes(recognizer, up);
            node += size;
        }
    }
}

static inline bool tb_check_and_push(tb_recognizer *recognizer, uint8_t byte) {
    if (!recognizer->byte_allowed(recognizer, byte)) return false;
    recognizer->push_byte(recognizer, byte);
    return true;
}

// Computes the mask (tb_mask_new) of the tokens that a recognizer allows next. These are the tokens
// whose bytes it allows in order, and the end-of-sequence token if special_allowed returns true.
static inline void tb_compute_bias(tb_recognizer *recognizer, uint32_t *mask) {
    tb_mask_clear_all(mask);
    if (recognizer->walk)
        recognizer->walk(recognizer, mask);
    else
        tb_walk_with(recognizer,
                     recognizer->try_push_byte ? recognizer->try_push_byte : tb_check_and_push,
                     recognizer->pop_bytes, mask);
    if (recognizer->special_allowed(recognizer, TB_EOS))
        tb_mask_set(mask, tb_special_token(TB_EOS));
    else
        tb_mask_clear(mask, tb_special_token(TB_EOS));
    if (recognizer->trie_finished) recognizer->trie_finished(recognizer);
}

// Advances a recognizer by a token. Returns false if the recognizer does not allow the token.
static inline bool tb_push_token(tb_recognizer *recognizer, uint32_t token) {
    uint32_t len;
    const uint8_t *bytes = tb_token(token, &len);
    for (uint32_t i = 0; i < len; i++)
        if (!tb_check_and_push(recognizer, bytes[i])) {
            recognizer->pop_bytes(recognizer, i);
            return false;
        }
    recognizer->collapse(recognizer);
    return true;
}

// --- a whole controller --------------------------------------------------------------------------

static tb_recognizer *tb_used;

// After this call, the recognizer answers mid_process and post_process, unless the module defines
// them. Call this function in tb_init_prompt.
static inline void tb_use_recognizer(tb_recognizer *recognizer) {
    tb_trie_get();
    tb_used = recognizer;
}

// mid_process under a recognizer: samples under its mask. Stops if the recognizer allows only the
// end of the sequence and the vocabulary does not have an end-of-sequence token.
static inline tb_answer tb_recognizer_mid(tb_recognizer *recognizer) {
    static uint32_t *mask;
    if (!mask) mask = tb_mask_new();
    tb_compute_bias(recognizer, mask);
    if (tb_mask_count(mask)) return tb_sample(mask);
    if (recognizer->special_allowed(recognizer, TB_EOS)) return tb_stop();
    tb_fail("the recognizer does not allow any token of this vocabulary here");
}

// post_process under a recognizer: advances the recognizer; stops at the end-of-sequence token.
static inline tb_answer tb_recognizer_post(tb_recognizer *recognizer, const uint32_t *tokens,
                                           uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] == tb_special_token(TB_EOS)) return tb_stop();
        if (!tb_push_token(recognizer, tokens[i]))
            tb_fail("token %u was appended, which the recognizer does not allow", tokens[i]);
    }
    return tb_go_on();
}

// --- the functional layer ------------------------------------------------------------------------

enum { TB_KEPT_MASKS = 8 };

// A cache of the masks of the last states. The mask of a state must depend only on the state.
typedef struct tb_masks {
    void *states[TB_KEPT_MASKS];
    uint32_t *masks[TB_KEPT_MASKS];
    uint32_t next;
} tb_masks;

// The cached mask of a state of n bytes; 0 if it is not cached.
static inline uint32_t *tb_masks_find(const tb_masks *kept, const void *state, uint32_t n) {
    for (uint32_t i = 0; i < TB_KEPT_MASKS; i++)
        if (kept->states[i] && !memcmp(kept->states[i], state, n)) return kept->masks[i];
    return 0;
}

// Adds a mask for a state to the cache, in place of the oldest mask. The new mask forbids every
// token.
static inline uint32_t *tb_masks_add(tb_masks *kept, const void *state, uint32_t n) {
    const uint32_t at = kept->next++ % TB_KEPT_MASKS;
    if (!kept->states[at]) {
        kept->states[at] = tb_alloc(n);
        kept->masks[at] = tb_mask_new();
    }
    memcpy(kept->states[at], state, n);
    tb_mask_clear_all(kept->masks[at]);
    return kept->masks[at];
}

// TB_FUNCTIONAL_RECOGNIZER(name, S) defines `tb_recognizer *name_recognizer(void)`. S is the type
// of a state: a number, or a struct that may be copied. Define these functions, without side
// effects:
//
//     static S name_initial(void);
//     static S name_append(S state, uint8_t byte);                // byte is allowed
//     static bool name_byte_allowed(S state, uint8_t byte);
//     static bool name_special_allowed(S state, tb_special token);
//
// The stack of states (AICI's StackRecognizer) has room for the bytes of the longest token, so call
// collapse after each token.
#define TB_FUNCTIONAL_RECOGNIZER(name, S)                                                          \
    typedef struct name##_stack {                                                                  \
        tb_recognizer base;                                                                        \
        S *top, *bottom, *limit;                                                                   \
        tb_masks masks;                                                                            \
    } name##_stack;                                                                                \
    static void name##_push_byte(tb_recognizer *self, uint8_t byte) {                              \
        name##_stack *stack = (name##_stack *)self;                                                \
        if (stack->top == stack->limit) tb_fail("the stack is full; collapse it between tokens");  \
        const S next = name##_append(*stack->top, byte);                                           \
        *++stack->top = next;                                                                      \
    }                                                                                              \
    static void name##_pop_bytes(tb_recognizer *self, uint32_t n) {                                \
        ((name##_stack *)self)->top -= n;                                                          \
    }                                                                                              \
    static void name##_collapse(tb_recognizer *self) {                                             \
        name##_stack *stack = (name##_stack *)self;                                                \
        *stack->bottom = *stack->top;                                                              \
        stack->top = stack->bottom;                                                                \
    }                                                                                              \
    static bool name##_top_allows(tb_recognizer *self, uint8_t byte) {                             \
        return name##_byte_allowed(*((name##_stack *)self)->top, byte);                            \
    }                                                                                              \
    static bool name##_top_allows_special(tb_recognizer *self, tb_special token) {                 \
        return name##_special_allowed(*((name##_stack *)self)->top, token);                        \
    }                                                                                              \
    static bool name##_try_push_byte(tb_recognizer *self, uint8_t byte) {                          \
        if (!name##_top_allows(self, byte)) return false;                                          \
        name##_push_byte(self, byte);                                                              \
        return true;                                                                               \
    }                                                                                              \
    static void name##_walk(tb_recognizer *self, uint32_t *mask) {                                 \
        name##_stack *stack = (name##_stack *)self;                                                \
        if (stack->top != stack->bottom) tb_fail("collapse the stack before a walk");              \
        uint32_t *made = tb_masks_find(&stack->masks, stack->top, sizeof(S));                      \
        const bool known = made != 0;                                                              \
        if (!known) made = tb_masks_add(&stack->masks, stack->top, sizeof(S));                     \
        const tb_node *const end = tb_trie_root() + tb_trie_get()->node_count;                     \
        const tb_node *node = known ? end : tb_trie_root() + 1;                                    \
        /* The stack has room for each token, so `top` is not checked and stays in a register. */  \
        for (S *top = stack->top; node < end;) {                                                   \
            const uint8_t byte = (uint8_t)node->token_byte;                                        \
            const uint32_t size = tb_node_size(node), up = tb_node_parents(node);                  \
            if (name##_byte_allowed(*top, byte)) {                                                 \
                const S next = name##_append(*top, byte);                                          \
                *++top = next;                                                                     \
                tb_mask_add(made, node->token_byte >> 8);                                          \
                top -= size == 1 ? up : 0;                                                         \
                node++;                                                                            \
            } else {                                                                               \
                top -= up - 1;                                                                     \
                node += size;                                                                      \
            }                                                                                      \
        }                                                                                          \
        memcpy(mask, made, 4 * tb_mask_words());                                                   \
    }                                                                                              \
    static tb_recognizer *name##_recognizer(void) {                                                \
        const uint32_t states = tb_trie_get()->longest + 2;                                        \
        name##_stack *stack = tb_alloc(sizeof(name##_stack));                                      \
        *stack = (name##_stack){.base = {name##_push_byte, name##_pop_bytes, name##_collapse,      \
                                         name##_top_allows, name##_top_allows_special, 0,          \
                                         name##_try_push_byte, name##_walk}};                      \
        stack->top = stack->bottom = tb_alloc(states * sizeof(S));                                 \
        stack->limit = stack->bottom + states - 1;                                                 \
        *stack->bottom = name##_initial();                                                         \
        return &stack->base;                                                                       \
    }

#endif
