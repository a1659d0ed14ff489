"""Texts that the model generates under the library's grammars: independent parsers accept them.

For each grammar, the model generates samples at temperature 1.5. At least half of them end by
themselves, and all of these parse. Some parsers refuse a valid text for a reason other than its
syntax. The functions below change such texts before they are parsed, and give the reason.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from datetime import datetime
from email.headerregistry import Address

import pytest
import sqlglot
import tree_sitter
import tree_sitter_c
from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ErrorLevel
from sqlglot.parser import Parser

from ..counts import rounds
from ..processes import Bus

pytestmark = pytest.mark.process

SAMPLES = rounds(60, 200)
TEMPERATURE = 1.5
MAX_TOKENS = 100

PROMPTS = {
    "arithmetic": ["x = ", ">>> ", "2 ^ 3 * (1 + x)\n", "return "],
    "c": [
        "int main(void) { return 0; }\n",
        "/* a C file */\n",
        "#include <stdio.h>\nint f(int a) {",
        "typedef long T;\nT x = sizeof(T);\n",
    ],
    "email": ["x = ", '"email": "', "edsger.kernighan@example.org\n", "To: "],
    "iso_date": ["x = ", "2024-01-01T10:00:00Z\n", '"date": "', "on "],
    "json": ["x = ", '{"a": [1, 2]}\n', "json.loads('", '{"name": "'],
    "python_expr": ["x = ", "return ", ">>> ", "print("],
    "sql_select": [
        "SELECT a FROM t;\n",
        'cursor.execute("',
        "select count(*) from t where a > 1 group by b order by c;\n",
        "WITH a AS (SELECT 1) ",
    ],
}
REGEXES = ("email", "iso_date")


def judge_json(text: str) -> None:
    """Raises an exception if ``json`` refuses the text."""
    json.loads(text)


def judge_python(text: str) -> None:
    """Raises an exception if ``ast`` refuses the text. A warning, for example about ``"\\d"`` or
    ``1()``, does not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ast.parse(text.strip(), mode="eval")


def judge_arithmetic(text: str) -> None:
    """Raises an exception if ``ast`` refuses the text as Python, with ``**`` in place of ``^``.

    In Python, some names of the grammar are keywords (``or``), and some of its numbers are not
    valid (``007``). So each name becomes x, and each number becomes 1 if ``float`` accepts it.
    Parentheses around the text allow line breaks.
    """

    def lexeme(found: re.Match[str]) -> str:
        if found["number"]:
            float(found["number"])
        return " 1 " if found["number"] else " x "

    lexemes = r"(?a)(?P<number>[0-9.]+([eE][+-]?[0-9]+)?)|[A-Za-z_]\w*"
    python = re.sub(lexemes, lexeme, text).replace("^", "**")
    judge_python(f"({python}\n)")


def judge_date(text: str) -> None:
    """Raises an exception if ``datetime`` refuses the text."""
    datetime.fromisoformat(text)


def judge_email(text: str) -> None:
    """Raises an exception if ``email`` refuses the address or changes its form, or if the domain
    does not have at least two labels."""
    address = Address(addr_spec=text)
    assert address.addr_spec == text
    label = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
    assert re.fullmatch(rf"({label}\.)+{label}", address.domain)


class AnyCall(Parser):
    """A parser that accepts calls of any function with any arguments, because the syntax does not
    determine which functions exist."""

    FUNCTIONS = {}
    FUNCTION_PARSERS = {"CAST": Parser.FUNCTION_PARSERS["CAST"]}
    FUNC_TOKENS = Parser.FUNC_TOKENS | Parser.ID_VAR_TOKENS


class Sql(Dialect):
    """sqlglot's own dialect with the parser ``AnyCall``."""

    Parser = AnyCall


SQL_QUOTED = r"""'(?:''|[^'])*'|"(?:""|[^"])*\""""
SQL_COMMENT = re.compile(rf"(?s)({SQL_QUOTED})|--[^\n]*|/\*.*?\*/")
SQL_EXCEPT = re.compile(rf"(?i)({SQL_QUOTED})|(\*\s*)except\b")


def judge_sql(text: str) -> None:
    """Raises an exception if ``sqlglot`` refuses the text.

    Comments become blanks, because sqlglot reads ``ORDER BY`` as one word and does not accept a
    comment within it. After ``*``, sqlglot reads ``EXCEPT (`` as in BigQuery, as a list of columns
    that are left out. In the standard, EXCEPT is a set operation like UNION, so it becomes UNION.
    """
    text = SQL_COMMENT.sub(lambda found: found[1] or " ", text)
    text = SQL_EXCEPT.sub(lambda found: found[1] or f"{found[2]}UNION", text)
    tree = sqlglot.parse_one(text, dialect=Sql, error_level=ErrorLevel.RAISE)
    assert isinstance(tree, exp.Query), tree


C = tree_sitter.Parser(tree_sitter.Language(tree_sitter_c.language()))
C_KEYWORD = (
    "auto|break|case|char|const|continue|default|do|double|else|enum|extern|float|for|goto|if|inline|"
    "int|long|register|restrict|return|short|signed|sizeof|static|struct|switch|typedef|union|"
    "unsigned|void|volatile|while|_Alignas|_Alignof|_Atomic|_Bool|_Complex|_Generic|_Imaginary|"
    "_Noreturn|_Static_assert|_Thread_local|offsetof"
)
C_NAME = rf"(?!(?:{C_KEYWORD})\b)[A-Za-z_]\w*"
C_NUMBER = r"(?<!\w)\.?[0-9](?:[eEpP][+-]|[\w.])*"
C_STRING = r"""(?:\b(?:L|u8?|U))?"(?:\\.|[^"\\\n])*\""""
C_CHARACTER = r"(?:\b[LuU])?'(?:\\.|[^'\\\n])*'"
C_COMMENT = re.compile(rf"(?as)({C_STRING}|{C_CHARACTER})|//[^\n]*|/\*.*?\*/")
C_DIRECTIVE = re.compile(
    r"(?am)^\s*#[ \t\r]*"
    r"((define|elif|else|endif|error|if|ifdef|ifndef|include|line|pragma|undef)(?!\w).*)?$"
)
C_LEXEME = re.compile(
    rf"(?as){C_STRING}|{C_NUMBER}|(?P<character>{C_CHARACTER})|(?P<name>{C_NAME})|\w+|\s+|."
)


def preprocessed(text: str) -> str:
    """C text after the first phases of translation (C11 5.1.1.2): with continued lines joined, and
    without comments and directives."""
    text = re.sub(r"\\\r?\n", "", text)
    text = C_COMMENT.sub(lambda found: found[1] or " ", text)
    return C_DIRECTIVE.sub("", text)


def plain_c(text: str) -> str:
    """Changes C text where tree-sitter's grammar of C differs from C11.

    tree-sitter has keywords such as ``true``, ``size_t`` and ``asm``, which are names in C11. So
    each name gets a ``_``. tree-sitter reads a comment in ``'a//b'``, so a slash in a character
    constant becomes a dot. tree-sitter does not allow a comma in a subscript, which C11 does
    (6.5.2.1 and 6.5.17). So the content of such a subscript gets parentheses.
    """
    out: list[str] = []
    brackets: list[tuple[int, list[str]]] = []
    for found in C_LEXEME.finditer(text):
        lexeme = found[0]
        if found["character"]:
            lexeme = lexeme.replace("/", ".")
        elif found["name"]:
            lexeme += "_"
        elif lexeme in ("#", "'", '"'):
            raise SyntaxError(f"a {lexeme} that begins nothing: {text[found.start() :][:100]}")
        elif lexeme in "([{":
            brackets.append((len(out) + 1, []))
        elif lexeme == "," and brackets:
            brackets[-1][1].append(lexeme)
        elif lexeme in ")]}" and brackets:
            start, commas = brackets.pop()
            if lexeme == "]" and commas:
                out.insert(start, "(")
                lexeme = ")]"
        out.append(lexeme)
    return "".join(out)


def judge_c(text: str) -> None:
    """Raises an exception if tree-sitter's grammar of C finds an error or a missing part.

    pycparser and compilers have a table of typedef names, and refuse a type name that was not
    declared. The model's texts do not declare their types. Neither tree-sitter nor our grammar has
    such a table.
    """
    tree = C.parse(plain_c(preprocessed(text)).encode())
    if tree.root_node.has_error:
        raise SyntaxError(f"a syntax error or a missing part: {tree.root_node}")


JUDGES: dict[str, Callable[[str], None]] = {
    "arithmetic": judge_arithmetic,
    "c": judge_c,
    "email": judge_email,
    "iso_date": judge_date,
    "json": judge_json,
    "python_expr": judge_python,
    "sql_select": judge_sql,
}


@pytest.mark.long
@pytest.mark.parametrize("name", JUDGES)
def test_what_ends_by_itself_is_taken_by_another_parser(name: str, steered: Bus) -> None:
    prompts = PROMPTS[name]
    with steered.client() as client:
        streams = [
            client.generate(
                prompts[seed % len(prompts)],
                controller="regex" if name in REGEXES else "yacc",
                controller_arg={"library": name},
                temperature=TEMPERATURE,
                seed=seed,
                max_tokens=MAX_TOKENS,
            )
            for seed in range(SAMPLES)
        ]
        samples = [stream.wait()[0] for stream in streams]
    ended = [sample.text for sample in samples if sample.finish_reason == "stop"]
    refused = []
    for text in ended:
        try:
            JUDGES[name](text)
        except Exception as error:
            refused.append((text, error))
    assert not refused, f"{len(refused)} of {len(ended)} refused: {refused[0]}"
    assert len(ended) >= SAMPLES / 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("arithmetic", "1 2"),
        ("arithmetic", "f(,)"),
        ("c", "int x = 1"),
        ("c", "# comment\nint x;"),
        ("c", "int x; # define A"),
        ("c", "int f(void) { x = [1, 2]; }"),
        ("c", 'int x = "a\n";'),
        ("email", "a@b"),
        ("email", "a@-b.org"),
        ("iso_date", "2023-02-29"),
        ("json", "[1,]"),
        ("python_expr", "x = 1"),
        ("sql_select", "SELECT a FROM t WHERE"),
        ("sql_select", "SELECT * FROM a UNION"),
        ("sql_select", "DROP TABLE t"),
    ],
)
def test_the_other_parsers_refuse_what_is_wrong(name: str, text: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - each has its own
        JUDGES[name](text)
