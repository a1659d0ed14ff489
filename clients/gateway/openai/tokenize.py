"""``POST /tokenize`` and ``/detokenize``, in vLLM's forms."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.sampling import TokenId
from ..bodies.reading import Body, ignored_of, read_body
from ..context import gateway_of
from ..conversation.parts import Conversation
from ..conversation.rendering import prompt_ids
from ..errors import ApiError, invalid_field
from ..json import json_response
from ..tokenization import num_items
from .chat_bodies import ChatTool, TemplateFields, rendering_of
from .messages import Message, to_turns


class TokenizeRequest(Body, kw_only=True):
    """The body of ``POST /tokenize``: a text, or the messages of a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens. Default: true for a text, false for messages."""
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Tokenized(Struct):
    """The answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body, kw_only=True):
    """The body of ``POST /detokenize``."""

    model: str = ""
    tokens: list[TokenId]


class Detokenized(Struct):
    """The answer of ``POST /detokenize``."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    ignored = ignored_of(request)
    body = await read_body(request, TokenizeRequest, ignored)
    gateway = gateway_of(request)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_field(
            "prompt",
            "the body must have 'prompt' or 'messages', but not both",
        )
    if body.prompt is not None:
        _check_text_only(body)
    model = await gateway.models.get(body.model)
    if body.prompt is not None:
        ids = await model.tokenize(body.prompt, special=body.add_special_tokens is not False)
    else:
        messages, tools = body.messages or [], body.tools
        conversation = await model.tokenization.prepare(
            num_items(messages, tools),
            lambda: Conversation(
                to_turns(messages), [tool.function.to_tool() for tool in tools or ()]
            ),
        )
        conversation.rendering = rendering_of(body)
        conversation.rendering.special = bool(body.add_special_tokens)
        ids = await prompt_ids(gateway, model, conversation, ignored)
    pieces = await model.texts_of(ids) if body.return_token_strs else None
    found = Tokenized(len(ids), model.info.context_length, ids, pieces)
    return json_response(found, headers=ignored.headers)


async def detokenize(request: Request) -> Response:
    """The text of token ids, including special tokens."""
    ignored = ignored_of(request)
    body = await read_body(request, DetokenizeRequest, ignored)
    model = await gateway_of(request).models.get(body.model)
    model.check_tokens(body.tokens)
    size = model.info.vocab_size
    wrong = next((i for i, token in enumerate(body.tokens) if token >= size), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"the token id {body.tokens[wrong]} is not in the vocabulary; use ids below {size}",
            code="token_out_of_range",
            param=f"tokens[{wrong}]",
        )
    found = Detokenized(await model.detokenize(body.tokens))
    return json_response(found, headers=ignored.headers)


def _check_text_only(body: TokenizeRequest) -> None:
    """Raises ApiError 400 if a field for conversations is given with a text."""
    for name in ("tools", *TemplateFields.__annotations__):
        if getattr(body, name) is not None:
            raise invalid_field(
                name,
                f"{name} is valid only with messages; leave it out or give messages",
            )
