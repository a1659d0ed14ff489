"""``tokenbus grammar``: real grammars, texts and tokenizers through the command line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients.cli.languages import Source, compiled, joined, library_sources, refusal
from tokenbus.clients.cli.main import main
from tokenbus.clients.cli.source_places import Lines
from tokenbus.clients.cli.tokenizer_files import read_vocabulary
from tokenbus.grammars import library
from tokenbus.grammars.yacc import compile_grammar
from tokenbus.workers.gpu import embedded

from ..processes import clean_environment
from ..workers.controller.tokens import real_tokenizers as real
from ..workers.controller.tokens.small_tokenizers import byte_level

PROGRAM = "int main(void)\n{\n    return 0;\n}\n"

Shown = pytest.CaptureFixture[str]


def run(shown: Shown, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of ``tokenbus grammar``."""
    try:
        code = main(["grammar", *arguments])
    except SystemExit as left:
        code = int(str(left.code))
    output, errors = shown.readouterr()
    assert "Traceback" not in errors
    return code, output, errors


def as_json(shown: Shown, *arguments: str) -> tuple[int, Any]:
    """Exit code and printed JSON object of ``tokenbus grammar --json``."""
    code, output, errors = run(shown, *arguments, "--json")
    assert errors == ""
    return code, json.loads(output)


def give(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Puts a text on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Captures what the command prints."""
    return capsys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a file that does not exist yet."""
    return tmp_path / "input.txt"


# --- accepted and refused -------------------------------------------------------------------------


@pytest.mark.process
def test_the_command_accepts_a_program_without_torch_or_transformers(file: Path) -> None:
    file.write_text(PROGRAM)
    code = (
        "import sys; from tokenbus.clients.cli import main; code = main()\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "grammar", "check", "c", str(file)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *_, verdict, modules = done.stdout.splitlines()
    assert verdict.startswith(f"accepted   {file}: 4 lines, {len(PROGRAM)} bytes, ")
    assert modules == "[]"


def test_a_refused_input_is_reported_with_its_place_and_its_line(shown: Shown, file: Path) -> None:
    file.write_text("int f;\n\tint 123456;\n")
    code, output, errors = run(shown, "check", "c", str(file))
    assert (code, errors) == (1, "")
    verdict, line, caret = output.splitlines()[-3:]
    assert verdict.startswith(f"{file}:2:6: '1' cannot follow; expected IDENTIFIER, ")
    assert (line, caret) == ("    \tint 123456;", "    \t    ^")


def test_an_input_that_ends_too_early_is_refused_at_its_end(shown: Shown, file: Path) -> None:
    file.write_text('{"a": ')
    code, output, _ = run(shown, "check", "json", str(file))
    assert code == 1
    assert f"{file}:1:7: the text ends here; expected " in output
    code, fields = as_json(shown, "check", "json", str(file))
    assert (code, fields["refusal"]["offset"], fields["refusal"]["found"]) == (1, 6, "")


@pytest.mark.parametrize("kind", ["y", "rx"])
def test_a_character_that_is_refused_in_its_middle_is_reported_as_a_whole(
    shown: Shown, tmp_path: Path, file: Path, kind: str
) -> None:
    grammar = tmp_path / f"accent.{kind}"
    grammar.write_text("xé" if kind == "rx" else '%start s\n%%\ns: "x" "é" ;')
    file.write_text("xè")
    code, fields = as_json(shown, "check", str(grammar), str(file))
    assert code == 1
    place = fields["refusal"]
    assert (place["offset"], place["column"], place["found"]) == (1, 2, "è")


@pytest.mark.parametrize("source", library_sources(), ids=lambda source: str(source.name))
def test_the_samples_of_a_library_page_are_accepted_and_refused_where_it_says(
    shown: Shown, file: Path, source: Any
) -> None:
    samples = library.samples(source.name)
    file.write_text(samples.accepted[-1])
    assert run(shown, "check", source.name, str(file))[0] == 0
    marked = next(sample for sample in samples.rejected if library.MARK in sample)
    before, _, rest = marked.partition(library.MARK)
    file.write_text(before + rest)
    code, fields = as_json(shown, "check", source.name, str(file))
    assert (code, fields["refusal"]["offset"]) == (1, len(before.encode()))


def test_an_empty_input_has_one_mask(shown: Shown, file: Path) -> None:
    file.write_bytes(b"")
    code, fields = as_json(shown, "check", "json", str(file), "--tokens")
    assert (code, len(fields["steps"]), fields["refusal"]["line"]) == (1, 1, 1)


def test_bytes_that_are_no_text_are_refused_with_their_place(shown: Shown, file: Path) -> None:
    file.write_bytes(b"[1,\n \xff]")
    code, fields = as_json(shown, "check", "json", str(file))
    assert code == 1
    assert (fields["refusal"]["line"], fields["refusal"]["column"]) == (2, 2)


def test_the_input_may_come_from_standard_input(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"2026-11-21")
    code, output, _ = run(shown, "check", "iso_date", "-")
    assert code == 0
    assert "accepted   <stdin>: 1 line, 10 bytes" in output


def test_a_last_line_end_that_a_regex_does_not_take_is_pointed_out(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"2026-11-21\n")
    code, output, _ = run(shown, "check", "iso_date", "-")
    assert code == 1
    assert "<stdin>:1:11: '\\n' cannot follow; expected \"T\", the end of the text" in output
    assert output.endswith("the input is accepted without its last line end\n")


# --- what is printed ------------------------------------------------------------------------------


def test_json_has_sizes_times_and_the_verdict(shown: Shown, file: Path) -> None:
    file.write_text(PROGRAM)
    code, fields = as_json(shown, "check", "c", str(file), "--tokens")
    assert (code, fields["accepted"], fields["refusal"]) == (0, True, None)
    steps = fields["steps"]
    assert len(steps) == fields["input"]["tokens"] + 1
    assert "".join(step["text"] for step in steps) == PROGRAM
    assert [step["offset"] for step in steps][-1] == len(PROGRAM)
    assert all(step["accepted"] for step in steps)
    for times in (fields["masks_us"], fields["masks_again_us"]):
        assert 0 < times["p50"] <= times["p99"] <= times["max"]
    assert fields["masks_us"]["first"] == steps[0]["us"]
    sizes = fields["grammar"]["sizes"]
    of_c = compile_grammar(library.grammar("c")).grammar
    assert (sizes["parser states"], fields["tokenizer"]["tokens"]) == (of_c.num_states, 4096)


def test_a_line_for_each_token_shows_place_and_what_was_forced(shown: Shown, file: Path) -> None:
    file.write_text("[\ntrue]")
    code, output, _ = run(shown, "check", "json", str(file), "--tokens")
    assert code == 0
    lines = output.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["byte", "place"])
    vocabulary = read_vocabulary("embedded")
    tokens = vocabulary.tokenize(b"[\ntrue]")
    rows = lines[header + 1 : header + 2 + len(tokens)]
    assert [row.split()[0] for row in rows][-1] == "7"
    assert rows[-1].endswith("the end")
    assert rows[2].split()[1] == "2:1"


def test_tokens_that_were_forced_are_counted(shown: Shown, tmp_path: Path, file: Path) -> None:
    grammar = tmp_path / "one.rx"
    grammar.write_text("a return of the def|b")
    file.write_text("a return of the def")
    code, fields = as_json(shown, "check", str(grammar), str(file))
    assert code == 0
    assert 0 < fields["forced_tokens"] < fields["input"]["tokens"]
    lines = run(shown, "check", str(grammar), str(file))[1].splitlines()
    [line] = [line for line in lines if line.startswith("forced")]
    assert re.fullmatch(r"forced +\d of \d+ tokens: the grammar leaves no choice", line)


def test_a_text_without_forced_tokens_is_not_said_to_leave_no_choice(
    shown: Shown, tmp_path: Path, file: Path
) -> None:
    grammar = tmp_path / "any.rx"
    grammar.write_text("[a-z ]+")
    file.write_text("a b")
    lines = run(shown, "check", str(grammar), str(file))[1].splitlines()
    [line] = [line for line in lines if line.startswith("forced")]
    assert re.fullmatch(r"forced +0 of \d+ tokens", line)


def test_conflicts_and_warnings_are_shown_with_their_example(
    shown: Shown, tmp_path: Path, file: Path
) -> None:
    grammar = tmp_path / "twice.y"
    grammar.write_text('%start s\n%%\ns: "a" | s s | "/a/" "b" ;')
    file.write_text("aa")
    code, output, _ = run(shown, "check", str(grammar), str(file))
    assert code == 0
    notes = [line for line in output.splitlines() if line.startswith("note")]
    assert 'shift/reduce conflict at "a" after `"a" "a" • "a"`' in notes[0]
    assert "line 3, column 16: /a/ can never match" in notes[-1]


def test_the_library_is_listed_and_shown(shown: Shown, tmp_path: Path, file: Path) -> None:
    code, output, _ = run(shown, "list")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == library.names() + library.names(
        "rx"
    )
    assert "C11 before the preprocessor" in output
    code, listed = as_json(shown, "list")
    assert {"name": "json", "kind": "y", "title": "JSON"} in listed
    own = tmp_path / "own.rx"
    own.write_text(run(shown, "show", "email")[1])
    file.write_text("somebody@example.org")
    assert run(shown, "check", str(own), str(file))[0] == 0


def test_files_of_regexes_are_read_as_the_library_s_are() -> None:
    for source in library_sources():
        if source.kind == "rx":
            pattern, places = joined(source.text)
            assert pattern == library.regex(source.name)
            assert len(places) == len(pattern) + 1
            lines = source.text.splitlines()
            for character, (line, column) in zip(pattern, places, strict=False):
                assert lines[line - 1][column - 1] == character


def test_long_lines_are_cut_around_the_caret() -> None:
    _, line, caret = Lines(b"x" * 300 + b"!" + b"y" * 300).pointed(1, 301).splitlines()
    assert line[len(caret) - 1] == "!"
    assert len(line) < 120
    _, line, caret = Lines("日本\x1b!\n".encode()).pointed(1, 4).splitlines()
    assert (line, caret) == ("    日本·!", "         ^")


@pytest.mark.parametrize(
    ("pattern", "beginning", "expected"),
    [
        (r"[0-9a-fA-F]{2}|\n", "", ('"\\n"', "0-9", "A-F", "a-f")),
        (r'"[^"\\]*"', '"', ('any character but "\\\\"',)),
        (r"(ab?)*", "a", ('"a"', '"b"', "the end of the text")),
        (r"[à-ü]", "", ("a character beyond ASCII",)),
        (r"(?s).", "", ("any character",)),
    ],
)
def test_what_a_regex_expects_is_named(
    tmp_path: Path, pattern: str, beginning: str, expected: tuple[str, ...]
) -> None:
    language = compiled(Source("own.rx", "rx", pattern))
    assert language.expected(beginning.encode()) == expected
    text = f"{beginning}\x00\x00".encode()
    wrong_at = language.wrong_at(text)
    assert wrong_at is not None
    assert refusal(language, text, wrong_at).offset == wrong_at


# --- tokenizers -----------------------------------------------------------------------------------


def test_tekken_s_own_file_gives_the_tokens_of_its_own_library() -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    own = Tekkenizer.from_file(real.TEKKEN)
    vocabulary = read_vocabulary(str(real.TEKKEN))
    assert (vocabulary.size, vocabulary.eos) == (real.TEKKEN_SIZE, 2)
    for text in (PROGRAM, "Größe  naïve 日本語 1234567\r\n\t\tx"):
        assert vocabulary.tokenize(text.encode()) == own.encode(text, bos=False, eos=False)


def test_a_checkpoint_s_folder_says_how_many_tokens_the_model_has_and_which_end_it(
    shown: Shown, tmp_path: Path, file: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tokenizer = byte_level()
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|end|>")
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    own = read_vocabulary(str(folder))
    assert (own.size, own.eos_ids) == (size, ())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert read_vocabulary(str(folder)).eos_ids == (end,)
    config = {"vocab_size": 33_000, "eos_token_id": [7, 2]}
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    padded = read_vocabulary(str(folder / "tokenizer.json"))
    assert (padded.size, padded.eos_ids) == (33_000, (7, 2))
    file.write_text(PROGRAM)
    code, fields = as_json(shown, "check", "c", str(file), "--tokenizer", str(folder))
    assert (code, fields["tokenizer"]["tokens"]) == (0, 33_000)


def test_the_embedded_model_s_tokenizer_is_the_one_without_a_name() -> None:
    named = read_vocabulary(str(embedded.path()))
    assert (named.size, named.eos_ids) == (4096, (0,))
    assert read_vocabulary("embedded").fingerprint == named.fingerprint


# --- what is wrong with files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("own.y", '%start s\n%%\ns: "a" t ;\n', ":3:8: the rule 't' is not defined\n    s: "),
        ("own.y", '%start s\n%%\ns: "/x(a/" ;\n', ":3:7: missing ), unterminated subpattern"),
        ("own.y", "%start s\n%%\n", ":3:1: expected a rule, found the end of the grammar\n"),
        ("own.rx", "# a note\nab\n  c(d\n", ":3:4: missing ), unterminated subpattern\n      c(d"),
        ("own.rx", "a(?=b)", ":1:2: the look-ahead '(?=b)' is not supported"),
        ("own.rx", "(", ":1:1: "),
    ],
)
def test_an_error_in_a_grammar_is_reported_with_its_place_and_its_line(
    shown: Shown, tmp_path: Path, name: str, text: str, says: str
) -> None:
    grammar = tmp_path / name
    grammar.write_text(text)
    code, output, errors = run(shown, "check", str(grammar), "-")
    assert (code, output) == (2, "")
    assert errors.startswith(f"tokenbus: {grammar}{says}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["check", "cobol", "IN"],
            "unknown grammar 'cobol': the library has arithmetic, c, json, ",
        ),
        (["check", "./cobol", "IN"], "./cobol: the name of a file must end with .y"),
        (["check", "none.y", "IN"], "cannot read none.y: No such file"),
        (["check", "LATIN.y", "IN"], "LATIN.y is not valid UTF-8 at byte 1"),
        (["check", "json", "none.txt"], "cannot read none.txt: No such file"),
        (["check", "json", "."], "cannot read .: Is a directory"),
        (["check", "json", "IN", "--tokenizer", "none"], "cannot read the tokenizer none: No such"),
        (["check", "json", "IN", "--tokenizer", "."], ". has no tokenizer: expected a tokenizer."),
        (["check", "json", "IN", "--tokenizer", "IN"], "IN is not a tokenizer, because it is not"),
        (["check", "json", "IN", "--tokenizer", "EMPTY"], "EMPTY is not a tokenizer ("),
        (["check", "json", "IN", "--tokenizer", "ODD"], "ODD: "),
        (["check", "json", "IN", "--tokenizer", "SMALL"], "SMALL cannot encode IN: "),
        (["show", "cobol"], "unknown grammar 'cobol'; valid: arithmetic, "),
        (["check", "json"], "INPUT"),
        ([], "ACTION"),
    ],
)
def test_what_cannot_be_used_is_said_on_a_line(
    shown: Shown,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("IN").write_text("[1]")
    Path("LATIN.y").write_bytes(b"\x20\xe9")
    Path("EMPTY").write_text("{}")
    Path("ODD").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    small = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "u": 1}, "unk_token": "u"},
        "decoder": {"type": "Fuse"},
    }
    Path("SMALL").write_text(json.dumps(small))
    code, output, errors = run(shown, *arguments)
    assert (code, output) == (2, "")
    assert says in errors
    if not says.isupper():
        assert errors.startswith("tokenbus: ")
        assert len(errors.splitlines()) == 1


# --- the picture of a mask ------------------------------------------------------------------------


def test_after_int_no_digit_may_come_and_names_may(shown: Shown) -> None:
    code, fields = as_json(shown, "allowed", "c", "int ")
    assert (code, fields["complete"], fields["forced"]) == (0, False, [])
    assert fields["allowed"] == len(fields["tokens"])
    vocabulary = read_vocabulary("embedded")
    written = {vocabulary.token(token) for token in fields["tokens"]}
    assert {b"main", b"x", b"*", b" "} <= written
    assert not any(token.strip()[:1].isdigit() for token in written)
    code, output, _ = run(shown, "allowed", "c", "int ")
    assert code == 0
    share = f"{len(fields['tokens']):,} of 4,096 tokens are allowed"
    lines = output.splitlines()
    assert lines[0].startswith(f"c after 'int ': {share}")
    assert lines[1] == "the text cannot end here"
    [digits] = [line for line in lines if line.startswith("a digit")]
    assert " 0 of    10  ··········" in digits


def test_text_that_must_come_is_shown_as_tokens(shown: Shown) -> None:
    code, fields = as_json(shown, "allowed", "json", '{"a": t')
    assert (code, fields["forced_text"]) == (0, "rue")
    code, output, _ = run(shown, "allowed", "json", '{"a": t')
    assert "forced tokens: 'rue'" in output


def test_the_picture_says_where_a_text_may_end(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"[1]\n")
    code, output, _ = run(shown, "allowed", "json", "-")
    assert code == 0
    assert "\nthe text may end here\n" in output
    code, fields = as_json(shown, "allowed", "json", "[1]")
    assert fields["complete"]
    assert 0 in fields["tokens"]


def test_a_text_that_cannot_be_has_no_picture(shown: Shown) -> None:
    code, output, errors = run(shown, "allowed", "c", "int 1")
    assert (code, errors) == (1, "")
    assert output.startswith("<text>:1:5: '1' cannot follow; expected IDENTIFIER, ")
    code, fields = as_json(shown, "allowed", "c", "int 1")
    assert (code, fields["refusal"]["column"]) == (1, 5)
