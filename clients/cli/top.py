"""``tokenbus top``: shows the workers, streams and rates of a running system, updated live.

A *picture* is the output of one update.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...protocol.errors import TokenbusError
from ...protocol.messages import Status, WorkerStatus
from ...protocol.settings import Settings
from .brokers import Brokers
from .exits import OK, counted
from .options import add_connection
from .source_places import printable

MAX_STREAMS = 20
"""Maximum number of streams in a picture. The number of further streams is printed below."""

MAX_CELL = 40
"""Maximum width, in characters, of the cells in columns whose ``Column.drop`` is above 0."""

FILE_WIDTH = 200
"""Width of a picture, in characters, if stdout is not a terminal."""

GAP = 2
"""Number of spaces between two columns."""


class Column(NamedTuple):
    """A column of a table."""

    name: str
    right: bool = False
    """Whether the cells are aligned to the right."""
    drop: int = 0
    """If the terminal is too narrow for all columns, columns whose ``drop`` is above 0 are left
    out, the highest number first."""


WORKER_COLUMNS = (
    Column("worker"),
    Column("role", drop=6),
    Column("state"),
    Column("serves", drop=2),
    Column("requests", right=True),
    Column("running", right=True, drop=3),
    Column("waiting", right=True, drop=5),
    Column("deferred", right=True, drop=7),
    Column("cache", right=True, drop=4),
    Column("rate", right=True),
    Column("heartbeat", right=True, drop=1),
)
STREAM_COLUMNS = (
    Column("request"),
    Column("type", drop=5),
    Column("client", drop=3),
    Column("model", drop=4),
    Column("worker", drop=1),
    Column("controller", drop=2),
    Column("state"),
    Column("priority", right=True, drop=6),
    Column("age", right=True),
)


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
    console = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
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
                live.update(Group(shown, Text("Ctrl-C: end", "dim")), refresh=True)
                shown = pictures.after(brokers, args.interval)


class FittedTable:
    """A table that omits columns if the terminal is too narrow for all of them."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, header_style="dim", pad_edge=False)
        shown = self._shown(options.max_width)
        for index in shown:
            column = self._columns[index]
            justify: Literal["left", "right"] = "right" if column.right else "left"
            width = MAX_CELL if column.drop else None
            table.add_column(column.name, justify=justify, max_width=width, no_wrap=True)
        for row in self._rows:
            # Names come from clients. They may contain control characters, and must not be parsed
            # as markup.
            table.add_row(*(Text(printable(row[index])) for index in shown))
        yield table

    def _shown(self, max_width: int) -> list[int]:
        """The indices of the columns that fit into ``max_width`` characters, and of the columns
        that are never dropped."""
        widths = []
        for i, column in enumerate(self._columns):
            width = max(map(cell_len, (column.name, *(row[i] for row in self._rows))))
            widths.append(min(width, MAX_CELL) if column.drop else width)
        shown = list(range(len(self._columns)))
        while sum(widths[i] + GAP for i in shown) - GAP > max_width:
            last = max(shown, key=lambda i: self._columns[i].drop)
            if not self._columns[last].drop:
                break
            shown.remove(last)
        return shown


class Pictures:
    """Makes a picture of each status. Requests per second and rounds per second are means over the
    time since the previous picture."""

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
        sessions = counted(status.sessions, "session")
        streams = counted(status.streams, "stream")
        head = Text(
            f"{shown}   up {duration(status.uptime_s)}   {sessions}   {streams}   "
            f"{status.queued} queued   {tokens:,.0f} tokens/s   {requests} requests/s"
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
        earlier = {w.name: w for w in before[0].workers} if before is not None else {}
        rows = []
        for worker in status.workers:
            last = earlier.get(worker.name)
            load = last.load if last is not None else None
            rows.append(
                [
                    worker.name,
                    worker.role,
                    worker.state,
                    serves(worker),
                    f"{worker.requests:,}/{worker.capacity:,}",
                    *_load(worker),
                    _work(worker, rate(worker.load, load, "rounds", before, now)),
                    f"{worker.heartbeat_age_s:.1f} s",
                ]
            )
        return FittedTable(WORKER_COLUMNS, rows)


def serves(worker: WorkerStatus) -> str:
    """The names of the models, controllers or tools that a worker serves."""
    return ", ".join(worker.models or worker.controllers or worker.tools)


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


def _streams(status: Status) -> FittedTable:
    rows = [
        [
            # The lower half of a request number is a counter. The upper half, which identifies the
            # broker's run, is not shown.
            str(stream.request & 0xFFFF_FFFF),
            stream.type,
            stream.client or "anonymous",
            stream.model,
            stream.worker,
            stream.controller,
            stream.state,
            str(stream.priority),
            duration(stream.age_s),
        ]
        for stream in status.live[:MAX_STREAMS]
    ]
    return FittedTable(STREAM_COLUMNS, rows)


def rate(
    counts: dict[str, Any],
    earlier: dict[str, Any] | None,
    name: str,
    before: tuple[Status, float] | None,
    now: float,
) -> str:
    """The growth of a count per second, as text; "-" if the earlier count is unknown."""
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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, not {text!r}")
    return value
