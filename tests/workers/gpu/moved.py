"""A stream that moves between workers, as its client receives it: the entries of the first worker
up to some message, and then the entries of the next worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.columns import TokenBody, TokenColumns, column_entries
from tokenbus.protocol.header import Flag, decode_manifest
from tokenbus.protocol.messages import Generate, System, Token
from tokenbus.protocol.sampling import Sampling
from tokenbus.protocol.transcript import encode_transcript
from tokenbus.workers.gpu.model.loader import LoadedModel

from ...worlds.gpu_worker_loop import Loop
from .ties import Asked, first_difference, tokens_of

REQUEST = 5
TURNS = 3000


def token_messages(loop: Loop) -> list[list[Token]]:
    """The entries of each TOKEN message that a worker has sent."""
    messages = []
    for frames in loop.sent(b"TOKEN"):
        entries: list[Token] = []
        for body in frames[2:]:
            decoded: TokenBody = decode_as(TokenBody, body)
            entries += column_entries(decoded) if isinstance(decoded, TokenColumns) else decoded
        messages.append(entries)
    return messages


def give(loop: Loop, kind: bytes, body: dict[str, Any], flags: int, *attachments: bytes) -> None:
    """Delivers a message of the client of ``REQUEST`` to the worker."""
    encoded = msgspec.msgpack.encode({"model": "m", "stream_id": REQUEST} | body)
    loop.give(kind, encoded, REQUEST, 100, flags | Flag.MSGPACK, attachments)


def finished(loop: Loop) -> bool:
    return any(REQUEST in decode_manifest(frames[1]).finished for frames in loop.sent(b"TOKEN"))


def finish(loop: Loop) -> None:
    """Runs turns until the stream has ended."""
    for _ in range(TURNS):
        if finished(loop):
            return
        assert not loop.sent(b"ERROR"), loop.sent(b"ERROR")
        loop.turn()
    raise AssertionError("the stream has not ended")


def transcript(messages: Sequence[list[Token]]) -> bytes:
    """The transcript that the next worker receives if the client has received these messages."""
    return encode_transcript([e for m in messages for e in m], "gpu-1", "it was killed", 0.5)


def merged(messages: list[list[Token]]) -> list[list[Token]]:
    """The entries in the form in which they are compared. Logs and writes of entries that were not
    sampled move to the next sampled entry of the sequence, or to its last entry. Their division
    among entries depends on time."""
    found = msgspec.msgpack.decode(
        msgspec.msgpack.encode([e for m in messages for e in m]), type=list[Token]
    )
    last: dict[int, Token] = {}
    for entry in found:
        before = last.get(entry.seq)
        if before is not None and entry.parent is None:
            entry.logs, entry.storage = before.logs + entry.logs, before.storage + entry.storage
            before.logs, before.storage = "", []
        if entry.parent is None:
            last[entry.seq] = entry
        if entry.token is not None and entry.logprob is not None:
            del last[entry.seq]
    return [found]


class Moving:
    """Runs one request at one worker, and again at two workers."""

    def __init__(
        self, folder: Path, loaded: LoadedModel, kind: bytes, body: dict[str, Any], flags: int = 0
    ) -> None:
        self._folder, self._loaded = folder, loaded
        self._kind, self._body, self._flags = kind, body, flags
        whole = Loop(folder, loaded)
        give(whole, kind, body, flags)
        finish(whole)
        self.messages = token_messages(whole)
        self.buffers = whole.sent(b"BUFFER")

    def check(self, cut: int, overlap: bool = False, compiled: bool = False) -> None:
        """Moves the stream after ``cut`` of its messages. Fails unless the client receives the same
        entries as without a move."""
        before = self.messages[:cut]
        second = Loop(self._folder, self._loaded, overlap=overlap, compiled=compiled)
        flags = self._flags | Flag.MOVED
        give(second, self._kind, self._body, flags, transcript(before))
        finish(second)
        after = token_messages(second)
        same_entries([*before, *after], self.messages, self._loaded, self._body)
        assert second.sent(b"BUFFER") == self.buffers
        check_notice(second)


def check_notice(loop: Loop) -> None:
    """Fails unless the client was notified of the move once, before the first new entry. Without a
    new entry, the client must not be notified."""
    kinds = [frames[0] for frames in loop.worker._bus._links[0]._outbox]
    if not any(token_messages(loop)):
        assert b"SYSTEM" not in kinds
        return
    assert kinds.count(b"SYSTEM") == 1
    assert kinds.index(b"SYSTEM") < kinds.index(b"TOKEN")
    notice: System = decode_as(System, loop.sent(b"SYSTEM")[0][2])
    assert (notice.event, notice.left, notice.message) == ("moved", "gpu-1", "it was killed")
    assert notice.worker == loop.worker._name
    assert notice.pause_s is not None
    assert notice.pause_s >= 0.5


def same_entries(
    got: Sequence[list[Token]],
    wanted: Sequence[list[Token]],
    loaded: LoadedModel,
    body: dict[str, Any],
) -> None:
    """Fails unless each sequence has the same entries in order. The entries may be divided among
    other steps.

    If both streams are exact, the log-probabilities have equal bits. Otherwise they may differ by
    1e-4, and only the entries before the first tie are compared. ``body``: the request.
    """
    first, second = ([e for m in messages for e in m] for messages in (got, wanted))
    exact = all(e.exact for e in [*first, *second] if e.finish_reason is not None)
    seqs = {entry.seq for entry in second}
    assert {entry.seq for entry in first} == seqs
    tied: set[int] = set()
    for seq in sorted(seqs):
        one, other = ([e for e in every if e.seq == seq] for every in (first, second))
        if other[0].parent in tied:
            tied.add(seq)
            continue
        if exact:
            assert [plain(e) for e in one] == [plain(e) for e in other]
            assert [_numbers(e) for e in one] == [_numbers(e) for e in other]
            continue
        count = _compared(one, other, seq, second, asked_of(loaded, body))
        if count < len(other):
            tied.add(seq)
        one, other = one[:count], other[:count]
        assert [plain(e) for e in one] == [plain(e) for e in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            if isinstance(a.top_logprobs, dict) and isinstance(b.top_logprobs, dict):
                near(a.top_logprobs, b.top_logprobs)
    live = len({entry.seq for entry in first}) - sum(entry.parent is not None for entry in first)
    for entry in first:
        live += (entry.parent is not None) - (entry.finish_reason is not None)
        assert entry.finish_reason is None or entry.live == live
    assert live == 0


def asked_of(loaded: LoadedModel, body: dict[str, Any]) -> Asked:
    """The prompt and the sampling of a request."""
    request = msgspec.convert({"stream_id": REQUEST} | body, Generate)
    prompt = request.prompt or []
    if isinstance(prompt, str):
        prompt = loaded.tokenizer.encode(prompt)
    sampling = {name: getattr(request, name) for name in Sampling.__struct_fields__}
    return Asked(loaded.model, prompt, Sampling(**sampling))


def _compared(
    one: Sequence[Token], other: Sequence[Token], seq: int, every: Sequence[Token], asked: Asked
) -> int:
    """The number of entries of a sequence that are compared: all, or those before the first tie."""
    whole = max(len(one), len(other))
    i = first_difference(one, other)
    if i is None:
        return whole
    a, b = one[i].token, other[i].token
    parent, begun = other[0].parent, other[0].pos
    before = [e for e in every if e.seq == parent and e.pos < begun] if parent is not None else []
    if a is None or b is None or not asked.tied(tokens_of([*before, *other[:i]]), seq, a, b):
        return whole
    return i


def _numbers(entry: Token) -> tuple[float | None, object]:
    """The log-probabilities of an entry."""
    return entry.logprob, entry.top_logprobs


def plain(entry: Token) -> Token:
    """An entry without the fields that may differ after a move.

    Log-probabilities are compared with a tolerance. The numbers of live sequences and of wake-ups
    depend on the order of rounds. The span begins again after a move, and the other worker may not
    be exact.
    """
    return msgspec.structs.replace(
        entry,
        logprob=None,
        top_logprobs=UNSET,
        live=0,
        span=None,
        exact=None,
        cached_tokens=0,
        round_us=0,
        wakes=0,
    )


def near(one: dict[int, float], other: dict[int, float]) -> None:
    """Fails unless the log-probabilities agree. If the least likely tokens are nearly tied, the
    two reports may have different tokens."""
    for token in one.keys() & other.keys():
        assert one[token] == pytest.approx(other[token], abs=1e-4)
    rest = [*(one.keys() - other.keys()), *(other.keys() - one.keys())]
    values = [(one | other)[token] for token in rest]
    assert not values or math.isclose(min(values), max(values), abs_tol=1e-4)
