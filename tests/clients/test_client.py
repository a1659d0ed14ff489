"""Both clients against a real broker and the embedded model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing as mp
import queue
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
from tokenbus.clients import (
    AsyncClient,
    Client,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    SlowClientError,
    System,
    Token,
)
from tokenbus.clients.lanes import Step
from tokenbus.clients.session import ClientSession

from ..processes import Bus, free_port, until

pytestmark = pytest.mark.anyio

PROMPT = "def add(a, b):\n"
WAIT_S = 300.0
"""Time in seconds after which a wait fails the test."""


def idle(client: Client) -> bool:
    return client.status().streams == 0


async def until_idle(client: AsyncClient) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await client.status()).streams:
            await asyncio.sleep(0.02)


# --- Client ---------------------------------------------------------------------------------------


def test_tokens_stream_and_their_texts_make_the_text(client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=20, ignore_eos=True)
    entries = list(stream)
    assert [e.pos for e in entries] == list(range(20))
    assert [e.finish_reason for e in entries] == [None] * 19 + ["length"]
    assert "".join(e.text for e in entries if isinstance(e.text, str)) == stream.text()
    assert stream.tokens() == [e.token for e in entries]
    [sequence] = stream.sequences
    assert sequence.cumulative_logprob == pytest.approx(sum(e.logprob or 0 for e in entries))


@pytest.mark.process
def test_a_program_without_a_system_prints_the_remedy_while_it_waits() -> None:
    """Runs the program of the README. This program does not configure logging."""
    front = f"tcp://127.0.0.1:{free_port()}"
    program = (
        f"from tokenbus.clients import Client\n"
        f"with Client({front!r}) as client:\n"
        f"    print(client.generate('x').text())"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.kill()
    assert line == (
        f"no broker answers at {front}; is that the address of a running system? "
        f"Start one with: tokenbus up --front {front} (waiting for 30 s)\n"
    )


def test_token_ids_in_give_token_ids_out(client: Client) -> None:
    stream = client.generate([5, 6, 7], max_tokens=4, ignore_eos=True, top_logprobs=3)
    for entry in stream:
        assert isinstance(entry.top_logprobs, dict)
        assert len(entry.top_logprobs) == 3
        assert entry.token in entry.top_logprobs
    assert len(stream.tokens()) == 4
    assert [len(top) for top in stream.sequences[0].top_logprobs] == [3] * 4
    with pytest.raises(ValueError, match="text=True"):
        _ = stream.text()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 1.0},
        {"stop": [200, 300]},
        {"text": True, "n": 2, "temperature": 1.0},
        {"top_logprobs": 2},
    ],
)
def test_tokens_in_columns_are_those_that_entries_give(
    bus: Bus, client: Client, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Step] = []
    deliver = Step.deliver

    def noted(step: Step) -> None:
        steps.append(step)
        deliver(step)

    monkeypatch.setattr(Step, "deliver", noted)

    def read(of: Client) -> tuple[list[Any], list[float]]:
        with of.generate([5, 6, 7], max_tokens=12, seed=3, ignore_eos=True, **options) as stream:
            found = sorted(stream, key=lambda entry: (entry.seq, entry.pos))
            assert [t for s in stream.sequences for t in s.tokens] == [e.token for e in found]
        fields = ("seq", "pos", "token", "text", "finish_reason", "prompt_tokens")
        shown = [tuple(getattr(e, field) for field in fields) for e in found]
        return shown, [e.logprob or 0.0 for e in found]

    by_columns, logprobs = read(client)
    assert bool(steps) == ("top_logprobs" not in options)
    monkeypatch.setattr(ClientSession, "capabilities", ("ping",))
    steps.clear()
    with Client(bus.front) as other:
        by_entries, others = read(other)
    assert not steps
    assert by_entries == by_columns
    assert logprobs == pytest.approx(others, abs=1e-4)


def test_many_streams_share_one_connection(client: Client) -> None:
    alone = client.generate(PROMPT, max_tokens=15, ignore_eos=True).tokens()
    streams = [client.generate(PROMPT, max_tokens=15, ignore_eos=True) for _ in range(50)]
    assert all(s.tokens() == alone for s in streams)
    assert client.status().sessions >= 1


def test_streams_may_be_read_by_many_threads(client: Client) -> None:
    wanted = client.generate(PROMPT, max_tokens=15, ignore_eos=True).text()
    texts: list[str] = []

    def read() -> None:
        texts.append(client.generate(PROMPT, max_tokens=15, ignore_eos=True).text())

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [wanted] * 8


def test_leaving_the_only_loop_over_a_stream_cancels(client: Client) -> None:
    for _ in client.generate(PROMPT, max_tokens=900, ignore_eos=True):
        break
    until(lambda: idle(client), WAIT_S, "the stream ended")


def test_a_stream_that_was_read_in_part_goes_on_where_it_was_left(client: Client) -> None:
    wanted = client.generate(PROMPT, max_tokens=60, ignore_eos=True).tokens()
    stream = client.generate(PROMPT, max_tokens=60, ignore_eos=True)
    read = [next(iter(stream)).token]
    gc.collect()
    read += [entry.token for entry in itertools.islice(stream, 10)]
    for entry in stream:
        read.append(entry.token)
        if len(read) == 20:
            break
    read.append(next(stream).token)
    assert read == wanted[:21]
    assert stream.tokens() == wanted
    assert list(stream) == []


def test_reading_a_closed_stream_raises(client: Client) -> None:
    with client.generate(PROMPT, max_tokens=900, ignore_eos=True) as stream:
        first = next(stream).token
    until(lambda: idle(client), WAIT_S, "the stream ended")
    with pytest.raises(RuntimeError, match="closed before its end"):
        next(stream)
    with pytest.raises(RuntimeError, match="closed before its end"):
        _ = stream.text()
    assert stream.sequences[0].tokens == [first]


def test_closing_a_stream_ends_the_waits_of_other_threads(client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=900, ignore_eos=True, n=32)
    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for _ in stream:
                pass
            ends.put(None)
        except RuntimeError as error:
            ends.put(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: stream.sequences, WAIT_S, "a first entry")
    stream.close()
    assert all("closed" in str(ends.get(timeout=WAIT_S)) for _ in threads)


def test_every_thread_that_reads_a_stream_sees_its_end(client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=40, ignore_eos=True)
    read: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=lambda: read.put([e.pos for e in stream]), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    positions = [pos for _ in threads for pos in read.get(timeout=WAIT_S)]
    assert sorted(positions) == list(range(40))


def test_a_callback_that_raises_ends_no_other_read(client: Client) -> None:
    def refuse(notice: System) -> None:
        raise LookupError(notice.event)

    stream = client.generate(
        PROMPT, model="embedded", max_tokens=5, ignore_eos=True, on_system=refuse
    )
    stream._call.take([System(event="queued", message="as a broker sends it")])
    with pytest.raises(LookupError):
        list(stream)
    assert len(stream.tokens()) == 5


def test_dropping_the_stream_cancels(client: Client) -> None:
    stream = client.generate(PROMPT, max_tokens=900, ignore_eos=True, n=32)
    next(stream)
    del stream
    gc.collect()
    until(lambda: idle(client), WAIT_S, "the stream ended")


def test_closing_the_client_ends_its_streams(bus: Bus, client: Client) -> None:
    other = bus.client()
    stream = other.generate(PROMPT, max_tokens=900, ignore_eos=True, n=32)
    next(iter_entries := iter(stream))
    other.close()
    with pytest.raises(ConnectionLostError, match="closed"):
        list(iter_entries)
    until(lambda: idle(client), WAIT_S, "the end of its streams")
    with pytest.raises(RuntimeError, match="closed"):
        other.generate(PROMPT)


def test_closing_at_once_ends_what_has_just_begun(bus: Bus) -> None:
    for _ in range(20):
        other = bus.client()
        stream = other.generate(PROMPT, max_tokens=900, ignore_eos=True)
        other.close()
        with pytest.raises(ConnectionLostError, match="closed"):
            stream.wait()


def test_a_timeout_keeps_what_came_and_raises(client: Client) -> None:
    timeout_s = 0.5
    while True:
        # No machine finishes this number of sequences before the broker checks the deadlines.
        stream = client.generate(
            PROMPT, max_tokens=900, ignore_eos=True, timeout_s=timeout_s, n=int(64 * timeout_s)
        )
        with pytest.raises(RequestTimeoutError):
            stream.wait()
        if stream.sequences:
            break
        timeout_s *= 2  # No token has arrived within the timeout.
    assert 0 < len(stream.sequences[0].tokens) < 900
    until(lambda: idle(client), WAIT_S, "the stream ended")


def test_stop_strings_and_stop_tokens_end_the_stream(client: Client) -> None:
    text = client.generate(PROMPT, max_tokens=60, ignore_eos=True).text()
    stop = text[10:14]
    stream = client.generate(PROMPT, max_tokens=60, ignore_eos=True, stop=["\0", stop])
    assert stream.text() == text[: text.index(stop)]
    assert (stream.sequences[0].finish_reason, stream.sequences[0].stop) == ("stop", stop)
    [first, token, *_] = client.generate(PROMPT, max_tokens=60, ignore_eos=True).tokens()
    named = client.generate(PROMPT, max_tokens=60, ignore_eos=True, stop=[token])
    assert (named.tokens(), named.sequences[0].stop) == ([first, token], token)


def test_a_seed_decides_and_its_absence_varies(client: Client) -> None:
    options: Any = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    seeded = {client.generate(PROMPT, seed=4, **options).text() for _ in range(3)}
    free = {client.generate(PROMPT, **options).text() for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) == 3


def test_buffers_are_sent_once_and_named_often(client: Client) -> None:
    whole = client.generate(PROMPT + "    return", max_tokens=8, ignore_eos=True).tokens()
    client.buffer("start", PROMPT)
    rest = client.generate("    return", buffers=["start"], max_tokens=8, ignore_eos=True)
    assert len(rest.tokens()) == 8
    ids = [5, 6, 7]
    client.buffer("ids", ids)
    named = client.generate([8, 9], buffers=["ids"], max_tokens=8, ignore_eos=True).tokens()
    assert named == client.generate([*ids, 8, 9], max_tokens=8, ignore_eos=True).tokens()
    assert whole
    client.drop_buffer("ids")
    with pytest.raises(RequestError, match="no buffer 'ids'"):
        client.generate([8], buffers=["ids"]).wait()


def test_what_a_stream_made_can_be_kept_as_a_buffer(client: Client) -> None:
    first = client.generate([5, 6, 7], max_tokens=8, ignore_eos=True, save="kept").tokens()
    going_on = client.generate([8], buffers=["kept"], max_tokens=8, ignore_eos=True).tokens()
    at_once = client.generate([5, 6, 7, *first, 8], max_tokens=8, ignore_eos=True).tokens()
    assert going_on == at_once


def test_what_it_knows_of_models_and_of_the_system(client: Client) -> None:
    info = client.model_info()
    assert (info.name, info.vocab_size, info.context_length) == ("embedded", 4096, 1024)
    assert info.parameters == 3_148_224
    status = client.status()
    assert [w.models for w in status.workers] == [["embedded"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2.0}, "top_p"),
        ({"model": "gpt-9"}, "embedded"),
        ({"stop": "text"}, "a list"),
        ({"stall_s": 0}, "stall_s is 0; it must be a number of seconds above 0"),
        ({"stall_s": float("nan")}, "stall_s is nan; it must be"),
        ({"retry_s": -1}, "retry_s is -1; it must be a number of seconds of at least 0"),
        ({"retry_s": "long"}, "retry_s is 'long'; it must be"),
    ],
)
def test_a_wrong_option_is_named(client: Client, options: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        client.generate(PROMPT, **options).wait()


def test_a_text_in_place_of_token_ids_is_named(client: Client) -> None:
    with pytest.raises(RequestError, match="'tea' is text; expected a list of token ids") as caught:
        client.embed([[1], "tea"])  # type: ignore[list-item]
    assert caught.value.path == "$.inputs[1]"


def test_a_wrong_prompt_is_named(client: Client) -> None:
    for prompt in ("caf\udce9", b"bytes"):
        with pytest.raises(RequestError, match=r"UTF-8|bytes") as caught:
            client.generate(prompt)  # type: ignore[arg-type]
        assert caught.value.path == "$.prompt"
    wrong: list[Any] = [[1, -2], ["a"], [2**40]]
    for prompt in wrong:
        with pytest.raises(RequestError, match="token ids"):
            client.generate(prompt)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        client.generate(PROMPT, temprature=1)  # type: ignore[call-arg]


def test_what_has_no_encoding_ends_alone(client: Client) -> None:
    good = client.generate(PROMPT, max_tokens=200, ignore_eos=True)
    entries = iter(good)
    next(entries)
    with pytest.raises(RequestError, match="encoded"):
        client.generate(PROMPT, stop=["\udce9"]).wait()
    with pytest.raises(RequestError, match="encoded"):
        client.generate(PROMPT, temperature=object()).wait()  # type: ignore[arg-type]
    assert len(list(entries)) == 199


def test_without_a_broker_the_error_names_the_address() -> None:
    front = f"tcp://127.0.0.1:{free_port()}"
    with Client(front) as client, pytest.raises(ConnectionLostError, match=front):
        client.generate(PROMPT, timeout_s=0.3).wait()
    with Client(front, patience_s=0.5) as client, pytest.raises(ConnectionLostError, match=front):
        client.status()


def test_an_invalid_address_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="is not a valid address"):
        Client("tcp://")


# --- AsyncClient ----------------------------------------------------------------------------------


async def test_async_streams_interleave(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        order: list[int] = []
        # A task does not pause while it reads entries that have already arrived. So the barrier
        # makes each task wait for the others after each entry.
        meeting = asyncio.Barrier(8)

        async def read(number: int) -> str:
            stream = client.generate(PROMPT, max_tokens=20, ignore_eos=True)
            async for _ in stream:
                order.append(number)
                await meeting.wait()
            return await stream.text()

        texts = await asyncio.gather(*map(read, range(8)))
    assert len(set(texts)) == 1
    assert [sorted(order[i : i + 8]) for i in range(0, 160, 8)] == [list(range(8))] * 20


async def test_async_text_score_info_and_errors(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        text = await client.generate(PROMPT, max_tokens=5, ignore_eos=True).text()
        assert text
        scores = await client.score("import ", "os")
        assert scores.total < 0
        assert "".join(scores.texts) == "os"
        likely = await client.score("import ", "os", top_logprobs=3)
        assert likely.logprobs == scores.logprobs
        for token, logprob, top in zip(
            likely.tokens, likely.logprobs, likely.top_logprobs, strict=True
        ):
            assert top[token] == logprob
            assert 3 <= len(top) <= 4
            assert logprob <= max(top.values())
        assert scores.top_logprobs == [{} for _ in scores.tokens]
        assert (await client.model_info()).name == "embedded"
        assert (await client.status()).workers
        await client.buffer("b", [5])
        with pytest.raises(RequestError, match="max_tokens"):
            await client.generate(PROMPT, max_tokens=0).wait()


async def test_what_has_arrived_is_read_in_one_piece(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        expected = await client.generate("def add(", max_tokens=20).wait()
        stream = client.generate("def add(", max_tokens=20)
        entries: list[Token] = []
        while part := await stream.arrived():
            entries += part
        assert [entry.token for entry in entries if entry.token is not None] == expected[0].tokens
        assert await stream.arrived() == []
        refused = client.generate("", max_tokens=20)
        with pytest.raises(RequestError):
            await refused.arrived()


async def test_an_async_stream_goes_on_where_it_was_left(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        wanted = await client.generate(PROMPT, max_tokens=30, ignore_eos=True).tokens()
        stream = client.generate(PROMPT, max_tokens=30, ignore_eos=True)
        read = [(await anext(aiter(stream))).token]
        gc.collect()
        async for entry in stream:
            read.append(entry.token)
            break
        assert read == wanted[:2]
        assert await stream.tokens() == wanted


async def test_a_wait_for_an_entry_that_is_given_up_leaves_the_stream_as_it_is(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        wanted = await client.generate(PROMPT, max_tokens=30, ignore_eos=True).tokens()
        stream = client.generate(PROMPT, max_tokens=30, ignore_eos=True)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await stream.tokens() == wanted


async def test_reading_a_closed_async_stream_raises(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        async with client.generate(PROMPT, max_tokens=900, ignore_eos=True, n=32) as stream:
            await anext(stream)
            waiting = asyncio.create_task(stream.wait())
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="closed before its end"):
            await waiting
        with pytest.raises(RuntimeError, match="closed before its end"):
            await anext(stream)
        await until_idle(client)


async def test_a_callback_of_one_async_stream_that_raises_disturbs_no_other(bus: Bus) -> None:
    def refuse(notice: System) -> None:
        raise LookupError(notice.event)

    async with AsyncClient(bus.front) as client:
        options: Any = {"max_tokens": 5, "ignore_eos": True}
        refusing = client.generate(PROMPT, on_system=refuse, **options)
        other = client.generate(PROMPT, **options)
        refusing._call.take([System(event="queued", message="as a broker sends it")])
        with pytest.raises(LookupError):
            await anext(refusing)
        assert len(await other.tokens()) == 5
        assert len(await refusing.tokens()) == 5


async def test_leaving_the_only_loop_over_an_async_stream_cancels(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        async for _ in client.generate(PROMPT, max_tokens=900, ignore_eos=True):
            break
        await until_idle(client)


async def test_a_stream_that_is_over_or_dropped_is_freed(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        over = client.generate(PROMPT, max_tokens=3, ignore_eos=True)
        await over.wait()
        dropped = client.generate(PROMPT, max_tokens=900, ignore_eos=True)
        kept = [weakref.ref(over), weakref.ref(dropped)]
        del over, dropped
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
        await until_idle(client)


async def test_a_cancelled_task_cancels_its_stream(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:

        async def read() -> str:
            stream = client.generate(PROMPT, max_tokens=900, ignore_eos=True, n=32)
            return (await stream.wait())[0].text

        task = asyncio.create_task(read())
        while (await client.status()).streams == 0:
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await until_idle(client)


# --- load -----------------------------------------------------------------------------------------

PROCESSES, STREAMS, TOKENS = 10, 100, 30


def _load(front: str, number: int, results: Any) -> None:
    async def run() -> list[tuple[list[int], list[int]]]:
        async with AsyncClient(front, patience_s=60) as client:
            streams = [
                client.generate(
                    [5 + number, 6 + i], max_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True
                )
                for i in range(STREAMS)
            ]

            async def read(stream: Any) -> tuple[list[int], list[int]]:
                entries = [entry async for entry in stream]
                return [e.pos for e in entries], [e.token for e in entries]

            return await asyncio.gather(*map(read, streams))

    results.put((number, asyncio.run(run())))


def test_a_thousand_streams_of_ten_processes_are_all_complete(bus: Bus, client: Client) -> None:
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_load, args=(bus.front, n, results)) for n in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    got = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    assert sorted(got) == list(range(PROCESSES))
    for streams in got.values():
        assert len(streams) == STREAMS
        assert all(positions == list(range(TOKENS)) for positions, _ in streams)
    # A stream has the same tokens if it runs alone.
    for number, i in ((0, 0), (4, 50), (9, 99)):
        alone = client.generate(
            [5 + number, 6 + i], max_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True
        )
        assert alone.tokens() == got[number][i][1]
    assert idle(client)


# --- failures on the way --------------------------------------------------------------------------


@pytest.mark.process
def test_the_stream_of_a_lost_worker_goes_on_at_another() -> None:
    with Bus(expiry_s=5) as bus:
        first = bus.start_worker()
        bus.wait_for_models("embedded")
        with bus.client() as client:
            options: Any = {
                "max_tokens": 400,
                "temperature": 1.0,
                "ignore_eos": True,
                "seed": 1,
                "retry_s": 0,
                "n": 16,
            }
            wanted = [one.tokens for one in client.generate(PROMPT, **options).wait()]
            notices: list[System] = []
            stream = client.generate(PROMPT, on_system=notices.append, **options)
            entries = iter(stream)
            next(entries)
            # The worker is killed at once, because on a busy machine the stream could end before
            # another worker has started.
            first.kill()
            bus.workers.remove(first)
            bus.start_worker()
            for _ in entries:
                pass
            assert [one.tokens for one in stream.wait()] == wanted
            assert "moved" in [n.event for n in notices]


# --- what a client needs --------------------------------------------------------------------------


@pytest.mark.process
def test_importing_the_client_pulls_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tokenbus.clients; "
        "print(sorted({'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.anyio
async def test_a_stream_that_nobody_reads_is_cancelled_at_its_bound(bus: Bus) -> None:
    async with AsyncClient(bus.front, patience_s=120.0, max_unread=50) as client:
        unread = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        while (await client.status()).streams:
            assert not unread.sequences
        with pytest.raises(SlowClientError, match="more than 50 entries"):
            await unread.wait()
        assert len(unread.sequences[0].tokens) <= 50
        read = client.generate(PROMPT, max_tokens=200, ignore_eos=True)
        assert len(await read.tokens()) == 200
