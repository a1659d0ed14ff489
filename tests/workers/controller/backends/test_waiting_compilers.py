"""A start that waits for a compiler process does not delay other starts, and a failed start leaves
nothing in the tables."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from tokenbus.grammars.regex import compile_regex
from tokenbus.protocol.errors import UnavailableError
from tokenbus.workers.controller.backends.compiling import bounds
from tokenbus.workers.controller.backends.compiling.bounds import RefusedGrammar
from tokenbus.workers.controller.backends.compiling.processes import Processes
from tokenbus.workers.controller.backends.compiling.shared import Shared
from tokenbus.workers.controller.backends.compiling.turns import Turns
from tokenbus.workers.controller.backends.grammar.shared_instances import Shared as SharedGrammar
from tokenbus.workers.controller.backends.grammar.shared_instances import SharedInstances
from tokenbus.workers.controller.backends.llguidance import matchers as matchers_module
from tokenbus.workers.controller.backends.llguidance.matchers import Grammar, Matchers
from tokenbus.workers.controller.pool import Pool

from ....processes import until
from ..played import BYTES, engine, vocabulary

BOUND_S = 300.0


@pytest.mark.process
def test_other_starts_run_while_a_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "TURN_S", 3600.0)
    monkeypatch.setattr(bounds, "WALL_S", 3600.0)
    words = vocabulary(BYTES)
    matchers = Matchers()
    matchers.get(words, _lark("a"))
    [process] = matchers.processes._idle
    pool = Pool(1)
    compiled, other = threading.Event(), threading.Event()

    def compiles() -> None:
        matchers.get(words, _lark("b"))
        compiled.set()

    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # All threads of the process are stopped.
    try:
        pool.submit([compiles, other.set])
        assert other.wait(BOUND_S), "a start waited for a compilation"
        assert not compiled.is_set()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert compiled.wait(BOUND_S)
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    matchers.close()


@pytest.mark.process
def test_streams_that_wait_for_the_same_shortest_text_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "TURN_S", 3600.0)
    monkeypatch.setattr(bounds, "WALL_S", 3600.0)
    matchers = Matchers()
    grammar = matchers.get(vocabulary(BYTES), _lark("a"))
    [process] = matchers.processes._idle
    pool = Pool(1)
    found: list[bytes | None] = []
    other = threading.Event()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        pool.submit([lambda: found.append(grammar.shortest_text)] * 3 + [other.set])
        assert other.wait(BOUND_S), "a job waited for jobs that need the shortest text"
        assert found == []
    finally:
        os.kill(process.pid, signal.SIGCONT)
    until(lambda: len(found) == 3, BOUND_S, "every job has the shortest text")
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    assert set(found) == {b"a"}
    matchers.close()


@pytest.mark.process
def test_a_grammar_whose_compiler_gets_no_cpu_time_is_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = Processes(bounds.Bounds())
    processes.check(_lark("a"))
    [process] = processes._idle
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with monkeypatch.context() as patched:
        patched.setattr(bounds, "WALL_S", 0.1)
        with pytest.raises(UnavailableError, match="this machine is busy; try again") as failed:
            processes.check(_lark("b"))
    assert failed.value.retry_after_s
    assert process.returncode == -signal.SIGKILL
    processes.check(_lark("b"))
    processes.close()


def test_a_tenant_whose_grammars_wait_does_not_keep_the_grammar_of_another_waiting() -> None:
    turns = Turns(2)
    assert turns.acquire("eve", BOUND_S)
    assert not turns.acquire("eve", 0.0), "one tenant has all turns"
    granted: list[str] = []

    def asks(tenant: str) -> None:
        assert turns.acquire(tenant, BOUND_S)
        granted.append(tenant)
        turns.release(tenant)

    waiting = [threading.Thread(target=asks, args=("eve",)) for _ in range(20)]
    for thread in waiting:
        thread.start()
    asks("ann")
    assert granted == ["ann"]
    turns.release("eve")
    for thread in waiting:
        thread.join(BOUND_S)
    assert granted == ["ann", *["eve"] * 20]


def test_a_grammar_that_another_tenant_waits_for_is_compiled_for_this_one() -> None:
    shared: Shared[str] = Shared(BOUND_S)
    pool = Pool(3)
    begun, over, done = (threading.Event() for _ in range(3))

    def slow() -> str:
        begun.set()
        assert over.wait(BOUND_S)
        return "slow"

    def asks() -> None:
        shared.get("key", slow)

    pool.submit([asks], tenant="eve")
    assert begun.wait(BOUND_S)

    def quick() -> None:
        assert shared.get("key", lambda: "quick") == "quick"
        done.set()

    pool.submit([quick], tenant="ann")
    assert done.wait(BOUND_S), "a tenant waited for the compilation of another tenant"
    over.set()
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")


def test_the_refusal_of_a_grammar_does_not_refuse_it_to_another_tenant() -> None:
    shared: Shared[str] = Shared(BOUND_S)
    found: list[str] = []

    def refuse() -> str:
        raise RefusedGrammar("too slow")

    def asks(make: Callable[[], str]) -> None:
        try:
            found.append(shared.get("key", make))
        except RefusedGrammar as error:
            found.append(str(error))

    for tenant, make in (("eve", refuse), ("eve", lambda: "eve's"), ("ann", lambda: "ann's")):
        _run_of(tenant, partial(asks, make))
    assert found == ["too slow", "too slow", "ann's"]


def test_a_cached_refusal_does_not_store_the_objects_of_the_compilation() -> None:
    shared: Shared[str] = Shared(BOUND_S)
    objects: list[weakref.ref[threading.Event]] = []

    def refuse() -> str:
        compiled = threading.Event()
        objects.append(weakref.ref(compiled))
        raise RefusedGrammar("too slow")

    with contextlib.suppress(RefusedGrammar):
        shared.get("key", refuse)
    gc.collect()
    assert objects[0]() is None
    with pytest.raises(RefusedGrammar, match="too slow"):
        shared.get("key", refuse)
    assert len(objects) == 1


@pytest.mark.process
def test_tenants_do_not_share_a_compiled_grammar() -> None:
    """The matchers of a grammar wait for its lock, and all fail if its lexer is full."""
    matchers = Matchers()
    words = vocabulary(BYTES)
    made: dict[str, list[Grammar]] = {"eve": [], "ann": []}

    def compile_for(tenant: str) -> None:
        made[tenant].append(matchers.get(words, _lark("same")))

    for tenant in ("eve", "ann", "eve"):
        _run_of(tenant, partial(compile_for, tenant))
    assert made["eve"][0] is made["eve"][1]
    with made["eve"][0].lock:
        _run_of("ann", partial(compile_for, "ann"))
        assert not made["ann"][0].lock.locked()
    made["eve"][0].give_up()
    assert made["ann"][0] is made["ann"][1]
    matchers.close()


def _run_of(tenant: str, job: Callable[[], object]) -> None:
    """Runs a job of a tenant on a pool, and waits for the job."""
    pool = Pool(1)
    done = threading.Event()

    def run() -> None:
        job()
        done.set()

    pool.submit([run], tenant=tenant)
    assert done.wait(BOUND_S), f"the job of {tenant} did not end"
    pool.close()


def test_tables_that_cannot_be_used_leave_nothing() -> None:
    instances = SharedInstances(engine, None)
    for i in range(5):
        with pytest.raises(Exception):  # noqa: B017
            instances.get(b"no tables %d" % i, vocabulary(BYTES))
    assert not instances._making
    assert not instances._all


def test_grammars_in_use_leave_memory_to_those_of_other_tenants() -> None:
    instances = SharedInstances(engine, None)
    words = vocabulary(BYTES)
    first = instances.get(_regex("first"), words)
    instances._max_used_bytes = int(3.5 * first.guest.size)
    first.release()
    made, refused = _used(instances, "eve", 5)
    assert len(made) == 2
    assert len(refused) == 3
    assert "grammars of this client's streams" in refused[0]
    assert len(_used(instances, "ann", 1)[0]) == 1
    for shared in made:
        shared.release()
    assert len(_used(instances, "eve", 1)[0]) == 1


def test_a_grammar_whose_mask_takes_long_does_not_hold_up_new_ones() -> None:
    instances = SharedInstances(engine, None)
    busy = instances.get(_regex("busy"), vocabulary(BYTES))
    with busy.guest._lock:
        assert len(_used(instances, "ann", 1)[0]) == 1


@pytest.mark.process
def test_a_tenant_with_many_grammars_does_not_evict_that_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matchers_module, "KEPT_GRAMMARS", 4)
    matchers = Matchers()
    words = vocabulary(BYTES)
    pool = Pool(1)
    hers: list[Grammar] = []

    def compile_many() -> None:
        for number in range(6):
            matchers.get(words, _lark(f"{number}"))

    pool.submit([lambda: hers.append(matchers.get(words, _lark("hers")))], tenant="ann")
    until(lambda: hers and not pool.busy, BOUND_S, "the first grammar is compiled")
    pool.submit([compile_many], tenant="eve")
    until(lambda: not pool.busy, BOUND_S, "the others are compiled")
    assert len(matchers._grammars) == 4
    _run_of("ann", lambda: hers.append(matchers.get(words, _lark("hers"))))
    assert hers[0] is hers[1]
    matchers.close()


def _used(
    instances: SharedInstances, tenant: str, count: int
) -> tuple[list[SharedGrammar], list[str]]:
    """New grammars that a tenant uses, and the errors of the grammars that the tenant may not
    use."""
    made: list[SharedGrammar] = []
    refused: list[str] = []

    def use(number: int) -> None:
        try:
            made.append(instances.get(_regex(f"{tenant}{number}{time.time_ns()}"), words))
        except UnavailableError as error:
            refused.append(error.message)

    words = vocabulary(BYTES)
    pool = Pool(1)
    pool.submit([partial(use, number) for number in range(count)], tenant=tenant)
    until(lambda: len(made) + len(refused) == count, BOUND_S, "every grammar is made or refused")
    pool.close()
    return made, refused


def _regex(text: str) -> bytes:
    return compile_regex(text).to_bytes()


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f'start: "{text}"'}]})
