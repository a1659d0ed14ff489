"""Compiled grammars and their tokenizers, shared by the sequences of a worker.

Source: llguidance (an Earley parser over lexemes that are derivatives of regular expressions; masks
by a walk of the token trie, cut short by slices of the vocabulary).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from ...host import Vocabulary
from ...pool import waiting
from .trial import RefusedGrammar, Trials, parser_limits, reason

KEPT_TOKENIZERS = 4
KEPT_TEXTS = 1024
SHORT = 100
"""Characters of forced texts whose tokens are kept."""
KEPT_GRAMMARS = 32
"""Each may come to ``trial.MAX_LEXER_STATES``."""


class _Wrapper:
    """A vocabulary as llguidance asks for one (its TokenizerWrapper).

    Tokens without bytes, special ones among them, are in no text, so no mask has them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self.tokens = [vocabulary.token(number) for number in range(vocabulary.size)]
        if ends[0] == vocabulary.size:
            self.tokens.append(b"")
        self.eos_token_id = ends[0]
        self._vocabulary = vocabulary
        self._short = lru_cache(KEPT_TEXTS)(self._tokenize)

    def __call__(self, text: str) -> list[int]:
        """The tokenizer's own choice for a text that is forced. Short ones come again: for the mask
        and for what is appended, and in each sequence of a grammar."""
        return self._short(text) if len(text) <= SHORT else self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text.encode())


class Tokens:
    """A vocabulary for llguidance. The ends of a sequence are allowed where a text is complete; a
    vocabulary that has none gets one beyond its last token, which is never let out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes about 0.4 s for 131,072 tokens, with Python's lock in hand."""
        size = vocabulary.size
        ends = vocabulary.eos_ids or (size,)
        wrapper = _Wrapper(vocabulary, ends)
        # It must not know of ``self``: the collector does not see what llguidance holds.
        self.tokenizer = LLTokenizer(wrapper, eos_token=list(ends))  # type: ignore[arg-type]
        wrapper.tokens = []
        self.endless = not vocabulary.eos_ids
        self.size = size + self.endless
        self.only_end = sum(1 << end for end in ends if end < size).to_bytes(
            4 * -(-size // 32), "little"
        )
        """The mask that allows the end and nothing else."""
        self.end_words = len({end // 32 for end in ends})
        """Words of a mask that such a one has set at most, or one with a single token."""


class Grammar:
    """A compiled grammar. Its matchers share what its lexer has found out: one of them at a time.

    ``lock`` is held around each call of any of its matchers. llguidance has a lock of its own for
    that, but a thread waits for it with Python's lock in its hand.
    """

    def __init__(self, matchers: Matchers, key: bytes, tokens: Tokens, matcher: LLMatcher) -> None:
        self.lock = threading.Lock()
        self.tokens = tokens
        self._matchers = matchers
        self._key = key
        self._matcher = matcher

    def start(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        return self.copy(self._matcher)

    def copy(self, matcher: LLMatcher) -> LLMatcher:
        """A matcher at the same place."""
        with self.lock:
            return matcher.deep_copy()

    def give_up(self) -> None:
        """A matcher of it has failed, perhaps as the lexer that they share is full: the next
        request has it compiled anew."""
        self._matchers.drop(self._key, self)


class Matchers:
    """The grammars and tokenizers that were used last. Safe from any thread."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._lock = threading.Lock()
        self._grammars: OrderedDict[bytes, Grammar] = OrderedDict()
        self._tokens_lock = threading.Lock()
        self._tokens: OrderedDict[object, Tokens] = OrderedDict()

    def get(self, vocabulary: Vocabulary, grammar: str) -> Grammar:
        """A grammar, as ``LLMatcher.grammar_from_*`` gives it, compiled; raises RefusedGrammar."""
        name = (vocabulary.fingerprint, vocabulary.size, vocabulary.eos_ids)
        key = hashlib.sha256(f"{name}\n{grammar}".encode()).digest()
        with self._lock:
            found = self._grammars.get(key)
            if found is not None:
                self._grammars.move_to_end(key)
                return found
        with waiting():
            self._trials.run(grammar)
        tokens = self._tokens_of(name, vocabulary)
        matcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise RefusedGrammar(reason(matcher.get_error()))
        made = Grammar(self, key, tokens, matcher)
        with self._lock:
            self._grammars[key] = made
            if len(self._grammars) > KEPT_GRAMMARS:
                self._grammars.popitem(last=False)
        return made

    def drop(self, key: bytes, grammar: Grammar) -> None:
        """Keeps a grammar no longer."""
        with self._lock:
            if self._grammars.get(key) is grammar:
                del self._grammars[key]

    def close(self) -> None:
        """Ends the processes that try grammars out."""
        self._trials.close()

    def _tokens_of(self, name: object, vocabulary: Vocabulary) -> Tokens:
        with self._tokens_lock:
            tokens = self._tokens.get(name)
            if tokens is None:
                tokens = self._tokens[name] = Tokens(vocabulary)
                if len(self._tokens) > KEPT_TOKENIZERS:
                    self._tokens.popitem(last=False)
            self._tokens.move_to_end(name)
            return tokens
