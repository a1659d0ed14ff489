"""``tokenbus grammar allowed``: shows one token mask: the tokens that may follow a text."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len

from ...workers.controller.tokens.vocabulary import TokenizerVocabulary
from .exits import FAILED, OK
from .grammar_output import (
    disagreement,
    encoded,
    language_fields,
    print_refusal,
    refusal_fields,
    token_text,
)
from .languages import Language, compiled, read_source, refusal
from .mask_walk import Guest, Mask
from .tokenizer_files import read_vocabulary, tokens_of

TEXT = "<text>"
NAMED = 16
"""Maximum number of expected lexemes that are printed."""
CELLS = (80, 100, 140)
"""Width of the output in characters: the minimum, the default if the width of the terminal is
unknown, and the maximum."""
BAR_CELLS = 10
ALLOWED_SHARE = 0.6
"""A row has examples of allowed and of forbidden tokens. Allowed tokens use this fraction of the
space."""


class _Found(NamedTuple):
    """The mask after a text."""

    language: Language
    vocabulary: TokenizerVocabulary
    text: bytes
    mask: Mask
    forced: list[int]


def allowed(args: argparse.Namespace) -> int:
    """Shows the mask after a text. Returns 0, or 1 if the grammar refuses the text. Raises
    FileFault if a file cannot be read or compiled."""
    language = compiled(read_source(args.grammar))
    text = sys.stdin.buffer.read() if args.text == "-" else os.fsencode(args.text)
    vocabulary = read_vocabulary(args.tokenizer)
    tokens = tokens_of(vocabulary, args.tokenizer, TEXT, text)
    with Guest(language.tables, vocabulary) as guest:
        found = guest.after(tokens)
    wrong_at = language.wrong_at(text)
    if (found is None) != (wrong_at is not None and wrong_at < len(text)):
        raise disagreement("accepts the text" if found else "refuses the text", wrong_at)
    if found is not None:
        shown = _Found(language, vocabulary, text, *found)
        if args.json:
            print(encoded(_fields(shown)))
        else:
            _print(shown)
        return OK
    refused = refusal(language, text, wrong_at or 0)
    if args.json:
        fields = {"text": text.decode(errors="replace"), "refusal": refusal_fields(refused)}
        print(encoded(fields))
    else:
        print_refusal(TEXT, text, refused, language)
    return FAILED


def _fields(found: _Found) -> dict[str, object]:
    vocabulary, mask = found.vocabulary, found.mask
    return {
        "text": found.text.decode(errors="replace"),
        "refusal": None,
        "complete": mask.complete,
        "allowed": mask.allowed_count,
        "tokens": [token for token in range(vocabulary.size) if mask.allows(token)],
        "forced": found.forced,
        "forced_text": vocabulary.bytes_of(found.forced).decode(errors="replace"),
        "expected": list(found.language.expected(found.text)),
        "mask_us": round(mask.seconds * 1e6, 1),
        "grammar": language_fields(found.language),
        "vocabulary": vocabulary.size,
    }


def _print(found: _Found) -> None:
    language, vocabulary, text, mask, forced = found
    share = f"{100 * mask.allowed_count / vocabulary.size:.3g} %"
    before = "…" * (len(text) > 60) + text[-60:].decode(errors="replace")
    print(
        f"{language.source.name} after {before!r}: {mask.allowed_count:,} of "
        f"{vocabulary.size:,} tokens are allowed ({share})"
    )
    print(f"the text {'may' if mask.complete else 'cannot'} end here")
    names = language.expected(text)
    more = f" or one of {len(names) - NAMED} more" if len(names) > NAMED else ""
    print(f"expected: {', '.join(names[:NAMED])}{more}")
    if forced:
        forced_text = " ".join(token_text(vocabulary, token) for token in forced)
        print(f"forced tokens: {forced_text}")
    print()
    _print_groups(vocabulary, _groups(vocabulary, mask))


# --- groups of tokens by their beginning ----------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Tokens with a similar beginning, in the order of their ids."""

    allowed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.allowed) + len(self.refused)


WHITE = "white space alone"
LETTER = "a letter or _"
DIGIT = "a digit"
SIGN = "a sign"
BEYOND = "a letter beyond ASCII"
BYTES = "another byte"
AFTER_WHITE = "  after white space"
"""Label of a row of tokens that begin with white space. The character after the white space is of
the kind that the row above names."""

_Kind = tuple[str, bool]
"""The kind of a token's first character after white space, and whether the token begins with white
space. If the token has only white space, this is ``(WHITE, False)``."""
_WHITE_BYTES = b" \t\r\n\f\v"


def _groups(vocabulary: TokenizerVocabulary, mask: Mask) -> dict[_Kind, _Group]:
    kinds = (WHITE, LETTER, DIGIT, SIGN, BEYOND, BYTES)
    groups = {(kind, white): _Group() for kind in kinds for white in (False, True)}
    for token in range(vocabulary.size):
        written = vocabulary.token(token)
        if written:
            group = groups[_kind(written)]
            (group.allowed if mask.allows(token) else group.refused).append(token)
    return {kind: group for kind, group in groups.items() if len(group)}


def _kind(written: bytes) -> _Kind:
    rest = written.lstrip(_WHITE_BYTES)
    if not rest:
        return WHITE, False
    first = rest[0]
    if rest[:1].isalpha() or first == ord("_"):
        kind = LETTER
    elif rest[:1].isdigit():
        kind = DIGIT
    elif 0x21 <= first < 0x7F:
        kind = SIGN
    elif 0xC2 <= first < 0xF5:
        kind = BEYOND
    else:
        kind = BYTES
    return kind, len(rest) < len(written)


def _print_groups(vocabulary: TokenizerVocabulary, groups: dict[_Kind, _Group]) -> None:
    minimum, default, maximum = CELLS
    cells = min(max(shutil.get_terminal_size((default, 24)).columns, minimum), maximum)
    names = max(map(len, (WHITE, LETTER, DIGIT, SIGN, BEYOND, BYTES, AFTER_WHITE)))
    digits = max(len(f"{len(group):,}") for group in groups.values())
    counts = 2 * digits + len(" of ")
    room = cells - names - counts - BAR_CELLS - 8
    yes_cells = int(room * ALLOWED_SHARE)
    head = f"{'beginning':{names}}  {'allowed':<{counts + 2 + BAR_CELLS}}"
    print(f"{head}  {'for example':{yes_cells}}  not")
    for (kind, white), group in groups.items():
        name = AFTER_WHITE if white and (kind, False) in groups else kind
        count = f"{len(group.allowed):>{digits},} of {len(group):>{digits},}"
        filled = len(group.allowed) * BAR_CELLS // len(group)
        filled = max(filled, 1) if group.allowed else 0
        bar = "█" * filled + "·" * (BAR_CELLS - filled)
        yes = _examples(vocabulary, group.allowed, yes_cells)
        yes += " " * (yes_cells - cell_len(yes))
        no = _examples(vocabulary, group.refused, room - yes_cells)
        print(f"{name:{names}}  {count}  {bar}  {yes}  {no}".rstrip())


def _examples(vocabulary: TokenizerVocabulary, tokens: Sequence[int], cells: int) -> str:
    """Examples of ``tokens`` that fit into ``cells`` characters of the terminal. A token that is
    too long for the remaining characters is left out."""
    shown = ""
    for token in _varied(vocabulary, tokens):
        more = f"{shown} {token_text(vocabulary, token)}".lstrip()
        if cell_len(more) <= cells:
            shown = more
        elif cell_len(shown) > cells - 4:
            break
    return shown


def _varied(vocabulary: TokenizerVocabulary, tokens: Sequence[int]) -> Iterable[int]:
    """Yields ``tokens``, but with different first characters at the beginning. First comes one
    token for each first character after white space, then come all other tokens. Both parts keep
    the order of ``tokens``, which are sorted by id. In most tokenizers, low ids belong to frequent
    tokens."""
    seen = set()
    later: list[int] = []
    for token in tokens:
        written = vocabulary.token(token)
        first = written.decode(errors="replace").lstrip()[:1]
        if first in seen or first == "\ufffd":
            later.append(token)
        else:
            seen.add(first)
            yield token
    yield from later
