"""``tokenbus generate``: one prompt, streamed to standard output."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from ...protocol.settings import Settings
from .. import Client, Stream
from .module_files import check_writable
from .notices import Notices
from .options import add_parameters, add_request, client_for, given_text, parameters
from .texts import Texts, exit_code, print_completed


def add_command(commands: Any) -> None:
    """Adds ``generate``."""
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="stream the continuation of a prompt",
        description="Streams the continuation of a prompt. If the prompt is '-' or missing, it is "
        "read from standard input.",
    )
    parser.add_argument("prompt", nargs="*", help="text")
    add_request(parser)
    add_parameters(parser)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="text that ends the sequence; repeatable"
    )
    parser.add_argument("--record", metavar="FILE", help="write a recording for tokenbus replay")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Streams one generation; returns the exit code."""
    options = parameters(args)
    if args.stop:
        options["stop"] = args.stop
    if args.record:
        check_writable(args.record)
        options["record"] = args.record
    prompt = given_text(args.prompt)
    with client_for(settings) as client, Notices() as notices:
        stream = begin(client, prompt, args.request_model, options, notices)
        if args.json:
            return _print_json(stream)
        if args.echo:
            print(prompt, end="", flush=True)
        if options.get("n", 1) > 1:
            print_completed(stream, notices)
            return exit_code(stream.sequences)
        texts = Texts(stream, notices)
        try:
            texts.follow()
        finally:
            texts.end()
        return exit_code(stream.sequences)


def begin(
    client: Client, prompt: str, model: str, options: dict[str, Any], notices: Notices
) -> Stream:
    """Starts the stream of a prompt. ``notices`` receives the stream's SYSTEM notices."""
    given: dict[str, Any] = {"model": model, "on_system": notices, "text": True}
    return client.generate(prompt, **(given | options))


def _print_json(stream: Stream) -> int:
    sequences = [
        {
            "seq": s.seq,
            "parent": s.parent,
            "text": s.text,
            "tokens": s.tokens,
            "logprobs": s.logprobs,
            "top_logprobs": s.top_logprobs,
            "logs": s.logs,
            "storage": s.storage,
            "finish_reason": s.finish_reason,
            "constraint": s.constraint,
            "error": s.error,
        }
        for s in stream.wait()
    ]
    print(msgspec.json.encode({"sequences": sequences}).decode())
    return exit_code(stream.sequences)
