"""A broker that is killed, or stopped for a while, under streams of every kind: each ends with the
tokens of an undisturbed run. None of them may be sent again from its beginning."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tokenbus.clients import Client, Stream

from ..processes import Bus, until

pytestmark = pytest.mark.process

PLAIN: dict[str, Any] = {"max_tokens": 400, "temperature": 1.0, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "several sequences": {**PLAIN, "n": 3, "max_tokens": 150},
}


@pytest.fixture(scope="module")
def system(processes: None) -> Iterator[Bus]:
    with Bus(heartbeat_s=0.2, ping_s=0.3, expiry_s=4) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        yield bus


def begin(client: Client, seed: int) -> list[Stream]:
    """A stream of each kind."""
    return [
        client.generate(f"import {kind}", seed=seed, retry_s=0, **options)
        for kind, options in KINDS.items()
    ]


def content(stream: Stream) -> Any:
    """All that a client can see of a stream."""
    return [(s.tokens, s.logs, s.storage, s.finish_reason) for s in stream.wait()]


def test_streams_outlive_a_broker_that_is_killed(system: Bus) -> None:
    with system.client() as client:
        reference = [content(stream) for stream in begin(client, 1)]
        streams = begin(client, 1)
        for stream in streams:
            next(iter(stream))
        system.broker.kill()
        system.start_broker()
        assert [content(stream) for stream in streams] == reference


def test_streams_outlive_a_broker_that_is_stopped_for_a_while(system: Bus) -> None:
    with system.client() as client:
        reference = [content(stream) for stream in begin(client, 2)]
        streams = begin(client, 2)
        for stream in streams:
            next(iter(stream))
        system.broker.send(signal.SIGSTOP)
        try:
            until(lambda: "is silent" in system.workers[0].log, 60.0, "the worker notices")
        finally:
            system.broker.send(signal.SIGCONT)
        assert [content(stream) for stream in streams] == reference
