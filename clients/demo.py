"""``make demo``: starts a system on this machine, shows streams, scores and control, and stops it.

The demo runs ``tokenbus up`` with its own ports and folder, so that other systems are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..protocol.errors import TokenbusError
from ..protocol.python_command import python_command
from . import AsyncClient, AsyncStream, Client

START_S = 300.0
"""Maximum time of the system's start, in seconds."""
END_S = 40.0
"""Maximum time of the system's stop, in seconds."""
FRONT_PORTS = range(20_000, 26_000)
"""Ports of the broker. The operating system gives higher ports to outgoing connections, so these
ports stay free."""
HTTP_PORTS = range(26_000, 32_000)
"""Ports of the gateway."""

PROMPT = 'def read_lines(path):\n    """'
EIGHT = {
    "import os\nimport ": 4,
    "class Stack:\n    def ": 3,
    '{"name": "': 2,
    "for line in ": 5,
    "    raise ValueError(": 3,
    '    """Return the ': 13,
    "[1, 2, 3, ": 12,
    "if __name__ == ": 2,
}
"""Prompts, each with a seed. With this seed, the embedded model writes a good text."""
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "white")
SCORED = ("import ", ("os", "sys", "banana"))
STEERED = {
    "import ": ["zebras", "os", "quilts"],
    "for i in ": ["Rome", "range(10):", "the garden"],
    "raise ": ["ValueError", "a glass", "the roof"],
}

NEXT = """\
Next steps:
  source .venv/bin/activate
  tokenbus up                             run the same system until Ctrl-C
  tokenbus generate 'def add(a, b):'      stream from it, in another terminal
  tokenbus client                         read prompts from the terminal
  tokenbus up --model PATH                serve your own model
  tokenbus controller run choice --arg '["yes", "no"]'
                                          generate under a controller
  docs/controllers.md                     controllers of your own
  README.md, docs/                        the Python client, the protocol"""


def main() -> int:
    """Runs the demo; returns the exit code."""
    console = Console(highlight=False)
    started = time.monotonic()
    try:
        with _system(console) as front:
            _one(front, console)
            asyncio.run(_eight(front, console))
            _score(front, console)
            _steered(front, console)
            console.rule("[bold]stopping the system", align="left", style="dim")
    except (TokenbusError, DemoError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    seconds = time.monotonic() - started
    console.print(f"all processes have ended; the demo took {seconds:.0f} s\n", style="dim")
    console.print(NEXT, markup=False)
    return 0


class DemoError(Exception):
    """The system did not start, or did not stop."""


@contextlib.contextmanager
def _system(console: Console) -> Iterator[str]:
    """Runs a system under supervisord; yields the address of its broker."""
    folder = Path(tempfile.mkdtemp(prefix="tokenbus-demo-"))
    front = f"tcp://127.0.0.1:{_free_port(FRONT_PORTS)}"
    http = f"127.0.0.1:{_free_port(HTTP_PORTS)}"
    command = python_command("tokenbus.clients.cli", "up")
    own = ["--front", front, "--http", http, "--run-dir", str(folder / "run")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
    output = folder / "output"
    console.rule("[bold]tokenbus up: a broker and its workers under supervisord", align="left")
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*command, *own, "--model", "embedded"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the demo, which then stops the system.
        )
    try:
        with console.status("starting: loading torch and the model"):
            _wait_until_ready(process, output)
        console.print(output.read_text().strip(), style="dim", markup=False, soft_wrap=True)
        yield front
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError(f"the system did not stop; its logs are in {folder}") from None
    shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_S
    while "ready:" not in output.read_text():
        if process.poll() is not None:
            raise DemoError(
                f"tokenbus up ended with exit code {process.returncode}: {output.read_text()}"
            )
        if time.monotonic() > deadline:
            raise DemoError(f"the system was not ready within {START_S:.0f} s")
        time.sleep(0.05)


def _one(front: str, console: Console) -> None:
    console.rule("[bold]one stream", align="left")
    console.print(PROMPT, style="bold", end="", markup=False)
    with Client(front) as client:
        stream = client.generate(PROMPT, max_tokens=90, temperature=0.6, seed=5)
        first = None
        started = time.monotonic()
        for token in stream:
            first = first or time.monotonic() - started
            if token.text is not UNSET:
                console.print(token.text, style="cyan", end="", markup=False)
        seconds = time.monotonic() - started
        count = len(stream.tokens())
    console.print(
        f"\n{count} tokens in {seconds:.2f} s, the first after {(first or 0) * 1000:.0f} ms",
        style="dim",
    )


async def _eight(front: str, console: Console) -> None:
    console.rule("[bold]eight streams at the same time, on one connection", align="left")
    order: list[int] = []
    async with AsyncClient(front) as client:
        streams = [
            client.generate(prompt, max_tokens=40, temperature=0.6, seed=seed)
            for prompt, seed in EIGHT.items()
        ]
        started = time.monotonic()
        with Live(console=console, refresh_per_second=20, transient=True) as live:

            async def read(number: int, stream: AsyncStream) -> None:
                async for _ in stream:
                    order.append(number)
                    live.update(_lines(streams))

            await asyncio.gather(*itertools.starmap(read, enumerate(streams)))
        seconds = time.monotonic() - started
    console.print(_lines(streams))
    shown = Text("arrival order: ", style="dim")
    for number in order[: max(16, console.width - 16)]:
        shown.append("█", style=COLOURS[number])
    console.print(shown, no_wrap=True, overflow="crop")
    console.print(f"{len(order)} tokens in {seconds:.2f} s", style="dim")


def _lines(streams: list[AsyncStream]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for prompt, stream, colour in zip(EIGHT, streams, COLOURS, strict=True):
        text = "".join(s.text for s in stream.sequences)
        line = Text(prompt.replace("\n", "⏎"), style="bold")
        line.append(text.replace("\n", "⏎"), style=colour)
        table.add_row(line)
    return table


def _score(front: str, console: Console) -> None:
    prompt, candidates = SCORED
    console.rule("[bold]scores: the log-probabilities of given texts", align="left")
    with Client(front) as client:
        for text in candidates:
            total = client.score(prompt, text).total
            console.print(f"  {prompt}[bold]{text:8}[/] log-probability {total:8.3f}")


def _steered(front: str, console: Console) -> None:
    what = "control: a controller in a sandbox allows one of three texts"
    console.rule(f"[bold]{what}", align="left")
    with Client(front) as client:
        for prompt, choices in STEERED.items():
            stream = client.generate(prompt, controller="choice", controller_arg=choices)
            shown = Text(f"  {prompt}", style="bold").append(stream.text(), style="green")
            console.print(shown, Text(f"  allowed: {', '.join(choices)}", style="dim"))


def _free_port(ports: range) -> int:
    """A free port of the range."""
    while True:
        port = random.choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


if __name__ == "__main__":
    sys.exit(main())
