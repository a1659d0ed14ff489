"""Writes Llama checkpoints as GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

Kind = Literal["F32", "F16", "Q8_0"]
TYPES: dict[Kind, int] = {"F32": 0, "F16": 1, "Q8_0": 8}
BLOCK = 32
"""Number of values of Q8_0 that share a scale."""
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (BLOCK,))])
Array = npt.NDArray[Any]
ALIGNMENT = 32
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write(folder: Path, file: Path, kind: Kind) -> None:
    """Writes the checkpoint in ``folder``. Weights of one dimension stay in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.float().numpy()
        name = name.removesuffix(".weight")
        if name in OTHERS:
            tensors.append((f"{OTHERS[name]}.weight", weight))
            continue
        _, _, layer, part = name.split(".", 3)
        if part.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, heads if part.endswith("q_proj") else kv_heads)
        tensors.append((f"blk.{layer}.{LAYER[part]}.weight", weight))
    infos, content = b"", b""
    for name, weight in tensors:
        form: Kind = kind if weight.ndim > 1 else "F32"
        dims = struct.pack(f"<I{weight.ndim}Q", weight.ndim, *reversed(weight.shape))
        infos += _string(name) + dims + struct.pack("<IQ", TYPES[form], len(content))
        content += _padded(encoded(weight, form))
    values = {**_properties(config), **_tokenizer(folder, config["eos_token_id"])}
    keys = b"".join(_string(key) + _typed(value) for key, value in values.items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    file.write_bytes(_padded(head + keys + infos) + content)


def encoded(weight: Array, kind: Kind) -> bytes:
    """The bytes of a weight in a GGUF file."""
    if kind != "Q8_0":
        return weight.astype("<f4" if kind == "F32" else "<f2").tobytes()
    blocks = weight.reshape(-1, BLOCK)
    scales = (np.abs(blocks).max(axis=1) / 127).astype("<f2")
    parts = np.empty(len(blocks), Q8_0)
    parts["scale"] = scales
    parts["values"] = np.round(blocks / scales.astype("<f4")[:, None])
    return parts.tobytes()


def rounded(weight: Array, kind: Kind) -> Array:
    """The values that a reader of the GGUF file gets for ``weight``. The type ``kind`` rounds
    them."""
    if weight.ndim == 1 or kind == "F32":
        return weight
    if kind == "F16":
        return weight.astype("<f2").astype("<f4")
    parts = np.frombuffer(encoded(weight, kind), Q8_0)
    values = parts["scale"].astype("<f4")[:, None] * parts["values"].astype("<f4")
    return values.reshape(weight.shape)


def interleaved(weight: Array, heads: int) -> Array:
    """Reorders the rows of a query or key projection for llama.cpp's rotary embedding, which pairs
    neighbouring rows. transformers pairs the two halves of a head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _properties(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["hidden_size"] // heads,
        "llama.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "llama.vocab_size": config["vocab_size"],
    }


def _tokenizer(folder: Path, eos: int) -> dict[str, Any]:
    read = json.loads((folder / "tokenizer.json").read_text())
    model, special = read["model"], {one["content"]: one["id"] for one in read["added_tokens"]}
    ids = model["vocab"] | special
    words = sorted(ids, key=ids.__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3 if word in special else 1 for word in words],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": eos,
    }


def _typed(value: Any) -> bytes:
    """A value with its type before it."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)
