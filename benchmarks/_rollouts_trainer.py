"""A GRPO trainer in plain torch, for the embedded model.

Source: Shao et al., "DeepSeekMath", 2024. The advantage of a sample compares its reward with the
rewards of its group. The loss contains a ratio: the trainer's probability of a token, divided by
the sampler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save
from tokenbus.clients.results import GeneratedSequence
from tokenbus.workers.gpu.model.cpu_native.functions import exact_functions
from tokenbus.workers.gpu.model.loader import load_model
from tokenbus.workers.gpu.sampling.sampler import score

CLIP = 0.2
"""The ratio of probabilities is clipped to the range from 1 - CLIP to 1 + CLIP."""
RATE = 1e-3
"""The step size of Adam."""


def reward_of(text: str) -> float:
    """The verifier: the share of a text's characters that are brackets with a partner."""
    depth = pairs = 0
    for character in text:
        if character == "(":
            depth += 1
        elif character == ")" and depth:
            depth -= 1
            pairs += 1
    return 2 * pairs / max(1, len(text))


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    prompt: list[int]
    samples: list[GeneratedSequence]
    rewards: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Compared:
    """The comparison of the sampler's log-probabilities with those of the trainer."""

    tokens: int = 0
    differing: int = 0
    """Number of tokens whose log-probabilities differ in any bit."""
    kl: float = 0.0
    """The sum of the estimates of the KL divergence of each token (k3 of Schulman)."""


class Trainer:
    """The model that is trained, and all versions of its weights so far."""

    def __init__(self, compared: Compared) -> None:
        """``compared`` collects the results of ``compare``."""
        loaded = load_model("embedded")
        self._model: Any = loaded.model
        self._reference: Any = load_model("embedded").model
        self._tokenizer = loaded.tokenizer
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=RATE)
        self._versions = [self._weights()]
        self._compared = compared
        self.eos: int = loaded.tokenizer.eos_token_id

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def verify(self, group: Group) -> None:
        """Computes the rewards of a group."""
        texts = self._tokenizer.batch_decode([sample.tokens for sample in group.samples])
        group.rewards = [reward_of(text) for text in texts]

    def step(self, groups: list[Group]) -> float:
        """Makes one step of the optimizer over all samples of the groups. The result is a new
        version of the weights. Returns the loss before the step."""
        count, total = sum(len(group.samples) for group in groups), 0.0
        self._optimizer.zero_grad()
        for group in groups:
            loss = self._loss(group) * (len(group.samples) / count)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._versions.append(self._weights())
        return total

    def file(self) -> bytes:
        """The weights of the last version, as a safetensors file."""
        return save(self._versions[-1])

    def compare(self, group: Group) -> None:
        """Compares the log-probability of each token with a plain forward over the whole text. The
        forward uses the version of the weights that sampled the token (``sample.spans``)."""
        for sample in group.samples:
            starts = [start for start, _ in sample.spans] + [len(sample.tokens)]
            for number, (start, span) in enumerate(sample.spans):
                end = starts[number + 1]
                self._reference.load_state_dict(self._versions[span.version], strict=False)
                text = torch.tensor([group.prompt + sample.tokens[:end]])
                with exact_functions(self._reference):
                    logits = self._reference(text, use_cache=False).logits[0]
                first = len(group.prompt) + start - 1
                tokens = sample.tokens[start:end]
                values, _ = score(logits[first:-1].contiguous(), tokens).fetch()
                self._count(values, sample.logprobs[start:end])

    def _count(self, trainer: list[float], sampler: list[float]) -> None:
        for ours, theirs in zip(trainer, sampler, strict=True):
            distance = torch.tensor(ours - theirs, dtype=torch.float64)
            self._compared.tokens += 1
            self._compared.differing += ours != theirs
            self._compared.kl += float(torch.expm1(distance) - distance)

    def _weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights. The output layer is left out, because it has the same weights as
        the embedding."""
        named = self._model.named_parameters()
        return {name: tensor.detach().clone() for name, tensor in named}

    def _loss(self, group: Group) -> torch.Tensor:
        """The clipped loss of a group, averaged over its tokens. All samples must have the same
        number of tokens."""
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        tokens = torch.tensor([sample.tokens for sample in group.samples])
        sampled = torch.tensor([sample.logprobs for sample in group.samples])
        prompt = torch.tensor(group.prompt).expand(len(tokens), -1)
        logits = self._model(torch.cat([prompt, tokens], 1), use_cache=False).logits
        logits = logits[:, len(group.prompt) - 1 : -1].float().log_softmax(-1)
        ratio = (logits.gather(-1, tokens[..., None])[..., 0] - sampled).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        each = advantages[:, None]
        return -torch.minimum(ratio * each, clipped * each).mean()
