"""The vocabularies of this worker: asked for over the bus, built once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...protocol.worker_messages import Vocabulary as VocabularyName
from .vocabulary import TokenizerVocabulary

Waiting = Callable[[TokenizerVocabulary | None, str], None]
"""Called with the vocabulary, or with None and why there is none."""

_Key = tuple[str, int, tuple[int, ...]]


class Vocabularies:
    """By tokenizer, size and end-of-sequence tokens. ``ask`` sends for a tokenizer's JSON."""

    def __init__(self, ask: Callable[[str, int], None]) -> None:
        """``ask(fingerprint, gpu worker)``."""
        self._ask = ask
        self._lock = threading.Lock()
        self._built: dict[_Key, TokenizerVocabulary] = {}
        self._waiting: dict[str, list[tuple[_Key, Waiting]]] = {}

    def want(self, name: VocabularyName, gpu: int, then: Waiting) -> None:
        """Calls ``then``, at once or when the GPU worker ``gpu`` has sent the tokenizer."""
        key = (name.fingerprint, name.size, tuple(name.eos))
        with self._lock:
            built = self._built.get(key)
            if built is None:
                self._waiting.setdefault(name.fingerprint, []).append((key, then))
        if built is not None:
            then(built, "")
        else:
            self._ask(name.fingerprint, gpu)

    def arrived(self, fingerprint: str, json: bytes | None, error: str) -> None:
        """A tokenizer has come, or why it cannot. Takes its time: not for the bus thread."""
        with self._lock:
            waiting = self._waiting.pop(fingerprint, [])
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
