"""The tool worker: receives CALL, runs functions, and sends CALL_ANSWER."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...protocol.bodies import decode_as
from ...protocol.errors import TokenbusError
from ...protocol.health_file import HealthFile
from ...protocol.keys import own_key
from ...protocol.messages import PROTOCOL_VERSION
from ...protocol.settings import Settings
from ...protocol.worker_messages import End, Register, Registered
from .. import bus
from ..bus import Bus, FromBus
from .calls import Calls
from .functions import Served

log = logging.getLogger(__name__)

IDLE_S = 0.25


class ToolWorker:
    """One tool worker process. ``run`` serves until ``stop``."""

    def __init__(
        self,
        settings: Settings,
        tools: Mapping[str, Served],
        loop: asyncio.AbstractEventLoop | None = None,
        name: str = "",
    ) -> None:
        """``loop``: a running event loop that the tools need. If None, the worker makes a new
        loop."""
        self._settings = settings
        self._name = name or f"tool-{socket.gethostname()}-{os.getpid()}"
        self._tools = tools
        self._loop = loop or running_loop()
        self._bus = Bus(
            settings.back_endpoint,
            self._registration,
            self._load,
            health=HealthFile(settings),
            key=own_key(settings, "worker"),
        )
        self._calls = Calls(tools, self._bus.post, settings.tool_threads, settings.tool_capacity)
        self._stop_reason = ""
        self._failed = False
        self._draining_since: float | None = None
        self._seen_at = time.monotonic()
        """The time at which the event loop last ran a callback of this worker."""

    def run(self) -> int:
        """Serves, and returns the exit code: 0 after ``stop``. The exit code is 1 after ``fail``,
        or if a tool has blocked the event loop for ``hung_step_s``. In this case the broker ends
        the calls with errors."""
        log.info("loaded the tools %s", ", ".join(self._tools))
        self._bus.start()
        while not self._done():
            if time.monotonic() - self._seen_at > self._settings.hung_step_s:
                log.error("a function with 'async' has blocked the event loop; it must not block")
                self._bus.close("a tool blocks its event loop")
                return 1
            self._later(self._see)
            for message in self._bus.take(IDLE_S):
                try:
                    self._on_message(message)
                except TokenbusError as error:
                    log.warning("dropped a malformed %r message: %s", message.type, error)
        self._bus.close(self._stop_reason)
        return int(self._failed)

    def fail(self, reason: str) -> None:
        """Stops the worker like ``stop``, because its tools do not work any more. ``run`` then
        returns 1."""
        log.error("stopping: %s", reason)
        self._failed = True
        self.stop(reason)

    def stop(self, reason: str, *, restarts: bool = False) -> None:
        """Stops the worker when its running calls have ended, or after ``drain_s``. May be called
        from a signal handler. ``restarts`` has no effect: calls do not move to another worker."""
        self._stop_reason = reason
        self._bus.interrupt()

    # --- inside ---------------------------------------------------------------------------------

    def _done(self) -> bool:
        if not self._stop_reason:
            return False
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            self._bus.drain(self._stop_reason)
        late = time.monotonic() - self._draining_since > self._settings.drain_s
        return late or not self._calls.num_running

    def _on_message(self, message: FromBus) -> None:
        match message.type:
            case b"CALL":
                self._later(self._begin, message)
            case b"END":
                for request in decode_as(End, message.body, "msgpack").requests:
                    self._later(self._calls.end, message.link, request)
            case bus.LEASE_ENDED:
                self._later(self._calls.end, message.link)
            case b"REGISTERED":
                # The broker has ended the calls of the earlier lease.
                self._later(self._calls.end, message.link)
                answer: Registered = decode_as(Registered, message.body, "msgpack")
                self._bus.registered(answer, message.link)
            case b"DRAIN":
                self.stop("the broker requested it")
            case b"HANDOVER":
                pass
            case _:
                log.warning("dropped a message of the unknown type %r", message.type)

    def _see(self) -> None:
        self._seen_at = time.monotonic()

    def _begin(self, message: FromBus) -> None:
        try:
            self._calls.begin(message)
        except TokenbusError as error:
            log.warning("dropped a malformed CALL: %s", error)

    def _later(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _registration(self) -> Register:
        return Register(
            name=self._name,
            role="tool",
            version=PROTOCOL_VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            capacity=self._settings.tool_capacity,
            tools=[tool.info for tool in self._tools.values()],
        )

    def _load(self) -> tuple[int, dict[str, float]]:
        calls = self._calls
        return calls.num_running, {
            "running": float(calls.num_running),
            "calls": float(calls.num_done),
        }


def running_loop() -> asyncio.AbstractEventLoop:
    """A new event loop, which runs on a separate thread until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop
