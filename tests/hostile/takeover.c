/* A program that runs in the place of a guest process. It has the rights, the descriptors and the
   shared memory of the process, and attacks the worker with them. ``take_over`` is called on the
   thread of a channel, while the worker waits for the answer to Begin. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HEAD 4096
#define AREA (1024 * 1024)
#define SIZE_AT 32 /* Offset of the size and the flag of a message part for the worker. */
#define CURRENT_AT 64

static uint8_t *shared;
static int worker_event, own_event, control;
static int64_t handle;
static pid_t zygote, worker;
static uint8_t *out; /* The area of the shared memory for messages to the worker. */

static void notify(void) {
    uint64_t one = 1;
    if (write(worker_event, &one, 8)) {}
}

/* Waits for a notification of the worker. */
static void await(void) {
    struct timespec pause = {0, 200000};
    uint64_t count;
    while (read(own_event, &count, 8) != 8) nanosleep(&pause, 0);
}

static void part(uint32_t size, uint32_t more) {
    memcpy(shared + SIZE_AT, &size, 4);
    memcpy(shared + SIZE_AT + 4, &more, 4);
    notify();
}

/* --- MessagePack ------------------------------------------------------------------------------ */

static size_t at;
static void byte(int value) { out[at++] = (uint8_t)value; }
static void big(int type, uint64_t value, int bytes) {
    byte(type);
    while (bytes--) byte((int)(value >> 8 * bytes & 255));
}
static void text(const char *value) {
    size_t size = strlen(value);
    big(0xdb, size, 4);
    memcpy(out + at, value, size);
    at += size;
}
static void send_message(void) { part((uint32_t)at, 0); }

/* Writes the beginning of the answer `Done` with one item. */
static void begin_done(void) {
    at = 0;
    byte(0x93), text("done"), byte(0x91);
}
static void end_done(void) { big(0xcb, 0, 8), send_message(); }

/* Answers with an error of the controller, which the client then receives. */
static void fail(const char *message) {
    begin_done();
    byte(0x94), byte(0xc0), byte(0xc0), byte(0xc0);
    byte(0x92), text("controller_failed"), text(message);
    end_done();
}

/* Answers that the call has succeeded. */
static void succeed(void) { begin_done(), byte(0x90), end_done(); }

static void ask(const char *what, const char *name, size_t value, int64_t number, int64_t of) {
    at = 0;
    byte(0x96), text("asked"), big(0xd3, (uint64_t)of, 8), text(what), text(name);
    big(0xc6, value, 4);
    memset(out + at, 'v', value);
    at += value;
    if (number) big(0xd3, (uint64_t)number, 8);
    else byte(0xc0);
    send_message();
}

/* --- messages that are not valid -------------------------------------------------------------- */

static void header_size(void) { part(0xffffffff, 0); }
static void header_over(void) { memset(shared, 0xff, HEAD), notify(); }
static void endless_parts(void) {
    for (;;) part(AREA, 1), await();
}
static void garbage(void) {
    for (size_t i = 0; i < AREA; i++) out[i] = (uint8_t)(i * 2654435761u >> 13);
    part(AREA, 0);
}
static void nothing(void) { part(0, 0); }
static void nested(void) {
    begin_done();
    out[0] = 0x94; /* One field more than the type has. */
    byte(0x90), big(0xcb, 0, 8);
    memset(out + at, 0x91, AREA - at);
    part(AREA, 0);
}
static void many(uint32_t count, int fill, void (*head)(uint32_t)) {
    head(count);
    memset(out + at, fill, AREA - at);
    uint32_t sent = (uint32_t)(AREA - at);
    part(AREA, 1);
    memset(out, fill, AREA);
    for (await(); count - sent > AREA; sent += AREA) part(AREA, 1), await();
    part(count - sent, 0);
}
static void head_items(uint32_t count) { at = 0, byte(0x93), text("done"), big(0xdd, count, 4); }
static void head_tokens(uint32_t count) {
    begin_done();
    byte(0x93), byte(0xc0), byte(0xc0), byte(0x93), byte(4), byte(0), big(0xdd, count, 4);
}
static void head_error(uint32_t count) {
    begin_done();
    byte(0x94), byte(0xc0), byte(0xc0), byte(0xc0);
    byte(0x92), text("controller_failed"), big(0xdb, count, 4);
}
static void head_log(uint32_t count) {
    begin_done();
    byte(0x95), byte(0xc0), byte(0xc0), byte(0xc0), byte(0xc0), big(0xc6, count, 4);
}
static void many_items(void) { many(60000000, 0xc0, head_items); }
static void many_tokens(void) { many(60000000, 1, head_tokens); }
static void long_error(void) { many(60000000, 'e', head_error); }
static void long_log(void) { many(60000000, 'l', head_log); }
static void wrong_answers(void) {
    begin_done();
    byte(0x93), byte(99), byte(0x91), byte(77), byte(0x91), byte(88);
    end_done();
}
static void too_many_answers(void) {
    at = 0;
    byte(0x93), text("done"), byte(0x93), byte(0x90), byte(0x90), byte(0x90);
    end_done();
}
static void no_answers(void) { at = 0, byte(0x93), text("done"), byte(0x90), end_done(); }
static void bias_shared(void) {
    begin_done();
    byte(0x93), byte(0xc0), byte(0xc0);
    byte(0x97), byte(1), byte(0), byte(0xc4), byte(0), byte(0xc3), big(0xce, 0x7fffffff, 4);
    big(0xc6, 0, 4), big(0xce, 0x7fffffff, 4);
    end_done();
}
static void cpu_negative(void) {
    begin_done(), byte(0x90), big(0xcb, 0xfff0000000000000, 8), send_message(); /* Minus infinity. */
}

/* --- questions -------------------------------------------------------------------------------- */

static void ask_for_ever(void) {
    for (;;) ask("get", "v", 0, 0, handle), await();
}
static void write_for_ever(void) {
    for (;;) ask("append", "v", 100000, 0, handle), await();
}
static void ask_of_others(void) {
    for (int64_t other = -200; other < 200; other++)
        if (other != handle) ask("get", "name", 0, 0, other), await();
    fail("asked");
}
static void return_memory(void) {
    for (int i = 0; i < 200; i++) {
        ask("memory", "", 0, -(1ll << 62), handle), await();
        ask("memory", "", 0, 1ll << 62, handle), await();
        ask("memory", "", 0, 1ll << 20, handle), await();
    }
    fail("asked");
}
static void ask_without_reading(void) {
    for (int i = 0; i < 100000; i++) ask("get", "v", 0, 0, handle);
    fail("asked");
}

/* --- races ------------------------------------------------------------------------------------ */

static void *flip(void *unused) {
    for (uint32_t i = 0;; i++) {
        uint32_t sizes[2] = {i & 1 ? 0xffffffff : AREA, i & 2};
        memcpy(shared + SIZE_AT, sizes, 8);
        out[i % AREA] ^= (uint8_t)i;
        shared[CURRENT_AT + i % 4] ^= (uint8_t)i;
    }
    return unused;
}
static void race(void) {
    pthread_t thread;
    pthread_create(&thread, 0, flip, 0);
    for (;;) notify();
}
static void event_overflow(void) {
    uint64_t most = UINT64_MAX - 1, got;
    for (int i = 0; i < 1000; i++) {
        if (write(worker_event, &most, 8)) {}
        if (write(own_event, &most, 8)) {}
        if (read(worker_event, &got, 8)) {}
    }
    fail("wrote");
}
static void drain_events(void) {
    uint64_t got;
    for (int i = 0; i < 1000; i++) {
        notify();
        if (read(worker_event, &got, 8)) {}
    }
    fail("drained");
}
static void remove_memory(void) {
    madvise(shared, HEAD + 4 * AREA, MADV_REMOVE);
    madvise(shared, HEAD + 4 * AREA, MADV_DONTNEED);
    fail("removed");
}
static void flood_control(void) {
    char lines[4000];
    memset(lines, '\n', sizeof lines);
    for (int i = 0; i < 20; i++)
        if (write(control, lines, sizeof lines)) {}
    _exit(1);
}

/* --- time, memory, and the end ---------------------------------------------------------------- */

static void hang(void) {
    for (;;) {
        struct timespec second = {1, 0};
        nanosleep(&second, 0);
    }
}
static void spin(void) {
    for (volatile uint64_t i = 0;; i++) {}
}
static void *spins(void *unused) {
    spin();
    return unused;
}
static void spin_on_threads(void) {
    for (int i = 0; i < 16; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, spins, 0);
    }
    spin();
}
static void block_signals(void) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, 0);
    spin();
}
static void *sleeps(void *unused) {
    hang();
    return unused;
}
static void many_threads(void) {
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 16384);
    for (int i = 0; i < 20000; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, sleeps, 0)) break;
    }
    hang();
}
static void take_memory(void) {
    size_t taken = 0, size = 1ul << 30;
    for (; size >= 4096; size /= 2)
        for (; taken < 1ul << 42; taken += size)
            if (mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
                break;
    fail(taken < 1ul << 40 ? "refused" : "took a terabyte");
}
static void take_descriptors(void) {
    int count = 0;
    while (count < 100000 && memfd_create("m", 0) >= 0) count++;
    fail(count < 1100 ? "refused" : "took 1100 descriptors");
}
static void leave(void) { _exit(0); }
static void crash(void) { *(volatile int *)8 = 1; }
static void abort_it(void) { abort(); }
static void deep(volatile char *above) {
    volatile char here[4096];
    here[0] = above[0];
    deep(here);
    here[1] = 1;
}
static void overflow(void) { deep((char *)""); }

/* --- rights ----------------------------------------------------------------------------------- */

static char done[4096];
static void tried(const char *name, long result) {
    if (result >= 0) strcat(strcat(done, name), " ");
}
#define CALL(name, ...) tried(#name, syscall(SYS_##name, __VA_ARGS__))
static void try_files(void) {
    CALL(open, "/etc/passwd", O_RDONLY);
    CALL(openat, AT_FDCWD, "/tmp/taken", O_CREAT | O_RDWR, 0600);
    CALL(openat, AT_FDCWD, "/dev/shm/taken", O_CREAT | O_RDWR, 0600);
    CALL(mkdir, "/tmp/taken", 0700);
    CALL(unlink, "/tmp/taken");
    CALL(chdir, "/");
    CALL(mount, "none", "/tmp", "tmpfs", 0, 0);
    CALL(execve, "/bin/true", 0, 0);
    CALL(io_uring_setup, 8, 0);
    CALL(open_by_handle_at, 0, 0, 0);
    fail(done[0] ? done : "nothing");
}
static void try_proc(void) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", worker), CALL(open, path, O_RDWR);
    snprintf(path, sizeof path, "/proc/%d/maps", zygote), CALL(open, path, O_RDONLY);
    snprintf(path, sizeof path, "/proc/%d/environ", worker), CALL(open, path, O_RDONLY);
    CALL(open, "/proc/self/mem", O_RDWR);
    CALL(open, "/proc/self/fd/0", O_RDWR);
    char copy[8];
    struct iovec local = {copy, 8}, remote = {shared, 8};
    CALL(process_vm_readv, worker, &local, 1, &remote, 1, 0);
    CALL(process_vm_writev, zygote, &local, 1, &remote, 1, 0);
    CALL(ptrace, PTRACE_ATTACH, worker, 0, 0);
    CALL(ptrace, PTRACE_SEIZE, zygote, 0, 0);
    CALL(pidfd_open, worker, 0);
    CALL(kcmp, getpid(), worker, 0, 0, 0);
    CALL(perf_event_open, 0, worker, -1, -1, 0);
    fail(done[0] ? done : "nothing");
}
static void try_signals(void) {
    CALL(kill, worker, SIGKILL);
    CALL(kill, zygote, SIGKILL);
    CALL(kill, -1, SIGTERM);
    CALL(kill, 0, SIGTERM);
    CALL(tkill, worker, SIGKILL);
    CALL(tgkill, worker, worker, SIGKILL);
    CALL(rt_sigqueueinfo, worker, SIGKILL, 0);
    CALL(prlimit64, worker, 0, 0, 0);
    CALL(setpriority, 0, worker, 19);
    CALL(sched_setaffinity, worker, 8, "\1\0\0\0\0\0\0");
    CALL(fcntl, control, F_SETOWN, worker);
    CALL(fcntl, control, F_SETFL, O_NONBLOCK);
    CALL(ioctl, control, 0x5421, &done);
    CALL(setuid, 0);
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
    fail(done[0] ? done : "nothing");
}
static void try_sockets(void) {
    CALL(socket, AF_INET, SOCK_STREAM, 0);
    CALL(socket, AF_UNIX, SOCK_STREAM, 0);
    CALL(socket, AF_NETLINK, SOCK_RAW, 0);
    CALL(socketpair, AF_UNIX, SOCK_STREAM, 0, &done);
    CALL(connect, control, "", 2);
    CALL(sendmsg, control, 0, 0);
    CALL(sendto, control, "x", 1, 0, 0, 0);
    CALL(shmget, 1, 4096, 0600 | 01000);
    CALL(mq_open, "/taken", O_CREAT | O_RDWR, 0600, 0);
    CALL(fork, 0);
    CALL(vfork, 0);
    CALL(clone, SIGCHLD, 0, 0, 0, 0);
    CALL(unshare, 0x10000000);
    CALL(bpf, 0, 0, 0);
    CALL(userfaultfd, 0);
    CALL(add_key, "user", "k", "v", 1, -2);
    fail(done[0] ? done : "nothing");
}

static const struct {
    const char *name;
    void (*act)(void);
} acts[] = {
#define ACT(name) {#name, name}
    ACT(header_size), ACT(header_over), ACT(endless_parts), ACT(garbage), ACT(nothing), ACT(nested),
    ACT(many_items), ACT(many_tokens), ACT(long_error), ACT(long_log), ACT(wrong_answers),
    ACT(too_many_answers), ACT(no_answers), ACT(bias_shared), ACT(cpu_negative), ACT(ask_for_ever),
    ACT(write_for_ever), ACT(ask_of_others), ACT(return_memory), ACT(ask_without_reading),
    ACT(race), ACT(event_overflow), ACT(drain_events), ACT(remove_memory), ACT(flood_control),
    ACT(hang), ACT(spin), ACT(spin_on_threads), ACT(block_signals), ACT(many_threads),
    ACT(take_memory), ACT(take_descriptors), ACT(leave), ACT(crash), ACT(abort_it), ACT(overflow),
    ACT(try_files), ACT(try_proc), ACT(try_signals), ACT(try_sockets), ACT(succeed),
};

/* Starts a thread that attacks while the guest runs as usual. Returns whether a thread was started. */
static int goes_on(const char *name) {
    pthread_t thread;
    if (!strcmp(name, "spin_beside")) return !pthread_create(&thread, 0, spins, 0);
    if (!strcmp(name, "race_beside")) return !pthread_create(&thread, 0, flip, 0);
    return 0;
}

/* Answers all further requests, and exits after `Close`. */
static void obey(void) {
    for (;;) {
        await();
        int closes = !memcmp(shared + HEAD + 2, "close", 5);
        at = 0, byte(0x93), text("done"), byte(0x90), end_done();
        if (closes) _exit(0);
    }
}

/* Runs the attack with this name. Returns only if the guest should run. */
int take_over(const char *name, void *memory, int to_worker, int to_guest, int socket, int64_t of,
              int zygote_pid, int worker_pid) {
    shared = memory, out = shared + HEAD + AREA;
    worker_event = to_worker, own_event = to_guest, control = socket, handle = of;
    zygote = zygote_pid, worker = worker_pid;
    if (goes_on(name)) return 1;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        if (!strcmp(name, acts[i].name)) {
            acts[i].act();
            obey();
        }
    return 0;
}
