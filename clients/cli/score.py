"""``tokenbus score``: the log-probabilities of a text after a prompt."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from ...protocol.settings import Settings
from .exits import OK
from .notices import Notices
from .options import add_request, client_for


def add_command(commands: Any) -> None:
    """Adds ``score``."""
    parser = commands.add_parser(
        "score",
        allow_abbrev=False,
        help="print the log-probabilities of a text",
        description="Prints the natural log-probability of each token of TEXT after PROMPT.",
    )
    parser.add_argument("prompt", help="text before the scored text")
    parser.add_argument("text", help="text to score")
    add_request(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the log-probabilities of one text; returns the exit code."""
    options: dict[str, Any] = {"model": args.request_model}
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    with client_for(settings) as client, Notices() as notices:
        scores = client.score(args.prompt, args.text, on_system=notices, **options)
    if args.json:
        fields = {
            "tokens": scores.tokens,
            "logprobs": scores.logprobs,
            "texts": scores.texts,
            "total": scores.total,
        }
        print(msgspec.json.encode(fields).decode())
        return OK
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text")
    table.add_column("logprob", justify="right")
    for token, text, logprob in zip(scores.tokens, scores.texts, scores.logprobs, strict=True):
        table.add_row(str(token), repr(text)[1:-1], f"{logprob:.4f}")
    table.add_row("total", "", f"{scores.total:.4f}", style="bold")
    Console(highlight=False).print(table)
    return OK
