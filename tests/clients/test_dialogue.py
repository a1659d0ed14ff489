"""A program exchanges messages and inputs with its client, in order, within bounds, and through
each interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenbus.clients import AsyncClient, Client
from tokenbus.protocol.errors import RequestError, UnavailableError
from tokenbus.protocol.messages import MAX_INPUT_BYTES, MAX_WAITING_INPUTS
from tokenbus.protocol.scripts import marked_script
from websockets.sync.client import ClientConnection

from ..processes import Bus, Gateway, until
from ..websocket import connect
from ..workers.controller.wasm.guests import compile_guest
from ..worlds.controllers import serving_main
from .dialogues import C_SOURCE, MESSAGES, PYTHON, SCRIPTS, TURNS, answered, next_message

NEVER = """
#include "tokenbus.h"

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n, (void)arg, (void)arg_len;
    tb_send("ready", 5);
}

tb_answer tb_pre_process(void) { return tb_suspend(); }

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    return tb_stop();
}

tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    (void)tokens, (void)n, (void)backtrack;
    return tb_go_on();
}
"""
"""A program that suspends and receives no input. It ends with `deadlock` when no input has arrived
for more than a minute."""
FIRST = b"""
async def main(ctx):
    i = await ctx.fork(2)
    await ctx.fixed(f" {i}")
    ctx.send(await ctx.receive())
"""


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        for language, text in SCRIPTS.items():
            client.upload_controller(marked_script(text, language), f"dialogue-{language}")
        yield client


def serves(client: Client, controller: str) -> bool:
    workers = client.status(timeout_s=60.0).workers
    return any(controller in worker.controllers for worker in workers)


@pytest.fixture
def controller(
    client: Client, steered: Bus, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The name of a controller: the dialogue as a script, a module in C, or a served function."""
    if request.param == "c":
        yield client.upload_controller(compile_guest(C_SOURCE)).module
    elif request.param == "served":
        with serving_main(steered, tmp_path, "dialogue_own", PYTHON.decode()):
            until(lambda: serves(client, "dialogue_own:main"), 300.0, "the controller")
            yield "dialogue_own:main"
    else:
        yield f"dialogue-{request.param}"


@pytest.mark.parametrize("controller", [*SCRIPTS, "c", "served"], indirect=True)
def test_a_dialogue_of_several_turns(client: Client, controller: str) -> None:
    stream = client.generate("Hello. ", controller=controller, temperature=0.0)
    answered(stream, [*TURNS, "end"])
    [sequence] = stream.sequences
    assert (sequence.messages, sequence.error) == (MESSAGES, None)
    for text in TURNS:
        assert text in sequence.text


SILENT = b"""
async def main(ctx):
    await ctx.fixed(await ctx.receive())
    await ctx.fixed(await ctx.receive())
"""


@pytest.mark.parametrize("script", [PYTHON, SILENT])
def test_a_client_sees_that_a_program_waits_for_an_input(client: Client, script: bytes) -> None:
    stored = client.upload_controller(marked_script(script, "python"))
    with client.generate("Hello. ", controller=stored.module, max_tokens=9) as stream:
        assert not stream.waiting
        for number, text in ((1, "a "), (2, "end")):
            assert number == next(entry.waiting for entry in stream if entry.waiting)
            assert stream.waiting
            stream.send(text)
            assert not stream.waiting
        stream.wait()
        assert not stream.waiting


def test_inputs_that_arrive_early_are_received_in_order(client: Client) -> None:
    stream = client.generate("Hello. ", controller="dialogue-python", temperature=0.0)
    for text in [*TURNS, "end"]:
        stream.send(text)
    [sequence] = stream.wait()
    places = [sequence.text.index(text) for text in TURNS]
    assert places == sorted(places)
    assert sequence.messages == MESSAGES


@pytest.mark.anyio
async def test_an_asynchronous_client_does_the_same(client: Client, steered: Bus) -> None:
    async with AsyncClient(steered.front) as other:
        stream = other.generate("Hello. ", controller="dialogue-javascript", temperature=0.0)
        texts = iter([*TURNS, "end"])
        async for entry in stream:
            if entry.messages and entry.messages != ["ended"]:
                await stream.send(next(texts))
        assert stream.sequences[0].messages == MESSAGES


def test_each_input_goes_to_one_of_the_forks(client: Client) -> None:
    stored = client.upload_controller(marked_script(FIRST, "python"))
    stream = client.generate("Hello.", controller=stored.module, max_tokens=20)
    stream.send("a")
    stream.send("b")
    sequences = stream.wait()
    assert sorted(message for s in sequences for message in s.messages) == ["a", "b"]


def test_inputs_that_nobody_receives_are_refused_beyond_a_bound(client: Client) -> None:
    stored = client.upload_controller(compile_guest(NEVER))
    with client.generate("Hello.", controller=stored.module) as stream:
        assert next_message(stream) == "ready"
        for number in range(MAX_WAITING_INPUTS):
            stream.send(f"{number}")
        with pytest.raises(UnavailableError, match=f"{MAX_WAITING_INPUTS} inputs with .* may wait"):
            stream.send("one more")


def test_an_input_has_a_maximum_size_and_is_text(client: Client) -> None:
    with client.generate("Hello. ", controller="dialogue-python") as stream:
        with pytest.raises(RequestError, match=f"at most {MAX_INPUT_BYTES} are allowed"):
            stream.send("x" * (MAX_INPUT_BYTES + 1))
        with pytest.raises(RequestError, match="an input is text; got bytes"):
            stream.send(b"x")  # type: ignore[arg-type]
        stream.send("end")
        assert stream.wait()[0].messages == ["turn 0", "ended"]


def test_a_stream_without_a_program_and_an_ended_one_take_no_inputs(client: Client) -> None:
    with client.generate("Hello.", max_tokens=2000, ignore_eos=True) as plain:
        next(plain)
        with pytest.raises(RequestError, match="has no program that could receive an input"):
            plain.send("x")
    stream = client.generate("Hello. ", controller="dialogue-python")
    answered(stream, ["end"])
    with pytest.raises(RequestError, match="the stream has ended"):
        stream.send("x")


def test_a_script_that_sends_something_else_than_text_fails(client: Client) -> None:
    text = b"async function main(ctx) { ctx.send(1); }"
    stored = client.upload_controller(marked_script(text, "javascript"))
    with pytest.raises(Exception, match=r"send\(text\) with 1; expected text"):
        client.generate("Hello.", controller=stored.module).wait()


# --- the interfaces -------------------------------------------------------------------------------


class Run:
    """A ``POST /v1/run`` that a thread reads. ``messages`` grows while the program runs."""

    def __init__(self, gateway: Gateway, controller: str, number: str) -> None:
        self._url, self._number = gateway.url, number
        self._body = {"controller": controller, "prompt": "Hello. ", "temperature": 0.0}
        self.messages: list[str] = []
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.messages) >= count, 120.0)

    def end(self) -> list[str]:
        self._thread.join(120.0)
        return self.messages

    def _read(self) -> None:
        headers = {"x-request-id": self._number}
        url = f"{self._url}/v1/run"
        with httpx.stream("POST", url, json=self._body, headers=headers, timeout=120.0) as answer:
            assert answer.headers["x-request-id"] == self._number
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                part = json.loads(data) if data.startswith("{") else {}
                for fork in part.get("forks", ()):
                    with self._arrived:
                        self.messages += fork.get("messages", [])
                        self._arrived.notify_all()


def give(gateway: Gateway, stream: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/streams/{stream}/input", json=body, timeout=120.0)


def test_the_http_door_gives_each_numbered_input_once(client: Client, gateway: Gateway) -> None:
    run = Run(gateway, "dialogue-python", "dialogue-1")
    for place, text in enumerate(TURNS, 1):
        run.wait_for(place)
        for _ in range(2):
            assert give(gateway, "dialogue-1", text=text, number=place).status_code == 204
    assert give(gateway, "dialogue-1", text="end").status_code == 204
    assert run.end() == MESSAGES


def test_the_http_door_refuses_what_it_cannot_deliver(client: Client, gateway: Gateway) -> None:
    missing = give(gateway, "nothing", text="x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_stream")
    run = Run(gateway, "dialogue-python", "dialogue-2")
    run.wait_for(1)
    early = give(gateway, "dialogue-2", text="x", number=3)
    assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
    assert give(gateway, "dialogue-2", text="end").status_code == 204
    assert run.end() == ["turn 0", "ended"]


def test_a_chunk_of_a_completion_has_the_messages(client: Client, gateway: Gateway) -> None:
    body = {
        "model": "embedded",
        "prompt": "Hello. ",
        "max_tokens": 40,
        "controller": "dialogue-python",
        "stream": True,
    }
    messages = []
    headers = {"x-request-id": "dialogue-3"}
    url = f"{gateway.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120.0) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            for choice in json.loads(data)["choices"] if data.startswith("{") else ():
                new = choice.get("tokenbus", {}).get("messages", [])
                messages += new
                assert bool(new and new != ["ended"]) == ("waiting" in choice.get("tokenbus", {}))
                if new and new != ["ended"]:
                    text = "a " if len(messages) == 1 else "end"
                    assert give(gateway, "dialogue-3", text=text).status_code == 204
    assert messages == ["turn 0", "turn 1", "ended"]


def test_lmtp_over_a_websocket(client: Client, gateway: Gateway) -> None:
    generate = {"stream_id": 5, "prompt": "Hello. ", "controller": "dialogue-python"}
    messages: list[str] = []
    answers: list[Any] = []
    with connect(gateway.ws_url) as socket:

        def give(stream_id: int, number: int, text: str) -> None:
            message = {"stream_id": stream_id, "number": number, "text": text}
            socket.send("INPUT " + json.dumps(message))

        socket.send("HELLO {}")
        socket.send("GENERATE " + json.dumps(generate))
        while "ended" not in messages or len(answers) < 4:
            kind, _, body = str(socket.recv(120.0)).partition(" ")
            for entry in json.loads(body) if kind == "TOKEN" else ():
                new = entry.get("messages", [])
                messages += new
                if new == ["turn 0"]:
                    give(5, 1, "a ")
                if "ended" in new:
                    give(6, 1, "x")
            if kind == "MSG":
                answers.append(json.loads(body)["input"])
                if len(answers) == 1:
                    give(5, 1, "a ")  # An input that is repeated is answered again.
                if len(answers) == 2:
                    give(5, 2, "end")
    assert messages == ["turn 0", "turn 1", "ended"]
    found = [(one["number"], one.get("code")) for one in answers]
    assert found == [(1, None), (1, None), (2, None), (1, "unknown_stream")]


def received(socket: ClientConnection, kind: str) -> Any:
    """The body of the next message of a type."""
    while True:
        got, _, body = str(socket.recv(120.0)).partition(" ")
        assert got != "ERROR", body
        if got == kind:
            return json.loads(body)


def test_a_client_that_comes_back_finds_its_program(client: Client, gateway: Gateway) -> None:
    generate = {"stream_id": 5, "prompt": "Hello. ", "controller": "dialogue-python"}
    given = {"stream_id": 5, "number": 1, "text": "a "}
    with connect(gateway.ws_url) as socket:
        socket.send("HELLO {}")
        session = received(socket, "WELCOME")["session"]
        socket.send("GENERATE " + json.dumps(generate))
        [entry] = received(socket, "TOKEN")
        assert (entry["messages"], entry["waiting"]) == (["turn 0"], 1)
        socket.send("INPUT " + json.dumps(given))
        assert received(socket, "MSG")["input"] == {"number": 1}
    messages: list[str] = []
    waits: list[int] = []
    with connect(gateway.ws_url) as socket:
        socket.send("HELLO " + json.dumps({"session": session}))
        assert received(socket, "WELCOME")["streams"] == [5]
        socket.send('ATTACH {"stream_id": 5, "received": 0}')
        assert received(socket, "MSG")["attached"] == 0
        for number, text in ((1, "a "), (2, "end")):
            socket.send("INPUT " + json.dumps({**given, "number": number, "text": text}))
        while "ended" not in messages:
            for entry in received(socket, "TOKEN"):
                messages += entry.get("messages", [])
                waits += [entry["waiting"]] if "waiting" in entry else []
    # The second input may arrive before the program waits for it.
    assert (messages, waits[0]) == (["turn 0", "turn 1", "ended"], 1)
