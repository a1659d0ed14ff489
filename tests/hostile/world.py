"""A bus with an attacker and a calm tenant. The calm tenant's streams run all the time."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenbus.clients import Client, TokenbusError
from tokenbus.clients.cli.keys import new_pair
from tokenbus.protocol.keys import Allowed, KeyFolder
from tokenbus.workers.controller.guests.process import MAX_CHANNELS

from ..processes import Process, children, until, zygotes
from ..workers.controller.wasm.hostile.guests import guest
from ..worlds.two_tenants import KeyedBus
from .attack import Attack, Outcome
from .takeovers import SHORT, compile_library

ROOT = Path(__file__).parents[2]
PROMPT = "def add(a, b):"
CALM_TOKENS = 40
BOUND_S = 400.0
MAX_DESCRIPTORS = 4 * MAX_CHANNELS
"""Maximum number of open descriptors of the controller worker in addition to those at the start:
two for each channel of two processes."""
MAX_GROWTH = 512 * 1024 * 1024
"""Maximum number of bytes by which the memory of the broker and the controller worker together may
grow during all attacks. The number is large, because one answer of a guest process may have 64
MiB."""
INIT_MS = 400
"""The setting ``controller_init_ms``. The value is below the default, so that the attacks take less
time."""
SETTINGS = {
    "controller_init_ms": INIT_MS,
    "controller_idle_wakes": 20,
    "guest_processes": 4,
    "grammar_compile_s": 0.5,
}
"""The settings of the controller worker."""


class CalmStreams:
    """Streams of one tenant, one after another on one thread, each with the same tokens."""

    def __init__(self, client: Client, controller: str) -> None:
        self._client, self._controller = client, controller
        self._wanted = self._tokens()
        assert len(self._wanted) == CALM_TOKENS
        self.arrivals: list[float] = []
        """The time at which each token of the streams has arrived, in seconds of the monotonic
        clock."""
        self.ended = 0
        """Number of streams that have ended with the right tokens."""
        self.failure: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_streams(self, count: int = 1) -> None:
        """Waits until ``count`` further streams have ended."""
        before = self.ended
        until(
            lambda: self.ended >= before + count or self.failure is not None,
            BOUND_S,
            "the ends of the calm tenant's streams",
        )
        assert self.failure is None, self.failure

    def close(self) -> None:
        """Ends the streams."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop:
                assert self._tokens(self.arrivals) == self._wanted
                self.ended += 1
        except BaseException as failure:
            self.failure = failure

    def _tokens(self, arrivals: list[float] | None = None) -> list[int]:
        tokens: list[int] = []
        options: dict[str, Any] = {"max_tokens": CALM_TOKENS, "ignore_eos": True, "text": False}
        with self._client.generate(PROMPT, controller=self._controller, **options) as stream:
            for token in stream:
                if token.token is None:
                    continue
                tokens.append(token.token)
                if arrivals is not None:
                    arrivals.append(time.monotonic())
        [sequence] = stream.sequences
        assert sequence.error is None, sequence.error
        return tokens


class HostileWorld:
    """A broker, a GPU worker, a state worker, a controller worker, an attacker, and another
    tenant's calm streams."""

    def __init__(self, bus: KeyedBus, attacker: Client, calm: Client) -> None:
        self.bus = bus
        self.attacker = attacker
        self.calm = CalmStreams(calm, calm.upload_controller(guest()).module)
        # Until the first attack, only the calm tenant has a guest process.
        self._others = self.processes()
        self._descriptors = self._open_files()
        self._memory_bytes = self._memory()

    def processes(self) -> set[int]:
        """The processes of the bus, the zygote, and the guest processes."""
        worker = self._worker
        parents = zygotes(worker.pid)
        guests = [pid for parent in parents for pid in children(parent)]
        workers = [process.pid for process in (*self.bus.workers, *self.bus.others)]
        return {self.bus.broker.pid, *workers, *parents, *guests}

    def run(self, attack: Attack, module: bytes | None = None) -> Outcome:
        """Makes all requests of an attack; returns the outcome of the first. ``module``: the module
        of the attack, if it has been made before."""
        try:
            name = attack.source
            if not isinstance(name, str):
                name = self._upload(module or name())
            options = {"max_tokens": 5, "timeout_s": BOUND_S, "text": False} | dict(attack.options)
            streams = [
                self.attacker.generate(
                    "x = 1", controller=name, controller_arg=attack.arg, ignore_eos=True, **options
                )
                for _ in range(attack.requests)
            ]
        except TokenbusError as error:
            return Outcome(str(error.code), error.message)
        outcomes = [_outcome(stream) for stream in streams]
        return outcomes[0]

    def _upload(self, module: bytes) -> str:
        return self.attacker.upload_controller(module, timeout_s=BOUND_S).module

    def problems(self) -> list[str]:
        """The harm that the attacks have done so far: ended processes, open descriptors, memory."""
        found = []
        for pid in self._others - self.processes():
            log = (self.bus.folder / "controller.log").read_text().splitlines()
            said = [line for line in log if f"process {pid} " in line]
            found.append(f"process {pid} has ended: {said}")
        if self._open_files() > self._descriptors + MAX_DESCRIPTORS:
            found.append(f"the worker has {self._open_files()} open descriptors")
        if self._memory() > self._memory_bytes + MAX_GROWTH:
            found.append(f"the broker and the worker have {self._memory()} bytes of memory")
        return found

    @property
    def _worker(self) -> Process:
        return self.bus.others[-1]

    def _memory(self) -> int:
        pages = [
            int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            for process in (self.bus.broker, self._worker)
        ]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def _open_files(self) -> int:
        return len(os.listdir(f"/proc/{self._worker.pid}/fd"))


def _outcome(stream: Any) -> Outcome:
    try:
        sequences = stream.wait()
    except TokenbusError as error:
        return Outcome(str(error.code), error.message)
    first = sequences[0]
    if first.error is not None:
        return Outcome(str(first.code), first.error, len(first.tokens))
    return Outcome("", first.logs or "", len(first.tokens))


def _controller_worker(bus: KeyedBus, short: bool) -> Process:
    settings = {f"TOKENBUS_{name.upper()}": str(value) for name, value in SETTINGS.items()}
    environment = bus.environment | settings | {"PYTHONPATH": str(ROOT), SHORT: "1" * short}
    return Process("tests.hostile.worker", bus.folder / "controller.log", environment)


@contextmanager
def hostile_world(short: bool) -> Iterator[HostileWorld]:
    """Runs the system until the block ends. ``short``: the worker has lower limits
    (``worker.py``)."""
    compile_library()
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        keys = KeyFolder(Path(folder, "keys"))
        keys.make(new_pair)
        tenants = []
        for name in ("mallory", "ann"):
            key = KeyFolder.issue(name, "client", new_pair(), keys.broker().public)
            keys.allow("client", name, Allowed(public=key.public))
            tenants.append(key)
        with KeyedBus(keys) as bus:
            bus.start_worker()
            bus.start_other("state")
            bus.others.append(_controller_worker(bus, short))
            bus.wait_for_models("embedded")
            bus.wait_for_roles("controller", "state")
            mallory, ann = (Client(bus.front, patience_s=BOUND_S, key=key) for key in tenants)
            with mallory, ann:
                world = HostileWorld(bus, mallory, ann)
                try:
                    yield world
                finally:
                    world.calm.close()
