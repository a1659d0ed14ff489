// Makes the text one of the strings of a list, like the built-in constraint "choice".
//
//   python -m ziglang cc -target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536 -I workers/controller/sdk workers/controller/sdk/examples/choice.c -o choice.wasm
//
// The argument is JSON: a list of strings, or {"choices": [...]}. Only tokens that continue a
// choice are allowed; the end of the sequence is allowed only if the text is a choice. When only
// one choice is possible, the rest of this choice is appended as tokens of the model's tokenizer,
// without a forward pass for each token.
#include "tokenbus.h"

static tb_strings choices;
static const char *json, *json_end;

// --- the argument --------------------------------------------------------------------------------

static void refuse(const char *what) {
    tb_fail("choice: the argument must be [STRING, ...] or {\"choices\": [STRING, ...]}; %s", what);
}

static void skip_space(void) {
    while (json < json_end && (*json == ' ' || *json == '\t' || *json == '\n' || *json == '\r'))
        json++;
}

static bool take(char what) {
    skip_space();
    if (json == json_end || *json != what) return false;
    json++;
    return true;
}

static uint32_t hex4(void) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const char c = json < json_end ? *json++ : 0;
        const char lower = c | 0x20;
        if (c >= '0' && c <= '9')
            value = value * 16 + (uint32_t)(c - '0');
        else if (lower >= 'a' && lower <= 'f')
            value = value * 16 + (uint32_t)(lower - 'a' + 10);
        else
            refuse("\\u must have four hexadecimal digits");
    }
    return value;
}

static void append_utf8(tb_bytes *out, uint32_t code) {
    uint8_t bytes[4] = {(uint8_t)code};
    uint32_t n = 1;
    if (code >= 0x10000) {
        n = 4;
        bytes[0] = (uint8_t)(0xf0 | code >> 18);
    } else if (code >= 0x800) {
        n = 3;
        bytes[0] = (uint8_t)(0xe0 | code >> 12);
    } else if (code >= 0x80) {
        n = 2;
        bytes[0] = (uint8_t)(0xc0 | code >> 6);
    }
    for (uint32_t i = 1; i < n; i++) bytes[i] = 0x80 | (code >> 6 * (n - 1 - i) & 0x3f);
    tb_bytes_append(out, bytes, n);
}

static void read_escape(tb_bytes *out) {
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char c = json < json_end ? *json++ : 0;
    if (c == 'u') {
        uint32_t code = hex4();
        if (code >= 0xd800 && code < 0xdc00 && json_end - json >= 2 && json[0] == '\\' &&
            json[1] == 'u') {
            json += 2;
            const uint32_t low = hex4();
            if (low < 0xdc00 || low > 0xdfff) refuse("a \\u is half of a surrogate pair");
            code = 0x10000 + (code - 0xd800) * 0x400 + (low - 0xdc00);
        } else if (code >= 0xd800 && code < 0xe000) {
            refuse("a \\u is half of a surrogate pair");
        }
        append_utf8(out, code);
        return;
    }
    for (uint32_t i = 0; c && names[i]; i++)
        if (c == names[i]) {
            tb_bytes_append(out, meant + i, 1);
            return;
        }
    refuse("a string has an unknown escape");
}

static void read_string(tb_bytes *out) {
    if (!take('"')) refuse("an item is not a string");
    for (;;) {
        const char *from = json;
        while (json < json_end && *json != '"' && *json != '\\' && (uint8_t)*json >= 0x20) json++;
        tb_bytes_append(out, from, (uint32_t)(json - from));
        if (json == json_end || (uint8_t)*json < 0x20) refuse("a string is not terminated");
        if (*json++ == '"') return;
        read_escape(out);
    }
}

static bool empty_choice;  // whether the empty string is a choice; tb_strings cannot contain it

static void read_list(void) {
    if (!take('[')) refuse("there is no [ where the list must begin");
    if (take(']')) refuse("the list is empty");
    do {
        tb_bytes string = {0};
        read_string(&string);
        if (string.len)
            tb_strings_add(&choices, string.data, string.len);
        else
            empty_choice = true;
        tb_bytes_free(&string);
    } while (take(','));
    if (!take(']')) refuse("a comma between two strings or the ] after the last is missing");
}

static void read_argument(const char *arg, uint32_t len) {
    json = arg;
    json_end = arg + len;
    if (take('{')) {
        tb_bytes name = {0};
        read_string(&name);
        if (strcmp((const char *)name.data, "choices") || !take(':'))
            refuse("its only field must be \"choices\"");
        read_list();
        if (!take('}')) refuse("its only field must be \"choices\"");
        tb_bytes_free(&name);
    } else {
        read_list();
    }
    skip_space();
    if (json != json_end) refuse("text follows after the end of the JSON value");
    tb_strings_sort(&choices);
}

// --- the constraint ------------------------------------------------------------------------------

// The choices that begin with the text so far, which has `offset` bytes. In the sorted list, these
// choices have the indexes from `from` to `to` - 1.
typedef struct left {
    uint32_t from, to, offset;
} left;

static left choice_initial(void) { return (left){0, choices.count, 0}; }

static bool complete(left state) {
    if (!state.offset) return empty_choice;
    return choices.items[state.from].len == state.offset;
}

static bool narrow(left *state, uint8_t byte) {
    if (state->offset && complete(*state)) state->from++;
    return tb_strings_narrow(&choices, state->offset++, byte, &state->from, &state->to);
}

static left choice_append(left state, uint8_t byte) {
    narrow(&state, byte);
    return state;
}

static bool choice_byte_allowed(left state, uint8_t byte) { return narrow(&state, byte); }

static bool choice_special_allowed(left state, tb_special token) {
    return token == TB_EOS && complete(state);
}

TB_FUNCTIONAL_RECOGNIZER(choice, left)

// --- the controller ------------------------------------------------------------------------------

static tb_recognizer *recognizer;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    read_argument(arg, arg_len);
    recognizer = choice_recognizer();
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    const left state = *((choice_stack *)recognizer)->top;
    const bool one = state.to - state.from == 1 && !(empty_choice && !state.offset);
    if (!one || complete(state)) return tb_recognizer_mid(recognizer);
    const tb_string last = choices.items[state.from];
    const tb_tokens rest =
        tb_tokenize(choices.text.data + last.at + state.offset, last.len - state.offset);
    const tb_answer answer = tb_splice(0, rest.ids, rest.n);
    tb_free(rest.ids);
    return answer;
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)backtrack;
    return tb_recognizer_post(recognizer, tokens, n);
}
