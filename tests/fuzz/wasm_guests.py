"""Guests as fuzz targets: they call the host functions with any arguments, and return any results.

The guest runs a script in its memory. Each record of the script names a function to call and its
arguments. The inputs of the fuzz target are the scripts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any, Literal

import wasmtime
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Controller
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.abis import EXPORTS, IMPORTS
from tokenbus.workers.controller.wasm.aici import FUNCTIONS as AICI_FUNCTIONS
from tokenbus.workers.controller.wasm.aici import AiciController, AiciState
from tokenbus.workers.controller.wasm.host_functions import make_linker
from tokenbus.workers.controller.wasm.instance import Guest, Template
from tokenbus.workers.controller.wasm.native import FUNCTIONS as NATIVE_FUNCTIONS
from tokenbus.workers.controller.wasm.native import NativeController, NativeState
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.variables import VariableStorage

from .draws import Draws
from .target import Target

Abi = Literal["native", "aici"]

LIMITS = Limits(memory_bytes=4 * 65_536, log_bytes=512, variable_bytes=256, used_bytes=1024)
EOS = 256
VOCABULARY = TokenizerVocabulary.from_tokens([*(bytes([i]) for i in range(256)), b""], [EOS], "b")
SCRIPT = 4096
"""The address of the script in the guest's memory."""
RECORD = 36
"""Size of a record of the script in bytes: the number of a function, and eight arguments."""
RESULTS = 256
"""The address from which the guest's exports load the values that they return."""
BLOCK = 512
"""The address of the call block of the native ABI. Texts in JSON follow this block."""
MAX_CALLS = 24
JSON = (
    b"{}",
    b'{"type":"Continue"}',
    b'{"type":"Fork","num_children":3}',
    b'{"type":"Splice","backtrack":1,"ff_tokens":[1,2]}',
    b'{"SampleWithBias":{}}',
    b'{"Splice":{"backtrack":99999999999,"ff_tokens":[-1]}}',
    b'{"ReadVar":{"name":"a"}}',
    b'{"WriteVar":{"name":"a","value":[1],"op":"Append","when_version_is":null}}',
)

_PLACES = [BLOCK + 64 + sum(map(len, JSON[:i])) for i in range(len(JSON))]
_EDGES = (0, 1, 4, 64, 255, 256, SCRIPT, 65_532, 65_536, 2**31, 2**32 - 4, 2**32 - 1)
ADDRESSES = (*_EDGES, *_PLACES, *map(len, JSON))
"""Values for arguments: addresses at edges of the memory, and the addresses and lengths of the
texts."""


def _module(abi: Abi) -> str:
    """The guest as WebAssembly text. Its exports run the script up to the next record of zeros."""
    functions = list(IMPORTS[abi].items())
    imports, cases = [], []
    for i, ((module, name), kind) in enumerate(functions):
        params = " ".join(kind.params)
        result = f"(result {kind.results[0]})" if kind.results else ""
        imports.append(f'(import "{module}" "{name}" (func $f{i} (param {params}) {result}))')
        given = "".join(
            f"({t}.load (i32.add (global.get $at) (i32.const {4 + 4 * k})))"
            for k, t in enumerate(kind.params)
        )
        call = f"(call $f{i} {given})"
        call = f"(drop {call})" if kind.results else call
        cases.append(f"(if (i32.eq (local.get $op) (i32.const {i + 1})) (then {call}))")
    run = (
        "(func $run (local $op i32) (block $done (loop $next"
        "(br_if $done (i32.gt_u (global.get $at) (i32.const 60000)))"
        "(local.set $op (i32.load (global.get $at)))"
        f"{''.join(cases)}"
        f"(global.set $at (i32.add (global.get $at) (i32.const {RECORD})))"
        "(br_if $next (local.get $op)))))"
    )
    exports = []
    for k, (name, kind) in enumerate(EXPORTS[abi].items()):
        param = "(param i32)" if kind.params else ""
        result = f"(i32.load (i32.const {RESULTS + 4 * k}))" if kind.results else ""
        shown = "(result i32)" if kind.results else ""
        exports.append(f'(func (export "{name}") {param} {shown} (call $run) {result})')
    return (
        f'(module {" ".join(imports)} (memory (export "memory") 1)'
        f'(global $at (export "at") (mut i32) (i32.const {SCRIPT})) {run} {" ".join(exports)})'
    )


@cache
def _template(abi: Abi) -> Template:
    engine = make_engine(LIMITS)
    functions = NATIVE_FUNCTIONS if abi == "native" else AICI_FUNCTIONS
    module = wasmtime.Module(engine, bytes(wasmtime.wat2wasm(_module(abi))))
    return Template(make_linker(engine, functions), module, engine)


def _host(seq: int) -> Host:
    storage = VariableStorage()

    def ask(operation: Variable) -> VariableAnswer:
        answer = storage.apply(operation)
        if answer.error is not None:
            raise ControllerError(Code.CONTROLLER_FAILED, answer.error)
        return answer

    variables = SequenceVariables(1, seq, ask, lambda: None)
    return Host(1, seq, b"the argument", VOCABULARY, variables, Log(512), LIMITS, 20)


def _script(abi: Abi, draws: Draws) -> bytes:
    """A script of random records of calls."""
    records = bytearray()
    functions = list(IMPORTS[abi].values())
    for _ in range(MAX_CALLS):
        if not draws.left:
            break
        op = draws.number() % (len(functions) + 1)
        args = [
            draws.number(4) if draws.number() & 1 else draws.pick(ADDRESSES)
            for _ in (functions[op - 1].params if op else ())
        ]
        records += struct.pack("<I", op) + b"".join(struct.pack("<I", arg) for arg in args)
        records += bytes(-len(records) % RECORD)
    return bytes(records)


def _play(controller: Controller, draws: Draws) -> None:
    """Calls the functions of a controller in order, and then those of its fork."""
    mask = memoryview(bytearray(4 * -(-VOCABULARY.size // 32)))
    acts: list[Callable[[Controller], Any]] = [
        lambda c: c.init_prompt([1, 2, 3]),
        lambda c: c.pre_process(),
        lambda c: c.mid_process([0], mask),
        lambda c: c.post_process([65], 0),
        lambda c: c.mid_process([0, 1, 2], mask),
        lambda c: c.post_process([65, 66], 1),
    ]
    for act in acts:
        act(controller)
    child = controller.fork(_host(1))
    try:
        for act in acts[1:]:
            act(child)
    finally:
        child.close()


def _run(abi: Abi, data: bytes) -> None:
    draws = Draws(data)
    host = _host(0)
    returned = b"".join(
        draws.number(4).to_bytes(4, "little") if draws.number() & 1 else b"\1\0\0\0"
        for _ in range(8)
    )
    block = struct.pack("<16I", *(draws.pick(ADDRESSES) for _ in range(16)))
    state: Any = NativeState(host) if abi == "native" else AiciState(host)
    guest = state.guest = Guest(_template(abi), state, LIMITS)
    try:
        guest.write(RESULTS, returned)
        guest.write(BLOCK, block)
        at = BLOCK + len(block)
        for json in JSON:
            guest.write(at, json)
            at += len(json)
        guest.write(SCRIPT, _script(abi, draws))
        if abi == "native":
            controller: Controller = NativeController(guest, host, BLOCK, None)
        else:
            controller = AiciController(guest, state, 0, None)
        _play(controller, draws)
    except ControllerError:
        pass
    finally:
        guest.close()


def run_native(data: bytes) -> None:
    """Runs a guest of the native ABI, which must fail only with a ControllerError."""
    _run("native", data)


def run_aici(data: bytes) -> None:
    """Runs a guest of AICI's ABI, which must fail only with a ControllerError."""
    _run("aici", data)


def corpus() -> Iterator[bytes]:
    """Random scripts."""
    draw = Random(5)
    for size in (30, 100, 300, 600):
        for _ in range(8):
            yield draw.randbytes(size)


NATIVE = Target(run_native, corpus, max_bytes=1024)
AICI = Target(run_aici, corpus, max_bytes=1024)
