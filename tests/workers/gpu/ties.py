"""Ties between tokens: two kernels round differently, and the last bits of a logit decide.

Two runs of a request agree up to their first tie, or completely if both are exact. Two tokens are a
tie if the request's sampling chooses each of them when its logit is increased by ``shapes.TIE``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample

from . import shapes


class Entry(Protocol):
    """An output of the engine, or an entry of a stream."""

    @property
    def token(self) -> int | None: ...
    @property
    def pos(self) -> int: ...
    @property
    def backtrack(self) -> int: ...


@dataclass(frozen=True)
class Asked:
    """A request: the model, the ids of the prompt, and the sampling parameters."""

    model: Any
    prompt: Sequence[int]
    sampling: Sampling

    def tied(self, before: Sequence[int], seq: int, a: int, b: int) -> bool:
        """Whether rounding may decide between the tokens ``a`` and ``b`` that follow ``before``."""
        logits = shapes.logits_after(self.model, [*self.prompt, *before])
        words = np.zeros(-(-len(logits) // 32), dtype=np.uint32)
        for token in (a, b):
            words[token // 32] |= np.uint32(1 << token % 32)
        # The mask of these two tokens replaces the mask of the run. Truncation has left both
        # tokens.
        sampling = msgspec.structs.replace(self.sampling, top_k=0, top_p=1.0, min_p=0.0)
        row = Row(sampling, sampling.seed or 0, seq, len(before), self.prompt, before, words)
        boost = shapes.TIE * max(1.0, sampling.temperature)
        found = []
        for token in (a, b):
            raised = logits.clone()
            raised[token] += boost
            found += sample(raised.unsqueeze(0), [0], [row]).tokens
        if found == [a, b]:
            shapes.ties.append(f"{a} or {b} after {len(self.prompt)} + {len(before)} tokens")
        return found == [a, b]


class RecordingEngine(Engine):
    """An engine that stores its requests in ``asked``."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, draft_model: LoadedModel | None = None
    ) -> None:
        super().__init__(loaded, config, draft_model)
        self.asked: dict[int, Asked] = {}
        self._loaded_model = loaded.model

    def add(self, request: int, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Any:
        self.asked[request] = Asked(self._loaded_model, list(prompt), sampling)
        return super().add(request, prompt, sampling, **options)


@dataclass
class Outputs:
    """The outputs of each sequence of an engine, and the requests."""

    streams: dict[tuple[int, int], list[TokenOutput]] = field(default_factory=dict)
    asked: Mapping[int, Asked] = field(default_factory=dict)
    arithmetic: str = ""
    """The arithmetic of an exact engine; empty if the engine is not exact."""

    @classmethod
    def of(cls, engine: RecordingEngine, outputs: Sequence[TokenOutput]) -> Outputs:
        """The outputs of an engine, by sequence."""
        found = cls(asked=engine.asked, arithmetic=engine.path.arithmetic)
        for output in outputs:
            found.streams.setdefault((output.request, output.seq), []).append(output)
        return found

    def tolerance(self, other: Outputs) -> float:
        """The largest allowed difference of log-probabilities. It is 0 if both engines are exact
        with the same arithmetic; a tie is then an error."""
        return 0.0 if self.arithmetic and self.arithmetic == other.arithmetic else 1e-4

    def compared(self, key: tuple[int, int], other: Sequence[TokenOutput]) -> int:
        """The number of outputs of a sequence that must equal ``other``: those before a tie, or
        all."""
        own = self.streams[key]
        i = first_difference(own, other)
        if i is None or key[0] not in self.asked:
            return max(len(own), len(other))
        a, b = own[i].token, other[i].token
        parent, pos = own[0].parent, own[0].pos
        begun: list[int] = []
        if parent is not None:
            begun = tokens_of([o for o in self.streams[key[0], parent] if o.pos < pos])
        before = [*begun, *tokens_of(own[:i])]
        if a is None or b is None or not self.asked[key[0]].tied(before, key[1], a, b):
            return max(len(own), len(other))
        return i


def first_difference(one: Sequence[Entry], other: Sequence[Entry]) -> int | None:
    """The index of the first entries with different tokens; None if one is the beginning of the
    other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), None)


def tokens_of(entries: Sequence[Entry]) -> list[int]:
    """The tokens that a client has after these entries."""
    tokens: list[int] = []
    for entry in entries:
        if entry.backtrack:
            del tokens[-entry.backtrack :]
        if entry.token is not None:
            tokens.append(entry.token)
    return tokens
