"""Trains the embedded model: ``python -m tokenbus.workers.gpu.embedded.train --out DIR``.

Trains first the tokenizer (byte-level BPE, 4,096 tokens), then the model (a Llama of 3 million
parameters). Both learn from the text of ``corpus.py``, which includes Python's standard library.
All random numbers have fixed seeds. With the same version of Python, the result is the same, except
for rounding that depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .corpus import documents

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024
SEED = 7
TOKENS_PER_STEP = 8192
PEAK_RATE, LAST_RATE = 3e-3, 1e-4
WARM_UP = 60
STEPS = 1400

SPLIT = r"""\n[ \t]*| ?[A-Za-z_]+|\d| +(?=\S)|\s+|[^\sA-Za-z_\d]+"""
"""Regular expression of the parts into which a text is split before BPE. A part is one of: a
newline with the indentation after it, a word with at most one space before it, a digit, other white
space, or several other characters."""


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text and adds no special tokens by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    return wrapped


def new_model() -> LlamaForCausalLM:
    """Returns an untrained model."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def token_row(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """The tokens of all texts in one row, with an end token before each text: ``[num_tokens]``."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    return torch.tensor([t for text in encoded for t in (0, *text.ids)], dtype=torch.int64)


def batches(row: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """``steps`` batches of random windows of the row: ``[batch, length + 1]``.

    In three of four batches the windows have a length of 512 tokens. In the fourth batch, the
    windows are as long as the context.
    """
    chance = torch.Generator().manual_seed(SEED)
    for step in range(steps):
        length = CONTEXT if step % 4 == 3 else CONTEXT // 2
        starts = torch.randint(
            len(row) - length - 1, (TOKENS_PER_STEP // length,), generator=chance
        )
        yield torch.stack([row[start : start + length + 1] for start in starts.tolist()])


def rate(step: int, steps: int) -> float:
    """The learning rate: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    part = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * part))


def loss_of(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each next token in ``[batch, length + 1]``, in nats."""
    logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, row: torch.Tensor) -> float:
    """The mean loss over a row of tokens, in windows of half the context, in nats per token."""
    length = CONTEXT // 2
    count = (len(row) - 1) // length
    windows = [row[i * length : (i + 1) * length + 1] for i in range(count)]
    losses = [loss_of(model, torch.stack(windows[i : i + 16])) for i in range(0, count, 16)]
    sizes = [len(windows[i : i + 16]) for i in range(0, count, 16)]
    return sum(float(x) * n for x, n in zip(losses, sizes, strict=True)) / sum(sizes)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the files that ``from_pretrained`` reads, with the weights in bfloat16."""
    copy: Any = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes the name of a class that transformers 4 does not have. Both versions
    # have the class whose name is written here.
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(named, indent=2) + "\n")


def main() -> None:
    """Trains the model, reports the loss every 50 steps, and saves the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    texts, held_out = documents()
    tokenizer = train_tokenizer(texts)
    row, held_row = token_row(tokenizer, texts), token_row(tokenizer, held_out)
    bytes_a_token = len("".join(held_out).encode()) / len(held_row)
    print(f"{len(row)} tokens to train on, {len(held_row)} held out", flush=True)
    model = new_model()
    save(model, tokenizer, arguments.out)
    print(f"{model.num_parameters()} parameters", flush=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    started = time.monotonic()
    for step, window in enumerate(batches(row, arguments.steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, arguments.steps)
        loss = loss_of(model, window)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49 or step + 1 == arguments.steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
            save(model, tokenizer, arguments.out)
    kept = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    nats = held_out_loss(kept, held_row)
    bits = nats / math.log(2) / bytes_a_token
    print(f"held-out loss {nats:.3f} nats a token, {bits:.3f} bits a byte", flush=True)


if __name__ == "__main__":
    main()
