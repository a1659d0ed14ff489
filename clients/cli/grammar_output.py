"""Formats grammars, tokens and refusals for ``tokenbus grammar``, as text and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from ...grammars.yacc import Refusal
from ...protocol.errors import Code, ServiceError
from ...workers.controller.tokens.vocabulary import TokenizerVocabulary
from .languages import Language
from .source_places import Lines


def token_text(vocabulary: TokenizerVocabulary, token: int) -> str:
    """A token in readable form: text in quotes, or bytes if it is not text."""
    written = vocabulary.token(token)
    try:
        return repr(written.decode())
    except UnicodeDecodeError:
        return repr(written)


def encoded(fields: dict[str, Any]) -> str:
    """The fields as one JSON object."""
    return msgspec.json.encode(fields).decode()


def language_fields(language: Language) -> dict[str, Any]:
    """The fields of a grammar in JSON."""
    return {
        "name": language.source.name,
        "sizes": language.sizes,
        "table_bytes": len(language.tables),
        "compile_ms": round(language.seconds * 1e3, 3),
        "notes": language.notes,
    }


def refusal_fields(refused: Refusal | None) -> dict[str, Any] | None:
    """The fields of a refusal in JSON; None if the text is accepted."""
    if refused is None:
        return None
    return {
        "offset": refused.offset,
        "line": refused.line,
        "column": refused.column,
        "found": refused.found,
        "expected": list(refused.expected),
    }


def print_language(language: Language) -> None:
    """Prints the sizes and the compile time of a grammar, its conflicts and its warnings."""
    sizes = ", ".join(f"{count:,} {what}" for what, count in language.sizes.items())
    print(f"{'grammar':10} {language.source.name}: {sizes}")
    made = f"{len(language.tables) / 1000:,.0f} kB, compiled in {language.seconds * 1e3:,.0f} ms"
    print(f"{'tables':10} {made}")
    for note in language.notes:
        print(f"{'note':10} {note}")


def print_refusal(name: str, text: bytes, refused: Refusal, language: Language) -> None:
    """Prints the place where an input is refused, the expected lexemes, and the line."""
    what = str(refused).partition(": ")[2]
    pointed = Lines(text).pointed(refused.line, refused.column)
    print(f"{name}:{refused.line}:{refused.column}: {what}{pointed}")
    ending = text[refused.offset :]
    if ending in (b"\n", b"\r\n") and language.wrong_at(text[: refused.offset]) is None:
        print("the input is accepted without its last line end")


def disagreement(backend_does: str, wrong_at: int | None) -> ServiceError:
    """Makes the error that reports a disagreement about a text between the grammar backend and the
    reference (``Language.wrong_at``)."""
    reference = "accepts the text" if wrong_at is None else f"stops at its byte {wrong_at}"
    return ServiceError(
        Code.INTERNAL,
        f"the grammar backend {backend_does}, but the Python reference {reference}; please report "
        "this with the grammar, the text and the tokenizer",
    )
