"""A system whose workers are killed while controllers run."""

from __future__ import annotations

from typing import Any

from tokenbus.clients import Client
from tokenbus.clients.client import Stream
from tokenbus.protocol.messages import WorkerStatus

from ..processes import Bus, Process, until
from ..workers.controller.wasm.hostile.guests import COUNTS, guest, set_word
from .reader import BOUND_S, Reader

PROMPT = "def add(a, b):"
TOKENS = 200
CALM = guest()
FORKS = guest(
    pre=f"""(if (i32.eq (global.get $round) (i32.const 1)) (then
        {set_word(1056, 2)} (return (i32.const 3))))
      (if (call $seq_id) (then (return (i32.const 2))))"""
)
"""A guest with two sequences. One of them is suspended in its second round."""
LARGE = guest(pages=512, init="(memory.fill (i32.const 65536) (i32.const 1) (i32.const 33488896))")
"""A guest that uses 32 MiB of memory."""


class System:
    """A broker, a GPU worker, a state worker, controller workers, and a client."""

    def __init__(self, bus: Bus, client: Client) -> None:
        self.bus, self.client = bus, client
        self.start_state()
        self.controllers: list[Process] = []
        self.with_controllers(1)
        for tag, wasm in (("calm", CALM), ("counts", COUNTS), ("forks", FORKS), ("large", LARGE)):
            client.upload_controller(wasm, tag)
        [self.reference] = self.stream().wait()

    def with_controllers(self, count: int) -> None:
        """Starts controller workers until ``count`` of them run, and waits until ``count`` are
        registered."""
        self.controllers = [c for c in self.controllers if c.alive]
        while len(self.controllers) < count:
            self.controllers.append(self.bus.start_other("controller"))
        until(lambda: len(self.of("controller")) >= count, BOUND_S, f"{count} controller workers")

    def start_state(self) -> None:
        """Starts the state worker, and waits until it is registered."""
        self.state = self.bus.start_other("state")
        until(
            lambda: self.state.pid in [w.pid for w in self.of("state")], BOUND_S, "a state worker"
        )

    def of(self, role: str) -> list[WorkerStatus]:
        """The broker's report on the workers of a role."""
        return [w for w in self.client.status().workers if w.role == role]

    def stream(self, controller: str = "calm", **options: Any) -> Stream:
        given = {
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "text": False,
            "retry_s": BOUND_S,
        } | options
        return self.client.generate(PROMPT, controller=controller, **given)

    def streams(self, count: int, controller: str = "calm", **options: Any) -> list[Reader]:
        """Begins streams, and waits for a token of each."""
        readers = [Reader(self.stream(controller, **options)) for _ in range(count)]
        for reader in readers:
            assert reader.began.wait(BOUND_S), "a stream did not begin"
        return readers

    def check_ends(self, *readers: Reader) -> None:
        """Checks that streams end without an error, with the tokens of the reference."""
        for reader in readers:
            assert reader.end() is None
            assert reader.tokens == self.reference.tokens

    def wait_until_free(self) -> None:
        """Waits until no worker has a request, no controller worker has a sequence group, and the
        state worker has no variables."""

        def free() -> bool:
            workers = self.client.status().workers
            controllers = [w for w in workers if w.role == "controller"]
            idle = all(w.load.get("sessions") == 0 for w in controllers)
            return idle and all(w.requests == 0 for w in workers if w.role != "state")

        until(free, BOUND_S, "the workers are idle")
        until(lambda: self.of("state")[0].load.get("requests") == 0, BOUND_S, "no variables")
