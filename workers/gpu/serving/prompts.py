"""A request's texts and token ids: buffers, prompt and what is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ....protocol.bodies import unpack_tokens
from ....protocol.buffers import buffer_part
from ....protocol.errors import Code, RequestError
from ....protocol.messages import Generate, Score
from ....protocol.text_bounds import TextBound, TokenSize
from ..model.loader import LoadedModel

Part = list[int] | str


class Tokens(NamedTuple):
    """The token ids of a request."""

    prompt: list[int]
    scored: list[int]


class RequestTexts(NamedTuple):
    """The texts and token ids of a request. ``prompt``: its parts, in order."""

    prompt: list[Part]
    scored: Part
    tokenizer: Any
    bound: TextBound

    def check(self) -> int:
        """The bytes of all texts. Raises RequestError where the model has no tokenizer for them,
        or where they are too long for it."""
        texts = [part for part in self.prompt if isinstance(part, str)]
        prompt_bytes = self.bound.check(texts)
        if isinstance(self.scored, str):
            scored_bytes = self.bound.check([self.scored], "$.scored")
            texts.append(self.scored)
        else:
            scored_bytes = 0
        if texts and self.tokenizer is None:
            raise RequestError(
                Code.UNSUPPORTED,
                "this model has no tokenizer; send token ids instead of text",
                path="$.prompt",
            )
        return prompt_bytes + scored_bytes

    def tokens(self, wanted: Callable[[], bool] = lambda: True) -> Tokens:
        """Tokenizes the texts; callable on another thread. It ends early, with fewer tokens, once
        ``wanted`` is false. Text gets the tokenizer's own beginning (a BOS) only at the start.

        Raises RequestError where the texts have too many tokens, or cannot be encoded.
        """
        prompt: list[int] = []
        for i, part in enumerate(self.prompt):
            if len(prompt) > self.bound.max_tokens or not wanted():
                # The engine refuses it by this number; further parts cannot shorten it.
                break
            prompt += self._tokenized(part, "$.prompt", wanted, start=i == 0)
        scored = self._tokenized(self.scored, "$.scored", wanted, start=False)
        return Tokens(prompt, scored)

    def _tokenized(
        self, part: Part, path: str, wanted: Callable[[], bool], *, start: bool
    ) -> list[int]:
        if not isinstance(part, str):
            return part
        self.bound.check_count(part, self._count, path, wanted)
        return tokenize(part, self.tokenizer, start=start) if wanted() else []

    def _count(self, segment: str) -> int:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return len(tokenize(segment, self.tokenizer, start=False))
        # A batch does not keep the interpreter's lock.
        return len(backend.encode_batch_fast([segment], add_special_tokens=False)[0])


def request_texts(
    message: Generate | Score, attachments: Sequence[bytes], loaded: LoadedModel, max_tokens: int
) -> RequestTexts:
    """The texts and token ids of a request, for a model that takes ``max_tokens`` tokens.

    The last attachments are its buffers, as many as it names; the first one is the prompt itself
    where the body has none. Raises RequestError where token ids alone are too many, before they
    are read.
    """
    own = len(attachments) - len(message.buffers)
    if own < 0:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the prompt names {len(message.buffers)} buffers and came with {len(attachments)}",
            path="$.buffers",
        )
    kept, body = attachments[own:], attachments[0] if own and message.prompt is None else b""
    num_ids = sum(len(k) // 4 for k in kept if k[:1] == b"t") + len(body) // 4
    if num_ids > max_tokens:
        raise RequestError(
            Code.PROMPT_TOO_LONG,
            f"the request needs {num_ids + 1} tokens, at least one generated token included; "
            f"{loaded.name} takes at most {max_tokens}",
            path="$.prompt",
        )
    bound = TextBound(loaded.name, max_tokens, loaded.token_size or TokenSize(1))
    if loaded.tokenizer is not None:
        # Before they are decoded.
        bound.check_bytes(sum(len(k) - 1 for k in kept if k[:1] == b"s"))
    parts: list[Part] = [buffer_part(one) for one in kept]
    if message.prompt is not None:
        parts.append(message.prompt)
    elif own:
        parts.append(unpack_tokens(body))
    scored = message.scored if isinstance(message, Score) else []
    return RequestTexts(parts, scored, loaded.tokenizer, bound)


def tokenize(text: str, tokenizer: Any, *, start: bool) -> list[int]:
    """The ids of a text; ``start``: it begins a sequence, so special beginnings are added.

    Raises RequestError where the tokenizer cannot encode the text.
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=start)
    except Exception as error:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the model's tokenizer cannot encode this text ({error}); send token ids instead",
            path="$.prompt",
        ) from error
    return ids
