"""The loop of a GPU worker without a broker. A test runs each iteration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Flag, Header
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.worker_messages import Result, StepResult
from tokenbus.workers.bus import FromBus
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.models import Ready
from tokenbus.workers.gpu.worker import GpuWorker

CONTROLLER = 7
"""The id of the controller worker."""


class Loop:
    """A worker that receives the test's messages."""

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        overlap: bool = False,
        speculation: bool = False,
        batched: int = 2048,
        compiled: bool = False,
        exact: Literal["auto", "on", "off"] = "auto",
        **settings: Any,
    ) -> None:
        back = f"ipc://{folder}/back.sock"
        self.worker = GpuWorker(Settings(back=back, model="auto", allow=["*"], **settings))
        self.loaded = loaded
        self.overlap = overlap
        self.speculation = speculation
        self.batched = batched
        self.compiled = compiled
        self.exact: Literal["auto", "on", "off"] = exact
        self.load("m")

    def load(self, model: str) -> None:
        """Makes an engine with the loaded model, under the name ``model``."""
        config = EngineConfig(
            kv_cache_bytes=2**22,
            max_num_batched_tokens=self.batched,
            overlap=self.overlap,
            speculation=self.speculation,
            compiled=self.compiled,
            exact=self.exact,
        )
        self.worker._models.events.put(Ready(model, Engine(self.loaded, config)))
        self.worker._load_events()

    def give(
        self,
        kind: bytes,
        body: Any,
        request: int = 0,
        address: int = 0,
        flags: int = 0,
        attachments: Iterable[bytes] = (),
        link: int = 0,
    ) -> None:
        """Delivers a message to the worker over a link."""
        encoded = body if isinstance(body, bytes) else encode_body(body, "msgpack")
        header = Header(request, address, flags)
        self.worker._bus._inbox.put([FromBus(kind, header, encoded, list(attachments), link)])

    def generate(
        self,
        request: int,
        controller: str | None = None,
        max_tokens: int = 50,
        model: str = "m",
        link: int = 0,
        moved: bytes | None = None,
    ) -> None:
        """Delivers a GENERATE. ``moved``: the transcript, if the request has moved."""
        body = {
            "model": model,
            "stream_id": request,
            "prompt": [5, 6, 7],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "controller": controller,
        }
        body = {name: value for name, value in body.items() if value is not None}
        flags, attachments = (0, []) if moved is None else (Flag.MOVED, [moved])
        encoded, session = msgspec.json.encode(body), 100 + request
        self.give(b"GENERATE", encoded, request, session, flags, attachments, link)

    def decide(self, request: int, action: Any) -> None:
        """Delivers the decision of a request's controller."""
        results = Result(sequences=[StepResult(request, 0, action)], host="elsewhere")
        self.give(b"RESULT", results, 0, CONTROLLER)

    def turn(self) -> None:
        """Runs one iteration of the loop of ``GpuWorker.run``, without ``_report_pages``."""
        worker = self.worker
        worker._take()
        worker._report()
        worker._load_events()
        worker._expire()
        worker._follow_orders()
        worker._step()

    def sent(self, kind: bytes, link: int = 0) -> list[list[bytes]]:
        """All messages of a type that the worker has sent over a link."""
        return [frames for frames in self.worker._bus._links[link]._outbox if frames[0] == kind]

    def entries(self, request: int) -> list[Any]:
        """The entries that the worker has sent over link 0 to the client of a request."""
        bodies = [body for frames in self.sent(b"TOKEN") for body in frames[2:]]
        entries = [entry for body in bodies for entry in msgspec.json.decode(body)]
        return [entry for entry in entries if entry["stream_id"] == request]
