"""The layers of the SDK for C: masks compared with brute force, the trie, memory, text,
variables."""

from __future__ import annotations

import struct

import pytest
import wasmtime
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.wasm.native import NativeProgram

from ....counts import examples
from ..played import BYTES, EOS, WORDS, Run, Steered, engine, program, says
from ..wasm.guests import compile_guest

pytestmark = pytest.mark.process

# --- layers ---------------------------------------------------------------------------------------

STRINGS = r"""
#include "tokenbus.h"

// The argument has rules: from, to (digits) and a string that ends with a newline; "from!" accepts.
static const char *rules;
static uint32_t machine_initial(void) { return 0; }

static const char *rule(const char *at, uint32_t *from, uint32_t *to, uint32_t *len) {
    *from = (uint32_t)(at[0] - '0');
    *to = at[1] == '!' ? TB_NONE : (uint32_t)(at[1] - '0');
    for (*len = 0; at[2 + *len] != '\n';) ++*len;
    return at + 2;
}

static uint32_t machine_append(uint32_t state, const char *suffix, uint32_t n) {
    uint32_t from, to, len;
    for (const char *at = rules, *text; *at; at = text + len + 1) {
        text = rule(at, &from, &to, &len);
        if (from == state && to != TB_NONE && len == n && !memcmp(text, suffix, n)) return to;
    }
    tb_fail("%.*s was not allowed", n, suffix);
}

static void machine_allowed(uint32_t state, tb_strings *strings) {
    uint32_t from, to, len;
    for (const char *at = rules, *text; *at; at = text + len + 1) {
        text = rule(at, &from, &to, &len);
        if (from == state && to != TB_NONE) tb_strings_add(strings, text, len);
    }
}

static bool machine_special_allowed(uint32_t state, tb_special token) {
    uint32_t from, to, len;
    for (const char *at = rules, *text; *at; at = text + len + 1) {
        text = rule(at, &from, &to, &len);
        if (from == state && to == TB_NONE) return token == TB_EOS;
    }
    return false;
}

TB_STRING_RECOGNIZER(machine, uint32_t)

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    tb_bytes kept = {0};
    tb_bytes_append(&kept, arg, arg_len);
    rules = (const char *)kept.data;
    tb_use_recognizer(machine_recognizer());
}
"""

Rules = dict[tuple[int, bytes], int]
rules = st.dictionaries(
    st.tuples(st.integers(0, 3), st.text("ab", min_size=1, max_size=4).map(str.encode)),
    st.integers(0, 3),
    max_size=10,
)


def readings(rules: Rules, accepting: set[int], text: bytes) -> set[tuple[int, bytes]]:
    """The possible readings of a text, except those that no text can follow. A reading is a state
    and the bytes of a string that has begun."""
    live = accepting | {state for state, _ in rules}
    found = {(0, b"")} & {(state, b"") for state in live}
    for byte in text:
        following = set()
        for state, begun in found:
            grown = begun + bytes([byte])
            for (source, string), target in rules.items():
                if source != state:
                    continue
                if string == grown and target in live:
                    following.add((target, b""))
                if string.startswith(grown) and string != grown:
                    following.add((state, grown))
        found = following
    return found


@settings(max_examples=examples(50))
@given(rules, st.sets(st.integers(0, 3)), st.data())
def test_masks_of_a_string_recognizer_are_those_of_brute_force(
    rules: Rules, accepting: set[int], data: st.DataObject
) -> None:
    tokens = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"abab", b"bb", b"aaaa", b"c", b"ab"]
    lines = [b"%d%d%s\n" % (source, to, string) for (source, string), to in rules.items()]
    lines += [b"%d!\n" % state for state in accepting]
    sequence = Steered(STRINGS, tokens, b"".join(lines))
    sequence.begin()
    text = b""
    for _ in range(8):
        fits = {i for i, t in enumerate(tokens) if t and readings(rules, accepting, text + t)}
        now = readings(rules, accepting, text)
        if any(state in accepting and not begun for state, begun in now):
            fits.add(EOS)
        if not fits:
            with pytest.raises(ControllerError, match="any token of this vocabulary"):
                sequence.mid()
            return
        assert sequence.mid() == fits
        token = data.draw(st.sampled_from(sorted(fits)))
        if token == EOS:
            return
        assert sequence.post([token]) is Action.CONTINUE
        text += tokens[token]


GENERAL = r"""
#include "tokenbus.h"

// A byte stack of the guest, without the optional calls. It allows brackets that match.
static uint8_t stack[1024];
static uint32_t depth;

static void push(tb_recognizer *self, uint8_t byte) {
    (void)self;
    const uint8_t open = stack[depth];
    stack[++depth] = (uint8_t)(byte == '(' ? open + 1 : byte == ')' ? open - 1 : open);
}
static void pop(tb_recognizer *self, uint32_t n) { (void)self, depth -= n; }
static void collapse(tb_recognizer *self) { (void)self, stack[0] = stack[depth], depth = 0; }
static bool allowed(tb_recognizer *self, uint8_t byte) {
    (void)self;
    return (byte == '(' && stack[depth] < 4) || (byte == ')' && stack[depth] > 0) || byte == 'x';
}
static bool special(tb_recognizer *self, tb_special token) {
    (void)self, (void)token;
    return stack[depth] == 0;
}
static void finished(tb_recognizer *self) {
    (void)self;
    tb_log("%u,", depth);
}
static tb_recognizer brackets = {push, pop, collapse, allowed, special, finished, 0, 0};

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_use_recognizer(&brackets);
}
"""


def brackets(text: bytes) -> int | None:
    """The number of open brackets; None if the text is not valid."""
    open_ = 0
    for byte in text:
        if byte not in b"()x" or not 0 <= (open_ := open_ + {40: 1, 41: -1}.get(byte, 0)) <= 4:
            return None
    return open_


@settings(max_examples=examples(30))
@given(st.lists(st.text("()xy", min_size=1, max_size=7).map(str.encode)), st.data())
def test_masks_of_a_byte_stack_are_those_of_brute_force(
    more: list[bytes], data: st.DataObject
) -> None:
    tokens = [b"", b"(", b")", b"x", *more]
    sequence = Steered(GENERAL, tokens)
    sequence.begin()
    text = b""
    for _ in range(6):
        fits = {i for i, t in enumerate(tokens) if t and brackets(text + t) is not None}
        assert sequence.mid() == (fits | {EOS} if brackets(text) == 0 else fits)
        assert sequence.log.take() == "0,", "the stack is as it was before the walk"
        token = data.draw(st.sampled_from(sorted(fits)))
        text += tokens[token]
        sequence.post([token])


def test_a_token_that_a_recognizer_does_not_allow_is_refused() -> None:
    sequence = Steered(GENERAL, [b"", b"(", b")", b"x", b"(y"])
    sequence.begin()
    with pytest.raises(ControllerError, match="token 4 was appended"):
        sequence.post([4])


TRIE = r"""
#include "tokenbus.h"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    tb_log("%u %u\n", tb_vocab_size(), tb_special_token(TB_EOS));
    for (uint32_t token = 0; token < tb_vocab_size(); token++) {
        uint32_t len;
        const uint8_t *bytes = tb_token(token, &len);
        for (uint32_t i = 0; i < len; i++) tb_log("%02x", bytes[i]);
        tb_log("\n");
    }
    for (const tb_node *c = tb_first_child(tb_trie_root()); c; c = tb_next_child(tb_trie_root(), c))
        tb_log("%02x", tb_node_byte(c));
    tb_log("\n");
    tb_tokens tokens;
    if (!tb_tokenize_greedy((const uint8_t *)arg, arg_len, &tokens)) tb_log("none");
    for (uint32_t i = 0; i < tokens.n; i++) tb_log("%u ", tokens.ids[i]);
}
"""


@settings(max_examples=examples(30))
@given(
    st.lists(st.binary(max_size=6).map(lambda b: bytes(x % 4 for x in b)), max_size=30),
    st.binary(max_size=12).map(lambda b: bytes(x % 4 for x in b)),
)
def test_the_trie_tells_tokens_and_tokenizes_by_the_longest_match(
    more: list[bytes], text: bytes
) -> None:
    tokens = [b"", *more]
    said = Steered(TRIE, tokens, text).begin().split("\n")
    assert said[0] == f"{len(tokens)} {EOS}"
    assert [bytes.fromhex(line) for line in said[1 : 1 + len(tokens)]] == tokens
    firsts = list(bytes.fromhex(said[1 + len(tokens)]))
    assert sorted(set(firsts)) == sorted({token[0] for token in tokens if token})
    written = []
    rest = text
    while rest and (fits := [t for t in tokens if t and rest.startswith(t)]):
        written.append(max(fits, key=len))
        rest = rest[len(written[-1]) :]
    if rest:
        assert said[-1] == "none"
    else:
        assert [tokens[int(token)] for token in said[-1].split()] == written


def broken(blob: bytes, word: int, value: int) -> bytes:
    return blob[: 4 * word] + struct.pack("<I", value) + blob[4 * word + 4 :]


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (0, 7, "does not begin with 0x558b6fd3"),
        (1, 24, "does not begin with"),
        (2, 0xFFFFFFF8, "are not its"),
        (4, 0, "are not its"),
        (5, 5, "in a vocabulary of 4"),
        (7 + 1, 0x300, "the root's subtree"),
        (7 + 3, 0x900 | 1, "more than its parent"),
        (7 + 3, 0x200 | 2, "ends 1 levels"),
        (7 + 2, (1 << 8) | ord("z"), "order of bytes"),
        (7 + 2, (9 << 8) | ord("a"), "not in the vocabulary"),
        (7 + 4, (1 << 8) | ord("b"), "occurs twice"),
        (7 + 2, (0xFFFFFF << 8) | ord("a"), "token 1 has bytes, but is not at a node"),
        (7 + 8 + 1, 0x10001, "are not in its data"),
        (7 + 8 + 2, 0x101, "its node is at depth 2"),
    ],
)
def test_a_token_trie_of_another_form_is_refused(word: int, value: int, says: str) -> None:
    tokens = [b"", b"a", b"ab", b"c"]
    sequence = Steered(TRIE, tokens)
    # The words of the header, of the nodes root, a, ab and c, and of four offsets.
    assert len(sequence.vocabulary.trie) == 4 * (7 + 8 + 4) + 4
    sequence.vocabulary.trie = broken(sequence.vocabulary.trie, word, value)
    with pytest.raises(ControllerError, match=says):
        sequence.begin()


# --- memory, text, the calls ----------------------------------------------------------------------

MEMORY = r"""
#include "tokenbus.h"

// Blocks that are written to their ends, freed and grown in an order without a pattern.
enum { BLOCKS = 64 };
static uint8_t *blocks[BLOCKS];
static uint32_t sizes[BLOCKS];

static void check(uint32_t i) {
    for (uint32_t k = 0; k < sizes[i]; k++)
        if (blocks[i][k] != (uint8_t)(i * 7 + 1)) tb_fail("block %u changed at %u", i, k);
}

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    uint32_t chance = 1;
    for (int round = 0; round < 20000; round++) {
        chance = chance * 1664525 + 1013904223;
        const uint32_t i = chance >> 8 & 63, kind = chance >> 16 & 3;
        const uint32_t size = 1u << (chance >> 20 & 15) | (chance >> 24);
        check(i);
        if (kind == 0) {
            tb_free(blocks[i]);
            blocks[i] = 0;
            sizes[i] = 0;
        } else if (kind == 1 || !blocks[i]) {
            tb_free(blocks[i]);
            blocks[i] = tb_alloc(size);
        } else {
            blocks[i] = tb_realloc(blocks[i], size);
        }
        if (!blocks[i]) continue;
        if ((uintptr_t)blocks[i] % 8) tb_fail("block %u is not aligned", i);
        // The earlier content is still there, up to the smaller of the two sizes.
        for (uint32_t k = 0; kind > 1 && k < sizes[i] && k < size; k++)
            if (blocks[i][k] != (uint8_t)(i * 7 + 1)) tb_fail("block %u lost byte %u", i, k);
        sizes[i] = size;
        memset(blocks[i], (int)(i * 7 + 1), size);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) check(i);
    tb_log("%u pages", (uint32_t)__builtin_wasm_memory_size(0));
    char across[] = "abcdef";
    memmove(across + 1, across, 4);
    memmove(across, across + 3, 3);
    tb_log(" %s %d %d", across, memcmp("ab", "b", 1) < 0, strcmp("ab", "ab"));
    if (tb_try_alloc(1u << 30)) tb_log("more than there is");
    tb_alloc(60000000);
    tb_alloc(60000000);
}
"""


def test_the_allocator_keeps_what_is_in_blocks_and_uses_freed_ones_again() -> None:
    sequence = Steered(MEMORY, BYTES)
    with pytest.raises(ControllerError, match="out of memory: 60000000 bytes more"):
        sequence.begin()
    pages, *rest = sequence.log.take().split()
    assert int(pages) < 100, "64 blocks of at most 33 kB"
    assert rest == ["pages", "cdfcdf", "1", "0"]


TEXT = r"""
#include "tokenbus.h"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    tb_log("%d|%5d|%05d|%u|%x|%04x|%c|%s|%.*s|%%|%lld|%llu|%lu\n", -7, -42, -42, 4294967295u,
           0xbeefu, 0xau, 'c', "text", 2, "abc", -9223372036854775807ll - 1, ~0ull, 5ul);
    tb_log("%u %u %u %s %u\n", n, prompt[0], prompt[n - 1], arg_len > 20 ? "long" : arg, arg_len);
    tb_log("%u %u\n", tb_seq_id(), tb_max_tokens());
    tb_log("%u %d\n", tb_find("banana", 6, "an", 2, 2), (int)tb_find("banana", 6, "x", 1, 0));
    uint32_t number = 0;
    const char *at = "42 ", *big = "4294967296";
    const bool read = tb_read_number(&at, at + 3, &number);
    tb_log("%d %u '%s' %d\n", read, number, at, tb_read_number(&big, big + 10, &number));
    const tb_tokens tokens = tb_tokenize("the cat", 7);
    for (uint32_t i = 0; i < tokens.n; i++) tb_log("%u ", tokens.ids[i]);
    tb_bytes text = {0};
    tb_token_bytes(tokens.ids, tokens.n, &text);
    tb_log("%s\n", text.data);
}
"""


def test_formats_the_prompt_and_the_argument_arrive() -> None:
    said = Steered(TEXT, WORDS, "arg").begin([5, 6, 7]).split("\n")
    assert said[0] == (
        "-7|  -42|-0042|4294967295|beef|000a|c|text|ab|%|-9223372036854775808|"
        "18446744073709551615|5"
    )
    assert said[1:5] == ["3 5 7 arg 3", "0 100", "3 -1", "1 42 ' ' 0"]
    assert said[5] == f"{WORDS.index(b'the ')} {WORDS.index(b'cat')} the cat"
    # The first inbox is too small for this prompt, and just large enough for the next one.
    said = Steered(TEXT, WORDS, "a" * 9_000).begin(range(50_000)).split("\n")
    assert said[1] == "50000 0 49999 long 9000"
    assert Steered(TEXT, WORDS, "arg!").begin([9] * 1023).split("\n")[1] == "1023 9 9 arg! 4"


ONE_FORMAT = r"""
#include "tokenbus.h"
#pragma clang diagnostic ignored "-Wformat-nonliteral"
#pragma clang diagnostic ignored "-Wformat-security"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)arg_len;
    if (n) tb_fail(arg, 1.5);
    tb_log(arg, 1.5);
}
"""


@pytest.mark.parametrize(
    ("given", "kind"),
    [("half: %f", "f"), ("%5.2f", "f"), ("%p", "p"), ("%-8d", "-"), ("%X", "X"), ("%hu", "h")],
)
def test_a_format_that_there_is_not_is_refused_by_name(given: str, kind: str) -> None:
    for prompt in ([], [1]):
        with pytest.raises(ControllerError) as told:
            Steered(ONE_FORMAT, BYTES, given).begin(prompt)
        assert f'the format "{given}" has a %{kind}; expected %d %i %u' in told.value.message


def test_a_percent_at_the_end_is_one() -> None:
    assert Steered(ONE_FORMAT, BYTES, "100%").begin() == "100%"


VARIABLES = r"""
#include "tokenbus.h"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_bytes value = {0};
    uint32_t version = 9;
    tb_log("%d ", tb_var_get("v", &value, &version));
    tb_log("%u ", tb_var_set("v", "one", 3));
    tb_log("%u ", tb_var_append("v", "two", 3));
    tb_log("%d %s %u ", tb_var_get("v", &value, &version), value.data, version);
    version = 1;
    tb_log("%d %u ", tb_var_set_when("v", "x", 1, &version), version);
    tb_log("%d %u ", tb_var_append_when("v", "3", 1, &version), version);
    version = 0;
    tb_log("%d %u ", tb_var_set_when("new", "", 0, &version), version);
    tb_log("%d %u ", tb_var_get("new", &value, 0), value.len);
    tb_bytes large = {0};
    tb_bytes_reserve(&large, 100000);
    memset(large.data, 'y', 100000);
    tb_var_set("large", large.data, 100000);
    tb_log("%d %u %c ", tb_var_get("large", &value, 0), value.len, value.data[99999]);
    tb_log("%d %u ", tb_var_wait("large", 1, &value), value.len);
    tb_log("%d %u %d", tb_var_wait("v", 3, &value), value.len, tb_var_wait("v", 4, &value));
}
"""


def test_variables_have_versions_and_any_length() -> None:
    said = Steered(VARIABLES, BYTES).begin().split()
    assert " ".join(said) == ("0 1 2 1 onetwo 2 0 2 1 3 1 1 1 0 1 100000 y 1 100000 1 7 0")


WRONG = r"""
#include "tokenbus.h"
tb_answer tb_pre_process(void) { return tb_splice(1, 0, 0); }
tb_answer tb_mid_process(const uint32_t *group, uint32_t n) {
    (void)group, (void)n;
    return tb_go_on();
}
tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)n, (void)backtrack;
    return tb_suspend();
}
"""


def test_an_answer_that_does_not_fit_its_call_is_refused_by_name() -> None:
    sequence = Steered(WRONG, BYTES)
    sequence.begin()
    with pytest.raises(ControllerError, match=r"tb_pre_process must return .* returned tb_splice"):
        sequence.controller.pre_process()
    sequence = Steered(WRONG, BYTES)
    with pytest.raises(
        ControllerError, match=r"tb_post_process must return .* returned tb_suspend"
    ):
        sequence.post([1])
    sequence = Steered(WRONG, BYTES)
    with pytest.raises(ControllerError, match=r"tb_mid_process must return .* returned tb_go_on"):
        sequence.controller.mid_process((0,), memoryview(bytearray(64)))


def test_a_fork_into_none_is_refused_and_one_into_one_is_none() -> None:
    source = '#include "tokenbus.h"\ntb_answer tb_pre_process(void) {{ return tb_fork({}); }}\n'
    run = Run(program(source.format(0)), WORDS, says("hi"))
    assert "tb_fork(0): the number counts this sequence too; expected 2 or more" in (run.ended[0])
    run = Run(program(source.format(1)), WORDS, says("hi"))
    assert (run.text(), run.ended) == ("hi", {0: "stop"})


RECURS = r"""
#include "tokenbus.h"
static uint32_t deep(uint32_t n) {
    volatile uint32_t own[16];
    own[n % 16] = n;
    return n ? deep(n - 1) + own[n % 16] : 0;
}
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_log("%u", deep(2000));
}
"""


def test_a_stack_that_is_used_up_is_reported_with_the_functions_and_may_be_made_larger() -> None:
    with pytest.raises(ControllerError, match="outside its memory, in deep < deep < deep"):
        Steered(RECURS, BYTES).begin()
    wasm = compile_guest(RECURS, "-Wl,-z,stack-size=1048576")
    run = Run(NativeProgram(engine, wasmtime.Module(engine, wasm)), WORDS, says("hi"))
    assert run.logs[0] == "2001000"


def test_a_module_that_defines_nothing_allows_everything() -> None:
    run = Run(program('#include "tokenbus.h"\n'), WORDS, says("hi"))
    assert (run.text(), run.ended) == ("hi", {0: "stop"})


SPECIAL = r"""
#include "tokenbus.h"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    for (tb_special token = TB_UNK; token <= TB_TURN_END; token++)
        tb_log("%d ", (int)tb_special_token(token));
}
"""


def test_a_guest_finds_the_special_tokens_of_the_model() -> None:
    """The guest logs the tokens in the order unk, pad, sep, bos, eos, cls, mask, turn_start,
    turn_end."""
    found = Steered(SPECIAL, BYTES).begin()
    assert found == f"-1 3 -1 1 {EOS} -1 {len(BYTES) - 1} -1 -1 "
    assert Steered(SPECIAL, BYTES, eos=-1).begin().split()[4] == "-1"


EVERYTHING = (
    STRINGS.replace("void tb_init_prompt", "static void with_strings")
    + r"""
static uint64_t all_initial(void) { return 0; }
static uint64_t all_append(uint64_t state, uint8_t byte) { return state * 31 + byte; }
static bool all_byte_allowed(uint64_t state, uint8_t byte) { return (state ^ byte) & 1; }
static bool all_special_allowed(uint64_t state, tb_special token) { return state || token; }
TB_FUNCTIONAL_RECOGNIZER(all, uint64_t)

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    with_strings(prompt, n, arg, arg_len);
    tb_recognizer *recognizer = arg_len > 5 ? all_recognizer() : machine_recognizer();
    if (arg_len > 7) recognizer->walk = 0;
    tb_use_recognizer(recognizer);
    tb_tokens tokens = tb_tokenize(arg, arg_len);
    tb_bytes text = {0};
    tb_token_bytes(tokens.ids, tokens.n, &text);
    tb_format(&text, "%d", (int)n);
    uint32_t version = tb_var_set("v", text.data, text.len) + tb_var_append("v", arg, arg_len);
    tb_var_set_when("v", arg, arg_len, &version);
    tb_var_append_when("v", arg, arg_len, &version);
    tb_var_get("v", &text, &version);
    tb_tokenize_greedy(text.data, text.len, &tokens);
    uint32_t *mask = tb_mask_new();
    tb_mask_set_all(mask);
    tb_log("%u %u %s", tb_mask_count(mask), tb_find(text.data, text.len, arg, arg_len, 0), arg);
    const char *at = arg;
    tb_read_number(&at, arg + arg_len, &version);
    tb_bytes_free(&text);
}

tb_answer tb_pre_process(void) {
    const uint32_t token = 1;
    if (tb_seq_id() == 1) return tb_append(&token, 1);
    return tb_seq_id() ? tb_suspend() : tb_fork(tb_max_tokens());
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    return n > 1 ? tb_splice(1, fork_group, n) : tb_recognizer_mid(tb_used);
}
"""
)


def test_all_layers_together_take_less_than_40_kb() -> None:
    wasm = compile_guest(EVERYTHING)
    print(f"all layers: {len(wasm)} bytes of Wasm")
    assert len(wasm) < 40_000
