"""The rounds of a text that the worker generates for a script."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenbus.grammars.regex import compile_regex
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller import biases
from tokenbus.workers.controller.backends.grammar.grammar_controller import GrammarController
from tokenbus.workers.controller.backends.grammar.shared_instances import SharedInstances
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.scripts.generation import Generate, Generation, decode_generate
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from ..played import UNHURRIED, engine, vocabulary

TOKENS = [b"", b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_at": [f"#{number}" for number in range(65)]},
        {"stop_at": ["a" * 1025]},
        {"stop_at": [""]},
        {"max_tokens": 0},
    ],
)
def test_arguments_that_would_occupy_the_worker_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ControllerError, match=r"^gen: "):
        decode_generate(json.dumps(wrong).encode())


def test_a_bias_does_not_forbid_a_forced_token() -> None:
    shared = SharedInstances(engine, None).get(
        compile_regex("[ac]b[ac]b").to_bytes(), vocabulary(TOKENS)
    )
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    host = Host(1, 0, b"", shared.guest.vocabulary, variables, Log(1000), UNHURRIED, 100)
    constraint = GrammarController(shared, host, shared.guest.start(), [])
    never_b = biases.sparse(np.array([2]), np.array([-np.inf], np.float32), len(TOKENS))
    generation = Generation(Generate(), host, constraint, never_b)
    mask = memoryview(bytearray(4))
    seen = []
    for token in (1, 2, 3):
        answer = generation.mid_process(mask)
        assert answer is not None
        assert answer.action is Action.CONTINUE
        seen.append((list(allowed(mask, len(TOKENS))), answer.bias))
        generation.post_process([token], 0)
    generation.close()
    assert seen == [([1, 3], never_b), ([2], None), ([1, 3], never_b)]


def test_a_round_whose_log_probability_is_wanted_does_not_run_in_a_batch() -> None:
    shared = SharedInstances(engine, None).get(
        compile_regex("[abc]*").to_bytes(), vocabulary(TOKENS)
    )
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    host = Host(1, 0, b"", shared.guest.vocabulary, variables, Log(1000), UNHURRIED, 100)
    for asks in (False, True):
        constraint = GrammarController(shared, host, shared.guest.start(), [])
        generation = Generation(Generate(logprobs=asks), host, constraint, None)
        mask = memoryview(bytearray(4))
        for token in (1, 2):
            answer = generation.mid_process(mask)
            assert answer is not None
            assert answer.logprobs is asks
            host.give(logprobs=[-token / 8] if asks else ())
            generation.post_process([token], 0)
        generation.mid_process(mask)
        assert (generation.batch(1) is None) is asks
        assert generation.logprobs == ([-1 / 8, -2 / 8] if asks else [None, None])
        generation.close()
