"""The examples of the SDK for C, and the built-in ``choice``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import wasmtime
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.wasm.native import NativeProgram

from ....counts import examples
from ..played import BYTES, EOS, WORDS, Run, Steered, engine, program, says
from ..wasm.guests import ROOT, SDK

pytestmark = pytest.mark.process

EXAMPLES = sorted((SDK / "examples").glob("*.c"))
CHOICE = SDK / "examples/choice.c"


# --- the examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_compiles_with_the_line_in_its_head(path: Path, tmp_path: Path) -> None:
    line = next(line for line in path.read_text().splitlines() if "-m ziglang" in line)
    words = shlex.split(line.removeprefix("//"))
    assert words[0] == "python"
    assert words[-1] == f"{path.stem}.wasm"
    made = tmp_path / words[-1]
    subprocess.run([sys.executable, *words[1:-1], str(made)], cwd=ROOT, check=True)
    assert len(made.read_bytes()) < 40_000
    wasmtime.Module(engine, made.read_bytes())


def test_upper4_writes_every_fourth_letter_in_upper_case() -> None:
    run = Run(program(SDK / "examples/upper4.c"), WORDS, says("a tame cat sat"))
    assert run.ended == {0: "stop"}
    assert all(not c.islower() for c in run.text()[3::4])
    assert run.text()[:3] == "a t"


small_tokens = st.lists(
    st.binary(min_size=1, max_size=5).map(lambda b: bytes(97 + x % 5 for x in b))
)


@settings(max_examples=examples(30))
@given(small_tokens, st.data())
def test_masks_of_upper4_are_those_of_brute_force(more: list[bytes], data: st.DataObject) -> None:
    tokens = [b"", b"A", b"b", b"\xff", b"ab!", b"abcD", b"abcd", *more]
    sequence = Steered(SDK / "examples/upper4.c", tokens)
    sequence.begin()
    text = b""
    for _ in range(6):
        fits = {i for i, t in enumerate(tokens) if t and is_upper4(text + t)}
        assert sequence.mid() == fits | {EOS}
        token = data.draw(st.sampled_from(sorted(fits)))
        text += tokens[token]
        assert sequence.post([token]) is Action.CONTINUE
    assert sequence.post([EOS]) is Action.STOP


def is_upper4(text: bytes) -> bool:
    return not any(ord("a") <= byte <= ord("z") for byte in text[3::4])


def test_best_of_gives_sequence_0_the_best_text() -> None:
    texts = ("judge", "a", "bbb", "ccccc", "dd")
    run = Run(program(SDK / "examples/best_of.c"), WORDS, says(*texts), "4 20 longest")
    assert set(run.ended.values()) == {"stop"}
    assert len(run.tokens) == 5
    # Each sequence's first token is from its own share of the vocabulary. The other tokens are its
    # text.
    best = max(range(1, 5), key=lambda seq: len(run.text(seq)))
    assert run.text(0) == run.text(best)
    assert run.text(best).endswith("cccc")
    assert f"best of 4: text {best} " in run.logs[0]
    firsts = [run.tokens[seq][0] for seq in range(1, 5)]
    assert len({token % 4 for token in firsts}) == 4


def test_best_of_counts_a_word_and_stops_at_a_length() -> None:
    texts = ("judge", "xababab", "abxxxxxx", "yyyyyyyyyyyy")
    run = Run(program(SDK / "examples/best_of.c"), WORDS, says(*texts), "3 6 ab")
    assert all(len(tokens) == 6 for seq, tokens in run.tokens.items() if seq)
    counts = {seq: run.text(seq).count("ab") for seq in range(1, 4)}
    assert run.text(0) == run.text(max(counts, key=lambda seq: counts[seq]))


def test_best_of_refuses_an_argument_that_is_none() -> None:
    run = Run(program(SDK / "examples/best_of.c"), WORDS, says("x"), "many")
    assert '"N LENGTH WHAT"' in run.ended[0]


def test_backtrack_takes_a_word_back_and_writes_another() -> None:
    run = Run(program(SDK / "examples/backtrack.c"), WORDS, says("a cat sat"), "cat=horse")
    assert run.text() == "a horse sat"
    assert run.dropped == 3
    assert '"cat" at byte 2 was taken back' in run.logs[0]


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_backtrack_leaves_what_a_replacement_by_hand_leaves(said: list[int]) -> None:
    tokens = [*BYTES, b"xaa", b"ba", b"ab", b"aab", b"b"]
    first = len(BYTES)

    script = iter([first + choice for choice in said])
    text = ""
    for choice in said:
        text = (text + tokens[first + choice].decode()).replace("aab", "z")

    def choose(_seq: int, _tokens: list[int], _may: set[int]) -> int:
        return next(script, EOS)

    run = Run(program(SDK / "examples/backtrack.c"), tokens, choose, "aab=z", max_tokens=1000)
    assert run.text() == text


def test_backtrack_refuses_a_replacement_that_has_the_word_in_it() -> None:
    run = Run(program(SDK / "examples/backtrack.c"), WORDS, says("x"), "cat=tomcat")
    assert "replaced forever" in run.ended[0]


def test_two_forks_talk_through_a_variable() -> None:
    run = Run(program(SDK / "examples/talk.c"), WORDS, says("meow!", ", it said"), "And then: ")
    assert run.text(0) == "meow"
    assert run.text(1) == "And then: meow, it said"
    assert 'said "meow"' in run.logs[0]
    assert 'heard "meow"' in run.logs[1]
    assert run.ended == {0: "stop", 1: "stop"}


# --- choice ---------------------------------------------------------------------------------------


words = st.text(alphabet='abé\n"\\\U0001f600', max_size=6)


@settings(max_examples=examples(50))
@given(st.lists(words, min_size=1, max_size=6), st.booleans(), st.booleans(), st.data())
def test_masks_of_choice_are_those_of_brute_force(
    choices: list[str], named: bool, ascii_only: bool, data: st.DataObject
) -> None:
    tokens = [*BYTES, b"ab", b"ba", b"aa", b"ab", "é".encode(), "éa".encode(), b'"a', b"\n\n"]
    given_choices = {"choices": choices} if named else choices
    sequence = Steered(CHOICE, tokens, json.dumps(given_choices, ensure_ascii=ascii_only))
    sequence.begin()
    left = {choice.encode() for choice in choices}
    text = b""
    while True:
        left = {choice for choice in left if choice.startswith(text)}
        answer = sequence.mid()
        if isinstance(answer, list):
            assert len(left) == 1
            assert text + b"".join(tokens[token] for token in answer) in left
            text = left.copy().pop()
            sequence.post(answer)
            continue
        fits = {i for i, t in enumerate(tokens) if t and any(c.startswith(text + t) for c in left)}
        assert answer == (fits | {EOS} if text in left else fits)
        token = data.draw(st.sampled_from(sorted(answer)))
        if token == EOS:
            assert sequence.post([token]) is Action.STOP
            break
        assert sequence.post([token]) is Action.CONTINUE
        text += tokens[token]


def test_choice_appends_the_only_text_that_is_left() -> None:
    run = Run(program(CHOICE), WORDS, says("the cat"), '["the cat", "a dog"]')
    assert run.text() == "the cat"
    assert run.sampled == 2  # "t", and the end


def test_choice_stops_by_itself_where_no_token_ends() -> None:
    sequence = Steered(CHOICE, BYTES, '["a"]', eos=-1)
    sequence.begin()
    assert sequence.mid() == [1 + ord("a")]
    assert sequence.post([1 + ord("a")]) is Action.CONTINUE
    assert sequence.mid() is None


@pytest.mark.parametrize(
    "arg",
    [
        "",
        "[]",
        "yes",
        '["a"',
        '["a" "b"]',
        '["a",]',
        '["a", 1]',
        '["a"] x',
        '["\\ud800"]',
        '["\\ud800\\u0041"]',
        '["\\x"]',
        '["\\u12"]',
        '["a\nb"]',
        '{"choice": ["a"]}',
        '{"choices": ["a"]',
        '{"choices": "a"}',
    ],
)
def test_choice_refuses_what_is_no_list_of_strings(arg: str) -> None:
    with pytest.raises(ControllerError, match="the argument must be"):
        Steered(CHOICE, BYTES, arg).begin()


# --- docs/controllers.md and docs/controllers-reference.md ----------------------------------------

PAGES = ("controllers.md", "controllers-reference.md")
GUIDE = "".join((ROOT / "docs" / page).read_text() for page in PAGES)


def c_of_the_guide(word: str) -> str:
    """The C code in the guide that contains a word."""
    blocks = [part.split("```")[0] for part in GUIDE.split("```c\n")[1:]]
    [source] = [block for block in blocks if word in block]
    return source


def test_the_first_controller_of_the_guide_does_what_it_says(tmp_path: Path) -> None:
    source = c_of_the_guide("shout_initial")
    line = next(line for line in GUIDE.splitlines() if line.startswith("python -m ziglang"))
    (tmp_path / "shout.c").write_text(source)
    words = [str(SDK) if word == "SDK" else word for word in shlex.split(line)]
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True)
    made = wasmtime.Module(engine, (tmp_path / "shout.wasm").read_bytes())
    run = Run(NativeProgram(engine, made), WORDS, says("HELLO YOU There"), "hello")
    assert re.fullmatch("HELLO YOU [A-Z]{2,5}!", run.text())
    assert '2 tokens of prompt, argument "hello" of 5 bytes, first token 1' in run.logs[0]
    assert run.ended == {0: "stop"}


def test_the_string_recognizer_of_the_guide_writes_sums() -> None:
    source = c_of_the_guide("sum_initial")
    source = f"""
    #include "tokenbus.h"
    #pragma clang diagnostic ignored "-Wunused-parameter"
    {source}
    void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {{
        tb_use_recognizer(sum_recognizer());
    }}
    """
    run = Run(program(source), WORDS, says("one + eleven + one"))
    assert (run.text(), run.ended) == ("one + eleven + one", {0: "stop"})


def test_each_function_of_the_guide_is_in_the_header_that_it_names() -> None:
    headers = dict(re.findall(r"^\| `(\w+\.h)` \| (.*) \|$", GUIDE, re.MULTILINE))
    assert set(headers) == {path.name for path in (SDK / "tokenbus").glob("*.h")}
    named = {name: re.findall(r"`(tb_\w+)`", row) for name, row in headers.items()}
    assert sum(map(len, named.values())) > 50
    for name, functions in named.items():
        source = (SDK / "tokenbus" / name).read_text()
        assert [one for one in functions if not re.search(rf" \*?{one}\(", source)] == []
