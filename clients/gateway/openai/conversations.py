"""Converts the messages of a request to the prompt: the fields for it, and the token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..bodies import Body
from ..context import Gateway
from ..errors import invalid_field
from ..models import ServedModel


class TemplateFields(Protocol):
    """The fields of a body that control how its messages are rendered, with vLLM's names."""

    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class Rendering(Body, kw_only=True):
    """A body with the fields of ``TemplateFields``, all of them optional."""

    chat_template: str | None = None
    """A Jinja template instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names that the template may use."""
    documents: list[dict[str, Any]] | None = None
    """For templates that know them."""
    add_generation_prompt: bool | None = None
    """The prompt ends where an assistant's message begins; default: true."""
    continue_final_message: bool | None = None
    """The prompt ends inside the last message, which the answer continues. Needs
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
    """The token ids of a conversation; ``special``: with those that the tokenizer adds.

    The template has already written the beginning of the text, so the tokenizer does not add
    special tokens by default.
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
