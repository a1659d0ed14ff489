"""The outcome of a request, and the difference of two outcomes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenbus.clients import GeneratedSequence

TOLERANCE = 1e-4
"""Maximum difference of log-probabilities whose last bits depend on the shape of the batch."""


@dataclass
class Outcome:
    """A client's result at the end of a request."""

    parts: dict[str, Any] = field(default_factory=dict)
    """The fields that must be equal."""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    """The fields that must be equal, up to ``TOLERANCE`` if an outcome is not exact."""
    error: str | None = None
    exact: bool = False
    """Whether the receipts of all sequences report that their results are exact. Exact outcomes
    must have equal bits."""

    def difference(self, other: Outcome) -> str | None:
        """Describes the difference of two outcomes: their errors if one has an error, else the
        first difference of each part, else the first different log-probability. None if they are
        equal and without errors."""
        if self.error is not None or other.error is not None:
            return f"errors: {self.error!r}, and {other.error!r}"
        different = []
        for name in sorted(self.parts.keys() | other.parts.keys()):
            ours, theirs = self.parts.get(name), other.parts.get(name)
            if ours != theirs:
                different.append(f"{name}: {_first_difference(ours, theirs)}")
        if different:
            return "; ".join(different)
        tolerance = 0.0 if self.exact and other.exact else TOLERANCE
        for name, numbers in self.logprobs.items():
            for i, (a, b) in enumerate(zip(numbers, other.logprobs[name], strict=True)):
                if not _close(a, b, tolerance):
                    return f"{name}, number {i}: {a!r}, and {b!r}"
        return None

    @property
    def size(self) -> int:
        """The number of tokens of all sequences; 0 for a stream of server-sent events."""
        return sum(len(part) for name, part in self.parts.items() if name.endswith("tokens"))


def outcome_of(sequences: Sequence[GeneratedSequence]) -> Outcome:
    """The outcome of a stream of the bus."""
    made = Outcome(exact=all(one.exact for one in sequences))
    for one in sequences:
        name = f"sequence {one.seq} of {one.parent}: "
        # The counts of the prompt are left out, because cached tokens depend on earlier requests.
        for part in ("tokens", "text", "logs", "messages", "storage", "finish_reason", "error",
                     "code", "stop", "constraint"):  # fmt: skip
            made.parts[name + part] = getattr(one, part)
        made.logprobs[name + "logprobs"] = one.logprobs
        made.logprobs[name + "top_logprobs"] = [_likely(top) for top in one.top_logprobs]
    return made


def outcome_of_events(lines: Iterable[str]) -> Outcome:
    """The outcome of a stream of server-sent events, without its ids and times.

    Chunks of a choice without log-probabilities are joined, because the gateway sends texts that
    arrive together in one chunk. Chunks with log-probabilities must be equal one by one.
    """
    made = Outcome()
    choices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    rest: list[Any] = []
    likely: list[Any] = []
    receipts: list[bool] = []
    for line in lines:
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            rest.append(line)
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            made.error = json.dumps(chunk["error"])
        for choice in chunk.pop("choices", []):
            if choice["finish_reason"] is not None:
                receipts.append(choice.get("tokenbus", {}).get("exact", False))
            likely += _numbers(choice.get("logprobs"))
            _join(choices[choice["index"]], choice)
        chunk.pop("id", None)
        chunk.pop("created", None)
        if (usage := chunk.get("usage")) is not None:
            usage.pop("prompt_tokens_details", None)
        if chunk not in rest:
            rest.append(chunk)
    made.parts = {f"choice {index}": pieces for index, pieces in sorted(choices.items())}
    made.parts["rest"] = rest
    made.logprobs["logprobs"] = likely
    made.exact = bool(receipts) and all(receipts)
    return made


def _likely(top: dict[int, float]) -> list[float]:
    """The log-probabilities without the tokens, because equally likely tokens may be in any
    order."""
    return sorted(top.values())


def _numbers(value: Any) -> list[float]:
    """Replaces the fractional numbers in a JSON value by 0.0; returns the replaced numbers."""
    found: list[float] = []
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value or []))
    for key, inner in pairs:
        if isinstance(inner, float):
            found.append(inner)
            value[key] = 0.0
        elif isinstance(inner, dict | list):
            found += _numbers(inner)
    return found


def _join(pieces: list[dict[str, Any]], choice: dict[str, Any]) -> None:
    """Joins a choice of a chunk to the earlier pieces.

    The fields of the last chunk (finish reason, receipt) may arrive together with text or after it.
    """
    text, before = _only_text(choice), _only_text(pieces[-1]) if pieces else None
    if text is None or before is None:
        pieces.append(choice)
        return
    last = pieces[-1]
    given = {name: value for name, value in choice.items() if value is not None}
    pieces[-1] = {**last, **given}
    if "delta" in choice:
        pieces[-1]["delta"] = {**last["delta"], **choice["delta"], "content": before + text}
    else:
        pieces[-1]["text"] = before + text


def _only_text(choice: dict[str, Any]) -> str | None:
    """The text of a choice of a chunk; None if it has log-probabilities."""
    text = choice.get("delta", choice).get("content" if "delta" in choice else "text")
    return None if choice.get("logprobs") else text or ""


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_close(one, other, tolerance) for one, other in pairs)
    return bool(abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b)))


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, str | list) and isinstance(theirs, str | list):
        pairs = zip(ours, theirs, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        return (
            f"from {at} on: {ours[at : at + 40]!r}, and {theirs[at : at + 40]!r} "
            f"({len(ours)} and {len(theirs)} long)"
        )
    return f"{ours!r}, and {theirs!r}"
