"""The live sequences of an engine, and the operations that begin, fork, splice, extend and end
them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np

from ....protocol.errors import Code, RequestError
from ....protocol.logs import about
from ....protocol.messages import FinishReason
from ....protocol.sampling import Distribution, Query, Sampling
from ..model.runner import Runner
from ..sampling.distributions import LOWEST
from ..sampling.sampler import NAN
from ..sampling.token_counts import has_penalties
from .block_manager import BlockManager, BlockTable
from .intake import Intake
from .pending_step import PendingStep
from .scheduler import Scheduler
from .sequence import MAX_SEQ, ScoredTexts, Sequence, TokenOutput
from .text import Text

log = logging.getLogger(__name__)


class LiveSequences:
    """The table of requests and their sequences, and the operations that change a sequence.

    A sequence is in this table, and in exactly one table of the scheduler, from its arrival to its
    end. When a sequence is removed, its blocks are freed.
    """

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: Runner,
        max_forks: int,
        ended: Callable[[Sequence], None],
    ) -> None:
        """``ended`` is called with each sequence that leaves the table."""
        self._ended = ended
        self._intake = intake
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._max_forks = max_forks
        self.requests: dict[int, dict[int, Sequence]] = {}
        self._made: dict[int, int] = {}
        """For each request: the number of its sequences so far, including ended ones."""
        self.step: PendingStep | None = None
        """The step that is between its forward and its sampling: its forward has been launched, and
        it has not been sampled."""
        self.looks: dict[Sequence, Query] = {}
        """The query (``Engine.look``) of each sequence that has one. The sequence's next logits
        answer it."""
        self.outputs: list[TokenOutput] = []
        """Outputs that have not been returned yet."""
        self.forks = 0
        self.splices = 0
        self.appended_tokens = 0
        self.dropped_tokens = 0

    # --- the table ------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Adds the first sequence of a request. Removes sequences of an earlier attempt."""
        self._drop_request(sequence.request)
        self.requests[sequence.request] = {sequence.seq: sequence}
        self._made[sequence.request] = 1 + sequence.pending_forks
        self._scheduler.add(sequence)

    def restore(self, sequences: Tokens[Sequence], made: int) -> None:
        """Adds the live sequences of a request that began at another worker. ``made``: number of
        sequences that the request has had. Removes sequences of an earlier attempt."""
        request = sequences[0].request
        self._drop_request(request)
        self.requests[request] = {sequence.seq: sequence for sequence in sequences}
        self._made[request] = made
        for sequence in sequences:
            self._scheduler.add(sequence)

    def _drop_request(self, request: int) -> None:
        """Removes all sequences of a request from the tables and from a pending step, and discards
        their outputs."""
        if request in self.requests:
            self.abort(request, "cancelled")

    def find(self, request: int, seq: int) -> Sequence | None:
        """The live sequence; None if it has ended or does not exist."""
        return self.requests.get(request, {}).get(seq)

    def named(self, request: int, seq: int) -> Sequence:
        """The live sequence of a generation. Raises RequestError if the sequence does not exist,
        or if it is a score."""
        sequence = self.find(request, seq)
        if sequence is None or sequence.scored:
            raise RequestError(Code.UNKNOWN_STREAM, f"request {request} has no live sequence {seq}")
        return sequence

    def changed(self) -> None:
        """Notifies the scheduler that the remaining work of a sequence has changed."""
        self._scheduler.changed()

    def has_any_of(self, step: PendingStep) -> bool:
        """Whether any sequence that a step computes or samples is still alive."""
        if step.rows:
            return True
        chunks = (part.chunk.sequence for part in step.parts)
        return any(self.find(s.request, s.seq) is s for s in chunks)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from the tables and from the pending step, and frees its blocks. First
        registers its computed blocks for prefix reuse.

        The sequence may be missing from some of the tables.
        """
        self.drop_texts(sequence)
        computed = min(sequence.num_computed_tokens, len(sequence.tokens))
        self._blocks.commit(sequence.block_table, sequence.tokens, computed)
        if self.step is not None:
            self.step.rows.pop(sequence, None)
        self.looks.pop(sequence, None)
        self._scheduler.remove(sequence)
        self._ended(sequence)
        left = self.requests.get(sequence.request, {})
        if left.get(sequence.seq) is not sequence:
            return
        del left[sequence.seq]
        if not left:
            del self.requests[sequence.request]
            del self._made[sequence.request]

    # --- forks ----------------------------------------------------------------------------------

    def fork(self, parent: Sequence, n: int, numbers: Tokens[int] | None) -> list[int]:
        """Forks a sequence ``n`` times and returns the numbers of the forks (``Engine.fork``)."""
        request = parent.request
        first = self._made[request]
        numbers = range(first, first + n) if numbers is None else numbers
        live = self.requests[request]
        if min(numbers) < 0 or max(numbers) > MAX_SEQ or len({*numbers, *live}) < n + len(live):
            raise RequestError(
                Code.INVALID_FIELD,
                f"forks of request {request} cannot be numbered {list(numbers)}: expected distinct "
                f"numbers from 0 to {MAX_SEQ} that no live sequence of the request has",
            )
        total = first + n
        if total > self._max_forks:
            self.fail(
                parent,
                f"{n} more forks would make {total} sequences of this request; "
                f"at most {self._max_forks} are allowed",
            )
            return []
        self._made[request] = total
        self.forks += n
        children = [self._forked(parent, number) for number in numbers]
        for child in children:
            begun = TokenOutput.of(child)
            begun.parent = parent.seq
            self.outputs.append(begun)
            if self.step is not None and parent in self.step.rows:
                self.step.rows[child] = self.step.rows[parent]
            elif parent.row is not None:
                child.row = parent.row
        if parent.num_computed_tokens < parent.target or self.has_logits(parent):
            self._scheduler.forked(children)
        else:
            # A sequence without logits computes its last token again when it is admitted.
            self._scheduler.put_back(children)
        return [child.seq for child in children]

    def has_logits(self, sequence: Sequence) -> bool:
        """Whether a sequence has logits to sample from."""
        return sequence.row is not None or (self.step is not None and sequence in self.step.rows)

    def fork_pending(self, sequence: Sequence) -> list[Sequence]:
        """Makes the other sequences of a request with ``sampling.n`` above 1. These sequences share
        the blocks and the logits of the prompt."""
        if not sequence.pending_forks:
            return []
        children = [
            self._forked(sequence, number) for number in range(1, sequence.pending_forks + 1)
        ]
        sequence.pending_forks = 0
        self._scheduler.forked(children)
        return children

    def _forked(self, parent: Sequence, number: int) -> Sequence:
        child = Sequence(
            request=parent.request,
            seq=number,
            tokens=list(parent.tokens),
            num_prompt=parent.num_prompt,
            sampling=parent.sampling,
            max_length=parent.max_length,
            seed=parent.seed,
            priority=parent.priority,
            client=parent.client,
            arrival=parent.arrival,
            stop_ids=parent.stop_ids,
            least=parent.least,
            logit_bias=parent.logit_bias,
            counts=parent.count_tokens() if has_penalties(parent.sampling) else None,
            text=parent.text.fork() if parent.text is not None else None,
            healed=parent.healed,
            with_text=parent.with_text,
            inspect=parent.inspect,
            prompt_usage=parent.prompt_usage,
            block_table=self._blocks.fork(parent.block_table, parent.num_computed_tokens),
            num_computed_tokens=parent.num_computed_tokens,
        )
        if parent.drafting is not None:
            child.drafting = parent.drafting.fork(child.tokens)
        self.requests[parent.request][number] = child
        return child

    # --- splices and suspension -----------------------------------------------------------------

    def splice(self, sequence: Sequence, drop: int, tokens: Tokens[int]) -> None:
        """Drops the last ``drop`` generated tokens and appends ``tokens`` (``Engine.splice``)."""
        try:
            if not 0 <= drop <= sequence.num_generated:
                raise RequestError(
                    Code.INVALID_FIELD,
                    f"a splice drops {drop} tokens, but the sequence has only "
                    f"{sequence.num_generated} generated tokens",
                )
            self._intake.check_tokens(tokens, "ff_tokens")
        except RequestError as error:
            self.fail(sequence, error.message)
            return
        self.splices += 1
        self.appended_tokens += len(tokens)
        self.dropped_tokens += drop
        self.discard_logits(sequence)
        if drop:
            self._drop(sequence, drop)
        if not tokens:
            # The last token is computed again, because its logits are needed.
            self._compute_last_again(sequence)
            dropped = TokenOutput.of(sequence)
            dropped.backtrack = drop
            self.outputs.append(dropped)
            return
        for number, token in enumerate(tokens, 1):
            output = TokenOutput.of(sequence, token)
            if number == 1:
                output.backtrack = drop
            if not self.append(sequence, output):
                if number < len(tokens):
                    self.outputs[-1].shortened = True
                return

    def discard_logits(self, sequence: Sequence) -> None:
        """Discards the logits and decisions of a sequence. If the sequence is deferred, reschedules
        it. If its last token has been computed, the caller must then append a token, suspend the
        sequence or call ``_compute_last_again``."""
        if self.step is not None:
            self.step.rows.pop(sequence, None)
        sequence.row = sequence.mask = sequence.bias = sequence.options = None
        self.looks.pop(sequence, None)
        self._scheduler.reschedule(sequence)
        self._scheduler.changed()

    @staticmethod
    def _compute_last_again(sequence: Sequence) -> None:
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.tokens) - 1)

    def _drop(self, sequence: Sequence, drop: int) -> None:
        sequence.drop(drop)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.tokens))
        self._blocks.truncate(sequence.block_table, sequence.num_computed_tokens)
        if sequence.text is not None:
            sequence.text = self._intake.text_of(sequence)

    def begin_anew(self, sequence: Sequence, prompt: Tokens[int]) -> None:
        """Replaces all tokens of a sequence by a new prompt (``Engine.begin_anew``)."""
        try:
            self._intake.check_prompt(prompt)
        except RequestError as error:
            self.fail(sequence, f"its new prompt is not valid: {error.message}", str(error.code))
            return
        self.discard_logits(sequence)
        output = TokenOutput.of(sequence)
        output.pos, output.backtrack = 0, sequence.num_generated
        output.prompt = list(prompt)
        self.dropped_tokens += output.backtrack
        computed = min(sequence.num_computed_tokens, len(sequence.tokens))
        self._blocks.commit(sequence.block_table, sequence.tokens, computed)
        self._scheduler.compute_anew(sequence)
        self._intake.begin_anew(sequence, prompt)
        self.outputs.append(output)

    # --- scored texts ---------------------------------------------------------------------------

    def score(self, sequence: Sequence, texts: Tokens[Tokens[int]]) -> None:
        """Suspends a sequence, and scores texts as its continuations (``Engine.score_texts``)."""
        self.drop_texts(sequence)
        self.discard_logits(sequence)
        self._compute_last_again(sequence)
        self._scheduler.suspend(sequence)
        sequence.scoring = ScoredTexts(sequence, [[] for _ in texts], deque(enumerate(texts)))
        begun = self._begin_texts(sequence.request)
        if sequence.num_computed_tokens == len(sequence.tokens) - 1:
            self._scheduler.forked(begun)
        else:
            # Some tokens of ``sequence`` may not be in the cache. The sequence of the first text
            # computes them. The sequences of the other texts wait for its blocks
            # (``Sequence.continued``).
            self._scheduler.put_back(begun)

    def _begin_texts(self, request: int) -> list[Sequence]:
        """Makes sequences for waiting texts of a request, so that up to ``max_forks`` texts are
        scored at once. The caller adds the sequences to the scheduler."""
        live = self.requests[request]
        room = self._max_forks - sum(seq < 0 for seq in live)
        number = min(0, *live) - 1
        begun: list[Sequence] = []
        for scoring in [s.scoring for s in live.values() if s.seq >= 0 and s.scoring is not None]:
            while scoring.waiting and len(begun) < room:
                place, text = scoring.waiting.popleft()
                one = self._text_after(scoring.sequence, number - len(begun), text)
                one.scoring = scoring
                live[one.seq] = one
                scoring.left[one] = place
                begun.append(one)
        return begun

    def _continue_texts(self, request: int) -> None:
        """Begins to score waiting texts of a request, after other texts of the request have
        ended."""
        begun = self._begin_texts(request)
        if begun:
            self._scheduler.put_back(begun)

    def drop_texts(self, sequence: Sequence) -> None:
        """Stops scoring texts as continuations of a sequence."""
        scoring = sequence.scoring
        if scoring is None or sequence.scored:
            return
        sequence.scoring = None
        for one in scoring.left:
            self.remove(one)
        self._continue_texts(sequence.request)

    def take_text_scores(
        self, one: Sequence, first: int, values: list[float], complete: bool
    ) -> None:
        """Stores log-probabilities of a scored text. ``first``: the index of the first scored token
        in the text. When all texts are scored completely, adds an output with all scores."""
        scoring = one.scoring
        assert scoring is not None
        numbers = np.maximum(np.array(values, np.float32), LOWEST)
        scoring.scores[scoring.left[one]][first:] = numbers.tolist()
        if not complete:
            return
        del scoring.left[one]
        self.remove(one)
        self._continue_texts(one.request)
        if not scoring.left:
            scoring.sequence.scoring = None
            output = TokenOutput.of(scoring.sequence)
            output.scores = scoring.scores
            self.outputs.append(output)

    def _text_after(self, sequence: Sequence, number: int, text: Tokens[int]) -> Sequence:
        computed, known = sequence.num_computed_tokens, len(sequence.tokens)
        return Sequence(
            request=sequence.request,
            seq=number,
            tokens=[*sequence.tokens, *text],
            num_prompt=known,
            sampling=Sampling(),
            max_length=known + len(text),
            scored=True,
            scored_from=known,
            priority=sequence.priority,
            client=sequence.client,
            arrival=sequence.arrival,
            prompt_usage=sequence.prompt_usage,
            block_table=self._blocks.fork(sequence.block_table, computed),
            num_computed_tokens=computed,
            continued=True,
        )

    # --- looks ----------------------------------------------------------------------------------

    def look(self, sequence: Sequence, query: Query) -> None:
        """Answers a query with the sequence's next logits (``Engine.look``)."""
        sequence.mask, sequence.bias, sequence.options, sequence.along = None, None, None, ()
        self.looks[sequence] = query
        self._scheduler.reschedule(sequence)
        self._scheduler.changed()

    def look_again(self, sequence: Sequence, query: Query) -> None:
        """Computes the logits of a sequence again, to answer a query."""
        self.discard_logits(sequence)
        self._compute_last_again(sequence)
        self.look(sequence, query)

    def take_look(self, sequence: Sequence, answer: Distribution) -> None:
        """Adds the output with the answer to a query. Does nothing if the sequence has ended. No
        token was sampled, so ``Distribution.rank`` is 0."""
        if self.find(sequence.request, sequence.seq) is not sequence:
            return
        if answer.entropy != answer.entropy:
            self.fail(sequence, NAN)
            return
        output = TokenOutput.of(sequence)
        output.distribution = answer
        self.outputs.append(output)

    # --- tokens and ends ------------------------------------------------------------------------

    def append(self, sequence: Sequence, output: TokenOutput, pushed: Text | None = None) -> bool:
        """Appends the token of an output to a sequence. Ends the sequence at a stop token, at a
        stop string, or at its maximum length. Returns whether the sequence is still alive.
        ``pushed``: the token's text, if it has already been decoded."""
        token = output.token
        assert token is not None
        if token in sequence.stop_ids:
            output.finish_reason = "stop"
            output.stop = token if token in sequence.sampling.stop else None
        elif len(sequence.tokens) + 1 >= sequence.max_length:
            output.finish_reason = "length"
        if sequence.text is not None:
            try:
                if pushed is None:
                    pushed = sequence.text.push(token)
                text = pushed.certain
                found = pushed.stop
                if output.finish_reason is not None and not found:
                    rest = sequence.text.finish()
                    text += rest.certain
                    found = rest.stop
                if found:
                    output.finish_reason, output.stop, output.shortened = "stop", found, True
                if sequence.with_text:
                    output.text = text
            except Exception as error:
                self.fail_text(sequence, error)
                return False
        sequence.tokens.append(token)
        if output.finish_reason is not None:
            self.remove(sequence)
        self.outputs.append(output)
        return output.finish_reason is None

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str = "",
        code: str | None = None,
    ) -> TokenOutput:
        """Ends a sequence without a further token. Returns its last output, and does not add this
        output to ``outputs``."""
        output = TokenOutput.of(sequence, reason=reason)
        output.error, output.code = error or None, code
        if sequence.with_text and sequence.text is not None:
            try:
                output.text = sequence.text.finish().certain
            except Exception:
                text_of = "decoding the last text of request %d failed"
                log.exception(text_of, sequence.request, extra=about(sequence.request))
        self.remove(sequence)
        return output

    def fail(self, sequence: Sequence, error: str, code: str | None = None) -> None:
        """Ends a sequence and its pending forks with an error. Frees the sequence's blocks. Blocks
        that no other sequence uses are filled with zeros, because they may contain NaN. If the
        sequence computes a scored text, ends the sequence that the text continues."""
        self._runner.clear_blocks(self._blocks.discard(sequence.block_table))
        sequence.block_table = BlockTable()
        sequence.num_computed_tokens = 0
        if sequence.seq < 0 and sequence.scoring is not None:
            del sequence.scoring.left[sequence]
            self.remove(sequence)
            self.fail(sequence.scoring.sequence, error, code)
            return
        self.outputs += self._ends(sequence, "error", error, code)

    def _ends(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str = "",
        code: str | None = None,
    ) -> list[TokenOutput]:
        """Ends a sequence and its pending forks."""
        ends = [self.end(sequence, reason, error, code)]
        for seq in range(sequence.seq + 1, sequence.seq + 1 + sequence.pending_forks):
            end = TokenOutput.of(sequence, reason=reason)
            end.seq, end.error, end.code = seq, error or None, code
            ends.append(end)
        return ends

    def fail_text(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence whose tokens could not be decoded to text."""
        what = "decoding the text of request %d failed"
        log.error(what, sequence.request, exc_info=error, extra=about(sequence.request))
        sequence.text = None
        self.fail(sequence, f"decoding its text failed: {error}")

    def fail_defect(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence because an exception was raised while its result was processed. The other
        sequences of the step continue."""
        number, what = sequence.request, "processing a result of request %d failed"
        log.error(what, number, exc_info=error, extra=about(number))
        self.fail(sequence, f"processing its result failed: {type(error).__name__}: {error}")

    def take_outputs(self) -> list[TokenOutput]:
        """Returns and clears ``outputs``."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def abort(self, request: int, reason: FinishReason) -> list[TokenOutput]:
        """Ends all sequences of a request. Returns the outputs of the request that have not been
        returned yet, followed by the last output of each sequence."""
        # The older outputs come first, because they may report a fork whose last output follows.
        ended = [o for o in self.outputs if o.request == request]
        self.outputs = [o for o in self.outputs if o.request != request]
        live = self.requests.get(request, {})
        for sequence in live.values():
            if sequence.scoring is not None:
                sequence.scoring.waiting.clear()
        for sequence in [sequence for seq, sequence in live.items() if seq >= 0]:
            ended += self._ends(sequence, reason)
        return ended
