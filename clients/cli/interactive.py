"""``tokenbus client``: LMTP's interactive client. A line is a prompt with parameters at its end."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from contextlib import suppress
from typing import Any

from rich.console import Console

from ...protocol.bodies import encode_body
from ...protocol.errors import TokenbusError
from ...protocol.settings import Settings
from .. import Client
from .exits import OK, report
from .generate import begin
from .notices import Notices
from .options import PARAMETERS, add_connection, client_for, parameter
from .texts import Texts, exit_code

PROMPT = ">>>> "
_PARAMETER = re.compile(r"(?:^|\s)([a-z_]+)=(\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|\{[^}]*\}|\S+)\s*$")


HELP = f"""\
PROMPT NAME=VALUE …   generates from a prompt: Hello there temperature=1.2 max_tokens=5
help                  prints this text
Ctrl-C                ends the generation; quit or Ctrl-D ends the client
parameters: {", ".join(sorted(PARAMETERS))}"""
"""The output of ``help``."""


def add_command(commands: Any) -> None:
    """Adds ``client``."""
    parser = commands.add_parser(
        "client",
        allow_abbrev=False,
        help="read prompts from the terminal",
        description="LMTP's interactive client. Each line is a prompt with parameters at its end, "
        "such as: Hello there temperature=1.2 max_tokens=5. Ctrl-C ends a generation; quit or "
        "Ctrl-D ends the client; help lists the parameters.",
    )
    parser.add_argument("request_model", nargs="?", default="", metavar="MODEL")
    add_connection(parser)
    parser.add_argument("--trace", action="store_true", help="print each entry of TOKEN messages")
    parser.set_defaults(run=run)


def split_parameters(line: str) -> tuple[str, dict[str, Any]]:
    """The prompt of a line, and the ``name=value`` parameters at its end.

    Only names of parameters are recognized: ``x=1`` at the end of a line of code stays in the
    prompt. Raises RequestError if the value of a parameter is not valid.
    """
    options: dict[str, Any] = {}
    while (found := _PARAMETER.search(line)) and found[1] in PARAMETERS:
        options.setdefault(found[1], parameter(found[1], found[2]))
        line = line[: found.start()]
    return line, options


def _warn(prompt: str) -> None:
    """Warns if the end of a prompt looks like a misspelt parameter."""
    found = _PARAMETER.search(prompt)
    near = difflib.get_close_matches(found[1], PARAMETERS, 1, 0.8) if found else []
    if found and near:
        print(
            f"tokenbus: {found[1]!r} is not a parameter, so it stays in the prompt; did you mean "
            f"{near[0]!r}?",
            file=sys.stderr,
        )


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Answers prompts until ``quit`` or the end of the input. On a terminal, returns 0. If the
    input is not a terminal, returns the exit code of the last prompt."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  Gives input() its history and editing.
    console = Console(highlight=False)
    last = OK
    with client_for(settings) as client:
        client.status()
        if args.request_model:
            client.model_info(args.request_model)
        terminal = sys.stdin.isatty()
        if terminal:
            console.print("type a prompt, with parameters at its end; or: help, quit", style="dim")
        while True:
            try:
                line = input(PROMPT if terminal else "")
            except EOFError:
                return OK if terminal else last
            except KeyboardInterrupt:
                print()
                continue
            command = line.strip()
            if command in ("quit", "exit"):
                return OK if terminal else last
            if command == "help":
                print(HELP)
            elif line.strip():
                last = _answer(client, line, args, console)


def _answer(client: Client, line: str, args: argparse.Namespace, console: Console) -> int:
    started = time.monotonic()
    try:
        prompt, options = split_parameters(line)
        _warn(prompt)
        with (
            Notices() as notices,
            begin(client, prompt, args.request_model, options, notices) as stream,
        ):
            if not args.trace:
                console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
                texts = Texts(stream, notices, with_inputs=False)
                try:
                    texts.follow()
                finally:
                    texts.end()
            else:
                for token in stream:
                    print(PROMPT + encode_body(token, "json").decode(), flush=True)
                print(prompt + stream.text())
    except TokenbusError as error:
        print()
        return report(error)
    except KeyboardInterrupt:
        console.print(" [cancelled]", style="dim", markup=False)
        return OK
    sequences = stream.sequences
    count = sum(len(s.tokens) for s in sequences)
    reason = ", ".join(s.finish_reason or "" for s in sequences)
    seconds = time.monotonic() - started
    if sys.stdout.isatty():
        console.print(f"[{count} tokens, {reason}, {seconds:.2f} s]", style="dim", markup=False)
    return exit_code(sequences)
