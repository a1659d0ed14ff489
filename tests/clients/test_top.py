"""``tokenbus top`` draws pictures of a system, on a terminal or without one, and computes rates."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tokenbus.clients.cli.brokers import merged
from tokenbus.clients.cli.status import absence_lines
from tokenbus.clients.cli.top import MAX_STREAMS, Pictures, duration
from tokenbus.protocol.messages import Status, StreamStatus, WorkerStatus

from ..processes import Bus, clean_environment, until
from .test_cli import PROMPT, TOKENBUS, tokenbus


def status(**fields: object) -> Status:
    given = {"version": "1", "uptime_s": 90.0, "sessions": 3, "streams": 2, "queued": 1}
    return Status(**{**given, "workers": [], **fields})  # type: ignore[arg-type]


def worker(role: str, **load: float) -> WorkerStatus:
    return WorkerStatus(
        name=f"{role}-1",
        role=role,
        pid=1,
        host="here",
        state="ready",
        models=["embedded"] if role == "gpu" else [],
        requests=2,
        capacity=512,
        heartbeat_age_s=0.4,
        load=load,
    )


def drawn(pictures: Pictures, at: float, shown: Status, width: int = 200) -> str:
    output = io.StringIO()
    Console(width=width, file=output).print(pictures.of(shown, at, "broker tcp://here:1"))
    return output.getvalue()


def test_one_picture_has_workers_and_running_streams(bus: Bus) -> None:
    def picture() -> subprocess.CompletedProcess[str]:
        """Runs ``top`` during a stream. If the command starts slowly, the stream may have ended."""
        with (
            bus.client() as client,
            client.generate(PROMPT, n=16, max_tokens=400, ignore_eos=True) as stream,
        ):
            next(stream)
            return tokenbus(bus, "top", "--once")

    pictures: list[subprocess.CompletedProcess[str]] = []

    def shows_a_stream() -> bool:
        pictures.append(picture())
        return "GENERATE" in pictures[-1].stdout

    until(shows_a_stream, 120.0, "a running stream in a picture")
    done = pictures[-1]
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"gpu-\S+ +gpu +ready +embedded", done.stdout)
    assert "tokens/s" in done.stdout
    assert re.search(r"GENERATE +tokenbus-python +embedded +gpu-\S+", done.stdout)
    assert "\x1b" not in done.stdout


def test_names_of_clients_are_not_markup() -> None:
    named = "[/x][link=https://evil.example]\x1b[31mred"
    live = [StreamStatus(request=1, type="GENERATE", state="running", age_s=1.0, client=named)]
    picture = drawn(Pictures(), 1.0, status(live=live))
    assert "[/x][link=https" in picture
    assert "\x1b" not in picture


@pytest.mark.usefixtures("processes")
def test_without_a_terminal_it_prints_one_picture_after_another(bus: Bus, tmp_path: Path) -> None:
    output = tmp_path / "top"
    with output.open("w") as writing:
        process = subprocess.Popen(
            [TOKENBUS, "top", "--interval", "0.1"],
            env=clean_environment(front=bus.front),
            stdout=writing,
            stderr=subprocess.PIPE,
        )
    until(lambda: output.read_text().count("broker ") >= 3, 300.0, "three pictures")
    process.send_signal(signal.SIGINT)
    assert process.wait(300.0) == 130


@pytest.mark.usefixtures("processes")
def test_on_a_terminal_it_redraws_until_ctrl_c(bus: Bus) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [TOKENBUS, "top", "--interval", "0.1"],
        env={**clean_environment(front=bus.front), "TERM": "xterm", "COLUMNS": "160"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    while shown.count(b"broker ") < 3:
        shown += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # The terminal closes when the process ends.
        while piece := os.read(ours, 65_536):
            shown += piece
    assert process.wait(300.0) == 130
    assert shown.startswith(b"\x1b[?1049h")  # The command opens and closes the alternate screen.
    assert b"\x1b[?1049l" in shown
    assert b"Ctrl-C: end" in shown


def test_status_says_that_no_gpu_worker_is_registered() -> None:
    def lines(*roles: str) -> list[str]:
        return absence_lines(status(workers=[worker(role) for role in roles]))

    assert lines("state", "controller") == ["no GPU worker is registered"]
    assert lines("state", "gpu") == lines() == []


def test_rates_are_those_since_the_picture_before() -> None:
    pictures = Pictures()
    load = {"tokens_per_s": 1234.0, "running": 2, "waiting": 1, "deferred": 0}
    gpu = worker("gpu", kv_blocks=100, kv_blocks_used=25, **load)
    first = drawn(
        pictures,
        10.0,
        status(counters={"requests": 5}, workers=[gpu, worker("controller", rounds=100)]),
    )
    assert "- requests/s" in first
    assert "- rounds/s" in first
    assert "25%" in first
    assert "1,234 tokens/s" in first
    second = drawn(
        pictures,
        12.0,
        status(counters={"requests": 11}, workers=[gpu, worker("controller", rounds=300)]),
    )
    assert "3 requests/s" in second
    assert "100 rounds/s" in second


def test_a_restarted_broker_or_worker_has_no_negative_rate() -> None:
    pictures = Pictures()
    drawn(pictures, 1.0, status(counters={"requests": 50}))
    assert "0 requests/s" in drawn(pictures, 2.0, status(counters={"requests": 3}))


def test_what_several_brokers_say_is_one_picture() -> None:
    old, new = (
        status(
            sessions=2,
            streams=3,
            queued=number,
            uptime_s=10.0 * number,
            counters={"requests": 4, f"of_{number}": 1},
            workers=[worker("gpu", tokens_per_s=10.0 * number)],
            live=[StreamStatus(request=number, type="GENERATE", state="running", age_s=number)],
        )
        for number in (1, 2)
    )
    new.workers[0].heartbeat_age_s = 0.1
    new.workers.append(worker("controller"))
    both = merged([old, new])
    assert (both.sessions, both.streams, both.queued, both.uptime_s) == (4, 6, 3, 20.0)
    assert both.counters == {"requests": 8, "of_1": 1, "of_2": 1}
    assert [(one.role, one.load.get("tokens_per_s")) for one in both.workers] == [
        ("gpu", 20.0),
        ("controller", None),
    ]
    assert [stream.request for stream in both.live] == [2, 1]
    assert merged([old]) is old


def test_many_streams_are_cut_and_counted() -> None:
    live = [StreamStatus(request=i, type="GENERATE", state="running", age_s=1.0) for i in range(25)]
    shown = drawn(Pictures(), 1.0, status(live=live))
    assert shown.count("GENERATE") == MAX_STREAMS
    assert "and 5 more" in shown


@pytest.mark.parametrize(
    ("width", "workers", "streams"),
    [
        (60, "worker state requests rate", "request worker controller state age"),
        (80, "worker state requests rate heartbeat",
         "request client worker controller state age"),
        (120, "worker state serves requests running cache rate heartbeat",
         "request type client model worker controller state age"),
        (200, "worker role state serves requests running waiting deferred cache rate heartbeat",
         "request type client model worker controller state priority age"),
    ],
)  # fmt: skip
def test_a_narrow_terminal_shows_fewer_columns_and_whole_cells(
    width: int, workers: str, streams: str
) -> None:
    load = {"tokens_per_s": 12345.0, "running": 250, "waiting": 100, "deferred": 0}
    gpu = worker("gpu", kv_blocks=100, kv_blocks_used=25, **load)
    gpu.name, gpu.models = "gpu-on-a-machine-12345", ["qwen3-30b-a3b-instruct-2507"]
    live = StreamStatus(
        request=7,
        type="GENERATE",
        state="running",
        age_s=1.0,
        client="tokenbus-python",
        model=gpu.models[0],
        worker=gpu.name,
        controller="json_schema",
    )
    lines = drawn(Pictures(), 1.0, status(workers=[gpu], live=[live]), width).splitlines()
    assert workers.split() in (words := [line.split() for line in lines])
    assert streams.split() in words
    assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines)


def test_a_long_cell_is_cut_where_its_column_may_be_dropped() -> None:
    gpu = worker("gpu")
    gpu.models = ["a-model-of-thirty-characters-1", "a-model-of-thirty-characters-2"]
    shown = drawn(Pictures(), 1.0, status(workers=[gpu]), 100)
    assert "a-model-of-thirty-characters-1, a-model…" in shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (90_000, "25 h")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize("interval", ["0", "x", "nan"])
def test_an_interval_is_checked(bus: Bus, interval: str) -> None:
    done = tokenbus(bus, "top", "--interval", interval)
    assert done.returncode == 2
    assert f"--interval: expected 0.1 to 3600 seconds, not '{interval}'" in done.stderr
