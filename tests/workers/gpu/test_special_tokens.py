"""The special tokens of tokenizers, and the turn markers of chat templates as models have them."""

from __future__ import annotations

import pytest
from tokenbus.workers.gpu.model.special_tokens import special_tokens
from transformers import PreTrainedTokenizerFast

from ..controller.tokens.small_tokenizers import byte_level

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% if message.tool_calls %}{{ '<|eom_id|>' }}{% else %}{{ '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + message['content'] + "
    "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def tokenizer(template: str | None, *added: str, **named: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **named)
    made.add_special_tokens({"additional_special_tokens": list(added)})
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "added", "ends", "start", "end"),
    [
        (CHATML, ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"], "<|im_start|>", "<|im_end|>"),
        (
            LLAMA_3,
            ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
            ["<|eom_id|>", "<|eot_id|>"],
            "<|start_header_id|>",
            "<|eot_id|>",
        ),
        (PHI, ["<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"], "<|assistant|>", "<|end|>"),
        (PHI, ["<|assistant|>"], [], "<|assistant|>", "</s>"),
        (MISTRAL, [], [], None, "</s>"),
        ("{{ messages }}", ["<|im_end|>"], ["<|im_end|>"], None, None),
        (None, ["<|im_end|>"], ["<|im_end|>"], None, None),
    ],
    ids=["chatml", "llama-3", "phi", "no turn end", "mistral", "plain", "no template"],
)
def test_the_turn_markers_are_those_of_the_template(
    template: str | None, added: list[str], ends: list[str], start: str | None, end: str | None
) -> None:
    made = tokenizer(template, *added, eos_token="</s>")
    eos = [made.get_vocab()[token] for token in (*ends, "</s>")]
    found = special_tokens(made, eos)
    for role, token in (("turn_start", start), ("turn_end", end)):
        expected = None if token is None else made.convert_tokens_to_ids(token)
        assert found.get(role) == expected


def test_a_tokenizer_names_its_special_tokens() -> None:
    named = {"bos_token": "<s>", "unk_token": "<u>", "pad_token": "<p>", "mask_token": "<m>"}
    made = tokenizer(None, **named)
    expected = {
        name.removesuffix("_token"): made.convert_tokens_to_ids(t) for name, t in named.items()
    }
    assert special_tokens(made, []) == expected
    assert special_tokens(None, [0]) == {}
