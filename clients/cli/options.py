"""Flags that several commands share, and the sampling parameters by name."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from ...protocol.errors import Code, RequestError
from ...protocol.messages import Generate
from ...protocol.settings import Settings
from .. import Client

PATIENCE_S = 3.0
"""How long a command waits for a broker that does not answer, in seconds."""

PARAMETERS = {
    field.name: field
    for field in msgspec.structs.fields(Generate)
    if field.name not in ("stream_id", "prompt")
}
"""What may be said of a generation, by name."""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that talks to a broker."""
    parser.add_argument("--front", metavar="ADDRESS", help="the broker (tcp://127.0.0.1:5555)")


def add_request(parser: argparse.ArgumentParser) -> None:
    """The flags of every request."""
    add_connection(parser)
    # Not dest=model: that setting is the model of the workers.
    parser.add_argument("--model", dest="request_model", metavar="M", default="", help="its name")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after S seconds")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def client_for(settings: Settings) -> Client:
    """A client of the system that the settings name."""
    return Client(settings.front, patience_s=PATIENCE_S)


def given_text(words: list[str]) -> str:
    """The text of the arguments, or standard input where they are ``-`` or missing."""
    if words in ([], ["-"]):
        return sys.stdin.read()
    return " ".join(words)


def parameter(name: str, text: str) -> Any:
    """The value of a parameter from its text; raises RequestError, naming what would be right."""
    field = PARAMETERS.get(name)
    if field is None:
        known = ", ".join(sorted(PARAMETERS))
        raise RequestError(
            Code.INVALID_FIELD, f"there is no parameter {name!r}; known are: {known}"
        )
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = text
    if name == "stop" and not isinstance(value, list):
        value = [value]
    try:
        return msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError as error:
        what = str(error).split(" - at ")[0].replace("`", "")
        raise RequestError(Code.INVALID_FIELD, f"{name}={text}: {what}") from None
