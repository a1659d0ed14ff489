"""Constraints on a text that a script generates. llguidance computes the mask before each token.

Source: llguidance. It parses with Earley's algorithm, matches lexemes with derivatives of regular
expressions, and walks the token trie to compute masks.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ....protocol.errors import Code, ControllerError
from ..backends.llguidance.schemas import implemented, schema_grammar
from ..backends.llguidance.spacing import spaced_lark
from ..host import Vocabulary
from .token_set import TokenSet

TOKENIZERS_KEPT = 4
GRAMMARS_KEPT = 256
SCHEMAS_KEPT = 16

_implemented = lru_cache(SCHEMAS_KEPT)(implemented)


class Constraint(Protocol):
    """The constraint on one text, which grows by tokens. Each call may raise ControllerError."""

    def mask(self, into: memoryview) -> bool:
        """Writes the mask of the next token, with the end-of-sequence token if the text may end
        here.

        Returns False if the text must end here. The mask must not be used in this case.
        """

    def advance(self, tokens: Sequence[int]) -> bool:
        """Appends tokens that the masks allowed; returns whether the text is finished."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""


class Allowed:
    """Allows the tokens of a set; the text may end if the set has an end-of-sequence token."""

    complete = True

    def __init__(self, tokens: TokenSet) -> None:
        self._tokens = tokens

    def mask(self, into: memoryview) -> bool:
        """Writes the mask of the next token."""
        into[:] = self._tokens.mask
        return True

    def advance(self, tokens: Sequence[int]) -> bool:
        """Returns False, because the text never has to end."""
        return False


class Grammar:
    """Constrains a text to an llguidance grammar. The functions below make ``grammar``.

    Compiling a small grammar takes a millisecond; copying a cached grammar takes a microsecond.
    Raises ControllerError if the grammar is not valid.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        self._vocabulary = vocabulary
        self._matcher = _compiled.get(vocabulary, grammar)

    def mask(self, into: memoryview) -> bool:
        """Writes the mask of the next token."""
        size, eos = self._vocabulary.size, self._vocabulary.eos
        if eos >= 0:
            self._fill(into)
            end = into[eos >> 3] & 1 << (eos & 7)
            into[eos >> 3] ^= end
            more = any(into.cast("I"))
            into[eos >> 3] |= end
            return more
        # This vocabulary has no end-of-sequence token, but llguidance needs one. So llguidance's
        # tokenizer has one more token than the vocabulary (``_Tokens``).
        wide = bytearray(4 * -(-(size + 1) // 32))
        self._fill(memoryview(wide))
        wide[size >> 3] &= ~(1 << (size & 7))
        into[:] = wide[: len(into)]
        return any(wide)

    def advance(self, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text; returns whether the text is finished."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise self._failed()
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def _fill(self, into: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        self._matcher.unsafe_compute_mask_ptr(address, len(into))
        if self._matcher.is_error():
            raise self._failed()

    def _failed(self) -> ControllerError:
        return _failure(self._matcher.get_error().split("\n<state>")[0])


def load_vocabulary(vocabulary: Vocabulary) -> None:
    """Prepares a vocabulary for its first grammar; this takes about 0.4 s."""
    _compiled.load(vocabulary)


def regex(pattern: str) -> str:
    """The grammar of a regular expression in Rust's syntax. The expression must match the whole
    text."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """The grammar that allows one of several texts."""
    quoted = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return LLMatcher.grammar_from_lark(f"start: {quoted}")


def json_schema(schema: str) -> str:
    """The grammar of the JSON values that match a schema, with the spacing of ``json.dumps``.

    A schema can override the spacing with ``x-guidance``, within bounds. Raises ValueError if the
    schema is not a JSON object, and RefusedGrammar if its spacing is unbounded.
    """
    return schema_grammar(schema, _implemented)


def lark(grammar: str) -> str:
    """The grammar given in llguidance's dialect of Lark; raises RefusedGrammar if the spacing of a
    schema in it is unbounded."""
    return LLMatcher.grammar_from_lark(spaced_lark(grammar))


def _failure(reason: str) -> ControllerError:
    """An error with llguidance's message on one line. The indented lines of the message, which
    quote the grammar, are left out.

    The error's cause has the complete message, for the log.
    """
    lines = [line for line in reason.splitlines() if line and not line[0].isspace()]
    message = " ".join(line.removeprefix("error: ") for line in lines)
    error = ControllerError(Code.CONTROLLER_FAILED, f"llguidance: {message}")
    error.__cause__ = ValueError(reason.strip())
    return error


class _Tokens:
    """A vocabulary in the form that llguidance takes."""

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
    """Caches of the most recently used tokenizers and grammars, for all sequences. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[str, LLTokenizer] = OrderedDict()
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def get(self, vocabulary: Vocabulary, grammar: str) -> LLMatcher:
        """A new matcher for one text. Raises ControllerError if the grammar is not valid."""
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

    def load(self, vocabulary: Vocabulary) -> None:
        """Creates the tokenizer of a vocabulary."""
        with self._lock:
            self._tokenizer(vocabulary)

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
