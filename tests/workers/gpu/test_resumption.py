"""A stream that continues at another worker: the client receives the same entries, without a gap or
a repetition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.protocol.header import Flag, decode_manifest
from tokenbus.protocol.messages import Cancel, Token
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.model.models import Models
from tokenbus.workers.gpu.serving.resumption import resume

from ...counts import examples
from ...worlds.engine_client import ClientView, run
from ...worlds.gpu_worker_loop import Loop
from ...worlds.steered_engine import CountingEngine
from .moved import REQUEST, Moving, finish, give, token_messages, transcript

pytestmark = pytest.mark.usefixtures("no_waiting")

ANY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
PROMPT = "def add(a, b):\n    "


GENERATE = st.fixed_dictionaries(
    {"prompt": st.just(PROMPT), "max_tokens": st.integers(1, 20)},
    optional={
        "temperature": st.just(1.0),
        "n": st.integers(2, 4),
        "text": st.just(True),
        "top_logprobs": st.just(3),
        "seed": st.just(7),
        "stop": st.sampled_from([["return"], [" a", "\n"], [10]]),
        "frequency_penalty": st.just(0.8),
        "repetition_penalty": st.just(1.4),
        "ignore_eos": st.just(True),
        "save": st.just("kept"),
        "inspect": st.just(True),
    },
)


@settings(max_examples=examples(10), suppress_health_check=ANY)
@given(
    body=GENERATE,
    form=st.sampled_from([0, Flag.COLUMNS, Flag.COLUMNS | Flag.TEXTS]),
    overlap=st.booleans(),
    data=st.data(),
)
def test_a_generation_moves_after_any_message(
    tmp_path: Path,
    embedded: LoadedModel,
    body: dict[str, Any],
    form: int,
    overlap: bool,
    data: st.DataObject,
) -> None:
    moving = Moving(tmp_path, embedded, b"GENERATE", body, form)
    moving.check(data.draw(st.integers(0, len(moving.messages)), "cut"), overlap)


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"text": True, "top_logprobs": 2}])
def test_a_score_moves_after_any_message(
    tmp_path: Path, embedded: LoadedModel, options: dict[str, Any], cut: int
) -> None:
    body = {"prompt": [5, 6, 7], "scored": [9 + i % 50 for i in range(600)]}
    moving = Moving(tmp_path, embedded, b"SCORE", body | options)
    assert len(moving.messages) == 3
    moving.check(cut)


def test_a_client_that_attaches_to_a_moved_stream_gets_what_it_missed(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
    moving = Moving(tmp_path, embedded, b"GENERATE", body)
    loop = Loop(tmp_path, embedded)
    give(loop, b"GENERATE", body, Flag.MOVED, transcript(moving.messages[:5]))
    loop.give(b"ATTACH", {"stream_id": REQUEST, "received": 2}, REQUEST, 100, Flag.MSGPACK)
    loop.turn()
    attached, new = token_messages(loop)
    assert [e.token for e in attached] == [m[0].token for m in moving.messages[2:5]]
    assert [e.token for e in new] == [moving.messages[5][0].token]


def test_a_moved_stream_is_cancelled_while_its_model_is_loaded(
    tmp_path: Path, embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "want", lambda self, name: None)
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "n": 3, "ignore_eos": True, "model": "n"}
    sent = [[Token(token=9, stream_id=REQUEST, logprob=-1.0, finish_reason=None, seq=1)]]
    loop = Loop(tmp_path, embedded)
    give(loop, b"GENERATE", body, Flag.MOVED, transcript(sent))
    loop.turn()
    loop.give(b"CANCEL", Cancel(stream_id=REQUEST), REQUEST)
    finish(loop)
    [ends] = token_messages(loop)
    assert [(e.seq, e.pos, e.live) for e in ends] == [(0, 0, 2), (1, 1, 1), (2, 0, 0)]
    assert {e.finish_reason for e in ends} == {"cancelled"}


def test_a_stream_that_was_sent_whole_only_ends(tmp_path: Path, embedded: LoadedModel) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "save": "kept"}
    moving = Moving(tmp_path, embedded, b"GENERATE", body)
    moving.check(len(moving.messages))


@pytest.mark.parametrize("attachments", [[], [b"\x00"]])
def test_a_malformed_transcript_is_refused(
    tmp_path: Path, embedded: LoadedModel, attachments: list[bytes]
) -> None:
    loop = Loop(tmp_path, embedded)
    give(loop, b"GENERATE", {"prompt": [5]}, Flag.MOVED, *attachments)
    loop.turn()
    assert len(loop.sent(b"ERROR")) == 1
    assert not loop.worker._arrivals.num_waiting


def test_a_stream_that_is_too_long_for_the_next_worker_is_refused(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    loop = Loop(tmp_path, embedded)
    longest = loop.worker._models.engines["m"].max_length
    sent = [
        Token(token=9, stream_id=REQUEST, logprob=-1.0, finish_reason=None, pos=i)
        for i in range(longest)
    ]
    give(loop, b"GENERATE", {"prompt": [5], "max_tokens": 9999}, Flag.MOVED, transcript([sent]))
    loop.turn()
    [error] = loop.sent(b"ERROR")
    assert b"cannot continue after" in error[2]
    assert not loop.worker._models.engines["m"].has_requests


@pytest.mark.parametrize("speculation", [False, True])
def test_sequences_that_go_on_share_their_text_and_have_drafts_again(
    embedded: LoadedModel, speculation: bool
) -> None:
    prompt = [300 + i % 40 for i in range(200)]
    sampling = Sampling(max_tokens=40, ignore_eos=True, temperature=0.3, n=4, seed=3)
    config = EngineConfig(kv_cache_bytes=2**22, speculation=speculation)
    whole = Engine(embedded, config)
    whole.add(1, prompt, sampling)
    wanted = run(whole).tokens
    engine = CountingEngine(embedded, config)
    begun = {seq: tokens[: 10 + seq] for seq, tokens in wanted.items()}
    engine.add(1, prompt, sampling, continued=Continued(begun, 4))
    client = ClientView()
    client.tokens = {seq: list(tokens) for seq, tokens in begun.items()}
    client.texts = {seq: [""] * len(tokens) for seq, tokens in begun.items()}
    client.take(engine.step())
    assert engine.forwarded == 210
    while len(client.tokens[3]) == 13:
        client.take(engine.step())
    assert engine.forwarded < 330
    assert run(engine, client).tokens == wanted
    assert engine.stats()["kv_blocks_used"] == 0


# --- the sequences that entries make --------------------------------------------------------------


def entry(seq: int = 0, token: int | None = None, **more: Any) -> Token:
    """An entry. Its token was sampled, unless ``logprob`` is None."""
    given = {"logprob": None if token is None else -1.0, "finish_reason": None} | more
    return Token(token=token, stream_id=1, seq=seq, **given)


def test_a_plain_sequence_goes_on_behind_its_last_token() -> None:
    found = resume([entry(0, 5), entry(0, 6), entry(1, 7)], n=3)
    assert {one.seq: one.tokens for one in found.live} == {0: [5, 6], 1: [7], 2: []}
    assert len(found.sequences) == 3


def test_a_steered_sequence_restarts_behind_its_last_sampled_token() -> None:
    found = resume(
        [
            entry(0, 5),
            entry(0, 6, logs="ab"),
            entry(0, 7, logprob=None, logs="cd", storage=[1, 2]),
            entry(0, 8, logprob=None, backtrack=1),
            entry(0, None, backtrack=2, logs="e"),
        ],
        steered=True,
    )
    [one] = found.live
    assert one.tokens == [5, 6]
    assert (one.given.entries, one.given.log_chars, one.given.writes) == (3, 3, 2)
    assert one.num_sent == 1
    assert one.replay.tokens == [5, 6]


def test_a_fork_begins_where_its_parent_was() -> None:
    found = resume(
        [
            entry(0, 5),
            entry(0, 6, logprob=None),
            entry(1, None, parent=0),
            entry(2, None, parent=0),
            entry(2, 8),
            entry(0, 7, logprob=None, logs="x"),
            entry(1, None, finish_reason="controller"),
            entry(3, None, parent=2),
            entry(2, 9, finish_reason="length"),
        ],
        steered=True,
    )
    zero, one, two, three = found.sequences.values()
    assert [s.seq for s in found.live] == [0, 3]
    assert (zero.tokens, zero.given.entries, zero.given.log_chars) == ([5, 6], 1, 1)
    assert (three.tokens, bool(three.given)) == ([5, 6, 8], False)
    assert zero.replay.forks == [1, 2]
    assert (one.replay.ended, one.replay.last, one.replay.tokens) == (True, False, [])
    assert (two.replay.ended, two.replay.last, two.replay.forks) == (True, True, [3])


def test_manifests_of_nothing_but_an_end_are_valid(tmp_path: Path, embedded: LoadedModel) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}
    moving = Moving(tmp_path, embedded, b"GENERATE", body)
    loop = Loop(tmp_path, embedded)
    give(loop, b"GENERATE", body, Flag.MOVED, transcript(moving.messages))
    loop.turn()
    [frames] = loop.sent(b"TOKEN")
    manifest = decode_manifest(frames[1])
    assert (manifest.sessions, manifest.finished, frames[2:]) == ((), (REQUEST,), [])
