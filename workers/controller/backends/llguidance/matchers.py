"""Caches compiled llguidance grammars and tokenizers, which the sequences of a worker share. A
*matcher* follows one text under a grammar, and computes the masks.

Source: llguidance. It parses with Earley's algorithm, matches lexemes with derivatives of regular
expressions, and walks the token trie to compute masks. It has precomputed masks for slices of the
vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from .....protocol.errors import ControllerError
from .....protocol.json_schema.relaxing import Path
from ...host import Vocabulary
from ...pool import tenant_of_thread
from ..compiling import bounds
from ..compiling.bounds import Bounds, RefusedGrammar
from ..compiling.kept import Kept
from ..compiling.meter import CompileMeter
from ..compiling.processes import Processes
from ..compiling.shared import Shared
from .checking.checked_text import CheckedText, EndingTokens
from .checking.obligations import Obligations
from .checking.walks import Checks
from .completion import Completion, Completions
from .least_length import Growth, growth, least_bytes
from .plain import MAX_TEXT, is_plain
from .token_sets import TokenSets
from .trial import parser_limits, plain_limits, reason, step_error


class Weakened(NamedTuple):
    """A schema that masks enforce only in a relaxed form."""

    schema: str
    """The schema as JSON."""
    places: list[Path]
    """The places in the schema where keywords were left out (``protocol.json_schema.relaxing``)."""


Found = tuple[bytes | None, list[int] | None]
"""The shortest text of a grammar and its tokens; both are None if no text was found."""
SEARCH_S = 0.05
"""Maximum CPU time of a search for a shortest text in the worker, in seconds; a longer search runs
in a separate process."""
KEPT_TOKENIZERS = 4
KEPT_TEXTS = 1024
SHORT = 100
"""Maximum characters of a forced text whose tokens are cached."""
KEPT_GRAMMARS = 32
"""Maximum cached grammars, each with up to ``MAX_LEXER_STATES`` lexer states."""


class _Wrapper:
    """A vocabulary in the form of llguidance's TokenizerWrapper.

    Masks never allow a token without bytes, such as a special token, unless it ends the sequence.
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
        """The tokenization of a forced text. Tokenizations of short texts are cached, because the
        same text is tokenized again for the mask, for the appended tokens, and in each sequence of
        a grammar."""
        return self._short(text) if len(text) <= SHORT else self._tokenize(text)

    def _tokenize(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text.encode())


class Tokens:
    """A vocabulary for llguidance. End-of-sequence tokens are allowed when a text is complete. If
    the vocabulary does not have such a token, llguidance gets one additional token, which ends the
    text. The bit of the additional token is cleared in each mask."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes about 0.4 s for 131,072 tokens, and keeps Python's lock during this time."""
        size = vocabulary.size
        ends = vocabulary.eos_ids or (size,)
        wrapper = _Wrapper(vocabulary, ends)
        # The garbage collector does not see llguidance's reference to the wrapper. If the wrapper
        # referred to ``self``, the garbage collector could not free the cycle.
        self.tokenizer = LLTokenizer(wrapper, eos_token=list(ends))  # type: ignore[arg-type]
        wrapper.tokens = []
        self.endless = not vocabulary.eos_ids
        self.size = size + self.endless
        self.only_end = sum(1 << end for end in ends if end < size).to_bytes(
            4 * -(-size // 32), "little"
        )
        """The mask that allows only the end of the sequence."""
        self.end_words = len({end // 32 for end in ends})
        """Number of nonzero words of ``only_end``, but at least 1. If a mask forces a single token,
        or allows only the end of the sequence, it has at most this number of nonzero words."""
        self.vocabulary = vocabulary
        self._sets: TokenSets | None = None
        self._ending: EndingTokens | None = None
        self._sets_lock = threading.Lock()

    @property
    def sets(self) -> TokenSets:
        """Sets of the vocabulary's tokens, by their meaning as parts of JSON. They are computed
        when the first schema is compiled."""
        with self._sets_lock:
            if self._sets is None:
                vocabulary = self.vocabulary
                tokens = [vocabulary.token(number) for number in range(vocabulary.size)]
                self._sets = TokenSets(tokens, -(-vocabulary.size // 32), vocabulary.tokenize)
            return self._sets

    @property
    def ending(self) -> EndingTokens:
        """Sets of the tokens that may end values. They are computed when the first schema with
        obligations is compiled."""
        with self._sets_lock:
            if self._ending is None:
                size = self.vocabulary.size
                self._ending = EndingTokens(size, -(-size // 32), self.vocabulary.token)
            return self._ending


class Grammar:
    """A grammar, compiled for one tenant. All matchers of the grammar share the lexer's states, so
    only one of them may run at a time, and they all fail if one of them fills the lexer.

    ``lock`` is held during each call of a matcher. llguidance has such a lock too, but a thread
    that waits for llguidance's lock keeps Python's lock.
    """

    def __init__(
        self,
        matchers: Matchers,
        key: bytes,
        tokens: Tokens,
        matcher: LLMatcher,
        text: str,
        least: int | None,
        schema: object | None,
        plain: bool,
        checks: Checks | None,
    ) -> None:
        """``plain``: whether the grammar was compiled without a separate process."""
        self.lock = threading.Lock()
        self.tokens = tokens
        self.least = least
        """An upper bound of the number of tokens of the shortest text, computed from the schema
        without a search (``least_bytes``). None if there is no such bound."""
        self._schema = schema
        self._plain = plain
        self._growth: Growth | None = None
        self._vocabulary = tokens.vocabulary
        self._checks = checks
        self._shortest: Found | None = None
        """The result of the search for the shortest text."""
        self._matchers = matchers
        self.key = key
        self._matcher = matcher
        self.text = text
        self._completions: Completions | None = None

    @property
    def is_schema(self) -> bool:
        """Whether the grammar is a single JSON schema of moderate length."""
        return self._schema is not None

    @property
    def max_growth(self) -> int:
        """An estimate of the maximum number of tokens by which one item extends the completion of a
        text. An item is an element of an array, or a property. The estimate is computed from the
        length of the schema, which takes less time than computing ``growth``."""
        return math.ceil(len(self.text) * self.tokens.sets.per_byte)

    @property
    def growth(self) -> Growth | None:
        """Bounds of the growth of a text's completion, in bytes; None for grammars that are not
        schemas."""
        if self._growth is None and self._schema is not None:
            self._growth = growth(self._schema)
        return self._growth

    @property
    def shortest_tokens(self) -> list[int] | None:
        """The tokens of ``shortest_text``; None if no text was found."""
        return self._found()[1]

    @property
    def shortest_text(self) -> bytes | None:
        """The shortest text that a search finds; None if the search does not find a text that the
        vocabulary can write."""
        return self._found()[0]

    def _found(self) -> Found:
        if self._shortest is None:
            self._shortest = self._matchers.shortest(self, self._vocabulary)
        return self._shortest

    def searched(self) -> bytes | None:
        """The shortest text. None if a search in this process does not find it within
        ``SEARCH_S``."""
        if not self._plain:
            return None
        with self.lock:
            return self._all_completions().shortest(time.thread_time() + SEARCH_S)

    def obeying(self, found: bytes | None) -> bytes | None:
        """Returns the whole text ``found`` if its values pass the checks. If they do not, returns a
        similar text whose values pass, or None if no such text is found."""
        with self.lock:
            return self._all_completions().start().obeying(found)

    def start(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        return self.copy(self._matcher)

    def copy(self, matcher: LLMatcher) -> LLMatcher:
        """A copy of a matcher with its state."""
        with self.lock:
            return matcher.deep_copy()

    def checked_text(self) -> CheckedText | None:
        """An empty text whose values are checked; None if masks enforce the whole schema."""
        if self._checks is None:
            return None
        tokens = self.tokens
        ends = np.frombuffer(tokens.only_end, np.uint32)
        return CheckedText(self._checks, tokens.ending, self._vocabulary.token, ends)

    def completion(self) -> Completion:
        """A ``Completion`` of the empty text. The caller holds ``lock`` around each call of the
        completion."""
        with self.lock:
            return self._all_completions().start()

    def _all_completions(self) -> Completions:
        if self._completions is None:
            self._completions = Completions(self.text, self._checks)
        return self._completions

    def give_up(self) -> None:
        """Removes the grammar from the cache after a matcher failed, because the shared lexer may
        be full. The next request compiles the grammar again."""
        self._matchers.drop(self.key, self)


class Matchers:
    """Caches of the most recently used grammars and tokenizers. Thread-safe."""

    def __init__(
        self, processes: Processes | None = None, meter: CompileMeter | None = None
    ) -> None:
        """Before the worker compiles a new grammar that may be expensive, ``processes`` check the
        grammar. ``meter`` measures the time of compiling."""
        self.processes = processes if processes is not None else Processes(Bounds())
        self._meter = meter if meter is not None else CompileMeter()
        self._compiled: Shared[Grammar] = Shared(2 * bounds.WALL_S)
        self._searched: Shared[Found] = Shared(2 * bounds.WALL_S)
        self._grammars: Kept[bytes, Grammar] = Kept(KEPT_GRAMMARS, KEPT_GRAMMARS)
        self._tokens_lock = threading.Lock()
        self._tokens: OrderedDict[object, Tokens] = OrderedDict()

    def get(
        self,
        vocabulary: Vocabulary,
        grammar: str,
        constraint: str = "lark",
        weakened: Weakened | None = None,
        unblamed: Collection[str] = (),
    ) -> Grammar:
        """The tenant's compiled form of an ``LLMatcher.grammar_from_*`` text. Raises RefusedGrammar
        if the grammar is not valid or exceeds the bounds.

        ``constraint``: the label of the compilation in the metrics. ``weakened``: the schema
        against which values are checked, because masks do not enforce all of it. ``unblamed``: see
        ``Processes.check``.
        """
        name, tenant = _name_of(vocabulary), tenant_of_thread()
        checked = "" if weakened is None else weakened.schema
        key = hashlib.sha256(f"{tenant}\n{name}\n{grammar}\n{checked}".encode()).digest()
        found = self._grammars.get(key)
        if found is not None:
            self._meter.hit(constraint)
            return found

        def make() -> Grammar:
            found = self._grammars.get(key)
            if found is not None:
                return found
            with self._meter.measured(constraint):
                return self._make(vocabulary, key, grammar, weakened, unblamed)

        return self._compiled.get(key, make)

    def _make(
        self,
        vocabulary: Vocabulary,
        key: bytes,
        grammar: str,
        weakened: Weakened | None,
        unblamed: Collection[str],
    ) -> Grammar:
        tokens = self._tokens_of(vocabulary)
        schema = _schema_of(grammar)
        # This bound is not used for a relaxed schema, because its shortest value may fail the
        # checks.
        least = None if schema is None or weakened is not None else least_bytes(schema)
        plain = schema is not None and is_plain(grammar, schema)
        if plain:
            matcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=plain_limits())
            plain = not step_error(matcher)  # The separate process will name the faulty part.
        if not plain:
            self.processes.check(grammar, unblamed)
            matcher = LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                raise RefusedGrammar(reason(matcher.get_error()))
        if schema is not None:
            _ = tokens.sets  # Computes the sets before a text begins.
        checks = None if weakened is None else self._checks_of(weakened)
        made = Grammar(self, key, tokens, matcher, grammar, least, schema, plain, checks)
        self._grammars.add(tenant_of_thread(), key, made)
        return made

    def _checks_of(self, weakened: Weakened) -> Checks:
        """Raises RefusedGrammar if the patterns of the schema exceed the bounds of compiling."""
        from .checking.values import Values  # Importing jsonschema takes 0.2 s.

        values = Values(weakened.schema)
        self.processes.check(values.texts.grammar)
        values.texts.prepare()
        return Checks(Obligations(values, weakened.places))

    def shortest(self, grammar: Grammar, vocabulary: Vocabulary) -> Found:
        """The shortest text of a compiled grammar, and its tokens; both are None if a search does
        not find a text that the vocabulary can write.

        Simultaneous requests share one search. A request that waits for the search frees its
        thread's slot (``pool.waiting``).
        """
        return self._searched.get(grammar.key, lambda: self._search(grammar, vocabulary))

    def _search(self, grammar: Grammar, vocabulary: Vocabulary) -> Found:
        try:
            found = grammar.searched()
            if found is None:
                found = grammar.obeying(self.processes.shortest(grammar.text))
            return found, None if found is None else vocabulary.tokenize(found)
        except (RefusedGrammar, ControllerError):
            return None, None

    def drop(self, key: bytes, grammar: Grammar) -> None:
        """Removes a grammar from the cache."""
        self._grammars.drop(key, grammar)

    def close(self) -> None:
        """Ends the processes."""
        self.processes.close()

    def _tokens_of(self, vocabulary: Vocabulary) -> Tokens:
        name = _name_of(vocabulary)
        with self._tokens_lock:
            tokens = self._tokens.get(name)
            if tokens is None:
                tokens = self._tokens[name] = Tokens(vocabulary)
                if len(self._tokens) > KEPT_TOKENIZERS:
                    self._tokens.popitem(last=False)
            self._tokens.move_to_end(name)
            return tokens


def _name_of(vocabulary: Vocabulary) -> object:
    return (vocabulary.fingerprint, vocabulary.size, vocabulary.eos_ids)


def _schema_of(grammar: str) -> object | None:
    """The schema of an ``LLMatcher.grammar_from_json_schema`` text. None if the schema is very
    long, and for other grammars."""
    if len(grammar) > MAX_TEXT:
        return None
    try:
        [only] = json.loads(grammar)["grammars"]
    except (ValueError, RecursionError):
        return None
    schema: object | None = only.get("json_schema")
    return schema
