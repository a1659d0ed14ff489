"""``tokenbus weights``: pauses and resumes models, and replaces their weights."""

from __future__ import annotations

import argparse
import os
from typing import Any, get_args

import msgspec

from ...protocol.messages import PauseMode, Rollout, UpdateMode
from ...protocol.settings import Settings
from ..operator import Operator
from ..request_options import DRAIN_S
from .exits import OK, counted
from .options import add_connection, client_for, number


def add_command(commands: Any) -> None:
    """Adds ``weights`` with its verbs."""
    parser = commands.add_parser(
        "weights",
        allow_abbrev=False,
        help="pause a model, or replace its weights while streams run",
        description="Pauses or resumes a model at all of its workers, or replaces its weights "
        "while its streams run.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    update = _verb(
        verbs, "update", "replace the weights at all workers of a model; if one fails, none changes"
    )
    update.add_argument("request_model", metavar="MODEL", help="name of the model")
    update.add_argument(
        "folder", metavar="FOLDER", help="folder of safetensors files on the workers' machines"
    )
    update.add_argument(
        "--mode",
        choices=get_args(UpdateMode),
        default="recompute",
        help="recompute the KV cache of live streams (default), or keep it",
    )
    update.add_argument(
        "--version",
        type=int,
        default=0,
        metavar="N",
        help="number of the new weights (default: the next number)",
    )
    update.set_defaults(run=_update)
    pause = _verb(verbs, "pause", "pause a model until it is resumed")
    pause.add_argument(
        "--mode",
        choices=get_args(PauseMode),
        default="keep",
        help="stop live streams (keep, the default), finish them (wait), or end them (abort)",
    )
    resume = _verb(verbs, "resume", "continue the streams of a paused model")
    for verb, run in ((pause, _pause), (resume, _resume)):
        verb.add_argument(
            "request_model",
            metavar="MODEL",
            nargs="?",
            default="",
            help="name of the model (default: the default model)",
        )
        verb.set_defaults(run=run)


def _verb(verbs: Any, name: str, what: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, allow_abbrev=False, help=what)
    add_connection(verb)
    verb.add_argument(
        "--timeout",
        type=number("timeout_s"),
        metavar="S",
        default=DRAIN_S,
        help=f"give up after S seconds (default: {DRAIN_S:.0f})",
    )
    verb.add_argument("--json", action="store_true", help="print JSON, for programs")
    return verb


def _update(args: argparse.Namespace, settings: Settings) -> int:
    folder = os.path.abspath(args.folder)
    with client_for(settings) as client:
        done = Operator(client).update_weights(
            folder, args.request_model, version=args.version, mode=args.mode, timeout_s=args.timeout
        )
    return _print(args, done, f"continued; steps stopped for {done.update_pause_ms:.1f} ms")


def _pause(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        done = Operator(client).pause(args.request_model, mode=args.mode, timeout_s=args.timeout)
    effects = {"keep": "stopped", "wait": "finished", "abort": "aborted"}
    return _print(args, done, effects[args.mode])


def _resume(args: argparse.Namespace, settings: Settings) -> int:
    with client_for(settings) as client:
        done = Operator(client).resume(args.request_model, timeout_s=args.timeout)
    return _print(args, done, "continued")


def _print(args: argparse.Namespace, done: Rollout, effect: str) -> int:
    """Prints the result of a verb and its effect on streams: one line, or JSON."""
    if args.json:
        print(msgspec.json.encode(msgspec.structs.asdict(done)).decode())
    else:
        head = f"{done.model}, version {done.version}, {counted(done.workers, 'worker')}"
        print(f"{head}: {counted(done.streams, 'stream')} {effect}")
    return OK
