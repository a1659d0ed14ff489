"""AICI's REST interface, in its earlier and its later form, has all fields that AICI's clients
read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct
from tokenbus.clients import AsyncStream, Client
from tokenbus.clients.gateway.aici.completions import AiciCompletion
from tokenbus.clients.gateway.aici.modules import TagInfo, Uploaded
from tokenbus.clients.gateway.aici.runs import RunPart, RunRequest
from tokenbus.clients.gateway.aici.streams import BACKTRACK, Fork, Usage
from tokenbus.clients.gateway.app import build
from tokenbus.protocol.messages import Token
from tokenbus.protocol.settings import Settings

from ...processes import Bus, Gateway, until
from ...workers.controller.wasm.aici_guests import puppet

PROMPT = "def add("
EARLIER = {"model": "", "prompt": PROMPT, "n": 1, "stream": True, "temperature": 0.0}
"""Fields that clients of the earlier form always send."""
FORM = pytest.mark.parametrize("path", ["controllers", "aici_modules"])


@dataclass
class Read:
    """All values that a client has read from the events of a run. The keys of ``texts``, ``logs``,
    ``ends`` and ``errors`` are fork indices."""

    head: dict[str, Any] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    usages: list[dict[str, int]] = field(default_factory=list)
    events: int = 0

    def add(self, fork: dict[str, Any]) -> None:
        """Reads all fields of a fork without checking that they exist, as AICI's clients did."""
        index = fork["index"]
        self.texts[index] = self.texts.get(index, "") + fork["text"]
        self.logs[index] = self.logs.get(index, "") + fork["logs"]
        for command in fork["storage"]:
            write = command["WriteVar"]
            value = bytes.fromhex(write["value"]).decode()
            before = self.variables.get(write["name"], "") if write["op"] == "Append" else ""
            self.variables[write["name"]] = before + value
        if fork["error"]:
            self.errors[index] = fork["error"]
        if fork["finish_reason"] is not None:
            assert index not in self.ends
            self.ends[index] = fork["finish_reason"]


class AiciClient:
    """Sends requests and reads answers in the same way as AICI's own client."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0)

    def upload(self, wasm: bytes, path: str = "controllers") -> dict[str, Any]:
        response = self._http.post(f"/v1/{path}", content=wasm)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def tags(self, path: str = "controllers") -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._http.get(f"/v1/{path}/tags").json()["tags"]
        return answer

    def tag(self, module: str, tags: Any, path: str = "controllers") -> httpx.Response:
        return self._http.post(f"/v1/{path}/tags", json={"module_id": module, "tags": tags})

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def run(self, script: Any, **body: Any) -> Read:
        """Runs a controller in the later form, ``/v1/run``."""
        given = {"controller": "puppet", "controller_arg": script, "max_tokens": 6, **body}
        first, *rest = self._events("/v1/run", given)
        assert set(first) == {"id", "object", "created", "model"}
        assert first["object"] == "initial-run"
        read = Read(first)
        for run in rest:
            assert set(run) == {"object", "forks", "usage"}
            assert run["object"] == "run"
            assert run["forks"]
            for fork in run["forks"]:
                read.add(fork)
            read.usages.append(run["usage"])
        return read

    def completion(self, script: Any, **body: Any) -> Read:
        """Runs a controller in the earlier form, ``/v1/completions``."""
        given = {"aici_module": "puppet", "aici_arg": script, "max_tokens": 6, **EARLIER, **body}
        read = Read()
        for chunk in self._events("/v1/completions", given):
            read.head = {name: chunk[name] for name in ("id", "object", "created", "model")}
            for choice in chunk["choices"]:
                read.add(choice)
            read.usages.append(chunk["usage"])
        return read

    def _events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        with self._http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def close(self) -> None:
        self._http.close()


@pytest.fixture
def aici(gateway: Gateway) -> Iterator[AiciClient]:
    """An ``AiciClient`` of a gateway that has a compiled AICI module under the tag ``puppet``."""
    client = AiciClient(gateway.url)
    module = client.upload(puppet())["module_id"]
    assert client.tag(module, ["puppet"]).status_code == 200
    yield client
    client.close()


# --- modules --------------------------------------------------------------------------------------


@FORM
def test_an_upload_is_answered_with_its_id_its_sizes_and_its_time(
    aici: AiciClient, steered: Bus, path: str
) -> None:
    answer = aici.upload(puppet(), path)
    assert set(answer) == {"module_id", "wasm_size", "compiled_size", "time"}
    assert answer["module_id"] == hashlib.sha256(puppet()).hexdigest()
    assert answer["wasm_size"] == len(puppet())
    [form] = steered.folder.glob(f"**/compiled/{answer['module_id']}-*")
    assert 0 <= form.stat().st_size - answer["compiled_size"] < 100
    assert answer["time"] >= 0


@pytest.mark.parametrize("kind", ["application/wasm", "application/json", "text/plain", None])
def test_a_module_may_have_any_content_type(gateway: Gateway, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = httpx.post(
        f"{gateway.url}/v1/controllers", content=puppet(), headers=headers, timeout=300
    )
    assert response.status_code == 200


@FORM
def test_tags_say_of_their_module_what_there_is_to_say(aici: AiciClient, path: str) -> None:
    began = int(time.time())
    module = aici.upload(puppet(), path)
    response = aici.tag(module["module_id"], [f"{path}-one", f"{path}-two"], path)
    assert response.status_code == 200
    assert [tag["tag"] for tag in response.json()["tags"]] == [f"{path}-one", f"{path}-two"]
    listed = {tag["tag"]: tag for tag in aici.tags(path)}
    for tag in response.json()["tags"]:
        assert listed[tag["tag"]] == tag
        assert began <= tag.pop("updated_at") <= time.time()
        assert tag == {
            "tag": tag["tag"],
            "module_id": module["module_id"],
            "updated_by": "localhost",
            "wasm_size": module["wasm_size"],
            "compiled_size": module["compiled_size"],
        }


def test_a_tag_may_be_given_alone_and_name_a_module_too(aici: AiciClient) -> None:
    assert aici.tag("puppet", "alone").json()["tags"][0]["tag"] == "alone"
    assert aici.run("", controller="alone").ends == {0: "length"}


# --- the later form -------------------------------------------------------------------------------


def test_a_run_is_read_to_its_end(aici: AiciClient, steered: Bus) -> None:
    read = aici.run("mid log hello", prompt=PROMPT)
    with steered.client() as client:
        free = client.generate(PROMPT, max_tokens=6, ignore_eos=True).text()
        model = client.model_info().name
    assert read.head["model"] == model
    assert read.head["id"].startswith("run-")
    assert abs(read.head["created"] - time.time()) < 600
    assert (read.texts, read.logs, read.ends) == ({0: free}, {0: "hello\n"}, {0: "length"})
    assert not read.errors


def test_the_cost_is_what_was_computed_and_twice_what_was_sampled(
    aici: AiciClient, steered: Bus
) -> None:
    read = aici.run("", prompt=PROMPT)
    with steered.client() as client:
        [sequence] = client.generate(PROMPT, max_tokens=1).wait()
    for sampled, usage in enumerate(read.usages, 1):
        computed = sequence.prompt_tokens + sampled - 1
        assert usage == {
            "sampled_tokens": sampled,
            "ff_tokens": computed,
            "cost": 2 * sampled + computed,
        }


def test_forks_write_and_end_each_for_itself(aici: AiciClient) -> None:
    write = {"WriteVar": {"name": "a", "value": b"yes".hex(), "op": "Append"}}
    read = aici.run(
        "\n".join(
            [
                'mid = {"SampleWithBias":{}}',
                'pre = {"attention_masks":[[],[]]}',
                "mid seq",
                'mid = {"SampleWithBias":{}}',
                f"pre storage {json.dumps(write)}",
                'pre only 1 = {"attention_masks":[]}',
            ]
        ),
        prompt=PROMPT,
        max_tokens=4,
    )
    assert read.variables == {"a": "yesyes"}
    assert [logs.splitlines()[0] for _, logs in sorted(read.logs.items())] == ["0", "1"]
    assert read.ends == {0: "length", 1: "aici-stop"}
    assert read.texts[0].startswith(read.texts[1]), "a fork also has its parent's text"
    assert read.texts[1]
    assert read.usages[-1]["sampled_tokens"] == 5


def test_what_a_splice_takes_back_is_marked(aici: AiciClient) -> None:
    read = aici.run(
        "\n".join(
            [
                'mid = {"SampleWithBias":{}}',
                'mid = {"Splice":{"backtrack":2,"ff_tokens":[65,66]}}',
                'mid = {"Splice":{"backtrack":1,"ff_tokens":[67]}}',
            ]
        ),
        prompt=PROMPT,
    )
    before, again = read.texts[0].split(BACKTRACK)
    assert before
    assert again
    # One sampled token is dropped, 3 tokens are appended, and then 3 tokens are sampled.
    assert read.usages[-1]["sampled_tokens"] == 4


def test_an_argument_that_is_no_text_is_given_as_json(aici: AiciClient) -> None:
    read = aici.run(["yes", "no"], controller="choice", prompt=PROMPT)
    assert read.texts[0] in ("yes", "no")
    assert not read.errors


def test_without_a_prompt_the_controller_begins(aici: AiciClient) -> None:
    for body in ({}, {"prompt": ""}, {"prompt": None}):
        assert aici.run("", **body).ends == {0: "length"}


def test_a_run_without_a_controller_continues_its_argument(aici: AiciClient) -> None:
    read = aici.run(PROMPT, controller="none", temperature=None, top_k=-1)
    assert read.texts == aici.run("", prompt=PROMPT).texts


def test_a_builtin_constraint_is_a_controller_too(aici: AiciClient) -> None:
    read = aici.run("[0-9]{3}", controller="regex", prompt=PROMPT)
    assert len(read.texts[0]) == 3
    assert read.texts[0].isdecimal()
    assert read.ends == {0: "eos"}


@pytest.mark.parametrize("call", ["create", "mid"])
def test_what_a_controller_does_wrong_is_the_error_of_its_fork(aici: AiciClient, call: str) -> None:
    read = aici.run(f"{call} log bad luck\n{call} stop")
    assert read.ends == {0: "fail"}
    assert "bad luck" in read.errors[0]


def test_so_is_a_limit_that_it_exceeds(aici: AiciClient) -> None:
    read = aici.run("mid loop")
    assert read.ends == {0: "fail"}
    assert "mid_process" in read.errors[0]


def test_a_deadlock_has_a_word_of_its_own(aici: AiciClient) -> None:
    read = aici.run("\n".join(['pre = {"attention_masks":[[]],"suspend":true}'] * 40))
    assert read.ends == {0: "deadlock"}
    assert read.errors[0]


def test_suspend_skips_a_round(aici: AiciClient) -> None:
    read = aici.run('pre = {"attention_masks":[[]],"suspend":true}')
    assert read.ends == {0: "length"}


def test_a_client_that_leaves_ends_its_run(
    gateway: Gateway, aici: AiciClient, steered: Bus
) -> None:
    body = {"controller": "puppet", "controller_arg": "", "prompt": PROMPT}
    with steered.client() as client:
        with httpx.stream("POST", f"{gateway.url}/v1/run", json=body, timeout=300.0) as response:
            lines = (line for line in response.iter_lines() if line)
            assert "initial-run" in next(lines)
            assert '"run"' in next(lines)
        until(lambda: not _live(client), 300.0, "the end of a run whose client has disconnected")


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/run", "/v1/completions"])
async def test_a_client_that_leaves_before_the_first_event_ends_its_run(
    steered: Bus, aici: AiciClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = AsyncStream.close
    closed: list[AsyncStream] = []

    def closing(stream: AsyncStream) -> None:
        closed.append(stream)
        close(stream)

    monkeypatch.setattr(AsyncStream, "close", closing)
    asked = {"controller": "puppet"} if path == "/v1/run" else {"aici_module": "puppet", **EARLIER}
    body = json.dumps({"prompt": PROMPT, "max_tokens": 900} | asked).encode()
    messages = [{"type": "http.request", "body": body}]
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message["status"] == 200
        left.set()
        await asyncio.Event().wait()

    app = build(Settings(front=steered.front), None)
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
        assert closed
        with steered.client() as client:
            until(lambda: not _live(client), 300.0, "the end of a run whose client has left")


def _live(client: Client) -> list[str]:
    return [stream.controller for stream in client.status(streams=True).live if stream.controller]


def test_the_first_minute_of_the_guide(aici: AiciClient) -> None:
    guide = Path(__file__).parents[3] / "docs" / "aici.md"
    [body] = re.findall(r"/v1/run .*\\\n  -d '(.*\"regex\".*)'", guide.read_text())
    read = aici.run(**{"script": "", **json.loads(body)})
    assert re.fullmatch("[0-9]{3}", read.texts[0])
    assert read.ends == {0: "eos"}


@pytest.mark.parametrize("kind", [RunRequest, RunPart, Fork, AiciCompletion, TagInfo, Uploaded])
def test_every_field_is_in_the_guide(kind: type[Struct]) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "aici.md").read_text()
    assert [name for name in kind.__struct_fields__ if name not in guide] == []


# --- the earlier form -----------------------------------------------------------------------------


def test_both_forms_are_one_run(aici: AiciClient) -> None:
    for script in (
        "mid log hello",
        'mid storage {"WriteVar":{"name":"a","value":"01","op":"Set"}}',
        'pre = {"attention_masks":[[],[]]}',
        "mid log bad luck\nmid stop",
    ):
        earlier, later = aici.completion(script, ignore_eos=True), aici.run(script, prompt=PROMPT)
        for name in ("texts", "logs", "variables", "ends", "errors"):
            assert getattr(earlier, name) == getattr(later, name)
        assert earlier.usages == [
            {
                "completion_tokens": usage["sampled_tokens"],
                "prompt_tokens": usage["ff_tokens"],
                "total_tokens": usage["sampled_tokens"] + usage["ff_tokens"],
                "fuel_tokens": usage["cost"],
            }
            for usage in later.usages
        ]


def test_a_chunk_has_what_completions_have(aici: AiciClient, steered: Bus) -> None:
    read = aici.completion("")
    with steered.client() as client:
        assert read.head["model"] == client.model_info().name
    assert read.head["object"] == "text_completion"
    assert read.head["id"].startswith("cmpl-")
    assert abs(read.head["created"] - time.time()) < 600


def test_without_a_module_logs_and_storage_are_there_too(aici: AiciClient) -> None:
    read = aici.completion(None, aici_module=None)
    assert read.logs == {0: ""}
    assert read.texts == aici.completion("").texts


@pytest.mark.parametrize("module", ["puppet", None])
def test_several_sequences_have_choices_of_their_own(aici: AiciClient, module: str | None) -> None:
    read = aici.completion("", aici_module=module, n=3, temperature=1.5, seed=3)
    assert sorted(read.ends) == sorted(read.texts) == sorted(read.logs) == [0, 1, 2]
    assert len(set(read.texts.values())) > 1


def test_a_completion_that_is_not_streamed_has_the_same_choices(aici: AiciClient) -> None:
    script = "mid log hello"
    body = {**EARLIER, "stream": False, "aici_module": "puppet", "aici_arg": script}
    for prompt in (PROMPT, [PROMPT]):
        answer = aici.post("/v1/completions", **{**body, "prompt": prompt, "max_tokens": 6}).json()
        read = Read()
        for choice in answer["choices"]:
            read.add(choice)
        streamed = aici.completion(script)
        assert (read.texts, read.logs, read.ends) == (
            streamed.texts,
            streamed.logs,
            streamed.ends,
        )
        assert answer["usage"] == streamed.usages[-1]


def test_a_failure_of_a_controller_is_a_choice_where_nothing_is_streamed(aici: AiciClient) -> None:
    body = {**EARLIER, "stream": False, "aici_module": "puppet", "aici_arg": "mid log x\nmid stop"}
    [choice] = aici.post("/v1/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "fail"
    assert choice["logs"] == "x\n"
    assert choice["error"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("run", {"controller": "nobody"}, 404, "unknown controller 'nobody'"),
        ("run", {"controller": "puppet", "model": "nobody"}, 404, "nobody"),
        ("run", {"controller": "puppet", "promt": ""}, 400, "unknown field 'promt'"),
        ("run", {"controller_arg": ""}, 400, "'controller' is missing"),
        ("run", {"controller": "puppet", "max_tokens": 0}, 400, "max_tokens"),
        ("run", {"controller": "puppet", "temperature": -1}, 400, "temperature"),
        ("completions", {**EARLIER, "aici_module": "nobody"}, 404, "unknown controller 'nobody'"),
        ("completions", {**EARLIER, "aici_module": "puppet", "echo": True}, 400, "'echo'"),
        ("completions", {**EARLIER, "aici_module": "puppet", "prompt": [1, "a"]}, 400, "prompt"),
        ("controllers/tags", {"module_id": "nobody", "tags": ["a"]}, 404, "unknown module 'nob"),
        ("aici_modules/tags", {"module_id": "puppet", "tags": [""]}, 400, "tags[0]"),
        ("controllers/tags", {"module_id": "puppet", "tags": ["regex"]}, 400, "built-in"),
    ],
)
def test_a_refusal_says_why(
    aici: AiciClient, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    response = aici.post(f"/v1/{path}", **body)
    assert response.status_code == status, response.text
    assert says in response.json()["message"]


def test_what_is_no_module_is_refused(gateway: Gateway) -> None:
    for content, status in ((b"", 400), (b"#!/bin/sh", 400), (bytes(16 * 1024**2 + 1), 413)):
        response = httpx.post(f"{gateway.url}/v1/controllers", content=content, timeout=300.0)
        assert response.status_code == status, response.text
        assert response.json()["message"]


def test_an_upload_of_200_megabytes_is_refused_and_not_kept(gateway: Gateway) -> None:
    part = bytes(1024**2)
    before = _resident(gateway)
    response = httpx.post(
        f"{gateway.url}/v1/aici_modules", content=(part for _ in range(200)), timeout=120.0
    )
    assert response.status_code == 413
    assert "at most 16777216 are allowed" in response.json()["message"]
    assert _resident(gateway) - before < 64 * 1024**2


def _resident(gateway: Gateway) -> int:
    with open(f"/proc/{gateway.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_body_must_be_json_and_say_so(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/run"
    wrong = httpx.post(url, content=b"{", headers={"content-type": "application/json"}, timeout=300)
    assert wrong.status_code == 400
    assert "not valid JSON" in wrong.json()["message"]
    kind = httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}, timeout=300)
    assert kind.status_code == 415
    assert httpx.get(url, timeout=300).status_code == 405


# --- usage ----------------------------------------------------------------------------------------


def entry(pos: int, token: int | None = 1, logprob: float | None = -1.0, **more: Any) -> Token:
    fields: dict[str, Any] = {"stream_id": 0, "finish_reason": None, **more}
    return Token(token=token, logprob=logprob, pos=pos, **fields)


def test_appended_tokens_are_counted_when_they_are_computed() -> None:
    usage = Usage()
    usage.add(entry(0, logprob=None, prompt_tokens=10))
    usage.add(entry(1, logprob=None))
    assert (usage.sampled, usage.processed) == (0, 10)
    usage.add(entry(2))
    assert (usage.sampled, usage.processed, usage.cost) == (1, 12, 14)
    usage.add(entry(0, None, None, seq=1, parent=0))
    usage.add(entry(3, seq=1))
    assert (usage.sampled, usage.processed) == (2, 13)
    # Two tokens are dropped, one is appended, and the next token is sampled.
    usage.add(entry(1, logprob=None, backtrack=2))
    usage.add(entry(2))
    assert (usage.sampled, usage.processed) == (3, 14)


SCRIPTS = {
    "pyctrl": """
import pyaici.server as aici

async def main():
    prompt = await aici.GetPrompt()
    await aici.FixedTokens("one ")
    number = await aici.gen_text(regex="[0-9]{2}", store_var="n")
    print(len(prompt) == aici.get_prompt_len(), number)

aici.start(main())
""",
    "jsctrl": """
async function main() {
  const prompt = await getPrompt();
  await $`one `;
  const number = await gen({ regex: /[0-9]{2}/, storeVar: "n" });
  console.log(prompt.length === getPromptLen(), number);
}
start(main);
""",
}


@pytest.mark.parametrize("controller", SCRIPTS)
def test_aicis_command_line_runs_a_script(aici: AiciClient, controller: str) -> None:
    """Sends and reads the same fields as the command ``aici run FILE``."""
    body = {
        "controller": f"gh:microsoft/aici/{controller}",
        "controller_arg": SCRIPTS[controller],
        "max_tokens": 60,
        "temperature": 0.0,
    }
    head, *parts = aici._events("/v1/run", body)
    assert "forks" not in head
    usage, read = {}, Read()
    for part in parts:
        usage = part["usage"]
        for fork in part["forks"]:
            read.add(fork)
    assert (usage["ff_tokens"] > 0, usage["sampled_tokens"] > 0) == (True, True)
    assert (read.errors, read.ends) == ({}, {0: "aici-stop"})
    number = read.variables["n"]
    assert re.fullmatch("[0-9]{2}", number)
    assert read.texts[0] == f"one {number}"
    assert read.logs[0].lower().splitlines()[-1] == f"true {number}"
