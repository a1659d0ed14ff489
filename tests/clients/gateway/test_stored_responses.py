"""Stored responses: later requests continue them, and other users do not see them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.bodies.value_counts import MAX_CONTAINERS
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.stored import background
from tokenbus.clients.gateway.stored import database as bounds
from tokenbus.clients.gateway.stored.background import BackgroundTask
from tokenbus.clients.gateway.stored.database import (
    ContextTooLargeError,
    Database,
    Item,
    NotStoredError,
    Stored,
    UnfinishedError,
)
from tokenbus.clients.gateway.stored.inputs import read_input
from tokenbus.clients.gateway.stored.references import replaced
from tokenbus.clients.gateway.stored.requests import Page, page_of
from tokenbus.clients.gateway.stored.responses import StoredResponses
from tokenbus.clients.gateway.stored.tables import FILE
from tokenbus.clients.gateway.tokenization import Tokenization
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import UnavailableError

from ...processes import Bus, Gateway
from .openai_requests import MODEL, openai_client
from .stepped import SteppedWorker, stepped_worker

BODY = b'{"model": "stepped"}'


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database(tmp_path)
    yield found
    found.close()


def stored(id: str, previous: str | None = None, status: str = "completed") -> Stored:
    return Stored(id, status, json.dumps({"id": id, "status": status}).encode(), previous)


def item(id: str, text: str = "x", given: bool = False) -> Item:
    return Item(id, json.dumps({"id": id, "text": text}).encode(), given)


def ids(found: list[bytes]) -> list[str]:
    return [json.loads(data)["id"] for data in found]


def test_a_response_belongs_to_its_user(database: Database) -> None:
    database.save("ann", stored("1"), [item("i")])
    assert database.find("ben", "1") is None
    assert database.items("ben", ["i"]) == {}
    assert not database.delete("ben", "1")
    assert database.cancel("ben", "1") is None
    with pytest.raises(NotStoredError):
        database.context("ben", "1")
    assert set(database.items("ann", ["i"])) == {"i"}
    assert database.delete("ann", "1")
    assert database.items("ann", ["i"]) == {}


def test_a_conversation_is_followed_to_its_beginning(database: Database) -> None:
    database.save("ann", stored("1"), [item("a", given=True), item("b")])
    database.save("ann", stored("2", "1"), [item("c", given=True), item("d")])
    assert ids(database.context("ann", "2")) == ["a", "b", "c", "d"]
    assert ids(database.given("ann", "2")) == ["c"]
    database.save("ann", stored("3", "2", "failed"), [])
    with pytest.raises(UnfinishedError):
        database.context("ann", "3")
    database.delete("ann", "1")
    with pytest.raises(NotStoredError) as missing:
        database.context("ann", "2")
    assert missing.value.id == "1"


def test_a_response_that_continues_itself_is_refused(database: Database) -> None:
    database.save("ann", stored("1", "1"), [])
    with pytest.raises(NotStoredError):
        database.context("ann", "1")


def test_responses_that_were_not_used_are_dropped_first(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_RESPONSES_OF_ONE", 2)
    database.save("ann", stored("1"), [])
    database.save("ann", stored("2"), [])
    database.context("ann", "1")
    database.save("ann", stored("3"), [])
    assert [id for id in "123" if database.find("ann", id)] == ["1", "3"]


@pytest.mark.parametrize("part", ["answer", "items", "body"])
def test_a_large_response_is_not_stored(
    database: Database, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(bounds, "MAX_RESPONSE_BYTES", 2500)
    response = Stored("1", "queued", b"{}", background=True, body=BODY)
    assert database.save("ann", response, [item("a", "x" * 100)])
    items = [item("a", "x" * (1500 if part == "items" else 100))]
    response.answer = b" " * 1500 if part == "answer" else b"{}"
    response.body = b" " * 1500 if part == "body" else BODY
    response.id = "2"
    assert not database.save("ann", response, items)
    assert database.find("ann", "2") is None


def test_the_user_with_the_most_bytes_makes_room(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_BYTES_OF_ONE", 20_000)
    monkeypatch.setattr(bounds, "MAX_BYTES", 19_000)
    database.save("small", stored("s"), [item("s")])
    for number in range(5):
        database.save("large", stored(str(number)), [item(str(number), "x" * 8000)])
    assert database.find("small", "s") is not None
    assert [n for n in range(5) if database.find("large", str(n))] == [4]


def steps(database: Database, work: Callable[[], object]) -> int:
    """The number of instructions that SQLite executes for ``work``, in hundreds."""
    count = 0

    def executed() -> None:
        nonlocal count
        count += 1

    database._connection.set_progress_handler(executed, 100)
    work()
    database._connection.set_progress_handler(None, 0)
    return count


def test_a_response_is_dropped_without_a_search_through_all_responses(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_RESPONSES_OF_ONE", 500)
    for number in range(500):
        database.save("ann", stored(str(number)), [])
    assert steps(database, lambda: database.save("ann", stored("last"), [])) < 20
    assert database.find("ann", "0") is None


def test_new_events_do_not_rewrite_a_large_response(database: Database, tmp_path: Path) -> None:
    large = b" " * 2**20
    database.save("ann", Stored("1", "queued", large, None, True, large), [], "owner")
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert database.append("ann", "1", "owner", 0, b"data: 0\n\n", 1)
    assert (tmp_path / f"{FILE}-wal").stat().st_size < 2**17
    found = database.find("ann", "1")
    assert found is not None
    assert (found.answer, found.body, found.status) == (large, large, "in_progress")
    short = database.find("ann", "1", contents=False)
    assert short is not None
    assert (short.answer, short.body, short.events) == (b"", None, 1)


def test_a_read_of_events_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "EVENT_BYTES", 15)
    database.save("ann", stored("1", status="queued"), [], "owner")
    for number in range(4):
        database.append("ann", "1", "owner", number, b"data: %d\n\n" % number, 1)
    assert [first for first, _ in database.events("ann", "1", -1)] == [0, 1]
    assert [first for first, _ in database.events("ann", "1", 1)] == [2, 3]
    assert [first for first, _ in database.events("ann", "1", 3)] == []


def test_the_items_of_an_input_are_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_CONTEXT_BYTES", 100)
    database.save("ann", stored("1"), [item("a", "x" * 60)])
    database.save("ann", stored("2", "1"), [item("b", "x" * 60)])
    assert ids(database.context("ann", "1")) == ["a"]
    with pytest.raises(ContextTooLargeError):
        database.context("ann", "2")
    with pytest.raises(ContextTooLargeError):
        database.items("ann", ["a", "b"])


@pytest.mark.parametrize("value", [[], "", {}])
def test_the_values_of_an_input_s_items_are_bounded(database: Database, value: Any) -> None:
    half = [value] * (MAX_CONTAINERS // 2 + 1)
    for id, previous in (("1", None), ("2", "1")):
        found = Item(id, json.dumps({"id": id, "x": half, "text": "x" * 2**17}).encode(), False)
        database.save("ann", stored(id, previous), [found])
    assert ids(database.context("ann", "1")) == ["1"]
    with pytest.raises(ContextTooLargeError):
        database.context("ann", "2")
    assert set(database.items("ann", ["1"])) == {"1"}
    for repeated in (["1", "2"], ["1", "1"]):
        with pytest.raises(ContextTooLargeError):
            database.items("ann", repeated)


def test_a_page_decodes_only_the_ids_of_the_other_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(data: bytes) -> None:
        raise AssertionError(f"an item of {len(data)} bytes was decoded")

    items = [msgspec.json.encode({"id": f"msg_{n}", "content": [[]] * 9}) for n in range(5)]
    monkeypatch.setattr(msgspec.json, "decode", decode)
    page = page_of(Page(after="msg_4", limit=2), items)
    assert [bytes(item) for item in page.data] == [items[3], items[2]]
    assert (page.has_more, page.first_id, page.last_id) == (True, "msg_3", "msg_2")
    page = page_of(Page(after="msg_2", order="asc"), items)
    assert [bytes(item) for item in page.data] == items[3:]
    assert not page.has_more


def test_references_are_replaced() -> None:
    found = {"1": b'{"x":1}'}
    reference: dict[str, Any] = {"type": "item_reference", "id": "1"}
    assert list(replaced(found, [reference])) == [{"x": 1}]
    cut: dict[str, Any] = {"type": "reasoning", "id": "1", "content": [{"text": ""}]}
    whole = {**cut, "summary": [{"type": "summary_text", "text": "t"}]}
    assert list(replaced(found, [cut, whole])) == [{"x": 1}, whole]
    for kept in ({**cut, "id": [1]}, {**cut, "id": "2"}):
        assert list(replaced(found, [kept])) == [kept]
    with pytest.raises(ApiError, match="is not stored"):
        list(replaced(found, [{**reference, "id": "2"}]))


def test_one_gateway_generates_a_response_at_a_time(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Database(tmp_path)
    started = Stored("1", "queued", b'{"status":"queued"}', None, True, BODY)
    database.save("ann", started, [], "first")
    assert database.append("ann", "1", "first", 0, b"data: 0\n\n", 1)
    assert not other.append("ann", "1", "second", 1, b"data: 1\n\n", 1)
    assert other.adopt("ann", "1", "second") is None
    database.release("ann", "1", "first")
    taken = other.adopt("ann", "1", "second")
    assert taken is not None
    assert (taken.events, taken.body) == (1, BODY)
    assert not database.append("ann", "1", "first", 1, b"data: 1\n\n", 1)
    assert other.append("ann", "1", "second", 1, b"data: 1\n\ndata: 2\n\n", 2)
    assert other.finish("ann", stored("1"), "second", [item("o")], 3, b"data: 3\n\n", 1)
    assert [first for first, _ in database.events("ann", "1", -1)] == [0, 1, 3]
    assert [first for first, _ in database.events("ann", "1", 1)] == [1, 3]
    assert database.events("ann", "1", 3) == []
    assert ids(database.context("ann", "1")) == ["o"]
    found = database.cancel("ann", "1")
    assert found is not None
    assert found.status == "completed"
    other.close()


def test_gateways_take_turns_at_the_database(database: Database, tmp_path: Path) -> None:
    other, begins = Database(tmp_path), threading.Event()
    other._connection.set_trace_callback(
        lambda sql: begins.set() if sql.startswith("BEGIN") else None
    )
    with ThreadPoolExecutor(1) as pool:
        with database._transaction():
            saving = pool.submit(other.save, "ann", stored("1"), [])
            assert begins.wait(60)
        with database._transaction():
            assert database.find("ann", "1") is not None
        assert saving.result()
    other.close()


def test_a_file_that_cannot_be_used_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sqlite3.connect(tmp_path / FILE) as newer:
        newer.execute("PRAGMA user_version = 9")
    found = Database(tmp_path)
    assert "has version 9 of the tables" in caplog.text
    assert found.save("ann", stored("1"), [])
    found.close()


VERSION_2 = """
DROP INDEX items_of_users;
ALTER TABLE items DROP COLUMN user;
CREATE INDEX item_ids ON items (id);
PRAGMA user_version = 2;
"""


def test_the_items_of_an_earlier_release_are_found(tmp_path: Path) -> None:
    earlier = Database(tmp_path)
    for user in ("ann", "ben"):
        earlier.save(user, stored("1"), [Item("a", user.encode(), given=False)])
    earlier._connection.executescript(VERSION_2)
    earlier.close()
    for _ in range(2):
        found = Database(tmp_path)
        assert found.items("ann", ["a"]) == {"a": b"ann"}
        assert found.items("ben", ["a"]) == {"a": b"ben"}
        found.close()


def test_many_items_of_others_with_the_same_id_are_not_read(database: Database) -> None:
    database.save("ann", stored("1"), [Item("a", b"1", given=False)])

    def steps() -> int:
        """The number of hundreds of steps of SQLite's virtual machine in a search."""
        counted: list[int] = []
        database._connection.set_progress_handler(lambda: counted.append(1), 100)
        assert database.items("ann", ["a"]) == {"a": b"1"}
        database._connection.set_progress_handler(None, 100)
        return len(counted)

    before = steps()
    database.save("ben", stored("1"), [Item("a", b"2", given=False)] * 5_000)
    assert steps() <= before + 1


def test_only_the_owner_may_read_the_file(database: Database, tmp_path: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{FILE}*")} == {0o600}


# --- over HTTP -----------------------------------------------------------------------------------


def post(gateway: Gateway, input: Any, **more: Any) -> Any:
    body = {"model": MODEL, "input": input, "max_output_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=300).json()


@pytest.mark.process
def test_a_conversation_continues_a_stored_response(gateway: Gateway) -> None:
    first = post(gateway, "hello")
    second = post(gateway, "more", previous_response_id=first["id"])
    asked = {"role": "user", "content": "hello"}
    more = {"role": "user", "content": "more"}
    sent = post(gateway, [asked, *first["output"], more])
    referred = post(
        gateway, [asked, {"type": "item_reference", "id": first["output"][0]["id"]}, more]
    )
    assert second["previous_response_id"] == first["id"]
    tokens = sent["usage"]["input_tokens"]
    assert (second["usage"]["input_tokens"], referred["usage"]["input_tokens"]) == (tokens, tokens)
    unstored = post(gateway, "hello", store=False)
    assert (first["store"], unstored["store"]) == (True, False)
    refused = post(gateway, "x", previous_response_id=unstored["id"])["error"]
    assert (refused["code"], refused["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    wrong = post(gateway, [{"type": "item_reference", "id": unstored["output"][0]["id"]}])
    assert wrong["error"]["param"] == "input[0].id"


@pytest.mark.process
def test_a_stored_response_is_read_and_deleted(gateway: Gateway) -> None:
    with openai_client(gateway) as api:
        first = api.responses.create(
            model=MODEL, input="hello", max_output_tokens=2, metadata={"job": "7"}
        )
        assert api.responses.retrieve(first.id) == first
        assert first.metadata == {"job": "7"}
        second = api.responses.create(
            model=MODEL,
            input="more",
            max_output_tokens=2,
            previous_response_id=first.id,
        )
        listed = list(api.responses.input_items.list(second.id, order="asc", limit=2))
        assert [one.type for one in listed] == ["message"] * 3
        newest = api.responses.input_items.list(second.id, limit=1)
        assert newest.has_more
        assert newest.data == listed[-1:]
        with pytest.raises(openai.BadRequestError, match="in the background"):
            api.responses.cancel(first.id)
        with pytest.raises(openai.BadRequestError, match="events of"):
            list(api.responses.retrieve(first.id, stream=True))
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(first.id)
        assert len(list(api.responses.input_items.list(second.id))) == 1


@pytest.mark.process
def test_an_item_is_stored_without_its_unknown_fields(gateway: Gateway) -> None:
    large = "x" * bounds.MAX_RESPONSE_BYTES
    part = {"type": "input_text", "text": "hello", "unknown": large[:9]}
    asked = {"role": "user", "id": "msg_a", "content": [part], "unknown": large}
    answer = post(gateway, [asked, {"type": "unknown", "id": "x_a", "unknown": large[:9]}])
    assert answer["store"] is True
    url = f"{gateway.url}/v1/responses/{answer['id']}/input_items?order=asc"
    listed = httpx.get(url, timeout=300)
    message, other = listed.json()["data"]
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "id": "msg_a",
        "content": [{"type": "input_text", "text": "hello"}],
    }
    assert other == {"type": "unknown", "status": "completed", "id": "x_a"}


@pytest.mark.process
def test_a_response_with_large_items_is_answered_but_not_stored(gateway: Gateway) -> None:
    # The field has no effect on the prompt, which would not fit into the context.
    asked = {"role": "user", "content": "hello", "status": "x" * bounds.MAX_RESPONSE_BYTES}
    answer = post(gateway, [asked])
    assert (answer["status"], answer["store"]) == ("incomplete", False)
    found = httpx.get(f"{gateway.url}/v1/responses/{answer['id']}", timeout=300)
    assert found.status_code == 404
    refused = post(gateway, [asked], background=True)["error"]
    assert refused["code"] == "too_large"


# --- in the background ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stepped(processes: None) -> Iterator[tuple[Bus, SteppedWorker, str]]:
    """A bus with a stepped worker, and the path of a file of API keys."""
    with Bus() as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", 100) as worker:
        keys = bus.folder / "api-keys"
        names = ("ann", "ben")
        keys.write_text(
            "".join(f"{one} {hashlib.sha256(one.encode()).hexdigest()}\n" for one in names)
        )
        bus.wait_for_models("stepped")
        yield bus, worker, str(keys)


def client(gateway: Gateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=120.0)


@pytest.mark.anyio
async def test_the_stored_items_of_an_input_count_towards_the_share_of_the_memory(
    tmp_path: Path,
) -> None:
    store, shares = StoredResponses(tmp_path), UserShares(8, max_body_bytes=10_000)
    models = SimpleNamespace(tokenization=Tokenization())
    gateway = cast(Any, SimpleNamespace(stored=store, shares=shares, models=models))
    message = {"type": "message", "role": "user", "content": "x" * 1000}
    items = [Item("a", msgspec.json.encode(message), True)]
    await store.call(lambda database, user: database.save(user, stored("1"), items))
    reference = {"type": "item_reference", "id": "a"}
    for input, previous, count in (("b", "1", 1), ([reference] * 3, None, 3)):
        body = ResponsesRequest(input=input, model="m", previous_response_id=previous)
        with shares.request():
            given = await read_input(gateway, body, Ignored())
            assert shares.memory.free == 10_000 - given.size
            assert given.size >= count * len(items[0].data)
        assert shares.memory.free == 10_000
    body = ResponsesRequest(input=[reference] * 9, model="m")
    with shares.request(), pytest.raises(UnavailableError):
        await read_input(gateway, body, Ignored())
    await store.close()


@pytest.mark.anyio
async def test_the_events_of_a_response_in_the_background_are_stored_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoredResponses(tmp_path)
    gateway = SimpleNamespace(stored=store)
    response = Stored("1", "queued", b"{}", background=True, body=BODY)
    await store.call(lambda database, user: database.save(user, response, [], store.owner))
    task = BackgroundTask(cast(Any, gateway), "1", BODY)
    part = b"x" * (background.GROUP_BYTES // 2) + b"\n\n"
    for _ in range(5):
        task._unsaved.add(part)
    await task._save()
    data = await store.call(
        lambda database, _: database._connection.execute("SELECT data FROM events").fetchall()
    )
    assert b"".join(one for (one,) in data) == 5 * part
    assert max(len(one) for (one,) in data) <= background.GROUP_BYTES
    monkeypatch.setattr(background, "MAX_RESPONSE_BYTES", len(part) - 3)
    with pytest.raises(ApiError, match="fewer logprobs"):
        task._unsaved.add(part)
    await store.close()


@pytest.mark.process
def test_a_response_in_the_background_outlives_its_gateway(
    stepped: tuple[Bus, SteppedWorker, str],
) -> None:
    bus, worker, keys = stepped
    first, second = (bus.start_gateway(api_keys=keys) for _ in range(2))
    with client(first, "ann") as ann, client(second, "ann") as other, client(second, "ben") as ben:
        begun = ann.responses.create(
            model="stepped", input="hi", background=True, stream=True, max_output_tokens=9
        )
        running = worker.begun()
        running.step(3)
        seen = []
        for event in begun:
            seen.append(event)
            if len([one for one in seen if one.type == "response.output_text.delta"]) == 3:
                break
        begun.close()
        head: Any = seen[0]
        id = head.response.id
        assert [one.type for one in seen[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        with pytest.raises(openai.NotFoundError):
            ben.responses.retrieve(id)
        with pytest.raises(openai.NotFoundError):
            ben.responses.cancel(id)
        assert other.responses.retrieve(id).status in ("queued", "in_progress")
        first.process.kill()
        with sqlite3.connect(bus.folder / FILE, timeout=120.0) as database:
            # The killed gateway's lease on the response expires now.
            database.execute("UPDATE responses SET lease = 0 WHERE id = ?", (id,))
        rest = other.responses.retrieve(id, stream=True, starting_after=seen[3].sequence_number)
        found = [next(rest)]
        assert worker.attached() == running.request
        running.send_again()
        running.step(2, "length")
        found += list(rest)
    numbers = [one.sequence_number for one in found]
    assert numbers == list(range(4, 4 + len(found)))
    assert found[0] == seen[4]
    last: Any = found[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert (last.response.output_text, last.response.id) == ("xxxxx", id)
    assert last.response.created_at == head.response.created_at


@pytest.mark.process
def test_a_response_in_the_background_fails_if_its_answer_is_too_large(
    stepped: tuple[Bus, SteppedWorker, str],
) -> None:
    bus, worker, keys = stepped
    gateway = bus.start_gateway(api_keys=keys)
    with client(gateway, "ann") as ann:
        begun = ann.responses.create(model="stepped", input="hi", background=True, stream=True)
        running = worker.begun()
        half = bounds.MAX_RESPONSE_BYTES // 2
        running.step(text="x" * half)
        running.step(1, "length", text="x" * half)
        *others, last = list(begun)
    answer: Any = last
    assert (last.type, answer.response.status) == ("response.failed", "failed")
    assert (answer.response.error.code, len(answer.response.output)) == ("too_large", 0)
    assert [one.sequence_number for one in others] == list(range(last.sequence_number))


@pytest.mark.process
def test_a_response_in_the_background_is_cancelled(
    stepped: tuple[Bus, SteppedWorker, str],
) -> None:
    bus, worker, keys = stepped
    first, second = (bus.start_gateway(api_keys=keys) for _ in range(2))
    with client(first, "ann") as ann, client(second, "ann") as other:
        begun = ann.responses.create(model="stepped", input="hi", background=True)
        running = worker.begun()
        assert begun.status == "queued"
        assert begun.background is True
        # The response is cancelled at the gateway that does not run its task.
        assert other.responses.cancel(begun.id).status == "cancelled"
        assert worker.cancelled() == running.request
        assert list(ann.responses.retrieve(begun.id, stream=True))[-1].type != "response.completed"
        assert ann.responses.cancel(begun.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            other.responses.create(model="stepped", input="more", previous_response_id=begun.id)
        failing = ann.responses.create(model="stepped", input="hi", background=True)
        assert worker.begun().request != running.request
        ann.responses.delete(failing.id)
        assert worker.cancelled()
        with pytest.raises(openai.BadRequestError, match="store"):
            ann.responses.create(model="stepped", input="hi", background=True, store=False)


@pytest.mark.process
def test_repeated_requests_in_the_background_begin_one_response(
    stepped: tuple[Bus, SteppedWorker, str],
) -> None:
    bus, worker, keys = stepped
    gateway = bus.start_gateway(api_keys=keys)
    with client(gateway, "ann") as ann, ThreadPoolExecutor(8) as pool:
        named = {"Idempotency-Key": "one-of-eight"}

        def begin(_: int) -> str:
            begun = ann.responses.create(
                model="stepped", input="hi", background=True, extra_headers=named
            )
            return begun.id

        [id] = set(pool.map(begin, range(8)))
        running = worker.begun()
        assert ann.responses.cancel(id).status == "cancelled"
        while worker.cancelled() != running.request:
            """CANCELs for requests of earlier tests may arrive first."""
    assert "Traceback" not in gateway.process.log
