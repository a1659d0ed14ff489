"""The controller of a script. It has the script's guest. While the script waits in ``gen``, it also
has the text that the worker generates for the guest.

While a text is generated, the worker runs the sequence's rounds with the controller of a built-in
constraint, without calling the guest. When the text has ended, the worker calls the guest's
post_process with the tokens of the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ....protocol.errors import Code, ControllerError, RequestError, TokenbusError
from ..host import Host
from ..interface import (
    AGAIN,
    CONTINUE,
    Action,
    Answer,
    Batch,
    Batched,
    Constraint,
    Controller,
    DecidesAhead,
    Program,
    RunsAhead,
)
from .generation import Generate, Generation, decode_generate, failed
from .next_tokens import ConstraintQuestions, FindConstraint

MAX_EMPTY_TEXTS = 256
"""Maximum number of texts without a token that a script may generate in a row in one round."""
MAX_REFUSALS = 16
"""Maximum number of constraints of a sequence that may be refused. Each refusal may take as long as
compiling a grammar."""


class ScriptProgram:
    """Makes the controllers of a script. ``guests`` makes their guests."""

    def __init__(self, guests: Program, constraints: FindConstraint) -> None:
        """``constraints`` finds a built-in constraint by its name."""
        self._guests = guests
        self._constraints = constraints

    def start(self, host: Host) -> Controller:
        """Creates a guest and its controller. Raises TokenbusError if the script fails."""
        return ScriptController(self._guests.start, host, self._constraints)


class ScriptController:
    """The controller of one sequence."""

    def __init__(
        self,
        make: Callable[[Host], Controller],
        host: Host,
        constraints: FindConstraint,
    ) -> None:
        """``make`` creates the guest for a host. Raises the errors of ``make``."""
        self._host = host
        self._constraints = constraints
        self._questions = host.questions = ConstraintQuestions(constraints, host)
        try:
            self._guest = make(host)
        except BaseException:
            self._questions.close()
            raise
        # ``isinstance`` takes 25 µs for a protocol, so it is called only once.
        self._ahead = self._guest if isinstance(self._guest, DecidesAhead) else None
        self._generation: Generation | None = None
        self._length = 0
        """Number of tokens after the prompt."""
        self._held: Answer | None = None
        """An answer of the guest that the next pre_process returns."""
        self._refusals = 0
        """Number of constraints of this sequence that were refused."""

    # --- interface.Controller -------------------------------------------------------------------

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Runs the script to its first ``await``."""
        self._guest.init_prompt(prompt)

    def pre_process(self) -> Answer:
        """Calls the guest or, while a text is generated, the constraint of the text."""
        held, self._held = self._held, None
        if held is not None:
            return held
        self._questions.renew()
        generation = self._generation
        if generation is not None and not generation.ended:
            return generation.pre_process()
        if generation is not None:
            self._finish_text()
        return self._guest.pre_process()

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Calls the guest or, while a text is generated, the constraint of the text."""
        for _ in range(MAX_EMPTY_TEXTS):
            if self._generation is None:
                answer = self._guest.mid_process(fork_group, mask)
                if answer.action is not Action.GENERATE:
                    return answer
                self._begin_text(answer)
            if self._generation is not None:
                found = self._generation.mid_process(mask)
                if found is not None:
                    return found
                self._finish_text()
            answer = self._guest.pre_process()
            if answer.action is Action.FORK or answer.action is Action.SUSPEND:
                self._held = answer
                return AGAIN
            if answer.action is not Action.CONTINUE:
                return answer
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the script generated {MAX_EMPTY_TEXTS} texts without a token one after another",
        )

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Passes the tokens to the guest or, while a text is generated, to the text."""
        if backtrack > self._length:
            self._length = 0  # The sequence begins anew, and ``tokens`` is its prompt.
        else:
            self._length += len(tokens) - backtrack
        if self._generation is None:
            self._questions.renew()
            return self._guest.post_process(tokens, backtrack)
        self._generation.post_process(tokens, backtrack)
        return CONTINUE

    def fork(self, host: Host) -> ScriptController:
        """Copies the guest and the text."""
        other = ScriptController(self._guest.fork, host, self._constraints)
        other._length, other._held = self._length, self._held
        other._refusals = self._refusals
        if self._generation is not None:
            try:
                other._generation = self._generation.fork(host)
            except BaseException:
                other.close()
                raise
        return other

    def close(self) -> None:
        """Frees the guest and the constraint."""
        if self._generation is not None:
            self._generation.close()
        self._guest.close()
        self._questions.close()

    # --- interface.RunsAhead --------------------------------------------------------------------

    @property
    def takes_drafts(self) -> bool:
        """Whether the guest takes drafts. Only a script that is a class can take drafts."""
        return isinstance(self._guest, RunsAhead) and self._guest.takes_drafts

    # --- interface.DecidesAhead -----------------------------------------------------------------

    @property
    def has_decided(self) -> bool:
        """Whether the guest has already sent the answer of the next call."""
        if self._generation is not None:
            return False
        ahead = self._ahead is not None and self._ahead.has_decided
        return ahead or self._held is not None

    def ends(self) -> None:
        """Notifies the guest that the next post_process is the last one."""
        if self._ahead is not None:
            self._ahead.ends()

    # --- interface.Batched ----------------------------------------------------------------------

    def batch(self, token: int) -> tuple[Batch, int] | None:
        """The batch of the constraint or of the guest; None if the round does not run in a
        batch."""
        if self._held is not None:
            return None
        if self._generation is not None:
            return self._generation.batch(token)
        return self._guest.batch(token) if isinstance(self._guest, Batched) else None

    def batched(self, token: int) -> None:
        """Records a round that ran in a batch."""
        self._length += 1
        if self._generation is not None:
            self._generation.batched(token)
        elif isinstance(self._guest, Batched):
            self._guest.batched(token)

    # --- inside ---------------------------------------------------------------------------------

    def _begin_text(self, answer: Answer) -> None:
        """Begins a text. If the text's constraint is refused, passes the reason to the guest
        instead, so that the script can catch the error. Raises ControllerError after
        ``MAX_REFUSALS`` refusals."""
        asked = decode_generate(answer.generate)
        constraint = None
        if asked.kind is not None:
            try:
                constraint = self._constraint(asked)
            except RequestError as error:
                self._refusals += 1
                if self._refusals > MAX_REFUSALS:
                    raise failed(asked, error) from None
                self._refuse(f"gen({asked.kind}): {error.message}")
                return
            except TokenbusError as error:
                raise failed(asked, error) from None
        self._generation = Generation(asked, self._host, constraint, answer.bias)

    def _constraint(self, asked: Generate) -> Constraint:
        program = self._constraints(asked.kind or "")
        if program is None:
            raise ControllerError(Code.CONTROLLER_FAILED, "this worker has no constraints")
        left = self._host.max_tokens - self._length
        most = left if asked.max_tokens is None else min(left, asked.max_tokens)
        host = replace(self._host, arg=asked.argument.encode(), max_tokens=max(1, most))
        constraint = program.start(host)
        constraint.init_prompt(())
        return constraint

    def _refuse(self, reason: str) -> None:
        """Passes the reason of a refusal to the guest, in a post_process without tokens."""
        self._host.refusal = reason
        try:
            self._guest.post_process((), 0)
        finally:
            self._host.refusal = ""

    def _finish_text(self) -> None:
        """Passes the tokens of the text to the guest, with their log-probabilities if the script
        asked for them."""
        generation, self._generation = self._generation, None
        assert generation is not None
        generation.close()
        self._host.give(logprobs=generation.logprobs if generation.asks else ())
        self._guest.post_process(generation.tokens, 0)
