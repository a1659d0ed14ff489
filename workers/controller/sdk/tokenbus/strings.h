// The string layer on top of the byte stack; AICI sketched it as StringRecognizer. Each state has a
// set of strings that may come next, and a text is a concatenation of such strings.
//
// A reading is a way to divide the bytes so far into strings. Strings of one state may share a
// prefix, and a string may be a prefix of another string. So the bytes may have several readings.
#ifndef TOKENBUS_STRINGS_H
#define TOKENBUS_STRINGS_H

enum { TB_MOST_READINGS = 1024 };

// A string of a tb_strings, as its position and length in the `text` of the tb_strings.
typedef struct tb_string {
    uint32_t at, len;
} tb_string;

// The strings that a state allows; after tb_strings_sort `items` is sorted, without duplicates.
typedef struct tb_strings {
    tb_bytes text;
    tb_string *items;
    uint32_t count, room;
} tb_strings;

// Adds a copy of a string. An empty string is an error.
static inline void tb_strings_add(tb_strings *strings, const void *string, uint32_t len) {
    if (!len) tb_fail("an allowed string is empty; allow the end in special_allowed instead");
    if (strings->count == strings->room) {
        strings->room = strings->room ? 2 * strings->room : 8;
        strings->items = tb_realloc(strings->items, strings->room * sizeof(tb_string));
    }
    strings->items[strings->count++] = (tb_string){strings->text.len, len};
    tb_bytes_append(&strings->text, string, len);
}

static inline int tb_strings_compare(const tb_strings *strings, tb_string a, tb_string b) {
    const int order = memcmp(strings->text.data + a.at, strings->text.data + b.at,
                             a.len < b.len ? a.len : b.len);
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

// Sorts by bytes (heap sort: no recursion, no quadratic worst case) and removes duplicates.
static inline void tb_strings_sort(tb_strings *strings) {
    tb_string *items = strings->items;
    uint32_t end = strings->count, start = end / 2;
    while (end > 1) {
        if (start) {
            start--;
        } else {
            const tb_string last = items[--end];
            items[end] = items[0];
            items[0] = last;
        }
        for (uint32_t root = start, child; (child = 2 * root + 1) < end; root = child) {
            if (child + 1 < end && tb_strings_compare(strings, items[child], items[child + 1]) < 0)
                child++;
            if (tb_strings_compare(strings, items[root], items[child]) >= 0) break;
            const tb_string swapped = items[root];
            items[root] = items[child];
            items[child] = swapped;
        }
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < strings->count; i++)
        if (!kept || tb_strings_compare(strings, items[kept - 1], items[i]))
            items[kept++] = items[i];
    strings->count = kept;
}

// The first of the sorted strings [from, to) whose byte at `offset` is at least `byte`. The strings
// must be longer than `offset`, and their first `offset` bytes must be equal.
static inline uint32_t tb_strings_from(const tb_strings *strings, uint32_t offset, uint32_t byte,
                                       uint32_t from, uint32_t to) {
    const uint8_t *column = strings->text.data + offset;
    while (from < to) {
        const uint32_t middle = from + (to - from) / 2;
        if (column[strings->items[middle].at] < byte)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

// Narrows [from, to) to the strings with this byte at `offset`; false if no string has it.
static inline bool tb_strings_narrow(const tb_strings *strings, uint32_t offset, uint8_t byte,
                                     uint32_t *from, uint32_t *to) {
    const uint8_t *column = strings->text.data + offset;
    const uint32_t first = tb_strings_from(strings, offset, byte, *from, *to);
    if (first == *to || column[strings->items[first].at] != byte) return false;
    *from = first;
    if (first + 1 == *to || column[strings->items[first + 1].at] != byte)
        *to = first + 1;  // the usual case
    else
        *to = tb_strings_from(strings, offset, byte + 1u, first, *to);
    return true;
}

// The functions of a string recognizer. TB_STRING_RECOGNIZER fills in this struct.
typedef struct tb_string_calls {
    uint32_t state_words;  // words of 8 bytes for a state, padded with zeros
    void (*initial)(void *state);
    void (*append)(void *state, const char *suffix, uint32_t len);
    void (*allowed)(const void *state, tb_strings *strings);
    bool (*special_allowed)(const void *state, tb_special token);
} tb_string_calls;

// A state of a reading (tb_reading), with the strings that it allows.
typedef struct tb_string_state {
    uint64_t *state;
    tb_strings strings;
    bool known;  // whether `strings` belongs to `state`
} tb_string_state;

// One reading of the bytes so far: a state, and `offset` bytes of one of its strings [from, to).
typedef struct tb_reading {
    uint32_t state, offset, from, to;
} tb_reading;

// A frame of the stack: the index of its first reading, and the number of states below the frame.
typedef struct tb_string_frame {
    uint32_t readings, states;
} tb_string_frame;

typedef struct tb_string_stack {
    tb_recognizer base;
    tb_string_calls calls;
    tb_string_state *states;
    tb_reading *readings;
    tb_string_frame *frames;
    uint32_t state_count, state_room, reading_count, reading_room, depth, limit;
    tb_masks masks;
} tb_string_stack;

static inline bool tb_string_same(const uint64_t *one, const uint64_t *other, uint32_t words) {
    for (uint32_t i = 0; i < words; i++)
        if (one[i] != other[i]) return false;
    return true;
}

// The index of a state among the states of the readings. If the state is missing, it is added with
// its strings. If an equal state was at this index before, that state's strings are reused.
static inline uint32_t tb_string_enter(tb_string_stack *stack, const uint64_t *state) {
    const uint32_t words = stack->calls.state_words;
    for (uint32_t i = stack->state_count; i--;)
        if (tb_string_same(stack->states[i].state, state, words)) return i;
    if (stack->state_count == stack->state_room) {
        const uint32_t before = stack->state_room;
        stack->state_room = before ? 2 * before : 8;
        stack->states = tb_realloc(stack->states, stack->state_room * sizeof(tb_string_state));
        for (uint32_t i = before; i < stack->state_room; i++)
            stack->states[i] = (tb_string_state){.state = tb_alloc(8 * words)};
    }
    tb_string_state *place = &stack->states[stack->state_count];
    if (!place->known || !tb_string_same(place->state, state, words)) {
        for (uint32_t i = 0; i < words; i++) place->state[i] = state[i];
        place->strings.count = 0;
        tb_bytes_cut(&place->strings.text, 0);
        stack->calls.allowed(state, &place->strings);
        tb_strings_sort(&place->strings);
        place->known = true;
    }
    return stack->state_count++;
}

static inline bool tb_reading_same(tb_reading a, tb_reading b) {
    return a.state == b.state && a.offset == b.offset && a.from == b.from && a.to == b.to;
}

static inline void tb_string_read(tb_string_stack *stack, tb_reading reading, uint32_t first) {
    for (uint32_t i = first; i < stack->reading_count; i++)
        if (tb_reading_same(stack->readings[i], reading)) return;
    if (stack->reading_count - first == TB_MOST_READINGS)
        tb_fail("the same bytes can be read in more than %d ways", TB_MOST_READINGS);
    if (stack->reading_count == stack->reading_room) {
        stack->reading_room = stack->reading_room ? 2 * stack->reading_room : 64;
        stack->readings = tb_realloc(stack->readings, stack->reading_room * sizeof(tb_reading));
    }
    stack->readings[stack->reading_count++] = reading;
}

// Adds the reading at the start of a state if a string or the end of the sequence is allowed there.
static inline void tb_string_begin(tb_string_stack *stack, const uint64_t *state, uint32_t first) {
    const uint32_t at = tb_string_enter(stack, state);
    const tb_string_state *entered = &stack->states[at];
    if (entered->strings.count || stack->calls.special_allowed(entered->state, TB_EOS))
        tb_string_read(stack, (tb_reading){at, 0, 0, entered->strings.count}, first);
}

static inline bool tb_string_try_push(tb_recognizer *self, uint8_t byte) {
    tb_string_stack *stack = (tb_string_stack *)self;
    const tb_string_frame top = stack->frames[stack->depth];
    const uint32_t first = stack->reading_count, states = stack->state_count;
    for (uint32_t i = top.readings; i < first; i++) {
        tb_reading reading = stack->readings[i];
        const tb_string_state *in = &stack->states[reading.state];
        if (!tb_strings_narrow(&in->strings, reading.offset, byte, &reading.from, &reading.to))
            continue;
        reading.offset++;
        const tb_string shortest = in->strings.items[reading.from];
        if (shortest.len == reading.offset) {
            const char *suffix = (const char *)in->strings.text.data + shortest.at;
            uint64_t next[stack->calls.state_words];
            for (uint32_t w = 0; w < stack->calls.state_words; w++) next[w] = in->state[w];
            stack->calls.append(next, suffix, shortest.len);
            tb_string_begin(stack, next, first);
            reading.from++;
        }
        if (reading.from < reading.to) tb_string_read(stack, reading, first);
    }
    if (stack->reading_count == first) {
        stack->state_count = states;
        return false;
    }
    if (stack->depth == stack->limit) tb_fail("the stack is full; collapse it between tokens");
    stack->frames[++stack->depth] = (tb_string_frame){first, states};
    return true;
}

static inline void tb_string_push(tb_recognizer *self, uint8_t byte) {
    if (!tb_string_try_push(self, byte)) tb_fail("byte %u is not allowed here", byte);
}

static inline void tb_string_pop(tb_recognizer *self, uint32_t n) {
    tb_string_stack *stack = (tb_string_stack *)self;
    for (; n; n--) {
        stack->reading_count = stack->frames[stack->depth].readings;
        stack->state_count = stack->frames[stack->depth--].states;
    }
}

static inline void tb_string_collapse(tb_recognizer *self) {
    tb_string_stack *stack = (tb_string_stack *)self;
    const uint32_t first = stack->frames[stack->depth].readings;
    uint32_t kept = 0;
    stack->reading_count -= first;
    for (uint32_t i = 0; i < stack->reading_count; i++) {
        tb_reading *reading = &stack->readings[i];
        *reading = stack->readings[first + i];
        // Moves the reading's state to the states that are kept, unless it is already there. The
        // move swaps two states, so the indexes in later readings of these states are updated.
        if (reading->state < kept) continue;
        const uint32_t from = reading->state;
        const tb_string_state moved = stack->states[from];
        stack->states[from] = stack->states[kept];
        stack->states[kept] = moved;
        reading->state = kept;
        for (uint32_t j = i + 1; j < stack->reading_count; j++) {
            tb_reading *later = &stack->readings[first + j];
            if (later->state == from)
                later->state = kept;
            else if (later->state == kept)
                later->state = from;
        }
        kept++;
    }
    stack->state_count = kept;
    stack->depth = 0;
    stack->frames[0] = (tb_string_frame){0, 0};
}

static inline bool tb_string_allows(tb_recognizer *self, uint8_t byte) {
    tb_string_stack *stack = (tb_string_stack *)self;
    for (uint32_t i = stack->frames[stack->depth].readings; i < stack->reading_count; i++) {
        tb_reading reading = stack->readings[i];
        if (tb_strings_narrow(&stack->states[reading.state].strings, reading.offset, byte,
                              &reading.from, &reading.to))
            return true;
    }
    return false;
}

static inline bool tb_string_allows_special(tb_recognizer *self, tb_special token) {
    tb_string_stack *stack = (tb_string_stack *)self;
    for (uint32_t i = stack->frames[stack->depth].readings; i < stack->reading_count; i++)
        if (stack->readings[i].offset == 0 &&
            stack->calls.special_allowed(stack->states[stack->readings[i].state].state, token))
            return true;
    return false;
}

// The walk over the trie. If the bytes so far have only one reading, the resulting mask is cached.
static inline void tb_string_walk(tb_recognizer *self, uint32_t *mask) {
    tb_string_stack *stack = (tb_string_stack *)self;
    const uint32_t first = stack->frames[stack->depth].readings, words = stack->calls.state_words;
    if (stack->reading_count - first != 1) {
        tb_walk_with(self, tb_string_try_push, tb_string_pop, mask);
        return;
    }
    const tb_reading reading = stack->readings[first];
    uint64_t key[words + 2];
    for (uint32_t w = 0; w < words; w++) key[w] = stack->states[reading.state].state[w];
    key[words] = (uint64_t)reading.from << 32 | reading.to;
    key[words + 1] = reading.offset;
    uint32_t *made = tb_masks_find(&stack->masks, key, sizeof key);
    if (!made) {
        made = tb_masks_add(&stack->masks, key, sizeof key);
        tb_walk_with(self, tb_string_try_push, tb_string_pop, made);
    }
    memcpy(mask, made, 4 * tb_mask_words());
}

static inline tb_recognizer *tb_string_recognizer(const tb_string_calls *calls) {
    tb_string_stack *stack = tb_alloc(sizeof(tb_string_stack));
    *stack = (tb_string_stack){
        .base = {tb_string_push, tb_string_pop, tb_string_collapse, tb_string_allows,
                 tb_string_allows_special, 0, tb_string_try_push, tb_string_walk},
        .calls = *calls,
        .limit = tb_trie_get()->longest + 1,
    };
    stack->frames = tb_alloc((stack->limit + 1) * sizeof(tb_string_frame));
    stack->frames[0] = (tb_string_frame){0, 0};
    uint64_t state[calls->state_words];
    memset(state, 0, sizeof state);
    calls->initial(state);
    tb_string_begin(stack, state, 0);
    return &stack->base;
}

// TB_STRING_RECOGNIZER(name, S) defines `tb_recognizer *name_recognizer(void)`. S is the type of a
// state: a number, or a struct that may be copied. Define these functions, without side effects:
//
//     static S name_initial(void);
//     static S name_append(S state, const char *suffix, uint32_t len);  // an allowed string
//     static void name_allowed(S state, tb_strings *strings);           // tb_strings_add each
//     static bool name_special_allowed(S state, tb_special token);
//
// `allowed` is called for each string that ends inside a token, so it must be fast. States that are
// equal byte by byte share the result.
#define TB_STRING_RECOGNIZER(name, S)                                                              \
    static void name##_initial_at(void *state) { *(S *)state = name##_initial(); }                 \
    static void name##_append_at(void *state, const char *suffix, uint32_t len) {                  \
        *(S *)state = name##_append(*(S *)state, suffix, len);                                     \
    }                                                                                              \
    static void name##_allowed_at(const void *state, tb_strings *strings) {                        \
        name##_allowed(*(const S *)state, strings);                                                \
    }                                                                                              \
    static bool name##_special_allowed_at(const void *state, tb_special token) {                   \
        return name##_special_allowed(*(const S *)state, token);                                   \
    }                                                                                              \
    static tb_recognizer *name##_recognizer(void) {                                                \
        const tb_string_calls calls = {(sizeof(S) + 7) / 8, name##_initial_at, name##_append_at,   \
                                       name##_allowed_at, name##_special_allowed_at};              \
        return tb_string_recognizer(&calls);                                                       \
    }

#endif
