"""``AsyncClient``: the client for asyncio, with the methods of ``Client``."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from ..protocol.keys import OwnKey
from ..protocol.messages import Embedded, ModelInfo, Msg, Status, StoredModule, TokenizerFiles
from .base_client import BaseClient, ClientOptions
from .calls import Call
from .chats import AsyncChat, Chats, Messages, Tools
from .lanes import Delivery, hand_out
from .recording import Recorder
from .request_options import (
    ASK_S,
    UPLOAD_S,
    EmbedOptions,
    GenerateOptions,
    OnSystem,
    Prompt,
    ScoreOptions,
    buffer_call,
    delete_call,
    embed_call,
    generate_call,
    model_info_call,
    score_call,
    status_call,
    stored_module,
    stored_modules,
    tag_call,
    tags_call,
    tokenizer_call,
    upload_call,
)
from .results import GeneratedSequence, Scores
from .streams import AsyncStream


class AsyncClient(BaseClient):
    """A connection to a Tokenbus broker, for one event loop. Its methods are those of ``Client``.

    async with AsyncClient() as client:
        async for token in client.generate("def add(a, b):", max_tokens=20):
            print(token.text, end="")
        print(await client.generate("def add(a, b):").text())
    """

    _stream_type: type[AsyncStream] = AsyncStream
    """The type of the streams that this client begins."""

    def __init__(
        self,
        front: str | None = None,
        *,
        patience_s: float | None = None,
        max_unread: int | None = None,
        wait_for_room: bool = True,
        key: OwnKey | None = None,
        session: str | None = None,
        keep_s: float = 0.0,
    ) -> None:
        """``front``, ``patience_s``, ``key`` and ``keep_s`` are as in ``Client``.

        ``max_unread``: maximum number of unread entries of a stream. A stream that exceeds this
        number is cancelled and ends with SlowClientError. None: no maximum. ``wait_for_room``: if
        the broker's queue is full, or the client has too many open requests, the client sends the
        request again until ``retry_s`` has passed. If False, such a request fails at once. A server
        sets False, so that its own clients decide whether to try again. ``session``: the session's
        token. If a session with this token exists already, the client takes over this session.
        Otherwise the client begins a session with this token. If None, the broker begins a session
        with a new token.
        """
        self._max_unread = max_unread
        self._wait_for_room = wait_for_room
        self._chats: Chats | None = None
        loops: list[asyncio.AbstractEventLoop] = []
        self._loops = loops

        def deliver(ready: Delivery) -> None:
            """Passes a batch of events to the event loop. Runs on the connection's thread."""
            with contextlib.suppress(RuntimeError):  # Raised if the loop is closed.
                loops[-1].call_soon_threadsafe(hand_out, ready)

        super().__init__(ClientOptions(front, patience_s, key, keep_s, session), deliver)

    def generate(
        self,
        prompt: Prompt,
        *,
        record: str | Path | Recorder | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Begins a stream of tokens that continue ``prompt``; see ``Client.generate``."""
        call = generate_call(prompt, options)
        recorder = None
        if record is not None:
            recorder = record if isinstance(record, Recorder) else Recorder(record)
            recorder.begin(call, None, self._sent_buffers)
            model = self._stream(model_info_call(options.get("model", ""), ASK_S), None)
            recorder.served_by = lambda: _model_info(model)
        return self._stream(call, options.get("on_system"), recorder)

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncChat:
        """The answer to a conversation; see ``Client.chat``."""
        if self._chats is None:
            self._chats = Chats(weakref.proxy(self))
        prepared = await self._chats.prepare(messages, tools, tool_choice, options)
        return AsyncChat(self.generate(prepared.ids, **options), prepared)

    async def score(
        self, prompt: Prompt, scored: Prompt, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """The log-probability of each token of ``scored``, given all tokens before it."""
        stream = self._stream(score_call(prompt, scored, options), options.get("on_system"))
        [sequence] = await stream.wait() or [GeneratedSequence(0)]
        return Scores.of(sequence)

    async def embed(
        self, inputs: Sequence[Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embedded:
        """One vector for each input. An input is a list of token ids (see ``tokenizer``). At most
        256 inputs are allowed.

        Raises RequestError if the model does not compute embeddings.
        """
        answer = await self.ask(embed_call(inputs, options))
        assert isinstance(answer.embedded, Embedded)
        return answer.embedded

    async def models(self, *, timeout_s: float = ASK_S) -> list[str]:
        """The names of the loaded models, sorted."""
        status = await self.status(timeout_s=timeout_s)
        return sorted({name for worker in status.workers for name in worker.models})

    async def model_info(self, model: str = "", *, timeout_s: float = ASK_S) -> ModelInfo:
        """The properties of a model. A model that is served on demand is loaded first."""
        answer = await self.ask(model_info_call(model, timeout_s))
        assert isinstance(answer.model_info, ModelInfo)
        return answer.model_info

    async def tokenizer(self, model: str = "", *, timeout_s: float = ASK_S) -> TokenizerFiles:
        """The tokenizer of a model; see ``Client.tokenizer``."""
        answer = await self.ask(tokenizer_call(model, timeout_s))
        assert isinstance(answer.tokenizer, TokenizerFiles)
        return answer.tokenizer

    async def status(
        self, *, streams: bool = False, metrics: bool = False, timeout_s: float = ASK_S
    ) -> Status:
        """Returns the broker's workers, sessions and queues. ``streams`` adds the live streams that
        this client may see, and ``metrics`` adds the counters and histograms."""
        answer = await self.ask(status_call(timeout_s, streams, metrics))
        assert isinstance(answer.status, Status)
        return answer.status

    async def buffer(self, name: str, content: Prompt, *, timeout_s: float = ASK_S) -> None:
        """Stores a part of a prompt at the broker, under a name. The prompt of a request with
        ``buffers=[name]`` begins with this part."""
        await self.ask(buffer_call(name, content, timeout_s))
        self._sent_buffers[name] = content

    async def drop_buffer(self, name: str, *, timeout_s: float = ASK_S) -> None:
        """Deletes a buffer. An unknown name is not an error."""
        await self.ask(buffer_call(name, None, timeout_s))
        self._sent_buffers.pop(name, None)

    async def upload_controller(
        self,
        wasm: bytes | Path,
        tag: str | None = None,
        *,
        by: str = "",
        timeout_s: float = UPLOAD_S,
    ) -> StoredModule:
        """Stores a controller's Wasm module; see ``Client.upload_controller``."""
        return stored_module(await self.ask(upload_call(wasm, tag, timeout_s, by)))

    async def tag_controller(
        self, module: str, *tags: str, by: str = "", timeout_s: float = ASK_S
    ) -> StoredModule:
        """Assigns ``tags`` to the module with this id or tag, and removes them from other modules.

        ``by``: as in ``upload_controller``.
        """
        return stored_module(await self.ask(tag_call(module, tags, timeout_s, by)))

    async def controllers(self, *, timeout_s: float = ASK_S) -> list[StoredModule]:
        """The uploaded controller modules, the latest first."""
        return stored_modules(await self.ask(tags_call(timeout_s)))

    async def delete_controller(self, name: str, *, timeout_s: float = ASK_S) -> StoredModule:
        """Deletes a tag, or a module and all its tags. ``name`` is the tag or the module id."""
        return stored_module(await self.ask(delete_call(name, timeout_s)))

    async def close(self) -> None:
        """Ends the session and all of its streams."""
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
        """Raises RuntimeError if another event loop uses this client and is not closed."""
        loop = asyncio.get_running_loop()
        if self._loops and self._loops[-1] is not loop and not self._loops[-1].is_closed():
            raise RuntimeError(
                "this AsyncClient is used by another event loop; create one client for each loop"
            )
        self._loops[:] = [loop]

    async def ask(self, call: Call) -> Msg:
        """The answer to a call that is not a stream. Other modules of the package use this
        method."""
        return await answer_to(self.begin(call))

    def begin(self, call: Call) -> AsyncStream:
        """Sends a call that is not a stream. ``answer_to`` then waits for the answer."""
        return self._stream(call, None)

    def _stream(
        self, call: Call, on_system: OnSystem | None, recorder: Recorder | None = None
    ) -> AsyncStream:
        self._enter_loop()
        call.waits_for_room = self._wait_for_room
        return self._stream_type(
            self, self._connection, call, on_system, self._max_unread, recorder
        )


def _model_info(stream: AsyncStream) -> ModelInfo | None:
    """The answer to MODEL_INFO; None if it has not arrived."""
    stream.read_arrived()
    info = stream.answer.model_info if stream.answer is not None else None
    return info if isinstance(info, ModelInfo) else None


async def answer_to(begun: AsyncStream) -> Msg:
    """The answer to a call that was sent by ``AsyncClient.begin``."""
    await begun.wait()
    return begun.answer or Msg(stream_id=0)
