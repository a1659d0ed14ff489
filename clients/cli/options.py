"""Flags that several commands share, and the sampling parameters by name."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from ...protocol.decoders import convert
from ...protocol.errors import Code, RequestError
from ...protocol.expected_values import expected
from ...protocol.messages import Generate
from ...protocol.settings import AtLeastOne, Settings
from .. import Client
from ..system.started import is_started
from .module_files import FileFault, text_or_file

PARAMETERS = {
    field.name: field
    for field in msgspec.structs.fields(Generate)
    if field.name not in ("stream_id", "prompt")
}
"""The fields of GENERATE that are options of a generation, by name."""
FLAGS = {
    "max_tokens": "maximum number of generated tokens (default: 64)",
    "min_tokens": "minimum number of generated tokens (default: 0)",
    "temperature": "sampling temperature; 0 is greedy (default: 0)",
    "top_p": "sample from the fewest tokens with this total probability",
    "top_k": "sample from this number of most likely tokens",
    "min_p": "minimum probability, as a fraction of the likeliest token's probability",
    "seed": "seed of the sampler (default: a random number)",
    "n": "number of sequences (default: 1)",
}
"""The options that have their own flag, and the help text of the flag."""
NOT_IN_JSON = re.compile(r"[+-]?(\.[0-9]+|[0-9]+\.[0-9]*)")
"""Matches numbers that JSON does not have, such as ``.7``."""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that connects to a broker."""
    parser.add_argument("--front", metavar="ADDRESS", help="broker (tcp://127.0.0.1:5555)")


def add_request(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every request."""
    add_connection(parser)
    # The dest is not ``model``, because the setting ``model`` is the model of the workers.
    parser.add_argument(
        "--model", dest="request_model", metavar="M", default="", help="name of the model"
    )
    parser.add_argument(
        "--timeout", type=number("timeout_s"), metavar="S", help="give up after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_parameters(parser: argparse.ArgumentParser, names: Iterable[str] = tuple(FLAGS)) -> None:
    """Adds the flags of a generation: the flags of ``FLAGS`` in ``names``, and ``--set`` for the
    other options."""
    for name in names:
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=f"p_{name}",
            type=number(name),
            metavar="X",
            help=FLAGS[name],
        )
    parser.add_argument(
        "--set",
        type=_assignment,
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another parameter of GENERATE, for example --set repetition_penalty=1.2",
    )


def parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``add_parameters`` and ``add_request``, as options of
    ``generate``."""
    given = {name: getattr(args, f"p_{name}", None) for name in FLAGS}
    options = {name: value for name, value in given.items() if value is not None}
    options.update(args.parameters)
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    return options


def at_least_one(text: str) -> int:
    """Parses a count of at least 1. argparse calls this function as a ``type``, and adds the flag's
    name to errors."""
    try:
        return convert(text, AtLeastOne, strict=False)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(expected(error, text)) from None


def _assignment(item: str) -> tuple[str, Any]:
    """Parses ``NAME=VALUE``. argparse calls this function as a ``type``, and adds the flag's name
    to errors."""
    name, equals, text = item.partition("=")
    try:
        return name.strip(), parameter(name.strip(), text if equals else None)
    except RequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def client_for(settings: Settings) -> Client:
    """A client of the system at the address in the settings. If ``tokenbus up`` runs this system on
    this machine, the client waits longer for an answer, because the broker may be starting."""
    front, patience_s = settings.front_endpoint, settings.command_timeout_s
    if is_started(front):
        patience_s = max(patience_s, settings.session_timeout_s)
    return Client(front, patience_s=patience_s)


def given_text(words: list[str]) -> str:
    """The arguments, joined to a text. If the argument is ``-`` or missing, the text is read from
    standard input."""
    if words not in ([], ["-"]):
        return " ".join(words)
    content = sys.stdin.buffer.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FileFault(
            f"standard input is not valid UTF-8 at byte {error.start} "
            f"(0x{content[error.start]:02x}); convert it, as with: iconv -f latin1 -t utf-8"
        ) from None


def parameter(name: str, text: str | None) -> Any:
    """Parses the value of a parameter. ``@FILE`` as the value of ``controller_arg`` stands for the
    text of the file. Raises RequestError if the parameter is unknown, or if the value is missing or
    not valid."""
    if name not in PARAMETERS:
        near = difflib.get_close_matches(name, PARAMETERS, 1, 0.7)
        known = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(sorted(PARAMETERS))}"
        raise RequestError(Code.INVALID_FIELD, f"unknown parameter {name!r}; {known}")
    if text is None:
        what = f"the parameter {name!r} has no value; use --set {name}=VALUE"
        raise RequestError(Code.INVALID_FIELD, what)
    if name == "controller_arg" and text.startswith("@"):
        try:
            return text_or_file(name, text)
        except FileFault as fault:
            raise RequestError(Code.INVALID_FIELD, str(fault)) from None
    try:
        return _value(name, text)
    except msgspec.ValidationError as error:
        raise RequestError(Code.INVALID_FIELD, f"{name}: {expected(error, text)}") from None


def _value(name: str, text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = float(text) if NOT_IN_JSON.fullmatch(text) else text
    if name == "stop" and not isinstance(value, list):
        value = [value]
    try:
        return convert(value, PARAMETERS[name].type, strict=False)
    except msgspec.ValidationError:
        # A text of digits was decoded as a number. But it may be the name of a controller, such as
        # the beginning of a module id.
        with suppress(msgspec.ValidationError):
            return convert(text, PARAMETERS[name].type, strict=False)
        raise


def number(name: str) -> Callable[[str], Any]:
    """Returns a parser for the value of a numeric flag. argparse calls the parser as a ``type``,
    and adds the flag's name to errors."""

    def parse(text: str) -> Any:
        try:
            value = _value(name, text)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(expected(error, text)) from None
        if value is None or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"expected a number, not {text!r}")
        return value

    return parse
