"""Shows the SYSTEM notices of a stream, such as the progress of a load or the place in a queue."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...protocol.messages import System

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Notices:
    """Shows SYSTEM notices on stderr, with a progress bar. Callers call ``clear``, which removes
    the bar, when the first token has arrived.

    If stderr is not a terminal but, for example, a log file, only retries are printed.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last = ""

    def __call__(self, notice: System) -> None:
        """Shows one notice."""
        if not sys.stderr.isatty():
            if notice.event == "retrying" and notice.message != self._last:
                self._last = notice.message
                print(f"tokenbus: trying again: {notice.message}", file=sys.stderr)
            return
        if self._progress is None or self._task is None:
            # rich is imported only here, because the import takes longer than a short command.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("[dim]{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True, highlight=False),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(notice.message, total=None)
        part = notice.progress
        self._progress.update(
            self._task,
            description=notice.message,
            total=None if part is None else 1.0,
            completed=part or 0.0,
        )

    def clear(self) -> None:
        """Removes the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.clear()
