"""The device, the models and the results file that all stages of ``gpu_check.py`` share."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _models import llama
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, PendingStep
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model

SMALL_CACHE = 2**24
"""Bytes of a small model's KV cache on a CPU."""
MEDIUM_CACHE = 2**30
"""Bytes of a small model's KV cache on a GPU."""
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
"""The shapes of Llama 3 8B and Llama 3.2 1B."""


SMALL = {"hidden_size": 512, "intermediate_size": 1376, "initializer_range": 0.05}
"""Settings of the small Llama. Its heads have 64 dimensions. Its weights are large, so that
attention affects the logits."""


class CheckFailed(Exception):
    """A stage has failed."""


@dataclass(slots=True)
class World:
    """The context of a stage, which records the stage's figures.

    ``dry``: the stage runs on a CPU with small models. ``limit_s``: time limit of the stage.
    """

    stage: int
    dry: bool
    results: Path
    limit_s: float
    faults: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """The device under test."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the models."""
        return torch.float32 if self.dry else torch.bfloat16

    @property
    def cache_bytes(self) -> int:
        """Bytes of a small model's KV cache."""
        return SMALL_CACHE if self.dry else MEDIUM_CACHE

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.limit_s - (time.monotonic() - self.began)

    def record(self, name: str, value: Any, **more: Any) -> None:
        """Prints a figure and immediately writes it to the results file."""
        line = {"stage": self.stage, "name": name, "value": value, **more}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = f"{value:,.5g}" if isinstance(value, float) else str(value)
        print(f"  {name}: {shown}", *(f"{key}={of}" for key, of in more.items()), flush=True)

    def fault(self, what: str) -> None:
        """Records a fault. The stage continues and fails at its end."""
        self.faults.append(what)
        self.record("fault", what)

    def expect(self, holds: bool, what: str) -> None:
        """Records ``what`` as a fault if ``holds`` is False."""
        if not holds:
            self.fault(what)

    def finish(self) -> None:
        """Raises CheckFailed if the stage has found faults."""
        if self.faults:
            raise CheckFailed(f"{len(self.faults)} faults; the first is: {self.faults[0]}")

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds that ``run`` takes, including its work on the device."""
        self.synchronize()
        began = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - began

    # --- models ---------------------------------------------------------------------------------

    def embedded(self) -> LoadedModel:
        """The embedded model on the device."""
        name = str(self.dtype).removeprefix("torch.")
        return load_model("embedded", device=self.device.type, dtype=name)

    def small(self) -> LoadedModel:
        """The embedded model in a dry run. On a GPU, a Llama with a vocabulary of 32,000 and heads
        with 64 dimensions, which every attention backend supports."""
        if self.dry:
            return self.embedded()
        return wrap_model("small", self.random_llama(**SMALL))

    def shape(self, name: str) -> LoadedModel:
        """A model of one of ``SHAPES`` with random weights; the embedded model in a dry run."""
        if self.dry:
            return self.embedded()
        return wrap_model(name, self.random_llama(**SHAPES[name], max_position_embeddings=40_960))

    def random_llama(self, **shape: Any) -> Any:
        """A Llama whose random weights are made on the device."""
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                model = llama(**shape)
        finally:
            torch.set_default_dtype(torch.float32)
        return model

    def engine(
        self, loaded: LoadedModel, draft_model: LoadedModel | None = None, **config: Any
    ) -> Engine:
        """An engine with a worker's settings. Steps overlap on a GPU."""
        given = {
            "max_num_seqs": 64,
            "kv_cache_bytes": self.cache_bytes,
            "overlap": not self.dry,
            "fixed_threads": self.dry,
        }
        return Engine(loaded, EngineConfig(**{**given, **config}), draft_model)


def disable_graphs(engine: Engine) -> None:
    """Makes all further steps of an engine run without CUDA graphs."""
    engine._runner.drop_graphs()


def random_prompts(seed: int, count: int, length: int, vocab: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens. With the same seed, the prompts are the same."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


Texts = dict[tuple[int, int], list[int]]
"""The tokens of each sequence, by request and sequence number."""


def run_to_end(
    engine: Engine, decide: Callable[[PendingStep, Texts], None] = lambda step, got: None
) -> Texts:
    """Runs steps until all requests have ended. In each step, ``decide`` is called between the
    forward and the sampling, with the step and the tokens so far. Raises CheckFailed if a sequence
    fails."""
    got: Texts = {}
    while engine.has_work:
        step = engine.begin()
        decide(step, got)
        for output in engine.finish(step).as_outputs():
            if output.error is not None:
                raise CheckFailed(f"request {output.request}: {output.error}")
            own = got.setdefault((output.request, output.seq), [])
            if output.backtrack:
                del own[-output.backtrack :]
            if output.token is not None:
                own.append(output.token)
    return got


def greedy(max_tokens: int, **more: Any) -> Sampling:
    """Greedy sampling with ``max_tokens``."""
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


@contextmanager
def no_warnings(world: World) -> Iterator[None]:
    """Records every warning of the engine as a fault. The engine only logs a failed step or
    draft."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = f": {record.exc_info[1]}" if record.exc_info else ""
            world.fault(f"the engine logged: {record.getMessage()}{error}")

    handler, logger = Handler(logging.WARNING), logging.getLogger("tokenbus")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def no_waiting(world: World) -> Iterator[None]:
    """Makes implicit waits for the device raise RuntimeError."""
    if world.device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
