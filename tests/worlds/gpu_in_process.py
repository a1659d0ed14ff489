"""A GPU worker in the test's process, with a real broker. A test can make parts of the worker
fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.worker import GpuWorker

from ..processes import KV_CACHE_BYTES, Bus, until

JOIN_S = 300.0


class InProcess:
    """A GPU worker on a thread of this process, its bus, and the result of the worker's ``run``."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        self.bus = bus
        own: dict[str, Any] = {
            "kv_cache_bytes": KV_CACHE_BYTES,
            "back": f"ipc://{bus.folder}/back.sock",
        }
        self.worker = GpuWorker(Settings(**own | settings))
        self.results: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self.results.append(self.worker.run()), name="gpu-worker", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker runs."""
        return self._thread.is_alive()

    def engine(self, model: str = "embedded") -> Any:
        """The engine of a loaded model."""
        return self.worker._models.engines[model]

    def end(self) -> int | None:
        """Stops the worker; returns the result of its ``run``, or None if ``run`` has raised."""
        self.worker.stop("the test has ended")
        self._thread.join(JOIN_S)
        assert not self.alive
        return self.results[0] if self.results else None

    def wait_until_idle(self) -> None:
        """Waits until no worker has a request or a used block of the KV cache."""
        with self.bus.client() as client:

            def idle() -> bool:
                workers = client.status().workers
                return not any(w.requests or w.load.get("kv_blocks_used") for w in workers)

            until(idle, JOIN_S, "the broker and the worker are idle")


@contextmanager
def in_process(**settings: Any) -> Iterator[InProcess]:
    """Runs a bus whose GPU worker is in this process."""
    with Bus(heartbeat_s=0.1) as bus:
        running = InProcess(bus, **settings)
        try:
            bus.wait_for_roles("gpu")
            if settings.get("model") != "auto":
                bus.wait_for_models("embedded")
            yield running
        finally:
            running.end()
