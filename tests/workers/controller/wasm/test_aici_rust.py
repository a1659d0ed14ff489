"""Modules in Rust for AICI's interface, which are compiled with the options of AICI's own modules.
The tests are skipped if no Rust compiler for WASI is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
import wasmtime
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..tokens.real_tokenizers import tekken_tokens
from .aici_guests import VOCABULARY, Request, compile_rust, ticking_engine

pytestmark = pytest.mark.process

WORD = {VOCABULARY.token(number): number for number in range(VOCABULARY.size)}


@pytest.fixture(scope="module")
def engine() -> Iterator[wasmtime.Engine]:
    with ticking_engine() as engine:
        yield engine


@cache
def tekken() -> TokenizerVocabulary:
    return TokenizerVocabulary.from_tokens(tekken_tokens(), [2], "tekken")


def may_say(request: Request, seq: int) -> set[bytes]:
    return {VOCABULARY.token(number) for number in request.may_sample(seq)}


def test_forks_choose_under_masks_and_vote_in_variables(engine: wasmtime.Engine) -> None:
    arg = '{"choices":["yes","no","yet"],"forks":2}'
    request = Request(engine, compile_rust("choice"), arg)
    forked, *first = request.begin([1, 2, 3])
    assert forked.children == [1]
    assert re.fullmatch(r"prompt of 3 tokens; 267 tokens in \d+ nodes\n", forked.logs)
    assert [result.action for result in first] == ["sample", "sample"]
    assert may_say(request, 0) == may_say(request, 1) == {b"y", b"n", b"yes", b"no", b"yet"}

    [stopped] = request.sampled(0, WORD[b"yes"])
    assert (stopped.action, stopped.logs) == ("stop", "1 votes, version 1\n")
    assert [write["WriteVar"]["value"] for write in stopped.storage] == [b"yes;".hex(), "01"]

    [going_on] = request.sampled(1, WORD[b"y"])
    assert going_on.error is None
    assert may_say(request, 1) == {b"e"}
    request.sampled(1, WORD[b"e"])
    assert may_say(request, 1) == {b"s", b"t"}
    [stopped] = request.sampled(1, WORD[b"t"])
    assert (stopped.action, stopped.logs) == ("stop", "2 votes, version 2\n")
    assert request.text(1) == b"yet"
    request.close()


def test_a_guest_accepts_the_trie_of_131072_tokens(engine: wasmtime.Engine) -> None:
    arg = '{"choices":["yes","no, never"],"forks":1}'
    request = Request(engine, compile_rust("choice"), arg, tekken())
    [result] = request.begin([1])
    assert result.error is None
    assert result.logs.startswith("prompt of 1 tokens; 131072 tokens in ")
    allowed = {tekken().token(number) for number in request.may_sample()}
    assert {b"yes", b"y", b"no", b"n"} <= allowed
    assert all(b"yes".startswith(word) or b"no, never".startswith(word) for word in allowed)
    request.close()


def test_one_fork_drops_tokens_and_writes_a_variable_that_the_other_waits_for(
    engine: wasmtime.Engine,
) -> None:
    request = Request(engine, compile_rust("scribe"), "green")
    forked, writer, waiter = request.begin([1, 2])
    assert forked.logs == "init_prompt [1, 2]\n"
    assert writer.logs == "writer of [0, 1]\n"
    assert waiter.logs == "waiter of [0, 1]\n"

    [asleep] = request.sampled(1, WORD[b"yes"])
    assert (asleep.action, asleep.logs) == (
        "suspend",
        f"post_process [{WORD[b'yes']}] 0\nwaiting\n",
    )

    request.sampled(0, 65)
    told, woken = request.sampled(0, 66)
    assert (told.seq, told.action, told.backtrack) == (0, "stop", 2)
    assert told.ff_tokens == VOCABULARY.tokenize(b" not")
    assert request.text(0) == b" not"
    assert (woken.seq, woken.action) == (1, "stop")
    assert woken.logs.startswith("woken by version 1\n")
    assert request.text(1) == b"yes the answer is green"
    request.close()


def test_a_panic_is_the_error(engine: wasmtime.Engine) -> None:
    request = Request(engine, compile_rust("scribe"), "panic")
    _, writer, _ = request.begin([1])
    assert writer.action == "error"
    assert (writer.error or "").startswith("mid_process: Panic: ")
    assert "no word for [0, 1]" in (writer.error or "")
    assert "no word for [0, 1]" in writer.logs
    request.close()


def test_the_same_inputs_give_the_same_results(engine: wasmtime.Engine) -> None:
    def run() -> list[StepResult]:
        request = Request(engine, compile_rust("scribe"), "green")
        results = [
            *request.begin([1, 2]),
            *request.sampled(1, WORD[b"yes"]),
            *request.sampled(0, 65),
            *request.sampled(0, 66),
        ]
        request.close()
        return results

    assert run() == run()
