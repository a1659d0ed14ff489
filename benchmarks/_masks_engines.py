"""One interface for engines that compute masks. The engines are our grammar engine, and other
engines for comparison.

An engine is constructed from a grammar and walks a text. It fills the mask at the beginning of the
text. Then, for each token, it accepts the token and fills the next mask. Only accepting and filling
are timed. xgrammar and outlines-core are measured if they are installed.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenbus.workers.controller.backends.grammar.grammar_instance import (
    GrammarInstance,
    GrammarModule,
)
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

_clock = time.perf_counter


class Engine(Protocol):
    """An engine for one grammar. The engine keeps its caches from one text to the next."""

    def walk(self, tokens: Sequence[int]) -> list[float]:
        """Walks a text and returns seconds. The first value is the time to fill the mask at the
        beginning of the text. Each further value is the time to accept a token and to fill the next
        mask."""

    def masks(self, tokens: Sequence[int]) -> list[bytes]:
        """The masks of a text: one at the beginning, and one after each token."""

    def close(self) -> None:
        """Frees the engine."""


class _Walking:
    """Walks texts with two functions: the first accepts a token, and the second fills the mask. The
    subclass's ``_begin`` returns these functions for each text."""

    _mask: bytearray

    def _begin(self) -> tuple[Callable[[int], object], Callable[[], object]]:
        raise NotImplementedError

    def _end(self) -> None:
        """Called after a text."""

    def walk(self, tokens: Sequence[int]) -> list[float]:
        """Walks a text and returns times; see ``Engine.walk``."""
        accept, fill = self._begin()
        began = _clock()
        fill()
        seconds = [_clock() - began]
        for token in tokens:
            began = _clock()
            accept(token)
            fill()
            seconds.append(_clock() - began)
        self._end()
        return seconds

    def masks(self, tokens: Sequence[int]) -> list[bytes]:
        """The masks of a text; see ``Engine.masks``."""
        accept, fill = self._begin()
        fill()
        found = [bytes(self._mask)]
        for token in tokens:
            accept(token)
            fill()
            found.append(bytes(self._mask))
        self._end()
        return found

    def close(self) -> None:
        """Does nothing."""


def _words(vocabulary: TokenizerVocabulary) -> bytearray:
    return bytearray(4 * -(-vocabulary.size // 32))


def _address(mask: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mask))


class Ours(_Walking):
    """Our grammar engine. Each object has a grammar instance of its own."""

    name = "tokenbus"

    def __init__(
        self, module: GrammarModule, vocabulary: TokenizerVocabulary, tables: bytes
    ) -> None:
        self.guest = GrammarInstance(module, vocabulary, tables)
        self._mask = _words(vocabulary)
        self._place = -1

    def _begin(self) -> tuple[Callable[[int], object], Callable[[], object]]:
        guest, place, into = self.guest, self.guest.start(), memoryview(self._mask)
        self._place = place
        return lambda token: guest.append(place, [token]), lambda: guest.mask(place, into)

    def _end(self) -> None:
        self.guest.end(self._place)

    def close(self) -> None:
        """Frees the engine."""
        self.guest.close()


class _Tokens:
    """A vocabulary with the interface that llguidance needs."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenizerVocabulary) -> None:
        self.eos_token_id = vocabulary.eos
        self.tokens = [vocabulary.token(number) for number in range(vocabulary.size)]
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if not text]
        self._tokenize = vocabulary.tokenize

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenize(text.encode() if isinstance(text, str) else text)


class LLGuidance(_Walking):
    """llguidance. Before each text the matcher is reset, because a new matcher would lose the
    cached states of the lexer. Masks are filled with llguidance's fastest call, which writes to an
    address."""

    name = "llguidance"

    def __init__(
        self, tokenizer: LLTokenizer, vocabulary: TokenizerVocabulary, grammar: str
    ) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if self._matcher.is_error():
            raise ValueError(f"llguidance: {self._matcher.get_error()}")
        self._mask = _words(vocabulary)

    @staticmethod
    def tokenizer(vocabulary: TokenizerVocabulary) -> LLTokenizer:
        """The vocabulary as a tokenizer of llguidance, with llguidance's default slices."""
        return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))

    def _begin(self) -> tuple[Callable[[int], object], Callable[[], object]]:
        matcher, size = self._matcher, len(self._mask)
        address = _address(self._mask)
        fill_at = matcher.unsafe_compute_mask_ptr
        matcher.reset()
        return matcher.consume_token, lambda: fill_at(address, size)

    def walk_rounds(
        self, rounds: Sequence[Sequence[int]], clock: Callable[[], float] = _clock
    ) -> list[float]:
        """Walks one text and returns the seconds of each round. In a round, the engine accepts one
        or more tokens together, and then fills the next mask."""
        fill = self._begin()[1]
        accept = self._matcher.consume_tokens
        seconds = []
        for tokens in rounds:
            some = list(tokens)
            began = clock()
            accept(some)
            fill()
            seconds.append(clock() - began)
        self._end()
        return seconds

    def _end(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"llguidance: {self._matcher.get_error()}")


class XGrammar(_Walking):
    """xgrammar on one thread. xgrammar computes most masks when it compiles a grammar."""

    name = "xgrammar"

    def __init__(self, compiled: Any, vocabulary: TokenizerVocabulary) -> None:
        xgrammar = importlib.import_module("xgrammar")
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary.size)
        self._mask = _words(vocabulary)

    @staticmethod
    def compiler(vocabulary: TokenizerVocabulary) -> Any:
        """The grammar compiler for a vocabulary. Raises ImportError if xgrammar is not
        installed."""
        xgrammar = importlib.import_module("xgrammar")
        tokens = [vocabulary.token(number) for number in range(vocabulary.size)]
        info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[vocabulary.eos])
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _begin(self) -> tuple[Callable[[int], object], Callable[[], object]]:
        matcher, bits = self._matcher, self._bits
        matcher.reset()
        fill = matcher.fill_next_token_bitmask

        def accept(token: int) -> None:
            if not matcher.accept_token(token):
                raise ValueError(f"xgrammar: token {token} cannot follow")

        return accept, lambda: fill(bits)

    def masks(self, tokens: Sequence[int]) -> list[bytes]:
        """The masks of a text; see ``Engine.masks``."""
        accept, fill = self._begin()
        fill()
        found = [self._bits.numpy().tobytes()]
        for token in tokens:
            accept(token)
            fill()
            found.append(self._bits.numpy().tobytes())
        return found


class OutlinesCore(_Walking):
    """outlines-core, which supports only regular expressions. It computes all masks when it builds
    its index."""

    name = "outlines-core"

    def __init__(self, words: Any, vocabulary: TokenizerVocabulary, pattern: str) -> None:
        outlines_core = importlib.import_module("outlines_core")
        self._guide = outlines_core.Guide(outlines_core.Index(pattern, words))
        self._mask = _words(vocabulary)

    @staticmethod
    def words(vocabulary: TokenizerVocabulary) -> Any:
        """The vocabulary in outlines-core's format. Raises ImportError if the package is not
        installed."""
        outlines_core = importlib.import_module("outlines_core")
        by_text: dict[bytes, list[int]] = {}
        for number in range(vocabulary.size):
            if vocabulary.token(number):
                by_text.setdefault(vocabulary.token(number), []).append(number)
        return outlines_core.Vocabulary(vocabulary.eos, by_text)

    def _begin(self) -> tuple[Callable[[int], object], Callable[[], object]]:
        guide, address = self._guide, _address(self._mask)
        guide.reset()
        words = len(self._mask) // 4
        return (
            lambda token: guide.advance(token, False),
            lambda: guide.write_mask_into(address, words, 4),
        )
