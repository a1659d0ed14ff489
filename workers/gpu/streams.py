"""The streams that a GPU worker runs, and how their tokens become messages.

One body per client and step, all in one multipart message: the broker fans them out as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...protocol.bodies import Encoding, encode_body, error_body, pack_tokens
from ...protocol.errors import TokenbusError
from ...protocol.header import Flag, Header, encode_header, encode_token_header
from ...protocol.messages import Buffer, Msg, System, Token
from .metrics import ModelMetrics
from .sequence import PromptUsage

Frames = list[bytes]


@dataclass(slots=True, eq=False)
class Stream:
    """A request of a client, as the worker that runs it knows it."""

    request: int
    session: int
    stream_id: int
    encoding: Encoding
    model: str
    live: int
    """Sequences that have not ended."""
    save: str | None = None
    prompt: list[int] = field(default_factory=list)
    usage: PromptUsage | None = None
    """Of its prompt; None while no engine has it."""
    entries: list[Token] = field(default_factory=list)
    """All that was sent, for a client that attaches again."""
    trace: str = ""
    operation: str = "text_completion"
    """``gen_ai.operation.name`` of its span, if it has a trace."""
    received: float = field(default_factory=time.monotonic)
    """When this worker received it, in seconds."""
    arrived: float = field(default_factory=time.monotonic)
    """When the broker did, by the clock of this process."""
    first_at: float = 0.0
    """When its first token was sent; 0 before."""
    sent_at: float = 0.0
    """When its last one was."""
    metrics: ModelMetrics | None = None
    """Those of its model, while an engine has it."""

    @classmethod
    def of(cls, header: Header, stream_id: int, model: str, live: int = 1) -> Stream:
        """The stream of a request's header."""
        encoding: Encoding = "msgpack" if header.flags & Flag.MSGPACK else "json"
        stream = cls(header.request, header.address, stream_id, encoding, model, live)
        stream.arrived = stream.received - header.waited_s
        return stream


def token_frames(entries: Iterable[tuple[Stream, list[Token]]]) -> Frames | None:
    """The ``TOKEN`` message of a step, from each stream's new entries; None where there are none.

    A stream whose last sequence ends with these entries is in the manifest as finished.
    """
    by_session: dict[tuple[int, Encoding], list[Token]] = {}
    finished: list[int] = []
    for stream, new in entries:
        by_session.setdefault((stream.session, stream.encoding), []).extend(new)
        if stream.live == 0:
            finished.append(stream.request)
    if not by_session:
        return None
    bodies = [encode_body(tokens, encoding) for (_, encoding), tokens in by_session.items()]
    sessions = [session for session, _ in by_session]
    return [b"TOKEN", encode_token_header(sessions, finished), *bodies]


def attached_frames(stream: Stream, received: int) -> list[Frames]:
    """What a client gets that picks a stream up again: the answer, then what it missed."""
    answer = Msg(stream_id=stream.stream_id, attached=received)
    head = encode_header(stream.request, stream.session)
    messages = [[b"MSG", head, encode_body(answer, stream.encoding)]]
    missed = stream.entries[received:]
    if missed:
        body = encode_body(missed, stream.encoding)
        messages.append([b"TOKEN", encode_token_header([stream.session]), body])
    return messages


def message_frames(stream: Stream, kind: bytes, body: Msg | System, final: bool = False) -> Frames:
    """An answer or a notice to a stream's client."""
    flags = Flag.FINAL if final else 0
    head = encode_header(stream.request, stream.session, flags)
    return [kind, head, encode_body(body, stream.encoding)]


def error_frames(stream: Stream, error: TokenbusError) -> Frames:
    """The ERROR that ends a stream."""
    body = error_body(error, stream.stream_id)
    head = encode_header(stream.request, stream.session, Flag.FINAL)
    return [b"ERROR", head, encode_body(body, stream.encoding)]


def saved_buffer_frames(stream: Stream) -> Frames:
    """The buffer that a stream with ``save`` leaves: its prompt and its first sequence."""
    tokens = list(stream.prompt)
    for entry in stream.entries:
        if entry.seq == 0:
            if entry.backtrack:
                del tokens[-entry.backtrack :]
            if entry.token is not None:
                tokens.append(entry.token)
    body = encode_body(Buffer(name=stream.save or ""), "msgpack")
    head = encode_header(stream.request, stream.session)
    return [b"BUFFER", head, body, b"t" + pack_tokens(tokens)]
