"""A request's prompt: buffers, token ids or text, joined and tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...protocol.bodies import unpack_tokens
from ...protocol.buffers import buffer_part
from ...protocol.errors import Code, RequestError
from ...protocol.messages import Generate, Score


def prompt_tokens(
    message: Generate | Score, attachments: Sequence[bytes], tokenizer: Any
) -> list[int]:
    """The token ids of a prompt.

    The last attachments are its buffers, as many as it names; the first one is the prompt itself
    where the body has none. Text gets the tokenizer's own beginning (a BOS) only at the start.
    """
    own = len(attachments) - len(message.buffers)
    if own < 0:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the prompt names {len(message.buffers)} buffers and came with {len(attachments)}",
            path="$.buffers",
        )
    parts: list[list[int] | str] = [buffer_part(kept) for kept in attachments[own:]]
    if message.prompt is not None:
        parts.append(message.prompt)
    elif own:
        parts.append(unpack_tokens(attachments[0]))
    tokens: list[int] = []
    for i, part in enumerate(parts):
        tokens += part if isinstance(part, list) else tokenize(part, tokenizer, start=i == 0)
    return tokens


def tokenize(text: str, tokenizer: Any, *, start: bool) -> list[int]:
    """The ids of a text; ``start``: it begins a sequence, so special beginnings are added.

    Raises RequestError where the model has no tokenizer, or has one that cannot encode the text.
    """
    if tokenizer is None:
        raise RequestError(
            Code.UNSUPPORTED,
            "this model has no tokenizer; send token ids instead of text",
            path="$.prompt",
        )
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=start)
    except Exception as error:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the model's tokenizer cannot encode this text ({error}); send token ids instead",
            path="$.prompt",
        ) from error
    return ids
