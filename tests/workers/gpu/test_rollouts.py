"""A GPU worker that is paused, or gets new weights, while its streams run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Embedded, Msg, Span, Token
from tokenbus.protocol.worker_messages import ModelState, Order, OrderDone, Registered
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model
from tokenbus.workers.gpu.model.weights import weights_version

from ...worlds.gpu_worker_loop import Loop
from .changed_weights import started_with, write_embedded
from .moved import finish, finished, give, same_entries, token_messages, transcript

BODY: dict[str, Any] = {
    "prompt": list(range(5, 45)),
    "max_tokens": 12,
    "n": 2,
    "ignore_eos": True,
    "seed": 3,
    "temperature": 1.0,
}
HANG_S = 240.0
"""A limit in seconds for an answer, which only bounds a hang."""
FORMS = pytest.mark.parametrize("flags", [0, Flag.COLUMNS])
OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.002)


@pytest.fixture
def loaded() -> LoadedModel:
    """A model whose weights a test changes."""
    return load_model("embedded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with other weights."""
    return write_embedded(tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def renewed(folder: str) -> LoadedModel:
    """The model with the weights of ``folder``."""
    return started_with(folder)


def order(loop: Loop, action: Any, number: int = 1, **fields: Any) -> None:
    """The worker receives an order."""
    loop.give(b"ORDER", Order(number=number, action=action, model="m", **fields))


def answers(loop: Loop) -> list[OrderDone]:
    return [decode_as(OrderDone, frames[2], "msgpack") for frames in loop.sent(b"ORDER_DONE")]


def until(loop: Loop, condition: Callable[[Loop], object]) -> None:
    """Runs turns until the condition holds. Another thread reads weights meanwhile."""
    gives_up_at = time.monotonic() + HANG_S
    while not condition(loop):
        assert time.monotonic() < gives_up_at
        loop.turn()


def answer(loop: Loop, action: str) -> OrderDone:
    """Runs turns until an order of this kind is answered; returns the answer."""
    until(loop, lambda _: any(done.action == action for done in answers(loop)))
    return next(done for done in answers(loop) if done.action == action)


def begun(loop: Loop, flags: int = 0, tokens: int = 4) -> None:
    """Begins a stream, and waits until it has sent ``tokens`` messages."""
    give(loop, b"GENERATE", BODY, flags)
    until(loop, lambda _: len(token_messages(loop)) >= tokens)


def update(loop: Loop, folder: str, version: int = 1, **fields: Any) -> OrderDone:
    """Runs both phases of an update; returns the last answer."""
    order(loop, "prepare", version=version, folder=folder, **fields)
    assert answer(loop, "prepare").error == ""
    order(loop, "commit", version=version, folder=folder, **fields)
    return answer(loop, "commit")


def entries(loop: Loop, stream: int) -> list[Token]:
    """The entries of one stream."""
    return [e for m in token_messages(loop) for e in m if e.stream_id == stream]


def ended(loop: Loop, stream: int) -> bool:
    return any(entry.finish_reason is not None for entry in entries(loop, stream))


def spans(messages: list[list[Token]]) -> list[tuple[int, Span]]:
    return [(e.seq, e.span) for m in messages for e in m if e.span is not None]


def prepared_early(loop: Loop, folder: str, **fields: Any) -> None:
    """Runs the first phase of an update, before any stream runs."""
    order(loop, "prepare", version=1, folder=folder, **fields)
    answer(loop, "prepare")


@FORMS
@OVERLAP
def test_live_streams_continue_as_on_a_worker_that_began_with_the_weights(
    tmp_path: Path,
    loaded: LoadedModel,
    renewed: LoadedModel,
    folder: str,
    flags: int,
    overlap: bool,
) -> None:
    old, loop = loaded.weights, Loop(tmp_path, loaded, overlap=overlap)
    prepared_early(loop, folder)
    begun(loop, flags)
    order(loop, "commit", version=1, folder=folder)
    done = answer(loop, "commit")
    assert (done.error, done.streams, done.weights) == ("", 1, renewed.weights)
    assert done.pause_ms > 0
    finish(loop)
    messages = token_messages(loop)
    cut = next(
        number
        for number, message in enumerate(messages)
        if any(e.span is not None and e.span.version for e in message)
    )
    other = Loop(tmp_path, renewed)
    give(other, b"GENERATE", BODY, flags | Flag.MOVED, transcript(messages[:cut]))
    finish(other)
    same_entries(messages[cut:], token_messages(other), renewed, BODY)
    found = spans(messages)
    assert [(seq, s.weights, s.version) for seq, s in found] == [
        (0, old, 0),
        (1, old, 0),
        (0, renewed.weights, 1),
        (1, renewed.weights, 1),
    ]
    assert len({s.exact for _, s in found}) == 1
    assert not any(s.kept_cache for _, s in found)


@OVERLAP
def test_a_kept_cache_is_named_and_serves_no_other_request(
    tmp_path: Path, loaded: LoadedModel, renewed: LoadedModel, folder: str, overlap: bool
) -> None:
    loop = Loop(tmp_path, loaded, overlap=overlap)
    prepared_early(loop, folder, update="keep")
    begun(loop)
    order(loop, "commit", version=1, folder=folder, update="keep")
    assert answer(loop, "commit").streams == 1
    finish(loop)
    last = [span for _, span in spans(token_messages(loop))][-2:]
    assert all(span.kept_cache and span.exact == "" and span.version == 1 for span in last)
    ends = [e.exact for m in token_messages(loop) for e in m if e.finish_reason is not None]
    assert ends == [False, False]
    whole = Loop(tmp_path, renewed)
    again = msgspec.json.encode(BODY | {"model": "m", "stream_id": 9, "n": 1})
    for each in (loop, whole):
        each.give(b"GENERATE", again, 9, 109)
        until(each, lambda loop: ended(loop, 9))
    got, wanted = entries(loop, 9), entries(whole, 9)
    assert [(e.token, e.logprob) for e in got] == [(e.token, e.logprob) for e in wanted]
    assert got[0].cached_tokens == 0


def test_a_stream_with_two_versions_moves_and_its_receipt_names_both(
    tmp_path: Path, loaded: LoadedModel, renewed: LoadedModel, folder: str
) -> None:
    first = Loop(tmp_path, loaded)
    prepared_early(first, folder)
    begun(first, tokens=3)
    order(first, "commit", version=1, folder=folder)
    until(first, lambda _: any(s.version for _, s in spans(token_messages(first))))
    sent = token_messages(first)
    second = Loop(tmp_path, load_model("embedded"))
    update(second, folder)
    give(second, b"GENERATE", BODY, Flag.MOVED, transcript(sent))
    finish(second)
    finish(first)
    rest = token_messages(second)
    same_entries([*sent, *rest], token_messages(first), renewed, BODY)
    versions = [(seq, span.version) for seq, span in spans([*sent, *rest])]
    assert versions == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1)]


def test_a_deferred_sequence_is_computed_again(
    tmp_path: Path, loaded: LoadedModel, folder: str
) -> None:
    """The row of logits for the next token was computed with the old weights, whether the update
    keeps the cache or recomputes it."""
    plain = Loop(tmp_path, loaded)
    update(plain, folder)
    plain.generate(3, max_tokens=1)
    until(plain, lambda loop: loop.entries(3))
    wanted = plain.entries(3)[0]
    recomputed = first_decided(tmp_path, folder, "recompute")
    assert (recomputed["token"], recomputed["logprob"]) == (wanted["token"], wanted["logprob"])
    kept = first_decided(tmp_path, folder, "keep")
    assert kept["logprob"] != wanted["logprob"]


def first_decided(tmp_path: Path, folder: str, mode: str) -> Any:
    """The first token of a stream. The decision for this token arrives after an update."""
    loop = Loop(tmp_path, load_model("embedded"))
    loop.generate(3, controller="c")
    deferred = loop.worker._models.engines["m"]._scheduler.deferred
    until(loop, lambda _: deferred)
    [sequence] = deferred
    row = sequence.row
    update(loop, folder, update=mode)
    until(loop, lambda _: sequence in deferred)
    assert sequence.row is not row
    loop.decide(3, "sample")
    until(loop, lambda _: loop.entries(3))
    return loop.entries(3)[0]


def test_a_last_token_that_waits_for_its_controller_has_its_own_version(
    tmp_path: Path, loaded: LoadedModel, folder: str
) -> None:
    old, loop = loaded.weights, Loop(tmp_path, loaded)
    loop.generate(3, controller="c", max_tokens=1)
    worker = loop.worker
    until(loop, lambda _: worker._models.engines["m"]._scheduler.deferred)
    loop.decide(3, "sample")
    until(loop, lambda _: worker._steering.kept_ends(3))
    update(loop, folder)
    assert loop.entries(3) == []
    loop.decide(3, "stop")
    until(loop, lambda each: each.entries(3))
    assert loop.entries(3)[0]["span"]["weights"] == old


def test_weights_that_cannot_be_had_change_nothing(
    tmp_path: Path, loaded: LoadedModel, folder: str
) -> None:
    old = loaded.weights
    loop = Loop(tmp_path, loaded)
    order(loop, "prepare", version=1, folder=str(tmp_path / "gone"))
    assert "is not a folder" in answer(loop, "prepare").error
    loop = Loop(tmp_path, loaded)
    loop.worker._rollouts._allow = [f"{tmp_path}/*"]
    order(loop, "prepare", version=1, folder=folder)
    assert "is not in the allow-list" in answer(loop, "prepare").error
    loop = Loop(tmp_path, loaded)
    prepared_early(loop, folder)
    order(loop, "drop", version=1, folder=folder)
    answer(loop, "drop")
    assert loop.worker._rollouts._readings == {}
    assert weights_version(loaded.model) == old


def test_no_stream_runs_before_the_model_has_its_current_weights(
    tmp_path: Path, loaded: LoadedModel, renewed: LoadedModel, folder: str
) -> None:
    """The worker receives the current version when it registers, before it loads the model."""
    loop = Loop(tmp_path, loaded)
    loop.worker._models.unload("m")
    states = [ModelState(model="m", version=4, folder=folder)]
    registered = Registered(worker=1, heartbeat_s=1.0, expiry_s=5.0, states=states)
    loop.give(b"REGISTERED", registered)
    loop.turn()
    loop.load("m")
    begun(loop, tokens=1)
    assert spans(token_messages(loop))[0][1].version == 4
    assert spans(token_messages(loop))[0][1].weights == renewed.weights
    [state] = loop.worker._registration().states
    assert (state.model, state.version, state.folder) == ("m", 4, folder)


def test_a_model_without_its_current_weights_is_refused_with_the_reason(
    tmp_path: Path, loaded: LoadedModel
) -> None:
    loop = Loop(tmp_path, loaded)
    loop.worker._models.unload("m")
    states = [ModelState(model="m", version=4, folder=str(tmp_path / "gone"))]
    loop.give(b"REGISTERED", Registered(worker=1, heartbeat_s=1.0, expiry_s=5.0, states=states))
    loop.turn()
    loop.load("m")
    loop.generate(1)
    until(loop, lambda _: loop.sent(b"ERROR"))
    error = msgspec.json.decode(loop.sent(b"ERROR")[0][2])
    assert error["code"] == "model_load_failed"
    assert "cannot have version 4 of its weights" in error["message"]
    assert loop.worker._failed is None
    assert loop.worker._models.engines == {}


@OVERLAP
def test_a_pause_keeps_streams_and_requests_until_they_are_resumed(
    tmp_path: Path, loaded: LoadedModel, overlap: bool
) -> None:
    whole = Loop(tmp_path, loaded, overlap=overlap)
    give(whole, b"GENERATE", BODY, 0)
    finish(whole)
    loop = Loop(tmp_path, loaded, overlap=overlap)
    begun(loop)
    order(loop, "pause", pause="keep")
    assert answer(loop, "pause").streams == 1
    sent = len(token_messages(loop))
    loop.generate(9, max_tokens=2)
    for _ in range(5):
        loop.turn()
    assert len(token_messages(loop)) == sent
    assert [frames[0] for frames in loop.sent(b"SYSTEM")] == [b"SYSTEM"]
    order(loop, "resume", number=2)
    answer(loop, "resume")
    finish(loop)
    until(loop, lambda _: ended(loop, 9))
    own = [[e for e in m if e.stream_id != 9] for m in token_messages(loop)]
    same_entries(own, token_messages(whole), loaded, BODY)


def test_a_pause_waits_for_streams_or_aborts_them(tmp_path: Path, loaded: LoadedModel) -> None:
    loop = Loop(tmp_path, loaded)
    begun(loop)
    order(loop, "pause", pause="wait")
    loop.generate(9, max_tokens=2)
    assert answer(loop, "pause").streams == 1
    assert finished(loop)
    assert entries(loop, 9) == []
    order(loop, "pause", number=2, pause="abort")
    until(loop, lambda _: len(answers(loop)) == 2)
    assert [entry.finish_reason for entry in entries(loop, 9)] == ["cancelled"]


def test_an_embed_has_vectors_of_one_version(
    tmp_path: Path, loaded: LoadedModel, renewed: LoadedModel, folder: str
) -> None:
    """The weights change after the first batch of the request."""
    body = msgspec.json.encode(
        {"model": "m", "stream_id": 2, "inputs": [[5] * 120 for _ in range(80)] + [[6, 7]]}
    )
    found = []
    for each, changes in ((loaded, False), (loaded, True), (renewed, False)):
        loop = Loop(tmp_path, each)
        if changes:
            prepared_early(loop, folder)
        loop.give(b"EMBED", body, 2, 102)
        loop.turn()
        if changes:
            assert not loop.sent(b"MSG")
            order(loop, "commit", version=1, folder=folder)
        until(loop, lambda each: each.sent(b"MSG"))
        message = msgspec.json.decode(loop.sent(b"MSG")[0][2], type=Msg)
        assert isinstance(message.embedded, Embedded)
        found.append(np.frombuffer(message.embedded.vectors, dtype=np.float32))
    # Batches of other sizes may round differently.
    before, changed, after = found
    assert np.abs(changed - after).max() < 1e-4
    assert np.abs(before - after).max() > 1e-2
