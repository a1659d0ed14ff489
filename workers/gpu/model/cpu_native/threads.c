#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    MAX_THREADS = 64,
    MAX_PARTS = 1 << 12,
    /* Number of rounds that a thread waits for others before it yields its core: about 50 us. */
    PATIENCE = 1000,
    /* Number of rounds that a thread waits for the next call before it sleeps. */
    IDLE = 100,
};

/* The state of the current loop in one word, so that a thread takes a part by one atomic operation.
 * From the highest bits on: the loop's number, the number of threads that may take parts, the
 * number of parts, and the number of parts that have been taken. */
#define WORD(loop, threads, parts) \
    ((uint64_t)(loop) << 40 | (uint64_t)(threads) << 32 | (uint64_t)(parts) << 16)
#define ALLOWED(word) ((word) >> 32 & 0xff)
#define PARTS(word) ((word) >> 16 & 0xffff)
#define TAKEN(word) ((word) & 0xffff)

static struct {
    _Atomic uint64_t word;
    char apart[56];
    _Atomic int64_t done;
    /* Written before the word; read only by threads that have taken a part. */
    Loop loop;
    const void *context;
    int64_t items, part;
    uint64_t number;
    int64_t threads;
} now;

static pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t called = PTHREAD_COND_INITIALIZER;
static atomic_int active;
static int started, asleep;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_a_moment(int *rounds) {
    if (++*rounds < PATIENCE)
        relax();
    else
        sched_yield();
}

/* Computes parts of the current loop, as thread number `thread`, until all are taken. Returns
 * whether this thread has computed any. */
static int take(int64_t thread) {
    int any = 0;
    uint64_t word = atomic_load_explicit(&now.word, memory_order_acquire);
    while (thread < (int64_t)ALLOWED(word) && TAKEN(word) < PARTS(word)) {
        if (!atomic_compare_exchange_weak_explicit(&now.word, &word, word + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        int64_t first = (int64_t)TAKEN(word) * now.part, end = first + now.part;
        now.loop(now.context, thread, first, end < now.items ? end : now.items);
        atomic_fetch_add_explicit(&now.done, 1, memory_order_release);
        word = atomic_load_explicit(&now.word, memory_order_acquire);
        any = 1;
    }
    return any;
}

static void *serve(void *number) {
    int64_t thread = (int64_t)(intptr_t)number;
    int rounds = 0;
    for (;;) {
        if (take(thread)) {
            rounds = 0;
        } else if (atomic_load_explicit(&active, memory_order_relaxed) > thread) {
            wait_a_moment(&rounds);
        } else if (++rounds < IDLE) {
            relax();
        } else {
            pthread_mutex_lock(&lock);
            asleep++;
            while (atomic_load_explicit(&active, memory_order_relaxed) <= thread)
                pthread_cond_wait(&called, &lock);
            asleep--;
            pthread_mutex_unlock(&lock);
            rounds = 0;
        }
    }
    return 0;
}

/* Resets the state in a forked process. Such a process has a copy of the state, but not the
 * threads. */
static void forget(void) {
    pthread_mutex_init(&caller, 0);
    pthread_mutex_init(&lock, 0);
    pthread_cond_init(&called, 0);
    atomic_store(&active, 0);
    atomic_store(&now.word, 0);
    started = asleep = 0;
}

/* Starts threads until there are `count`, or until the system refuses another thread. */
static void start(int64_t count) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (!started)
        pthread_atfork(0, 0, forget);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (started < count - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, serve, (void *)(intptr_t)(started + 1)))
            break;
        started++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

int64_t threads_bounded(int64_t count) {
    return count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
}

void threads_begin(int64_t count) {
    pthread_mutex_lock(&caller);
    now.threads = threads_bounded(count);
    if (now.threads == 1)
        return;
    if (started < now.threads - 1)
        start(now.threads);
    pthread_mutex_lock(&lock);
    atomic_store_explicit(&active, (int)now.threads, memory_order_relaxed);
    if (asleep)
        pthread_cond_broadcast(&called);
    pthread_mutex_unlock(&lock);
}

void threads_end(void) {
    atomic_store_explicit(&active, 0, memory_order_relaxed);
    pthread_mutex_unlock(&caller);
}

void threads_run(Loop loop, const void *context, int64_t items, int64_t part) {
    if (part * MAX_PARTS < items)
        part = (items + MAX_PARTS - 1) / MAX_PARTS;
    int64_t parts = (items + part - 1) / part;
    if (parts <= 1 || now.threads == 1) {
        loop(context, 0, 0, items);
        return;
    }
    now.loop = loop;
    now.context = context;
    now.items = items;
    now.part = part;
    atomic_store_explicit(&now.done, 0, memory_order_relaxed);
    atomic_store_explicit(&now.word, WORD(++now.number, now.threads, parts), memory_order_release);
    take(0);
    for (int rounds = 0; atomic_load_explicit(&now.done, memory_order_acquire) < parts;)
        wait_a_moment(&rounds);
}
