"""The sequence groups of a controller worker under one constraint, without processes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import cache

from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.worker_messages import Result, StepResult, StepSequence
from tokenbus.workers.controller.backends.compiling.bounds import Bounds
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.backends.grammar.grammar_controller import GrammarController
from tokenbus.workers.controller.fair_jobs import Job
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.meters import Meter
from tokenbus.workers.controller.pending_result import PendingResult
from tokenbus.workers.controller.round_jobs import Begun, round_jobs
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.variables import VariableStorage

from ..workers.controller.played import WORDS, engine, vocabulary

GROUPS = 12
SIZE = len(WORDS)


@cache
def constraints() -> Constraints:
    return Constraints(engine, None, Bounds())


class World:
    """``GROUPS`` sequence groups under one constraint. ``step`` runs all jobs of a STEP itself."""

    def __init__(self, constraint: str, arg: str, max_tokens: int = 120) -> None:
        program = constraints().get(constraint)
        assert program is not None
        words = vocabulary(WORDS)
        self.meter = Meter()
        self.groups: dict[int, SequenceGroup] = {}
        self.posted: list[list[bytes]] = []
        self.num_jobs = 0
        """The number of jobs that ``round_jobs`` has made for the last STEP."""
        for request in range(1, GROUPS + 1):
            group = SequenceGroup(
                request, 9, Limits(), arg.encode(), max_tokens, False, VariableStorage().apply
            )
            group.meter = self.meter
            group.record(group.begin(program, words, [1, 2]))
            self.groups[request] = group

    def batches_nothing(self) -> None:
        """Makes all further rounds run individually."""
        for group in self.groups.values():
            group._sequences[0].batched = None

    @property
    def controller(self) -> GrammarController:
        controller = self.groups[1]._sequences[0].controller
        assert isinstance(controller, GrammarController)
        return controller

    def step(self, tokens: dict[int, Sequence[int]], ended: Iterable[int] = ()) -> list[StepResult]:
        """Runs a STEP with the tokens of each request; returns the results, sorted by request."""
        begun = []
        for request, given in tokens.items():
            found = self.groups[request].step(0, given, request in ended, None)
            assert found is not None
            begun.append(
                Begun(
                    StepSequence(request, 0, list(given), "length" if request in ended else None),
                    self.groups[request],
                    *found,
                )
            )
        jobs: list[Job] = []

        def submit(submitted: Iterable[Job], *, tenant: str) -> None:
            jobs.extend(submitted)

        pending = PendingResult(
            9, len(begun), self.posted.append, lambda *_: None, submit, threading.Lock()
        )
        made, hands = round_jobs(pending, begun)
        first = [job for of_tenant in made.values() for job in of_tenant]
        assert 1 <= hands <= 1 + len(begun)
        self.num_jobs = len(first)
        jobs += first
        while jobs:
            jobs.pop(0)()
        assert pending.complete
        [[_, _, body, *masks]] = self.posted
        self.posted.clear()
        results = decode_as(Result, body, "msgpack").sequences
        self.masks = {
            one.request: list(allowed(masks[one.attachment], SIZE))
            for one in results
            if one.attachment is not None
        }
        for one in results:
            one.attachment = None if one.attachment is None else 0
        return sorted(results, key=lambda one: one.request)
