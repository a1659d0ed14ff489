"""``tokenbus status``: the workers of a running system and their load."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ...protocol.messages import Quantized, Status
from ...protocol.settings import Settings
from .brokers import Brokers
from .exits import OK, counted
from .options import add_connection
from .top import FILE_WIDTH, duration, serves


def add_command(commands: Any) -> None:
    """Adds ``status``."""
    parser = commands.add_parser(
        "status", allow_abbrev=False, help="show the workers and their load"
    )
    add_connection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the state of the system; returns the exit code."""
    with Brokers(settings) as brokers:
        status = brokers.status()
        shown = brokers.shown
    if args.json:
        print(msgspec.json.encode(status).decode())
        return OK
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(
        f"{shown}   up {duration(status.uptime_s)}   {counted(status.sessions, 'session')}   "
        f"{counted(status.streams, 'stream')}   {status.queued} queued",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "role", "state", "serves", "requests", "tokens/s", "heartbeat"):
        # Other commands need the full name of a worker or a controller.
        table.add_column(name, no_wrap=name in ("worker", "serves"))
    for worker in status.workers:
        table.add_row(
            worker.name,
            worker.role,
            worker.state,
            serves(worker) or "none",
            f"{worker.requests:,} of {worker.capacity:,}",
            f"{worker.load.get('tokens_per_s', 0.0):,.0f}",
            f"{worker.heartbeat_age_s:.1f} s ago",
        )
    console.print(table if status.workers else "no workers are registered", soft_wrap=True)
    for model, mode in status.paused.items():
        console.print(f"{model} is paused ({mode})", soft_wrap=True, markup=False)
    for line in (*absence_lines(status), *path_lines(status), *isolation_lines(status)):
        console.print(line, soft_wrap=True, markup=False)
    return OK


def absence_lines(status: Status) -> list[str]:
    """A line that says that no GPU worker is registered. Empty if a GPU worker is registered, or if
    no worker is registered at all."""
    if not status.workers or any(worker.role == "gpu" for worker in status.workers):
        return []
    return ["no GPU worker is registered"]


def isolation_lines(status: Status) -> list[str]:
    """Lines with the layers of isolation that controller workers lack, and the remedies."""
    lines = []
    for worker in status.workers:
        if worker.missing_layers:
            lines.append(
                f"{worker.name} runs clients' controllers without these layers of isolation "
                "(docs/security.md):"
            )
            lines += [f"  {layer}" for layer in worker.missing_layers]
    return lines


def path_lines(status: Status) -> list[str]:
    """Lines that show how each GPU worker computes its models, and which fast paths are missing."""
    lines = []
    for worker in status.workers:
        for model, path in worker.paths.items():
            if path.attention:
                graphs = f", {path.graphs} CUDA graphs" if path.graphs else ""
                how = f"{path.attention} of the KV cache{graphs}"
                lines.append(f"{worker.name} computes the attention of {model} with {how}")
            if path.quantized is not None:
                lines.append(f"  {_quantized(path.quantized)}")
            if path.why_not_exact:
                lines.append(f"  not exact: {path.why_not_exact}")
            lines += [f"  slower than possible: {why}" for why in path.fallbacks]
    return lines


def _quantized(one: Quantized) -> str:
    return (
        f"quantized to {one.kind}: {decimal(one.saved_bytes)} less memory, a divergence of "
        f"{one.divergence:.2g} nats, a perplexity of {one.perplexity:.4g} instead of "
        f"{one.perplexity_before:.4g}"
    )
