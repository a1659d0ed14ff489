"""Sparse and dense biases of C guests equal those by brute force, and wrong biases are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.interface import Answer
from tokenbus.workers.gpu.sampling.biases import read_bias

from ....counts import examples
from ..played import BYTES, Run, Steered, program, vocabulary

pytestmark = pytest.mark.process

SIZE = len(BYTES)
INF = float("inf")

GUEST = r"""
#include "tokenbus.h"

// The argument is a list of operations: a letter, a token (u32) and a float. 's' sets, 'c' clears,
// 'd' makes the bias dense, 'm' samples under a mask that allows the token, 'n' has no bias.
static tb_bias *bias;
static uint32_t *mask;
static bool none;

void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    bias = tb_bias_new();
    for (uint32_t at = 0; at < arg_len; at += 9) {
        uint32_t token;
        float value;
        memcpy(&token, arg + at + 1, 4), memcpy(&value, arg + at + 5, 4);
        if (arg[at] == 'c') tb_bias_clear(bias);
        if (arg[at] == 'd') tb_bias_values(bias);
        if (arg[at] == 'm') mask = mask ? mask : tb_mask_new(), tb_mask_set(mask, token);
        if (arg[at] == 'n') none = true;
        if (arg[at] != 's') continue;
        tb_bias_set(bias, token, value);
        if (value == value && tb_bias_get(bias, token) != value) tb_fail("it was not set");
    }
}

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    return tb_sample_bias(mask, none ? 0 : bias);
}
"""


def operations(*every: tuple[str, int, float]) -> bytes:
    return b"".join(struct.pack("<cIf", kind.encode(), *rest) for kind, *rest in every)


def answered(arg: bytes) -> tuple[Steered, Answer]:
    """A sequence with this argument, and the answer of its first mid_process."""
    guest = Steered(GUEST, BYTES, arg)
    guest.begin()
    guest.controller.pre_process()
    return guest, guest.controller.mid_process((0,), memoryview(guest._mask))


def added(answer: Answer) -> list[float]:
    """The number that the bias of an answer adds to each token, as the GPU worker reads it."""
    if answer.bias is None:
        return [0.0] * SIZE
    bias = read_bias(np.frombuffer(answer.bias.encoded(), dtype=np.uint32), SIZE)
    return [bias.of(token) for token in range(SIZE)]


TOKENS = st.integers(0, SIZE - 1)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("s"), TOKENS, st.one_of(st.floats(-9, 9, width=32), st.just(-INF))),
        st.tuples(st.sampled_from("sssm"), TOKENS, st.just(1.5)),
        st.tuples(st.sampled_from("cd"), st.just(0), st.just(0.0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(50))
@given(OPERATIONS)
def test_a_bias_is_what_was_set_last_for_each_token(done: list[tuple[str, int, float]]) -> None:
    wanted, allowed = [0.0] * SIZE, set()
    for kind, token, value in done:
        if kind == "s":
            wanted[token] = value
        elif kind == "c":
            wanted = [0.0] * SIZE
        elif kind == "m":
            allowed.add(token)
    guest, answer = answered(operations(*done))
    assert added(answer) == wanted
    assert answer.masked == bool(allowed)
    if allowed:
        bits = int.from_bytes(guest._mask, "little")
        assert {i for i in range(SIZE) if bits >> i & 1} == allowed


def test_no_bias_an_empty_one_and_a_cleared_one_add_nothing() -> None:
    for done in (
        [("s", 5, 1.0), ("n", 0, 0.0)],
        [],
        [("s", 5, 1.0), ("c", 0, 0.0)],
        [("d", 0, 0.0), ("n", 0, 0.0)],
    ):
        _, answer = answered(operations(*done))
        assert answer.bias is None


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_nan_and_infinity_end_the_sequence_with_an_error_that_names_the_token(
    dense: bool, value: float
) -> None:
    made = [("d", 0, 0.0)] if dense else []
    with pytest.raises(ControllerError, match=f"the bias of token 7 is {value}; a bias is a"):
        answered(operations(*made, ("s", 3, 1.0), ("s", 7, value)))


def test_a_token_outside_the_vocabulary_ends_the_sequence_with_an_error() -> None:
    with pytest.raises(ControllerError, match=f"token {SIZE} is not in the vocabulary, which is 0"):
        answered(operations(("s", SIZE, 1.0)))


RAW = r"""
#include "tokenbus.h"
static uint32_t pairs[8] = {9, 0x3f800000, 4, 0xbf800000, 9, 0x3f800000, 999, 0};
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    static uint32_t round;
    tb_answer answer = tb_sample(0);
    answer.bias = pairs, answer.pairs = 2;
    if (round == 1) answer.pairs = 3;
    if (round == 2) answer.pairs = 4, pairs[4] = 10;
    if (round == 3) answer.pairs = 4000;
    if (round == 4) answer.pairs = 0, answer.bias = (void *)0x7ffffffc;
    round++;
    return answer;
}
"""
"""A guest that sets the fields of its answer's bias without the functions of the SDK."""


def test_pairs_may_come_in_any_order_and_the_host_checks_them() -> None:
    guest = Steered(RAW, BYTES)
    guest.begin()
    mask = memoryview(guest._mask)
    answer = guest.controller.mid_process((0,), mask)
    assert {t: v for t, v in enumerate(added(answer)) if v} == {9: 1.0, 4: -1.0}
    for error in (
        "the bias has token 9 twice; a token has one value",
        f"the bias has token 999; token ids of this model are 0 to {SIZE - 1}",
        f"the bias has 4000 pairs; the vocabulary has {SIZE} tokens",
        "outside its memory|beyond|memory",
    ):
        with pytest.raises(ControllerError, match=error):
            guest.controller.mid_process((0,), mask)


FORKS = r"""
#include "tokenbus.h"
static tb_bias *bias;
static uint32_t rounds;
tb_answer tb_pre_process(void) { return rounds++ ? tb_go_on() : tb_fork(3); }
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    if (!bias) bias = tb_bias_new(), tb_bias_set(bias, 200, 1);
    for (uint32_t i = 0; n > 1 && i < n; i++)
        if (fork_group[i] == tb_seq_id()) tb_bias_set(bias, 66 + i, 5);
    return rounds > 3 ? tb_stop() : tb_sample_bias(0, bias);
}
"""


def test_each_fork_keeps_its_own_bias() -> None:
    seen: dict[int, set[tuple[int, ...]]] = {}

    def choose(seq: int, _tokens: list[int], _may: set[int]) -> int:
        data = np.frombuffer(run._group.bias(seq) or b"", dtype=np.uint32)
        bias = read_bias(data, len(BYTES))
        assert bias.tokens is not None
        seen.setdefault(seq, set()).add(tuple(bias.tokens.tolist()))
        return int(bias.tokens[bias.values.argmax()])

    run = Run.__new__(Run)
    run.__init__(program(FORKS), BYTES, choose)  # type: ignore[misc]
    assert run.ended == {0: "stop", 1: "stop", 2: "stop"}
    assert seen == {place: {(66 + place, 200)} for place in range(3)}
    assert [run.text(place) for place in range(3)] == ["AAA", "BBB", "CCC"]
    assert vocabulary(BYTES).token(66) == b"A"
