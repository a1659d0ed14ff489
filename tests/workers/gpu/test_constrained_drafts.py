"""Under a constraint, every entry is the same with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Step
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ..controller.played import engine as wasm_engine
from .controlled import Workers
from .moved import finished, give, same_entries
from .moved import transcript as transcript_of
from .test_speculation import accepted, eager

pytestmark = pytest.mark.usefixtures("no_waiting")

PROMPT = "rows = [['Ada', 36], ['Alan', 41], ['Ada', 36], ['Alan', 41], ['Ada', 36], "
ROWS = r"(\['(Ada|Alan|Grace)', [0-9]{2}\], )*"
SCHEMA = {"type": "array", "items": {"type": "string"}}
STRUCTURE = {
    "tags": [
        {"begin": "<think>", "end": "</think>", "max_tokens": 24, "closing": "\n", "then": 1},
        {"begin": "<call>[", "end": "]</call>", "content": "json", "schema": SCHEMA, "then": 0},
    ],
    "phases": [{"text": True, "tags": [1], "may_end": True}, {"first": [1]}],
    "inside": 0,
}
"""Thinking, which the prompt begins, then a call, then text."""
WAYS = ((False, False), (True, False), (True, True))
"""Whether the engine has drafts, and whether its steps overlap."""
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"controller": "regex", "controller_arg": r"[\[\]', A-Za-z0-9]*"},
    "rows": {"controller": "regex", "controller_arg": ROWS},
    "schema": {"controller": "json_schema", "controller_arg": SCHEMA},
    "structural": {"controller": "structural", "controller_arg": STRUCTURE},
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"text": True},
    "sampled": {"temperature": 0.7, "seed": 4, "n": 3},
    "penalised": {"frequency_penalty": 0.1, "logit_bias": {10: -2.0}, "top_logprobs": 2},
    "stopped": {"stop": ["36], ['Alan', 41], ['A"], "text": True},
}


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constraints]:
    made = Constraints(wasm_engine, tmp_path_factory.mktemp("grammars"))
    yield made
    made.close()


class Run(Workers):
    """A request with a controller on a GPU worker and a controller worker."""

    def __init__(
        self,
        folder: Path,
        loaded: LoadedModel,
        program: Program | None,
        way: tuple[bool, bool],
        body: dict[str, Any],
        *before: list[Token],
        shared: bool = True,
    ) -> None:
        """``before``: the messages of another worker, from which the stream moves here."""
        speculation, overlap = way
        loop = Loop(folder, loaded, overlap=overlap, speculation=speculation)
        super().__init__(loop, VariableStorage(), Random(7), program=program, shared=shared)
        self.engine = eager(loop.worker._models.engines["m"])
        moved = [transcript_of(before)] if before else []
        give(loop, b"GENERATE", body, Flag.MOVED if before else 0, *moved)

    def finish(self) -> list[list[Token]]:
        messages = super().finish()
        assert self.engine.stats()["kv_blocks_used"] == 0
        return messages

    @property
    def drafted(self) -> int:
        """Number of draft tokens that were sent with STEPs."""
        steps: list[Step] = [decode_as(Step, f[2], "msgpack") for f in self.loop.sent(b"STEP")]
        return sum(len(one.draft) for step in steps for one in step.sequences)


def body_of(kind: str, name: str) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 60} | KINDS[kind] | BODIES[name]


@pytest.mark.parametrize(
    ("kind", "name", "shared"),
    [
        *(("regex", name, True) for name in BODIES),
        ("regex", "greedy", False),
        ("rows", "greedy", False),
        pytest.param("schema", "greedy", False, marks=pytest.mark.process),
        pytest.param("structural", "greedy", True, marks=pytest.mark.process),
        pytest.param("structural", "sampled", False, marks=pytest.mark.process),
    ],
)
def test_a_constrained_stream_is_the_same_with_drafts(
    tmp_path: Path,
    embedded: LoadedModel,
    constraints: Constraints,
    kind: str,
    name: str,
    shared: bool,
) -> None:
    body = body_of(kind, name)
    program = constraints.get(body["controller"])
    runs = [Run(tmp_path, embedded, program, way, body, shared=shared) for way in WAYS]
    plain, *drafted = [run.finish() for run in runs]
    for messages in drafted:
        same_entries(messages, plain, embedded, body)
    assert runs[0].drafted == 0
    assert runs[1].drafted > 0
    if kind != "rows":
        assert accepted(runs[1].engine) > 0
    steps = [len(run.loop.sent(b"STEP")) for run in runs]
    assert steps[1] <= steps[0]


@pytest.mark.parametrize(
    ("kind", "overlap"),
    [("regex", False), ("regex", True), pytest.param("schema", False, marks=pytest.mark.process)],
)
def test_it_moves_while_it_is_drafted_for(
    tmp_path: Path, embedded: LoadedModel, constraints: Constraints, kind: str, overlap: bool
) -> None:
    """The stream moves to another GPU worker, where its controller later moves to another
    controller worker."""
    body = body_of(kind, "sampled")
    program = constraints.get(body["controller"])
    plain = Run(tmp_path, embedded, program, WAYS[0], body).finish()
    first = Run(tmp_path, embedded, program, (True, overlap), body)
    sent = first.finish()
    for cut in (1, len(sent) // 2):
        before = sent[:cut]
        second = Run(tmp_path, embedded, program, (True, overlap), body, *before)
        for _ in range(9):
            second.turn()
        if not finished(second.loop):
            second.lose_controllers()
        after = second.finish()
        same_entries([*before, *after], plain, embedded, body)


def test_what_the_controller_worker_does_not_answer_for_is_not_verified(
    tmp_path: Path, embedded: LoadedModel, constraints: Constraints
) -> None:
    """If masks along a draft are missing or have another size, only the draft is lost."""
    body = body_of("regex", "greedy")
    program = constraints.get(body["controller"])
    plain = Run(tmp_path, embedded, program, WAYS[0], body).finish()
    for spoil in ("missing", "short", "out of range"):
        run = Run(tmp_path, embedded, program, WAYS[1], body, shared=False)
        give_plainly = run.loop.give

        def spoiled(
            kind: bytes, content: Any, *rest: Any, spoil: str = spoil, give: Any = give_plainly
        ) -> None:
            if kind != b"RESULT":
                give(kind, content, *rest)
                return
            *others, attachments = rest
            result = msgspec.msgpack.decode(content)
            for one in result["sequences"]:
                along = one[16] if len(one) > 16 else []
                if spoil == "missing":
                    one[16:] = []
                elif spoil == "out of range":
                    one[16:] = [[999] * len(along)]
                else:
                    attachments = [
                        a[:8] if i in along[1:] else a for i, a in enumerate(attachments)
                    ]
            give(kind, msgspec.msgpack.encode(result), *others, attachments)

        run.loop.give = spoiled  # type: ignore[assignment, method-assign]
        same_entries(run.finish(), plain, embedded, body)
        assert run.drafted > 0


def test_a_controller_that_takes_no_drafts_gets_none(
    tmp_path: Path, embedded: LoadedModel, constraints: Constraints
) -> None:
    # Because of the JSON schema, the combination is not compiled to an automaton. An automaton
    # would take drafts.
    parts = ["[['Ada', 36], ", {"json_schema": SCHEMA}]
    combination = {"controller": "combination", "controller_arg": json.dumps({"sequence": parts})}
    body = {"prompt": PROMPT, "max_tokens": 12} | combination
    program = constraints.get("combination")
    run = Run(tmp_path, embedded, program, WAYS[1], body)
    run.finish()
    assert run.drafted == 0
