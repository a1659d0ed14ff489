"""LMTP is the same on every transport: ZeroMQ, WebSocket, stdio, and within one process."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from tokenbus.clients import Client
from tokenbus.protocol.messages import WorkerStatus

from ..clients.wasm_guests import LOGS, endless
from ..processes import until
from .transports import WAIT_S, Lmtp, Transport

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"
IDS = [263, 305, 17]
LONG: dict[str, Any] = {"prompt": IDS, "max_tokens": 900, "ignore_eos": True}


def tokens(entries: list[Any], seq: int = 0) -> list[int]:
    """The tokens of one sequence."""
    mine = [entry for entry in entries if entry.get("seq", 0) == seq]
    return [entry["token"] for entry in mine if entry["token"] is not None]


def text(entries: list[Any]) -> str:
    return "".join(entry.get("text", "") for entry in entries)


# --- streams --------------------------------------------------------------------------------------


def test_generate_in_text_mode(lmtp: Lmtp, client: Client) -> None:
    entries = lmtp.stream("GENERATE", prompt=PROMPT, text=True, max_tokens=12)
    assert text(entries) == client.generate(PROMPT, max_tokens=12).text()
    assert [entry.get("pos", 0) for entry in entries] == list(range(len(entries)))


def test_generate_with_token_ids(lmtp: Lmtp, client: Client) -> None:
    entries = lmtp.stream("GENERATE", prompt=IDS, max_tokens=12)
    assert tokens(entries) == client.generate(IDS, max_tokens=12).tokens()
    assert not any("text" in entry for entry in entries)


def test_several_sequences_of_one_prompt(lmtp: Lmtp, client: Client) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 6}
    entries = lmtp.stream("GENERATE", prompt=IDS, **options)
    expected = client.generate(IDS, **options).wait()
    assert [tokens(entries, seq) for seq in range(3)] == [sequence.tokens for sequence in expected]


def test_streams_interleave_and_each_is_whole(lmtp: Lmtp, client: Client) -> None:
    expected = client.generate(IDS, max_tokens=20, ignore_eos=True).tokens()
    options: dict[str, Any] = {"prompt": IDS, "max_tokens": 20, "ignore_eos": True}
    received: dict[int, list[int]] = {lmtp.begin("GENERATE", **options): [] for _ in range(6)}
    while any(len(got) < 20 for got in received.values()):
        kind, entries = lmtp.receive()
        assert kind == "TOKEN"
        for entry in entries:
            received[entry["stream_id"]].append(entry["token"])
    assert list(received.values()) == [expected] * 6


def test_a_stop_string_ends_a_sequence(lmtp: Lmtp, client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=12).text()
    stop = whole[len(whole) // 2]
    entries = lmtp.stream("GENERATE", prompt=PROMPT, text=True, max_tokens=12, stop=[stop])
    assert entries[-1]["finish_reason"] == "stop"
    assert text(entries) == whole[: whole.index(stop)]


def test_log_probabilities(lmtp: Lmtp) -> None:
    entries = lmtp.stream("GENERATE", prompt=IDS, max_tokens=3, ignore_eos=True, top_logprobs=4)
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 4
        assert top[str(entry["token"])] == max(top.values()) == entry["logprob"]


def test_score(lmtp: Lmtp, client: Client) -> None:
    entries = lmtp.stream("SCORE", prompt=IDS, scored=[7, 8, 9])
    assert tokens(entries) == [7, 8, 9]
    expected = client.score(IDS, [7, 8, 9]).logprobs
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected)
    assert not any("top_logprobs" in entry for entry in entries)


def test_cancel_ends_a_stream(lmtp: Lmtp) -> None:
    stream_id = lmtp.begin("GENERATE", **LONG, n=32)
    lmtp.receive()
    lmtp.send("CANCEL", stream_id=stream_id)
    entries = lmtp.rest_of(stream_id)
    assert entries[-1]["finish_reason"] == "cancelled"
    assert len(entries) < 32 * LONG["max_tokens"]


def test_a_controller_steers_a_stream(lmtp: Lmtp) -> None:
    entries = lmtp.stream(
        "GENERATE",
        prompt=PROMPT,
        text=True,
        max_tokens=40,
        controller="regex",
        controller_arg="[0-9]{3}-[a-f]{2}",
    )
    shown = text(entries)
    assert (len(shown), shown[3]) == (6, "-")
    assert shown[:3].isdecimal()
    assert set(shown[4:]) <= set("abcdef")


# --- answers --------------------------------------------------------------------------------------


def test_model_info(lmtp: Lmtp) -> None:
    kind, answer = lmtp.ask("MODEL_INFO", model="embedded")
    assert (kind, answer["model_info"]["name"]) == ("MSG", "embedded")
    assert answer["model_info"]["vocab_size"] == 4096


def test_status(lmtp: Lmtp) -> None:
    kind, answer = lmtp.ask("STATUS")
    assert kind == "MSG"
    assert {w["role"] for w in answer["status"]["workers"]} == {"gpu", "controller", "state"}


def test_a_module_is_uploaded_and_used(lmtp: Lmtp) -> None:
    module = base64.b64encode(LOGS).decode()
    kind, answer = lmtp.ask("UPLOAD", data=module, tag="lmtp-logs")
    assert (kind, answer["result"]["size"]) == ("MSG", len(LOGS))
    entries = lmtp.stream(
        "GENERATE", prompt=IDS, max_tokens=3, ignore_eos=True, controller="lmtp-logs"
    )
    assert "".join(entry.get("logs", "") for entry in entries).startswith("round\n")


def test_ping(lmtp: Lmtp) -> None:
    lmtp.send("PING", n=9)
    assert lmtp.receive() == ("PONG", {"n": 9})


# --- buffers --------------------------------------------------------------------------------------


def test_a_prompt_of_buffers(lmtp: Lmtp, client: Client) -> None:
    lmtp.send("BUFFER", name="a", tokens=IDS)
    entries = lmtp.stream("GENERATE", buffers=["a", "a"], prompt=[5], max_tokens=4, save="b")
    assert tokens(entries) == client.generate([*IDS, *IDS, 5], max_tokens=4).tokens()
    more = lmtp.stream("SCORE", buffers=["b"], scored=[7])
    whole = [*IDS, *IDS, 5, *tokens(entries)]
    assert more[0]["logprob"] == pytest.approx(client.score(whole, [7]).logprobs[0])
    lmtp.send("BUFFER", name="a")
    kind, error = lmtp.ask("GENERATE", buffers=["a"], prompt=[5])
    assert (kind, error["path"]) == ("ERROR", "$.buffers[0]")


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "code", "path"),
    [
        ("GENERATE", {"max_tokens": 0}, "invalid_field", "$.max_tokens"),
        ("GENERATE", {"logit_bias": {"1": "x"}}, "invalid_field", "$.logit_bias[...]"),
        ("GENERATE", {"prompt": []}, "empty_prompt", "$.prompt"),
        ("GENERATE", {"prompt": [99_999]}, "token_out_of_range", "$.prompt[0]"),
        ("GENERATE", {"model": "unknown"}, "unknown_model", "$.model"),
        ("GENERATE", {"controller": "unknown"}, "unknown_controller", "$.controller"),
        ("GENERATE", {"controller": "regex", "controller_arg": "("}, "invalid_field", None),
        ("SCORE", {"scored": []}, "invalid_field", "$.scored"),
        ("ATTACH", {"received": 0}, "unknown_stream", None),
        ("TAG", {"module": "unknown", "tags": ["t"]}, "unknown_controller", "$.module"),
    ],
)
def test_an_error_has_a_code_and_a_path(
    lmtp: Lmtp, kind: str, body: dict[str, Any], code: str, path: str | None
) -> None:
    stream_id = lmtp.begin(kind, **{"prompt": [1], **body})
    word, error = lmtp.receive()
    error = error[-1] if word == "TOKEN" else error
    assert (error["stream_id"], error["code"]) == (stream_id, code)
    if word == "ERROR":
        assert error.get("path") == path


def test_an_unknown_type_is_named(lmtp: Lmtp) -> None:
    lmtp.send("GENERATES", stream_id=1)
    kind, error = lmtp.receive()
    assert (kind, error["code"], error["type"]) == ("ERROR", "unknown_type", "GENERATES")
    assert "'GENERATES'" in error["message"]


@pytest.mark.parametrize("line", ["GENERATE {", "GENERATE nonsense", "HELLO {", "SCORE \0"])
def test_bad_json_is_answered_once_and_the_next_message_is_served(lmtp: Lmtp, line: str) -> None:
    lmtp.send_line(line)
    kind, error = lmtp.receive()
    assert (kind, error["code"]) == ("ERROR", "bad_message")
    assert error["type"] == line.split()[0]
    lmtp.send("PING", n=1)
    assert lmtp.receive()[0] == "PONG"


# --- sessions -------------------------------------------------------------------------------------


def gpu_worker(client: Client) -> WorkerStatus:
    [worker] = [w for w in client.status().workers if w.role == "gpu"]
    return worker


def test_a_stream_that_waits_for_a_worker_has_notices(transport: Transport, client: Client) -> None:
    connection = transport.connect()
    connection.hello()
    for _ in range(gpu_worker(client).capacity + 1):
        last = connection.begin("GENERATE", **LONG)
    while True:
        kind, body = connection.receive_any()
        if kind == "SYSTEM":
            break
    assert (body["event"], body["stream_id"], body["place"]) == ("queued", last, 1)
    connection.send("BYE")
    connection.close()
    until(lambda: not gpu_worker(client).requests, WAIT_S, "the end of all requests")


def test_a_stream_goes_on_over_another_connection(transport: Transport, client: Client) -> None:
    first, second = transport.connect(), transport.connect()
    welcome = first.hello()
    second.send("PING")
    assert second.receive()[0] == "PONG"
    client.upload_controller(endless(100), "lmtp-endless")
    stream_id = first.begin("GENERATE", **LONG, controller="lmtp-endless")
    received: list[Any] = []
    while len(received) < 5:
        received += first.receive()[1]
    first.close()
    again = second.hello(session=welcome["session"])
    assert (again["resumed"], again["streams"]) == (True, [stream_id])
    second.send("ATTACH", stream_id=stream_id, received=len(received))
    while (answer := second.receive())[0] == "TOKEN":
        pass  # Entries before the answer are sent again after the answer.
    assert answer == ("MSG", {"stream_id": stream_id, "attached": len(received)})
    while len(received) < 30:
        received += second.receive()[1]
    second.send("CANCEL", stream_id=stream_id)
    second.rest_of(stream_id)
    expected = client.generate(IDS, max_tokens=30, ignore_eos=True).tokens()
    assert tokens(received)[:30] == expected
