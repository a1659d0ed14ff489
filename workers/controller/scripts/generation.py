"""Generates the text of a script's call of ``gen``, under a built-in constraint.

During this text, rounds call the controller of the constraint instead of the script. The constraint
completes the text within ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, ControllerError, TokenbusError
from ....protocol.sampling import MAX_STOP, StopString
from ..biases import Bias
from ..host import Host
from ..interface import CONTINUE, Action, Answer, Batch, Batched, Constraint

MAX_RUN = 64
"""Maximum number of tokens between two rounds of a text without a constraint."""

Kind = Literal["regex", "choice", "json_schema", "lark", "yacc", "substring", "combination"]


class Generate(msgspec.Struct, frozen=True):
    """The arguments of a script's call of ``gen``."""

    kind: Kind | None = None
    """The built-in constraint; None if every text is allowed."""
    argument: str = ""
    stop_at: Annotated[list[StopString], Meta(max_length=MAX_STOP)] = []
    """The generated text ends after the first occurrence of one of these texts. The number of these
    texts is bounded, because the worker compares each new token with each text."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    place: str = ""
    """The position of the call in the script, for errors."""
    logprobs: bool = False
    """Whether the script asks for the log-probabilities of the text's tokens."""


_decoder = json_decoder(Generate)


def decode_generate(data: bytes) -> Generate:
    """Decodes the arguments of ``gen``; raises ControllerError if they are not valid."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ControllerError(Code.CONTROLLER_FAILED, f"gen: {error}") from None


class Generation:
    """The text of one call of ``gen``. The methods correspond to the calls of a controller."""

    def __init__(
        self, asked: Generate, host: Host, constraint: Constraint | None, bias: Bias | None
    ) -> None:
        """``constraint``: a controller of the constraint that has not received any token."""
        self._asked = asked
        self._host = host
        self._constraint = constraint
        self._bias = bias
        self._stops = [stop.encode() for stop in asked.stop_at]
        self._text = bytearray()
        """The bytes of the text. They are collected only if there are stop texts."""
        self._repair: Answer | None = None
        """The splice that drops everything after the end of the text; None if nothing has to be
        dropped."""
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        """The log-probabilities of ``tokens``. An entry is None if its token was not sampled, or if
        ``asks`` is false."""
        self.asks = asked.logprobs
        """Whether the script asked for log-probabilities."""
        self.ended = False

    def pre_process(self) -> Answer:
        """Calls the constraint, which may append tokens."""
        if self._repair is not None or self._constraint is None:
            return CONTINUE
        return self._constraint.pre_process()

    def mid_process(self, mask: memoryview) -> Answer | None:
        """Returns the decision to sample or to splice; None if the text has ended."""
        if self._repair is not None:
            return self._repair
        if self._constraint is None:
            return self._sample_freely(mask)
        answer = self._constraint.mid_process((self._host.seq,), mask)
        if answer.action is Action.STOP:
            self.ended = True
            return None
        if answer.action is not Action.CONTINUE:
            return answer
        if self.asks:
            answer = answer._replace(logprobs=True)
        if self._bias is None:
            return answer
        # If the mask allows a single token, the text continues as if this token were appended. No
        # bias applies to appended tokens.
        single = answer.masked and int.from_bytes(mask, "little").bit_count() == 1
        return answer if single else answer._replace(bias=self._bias)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> None:
        """Adds tokens up to the end of the text."""
        if self._repair is not None:
            self.ended = True
            return
        if backtrack:
            left = len(self.tokens) - backtrack
            del self.tokens[left:], self.logprobs[left:]
            self._text = bytearray(self._bytes(self.tokens)) if self._stops else self._text
        eos_ids = self._host.vocabulary.eos_ids
        logprobs = self._host.logprobs or [None] * len(tokens)
        for place, token in enumerate(tokens):
            more = len(tokens) - place - 1
            if token in eos_ids:
                self._end(more + 1)
                return
            self.tokens.append(token)
            self.logprobs.append(logprobs[place])
            if self._stops and self._stopped(token, more):
                return
            if len(self.tokens) == self._asked.max_tokens:
                if self._constraint is not None:
                    # The constraint logs that the text is cut.
                    self._constraint.post_process(tokens[: place + 1], backtrack)
                self._end(more)
                return
        if self._constraint is not None:
            answer = self._constraint.post_process(tokens, backtrack)
            self.ended = answer.action is Action.STOP

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The batch in which the round after a token runs; None if the round does not run in a
        batch."""
        alone = self._stops or self._bias is not None or self._repair is not None or self.ended
        constraint = self._constraint
        if alone or self.asks or not isinstance(constraint, Batched):
            return None
        if len(self.tokens) + 1 == self._asked.max_tokens:
            return None
        return constraint.batch(token)

    def batched(self, token: int) -> None:
        """Records a round that ran in a batch."""
        self.tokens.append(token)
        self.logprobs.append(None)
        assert isinstance(self._constraint, Batched)
        self._constraint.batched(token)

    def fork(self, host: Host) -> Generation:
        """Copies the generation for the forked sequence of ``host``."""
        constraint = self._constraint.fork(host) if self._constraint is not None else None
        other = Generation(self._asked, host, constraint, self._bias)
        other.tokens, other.logprobs = list(self.tokens), list(self.logprobs)
        other._text = bytearray(self._text)
        other._repair, other.ended = self._repair, self.ended
        return other

    def close(self) -> None:
        """Frees the constraint."""
        if self._constraint is not None:
            self._constraint.close()
            self._constraint = None

    # --- inside ---------------------------------------------------------------------------------

    def _sample_freely(self, mask: memoryview) -> Answer:
        """Samples without a constraint. Without a bias, the model samples several tokens before the
        next round (``Answer.run``). The next round comes earlier if the model samples a token in
        which the text may end."""
        most = self._asked.max_tokens
        run = MAX_RUN if most is None else min(MAX_RUN, most - len(self.tokens))
        if run < 2 or self._bias is not None:
            return Answer(Action.CONTINUE, bias=self._bias, logprobs=self.asks)
        mask[:] = self._endings
        return Answer(Action.CONTINUE, masked=True, run=run, logprobs=self.asks)

    @cached_property
    def _endings(self) -> bytes:
        """The tokens in which the text may end, as a mask: end-of-sequence tokens, and tokens that
        contain the last byte of a stop text."""
        vocabulary = self._host.vocabulary
        endings = sum(1 << token for token in set(vocabulary.eos_ids))
        for byte in {stop[-1] for stop in self._stops}:
            endings |= int.from_bytes(vocabulary.tokens_with(byte), "little")
        return endings.to_bytes(4 * -(-vocabulary.size // 32), "little")

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._host.vocabulary.token, tokens))

    def _stopped(self, token: int, more: int) -> bool:
        """Adds a token's text. If a stop text then occurs, ends the text after the stop text, and
        returns True."""
        before = len(self._text)
        self._text += self._host.vocabulary.token(token)
        ends = [
            at + len(stop)
            for stop in self._stops
            if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if not ends:
            return False
        end = min(ends)
        if end == len(self._text):
            self._end(more)
            return True
        again = self._host.vocabulary.tokenize(bytes(self._text[before:end]))
        self.tokens[-1:] = again
        self.logprobs[-1:] = [None] * len(again)
        self._end(more + 1, again)
        return True

    def _end(self, drop: int, tokens: Sequence[int] = ()) -> None:
        if drop:
            self._repair = Answer(Action.SPLICE, backtrack=drop, tokens=tokens)
        else:
            self.ended = True


def failed(asked: Generate, error: TokenbusError) -> ControllerError:
    """Adds the position of the call of ``gen`` in the script to an error of the constraint."""
    where = f"{asked.place}: " if asked.place else ""
    return ControllerError(Code.CONTROLLER_FAILED, f"{where}gen({asked.kind}): {error.message}")
