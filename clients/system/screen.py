"""Displays a running system: on a terminal as a live table, in a file or a pipe as lines."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .watch import Picture, Shown


class Screen(Protocol):
    """The display of a system."""

    def show(self, picture: Picture) -> None:
        """Shows the current state."""

    def say(self, line: str) -> None:
        """Prints a line that stays when the display is drawn again."""

    def close(self) -> None:
        """Ends the display. The printed lines are not removed."""


def screen_for(address: str) -> Screen:
    """If standard output is a terminal, the live table. If it is not, the screen with lines."""
    console = Console(highlight=False)
    return LiveScreen(console, address) if console.is_terminal else PlainScreen()


class LiveScreen:
    """A table below the printed lines, redrawn in place."""

    def __init__(self, console: Console, address: str) -> None:
        self._console = console
        self._address = address
        self._started = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, picture: Picture) -> None:
        """Draws the table."""
        self._live.update(self._draw(picture), refresh=True)

    def say(self, line: str) -> None:
        """Prints a line above the table."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Removes the table."""
        self._live.stop()

    def _draw(self, picture: Picture) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for shown in picture.shown:
            process = shown.process
            mark = Text(" ●", "green" if shown.serves else _COLOURS.get(process.state, "yellow"))
            pid = Text(str(process.pid) if process.pid else "", "dim")
            table.add_row(mark, process.name, pid, _doing(shown))
        seconds = int(time.monotonic() - self._started)
        up = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        foot = Text.assemble(
            (f" {self._address}", "bold cyan"),
            f"   {picture.load}   ",
            (f"{up}   Ctrl-C: stop", "dim"),
            overflow="ellipsis",
            no_wrap=True,
        )
        return Group(Text(), table, foot)


class PlainScreen:
    """Prints a line for each change of a process's state, for logs and pipes. Does not print the
    load."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def show(self, picture: Picture) -> None:
        """Prints a line for each process whose state or process id has changed since the last
        call."""
        for shown in picture.shown:
            name, pid = shown.process.name, shown.process.pid
            line = f"{name}: {shown.doing}" + (f" (process {pid})" if pid else "")
            if self._last.get(name) != line:
                self._last[name] = line
                self.say(line)

    def say(self, line: str) -> None:
        """Prints a line."""
        print(line, flush=True)

    def close(self) -> None:
        """Does nothing."""


_COLOURS = {"FATAL": "red", "EXITED": "red", "BACKOFF": "red", "STOPPED": "dim"}


def _doing(shown: Shown) -> RenderableType:
    if shown.progress is None:
        return Text.assemble(shown.doing, (f"   {shown.load}", "dim"))
    row = Table.grid(padding=(0, 1))
    row.add_row(shown.doing, ProgressBar(total=1.0, completed=shown.progress, width=24))
    return row
