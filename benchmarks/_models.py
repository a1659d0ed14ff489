"""Models of realistic shape with random weights."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 32_000
SPACE = "\u0120"
"""The space in the vocabulary of a byte-level tokenizer."""


def llama(**changes: Any) -> Any:
    """A Llama with 21 million parameters: 6 layers, hidden size 256, 8 query heads, 4 key-value
    heads and 32,000 tokens. ``changes`` override values of its LlamaConfig."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model


def llama_folder(folder: Path, eos: bool = True, words: bool = False, **changes: Any) -> Path:
    """Writes the Llama as a checkpoint with a byte-level tokenizer. If ``eos`` is False, the
    tokenizer has no end-of-sequence token, so that a stream under a regex continues to its limit.

    By default, tokens above 256 are pairs of bytes, and the tokenizer never produces them. With
    ``words``, these tokens are words of up to four letters with a space before them. If a sampled
    text is tokenized, the result is then the sampled tokens.
    """
    llama(eos_token_id=0 if eos else None, **changes).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _word_merges() if words else []
    longer = (a + b for a, b in merges) if words else (a + b for a in letters for b in letters)
    tokens = ["<eos>", *letters, *longer][:VOCAB]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [pair for pair in merges if "".join(pair) in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<eos>"} if eos else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    return folder


def _word_merges() -> list[tuple[str, str]]:
    """The BPE merges that make words of one to four letters. Merges of shorter words come first."""
    merges = []
    shorter = [SPACE]
    for _ in range(4):
        pairs = [(word, letter) for word in shorter for letter in ascii_lowercase]
        shorter = [word + letter for word, letter in pairs]
        merges += pairs
    return merges
