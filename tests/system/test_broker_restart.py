"""A broker is killed, or stopped for a while, while streams of every kind run. Each stream must end
with the tokens of an undisturbed run, and must not be sent again from its beginning."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenbus.clients import Client, Stream

from ..processes import Bus, Gateway, until
from ..workers.controller.wasm.hostile.guests import FREE, call, guest

pytestmark = pytest.mark.process

COUNTS = guest(
    mid=f"""(drop {call("var_append", 512, 4, 512, 1, -1, FREE)})
      (i32.store8 (i32.const {FREE + 1}) {call("var_get", 512, 4, FREE + 8, 1024, 0)})
      {call("log", FREE, 2)}"""
)
"""A guest that appends a byte to a variable in each round, and logs the variable's new version and
new length."""
DRAWN: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0}
PLAIN: dict[str, Any] = {**DRAWN, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "several sequences": {**PLAIN, "n": 3, "max_tokens": 150},
    "constrained": {
        "controller": "regex",
        "controller_arg": "[a-z ]{300}",
        **DRAWN,
    },
    "constrained, several": {
        "controller": "regex",
        "controller_arg": "[a-z]{120}",
        **DRAWN,
        "n": 3,
    },
    "variables": {"controller": "counts", "max_tokens": 150, "ignore_eos": True, "text": False},
}


@pytest.fixture(scope="module")
def system(processes: None) -> Iterator[Bus]:
    with Bus(heartbeat_s=0.2, ping_s=0.3, expiry_s=4) as bus:
        bus.start_all_roles()
        with bus.client() as client:
            client.upload_controller(COUNTS, "counts")
        yield bus


@pytest.fixture(scope="module")
def gateway(system: Bus) -> Gateway:
    return system.start_gateway()


class Download:
    """A completion that is streamed over HTTP, and read on a separate thread."""

    def __init__(self, gateway: Gateway) -> None:
        self.began = threading.Event()
        self._url = f"{gateway.url}/v1/completions"
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def content(self) -> tuple[str, list[str], list[str]]:
        """The completion's text, its finish reasons, and the data of all events without choices.
        The text is joined, because its division into events depends on time."""
        self._thread.join(300.0)
        text, reasons, others = "", [], []
        for line in self._lines:
            data = line.removeprefix("data: ")
            choices = json.loads(data)["choices"] if data.startswith("{") else []
            for choice in choices:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            others += [data] if data and not choices else []
        return text, reasons, others

    def _run(self) -> None:
        body = {
            "model": "embedded",
            "prompt": "def f(",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "seed": 1,
        }
        with httpx.stream("POST", self._url, json=body, timeout=300.0) as response:
            for line in response.iter_lines():
                self._lines.append(line)
                self.began.set()


def begin(client: Client, seed: int) -> list[Stream]:
    """Begins a stream of each kind."""
    return [
        client.generate(f"import {kind}", seed=seed, retry_s=0, **options)
        for kind, options in KINDS.items()
    ]


def content(stream: Stream) -> Any:
    """The parts of a stream's result that must be the same in each run."""
    return [(s.tokens, s.logs, s.storage, s.finish_reason) for s in stream.wait()]


def test_streams_outlive_a_broker_that_is_killed(system: Bus, gateway: Gateway) -> None:
    with system.client() as client:
        reference = [content(stream) for stream in begin(client, 1)]
        downloaded = Download(gateway).content()
        assert downloaded[1:] == (["length"], ["[DONE]"])
        streams, download = begin(client, 1), Download(gateway)
        for stream in streams:
            next(iter(stream))
        assert download.began.wait(300.0)
        system.broker.kill()
        system.start_broker()
        assert [content(stream) for stream in streams] == reference
        assert download.content() == downloaded


def test_streams_outlive_a_broker_that_is_stopped_for_a_while(system: Bus) -> None:
    with system.client() as client:
        reference = [content(stream) for stream in begin(client, 3)]
        streams = begin(client, 3)
        for stream in streams:
            next(iter(stream))
        system.broker.send(signal.SIGSTOP)
        try:
            until(lambda: "is silent" in system.workers[0].log, 300.0, "a silent broker")
        finally:
            system.broker.send(signal.SIGCONT)
        assert [content(stream) for stream in streams] == reference
