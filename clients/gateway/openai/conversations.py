"""Converts the messages of a request to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..bodies import Body
from ..context import Gateway
from ..errors import invalid_field
from ..models import ServedModel


class TemplateFields(Protocol):
    """The fields of a body that control the rendering of its messages, with vLLM's names."""

    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class Rendering(Body, kw_only=True):
    """A body with the fields of ``TemplateFields``, which are all optional."""

    chat_template: str | None = None
    """A Jinja template that replaces the model's template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the template."""
    documents: list[dict[str, Any]] | None = None
    """Documents for templates that support them."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends at the beginning of an assistant's message. Default: true."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, so that the prompt ends inside it. Requires
    ``add_generation_prompt: false``."""


async def prompt_ids(
    gateway: Gateway,
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    fields: TemplateFields,
    *,
    special: bool = False,
) -> list[int]:
    """The token ids of a conversation. ``special``: the tokenizer adds special tokens.

    The default is False, because the template has already written the special tokens at the
    beginning.
    """
    generation = fields.add_generation_prompt
    generation = True if generation is None else generation
    if generation and fields.continue_final_message:
        raise invalid_field(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; set "
            "add_generation_prompt to false",
        )
    variables = dict(fields.chat_template_kwargs or {})
    if fields.documents is not None:
        variables["documents"] = fields.documents
    text = await gateway.templates.render(
        model,
        messages,
        tools=tools,
        chat_template=fields.chat_template,
        variables=variables,
        add_generation_prompt=generation,
        continue_final_message=bool(fields.continue_final_message),
    )
    return await model.tokenize(text, special=special)
