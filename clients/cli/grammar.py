"""``tokenbus grammar``: checks texts against grammars, without a running system.

The implementation needs the packages in ``NEEDED``. It is imported only when this command runs,
because other commands work without these packages.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ...protocol.settings import Settings
from .exits import OK
from .module_files import FileFault

NEEDED = ("wasmtime", "tokenizers", "numpy")
"""Packages that are not in the base install."""


def add_command(commands: Any) -> None:
    """Adds ``grammar`` with its subcommands."""
    parser = commands.add_parser(
        "grammar",
        allow_abbrev=False,
        help="check texts against grammars",
        description="Checks texts against grammars and regular expressions, with the token masks "
        "that constrain a model. A running system is not needed.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add in (_add_check, _add_allowed, _add_list, _add_show):
        add(actions)


def _add_check(actions: Any) -> None:
    parser = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="check whether a grammar accepts an input",
        description="Checks an input against the masks of a grammar, token by token. The exit code "
        "is 0 if the input is accepted, otherwise 1. For a refused input, the place of the refusal "
        "and the expected lexemes are printed.",
    )
    _add_grammar(parser)
    parser.add_argument("input", metavar="INPUT", help="input file; - is standard input")
    _add_tokenizer(parser)
    parser.add_argument("--tokens", action="store_true", help="print a line for each token")
    _finish(parser, _check)


def _add_allowed(actions: Any) -> None:
    parser = actions.add_parser(
        "allowed",
        allow_abbrev=False,
        help="show the tokens that may follow a text",
        description="Shows one token mask: the tokens that a model may generate after a text.",
    )
    _add_grammar(parser)
    parser.add_argument("text", metavar="TEXT", help="the text so far; - is standard input")
    _add_tokenizer(parser)
    _finish(parser, _allowed)


def _add_list(actions: Any) -> None:
    parser = actions.add_parser(
        "list", allow_abbrev=False, help="list the grammars and regular expressions of Tokenbus"
    )
    _finish(parser, _list)


def _add_show(actions: Any) -> None:
    parser = actions.add_parser("show", allow_abbrev=False, help="print a grammar of Tokenbus")
    parser.add_argument("grammar", metavar="NAME", help="grammar name, as list prints it")
    parser.set_defaults(run=_show)


def _add_grammar(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "grammar",
        metavar="GRAMMAR",
        help="file (.y: grammar, .rx: regular expression) or a name that 'grammar list' prints",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        default="embedded",
        help="folder of a checkpoint, or its tokenizer.json or tekken.json (default: the tokenizer "
        "of the embedded model)",
    )


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def _check(args: argparse.Namespace, settings: Settings) -> int:
    _need_packages()
    from .grammar_check import check

    return check(args)


def _allowed(args: argparse.Namespace, settings: Settings) -> int:
    _need_packages()
    from .grammar_allowed import allowed

    return allowed(args)


def _list(args: argparse.Namespace, settings: Settings) -> int:
    import msgspec

    from .languages import library_sources, title

    found = [
        {"name": source.name, "kind": source.kind, "title": title(source)}
        for source in library_sources()
    ]
    if args.json:
        print(msgspec.json.encode(found).decode())
        return OK
    for each in found:
        kind = "grammar" if each["kind"] == "y" else "regex"
        print(f"{each['name']:12} {kind:8} {each['title']}")
    return OK


def _show(args: argparse.Namespace, settings: Settings) -> int:
    from .languages import library_sources

    for source in library_sources():
        if source.name == args.grammar:
            print(source.text, end="")
            return OK
    known = ", ".join(source.name for source in library_sources())
    raise FileFault(f"unknown grammar {args.grammar!r}; valid: {known}")


def _need_packages() -> None:
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        needed = ", ".join(NEEDED)
        raise FileFault(f"this command needs {needed}: pip install 'tokenbus[controller]'")
