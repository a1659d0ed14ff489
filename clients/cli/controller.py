"""``tokenbus controller``: programs that steer the output, uploaded, named, listed and tried."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import Code, TokenbusError, error_for
from ...protocol.messages import StoredModule
from ...protocol.settings import Settings, environment
from .. import Client, Sequence, Stream
from .exits import OK, WRONG_USAGE, report
from .generate import begin
from .notices import Notices
from .options import add_connection, add_request, client_for, parameter
from .own_system import own_system, somebody_answers

SUFFIXES = (".wasm", ".c")
"""How the names of files end; anything else that is no file's name is a tag, an id, a built-in."""
DEFAULT_PROMPT = "\n"
"""There must be one: a model continues something."""
C_FLAGS = "-target wasm32-freestanding -O2 -g0 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=65536"


def add_command(commands: Any) -> None:
    """Adds ``controller`` and what it can do."""
    parser = commands.add_parser(
        "controller",
        allow_abbrev=False,
        help="upload and try programs that steer the output",
        description="Programs (Wasm) that decide, token by token, what a model may say.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add in (_add_upload, _add_tag, _add_list, _add_delete, _add_run, _add_serve):
        add(actions)


def _add_upload(actions: Any) -> None:
    parser = actions.add_parser("upload", allow_abbrev=False, help="store a module")
    parser.add_argument("file", type=Path, metavar="FILE", help="Wasm, or C to be compiled first")
    parser.add_argument("--tag", metavar="T", help="a name for it")
    _finish(parser, _upload)


def _add_tag(actions: Any) -> None:
    parser = actions.add_parser("tag", allow_abbrev=False, help="give a module names")
    parser.add_argument("module", metavar="MODULE", help="its id, or a tag of it")
    parser.add_argument("tags", nargs="+", metavar="TAG", help="names no other module any more")
    _finish(parser, _tag)


def _add_list(actions: Any) -> None:
    parser = actions.add_parser("list", allow_abbrev=False, help="what has been uploaded")
    _finish(parser, _list)


def _add_delete(actions: Any) -> None:
    parser = actions.add_parser("delete", allow_abbrev=False, help="drop a tag, or a module")
    parser.add_argument("name", metavar="NAME", help="a tag, or a module's id")
    _finish(parser, _delete)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=_reporting(run))


def _add_run(actions: Any) -> None:
    parser = actions.add_parser(
        "run",
        allow_abbrev=False,
        help="try one",
        description="Generates under a controller. Where no system runs, it starts one on the "
        "embedded model, for this run only.",
    )
    parser.add_argument("program", metavar="FILE|TAG|ID", help="Wasm, C, or what was uploaded")
    parser.add_argument("--arg", metavar="A", help="what the controller is given")
    parser.add_argument(
        "--prompt", metavar="P", default=DEFAULT_PROMPT, help="what it continues (a new line)"
    )
    parser.add_argument("--max-tokens", metavar="N", help="tokens at most (64)")
    add_request(parser)
    parser.set_defaults(run=_reporting(_run))


def _add_serve(actions: Any) -> None:
    parser = actions.add_parser(
        "serve",
        allow_abbrev=False,
        help="run a controller written in Python",
        description="A worker for Python controllers of your own, beside a system that runs: "
        "classes and scripts, named as MODULE:NAME and found in the current folder too.",
    )
    parser.add_argument("programs", nargs="+", metavar="MODULE:NAME", help="what to serve")
    parser.add_argument("--run-dir", dest="run_dir", metavar="DIR", help="the system's folder")
    parser.add_argument("--back", metavar="ADDRESS", help="its address for workers")
    parser.set_defaults(run=_reporting(_serve))


class FileFault(Exception):
    """A file cannot be read, or cannot be compiled."""


def _reporting(command: Any) -> Any:
    """``command`` with what is wrong with a file as one line, and its exit code."""

    def run(args: argparse.Namespace, settings: Settings) -> int:
        try:
            code: int = command(args, settings)
        except FileFault as fault:
            print(f"tokenbus: {fault}", file=sys.stderr)
            return WRONG_USAGE
        return code

    return run


# --- the store ------------------------------------------------------------------------------------


def _upload(args: argparse.Namespace, settings: Settings) -> int:
    wasm = read_module(args.file)
    with client_for(settings) as client:
        return _show(client.upload_controller(wasm, args.tag), args.json)


def _tag(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        return _show(client.tag_controller(args.module, *args.tags), args.json)


def _delete(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        return _show(client.delete_controller(args.name), args.json)


def _list(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        modules = client.controllers()
    if args.json:
        print(msgspec.json.encode([msgspec.structs.asdict(m) for m in modules]).decode())
        return OK
    for module in modules:
        _show(module, False)
    if not modules:
        print("no module has been uploaded", file=sys.stderr)
    return OK


def _show(module: StoredModule, as_json: bool) -> int:
    """A module on a line: what programs take apart, first its id."""
    if as_json:
        print(msgspec.json.encode(msgspec.structs.asdict(module)).decode())
        return OK
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(module.uploaded))
    forks = "" if module.forks else "  (no forks)"
    print(
        f"{module.module}  {module.size:>9,} bytes  {module.abi:6}  {when}  "
        f"{' '.join(module.tags) or '-'}{forks}"
    )
    return OK


# --- modules in files -----------------------------------------------------------------------------


def read_module(file: Path) -> bytes:
    """The Wasm in a file, or made of the C in it; raises FileFault."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise FileFault(f"cannot read {file}: {error.strerror}") from None
    return _compiled(file) if file.suffix == ".c" else content


def _compiled(source: Path) -> bytes:
    """The module of one C file, against the SDK of this installation."""
    if importlib.util.find_spec("ziglang") is None:
        raise FileFault(
            f"{source} is C, and there is no compiler: pip install ziglang, or compile it to Wasm"
        )
    workers = importlib.util.find_spec("tokenbus.workers")
    places = workers.submodule_search_locations if workers is not None else None
    include = [f"-I{place}/controller/sdk" for place in places or []]
    with tempfile.TemporaryDirectory(prefix="tokenbus-c-") as folder:
        out = Path(folder) / "out.wasm"
        command = [sys.executable, "-m", "ziglang", "cc", *C_FLAGS.split(), *include]
        done = subprocess.run(
            [*command, str(source), "-o", str(out)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FileFault(f"{source} does not compile:\n{done.stderr.rstrip()}")
        return out.read_bytes()


# --- a worker of one's own ------------------------------------------------------------------------


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    """Becomes the worker's process, so that signals and exit codes are its own."""
    if importlib.util.find_spec("wasmtime") is None:
        raise FileFault("this needs what controllers need: pip install 'tokenbus[controller]'")
    command = [sys.executable, "-m", "tokenbus.workers.controller", *args.programs]
    sys.stdout.flush()
    os.execve(sys.executable, command, os.environ | environment(settings))


# --- a run ----------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, settings: Settings) -> int:
    file = Path(args.program)
    is_file = file.suffix in SUFFIXES or "/" in args.program or file.is_file()
    wasm = read_module(file) if is_file else None
    options: dict[str, Any] = {"controller": args.program}
    if args.arg is not None:
        options["controller_arg"] = args.arg
    if args.max_tokens is not None:
        options["max_tokens"] = parameter("max_tokens", args.max_tokens)
    if args.timeout is not None:
        options["timeout_s"] = args.timeout
    with _system(args, settings) as client, Notices() as notices:
        if wasm is not None:
            options["controller"] = client.upload_controller(wasm).module
        stream = begin(client, args.prompt, args.request_model, options, notices)
        shown = _AsJson(stream) if args.json else _AsText(stream, notices)
        try:
            shown.follow()
        except TokenbusError as error:
            shown.end()
            return report(error, client.front)
        shown.end()
        return _exit_code(stream.sequences, client.front)


@contextmanager
def _system(args: argparse.Namespace, settings: Settings) -> Iterator[Client]:
    """A client of the system that runs, or of one that is started where none was named and runs."""
    named = args.front is not None or settings.front != Settings().front
    if named or somebody_answers(settings.front):
        with client_for(settings) as client:
            yield client
        return
    with own_system(settings, args.request_model or "embedded") as client:
        yield client


def _exit_code(sequences: list[Sequence], front: str) -> int:
    """That of the first failure, where every sequence failed."""
    failed = [s for s in sequences if s.finish_reason == "error"]
    for s in failed:
        error = error_for(s.code or Code.INTERNAL, f"sequence {s.seq}: {s.error}")
        code = report(error, front)
    return code if failed and len(failed) == len(sequences) else OK


class _AsJson:
    """One JSON object when all is over, also where it ended with an error."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def follow(self) -> None:
        self._stream.wait()

    def end(self) -> None:
        sequences = [
            {
                "seq": s.seq,
                "parent": s.parent,
                "text": s.text,
                "tokens": s.tokens,
                "logs": s.logs,
                "storage": s.storage,
                "finish_reason": s.finish_reason,
                "error": s.error,
            }
            for s in self._stream.sequences
        ]
        print(msgspec.json.encode({"sequences": sequences}).decode(), flush=True)


class _AsText:
    """The text of a single sequence as it comes; several ones, and logs, when all is over.

    What was printed cannot be taken back: after a backtrack the text begins again on a new line.
    """

    def __init__(self, stream: Stream, notices: Notices) -> None:
        self._stream = stream
        self._notices = notices
        self._printed = False

    def follow(self) -> None:
        for token in self._stream:
            self._notices.clear()
            sequences = self._stream.sequences
            if len(sequences) > 1:
                continue
            if token.backtrack and self._printed:
                count = "a token" if token.backtrack == 1 else f"{token.backtrack} tokens"
                print(f"\n--- {count} taken back", flush=True)
                print(sequences[0].text, end="", flush=True)
            elif token.text:
                print(token.text, end="", flush=True)
                self._printed = True

    def end(self) -> None:
        if self._printed:
            print()
        sequences = self._stream.sequences
        for s in sequences:
            if len(sequences) > 1:
                of = f", fork of {s.parent}" if s.parent is not None else ""
                print(f"--- sequence {s.seq}{of} ({s.finish_reason or 'not over'})\n{s.text}")
            if s.logs:
                print(f"--- log of {s.seq}\n{s.logs.rstrip()}")
        sys.stdout.flush()
