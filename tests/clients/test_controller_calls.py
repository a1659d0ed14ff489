"""Controllers through the client: modules, and the streams that they steer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from tokenbus.clients import AsyncClient, Client, ControllerError, RequestError, StoredModule
from tokenbus.clients.calls import Ended
from tokenbus.clients.request_options import stored_module, upload_call
from tokenbus.protocol.messages import Msg

from ..processes import Bus
from ..worlds.client_session import Bench
from .controller_command import PROMPT
from .wasm_guests import FAILS, FORKS, LOGS, SPLICES, guest

pytestmark = pytest.mark.anyio


def test_a_module_travels_as_an_attachment_and_its_answer_is_a_stored_module() -> None:
    bench = Bench()
    bench.welcome(encoding="msgpack")
    bench.sent()
    call = upload_call(b"\0asm\xff\xfe", "t", 5.0)
    bench.session.submit(call, bench.now)
    [frames] = bench.session.outgoing
    assert (frames[0], frames[2:]) == (b"UPLOAD", [b"\0asm\xff\xfe"])
    bench.receive("MSG", {"stream_id": call.number, "result": {"module": "ab", "size": 6}})
    answer, ended = bench.events(call)
    assert isinstance(answer, Msg)
    assert isinstance(ended, Ended)
    assert stored_module(answer) == StoredModule(module="ab", size=6)


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def test_modules_are_uploaded_tagged_listed_and_deleted(client: Client, tmp_path: Path) -> None:
    wasm = guest(mid="nop nop nop")
    file = tmp_path / "guest.wasm"
    file.write_bytes(wasm)
    stored = client.upload_controller(wasm, "nops")
    assert client.upload_controller(file) == stored
    assert (stored.tags, stored.size, stored.abi) == (["nops"], len(wasm), "native")
    assert client.tag_controller("nops", "x", "y").tags == ["nops", "x", "y"]
    assert client.delete_controller("x").module == stored.module
    assert stored.module in {m.module for m in client.controllers()}
    client.delete_controller(stored.module)
    assert stored.module not in {m.module for m in client.controllers()}
    with pytest.raises(RequestError, match="unknown controller 'nops'") as caught:
        client.generate(PROMPT, controller="nops").wait()
    assert caught.value.code == "unknown_controller"


async def test_the_asynchronous_client_does_the_same(steered: Bus) -> None:
    async with AsyncClient(steered.front) as client:
        stored = await client.upload_controller(LOGS + b"\0\2\1a", "async")
        assert (await client.tag_controller("async", "other")).tags == ["async", "other"]
        assert stored.module in [m.module for m in await client.controllers()]
        stream = client.generate(PROMPT, controller="async", max_tokens=3, ignore_eos=True)
        assert [s.logs for s in await stream.wait()] == ["round\n" * 3]
        assert (await client.delete_controller("async")).tags == ["async"]


def test_what_is_no_controller_is_refused_with_the_reason(client: Client) -> None:
    for wasm, says in (
        (b"#!/bin/sh", "not Wasm"),
        (bytes(wasmtime.wat2wasm("(module)")), "tokenbus_abi_v1"),
        (b"\0asm\1\0\0\0" + bytes(50_000_000), "50000008 bytes; the limit is 16777216"),
        (b"\0asm\1\0\0\0" + bytes(70_000_000), "the limit is 16777216"),
    ):
        with pytest.raises(RequestError, match=says):
            client.upload_controller(wasm)
    with pytest.raises(FileNotFoundError):
        client.upload_controller(Path("/nowhere.wasm"))


def test_logs_and_writes_come_with_the_tokens_that_they_belong_to(client: Client) -> None:
    name = client.upload_controller(LOGS).module
    stream = client.generate(PROMPT, controller=name, max_tokens=5, ignore_eos=True)
    entries = list(stream)
    assert [e.token is not None for e in entries] == [True] * 5
    assert [e.logs for e in entries] == ["round\n"] * 5
    assert all(len(e.storage) == 1 for e in entries)
    [sequence] = stream.sequences
    assert sequence.logs == "round\n" * 5
    assert [set(command) for command in sequence.storage] == [{"WriteVar"}] * 5


def test_a_controller_that_fails_is_an_error_with_its_own_words(client: Client) -> None:
    name = client.upload_controller(FAILS).module
    stream = client.generate(PROMPT, controller=name, max_tokens=5, ignore_eos=True)
    with pytest.raises(ControllerError, match="bad luck") as caught:
        stream.wait()
    assert caught.value.code == "controller_failed"
    [sequence] = stream.sequences
    assert (len(sequence.tokens), sequence.code) == (2, "controller_failed")


def test_a_loop_sees_the_sequence_as_it_is_with_its_entry(client: Client) -> None:
    name = client.upload_controller(SPLICES).module
    stream = client.generate(PROMPT, controller=name, max_tokens=8, ignore_eos=True)
    texts: list[str] = []
    for entry in stream:
        [sequence] = stream.sequences
        texts = [*texts[: len(texts) - entry.backtrack], entry.text or ""]
        assert sequence.texts == texts
        assert len(sequence.tokens) == entry.pos + 1
    client.delete_controller(name)


def test_the_loop_of_the_guide_prints_what_holds(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = Path(__file__).parents[2] / "docs" / "clients.md"
    [code] = re.findall(
        r"(?s)```python\n(for token in stream:\n    again.*?)```", guide.read_text()
    )
    assert len(code.splitlines()) == 3
    name = client.upload_controller(SPLICES).module
    free = client.generate(PROMPT, max_tokens=3, ignore_eos=True).text()
    stream = client.generate(PROMPT, controller=name, max_tokens=8, ignore_eos=True)
    exec(code, {"stream": stream})
    assert capsys.readouterr().out == f"{free}\n{stream.text()}"
    client.delete_controller(name)


async def test_an_asynchronous_loop_sees_the_same(steered: Bus) -> None:
    async with AsyncClient(steered.front) as client:
        name = (await client.upload_controller(SPLICES)).module
        stream = client.generate(PROMPT, controller=name, max_tokens=8, ignore_eos=True)
        async for entry in stream:
            assert len(stream.sequences[0].tokens) == entry.pos + 1
        await client.delete_controller(name)


def test_an_argument_without_a_controller_is_an_error(client: Client) -> None:
    arguments: list[Any] = ["text", {}, []]
    for argument in arguments:
        with pytest.raises(RequestError, match="without a controller") as caught:
            client.generate(PROMPT, controller_arg=argument)
        assert caught.value.path == "$.controller_arg"


def test_forks_are_a_tree_and_may_go_back_beyond_their_beginning(client: Client) -> None:
    name = client.upload_controller(FORKS).module
    free = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
    stream = client.generate(PROMPT, controller=name, max_tokens=8, ignore_eos=True)
    parent, fork = stream.wait()
    assert (parent.parent, fork.parent) == (None, 0)
    assert (parent.text, parent.tokens) == (free.text(), free.tokens())
    assert fork.tokens[:3] == [parent.tokens[0], 0x41, 0x42]
    assert len(fork.tokens) == len(fork.texts) == 8
    assert fork.texts[0] == parent.texts[0]
