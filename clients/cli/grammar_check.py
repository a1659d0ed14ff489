"""``tokenbus grammar check``: checks an input against the masks of a grammar, token by token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ...workers.controller.tokens.vocabulary import TokenizerVocabulary
from .exits import FAILED, OK
from .grammar_output import (
    disagreement,
    encoded,
    language_fields,
    print_language,
    print_refusal,
    refusal_fields,
    token_text,
)
from .languages import compiled, read_source, refusal
from .mask_walk import Guest, MaskStep
from .module_files import FileFault
from .source_places import Lines
from .tokenizer_files import read_vocabulary, tokens_of

STDIN = "<stdin>"


def check(args: argparse.Namespace) -> int:
    """Checks one input. Returns 0 if the input is accepted, otherwise 1. Raises FileFault if a
    file cannot be read or compiled."""
    language = compiled(read_source(args.grammar))
    name, text = _read_input(args.input)
    vocabulary = read_vocabulary(args.tokenizer)
    tokens = tokens_of(vocabulary, args.tokenizer, name, text)
    lines = Lines(text)
    if not args.json:
        print_language(language)
        print(f"{'tokenizer':10} {args.tokenizer}: {vocabulary.size:,} tokens", flush=True)
    shown = args.tokens and not args.json
    steps: list[MaskStep] = []
    with Guest(language.tables, vocabulary) as guest:
        for step in guest.walk(tokens):
            if shown:
                if not steps:
                    print(f"\n{'byte':>8}  {'place':9} {'allowed':>8} {'us':>9}   token")
                print(_line(step, vocabulary, lines))
            steps.append(step)
        again = list(guest.walk(tokens))
        size = guest.size
    wrong_at = language.wrong_at(text)
    _compare(steps[-1], wrong_at, vocabulary)
    refused = None if wrong_at is None else refusal(language, text, wrong_at)
    passes = {"first": _times(steps), "again": _times(again)}
    if args.json:
        each = [_fields(step, vocabulary, lines) for step in steps] if args.tokens else None
        fields = {
            "accepted": refused is None,
            "refusal": refusal_fields(refused),
            "input": {"name": name, "bytes": len(text), "tokens": len(tokens)},
            "forced_tokens": _forced(steps),
            "masks_us": passes["first"],
            "masks_again_us": passes["again"],
            "guest_start_ms": round(guest.seconds * 1e3, 3),
            "guest_bytes": size,
            "grammar": language_fields(language),
            "tokenizer": {"name": args.tokenizer, "tokens": vocabulary.size},
        }
        print(encoded(fields if each is None else fields | {"steps": each}))
    else:
        _print_summary(steps, passes, size, guest.seconds)
        if refused is None:
            ends = f"{lines.count:,} lines" if lines.count != 1 else "1 line"
            print(f"{'accepted':10} {name}: {ends}, {len(text):,} bytes, {len(tokens):,} tokens")
        else:
            print_refusal(name, text, refused, language)
    return OK if refused is None else FAILED


def _read_input(name: str) -> tuple[str, bytes]:
    """Reads an input; ``-`` is standard input. Returns its name, as messages show it, and its
    bytes. Raises FileFault if the file cannot be read."""
    if name == "-":
        return STDIN, sys.stdin.buffer.read()
    try:
        with open(name, "rb") as file:
            return name, file.read()
    except OSError as error:
        raise FileFault(f"cannot read {name}: {error.strerror}") from None


# --- times and tokens -----------------------------------------------------------------------------


def _times(steps: Sequence[MaskStep]) -> dict[str, float]:
    """Statistics of the masks' computing times, in microseconds."""
    each = sorted(step.seconds * 1e6 for step in steps)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {"mean": sum(each) / len(each)}
    found |= {name: each[round(share * (len(each) - 1))] for name, share in shares.items()}
    found["first"] = steps[0].seconds * 1e6
    return {name: round(value, 1) for name, value in found.items()}


def _forced(steps: Sequence[MaskStep]) -> int:
    return sum(step.forced for step in steps)


def _print_summary(
    steps: Sequence[MaskStep], passes: dict[str, dict[str, float]], size: int, start_s: float
) -> None:
    print()
    names = passes["first"]
    print(f"{'masks, us':10} " + " ".join(f"{name:>9}" for name in names))
    for label, found in (("at first", passes["first"]), ("again", passes["again"])):
        print(f"{label:10} " + " ".join(f"{found[name]:>9,.1f}" for name in names))
    print(f"{'guest':10} started in {start_s * 1e3:,.0f} ms, {size / 1e6:,.1f} MB at the end")
    taken = sum(step.allowed and step.token is not None for step in steps)
    forced = _forced(steps)
    why = ": the grammar leaves no choice" if forced else ""
    print(f"{'forced':10} {forced:,} of {taken:,} tokens{why}")
    print()


def _line(step: MaskStep, vocabulary: TokenizerVocabulary, lines: Lines) -> str:
    line, column = lines.place(step.offset)
    what = "the end" if step.token is None else token_text(vocabulary, step.token)
    mark = "   forced" if step.forced else "" if step.allowed else "   REFUSED"
    return (
        f"{step.offset:>8,}  {f'{line}:{column}':9} {step.choices:>8,} "
        f"{step.seconds * 1e6:>9,.1f}   {what}{mark}"
    )


def _fields(step: MaskStep, vocabulary: TokenizerVocabulary, lines: Lines) -> dict[str, Any]:
    line, column = lines.place(step.offset)
    written = b"" if step.token is None else vocabulary.token(step.token)
    return {
        "offset": step.offset,
        "line": line,
        "column": column,
        "token": step.token,
        "text": written.decode(errors="replace"),
        "allowed": step.choices,
        "accepted": step.allowed,
        "forced": step.forced,
        "us": round(step.seconds * 1e6, 1),
    }


def _compare(last: MaskStep, wrong_at: int | None, vocabulary: TokenizerVocabulary) -> None:
    """Raises ServiceError if the grammar backend and the reference disagree about an input. They
    disagree if only one of them accepts the input, or if they stop at different places. ``last``:
    the last step of the grammar backend. ``wrong_at``: the result of the reference
    (``Language.wrong_at``)."""
    guest = f"stops at the token at byte {last.offset}"
    if last.allowed:
        agree, guest = wrong_at is None, "accepts the text"
    elif wrong_at is None or last.token is None:
        agree = wrong_at == last.offset
    else:
        agree = last.offset <= wrong_at < last.offset + len(vocabulary.token(last.token))
    if not agree:
        raise disagreement(guest, wrong_at)
