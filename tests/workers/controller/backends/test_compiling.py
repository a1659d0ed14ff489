"""Grammars are compiled in separate processes, within bounds, and once for all requests. Metrics
count the cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenbus.clients import Client, RequestError, TokenbusError
from tokenbus.protocol.metrics import Series
from tokenbus.workers.controller.backends.compiling import bounds
from tokenbus.workers.controller.backends.compiling.bounds import TOO_DEEP, Bounds, RefusedGrammar
from tokenbus.workers.controller.backends.compiling.meter import CompileMeter
from tokenbus.workers.controller.backends.compiling.processes import Processes
from tokenbus.workers.controller.backends.grammar import grammar_tables
from tokenbus.workers.controller.backends.grammar.grammar_tables import Tables
from tokenbus.workers.controller.backends.llguidance.matchers import Grammar, Matchers
from tokenbus.workers.controller.backends.llguidance.plain import is_plain
from tokenbus.workers.controller.task_pipes import end, exchange

from ....processes import Bus, until
from ..played import BYTES, vocabulary
from .compile_bombs import Bomb, bombs, intersection

pytestmark = pytest.mark.process

BOUND_S = 120.0
SMALL = Bounds(cpu_s=1.0)
"""A low limit of CPU time. Bombs that are refused for another reason need at most a sixth of it."""


@pytest.fixture(scope="module")
def processes_of_ours() -> Iterator[Processes]:
    made = Processes(SMALL)
    yield made
    made.close()


def grammar_of(bomb: Bomb) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(bomb.schema))


# --- bounds ---------------------------------------------------------------------------------------


def test_every_bomb_is_compiled_or_refused_with_the_reason(processes_of_ours: Processes) -> None:
    every = list(bombs())
    assert len(every) >= 51
    refused = {}
    limit = (
        "compiling the grammar takes more than 1 s of CPU time, the limit that "
        "grammar_compile_s sets"
    )
    for bomb in every:
        try:
            processes_of_ours.check(grammar_of(bomb))
        except RefusedGrammar as error:
            refused[bomb.name] = str(error)
            if is_plain(json.dumps(bomb.schema), bomb.schema):
                assert not refused[bomb.name].startswith((limit, TOO_DEEP))
    assert all(refused.values())
    assert refused["30 patterns at once"].startswith(limit)
    assert "oneOf constraints are not supported" in refused["oneOf, 16 deep"]


def test_the_error_names_the_part_that_cost_it(processes_of_ours: Processes) -> None:
    large = {"type": "object", "properties": {"fine": {"type": "string"}, **_deep()}}
    with pytest.raises(
        RefusedGrammar, match=r"grammar_compile_s sets \(in \$\.properties\.deep[.,]"
    ):
        processes_of_ours.check(grammar_of(Bomb("", large)))
    inner = {"$defs": {"item": {"type": "array", "uniqueItems": True}}, "type": "object"}
    items = {"type": "array", "items": {"$ref": "#/$defs/item"}}
    with pytest.raises(RefusedGrammar, match=r'"uniqueItems"\] \(in \$\.\$defs\.item\)'):
        processes_of_ours.check(grammar_of(Bomb("", {**inner, "properties": {"a": items}})))
    rules = "start: /x/ T\nfine: /y/\nT: /.*a.{20}/ & /.*b.{21}/ & ~/.*c.{22}/\n"
    with pytest.raises(RefusedGrammar, match=r"\(in T, line 3\)"):
        processes_of_ours.check(json.dumps({"grammars": [{"lark_grammar": rules}]}))


def _deep() -> dict[str, object]:
    found: dict[str, object] = intersection(30)["properties"]
    return found


def test_memory_has_a_limit_that_the_error_names() -> None:
    small = Processes(Bounds(memory_bytes=48 << 20))
    try:
        with pytest.raises(RefusedGrammar, match="48 MiB of memory, the limit that grammar_comp"):
            small.check(grammar_of(Bomb("", {"enum": [f"{i} {i * i}" for i in range(200_000)]})))
    finally:
        small.close()


def test_a_pattern_that_takes_longer_is_compiled_apart() -> None:
    slow = json.dumps([f"{i * i:020d}" for i in range(1500)]).encode()
    patient = Processes(Bounds(cpu_s=BOUND_S))
    try:
        assert Tables(None, patient, CompileMeter()).choice(slow)
        assert len(patient._idle) == 1
    finally:
        patient.close()
    short = Processes(Bounds(cpu_s=0.03))
    with pytest.raises(RequestError, match=r"1,500 texts takes longer than 0\.03 s"):
        Tables(None, short, CompileMeter()).choice(slow)
    short.close()


# --- shared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", [True, False])
def test_a_hundred_requests_have_a_grammar_compiled_once(
    monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    monkeypatch.setattr(bounds, "TURN_S", 3600.0)
    monkeypatch.setattr(bounds, "WALL_S", 3600.0)
    meter = CompileMeter()
    matchers = Matchers(Processes(SMALL), meter)
    words = vocabulary(BYTES)
    matchers.get(words, _lark('"a"'))
    [process] = matchers.processes._idle
    grammar = _lark('"b"' if good else "nothing_of_this_name")
    waiting = threading.Barrier(101)

    def ask() -> Grammar | str:
        waiting.wait(BOUND_S)
        try:
            return matchers.get(words, grammar)
        except RefusedGrammar as error:
            return str(error)

    os.kill(process.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(100) as threads:
            asked = [threads.submit(ask) for _ in range(100)]
            waiting.wait(BOUND_S)
            os.kill(process.pid, signal.SIGCONT)
            answers = [one.result(BOUND_S) for one in asked]
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert len({id(one) if good else one for one in answers}) == 1
    matchers.close()
    compiled = _histograms(meter.series())
    assert compiled["compiled"] == (2 if good else 1)
    assert compiled.get("refused", 0) == (0 if good else 1)


def test_tables_that_took_time_are_there_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tables are stored however quickly this processor compiles them.
    monkeypatch.setattr(grammar_tables, "WORTH_S", 0.0)
    processes = Processes(Bounds(cpu_s=BOUND_S))
    try:
        _check_kept_tables(tmp_path, processes, monkeypatch)
    finally:
        processes.close()


def _check_kept_tables(folder: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    arg = json.dumps({"choices": [f"{i * i:020d}" for i in range(1500)]}).encode()
    made = Tables(folder, processes, CompileMeter()).choice(arg)
    [file] = folder.iterdir()

    def again(kind: str, grammar: bytes) -> bytes:
        raise AssertionError("the tables were compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(processes, "run", again)
        assert Tables(folder, processes, CompileMeter()).choice(arg) == made
    file.write_bytes(made[:-1] + b"?")
    assert Tables(folder, processes, CompileMeter()).choice(arg) == made


# --- metrics, and other streams -------------------------------------------------------------------


def test_what_compiling_costs_is_counted_by_constraint(processes_of_ours: Processes) -> None:
    meter = CompileMeter()
    tables = Tables(None, processes_of_ours, meter)
    for pattern in (b"a+", b"a+", b"b+"):
        tables.regex(pattern)
    with pytest.raises(RequestError):
        tables.regex(b"(")
    series = meter.series()
    assert _histograms(series) == {"compiled": 2, "refused": 1}
    assert [one.value for one in series if one.name == "grammar_cache_hits"] == [1]


def test_streams_go_on_beside_schemas_that_explode(steered: Bus) -> None:
    """Each bomb is answered. Meanwhile another stream gets the same tokens as before."""
    names = ("oneOf, 16 deep", "30 patterns at once", "anyOf, written out", "10 to the power of 10")
    some = [bomb for bomb in bombs() if bomb.name in names]
    assert len(some) == len(names)

    with steered.client() as client, steered.client() as hostile:

        def beside() -> list[int]:
            return client.generate(
                "Once",
                max_tokens=24,
                temperature=0,
                controller="regex",
                controller_arg="[a-z ]{200}",
            ).tokens()

        alone = beside()
        with ThreadPoolExecutor(len(some)) as threads:
            asked = [threads.submit(_outcome, hostile, bomb) for bomb in some]
            answered = 0
            while not all(one.done() for one in asked) or not answered:
                assert beside() == alone
                answered += 1
            outcomes = {
                bomb.name: one.result(BOUND_S) for bomb, one in zip(some, asked, strict=True)
            }
        assert all(outcomes.values())
        assert "grammar_compile_s" in outcomes["30 patterns at once"]
        until(lambda: _counted(client), BOUND_S, "the metric in the worker's next heartbeat")


def _outcome(client: Client, bomb: Bomb) -> str:
    """The reason why a bomb is refused, or how its stream ended. On a busy machine the worker may
    request another try; the bomb is then sent again."""
    while True:
        try:
            [sequence] = client.generate(
                "Once", max_tokens=2, controller="json_schema", controller_arg=bomb.schema
            ).wait()
            answer = sequence.error or sequence.finish_reason or ""
        except TokenbusError as error:
            answer = error.message
        if "try again" not in answer:
            return answer


def _counted(client: Client) -> bool:
    workers = client.status(metrics=True).workers
    return any(
        one.name == "grammar_compile_seconds" and one.labels.get("outcome") == "refused"
        for worker in workers
        for one in worker.metrics
    )


def _histograms(series: list[Series]) -> dict[str, int]:
    return {
        one.labels["outcome"]: sum(one.histogram.counts)
        for one in series
        if one.histogram is not None
    }


def _lark(rule: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: {rule}"}]})


def test_a_process_that_ends_in_the_middle_of_its_reply_has_not_replied() -> None:
    head_and_two_of_nine_bytes = r"head -c 5 > /dev/null; printf '\011\0\0\0ab'"
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sh", "-c", head_and_two_of_nine_bytes], stdin=pipe, stdout=pipe)
    assert exchange(process, b"x", 300.0) is None
    end(process)
    assert process.returncode == 0
