// Memory of the grammar engine: permanent blocks, and an arena. Blocks of the arena are never freed
// one by one; the whole arena is emptied at once.
#ifndef GRAMMAR_MEMORY_H
#define GRAMMAR_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT(name) __attribute__((export_name(name)))

// MIN_CHUNKS: the number of chunks that the arena always keeps.
enum { PAGE = 65536, CHUNK = 1 << 20, MAX_CHUNKS = 512, MIN_CHUNKS = 8 };

__attribute__((import_module("tokenbus"), import_name("fail"), noreturn)) void host_fail(
    const char *text, uint32_t n);

// Ends this guest, and all of its sequences, with an error message.
#define FAIL(text) host_fail(text, sizeof text - 1)

static inline void copy(void *to, const void *from, uint32_t n) { __builtin_memcpy(to, from, n); }

static inline void zero(void *at, uint32_t n) { __builtin_memset(at, 0, n); }

static inline bool same(const uint32_t *one, const uint32_t *other, uint32_t words) {
    for (uint32_t i = 0; i < words; i++)
        if (one[i] != other[i]) return false;
    return true;
}

// Adds pages at the end of the memory; returns 0 if the host refuses more memory.
static void *take_pages(uint32_t bytes) {
    const size_t before = __builtin_wasm_memory_grow(0, (bytes + PAGE - 1) / PAGE);
    return before == (size_t)-1 ? 0 : (void *)(before * PAGE);
}

// --- permanent memory ----------------------------------------------------------------------------

static uint8_t *stay_at, *stay_end;

// Allocates zeroed memory, aligned to 16 bytes; returns 0 if the host refuses more memory.
static void *stay_if_room(uint32_t bytes) {
    bytes = (bytes + 15) & ~15u;
    if ((uint32_t)(stay_end - stay_at) < bytes) {
        const uint32_t room = bytes > PAGE ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
        uint8_t *pages = take_pages(room);
        if (!pages) return 0;
        if (pages != stay_end) stay_at = pages;
        stay_end = pages + room;
    }
    uint8_t *at = stay_at;
    stay_at += bytes;
    return at;
}

static void *stay(uint32_t bytes) {
    void *at = stay_if_room(bytes);
    if (!at) FAIL("the grammar and the vocabulary do not fit into the memory");
    return at;
}

// --- the arena -----------------------------------------------------------------------------------

static uint8_t *chunks[MAX_CHUNKS];
static uint32_t chunk_count, chunk_now, chunk_used;

// Adds a free block of memory to the arena, in whole chunks. A smaller remainder is not used.
static void arena_give(uint8_t *block, uint32_t bytes) {
    for (; bytes >= CHUNK && chunk_count < MAX_CHUNKS; block += CHUNK, bytes -= CHUNK)
        chunks[chunk_count++] = block;
}

// Allocates at most CHUNK bytes, aligned to 16 and not zeroed; returns 0 if the memory is full.
static void *arena_take(uint32_t bytes) {
    bytes = (bytes + 15) & ~15u;
    if (bytes > CHUNK) return 0;
    if (chunk_now < chunk_count && chunk_used + bytes > CHUNK) {
        chunk_now++;
        chunk_used = 0;
    }
    if (chunk_now == chunk_count) {
        uint8_t *block = chunk_count < MAX_CHUNKS ? take_pages(CHUNK) : 0;
        if (!block) return 0;
        arena_give(block, CHUNK);
    }
    void *at = chunks[chunk_now] + chunk_used;
    chunk_used += bytes;
    return at;
}

static void arena_empty(void) { chunk_now = chunk_used = 0; }

// Turns a chunk of the empty arena into permanent memory.
static void arena_to_stay(void) {
    stay_at = chunks[--chunk_count];
    stay_end = stay_at + CHUNK;
    zero(stay_at, CHUNK);
}

#endif
