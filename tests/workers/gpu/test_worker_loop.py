"""The loop of a GPU worker, turn by turn and without a broker: the messages that it sends, and the
state that it keeps."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenbus.protocol.columns import TokenColumns
from tokenbus.protocol.header import Flag, decode_header, decode_manifest
from tokenbus.protocol.messages import Cancel, Generate
from tokenbus.protocol.metrics import Histogram
from tokenbus.protocol.worker_messages import Lost
from tokenbus.workers.bus import FromBus
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.models import Models
from tokenbus.workers.gpu.serving import attaching
from tokenbus.workers.gpu.serving.arrivals import client_of

from ...worlds.gpu_worker_loop import Loop

pytestmark = pytest.mark.usefixtures("no_waiting")


def test_answers_to_many_attaches_leave_each_turn_a_step(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer has all entries of a stream, and may take as long as many steps."""
    monkeypatch.setattr(attaching, "MAX_ENTRIES", 8)
    loop = Loop(tmp_path, embedded)
    loop.worker._reports.renew()
    for request in (1, 2):
        loop.generate(request)
    for _ in range(9):
        loop.turn()
    for request in [1] * 5 + [2]:
        loop.give(b"ATTACH", {"stream_id": request, "received": 0}, request, 100 + request)
    answered = []
    for _ in range(14):
        steps = len(loop.entries(1))
        loop.turn()
        answers = [msgspec.json.decode(frames[2])["stream_id"] for frames in loop.sent(b"MSG")]
        answered.append(len(answers))
        assert len(loop.entries(1)) > steps
    # The other session has its turn after one answer. A large answer also counts against later
    # turns.
    assert answers == [1, 2, 1, 1, 1, 1]
    assert all(now - before <= 1 for before, now in pairwise([0, *answered]))
    assert answered[6] < 6


COLUMNS = Flag.MSGPACK | Flag.COLUMNS | Flag.TEXTS


def test_a_turn_answers_a_bounded_number_of_attaches_with_rows(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message has the missed rows of all streams that are answered in a turn."""
    loop = Loop(tmp_path, embedded)
    streams = range(1, 7)
    for request in streams:
        loop.generate(request)
    for _ in range(21):
        loop.turn()
    monkeypatch.setattr(attaching, "MAX_ENTRIES", 2 * attaching.ANSWER_ENTRIES)
    loop.worker._reports.renew()
    for stream in loop.worker._streams:
        stream.session = 100
    for request in streams:
        body = {"stream_id": request, "received": len(loop.entries(request)) - 8}
        loop.give(b"ATTACH", body, request, 100, COLUMNS)
    answers = [0]
    while answers[-1] < len(streams):
        before = len(loop.sent(b"TOKEN"))
        loop.turn()
        answers.append(len(loop.sent(b"MSG")))
        rows, step = loop.sent(b"TOKEN")[before:]
        [missed] = [msgspec.msgpack.decode(body, type=TokenColumns) for body in rows[2:]]
        # Each turn adds a row to each stream.
        num_missed = 8 + len(answers) - 2
        assert len(missed.tokens) // 4 == num_missed * (answers[-1] - answers[-2])
        assert len(decode_manifest(step[1]).sessions) == 1
    # Eight rows count as two entries.
    assert [now - before for before, now in pairwise(answers)] == [2, 1, 1, 2]


def test_each_answer_to_a_stream_precedes_its_entries(
    embedded: LoadedModel, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, embedded)
    loop.generate(1)
    for _ in range(9):
        loop.turn()
    sent = len(loop.entries(1))
    before = len(loop.worker._bus._links[0]._outbox)
    for received in (sent - 2, sent - 4):
        loop.give(b"ATTACH", {"stream_id": 1, "received": received}, 1, 101, COLUMNS)
    loop.turn()
    frames = list(loop.worker._bus._links[0]._outbox)[before:]
    assert [kind for kind, *_ in frames] == [b"MSG", b"TOKEN", b"MSG", b"TOKEN", b"TOKEN"]
    rows = [msgspec.msgpack.decode(frames[i][2], type=TokenColumns) for i in (1, 3)]
    assert [len(body.tokens) // 4 for body in rows] == [2, 4]


def test_a_message_that_hangs_counts_as_a_step_that_does(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, embedded)
    bus = loop.worker._bus
    ages = []
    handle = loop.worker._on_message

    def note(message: FromBus) -> None:
        ages.append(bus.beat(0, time.monotonic()).step_age_s)
        handle(message)
        ages.append(bus.beat(0, time.monotonic()).step_age_s)

    monkeypatch.setattr(loop.worker, "_on_message", note)
    loop.generate(1)
    loop.turn()
    assert len(ages) == 2
    assert None not in ages
    assert bus.beat(0, time.monotonic()).step_age_s is None


class SlowTokenizer:
    """The tokenizer of a model. If a text contains ``hold``, its encoding waits for the test."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.begun: list[str] = []
        """The first characters of the texts whose encoding has begun."""
        self.held = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.begun.append(text[:4])
        if "hold" in text:
            assert self.held.acquire(timeout=120.0)
        return self._tokenizer.encode(text, **options)


@pytest.fixture
def slow(embedded: LoadedModel, tmp_path: Path) -> tuple[Loop, SlowTokenizer]:
    tokenizer = SlowTokenizer(embedded.tokenizer)
    return Loop(tmp_path, dataclasses.replace(embedded, tokenizer=tokenizer)), tokenizer


def text_prompt(loop: Loop, request: int, prompt: str, session: int = 0, **fields: Any) -> None:
    body = {"model": "m", "stream_id": request, "prompt": prompt, "max_tokens": 2, **fields}
    session = session or 100 + request
    loop.give(b"GENERATE", msgspec.json.encode({**body, "ignore_eos": True}), request, session)


def turn_until(loop: Loop, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not done():
        assert time.monotonic() < deadline
        loop.turn()


MEDIUM = "    return self\n" * 100
"""A text that is too long to be tokenized at once in the loop."""


def test_a_prompt_in_tokenization_stops_neither_steps_nor_short_prompts(
    slow: tuple[Loop, SlowTokenizer],
) -> None:
    loop, tokenizer = slow
    loop.generate(1, max_tokens=40)
    text_prompt(loop, 2, "hold" + MEDIUM)
    text_prompt(loop, 3, "short")
    turn_until(loop, lambda: len(loop.entries(1)) == 40 and len(loop.entries(3)) == 2)
    assert not loop.entries(2)
    assert loop.worker._bus.beat(0, time.monotonic()).step_age_s is None
    tokenizer.held.release()
    turn_until(loop, lambda: len(loop.entries(2)) == 2)


def test_clients_take_turns_at_tokenization(slow: tuple[Loop, SlowTokenizer]) -> None:
    loop, tokenizer = slow
    text_prompt(loop, 1, "hold" + MEDIUM, session=7)
    turn_until(loop, lambda: "hold" in tokenizer.begun)
    for request, prompt in enumerate(("a1  ", "a2  ", "a3  "), 2):
        text_prompt(loop, request, prompt + MEDIUM, session=7)
    text_prompt(loop, 9, "b1  " + MEDIUM, session=8)
    loop.turn()
    tokenizer.held.release()
    turn_until(loop, lambda: all(len(loop.entries(r)) == 2 for r in (2, 3, 4, 9)))
    assert tokenizer.begun.index("b1  ") < tokenizer.begun.index("a2  ")


def test_users_of_a_session_take_turns(slow: tuple[Loop, SlowTokenizer]) -> None:
    loop, tokenizer = slow
    text_prompt(loop, 1, "hold" + MEDIUM, session=7, by="eve")
    turn_until(loop, lambda: "hold" in tokenizer.begun)
    for request, prompt in enumerate(("a1  ", "a2  ", "a3  "), 2):
        text_prompt(loop, request, prompt + MEDIUM, session=7, by="eve")
    text_prompt(loop, 9, "b1  " + MEDIUM, session=7, by="ann")
    loop.turn()
    tokenizer.held.release()
    turn_until(loop, lambda: all(len(loop.entries(r)) == 2 for r in (2, 3, 4, 9)))
    assert tokenizer.begun.index("b1  ") < tokenizer.begun.index("a2  ")


def test_the_client_of_a_request_is_its_session_or_the_user_of_its_session_or_group() -> None:
    plain = Generate(stream_id=1)
    assert client_of(7, plain) == 7
    users = [Generate(stream_id=1, by=by, group=group) for by in ("", "a") for group in ("", "g")]
    numbers = {client_of(session, user) for session in (7, 8) for user in users}
    # A group counts as one client, even if several sessions have its requests.
    assert len(numbers) == 2 + 2 + 2
    assert all(0 <= number < 2**63 for number in numbers)


def test_a_request_that_is_cancelled_while_its_prompt_waits_is_never_tokenized(
    slow: tuple[Loop, SlowTokenizer],
) -> None:
    loop, tokenizer = slow
    text_prompt(loop, 1, "hold" + MEDIUM)
    text_prompt(loop, 2, "gone" + MEDIUM)
    for request in (1, 2):
        loop.give(b"CANCEL", Cancel(stream_id=request), request)
    loop.turn()
    for request in (1, 2):
        assert [e["finish_reason"] for e in loop.entries(request)] == ["cancelled"]
    tokenizer.held.release()
    text_prompt(loop, 3, "next" + MEDIUM)
    turn_until(loop, lambda: len(loop.entries(3)) == 2)
    assert "gone" not in tokenizer.begun
    assert len(loop.entries(1)) == 1


@pytest.mark.parametrize("field", ["prompt", "scored", "buffer"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    slow: tuple[Loop, SlowTokenizer], field: str
) -> None:
    loop, tokenizer = slow
    text = "x" * 15_000_000
    body: dict[str, Any] = {"model": "m", "stream_id": 1, "prompt": [5], "scored": [6]}
    attachments = [b"s" + text.encode()] if field == "buffer" else []
    body |= {"buffers": ["b"]} if field == "buffer" else {field: text}
    loop.give(b"SCORE", msgspec.json.encode(body), 1, 101, attachments=attachments)
    loop.turn()
    [frames] = loop.sent(b"ERROR")
    error = msgspec.json.decode(frames[2])
    assert error["code"] == "prompt_too_long"
    assert re.search(r"15000000 bytes .* tokens of at most 41 bytes each", error["message"])
    assert tokenizer.begun == []


def test_token_ids_that_cannot_fit_are_refused_before_they_are_read(
    slow: tuple[Loop, SlowTokenizer],
) -> None:
    loop, _ = slow
    # The last token id is incomplete. This error would only be found by reading the ids.
    body = {"model": "m", "stream_id": 1}
    ids = bytes(4 * 1_000_000 + 1)
    loop.give(b"GENERATE", msgspec.json.encode(body), 1, 101, attachments=[ids])
    loop.turn()
    [frames] = loop.sent(b"ERROR")
    assert msgspec.json.decode(frames[2])["code"] == "prompt_too_long"


def test_a_prompt_beside_an_attachment_is_refused(slow: tuple[Loop, SlowTokenizer]) -> None:
    loop, _ = slow
    body = {"model": "m", "stream_id": 1, "prompt": [5]}
    loop.give(b"GENERATE", msgspec.json.encode(body), 1, 101, attachments=[bytes(8)])
    loop.turn()
    [frames] = loop.sent(b"ERROR")
    error = msgspec.json.decode(frames[2])
    assert (error["code"], error["path"]) == ("bad_message", "$.prompt")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_deadline_that_ends_during_prefill_ends_the_stream_before_its_first_token(
    tmp_path: Path, embedded: LoadedModel, overlap: bool, turns: int
) -> None:
    """The broker sends CANCEL when ``timeout_s`` has passed. The rest of the prompt is not
    computed, and its blocks become free."""
    loop = Loop(tmp_path, embedded, overlap=overlap, batched=64)
    prompt = [5 + i % 50 for i in range(600)]
    body = {"model": "m", "stream_id": 1, "prompt": prompt, "max_tokens": 50, "timeout_s": 3.0}
    loop.give(b"GENERATE", msgspec.json.encode(body), 1, 101)
    engine = loop.worker._models.engines["m"]

    def computed() -> float:
        steps = engine.metrics()["iteration_tokens_total"]
        assert isinstance(steps, Histogram)
        return steps.total

    for _ in range(turns):
        loop.turn()
    assert 0 < computed() < len(prompt)
    loop.give(b"CANCEL", Cancel(stream_id=1, reason="timeout"), 1)
    while not loop.entries(1):
        loop.turn()
    [end] = loop.entries(1)
    assert (end["token"], end["finish_reason"]) == (None, "timeout")
    loop.generate(2, max_tokens=3)
    while len(loop.entries(2)) < 3:
        loop.turn()
    assert computed() < len(prompt)
    assert engine.stats()["kv_blocks_used"] == 0
    assert len(loop.entries(1)) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cancelled_stream_gets_one_more_token_at_most(
    tmp_path: Path, embedded: LoadedModel, overlap: bool
) -> None:
    loop = Loop(tmp_path, embedded, overlap=overlap)
    loop.generate(1)
    loop.generate(2)
    while len(loop.entries(1)) < 3:
        loop.turn()
    before = len(loop.entries(1))
    loop.give(b"CANCEL", Cancel(stream_id=1), 1)
    loop.turn()
    assert loop.worker._models.engines["m"].stats()["running"] == 1
    while loop.entries(1)[-1]["finish_reason"] is None:
        loop.turn()
    *tokens, end = loop.entries(1)[before:]
    assert (end["token"], end["finish_reason"]) == (None, "cancelled")
    assert len(tokens) <= 1
    while loop.entries(2)[-1]["finish_reason"] is None:
        loop.turn()
    assert len(loop.entries(2)) == 50


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_fails_the_streams_that_are_left(
    tmp_path: Path, embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    loop = Loop(tmp_path, embedded, overlap=overlap)
    loop.generate(1)
    loop.generate(2, max_tokens=1)
    loop.turn()
    monkeypatch.setattr(Engine, "begin", lambda self: 1 / 0)
    loop.turn()
    assert [entry["finish_reason"] for entry in loop.entries(2)] == ["length"]
    assert [decode_header(frames[1]).request for frames in loop.sent(b"ERROR")] == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_computed_is_sent_before_a_controller_that_cannot_run_ends_its_stream(
    tmp_path: Path, embedded: LoadedModel, overlap: bool
) -> None:
    loop = Loop(tmp_path, embedded, overlap=overlap)
    loop.generate(1)
    loop.generate(2, controller="c")
    loop.decide(2, "sample")
    loop.turn()
    loop.give(b"LOST", Lost(requests=[2], code="no_worker", message="none"))
    loop.turn()
    assert len(loop.entries(2)) == 1, "the entry is missing"
    assert [decode_header(frames[1]).request for frames in loop.sent(b"ERROR")] == [2]


def test_a_model_is_not_evicted_before_the_ends_of_its_streams_are_sent(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    loop = Loop(tmp_path, embedded, max_models=1)
    loop.generate(1, controller="c")
    loop.turn()
    loop.load("n")
    loop.decide(1, "stop")
    loop.turn()
    assert [entry["finish_reason"] for entry in loop.entries(1)] == ["controller"]
    assert not len(loop.worker._streams)
    loop.turn()
    assert list(loop.worker._models.engines) == ["n"]


def test_a_controller_starts_before_the_first_step_of_a_model_that_was_loaded_for_it(
    tmp_path: Path, embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "want", lambda self, name: None)
    loop = Loop(tmp_path, embedded)
    loop.generate(1, controller="c", model="n")
    loop.turn()
    bus = loop.worker._bus
    sent: list[bytes] = []
    monkeypatch.setattr(
        bus._links[0]._carrier, "wake", lambda: sent.extend(f[0] for f in bus._links[0]._outbox)
    )
    loop.load("n")
    assert b"START" in sent
