"""Converts a stream of tokens to AICI's terms, for both forms of the interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request

from ....protocol.errors import Code, TokenbusError
from ....protocol.messages import Token
from ... import AsyncStream, GenerateOptions
from ...results import GeneratedSequence, Sequences
from ..context import Gateway
from ..events import unless_disconnected
from ..first_entries import first_entries
from ..generation.generations import MAX_BATCH
from ..loop_time import EntryPasses
from ..models import ServedModel

BACKTRACK = " ↩ "
"""The text that marks a backtrack of the controller, as in AICI's server."""
NO_CONTROLLER = "none"
"""The controller name of a request without a controller."""

FINISH = {
    "stop": "eos",
    "length": "length",
    "controller": "aici-stop",
    "cancelled": "abort",
    "timeout": "abort",
    "error": "fail",
}
"""AICI's names of finish reasons."""
CONTROLLERS_OWN = frozenset({Code.CONTROLLER_FAILED, Code.CONTROLLER_TIMEOUT, Code.DEADLOCK})
"""Codes of errors that a running controller has caused."""


class Fork(Struct):
    """The new part of a sequence. Only ``messages``, ``waiting`` and ``exact`` may be absent."""

    index: int
    text: str
    logs: str
    storage: list[Any]
    error: str
    finish_reason: str | None
    messages: list[str] | UnsetType = UNSET
    """The texts that the program sent to the client, if any."""
    waiting: int | UnsetType = UNSET
    """The number of the input that the program waits for."""
    exact: bool | UnsetType = UNSET
    """In the last part: whether each step of the sequence was exact (``Receipt.exact``)."""


class Usage:
    """Counts the cost of a request so far.

    ``processed`` is the number of tokens that the model computed: the tokens of the prompt, and
    each sampled or appended token that precedes a sampled token.
    """

    def __init__(self) -> None:
        self.sampled = 0
        self.processed = 0
        self._computed: dict[int, int] = {}
        """Number of tokens after the prompt that the model has computed, by sequence."""

    def add(self, entry: Token) -> None:
        """Counts one entry."""
        self.processed += entry.prompt_tokens
        if entry.parent is not None:
            self._computed[entry.seq] = self._computed.get(entry.parent, 0)
        if entry.token is None:
            return
        computed = min(self._computed.get(entry.seq, 0), entry.pos)
        if entry.logprob is not None:
            self.sampled += 1
            self.processed += entry.pos - computed
            computed = entry.pos
        self._computed[entry.seq] = computed

    @property
    def cost(self) -> int:
        """The cost in AICI's unit: 2 for each sampled token, and 1 for each processed token."""
        return 2 * self.sampled + self.processed


class Run:
    """A running request for tokens."""

    def __init__(self, stream: AsyncStream, first: list[Token]) -> None:
        self._stream = stream
        self._first = first
        self._sequences = Sequences()
        self.usage = Usage()
        self._indexes = {0: 0}

    def index_of(self, seq: int) -> int:
        """The index of a sequence. Indices are 0, 1, 2, … in the order in which sequences begin,
        because AICI's clients store sequences in lists."""
        return self._indexes.setdefault(seq, len(self._indexes))

    @classmethod
    async def begin(
        cls, request: Request, gateway: Gateway, prompt: str | list[int], options: GenerateOptions
    ) -> Run:
        """Sends the request and waits for its first entries, so that a refusal determines the HTTP
        status.

        Raises TokenbusError if the request is refused, and ClientDisconnect if the client has
        disconnected. If a controller ends a sequence with an error, the sequence reports the error.
        """
        with_text: GenerateOptions = {**options, "text": True}
        stream = gateway.client.generate(prompt, **with_text)
        return cls(stream, await first_entries(request, stream, CONTROLLERS_OWN))

    async def forks(self) -> AsyncGenerator[Fork, None]:
        """The new parts, entry by entry. An error of the whole request is reported as an error of
        each sequence that has not ended."""
        try:
            entries = self._first
            passes = EntryPasses(MAX_BATCH)
            while entries:
                for entry in entries:
                    await passes.take(1)
                    yield self._fork(entry)
                entries = await self._stream.arrived()
        except TokenbusError as error:
            for fork in self._failed(error):
                yield fork
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._stream.close()

    async def finished(self, request: Request) -> list[GeneratedSequence]:
        """Waits until the stream has ended, and returns all of its sequences."""
        await unless_disconnected(request.receive, self._read())
        return sorted(self._sequences.listed(), key=lambda one: self.index_of(one.seq))

    async def _read(self) -> None:
        async for _ in self.forks():
            pass

    def _fork(self, entry: Token) -> Fork:
        self._sequences.add(entry)
        self.usage.add(entry)
        if entry.parent is not None:
            # Clients concatenate the texts of an index, so the first text of a fork must be its
            # parent's text.
            text = self._sequences.by_seq[entry.seq].text
        else:
            new = "" if entry.text is UNSET else entry.text
            text = BACKTRACK + new if entry.backtrack else new
        return Fork(
            index=self.index_of(entry.seq),
            text=text,
            logs=entry.logs,
            storage=entry.storage,
            messages=entry.messages or UNSET,
            waiting=entry.waiting or UNSET,
            error=entry.error or "",
            finish_reason=finish_reason(entry),
            exact=UNSET if entry.exact is None else entry.exact,
        )

    def _failed(self, error: TokenbusError) -> Iterable[Fork]:
        """The last parts of the sequences that an error of the request has ended."""
        listed = self._sequences.listed()
        for sequence in listed:
            if sequence.finish_reason is None:
                sequence.finish_reason, sequence.error = "error", error.message
                sequence.code = error.code
                yield Fork(
                    index=self.index_of(sequence.seq),
                    text="",
                    logs="",
                    storage=[],
                    error=error.message,
                    finish_reason=finish_reason(sequence),
                )


def finish_reason(ended: Token | GeneratedSequence) -> str | None:
    """AICI's name of the finish reason; None while the sequence runs."""
    if ended.code == Code.DEADLOCK:
        return "deadlock"
    return FINISH[ended.finish_reason] if ended.finish_reason is not None else None


def controller_options(controller: str | None, arg: Any) -> GenerateOptions:
    """The options for a controller and its argument. A text is passed unchanged, None as an empty
    text, and any other argument as JSON."""
    if controller is None or controller == NO_CONTROLLER:
        return {}
    if arg is None or isinstance(arg, str):
        return {"controller": controller, "controller_arg": arg or ""}
    return {"controller": controller, "controller_arg": msgspec.json.encode(arg).decode()}


def prompt_for(model: ServedModel, prompt: str | list[int]) -> str | list[int]:
    """The prompt; a space if the prompt is empty and the model does not have a BOS token."""
    if not prompt and not model.encode(""):
        return " "
    return prompt
