"""A model whose answers follow a script: it thinks, calls a tool, and answers after the result.

A real worker runs the model. Its weights are random, but each token of the script makes the next
token of the script the most likely one. The only layer of the model adds zero to the embeddings.
Masks choose the arguments of calls, and the values of arguments are as short as their schemas
allow.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenbus.workers.gpu import embedded
from tokenizers import AddedToken, Tokenizer

CONTEXT = 262_144
HIDDEN = 128
FIRST, LATER = "<think>\n", "<think>\n\n"
"""The ends of prompts: the first begins thinking before a call, the second before the answer."""
NEEDS, HAS = "I need a tool.</think>", "I can answer.</think>"
CALLING, DONE = "I call one.", "Done: that is the answer."
CALL = "<tool_call>"
SCRIPT = (FIRST, NEEDS, CALLING, CALL), (LATER, HAS, DONE)
CLOSERS = {"<|endoftext|>": 26.0, '"': 20.0, "}": 11.0, "]": 11.0, ",": 3.0, "0": 8.0}
"""Logits of tokens that end a text or a value. They do not depend on the previous tokens."""
FOLLOWS = 45.0
"""The logit of the next token of the script."""

TEMPLATE = """\
{#- Refuses each order of messages that a strict template refuses. </think> <tool_call> #}
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}
{%- set rest = messages[1:] %}
{{- '<|system|>' + messages[0].content }}
{%- endif %}
{%- if tools %}
{{- '<|tools|>' }}
{%- for tool in tools %}{{- tool.function.name + ' ' }}{%- endfor %}
{%- endif %}
{%- macro opening(previous) -%}
{{- '<|assistant|>' }}
{{- '<think>\\n' if tools and previous.role == 'user' else '<think>\\n\\n' }}
{%- endmacro %}
{%- for m in rest %}
{%- set previous = loop.previtem %}
{%- if m.role == 'user' %}
{%- if previous and previous.role != 'assistant' %}
{{- raise_exception('a user message follows a ' + previous.role + ' message') }}
{%- endif %}
{{- '<|user|>' + m.content }}
{%- elif m.role == 'tool' %}
{%- if not previous or (previous.role != 'tool' and not previous.tool_calls) %}
{{- raise_exception('a result follows no call') }}
{%- endif %}
{{- '<|result|>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- if not previous or previous.role == 'assistant' %}
{{- raise_exception('an assistant message follows no question') }}
{%- endif %}
{{- opening(previous) + (m.reasoning_content or '') + '</think>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- else %}
{{- raise_exception('a ' + m.role + ' message is in the middle') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ opening(rest[-1]) }}{% endif %}"""


def write(folder: Path) -> Path:
    """Writes the checkpoint of the model into a new folder, and returns the folder."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    pieces = [piece for line in SCRIPT for piece in line]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    given = json.loads((embedded.path() / "tokenizer_config.json").read_text())
    given |= {"model_max_length": CONTEXT, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    vocab = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(tokenizer, vocab), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights(tokenizer: Tokenizer, vocab: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(1)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype=np.float32)

    embeddings = draws.standard_normal((vocab, HIDDEN)).astype(np.float32)
    embeddings[:, 0] = 4.0
    scale = np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    normed = embeddings / scale
    head = (draws.standard_normal((vocab, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    head[:, 0] = 0.0
    for name, logit in CLOSERS.items():
        head[_id(tokenizer, name), 0] = logit / 4.0
    for line in SCRIPT:
        for before, after in pairwise(line):
            own = normed[_id(tokenizer, before), 1:]
            head[_id(tokenizer, after), 1:] = FOLLOWS * own / (own @ own)
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        "model.norm.weight": zeros(HIDDEN) + 1,
        f"{layer}input_layernorm.weight": zeros(HIDDEN) + 1,
        f"{layer}post_attention_layernorm.weight": zeros(HIDDEN) + 1,
        f"{layer}self_attn.q_proj.weight": zeros(16, HIDDEN),
        f"{layer}self_attn.k_proj.weight": zeros(16, HIDDEN),
        f"{layer}self_attn.v_proj.weight": zeros(16, HIDDEN),
        f"{layer}self_attn.o_proj.weight": zeros(HIDDEN, 16),
        f"{layer}mlp.gate_proj.weight": zeros(16, HIDDEN),
        f"{layer}mlp.up_proj.weight": zeros(16, HIDDEN),
        f"{layer}mlp.down_proj.weight": zeros(HIDDEN, 16),
    }


def _id(tokenizer: Tokenizer, name: str) -> int:
    found: int | None = tokenizer.token_to_id(name)
    assert found is not None, name
    return found
