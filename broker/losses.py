"""Logs the workers that leave or are lost, with one line for all streams of a worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from .request import Request
from .worker import Loss, Worker, WorkerState

log = logging.getLogger(__name__)


def log_drain(worker: Worker, reason: str) -> None:
    """Logs that a worker takes no more requests and is about to leave."""
    streams = _streams(len(worker.requests) + len(worker.steers))
    log.info("worker %s drains: %s; it has %s", worker.name, reason, streams)


def log_end(
    worker: Worker,
    loss: Loss,
    streams: Sequence[Request],
    live: Mapping[int, Request],
    wait_s: float,
) -> None:
    """Logs the end of a worker's lease. The log line is a warning, unless the worker drained and
    then left.

    ``streams``: the requests that were open at the worker. ``live``: all requests that have not
    ended, by id. If a request is in both and has no worker, it waits for another worker, for at
    most ``wait_s`` seconds.
    """
    # A state worker has no requests to finish, so it leaves without a drain.
    planned = not loss.died and (worker.state is WorkerState.DRAINING or worker.role == "state")
    left = [live.get(stream.id) for stream in streams]
    continued = sum(one is not None and one.worker is not None for one in left)
    waiting = sum(one is not None and one.worker is None for one in left)
    text = "worker %s has left: %s; %s" if planned else "lost worker %s: %s; %s"
    level = logging.INFO if planned else logging.WARNING
    log.log(level, text, worker.name, loss.why, _outcome(len(left), continued, waiting, wait_s))


def log_continued(number: int) -> None:
    """Logs that waiting streams continue at a worker."""
    if number:
        log.info("%s that waited for a worker continue%s", _streams(number), _s(number))


def log_given_up(number: int, wait_s: float) -> None:
    """Logs that waiting streams end because no worker that can continue them has registered in
    time."""
    if number:
        log.warning(
            "%s that waited for a worker end%s with an error: no worker that can continue them "
            "has registered for %g s",
            _streams(number),
            _s(number),
            wait_s,
        )


def _outcome(streams: int, continued: int, waiting: int, wait_s: float) -> str:
    if not streams:
        return "it had no streams"
    parts = []
    if continued:
        parts.append(f"{continued} continue{_s(continued)} at other workers")
    if waiting:
        parts.append(f"{waiting} wait{_s(waiting)} for a worker, for at most {wait_s:g} s")
    ended = streams - continued - waiting
    if ended:
        parts.append(f"{ended} end{_s(ended)} with an error")
    return f"of its {_streams(streams)}, {' and '.join(parts)}"


def _streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"


def _s(number: int) -> str:
    """The ending of a verb in the present tense: ``s`` if its subject is one stream."""
    return "s" if number == 1 else ""
