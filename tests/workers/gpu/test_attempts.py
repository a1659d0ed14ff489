"""A worker receives a request that it still has. The later attempt replaces the earlier one.

Most tests repeat an order of events in which an earlier version ran two sequences of one request.
Both were sampled in one step. The end of the second sequence raised KeyError, which ended every
stream of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import msgpack
from tokenbus.protocol.header import Flag, decode_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.transcript import encode_transcript
from tokenbus.protocol.worker_messages import (
    Claim,
    Claimed,
    Registered,
    Result,
    Start,
    Step,
    StepResult,
)
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.engine.sequences import LiveSequences
from tokenbus.workers.gpu.model.loader import LoadedModel

from ...worlds.gpu_worker_loop import CONTROLLER, Loop

pytestmark = pytest.mark.usefixtures("no_waiting")

MAX_TOKENS = 12
MOVED, NEIGHBOUR = 1, 2
"""The ids of the request that comes back, and of a request that runs next to it."""


def body_of(request: int, **fields: Any) -> bytes:
    usual = {"model": "m", "prompt": [5, 6, 7], "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return msgspec.json.encode(usual | {"stream_id": request} | fields)


def begin(loop: Loop, request: int, **fields: Any) -> None:
    loop.give(b"GENERATE", body_of(request, **fields), request, 100 + request)


def come_back(loop: Loop, sent: list[Any], **fields: Any) -> None:
    """The worker receives the request again, with the entries that its client has received."""
    entries = msgspec.json.decode(msgspec.json.encode(sent), type=list[Token])
    transcript = encode_transcript(entries, "gpu-1", "it was cut off", 0.5)
    body = body_of(MOVED, **fields)
    loop.give(b"GENERATE", body, MOVED, 100 + MOVED, Flag.MOVED, [transcript])


def in_the_next_step(loop: Loop, arrive: Any) -> None:
    """Runs a turn, and calls ``arrive`` in it after the step's forward has been launched."""
    engine = loop.worker._models.engines["m"]
    begin_step = engine.begin

    def begun() -> Any:
        step = begin_step()
        engine.begin = begin_step  # type: ignore[method-assign]
        arrive()
        return step

    engine.begin = begun  # type: ignore[method-assign]
    loop.turn()


def finish(loop: Loop) -> None:
    for _ in range(20 * MAX_TOKENS):
        loop.turn()
    assert not loop.sent(b"ERROR"), loop.sent(b"ERROR")
    assert not loop.worker._streams.inconsistent
    [engine] = loop.worker._models.engines.values()
    assert not engine.has_requests
    assert not engine.has_work
    assert engine.stats()["kv_blocks_used"] == 0


def tokens(loop: Loop, request: int) -> list[int]:
    return [entry["token"] for entry in loop.entries(request)]


def undisturbed(folder: Path, embedded: LoadedModel) -> list[int]:
    loop = Loop(folder, embedded)
    begin(loop, MOVED)
    finish(loop)
    assert len(tokens(loop, MOVED)) == MAX_TOKENS
    return tokens(loop, MOVED)


@pytest.mark.parametrize("known", [0, 3], ids=["from the beginning", "after three tokens"])
def test_a_request_that_comes_back_while_its_old_sequence_is_in_a_step_goes_on_once(
    embedded: LoadedModel, tmp_path: Path, overlap: bool, known: int
) -> None:
    wanted = undisturbed(tmp_path, embedded)
    loop = Loop(tmp_path, embedded, overlap=overlap)
    begin(loop, MOVED)
    begin(loop, NEIGHBOUR)
    while len(loop.entries(MOVED)) < 5:
        loop.turn()
    before = loop.entries(MOVED)
    in_the_next_step(loop, lambda: come_back(loop, before[:known]))
    finish(loop)
    after = tokens(loop, MOVED)[len(before) :]
    assert after == wanted[known:], "entries of the earlier attempt, or missing ones"
    assert [e["finish_reason"] for e in loop.entries(MOVED)].count("length") == 1
    assert tokens(loop, NEIGHBOUR) == wanted


def test_a_request_that_comes_back_between_steps_goes_on_once(
    embedded: LoadedModel, tmp_path: Path, overlap: bool
) -> None:
    wanted = undisturbed(tmp_path, embedded)
    loop = Loop(tmp_path, embedded, overlap=overlap)
    begin(loop, MOVED)
    begin(loop, NEIGHBOUR)
    while len(loop.entries(MOVED)) < 5:
        loop.turn()
    before = loop.entries(MOVED)
    come_back(loop, before)
    finish(loop)
    assert tokens(loop, MOVED) == wanted
    assert tokens(loop, NEIGHBOUR) == wanted


def test_a_request_that_comes_back_after_its_end_goes_on_where_its_client_is(
    embedded: LoadedModel, tmp_path: Path
) -> None:
    """The last entries were lost with the broker or with the lease."""
    wanted = undisturbed(tmp_path, embedded)
    loop = Loop(tmp_path, embedded)
    begin(loop, MOVED)
    finish(loop)
    assert loop.worker._streams.kept(MOVED) is not None
    come_back(loop, loop.entries(MOVED)[:4])
    loop.turn()
    reported = [stream.request for stream in loop.worker._streams.reported()]
    assert reported == [MOVED], "the stream of the later attempt only"
    finish(loop)
    assert tokens(loop, MOVED) == [*wanted, *wanted[4:]]


def test_nothing_of_a_revoked_attempt_follows_the_confirmation(
    embedded: LoadedModel, tmp_path: Path, overlap: bool
) -> None:
    """While the old sequence is in a step, the broker revokes the attempt, requests a confirmation,
    and sends the request again."""
    wanted = undisturbed(tmp_path, embedded)
    loop = Loop(tmp_path, embedded, overlap=overlap)
    begin(loop, MOVED)
    begin(loop, NEIGHBOUR)
    while len(loop.entries(MOVED)) < 5:
        loop.turn()
    before = loop.entries(MOVED)

    def arrive() -> None:
        revoked = Registered(worker=0, heartbeat_s=1.0, expiry_s=5.0, unknown=[MOVED])
        loop.give(b"REGISTERED", revoked)
        loop.give(b"CLAIM", Claim(session=0))
        come_back(loop, before[:3])

    in_the_next_step(loop, arrive)
    finish(loop)
    [confirmed] = loop.sent(b"CLAIMED")
    assert msgpack.decode(confirmed[2], type=Claimed).session == 0
    assert not loop.sent(b"JOURNAL")
    assert tokens(loop, MOVED) == [*wanted[: len(before)], *wanted[3:]]
    assert tokens(loop, NEIGHBOUR) == wanted


def test_a_score_that_comes_back_is_computed_once(embedded: LoadedModel, tmp_path: Path) -> None:
    loop = Loop(tmp_path, embedded, batched=8)
    body = msgspec.json.encode(
        {"model": "m", "stream_id": MOVED, "prompt": [5], "scored": [6, 7, 8] * 10}
    )
    loop.give(b"SCORE", body, MOVED, 100 + MOVED)
    loop.turn()
    sent = len(loop.entries(MOVED))
    assert 0 < sent < 30
    loop.give(b"SCORE", body, MOVED, 100 + MOVED)
    finish(loop)
    assert tokens(loop, MOVED)[sent:] == [6, 7, 8] * 10


def test_a_request_that_comes_back_while_its_model_is_loaded_waits_once(
    embedded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Models, "want", lambda self, name: None)
    wanted = undisturbed(tmp_path, embedded)
    loop = Loop(tmp_path, embedded)
    begin(loop, MOVED, model="n")
    loop.turn()
    entries = [{"token": wanted[0], "stream_id": MOVED, "logprob": -1.0, "finish_reason": None}]
    come_back(loop, entries, model="n")
    loop.turn()
    assert loop.worker._arrivals.num_waiting == 1
    loop.load("n")
    for _ in range(2 * MAX_TOKENS):
        loop.turn()
    assert tokens(loop, MOVED) == wanted[1:]


# --- controllers ----------------------------------------------------------------------------------


def mask_for(embedded: LoadedModel, token: int) -> bytes:
    """A mask that allows one token."""
    mask = np.zeros(-(-embedded.vocab_size // 32), dtype=np.uint32)
    mask[token >> 5] = 1 << (token & 31)
    return mask.tobytes()


def allow(loop: Loop, embedded: LoadedModel, request: int, token: int, attempt: int = 0) -> None:
    """Delivers a RESULT in which the controller of a request allows one token. ``attempt``: the
    attempt that the RESULT names; 0: none."""
    one = StepResult(request, 0, "sample", attachment=0)
    attempts = {request: attempt} if attempt else {}
    result = Result(sequences=[one], host="elsewhere", attempts=attempts)
    mask = mask_for(embedded, token)
    loop.give(b"RESULT", result, 0, CONTROLLER, attachments=[mask])


def stepped(loop: Loop, request: int) -> list[list[int]]:
    """The tokens of a request in each STEP that the worker has sent for the request."""
    steps = [msgpack.decode(frames[2], type=Step) for frames in loop.sent(b"STEP")]
    return [one.tokens for step in steps for one in step.sequences if one.request == request]


def test_a_controller_gets_no_token_of_an_earlier_attempt(
    embedded: LoadedModel, tmp_path: Path, overlap: bool
) -> None:
    """The sequence of the earlier attempt was once sampled without a mask. Its token was sent to
    the grammar of the later attempt, which ended with "doesn't satisfy the grammar"."""
    loop = Loop(tmp_path, embedded, overlap=overlap)
    begin(loop, MOVED, controller="c")
    loop.turn()
    allow(loop, embedded, MOVED, 65)
    while not stepped(loop, MOVED):
        loop.turn()
    assert stepped(loop, MOVED) == [[65]]
    before = loop.entries(MOVED)
    in_the_next_step(loop, lambda: come_back(loop, before, controller="c"))
    first, second = loop.sent(b"START")
    assert decode_header(first[1]).request == decode_header(second[1]).request == MOVED
    # A decision for the earlier attempt is ignored.
    allow(loop, embedded, MOVED, 64)
    attempt = msgpack.decode(second[2], type=Start).attempt
    assert attempt > msgpack.decode(first[2], type=Start).attempt
    for number, token in enumerate((66, 67), 2):
        allow(loop, embedded, MOVED, token, attempt)
        while len(stepped(loop, MOVED)) < number:
            loop.turn()
    assert stepped(loop, MOVED) == [[65], [66], [67]]
    assert tokens(loop, MOVED) == [65, 66, 67]


def test_a_decision_for_an_attempt_that_was_dropped_is_void(
    embedded: LoadedModel, tmp_path: Path
) -> None:
    """The worker has dropped the earlier attempt before the request comes back. The worker has no
    record of the attempt, but the answer to the attempt's START still arrives."""
    loop = Loop(tmp_path, embedded)
    begin(loop, MOVED, controller="c")
    loop.turn()
    revoked = Registered(worker=0, heartbeat_s=1.0, expiry_s=5.0, unknown=[MOVED])
    loop.give(b"REGISTERED", revoked)
    entries = [{"token": 65, "stream_id": MOVED, "logprob": -1.0, "finish_reason": None}]
    come_back(loop, entries, controller="c")
    loop.turn()
    _, second = loop.sent(b"START")
    allow(loop, embedded, MOVED, 64)
    for _ in range(3):
        loop.turn()
    assert not tokens(loop, MOVED)
    allow(loop, embedded, MOVED, 66, msgpack.decode(second[2], type=Start).attempt)
    while not stepped(loop, MOVED):
        loop.turn()
    assert tokens(loop, MOVED) == [66]


# --- the engine -----------------------------------------------------------------------------------


def engine_of(embedded: LoadedModel, overlap: bool) -> Engine:
    return Engine(embedded, EngineConfig(kv_cache_bytes=2**22, overlap=overlap))


def test_an_engine_that_gets_a_request_which_it_has_drops_the_old_sequences(
    embedded: LoadedModel, overlap: bool
) -> None:
    engine = engine_of(embedded, overlap)
    sampling = Sampling(max_tokens=6, ignore_eos=True, n=3)
    alone = engine_of(embedded, overlap)
    alone.add(1, [5, 6, 7], sampling)
    wanted = []
    while alone.has_work:
        wanted += alone.step()
    engine.add(1, [5, 6, 7], sampling)
    for _ in range(3):
        engine.step()
    step = engine.begin()
    engine.fork(1, 0, 1)
    engine.add(1, [5, 6, 7], sampling)
    got = engine.finish(step).as_outputs()
    while engine.has_work:
        got += engine.step()
    for seq in range(3):
        one, other = ([o.token for o in every if o.seq == seq] for every in (got, wanted))
        assert one == other
    assert {o.seq for o in got} == {0, 1, 2}
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0


def test_a_sequence_that_has_left_the_tables_can_be_removed_again(
    embedded: LoadedModel,
) -> None:
    engine = engine_of(embedded, False)
    engine.add(1, [5, 6, 7], Sampling(max_tokens=6, ignore_eos=True))
    engine.add(2, [5, 6, 7], Sampling(max_tokens=6, ignore_eos=True))
    engine.step()
    sequence = engine._live.named(1, 0)
    engine.abort(1)
    engine._live.remove(sequence)
    assert engine.sequences(2) == [0]
    engine.abort(2)
    assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("speculation", [False, True])
def test_an_error_while_a_token_is_appended_ends_its_own_sequence_only(
    embedded: LoadedModel, overlap: bool, speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(kv_cache_bytes=2**22, overlap=overlap, speculation=speculation)
    engine = Engine(embedded, config)
    append = LiveSequences.append

    def failing(self: LiveSequences, sequence: Sequence, *args: Any, **kw: Any) -> bool:
        if sequence.request == 1:
            raise KeyError(sequence.request)
        return append(self, sequence, *args, **kw)

    monkeypatch.setattr(LiveSequences, "append", failing)
    for request in (1, 2):
        # Outputs with log-probabilities of other tokens are not sent in columns.
        sampling = Sampling(max_tokens=6, ignore_eos=True, top_logprobs=2)
        engine.add(request, [5, 6, 7] * 8, sampling)
    got = []
    while engine.has_work:
        got += engine.step()
    [failed] = [output for output in got if output.request == 1]
    assert failed.finish_reason == "error"
    assert "KeyError: 1" in (failed.error or "")
    assert [output.finish_reason for output in got if output.request == 2][-1] == "length"
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0
