"""A controller worker without sockets and threads. Its results reach a GPU worker's loop in the
same turn or some turns later, in random order."""

from __future__ import annotations

import json
from collections import deque
from functools import cache
from random import Random
from typing import Any

from tokenbus.protocol.bodies import decode_as, encode_body
from tokenbus.protocol.header import decode_header
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Lost, Result, Start, Step, StepResult
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.masks import MaskFiles
from tokenbus.workers.controller.pending_result import attach
from tokenbus.workers.controller.python import PythonProgram
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.machine import machine_id
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ..controller.scripted import Scripted
from .moved import REQUEST, TURNS, finished, token_messages

WIDE = Limits(init_s=60.0, pre_s=60.0, mid_s=60.0, post_s=60.0, script_s=60.0, idle_wakes=3)


class Controllers:
    """Runs the controllers of one GPU worker's requests.

    ``storage``: a state worker's variables, which remain when this object or the GPU worker is
    replaced. ``program`` makes the controllers; None: they are scripts. ``shared``: whether both
    workers are on one machine. ``runs``: whether results may have runs
    (``StepResult.run``).
    """

    def __init__(
        self,
        loop: Loop,
        storage: VariableStorage,
        rng: Random,
        number: int = 7,
        program: Program | None = None,
        shared: bool = False,
        runs: bool = True,
    ) -> None:
        self._runs = runs
        self._program, self._files = program, MaskFiles() if shared else None
        self.number = number
        self._loop, self._storage, self._rng = loop, storage, rng
        self._groups: dict[int, SequenceGroup] = {}
        self._rounds: deque[tuple[SequenceGroup, Round]] = deque()
        self._seen = len(loop.worker._bus._links[0]._outbox)

    def turn(self) -> None:
        """Reads the messages of the GPU worker, and sends some of the results that are due."""
        outbox = list(self._loop.worker._bus._links[0]._outbox)
        for frames in outbox[self._seen :]:
            if frames[0] == b"START":
                self._start(decode_header(frames[1]).request, decode_as(Start, frames[2]))
            elif frames[0] == b"STEP" and decode_header(frames[1]).address == self.number:
                self._step(decode_as(Step, frames[2]))
        self._seen = len(outbox)
        for _ in range(len(self._rounds)):
            group, run = self._rounds.popleft()
            if self._rng.random() < 0.6:
                self._send(group, run())
            else:
                self._rounds.append((group, run))
        for group in self._groups.values():
            woken, ended = group.wake_idle()
            self._rounds.extend((group, run) for run in woken)
            if ended:
                self._send(group, ended)

    def _start(self, request: int, start: Start) -> None:
        text = start.arg if isinstance(start.arg, str) else json.dumps(start.arg)
        arg = b"" if start.arg is None else text.encode()
        group = SequenceGroup(
            request,
            1,
            WIDE,
            arg,
            start.max_tokens,
            start.ignore_eos,
            self._storage.apply,
            attempt=start.attempt,
        )
        group.takes_runs = start.takes_runs and self._runs
        self._groups[request] = group
        vocabulary = start.vocabulary
        program = self._program or PythonProgram(Scripted)
        json_of = self._loop.loaded.tokenizer_json
        if json_of is None:
            tokens = [b"%d" % i for i in range(vocabulary.size)]
            words = TokenizerVocabulary.from_tokens(tokens, vocabulary.eos, "test")
        else:
            words = vocabulary_of(
                json_of, vocabulary.size, tuple(vocabulary.eos), vocabulary.fingerprint
            )

        def begin() -> list[StepResult]:
            if not start.replay:
                return group.begin(program, words, start.prompt, start.n)
            steps = group.begin_again(program, words, start.prompt, start.n, start.replay)
            while True:
                try:
                    next(steps)
                except StopIteration as ended:
                    results: list[StepResult] = ended.value
                    return results

        self._rounds.append((group, begin))

    def _step(self, step: Step) -> None:
        rows = None
        if self._files is not None and step.masks:
            rows = self._files.get(step.masks, step.rows, step.row_bytes, step.bias_bytes)
        for one in step.sequences:
            group = self._groups.get(one.request)
            if group is None:
                continue
            ended = one.ended is not None
            stepped = group.step(
                one.seq,
                one.tokens,
                ended,
                rows,
                one.stop,
                one.draft,
                distributions=one.distributions,
                scores=one.scores,
                logprobs=one.logprobs,
            )
            if stepped is not None:
                self._rounds.append((group, stepped[1]))

    def _send(self, group: SequenceGroup, results: list[StepResult]) -> None:
        while results:
            attachments: list[bytes] = []
            for result in results:
                assert attach(group, result, attachments)
            host = "elsewhere" if self._files is None else machine_id()
            attempts = {group.request: group.attempt} if group.attempt else {}
            group.attempt = 0
            made = Result(sequences=results, host=host, attempts=attempts)
            body = encode_body(made, "msgpack")
            woken, results = group.record(results)
            self._loop.give(b"RESULT", body, 0, self.number, 0, attachments)
            self._rounds.extend((group, run) for run in woken)
            group.free()


class Workers:
    """A GPU worker (``loop``) and a controller worker, whose turns alternate. ``how``: further
    arguments of ``Controllers``."""

    def __init__(self, loop: Loop, storage: VariableStorage, rng: Random, **how: Any) -> None:
        self.loop = loop
        self._with, self._how = (storage, rng), how
        self.controllers = Controllers(self.loop, *self._with, **how)

    def turn(self) -> None:
        assert not self.loop.sent(b"ERROR"), self.loop.sent(b"ERROR")
        self.loop.turn()
        self.controllers.turn()

    def finish(self) -> list[list[Token]]:
        for _ in range(TURNS):
            if finished(self.loop):
                return token_messages(self.loop)
            self.turn()
        raise AssertionError("the stream has not ended")

    def lose_controllers(self) -> None:
        """The controller worker dies. The results that it has sent still arrive."""
        number = self.controllers.number + 1
        self.controllers = Controllers(self.loop, *self._with, number, **self._how)
        lost = Lost(requests=[REQUEST], code="worker_lost", message="it was killed", worker="gpu-1")
        self.loop.give(b"LOST", lost)


def check_nothing_is_left(loop: Loop) -> None:
    worker = loop.worker
    assert not len(worker._streams)
    assert not worker._steering.active
    assert not worker._steering._awaited
    assert not worker._steering._forks
    assert not worker._steering._behind
    assert not worker._steering._runs
    engine = worker._models.engines["m"]
    loop.turn()
    assert not engine.has_requests
    assert engine.stats()["kv_blocks_used"] == 0


@cache
def vocabulary_of(
    json: bytes, size: int, eos: tuple[int, ...], fingerprint: str
) -> TokenizerVocabulary:
    """A model's vocabulary, which is made once."""
    return TokenizerVocabulary.from_json(json.decode(), size=size, eos=eos, fingerprint=fingerprint)


def script(rng: Random, longest: int) -> dict[str, Any]:
    """A random script of decisions. Forks may fork again, up to a depth of three."""

    def some(length: int, depth: int) -> list[list[Any]]:
        done: list[list[Any]] = []
        for _ in range(length):
            tokens = [rng.randrange(10, 60) for _ in range(rng.randrange(1, 4))]
            kind = rng.choice(
                [
                    *["sample", "sample", "allow", "bias"],
                    *["append", "splice", "log", "set", "wait", "fork", "look"],
                ]
            )
            match kind:
                case "sample":
                    done.append(["sample", None])
                case "allow":
                    done.append(["sample", [rng.randrange(10, 60) for _ in range(4)]])
                case "bias":
                    mask = rng.choice([None, [rng.randrange(10, 60) for _ in range(4)]])
                    values = {str(rng.randrange(10, 60)): rng.choice([9.0, -2.0]) for _ in tokens}
                    done.append(["sample", mask, rng.choice([values, len(tokens)])])
                case "look":
                    done.append(["look", len(tokens)])
                case "append":
                    done.append(["append", tokens])
                case "splice":
                    done.append(["sample", None])
                    done.append(["splice", 1, rng.choice([tokens, []])])
                case "log":
                    done.append(["log", rng.choice("abc") * rng.randrange(1, 4)])
                case "set":
                    done.append(["set", rng.choice("xy"), "1"])
                case "wait":
                    done.append(["wait", rng.choice("xy")])
                case "fork" if depth < 3:
                    ways = rng.randrange(2, 4)
                    first = [["splice", 0, tokens]] if rng.random() < 0.5 else []
                    branches = [first + some(rng.randrange(1, 6), depth + 1) for _ in range(ways)]
                    done.append(["fork", branches])
                    return done
        done.append(rng.choice([["stop"], ["sample", None], ["log", "end"], ["fail", "so"]]))
        return done

    todo = [["set", "x", "0"]] if rng.random() < 0.7 else []
    return {"do": todo + some(longest, 0), "tells": rng.random() < 0.3}
