"""``tokenbus controller run``: generates text under a controller. The command names the controller,
or its file."""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from ...protocol.errors import Code, TokenbusError, error_for
from ...protocol.messages import StoredModule
from ...protocol.scripts import SCRIPT_MARK
from ...protocol.settings import Settings
from .. import Client, Stream
from .dialogue import Dialogue
from .exits import report
from .generate import begin
from .module_files import SUFFIXES, FileFault, is_file, read_module, text_or_file
from .notices import Notices
from .options import client_for, parameters
from .own_system import broker_answers, interrupted, own_system
from .texts import Texts, exit_code

DEFAULT_PROMPT = "\n"
"""The default prompt: a line break, because a prompt must not be empty."""
STORED_S = 10.0
"""If a run is interrupted during the upload of its module, it waits at most this number of seconds
for the end of the upload."""

_LEASE = re.compile(r"run-[0-9a-f]{16}")
"""Matches the tag that a run adds to its module, so that the store keeps the module during the
run."""


def try_controller(args: argparse.Namespace, settings: Settings) -> int:
    """Runs a controller; returns the exit code. Raises FileFault if a file or an option is not
    usable."""
    options = parameters(args)
    for name in ("controller", "controller_arg"):
        if name in options:
            raise FileFault(f"--set {name} is not valid here; use the argument of run, and --arg")
    wasm = read_module(Path(args.program)) if is_file(args.program) else None
    is_script = wasm is not None and wasm.startswith(SCRIPT_MARK)
    options["controller"] = args.program
    if args.arg is not None:
        options["controller_arg"] = text_or_file("--arg", args.arg)
        if is_script:
            _report_text(options["controller_arg"])
    with ExitStack() as stack:
        named = args.front is not None or settings.front != Settings().front
        if named or broker_answers(settings):
            client = stack.enter_context(client_for(settings))
            if wasm is not None:
                options["controller"] = stack.enter_context(_lent(client, wasm))
        else:
            own = own_system(settings, args.request_model or "embedded")
            client = stack.enter_context(own)
            if wasm is not None:
                options["controller"] = client.upload_controller(wasm).module
        notices = stack.enter_context(Notices())
        stream = begin(client, args.prompt, args.request_model, options, notices)
        shown = _Json(stream) if args.json else Texts(stream, notices)
        try:
            shown.follow()
        except TokenbusError as error:
            shown.end()
            return report(_with_suffixes(error, args.program))
        shown.end()
        if is_script:
            _report_unfinished(stream)
        return exit_code(stream.sequences)


def _report_text(arg: str) -> None:
    """Prints a warning on stderr if a script's argument begins like a JSON object but is not valid
    JSON. The script then gets the argument as text."""
    if not arg.lstrip().startswith("{"):
        return
    try:
        msgspec.json.decode(arg)
    except msgspec.MsgspecError as error:
        print(
            f"tokenbus: --arg begins like a JSON object but is not JSON ({error}), so the script "
            "gets a text",
            file=sys.stderr,
        )


def _report_unfinished(stream: Stream) -> None:
    """Prints a warning on stderr for each sequence that reached the maximum number of tokens. The
    program of such a sequence may not have finished."""
    for sequence in stream.sequences:
        if sequence.finish_reason == "length":
            print(
                f"tokenbus: sequence {sequence.seq} reached its maximum of tokens, so its program "
                "may not have finished; raise --max-tokens, unless the context is full",
                file=sys.stderr,
            )


def _with_suffixes(error: TokenbusError, program: str) -> TokenbusError:
    """Returns ``error``. If the controller is unknown, and ``program`` looks like a file name, adds
    the valid suffixes of files to the error's message."""
    unknown = error.code == Code.UNKNOWN_CONTROLLER
    if not unknown or ":" in program or not Path(program).suffix:
        return error
    what = f"the name of a file ends with one of {', '.join(SUFFIXES)}, or contains a /"
    return error_for(error.code, f"{error.message}; {what}")


@contextmanager
def _lent(client: Client, wasm: bytes) -> Iterator[str]:
    """Stores a module for the ``with`` block and yields its id. The module is deleted afterwards
    unless it was stored before.

    Each run adds a tag ``run-…`` to the module, and removes the tag at its end. The module is
    deleted only if it then has no other tag. So if several runs use the module at the same time,
    the last one deletes it.
    """
    module = hashlib.sha256(wasm).hexdigest()
    before = _tags(client, module)
    if before is not None and (not before or not all(map(_LEASE.fullmatch, before))):
        yield module
        return
    lease = f"run-{secrets.token_hex(8)}"
    with interrupted():
        # An upload cannot be cancelled. If the run is interrupted during the upload, the upload
        # continues on its thread. The stored module is deleted afterwards.
        stored: Future[StoredModule] = Future()

        def upload() -> None:
            try:
                stored.set_result(client.upload_controller(wasm, lease))
            except BaseException as error:
                stored.set_exception(error)

        try:
            threading.Thread(target=upload, daemon=True).start()
            yield stored.result().module
        finally:
            with suppress(TokenbusError, TimeoutError):
                stored.result(timeout=STORED_S)
                client.delete_controller(module if _tags(client, module) == [lease] else lease)


def _tags(client: Client, module: str) -> list[str] | None:
    """The tags of a module; None if the module is not stored."""
    return next((m.tags for m in client.controllers() if m.module == module), None)


class _Json:
    """Prints one JSON object when the stream has ended, even after an error."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def follow(self) -> None:
        """Reads the stream to its end."""
        dialogue = Dialogue(self._stream)
        for entry in dialogue.entries():
            dialogue.show(entry, line_begun=False)

    def end(self) -> None:
        """Prints the object."""
        sequences = [
            {
                "seq": s.seq,
                "parent": s.parent,
                "text": s.text,
                "tokens": s.tokens,
                "logs": s.logs,
                "storage": s.storage,
                "messages": s.messages,
                "waiting": s.waiting,
                "finish_reason": s.finish_reason,
                "constraint": s.constraint,
                "error": s.error,
            }
            for s in self._stream.sequences
        ]
        print(msgspec.json.encode({"sequences": sequences}).decode(), flush=True)
