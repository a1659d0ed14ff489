"""Prompts with a gap that the model fills: the field ``suffix`` of completions."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import invalid_field
from ..generation.generations import Prompt
from ..models import ServedModel


class Form(NamedTuple):
    """The tokens with which a family of models marks the text before a gap and the text after
    it."""

    prefix: str
    suffix: str
    middle: str
    """The token at the end of the prompt; empty if the prompt ends with the text before the gap."""
    suffix_first: bool = False


FORMS = (
    Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    Form("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
"""All forms. A tokenizer has the tokens of at most one form."""
ENDS = ("<|endoftext|>", "<|file_sep|>", "<|fim_pad|>", "<file_sep>", "<fim_pad>", "▁<EOT>")
"""Tokens that end the text in a gap, in addition to the end-of-sequence tokens of the model."""


async def filled(model: ServedModel, prompt: Prompt, suffix: str) -> list[int]:
    """The token ids of a text with a gap: ``prompt`` is the text before the gap, and ``suffix`` the
    text after it. Raises ApiError 400 if the tokenizer has no tokens that mark a gap."""
    form = form_of(model)
    if form is None:
        raise invalid_field(
            "suffix",
            f"the tokenizer of {model.name} has no tokens that mark the prefix and the suffix of "
            "a text; leave suffix out, or put both parts into the prompt",
        )
    before = prompt
    if isinstance(before, str):
        before = await model.tokenize(before, special=False)
    after = await model.tokenize(suffix, special=False)
    first, second = [_id(model, form.prefix), *before], [_id(model, form.suffix), *after]
    if form.suffix_first:
        first, second = second, first
    middle = [_id(model, form.middle)] if form.middle else []
    return [*model.encode(""), *first, *second, *middle]


def form_of(model: ServedModel) -> Form | None:
    """Finds the form whose tokens are in the tokenizer. Returns None if no form matches."""
    has = model.tokenizer.token_to_id
    for form in FORMS:
        if all(has(name) is not None for name in form[:3] if name):
            return form
    return None


def ends_of(model: ServedModel) -> list[int]:
    """The ids of the tokens that end the text in a gap."""
    form = form_of(model)
    names = (*ENDS, *(name for name in (form[:3] if form is not None else ()) if name))
    found = (model.tokenizer.token_to_id(name) for name in names)
    return [token for token in found if token is not None]


def _id(model: ServedModel, name: str) -> int:
    found: int | None = model.tokenizer.token_to_id(name)
    assert found is not None
    return found
