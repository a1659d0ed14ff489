"""Pauses and new weights: either all workers of a model change, or no worker changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.protocol.header import Header
from tokenbus.protocol.messages import ForwardPath, ModelInfo
from tokenbus.protocol.worker_messages import (
    FetchWeights,
    ModelState,
    Order,
    OrderDone,
    Unregister,
    WeightsPart,
)

from ..worlds.broker import Bench, peer_of

MODEL = ModelInfo(name="m", vocab_size=8, context_length=8, eos_token_ids=[], fingerprint="")
UPDATE = {"stream_id": 5, "model": "m", "folder": "/weights/1"}


@pytest.fixture
def bench() -> Bench:
    """A broker with two workers of a model."""
    bench = Bench()
    for name in ("a", "b"):
        bench.worker(name, models=[MODEL])
    return bench


def orders(bench: Bench, name: str) -> list[Order]:
    """The orders sent to a worker since the last call."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of(name)]
    bench.sent = [m for m in bench.sent if m not in mine]
    return [
        msgspec.msgpack.decode(m.frames[2], type=Order) for m in mine if m.frames[0] == b"ORDER"
    ]


def the_order(bench: Bench, name: str, action: str) -> Order:
    [order] = orders(bench, name)
    assert order.action == action
    return order


def answer(bench: Bench, name: str, order: Order, **fields: Any) -> None:
    done = OrderDone(number=order.number, action=order.action, **fields)
    bench.send(name, "ORDER_DONE", done)


def operator(bench: Bench) -> tuple[str, Any]:
    """The only message to the operator since the last call."""
    [message] = bench.to_client("operator")
    return message


def test_all_workers_read_the_weights_before_any_uses_them(bench: Bench) -> None:
    assert bench.client("operator", "UPDATE_WEIGHTS", UPDATE | {"mode": "keep"}) == []
    first, second = (the_order(bench, name, "prepare") for name in ("a", "b"))
    assert (first.version, first.folder, first.update) == (1, "/weights/1", "keep")
    answer(bench, "a", first, weights="w", dtype="f")
    assert orders(bench, "a") == []
    answer(bench, "b", second, weights="w", dtype="f")
    first, second = (the_order(bench, name, "commit") for name in ("a", "b"))
    answer(bench, "a", first, streams=2, pause_ms=3.0, weights="w")
    assert bench.to_client("operator") == []
    answer(bench, "b", second, streams=1, pause_ms=1.0, weights="w")
    kind, message = operator(bench)
    assert (kind, message["stream_id"]) == ("MSG", 5)
    assert message["result"] == {
        "model": "m",
        "version": 1,
        "workers": 2,
        "streams": 3,
        "update_pause_ms": 3.0,
        "weights": "w",
    }


@pytest.mark.parametrize("fault", ["an error", "other weights"])
def test_no_worker_changes_if_one_cannot_have_the_weights(bench: Bench, fault: str) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    first, second = (the_order(bench, name, "prepare") for name in ("a", "b"))
    answer(bench, "a", first, weights="w", dtype="f")
    if fault == "an error":
        answer(bench, "b", second, error="the tensor 'x' is missing")
    else:
        answer(bench, "b", second, weights="v", dtype="f")
    for name in ("a", "b"):
        the_order(bench, name, "drop")
    kind, error = operator(bench)
    assert (kind, error["stream_id"], error["code"]) == ("ERROR", 5, "invalid_field")
    assert "because b cannot have them: " in error["message"]
    assert bench.worker("c", models=[MODEL]).states == []


def test_a_worker_that_is_lost_between_the_phases_returns_with_the_new_version(
    bench: Bench,
) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    first, second = (the_order(bench, name, "prepare") for name in ("a", "b"))
    answer(bench, "b", second, weights="w", dtype="f")
    bench.send("b", "UNREGISTER", Unregister())
    answer(bench, "a", first, weights="w", dtype="f")
    commit = the_order(bench, "a", "commit")
    [state] = bench.worker("b", models=[MODEL]).states
    assert (state.model, state.version, state.folder) == ("m", 1, "/weights/1")
    assert state.hashes == commit.hashes == {"f": "w"}
    answer(bench, "a", commit)
    assert operator(bench)[1]["result"]["workers"] == 1


def test_an_update_without_a_loaded_model_changes_nothing(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.send(name, "UNREGISTER", Unregister())
    bench.worker("c")
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    answer(bench, "c", the_order(bench, "c", "prepare"))
    kind, error = operator(bench)
    assert (kind, error["code"]) == ("ERROR", "no_worker")
    assert "no worker has loaded the model 'm'" in error["message"]


def with_weights(weights: str, version: int) -> ModelInfo:
    return msgspec.structs.replace(MODEL, path=ForwardPath(weights=weights, version=version))


def test_a_worker_gets_the_weights_from_the_workers_that_have_them(bench: Bench) -> None:
    state = ModelState(model="m", version=1, hashes={"f": "w"})
    for name in ("a", "b"):
        bench.worker(name, models=[with_weights("w", 1)], states=[state])
    registered = bench.worker("c", models=[MODEL])
    assert registered.states == [state]
    for turn, peer in ((0, "a"), (1, "b"), (2, "a")):
        bench.send("c", "FETCH_WEIGHTS", FetchWeights(model="m", weights="w", turn=turn))
        [(_, to)] = [m for m in bench.to_worker(peer) if m[0] == "FETCH_WEIGHTS"]
        assert to.address == registered.worker
        part = WeightsPart(model="m", weights="w", size=3)
        bench.send(peer, "WEIGHTS_PART", part, Header(0, to.address))
        assert [kind for kind, _ in bench.to_worker("c")] == ["WEIGHTS_PART"]
    for name in ("a", "b"):
        bench.send(name, "UNREGISTER", Unregister())
    bench.send("c", "FETCH_WEIGHTS", FetchWeights(model="m", weights="w"))
    assert [(kind, to.address) for kind, to in bench.to_worker("c")] == [("WEIGHTS_PART", 0)]


def test_a_worker_with_outdated_weights_counts_as_one_that_has_not_loaded_the_model(
    bench: Bench,
) -> None:
    state = ModelState(model="m", version=1, hashes={"f": "w"})
    bench.worker("c", models=[with_weights("w", 1)], states=[state])
    bench.worker("d", models=[MODEL])
    loaded = {w.name: list(w.models) for w in bench.broker.state.workers.values()}
    assert (loaded["c"], loaded["d"]) == (["m"], [])
    bench.worker("d", models=[with_weights("w", 1)], update=True)
    loaded = {w.name: list(w.models) for w in bench.broker.state.workers.values()}
    assert loaded["d"] == ["m"]


def test_an_update_whose_workers_are_all_lost_changes_nothing(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    for name in ("a", "b"):
        bench.send(name, "UNREGISTER", Unregister())
    kind, error = operator(bench)
    assert (kind, error["code"]) == ("ERROR", "worker_lost")
    assert bench.worker("a", models=[MODEL]).states == []


def test_an_update_is_given_up_when_its_time_is_over(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE | {"timeout_s": 1.0})
    answer(bench, "a", the_order(bench, "a", "prepare"), weights="w", dtype="f")
    bench.pass_time(1.5)
    kind, error = operator(bench)
    assert (kind, error["code"]) == ("ERROR", "timeout")
    assert "were not read in time by: b" in error["message"]
    assert [order.action for order in orders(bench, "b")] == ["prepare", "drop"]


def test_a_restarted_broker_learns_the_state_and_brings_others_up_to_date() -> None:
    bench = Bench()
    bench.worker("a", models=[MODEL])
    state = ModelState(model="m", version=3, folder="/weights/3", paused="keep")
    assert bench.worker("b", models=[MODEL], states=[state]).states == [state]
    order = the_order(bench, "a", "commit")
    assert (order.version, order.folder) == (3, "/weights/3")
    [(kind, error)] = bench.client("operator", "UPDATE_WEIGHTS", UPDATE | {"version": 3})
    assert (kind, error["path"]) == ("ERROR", "$.version")
    assert "the current version is 3" in error["message"]


def test_a_pause_is_answered_by_all_workers_and_holds_for_later_ones(bench: Bench) -> None:
    bench.client("operator", "PAUSE", {"stream_id": 5, "mode": "wait"})
    waits = [the_order(bench, name, "pause") for name in ("a", "b")]
    assert [order.pause for order in waits] == ["wait", "wait"]
    assert [s.paused for s in bench.worker("c").states] == ["wait"]
    answer(bench, "a", waits[0], streams=2)
    bench.client("operator", "RESUME", {"stream_id": 6})
    answer(bench, "b", waits[1])
    assert operator(bench)[1]["result"] == {"model": "m", "workers": 2, "streams": 2}
    for name in ("a", "b", "c"):
        answer(bench, name, the_order(bench, name, "resume"))
    assert operator(bench)[1]["result"] == {"model": "m", "workers": 3}
    assert [s.paused for s in bench.worker("d").states] == [None]


@pytest.mark.parametrize("kind", ["PAUSE", "RESUME", "UPDATE_WEIGHTS", "WEIGHTS"])
def test_only_the_operator_may_change_a_model(bench: Bench, kind: str) -> None:
    bench.client("g", "HELLO", {"capabilities": ["gateway"]})
    for name, key in (("g", ""), ("k", "a tenant")):
        [(answered, error)] = bench.client(name, kind, UPDATE, key=key)
        assert (answered, error["code"]) == ("ERROR", "not_allowed")
    assert orders(bench, "a") == []


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"folder": "weights"}, "invalid_field", "is a relative path"),
        ({"folder": ""}, "invalid_field", "this update names no weights; expected a folder, or"),
        ({"size": 5}, "invalid_field", "has a folder and also the name, size or sha256"),
        ({"folder": "", "shared": "../x"}, "invalid_field", "is not the name of shared memory"),
        ({"folder": "", "size": 5, "sha256": "A" * 64}, "invalid_field", "is not a SHA-256"),
        ({"model": "other"}, "unknown_model", "served models: m"),
        ({"mode": "fast"}, "invalid_field", "expected 'keep' or 'recompute', not 'fast' at $.mode"),
    ],
)
def test_a_wrong_update_is_refused(
    bench: Bench, change: dict[str, Any], code: str, said: str
) -> None:
    [(kind, error)] = bench.client("operator", "UPDATE_WEIGHTS", UPDATE | change)
    assert (kind, error["code"]) == ("ERROR", code)
    assert said in error["message"]
    assert orders(bench, "a") == []


def test_a_wrong_mode_of_a_pause_is_refused_with_the_valid_ones(bench: Bench) -> None:
    [(kind, error)] = bench.client("operator", "PAUSE", {"stream_id": 5, "mode": "now"})
    assert (kind, error["path"]) == ("ERROR", "$.mode")
    assert error["message"] == "expected 'abort' or 'keep' or 'wait', not 'now' at $.mode"
    assert orders(bench, "a") == []


def test_a_model_has_one_update_at_a_time(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    [(kind, error)] = bench.client("operator", "UPDATE_WEIGHTS", UPDATE | {"stream_id": 6})
    assert (kind, error["code"]) == ("ERROR", "queue_full")


SENT = {"stream_id": 5, "model": "m", "size": 5, "sha256": "a" * 64}


def send(bench: Bench, offset: int, part: bytes, stream: int = 6) -> list[tuple[str, Any]]:
    """The operator sends a part of the weights; returns the immediate answers."""
    body = {"stream_id": stream, "sha256": "a" * 64, "offset": offset}
    frames = [b"WEIGHTS", msgspec.json.encode(body), part]
    out = bench.broker.on_client(peer_of("operator"), frames, bench.now)
    bench.sent += out
    return bench.to_client("operator")


def fetch(bench: Bench, name: str, order: Order, offset: int) -> None:
    request = FetchWeights(model="m", weights="a" * 64, order=order.number, offset=offset)
    bench.send(name, "FETCH_WEIGHTS", request)


def received(bench: Bench, name: str) -> list[tuple[int, bytes]]:
    """The parts that were passed to a worker since the last call."""
    mine = [m for m in bench.sent if m.side is Side.BACK and m.peer == peer_of(name)]
    bench.sent = [m for m in bench.sent if m not in mine]
    parts = [m.frames for m in mine if m.frames[0] == b"WEIGHTS_PART"]
    return [(msgspec.msgpack.decode(f[2], type=WeightsPart).offset, f[3]) for f in parts]


def test_a_part_is_passed_on_when_all_workers_have_requested_it(bench: Bench) -> None:
    assert bench.client("operator", "UPDATE_WEIGHTS", SENT) == []
    first, second = (the_order(bench, name, "prepare") for name in ("a", "b"))
    assert (first.folder, first.size, first.sha256) == ("", 5, "a" * 64)
    fetch(bench, "a", first, 0)
    assert send(bench, 0, b"abc") == []
    assert received(bench, "a") == []
    fetch(bench, "b", second, 0)
    assert bench.to_client("operator") == [("MSG", {"stream_id": 6, "result": {"sent": 3}})]
    assert [received(bench, name) for name in ("a", "b")] == [[(0, b"abc")]] * 2
    fetch(bench, "a", first, 0)  # The worker repeated the request before the part arrived.
    fetch(bench, "a", first, 3)
    assert send(bench, 3, b"de") == []
    bench.send("b", "UNREGISTER", Unregister())
    assert bench.to_client("operator")[0][1]["result"] == {"sent": 5}
    assert received(bench, "a") == [(3, b"de")]
    answer(bench, "a", first, weights="w", dtype="f")
    commit = the_order(bench, "a", "commit")
    assert commit.hashes == {"f": "w"}
    answer(bench, "a", commit)
    assert operator(bench)[1]["result"]["version"] == 1


def test_a_part_that_waits_ends_with_its_update(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", SENT)
    first, second = (the_order(bench, name, "prepare") for name in ("a", "b"))
    fetch(bench, "a", first, 0)
    assert send(bench, 0, b"abc") == []
    answer(bench, "b", second, error="too large")
    errors = bench.to_client("operator")
    assert [(kind, e["stream_id"], e["code"]) for kind, e in errors] == [
        ("ERROR", 5, "invalid_field"),
        ("ERROR", 6, "invalid_field"),
    ]
    assert "b cannot have them: too large" in errors[1][1]["message"]


def test_an_update_ends_with_the_session_that_sends_its_weights(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", SENT)
    the_order(bench, "a", "prepare")
    bench.client("operator", "BYE")
    bench.pass_time(0.5)
    the_order(bench, "a", "drop")


@pytest.mark.parametrize(
    ("offset", "part", "code", "said"),
    [
        (1, b"a", "invalid_field", "expected the part from byte 0 on"),
        (0, b"", "too_large", "has 0 bytes; expected 1 to 5"),
        (0, b"abcdef", "too_large", "has 6 bytes; expected 1 to 5"),
    ],
)
def test_a_wrong_part_is_refused(
    bench: Bench, offset: int, part: bytes, code: str, said: str
) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", SENT)
    [(kind, error)] = send(bench, offset, part)
    assert (kind, error["code"]) == ("ERROR", code)
    assert said in error["message"]
    [(kind, error)] = bench.client("operator", "WEIGHTS", {"stream_id": 6, "sha256": "b" * 64})
    assert (kind, error["code"]) == ("ERROR", "conflict")
    assert "send UPDATE_WEIGHTS with their size and sha256 first" in error["message"]
    received(bench, "a")


def test_only_one_part_waits_at_the_broker(bench: Bench) -> None:
    bench.client("operator", "UPDATE_WEIGHTS", SENT)
    assert send(bench, 0, b"ab") == []
    [(kind, error)] = send(bench, 2, b"cd", stream=7)
    assert (kind, error["stream_id"], error["code"]) == ("ERROR", 7, "invalid_field")


def test_an_adapter_has_the_weights_and_the_version_of_its_model(bench: Bench) -> None:
    adapter = msgspec.structs.replace(MODEL, name="sql", parent="m")
    bench.worker("c", models=[MODEL, adapter])
    [(kind, error)] = bench.client("operator", "UPDATE_WEIGHTS", UPDATE | {"model": "sql"})
    assert (kind, error["code"]) == ("ERROR", "unsupported")
    assert "'sql' is a LoRA adapter" in error["message"]
    bench.client("operator", "UPDATE_WEIGHTS", UPDATE)
    for action in ("prepare", "commit"):
        for name in ("a", "b", "c"):
            order = the_order(bench, name, action)
            answer(bench, name, order, weights="w", dtype="f")
    bench.worker("d", models=[MODEL, adapter])
    workers = {worker.name: worker for worker in bench.broker.state.workers.values()}
    assert workers["d"].models == {}
