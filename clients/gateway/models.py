"""Requests the descriptions and tokenizers of the served models from the bus."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tokenizers import Tokenizer

from ...protocol.errors import Code, RequestError, ServiceError, TokenbusError
from ...protocol.messages import ModelInfo, TokenizerFiles
from ...protocol.model_names import Aliases
from ...protocol.text_bounds import TextBound, TokenSize, size_of_tokenizer
from .token_bytes import bytes_of, decoders
from .tokenization import Tokenization

FRESH_S = 10.0
"""If a cached description of a model is older than this number of seconds, it is requested
again."""
SHORT_TEXT = 4096
"""Maximum length of a text, in characters or tokens, that is encoded or decoded in the event
loop."""
MAX_NEW_TEXTS = 256
"""Maximum number of texts of single tokens that are computed in the event loop at once. Each takes
about 20 µs."""
MAX_SHOWN_NAME = 256
"""Maximum number of characters of a requested model name that an answer repeats. If the requested
name is longer, the answer has the name under which the model is served."""
MAX_REASON = 500
"""Maximum number of characters of the error message for a tokenizer that cannot be read."""
LOAD_S = 600.0
"""Maximum time to load a model on demand, in seconds."""


@dataclass
class ServedModel:
    """A model and its tokenizer."""

    info: ModelInfo
    files: TokenizerFiles
    tokenizer: Tokenizer
    tokenization: Tokenization = field(default_factory=Tokenization)
    """Runs the tokenization of long texts on threads. All models of the gateway share this
    object."""
    token_size: TokenSize = TokenSize(1_000_000)  # noqa: RUF009
    """The maximum amount of text that one token can represent."""
    _texts: dict[int, str] = field(default_factory=dict)
    """The texts that ``text_of`` has computed, by token id."""

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.info.name

    def name_for(self, asked: str | None) -> str:
        """The model's name in an answer. This is the requested name ``asked``, which may be an
        alias: if an answer has another name, Claude Code drops the thinking in the answer."""
        return asked if asked and len(asked) <= MAX_SHOWN_NAME else self.name

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are not text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def special_names(self) -> dict[int, str]:
        """The special tokens by their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``. ``special``: whether special tokens are added, such as BOS."""
        return self.tokenizer.encode(text, add_special_tokens=special).ids

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``. A text of more than ``SHORT_TEXT`` characters is encoded on a
        thread. Raises RequestError if such a text is too long for the model. Shorter texts are
        encoded one after another, and the event loop serves other requests between them."""
        if len(text) <= SHORT_TEXT:
            return await self.tokenization.run_short(lambda: self.encode(text, special=special))
        bound = self._bound
        bound.check([text])
        return await self.tokenization.run(
            len(text), lambda: self._encode_long(text, special, bound)
        )

    def check_chars(self, count: int) -> None:
        """Raises RequestError if a text of ``count`` characters is too long for the model, as
        ``tokenize`` does."""
        if count > SHORT_TEXT:
            # Each character has at least one byte.
            self._bound.check_bytes(count)

    @property
    def _bound(self) -> TextBound:
        return TextBound(self.name, self.info.context_length, self.token_size)

    def _encode_long(self, text: str, special: bool, bound: TextBound) -> list[int]:
        bound.check_count(text, self._count)
        # ``encode`` holds the interpreter's lock, and so blocks the event loop. ``encode_batch``
        # does not hold the lock.
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return batch[0].ids

    def _count(self, segment: str) -> int:
        return len(self.tokenizer.encode_batch_fast([segment], add_special_tokens=False)[0])

    def check_tokens(self, ids: list[int], path: str = "$.tokens") -> None:
        """Raises RequestError if ``ids`` has more tokens than the model accepts."""
        limit = self.info.context_length
        if len(ids) > limit:
            raise RequestError(
                Code.PROMPT_TOO_LONG,
                f"the list has {len(ids)} tokens; {self.name} accepts at most {limit}",
                path=path,
            )

    async def detokenize(self, ids: list[int]) -> str:
        """The text of token ids. A long list is decoded on a thread, and the event loop serves
        other requests during this time. Short lists are decoded one after another, as in
        ``tokenize``."""
        if len(ids) <= SHORT_TEXT:
            return await self.tokenization.run_short(lambda: self.decode(ids))
        # ``decode_batch`` does not hold the interpreter's lock; ``decode`` does.
        texts = await self.tokenization.run(
            len(ids), lambda: self.tokenizer.decode_batch([ids], skip_special_tokens=False)
        )
        return texts[0]

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special)

    def text_of(self, token: int) -> str:
        """The text of a single token. An incomplete character becomes U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._text(token)
        return text

    async def texts_of(self, tokens: list[int]) -> list[str]:
        """The texts of single tokens, as ``text_of`` returns them. Many new texts are computed on a
        thread."""
        new = set(tokens) - self._texts.keys()
        if len(new) > MAX_NEW_TEXTS:
            await self.tokenization.run(len(new), lambda: [self.text_of(one) for one in new])
        return [self.text_of(token) for token in tokens]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        piece = self.tokenizer.id_to_token(token) or ""
        if token in self.special_ids:
            return piece.encode()
        return bytes_of(piece, self.text_of(token), self._decoders)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        return decoders(self.files.json)

    def _text(self, token: int) -> str:
        if token in self.special_ids:
            return self.tokenizer.id_to_token(token) or ""
        # Some decoders drop a space at the beginning of a text. So the token is decoded together
        # with a token before it.
        return self._after_anchor(token)

    def _after_anchor(self, token: int) -> str:
        anchor = self._anchor
        if anchor is None:
            return self.tokenizer.decode([token], skip_special_tokens=False)
        before = self.tokenizer.decode([anchor], skip_special_tokens=False)
        both = self.tokenizer.decode([anchor, token], skip_special_tokens=False)
        return both.removeprefix(before)

    @cached_property
    def _anchor(self) -> int | None:
        ids = self.tokenizer.encode("a", add_special_tokens=False).ids
        return ids[-1] if ids else None


@contextmanager
def _naming(asked: str, model: str) -> Iterator[None]:
    """Adds the alias ``asked`` to the error for an unknown ``model``."""
    try:
        yield
    except TokenbusError as error:
        if asked != model and error.code == Code.UNKNOWN_MODEL:
            error.message = f"{asked!r} stands for the model {model!r}: {error.message}"
        raise


class ModelSource(Protocol):
    """The methods of ``AsyncClient`` that ``ModelTable`` calls."""

    async def model_info(self, model: str = "", *, timeout_s: float = ...) -> ModelInfo:
        """The properties of a model."""

    async def tokenizer(self, model: str = "", *, timeout_s: float = ...) -> TokenizerFiles:
        """The tokenizer of a model."""


class ModelTable:
    """Requests descriptions and tokenizers of models from the bus, and caches them. Tokenizers are
    cached by the model's fingerprint."""

    def __init__(self, client: ModelSource, aliases: Aliases) -> None:
        self._client = client
        self.aliases = aliases
        self._models: dict[str, tuple[float, ServedModel]] = {}
        self._tokenizers: dict[str, tuple[TokenizerFiles, Tokenizer, TokenSize]] = {}
        self.tokenization = Tokenization()
        self._locks: dict[str, asyncio.Lock] = {}

    async def info(self, name: str) -> ModelInfo:
        """The description of a model, even if the gateway cannot read its tokenizer.

        Raises TokenbusError: ``unknown_model`` if no model is served under this name.
        """
        asked, name = name, self.aliases.model(name)
        kept = self._models.get(name)
        if kept is not None and time.monotonic() - kept[0] < FRESH_S:
            return kept[1].info
        with _naming(asked, name):
            return await self._client.model_info(name, timeout_s=LOAD_S)

    async def get(self, name: str = "") -> ServedModel:
        """The model with this name or alias, or the default model if ``name`` is empty. A model
        that is served on demand is loaded first.

        Raises TokenbusError: ``unknown_model`` if no model is served under this name.
        """
        asked, name = name, self.aliases.model(name)
        kept = self._models.get(name)
        if kept is not None and time.monotonic() - kept[0] < FRESH_S:
            return kept[1]
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                kept = self._models.get(name)
                if kept is not None and time.monotonic() - kept[0] < FRESH_S:
                    return kept[1]
                with _naming(asked, name):
                    return await self._ask(name, kept[1] if kept is not None else None)
        finally:
            if not lock.locked():
                self._locks.pop(name, None)

    async def _ask(self, name: str, before: ServedModel | None) -> ServedModel:
        info = await self._client.model_info(name, timeout_s=LOAD_S)
        if before is not None and before.info == info:
            model = before
        else:
            files, tokenizer, size = await self._tokenizer(name, info.fingerprint)
            model = ServedModel(info, files, tokenizer, self.tokenization, size)
        self._models[name] = (time.monotonic(), model)
        return model

    async def _tokenizer(
        self, name: str, fingerprint: str
    ) -> tuple[TokenizerFiles, Tokenizer, TokenSize]:
        kept = self._tokenizers.get(fingerprint)
        if kept is None:
            files = await self._client.tokenizer(name)
            # A vocabulary of 130,000 tokens takes a second to read, so a thread reads it.
            try:
                tokenizer = await asyncio.to_thread(Tokenizer.from_str, files.json)
                size = await asyncio.to_thread(lambda: size_of_tokenizer(json.loads(files.json)))
            except Exception as error:  # The package raises plain Exception.
                what = f"the tokenizer of the model {name!r} cannot be read: {error}"
                raise ServiceError(Code.MODEL_LOAD_FAILED, what[:MAX_REASON]) from None
            kept = self._tokenizers[fingerprint] = files, tokenizer, size
        return kept
