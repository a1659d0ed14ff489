"""Converts a Llama checkpoint to a float32 GGUF file: ``python _gguf.py FOLDER FILE``.

The environment must have the package ``gguf``. The checkpoint's tokenizer must be a byte-level BPE.
The GGUF file contains the tokenizer's vocabulary, but not the tokenizer's merges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

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


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection. The rotary embedding of llama.cpp pairs
    neighbouring rows. That of transformers pairs the rows of the first half of a head with the rows
    of the second half."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def main(folder: Path, file: Path) -> None:
    """Writes the GGUF file."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, folder, config["eos_token_id"] or 0)
    for name, weight in load_file(folder / "model.safetensors").items():
        name = name.removesuffix(".weight")
        if name in OTHERS:
            writer.add_tensor(f"{OTHERS[name]}.weight", weight)
            continue
        _, _, layer, kind = name.split(".", 3)
        if kind.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, heads if kind.endswith("q_proj") else kv_heads)
        writer.add_tensor(f"blk.{layer}.{LAYER[kind]}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, eos: int) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(words)
    kinds[eos] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    # llama.cpp refuses a byte-level BPE without merges. One arbitrary merge is enough, because
    # requests contain token ids, which the server does not tokenize.
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(eos)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
