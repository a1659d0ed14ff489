"""The vocabulary of Tekken, the Wasm engine and the texts that all parts of ``masks.py`` share."""

from __future__ import annotations

import runpy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import wasmtime
from tokenbus.workers.controller.backends.grammar.grammar_instance import GrammarModule
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.wasm.sandbox import make_engine

ROOT = Path(__file__).parents[1]
TEXTS = Path(__file__).parent / "texts"
C_FILE = ROOT / "tests" / "grammars" / "samples" / "json.c"
TOKENIZERS = ROOT / "tests" / "workers" / "controller" / "tokens" / "real_tokenizers.py"
EOS = 2
"""Tekken's ``</s>``."""
MAX_TOKENS = 1_000_000
"""``max_tokens`` of every sequence. Each text has fewer tokens than this number. So no constraint
has to close its output before the text ends."""
MICRO = 1e6
MILLI = 1e3


@dataclass(frozen=True, slots=True)
class World:
    """The shared objects, created once."""

    vocabulary: TokenizerVocabulary
    engine: wasmtime.Engine
    module: GrammarModule

    @classmethod
    def make(cls) -> World:
        """Creates the shared objects. Reading the tokenizer takes about 3 s."""
        tekken: Callable[[], str] = runpy.run_path(str(TOKENIZERS))["tekken_json"]
        vocabulary = TokenizerVocabulary.from_json(
            tekken(), size=131_072, eos=[EOS], fingerprint="tekken"
        )
        engine = make_engine(Limits())
        return cls(vocabulary, engine, GrammarModule(engine))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.vocabulary.tokenize(text.encode())

    def host(self, arg: str) -> Host:
        """The ``Host`` of a controller, for a sequence with the argument ``arg``."""
        limits = Limits()
        log = Log(limits.log_bytes)
        return Host(1, 0, arg.encode(), self.vocabulary, None, log, limits, MAX_TOKENS)  # type: ignore[arg-type]

    def mask(self) -> memoryview:
        """A buffer for a mask."""
        return memoryview(bytearray(4 * -(-self.vocabulary.size // 32)))


def p99(seconds: Sequence[float]) -> float:
    """The 99th percentile of times."""
    return sorted(seconds)[-(-99 * len(seconds) // 100) - 1]


def steady_us(passes: Sequence[Sequence[float]]) -> float:
    """All passes have the same steps. For each step, takes the median of its times in all passes.
    Returns the mean of these medians, in microseconds. The medians remove the effect of other load,
    which slows different steps in each pass."""
    return statistics.mean(map(statistics.median, zip(*passes, strict=True))) * MICRO
