"""``tokenbus replay``: runs a recorded stream again and prints the first difference."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import UNSET

from ...protocol.errors import TokenbusError
from ...protocol.messages import Token
from ...protocol.settings import Settings
from .. import Client
from ..recording import Recording, again, first_difference, read_recording
from .exits import FAILED, OK
from .module_files import FileFault, check_writable, read_module
from .options import add_connection, at_least_one, client_for
from .own_system import broker_answers, own_system

SHOWN = 8
"""For an entry, ``--show masks`` prints at most this number of allowed tokens, of forbidden tokens,
and of biases."""

_TEST = '''\
"""{what}

Written by ``tokenbus replay {file} --test``.
"""

import subprocess
import sys
from pathlib import Path

RECORDING = Path(__file__).with_name({name!r})
CONTROLLER = ""
"""A .wasm or .c file next to this file, to run instead of the recorded module."""


def test_{function}() -> None:
    command = [sys.executable, "-P", "-m", "tokenbus.clients.cli", "replay", str(RECORDING)]
    command += ["--own-system", "--expect", {expect!r}]
    if CONTROLLER:
        command += ["--controller", str(Path(__file__).with_name(CONTROLLER))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
'''


def add_command(commands: Any) -> None:
    """Adds ``replay``."""
    parser = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="run a recorded stream again and compare it",
        description="Runs a recorded stream and its controller again, and compares the entries. "
        "The exit code is 0 if all entries are the same, otherwise 1; the first difference is "
        "printed. If no system is running, the command starts one for this run.",
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    add_connection(parser)
    parser.add_argument(
        "--own-system", action="store_true", help="start a system even if one is running"
    )
    parser.add_argument(
        "--model", dest="request_model", metavar="M", help="model, if not the recorded one"
    )
    parser.add_argument(
        "--until", type=at_least_one, metavar="N", help="compare only the first N entries"
    )
    parser.add_argument(
        "--show",
        choices=("entries", "masks"),
        help="print each entry; 'masks' adds the allowed and forbidden tokens",
    )
    parser.add_argument(
        "--controller",
        metavar="FILE",
        help="file (.wasm, .c or a script) to run instead of the recorded module",
    )
    parser.add_argument(
        "--expect",
        choices=("same", "success"),
        default="same",
        help="same: all entries are the same (default); success: no error, whatever the tokens",
    )
    parser.add_argument(
        "--test", metavar="PATH", help="write a test to PATH and copy the recording next to it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Replays; returns the exit code. Raises FileFault if a file cannot be used."""
    try:
        recording = read_recording(args.file)
    except OSError as error:
        raise FileFault(f"cannot read {args.file}: {error.strerror}") from None
    if args.test:
        return _write_test(args, recording)
    module = read_module(Path(args.controller)) if args.controller else None
    with _client(args, settings, recording) as client:
        return _replay(args, recording, client, module)


@contextmanager
def _client(args: argparse.Namespace, settings: Settings, recording: Recording) -> Iterator[Client]:
    named = args.front is not None or settings.front != Settings().front
    if not args.own_system and (named or broker_answers(settings)):
        with client_for(settings) as client:
            yield client
        return
    model = args.request_model or (recording.model.name if recording.model else "embedded")
    with own_system(settings, model) as client:
        yield client


def _replay(
    args: argparse.Namespace, recording: Recording, client: Client, module: bytes | None
) -> int:
    entries: list[Token] = []
    failed: TokenbusError | None = None
    masks = args.show == "masks"
    texts = _texts(client, args.request_model or recording.request.model) if masks else None
    try:
        for entry in again(
            client,
            recording,
            module=module,
            until=args.until,
            inspect=masks,
            model=args.request_model,
        ):
            entries.append(entry)
            if args.show:
                print(_line(entry, texts), flush=True)
    except TokenbusError as error:
        failed = error
        if not entries and not recording.failure:
            raise
    failure = next((e.error for e in entries if e.error), failed.message if failed else "")
    if args.expect == "success":
        ends = f"and the stream failed: {failure}" if failure else "without an error, as expected"
        print(f"{_entries(len(entries))} {ends}")
        return FAILED if failure else OK
    prefix = args.until is not None or not recording.complete
    difference = first_difference(recording.entries, entries, prefix)
    if difference is not None:
        print(difference)
        return FAILED
    if not prefix and failure != recording.failure:
        was, now = recording.failure or "no error", failure or "no error"
        print(f"the end differs: recorded {was}, now {now}")
        return FAILED
    ends = f", with the recorded error: {failure}" if failure else ""
    print(f"the same: {_entries(len(entries))}{ends}")
    return OK


def _texts(client: Client, model: str) -> Callable[[int], str]:
    """Returns a function that maps a token of this model to its text. If the model has no
    tokenizer, or the package tokenizers is not installed, the function returns the token's id as
    text."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(client.tokenizer(model).json)
    except (ImportError, TokenbusError):
        return str
    return lambda token: repr(tokenizer.decode([token], skip_special_tokens=False))


def _line(entry: Token, texts: Callable[[int], str] | None) -> str:
    """Formats an entry. If ``texts`` is given, adds the mask and the bias of the entry."""
    what = f"{entry.seq}:{entry.pos}"
    if entry.parent is not None:
        what += f"  fork of {entry.parent}"
    if entry.backtrack:
        what += f"  drops {entry.backtrack}"
    if entry.token is not None:
        text = "" if entry.text is UNSET else f" {entry.text!r}"
        chance = "appended" if entry.logprob is None else f"{entry.logprob:.3f}"
        what += f"  {entry.token}{text}  {chance}"
    if texts is not None and entry.logprob is not None:
        what += f"  {_mask(entry, texts)}"
    if entry.logs:
        what += f"  log {entry.logs!r}"
    if entry.storage:
        what += f"  writes {entry.storage}"
    if entry.finish_reason is not None:
        what += f"  ends: {entry.finish_reason}" + (f": {entry.error}" if entry.error else "")
    return what


def _mask(entry: Token, texts: Callable[[int], str]) -> str:
    """Formats the mask and the bias of a sampled entry, and the time of the controller's round."""
    parts = ["every token is allowed"]
    if entry.allowed is not UNSET:
        # ``top_logprobs`` has the likeliest tokens. ``cut`` has those of them that are forbidden.
        likely = {} if entry.top_logprobs is UNSET else entry.top_logprobs
        ids = sorted(likely.keys() - set(entry.cut), key=lambda i: (-likely[i], i))
        more = ", …" if entry.allowed > min(len(ids), SHOWN) else ""
        counted = "1 token is" if entry.allowed == 1 else f"{entry.allowed} tokens are"
        parts = [f"{counted} allowed: {', '.join(map(texts, ids[:SHOWN]))}{more}"]
    if entry.cut:
        more = ", …" if len(entry.cut) > SHOWN else ""
        parts.append(f"forbidden: {', '.join(map(texts, entry.cut[:SHOWN]))}{more}")
    if entry.bias:
        changed = sorted(entry.bias.items(), key=lambda one: -abs(one[1]))[:SHOWN]
        more = ", …" if len(entry.bias) > SHOWN else ""
        parts.append("bias: " + ", ".join(f"{texts(t)} {b:+g}" for t, b in changed) + more)
    if entry.round_us:
        parts.append(f"the round took {entry.round_us} us")
    return "; ".join(parts)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _write_test(args: argparse.Namespace, recording: Recording) -> int:
    test = Path(args.test)
    check_writable(args.test)
    copy = test.with_suffix(".recording.json")
    failure = recording.failure
    what = (
        "A stream that failed once ends without an error."
        if failure
        else ("A stream gives the same tokens as when it was recorded.")
    )
    name = test.stem.removeprefix("test_")
    function = "".join(c if c.isalnum() else "_" for c in name) or "stream"
    text = _TEST.format(
        what=what,
        file=Path(args.file).name,
        name=copy.name,
        function=function,
        expect="success" if failure else "same",
    )
    try:
        if test.exists():
            raise FileFault(f"{test} already exists; give the name of a new file")
        shutil.copyfile(args.file, copy)
        test.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileFault(f"cannot write {test}: {error.strerror}") from None
    print(f"wrote {test} and {copy}", file=sys.stderr)
    return OK
