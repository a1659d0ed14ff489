// Memory without a libc: an allocator, growable buffers, and the functions that compilers call.
#ifndef TOKENBUS_MEMORY_H
#define TOKENBUS_MEMORY_H

// Ends this sequence with the formatted text as its error. The formats are those of tb_log. Does
// not return.
__attribute__((noreturn, format(printf, 1, 2))) static inline void tb_fail(const char *format, ...);

// --- what compilers call -------------------------------------------------------------------------

#define TB_LIBC __attribute__((weak, no_builtin)) extern

TB_LIBC void *memcpy(void *restrict to, const void *restrict from, size_t n) {
    uint8_t *a = to;
    for (const uint8_t *b = from; n; n--) *a++ = *b++;
    return to;
}

TB_LIBC void *memmove(void *to, const void *from, size_t n) {
    uint8_t *a = to;
    const uint8_t *b = from;
    if (a <= b) {
        for (; n; n--) *a++ = *b++;
    } else {
        while (n--) a[n] = b[n];
    }
    return to;
}

TB_LIBC void *memset(void *to, int byte, size_t n) {
    for (uint8_t *a = to; n; n--) *a++ = (uint8_t)byte;
    return to;
}

TB_LIBC int memcmp(const void *one, const void *other, size_t n) {
    const uint8_t *a = one, *b = other;
    for (; n; n--, a++, b++)
        if (*a != *b) return *a - *b;
    return 0;
}

TB_LIBC size_t strlen(const char *text) {
    size_t n = 0;
    while (text[n]) n++;
    return n;
}

TB_LIBC int strcmp(const char *one, const char *other) {
    while (*one && *one == *other) one++, other++;
    return (uint8_t)*one - (uint8_t)*other;
}

// --- the allocator -------------------------------------------------------------------------------
//
// Each block has one of a fixed number of sizes (classes), and is taken from the end of the heap. A
// freed block is added to the free list of its class, and is reused. The sizes of classes differ by
// 16 bytes up to 1 KiB, and by a quarter of a power of two above 1 KiB.

enum { TB_PAGE = 65536, TB_SMALL = 64, TB_SIZES = TB_SMALL + 4 * 22 };

typedef struct tb_block_head {
    uint32_t size_class;
    struct tb_block_head *next;  // the next free block, while this block is free
} tb_block_head;

static tb_block_head *tb_free_blocks[TB_SIZES];
static uintptr_t tb_heap_at, tb_heap_end;

static inline uint32_t tb_size_class(uint32_t n) {
    if (n <= 16) return 0;
    if (n <= 1024) return (n - 1) / 16;
    const uint32_t power = 31 - (uint32_t)__builtin_clz(n - 1);
    return TB_SMALL + (power - 10) * 4 + ((n - 1) >> (power - 2)) - 4;
}

static inline uint32_t tb_class_bytes(uint32_t size_class) {
    if (size_class < TB_SMALL) return (size_class + 1) * 16;
    const uint32_t power = (size_class - TB_SMALL) / 4 + 10;
    return (1u << power) + ((size_class - TB_SMALL) % 4 + 1) * (1u << (power - 2));
}

// Allocates at least n bytes, aligned to 8 and not initialized; 0 if the host refuses more memory.
static inline void *tb_try_alloc(uint32_t n) {
    if (n > 1u << 30) return 0;
    const uint32_t size_class = tb_size_class(n);
    tb_block_head *block = tb_free_blocks[size_class];
    if (block) {
        tb_free_blocks[size_class] = block->next;
        return block + 1;
    }
    const uint32_t bytes = tb_class_bytes(size_class) + sizeof(tb_block_head);
    if (tb_heap_end - tb_heap_at < bytes) {
        const size_t before = __builtin_wasm_memory_grow(0, (bytes + TB_PAGE - 1) / TB_PAGE);
        if (before == (size_t)-1) return 0;
        // If other code has grown the memory, the new pages do not follow the heap, and the rest of
        // the old heap is abandoned.
        if (before * TB_PAGE != tb_heap_end) tb_heap_at = before * TB_PAGE;
        tb_heap_end = __builtin_wasm_memory_size(0) * TB_PAGE;
    }
    block = (tb_block_head *)tb_heap_at;
    tb_heap_at += bytes;
    block->size_class = size_class;
    return block + 1;
}

// Like tb_try_alloc, but ends the sequence with an error if the host refuses more memory.
static inline void *tb_alloc(uint32_t n) {
    void *block = tb_try_alloc(n);
    if (!block) tb_fail("out of memory: %u bytes more", n);
    return block;
}

// Frees a block; `at` may be 0.
static inline void tb_free(void *at) {
    if (!at) return;
    tb_block_head *block = (tb_block_head *)at - 1;
    block->next = tb_free_blocks[block->size_class];
    tb_free_blocks[block->size_class] = block;
}

// Grows a block to at least n bytes, moving it if necessary; `at` may be 0.
static inline void *tb_realloc(void *at, uint32_t n) {
    if (!at) return tb_alloc(n);
    const uint32_t room = tb_class_bytes(((tb_block_head *)at - 1)->size_class);
    if (n <= room) return at;
    void *larger = tb_alloc(n);
    memcpy(larger, at, room);
    tb_free(at);
    return larger;
}

// --- growable buffers ----------------------------------------------------------------------------

// A growable buffer, initialized with {0}. After the first append or read into the buffer, a 0 byte
// always follows the content.
typedef struct tb_bytes {
    uint8_t *data;
    uint32_t len, room;
} tb_bytes;

// Ensures capacity for n bytes in total, and for the 0 byte after them.
static inline void tb_bytes_reserve(tb_bytes *bytes, uint32_t n) {
    if (n < bytes->room) return;
    const uint32_t twice = bytes->room < 1u << 28 ? 2 * bytes->room : n;
    bytes->room = (n > twice ? n : twice) + 1;
    bytes->data = tb_realloc(bytes->data, bytes->room);
}

static inline void tb_bytes_append(tb_bytes *bytes, const void *data, uint32_t n) {
    if (n > UINT32_MAX - bytes->len) tb_fail("out of memory: %u bytes more", n);
    tb_bytes_reserve(bytes, bytes->len + n);
    if (n) memcpy(bytes->data + bytes->len, data, n);
    bytes->len += n;
    bytes->data[bytes->len] = 0;
}

// Truncates to the first n bytes; keeps the capacity.
static inline void tb_bytes_cut(tb_bytes *bytes, uint32_t n) {
    if (n >= bytes->len) return;
    bytes->len = n;
    bytes->data[n] = 0;
}

static inline void tb_bytes_free(tb_bytes *bytes) {
    tb_free(bytes->data);
    *bytes = (tb_bytes){0};
}

#endif
