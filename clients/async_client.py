"""``AsyncClient``: the same client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from ..protocol.errors import TokenbusError
from ..protocol.messages import ModelInfo, Msg, Status, StoredModule, System, Token
from ..protocol.settings import load
from .calls import Call, Ended, Event
from .connection import Connection, Delivery
from .request_options import (
    ASK_S,
    UPLOAD_S,
    GenerateOptions,
    OnSystem,
    Prompt,
    RequestOptions,
    buffer_call,
    delete_call,
    generate_call,
    model_info_call,
    score_call,
    status_call,
    stored_module,
    stored_modules,
    tag_call,
    tags_call,
    upload_call,
)
from .results import GeneratedSequence, Scores, Sequences, check_text, describe


def _hand_out(ready: Delivery) -> None:
    for call, events in ready:
        call.take(events)


class AsyncClient:
    """A connection to a Tokenbus broker, for one event loop; as ``Client`` in everything else.

    async with AsyncClient() as client:
        async for token in client.generate("def add(a, b):", max_tokens=20):
            print(token.text, end="")
        print(await client.generate("def add(a, b):").text)
    """

    def __init__(self, front: str | None = None, *, patience_s: float | None = None) -> None:
        settings = load(front=front)
        self.front = settings.front
        loops: list[asyncio.AbstractEventLoop] = []
        self._loops = loops

        def deliver(ready: Delivery) -> None:
            """On the connection's thread: over to the event loop, all of a message's at once."""
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loops[-1].call_soon_threadsafe(_hand_out, ready)

        self._connection = Connection(
            self.front,
            deliver,
            settings.session_timeout_s if patience_s is None else patience_s,
        )
        self._close = weakref.finalize(self, self._connection.close)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Begins a stream of tokens that continue ``prompt``; see ``Client.generate``."""
        return AsyncStream(self, generate_call(prompt, options), options.get("on_system"))

    async def score(
        self, prompt: Prompt, scored: Prompt, **options: Unpack[RequestOptions]
    ) -> Scores:
        """The log-probability of each token of ``scored``, given all before it."""
        stream = AsyncStream(self, score_call(prompt, scored, options), options.get("on_system"))
        [sequence] = await stream.wait() or [GeneratedSequence(0)]
        return Scores(sequence.tokens, sequence.logprobs, sequence.texts)

    async def model_info(self, model: str = "", *, timeout_s: float = ASK_S) -> ModelInfo:
        """What is known of a model; loads one that is loaded on demand."""
        answer = await self._ask(model_info_call(model, timeout_s))
        assert isinstance(answer.model_info, ModelInfo)
        return answer.model_info

    async def status(self, *, timeout_s: float = ASK_S) -> Status:
        """Workers, sessions and queues."""
        answer = await self._ask(status_call(timeout_s))
        assert isinstance(answer.status, Status)
        return answer.status

    async def buffer(self, name: str, content: Prompt | None, *, timeout_s: float = ASK_S) -> None:
        """Keeps a part of prompts at the broker, for ``buffers=[name]``; None drops it."""
        await self._ask(buffer_call(name, content, timeout_s))

    async def upload_controller(
        self, wasm: bytes | Path, tag: str | None = None, *, timeout_s: float = UPLOAD_S
    ) -> StoredModule:
        """Stores a controller's Wasm module; see ``Client.upload_controller``."""
        return stored_module(await self._ask(upload_call(wasm, tag, timeout_s)))

    async def tag_controller(
        self, module: str, *tags: str, timeout_s: float = ASK_S
    ) -> StoredModule:
        """Lets ``tags`` name the module of this id or tag; they name no other one any more."""
        return stored_module(await self._ask(tag_call(module, tags, timeout_s)))

    async def controllers(self, *, timeout_s: float = ASK_S) -> list[StoredModule]:
        """The controller modules that were uploaded, the latest first."""
        return stored_modules(await self._ask(tags_call(timeout_s)))

    async def delete_controller(self, name: str, *, timeout_s: float = ASK_S) -> StoredModule:
        """Drops a tag, or the module of an id with all its tags; returns what was dropped."""
        return stored_module(await self._ask(delete_call(name, timeout_s)))

    async def close(self) -> None:
        """Ends the session, and every stream of it."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    def _enter_loop(self) -> None:
        """Raises RuntimeError where this client serves another event loop, which still runs."""
        loop = asyncio.get_running_loop()
        if self._loops and self._loops[-1] is not loop and not self._loops[-1].is_closed():
            raise RuntimeError("an AsyncClient belongs to one event loop; make one for each")
        self._loops[:] = [loop]

    async def _ask(self, call: Call) -> Msg:
        stream = AsyncStream(self, call, None)
        await stream.wait()
        return stream._answer or Msg(stream_id=0)


class AsyncStream:
    """The tokens of one request, as they come; see ``Stream``. One task reads it."""

    def __init__(self, client: AsyncClient, call: Call, on_system: OnSystem | None) -> None:
        self._connection = client._connection
        self._client = client
        self._call = call
        self._on_system = on_system
        self._collected = Sequences()
        self._entries: deque[Token] = deque()
        self._arrived = asyncio.Event()
        self._answer: Msg | None = None
        self._over = True
        self._error: TokenbusError | None = None
        client._enter_loop()
        this = weakref.ref(self)

        def take(events: list[Event]) -> None:
            stream = this()
            if stream is not None:
                stream._arrive(events)

        call.take = take
        self._connection.submit(call)
        self._over = False

    @property
    def sequences(self) -> list[GeneratedSequence]:
        """The sequences as far as they were read: with the entry of the loop, and none after it."""
        return self._collected.listed()

    @property
    def text(self) -> Coroutine[Any, Any, str]:
        """``await stream.text``: the text of the first sequence, read to its end.

        Raises ValueError where the request did not ask for text.
        """
        check_text(self._call)
        return self._text()

    @property
    def tokens(self) -> Coroutine[Any, Any, list[int]]:
        """``await stream.tokens``: the tokens of the first sequence, read to its end."""
        return self._tokens()

    async def wait(self) -> list[GeneratedSequence]:
        """Reads to the end; all sequences."""
        async for _ in self:
            pass
        return self.sequences

    def close(self) -> None:
        """Cancels the request, if it is not over."""
        if not self._over:
            self._over = True
            self._connection.cancel(self._call)
            self._arrived.set()

    def __aiter__(self) -> AsyncEntries:
        return AsyncEntries(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._connection.cancel(self._call)

    def __repr__(self) -> str:
        return f"<AsyncStream {self._call.number}: {describe(self._over, self.sequences)}>"

    async def _text(self) -> str:
        return next((s.text for s in await self.wait()), "")

    async def _tokens(self) -> list[int]:
        return next((s.tokens for s in await self.wait()), [])

    def _arrive(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Token():
                    self._entries.append(event)
                case System():
                    if self._on_system is not None:
                        self._on_system(event)
                case Msg():
                    self._answer = event
                case Ended(error):
                    self._over = True
                    self._error = error
        self._arrived.set()


class AsyncEntries:
    """Iterates the entries of a stream, and cancels it when it is left before the end."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._done = False

    def __aiter__(self) -> AsyncEntries:
        return self

    async def __anext__(self) -> Token:
        stream = self._stream
        while not stream._entries and not stream._over:
            stream._arrived.clear()
            await stream._arrived.wait()
        if stream._entries:
            entry = stream._entries.popleft()
            stream._collected.add(entry)
            return entry
        self._done = True
        error = stream._error or stream._collected.failure()
        if error is not None:
            raise error.with_traceback(None)
        raise StopAsyncIteration

    def __del__(self) -> None:
        if not self._done:
            self._stream.close()
