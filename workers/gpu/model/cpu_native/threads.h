/* Threads that compute parts of a loop, made for loops of some ten microseconds on cores that other
 * processes use too.
 *
 * A loop is cut into parts, which are taken one by one: a thread that does not run takes none, and
 * nothing waits for it. So a loop takes as long as the cores that it gets allow, and where the
 * caller is alone it computes all of it. (OpenMP gives each thread its share beforehand; one that
 * another process keeps from running then holds up all the others for a slice of its time.) */

#ifndef TOKENBUS_THREADS_H
#define TOKENBUS_THREADS_H

#include <stdint.h>

/* Computes the items first to end - 1 of a loop. */
typedef void (*Loop)(const void *context, int64_t first, int64_t end);

/* From here to threads_end the caller uses so many threads, itself included. Another thread that
 * calls this waits until then. */
void threads_begin(int64_t count);
void threads_end(void);

/* Runs a loop over items, in parts of so many. Between threads_begin and threads_end only. */
void threads_run(Loop loop, const void *context, int64_t items, int64_t part);

#endif
