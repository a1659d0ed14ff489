"""Compares the engine's tokens with the tokens that transformers samples from the same model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _gpu_world import World
from tokenbus.workers.gpu.model.loader import LoadedModel

TIE = {torch.bfloat16: 0.1, torch.float32: 1e-3}
"""If the distance of two logits is less than this fraction of the logits' standard deviation, they
count as a *tie*, because kernels round differently."""


class Reference:
    """A model that runs with transformers' attention. The methods compare the engine's tokens with
    this model."""

    def __init__(self, world: World, loaded: LoadedModel) -> None:
        self._world = world
        self._model: Any = loaded.model
        self._device = loaded.device
        self._tie = TIE[loaded.dtype]

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns the ``count`` tokens that transformers' ``generate`` samples greedily.
        End-of-sequence tokens are excluded from sampling."""
        with self._own_attention():
            out = self._model.generate(
                torch.tensor([list(prompt)], device=self._device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=self._device),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def check_same(
        self, what: str, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
    ) -> bool:
        """Returns whether ``expected`` and ``got`` are equal. Records a fault if their first
        difference is not a tie, or if only their lengths differ."""
        if list(expected) == list(got):
            return True
        first = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None
        )
        if first is None:
            self._world.fault(f"{what}: {len(got)} tokens, expected {len(expected)}")
        else:
            self.check_greedy(what, prompt, got[: first + 1], range(first, first + 1))
        return False

    def check_greedy(
        self,
        what: str,
        prompt: Sequence[int],
        got: Sequence[int],
        places: Sequence[int] | None = None,
        allowed: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Checks that each token at ``places`` of ``got`` is the most likely token after the tokens
        before it, up to a tie. If ``places`` is None, checks each token. ``allowed``: for each
        token of ``got``, the tokens that its mask allows, ``[vocab]``."""
        rows = self._logits(prompt, got)
        spread = rows.std().item()
        if allowed is not None:
            forbidden = ~torch.stack(list(allowed)).to(rows.device)
            rows = rows.masked_fill(forbidden, float("-inf"))
        index = torch.tensor(list(places if places is not None else range(len(got))))
        chosen = torch.tensor(list(got))[index].to(rows.device)
        rows = rows[index.to(rows.device)]
        gap = rows.amax(-1) - rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        worst = gap.max().item() / spread
        if not worst <= self._tie:
            at = int(index[int(gap.argmax())])
            self._world.fault(
                f"{what}: the logit of token {at} is {worst:.3g} standard deviations below the best"
            )

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int], got: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *got]], device=self._device)
        with self._own_attention():
            logits: torch.Tensor = self._model(ids, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1].float()

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        model = self._model
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(before)
