"""The broker passes INPUT on to the state worker, and reports the state worker's answer to the
client."""

from __future__ import annotations

from typing import Any

import pytest
from tokenbus.broker import inputs
from tokenbus.broker.inputs import AGAIN_S, INPUT_BYTES, MAX_UNANSWERED_BYTES
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import MAX_INPUT_BYTES, MAX_WAITING_INPUTS
from tokenbus.protocol.worker_messages import End, Inputs, Variable, VariableAnswer

from ..worlds.broker import Bench, generate, peer_of
from .test_controllers import begun, bodies, controller_worker


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.worker("gpu", capacity=8)
    controller_worker(made, "controller")
    return made


def state_worker(bench: Bench) -> None:
    bench.worker("state", role="state")


def give(bench: Bench, number: int = 1, text: str = "x", who: str = "c") -> list[tuple[str, Any]]:
    return bench.client(who, "INPUT", {"stream_id": 1, "number": number, "text": text})


def refusal(answer: list[tuple[str, Any]]) -> tuple[str, float | None]:
    [(kind, body)] = answer
    assert (kind, body["stream_id"]) == ("MSG", 1)
    return body["input"]["code"], body["input"].get("retry_after_s")


def stored(bench: Bench, request: int, number: int = 1, **more: Any) -> None:
    answer = VariableAnswer(request, 0, number, number, written=True, **more)
    bench.send("state", "VARIABLE_ANSWER", answer, Header(request))


def test_an_input_is_stored_and_then_confirmed_and_wakes_the_program(bench: Bench) -> None:
    state_worker(bench)
    request = begun(bench).request
    assert give(bench) == []
    assert bodies(bench, "state", "VARIABLE", Variable) == [
        Variable(request, 0, 1, "give", "", b"x")
    ]
    assert bodies(bench, "controller", "INPUTS", Inputs) == []
    stored(bench, request)
    assert bodies(bench, "controller", "INPUTS", Inputs) == [Inputs(number=1)]
    assert ("MSG", {"stream_id": 1, "input": {"number": 1}}) in bench.to_client("c")


def test_a_refusal_of_the_state_worker_says_whether_to_try_again(bench: Bench) -> None:
    state_worker(bench)
    request = begun(bench).request
    for again, code in ((True, "queue_full"), (False, "too_large")):
        bench.to_client("c")
        give(bench)
        stored(bench, request, error="no room", again=again)
        found, retry_after_s = refusal(bench.to_client("c"))
        assert (found, retry_after_s is not None) == (code, again)
    assert bodies(bench, "controller", "INPUTS", Inputs) == []


def test_only_the_session_of_a_stream_with_a_program_may_send(bench: Bench) -> None:
    state_worker(bench)
    begun(bench)
    assert refusal(give(bench, who="other")) == ("unknown_stream", None)
    bench.client("other", "GENERATE", generate(1))
    assert refusal(give(bench, who="other")) == ("unsupported", None)
    assert bodies(bench, "state", "VARIABLE", Variable) == []


def test_an_input_that_is_too_large_or_has_no_state_worker_is_refused(bench: Bench) -> None:
    begun(bench)
    code, retry_after_s = refusal(give(bench))
    assert (code, retry_after_s is not None) == ("no_worker", True)
    state_worker(bench)
    assert refusal(give(bench, text="x" * (MAX_INPUT_BYTES + 1))) == ("too_large", None)


def test_a_bounded_number_of_inputs_is_unanswered(bench: Bench) -> None:
    state_worker(bench)
    request = begun(bench).request
    for number in range(1, MAX_WAITING_INPUTS + 1):
        assert give(bench, number) == []
    assert give(bench, 1) == []
    assert refusal(give(bench, MAX_WAITING_INPUTS + 1))[0] == "queue_full"
    stored(bench, request)
    bench.to_client("c")
    assert give(bench, MAX_WAITING_INPUTS + 1) == []


def test_an_input_is_not_passed_on_again_at_once(bench: Bench) -> None:
    state_worker(bench)
    begun(bench)
    for _ in range(9):
        assert give(bench) == []
    assert len(bodies(bench, "state", "VARIABLE", Variable)) == 1
    bench.pass_time(AGAIN_S)
    assert give(bench) == []
    assert len(bodies(bench, "state", "VARIABLE", Variable)) == 2


def test_a_client_cannot_have_all_room_for_unanswered_inputs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_UNANSWERED_BYTES", 4 * (INPUT_BYTES + 1))
    state_worker(bench)
    request = begun(bench).request
    assert give(bench, 1) == []
    assert give(bench, 2) == []
    assert refusal(give(bench, 3))[0] == "queue_full"
    bench.client("d", "GENERATE", generate(1, controller="mine"))
    assert give(bench, who="d") == []
    stored(bench, request)
    bench.to_client("c")
    assert give(bench, 3) == []


def test_small_inputs_of_a_client_do_not_hold_up_the_state_worker_for_long() -> None:
    """The state worker handles the operations of all clients in their order."""
    bench = Bench()
    bench.worker("gpu", capacity=99)
    controller_worker(bench, "controller", capacity=99)
    state_worker(bench)
    for stream in range(80):
        bench.client("c", "GENERATE", generate(stream, controller="mine"))
        for number in range(1, MAX_WAITING_INPUTS + 1):
            bench.client("c", "INPUT", {"stream_id": stream, "number": number, "text": "x"})
    passed = len(bodies(bench, "state", "VARIABLE", Variable))
    assert passed == MAX_UNANSWERED_BYTES // 2 // (INPUT_BYTES + 1) < 4_096


def test_an_unanswered_input_counts_each_time_it_is_passed_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_UNANSWERED_BYTES", 4 * (INPUT_BYTES + 9))
    state_worker(bench)
    request = begun(bench).request
    for text in ("", "x" * 9):
        assert give(bench, text=text) == []
        bench.pass_time(AGAIN_S)
    assert refusal(give(bench, text="x" * 9))[0] == "queue_full"
    stored(bench, request)
    bench.to_client("c")
    assert give(bench, 2) == []


def test_another_state_worker_receives_an_input_at_once_and_has_all_its_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_UNANSWERED_BYTES", 4 * (INPUT_BYTES + 1))
    state_worker(bench)
    begun(bench)
    assert give(bench, 1) == give(bench, 2) == []
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("state"), bench.now)
    bench.worker("other", role="state")
    assert give(bench, 1) == give(bench, 2) == []
    assert len(bodies(bench, "other", "VARIABLE", Variable)) == 2
    assert refusal(give(bench, 3))[0] == "queue_full"


def test_the_inputs_of_a_request_that_ends_before_its_program_begins_are_dropped(
    bench: Bench,
) -> None:
    state_worker(bench)
    bench.client("c", "GENERATE", generate(1, controller="mine"))
    [(_, header)] = [m for m in bench.to_worker("gpu") if m[0] == "GENERATE"]
    give(bench)
    bench.tokens("gpu", header, final=True)
    assert bodies(bench, "state", "END", End) == [End(requests=[header.request])]
