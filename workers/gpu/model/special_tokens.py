"""The special tokens of a model by role. A controller requests a token by the name of its role.

The tokenizer names most of these tokens. The markers that begin and end a turn of a chat are found
in the text of the chat template. The template is not run, because it is code from the publisher of
the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ....protocol.special_tokens import SpecialToken

_NAMED = ("unk", "pad", "sep", "bos", "cls", "mask")
"""Roles for which a tokenizer of transformers has an attribute, ``bos_token_id`` and so on."""
_PROMPT = "add_generation_prompt"
"""The template variable that requests the beginning of the assistant's turn."""


def special_tokens(tokenizer: Any, eos: Collection[int]) -> dict[str, int]:
    """The ids of the special tokens by role (``SpecialToken.role``), without roles that the model
    does not have. ``eos``: the tokens that end the model's text. One of these tokens may also end a
    turn."""
    found = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _NAMED}
    template = _template(tokenizer)
    if template:
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        found[SpecialToken.TURN_START.role] = _turn_start(template, added)
        found[SpecialToken.TURN_END.role] = _turn_end(template, added, eos, tokenizer)
    return {role: at for role, at in found.items() if isinstance(at, int)}


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    return str(template)


def _turn_start(template: str, added: Mapping[str, int]) -> int | None:
    """The first special token that the template writes for ``add_generation_prompt``."""
    _, prompt, written = template.rpartition(_PROMPT)
    names = _occurrences(written, added)
    return added[names[0]] if prompt and names else None


def _turn_end(
    template: str, added: Mapping[str, int], eos: Collection[int], tokenizer: Any
) -> int | None:
    """The token among ``eos`` that the template writes most often. If the template writes none of
    them, but writes the variable ``eos_token``, the tokenizer's end-of-sequence token. If it writes
    neither, None."""
    ends = [name for name in _occurrences(template, added) if added[name] in eos]
    if ends:
        return added[Counter(ends).most_common(1)[0][0]]
    return getattr(tokenizer, "eos_token_id", None) if "eos_token" in template else None


def _occurrences(text: str, added: Mapping[str, int]) -> list[str]:
    """The special tokens in a text, in order. If several tokens match at one place, the longest
    token is found."""
    names = sorted((name for name in added if name and name in text), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, names)), text) if names else []
