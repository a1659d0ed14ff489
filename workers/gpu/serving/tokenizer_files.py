"""Sends a model's tokenizer to clients: ``TOKENIZER`` and its answer."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ....protocol.bodies import Encoding, encode_body
from ....protocol.errors import Code, RequestError
from ....protocol.header import Flag, encode_header
from ....protocol.messages import TokenizerFiles
from ..model.loader import LoadedModel
from .streams import Frames, Stream

KEPT = 2
"""Maximum number of encoded tokenizers in memory; each takes up to about 20 MB."""


class _Answer(msgspec.Struct):
    """The body of a ``MSG`` whose tokenizer is already encoded."""

    stream_id: int
    tokenizer: msgspec.Raw


class TokenizerAnswers:
    """Answers requests for tokenizers. The ``KEPT`` most recently requested tokenizers stay in
    memory in encoded form."""

    def __init__(self) -> None:
        self._encoded: OrderedDict[tuple[str, str, Encoding], msgspec.Raw] = OrderedDict()

    def frames(self, stream: Stream, loaded: LoadedModel) -> Frames:
        """The answer to a request. Raises RequestError if the model's tokenizer cannot be sent."""
        key = (loaded.name, loaded.fingerprint, stream.encoding)
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = msgspec.Raw(encode_body(tokenizer_files(loaded), stream.encoding))
            self._encoded[key] = encoded
            if len(self._encoded) > KEPT:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(key)
        head = encode_header(stream.request, stream.session, Flag.FINAL)
        body = encode_body(_Answer(stream.stream_id, encoded), stream.encoding)
        return [b"MSG", head, body]


def tokenizer_files(loaded: LoadedModel) -> TokenizerFiles:
    """A model's tokenizer, chat template and special tokens.

    Raises RequestError if the model has no tokenizer, or if the tokenizers library cannot represent
    the tokenizer.
    """
    tokenizer, json = loaded.tokenizer, loaded.tokenizer_json
    if json is None:
        if tokenizer is None:
            fault = "has no tokenizer; send its prompts as token ids"
        else:
            kind = type(tokenizer).__name__
            fault = (
                f"has a {kind}, which the tokenizers library cannot represent; send prompts "
                "as text, which the worker tokenizes"
            )
        raise RequestError(Code.UNSUPPORTED, f"the model {loaded.name} {fault}", path="$.model")
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        # If the templates have names, "default" is the template for chats without tools or
        # documents.
        template = template.get("default", "")
    special = getattr(tokenizer, "special_tokens_map", {})
    return TokenizerFiles(
        fingerprint=loaded.fingerprint,
        json=json.decode(),
        chat_template=template,
        special_tokens={k: str(v) for k, v in special.items() if not isinstance(v, list | tuple)},
    )
