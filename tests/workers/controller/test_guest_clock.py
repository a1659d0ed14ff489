"""The CPU time that counts towards the limit of a call."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tokenbus.workers.controller import guest_clock
from tokenbus.workers.controller.host import Host, Stored
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.variables import VariableStorage

from .played import BYTES, UNHURRIED, program, vocabulary

READS_50_TIMES = r"""
#include "tokenbus.h"

tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group, (void)n;
    tb_bytes value;
    for (int i = 0; i < 50; i++) tb_var_get("name", &value, NULL);
    return tb_sample(NULL);
}
"""
BUSY_S = 0.01


def _work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class _BusyMachine(SequenceVariables):
    """Variables on a machine where each question takes ``BUSY_S`` of CPU time."""

    def get(self, name: str) -> Stored | None:
        with guest_clock.question():
            _work(BUSY_S)
            return super().get(name)


@pytest.mark.process
def test_a_busy_machine_does_not_fail_a_call_with_many_questions() -> None:
    variables = _BusyMachine(1, 0, VariableStorage().apply, lambda: None)
    limits = replace(UNHURRIED, mid_s=20 * BUSY_S)
    host = Host(1, 0, b"", vocabulary(BYTES), variables, Log(1 << 20), limits, 100)
    controller = program(READS_50_TIMES).start(host)
    controller.init_prompt(())
    assert controller.pre_process().action is Action.CONTINUE
    answer = controller.mid_process((0,), memoryview(bytearray(4 * -(-len(BYTES) // 32))))
    assert answer.action is Action.CONTINUE


def test_a_question_counts_a_fixed_time() -> None:
    counted, used = guest_clock.call_cpu_s(), guest_clock.thread_cpu_s()
    with guest_clock.question():
        _work(0.2)
    assert 0 < guest_clock.call_cpu_s() - counted < 0.1
    assert guest_clock.thread_cpu_s() - used >= 0.2
