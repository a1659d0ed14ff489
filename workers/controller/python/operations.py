"""What a script can wait for, each as the controller's calls see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....protocol.errors import Code, ControllerError
from ..host import Stored, Vocabulary
from ..interface import CONTINUE, STOP, SUSPEND, Action, Answer
from .script_constraints import Constraint
from .transcript import Question, Transcript

_MASKED = Answer(Action.CONTINUE, masked=True)


class Operation:
    """Something that a script waits for until it is ``finished``, and then its ``answer``.

    The calls are those of ``interface.Controller``. After each of them the request may be
    finished; what ``pre_process`` and ``mid_process`` return counts only where it is not.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.finished = False
        self.answer: object = None

    def pre_process(self) -> Answer:
        """What to do before mid_process."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """What to do with the next token; None: pre_process has to come first."""
        return None

    def post_process(self, tokens: Sequence[int]) -> None:
        """Tokens were appended; the transcript has them already."""

    def resume(self, other: Operation) -> None:
        """Go on from where the same request of another sequence is."""

    def _finish(self, answer: object = None) -> None:
        self.finished = True
        self.answer = answer


class Stop(Operation):
    """The sequence ends; it is never finished."""

    def pre_process(self) -> Answer:
        """Stops."""
        return STOP

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Stops."""
        return STOP


class Append(Operation):
    """Tokens are appended; those after ``following``, a length of the sequence, dropped before."""

    def __init__(
        self,
        question: Question,
        tokens: Sequence[int],
        transcript: Transcript,
        following: int | None,
    ) -> None:
        super().__init__(question)
        self._tokens = tokens
        self._drop = 0 if following is None else len(transcript.tokens) - following
        if not tokens and not self._drop:
            self._finish()

    def pre_process(self) -> Answer:
        """Appends at once where nothing is to be dropped."""
        return CONTINUE if self._drop else Answer(Action.SPLICE, tokens=self._tokens)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Drops and appends."""
        return Answer(Action.SPLICE, backtrack=self._drop, tokens=self._tokens)

    def post_process(self, tokens: Sequence[int]) -> None:
        """Done."""
        self._finish()


class Generate(Operation):
    """The model writes: until its constraint allows no more, a stop text, a number of tokens, or
    the token that ends a sequence, which is taken back. The answer is the text, as bytes."""

    def __init__(
        self,
        question: Question,
        vocabulary: Vocabulary,
        constraint: Constraint | None,
        stops: Sequence[bytes],
        max_tokens: int | None,
    ) -> None:
        super().__init__(question)
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._stops = stops
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._text = bytearray()
        self._repair: Answer | None = None
        """The text is there, and the last tokens are more than it."""

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Samples, or takes back what is too much."""
        if self._repair is not None:
            return self._repair
        if self._constraint is None:
            return CONTINUE
        if not self._constraint.mask(mask):
            self._finish(bytes(self._text))
        return _MASKED

    def post_process(self, tokens: Sequence[int]) -> None:
        """Takes the tokens up, one by one, until the text ends."""
        if self._repair is not None:
            self._finish(bytes(self._text))
            return
        for at, token in enumerate(tokens):
            if token == self._vocabulary.eos:
                self._end(drop=len(tokens) - at)
                return
            before = len(self._text)
            self._tokens.append(token)
            self._text += self._vocabulary.token(token)
            end = self._stopped(before)
            if end is not None:
                self._cut(before, end, more=len(tokens) - at - 1)
                return
            over = self._constraint is not None and self._constraint.advance((token,))
            if over or len(self._tokens) == self._max_tokens:
                self._end(drop=len(tokens) - at - 1)
                return

    def resume(self, other: Operation) -> None:
        """The same text so far."""
        assert isinstance(other, Generate)
        self._tokens, self._text = list(other._tokens), bytearray(other._text)
        self._repair = other._repair
        if self._constraint is not None and self._tokens and self._repair is None:
            self._constraint.advance(self._tokens)

    def _stopped(self, before: int) -> int | None:
        """Where the first stop text ends that the last token completed."""
        found = [
            at + len(stop)
            for stop in self._stops
            if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found) if found else None

    def _cut(self, before: int, end: int, more: int) -> None:
        """The text ends within the last token, or with it; ``more`` tokens came after."""
        if end == len(self._text):
            self._end(more)
            return
        del self._text[end:]
        self._end(more + 1, self._vocabulary.tokenize(bytes(self._text[before:])))

    def _end(self, drop: int, tokens: Sequence[int] = ()) -> None:
        if drop:
            self._repair = Answer(Action.SPLICE, backtrack=drop, tokens=tokens)
        else:
            self._finish(bytes(self._text))


class Fork(Operation):
    """The sequence becomes ``count``; the answer is which of them this is."""

    def __init__(self, question: Question, count: int, seq: int) -> None:
        super().__init__(question)
        self._count = count
        self._seq = seq
        self._made = False

    def pre_process(self) -> Answer:
        """Forks."""
        self._made = True
        return Answer(Action.FORK, count=self._count)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Answers where the fork was made."""
        if self._made:
            if self._seq not in fork_group:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"sequence {self._seq} is not among its fork's: {list(fork_group)}",
                )
            self._finish(list(fork_group).index(self._seq))
        return None

    def resume(self, other: Operation) -> None:
        """Made or not."""
        assert isinstance(other, Fork)
        self._made = other._made


class WaitFor(Operation):
    """A variable of the request comes to be; the answer is what it is then."""

    def __init__(self, question: Question, read: Callable[[], Stored | None]) -> None:
        super().__init__(question)
        self._read = read

    def pre_process(self) -> Answer:
        """Looks, and suspends where there is none."""
        stored = self._read()
        if stored is not None:
            self._finish(stored)
        return SUSPEND
