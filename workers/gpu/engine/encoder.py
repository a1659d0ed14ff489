"""The engine of a model that computes vectors of texts and does not generate text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ....protocol.errors import Code, RequestError
from ....protocol.messages import FinishReason, ForwardPath
from ..model.loader import LoadedModel
from .engine import Engine
from .pages import PageLog
from .sequence import TokenOutput

T = TypeVar("T")


class EncoderEngine(Engine):
    """The engine of a model without a KV cache. ``add`` and ``score`` refuse all requests, so steps
    never have work.

    ``serving.embeddings`` computes the vectors.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        # The constructor of Engine would make a KV cache.
        self.loaded = loaded
        self.mask_words = -(-loaded.vocab_size // 32)
        self.max_length = loaded.context_length
        self.pages = PageLog(loaded.name, 1)

    def add(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RequestError."""
        self._refuse("generate")

    def score(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RequestError."""
        self._refuse("score tokens")

    def healed(self, *_: Any) -> NoReturn:
        """Raises RequestError."""
        self._refuse("generate")

    def abort(self, request: int, reason: FinishReason = "cancelled") -> list[TokenOutput]:
        """Does nothing, because the engine has no sequences."""
        return []

    def run(self, work: Callable[[], T]) -> T:
        """Calls ``work``, which uses the model, and returns its result."""
        return work()

    def _refuse(self, what: str) -> NoReturn:
        raise RequestError(
            Code.UNSUPPORTED,
            f"the model {self.loaded.name!r} is an encoder and does not {what}; use it for "
            "embeddings",
            path="$.model",
        )

    @property
    def has_work(self) -> bool:
        """Always False, because an encoder does not run steps."""
        return False

    @property
    def has_requests(self) -> bool:
        """Always False, because an encoder does not have sequences."""
        return False

    @property
    def path(self) -> ForwardPath:
        """Reports that transformers' own attention is used."""
        return ForwardPath(attention="transformers' own", why_not_exact="texts are padded")

    def stats(self) -> dict[str, float]:
        """Empty, because an encoder has no gauges."""
        return {}

    def metrics(self) -> dict[str, Any]:
        """Empty, because an encoder has no metrics."""
        return {}
