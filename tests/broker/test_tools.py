"""Calls of tools through the broker: which programs may call a tool, which worker gets the call,
and how a call ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenbus.broker.outgoing import Side
from tokenbus.broker.waiting_calls import MAX_WAITING
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.header import Header, decode_header
from tokenbus.protocol.keys import Allowed
from tokenbus.protocol.messages import Tool
from tokenbus.protocol.worker_messages import Call, CallAnswer, End, Start, VocabularyName

from ..worlds.broker import Bench, generate, peer_of

START = Start(
    controller="mine",
    prompt=[1],
    max_tokens=5,
    model="m",
    vocabulary=VocabularyName(fingerprint="f", size=9, eos=[0]),
)
KEY = "ab" * 32


class ToolBench(Bench):
    """A broker with a GPU worker, the controller worker ``c1`` and the tool workers ``t1`` and
    ``t2``. Both tool workers serve ``add``, and ``t2`` also serves ``search``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.worker("gpu", capacity=8)
        self.worker("c1", role="controller", patterns=["*"], default="", capacity=8)
        self.tool_worker("t1", "add")
        self.tool_worker("t2", "add", "search")

    def tool_worker(self, name: str, *tools: str, capacity: int = 3) -> None:
        infos = [Tool(name=tool) for tool in tools]
        self.worker(name, role="tool", patterns=[], default="", capacity=capacity, tools=infos)

    def begun(self, stream: int = 1, key: str = "", client: str = "c", **fields: Any) -> int:
        """Begins a request whose controller runs at ``c1``; returns the request's id."""
        self.client(client, "GENERATE", generate(stream, controller="mine", **fields), key=key)
        [(_, header)] = [m for m in self.to_worker("gpu") if m[0] == "GENERATE"]
        self.send("gpu", "START", START, Header(header.request))
        return header.request

    def call(self, request: int, tool: str = "add", count: int = 1, again: bool = False) -> None:
        body = Call(request, 0, count, tool, b'{"a":1}', again)
        self.send("c1", "CALL", body, Header(request))

    def answer(self, worker: str, request: int, count: int = 1) -> None:
        self.send(worker, "CALL_ANSWER", CallAnswer(request, 0, count, b"2"), Header(request))

    def bodies(self, worker: str, kind: str, of: Any) -> list[Any]:
        """The bodies of the messages of a type to a worker since the last call."""
        mine = [m for m in self.sent if m.side is Side.BACK and m.peer == peer_of(worker)]
        found = [m for m in mine if m.frames[0] == kind.encode()]
        self.sent = [m for m in self.sent if m not in found]
        return [msgspec.msgpack.decode(m.frames[2], type=of) for m in found]

    def calls(self, worker: str) -> list[int]:
        """The numbers of the calls that a tool worker received."""
        return [call.count for call in self.bodies(worker, "CALL", Call)]

    def answers(self, worker: str = "c1") -> list[CallAnswer]:
        """The answers that a controller worker received."""
        return self.bodies(worker, "CALL_ANSWER", CallAnswer)


@pytest.fixture
def bench() -> ToolBench:
    return ToolBench()


def test_calls_go_to_the_least_filled_worker_that_serves_the_tool(bench: ToolBench) -> None:
    request = bench.begun()
    for count in (1, 2):
        bench.call(request, count=count)
    bench.call(request, "search", count=3)
    assert (bench.calls("t1"), bench.calls("t2")) == ([1], [2, 3])


def test_an_answer_goes_to_the_worker_that_runs_the_program(bench: ToolBench) -> None:
    request = bench.begun()
    bench.call(request)
    bench.answer("t2", request)
    assert bench.answers() == []
    bench.answer("t1", request)
    assert bench.answers() == [CallAnswer(request, 0, 1, b"2")]


def test_after_a_move_of_the_program_the_answer_goes_to_its_new_worker(bench: ToolBench) -> None:
    request = bench.begun()
    bench.call(request)
    bench.worker("c2", role="controller", patterns=["*"], default="", capacity=8)
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("c1"), bench.now)
    bench.send("gpu", "START", START, Header(request))
    bench.send("c2", "CALL", Call(request, 0, 1, "add", again=True), Header(request))
    assert (bench.calls("t1"), bench.calls("t2")) == ([1, 1], [])
    bench.answer("t1", request)
    assert bench.answers("c2") == [CallAnswer(request, 0, 1, b"2")]


def test_a_call_of_an_earlier_attempt_is_not_made_by_another_worker(bench: ToolBench) -> None:
    request = bench.begun()
    bench.call(request, again=True)
    [answer] = bench.answers()
    assert answer.code == "worker_lost"
    assert answer.error is not None
    assert "not called again" in answer.error
    assert (bench.calls("t1"), bench.calls("t2")) == ([], [])


def test_the_calls_of_a_lost_worker_fail(bench: ToolBench) -> None:
    request = bench.begun()
    bench.call(request)
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("t1"), bench.now)
    [answer] = bench.answers()
    assert (answer.count, answer.code) == (1, "worker_lost")
    bench.call(request, again=True)
    [answer] = bench.answers()
    assert answer.code == "worker_lost"
    assert bench.calls("t2") == []


@pytest.mark.parametrize("leaves", ["dies", "drains"])
def test_a_call_waits_for_the_return_of_the_last_worker_of_its_tool(
    bench: ToolBench, leaves: str
) -> None:
    """The running call of the worker fails. Later calls of all of the worker's tools wait."""
    request = bench.begun()
    if leaves == "dies":
        bench.call(request, "search", count=9)
        bench.sent += bench.broker.on_gone(Side.BACK, peer_of("t2"), bench.now)
        assert [(a.count, a.code) for a in bench.answers()] == [(9, "worker_lost")]
    else:
        bench.send("t2", "DRAIN", {"reason": "test"})
    bench.call(request, "search")
    bench.call(request, "add", count=2)
    bench.pass_time(2)
    bench.call(request, "search", again=True)
    assert (bench.answers(), bench.calls("t1")) == ([], [2])
    bench.tool_worker("t3", "search")
    bench.pass_time(0.25)
    [call] = bench.bodies("t3", "CALL", Call)
    assert (call.count, call.tool, call.arguments) == (1, "search", b'{"a":1}')
    bench.answer("t3", request)
    assert bench.answers() == [CallAnswer(request, 0, 1, b"2")]


def test_a_call_whose_worker_does_not_return_fails(bench: ToolBench) -> None:
    request, ended = bench.begun(), bench.begun(2, client="d")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("t2"), bench.now)
    bench.call(request, "search")
    bench.call(ended, "search")
    bench.send("gpu", "ERROR", {"code": "internal", "message": "m"}, Header(ended, 0, 2))
    bench.pass_time(5.25)
    [answer] = bench.answers()
    assert (answer.request, answer.code) == (request, "no_worker")
    assert answer.error == "no worker serves the tool 'search'; the served tools: add"


def test_one_client_leaves_waiting_places_for_others(bench: ToolBench) -> None:
    request, other = bench.begun(), bench.begun(client="d")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("t2"), bench.now)
    for count in range(1, MAX_WAITING + 1):
        bench.call(request, "search", count=count)
    refused = bench.answers()
    assert {answer.code for answer in refused} == {"queue_full"}
    assert len(refused) == MAX_WAITING // 2
    bench.call(other, "search")
    assert bench.answers() == []


def test_one_user_of_a_gateway_leaves_waiting_places_for_its_other_users(bench: ToolBench) -> None:
    """The gateway may have half of the waiting places, and a user may have half of these."""
    request, other = bench.begun(by="ann"), bench.begun(2, by="ben")
    bench.sent += bench.broker.on_gone(Side.BACK, peer_of("t2"), bench.now)
    for count in range(1, MAX_WAITING + 1):
        bench.call(request, "search", count=count)
    assert len(bench.answers()) == MAX_WAITING - MAX_WAITING // 4
    bench.call(other, "search")
    bench.pass_time(2)
    assert bench.answers() == []


def test_an_unknown_tool_is_refused_with_the_names_that_are_served(bench: ToolBench) -> None:
    bench.call(bench.begun(), "nope")
    [answer] = bench.answers()
    assert (answer.code, answer.error) == (
        "no_worker",
        "no worker serves the tool 'nope'; the served tools: add, search",
    )


def test_a_call_without_a_tool_worker_is_refused_with_the_command(bench: ToolBench) -> None:
    request = bench.begun()
    for worker in ("t1", "t2"):
        bench.sent += bench.broker.on_gone(Side.BACK, peer_of(worker), bench.now)
    bench.call(request, "nope")
    [answer] = bench.answers()
    assert answer.error == (
        "no worker serves the tool 'nope', because no tool worker is running; start one with: "
        "tokenbus tool serve FILE"
    )


def test_one_client_leaves_places_for_others(bench: ToolBench) -> None:
    """The workers have six places. A client may use at most as many places as are still free."""
    request = bench.begun()
    for count in range(1, 6):
        bench.call(request, count=count)
    assert len(bench.calls("t1") + bench.calls("t2")) == 3
    assert [(a.count, a.code) for a in bench.answers()] == [(4, "queue_full"), (5, "queue_full")]
    other = bench.begun(client="d")
    bench.call(other)
    assert len(bench.calls("t1") + bench.calls("t2")) == 1
    bench.answer("t1", request)
    bench.answer("t2", request, 2)
    bench.call(request, count=6)
    assert 6 in bench.calls("t1") + bench.calls("t2")


def test_one_user_of_a_gateway_leaves_places_for_its_other_users(bench: ToolBench) -> None:
    """The gateway may have three of the six places. A user may have at most as many of these as are
    still free."""
    request = bench.begun(by="ann")
    for count in range(1, 4):
        bench.call(request, count=count)
    [refused] = bench.answers()
    assert (refused.count, refused.code) == (3, "client_limit")
    assert refused.error is not None
    assert "run 2 calls for you, and 0 for other users" in refused.error
    other = bench.begun(2, by="ben")
    bench.call(other, count=4)
    assert sorted(bench.calls("t1") + bench.calls("t2")) == [1, 2, 4]
    for count in (1, 2):
        bench.answer("t1", request, count)
        bench.answer("t2", request, count)
    bench.answers()
    bench.call(request, count=5)
    assert 5 in bench.calls("t1") + bench.calls("t2")
    assert bench.answers() == []


def test_a_draining_worker_gets_no_calls(bench: ToolBench) -> None:
    request = bench.begun()
    bench.send("t1", "DRAIN", {"reason": "test"})
    bench.call(request)
    assert (bench.calls("t1"), bench.calls("t2")) == ([], [1])


def test_the_end_of_a_request_ends_its_calls(bench: ToolBench) -> None:
    request = bench.begun()
    bench.call(request)
    bench.send("gpu", "ERROR", {"code": "internal", "message": "m"}, Header(request, 0, 2))
    assert bench.bodies("t1", "END", End) == [End(requests=[request])]
    assert bench.bodies("t2", "END", End) == []
    assert not any(worker.calls for worker in bench.broker.state.workers.values())
    bench.answer("t1", request)
    assert bench.answers() == []


def test_only_the_worker_of_the_program_can_call(bench: ToolBench) -> None:
    request = bench.begun()
    bench.send("gpu", "CALL", Call(request, 0, 1, "add"), Header(request))
    assert (bench.calls("t1"), bench.calls("t2")) == ([], [])


@pytest.mark.parametrize(
    ("own", "general", "allowed"),
    [
        (None, [], False),
        (None, ["se*"], True),
        (["search"], [], True),
        (["add"], ["search"], False),
        ([], ["*"], False),
    ],
)
def test_a_tenant_may_call_the_tools_of_its_key_or_of_the_setting(
    own: list[str] | None, general: list[str], allowed: bool
) -> None:
    bench = ToolBench(allow_tools=general)
    keys = {"ann": Allowed(public=KEY, tools=own)}
    bench.sent += bench.broker.on_keys(keys, {}, bench.now)
    bench.call(bench.begun(key=KEY), "search")
    assert bench.calls("t2") == ([1] if allowed else [])
    assert [a.code for a in bench.answers()] == ([] if allowed else ["not_allowed"])


@pytest.mark.parametrize("general", [[], ["search"]])
def test_a_gateways_users_may_call_only_the_tools_of_the_setting(general: list[str]) -> None:
    """A client on the broker's machine is the operator, but the users of a gateway are not."""
    bench = ToolBench(allow_tools=general)
    bench.client("c", "HELLO", {"versions": [1], "capabilities": ["gateway"]})
    bench.call(bench.begun(), "search")
    assert bench.calls("t2") == [1] * len(general)
    bench.call(bench.begun(2, client="local"), "search")
    assert len(bench.calls("t2")) == 1


def test_a_gateways_user_without_hello_may_call_only_the_tools_of_the_setting() -> None:
    """A WebSocket without HELLO has a session that the broker cannot tell from a local client's.
    The gateway names its group in each request, and marks each STATUS."""
    bench = ToolBench()
    bench.call(bench.begun(group="g"), "search")
    assert bench.calls("t2") == []
    assert [a.code for a in bench.answers()] == ["not_allowed"]
    asked = {"stream_id": 99, "tools": ["search"], "own": True}
    [*_, (kind, answer)] = bench.client("c", "STATUS", asked)
    assert (kind, answer.get("code")) == ("ERROR", "not_allowed")
    bench.call(bench.begun(2), "search")
    assert bench.calls("t2") == [1]


def test_a_call_passes_with_its_sender_and_its_owner(bench: ToolBench) -> None:
    bench.sent += bench.broker.on_keys({"ann": Allowed(public=KEY, tools=["*"])}, {}, bench.now)
    request = bench.begun(key=KEY, by="ben")
    forged = Call(request, 0, 1, "add", b'{"a":1}', owner="other", user="other")
    bench.send("c1", "CALL", forged, Header(request))
    [out] = [m for m in bench.sent if m.frames[0] == b"CALL"]
    assert decode_header(out.frames[1]).request == request
    passed = Call(request, 0, 1, "add", b'{"a":1}', owner=KEY, user="ben")
    assert out.frames[2] == encode_body(passed, "msgpack")


def test_status_describes_the_tools_that_a_client_may_call() -> None:
    bench = ToolBench(allow_tools=["a*"])

    def described(*tools: str) -> Any:
        bench.client("c", "HELLO", {"capabilities": ["gateway"]})
        asked = {"stream_id": 99, "tools": list(tools)}
        [*_, (kind, answer)] = bench.client("c", "STATUS", asked)
        return answer["code"] if kind == "ERROR" else answer["status"].get("tools", [])

    assert [tool["name"] for tool in described("add")] == ["add"]
    assert described() == []
    assert described("add", "search") == "not_allowed"
    assert described("all") == "no_worker"
    assert described(*["add"] * 129) == "invalid_field"
