"""A controller that is replayed from its recorded inputs repeats its decisions, byte for byte.

The inputs are the prompt, the argument, the sampled tokens in order, and the answer to each named
operation on variables. The outputs are all results, masks, logs and writes. A replay runs in
another engine, after other guests have used the memory of the process.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import wasmtime
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.worker_messages import StepResult, Variable, VariableAnswer
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Controller, Program
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.sequence_group import Round, SequenceGroup
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.controller.wasm.wasm_binary import with_exported_globals
from tokenbus.workers.variables import VariableStorage

from ....counts import examples
from ..played import UNHURRIED, WORDS, vocabulary
from .aici_guests import puppet
from .guests import ROOT, compile_guest
from .hostile.guests import FREE, MASK_AT, call, guest, set_word

pytestmark = pytest.mark.process

SDK = ROOT / "workers/controller/sdk/examples"
VOCABULARY = vocabulary(WORDS)
PROMPT = [117, 33, 44]
MAX_TOKENS = 30
LIMITS = UNHURRIED
FLOATS, TEMPORARY = 40_960, 49_152
CANONICAL = 0x7FF8_0000_0000_0000
"""The bits of the canonical NaN as a double."""


def _floats() -> bytes:
    """A guest whose mask and variables contain everything that could differ from run to run.

    These are NaNs with signs and payloads, random bytes, the clock, memory that was just allocated,
    its size, and the number of the round.
    """
    numbers = [
        "(f64.div (f64.const 0) (f64.const -0))",
        "(f64.sqrt (f64.const -1))",
        "(f64.add (f64.const nan:0x123456) (f64.const 1))",
        "(f64.mul (f64.const -nan:0xabcdef) (f64.const nan:0x4444))",
        "(f64.min (f64.const nan:0x99) (f64.const 2))",
        "(f64.sub (f64.const inf) (f64.const inf))",
        "(f64.promote_f32 (f32.div (f32.const 0) (f32.const 0)))",
        "(f64.div (f64.convert_i32_u (global.get $round)) (f64.const 3))",
        "(f64x2.extract_lane 1 (f64x2.div (v128.const f64x2 0 0) (v128.const f64x2 0 -0)))",
        "(f64.promote_f32 (f32x4.extract_lane 2 (f32x4.sqrt (v128.const f32x4 0 0 -1 0))))",
    ]
    stores = "".join(
        f"(f64.store (i32.const {FLOATS + 8 * i}) {number})" for i, number in enumerate(numbers)
    )
    imports = "\n".join(
        f'(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {p}) (result i32)))'
        for name, p in (("random_get", "i32 i32"), ("clock_time_get", "i32 i64 i32"))
    )
    world = f"""(drop {call("random_get", FLOATS + 128, 32)})
      (drop (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const {FLOATS + 160})))
      (local.set $i (i32.mul (memory.grow (i32.const 1)) (i32.const 65536)))
      (memory.copy (i32.const {FLOATS + 168}) (local.get $i) (i32.const 64))
      (i32.store (local.get $i) (i32.const 0x55555555))
      (i32.store (i32.const {FLOATS + 232}) (memory.size))
      (i32.store (i32.const {FLOATS + 236}) (global.get $round))
      (i32.store (i32.const {FLOATS + 240}) {call("var_append", 512, 4, FLOATS, 240, -1, 0)})
      (i32.store (i32.const {FLOATS + 244})
        {call("var_get", 512, 4, TEMPORARY, 4096, FLOATS + 248)})"""
    # The mask is a hash of these bytes. The tokens of its first word are always allowed.
    mask = f"""(memory.fill (i32.const {FREE}) (i32.const 0) (i32.const 64))
      (local.set $i (i32.const 0))
      (loop $fold
        (i32.store (i32.add (i32.const {FREE}) (i32.and (local.get $i) (i32.const 28)))
          (i32.xor
            (i32.rotl (i32.load (i32.add (i32.const {FREE})
              (i32.and (local.get $i) (i32.const 28)))) (i32.const 5))
            (i32.load (i32.add (i32.const {FLOATS}) (local.get $i)))))
        (br_if $fold (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 4)))
          (i32.const 256))))
      {set_word(FREE, 0xFFFFFFFE)} {set_word(MASK_AT, FREE)}"""
    return guest(imports=imports, mid=stores + world + mask)


AICI_LINES = """prompt log hello
mid mask 65
mid storage {"WriteVar":{"name":"a","value":"6869","op":"Append"}}
pre = {"attention_masks":[[],[]],"suspend":false,"ff_tokens":[]}
mid seq
mid storage {"ReadVar":{"name":"a"}}
mid only 1 mask 70
post tokens
mid tokens
mid = {"Splice":{"backtrack":2,"ff_tokens":[7,8,9]}}
post arg
mid mask 80
pre = {"attention_masks":[[]],"suspend":false,"ff_tokens":[11,12]}
mid poke clock_time_get 0 8
mid poke random_get 8 64"""


class Guest(NamedTuple):
    """A module and its argument."""

    wasm: Callable[[], bytes]
    arg: str = ""
    aici: bool = False


def _c(file: Path) -> Callable[[], bytes]:
    return lambda: compile_guest(file)


GUESTS = {
    "choice": Guest(_c(SDK / "choice.c"), '["the cat sat", "the dog", "a dog sat"]'),
    "upper4": Guest(_c(SDK / "upper4.c")),
    "best_of": Guest(_c(SDK / "best_of.c"), "4 6 longest"),
    "backtrack": Guest(_c(SDK / "backtrack.c"), "a=bc"),
    "talk": Guest(_c(SDK / "talk.c"), "I heard: "),
    "floats": Guest(_floats),
    "aici": Guest(puppet, AICI_LINES, aici=True),
}


@cache
def wasm_of(name: str) -> bytes:
    return with_exported_globals(GUESTS[name].wasm())


def program(name: str, engine: wasmtime.Engine) -> Program:
    module = wasmtime.Module(engine, wasm_of(name))
    return AiciProgram(engine, module) if GUESTS[name].aici else NativeProgram(engine, module)


@pytest.fixture(scope="module")
def first() -> wasmtime.Engine:
    return make_engine(LIMITS)


@pytest.fixture(scope="module")
def second() -> wasmtime.Engine:
    return make_engine(LIMITS)


# --- whole requests -------------------------------------------------------------------------------


class Told(NamedTuple):
    """Tokens that were sampled for a sequence, and whether it ended with them."""

    seq: int
    tokens: list[int]
    ended: bool


class Record:
    """The inputs of a request, and its results."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.answers: dict[tuple[int, int], tuple[Variable, VariableAnswer]] = {}
        self.came: list[bytes] = []
        """The outputs of each round, in order: its results and masks."""


class Request:
    """A request whose controllers run in a sequence group."""

    def __init__(self, made: Program, arg: str, record: Record) -> None:
        self._record = record
        self._group = SequenceGroup(1, 1, LIMITS, arg.encode(), MAX_TOKENS, False, self._answer)
        self._storage = VariableStorage()
        self._made = made
        self.may: dict[int, list[int]] = {}
        """The sequences that wait for the model, and their allowed tokens."""
        self.length: dict[int, int] = {0: 0}

    def begin(self) -> None:
        self._play(lambda: self._group.begin(self._made, VOCABULARY, PROMPT))

    def tell(self, told: Told) -> None:
        self._record.told.append(told)
        self.may.pop(told.seq)
        self.length[told.seq] += len(told.tokens)
        stepped = self._group.step(told.seq, told.tokens, told.ended, None)
        assert stepped is not None
        self._play(stepped[1])

    def close(self) -> None:
        self._group.close()
        self._group.free()

    def _play(self, round_: Round) -> None:
        rounds: deque[Round] = deque([round_])
        while rounds:
            results = rounds.popleft()()
            while results:
                self._came(results)
                woken, results = self._group.record(results)
                self._group.free()
                rounds += woken

    def _came(self, results: list[StepResult]) -> None:
        masks = []
        for result in results:
            seq = result.seq
            self.length[seq] += len(result.ff_tokens) - result.backtrack
            self.length.update((child, self.length[seq]) for child in result.children)
            if result.action == "sample":
                mask = self._group.mask(seq) if result.attachment is not None else None
                masks.append(mask)
                self.may[seq] = [
                    token
                    for token in range(VOCABULARY.size)
                    if mask is None or mask[token >> 3] >> (token & 7) & 1
                ]
        self._record.came.append(msgspec.msgpack.encode((results, masks)))

    def _answer(self, operation: Variable) -> VariableAnswer:
        answer = self._storage.apply(operation)
        self._record.answers[operation.lineage, operation.count] = (operation, answer)
        return answer


class Replay(Request):
    """A request whose operations get the recorded answers."""

    def __init__(self, made: Program, arg: str, recorded: Record) -> None:
        super().__init__(made, arg, Record())
        self._answers = recorded.answers

    def _answer(self, operation: Variable) -> VariableAnswer:
        was, answer = self._answers[operation.lineage, operation.count]
        assert operation == was
        return answer


def record(made: Program, arg: str, seed: int) -> Record:
    """The record of a request whose model samples random allowed tokens."""
    draw = random.Random(seed)
    record = Record()
    request = Request(made, arg, record)
    request.begin()
    while request.may:
        seq = draw.choice(sorted(request.may))
        token = draw.choice(request.may[seq])
        over = request.length[seq] + 1 >= MAX_TOKENS
        request.tell(Told(seq, [token], over))
    request.close()
    return record


@settings(max_examples=examples(5))
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", GUESTS)
def test_a_replayed_request_gives_the_same_results_masks_logs_and_writes(
    first: wasmtime.Engine, second: wasmtime.Engine, name: str, seed: int
) -> None:
    arg = GUESTS[name].arg
    recorded = record(program(name, first), arg, seed)
    made = program(name, second)
    # Another request, with other tokens, leaves its memory to later sequences.
    record(made, arg, seed + 1)
    replay = Replay(made, arg, recorded)
    replay.begin()
    for told in recorded.told:
        replay.tell(told)
    assert replay._record.came == recorded.came
    assert not replay.may
    replay.close()


def test_the_records_are_of_what_is_meant(first: wasmtime.Engine) -> None:
    """The compared results contain forks, splices, logs, writes and suspensions."""
    kinds: dict[str, set[str]] = {}
    for name in GUESTS:
        came = kinds[name] = set()
        for one in record(program(name, first), GUESTS[name].arg, 1).came:
            results, masks = msgspec.msgpack.decode(
                one, type=tuple[list[StepResult], list[bytes | None]]
            )
            for result in results:
                assert result.error is None, (name, result.error)
                came.add(result.action)
                came |= {
                    w for w in ("backtrack", "ff_tokens", "logs", "storage") if getattr(result, w)
                }
            came |= {"mask"} if any(masks) else set()
    assert kinds["choice"] >= {"ff_tokens", "mask", "stop"}
    assert kinds["upper4"] >= {"mask"}
    assert kinds["best_of"] >= {"fork", "suspend", "storage", "logs"}
    assert kinds["backtrack"] >= {"backtrack", "ff_tokens"}
    assert kinds["talk"] >= {"fork", "suspend", "storage", "logs"}
    assert kinds["floats"] >= {"storage", "mask"}
    assert kinds["aici"] >= {"fork", "backtrack", "ff_tokens", "storage", "logs", "mask"}


def test_floats_random_bytes_clock_and_new_memory_have_one_value(first: wasmtime.Engine) -> None:
    came = record(program("floats", first), "", 1).came[0]
    [result], _ = msgspec.msgpack.decode(came, type=tuple[list[StepResult], list[bytes]])
    written = bytes.fromhex(result.storage[0]["WriteVar"]["value"])
    numbers = struct.unpack("<10Q", written[:80])
    assert {n for i, n in enumerate(numbers) if i != 7} == {CANONICAL}
    assert written[128:160] == bytes(32)
    assert int.from_bytes(written[160:168], "little") == 1_700_000_000_000_000_000
    assert written[168:232] == bytes(64)


# --- a clone --------------------------------------------------------------------------------------


class One:
    """The controller of one sequence, whose calls are recorded one by one."""

    def __init__(self, name: str, engine: wasmtime.Engine) -> None:
        self._storage = VariableStorage()
        self._name = name
        self._host = self._made_host()
        self._controller: Controller = program(name, engine).start(self._host)
        self.came: list[bytes] = []
        self.may: list[int] = []
        self._controller.init_prompt(PROMPT)
        self._note(None)

    def _made_host(self) -> Host:
        variables = SequenceVariables(1, 0, self._storage.apply, lambda: None)
        arg = GUESTS[self._name].arg.encode()
        return Host(1, 0, arg, VOCABULARY, variables, Log(65536), LIMITS, MAX_TOKENS)

    def clone(self) -> One:
        """A fork of the controller with the same sequence number, and with a copy of the
        variables."""
        other = object.__new__(One)
        other._name = self._name
        other._storage = VariableStorage()
        if self._storage.requests:
            other._storage.restore(self._storage.save(1))
        other._host = other._made_host()
        other._host.variables._count = self._host.variables._count  # type: ignore[attr-defined]
        other._controller = self._controller.fork(other._host)
        other.came, other.may = [], self.may
        return other

    def decide(self) -> None:
        """Makes the calls before the next token. ``may`` then has the allowed tokens."""
        self.may = []
        mask = bytearray(4 * -(-VOCABULARY.size // 32))
        for _ in range(20):
            answer = self._controller.pre_process()
            self._note(answer)
            if answer.action in (Action.STOP, Action.SUSPEND):
                return
            if answer.action is not Action.SPLICE:
                answer = self._controller.mid_process((0,), memoryview(mask))
                self._note(answer, bytes(mask) if answer.masked else b"")
                if answer.action is Action.CONTINUE:
                    every = range(VOCABULARY.size)
                    self.may = [
                        t for t in every if not answer.masked or mask[t >> 3] >> (t & 7) & 1
                    ]
                if answer.action is not Action.SPLICE:
                    return
            if not self._told(answer.tokens, answer.backtrack):
                return

    def sampled(self, pick: int) -> bool:
        """Samples an allowed token, and makes the calls before the next one; returns whether the
        sequence continues."""
        if self._told([self.may[pick % len(self.may)]], 0):
            self.decide()
        else:
            self.may = []
        return bool(self.may)

    def _told(self, tokens: Sequence[int], backtrack: int) -> bool:
        said = self._controller.post_process(tokens, backtrack)
        self._note(said)
        return said.action is not Action.STOP

    def close(self) -> None:
        self._controller.close()

    def _note(self, *what: object) -> None:
        writes = self._host.variables.take_writes()  # type: ignore[attr-defined]
        self.came.append(repr((what, self._host.log.take(), writes)).encode())


ALONE = ["choice", "upper4", "backtrack", "floats", "aici"]
"""The guests that also make decisions without a fork."""


@settings(max_examples=examples(5))
@given(picks=st.lists(st.integers(0, 1000), max_size=12), at=st.integers(0, 12))
@pytest.mark.parametrize("name", ALONE)
def test_a_clone_goes_on_as_a_replay_of_its_parent_would(
    first: wasmtime.Engine, second: wasmtime.Engine, name: str, picks: list[int], at: int
) -> None:
    parent, replay = One(name, first), One(name, second)
    clone: One | None = None
    forked = 0
    for one in (parent, replay):
        one.decide()
    for i, pick in enumerate(picks):
        if i == at:
            clone = parent.clone()
            forked = len(replay.came)
        # The clone's calls come first, so that they cannot depend on the parent's next calls.
        if clone is not None:
            clone.sampled(pick)
        if not (parent.sampled(pick) & replay.sampled(pick)):
            break
    assert parent.came == replay.came
    if clone is not None:
        assert clone.came == replay.came[forked:]
        clone.close()
    parent.close()
    replay.close()
