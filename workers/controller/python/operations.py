"""The operations that a script can await. The calls of the script's controller advance an
operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....protocol.errors import Code, ControllerError
from ....protocol.sampling import Query
from ..biases import Bias
from ..host import Host, Stored
from ..interface import CONTINUE, STOP, SUSPEND, Action, Answer
from ..scripts.generation import Generate as GeneratedText
from .generated_text import GeneratedBytes
from .script_constraints import Constraint
from .transcript import Question, Transcript


class Operation:
    """An operation that a script awaits. When the operation is ``finished``, the script continues
    with its ``answer``.

    The methods correspond to those of ``interface.Controller``. Each call may finish the operation.
    The result of ``pre_process`` or ``mid_process`` applies only if the call has not finished the
    operation.
    """

    posts = False
    """Whether the script continues during the post_process that finishes the operation. If false,
    the script continues in the next pre_process."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.finished = False
        self.answer: object = None

    def pre_process(self) -> Answer:
        """The answer of the controller's pre_process."""
        return CONTINUE

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """The answer of the controller's mid_process. None if pre_process must be called first."""
        return None

    def post_process(self, tokens: Sequence[int]) -> None:
        """Called after tokens were appended to the sequence and to the transcript."""

    def after_post(self) -> Answer:
        """Returns the answer of the post_process that has finished the previous operation. Called
        only if ``posts`` of the previous operation is true."""
        return CONTINUE

    def resume(self, other: Operation) -> None:
        """Copies the state of ``other``, the same operation of the sequence that was forked."""

    def _finish(self, answer: object = None) -> None:
        self.finished = True
        self.answer = answer


class Stop(Operation):
    """Ends the sequence. The operation is never finished."""

    def pre_process(self) -> Answer:
        """Stops."""
        return STOP

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Stops."""
        return STOP


class Append(Operation):
    """Appends tokens. If ``following`` is given, first drops all tokens of the sequence except this
    number of tokens at its beginning."""

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
        """Appends the tokens if no tokens must be dropped first. Tokens can be dropped only in
        mid_process."""
        return CONTINUE if self._drop else Answer(Action.SPLICE, tokens=self._tokens)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Drops and appends."""
        return Answer(Action.SPLICE, backtrack=self._drop, tokens=self._tokens)

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation."""
        self._finish()


class Generate(Operation):
    """Generates a text. The text ends when the constraint allows no more tokens, after a stop text,
    after ``max_tokens`` tokens, or before a sampled end-of-sequence token, which is dropped. The
    answer is the text, as bytes, or as ``GeneratedBytes`` if the script asks for
    log-probabilities."""

    def __init__(
        self,
        question: Question,
        host: Host,
        constraint: Constraint | None,
        text: GeneratedText,
        bias: Bias | None = None,
    ) -> None:
        """``text`` has the stop texts, ``max_tokens`` and ``logprobs``."""
        super().__init__(question)
        self._free = Answer(Action.CONTINUE, bias=bias, logprobs=text.logprobs)
        self._masked = self._free._replace(masked=True)
        self._host = host
        self._vocabulary = host.vocabulary
        self._constraint = constraint
        self._stops = [stop.encode() for stop in text.stop_at]
        self._max_tokens = text.max_tokens
        self._asks = text.logprobs
        self._tokens: list[int] = []
        self._logprobs: list[float | None] = []
        """The log-probabilities of ``_tokens``; None for a token that was not sampled."""
        self._text = bytearray()
        self._repair: Answer | None = None
        """The splice that drops everything after the end of the text; None if nothing has to be
        dropped."""

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Samples the next token, or drops the bytes after the end of the text."""
        if self._repair is not None:
            return self._repair
        if self._constraint is None:
            return self._free
        if not self._constraint.mask(mask):
            self._finish_text()
        return self._masked

    def post_process(self, tokens: Sequence[int]) -> None:
        """Adds the tokens one by one until the text ends."""
        if self._repair is not None:
            self._finish_text()
            return
        logprobs = self._host.logprobs or [None] * len(tokens)
        for at, token in enumerate(tokens):
            if token == self._vocabulary.eos:
                self._end(drop=len(tokens) - at)
                return
            before = len(self._text)
            self._tokens.append(token)
            self._logprobs.append(logprobs[at])
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
        """Copies the text that ``other`` has generated so far."""
        assert isinstance(other, Generate)
        self._tokens, self._logprobs = list(other._tokens), list(other._logprobs)
        self._text = bytearray(other._text)
        self._repair = other._repair
        if self._constraint is not None and self._tokens and self._repair is None:
            self._constraint.advance(self._tokens)

    def _stopped(self, before: int) -> int | None:
        """The number of bytes of the text up to the end of the first stop text that the last token
        has completed. None if the token has not completed a stop text."""
        found = [
            at + len(stop)
            for stop in self._stops
            if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found) if found else None

    def _cut(self, before: int, end: int, more: int) -> None:
        """Ends the text at byte ``end``, which is within the last token of the text or at its end.
        ``before``: bytes of the text before this token. ``more``: number of sampled tokens after
        this token."""
        if end == len(self._text):
            self._end(more)
            return
        del self._text[end:]
        again = self._vocabulary.tokenize(bytes(self._text[before:]))
        self._tokens[-1:] = again
        self._logprobs[-1:] = [None] * len(again)
        self._end(more + 1, again)

    def _end(self, drop: int, tokens: Sequence[int] = ()) -> None:
        if drop:
            self._repair = Answer(Action.SPLICE, backtrack=drop, tokens=tokens)
        else:
            self._finish_text()

    def _finish_text(self) -> None:
        text, logprobs = bytes(self._text), tuple(self._logprobs)
        scored = GeneratedBytes(text, tuple(self._tokens), logprobs)
        self._finish(scored if self._asks else text)


class Fork(Operation):
    """Forks into ``count`` sequences. The answer is the index of this sequence."""

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
        """Finishes the operation if the fork was made."""
        if self._made:
            if self._seq not in fork_group:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"sequence {self._seq} is not in the group of its fork: {list(fork_group)}",
                )
            self._finish(list(fork_group).index(self._seq))
        return None

    def resume(self, other: Operation) -> None:
        """Copies from ``other`` whether the fork was made."""
        assert isinstance(other, Fork)
        self._made = other._made


class Replace(Operation):
    """Saves the sequence as a context, or replaces all of its tokens by a new prompt or by a
    context. ``answer``: the answer of mid_process that requests the operation. The answer of the
    operation is the reason why a context was refused, or the number of tokens of the new prompt."""

    def __init__(self, question: Question, host: Host, answer: Answer) -> None:
        super().__init__(question)
        self._host = host
        self._decision = answer

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Saves or replaces the tokens."""
        return self._decision

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation."""
        self._finish(self._host.refusal or len(tokens))


class Score(Operation):
    """Scores texts after the sequence. The answer has the log-probability of each token of each
    text."""

    def __init__(self, question: Question, host: Host, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(question)
        self._host = host
        self._answer = Answer(Action.SCORE, texts=texts)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Asks for the scores."""
        return self._answer

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation."""
        self._finish(self._host.scores)


class Look(Operation):
    """Reads the distribution of the next token. The answer is a list of the most likely tokens,
    each with its log-probability."""

    def __init__(self, question: Question, host: Host, query: Query) -> None:
        super().__init__(question)
        self._host = host
        self._answer = Answer(Action.LOOK, query=query)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer | None:
        """Asks for the distribution."""
        return self._answer

    def post_process(self, tokens: Sequence[int]) -> None:
        """Finishes the operation."""
        [found] = self._host.distributions
        self._finish([list(pair) for pair in found.top.items()])


class Receive(Operation):
    """Waits for the next input of the client. The answer is the input's text."""

    def __init__(self, question: Question, receive: Callable[[], bytes | None]) -> None:
        super().__init__(question)
        self._receive = receive

    def pre_process(self) -> Answer:
        """Takes the next input; suspends if no input has arrived."""
        text = self._receive()
        if text is not None:
            self._finish(text.decode("utf-8", "replace"))
        return SUSPEND


class WaitFor(Operation):
    """Waits until a variable of the request exists. The answer is the variable's version and
    value."""

    def __init__(self, question: Question, read: Callable[[], Stored | None]) -> None:
        super().__init__(question)
        self._read = read

    def pre_process(self) -> Answer:
        """Reads the variable; suspends if it does not exist."""
        stored = self._read()
        if stored is not None:
            self._finish(stored)
        return SUSPEND
