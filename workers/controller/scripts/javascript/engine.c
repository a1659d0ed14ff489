// QuickJS as a controller of the native ABI: one instance runs one script.
//
// boot.js defines the four calls and the interface of scripts in JavaScript. This file passes the
// calls of the host to boot.js, and gives boot.js an object `host` with the imports of the ABI. The
// worker runs tokenbus_boot once and stores the memory after it; every script starts from that
// memory with tokenbus_script. docs/controllers-reference.md describes the call block.

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "quickjs.h"

#define IMPORT(name) __attribute__((import_module("tokenbus"), import_name(name))) extern
#define EXPORT(name) __attribute__((export_name(name), used, visibility("default")))

IMPORT("log") void host_log(const char *text, uint32_t n);
IMPORT("fail") void host_fail(const char *text, uint32_t n);
IMPORT("seq_id") uint32_t host_seq_id(void);
IMPORT("special_token") int32_t host_special_token(uint32_t number);
IMPORT("tokenize") uint32_t host_tokenize(const void *, uint32_t n, uint32_t *into, uint32_t most);
IMPORT("token_bytes")
uint32_t host_token_bytes(const uint32_t *tokens, uint32_t n, void *into, uint32_t most,
                          uint32_t *lengths);
IMPORT("send") void host_send(const char *text, uint32_t n);
IMPORT("receive") int32_t host_receive(void *into, uint32_t most);
IMPORT("var_get")
int32_t host_var_get(const char *name, uint32_t n, void *into, uint32_t most, uint32_t *version);
IMPORT("var_set")
int32_t host_var_set(const char *name, uint32_t n, const void *value, uint32_t size, int32_t when,
                     uint32_t *version);
IMPORT("var_append")
int32_t host_var_append(const char *name, uint32_t n, const void *value, uint32_t size,
                        int32_t when, uint32_t *version);
// For scripts only: the tokens that may follow a text under a built-in constraint. Returns flags, or
// REFUSED and the length of an error, which is written in place of the mask.
IMPORT("next_tokens")
uint32_t host_next_tokens(const char *kind, uint32_t kind_n, const char *argument, uint32_t n,
                          const uint32_t *text, uint32_t count, void *mask, uint32_t size);

IMPORT("tool_call")
uint32_t host_tool_call(const char *tool, uint32_t n, const void *arguments, uint32_t size,
                        char *record, uint32_t most);

enum { VERSION, INBOX, INBOX_SIZE, COUNT, BACKTRACK, SEQ, ARG, VOCABULARY };
enum { N = 8, LIST, DROP, MASK, EOS, MAX_TOKENS, BIAS, PAIRS };
enum { FIRST_INBOX = 4096, STACK_BYTES = 192 * 1024, MAX_INPUT_BYTES = 32768 };

static const uint32_t REFUSED = 0x80000000;

static uint32_t block[16];
static uint32_t first_inbox[FIRST_INBOX / 4];
static JSRuntime *runtime;
static JSContext *context;
static JSValue calls;   // the object with the functions that boot.js defines
static JSValue exported;  // the names that the modules "aici" and "tokenbus" export

// A buffer that keeps an answer until the host has read it.
typedef struct kept {
    void *data;
    size_t size;
} kept;
static kept kept_list, kept_mask, kept_bias;

static void *keep(kept *buffer, const void *data, size_t size) {
    if (size > buffer->size || !buffer->data) {
        free(buffer->data);
        buffer->size = size < 256 ? 256 : size;
        buffer->data = malloc(buffer->size);
        if (!buffer->data) host_fail("out of memory", 13);
    }
    if (data) memcpy(buffer->data, data, size);
    return buffer->data;
}

// --- errors --------------------------------------------------------------------------------------

// Ends the sequence with the pending exception as its error. boot.js formats the error.
static void fail(void) {
    JSValue error = JS_GetException(context);
    JSValue describe = JS_GetPropertyStr(context, calls, "describe");
    JSValue text = JS_IsFunction(context, describe)
                       ? JS_Call(context, describe, JS_UNDEFINED, 1, &error)
                       : JS_ToString(context, error);
    size_t n;
    const char *said = JS_ToCStringLen(context, &n, JS_IsException(text) ? error : text);
    if (said) host_fail(said, n);
    host_fail("the script failed, and its error cannot be shown", 48);
}

static void run_jobs(void) {
    JSContext *of;
    for (;;) {
        int ran = JS_ExecutePendingJob(runtime, &of);
        if (ran < 0) fail();
        if (ran <= 0) return;
    }
}

static JSValue call(const char *name, int count, JSValue *arguments) {
    JSValue function = JS_GetPropertyStr(context, calls, name);
    JSValue result = JS_Call(context, function, calls, count, arguments);
    JS_FreeValue(context, function);
    for (int i = 0; i < count; i++) JS_FreeValue(context, arguments[i]);
    if (JS_IsException(result)) fail();
    return result;
}

static int32_t call_phase(const char *name, int count, JSValue *arguments) {
    block[N] = block[LIST] = block[DROP] = block[MASK] = block[BIAS] = block[PAIRS] = 0;
    JS_UpdateStackTop(runtime);
    int32_t action = 0;
    JSValue result = call(name, count, arguments);
    if (JS_ToInt32(context, &action, result)) fail();
    return action;
}

// --- values --------------------------------------------------------------------------------------

static JSValue array_of(const uint32_t *numbers, uint32_t n) {
    JSValue array = JS_NewArray(context);
    for (uint32_t i = 0; i < n; i++)
        JS_DefinePropertyValueUint32(context, array, i, JS_NewInt64(context, numbers[i]),
                                     JS_PROP_C_W_E);
    return array;
}

// Returns the numbers of an array, which the caller frees; NULL if an exception is pending.
static uint32_t *numbers_of(JSValueConst array, uint32_t *n) {
    JSValue length = JS_GetPropertyStr(context, array, "length");
    if (JS_ToUint32(context, n, length)) return NULL;
    JS_FreeValue(context, length);
    uint32_t *numbers = malloc(4 * (size_t)*n + 4);
    if (!numbers) {
        JS_ThrowOutOfMemory(context);
        return NULL;
    }
    for (uint32_t i = 0; i < *n; i++) {
        JSValue item = JS_GetPropertyUint32(context, array, i);
        if (JS_ToUint32(context, numbers + i, item)) {
            free(numbers);
            return NULL;
        }
        JS_FreeValue(context, item);
    }
    return numbers;
}

// The bytes of a text, an ArrayBuffer or a typed array.
typedef struct bytes {
    const uint8_t *data;
    size_t size;
    const char *text;
} bytes;

static bool bytes_of(JSValueConst value, bytes *found) {
    found->text = NULL;
    if (JS_IsString(value)) {
        found->text = JS_ToCStringLen(context, &found->size, value);
        found->data = (const uint8_t *)found->text;
        return found->text != NULL;
    }
    size_t offset = 0, size = 0;
    JSValue buffer = JS_GetTypedArrayBuffer(context, value, &offset, &size, NULL);
    if (JS_IsException(buffer)) {
        JS_FreeValue(context, JS_GetException(context));
        found->data = JS_GetArrayBuffer(context, &found->size, value);
        if (found->data) return true;
        JS_FreeValue(context, JS_GetException(context));
        JS_ThrowTypeError(context, "expected a text or bytes");
        return false;
    }
    size_t whole;
    const uint8_t *data = JS_GetArrayBuffer(context, &whole, buffer);
    JS_FreeValue(context, buffer);
    found->data = data + offset;
    found->size = size;
    return data != NULL;
}

static void release(bytes *found) {
    if (found->text) JS_FreeCString(context, found->text);
}

// --- the object `host` ---------------------------------------------------------------------------

#define NATIVE(name) \
    static JSValue name(JSContext *ctx, JSValueConst self, int argc, JSValueConst *argv)

NATIVE(js_tokenize) {
    bytes text;
    if (!bytes_of(argv[0], &text)) return JS_EXCEPTION;
    // A text has at most as many tokens as bytes, except if the vocabulary lacks a byte.
    uint32_t most = text.size + 16;
    uint32_t *tokens = malloc(4 * (size_t)most);
    if (!tokens) return JS_ThrowOutOfMemory(ctx);
    uint32_t n = host_tokenize(text.data, text.size, tokens, most);
    if (n > most) {
        free(tokens);
        tokens = malloc(4 * (size_t)n);
        if (!tokens) return JS_ThrowOutOfMemory(ctx);
        n = host_tokenize(text.data, text.size, tokens, n);
    }
    JSValue array = array_of(tokens, n);
    free(tokens);
    release(&text);
    return array;
}

// The concatenated bytes of tokens, as a text or as an ArrayBuffer.
static JSValue joined(JSValueConst array, bool as_text) {
    uint32_t n;
    uint32_t *tokens = numbers_of(array, &n);
    if (!tokens) return JS_EXCEPTION;
    uint32_t most = 16 * n + 64;
    char *data = malloc(most);
    if (!data) return JS_ThrowOutOfMemory(context);
    uint32_t size = host_token_bytes(tokens, n, data, most, NULL);
    if (size > most) {
        free(data);
        data = malloc(size);
        if (!data) return JS_ThrowOutOfMemory(context);
        host_token_bytes(tokens, n, data, size, NULL);
    }
    JSValue made = as_text ? JS_NewStringLen(context, data, size)
                           : JS_NewArrayBufferCopy(context, (uint8_t *)data, size);
    free(tokens);
    free(data);
    return made;
}

NATIVE(js_text) { return joined(argv[0], true); }
NATIVE(js_bytes) { return joined(argv[0], false); }

NATIVE(js_encode) {
    bytes text;
    if (!bytes_of(argv[0], &text)) return JS_EXCEPTION;
    JSValue made = JS_NewArrayBufferCopy(ctx, text.data, text.size);
    release(&text);
    return made;
}

NATIVE(js_decode) {
    bytes data;
    if (!bytes_of(argv[0], &data)) return JS_EXCEPTION;
    JSValue made = JS_NewStringLen(ctx, (const char *)data.data, data.size);
    release(&data);
    return made;
}

NATIVE(js_log) {
    bytes text;
    if (!bytes_of(argv[0], &text)) return JS_EXCEPTION;
    host_log((const char *)text.data, text.size);
    release(&text);
    return JS_UNDEFINED;
}

NATIVE(js_send) {
    bytes text;
    if (!bytes_of(argv[0], &text)) return JS_EXCEPTION;
    host_send((const char *)text.data, text.size);
    release(&text);
    return JS_UNDEFINED;
}

// receive(): the next input of the client, or null.
NATIVE(js_receive) {
    char *data = malloc(MAX_INPUT_BYTES);
    if (!data) return JS_ThrowOutOfMemory(ctx);
    int32_t size = host_receive(data, MAX_INPUT_BYTES);
    JSValue text = size < 0 ? JS_NULL : JS_NewStringLen(ctx, data, size);
    free(data);
    return text;
}

NATIVE(js_seq) { return JS_NewInt64(ctx, host_seq_id()); }

NATIVE(js_word) {
    uint32_t index = 0;
    JS_ToUint32(ctx, &index, argv[0]);
    return JS_NewInt64(ctx, (int32_t)block[index & 15]);
}

NATIVE(js_special) {
    uint32_t number = 0;
    JS_ToUint32(ctx, &number, argv[0]);
    return JS_NewInt32(ctx, host_special_token(number));
}

// varGet(name): null, or [version, bytes].
NATIVE(js_var_get) {
    bytes name;
    if (!bytes_of(argv[0], &name)) return JS_EXCEPTION;
    uint32_t version = 0, most = 256;
    char *data = malloc(most);
    int32_t size = host_var_get((const char *)name.data, name.size, data, most, &version);
    while (size > (int32_t)most) {
        most = size;
        data = realloc(data, most);
        if (!data) return JS_ThrowOutOfMemory(ctx);
        size = host_var_get((const char *)name.data, name.size, data, most, &version);
    }
    JSValue found = JS_NULL;
    if (size >= 0) {
        found = JS_NewArray(ctx);
        JS_SetPropertyUint32(ctx, found, 0, JS_NewInt64(ctx, version));
        JS_SetPropertyUint32(ctx, found, 1, JS_NewArrayBufferCopy(ctx, (uint8_t *)data, size));
    }
    free(data);
    release(&name);
    return found;
}

// varWrite(name, value, append, when): [whether it was written, version].
NATIVE(js_var_write) {
    bytes name, value;
    int32_t when = -1;
    if (!bytes_of(argv[0], &name) || !bytes_of(argv[1], &value)) return JS_EXCEPTION;
    if (JS_ToInt32(ctx, &when, argv[3])) return JS_EXCEPTION;
    uint32_t version = 0;
    int32_t ok = (JS_ToBool(ctx, argv[2]) ? host_var_append : host_var_set)(
        (const char *)name.data, name.size, value.data, value.size, when, &version);
    release(&name);
    release(&value);
    JSValue written = JS_NewArray(ctx);
    JS_SetPropertyUint32(ctx, written, 0, JS_NewBool(ctx, ok));
    JS_SetPropertyUint32(ctx, written, 1, JS_NewInt64(ctx, version));
    return written;
}

// nextTokens(kind, argument, text): [flags, mask].
NATIVE(js_next_tokens) {
    bytes kind, argument;
    uint32_t n;
    uint32_t *text = numbers_of(argv[2], &n);
    if (!text) return JS_EXCEPTION;
    size_t size = 4 * ((block[VOCABULARY] + 31) / 32);
    void *mask = malloc(size);
    if (!mask) return JS_ThrowOutOfMemory(ctx);
    if (!bytes_of(argv[0], &kind) || !bytes_of(argv[1], &argument)) return JS_EXCEPTION;
    uint32_t flags =
        host_next_tokens((const char *)kind.data, kind.size, (const char *)argument.data,
                         argument.size, text, n, mask, size);
    release(&kind);
    release(&argument);
    free(text);
    if (flags & REFUSED) {
        JS_ThrowTypeError(ctx, "%.*s", (int)(flags & ~REFUSED), (const char *)mask);
        free(mask);
        return JS_EXCEPTION;
    }
    JSValue found = JS_NewArray(ctx);
    JS_SetPropertyUint32(ctx, found, 0, JS_NewInt64(ctx, flags));
    JS_SetPropertyUint32(ctx, found, 1, JS_NewArrayBufferCopy(ctx, mask, size));
    free(mask);
    return found;
}

// toolCall(tool, json): the name of the variable that will have the answer.
NATIVE(js_tool_call) {
    bytes tool, given;
    if (!bytes_of(argv[0], &tool) || !bytes_of(argv[1], &given)) return JS_EXCEPTION;
    char record[64];
    uint32_t n = host_tool_call((const char *)tool.data, tool.size, given.data, given.size, record,
                                sizeof record);
    release(&tool);
    release(&given);
    return JS_NewStringLen(ctx, record, n);
}

NATIVE(js_jobs) {
    run_jobs();
    return JS_UNDEFINED;
}

// Each of these functions writes a part of an answer to the call block: tokens, the number of
// sequences of a fork, the number of dropped tokens, a mask, a bias, or JSON.

NATIVE(js_tokens) {
    uint32_t n;
    uint32_t *tokens = numbers_of(argv[0], &n);
    if (!tokens) return JS_EXCEPTION;
    block[LIST] = (uint32_t)(uintptr_t)keep(&kept_list, tokens, 4 * (size_t)n);
    block[N] = n;
    free(tokens);
    return JS_UNDEFINED;
}

NATIVE(js_count) {
    JS_ToUint32(ctx, &block[N], argv[0]);
    return JS_UNDEFINED;
}

NATIVE(js_drop) {
    JS_ToUint32(ctx, &block[DROP], argv[0]);
    return JS_UNDEFINED;
}

NATIVE(js_mask) {
    bytes mask;
    if (!bytes_of(argv[0], &mask)) return JS_EXCEPTION;
    size_t size = 4 * ((block[VOCABULARY] + 31) / 32);
    if (mask.size != size)
        return JS_ThrowRangeError(ctx, "a mask of this vocabulary has %d bytes", (int)size);
    block[MASK] = (uint32_t)(uintptr_t)keep(&kept_mask, mask.data, size);
    release(&mask);
    return JS_UNDEFINED;
}

NATIVE(js_bias) {
    bytes bias;
    if (!bytes_of(argv[0], &bias)) return JS_EXCEPTION;
    uint32_t pairs = 0;
    if (JS_ToUint32(ctx, &pairs, argv[1])) return JS_EXCEPTION;
    size_t size = pairs ? 8 * (size_t)pairs : 4 * (size_t)block[VOCABULARY];
    if (bias.size != size)
        return JS_ThrowRangeError(ctx, "the bias must have %d bytes", (int)size);
    block[BIAS] = (uint32_t)(uintptr_t)keep(&kept_bias, bias.data, size);
    block[PAIRS] = pairs;
    release(&bias);
    return JS_UNDEFINED;
}

NATIVE(js_generate) {
    bytes text;
    if (!bytes_of(argv[0], &text)) return JS_EXCEPTION;
    block[LIST] = (uint32_t)(uintptr_t)keep(&kept_list, text.data, text.size);
    block[N] = text.size;
    release(&text);
    return JS_UNDEFINED;
}

static const JSCFunctionListEntry host_functions[] = {
    JS_CFUNC_DEF("tokenize", 1, js_tokenize), JS_CFUNC_DEF("text", 1, js_text),
    JS_CFUNC_DEF("bytes", 1, js_bytes),       JS_CFUNC_DEF("encode", 1, js_encode),
    JS_CFUNC_DEF("decode", 1, js_decode),     JS_CFUNC_DEF("log", 1, js_log),
    JS_CFUNC_DEF("seq", 0, js_seq),           JS_CFUNC_DEF("word", 1, js_word),
    JS_CFUNC_DEF("special", 1, js_special),   JS_CFUNC_DEF("varGet", 1, js_var_get),
    JS_CFUNC_DEF("varWrite", 4, js_var_write), JS_CFUNC_DEF("jobs", 0, js_jobs),
    JS_CFUNC_DEF("send", 1, js_send),         JS_CFUNC_DEF("receive", 0, js_receive),
    JS_CFUNC_DEF("toolCall", 2, js_tool_call),
    JS_CFUNC_DEF("tokens", 1, js_tokens),     JS_CFUNC_DEF("count", 1, js_count),
    JS_CFUNC_DEF("drop", 1, js_drop),         JS_CFUNC_DEF("mask", 1, js_mask),
    JS_CFUNC_DEF("bias", 2, js_bias),         JS_CFUNC_DEF("generate", 1, js_generate),
    JS_CFUNC_DEF("nextTokens", 3, js_next_tokens),
};

// --- modules -------------------------------------------------------------------------------------

static int fill_module(JSContext *ctx, JSModuleDef *module) {
    uint32_t n = 0;
    JSValue length = JS_GetPropertyStr(ctx, exported, "length");
    JS_ToUint32(ctx, &n, length);
    JSValue global = JS_GetGlobalObject(ctx);
    for (uint32_t i = 0; i < n; i++) {
        JSValue item = JS_GetPropertyUint32(ctx, exported, i);
        const char *name = JS_ToCString(ctx, item);
        JS_SetModuleExport(ctx, module, name, JS_GetPropertyStr(ctx, global, name));
        JS_FreeCString(ctx, name);
        JS_FreeValue(ctx, item);
    }
    JS_FreeValue(ctx, global);
    return 0;
}

static JSModuleDef *load_module(JSContext *ctx, const char *name, void *opaque) {
    if (strcmp(name, "aici") && strcmp(name, "tokenbus")) {
        JS_ThrowReferenceError(
            ctx, "a script cannot import '%s'; it can import 'tokenbus' and 'aici'", name);
        return NULL;
    }
    JSModuleDef *module = JS_NewCModule(ctx, name, fill_module);
    uint32_t n = 0;
    JSValue length = JS_GetPropertyStr(ctx, exported, "length");
    JS_ToUint32(ctx, &n, length);
    for (uint32_t i = 0; module && i < n; i++) {
        JSValue item = JS_GetPropertyUint32(ctx, exported, i);
        const char *text = JS_ToCString(ctx, item);
        JS_AddModuleExport(ctx, module, text);
        JS_FreeCString(ctx, text);
        JS_FreeValue(ctx, item);
    }
    return module;
}

// --- exports -------------------------------------------------------------------------------------

// The text in the inbox, which ends with a 0 byte.
static char *inbox_text(void) {
    char *text = malloc((size_t)block[COUNT] + 1);
    if (!text) host_fail("out of memory", 13);
    memcpy(text, (void *)(uintptr_t)block[INBOX], block[COUNT]);
    text[block[COUNT]] = 0;
    return text;
}

EXPORT("tokenbus_abi_v1") uint32_t *export_abi(void) {
    block[VERSION] = 1;
    if (!block[INBOX]) {
        block[INBOX] = (uint32_t)(uintptr_t)first_inbox;
        block[INBOX_SIZE] = FIRST_INBOX;
    }
    return block;
}

EXPORT("tokenbus_grow") int32_t export_grow(uint32_t size) {
    void *larger = malloc(size);
    if (!larger) return 0;
    if (block[INBOX] != (uint32_t)(uintptr_t)first_inbox) free((void *)(uintptr_t)block[INBOX]);
    block[INBOX] = (uint32_t)(uintptr_t)larger;
    block[INBOX_SIZE] = size;
    return 1;
}

// Creates the interpreter and runs the text in the inbox, which is boot.js.
EXPORT("tokenbus_boot") int32_t export_boot(void) {
    runtime = JS_NewRuntime();
    JS_SetMaxStackSize(runtime, STACK_BYTES);
    JS_UpdateStackTop(runtime);
    context = JS_NewContext(runtime);
    JS_SetModuleLoaderFunc(runtime, NULL, load_module, NULL);
    JSValue global = JS_GetGlobalObject(context);
    JSValue host = JS_NewObject(context);
    JS_SetPropertyFunctionList(context, host, host_functions,
                               sizeof host_functions / sizeof *host_functions);
    JS_SetPropertyStr(context, global, "host", host);
    char *text = inbox_text();
    calls = JS_UNDEFINED;
    calls = JS_Eval(context, text, block[COUNT], "boot.js", JS_EVAL_TYPE_GLOBAL);
    if (JS_IsException(calls)) {
        calls = JS_UNDEFINED;
        fail();
    }
    exported = JS_GetPropertyStr(context, calls, "exported");
    JSAtom name = JS_NewAtom(context, "host");
    JS_DeleteProperty(context, global, name, 0);
    JS_FreeAtom(context, name);
    JS_FreeValue(context, global);
    free(text);
    return 1;
}

// Compiles the script in the inbox, and runs it unless block[BACKTRACK] is set.
EXPORT("tokenbus_script") int32_t export_script(void) {
    JS_UpdateStackTop(runtime);
    char *text = inbox_text();
    JSValue code = JS_Eval(context, text, block[COUNT], "script",
                           JS_EVAL_TYPE_MODULE | JS_EVAL_FLAG_COMPILE_ONLY);
    free(text);
    if (JS_IsException(code)) fail();
    if (block[BACKTRACK]) return 1;
    JSValue done = JS_EvalFunction(context, code);
    if (JS_IsException(done)) fail();
    JS_FreeValue(context, done);
    return 1;
}

EXPORT("tokenbus_init_prompt") int32_t export_init(void) {
    const uint32_t *prompt = (const uint32_t *)(uintptr_t)block[INBOX];
    JSValue arguments[2] = {
        array_of(prompt, block[COUNT]),
        JS_NewStringLen(context, (const char *)(prompt + block[COUNT]), block[ARG]),
    };
    return call_phase("init", 2, arguments);
}

EXPORT("tokenbus_pre_process") int32_t export_pre(void) { return call_phase("pre", 0, NULL); }

EXPORT("tokenbus_mid_process") int32_t export_mid(void) {
    JSValue group = array_of((const uint32_t *)(uintptr_t)block[INBOX], block[COUNT]);
    return call_phase("mid", 1, &group);
}

EXPORT("tokenbus_post_process") int32_t export_post(void) {
    JSValue arguments[2] = {
        array_of((const uint32_t *)(uintptr_t)block[INBOX], block[COUNT]),
        JS_NewInt64(context, block[BACKTRACK]),
    };
    return call_phase("post", 2, arguments);
}
