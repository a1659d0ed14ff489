"""The texts and token ids of a request: buffers, prompt and scored text."""

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
    """The texts and token ids of a request. ``prompt``: the parts of the prompt, in order."""

    prompt: list[Part]
    scored: Part
    tokenizer: Any
    bound: TextBound

    def check(self) -> int:
        """Returns the size of all texts in bytes. Raises RequestError if the model has no
        tokenizer, or if the texts are too long for the model."""
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
        """Tokenizes the texts; may be called on another thread. ``wanted`` returns whether the
        tokens are still needed. If they are not, this method returns early, with fewer tokens. The
        tokenizer's special first token (BOS) is added only if the prompt begins with a text.

        Raises RequestError if the texts have too many tokens or cannot be encoded.
        """
        prompt: list[int] = []
        for i, part in enumerate(self.prompt):
            if len(prompt) > self.bound.max_tokens or not wanted():
                # The engine will refuse a prompt of this length, or the request has ended. The
                # other parts are not tokenized.
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
        # The text is tokenized as a batch of one, because a call for a batch releases the
        # interpreter's lock, and a call for one text does not.
        return len(backend.encode_batch_fast([segment], add_special_tokens=False)[0])


def request_texts(
    message: Generate | Score, attachments: Sequence[bytes], loaded: LoadedModel, max_tokens: int
) -> RequestTexts:
    """The texts and token ids of a request, for a model with at most ``max_tokens`` tokens.

    The last attachments are the buffers that the request names. If the body does not have a prompt,
    the first attachment is the prompt. Raises RequestError if the attachments do not fit the body,
    or if the prompt is too long. If the token ids alone exceed ``max_tokens``, nothing is decoded.
    """
    own = len(attachments) - len(message.buffers)
    if own < 0:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"the request names {len(message.buffers)} buffers but has {len(attachments)} "
            "attachments",
            path="$.buffers",
        )
    if own and message.prompt is not None:
        raise RequestError(
            Code.BAD_MESSAGE,
            "the request has a prompt and an attachment; expected one of them",
            path="$.prompt",
        )
    kept, body = attachments[own:], attachments[0] if own and message.prompt is None else b""
    num_ids = sum(len(k) // 4 for k in kept if k[:1] == b"t") + len(body) // 4
    if num_ids > max_tokens:
        raise RequestError(
            Code.PROMPT_TOO_LONG,
            f"the request needs at least {num_ids + 1} tokens; "
            f"{loaded.name} takes at most {max_tokens}",
            path="$.prompt",
        )
    bound = TextBound(loaded.name, max_tokens, loaded.token_size or TokenSize(1))
    if loaded.tokenizer is not None:
        # Texts that are too long are refused before the ids are decoded.
        bound.check_bytes(sum(len(k) - 1 for k in kept if k[:1] == b"s"))
    parts: list[Part] = [buffer_part(one) for one in kept]
    if message.prompt is not None:
        parts.append(message.prompt)
    elif own:
        parts.append(unpack_tokens(body))
    scored = message.scored if isinstance(message, Score) else []
    return RequestTexts(parts, scored, loaded.tokenizer, bound)


def tokenize(text: str, tokenizer: Any, *, start: bool) -> list[int]:
    """The token ids of a text. ``start``: whether the text begins the sequence. If so, the
    tokenizer's special first tokens are added.

    Raises RequestError if the tokenizer cannot encode the text.
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
