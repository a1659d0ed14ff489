"""The forward of tokens with LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.packing import Packed
from ..step_tensors import StepTensors
from ..transformers.backend import TransformersBackend
from .adapters import Adapters


class AdaptedBackend(TransformersBackend):
    """Runs a model's own modules with ``Packed.adapters``."""

    def __init__(self, tensors: StepTensors, model: Any, adapters: Adapters) -> None:
        super().__init__(tensors, model)
        self._adapters = adapters

    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of ``packed.rows``."""
        tokens = packed.adapters
        assert tokens is not None
        outputs = tokens[packed.rows] if self._keeps_logits else tokens
        with self._adapters.applied(tokens, outputs, self.tensors.device):
            return super().forward(packed, drawn)
