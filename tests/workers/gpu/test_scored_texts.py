"""Texts that a program scores after a sequence: their log-probabilities are those of a SCORE, the
sequence does not change, and a replay reads the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.sampling import MAX_SCORED_TEXTS, MAX_SCORED_TOKENS, Sampling
from tokenbus.workers.controller.python import Context, ScriptProgram
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ...worlds.steered_engine import CountingEngine
from .controlled import Workers, check_nothing_is_left
from .moved import give, merged, same_entries
from .moved import transcript as transcript_of

pytestmark = pytest.mark.usefixtures("no_waiting")

PROMPT = "def add(a, b):\n    " * 4
TEXTS = [" return a + b", "x", " return a - b\n", "z" * 300]


def tokens_of(loaded: LoadedModel, text: str) -> list[int]:
    tokens: list[int] = loaded.tokenizer.encode(text)
    return tokens


def until(engine: Engine, done: Callable[[TokenOutput], object]) -> TokenOutput:
    """Runs steps until an output fulfils ``done``; returns this output."""
    for _ in range(1000):
        for output in engine.step():
            if done(output):
                return output
    raise AssertionError("the output has not come")


def scored(engine: Engine, before: list[int], text: list[int]) -> list[float]:
    """The log-probabilities of a text, by a SCORE."""
    engine.score(99, before, text)
    found: list[float] = []
    while engine.has_requests:
        found += [o.logprob for o in engine.step() if o.request == 99 and o.logprob is not None]
    return found


def generated(engine: Engine, request: int, pause: Callable[[], None] | None) -> list[int]:
    """The tokens of a sequence; ``pause`` is called once, after its third token."""
    engine.add(request, tokens_of(engine.loaded, PROMPT), Sampling(max_tokens=8, ignore_eos=True))
    tokens: list[int] = []
    while engine.alive(request, 0):
        tokens += [o.token for o in engine.step() if o.token is not None]
        if len(tokens) == 3 and pause is not None:
            pause()
    return tokens


def test_the_scores_are_those_of_a_score_and_the_sequence_continues_unchanged(
    embedded: LoadedModel, overlap: bool
) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**23, overlap=overlap))
    texts = [tokens_of(embedded, text) for text in TEXTS]
    found: list[list[float]] = []

    def pause() -> None:
        engine.score_texts(1, 0, texts)
        found.extend(until(engine, lambda output: output.scores).scores)
        assert engine.sequences(1) == [0]
        engine.resume(1, 0)

    tokens = generated(engine, 1, pause)
    assert tokens == generated(engine, 2, None)
    before = [*tokens_of(embedded, PROMPT), *tokens[:3]]
    for text, scores in zip(texts, found, strict=True):
        assert scores == pytest.approx(scored(engine, before, text), abs=1e-3)


@pytest.mark.parametrize("begun", [False, True])
def test_all_texts_share_the_blocks_of_the_sequence(embedded: LoadedModel, begun: bool) -> None:
    """Also tests texts that arrive before the prompt has been computed."""
    engine = CountingEngine(embedded, EngineConfig(kv_cache_bytes=2**23))
    prompt = tokens_of(embedded, PROMPT)
    engine.add(1, prompt, Sampling(max_tokens=9, ignore_eos=True))
    if begun:
        until(engine, lambda output: output.token is not None)
        engine.forwarded = 0
    engine.score_texts(1, 0, [[7, 8, 9]] * 16)
    found = until(engine, lambda output: output.scores).scores
    assert [len(scores) for scores in found] == [3] * 16
    # Without the prefix cache's partial last block, each text has its own three tokens to compute.
    assert engine.forwarded <= (0 if begun else len(prompt)) + 16 * (3 + engine._blocks.block_size)
    assert found[1:] == [pytest.approx(found[0], abs=1e-4)] * 15


def test_texts_that_do_not_fit_into_memory_together_are_scored(embedded: LoadedModel) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**20, max_num_seqs=4))
    prompt = tokens_of(embedded, PROMPT)
    engine.add(1, prompt, Sampling(max_tokens=9, ignore_eos=True))
    until(engine, lambda output: output.token is not None)
    room = engine.max_length - len(prompt) - 2
    text = [5 + i % 50 for i in range(room)]
    engine.score_texts(1, 0, [text, text[::-1], text])
    first, _, third = until(engine, lambda output: output.scores).scores
    assert len(first) == room
    assert first == pytest.approx(third, abs=1e-3)


def test_a_request_scores_a_bounded_number_of_texts_at_once(embedded: LoadedModel) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**23, max_forks=4))
    prompt = tokens_of(embedded, PROMPT)
    engine.add(1, prompt, Sampling(max_tokens=9, ignore_eos=True))
    first = until(engine, lambda output: output.token is not None).token
    assert first is not None
    [second, third] = engine.fork(1, 0, 2)
    texts = [[7 + i, 8, 9] for i in range(6)]
    for seq in (0, second, third):
        engine.score_texts(1, seq, texts)
    found: dict[int, list[list[float]]] = {}
    most = 0
    while len(found) < 2:
        most = max(most, sum(seq < 0 for seq in engine._live.requests[1]))
        for output in engine.step():
            if output.scores:
                found[output.seq] = output.scores
        if 0 in found and engine.alive(1, second):
            # Texts of the third sequence take the places of the texts of this sequence.
            engine.end(1, second)
    assert most == 4
    assert set(found) == {0, third}
    engine.abort(1)
    assert not engine.has_requests
    for scores in found.values():
        for text, numbers in zip(texts, scores, strict=True):
            assert numbers == pytest.approx(scored(engine, [*prompt, first], text), abs=1e-3)
    assert engine.stats()["kv_blocks_used"] == 0


def test_a_request_that_ends_while_texts_are_scored_frees_everything(
    embedded: LoadedModel,
) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**22, max_forks=2))
    engine.add(1, tokens_of(embedded, PROMPT), Sampling(max_tokens=9))
    until(engine, lambda output: output.token is not None)
    engine.score_texts(1, 0, [[7, 8]] * 3)
    engine.begin()
    [end] = engine.abort(1)
    assert (end.seq, end.finish_reason) == (0, "cancelled")
    assert not engine.step()
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([], "0 texts"),
        ([[1]] * (MAX_SCORED_TEXTS + 1), f"{MAX_SCORED_TEXTS + 1} texts"),
        ([[1], []], "none of them empty"),
        ([[1] * (MAX_SCORED_TOKENS + 1)], f"at most {MAX_SCORED_TOKENS} tokens"),
        ([[1] * 4000], "cannot be scored after"),
        ([[4096]], "token id 4096 is outside the vocabulary"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused(
    embedded: LoadedModel, texts: list[list[int]], error: str
) -> None:
    engine = Engine(embedded, EngineConfig(kv_cache_bytes=2**22))
    engine.add(1, [5], Sampling(max_tokens=9))
    with pytest.raises(RequestError, match=error):
        engine.score_texts(1, 0, texts)
    until(engine, lambda output: output.token is not None)


# --- in a stream that moves -----------------------------------------------------------------------


async def chooses(ctx: Context) -> None:
    """Forks into two sequences. Each sequence scores texts and writes the likeliest one, three
    times."""
    i = await ctx.fork(2)
    for texts in ([" a", " b", "\n"], [" return", f" {i}"], ["x" * 20, "y"]):
        scores = await ctx.score(texts)
        ctx.log(json.dumps(scores))
        await ctx.fixed(texts[scores.index(max(scores))])
        await ctx.gen(max_tokens=2)


class Choosing(Workers):
    """A request whose program is ``chooses``."""

    def __init__(self, folder: Path, loaded: LoadedModel, storage: VariableStorage) -> None:
        loop = Loop(folder, loaded, overlap=False)
        super().__init__(loop, storage, Random(0), program=ScriptProgram(chooses))

    def lose_controllers(self) -> None:
        super().lose_controllers()
        self.controllers._program = ScriptProgram(chooses)


def check_logs(messages: list[list[Token]]) -> None:
    """Fails unless the program has read the scores of the entries, each once."""
    for seq in (0, 1):
        entries = [e for message in messages for e in message if e.seq == seq]
        logged = [json.loads(line) for e in entries for line in e.logs.splitlines()]
        read = [[pytest.approx(sum(text)) for text in e.scores] for e in entries if e.scores]
        assert len(read) == 3
        assert logged == read


BODY = {"prompt": PROMPT, "max_tokens": 60, "controller": "c", "ignore_eos": True}


def test_a_stream_that_moves_replays_the_scores_that_its_program_has_read(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    storage = VariableStorage()
    whole = Choosing(tmp_path, embedded, storage)
    give(whole.loop, b"GENERATE", BODY, 0)
    messages = whole.finish()
    check_logs(messages)
    for cut in range(0, len(messages), 3):
        second = Choosing(tmp_path, embedded, storage)
        give(second.loop, b"GENERATE", BODY, Flag.MOVED, transcript_of(messages[:cut]))
        got = [*messages[:cut], *second.finish()]
        check_logs(got)
        check_nothing_is_left(second.loop)


def test_lost_controllers_are_started_again_before_and_after_their_scores(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    whole = Choosing(tmp_path, embedded, VariableStorage())
    give(whole.loop, b"GENERATE", BODY, 0)
    wanted = whole.finish()
    for turns in range(1, 40, 7):
        second = Choosing(tmp_path, embedded, VariableStorage())
        give(second.loop, b"GENERATE", BODY, 0)
        for _ in range(turns):
            second.turn()
        second.lose_controllers()
        got = second.finish()
        check_logs(got)
        same_entries(merged(without_scores(got)), merged(without_scores(wanted)), embedded, BODY)
        check_nothing_is_left(second.loop)


def without_scores(messages: list[list[Token]]) -> list[list[Token]]:
    """The entries that have tokens or ends. The last bits of scores depend on the batch."""
    for message in messages:
        for entry in message:
            entry.logs, entry.scores = "", []
    return [[e for e in m if e.token is not None or e.finish_reason] for m in messages]
