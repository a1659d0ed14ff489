"""Biases of Python controllers: how they are sent, which are refused, and what a replay checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.worker_messages import Replay, Result, StepResult
from tokenbus.workers.controller.biases import bias_bytes
from tokenbus.workers.controller.masks import MaskRows
from tokenbus.workers.controller.pending_result import _message
from tokenbus.workers.controller.python import PythonProgram, fork, sample, stop
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.gpu.sampling.biases import read_bias
from tokenbus.workers.variables import VariableStorage

from .played import BYTES, UNHURRIED, vocabulary
from .test_sequence_group import SIZE, decides, opened, stepped

NAN, INF = float("nan"), float("inf")
ROW_BYTES, BIAS_BYTES = 4 * -(-SIZE // 32), bias_bytes(SIZE)


def read(data: bytes | memoryview) -> list[float]:
    """A bias as the GPU worker reads it: the value of each token."""
    bias = read_bias(np.frombuffer(data, dtype=np.uint32), SIZE)
    return [bias.of(token) for token in range(SIZE)]


def wanted(values: dict[int, float]) -> list[float]:
    return [values.get(token, 0.0) for token in range(SIZE)]


def sent(group: SequenceGroup, result: StepResult) -> list[float] | None:
    """The values of a bias that is sent in the message of a result; None: the message has no
    bias."""
    body, attachments = _message([(group, [result])])
    [one] = decode_as(Result, body, "msgpack").sequences
    if one.bias_attachment is None:
        return None
    return read(attachments[one.bias_attachment])


EVERY = [token / 8 for token in range(SIZE)]


@pytest.mark.parametrize(
    ("bias", "values"),
    [
        ({7: 1.5}, {7: 1.5}),
        ({9: -INF, 3: 2, np.int64(5): 0.25}, {9: -INF, 3: 2.0, 5: 0.25}),
        (EVERY, dict(enumerate(EVERY))),
        (np.array(EVERY), dict(enumerate(EVERY))),
        (np.array(EVERY, dtype=np.float32), dict(enumerate(EVERY))),
        (dict.fromkeys(range(SIZE), 1.0), dict.fromkeys(range(SIZE), 1.0)),
        ({3: -1e300}, {3: -INF}),
    ],
)
def test_a_bias_is_sent_dense_or_sparse_with_and_without_a_mask(
    bias: Any, values: dict[int, float]
) -> None:
    for mask in (None, {7, 9}):
        group, [result] = opened(decides([], [sample(mask, bias)]))
        assert result.action == "sample"
        assert (result.attachment is not None) == (mask is not None)
        assert sent(group, result) == wanted(values)


@pytest.mark.parametrize("bias", [None, {}])
def test_a_round_without_a_bias_sends_none(bias: Any) -> None:
    group, [result] = opened(decides([], [sample(None, bias)]))
    assert not result.biased
    assert sent(group, result) is None


@pytest.mark.parametrize(
    ("bias", "error"),
    [
        ({7: NAN}, "the bias of token 7 is nan; a bias is a finite number, or minus infinity"),
        ({3: 0.0, 8: INF}, "the bias of token 8 is inf"),
        ({8: 1e300}, "the bias of token 8 is inf"),
        ({SIZE: 1.0}, f"the bias has token {SIZE}; token ids of this model are 0 to {SIZE - 1}"),
        ({4: 1.0, -2: 1.0}, "the bias has token -2"),
        ([0.0] * (SIZE - 1), f"the bias has {SIZE - 1} values; the vocabulary has {SIZE} tokens"),
        ([0.0] * 5 + [NAN] + [0.0] * (SIZE - 6), "the bias of token 5 is nan"),
        (np.zeros((2, 3)), "the bias has 2 x 3 values"),
        (1.5, "the bias has no values"),
        ({"a": 1.0}, "'str' object cannot be interpreted as an integer; expected"),
        ({5: "high"}, "could not convert string to float: 'high'; expected {token id"),
        ("high", "text is not a list of numbers; expected"),
    ],
)
def test_a_wrong_bias_ends_the_sequence_with_an_error_that_names_it(bias: Any, error: str) -> None:
    _, [result] = opened(decides([], [sample(None, bias)]))
    assert result.action == "error"
    assert result.error is not None
    assert error in result.error


def test_a_bias_is_written_to_the_row_of_its_sequence() -> None:
    descriptor = os.memfd_create("biases-of-the-test")
    try:
        os.ftruncate(descriptor, 4 * (ROW_BYTES + BIAS_BYTES))
        path = f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"
        rows = MaskRows(path, 4, ROW_BYTES, BIAS_BYTES)
        mids = [sample(), sample({1}, {5: 2.0}), sample(None, EVERY), sample({2})]
        group, _ = opened(decides([], mids))
        for values in ({5: 2.0}, dict(enumerate(EVERY)), None):
            [result] = stepped(group, 10, rows=rows)
            assert result.bias_attachment is None
            assert (result.bias_row is None) == (values is None)
            if values is not None and result.bias_row is not None:
                view = rows.bias_view(result.bias_row)
                assert view is not None
                assert read(view) == wanted(values)
            group.record([result])
        group.close()
        del view
    finally:
        os.close(descriptor)


def test_a_file_without_room_for_biases_has_them_sent() -> None:
    """A GPU worker of an earlier release has such a file."""
    descriptor = os.memfd_create("biases-of-the-test")
    try:
        os.ftruncate(descriptor, 4 * ROW_BYTES)
        path = f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"
        group, _ = opened(decides([], [sample(), sample({1}, {5: 2.0})]))
        [result] = stepped(group, 10, rows=MaskRows(path, 4, ROW_BYTES))
        assert result.row is not None
        assert result.bias_row is None
        assert sent(group, result) == wanted({5: 2.0})
        group.close()
    finally:
        os.close(descriptor)


class Forks(decides([fork(3)])):  # type: ignore[misc]
    """Three sequences, each with a bias of its own."""

    def mid_process(self, fork_group: list[int]) -> Any:
        return sample(None, {10 + fork_group.index(self.seq): 1.0})


def test_each_sequence_of_a_fork_has_its_own_bias() -> None:
    group, [_, *results] = opened(Forks)
    for place, result in enumerate(results):
        assert sent(group, result) == wanted({10 + place: 1.0})


@pytest.mark.parametrize("eos", [True, False])
def test_a_round_that_ends_the_sequence_has_no_bias(eos: bool) -> None:
    end = sample(None, {5: 1.0}) if eos else stop()
    group, _ = opened(decides([], [sample(None, {4: 1.0}), end]))
    eos_id = vocabulary(BYTES).eos
    [result] = stepped(group, eos_id if eos else 10)
    assert result.action == "stop"
    assert not result.biased


def replayed(kind: Callable[[], Any], *tokens: int) -> list[StepResult]:
    """The results of a controller that is replayed with these tokens."""
    group = SequenceGroup(1, 9, UNHURRIED, b"", 100, False, VariableStorage().apply)
    steps = group.begin_again(
        PythonProgram(kind),  # type: ignore[arg-type]
        vocabulary(BYTES),
        [1, 2, 3],
        1,
        [Replay(0, list(tokens))],
    )
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            results: list[StepResult] = ended.value
            for result in results:
                result.logs = ""
            assert sent(group, results[-1]) is not None or results[-1].action == "error"
            return results


@pytest.mark.parametrize("dense", [True, False])
def test_a_replay_sends_the_last_bias_and_refuses_a_token_that_it_forbids(dense: bool) -> None:
    values = {4: -INF, 6: 1.0}
    bias = wanted(values) if dense else values
    kind = decides([], [sample(None, bias), sample({6}, bias)])
    [result] = replayed(kind, 6)  # type: ignore[arg-type]
    assert result.action == "sample"
    assert result.biased
    [result] = replayed(kind, 4)  # type: ignore[arg-type]
    assert result.action == "error"
    assert result.error is not None
    assert "it forbids token 4, which was sampled the first time" in result.error
