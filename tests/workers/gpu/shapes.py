"""Randomly initialised models of test size, and the results of transformers for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 500
TIE = 1e-4
"""If the logits of two candidates differ by less than this, they are a tie, because kernels round
the last bits differently."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TINY = {
    **_COMMON,
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
}
SHAPES = ("llama", "gpt2", "qwen2")
ties: list[str] = []
"""The positions at which a tie was decided differently. They are reported at the end of a test
run."""


def make(shape: str) -> Any:
    """A model of this architecture, with the same weights in each call."""
    torch.manual_seed(0)
    if shape == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**_COMMON))
    elif shape == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_COMMON))
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=64,
                n_layer=3,
                n_head=4,
                n_positions=1024,
                initializer_range=0.3,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    model.generation_config.eos_token_id = None
    return model.eval()


def tiny_model() -> Any:
    """A Llama with one layer and a vocabulary of 64 tokens, with the same weights in each call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_TINY)).eval()


def prompts(count: int, longest: int, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of 1 to ``longest`` tokens. Some lengths are next to multiples of the block size."""
    rng = random.Random(7)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, longest]
    lengths += [rng.randrange(1, longest) for _ in range(count - len(lengths))]
    return [[rng.randrange(1, vocab) for _ in range(n)] for n in lengths[:count]]


def _own(model: Any) -> str:
    """The attention that transformers uses for this model."""
    return "sdpa" if model._supports_sdpa else "eager"


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens of a greedy ``model.generate`` without an end-of-sequence token."""
    model.set_attn_implementation(_own(model))
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def log_probs(model: Any, prompt: Sequence[int], scored: Sequence[int]) -> list[float]:
    """The log-probability of each scored token, by one plain forward."""
    model.set_attn_implementation(_own(model))
    rows = torch.log_softmax(model(torch.tensor([[*prompt, *scored]])).logits[0].float(), -1)
    return [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(scored)]


@torch.inference_mode()
def logits_after(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The logits ``[vocab]`` after these tokens by one plain forward."""
    before = model.config._attn_implementation
    model.set_attn_implementation(_own(model))
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1].float()
    model.set_attn_implementation(before)
    return logits


@torch.inference_mode()
def same_tokens(
    model: Any, prompt: Sequence[int], wanted: Sequence[int], got: Sequence[int]
) -> bool:
    """Whether two continuations agree up to their first tie. A difference is printed."""
    assert len(wanted) == len(got)
    for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if a != b:
            logits = logits_after(model, [*prompt, *wanted[:i]])
            gap = abs(logits[a].item() - logits[b].item())
            what = f"position {i} of a prompt of {len(prompt)}: {a} or {b}, {gap:.1e} apart"
            print(what)
            if gap < TIE:
                ties.append(what)
            return gap < TIE
    return True
