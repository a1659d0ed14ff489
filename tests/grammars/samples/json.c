/*
 * A JSON reader and writer in plain C11: a recursive parser over a buffer, values in an arena,
 * objects as open-addressing hash tables, and a small command line around it.
 */
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_BLOCK ((size_t)64 * 1024)
#define MAX_DEPTH 200
#define COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))
#define UNUSED(x) ((void)(x))

enum kind {
    KIND_NULL,
    KIND_FALSE,
    KIND_TRUE,
    KIND_NUMBER,
    KIND_STRING,
    KIND_ARRAY,
    KIND_OBJECT
};

typedef struct value value;
typedef struct arena arena;
typedef struct reader reader;

typedef struct text {
    const char *bytes;
    size_t length;
} text;

struct block {
    struct block *next;
    size_t used, size;
    _Alignas(16) unsigned char bytes[];
};

struct arena {
    struct block *first;
    size_t total;
};

struct entry {
    text key;
    value *item;
    uint64_t hash;
};

struct value {
    enum kind kind;
    union {
        double number;
        text string;
        struct {
            value **items;
            size_t count, capacity;
        } array;
        struct {
            struct entry *entries;
            size_t count, capacity;
        } object;
    } as;
};

struct reader {
    const char *at, *end, *begin;
    arena *memory;
    unsigned depth;
    jmp_buf failed;
    char message[128];
};

typedef bool (*visit_fn)(text key, const value *item, void *context);

static const char *const kind_names[] = {
    [KIND_NULL] = "null",     [KIND_FALSE] = "false", [KIND_TRUE] = "true",
    [KIND_NUMBER] = "number", [KIND_STRING] = "string", [KIND_ARRAY] = "array",
    [KIND_OBJECT] = "object",
};

static const struct {
    const char *word;
    enum kind kind;
} words[] = {
    { "null", KIND_NULL },
    { "false", KIND_FALSE },
    { "true", KIND_TRUE },
};

_Static_assert(COUNT_OF(kind_names) == KIND_OBJECT + 1, "each kind has its name");

static value *read_value(reader *r);

/* --- memory -------------------------------------------------------------------------------- */

static void *arena_take(arena *a, size_t size)
{
    struct block *b = a->first;

    size = (size + 15u) & ~(size_t)15u;
    if (b == NULL || b->size - b->used < size) {
        size_t room = size > ARENA_BLOCK ? size : ARENA_BLOCK;

        b = malloc(sizeof *b + room);
        if (b == NULL) {
            perror("malloc");
            exit(EXIT_FAILURE);
        }
        *b = (struct block){ .next = a->first, .used = 0, .size = room };
        a->first = b;
        a->total += room;
    }
    b->used += size;
    return b->bytes + (b->used - size);
}

static void arena_free(arena *a)
{
    for (struct block *b = a->first, *next; b != NULL; b = next) {
        next = b->next;
        free(b);
    }
    a->first = NULL, a->total = 0;
}

static void *grown(arena *a, const void *old, size_t count, size_t capacity, size_t size)
{
    void *bigger = arena_take(a, capacity * size);

    if (count != 0)
        memcpy(bigger, old, count * size);
    return bigger;
}

/* --- texts --------------------------------------------------------------------------------- */

static inline bool text_equal(text a, text b)
{
    return a.length == b.length && memcmp(a.bytes, b.bytes, a.length) == 0;
}

static uint64_t text_hash(text t)
{
    uint64_t h = 0xcbf29ce484222325ull;

    for (size_t i = 0; i < t.length; i++)
        h = (h ^ (uint8_t)t.bytes[i]) * 0x100000001b3ull;
    return h ? h : 1;
}

static text text_of(const char *bytes)
{
    text made = { bytes, strlen(bytes) };
    return made;
}

/* --- objects ------------------------------------------------------------------------------- */

static struct entry *object_slot(struct entry *entries, size_t capacity, text key, uint64_t hash)
{
    size_t i = hash & (capacity - 1);

    while (entries[i].hash != 0) {
        if (entries[i].hash == hash && text_equal(entries[i].key, key))
            break;
        i = (i + 1) & (capacity - 1);
    }
    return &entries[i];
}

static void object_set(arena *a, value *object, text key, value *item)
{
    uint64_t hash = text_hash(key);
    struct entry *slot;

    assert(object->kind == KIND_OBJECT);
    if (4 * (object->as.object.count + 1) > 3 * object->as.object.capacity) {
        size_t capacity = object->as.object.capacity ? object->as.object.capacity * 2 : 8;
        struct entry *entries = arena_take(a, capacity * sizeof *entries);

        memset(entries, 0, capacity * sizeof *entries);
        for (size_t i = 0; i < object->as.object.capacity; i++) {
            const struct entry *e = object->as.object.entries + i;
            if (e->hash)
                *object_slot(entries, capacity, e->key, e->hash) = *e;
        }
        object->as.object.entries = entries;
        object->as.object.capacity = capacity;
    }
    slot = object_slot(object->as.object.entries, object->as.object.capacity, key, hash);
    if (slot->hash == 0)
        object->as.object.count++;
    *slot = (struct entry){ key, item, hash };
}

static const value *object_get(const value *object, text key)
{
    if (object->kind != KIND_OBJECT || object->as.object.count == 0)
        return NULL;
    return object_slot(object->as.object.entries, object->as.object.capacity, key,
                       text_hash(key))->item;
}

static bool object_each(const value *object, visit_fn visit, void *context)
{
    size_t left = object->as.object.count;

    for (const struct entry *e = object->as.object.entries; left > 0; e++) {
        if (!e->hash)
            continue;
        left--;
        if (!(*visit)(e->key, e->item, context))
            return false;
    }
    return true;
}

/* --- reading ------------------------------------------------------------------------------- */

static _Noreturn void fail(reader *r, const char *format, ...)
{
    va_list arguments;
    unsigned line = 1;

    for (const char *p = r->begin; p < r->at; ++p)
        line += *p == '\n';
    int used = snprintf(r->message, sizeof r->message, "line %u: ", line);
    va_start(arguments, format);
    vsnprintf(r->message + used, sizeof r->message - (size_t)used, format, arguments);
    va_end(arguments);
    longjmp(r->failed, 1);
}

static int peek(const reader *r) { return r->at < r->end ? (unsigned char)*r->at : EOF; }

static void skip_blank(reader *r)
{
    while (r->at < r->end && strchr(" \t\r\n", *r->at) != NULL && *r->at != '\0')
        r->at++;
}

static void expect(reader *r, char wanted)
{
    skip_blank(r);
    if (peek(r) != wanted)
        fail(r, "expected '%c', found %s%.1s", wanted, r->at < r->end ? "" : "the end", r->at);
    r->at++;
}

static unsigned read_hex(reader *r)
{
    unsigned code = 0;

    for (int i = 0; i < 4; i++, r->at++) {
        int c = peek(r);

        if (!isxdigit(c))
            fail(r, "a \\u escape has four hexadecimal digits");
        code = code << 4 | (unsigned)(isdigit(c) ? c - '0' : tolower(c) - 'a' + 10);
    }
    return code;
}

static char *put_utf8(char *out, uint32_t code)
{
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xC0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *out++ = (char)(0xE0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (char)(0x80 | (code & 0x3F));
    } else {
        *out++ = (char)(0xF0 | code >> 18);
        for (int shift = 12; shift >= 0; shift -= 6)
            *out++ = (char)(0x80 | (code >> shift & 0x3F));
    }
    return out;
}

static text read_string(reader *r)
{
    const char *close;
    char *out, *start;

    expect(r, '"');
    for (close = r->at; close < r->end && *close != '"'; close++)
        if (*close == '\\' && ++close == r->end)
            break;
    if (close >= r->end)
        fail(r, "a string is not closed");
    start = out = arena_take(r->memory, (size_t)(close - r->at) + 1);
    while (r->at < close) {
        char c = *r->at++;

        if ((unsigned char)c < 0x20)
            fail(r, "a control character \\x%02x in a string", (unsigned)c);
        if (c != '\\') {
            *out++ = c;
            continue;
        }
        switch (c = *r->at++) {
        case '"': case '\\': case '/': *out++ = c; break;
        case 'b': *out++ = '\b'; break;
        case 'f': *out++ = '\f'; break;
        case 'n': *out++ = '\n'; break;
        case 'r': *out++ = '\r'; break;
        case 't': *out++ = '\t'; break;
        case 'u': {
            uint32_t code = read_hex(r);

            if (code >= 0xD800 && code < 0xDC00 && r->at[0] == '\\' && r->at[1] == 'u') {
                r->at += 2;
                code = 0x10000 + ((code - 0xD800) << 10) + (read_hex(r) - 0xDC00);
            }
            out = put_utf8(out, code);
            break;
        }
        default:
            fail(r, "the escape \\%c is none", c);
        }
    }
    r->at = close + 1;
    *out = '\0';
    return (text){ .bytes = start, .length = (size_t)(out - start) };
}

static value *new_value(reader *r, enum kind kind)
{
    value *made = arena_take(r->memory, sizeof(value));

    memset(made, 0, sizeof *made);
    made->kind = kind;
    return made;
}

static value *read_number(reader *r)
{
    value *made = new_value(r, KIND_NUMBER);
    char *end = NULL;

    errno = 0;
    made->as.number = strtod(r->at, &end);
    if (end == r->at || errno == ERANGE || !isfinite(made->as.number))
        fail(r, "not a number");
    r->at = end;
    return made;
}

static value *read_array(reader *r)
{
    value *array = new_value(r, KIND_ARRAY);

    expect(r, '[');
    skip_blank(r);
    if (peek(r) == ']') {
        r->at++;
        return array;
    }
    for (;;) {
        if (array->as.array.count == array->as.array.capacity) {
            size_t capacity = array->as.array.capacity * 2 + 4;
            array->as.array.items = grown(r->memory, array->as.array.items, array->as.array.count,
                                          capacity, sizeof(value *));
            array->as.array.capacity = capacity;
        }
        array->as.array.items[array->as.array.count++] = read_value(r);
        skip_blank(r);
        if (peek(r) != ',')
            break;
        r->at++;
    }
    expect(r, ']');
    return array;
}

static value *read_object(reader *r)
{
    value *object = new_value(r, KIND_OBJECT);

    expect(r, '{');
    skip_blank(r);
    if (peek(r) == '}')
        goto done;
    do {
        text key = (skip_blank(r), read_string(r));
        expect(r, ':');
        object_set(r->memory, object, key, read_value(r));
        skip_blank(r);
    } while (peek(r) == ',' && r->at++);
done:
    expect(r, '}');
    return object;
}

static value *read_value(reader *r)
{
    value *made = NULL;

    if (++r->depth > MAX_DEPTH)
        fail(r, "more than %d values inside each other", MAX_DEPTH);
    skip_blank(r);
    switch (peek(r)) {
    case '{': made = read_object(r); break;
    case '[': made = read_array(r); break;
    case '"':
        made = new_value(r, KIND_STRING);
        made->as.string = read_string(r);
        break;
    default:
        for (size_t i = 0; i < COUNT_OF(words); i++) {
            size_t length = strlen(words[i].word);
            if ((size_t)(r->end - r->at) >= length && !memcmp(r->at, words[i].word, length)) {
                r->at += length;
                made = new_value(r, words[i].kind);
                break;
            }
        }
        if (made == NULL)
            made = read_number(r);
    }
    r->depth--;
    return made;
}

/* --- writing ------------------------------------------------------------------------------- */

struct writer {
    FILE *out;
    int indent;
    bool first;
};

static void write_value(struct writer *w, const value *v);

static void write_string(struct writer *w, text t)
{
    fputc('"', w->out);
    for (const char *p = t.bytes; p != t.bytes + t.length; p++)
        if ((unsigned char)*p < 0x20)
            fprintf(w->out, "\\u%04x", (unsigned)*p);
        else if (*p == '"' || *p == '\\')
            fprintf(w->out, "\\%c", *p);
        else
            fputc(*p, w->out);
    fputc('"', w->out);
}

static void write_line(struct writer *w)
{
    fprintf(w->out, "%s\n%*s", w->first ? "" : ",", 2 * w->indent, "");
    w->first = false;
}

static bool write_entry(text key, const value *item, void *context)
{
    struct writer *w = context;

    write_line(w);
    write_string(w, key);
    fputs(": ", w->out);
    write_value(w, item);
    return !ferror(w->out);
}

static void write_value(struct writer *w, const value *v)
{
    switch (v->kind) {
    case KIND_NUMBER:
        fprintf(w->out, "%.17g", v->as.number);
        return;
    case KIND_STRING:
        write_string(w, v->as.string);
        return;
    case KIND_ARRAY:
    case KIND_OBJECT: {
        bool is_array = v->kind == KIND_ARRAY;

        fputc("{["[is_array], w->out);
        w->indent++, w->first = true;
        if (is_array)
            for (size_t i = 0; i < v->as.array.count; ++i) {
                write_line(w);
                write_value(w, v->as.array.items[i]);
            }
        else
            (void)object_each(v, write_entry, w);
        w->indent -= 1;
        w->first = true;
        write_line(w), w->first = false;
        fputc("}]"[is_array], w->out);
        return;
    }
    default:
        fputs(kind_names[v->kind], w->out);
    }
}

/* --- the program --------------------------------------------------------------------------- */

static char *read_file(const char *name, size_t *length)
{
    FILE *file = strcmp(name, "-") ? fopen(name, "rb") : stdin;
    char *bytes = NULL;
    size_t capacity = 0, got;

    *length = 0;
    if (file == NULL)
        return NULL;
    do {
        if (capacity - *length < 4096)
            bytes = realloc(bytes, (capacity = capacity * 2 + 8192) + 1);
        got = fread(bytes + *length, 1, capacity - *length, file);
        *length += got;
    } while (got > 0);
    bytes[*length] = '\0';
    if (file != stdin)
        fclose(file);
    return bytes;
}

int main(int argc, char *argv[])
{
    arena memory = { 0 };
    int status = EXIT_SUCCESS;

    for (int i = 1; i < argc && status == EXIT_SUCCESS; i++) {
        size_t length;
        char *bytes = read_file(argv[i], &length);
        reader r = { .at = bytes, .begin = bytes, .end = bytes + length, .memory = &memory };

        if (!bytes) {
            fprintf(stderr, "%s: %s\n", argv[i], strerror(errno));
            status = 2;
        } else if (setjmp(r.failed) == 0) {
            struct writer w = { stdout, 0, true };
            const value *root = read_value(&r), *name = object_get(root, text_of("name"));

            write_value(&w, root);
            printf("\n%s of %" "zu bytes%s%s\n", kind_names[root->kind], length,
                   name ? ", called " : "", name && name->kind == KIND_STRING ? name->as.string.bytes : "");
        } else {
            fprintf(stderr, "%s: %s\n", argv[i], r.message);
            status = 1;
        }
        free(bytes);
    }
    UNUSED(memory.total);
    arena_free(&memory);
    return status;
}
