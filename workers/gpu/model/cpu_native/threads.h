/* Threads that compute parts of a loop. The loops take tens of microseconds, and other processes
 * may use the same cores.
 *
 * A loop is divided into parts, which threads take one by one. A thread that is not scheduled does
 * not take parts. The other threads wait for it only if it has begun a part. If only the calling
 * thread is scheduled, it computes the whole loop. (OpenMP assigns each thread a fixed share of the
 * loop. If another process occupies the core of one thread, all other threads therefore wait for a
 * time slice.) */

#ifndef TOKENBUS_THREADS_H
#define TOKENBUS_THREADS_H

#include <stdint.h>

/* Computes the items first to end - 1 of a loop, as thread number `thread`. */
typedef void (*Loop)(const void *context, int64_t thread, int64_t first, int64_t end);

/* The number of threads that are used if `count` are requested. */
int64_t threads_bounded(int64_t count);

/* From now until threads_end, the caller uses this number of threads, including itself. If another
 * thread calls this function, it waits until threads_end. */
void threads_begin(int64_t count);
void threads_end(void);

/* Runs a loop over items, in parts of this size. Called only between threads_begin and
 * threads_end. */
void threads_run(Loop loop, const void *context, int64_t items, int64_t part);

#endif
