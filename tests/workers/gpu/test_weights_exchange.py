"""A GPU worker receives the current weights of a model from another worker."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.worker_messages import (
    FetchWeights,
    ModelState,
    OrderDone,
    Registered,
    WeightsPart,
)
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model
from tokenbus.workers.gpu.model.new_weights import WeightsError, read_received
from tokenbus.workers.gpu.model.weights import weights_version
from tokenbus.workers.gpu.model.weights_file import SHARED, ReceivedFile, WeightsFile
from tokenbus.workers.gpu.serving import weights_exchange

from ...worlds.gpu_worker_loop import Loop
from .changed_weights import started_with, write_embedded
from .moved import token_messages
from .test_architectures import make
from .test_rollouts import answer, answers, begun, order, spans, until

PEER, OTHER = 21, 22
"""The ids of two workers that have the weights."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.002)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with other weights."""
    return write_embedded(tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def renewed(folder: str) -> LoadedModel:
    """The model with the weights of ``folder``; no test changes it."""
    return started_with(folder)


@pytest.fixture
def peer(tmp_path: Path, renewed: LoadedModel) -> Loop:
    """A worker that has the weights."""
    return Loop(tmp_path, renewed)


@pytest.fixture
def receiver(tmp_path: Path, renewed: LoadedModel) -> Loop:
    """A worker that has registered, and then loads the model with outdated weights. The current
    weights are not in a folder."""
    loop = Loop(tmp_path, load_model("embedded"))
    registered(loop, renewed)
    return loop


def registered(loop: Loop, renewed: LoadedModel, folder: str = "") -> None:
    """The worker receives the current version, and loads the model."""
    loop.worker._models.unload("m")
    hashes = {str(renewed.dtype): renewed.weights}
    state = ModelState(model="m", version=4, folder=folder, hashes=hashes)
    loop.give(b"REGISTERED", Registered(worker=1, heartbeat_s=1.0, expiry_s=5.0, states=[state]))
    loop.turn()
    loop.load("m")


def asked(loop: Loop) -> list[FetchWeights]:
    """The requests that a worker has sent."""
    return [decode_as(FetchWeights, f[2], "msgpack") for f in loop.sent(b"FETCH_WEIGHTS")]


def parts(peer: Loop, fetch: FetchWeights, address: int = 9) -> tuple[WeightsPart, list[bytes]]:
    """The answer of a worker to a request."""
    peer.give(b"FETCH_WEIGHTS", fetch, 0, address)
    before = len(peer.sent(b"WEIGHTS_PART"))
    until(peer, lambda _: len(peer.sent(b"WEIGHTS_PART")) > before)
    frames = peer.sent(b"WEIGHTS_PART")[-1]
    assert decode_header(frames[1]).address == address
    return decode_as(WeightsPart, frames[2], "msgpack"), frames[3:]


def deliver(loop: Loop, part: WeightsPart, content: list[bytes], sender: int = PEER) -> None:
    loop.give(b"WEIGHTS_PART", part, 0, sender, attachments=content)
    loop.turn()


def transfer(loop: Loop, peer: Loop, sender: int = PEER) -> Iterator[FetchWeights]:
    """Answers the worker's requests. Yields each request after its answer was delivered."""
    answered = 0
    while answered < len(asked(loop)):
        fetch = asked(loop)[-1]
        answered = len(asked(loop))
        deliver(loop, *parts(peer, fetch), sender)
        yield fetch


def refused(loop: Loop, renewed: LoadedModel) -> None:
    """The broker reports that no worker has the weights."""
    error = "no worker has the weights"
    deliver(loop, WeightsPart(model="m", weights=renewed.weights, error=error), [], sender=0)


@pytest.mark.parametrize("name", ["embedded", "qwen2", "gemma"])
def test_parts_of_any_size_are_a_safetensors_file_of_the_weights(name: str) -> None:
    loaded = load_model(name) if name == "embedded" else wrap_model(name, make(name))
    file = WeightsFile(loaded)
    whole = file.read(0, file.size)
    assert len(whole) == file.size
    count = len(whole) // 7 + 1
    assert b"".join(file.read(at, count) for at in range(0, file.size, count)) == whole
    assert load(whole).keys() <= loaded.model.state_dict().keys()
    received = ReceivedFile(loaded, file.size)
    received.add(whole)
    assert received.complete
    assert read_received(loaded, received.path, 1, "another worker").weights == loaded.weights


def test_a_file_that_is_too_large_is_refused(renewed: LoadedModel) -> None:
    with pytest.raises(WeightsError, match=r"at most \d+ are possible"):
        ReceivedFile(renewed, 2**40)
    received = ReceivedFile(renewed, 10)
    with pytest.raises(WeightsError, match="more than the 10 bytes"):
        received.add(bytes(11))


def test_a_stream_begins_with_the_weights_of_another_worker(
    peer: Loop, receiver: Loop, renewed: LoadedModel
) -> None:
    receiver.generate(9, max_tokens=2)
    assert [fetch.offset for fetch in transfer(receiver, peer)][:2] == [0, 2**20]
    until(receiver, lambda loop: loop.entries(9))
    span = receiver.entries(9)[0]["span"]
    assert (span["version"], span["weights"]) == (4, renewed.weights)
    assert sum(len(frames[3]) for frames in peer.sent(b"WEIGHTS_PART")) == WeightsFile(renewed).size
    [state] = receiver.worker._registration().states
    assert state.hashes == {str(renewed.dtype): renewed.weights}


def test_another_worker_continues_the_transfer_of_one_that_dies(
    peer: Loop, receiver: Loop, renewed: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = transfer(receiver, peer)
    next(requests)
    next(requests)
    lost = asked(receiver)[-1]
    # The worker that has received this request dies.
    monkeypatch.setattr(weights_exchange, "AGAIN_S", -1.0)
    receiver.turn()
    monkeypatch.undo()
    again = asked(receiver)[-1]
    assert (again.offset, again.turn) == (lost.offset, lost.turn + 1)
    *_, last = transfer(receiver, peer, OTHER)
    assert last.turn == again.turn
    begun(receiver, tokens=1)
    assert spans(token_messages(receiver))[0][1].weights == renewed.weights


def test_weights_with_another_hash_are_not_used(
    peer: Loop, receiver: Loop, renewed: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.generate(9, max_tokens=2)
    part, content = parts(peer, asked(receiver)[-1])
    changed = bytearray(content[0])
    changed[-1] ^= 1  # The changed numbers are still finite.
    changed[-4] ^= 1
    deliver(receiver, part, [bytes(changed)])
    monkeypatch.setattr(weights_exchange, "AGAIN_S", 1e9)
    for _ in transfer(receiver, peer):
        pass
    readings = receiver.worker._rollouts._readings
    until(receiver, lambda _: readings["m"].attempts and readings["m"].incoming)
    assert receiver.entries(9) == []
    before = len(asked(receiver))
    monkeypatch.setattr(weights_exchange, "AGAIN_S", -1.0)
    until(receiver, lambda loop: len(asked(loop)) > before)
    monkeypatch.undo()
    monkeypatch.setattr(module, "IDLE_S", 0.002)
    for _ in transfer(receiver, peer, OTHER):
        pass
    until(receiver, lambda loop: loop.entries(9))
    assert receiver.entries(9)[0]["span"]["weights"] == renewed.weights


def test_a_folder_whose_files_have_changed_is_not_used(
    tmp_path: Path, peer: Loop, renewed: LoadedModel
) -> None:
    loop = Loop(tmp_path, load_model("embedded"))
    registered(loop, renewed, write_embedded(tmp_path / "other", seed=5))
    until(loop, asked)
    for _ in transfer(loop, peer):
        pass
    begun(loop, tokens=1)
    assert spans(token_messages(loop))[0][1].weights == renewed.weights


def test_requests_wait_for_an_update_if_no_worker_has_the_weights(
    receiver: Loop, renewed: LoadedModel, folder: str
) -> None:
    receiver.generate(9, max_tokens=2)
    refused(receiver, renewed)
    assert not receiver.sent(b"ERROR")
    for number, action in ((1, "drop"), (3, "commit")):
        order(receiver, "prepare", number=number, version=5, folder=folder)
        until(receiver, lambda loop: number in done(loop))  # noqa: B023
        assert done(receiver)[number].error == ""
        assert receiver.entries(9) == []
        order(receiver, action, number=number + 1, version=5, folder=folder)
        answer(receiver, action)
    until(receiver, lambda loop: loop.entries(9))
    assert receiver.entries(9)[0]["span"]["version"] == 5


def done(loop: Loop) -> dict[int, OrderDone]:
    """The answers to the orders, by their numbers."""
    return {one.number: one for one in answers(loop)}


def test_a_model_whose_folder_is_gone_is_refused_if_no_worker_has_the_weights(
    tmp_path: Path, renewed: LoadedModel
) -> None:
    loop = Loop(tmp_path, load_model("embedded"))
    registered(loop, renewed, str(tmp_path / "gone"))
    loop.generate(9)
    until(loop, asked)
    refused(loop, renewed)
    until(loop, lambda _: loop.sent(b"ERROR"))
    error = msgspec.json.decode(loop.sent(b"ERROR")[0][2])
    assert error["code"] == "model_load_failed"
    assert "no worker has the weights" in error["message"]


def test_a_worker_without_the_weights_says_so(
    tmp_path: Path, renewed: LoadedModel, receiver: Loop
) -> None:
    plain = Loop(tmp_path, load_model("embedded"))
    part, content = parts(plain, asked(receiver)[0])
    assert (part.error, content) == ("the worker does not have these weights of m", [])
    deliver(receiver, part, content)
    assert receiver.worker._models.engines
    assert not receiver.sent(b"ERROR")


def arrives(loop: Loop, content: bytes, number: int, sha256: str = "") -> OrderDone:
    """The worker receives the file of an update from the operator; returns its answer."""
    sha256 = sha256 or hashlib.sha256(content).hexdigest()
    order(loop, "prepare", number=number, version=1, size=len(content), sha256=sha256)
    loop.turn()
    for offset in range(0, len(content), 2**20):
        assert (asked(loop)[-1].order, asked(loop)[-1].offset) == (number, offset)
        part = WeightsPart(model="m", weights=sha256, offset=offset, size=len(content))
        deliver(loop, part, [content[offset : offset + 2**20]], sender=0)
    until(loop, lambda _: number in done(loop))
    return done(loop)[number]


def test_weights_that_the_operator_sends_replace_the_old_ones(
    tmp_path: Path, folder: str, renewed: LoadedModel
) -> None:
    loop = Loop(tmp_path, load_model("embedded"))
    content = Path(folder, "model.safetensors").read_bytes()
    assert "do not have the sha256" in arrives(loop, content, 1, sha256="0" * 64).error
    assert "at most" in too_large(loop, 2).error
    changed = b"\xff" * 8 + content[8:]
    assert "cannot read 'the bus'" in arrives(loop, changed, 3).error
    assert arrives(loop, content, 4).weights == renewed.weights
    begun(loop)
    order(loop, "commit", number=5, version=1, hashes={str(renewed.dtype): renewed.weights})
    assert answer(loop, "commit").streams == 1
    until(loop, lambda _: any(s.version for _, s in spans(token_messages(loop))))
    assert spans(token_messages(loop))[-1][1].weights == renewed.weights
    [state] = loop.worker._registration().states
    assert (state.folder, state.hashes) == ("", {str(renewed.dtype): renewed.weights})


def test_a_worker_that_misses_the_rest_of_the_operator_s_weights_gets_them_from_a_worker(
    tmp_path: Path, folder: str, peer: Loop, renewed: LoadedModel
) -> None:
    """Another broker reports that the version is the current one."""
    loop = Loop(tmp_path, load_model("embedded"))
    content = Path(folder, "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    order(loop, "prepare", version=1, size=len(content), sha256=sha256)
    loop.turn()
    part = WeightsPart(model="m", weights=sha256, size=len(content))
    deliver(loop, part, [content[: 2**20]], sender=0)
    order(loop, "commit", number=2, version=1, hashes={str(renewed.dtype): renewed.weights})
    loop.turn()
    assert (asked(loop)[-1].order, asked(loop)[-1].weights) == (0, renewed.weights)
    for _ in transfer(loop, peer):
        pass
    assert answer(loop, "commit").weights == renewed.weights


def too_large(loop: Loop, number: int) -> OrderDone:
    """The answer to an update whose file is larger than the model can be."""
    order(loop, "prepare", number=number, version=1, size=2**40, sha256="0" * 64)
    until(loop, lambda _: number in done(loop))
    return done(loop)[number]


def test_weights_in_shared_memory_are_copied(
    tmp_path: Path, folder: str, renewed: LoadedModel
) -> None:
    loop = Loop(tmp_path, load_model("embedded"))
    content = Path(folder, "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    shared = SHARED / f"tokenbus-test-{os.getpid()}"
    try:
        shared.write_bytes(content + b"rest!")

        def prepared(number: int, name: str, size: int, sha256: str) -> OrderDone:
            given = {"shared": name, "size": size, "sha256": sha256}
            order(loop, "prepare", number=number, version=1, **given)
            until(loop, lambda _: number in done(loop))
            return done(loop)[number]

        assert "cannot read the shared memory" in prepared(1, "gone", 5, sha256).error
        assert "bytes; expected" in prepared(2, shared.name, len(content) + 6, sha256).error
        assert "do not have the sha256" in prepared(3, shared.name, len(content), "0" * 64).error
        assert prepared(4, shared.name, len(content), sha256).weights == renewed.weights
        shared.write_bytes(bytes(len(content)))
    finally:
        shared.unlink()
    order(loop, "commit", number=5, version=1, hashes={str(renewed.dtype): renewed.weights})
    answer(loop, "commit")
    loop.generate(9, max_tokens=2)
    until(loop, lambda _: loop.entries(9))
    assert loop.entries(9)[0]["span"]["weights"] == renewed.weights
    assert weights_version(loop.loaded.model) == renewed.weights
