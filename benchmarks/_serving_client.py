"""A client process that reads streams as fast as their tokens arrive.

``python _serving_client.py KIND ADDRESS MODEL`` receives an order for each run from a ``Loader``
(``_served.py``). An order has three fields. ``prompts`` has a list of token ids for each stream.
``tokens`` is the number of tokens that each stream generates. ``options`` has further fields of the
requests. All streams begin together. The answer has two rates in tokens per second. ``whole`` is
measured from the first request to the last token. ``middle`` is measured from the time at which one
tenth of all tokens has arrived to the time at which eight tenths have arrived. KIND is one of these
clients:

``KIND`` is one of three clients:

- ``count`` has one connection, receives tokens in columns, and only counts tokens and ends of
  streams.
- ``python`` is our ``AsyncClient``. If an order has ``seconds``, the client runs one stream after
  another for this time. The answer then has only ``per_second``, the number of tokens in each
  second.
- ``llamacpp`` is an HTTP client of llama.cpp's server with one connection for each stream. Its
  answer has only ``whole``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq
from _served import answer, orders
from tokenbus.clients import AsyncClient

SILENCE_MS = 60_000
"""If no message arrives for this number of milliseconds, a run fails."""

Order = Mapping[str, Any]


class Clock:
    """Records the arrival times of a run's tokens."""

    def __init__(self, total: int) -> None:
        self.count = 0
        self._total = total
        self._low, self._high = total // 10, 8 * total // 10
        self._marks: list[tuple[int, float]] = []
        self._began = time.perf_counter()

    def add(self, count: int) -> None:
        """Records the arrival of ``count`` tokens."""
        self.count += count
        if self.count >= (self._high if self._marks else self._low) and len(self._marks) < 2:
            self._marks.append((self.count, time.perf_counter()))

    def whole(self) -> float:
        """Tokens per second of an ended run.

        Raises RuntimeError if more than a fifth of the expected tokens are missing, or if there are
        too many tokens. Fewer may be missing, because a constraint can end a stream before its
        limit.
        """
        if not 0.8 * self._total <= self.count <= self._total:
            raise RuntimeError(f"{self.count} tokens have arrived; expected {self._total}")
        return self.count / (time.perf_counter() - self._began)

    def found(self) -> dict[str, float]:
        """The answer to an ended run."""
        whole = self.whole()
        (low, since), (high, until) = self._marks
        return {"whole": whole, "middle": (high - low) / (until - since)}


# --- a client that only counts --------------------------------------------------------------------


class Counted(msgspec.Struct):
    """The fields of an entry that are needed to count it."""

    token: int | None = None
    finish_reason: str | None = None


class CountedColumns(msgspec.Struct, rename={"tokens": "t", "entries": "e"}):
    """The fields of the body of a ``TOKEN`` in columns that are needed to count its tokens and
    ends."""

    tokens: bytes = b""
    entries: list[Counted] = []


_body: Any = msgspec.msgpack.Decoder(list[Counted] | CountedColumns)


def tokens_and_ends(body: bytes) -> tuple[int, int]:
    """The number of tokens and the number of stream ends in the body of a ``TOKEN``."""
    found = _body.decode(body)
    columns = isinstance(found, CountedColumns)
    tokens, entries = (len(found.tokens) // 4, found.entries) if columns else (0, found)
    tokens += sum(entry.token is not None for entry in entries)
    return tokens, sum(entry.finish_reason is not None for entry in entries)


class Counting:
    """A client with one session, which only counts the tokens and the ends of its streams."""

    def __init__(self, front: str, model: str) -> None:
        self._model = model
        self._stream_id = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
        self._socket.connect(front)
        capabilities = ["columns", "text_columns", "bodies"]
        self._send(b"HELLO", {"encodings": ["msgpack"], "capabilities": capabilities})
        assert self._socket.recv_multipart()[0] == b"WELCOME"

    def run(self, order: Order) -> dict[str, float]:
        """Reads all streams of a run to their ends."""
        prompts, tokens = order["prompts"], order["tokens"]
        clock = Clock(len(prompts) * tokens)
        for prompt in prompts:
            self._stream_id += 1
            request = {"stream_id": self._stream_id, "model": self._model, "prompt": prompt}
            request |= {"max_tokens": tokens, "ignore_eos": True, **order["options"]}
            self._send(b"GENERATE", request)
        live = len(prompts)
        while live:
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                raise RuntimeError(
                    f"no message after {clock.count} tokens, while {live} streams are live"
                ) from None
            if frames[0] == b"TOKEN":
                for body in frames[1:]:
                    count, ends = tokens_and_ends(body)
                    clock.add(count)
                    live -= ends
            elif frames[0] == b"ERROR":
                raise RuntimeError(f"a stream has failed: {frames[1]!r}")
        return clock.found()

    def _send(self, kind: bytes, body: Mapping[str, Any]) -> None:
        self._socket.send_multipart([kind, msgspec.msgpack.encode(body)])


# --- our own client -------------------------------------------------------------------------------


class OurClient:
    """One ``AsyncClient`` with a task for each stream."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def run(self, order: Order) -> dict[str, Any]:
        """Reads all streams of a run to their ends."""
        if "seconds" in order:
            return await self._one_after_another(order)
        prompts, tokens = order["prompts"], order["tokens"]
        clock = Clock(len(prompts) * tokens)

        async def read(prompt: list[int]) -> None:
            async for _ in self._client.generate(
                prompt, model=self._model, max_tokens=tokens, ignore_eos=True, **order["options"]
            ):
                clock.add(1)

        await asyncio.gather(*map(read, prompts))
        return clock.found()

    async def _one_after_another(self, order: Order) -> dict[str, list[int]]:
        """Runs one stream after another; returns the number of tokens in each second."""
        counts = [0] * int(order["seconds"])
        began = 0.0
        for prompt in itertools.cycle(order["prompts"]):
            async for _ in self._client.generate(
                prompt, model=self._model, max_tokens=order["tokens"], ignore_eos=True
            ):
                now = time.perf_counter()
                began = began or now
                if now - began >= len(counts):
                    return {"per_second": counts}
                counts[int(now - began)] += 1
        raise ValueError("the run has no prompts")


# --- llama.cpp's server ---------------------------------------------------------------------------


class LlamaClient:
    """A client of llama.cpp's server with one connection for each stream. The connections open
    before the clock starts."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    async def run(self, order: Order) -> dict[str, float]:
        """Reads all streams of a run to their ends. The client counts a stream's tokens when the
        stream ends. It cannot count events, because an event may have several tokens: the server
        holds tokens back until their characters are complete."""
        prompts, tokens = order["prompts"], order["tokens"]
        opened = [await asyncio.open_connection(*self._address) for _ in prompts]
        clock = Clock(len(prompts) * tokens)

        async def read(
            streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], prompt: list[int]
        ) -> None:
            clock.add(await self._stream(*streams, prompt, tokens))

        await asyncio.gather(*map(read, opened, prompts))
        found = {"whole": clock.whole()}
        for _, writer in opened:
            writer.close()
        return found

    async def _stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        prompt: list[int],
        tokens: int,
    ) -> int:
        """Reads one stream; returns the number of tokens that the server reports."""
        body = {"prompt": prompt, "n_predict": tokens, "stream": True, "ignore_eos": True}
        # Greedy sampling needs only one sampler. The server must not reuse earlier prompts.
        body |= {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0, "cache_prompt": False}
        data = json.dumps(body).encode()
        head = "POST /completion HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        begun = await reader.readuntil(b"\r\n\r\n")
        if not begun.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"llama.cpp's server refused: {begun + await reader.read(4096)!r}")
        found = 0
        while True:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            event = await reader.readexactly(size + 2)
            if size == 0:
                return found
            for line in event.split(b"\n") if b'"stop":true' in event else []:
                if line.startswith(b"data: "):
                    found = json.loads(line[6:]).get("tokens_predicted", found)


# --- the process ----------------------------------------------------------------------------------


async def _serve(run: Callable[[Order], Any]) -> None:
    loop = asyncio.get_running_loop()
    waiting = orders()
    while (order := await loop.run_in_executor(None, next, waiting, None)) is not None:
        answer(await run(order))


async def main(kind: str, address: str, model: str) -> None:
    """Handles orders until the end of the input."""
    if kind == "count":
        counting = Counting(address, model)
        for order in orders():
            answer(counting.run(order))
    elif kind == "python":
        async with AsyncClient(address) as client:
            await _serve(OurClient(client, model).run)
    else:
        host, port = address.split(":")
        await _serve(LlamaClient(host, int(port)).run)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
