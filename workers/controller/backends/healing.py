"""Token healing: the last token of a prompt is removed, and the first sampled token must begin with
the removed token's text.

If a prompt ends in the middle of a word, its last tokens differ from the tokens of the whole word.
After healing, the model can sample the token of the whole word. The first part of this token's text
is the removed text, which belongs to the prompt. The constrained text begins after the removed
text. The method is guidance's token healing, but here exactly one token is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ....protocol.errors import Code, ControllerError, RequestError
from ....protocol.messages import ConstraintEnd
from ..host import Host, Vocabulary
from ..interface import CONTINUE, Action, Answer, Constraint, Program, TakesDrafts
from .structural.free_masks import TokenTable

KEPT_TABLES = 4
MAX_TRIED = 256
"""The *rest* of a candidate for the first token is its text after the removed text. If the rest is
a single token, the constraint's mask decides whether the candidate is allowed. If the rest is not a
single token, the candidate is tried in a copy of the constraint's controller. If the constraint has
returned a mask, at most this number of candidates is tried. Further candidates that would have to
be tried are forbidden."""

_MASKED = Answer(Action.CONTINUE, masked=True)


class HealingProgram:
    """Makes the controllers of a request whose prompt is healed."""

    def __init__(self, program: Program, healed: int) -> None:
        """``program``: the program of the constraint; ``healed``: the token that was removed."""
        self._program = program
        self.healed = healed
        """The removed token."""

    def start(self, host: Host) -> Constraint:
        """Makes the controller. Raises RequestError if the request's controller is not a built-in
        constraint. Also raises the errors of ``program.start``."""
        text = host.vocabulary.token(self.healed)
        first = self._begin(host)
        return HealingController(self, first, host, text) if text else first

    def begin(self, host: Host, max_tokens: int) -> Constraint:
        """Makes the constraint's controller, for a text of at most ``max_tokens`` tokens."""
        return self._begin(replace(host, max_tokens=max_tokens))

    def _begin(self, host: Host) -> Constraint:
        made = self._program.start(host)
        if isinstance(made, Constraint):
            return made
        made.close()
        raise RequestError(
            Code.INVALID_FIELD,
            "heal_prompt is set, but the controller is not a built-in constraint; use a built-in "
            "constraint, or send the request without a controller",
            path="$.heal_prompt",
        )


class HealingController:
    """The controller of one sequence. The text of the first sampled token must begin with the
    removed token's text."""

    def __init__(
        self, program: HealingProgram, inner: Constraint, host: Host, prefix: bytes
    ) -> None:
        self._program = program
        self._inner = inner
        self._host = host
        self._prefix = prefix
        self._prompt: Sequence[int] = ()
        self._rest: list[int] | None = None
        """The part of the first token's text that belongs to the constrained text, as tokens; None
        before the first token."""
        self._after = 0
        """Number of the sequence's tokens after the first sampled token."""
        self._given: Answer | None = None
        """The constraint's last answer, if this answer is a splice that drops tokens of ``_rest``.
        None for any other answer."""

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Passes the prompt to the constraint."""
        self._prompt = prompt
        self._inner.init_prompt(prompt)

    def pre_process(self) -> Answer:
        """Returns the answer of the constraint."""
        return self._inner.pre_process()

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Writes the mask of the first token. After the first token, returns the decisions of the
        constraint."""
        answer = self._inner.mid_process(fork_group, mask)
        if self._rest is not None:
            return self._whole(answer)
        found = bytearray(len(mask))
        for token in self._beginning(answer, bytes(mask)):
            found[token >> 3] |= 1 << (token & 7)
        mask[:] = found
        return _MASKED

    def masks_along(self, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Calls the constraint's masks_along; returns 0 before the first token."""
        inner = self._inner
        if self._rest is None or not isinstance(inner, TakesDrafts):
            return 0
        return inner.masks_along(draft, masks)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Passes the rest of the first token, and all later tokens, to the constraint."""
        given, self._given = self._given, None
        if given is not None:
            # ``tokens`` replaced the first token and all tokens after it (``_whole``).
            self._rest, self._after = [], len(tokens) - 1
            return self._inner.post_process(given.tokens, given.backtrack)
        if self._rest is None and tokens:
            self._rest = self._rest_of(tokens[0])
            # The sequence has used one token of ``max_tokens``. The constraint counts the tokens of
            # ``_rest`` instead of this token, so it gets a different ``max_tokens``.
            left = max(1, self._host.max_tokens - 1 + len(self._rest))
            self._inner.close()
            self._inner = self._program.begin(self._host, left)
            self._inner.init_prompt(self._prompt)
            self._after = len(tokens) - 1
            followed = [*self._rest, *tokens[1:]]
            return self._inner.post_process(followed, 0) if followed else CONTINUE
        self._after += len(tokens) - backtrack
        return self._inner.post_process(tokens, backtrack)

    def text_end(self, stop: bytes = b"") -> ConstraintEnd:
        """How the constrained text ends (``Constraint.text_end``)."""
        return self._inner.text_end(stop)

    def fork(self, host: Host) -> HealingController:
        """A controller with a copy of the state."""
        left = max(1, host.max_tokens - 1 + len(self._rest or ()))
        within = host if self._rest is None else replace(host, max_tokens=left)
        other = HealingController(self._program, self._inner.fork(within), host, self._prefix)
        other._prompt, other._after = self._prompt, self._after
        other._rest = None if self._rest is None else list(self._rest)
        return other

    def close(self) -> None:
        """Closes the constraint."""
        self._inner.close()

    # --- inside ---------------------------------------------------------------------------------

    def _rest_of(self, token: int) -> list[int]:
        """The part of a first token's text that follows the removed token's text, as tokens."""
        vocabulary = self._host.vocabulary
        text = vocabulary.token(token)
        if not text.startswith(self._prefix):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the token {token} ({text!r}) does not begin with the text {self._prefix!r} that "
                "was removed from the prompt",
            )
        return vocabulary.tokenize(text[len(self._prefix) :])

    def _whole(self, answer: Answer) -> Answer:
        """The answer of the constraint, changed to apply to the whole sequence. If the answer is a
        splice that drops tokens of ``_rest``, the changed splice drops the whole first token. Then
        it appends the removed token, the remaining tokens of ``_rest``, and the splice's tokens."""
        rest = self._rest or []
        if answer.action is not Action.SPLICE or answer.backtrack <= self._after:
            return answer
        kept = rest[: len(rest) - (answer.backtrack - self._after)]
        vocabulary = self._host.vocabulary
        text = b"".join(map(vocabulary.token, (*kept, *answer.tokens)))
        tokens = [self._program.healed, *vocabulary.tokenize(text)]
        self._given = answer
        return Answer(Action.SPLICE, backtrack=self._after + 1, tokens=tokens)

    def _beginning(self, answer: Answer, mask: bytes) -> Iterator[int]:
        """The tokens that begin with the removed token's text and continue as the constraint
        allows. ``answer`` and ``mask`` are the constraint's decision at the beginning of its
        text."""
        table = _table(self._host.vocabulary)  # type: ignore[arg-type]
        every = int.from_bytes(table.all_text, "little")
        if answer.masked and int.from_bytes(mask, "little") & every == every:
            # The constrained text may begin with any token, and so with any text.
            answer = CONTINUE
        tried = 0
        for place in table.beginning_with(self._prefix):
            token, rest = table.numbers[place], table.texts[place][len(self._prefix) :]
            single = table.number_of(rest) if answer.masked else None
            if single is not None:
                if mask[single >> 3] >> (single & 7) & 1:
                    yield token
            elif not rest or answer == CONTINUE:
                yield token
            elif tried < MAX_TRIED and answer.action is not Action.STOP:
                tried += answer.masked
                if self._allows(rest, answer, mask):
                    yield token

    def _allows(self, rest: bytes, answer: Answer, mask: bytes) -> bool:
        """Whether the constrained text may begin with ``rest``. ``answer`` and ``mask`` are the
        constraint's decision at the beginning of its text."""
        inner, after = self._inner.fork(self._host), memoryview(bytearray(mask))
        vocabulary = self._host.vocabulary
        try:
            while True:
                if answer.action is Action.SPLICE:
                    tokens = answer.tokens
                    forced = b"".join(map(vocabulary.token, tokens))
                    if forced.startswith(rest):
                        return True
                    if not forced or answer.backtrack or not rest.startswith(forced):
                        return False
                    rest = rest[len(forced) :]
                elif answer.action is Action.CONTINUE:
                    first, *others = vocabulary.tokenize(rest)
                    if answer.masked and not after[first >> 3] >> (first & 7) & 1:
                        return False
                    if not others:
                        return True
                    tokens = [first]
                    rest = rest[len(vocabulary.token(first)) :]
                else:
                    return False
                if inner.post_process(tokens, 0).action is Action.STOP:
                    return False
                answer = inner.mid_process((self._host.seq,), after)
        except ControllerError:
            return False
        finally:
            inner.close()


@lru_cache(KEPT_TABLES)
def _table(vocabulary: Vocabulary) -> TokenTable:
    return TokenTable(vocabulary)
