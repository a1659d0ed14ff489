"""Parses the command line and runs one command; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec

from ...protocol.errors import TokenbusError
from ...protocol.keys import KeyFault
from ...protocol.settings import SettingError, Settings, load
from ...transport.dealer import AddressError
from .exits import INTERRUPTED, WRONG_USAGE, report
from .hub.faults import HubFault
from .module_files import FileFault
from .usage import Parser

Command = Callable[[argparse.Namespace, Settings], int]

COMMANDS = {
    "up": "..system",
    "serve-model": "..system",
    "down": "..system",
    "status": ".status",
    "top": ".top",
    "drain": ".drain",
    "weights": ".weights",
    "pull": ".hub.pull",
    "models": ".hub.models",
    "rm": ".hub.rm",
    "client": ".interactive",
    "generate": ".generate",
    "score": ".score",
    "record": ".record",
    "replay": ".replay",
    "lmtp": ".lmtp",
    "controller": ".controller",
    "tool": ".tool",
    "grammar": ".grammar",
    "template": ".template",
    "api-key": ".api_key",
    "keys": ".keys",
}
"""The module of each command. The function ``add_command`` of a module adds the parsers of its
commands."""

FIRST = """\
first steps:
  tokenbus up                                 run a whole system here, until Ctrl-C
  tokenbus pull Qwen/Qwen3-0.6B               download a model, for up --model NAME
  tokenbus generate 'def add(a, b):'          stream the continuation of a prompt
  tokenbus client                             read prompts from the terminal
  tokenbus score 'import ' 'os'               print the log-probabilities of a text
  tokenbus controller run my.c                generate under a controller
  tokenbus tool serve my.py                   serve functions to programs
  tokenbus grammar check c my.c               check a text against a grammar
  tokenbus template check MODEL               show the effect of a chat template
  tokenbus status                             show workers and their load
  tokenbus top                                show workers, streams and rates, updated live

A flag overrides its environment variable TOKENBUS_*, which overrides tokenbus.toml.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unavailable, 4 refused, 5 timed out, 130 Ctrl-C."""


def build_parser(command: str = "") -> Parser:
    """The parser of the command line. For a known ``command``, only the module of this command is
    imported, and the parser has only the commands of this module."""
    parser = Parser(
        prog="tokenbus",
        description="A message bus that serves language models.",
        epilog=FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    needed = [COMMANDS[command]] if command in COMMANDS else COMMANDS.values()
    for module in dict.fromkeys(needed):
        import_module(module, __package__).add_command(commands)
    return parser


class _ShowVersion(argparse.Action):
    """The action of the flag ``--version``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        """Prints the version and exits."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tokenbus {version('tokenbus')}")
        except PackageNotFoundError:
            print("tokenbus of a source tree")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    args = build_parser(*words[:1]).parse_args(words)
    try:
        names = {field.name for field in msgspec.structs.fields(Settings)}
        settings = load(**{k: v for k, v in vars(args).items() if k in names})
    except SettingError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return WRONG_USAGE
    command: Command = args.run
    try:
        code = command(args, settings)
        sys.stdout.flush()
        return code
    except TokenbusError as error:
        return report(error)
    except HubFault as fault:
        print(f"tokenbus: {fault}", file=sys.stderr)
        return fault.exit_code
    except (AddressError, FileFault, KeyFault) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return WRONG_USAGE
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        print(f"tokenbus: the input is not valid UTF-8 at byte {byte:#x}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:
        # The output's reader has closed the pipe. Python would report the error again at exit, so
        # further output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
