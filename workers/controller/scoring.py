"""Checks of the texts that a program scores (``Action.SCORE``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import fsum
from typing import Any

from ...protocol.errors import Code, ControllerError
from ...protocol.sampling import MAX_SCORED_TEXTS, MAX_SCORED_TOKENS, Scores


def texts_of(
    candidates: object, size: int, tokenize: Callable[[str | bytes], list[int]]
) -> list[list[int]]:
    """The tokens of each candidate: a text, or a list of token ids of a vocabulary of ``size``
    tokens. Raises ControllerError if a candidate is not valid, or if there are too many candidates
    or tokens."""
    if isinstance(candidates, str | bytes) or not isinstance(candidates, Iterable):
        raise _wrong(f"{candidates!r}; expected a list of texts")
    texts: list[Any] = list(candidates)
    if len(texts) <= MAX_SCORED_TEXTS:
        texts = [tokenize(each) if isinstance(each, str | bytes) else each for each in texts]
    return checked_texts(texts, size)


def checked_texts(texts: Sequence[Any], size: int) -> list[list[int]]:
    """Checks lists of token ids, and returns them. Raises ControllerError for the first text that
    is not valid, or if there are too many texts or tokens."""
    if not 0 < len(texts) <= MAX_SCORED_TEXTS:
        raise _wrong(f"{len(texts)} texts; expected 1 to {MAX_SCORED_TEXTS}")
    total = 0
    for text in texts:
        if not isinstance(text, list) or not text:
            raise _wrong(f"{text!r}; expected a text that is not empty, or a list of token ids")
        for token in text:
            if not isinstance(token, int) or not 0 <= token < size:
                raise _wrong(f"token {token!r}; token ids of this model are 0 to {size - 1}")
        total += len(text)
    if total > MAX_SCORED_TOKENS:
        raise _wrong(f"{total} tokens in all; at most {MAX_SCORED_TOKENS} are allowed at once")
    return list(texts)


def of_texts(scores: Scores, per_token: bool) -> list[Any]:
    """Returns the result of ``ctx.score``: the log-probability of each text. If ``per_token`` is
    true, returns for each text a list of the log-probabilities of its tokens."""
    return scores if per_token else [fsum(text) for text in scores]


def _wrong(what: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, f"score(candidates) with {what}")
