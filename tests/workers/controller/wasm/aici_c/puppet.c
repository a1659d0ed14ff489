/* A guest of the AICI ABI that does what its argument says, line by line.

   A line has the word of a call and an operation: `mid log hello`. A call executes its lines in
   order. It stops after a line that returns a result (`mid = {"SampleWithBias":{}}`). It also stops
   before a line of another call and at the end, and then returns its usual result. The words of the
   calls are start, init, create, prompt, pre, mid and post. Only sequence 1 executes an operation
   after `only 1`. */

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ENV(result, name) __attribute__((import_module("env"), import_name(#name))) result name
#define WASI(result, name) \
    __attribute__((import_module("wasi_snapshot_preview1"), import_name(#name))) result name
#define EXPORT(name) __attribute__((export_name(#name)))

ENV(u32, aici_host_read_blob)(u32 blob, u32 dst, u32 size);
ENV(u32, aici_host_token_trie)(void);
ENV(u32, aici_host_module_arg)(void);
ENV(u32, aici_host_process_arg)(void);
ENV(void, aici_host_return_process_result)(u32 at, u32 size);
ENV(void, aici_host_return_logit_bias)(u32 at);
ENV(u32, aici_host_tokenize)(u32 at, u32 size);
ENV(u32, aici_host_self_seq_id)(void);
ENV(u32, aici_host_eos_token)(void);
ENV(u32, aici_host_special_token)(u32 number);
ENV(u32, aici_host_storage_cmd)(u32 at, u32 size);
ENV(void, aici_host_stop)(void);
ENV(u32, aici_host_tokens)(void);
ENV(u32, aici_host_get_config)(u32 at, u32 size);
WASI(u32, fd_write)(u32 fd, u32 pieces, u32 count, u32 written);
WASI(u32, fd_fdstat_get)(u32 fd, u32 into);
WASI(u32, random_get)(u32 into, u32 size);
WASI(u32, clock_time_get)(u32 clock, u64 precision, u32 into);
WASI(u32, args_sizes_get)(u32 count, u32 size);
WASI(u32, environ_sizes_get)(u32 count, u32 size);
WASI(void, proc_exit)(u32 code);

#define HANDLE 4711
#define MASK_WORDS 8192

static u8 script[1 << 16];
static u32 script_size, cursor;
static u8 blob[1 << 18];
static u32 mask[MASK_WORDS];

static u32 address(const void *at) { return (u32)at; }

static void print(const u8 *at, u32 size) {
    u32 pieces[2] = {address(at), size}, written = 0;
    fd_write(1, address(pieces), 1, address(&written));
}

static void print_number(u32 n) {
    u8 digits[11];
    u32 at = sizeof digits;
    digits[--at] = '\n';
    do digits[--at] = '0' + n % 10;
    while (n /= 10);
    print(digits + at, sizeof digits - at);
}

static void print_blob(u32 id) {
    u32 size = aici_host_read_blob(id, address(blob), sizeof blob);
    print(blob, size < sizeof blob ? size : sizeof blob);
    print((const u8 *)"\n", 1);
}

static void print_tokens(u32 id) {
    u32 size = aici_host_read_blob(id, address(blob), sizeof blob);
    for (u32 i = 0; i < size / 4; i++) print_number(((u32 *)blob)[i]);
}

/* Whether the text at `at` begins with `word` and then a space, a line's end or the end. */
static u32 is(u32 at, const char *word) {
    for (; *word; word++, at++)
        if (at >= script_size || script[at] != (u8)*word) return 0;
    return at >= script_size || script[at] == ' ' || script[at] == '\n';
}

/* The position after a word and the space after the word. */
static u32 next(u32 at, u32 end) {
    while (at < end && script[at] != ' ') at++;
    return at < end ? at + 1 : end;
}

static u32 number(u32 at, u32 end) {
    u32 n = 0;
    for (; at < end && script[at] >= '0' && script[at] <= '9'; at++) n = 10 * n + script[at] - '0';
    return n;
}

__attribute__((noinline)) static u32 recurse(volatile u32 *above) {
    volatile u32 here[64];
    here[0] = *above + 1;
    return recurse(here) + here[0];
}

/* Calls an import with the numbers in the line. */
static u32 poke(u32 at, u32 end) {
    u32 n[4], where = at;
    for (u32 i = 0; i < 4; i++) {
        where = next(where, end);
        n[i] = number(where, end);
    }
    if (is(at, "read_blob")) return aici_host_read_blob(n[0], n[1], n[2]);
    if (is(at, "return_process_result")) return aici_host_return_process_result(n[0], n[1]), 0;
    if (is(at, "return_logit_bias")) return aici_host_return_logit_bias(n[0]), 0;
    if (is(at, "tokenize")) return aici_host_tokenize(n[0], n[1]);
    if (is(at, "storage_cmd")) return aici_host_storage_cmd(n[0], n[1]);
    if (is(at, "get_config")) return aici_host_get_config(n[0], n[1]);
    if (is(at, "fd_write")) return fd_write(n[0], n[1], n[2], n[3]);
    if (is(at, "fd_write_piece")) {
        u32 piece[2] = {n[0], n[1]}, written = 0;
        return fd_write(1, address(piece), 1, address(&written));
    }
    if (is(at, "fd_fdstat_get")) return fd_fdstat_get(n[0], n[1]);
    if (is(at, "random_get")) return random_get(n[0], n[1]);
    if (is(at, "clock_time_get")) return clock_time_get(n[0], 1, n[1]);
    if (is(at, "args_sizes_get")) return args_sizes_get(n[0], n[1]);
    if (is(at, "environ_sizes_get")) return environ_sizes_get(n[0], n[1]);
    if (is(at, "proc_exit")) return proc_exit(n[0]), 0;
    __builtin_trap();
}

/* Executes one line, from its second word on. Returns whether the line has returned a result. */
static u32 act(u32 at, u32 end) {
    u32 what = next(at, end), size = end - what;
    if (is(at, "=")) return aici_host_return_process_result(address(script + what), size), 1;
    if (is(at, "silent")) return 1;
    if (is(at, "only"))
        return number(what, end) == aici_host_self_seq_id() ? act(next(what, end), end) : 0;
    if (is(at, "log")) print(script + what, size), print((const u8 *)"\n", 1);
    else if (is(at, "arg")) print_blob(aici_host_process_arg());
    else if (is(at, "module_arg")) print_blob(aici_host_module_arg());
    else if (is(at, "storage")) print_blob(aici_host_storage_cmd(address(script + what), size));
    else if (is(at, "tokenize")) print_tokens(aici_host_tokenize(address(script + what), size));
    else if (is(at, "tokens")) print_tokens(aici_host_tokens());
    else if (is(at, "trie")) print_number(aici_host_read_blob(aici_host_token_trie(), 0, 0));
    else if (is(at, "seq")) print_number(aici_host_self_seq_id());
    else if (is(at, "eos")) print_number(aici_host_eos_token());
    else if (is(at, "special")) print_number(aici_host_special_token(number(what, end)));
    else if (is(at, "config")) print_number(aici_host_get_config(address(script + what), size));
    else if (is(at, "mask")) {
        u32 token = number(what, end);
        for (u32 i = 0; i < MASK_WORDS; i++) mask[i] = 0;
        mask[token >> 5] = 1u << (token & 31);
        aici_host_return_logit_bias(address(mask));
    }
    else if (is(at, "say")) aici_host_return_process_result(address(script + what), size);
    else if (is(at, "fill")) {
        /* A result that consists of this number of `[`. */
        u8 *room = (u8 *)(__builtin_wasm_memory_grow(0, 128) << 16);
        u32 many = number(what, end);
        for (u32 i = 0; i < many; i++) room[i] = '[';
        return aici_host_return_process_result(address(room), many), 1;
    }
    else if (is(at, "poke")) print_number(poke(what, end));
    else if (is(at, "blobs"))
        for (u32 i = number(what, end); i > 0; i--) aici_host_tokenize(address(script), 100);
    else if (is(at, "loop")) for (;;) mask[0]++;
    else if (is(at, "recurse")) print_number(recurse(mask));
    else if (is(at, "grow")) while (__builtin_wasm_memory_grow(0, 16) != (u32)-1) ;
    else if (is(at, "stop")) aici_host_stop();
    else __builtin_trap();
    return 0;
}

/* Executes the lines of a call. Returns whether one of them has returned a result. */
static u32 play(const char *call) {
    while (cursor < script_size && is(cursor, call)) {
        u32 end = cursor;
        while (end < script_size && script[end] != '\n') end++;
        u32 at = next(cursor, end);
        cursor = end + 1;
        if (act(at, end)) return 1;
    }
    return 0;
}

static void run(u32 handle, const char *call, const char *usual) {
    if (handle != HANDLE) __builtin_trap();
    if (play(call)) return;
    u32 size = 0;
    while (usual[size]) size++;
    aici_host_return_process_result(address(usual), size);
}

EXPORT(_start) void start(void) {
    script_size = aici_host_read_blob(aici_host_module_arg(), address(script), sizeof script);
    play("start");
}
EXPORT(aici_init) void init(void) { play("init"); }
EXPORT(aici_create) u32 create(void) {
    play("create");
    return HANDLE;
}
EXPORT(aici_init_prompt) void prompt(u32 handle) { run(handle, "prompt", "{}"); }
EXPORT(aici_pre_process) void pre(u32 handle) {
    run(handle, "pre", "{\"attention_masks\":[[]],\"suspend\":false,\"ff_tokens\":[]}");
}
EXPORT(aici_mid_process) void mid(u32 handle) { run(handle, "mid", "{\"SampleWithBias\":{}}"); }
EXPORT(aici_post_process) void post(u32 handle) { run(handle, "post", "{\"stop\":false}"); }
EXPORT(aici_panic) void panic(void) { __builtin_trap(); }
