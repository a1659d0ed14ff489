"""Flags that several commands share, and the sampling parameters by name."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from ...protocol.errors import Code, RequestError
from ...protocol.messages import Generate
from ...protocol.settings import Settings
from .. import Client

PARAMETERS = {
    field.name: field
    for field in msgspec.structs.fields(Generate)
    if field.name not in ("stream_id", "prompt")
}
"""What may be said of a generation, by name."""
FLAGS = {
    "max_tokens": "tokens at most (64)",
    "temperature": "0 is greedy (default)",
    "top_p": "keep the smallest set of this probability",
    "top_k": "keep this many tokens",
    "min_p": "keep tokens this probable beside the best one",
    "seed": "the same seed gives the same tokens",
    "n": "sequences to sample (1)",
}
"""Those that have a flag of their own, and its help."""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that talks to a broker."""
    parser.add_argument("--front", metavar="ADDRESS", help="the broker (tcp://127.0.0.1:5555)")


def add_request(parser: argparse.ArgumentParser) -> None:
    """The flags of every request."""
    add_connection(parser)
    # Not dest=model: that setting is the model of the workers.
    parser.add_argument("--model", dest="request_model", metavar="M", default="", help="its name")
    parser.add_argument(
        "--timeout", type=_number("timeout_s"), metavar="S", help="give up after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_parameters(parser: argparse.ArgumentParser, names: Iterable[str] = tuple(FLAGS)) -> None:
    """The flags of a generation: those of ``FLAGS`` that are named, and ``--set`` for the rest."""
    for name in names:
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=f"p_{name}",
            type=_number(name),
            metavar="X",
            help=FLAGS[name],
        )
    parser.add_argument(
        "--set",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other parameter of GENERATE, as --set repetition_penalty=1.2",
    )


def parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of ``add_parameters`` and ``add_request`` as options of ``generate``.

    Raises RequestError for an invalid ``--set``.
    """
    given = {name: getattr(args, f"p_{name}", None) for name in FLAGS}
    options = {name: value for name, value in given.items() if value is not None}
    for item in args.parameters:
        name, _, text = item.partition("=")
        options[name.strip()] = parameter(name.strip(), text)
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    return options


def client_for(settings: Settings) -> Client:
    """A client of the system at the address in the settings."""
    return Client(settings.front_endpoint, patience_s=settings.command_timeout_s)


def given_text(words: list[str]) -> str:
    """The text of the arguments, or of standard input if they are ``-`` or missing."""
    if words in ([], ["-"]):
        return sys.stdin.read()
    return " ".join(words)


def parameter(name: str, text: str) -> Any:
    """The value of a parameter from its text; raises RequestError if it is not valid."""
    field = PARAMETERS.get(name)
    if field is None:
        known = ", ".join(sorted(PARAMETERS))
        raise RequestError(
            Code.INVALID_FIELD, f"unknown parameter {name!r}; the parameters are {known}"
        )
    try:
        return _value(name, text)
    except msgspec.ValidationError as error:
        what = str(error).split(" - at ")[0].replace("`", "")
        raise RequestError(Code.INVALID_FIELD, f"{name}={text}: {what}") from None


def _value(name: str, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    if name == "stop" and not isinstance(value, list):
        value = [value]
    try:
        return msgspec.convert(value, PARAMETERS[name].type, strict=False)
    except msgspec.ValidationError:
        # A name may consist of digits, as the beginning of a module id.
        with suppress(msgspec.ValidationError):
            return msgspec.convert(text, PARAMETERS[name].type, strict=False)
        raise


def _number(name: str) -> Callable[[str], Any]:
    """The ``type`` of a numeric flag for argparse, which adds the name of the flag to errors."""

    def parse(text: str) -> Any:
        try:
            value = _value(name, text)
        except msgspec.ValidationError as error:
            wanted = str(error).split(",")[0].split(" - at ")[0].replace("`", "")
            what = wanted.replace(" | null", "").replace("Expected ", "expected ")
            raise argparse.ArgumentTypeError(f"{what}, not {text!r}") from None
        if value is None or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"expected a number, not {text!r}")
        return value

    return parse
