"""If instructions are counted, a limit ends the same calls on every machine. The limit in seconds
then only ends calls that hang."""

from __future__ import annotations

import pytest
import wasmtime
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import Ticker, make_engine
from tokenbus.workers.variables import VariableStorage

from ..played import WORDS, vocabulary
from .guests import compile_guest

pytestmark = pytest.mark.process

COUNTS = """
#include "tokenbus.h"
static uint32_t rounds;
static volatile uint32_t sum;
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    for (uint32_t i = 0; i < arg_len; i++) rounds = 10 * rounds + (arg[i] - '0');
}
tb_answer tb_pre_process(void) {
    for (uint32_t i = 0; i < rounds; i++) sum += i;
    return tb_go_on();
}
tb_answer tb_post_process(const uint32_t *tokens, uint32_t n, uint32_t backtrack) {
    for (uint32_t i = 0; i < rounds; i++) tb_log("%d", (int)i);
    return tb_go_on();
}
"""
"""A guest that loops in pre_process, and calls the host in post_process, as often as its argument
says."""


class Started:
    """A controller that has begun, and its engine."""

    def __init__(self, limits: Limits, rounds: int) -> None:
        self.engine = make_engine(limits)
        module = wasmtime.Module(self.engine, compile_guest(COUNTS, "-Wno-unused-parameter"))
        variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
        argument = b"%d" % rounds
        host = Host(1, 0, argument, vocabulary(WORDS), variables, Log(2**20), limits, 9)
        self.controller = NativeProgram(self.engine, module).start(host)
        self.controller.init_prompt([1])


def ends(limits: Limits, rounds: int) -> bool:
    """Whether a limit ends a pre_process that loops this often."""
    try:
        Started(limits, rounds).controller.pre_process()
    except ControllerError:
        return True
    return False


def longest(limits: Limits) -> int:
    """The largest number of loops of pre_process that a limit does not end."""
    low, high = 0, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ends(limits, middle) else (middle, high)
    return low


def test_the_same_call_is_the_first_that_ends_each_time() -> None:
    limits = Limits(init_s=60.0, pre_s=0.001, fuel_per_ms=1_000_000)
    first = longest(limits)
    assert 10_000 < first < 1 << 19
    assert longest(limits) == first


def test_seconds_do_not_end_a_call_that_has_instructions_left() -> None:
    # The first call ends at the next tick, which a busy machine may delay by a second.
    with pytest.raises(ControllerError, match="ran for longer than its"):
        pre_process(Started(Limits(init_s=60.0, pre_s=0.0001), 2_000_000_000))
    pre_process(Started(Limits(init_s=60.0, pre_s=0.0001, fuel_per_ms=1 << 50), 20_000_000))


def pre_process(made: Started) -> None:
    with Ticker(made.engine):
        made.controller.pre_process()


def test_an_endless_loop_is_named() -> None:
    controller = Started(
        Limits(init_s=60.0, pre_s=0.002, fuel_per_ms=1_000_000), 2**32 - 1
    ).controller
    with pytest.raises(ControllerError) as caught:
        controller.pre_process()
    assert caught.value.message == (
        "pre_process: it executed more than 2,000,000 instructions, the limit for a call of 2 ms"
    )


def test_work_of_the_host_counts_as_instructions() -> None:
    limits = Limits(init_s=60.0, post_s=0.01, fuel_per_ms=1_000_000)
    controller = Started(limits, 100_000).controller
    with pytest.raises(ControllerError, match="it executed more than 10,000,000 instructions"):
        controller.post_process([1], 0)


def test_seconds_still_end_a_call() -> None:
    made = Started(Limits(init_s=60.0, pre_s=0.001, fuel_per_ms=1 << 50), 2**32 - 1)
    with pytest.raises(ControllerError, match="ran for longer than its 1 ms"):
        pre_process(made)
