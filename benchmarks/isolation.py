"""Measures the effect of hostile controllers on another stream, and the time to import the client.

A stream with a well-behaved controller runs all the time. The first figure is the stream's slowest
step while a hostile controller runs in the same controller worker, divided by its slowest step
while a second well-behaved controller runs there. The second figure is the ratio of the client's
import time to the import time of its two required libraries.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import wasmtime
from _report import arguments, report
from controllers import System, system
from tokenbus.clients import Client, TokenbusError

PROMPT = "def add(a, b):"
GUEST = """(module
  (memory (export "memory") 1 1024)
  (data (i32.const 1024) "\\01\\00\\00\\00\\00\\08\\00\\00\\00\\10\\00\\00")
  (func $recurse (call $recurse))
  (func (export "tokenbus_abi_v1") (result i32) (i32.const 1024))
  (func (export "tokenbus_grow") (param i32) (result i32) (i32.const 0))
  (func (export "tokenbus_init_prompt") (result i32) %(init)s (i32.const 1))
  (func (export "tokenbus_post_process") (result i32) (i32.const 1))
  (func (export "tokenbus_pre_process") (result i32) %(pre)s (i32.const 1))
  (func (export "tokenbus_mid_process") (result i32) %(mid)s (i32.const 1)))"""
LOOP = "(loop $ever (br $ever))"
HOSTILE = {
    "endless loop at the start": {"init": LOOP},
    "endless loop in a step": {"mid": LOOP},
    "endless recursion": {"mid": "(call $recurse)"},
    "all the memory there is": {
        "init": """(loop $more (br_if $more (i32.ne (memory.grow (i32.const 1)) (i32.const -1))))
          (memory.fill (i32.const 65536) (i32.const 1)
            (i32.mul (i32.sub (memory.size) (i32.const 1)) (i32.const 65536)))"""
    },
    "a fork bomb": {"pre": "(i32.store (i32.const 1056) (i32.const 2)) (return (i32.const 3))"},
}
NOTES = {
    "hostile_step_ratio": "ratio of the slowest steps next to hostile and well-behaved controllers",
    "client_import_ratio": "ratio of import times, tokenbus.clients to zmq and msgspec",
}


def guest(**calls: str) -> bytes:
    """A controller that allows every token. ``calls``: code at the beginning of a call, by the
    call's name in ``GUEST`` (``init``, ``pre``, ``mid``)."""
    return bytes(wasmtime.wat2wasm(GUEST % {"init": "", "pre": "", "mid": "", **calls}))


class Neighbour:
    """A stream that always runs, and the arrival times of its tokens."""

    def __init__(self, front: str, controller: str) -> None:
        self._front, self._controller = front, controller
        self._times: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while len(self._times) < 50:
            time.sleep(0.01)

    def slowest(self, since: float, until: float) -> float:
        """The longest time between two tokens that overlaps a period, in seconds."""
        gaps = [b - a for a, b in pairwise(self._times[:]) if b >= since and a <= until]
        return max(gaps, default=0.0)

    def close(self) -> None:
        """Ends the stream."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with Client(self._front) as client:
            while not self._over.is_set():
                with client.generate(
                    PROMPT, controller=self._controller, max_tokens=600, ignore_eos=True, text=False
                ) as stream:
                    for _ in stream:
                        self._times.append(time.monotonic())
                        if self._over.is_set():
                            return
                self._times.append(float("nan"))


def spans(running: System, neighbour: Neighbour, controller: str, runs: int) -> float:
    """Runs a controller ``runs`` times; returns the median of the neighbour's slowest steps, in
    seconds."""
    slowest = []
    for _ in range(runs):
        began = time.monotonic()
        stream = running.client.generate("x = 1", controller=controller, max_tokens=8, text=False)
        try:
            stream.wait()
        except TokenbusError:
            pass
        ended = time.monotonic()
        time.sleep(0.1)
        slowest.append(neighbour.slowest(began, ended + 0.02))
    return statistics.median(slowest)


def hostile_step_ratio(runs: int) -> float:
    """The largest ratio of all hostile controllers."""
    with system(["-m", "tokenbus.workers.gpu"], Path("embedded")) as running:
        calm = running.client.upload_controller(guest()).module
        neighbour = Neighbour(running.front, calm)
        try:
            usual = spans(running, neighbour, calm, runs)
            names = [running.client.upload_controller(guest(**c)).module for c in HOSTILE.values()]
            return max(spans(running, neighbour, name, runs) / usual for name in names)
        finally:
            neighbour.close()


def import_s(modules: str, runs: int) -> float:
    """Seconds to import ``modules`` in a new interpreter: the minimum of ``runs`` runs."""
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return min(float(subprocess.check_output(command)) for _ in range(runs))


def main() -> None:
    """Measures and reports."""
    options = arguments(__doc__)
    runs = 5 if options.quick else 25
    results = {
        "hostile_step_ratio": hostile_step_ratio(runs),
        "client_import_ratio": import_s("tokenbus.clients", 5) / import_s("zmq, msgspec", 5),
    }
    report(results, NOTES, options.json)


if __name__ == "__main__":
    main()
