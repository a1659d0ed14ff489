"""The rounds of a grammar make the same decisions in a batch as alone. A stream that moves to
another worker gets the same tokens, although other rounds run in batches there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenbus.grammars.regex import compile_regex
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.backends.grammar.grammar_controller import GrammarController
from tokenbus.workers.controller.backends.grammar.shared_instances import Shared, SharedInstances
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import CONTINUE, Action, Answer
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ....counts import examples
from ..played import UNHURRIED, engine
from .grammar_cases import Case, grammar_cases, raw_vocabulary, regex_cases

INSTANCES = SharedInstances(engine, None)
MOST = 40
"""Maximum number of decisions of a text."""


class Side:
    """The controller of a text. ``batches``: whether its rounds run in batches if they can."""

    def __init__(self, shared: Shared, max_tokens: int, *, batches: bool) -> None:
        vocabulary = shared.guest.vocabulary
        variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
        log = Log(1 << 20)
        host = Host(1, 0, b"", vocabulary, variables, log, UNHURRIED, max_tokens)
        self.controller = GrammarController(shared, host, shared.guest.start(), [])
        self.log = log
        self.batched: list[int] = []
        """The number of allowed tokens after each round that ran in a batch."""
        self._batches = batches
        self._size = vocabulary.size
        self._mask = memoryview(bytearray(4 * -(-vocabulary.size // 32)))

    def decide(self) -> tuple[Answer | str, list[int]]:
        """The next decision, or the message of its error, and the allowed tokens if it samples."""
        try:
            answer = self.controller.mid_process((0,), self._mask)
        except ControllerError as error:
            return str(error), []
        return answer, self._allowed() if answer.action is Action.CONTINUE else []

    def sampled(self, token: int) -> tuple[Answer | str, list[int]]:
        """The decision after a sampled token."""
        batch = self.controller.batch(token) if self._batches else None
        if batch is not None and batch[0].rounds([(batch[1], token)], [self._mask]) == [True]:
            self.controller.batched(token)
            self.batched.append(len(self._allowed()))
            return Answer(Action.CONTINUE, masked=True), self._allowed()
        after = self.controller.post_process([token], 0)
        return self.decide() if after == CONTINUE else (after, [])

    def _allowed(self) -> list[int]:
        return list(allowed(self._mask, self._size))


def compare(
    tables: bytes,
    vocabulary: TokenizerVocabulary,
    max_tokens: int,
    choose: Callable[[list[int]], int],
) -> list[int]:
    """Fails unless the decisions with and without batches are equal until the text ends. Returns
    ``Side.batched``."""
    shared = INSTANCES.get(tables, vocabulary)
    # The first side caches the masks, which a round in a batch needs.
    sides = [Side(shared, max_tokens, batches=batches) for batches in (False, True)]
    found = [side.decide() for side in sides]
    for _ in range(MOST):
        assert found[0] == found[1]
        answer, tokens = found[0]
        if isinstance(answer, str) or answer.action is Action.STOP:
            break
        if answer.action is Action.SPLICE:
            for side in sides:
                side.controller.post_process(answer.tokens, answer.backtrack)
            found = [side.decide() for side in sides]
        else:
            token = choose(tokens)
            found = [side.sampled(token) for side in sides]
    ends = {(side.controller.text_end(), side.log.take()) for side in sides}
    assert len(ends) == 1
    for side in sides:
        side.controller.close()
    shared.release()
    return sides[1].batched


@settings(
    max_examples=examples(30),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(regex_cases() | grammar_cases(), st.integers(1, 400), st.randoms(use_true_random=False))
def test_rounds_in_batches_and_separate_rounds_decide_alike(
    case: Case, max_tokens: int, chance: Random
) -> None:
    compare(case.tables, case.vocabulary, max_tokens, chance.choice)


def test_texts_with_forced_tokens_and_closings_are_the_same_in_batches() -> None:
    tokens = [bytes((byte,)) for byte in b'ab,:"{}']
    vocabulary = raw_vocabulary([b"", *tokens, b'"a', b"ab", b'":'])
    tables = compile_regex('[{]("a+b?":b(,"ab?":a)*)+[}]').to_bytes()
    chance, batched = Random(7), []
    for max_tokens in range(1, 41):
        batched += compare(tables, vocabulary, max_tokens, chance.choice)
    # Some rounds in batches have a forced token, and others have a choice.
    assert min(batched) == 1
    assert max(batched) > 1
