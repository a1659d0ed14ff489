"""``tokenbus lmtp --stdio`` answers each line of its input, and exits after the last answer."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenbus.clients.cli.line_pipe import split_lines

from ..processes import Bus, clean_environment, free_port

TOKENBUS = Path(sys.executable).parent / "tokenbus"


def lmtp(front: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Runs ``tokenbus lmtp --stdio`` with ``data`` as its input."""
    return subprocess.run(
        [TOKENBUS, "lmtp", "--stdio", "--front", front],
        env=clean_environment(),
        cwd="/tmp",
        input=data,
        capture_output=True,
        timeout=300,
        check=False,
    )


def messages(output: bytes) -> list[tuple[str, Any]]:
    found = [line.split(" ", 1) for line in output.decode().splitlines()]
    return [(kind, json.loads(body)) for kind, body in found]


def test_running_streams_are_finished_at_the_end_of_the_input(steered: Bus) -> None:
    request = '"prompt": "def add(a, b):", "max_tokens": 30, "ignore_eos": true'
    lines = [f'GENERATE {{"stream_id": {number}, {request}}}' for number in range(3)]
    # The last line does not end with a newline.
    done = lmtp(steered.front, "\n".join([*lines, 'MODEL_INFO {"stream_id": 9}']).encode())
    assert (done.returncode, done.stderr) == (0, b"")
    received = messages(done.stdout)
    assert [body["stream_id"] for kind, body in received if kind == "MSG"] == [9]
    entries = [entry for kind, body in received if kind == "TOKEN" for entry in body]
    for number in range(3):
        mine = [entry for entry in entries if entry["stream_id"] == number]
        assert len(mine) == 30
        assert mine[-1]["finish_reason"] == "length"


def test_an_invalid_line_is_answered_by_one_line(steered: Bus) -> None:
    done = lmtp(steered.front, b'\xff\xfe\n\n \n\xc3\xa9 {}\nGENERATE {\nBUFFER {"name": ""}\n')
    assert (done.returncode, done.stderr) == (0, b"")
    received = messages(done.stdout)
    assert {kind for kind, _ in received} == {"ERROR"}
    codes = sorted(body["code"] for _, body in received)
    assert codes == ["bad_message", "bad_message", "bad_message", "invalid_field"]


def test_an_empty_input_ends_at_once(steered: Bus) -> None:
    done = lmtp(steered.front, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_without_a_broker_it_says_so(processes: None) -> None:
    done = lmtp(f"tcp://127.0.0.1:{free_port()}", b'MODEL_INFO {"stream_id": 1}\n')
    assert done.returncode == 3
    [(kind, error)] = messages(done.stdout)
    assert (kind, error["code"]) == ("ERROR", "connection_lost")
    assert b"no broker answers" in done.stderr


def test_lines_are_split_wherever_the_input_is() -> None:
    data = b"one\n\ntwo three\nfour"
    for size in range(1, len(data) + 1):
        parts = itertools.chain((data[i : i + size] for i in range(0, len(data), size)), [b""])
        lines = list(split_lines(lambda parts=parts: next(parts), 100))  # type: ignore[misc]
        assert [line.data for line in lines] == [b"one", b"", b"two three", b"four"]
        assert [line.size for line in lines] == [3, 0, 9, 4]


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole() -> None:
    parts = iter([b"x" * 60, b"y" * 60, b"z" * 60 + b"\nnext\n", b""])
    lines = list(split_lines(lambda: next(parts), 100))
    assert [len(lines[0].data), lines[0].size, lines[1]] == [100, 180, (b"next", 4)]
