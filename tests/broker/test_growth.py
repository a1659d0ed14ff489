"""With large tables, the broker chooses workers from pools and ticks do their work in parts."""

from __future__ import annotations

import gc
import random

import pytest
from tokenbus.broker.pools import Pool, Pools
from tokenbus.broker.sessions import MAX_ENDED
from tokenbus.broker.sweep import Sweep
from tokenbus.broker.worker import STORE_REQUESTS, Worker, WorkerState
from tokenbus.protocol.messages import ModelInfo, Token
from tokenbus.protocol.worker_messages import Unregister

from ..worlds.broker import Bench, generate
from .invariants import check, check_empty

MODELS = ("m", "n", "embedded", "other")


def _worker(number: int, rng: random.Random) -> Worker:
    role = rng.choice(["gpu", "gpu", "gpu", "controller"])
    worker = Worker(
        id=number,
        peer=b"",
        name=f"w{number}",
        role=role,
        pid=1,
        host="h",
        capacity=rng.choice([1, 2, 4]),
        models={},
        patterns=[],
        default="",
        last_seen=0.0,
    )
    _draw(worker, rng)
    return worker


def _draw(worker: Worker, rng: random.Random) -> None:
    if worker.role == "controller":
        worker.patterns = rng.sample(["*", "regex", "mine"], rng.randrange(3))
        return
    names = rng.sample(MODELS, rng.randrange(3))
    worker.models = {
        name: ModelInfo(
            name=name, vocab_size=9, context_length=9, eos_token_ids=[0], fingerprint=""
        )
        for name in names
    }
    worker.patterns = rng.sample(["m", "o*", "*"], rng.randrange(3))
    worker.default = rng.choice(["", "m", "embedded"])


def _accepts(worker: Worker) -> bool:
    ready = worker.state is WorkerState.READY and not worker.step_age_s
    most = STORE_REQUESTS if worker.role == "controller" else worker.capacity
    return ready and len(worker.requests) < most


def _default(workers: dict[int, Worker]) -> str:
    names = {w.default for w in workers.values() if w.default}
    return names.pop() if len(names) == 1 else "embedded" if "embedded" in names else ""


def _check_pool(pool: Pool, expected: list[Worker], model: str) -> None:
    assert set(pool.workers) == {w.id for w in expected}
    free = [w for w in expected if _accepts(w)]
    found = pool.least_loaded()
    if not free:
        assert found is None
        return
    assert found is not None
    loaded = any(model in w.models for w in expected)
    ranks = {w.id: (loaded and model not in w.models, w.fill) for w in free}
    assert ranks[found.id] == min(ranks.values())


@pytest.mark.parametrize("seed", range(30))
def test_the_pools_choose_as_a_look_at_every_worker_would(seed: int) -> None:
    rng = random.Random(seed)
    pools = Pools(lambda worker: bool(worker.step_age_s))
    workers: dict[int, Worker] = {}
    for event in range(300):
        what = rng.random()
        some = rng.choice(list(workers.values())) if workers else None
        if some is None or (what < 0.15 and len(workers) < 12):
            made = workers[event] = _worker(event, rng)
            pools.add(made)
        elif what < 0.2:
            pools.remove(workers.pop(some.id))
        elif what < 0.25:
            pools.remove(some)
            _draw(some, rng)
            pools.add(some)
        elif what < 0.3:
            some.state = WorkerState.DRAINING
        elif what < 0.35:
            some.step_age_s = None if some.step_age_s else 1.0
            pools.note(some)
        elif what < 0.7 and len(some.requests) < some.capacity:
            some.requests[event] = None  # type: ignore[assignment]
            pools.note(some)
        elif some.requests:
            some.requests.popitem()
            pools.note(some)
        default = _default(workers)
        assert pools.default_model == default
        gpu = [w for w in workers.values() if w.role == "gpu"]
        for model in (*MODELS, "unknown"):
            _check_pool(pools.serving("gpu", model), [w for w in gpu if w.serves(model)], model)
        unnamed = [w for w in gpu if default and w.default == default]
        _check_pool(pools.serving("gpu", ""), unnamed, default)
        steering = [w for w in workers.values() if w.role == "controller"]
        every = [w for w in steering if "*" in w.patterns]
        _check_pool(pools.serving("controller", ""), every, "")
        mine = pools.steering("mine")
        assert set(mine.workers) == {w.id for w in steering if "mine" in w.patterns}
        least = mine.least_loaded()
        free = [w.fill for w in mine.workers.values() if w.state is WorkerState.READY]
        assert (least.fill if least is not None else 1.0) == min([*free, 1.0])


def test_names_that_fit_a_pattern_share_a_pool() -> None:
    bench = Bench()
    bench.worker("a", capacity=9, patterns=["*"])
    pools = bench.broker.state.pools
    assert pools.serving("gpu", "one") is pools.serving("gpu", "another")


def test_a_sweep_visits_every_value_of_a_large_table_in_parts() -> None:
    table = {n: n for n in range(10)}
    sweep = Sweep(table, 4)
    assert [sweep.part() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sweep.begins
    del table[0]
    assert sweep.part() == [1, 2, 3, 4]


def test_a_session_of_many_streams_ends_in_several_ticks_one_right_after_the_other() -> None:
    bench = Bench()
    bench.worker("a", capacity=9999)
    bench.client("c", "HELLO", {})
    for stream in range(2 * MAX_ENDED + 1):
        bench.client("c", "GENERATE", generate(stream))
    bench.client("c", "BYE", {})
    check(bench.broker)
    left = [2 * MAX_ENDED + 1 - MAX_ENDED, 1, 0]
    for number in left:
        live = [r for r in bench.broker.state.requests.values() if r.open]
        assert len(live) == number
        bench.now += 0.01
        bench.broker.tick(bench.now)
        check(bench.broker)
        assert (bench.broker.wait_s(bench.now) < 0.25) == (number > MAX_ENDED)


def test_the_names_of_workers_that_do_not_return_are_dropped() -> None:
    bench = Bench(expiry_s=5.0, move_wait_s=10.0)
    for number in range(100):
        for role in ("gpu", "controller"):
            bench.worker(role, role=role, patterns=[f"of {number}"], default="")
            bench.send(role, "UNREGISTER", Unregister(reason="SIGTERM"))
        bench.pass_time(1.0)
    assert [len(lost) for lost in bench.broker.state.recovery._lost.values()] == [10, 10]


def test_what_the_broker_keeps_of_a_request_needs_no_collector() -> None:
    bench = Bench()
    bench.worker("a")
    bench.client("c", "HELLO", {})
    gc.collect()
    gc.disable()
    try:
        for stream in range(20):
            bench.client("c", "GENERATE", generate(stream, timeout_s=60))
            for _, to in bench.to_worker("a"):
                end = Token(token=1, stream_id=stream, logprob=0.0, finish_reason="stop", live=0)
                bench.tokens("a", to, end, final=True)
            bench.pass_time(0.5)
        bench.client("c", "BYE", {})
        check_empty(bench.broker)
        assert gc.collect() == 0
    finally:
        gc.enable()
