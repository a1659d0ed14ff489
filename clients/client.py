"""``Client``: the blocking client, and the streams that it reads."""

from __future__ import annotations

import queue
import weakref
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

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


def _deliver(ready: Delivery) -> None:
    """On the connection's thread: into the queue of each call."""
    for call, events in ready:
        call.take(events)


class Client:
    """A connection to a Tokenbus broker. One carries any number of streams, from any threads.

    ``front`` is the broker's address; without it, the setting of that name (``TOKENBUS_FRONT``,
    ``tokenbus.toml``, else ``tcp://127.0.0.1:5555``). ``patience_s``: how long calls wait for a
    broker that does not answer, in seconds.

        with Client() as client:
            for token in client.generate("def add(a, b):", max_tokens=20):
                print(token.text, end="")
    """

    def __init__(self, front: str | None = None, *, patience_s: float | None = None) -> None:
        settings = load(front=front)
        self.front = settings.front
        self._connection = Connection(
            self.front,
            _deliver,
            settings.session_timeout_s if patience_s is None else patience_s,
        )
        self._close = weakref.finalize(self, self._connection.close)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Begins a stream of tokens that continue ``prompt``: text, or token ids.

        The options are those of ``GenerateOptions``: ``model``, ``temperature`` (0, greedy),
        ``max_tokens`` (64), ``seed``, ``stop``, ``n`` and so on. Errors are raised where the stream
        is read: RequestError where the request is wrong, UnavailableError, RequestTimeoutError,
        ControllerError, SlowClientError, ServiceError.
        """
        return Stream(self, generate_call(prompt, options), options.get("on_system"))

    def score(self, prompt: Prompt, scored: Prompt, **options: Unpack[RequestOptions]) -> Scores:
        """The log-probability of each token of ``scored``, given all before it."""
        stream = Stream(self, score_call(prompt, scored, options), options.get("on_system"))
        [sequence] = stream.wait() or [GeneratedSequence(0)]
        return Scores(sequence.tokens, sequence.logprobs, sequence.texts)

    def model_info(self, model: str = "", *, timeout_s: float = ASK_S) -> ModelInfo:
        """What is known of a model; loads one that is loaded on demand."""
        answer = self._ask(model_info_call(model, timeout_s))
        assert isinstance(answer.model_info, ModelInfo)
        return answer.model_info

    def status(self, *, timeout_s: float = ASK_S) -> Status:
        """Workers, sessions and queues."""
        answer = self._ask(status_call(timeout_s))
        assert isinstance(answer.status, Status)
        return answer.status

    def buffer(self, name: str, content: Prompt | None, *, timeout_s: float = ASK_S) -> None:
        """Keeps a part of prompts at the broker, for ``buffers=[name]``; None drops it."""
        self._ask(buffer_call(name, content, timeout_s))

    def upload_controller(
        self, wasm: bytes | Path, tag: str | None = None, *, timeout_s: float = UPLOAD_S
    ) -> StoredModule:
        """Stores a controller's Wasm module, given as bytes or as a file, for ``controller=``.

        ``tag`` names it from then on, besides its id. The same module again changes nothing else.
        Raises RequestError where it is none that can run, saying why.
        """
        return stored_module(self._ask(upload_call(wasm, tag, timeout_s)))

    def tag_controller(self, module: str, *tags: str, timeout_s: float = ASK_S) -> StoredModule:
        """Lets ``tags`` name the module of this id or tag; they name no other one any more."""
        return stored_module(self._ask(tag_call(module, tags, timeout_s)))

    def controllers(self, *, timeout_s: float = ASK_S) -> list[StoredModule]:
        """The controller modules that were uploaded, the latest first."""
        return stored_modules(self._ask(tags_call(timeout_s)))

    def delete_controller(self, name: str, *, timeout_s: float = ASK_S) -> StoredModule:
        """Drops a tag, or the module of an id with all its tags; returns what was dropped."""
        return stored_module(self._ask(delete_call(name, timeout_s)))

    def close(self) -> None:
        """Ends the session, and every stream of it."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, call: Call) -> Msg:
        stream = Stream(self, call, None)
        stream.wait()
        return stream._answer or Msg(stream_id=0)


class Stream:
    """The tokens of one request, as they come.

    Iterate it for the ``Token`` entries; leaving the loop, by ``break`` or by an error, cancels
    the request. ``text`` and ``wait`` read it to its end. ``sequences`` is what was read so far.
    Reading it to the end raises TokenbusError where the stream failed.
    """

    def __init__(self, client: Client, call: Call, on_system: OnSystem | None) -> None:
        self._connection = client._connection
        self._client = client  # Streams keep their client alive.
        self._call = call
        self._on_system = on_system
        self._inbox: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        call.take = self._inbox.put
        self._collected = Sequences()
        self._entries: deque[Token] = deque()
        """Those that have come and were not read yet."""
        self._answer: Msg | None = None
        self._over = True
        self._error: TokenbusError | None = None
        self._connection.submit(call)
        self._over = False

    @property
    def sequences(self) -> list[GeneratedSequence]:
        """The sequences as far as they were read: with the entry of the loop, and none after it."""
        return self._collected.listed()

    @property
    def text(self) -> str:
        """The text of the first sequence, read to its end.

        Raises ValueError where the request did not ask for text.
        """
        check_text(self._call)
        return next((s.text for s in self.wait()), "")

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first sequence, read to its end."""
        return next((s.tokens for s in self.wait()), [])

    def wait(self) -> list[GeneratedSequence]:
        """Reads to the end; all sequences."""
        for _ in self:
            pass
        return self.sequences

    def close(self) -> None:
        """Cancels the request, if it is not over."""
        if not self._over:
            self._over = True
            self._connection.cancel(self._call)

    def __iter__(self) -> Entries:
        return Entries(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self.close()

    def __repr__(self) -> str:
        return f"<Stream {self._call.number}: {describe(self._over, self.sequences)}>"

    def _next(self) -> Token | None:
        """The next entry, waiting for it; None where the stream is over."""
        while not self._entries and not self._over:
            for event in self._inbox.get():
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
        if not self._entries:
            return None
        entry = self._entries.popleft()
        self._collected.add(entry)
        return entry

    def _failure(self) -> TokenbusError | None:
        """Why the stream failed, when all of it was read."""
        return self._error or self._collected.failure()


class Entries:
    """Iterates the entries of a stream, and cancels it when it is left before the end."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._done = False

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Token:
        try:
            entry = self._stream._next()
        except BaseException:
            self._stream.close()
            raise
        if entry is not None:
            return entry
        self._done = True
        error = self._stream._failure()
        if error is not None:
            raise error.with_traceback(None)
        raise StopIteration

    def __del__(self) -> None:
        if not self._done:
            self._stream.close()
