"""The memory of the requests that wait at a GPU worker is bounded, and clients share the bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.errors import Code
from tokenbus.protocol.messages import Cancel, Embed, Error, Generate, Score
from tokenbus.protocol.worker_messages import Registered
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model
from tokenbus.workers.gpu.model.models import Failed
from tokenbus.workers.gpu.serving import stored_bytes
from tokenbus.workers.gpu.serving.stored_bytes import ID_BYTES, MEMORY_PART, decoded_bytes

from ...worlds.gpu_worker_loop import Loop

BOUND = 1_000_000
TEXT = "x" * (BOUND // 20)
MINE, OTHER = 7, 8
"""The sessions of two clients."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded.NAME, device="cpu")


@pytest.fixture
def loop(tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A worker with the bound ``BOUND``. The model ``m`` is loaded, other models never are."""
    monkeypatch.setattr(stored_bytes, "machine_memory", lambda: MEMORY_PART * BOUND)
    found = Loop(tmp_path, loaded)
    monkeypatch.setattr(found.worker._models, "want", lambda name: None)
    return found


def give(loop: Loop, request: int, session: int = MINE, model: str = "loading") -> None:
    """Delivers a request that takes about a fifth of one client's share."""
    message = Generate(stream_id=request, model=model, prompt=TEXT)
    loop.give(b"GENERATE", message, request, session)
    loop.worker._receive()


def embed(loop: Loop, request: int, model: str = "m", num_inputs: int = 4) -> None:
    inputs = [[1000 + i for i in range(500)]] * num_inputs
    loop.give(b"EMBED", Embed(stream_id=request, model=model, inputs=inputs), request, MINE)
    loop.worker._receive()


def refused(loop: Loop) -> list[int | None]:
    """The stream of each ERROR, whose code must be ``client_limit``."""
    errors = [decode_as(Error, frames[2]) for frames in loop.sent(b"ERROR")]
    assert {error.code for error in errors} <= {Code.CLIENT_LIMIT}
    assert all("gpu_workers" in error.message for error in errors)
    return [error.stream_id for error in errors]


def stored(loop: Loop) -> int:
    """The bytes that count."""
    return loop.worker._streams._stored._total


def test_requests_for_a_model_that_loads_have_a_share_of_the_bound(loop: Loop) -> None:
    for request in range(1, 11):
        give(loop, request)
    # A request counts its body and its decoded text, and a single client gets half of the bound.
    assert refused(loop) == [6, 7, 8, 9, 10]
    give(loop, 11, OTHER)
    assert refused(loop)[-1] == 10
    assert loop.worker._arrivals.num_waiting == 6


def test_requests_for_a_paused_model_have_a_share_of_the_bound(loop: Loop) -> None:
    loop.worker._arrivals.held.add("m")
    for request in range(1, 11):
        give(loop, request, model="m")
    assert refused(loop) == [6, 7, 8, 9, 10]


def test_the_token_ids_and_the_vectors_of_embeds_count(loop: Loop) -> None:
    embed(loop, 1)
    one = stored(loop)
    assert one > 4 * 500 * ID_BYTES + 4 * 4 * 192
    for request in range(2, 20):
        embed(loop, request)
    assert refused(loop)[0] == BOUND // 2 // one + 1


def cancel(loop: Loop) -> None:
    loop.give(b"CANCEL", Cancel(stream_id=1), 1, MINE)
    loop.worker._receive()


def lose(loop: Loop) -> None:
    """The broker does not know the request any more."""
    body = Registered(worker=1, unknown=[1], heartbeat_s=1.0, expiry_s=5.0)
    loop.give(b"REGISTERED", body)
    loop.worker._receive()


def fail(loop: Loop) -> None:
    loop.worker._models.events.put(Failed("loading", ModelLoadError("no such model")))
    loop.worker._load_events()


def compute(loop: Loop) -> None:
    while loop.worker._arrivals.embeddings.has_work:
        loop.turn()


@pytest.mark.parametrize(
    ("begin", "end"),
    [(give, cancel), (give, lose), (give, fail), (embed, cancel), (embed, lose), (embed, compute)],
)
def test_an_ended_request_does_not_count(
    loop: Loop, begin: Callable[[Loop, int], None], end: Callable[[Loop], None]
) -> None:
    begin(loop, 1)
    assert stored(loop) > 0
    end(loop)
    assert stored(loop) == 0


def test_a_request_that_arrives_again_counts_once(loop: Loop) -> None:
    give(loop, 1)
    once = stored(loop)
    give(loop, 1)
    assert stored(loop) == once


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (Generate(stream_id=1, prompt=[1, 2, 3]), 3 * ID_BYTES),
        (Generate(stream_id=1, controller="c", controller_arg="x" * 5000), 5000),
        (Generate(stream_id=1, controller="c", controller_arg={"a": [1]}), 9 * ID_BYTES),
        (Generate(stream_id=1, controller="c", controller_arg=[{(1, 2): 3}]), 1000 * ID_BYTES),
        (Generate(stream_id=1, prompt="x" * 5000, controller="c", controller_arg=[]), 5000),
        (Score(stream_id=1, scored="y" * 5000), 5000),
        (Score(stream_id=1, scored=[1] * 100, prompt="x" * 5000), 5000 + 100 * ID_BYTES),
        (Embed(stream_id=1, inputs=[[1] * 100, [2]]), 101 * ID_BYTES),
    ],
)
def test_decoded_texts_and_ids_count(message: Any, size: int) -> None:
    assert size <= decoded_bytes(message, 1000) < size + 200
