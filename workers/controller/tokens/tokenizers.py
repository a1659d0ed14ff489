"""The vocabularies of this worker: asked for over the bus, built once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ....protocol.worker_messages import VocabularyName
from .vocabulary import TokenizerVocabulary

Waiting = Callable[[TokenizerVocabulary | None, str], None]
"""Called with the vocabulary, or with None and why there is none."""

AGAIN_S = 2.0
"""How long a request waits for a tokenizer before the next one asks for it again, in seconds."""

_Key = tuple[str, int, tuple[int, ...]]


class Vocabularies:
    """By tokenizer, size and end-of-sequence tokens. ``ask`` sends for a tokenizer's JSON."""

    def __init__(self, ask: Callable[[str, int], None]) -> None:
        """``ask(fingerprint, gpu worker)``."""
        self._ask = ask
        self._lock = threading.Lock()
        self._built: dict[_Key, TokenizerVocabulary] = {}
        self._asked: dict[str, float] = {}
        """When each tokenizer was asked for last."""
        self._waiting: dict[str, list[tuple[_Key, Waiting]]] = {}

    def want(self, name: VocabularyName, gpu: int, then: Waiting) -> None:
        """Calls ``then``, at once or when the GPU worker ``gpu`` has sent the tokenizer."""
        key = (name.fingerprint, name.size, tuple(name.eos))
        with self._lock:
            built = self._built.get(key)
            if built is None:
                self._waiting.setdefault(name.fingerprint, []).append((key, then))
                now = time.monotonic()
                asked = now - self._asked.get(name.fingerprint, -AGAIN_S) < AGAIN_S
                if not asked:
                    self._asked[name.fingerprint] = now
        if built is not None:
            then(built, "")
        elif not asked:
            self._ask(name.fingerprint, gpu)

    def arrived(self, fingerprint: str, json: bytes | None, error: str) -> None:
        """A tokenizer has come, or why it cannot. Takes its time: not for the bus thread."""
        with self._lock:
            waiting = self._waiting.pop(fingerprint, [])
            self._asked.pop(fingerprint, None)
        for key, then in waiting:
            vocabulary, failure = self._built.get(key), error
            if vocabulary is None and json is not None:
                try:
                    vocabulary = TokenizerVocabulary.from_json(
                        json.decode(), size=key[1], eos=key[2], fingerprint=fingerprint
                    )
                    with self._lock:
                        self._built[key] = vocabulary
                except Exception as failed:
                    failure = f"the model's tokenizer cannot be used: {failed}"
            then(vocabulary, failure)
