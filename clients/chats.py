"""Conversations of a client with a model: ``Client.chat`` and ``AsyncClient.chat``.

Messages have OpenAI's form. The client renders the model's chat template, and separates thinking
and calls of tools from the text of the answer. The gateway does the same with the same code.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..protocol.errors import Code, RequestError
from ..protocol.messages import ModelInfo, Token, TokenizerFiles
from ..protocol.model_names import Aliases
from .request_options import GenerateOptions
from .results import GeneratedSequence
from .streams import AsyncStream, Stream

if TYPE_CHECKING:
    from .client import Client
    from .gateway.conversation.planning import Prepared
    from .gateway.models import ModelSource
    from .gateway.templates.templates import Templates

Messages = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: ``{"role": "user", "content": "…"}``."""
Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""


class Chats:
    """Prepares the conversations of one client, and caches the tokenizers of its models."""

    def __init__(self, source: ModelSource) -> None:
        """``source`` must not have a reference to the client, because the client closes when its
        last reference is dropped. Raises ImportError if the packages of the extra ``gateway`` are
        missing."""
        try:
            from .gateway.models import ModelTable
            from .gateway.templates.templates import OwnTemplates
        except ImportError as error:
            raise ImportError(
                f"chat needs the packages of the extra gateway ({error}); install them with "
                "pip install 'tokenbus[gateway]'"
            ) from error
        self.models = ModelTable(source, Aliases([]))
        self.templates: Templates = OwnTemplates()

    async def prepare(
        self,
        messages: Messages,
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        options: GenerateOptions,
    ) -> Prepared:
        """The prompt of a conversation, and the form of its answer. Adds the model, ``text``, the
        default of ``max_tokens`` and the constraint to ``options``. Raises RequestError if the
        conversation is not valid."""
        from .gateway.bodies.leniency import Ignored
        from .gateway.bodies.reading import decode_body
        from .gateway.conversation.planning import prepare
        from .gateway.errors import ApiError
        from .gateway.openai.chat_bodies import ChatRequest

        given = {
            "messages": messages,
            "tools": tools,
            "tool_choice": tool_choice,
            "controller": options.pop("controller", None),
            "controller_arg": options.pop("controller_arg", None),
        }
        try:
            body = decode_body(msgspec.json.encode(given), ChatRequest, Ignored())
            conversation = body.to_conversation()
            prepared = await prepare(self, options.get("model", ""), conversation, Ignored())
        except ApiError as error:
            path = None if error.param is None else f"$.{error.param}"
            raise RequestError(Code.INVALID_FIELD, error.message, path=path) from None
        options["model"] = prepared.model.name
        options["text"] = True
        room = prepared.model.info.context_length - len(prepared.ids)
        options.setdefault("max_tokens", max(1, room))
        if prepared.constraint is not None:
            options.update(prepared.constraint.options)
        return prepared


class BlockingChats:
    """The conversations of a blocking client. Any thread may use them."""

    def __init__(self, client: Client) -> None:
        self._chats = Chats(_Blocking(weakref.proxy(client)))
        self._turn = threading.Lock()

    def prepare(
        self,
        messages: Messages,
        tools: Tools | None,
        tool_choice: str | Mapping[str, Any] | None,
        options: GenerateOptions,
    ) -> Prepared:
        """Calls ``Chats.prepare`` and blocks the calling thread until the result is ready."""
        done: Future[Prepared] = Future()

        def run() -> None:
            # ``asyncio.run`` needs a thread without an event loop. The calling thread may have one,
            # as in a notebook.
            try:
                work = self._chats.prepare(messages, tools, tool_choice, options)
                done.set_result(asyncio.run(work))
            except BaseException as error:
                done.set_exception(error)

        with self._turn:
            threading.Thread(target=run, name="tokenbus-chat", daemon=True).start()
            return done.result()


@dataclass
class _Blocking:
    """Gives ``Chats`` the models of a blocking client. A call blocks the event loop of ``Chats``,
    which has no other task."""

    client: Client

    async def model_info(self, model: str = "", *, timeout_s: float = 30.0) -> ModelInfo:
        return self.client.model_info(model, timeout_s=timeout_s)

    async def tokenizer(self, model: str = "", *, timeout_s: float = 30.0) -> TokenizerFiles:
        return self.client.tokenizer(model, timeout_s=timeout_s)


class _Texts:
    """The text of the first sequence while it arrives, without thinking and calls of tools."""

    def __init__(self, prepared: Prepared) -> None:
        from .gateway.conversation.answers import Answer

        self._form = prepared.form
        self._answer = Answer(prepared.form)

    def read(self, entry: Token) -> str:
        """The text that an entry adds."""
        from .gateway.conversation.answers import entry_text
        from .gateway.conversation.parts import Text

        if entry.seq != 0:
            return ""
        pieces = self._answer.feed(entry_text(self._form, entry))
        if entry.finish_reason is not None:
            pieces += self._answer.end()
        return "".join(piece.text for piece in pieces if isinstance(piece.part, Text))


def _message(prepared: Prepared, sequences: Sequence[GeneratedSequence]) -> dict[str, Any]:
    from .gateway.openai.chat import message_of

    first = sequences[0] if sequences else GeneratedSequence(0)
    found: dict[str, Any] = msgspec.to_builtins(message_of(prepared, first))
    return found


class Chat:
    """The answer to a conversation.

    Iteration yields the text of the answer as it arrives. A controller may later remove text that
    was already yielded. ``message`` has the final answer.
    """

    def __init__(self, stream: Stream, prepared: Prepared) -> None:
        self.stream = stream
        """The stream of the answer, with its entries and sequences."""
        self._prepared = prepared

    def __iter__(self) -> Iterator[str]:
        texts = _Texts(self._prepared)
        return (text for entry in self.stream if (text := texts.read(entry)))

    def message(self) -> dict[str, Any]:
        """Reads the answer to its end, and returns the assistant's message. The message can be one
        of the ``messages`` of the next ``chat``. Its fields are ``role`` and ``content``, and
        possibly ``tool_calls`` and ``reasoning_content``."""
        return _message(self._prepared, self.stream.wait())

    def text(self) -> str:
        """Reads the answer to its end; returns its text."""
        return self.message()["content"] or ""

    def close(self) -> None:
        """Cancels the answer unless it has been read to its end."""
        self.stream.close()


class AsyncChat:
    """The answer to a conversation of ``AsyncClient``; see ``Chat``."""

    def __init__(self, stream: AsyncStream, prepared: Prepared) -> None:
        self.stream = stream
        self._prepared = prepared

    async def __aiter__(self) -> AsyncIterator[str]:
        texts = _Texts(self._prepared)
        async for entry in self.stream:
            if text := texts.read(entry):
                yield text

    async def message(self) -> dict[str, Any]:
        """Reads the answer to its end, and returns the message; see ``Chat.message``."""
        return _message(self._prepared, await self.stream.wait())

    async def text(self) -> str:
        """Reads the answer to its end; returns its text."""
        message = await self.message()
        return message["content"] or ""

    def close(self) -> None:
        """Cancels the answer unless it has been read to its end."""
        self.stream.close()
