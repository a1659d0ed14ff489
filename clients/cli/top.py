"""``tokenbus top``: shows the workers, streams and rates of a running system, updated live."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...protocol.errors import TokenbusError
from ...protocol.messages import Status, WorkerStatus
from ...protocol.settings import Settings
from .brokers import Brokers
from .exits import OK
from .options import add_connection

MAX_STREAMS = 20
"""Maximum number of streams in a picture. The number of further streams is printed below."""


def add_command(commands: Any) -> None:
    """Adds ``top``."""
    parser = commands.add_parser(
        "top", allow_abbrev=False, help="show workers, streams and rates, updated live"
    )
    add_connection(parser)
    parser.add_argument("--once", action="store_true", help="print once and exit, for scripts")
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds between updates (default: 1)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Shows pictures until Ctrl-C, or only one with ``--once``. If stdout is not a terminal, the
    pictures are printed one after another."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    pictures = Pictures()
    with Brokers(settings) as brokers:
        status = brokers.status(streams=True)
        shown = pictures.of(status, time.monotonic(), brokers.shown)
        if args.once:
            console.print(shown)
            return OK
        if not console.is_terminal:
            while True:
                console.print(shown)
                console.print()
                sys.stdout.flush()
                shown = pictures.after(brokers, args.interval)
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(pictures.after(brokers, args.interval), refresh=True)


class Pictures:
    """Makes a picture of each status. Rates count from the previous picture."""

    def __init__(self) -> None:
        self._last: tuple[Status, float] | None = None

    def after(self, brokers: Brokers, interval_s: float) -> Group:
        """The picture after a pause, or an error message if no broker answers."""
        time.sleep(interval_s)
        try:
            status = brokers.status(streams=True)
        except TokenbusError as error:
            return Group(Text(f"{brokers.shown}: {error.message}"))
        return self.of(status, time.monotonic(), brokers.shown)

    def of(self, status: Status, now: float, shown: str) -> Group:
        """The picture of a status at the time ``now``, in seconds. ``shown``: the brokers, for
        display."""
        before, self._last = self._last, (status, now)
        counters = before[0].counters if before is not None else None
        requests = rate(status.counters, counters, "requests", before, now)
        tokens = sum(worker.load.get("tokens_per_s", 0.0) for worker in status.workers)
        head = Text(
            f"{shown}   up {duration(status.uptime_s)}   {status.sessions} sessions   "
            f"{status.streams} streams   {status.queued} queued   {tokens:,.0f} tokens/s   "
            f"{requests} requests/s"
        )
        parts: list[Any] = [head, Text(), self._workers(status, before, now)]
        if status.live:
            parts += [Text(), _streams(status)]
        if len(status.live) > MAX_STREAMS:
            parts.append(Text(f"and {len(status.live) - MAX_STREAMS} more", style="dim"))
        return Group(*parts)

    def _workers(self, status: Status, before: tuple[Status, float] | None, now: float) -> Any:
        if not status.workers:
            return Text("no workers are registered")
        table = _table("worker", "role", "state", "models")
        for name in ("requests", "running", "waiting", "deferred", "cache", "rate", "heartbeat"):
            table.add_column(name, justify="right", no_wrap=True)
        earlier = {w.name: w for w in before[0].workers} if before is not None else {}
        for worker in status.workers:
            last = earlier.get(worker.name)
            load = last.load if last is not None else None
            table.add_row(
                worker.name,
                worker.role,
                worker.state,
                ", ".join(worker.models),
                f"{worker.requests}/{worker.capacity}",
                *_load(worker),
                _work(worker, rate(worker.load, load, "rounds", before, now)),
                f"{worker.heartbeat_age_s:.1f} s",
            )
        return table


def _load(worker: WorkerStatus) -> list[str]:
    """Numbers of running, waiting and deferred sequences, and the used part of the KV cache."""
    load = worker.load
    cells = [f"{load[name]:.0f}" if name in load else "" for name in ("running", "waiting")]
    cells.append(f"{load['deferred']:.0f}" if "deferred" in load else "")
    blocks = load.get("kv_blocks")
    return [*cells, f"{load.get('kv_blocks_used', 0.0) / blocks:.0%}" if blocks else ""]


def _work(worker: WorkerStatus, rounds: str) -> str:
    if worker.role == "gpu":
        return f"{worker.load.get('tokens_per_s', 0.0):,.0f} tokens/s"
    return f"{rounds} rounds/s" if worker.role == "controller" else ""


def _streams(status: Status) -> Table:
    table = _table("request", "type", "client", "model", "worker", "controller", "state")
    table.add_column("priority", justify="right")
    table.add_column("age", justify="right", no_wrap=True)
    for stream in status.live[:MAX_STREAMS]:
        # Shows the lower half of a request number, which is a counter. The upper half identifies
        # the broker's run.
        table.add_row(
            str(stream.request & 0xFFFF_FFFF),
            stream.type,
            stream.client or "anonymous",
            stream.model,
            stream.worker,
            stream.controller,
            stream.state,
            str(stream.priority),
            duration(stream.age_s),
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    return table


def rate(
    counts: dict[str, Any],
    earlier: dict[str, Any] | None,
    name: str,
    before: tuple[Status, float] | None,
    now: float,
) -> str:
    """The growth of a count per second; "-" if an earlier count is unknown."""
    if earlier is None or before is None or now <= before[1]:
        return "-"
    grown = counts.get(name, 0) - earlier.get(name, 0)
    return f"{max(0.0, grown / (now - before[1])):,.0f}"


def duration(seconds: float) -> str:
    """A duration in the largest fitting unit: ``59 s``, ``4 min``, ``2 h``, ``3 d``."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, not {text!r}")
    return value
