/* Vectors of float32 that have the width of the processor's registers, and functions on them. */

#ifndef TOKENBUS_VECTORS_H
#define TOKENBUS_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

INLINE Vector load(const float *from) {
    Vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store(float *to, Vector values) {
    memcpy(to, &values, sizeof values);
}

/* Loads the first `count` lanes; the other lanes are 0. */
INLINE Vector load_some(const float *from, int64_t count) {
    Vector found = {0};
    memcpy(&found, from, (size_t)count * sizeof(float));
    return found;
}

INLINE Vector all(float value) {
    return value - (Vector){0};
}

/* a * b + c, rounded once. The compiler does not fuse other products and sums (-ffp-contract=off).
 * So the source determines each rounding, and a function gives equal bits wherever it is called. */
#define FUSED(a, b, c) __builtin_elementwise_fma(a, b, c)

INLINE float sum(Vector values) {
#if LANES == 16
    typedef float Half __attribute__((vector_size(32)));
    Half low, high;
    memcpy(&low, &values, sizeof low);
    memcpy(&high, (char *)&values + sizeof low, sizeof high);
    low += high;
#elif LANES == 8
    Vector low = values;
#endif
#if LANES >= 8
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter four, other;
    memcpy(&four, &low, sizeof four);
    memcpy(&other, (char *)&low + sizeof four, sizeof other);
    four += other;
#else
    Vector four = values;
#endif
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Sums of neighbouring lanes: of the first vector, then of the second. */
#if LANES == 16
#define NEIGHBOURS(a, b)                                                                          \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +   \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#elif LANES == 8
#define NEIGHBOURS(a, b)                                             \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +      \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15))
#else
#define NEIGHBOURS(a, b) \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7))
#endif

/* The sums of the lanes of LANES vectors: lane i of the result is the sum of vector i. Overwrites
 * `values`. */
INLINE Vector sums_of(Vector *values) {
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            values[i] = NEIGHBOURS(values[2 * i], values[2 * i + 1]);
    return values[0];
}

/* Interleaves the entries of the first halves, and of the second halves, of two vectors. */
#if LANES == 16
#define FIRST_HALVES(a, b) \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND_HALVES(a, b) \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define FIRST_HALVES(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SECOND_HALVES(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define FIRST_HALVES(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define SECOND_HALVES(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif

/* Transposes: swaps entry j of vector i and entry i of vector j. Each round rotates the bits of an
 * entry's overall index by one. */
INLINE void transpose(Vector *values) {
    for (int round = 1; round < LANES; round *= 2) {
        Vector found[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            found[2 * i] = FIRST_HALVES(values[i], values[i + LANES / 2]);
            found[2 * i + 1] = SECOND_HALVES(values[i], values[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++)
            values[i] = found[i];
    }
}

/* Each lane of the result is the lane of `yes` if the comparison `which` is true there, and the
 * lane of `no` if it is false. */
INLINE Vector choose(Integers which, Vector yes, Vector no) {
    return (Vector)(((Integers)yes & which) | ((Integers)no & ~which));
}

/* e to the power of each entry, accurate to 2 units in the last place. Entries are clamped to -87.3
 * and 88, so that the result is a finite normal number. Source: Cephes, expf. */
INLINE Vector exponential(Vector x) {
    const float bias = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer. */
    x = choose(x < all(-87.3f), all(-87.3f), x);
    x = choose(x > all(88.0f), all(88.0f), x);
    Vector power = FUSED(x, all(1.44269504f), all(bias)) - bias;
    Vector rest = FUSED(power, all(2.12194440e-4f), FUSED(power, all(-0.693359375f), x));
    Vector found = all(1.9875691500e-4f);
    found = FUSED(found, rest, all(1.3981999507e-3f));
    found = FUSED(found, rest, all(8.3334519073e-3f));
    found = FUSED(found, rest, all(4.1665795894e-2f));
    found = FUSED(found, rest, all(1.6666665459e-1f));
    found = FUSED(found, rest, all(5.0000001201e-1f));
    found = FUSED(found, rest * rest, rest) + 1.0f;
    Integers scale = (__builtin_convertvector(power, Integers) + 127) << 23;
    return found * (Vector)scale;
}

/* Replaces count values in place by an expression, in which `name` is the current vector. */
#define FOR_EACH(values, count, name, expression)                            \
    do {                                                                     \
        int64_t at = 0;                                                      \
        for (; at + LANES <= (count); at += LANES) {                         \
            Vector name = load((values) + at);                               \
            store((values) + at, expression);                                \
        }                                                                    \
        if (at < (count)) {                                                  \
            Vector name = load_some((values) + at, (count) - at);            \
            Vector changed = expression;                                     \
            memcpy((values) + at, &changed, (size_t)((count) - at) * sizeof(float)); \
        }                                                                    \
    } while (0)

INLINE float dot(const float *a, const float *b, int64_t count) {
    Vector one = {0}, other = {0};
    int64_t at = 0;
    for (; at + 2 * LANES <= count; at += 2 * LANES) {
        one = FUSED(load(a + at), load(b + at), one);
        other = FUSED(load(a + at + LANES), load(b + at + LANES), other);
    }
    for (; at + LANES <= count; at += LANES)
        one = FUSED(load(a + at), load(b + at), one);
    if (at < count)
        other = FUSED(load_some(a + at, count - at), load_some(b + at, count - at), other);
    return sum(one + other);
}

#endif
