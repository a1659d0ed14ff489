"""What a generated text has to be, told token by token: a small protocol, and llguidance behind it.

Source: llguidance (its Earley parser over derivative-based lexemes, masks from the token trie).
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ....protocol.errors import Code, ControllerError
from ..host import Vocabulary
from .token_set import TokenSet

TOKENIZERS_KEPT = 4
GRAMMARS_KEPT = 256


class Constraint(Protocol):
    """A text that grows by tokens. Each call may raise ControllerError."""

    def mask(self, into: memoryview) -> bool:
        """Writes what may follow, the end of a sequence where the text may end here.

        False: nothing may follow but the end, and what was written is not to be used.
        """

    def advance(self, tokens: Sequence[int]) -> bool:
        """The text grows by these tokens, which the masks allowed; whether it can grow no more."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""


class Allowed:
    """Any text of the tokens of a set; it ends where the set has the end of a sequence."""

    complete = True

    def __init__(self, tokens: TokenSet) -> None:
        self._tokens = tokens

    def mask(self, into: memoryview) -> bool:
        """As ``Constraint`` says."""
        into[:] = self._tokens.mask
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        """As ``Constraint`` says."""
        return False


class Grammar:
    """A text of an llguidance grammar; ``grammar`` is what the functions below give.

    Compiling takes a millisecond for a small grammar; a grammar that was compiled before is copied
    in a microsecond. Raises ControllerError where it is wrong.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._matcher = _compiled.get(vocabulary, grammar)

    def mask(self, into: memoryview) -> bool:
        """As ``Constraint`` says."""
        size, eos = self._vocabulary.size, self._vocabulary.eos
        if eos >= 0:
            self._fill(into)
            end = into[eos >> 3] & 1 << (eos & 7)
            into[eos >> 3] ^= end
            more = any(into.cast("I"))
            into[eos >> 3] |= end
            return more
        # The tokenizer was given an end of its own, one beyond the vocabulary.
        wide = bytearray(4 * -(-(size + 1) // 32))
        self._fill(memoryview(wide))
        wide[size >> 3] &= ~(1 << (size & 7))
        into[:] = wide[: len(into)]
        return any(wide)

    def advance(self, tokens: Sequence[int]) -> bool:
        """As ``Constraint`` says."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise self._failed()
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """As ``Constraint`` says."""
        return self._matcher.is_accepting()

    def _fill(self, into: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        self._matcher.unsafe_compute_mask_ptr(address, len(into))
        if self._matcher.is_error():
            raise self._failed()

    def _failed(self) -> ControllerError:
        return _failure(self._matcher.get_error().split("\n<state>")[0])


def regex(pattern: str) -> str:
    """The grammar of a regular expression, in Rust's syntax, that the whole text matches."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    quoted = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return LLMatcher.grammar_from_lark(f"start: {quoted}")


def json_schema(schema: str) -> str:
    """The grammar of the JSON values of a schema, spaced as ``json.dumps`` does.

    A schema that wants other spaces says so in its ``x-guidance``. Raises ValueError where it is
    no JSON object.
    """
    return LLMatcher.grammar_from_json_schema(
        schema, {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )


def lark(grammar: str) -> str:
    """The grammar of a text in Lark's syntax, as llguidance reads it."""
    return LLMatcher.grammar_from_lark(grammar)


def _failure(reason: str) -> ControllerError:
    """llguidance's reason in one line, without its excerpts of the grammar, which are indented.

    All of it is the error's cause, for the log.
    """
    lines = [line for line in reason.splitlines() if line and not line[0].isspace()]
    told = " ".join(line.removeprefix("error: ") for line in lines)
    error = ControllerError(Code.CONTROLLER_FAILED, f"llguidance: {told}")
    error.__cause__ = ValueError(reason.strip())
    return error


class _Tokens:
    """A vocabulary as llguidance asks for one."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token(number) for number in range(vocabulary.size)]
        self.eos_token_id = vocabulary.eos
        if vocabulary.eos < 0:
            self.eos_token_id = vocabulary.size
            self.tokens.append(b"")
        self.special_token_ids = [i for i, text in enumerate(self.tokens) if not text]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.tokenize(text.encode() if isinstance(text, str) else text)


class _Compiled:
    """The tokenizers and grammars that were used last, for all sequences. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[str, LLTokenizer] = OrderedDict()
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def get(self, vocabulary: Vocabulary, grammar: str) -> LLMatcher:
        """A matcher at its beginning, for one text; raises ControllerError."""
        name = (vocabulary.fingerprint, grammar)
        with self._lock:
            matcher = self._matchers.get(name)
            if matcher is not None:
                self._matchers.move_to_end(name)
                return matcher.deep_copy()
            tokenizer = self._tokenizer(vocabulary)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _failure(matcher.get_error())
        with self._lock:
            self._matchers[name] = matcher
            if len(self._matchers) > GRAMMARS_KEPT:
                self._matchers.popitem(last=False)
            return matcher.deep_copy()

    def _tokenizer(self, vocabulary: Vocabulary) -> LLTokenizer:
        tokenizer = self._tokenizers.get(vocabulary.fingerprint)
        if tokenizer is None:
            tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))
            self._tokenizers[vocabulary.fingerprint] = tokenizer
            if len(self._tokenizers) > TOKENIZERS_KEPT:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(vocabulary.fingerprint)
        return tokenizer


_compiled = _Compiled()
