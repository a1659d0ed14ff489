"""Encodes the chunks of a streamed chat whose tools the gateway calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ....protocol.messages import Token
from ..conversation.answers import Piece
from ..conversation.constraints import Receipt
from ..conversation.growing import GrowingChoice
from ..conversation.parts import Call
from ..conversation.tool_turns import ModelTurn
from .chat_bodies import ChatRequest, Delta
from .chat_chunks import ChatChunks
from .usage import Counter


class TurnChunks(ChatChunks):
    """Encodes the entries of one turn. Chunks do not report calls of the bus's tools. Only the last
    chunk of the answer (``last``) has a finish reason and a receipt."""

    def __init__(
        self,
        id: str,
        created: int,
        body: ChatRequest,
        turn: ModelTurn,
        counter: Counter,
        is_served: Callable[[str], bool],
        before: TurnChunks | None,
    ) -> None:
        """``is_served``: returns whether the bus has a tool of this name. ``before``: the chunks of
        the previous turn."""
        super().__init__(id, created, body, turn.prepared, counter)
        self.turn = turn
        self._is_served = is_served
        self._is_first = before is None
        self._earlier: frozenset[type] = frozenset() if before is None else before._kinds
        """The kinds of parts (text, thinking) that earlier turns have and this turn does not have
        yet."""
        self._kinds: frozenset[type] = self._earlier
        """The kinds of parts that this turn or earlier turns have."""
        self._numbers: dict[str, int] = {}
        """The numbers of the client's calls by their ids."""

    def last(self, reason: str, receipt: Receipt) -> bytes:
        """The last chunk of the answer."""
        return self._chunk(0, Delta(), None, reason, receipt)

    def _begin(self, seq: int) -> bytes:
        if self._is_first:
            return super()._begin(seq)
        self._heads[seq] = b""
        return b""

    def _ended(
        self, entry: Token, choice: GrowingChoice, called: bool
    ) -> tuple[str | None, Receipt | None]:
        return None, None

    def _deltas_of(self, pieces: Iterable[Piece]) -> list[Delta]:
        return [self._delta(piece) for piece in pieces if not self._is_hidden(piece)]

    def _is_hidden(self, piece: Piece) -> bool:
        return isinstance(piece.part, Call) and self._is_served(piece.part.name)

    def _delta(self, piece: Piece) -> Delta:
        part = piece.part
        if isinstance(part, Call):
            number = self._numbers.setdefault(part.id, len(self._numbers))
            return super()._delta(piece._replace(number=number))
        kind = type(part)
        if kind in self._earlier:
            # As in an answer that is not streamed, a line break precedes the text of a turn.
            piece = piece._replace(text="\n" + piece.text)
            self._earlier -= {kind}
        self._kinds |= {kind}
        return super()._delta(piece)
