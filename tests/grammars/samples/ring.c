/* A ring buffer of messages with a small hash index: plain C11, as people write it. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING_SLOTS 64u
#define RING_MASK (RING_SLOTS - 1)
#define MAX(a, b) \
    ((a) > (b) ? (a) : (b))

#ifdef __cplusplus
#error "C only"
#endif

typedef uint32_t key_t;
typedef int (*compare_fn)(const void *left, const void *right);
typedef struct message message_t;
typedef enum { LEVEL_DEBUG, LEVEL_INFO = 10, LEVEL_ERROR = 1 << 5, } level_t;

struct message {
    key_t key;
    level_t level;
    unsigned int seen : 1, kept : 2;
    unsigned : 0;
    union {
        int64_t number;
        double real;
        char text[16];
    };
    struct message *next, **back;
    void (*release)(struct message *self, void *context);
};

struct ring {
    message_t *slots[RING_SLOTS];
    size_t head, tail;
    struct { key_t key; message_t *at; } index[128];
    const char *name;
};

static const char *const level_names[] = {
    [LEVEL_DEBUG] = "debug",
    [LEVEL_INFO] = "info",
    [LEVEL_ERROR] = "err" "or",
};

static const struct { const char *name; int value; double weight; } defaults[] = {
    { "alpha", 1, .5 },
    { .name = "beta", .value = -2, .weight = 1e-3 },
    { "gamma", 0x1F, 0x1.8p3, },
};

extern int verbose;
int verbose = 0;
_Static_assert(sizeof(struct message) >= 8, "a message has at least a key");
_Noreturn static void fail(const char *format, ...);
static inline uint32_t mix(uint32_t h) { h ^= h >> 16; h *= 0x85ebca6bU; return h ^ (h >> 13); }
static message_t *message_new(key_t key, level_t level, const char *text);
int (*choose(int which))(int, int);
compare_fn comparers[4], *current = comparers;
volatile unsigned long long ticks = 18446744073709551615ULL;
char letters[] = { 'a', '\n', '\\', '\'', '\x41', '\0', L'z' };
long double half = 0.5L, tiny = 1.e-10L;

static void fail(const char *format, ...)
{
    fputs("fatal: ", stderr);
    fprintf(stderr, "%s\n", format);
    exit(EXIT_FAILURE);
}

static message_t *message_new(key_t key, level_t level, const char *text)
{
    message_t *made = calloc(1, sizeof *made);

    if (!made)
        fail("no memory");
    made->key = key;
    made->level = level;
    if (text != NULL) {
        size_t length = strlen(text);
        if (length >= sizeof made->text)
            length = sizeof(made->text) - 1;
        memcpy(made->text, text, length);
        made->text[length] = '\0';
    } else
        made->number = (int64_t)key * -1;
    return made;
}

static void message_release(struct message *self, void *context)
{
    (void)context;
    free(self);
}

static size_t ring_count(const struct ring *r)
{
    return (r->head - r->tail) & RING_MASK;
}

bool ring_push(struct ring *r, message_t *m)
{
    size_t slot;
    uint32_t h = mix(m->key);

    if (ring_count(r) == RING_SLOTS - 1)
        return false;
    slot = r->head++ & RING_MASK;
    r->slots[slot] = m;
    m->release = message_release;
    for (unsigned i = 0; i < 128; i++) {
        unsigned at = (h + i) % 128;
        if (r->index[at].at == NULL || r->index[at].key == m->key) {
            r->index[at].key = m->key;
            r->index[at].at = m;
            break;
        }
    }
    return true;
}

static int by_key(const void *left, const void *right)
{
    const message_t *const *a = left;
    message_t *const *b = right;

    return (*a)->key < (*b)->key ? -1 : (*a)->key > (*b)->key;
}

static int by_level(const void *left, const void *right)
{
    const message_t *a = *(message_t **)left, *b = *(message_t *const *)right;
    int difference = (int)a->level - (int)b->level;
    return difference ? difference : by_key(left, right);
}

static message_t *ring_pop(struct ring *r)
{
    message_t *first = r->slots[r->tail & RING_MASK], **place;

    if (r->head == r->tail)
        return NULL;
    place = &r->slots[r->tail++ & RING_MASK];
    *place = NULL;
    return first;
}

static void ring_sort(struct ring *r, compare_fn compare)
{
    message_t *sorted[RING_SLOTS] = { 0 };
    size_t n = 0;

    while (r->tail != r->head) {
        message_t *m = ring_pop(r);
        sorted[n++] = m;
    }
    qsort(sorted, n, sizeof sorted[0], compare);
    for (size_t i = 0; i < n; ++i)
        ring_push(r, sorted[i]);
}

static const char *level_name(level_t level)
{
    switch (level) {
    case LEVEL_DEBUG:
    case LEVEL_INFO:
        return level_names[level];
    case LEVEL_ERROR: {
        static int errors = 0;
        errors += 1;
        return errors > 3 ? "many errors" : level_names[LEVEL_ERROR];
    }
    default:
        break;
    }
    return "?";
}

static uint32_t checksum(const void *data, size_t size)
{
    const uint8_t *p = (const uint8_t *)data, *end = p + size;
    uint32_t sum = ~0u;

    do {
        if (p == end)
            goto done;
        sum ^= (uint32_t)*p++;
        for (int k = 8; k--; )
            sum = sum & 1 ? (sum >> 1) ^ 0xEDB88320u : sum >> 1;
    } while (1);
done:
    return ~sum;
}

static int add(int a, int b) { return a + b; }
static int subtract(int a, int b) { return a - b; }

int (*choose(int which))(int, int)
{
    static int (*const table[2])(int, int) = { add, subtract };
    return table[!!which];
}

#if 0
static int not_compiled = 1;
#endif

static void matrix(size_t rows, size_t columns, double out[rows][columns], double *restrict in)
{
    for (size_t i = 0, j; i < rows; i++)
        for (j = 0; j < columns; j++) {
            out[i][j] = in[i * columns + j] * 2.0f - (double)(i == j);
            if (out[i][j] < 0) continue; else ticks--;
        }
}

typedef struct point { int x, y; } point;

static point shift(point p, int dx, int dy)
{
    point moved = { .x = p.x + dx, .y = p.y + dy };
    point *where = &moved;
    where->x <<= 1, where->y |= 0x0F;
    return *where;
}

static struct point centre(void)
{
    return (struct point){ .x = 3, 4 };
}

static void print_all(struct ring *r)
{
    int (*op)(int, int) = choose(verbose > 1 && r->name[0] != '_');
    point p = shift(centre(), op(2, 1), (int)sizeof(struct ring *));

    for (size_t i = r->tail; i != r->head; i++) {
        message_t *m = r->slots[i & RING_MASK];
        if (m == NULL)
            continue;
        printf("%-8s %08x \"%s\" (%d, %d)\n",
               level_name(m->level), (unsigned)m->key, m->text, p.x, p.y);
        // a call through a member, and one through a pointer
        if (m->kept)
            m->release(m, NULL);
        (*op)(1, 2);
    }
}

int main(int argc, char **argv)
{
    struct ring r = { .name = argc > 1 ? argv[1] : "ring" };
    double in[6] = { 1, 2, 3, 4, 5, 6 }, out[2][3];
    char *end;
    int status = EXIT_SUCCESS;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-v") == 0) {
            verbose++;
            continue;
        }
        unsigned long key = strtoul(argv[i], &end, 0);
        if (*end != '\0') {
            fprintf(stderr, "%s: not a number: '%s'\n", argv[0], argv[i]);
            status = 2;
        } else if (!ring_push(&r, message_new((key_t)key, LEVEL_INFO, end)))
            break;
    }
    current = &comparers[1];
    *current = by_level;
    ring_sort(&r, verbose ? *current : by_key);
    print_all(&r);
    matrix(2, 3, out, in);
    printf("%u\n", checksum(out, sizeof out) ^ (uint32_t)ring_count(&r));
    return status | (ticks > 0 ? 0 : 1);
}
