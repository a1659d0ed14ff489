"""Controllers from the client's side: modules, trees of sequences, the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.clients import AsyncClient, Client, ControllerError, RequestError, StoredModule
from tokenbus.clients.calls import Ended
from tokenbus.clients.cli.module_files import FileFault, read_module
from tokenbus.clients.cli.own_system import broker_answers
from tokenbus.clients.request_options import stored_module, upload_call
from tokenbus.clients.results import Sequences
from tokenbus.clients.system.processes import started_by
from tokenbus.clients.system.run_dir import RunDir
from tokenbus.protocol.messages import Msg, Token
from tokenbus.protocol.settings import Settings

from ..processes import Bus, clean_environment, until
from .test_session import Bench

pytestmark = pytest.mark.anyio

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")
PROMPT = "def add(a, b):"


# --- trees of sequences ---------------------------------------------------------------------------


def entry(token: int | None, pos: int, seq: int = 0, **fields: Any) -> Token:
    """An entry whose token's text is its number in brackets."""
    text = {"text": f"[{token}]"} if token is not None else {}
    given = {"logprob": -1.0 if token is not None else None, "finish_reason": None} | text | fields
    return Token(token=token, stream_id=1, pos=pos, seq=seq, **given)


def collect(*entries: Token) -> Sequences:
    sequences = Sequences()
    for each in entries:
        sequences.add(each)
    return sequences


def test_a_fork_begins_with_what_its_parent_had_then() -> None:
    forked = collect(
        entry(1, 0),
        entry(2, 1),
        entry(None, 2, 1, parent=0),
        entry(3, 2),
        entry(4, 2, 1),
        entry(None, 3, 2, parent=1),
        entry(5, 3, 2),
    )
    assert [(s.seq, s.parent, s.tokens, s.text) for s in forked.listed()] == [
        (0, None, [1, 2, 3], "[1][2][3]"),
        (1, 0, [1, 2, 4], "[1][2][4]"),
        (2, 1, [1, 2, 4, 5], "[1][2][4][5]"),
    ]


def test_a_fork_may_take_back_what_it_had_from_its_parent() -> None:
    forked = collect(
        entry(1, 0),
        entry(2, 1),
        entry(3, 2),
        entry(None, 3, 1, parent=0),
        entry(9, 1, 1, backtrack=2),
        entry(4, 3),
    )
    assert [s.tokens for s in forked.listed()] == [[1, 2, 3, 4], [1, 9]]
    assert [s.texts for s in forked.listed()] == [["[1]", "[2]", "[3]", "[4]"], ["[1]", "[9]"]]


def test_a_fork_may_take_back_in_the_entry_that_tells_of_it() -> None:
    forked = collect(entry(1, 0), entry(2, 1), entry(9, 1, 1, parent=0, backtrack=1))
    assert [s.tokens for s in forked.listed()] == [[1, 2], [1, 9]]


def test_a_fork_before_the_first_token_knows_its_parent() -> None:
    forked = collect(entry(None, 0, 1, parent=0), entry(7, 0, 1), entry(8, 0))
    assert [(s.seq, s.parent, s.tokens) for s in forked.listed()] == [(0, None, [8]), (1, 0, [7])]


def test_logs_and_storage_are_each_sequence_s_own_and_are_not_taken_back() -> None:
    forked = collect(
        entry(1, 0, logs="a", storage=[{"WriteVar": 1}]),
        entry(None, 1, 1, parent=0),
        entry(None, 1, 1, logs="b"),
        entry(2, 0, backtrack=1, logs="c"),
    )
    assert [(s.logs, s.storage, s.tokens) for s in forked.listed()] == [
        ("ac", [{"WriteVar": 1}], [2]),
        ("b", [], [1]),
    ]


def test_text_that_was_held_back_belongs_to_the_last_token() -> None:
    [sequence] = collect(
        entry(1, 0, text=""), entry(None, 1, text="ä", finish_reason="stop")
    ).listed()
    assert sequence.texts == ["ä"]


@given(st.data())
def test_texts_and_tokens_stay_aligned_whatever_is_forked_and_taken_back(
    data: st.DataObject,
) -> None:
    wanted: dict[int, list[int]] = {0: []}
    sequences = Sequences()
    for number in range(data.draw(st.integers(0, 40))):
        seq = data.draw(st.sampled_from(sorted(wanted)))
        tokens = wanted[seq]
        if data.draw(st.integers(0, 3)) == 0:
            child = len(wanted)
            wanted[child] = list(tokens)
            sequences.add(entry(None, len(tokens), child, parent=seq))
            continue
        drop = data.draw(st.integers(0, len(tokens)))
        del tokens[len(tokens) - drop :]
        sequences.add(entry(number, len(tokens), seq, backtrack=drop))
        tokens.append(number)
    for sequence in sequences.listed():
        assert sequence.tokens == wanted[sequence.seq]
        assert sequence.texts == [f"[{t}]" for t in sequence.tokens]
        assert len(sequence.logprobs) == len(sequence.top_logprobs) == len(sequence.tokens)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("controller_failed", "ControllerError"),
        ("controller_timeout", "ControllerError"),
        ("deadlock", "ControllerError"),
        ("worker_lost", "UnavailableError"),
        (None, "ServiceError"),
    ],
)
def test_the_error_of_a_single_sequence_has_the_type_of_its_code(
    code: str | None, kind: str
) -> None:
    ended = entry(None, 0, finish_reason="error", error="it broke", code=code)
    failure = collect(entry(1, 0), ended).failure()
    assert type(failure).__name__ == kind
    assert failure is not None
    assert (failure.message, failure.code) == ("it broke", code or "internal")
    assert collect(entry(1, 0), entry(1, 0, 1), ended).failure() is None


# --- the calls ------------------------------------------------------------------------------------


def test_a_module_travels_as_an_attachment_and_its_answer_is_a_stored_module() -> None:
    bench = Bench()
    bench.welcome(encoding="msgpack")
    bench.sent()
    call = upload_call(b"\0asm\xff\xfe", "t", 5.0)
    bench.session.submit(call, bench.now)
    [frames] = bench.session.outgoing
    assert (frames[0], frames[2:]) == (b"UPLOAD", [b"\0asm\xff\xfe"])
    bench.hear("MSG", {"stream_id": call.number, "result": {"module": "ab", "size": 6}})
    answer, ended = bench.events(call)
    assert isinstance(answer, Msg)
    assert isinstance(ended, Ended)
    assert stored_module(answer) == StoredModule(module="ab", size=6)


# --- a system with controllers --------------------------------------------------------------------

GUEST = """(module
  (import "tokenbus" "log" (func $log (param i32 i32)))
  (import "tokenbus" "fail" (func $fail (param i32 i32)))
  (import "tokenbus" "seq_id" (func $seq (result i32)))
  (import "tokenbus" "var_set" (func $set (param i32 i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (global $round (mut i32) (i32.const 0))
  (data (i32.const 1024) "\\01\\00\\00\\00\\00\\08\\00\\00\\00\\10\\00\\00")
  (data (i32.const 512) "round\\0a----bad luck")
  (data (i32.const 600) "\\41\\00\\00\\00\\42\\00\\00\\00")
  (func (export "tokenbus_abi_v1") (result i32) (i32.const 1024))
  (func (export "tokenbus_grow") (param i32) (result i32) (i32.const 0))
  (func (export "tokenbus_init_prompt") (result i32) (i32.const 1))
  (func (export "tokenbus_post_process") (result i32) (i32.const 1))
  (func (export "tokenbus_pre_process") (result i32)
    (global.set $round (i32.add (global.get $round) (i32.const 1)))
    %(pre)s (i32.const 1))
  (func (export "tokenbus_mid_process") (result i32) %(mid)s (i32.const 1)))"""


def guest(pre: str = "", mid: str = "") -> bytes:
    """A controller that goes on and allows everything, but for what is given."""
    return bytes(wasmtime.wat2wasm(GUEST % {"pre": pre, "mid": mid}))


LOGS = guest(
    mid="""(call $log (i32.const 512) (i32.const 6))
    (drop (call $set (i32.const 512) (i32.const 5) (i32.const 516) (i32.const 2) (i32.const -1)
      (i32.const 0)))"""
)
FAILS = guest(
    mid="""(if (i32.eq (global.get $round) (i32.const 3))
      (then (call $fail (i32.const 522) (i32.const 8))))"""
)
FORKS = guest(
    # In round 4 two sequences are made of one; the second drops 2 of 3 tokens and appends A and B.
    pre="""(if (i32.eq (global.get $round) (i32.const 4)) (then
      (i32.store (i32.const 1056) (i32.const 2)) (return (i32.const 3))))""",
    mid="""(if (i32.and (call $seq) (i32.eq (global.get $round) (i32.const 4))) (then
      (global.set $round (i32.const 5))
      (i32.store (i32.const 1056) (i32.const 2)) (i32.store (i32.const 1060) (i32.const 600))
      (i32.store (i32.const 1064) (i32.const 2)) (return (i32.const 4))))""",
)


SPLICES = guest(
    # In round 4 the 3 tokens are dropped, and two others are appended, in one message.
    mid="""(if (i32.eq (global.get $round) (i32.const 4)) (then
      (i32.store (i32.const 1056) (i32.const 2)) (i32.store (i32.const 1060) (i32.const 600))
      (i32.store (i32.const 1064) (i32.const 3)) (return (i32.const 4))))"""
)


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def test_modules_are_uploaded_tagged_listed_and_deleted(client: Client, tmp_path: Path) -> None:
    before = {m.module for m in client.controllers()}
    wasm = guest(mid="nop nop nop")
    file = tmp_path / "guest.wasm"
    file.write_bytes(wasm)
    stored = client.upload_controller(wasm, "nops")
    assert client.upload_controller(file) == stored
    assert (stored.tags, stored.size, stored.abi) == (["nops"], len(wasm), "native")
    assert client.tag_controller("nops", "x", "y").tags == ["nops", "x", "y"]
    assert client.delete_controller("x").module == stored.module
    assert {m.module for m in client.controllers()} == before | {stored.module}
    client.delete_controller(stored.module)
    assert {m.module for m in client.controllers()} == before
    with pytest.raises(RequestError, match="no controller 'nops'") as caught:
        client.generate(PROMPT, controller="nops").wait()
    assert caught.value.code == "unknown_controller"


async def test_the_asynchronous_client_does_the_same(steered: Bus) -> None:
    async with AsyncClient(steered.front) as client:
        stored = await client.upload_controller(LOGS, "async")
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
    free = client.generate(PROMPT, max_tokens=3, ignore_eos=True).text
    stream = client.generate(PROMPT, controller=name, max_tokens=8, ignore_eos=True)
    exec(code, {"stream": stream})
    assert capsys.readouterr().out == f"{free}\n{stream.text}"
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
    assert (parent.text, parent.tokens) == (free.text, free.tokens)
    assert fork.tokens[:3] == [parent.tokens[0], 0x41, 0x42]
    assert len(fork.tokens) == len(fork.texts) == 8
    assert fork.texts[0] == parent.texts[0]


# --- the command line -----------------------------------------------------------------------------


def tokenbus(bus: Bus | None, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    front = {"front": bus.front} if bus is not None else {}
    return subprocess.run(
        [TOKENBUS, "controller", *arguments],
        env=clean_environment(**front) | more,
        cwd="/tmp",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_module_is_uploaded_named_and_run_from_the_command_line(
    steered: Bus, tmp_path: Path
) -> None:
    file = tmp_path / "logs.wasm"
    file.write_bytes(LOGS + b"\0\2\1x")  # An empty custom section: another module.
    done = tokenbus(steered, "upload", str(file), "--tag", "cli")
    module = done.stdout.split()[0]
    assert (done.returncode, done.stderr, len(module)) == (0, "", 64)
    assert "cli more" in tokenbus(steered, "tag", "cli", "more").stdout
    listed = json.loads(tokenbus(steered, "list", "--json").stdout)
    assert ["cli", "more"] in [m["tags"] for m in listed]
    assert module in tokenbus(steered, "list").stdout
    for program in (str(file), "cli", module):
        run = tokenbus(steered, "run", program, "--prompt", PROMPT, "--max-tokens", "4", "--json")
        [sequence] = json.loads(run.stdout)["sequences"]
        assert run.stderr == ""
        assert set(sequence) == {
            "seq", "parent", "text", "tokens", "logs", "storage", "finish_reason", "error",
        }  # fmt: skip
        assert sequence["logs"] == "round\n" * 4
        assert (sequence["finish_reason"], len(sequence["tokens"])) == ("length", 4)
    shown = tokenbus(steered, "run", module[:8], "--prompt", PROMPT, "--max-tokens", "4")
    assert shown.stdout == f"{sequence['text']}\n"
    assert shown.stderr == "--- log of 0\n" + "round\n" * 4
    done = tokenbus(steered, "delete", "more")
    assert done.stdout == f"deleted the tag more; the module {module[:12]} stays\n"
    tokenbus(steered, "tag", "cli", "more")
    done = tokenbus(steered, "delete", module[:20])
    assert done.stdout == f"deleted the module {module[:12]} and its tags cli, more\n"
    assert tokenbus(steered, "run", "cli").returncode == 4


def test_an_upload_may_get_several_tags(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "tagged.wasm"
    file.write_bytes(LOGS + b"\0\2\1y")
    done = tokenbus(steered, "upload", str(file), "--tag", "race", "--tag", "race2", "--json")
    stored = json.loads(done.stdout)
    assert stored["tags"] == ["race", "race2"]
    assert json.loads(tokenbus(steered, "delete", stored["module"], "--json").stdout) == stored


def test_a_run_leaves_its_file_s_module_only_where_it_was_before(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "left.wasm"
    file.write_bytes(LOGS + b"\0\2\1z")
    before = client.controllers()

    def run(*more: str) -> int:
        return tokenbus(steered, "run", str(file), "--max-tokens", "2", *more).returncode

    assert (run(), client.controllers()) == (0, before)
    assert (run("--model", "gpt-9"), client.controllers()) == (4, before)
    stored = client.upload_controller(file)
    assert (run(), client.controllers()) == (0, [stored, *before])
    client.delete_controller(stored.module)


def start_long_run(bus: Bus, file: Path) -> subprocess.Popen[str]:
    """A run that has begun and has not ended."""
    process = subprocess.Popen(
        [TOKENBUS, "controller", "run", str(file), "--max-tokens", "1000", "--set",
         "ignore_eos=true", "--prompt", PROMPT],
        env=clean_environment(front=bus.front),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_takes_its_module_along(
    steered: Bus, client: Client, tmp_path: Path, wish: signal.Signals
) -> None:
    file = tmp_path / "told.wasm"
    file.write_bytes(guest() + b"\0\2\1t")
    before = client.controllers()
    process = start_long_run(steered, file)
    assert len(client.controllers()) == len(before) + 1
    process.send_signal(wish)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors.strip()) == (130, "")
    assert client.controllers() == before


def test_of_several_runs_of_a_file_the_last_one_drops_its_module(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "twice.wasm"
    file.write_bytes(guest() + b"\0\2\1u")
    before = client.controllers()
    first, second = (start_long_run(steered, file) for _ in range(2))
    [module] = [m for m in client.controllers() if m not in before]
    assert len(module.tags) == 2
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=300)
    [module] = [m for m in client.controllers() if m not in before]
    assert len(module.tags) == 1
    kept = client.tag_controller(module.module, "kept")
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=300)
    [module] = [m for m in client.controllers() if m not in before]
    assert (module.module, module.tags) == (kept.module, ["kept"])
    client.delete_controller(module.module)


def test_what_is_taken_back_is_marked_and_nothing_is_printed_twice(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "splices.wasm"
    file.write_bytes(SPLICES)
    client.upload_controller(file, "splices")
    free = client.generate(PROMPT, max_tokens=3, ignore_eos=True).text
    text = client.generate(PROMPT, controller="splices", max_tokens=8, ignore_eos=True).text
    shown = f"{free}\n--- 3 tokens taken back\n{text}\n"
    more = ("--max-tokens", "8", "--set", "ignore_eos=true")
    assert text[:2] == "ab"
    run = tokenbus(steered, "run", str(file), "--prompt", PROMPT, *more)
    assert (run.stdout, run.stderr) == (shown, "")
    for words, typed in (
        (["generate", PROMPT, *more, "--set", "controller=splices"], ""),
        (["client"], f"{PROMPT} max_tokens=8 ignore_eos=true controller=splices\n"),
    ):
        done = subprocess.run(
            [TOKENBUS, *words],
            env=clean_environment(front=steered.front),
            input=typed,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (done.stdout.removeprefix(PROMPT), done.stderr) == (shown, "")
    client.delete_controller("splices")


def test_a_run_takes_the_sampling_flags_of_generate(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "free.wasm"
    file.write_bytes(guest())

    def text(*more: str) -> str:
        given = ("--prompt", PROMPT, "--max-tokens", "12", "--set", "ignore_eos=true")
        run = tokenbus(steered, "run", str(file), *given, *more)
        assert run.returncode == 0, run.stderr
        return run.stdout

    hot = ("--temperature", "1.5", "--top-p", "0.95")
    assert text(*hot, "--seed", "3") == text(*hot, "--seed", "3")
    assert text(*hot, "--seed", "3") != text(*hot, "--seed", "4")
    assert text("--set", "temperature=1.5", "--set", "seed=3") != text()


def test_several_sequences_are_shown_one_after_the_other(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "forks.wasm"
    file.write_bytes(FORKS)
    run = tokenbus(steered, "run", str(file), "--prompt", PROMPT, "--max-tokens", "6")
    assert (run.returncode, run.stderr) == (0, "")
    assert "--- sequence 0 (length)\n" in run.stdout
    assert "--- sequence 1, fork of 0 (length)\n" in run.stdout


def test_a_failure_is_one_line_and_an_exit_code_and_the_json_is_whole(
    steered: Bus, tmp_path: Path
) -> None:
    file = tmp_path / "fails.wasm"
    file.write_bytes(FAILS)
    run = tokenbus(steered, "run", str(file), "--json")
    [sequence] = json.loads(run.stdout)["sequences"]
    assert "bad luck" in sequence["error"]
    assert (run.returncode, len(run.stderr.splitlines())) == (4, 1)
    assert "bad luck" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "no-such-tag"], 4, "no controller 'no-such-tag'"),
        (["run", "/nowhere/x.wasm"], 2, "/nowhere/x.wasm"),
        (["upload", "/nowhere/x.wasm"], 2, "No such file"),
        (["upload", "/etc/passwd"], 4, "not Wasm"),
        (["delete", "no-such-tag"], 4, "no-such-tag"),
        (["run", "x", "--max-tokens", "0"], 2, "--max-tokens: expected int >= 1, not '0'"),
        (["run", "x", "--max-tokens", "abc"], 2, "--max-tokens: expected int, not 'abc'"),
        (["run", "x", "--timeout", "-1"], 2, "--timeout: expected float > 0.0, not '-1'"),
        (["run", "x", "--temperature", "nan"], 2, "--temperature: expected"),
        (["run", "x", "--set", "colour=red"], 4, "'colour'"),
        (["run", "x", "--set", "controller=y"], 4, "--set controller"),
        (["run", "chioce"], 4, "built in: choice"),
        (["run", "my:Class"], 4, "served by `tokenbus controller serve`, and none of that name"),
        (["run", "my.py"], 2, "tokenbus controller serve my:NAME"),
        (["upload", "my.py"], 2, "tokenbus controller serve my:NAME"),
        (["run", "./nowhere"], 2, "nowhere"),
        (["tag", "x"], 2, "TAG"),
        (["list", "--front", "tcp://127.0.0.1:9"], 3, "tcp://127.0.0.1:9"),
        ([], 2, "ACTION"),
    ],
)
def test_what_is_wrong_is_told_with_an_exit_code(
    steered: Bus, arguments: list[str], code: int, says: str
) -> None:
    done = tokenbus(steered, *arguments)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_c_is_compiled_against_the_sdk_and_its_errors_are_the_compiler_s(
    steered: Bus, tmp_path: Path
) -> None:
    pytest.importorskip("ziglang")
    good, bad = tmp_path / "good.c", tmp_path / "bad.c"
    good.write_text(
        '#include "tokenbus.h"\n'
        "void tb_init_prompt(const uint32_t *p, uint32_t n, const char *arg, uint32_t len) {\n"
        '  (void)p; (void)len; tb_log("%s, %u", arg, n > 0);\n}\n'
    )
    bad.write_text("int x = ;\n")
    run = tokenbus(steered, "run", str(good), "--arg", "hello", "--max-tokens", "2", "--json")
    [sequence] = json.loads(run.stdout)["sequences"]
    assert sequence["logs"] == "hello, 1"
    run = tokenbus(steered, "run", str(bad))
    assert (run.returncode, run.stdout) == (2, "")
    assert "expected expression" in run.stderr


def test_a_name_without_a_suffix_or_a_slash_is_no_file_s(steered: Bus, tmp_path: Path) -> None:
    (tmp_path / "named").write_bytes(LOGS)
    (tmp_path / "named.wasm").write_bytes(LOGS)

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [TOKENBUS, "controller", "run", program, "--max-tokens", "2"],
            env=clean_environment(front=steered.front),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert run("./named").returncode == run("named.wasm").returncode == 0
    assert "no controller 'named'" in run("named").stderr


@pytest.mark.process
def test_a_slip_in_the_name_of_a_call_in_c_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    file = tmp_path / "slip.c"
    for wrong, says in (
        ("tb_init_promt", "unknown call tb_init_promt; did you mean tb_init_prompt?"),
        ("tb_xyz", "the calls are tb_init_prompt, tb_pre_process"),
    ):
        file.write_text(f'#include "tokenbus.h"\nvoid {wrong}(void) {{}}\n')
        for _ in range(2):  # The second time the compiler has it all in its cache.
            with pytest.raises(FileFault, match=re.escape(says)):
                read_module(file)


@pytest.mark.process
def test_warnings_of_c_that_compiles_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ziglang")
    file = tmp_path / "warned.c"
    file.write_text(
        '#include "tokenbus.h"\n'
        "int own(void) { return 1; }\n"
        "tb_answer tb_pre_process(void) { int unused = own(); return tb_go_on(); }\n"
    )
    for _ in range(2):
        assert read_module(file)[:4] == b"\0asm"
        shown = capfd.readouterr().err
        assert "unused variable 'unused'" in shown
        assert "prototype" not in shown
        assert "declare 'static'" not in shown
        assert "generated" not in shown


@pytest.mark.process
def test_serve_says_that_it_waits_where_no_broker_is(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [TOKENBUS, "controller", "serve", "tokenbus_example:None", "--run-dir", str(tmp_path)],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate(timeout=300)
    first, second = errors.splitlines()
    assert first == (
        f"tokenbus: waiting for a broker at ipc://{tmp_path}/back.sock; is a system running with "
        f"--run-dir {tmp_path}?"
    )
    assert (process.returncode, "tokenbus_example" in second) == (2, True)


# --- a system for one run -------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder for what the command keeps while it runs."""
    if broker_answers(Settings().front):
        pytest.skip("a system runs at the default address, and would be used")
    path = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.process
def test_without_a_system_one_is_started_for_the_run_and_ended(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "logs.wasm"
    file.write_bytes(LOGS)
    run = tokenbus(
        None, "run", str(file), "--prompt", PROMPT, "--max-tokens", "4", "--json",
        TMPDIR=str(folder),
    )  # fmt: skip
    [sequence] = json.loads(run.stdout)["sequences"]
    assert (sequence["logs"], run.returncode) == ("round\n" * 4, 0)
    assert "starting one with the model embedded" in run.stderr
    assert not list(folder.glob("tokenbus-run-*"))


@pytest.mark.process
@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_end_ends_its_system(folder: Path, wish: signal.Signals) -> None:
    process = subprocess.Popen(
        [TOKENBUS, "controller", "run", "choice", "--arg", '["a"]'],
        env=clean_environment() | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def runs() -> bool:
        return any(started_by(RunDir(path)) for path in folder.glob("tokenbus-run-*"))

    until(runs, 120.0, "its system is being started")
    [path] = folder.glob("tokenbus-run-*")
    process.send_signal(wish)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert started_by(RunDir(path)) == []
    assert not path.exists()


@pytest.mark.process
def test_a_system_that_cannot_start_is_told_with_its_reason(folder: Path) -> None:
    done = tokenbus(None, "run", "x", "--model", "/nowhere", TMPDIR=str(folder))
    assert done.returncode == 3
    assert "/nowhere" in done.stderr
    assert not list(folder.glob("tokenbus-run-*"))


@pytest.mark.process
def test_a_named_system_that_does_not_answer_is_an_error(folder: Path) -> None:
    done = tokenbus(None, "run", "x", "--front", "tcp://127.0.0.1:9", TMPDIR=str(folder))
    assert done.returncode == 3
    assert "tcp://127.0.0.1:9" in done.stderr
    assert os.listdir(folder) == []
