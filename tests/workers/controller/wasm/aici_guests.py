"""Guests of the AICI ABI for tests: compiled once, and run without a model."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import wasmtime
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.protocol.worker_messages import StepResult, Variable, VariableAnswer
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import Controller
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.rounds import ControlledSequence, Rounds, Stage
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.abis import examine
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.controller.wasm.sandbox import Ticker, make_engine
from tokenbus.workers.controller.wasm.wasm_binary import with_exported_globals
from tokenbus.workers.variables import VariableStorage

from .... import starts
from .guests import CACHE, compile_guest

HERE = Path(__file__).parent
RUST_TARGETS = ("wasm32-wasip1", "wasm32-wasi")
EOS = 256
LIMITS = Limits(init_s=0.4, pre_s=0.05, mid_s=0.1, post_s=0.05)
"""Limits above the usual ones, because these tests do not check times."""

WORDS = [b"yes", b"no", b"yet", b"not", b" the", b" answer", b" is", b"red", b"green", b"blue"]
VOCABULARY = TokenizerVocabulary.from_tokens(
    [*(bytes([i]) for i in range(256)), b"", *WORDS], [EOS], "bytes and words"
)
"""Every byte, the end, and some words: 267 tokens, so that the last word of a mask is not full."""
VOCABULARY.assign_roles({"unk": 10, "sep": 12, "bos": 13, "turn_end": 18})


@contextmanager
def ticking_engine(limits: Limits = LIMITS) -> Iterator[wasmtime.Engine]:
    """An engine that stops its guests when their time is over."""
    engine = make_engine(limits)
    with Ticker(engine):
        yield engine


@cache
def puppet() -> bytes:
    """The guest that executes the lines of its argument (``aici_c/puppet.c``)."""
    return compile_guest(HERE / "aici_c" / "puppet.c", "-Wno-infinite-recursion")


def compile_rust(name: str) -> bytes:
    """Compiles ``aici_rust/<name>.rs`` to a program for WASI, as AICI's modules are.

    Skips the test if no Rust compiler for WASI is installed.
    """
    starts.check("a compiler")
    rustc, target = _rust()
    command = [rustc, "--edition", "2021", "--target", target, "-O", "-C", "panic=abort"]
    command += ["-C", "strip=symbols", str(HERE / "aici_rust" / f"{name}.rs")]
    made_of = hashlib.sha256(repr(command).encode())
    for source in sorted((HERE / "aici_rust").glob("*.rs")):
        made_of.update(source.read_bytes())
    wasm = CACHE / f"{made_of.hexdigest()}.wasm"
    if wasm.exists():
        return wasm.read_bytes()
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder, "guest.wasm")
        command += ["-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        os.replace(made, wasm)
    return wasm.read_bytes()


@cache
def _rust() -> tuple[str, str]:
    """A Rust compiler that has the standard library of a WASI target, and that target."""
    found = dict.fromkeys(filter(None, [shutil.which("rustc"), shutil.which("/usr/bin/rustc")]))
    for rustc in found:
        ask = [rustc, "--print", "sysroot"]
        said = subprocess.run(ask, capture_output=True, text=True, timeout=300, check=False)
        root = said.stdout.strip()
        for target in RUST_TARGETS:
            if list(Path(root, "lib/rustlib", target, "lib").glob("libstd-*.rlib")):
                return rustc, target
    pytest.skip(
        f"no rustc with the standard library of {' or '.join(RUST_TARGETS)}, so that no Rust guest "
        "can be compiled (Debian: apt-get install rustc libstd-rust-dev-wasm32 lld)"
    )


_STAGES = {
    "sample": Stage.WAITING,
    "fork": Stage.RUNNING,
    "suspend": Stage.SUSPENDED,
    "stop": Stage.FINISHED,
    "error": Stage.FINISHED,
}


class Request:
    """The sequences of one request. The test chooses the sampled tokens."""

    def __init__(
        self,
        engine: wasmtime.Engine,
        wasm: bytes,
        arg: bytes | str = b"",
        vocabulary: TokenizerVocabulary = VOCABULARY,
        limits: Limits = LIMITS,
    ) -> None:
        found = examine(wasm, limits)
        assert found.abi == "aici"
        module = wasmtime.Module(engine, with_exported_globals(wasm))
        self._program = AiciProgram(engine, module, found.why_no_fork)
        self._arg = arg.encode() if isinstance(arg, str) else arg
        self._vocabulary = vocabulary
        self._limits = limits
        self._rounds = Rounds(self._fork, self._changes_of_others)
        self._changes = 0
        self.storage = VariableStorage()
        self.sequences: dict[int, ControlledSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        """The tokens of each sequence after the prompt."""
        self.logs: dict[int, str] = {}

    # --- events of the request ------------------------------------------------------------------

    def begin(self, prompt: Sequence[int] = ()) -> list[StepResult]:
        """Runs the first round; returns its results."""
        first = self._sequence(0, self._program.start)
        return self._take(self._rounds.begin(first, prompt))

    def sampled(self, seq: int, *tokens: int) -> list[StepResult]:
        """Runs the round of a sequence after these tokens, and the rounds of sequences that it
        wakes."""
        self.tokens[seq] += tokens
        sequence = self.sequences[seq]
        assert sequence.stage is Stage.WAITING
        return self._take(self._rounds.sampled(sequence, tokens))

    def may_sample(self, seq: int = 0) -> list[int]:
        """The tokens in the last mask of a sequence."""
        return list(allowed(self.sequences[seq].mask, self._vocabulary.size))

    def text(self, seq: int = 0) -> bytes:
        """The text of a sequence after its prompt."""
        return self._vocabulary.bytes_of(self.tokens[seq])

    def close(self) -> None:
        """Frees the guests."""
        for sequence in self.sequences.values():
            sequence.controller.close()

    # --- the part of a sequence group ------------------------------------------------------------

    def _take(self, results: list[StepResult]) -> list[StepResult]:
        for result in results:
            had = self.tokens[result.seq]
            del had[len(had) - result.backtrack :]
            had += result.ff_tokens
            self.logs[result.seq] += result.logs
            self.sequences[result.seq].stage = _STAGES[result.action]
            for child in result.children:
                self.tokens[child] = list(had)
            if result.action in ("stop", "error"):
                self._changes += 1
        for sequence in list(self.sequences.values()):
            asleep = sequence.stage is Stage.SUSPENDED
            if asleep and self._changes_of_others(sequence) > sequence.seen_changes:
                results = results + self._take(self._rounds.again(sequence))
        return results

    def _fork(self, parent: ControlledSequence, more: int) -> list[ControlledSequence]:
        children = []
        for _ in range(more):
            child = self._sequence(len(self.sequences), parent.controller.fork)
            child.length = parent.length
            children.append(child)
        return children

    def _changes_of_others(self, sequence: ControlledSequence) -> int:
        return self._changes - sequence.variables.own_changes

    def _sequence(self, seq: int, make: Callable[[Host], Controller]) -> ControlledSequence:
        variables = SequenceVariables(1, seq, self._ask, self._wrote)
        log = Log(self._limits.log_bytes)
        host = Host(1, seq, self._arg, self._vocabulary, variables, log, self._limits, 100)
        mask = memoryview(bytearray(4 * -(-self._vocabulary.size // 32)))
        made = ControlledSequence(seq, make(host), host, variables, mask)
        self.sequences[seq] = made
        self.tokens.setdefault(seq, [])
        self.logs[seq] = ""
        return made

    def _ask(self, operation: Variable) -> VariableAnswer:
        answer = self.storage.apply(operation)
        if answer.error is not None:
            raise ControllerError(Code.CONTROLLER_FAILED, answer.error)
        return answer

    def _wrote(self) -> None:
        self._changes += 1
