"""Each library grammar accepts and rejects the samples of its page, and other parsers agree."""

from __future__ import annotations

import ast
import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.yacc import Compilation, check_text, compile_grammar

ROOT = Path(__file__).parents[2]
C_FILES = [
    *sorted((ROOT / "tests/grammars/samples").glob("*.c")),
    *(
        ROOT / f"workers/controller/sdk/examples/{name}.c"
        for name in ("backtrack", "best_of", "talk")
    ),
]
_compiled: dict[str, Compilation] = {}


def compiled(name: str) -> Compilation:
    """The compilation of a library grammar. Each grammar is compiled only once."""
    if name not in _compiled:
        _compiled[name] = compile_grammar(library.grammar(name))
    return _compiled[name]


def cases(names: list[str], accepted: bool) -> list[tuple[str, str]]:
    """Each grammar's name with each accepted sample of its page, or with each rejected sample."""
    return [
        (name, sample)
        for name in names
        for sample in (
            library.samples(name).accepted if accepted else library.samples(name).rejected
        )
    ]


GRAMMARS = library.names()
REGEXES = library.names("rx")


def test_the_library_has_what_the_manual_names() -> None:
    assert GRAMMARS == ["arithmetic", "c", "json", "python_expr", "sql_select"]
    assert REGEXES == ["email", "iso_date"]
    with pytest.raises(
        KeyError, match="'cpp' is not in the library; it must be one of arithmetic, c,"
    ):
        library.grammar("cpp")


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_library_grammar_has_no_conflict_and_no_warning(name: str) -> None:
    assert compiled(name).conflicts == ()
    assert compiled(name).warnings == ()


@pytest.mark.parametrize(("name", "sample"), cases(GRAMMARS, accepted=True))
def test_an_accepted_sample_is_a_sentence(name: str, sample: str) -> None:
    assert check_text(compiled(name).grammar, sample.encode()) is None


@pytest.mark.parametrize(("name", "sample"), cases(GRAMMARS, accepted=False))
def test_a_rejected_sample_is_refused_at_its_mark(name: str, sample: str) -> None:
    before, mark, after = sample.partition(library.MARK)
    refusal = check_text(compiled(name).grammar, (before + after).encode())
    assert refusal is not None
    assert refusal.offset == len(before.encode()), (mark, str(refusal))


@pytest.mark.parametrize(("name", "sample"), cases(REGEXES, accepted=True))
def test_an_accepted_sample_matches(name: str, sample: str) -> None:
    assert re.fullmatch(library.regex(name), sample)
    assert compile_regex(library.regex(name)).accepts(sample.encode())


@pytest.mark.parametrize(("name", "sample"), cases(REGEXES, accepted=False))
def test_a_rejected_sample_dies_at_its_mark(name: str, sample: str) -> None:
    before, _, after = sample.partition(library.MARK)
    text = (before + after).encode()
    dfa = compile_regex(library.regex(name))
    assert not dfa.accepts(text)
    alive = [count for count in range(len(text) + 1) if dfa.walk(text[:count])]
    assert alive[-1] == len(before.encode())
    assert not re.fullmatch(library.regex(name), before + after)


@pytest.mark.parametrize("sample", library.samples("json").accepted)
def test_json_agrees_with_the_standard_library(sample: str) -> None:
    json.loads(sample)


@pytest.mark.parametrize("sample", library.samples("json").rejected)
def test_json_refuses_what_the_standard_library_refuses(sample: str) -> None:
    with pytest.raises(ValueError):
        json.loads(sample.replace(library.MARK, ""))


@pytest.mark.parametrize("sample", library.samples("python_expr").accepted)
def test_python_agrees_with_its_own_parser(sample: str) -> None:
    ast.parse(sample, mode="eval")


@pytest.mark.parametrize("sample", library.samples("python_expr").rejected)
def test_python_refuses_what_its_own_parser_refuses(sample: str) -> None:
    text = sample.replace(library.MARK, "")
    if text != 'f"a"':  # The grammar has no f-strings, which Python accepts.
        with pytest.raises(SyntaxError):
            ast.parse(text, mode="eval")


@pytest.mark.parametrize("sample", library.samples("iso_date").accepted)
def test_dates_are_dates(sample: str) -> None:
    datetime.fromisoformat(sample)


def test_every_day_is_a_date_and_no_other_is() -> None:
    dfa = compile_regex(library.regex("iso_date"))
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2024, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.fromisoformat(text)
                except ValueError:
                    assert not dfa.accepts(text.encode()), text
                else:
                    assert dfa.accepts(text.encode()), text


@pytest.mark.parametrize("path", C_FILES, ids=lambda path: path.name)
def test_c_takes_the_files_that_its_page_names(path: Path) -> None:
    page = (ROOT / "grammars/library/c.md").read_text()
    assert f"`{path.name}` ({len(path.read_bytes().splitlines())})" in page
    refusal = check_text(compiled("c").grammar, path.read_bytes())
    assert refusal is None, str(refusal)


def test_the_files_that_c_takes_have_a_thousand_lines() -> None:
    assert sum(len(path.read_bytes().splitlines()) for path in C_FILES) >= 1000
