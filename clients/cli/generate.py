"""``tokenbus generate``: one prompt, streamed to standard output."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
from msgspec import UNSET

from ...protocol.messages import Token
from ...protocol.settings import Settings
from .. import Client, Stream
from .exits import FAILED, OK
from .notices import Notices
from .options import add_request, client_for, given_text, parameter

FLAGS = {
    "max_tokens": "tokens at most (64)",
    "temperature": "0 is greedy (default)",
    "top_p": "keep the smallest set of this probability",
    "top_k": "keep this many tokens",
    "min_p": "keep tokens this probable beside the best one",
    "seed": "the same seed gives the same tokens",
    "n": "sequences to sample (1)",
}


def add_command(commands: Any) -> None:
    """Adds ``generate``."""
    parser = commands.add_parser(
        "generate",
        allow_abbrev=False,
        help="stream what a model makes of a prompt",
        description="Streams the continuation of a prompt; '-' or nothing reads it from stdin.",
    )
    parser.add_argument("prompt", nargs="*", help="text")
    add_request(parser)
    for name, what in FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), dest=f"p_{name}", metavar="X", help=what)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop there; repeatable")
    parser.add_argument(
        "--set",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other parameter of GENERATE, as --set repetition_penalty=1.2",
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Streams one generation."""
    options: dict[str, Any] = {
        name: parameter(name, text)
        for name in FLAGS
        if (text := getattr(args, f"p_{name}")) is not None
    }
    for item in args.parameters:
        name, _, text = item.partition("=")
        options[name.strip()] = parameter(name.strip(), text)
    if args.stop:
        options["stop"] = args.stop
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    prompt = given_text(args.prompt)
    with client_for(settings) as client, Notices() as notices:
        stream = begin(client, prompt, args.request_model, options, notices)
        if args.json:
            return _print_json(stream)
        if args.echo:
            print(prompt, end="", flush=True)
        if options.get("n", 1) > 1:
            return _print_sequences(stream, notices)
        return print_stream(stream, notices)


def begin(
    client: Client, prompt: str, model: str, options: dict[str, Any], notices: Notices
) -> Stream:
    """The stream of a prompt, with its notices shown."""
    given: dict[str, Any] = {"model": model, "on_system": notices, "text": True}
    return client.generate(prompt, **(given | options))


def print_stream(stream: Stream, notices: Notices) -> int:
    """Prints the text of one sequence as it comes."""
    said = False
    try:
        for token in stream:
            notices.clear()
            said = True
            print(_text(token), end="", flush=True)
    finally:
        if said:
            print(flush=True)
    return OK


def _print_sequences(stream: Stream, notices: Notices) -> int:
    """Prints several sequences, each when it is complete."""
    for token in stream:
        notices.clear()
        if token.finish_reason is not None:
            text = next(s.text for s in stream.sequences if s.seq == token.seq)
            print(
                f"--- sequence {token.seq} ({token.error or token.finish_reason})\n{text}",
                flush=True,
            )
    return FAILED if all(s.finish_reason == "error" for s in stream.sequences) else OK


def _print_json(stream: Stream) -> int:
    sequences = [
        {
            "seq": s.seq,
            "text": s.text,
            "tokens": s.tokens,
            "logprobs": s.logprobs,
            "top_logprobs": s.top_logprobs,
            "finish_reason": s.finish_reason,
            "error": s.error,
        }
        for s in stream.wait()
    ]
    print(msgspec.json.encode({"sequences": sequences}).decode())
    return OK


def _text(token: Token) -> str:
    return "" if token.text is UNSET else token.text
