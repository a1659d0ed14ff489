"""AICI's JSON: what the results of calls and the storage commands mean."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.interface import CONTINUE, STOP, SUSPEND, Action, Answer
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.aici import RESULT_BYTES
from tokenbus.workers.controller.wasm.aici_calls import (
    check_init_prompt,
    init_prompt_argument,
    mid_process_answer,
    mid_process_argument,
    post_process_answer,
    post_process_argument,
    pre_process_answer,
)
from tokenbus.workers.controller.wasm.aici_storage import run_command
from tokenbus.workers.variables import VariableStorage


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ({"attention_masks": [[]]}, CONTINUE),
        ({"attention_masks": [[1, 1.0]], "suspend": False, "ff_tokens": []}, CONTINUE),
        ({"attention_masks": []}, STOP),
        ({"attention_masks": [[], [1], []]}, Answer(Action.FORK, count=3, tokens=[])),
        ({"attention_masks": [[]], "suspend": True}, SUSPEND),
        ({"attention_masks": [[]], "ff_tokens": [1, 2]}, Answer(Action.SPLICE, tokens=[1, 2])),
        ({"attention_masks": [], "suspend": True, "ff_tokens": [1]}, STOP),
        ({"attention_masks": [[], []], "suspend": True, "ff_tokens": [1]}, SUSPEND),
        ({"attention_masks": [[], []], "ff_tokens": [1]}, Answer(Action.FORK, 2, tokens=[1])),
        ({"attention_masks": [[]], "of_a_later_version": {}}, CONTINUE),
    ],
)
def test_pre_process_says(result: object, answer: Answer) -> None:
    assert pre_process_answer(json.dumps(result).encode()) == answer


@pytest.mark.parametrize("weights", [[0.5], [1, 0], [1, 1, 2.5]])
def test_attention_with_weights_is_refused(weights: list[float]) -> None:
    with pytest.raises(ControllerError, match="attends to all tokens alike") as error:
        pre_process_answer(json.dumps({"attention_masks": [[], weights]}).encode())
    assert f"weight {weights[-1]:g}" in error.value.message


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ("Stop", STOP),
        ({"Stop": {}}, STOP),
        ({"SampleWithBias": {}}, CONTINUE),
        ({"Splice": {"backtrack": 0, "ff_tokens": [1]}}, Answer(Action.SPLICE, tokens=[1])),
        ({"Splice": {"backtrack": 1, "ff_tokens": [1]}}, Answer(Action.SPLICE, tokens=[1])),
        ({"Splice": {"backtrack": 3, "ff_tokens": []}}, Answer(Action.SPLICE, 1, 2, [])),
    ],
)
def test_mid_process_says(result: object, answer: Answer) -> None:
    assert mid_process_answer(json.dumps(result).encode(), masked=False, size=3) == answer


@pytest.mark.parametrize("masked", [True, False])
def test_sample_with_bias_may_have_a_number_for_each_token(masked: bool) -> None:
    result = b'{"SampleWithBias":{"bias":[0.5,null,-3]}}'
    answer = mid_process_answer(result, masked=masked, size=3)
    assert (answer.action, answer.masked) == (Action.CONTINUE, masked)
    assert answer.bias is not None
    assert answer.bias.pairs == 0
    assert list(answer.bias.data.cast("f")) == [0.5, float("-inf"), -3.0]
    assert mid_process_answer(b'{"SampleWithBias":{"bias":[]}}', masked=masked, size=3).bias is None


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ("[1,2]", "the bias has 2 values; the vocabulary has 3 tokens"),
        ("[1,1e300,2]", "the bias of token 1 is inf"),
        ('[1,"x",2]', "Expected `float | null`, got `str`"),
    ],
)
def test_a_wrong_bias_of_sample_with_bias_is_refused(bias: str, says: str) -> None:
    result = '{"SampleWithBias":{"bias":%s}}' % bias  # noqa: UP031
    with pytest.raises(ControllerError) as error:
        mid_process_answer(result.encode(), masked=False, size=3)
    assert says in error.value.message


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (b'{"attention_masks":[' + b"[]," * 1_300_000 + b"[]]}", "1300001 values; at most 70000"),
        (b'{"attention_masks":[' + b"[]," * 1024 + b"[]]}", "1027 lists and objects; at most 1024"),
        (b'{"attention_masks":' + b"[" * 2000, "2001 lists and objects; at most 1024"),
    ],
)
def test_json_of_too_many_values_is_not_decoded(result: bytes, says: str) -> None:
    with pytest.raises(ControllerError, match=f"^pre_process returned JSON with {says} are allowe"):
        pre_process_answer(result)


def test_as_many_tokens_as_may_be_appended_are_decoded() -> None:
    tokens = [2**32 - 1] * Limits().appended_tokens
    result = json.dumps({"attention_masks": [[]], "ff_tokens": tokens}, separators=(",", ":"))
    assert len(result) <= RESULT_BYTES
    assert pre_process_answer(result.encode()).tokens == tokens


@pytest.mark.parametrize("backtrack", [0, 1])
def test_a_splice_that_does_nothing_is_refused(backtrack: int) -> None:
    result = {"Splice": {"backtrack": backtrack, "ff_tokens": []}}
    with pytest.raises(ControllerError, match=f"backtrack {backtrack} and no ff_tokens, does noth"):
        mid_process_answer(json.dumps(result).encode(), masked=False, size=3)


# --- storage --------------------------------------------------------------------------------------


def storage(*commands: object) -> list[object]:
    """The answers to storage commands of one sequence."""
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    return [json.loads(run_command(json.dumps(c).encode(), variables, 1000)) for c in commands]


def read(name: str) -> object:
    return {"ReadVar": {"name": name}}


def write(name: str, value: str, op: str = "Set", when: int | None = None) -> object:
    command = {"name": name, "value": value, "op": op, "when_version_is": when}
    return {"WriteVar": command}


MISSING: dict[str, dict[str, Any]] = {"VariableMissing": {}}


def test_variables_are_set_appended_to_and_read() -> None:
    assert storage(
        read("a"), write("a", "00ff"), write("a", "AB", "Append"), read("a"), read("b")
    ) == [
        MISSING,
        {"WriteVar": {"version": 1}},
        {"WriteVar": {"version": 2}},
        {"ReadVar": {"version": 2, "value": "00ffab"}},
        MISSING,
    ]


def test_a_write_of_another_version_is_answered_with_what_is_there() -> None:
    assert storage(
        write("a", "01", when=1),
        write("a", "01", when=0),
        write("a", "02", when=0),
        write("a", "02", "Append", when=1),
        read("a"),
    ) == [
        MISSING,
        {"WriteVar": {"version": 1}},
        {"ReadVar": {"version": 1, "value": "01"}},
        {"WriteVar": {"version": 2}},
        {"ReadVar": {"version": 2, "value": "0102"}},
    ]


# --- properties -----------------------------------------------------------------------------------

WORDS = [
    *("Stop", "Splice", "SampleWithBias", "backtrack", "ff_tokens", "attention_masks", "suspend"),
    *("stop", "ReadVar", "WriteVar", "name", "value", "op", "when_version_is"),
]
ids = st.integers(0, 2**32 - 1)
nonsense = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(WORDS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(nonsense)
def test_whatever_a_guest_gives_is_an_answer_or_a_clear_error(data: bytes) -> None:
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    for take in (
        check_init_prompt,
        pre_process_answer,
        lambda data: mid_process_answer(data, masked=True, size=3),
        post_process_answer,
        lambda data: run_command(data, variables, 1000),
    ):
        with suppress(ControllerError):
            take(data)


@given(st.lists(ids), st.integers(0, 1000))
def test_arguments_are_json(numbers: list[int], backtrack: int) -> None:
    assert json.loads(init_prompt_argument(numbers)) == {"prompt": numbers}
    assert json.loads(mid_process_argument(numbers)) == {"fork_group": numbers}
    told = json.loads(post_process_argument(numbers, backtrack))
    assert told == {"tokens": numbers, "backtrack": backtrack}


@given(st.lists(ids, min_size=1), st.integers(0, 2**32 - 1))
def test_a_splice_is_read_as_it_was_written(tokens: list[int], backtrack: int) -> None:
    result = json.dumps({"Splice": {"backtrack": backtrack, "ff_tokens": tokens}}).encode()
    answer = mid_process_answer(result, masked=False, size=3)
    assert answer == Answer(Action.SPLICE, backtrack=max(0, backtrack - 1), tokens=tokens)
