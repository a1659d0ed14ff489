"""A client of an engine. The test runs the engine's steps, without a worker."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel

PROMPT = list(range(5, 45))
LENGTH = 14
GREEDY = Sampling(max_tokens=LENGTH, ignore_eos=True)
SEEDED = Sampling(max_tokens=LENGTH, ignore_eos=True, temperature=1.0, seed=5)


class ClientView:
    """The tokens, texts, finish reasons and errors that a client has received, by sequence. They
    are computed from the engine's outputs for one request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {0: []}
        self.texts: dict[int, list[str]] = {0: []}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, str] = {}

    def take(self, outputs: list[TokenOutput]) -> None:
        for o in outputs:
            if o.parent is not None:
                self.tokens[o.seq] = self.tokens[o.parent][: o.pos]
                self.texts[o.seq] = self.texts[o.parent][: o.pos]
            tokens = self.tokens.setdefault(o.seq, [])
            texts = self.texts.setdefault(o.seq, [])
            if o.backtrack:
                del tokens[-o.backtrack :], texts[-o.backtrack :]
            if o.token is not None:
                assert o.pos == len(tokens)
                tokens.append(o.token)
                texts.append(o.text or "")
            if o.finish_reason is not None:
                self.reasons[o.seq] = o.finish_reason
            if o.error is not None:
                self.errors[o.seq] = o.error


def run(engine: Engine, client: ClientView | None = None) -> ClientView:
    """Runs steps until the engine has no work; returns the client that received the outputs."""
    client = client or ClientView()
    while engine.has_work:
        client.take(engine.step())
    return client


_alone: dict[object, list[int]] = {}


def alone(embedded: LoadedModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """The tokens that a new engine generates for a prompt; cached, because many tests use them."""
    key = embedded.name, tuple(prompt), msgspec.json.encode(sampling), torch.get_num_threads()
    if key not in _alone:
        engine = Engine(embedded, EngineConfig(kv_cache_bytes=32 * 2**20))
        engine.add(1, prompt, sampling)
        _alone[key] = run(engine).tokens[0]
    return list(_alone[key])


def only(vocab: int, *tokens: int) -> np.ndarray:
    mask = np.zeros(-(-vocab // 32), dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask
