"""The memory of a worker's guests: the shares of tenants while guests begin, grow, fork and end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import wasmtime
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.guest_memory import GuestMemory
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.controller.wasm.instance import INSTANCE_BYTES
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.wasm_binary import with_exported_globals
from tokenbus.workers.variables import VariableStorage

from ..played import BYTES, vocabulary
from .aici_guests import puppet
from .hostile.guests import N, guest, set_word

LIMITS = Limits(init_s=60.0, pre_s=60.0, mid_s=60.0, post_s=60.0)
SMALL = INSTANCE_BYTES + 65_536
"""Bytes of a guest with one page."""
GROW = "(drop (memory.grow (i32.const 100)))"
FORK_ONCE = f"""(if (i32.eq (global.get $round) (i32.const 1)) (then
    {set_word(N, 4)} (return (i32.const 3))))"""


@dataclass
class Worker:
    """The parts that the requests of a worker share."""

    memory: GuestMemory
    engine: wasmtime.Engine

    def begin(self, wasm: bytes, tenant: str = "anna") -> tuple[SequenceGroup, list[StepResult]]:
        """Starts a request; returns its group and the results of its first round."""
        module = wasmtime.Module(self.engine, with_exported_globals(wasm))
        group = SequenceGroup(1, 9, LIMITS, b"", 100, True, VariableStorage().apply)
        group.memory = self.memory.of(tenant)
        program = NativeProgram(self.engine, module)
        results = group.begin(program, vocabulary(BYTES), [1, 2, 3])
        group.record(results)
        return group, results


@pytest.fixture
def worker() -> Worker:
    """A worker in which one tenant may have six small guests."""
    return Worker(GuestMemory(12 * SMALL), make_engine(LIMITS))


def end(group: SequenceGroup) -> None:
    group.close()
    group.free()


def test_a_tenant_has_half_and_leaves_the_other_half_to_those_that_come_later(
    worker: Worker,
) -> None:
    groups = [worker.begin(guest())[0] for _ in range(6)]
    with pytest.raises(ControllerError, match="a client may not use more memory than remains free"):
        worker.begin(guest())
    others = [worker.begin(guest(), "bert")[0] for _ in range(3)]
    with pytest.raises(ControllerError, match=f"would use {4 * SMALL} bytes of memory; the"):
        worker.begin(guest(), "bert")
    for group in groups + others:
        end(group)
    assert worker.memory.used == 0


@pytest.mark.parametrize(
    "wasm",
    [
        guest(init=GROW),
        guest(mid=GROW),
        guest(pre=GROW),
        guest(pre=f"{GROW} (return (i32.const 2))"),
    ],
    ids=["init_prompt", "mid_process", "pre_process", "suspended"],
)
def test_a_guest_that_grows_beyond_the_share_ends_and_gives_its_memory_back(
    worker: Worker, wasm: bytes
) -> None:
    group, [result] = worker.begin(wasm)
    assert result.action == "error"
    assert "a client may not use more memory than remains free" in (result.error or "")
    end(group)
    assert worker.memory.used == 0


@pytest.mark.process
def test_what_the_host_keeps_for_an_aici_guest_is_counted_while_it_is_kept(worker: Worker) -> None:
    tokens = 1000
    lines = {
        "nothing": "",
        "the first call": f"prompt tokenize {'a' * tokens}",
        "a later call": f"prompt tokenize {'a' * tokens}\nmid tokenize a",
    }
    used = {}
    for name, arg in lines.items():
        group = SequenceGroup(1, 9, LIMITS, arg.encode(), 100, True, VariableStorage().apply)
        group.memory = worker.memory.of("anna")
        module = wasmtime.Module(worker.engine, with_exported_globals(puppet()))
        program = AiciProgram(worker.engine, module)
        group.record(group.begin(program, vocabulary(BYTES), [1]))
        used[name] = worker.memory.used
        end(group)
        assert worker.memory.used == 0
    assert used["the first call"] - used["nothing"] == 4 * tokens
    assert used["a later call"] - used["nothing"] == 4


def test_forks_are_counted_each(worker: Worker) -> None:
    for _ in range(3):  # Later iterations reuse spare instances.
        group, results = worker.begin(guest(pre=FORK_ONCE))
        assert [r.action for r in results] == ["fork", *["sample"] * 4]
        assert worker.memory.used == 4 * SMALL
        other, [failed] = worker.begin(guest(pre=FORK_ONCE))
        assert failed.action == "error"
        end(other)
        assert worker.memory.used == 4 * SMALL
        end(group)
        assert worker.memory.used == 0
