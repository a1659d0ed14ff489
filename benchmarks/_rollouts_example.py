"""A trainer's loop in 60 lines: groups of samples, a verifier, and new weights over the bus.

    tokenbus up
    python benchmarks/_rollouts_example.py

The loss is that of REINFORCE. The baseline is the mean reward of a group. ``rollouts.py`` has a
loop for GRPO, in which the rollouts overlap with the training steps.
"""

from __future__ import annotations

from statistics import fmean

import torch
from safetensors.torch import save
from tokenbus.clients import Client
from tokenbus.clients.operator import Operator
from transformers import AutoModelForCausalLM, AutoTokenizer

CHECKPOINT = "workers/gpu/embedded/model"
"""The checkpoint of the model ``embedded``, which the workers have loaded."""
PROMPT = "def count(items):\n    return"
STEPS = 4


def reward_of(text: str) -> float:
    """The verifier: the share of a text's characters that are brackets."""
    return sum(character in "()[]" for character in text) / max(1, len(text))


def main() -> None:
    """Makes ``STEPS`` training steps, and prints the mean reward of each."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    prompt = tokenizer.encode(PROMPT)
    with Client() as client:
        for step in range(STEPS):
            # The worker computes the prompt once, for all eight samples.
            stream = client.generate(
                prompt, n=8, max_tokens=32, temperature=1.0, seed=step, ignore_eos=True
            )
            samples = stream.wait()
            tokens = torch.tensor([sample.tokens for sample in samples])
            texts = tokenizer.batch_decode([sample.tokens for sample in samples])
            rewards = torch.tensor([reward_of(text) for text in texts])
            [version] = {span.version for sample in samples for _, span in sample.spans}
            print(f"version {version}: reward {fmean(rewards.tolist()):.3f}")

            inputs = torch.cat([torch.tensor(prompt).expand(len(tokens), -1), tokens], 1)
            logits = model(inputs, use_cache=False).logits[:, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            optimizer.zero_grad()
            (-advantages[:, None] * logprobs).mean().backward()
            optimizer.step()

            weights = {name: tensor.data for name, tensor in model.named_parameters()}
            done = Operator(client).send_weights(save(weights))
            print(f"weights changed in {done.update_pause_ms:.1f} ms, workers: {done.workers}")


if __name__ == "__main__":
    main()
