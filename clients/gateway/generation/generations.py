"""The streams of one HTTP request at the bus, one stream for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Unpack

from msgspec import UNSET

from ....protocol.errors import Code, TokenbusError
from ....protocol.messages import Token
from ... import AsyncClient, AsyncStream, GeneratedSequence, GenerateOptions
from ..context import Gateway
from ..conversation.constraints import Constraint
from ..conversation.planning import Prepared
from ..errors import ApiError, from_tokenbus
from ..loop_time import EntryPasses
from .counter import Counter, check_alternatives
from .shown_text import ShownText

Prompt = str | list[int]
MAX_BATCH = 256
"""Maximum number of entries and of their alternatives in a batch, unless one entry has more."""

Batch = tuple[int, list[Token]]
"""The number of a prompt, and the next entries of the prompt's stream."""


class Generations:
    """Begins a stream for each prompt, and reads all streams.

    ``fields`` maps the bus's field names to the names in the request's body, which errors then
    report.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompts: Sequence[Prompt],
        fields: Mapping[str, str],
        constraint: Constraint | None,
        counter: Counter,
        **options: Unpack[GenerateOptions],
    ) -> None:
        self._fields = dict(fields)
        self._constraint = constraint
        if constraint is not None:
            self._fields |= {"controller": "controller", "controller_arg": constraint.field}
        self.counter = counter
        self.shown: ShownText | None = None
        """Text to add to the answers. The caller sets this field before it reads the streams."""
        self.streams: list[AsyncStream] = []
        for prompt in prompts:
            try:
                self.streams.append(client.generate(prompt, **options))
            except TokenbusError as error:
                self.close()
                raise self._named(error) from None

    def close(self) -> None:
        """Closes the streams. Streams that still run are cancelled, or continue for a repeated
        request (``idempotency.py``)."""
        for stream in self.streams:
            stream.close()

    async def wait(self) -> list[list[GeneratedSequence]]:
        """Reads all streams to their ends; returns the sequences of each prompt. Raises
        ApiError."""
        async for _ in self.batches():
            pass
        return self.finished()

    def finished(self) -> list[list[GeneratedSequence]]:
        """The sequences of each prompt, with the text of ``shown``. Must be called only once, after
        all streams have been read to their ends."""
        found = [stream.sequences for stream in self.streams]
        if self.shown is not None:
            for sequence in (one for sequences in found for one in sequences):
                self.shown.add_all(sequence)
        return found

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Yields entries as they arrive. Entries that arrive together are one batch, up to
        ``MAX_BATCH``. Other requests run between the batches. Raises ApiError.

        If the generator ends early, for example by an error or a cancellation, it closes the
        streams.
        """
        passes = EntryPasses(MAX_BATCH)
        several = len(self.streams) != 1
        try:
            async with aclosing(self._of_several() if several else self._of_one()) as arrivals:
                async for place, arrived in arrivals:
                    for size, entries in _parts(arrived):
                        await passes.take(size)
                        self._count(entries)
                        yield place, entries
        except TokenbusError as error:
            raise self._named(error) from None
        finally:
            self.close()

    def _count(self, entries: list[Token]) -> None:
        self.counter.add(entries)
        check_alternatives(self.counter.alternatives)
        if self.shown is not None:
            for entry in entries:
                self.shown.add(entry)

    async def _of_one(self) -> AsyncGenerator[Batch, None]:
        [stream] = self.streams
        while entries := await _next(stream):
            yield 0, entries

    async def _of_several(self) -> AsyncGenerator[Batch, None]:
        reading = {
            asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(self.streams)
        }
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = reading.pop(task)
                    if entries := task.result():
                        again = asyncio.ensure_future(_next(self.streams[place]))
                        reading[again] = place
                        yield place, entries
        finally:
            for task in reading:
                task.cancel()

    def _named(self, error: TokenbusError) -> ApiError:
        """Converts an error of the bus. The result names the faulty field as the body does."""
        named = from_tokenbus(error)
        param = named.param
        if param is None and error.code == Code.INVALID_FIELD:
            # The controller worker reports an invalid argument of a constraint without a path.
            param = "controller_arg"
        elif param is None and error.code == Code.UNKNOWN_CONTROLLER:
            param = "controller"
        named.param = self._fields.get(param or "", param)
        if self._constraint is not None:
            named.message = self._constraint.in_words(named.message)
        return named


def chat_generations(
    gateway: Gateway,
    prepared: Prepared,
    options: GenerateOptions,
    counter: Counter,
    fields: Mapping[str, str],
) -> Generations:
    """Begins the answer to a conversation. Without ``max_tokens``, the answer may take the rest of
    the context.

    ``fields``: as in ``Generations``.
    """
    ids, constraint = prepared.ids, prepared.constraint
    options["model"] = prepared.model.name
    options.setdefault("max_tokens", rest_of_context(prepared))
    return Generations(gateway.client, [ids], fields, constraint, counter, **options)


def rest_of_context(prepared: Prepared) -> int:
    """Number of tokens for which the context has room after the prompt; at least 1."""
    return max(1, prepared.model.info.context_length - len(prepared.ids))


def _parts(entries: list[Token]) -> Iterator[tuple[int, list[Token]]]:
    """The batches of entries that have arrived together. With each batch, returns the number of its
    entries and alternatives."""
    begin = size = 0
    for place, entry in enumerate(entries):
        more = 1 + (0 if entry.top_logprobs is UNSET else len(entry.top_logprobs))
        if size and size + more > MAX_BATCH:
            yield size, entries[begin:place]
            begin, size = place, 0
        size += more
    yield size, entries[begin:]


async def _next(stream: AsyncStream) -> list[Token]:
    """The next entries of a stream; ``[]`` at its end. If the stream has failed, raises its
    TokenbusError instead of returning the last entries."""
    entries = await stream.arrived()
    if entries and entries[-1].error is not None and not entries[-1].live:
        await stream.arrived()
    return entries
