"""``tokenbus controller``: upload, tag, list, run and serve controllers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.endpoints import host_and_port, separate
from ...protocol.messages import StoredModule
from ...protocol.python_command import python_command
from ...protocol.settings import Settings, environment
from .controller_run import DEFAULT_PROMPT, try_controller
from .exits import OK
from .module_files import FileFault, read_module
from .options import add_connection, add_parameters, add_request, client_for

SHORT_ID = 12
"""Number of characters of a module id that messages show. Commands accept the first 8 or more
characters of an id."""
CONNECT_S = 1.0
"""If a TCP address does not accept a connection within this number of seconds, it counts as not in
use."""


def add_command(commands: Any) -> None:
    """Adds ``controller`` and its actions."""
    parser = commands.add_parser(
        "controller",
        allow_abbrev=False,
        help="upload and run controllers",
        description="Controllers: Wasm programs that decide which tokens may follow.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for add in (_add_upload, _add_tag, _add_list, _add_delete, _add_run, _add_serve):
        add(actions)


def _add_upload(actions: Any) -> None:
    parser = actions.add_parser("upload", allow_abbrev=False, help="store a module")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="Wasm file, C file to compile, or script"
    )
    parser.add_argument(
        "--tag", action="append", default=[], metavar="T", help="tag for the module; repeatable"
    )
    _finish(parser, _upload)


def _add_tag(actions: Any) -> None:
    parser = actions.add_parser("tag", allow_abbrev=False, help="assign tags to a module")
    parser.add_argument(
        "module", metavar="MODULE", help="module id (at least 8 characters of it) or tag"
    )
    parser.add_argument(
        "tags", nargs="+", metavar="TAG", help="tag to assign; it is removed from other modules"
    )
    _finish(parser, _tag)


def _add_list(actions: Any) -> None:
    parser = actions.add_parser(
        "list", allow_abbrev=False, help="list uploaded modules and served controllers"
    )
    _finish(parser, _list)


def _add_delete(actions: Any) -> None:
    parser = actions.add_parser("delete", allow_abbrev=False, help="delete a tag, or a module")
    parser.add_argument("name", metavar="NAME", help="tag, or module id (8 characters or more)")
    _finish(parser, _delete)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def _add_run(actions: Any) -> None:
    parser = actions.add_parser(
        "run",
        allow_abbrev=False,
        help="generate under a controller",
        description="Generates under a controller. If no system is running, the command starts one "
        "for this run, with the embedded model or the model of --model. A name that ends with "
        ".wasm, .c, .py, .js, .mjs, .ts or .mts, or contains a /, is a file. Any other name is a "
        "tag, a module id, a built-in controller or a served MODULE:NAME. The module of a file is "
        "deleted after the run unless it was stored before.",
    )
    parser.add_argument("program", metavar="FILE|TAG|ID", help="the controller")
    parser.add_argument(
        "--arg",
        "--controller-arg",
        metavar="A|@FILE",
        help="argument of the controller, or @ and the name of a file with it",
    )
    parser.add_argument(
        "--prompt", metavar="P", default=DEFAULT_PROMPT, help="the prompt (default: a line break)"
    )
    add_request(parser)
    add_parameters(parser, ("max_tokens", "temperature", "top_p", "seed"))
    parser.set_defaults(run=try_controller)


def _add_serve(actions: Any) -> None:
    parser = actions.add_parser(
        "serve",
        allow_abbrev=False,
        help="run controllers that are written in Python",
        description="Adds a worker for Python controllers to a running system. MODULE:NAME is a "
        "class or a script; Python also searches the current folder for MODULE.",
    )
    parser.add_argument("programs", nargs="+", metavar="MODULE:NAME", help="controller to serve")
    parser.add_argument(
        "--run-dir", dest="run_dir", metavar="DIR", help="run directory of the system"
    )
    parser.add_argument("--back", metavar="ADDRESS", help="broker's address for workers")
    parser.set_defaults(run=_serve)


# --- the store ------------------------------------------------------------------------------------


def _upload(args: argparse.Namespace, settings: Settings) -> int:
    wasm = read_module(args.file)
    with client_for(settings) as client:
        stored = client.upload_controller(wasm, *args.tag[:1])
        if args.tag[1:]:
            stored = client.tag_controller(stored.module, *args.tag[1:])
        return _show(stored, args.json)


def _tag(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        return _show(client.tag_controller(args.module, *args.tags), args.json)


def _delete(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        dropped = client.delete_controller(args.name)
    if args.json:
        return _show(dropped, True)
    module = f"the module {dropped.module[:SHORT_ID]}"
    if dropped.tags == [args.name]:
        print(f"deleted the tag {args.name}; {module} stays")
        return OK
    several = "tags" if len(dropped.tags) > 1 else "tag"
    tags = f" and its {several} {', '.join(dropped.tags)}" if dropped.tags else ""
    print(f"deleted {module}{tags}")
    return OK


def _list(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        modules = client.controllers()
        workers = [] if args.json else client.status().workers
    if args.json:
        print(msgspec.json.encode([msgspec.structs.asdict(m) for m in modules]).decode())
        return OK
    for module in modules:
        _show(module, False)
    for worker in workers:
        for name in worker.controllers:
            print(f"{name}  served by {worker.name}")
    if not modules:
        print("no module has been uploaded", file=sys.stderr)
    return OK


def _show(module: StoredModule, as_json: bool) -> int:
    """Prints a module as JSON, or on one line that begins with the module id."""
    if as_json:
        print(msgspec.json.encode(msgspec.structs.asdict(module)).decode())
        return OK
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(module.uploaded))
    why = f": {module.why_no_fork}" if module.why_no_fork else ""
    forks = "" if module.forks else f"  (no forks{why})"
    print(
        f"{module.module}  {module.size:>9,} bytes  {module.abi:6}  {when}  "
        f"{' '.join(module.tags) or '-'}{forks}"
    )
    return OK


def wait_notice(settings: Settings) -> None:
    """Prints a notice if no broker listens at its address for workers. A worker that starts now
    would then wait for a broker."""
    back = settings.back_endpoint
    if not any(map(_listens, separate(back))):
        where = f"--back {back}" if settings.back else f"--run-dir {settings.run_folder}"
        print(
            f"tokenbus: waiting for a broker at {back}; is a system running with {where}?",
            file=sys.stderr,
            flush=True,
        )
    sys.stdout.flush()


def _listens(address: str) -> bool:
    """Whether a process listens at an address. Also True if the address cannot be checked."""
    kind, _, rest = address.partition("://")
    if kind == "ipc":
        return rest.startswith("@") or Path(rest).exists()
    if kind != "tcp":
        return True
    try:
        with socket.create_connection(host_and_port(rest), CONNECT_S):
            return True
    except ValueError:
        return True
    except OSError:
        return False


# --- a worker for Python controllers --------------------------------------------------------------


def _serve(args: argparse.Namespace, settings: Settings) -> int:
    """Replaces this process by the worker. The worker then receives the signals and sets the exit
    code."""
    if importlib.util.find_spec("wasmtime") is None:
        raise FileFault("wasmtime is not installed; use pip install 'tokenbus[controller]'")
    command = python_command("tokenbus.workers.controller", *args.programs)
    wait_notice(settings)
    # The hash seed determines the order of a set of strings. With the same seed in all workers, a
    # controller makes the same decisions after its stream has moved to another worker.
    same_order = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    os.execve(sys.executable, command, os.environ | same_order | environment(settings))
