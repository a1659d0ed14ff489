"""The detector of the watermark example finds the watermark in marked text only."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import PythonProgram
from tokenbus.workers.controller.sequence_group import SequenceGroup
from tokenbus.workers.gpu.sampling.biases import Bias, read_bias
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample
from tokenbus.workers.variables import VariableStorage

from ..wasm.guests import SDK
from .runs import vocabulary

TOKENS = 200
PROMPT = [5, 6, 7]


def example() -> Any:
    """The example's module."""
    path = SDK / "examples/watermark.py"
    spec = importlib.util.spec_from_file_location("watermark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(path.read_text().splitlines()) <= 120
    return module


def written(watermark: Any, key: int | None, temperature: float, seed: int) -> list[int]:
    """A prompt and a text that a model with random logits writes with the watermark of ``key``;
    None: without the controller."""
    size = vocabulary().size
    arg = json.dumps({"key": key or 0}).encode()
    group = SequenceGroup(1, 1, Limits(), arg, 999, True, VariableStorage().apply)
    [result] = group.begin(PythonProgram(watermark.Watermark), vocabulary(), PROMPT)
    tokens = list(PROMPT)
    chance = torch.Generator().manual_seed(seed)
    for position in range(TOKENS):
        bias: Bias | None = None
        if key is not None:
            assert result.biased
            bias = read_bias(np.frombuffer(group.bias(0) or b"", dtype=np.uint32), size)
        group.record([result])
        logits = 2.0 * torch.randn(1, size, generator=chance)
        logits[0, 0] = -100.0  # the token that ends the sequence
        row = Row(Sampling(temperature=temperature), seed, 0, position, bias=bias)
        [token] = sample(logits, [0], [row]).tokens
        tokens.append(token)
        stepped = group.step(0, [token], False, None)
        assert stepped is not None
        [result] = stepped[1]()
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_detector_tells_marked_text_from_other_text(temperature: float) -> None:
    watermark, size = example(), vocabulary().size
    for seed in range(3):
        marked = written(watermark, 42, temperature, seed)
        plain = written(watermark, None, temperature, seed)
        assert watermark.z_score(marked, 42, size) > 4
        assert watermark.z_score(plain, 42, size) < 2
        assert watermark.z_score(marked, 43, size) < 2, "another key detects nothing"


def test_half_of_the_vocabulary_is_green_after_each_token() -> None:
    watermark = example()
    for before in (0, 1, 4095):
        share = watermark.green(before, 7, 131_072).mean()
        assert 0.49 < share < 0.51
    assert watermark.z_score([], 7, 100) == 0.0
