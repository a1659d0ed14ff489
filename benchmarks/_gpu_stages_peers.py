"""Stage 8 of ``gpu_check.py``: compares the engine with ``generate_batch`` of transformers and, if
it is installed, with vLLM."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpu_world import SHAPES, World, greedy, random_prompts, run_to_end
from tokenbus.workers.gpu.model.loader import LoadedModel
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig

PROMPT, NEW = 128, 128
BATCHES = (1, 64, 256)
TARGET = 3.0
"""Target for the engine's tokens per second at the largest batch, as a multiple of those of
``generate_batch``."""
KNOWN = ("vllm", "sglang", "lmdeploy", "tensorrt_llm")
Prompts = list[list[int]]


def run(world: World) -> None:
    """Measures our engine and the other engines one after another. At each batch size, all engines
    have the same prompts."""
    loaded = world.shape("8b")
    batches, new = ((2,), 4) if world.dry else (BATCHES, NEW)
    for batch in batches:
        prompts = random_prompts(batch, batch, 16 if world.dry else PROMPT, loaded.vocab_size)
        ours = _rate(world, prompts, new, _ours(world, loaded, batch))
        world.record(f"tokens_s_{batch}", ours)
        theirs = _rate(world, prompts, new, _generate_batch(world, loaded))
        world.record(f"generate_batch_tokens_s_{batch}", theirs)
        more = {"target": TARGET} if batch == BATCHES[-1] else {}
        world.record(f"over_generate_batch_{batch}", ours / theirs, **more)
    del loaded
    if not world.dry:
        torch.cuda.empty_cache()
    for name in KNOWN:
        if importlib.util.find_spec(name) is None:
            world.record(name, "not installed")
        elif name != "vllm":
            world.record(name, "installed, but not measured")
        elif not world.dry:
            _vllm(world, batches)


def _rate(
    world: World, prompts: Prompts, new: int, generate: Callable[[Prompts, int], None]
) -> float:
    """Tokens per second. On a GPU, a short run before the measurement warms up the engine."""
    if not world.dry:
        generate([prompt[:8] for prompt in prompts[:2]], 2)
    return len(prompts) * new / world.timed(lambda: generate(prompts, new))


def _ours(world: World, loaded: LoadedModel, batch: int) -> Callable[[Prompts, int], None]:
    size = world.cache_bytes if world.dry else 16 * 2**30
    engine = world.engine(loaded, max_num_seqs=batch, kv_cache_bytes=size)

    def generate(prompts: Prompts, new: int) -> None:
        for number, prompt in enumerate(prompts):
            engine.add(number, prompt, greedy(new))
        run_to_end(engine)

    return generate


def _generate_batch(world: World, loaded: LoadedModel) -> Callable[[Prompts, int], None]:
    """Returns a function that runs transformers' continuous batching. The function records a fault
    if a text has the wrong number of tokens."""
    model: Any = loaded.model
    model.set_attn_implementation("sdpa")
    # On a CPU, the default size of the cache is most of the free memory.
    sizes = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64) if world.dry else None

    def generate(prompts: Prompts, new: int) -> None:
        config = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new
        )
        found = model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=sizes
        )
        lengths = {len(one.generated_tokens) for one in found.values()}
        world.expect(lengths == {new}, f"generate_batch returned texts of {lengths} tokens")

    return generate


def _vllm(world: World, batches: tuple[int, ...]) -> None:
    """Measures vLLM with a model of the same shape. vLLM fills the model with random weights."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        shape = {**SHAPES["8b"], "max_position_embeddings": 8192}
        LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(Path(name))
        model = LLM(
            model=name,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=4096,
        )
        params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, detokenize=False)
        for batch in batches:
            prompts = random_prompts(batch, batch, PROMPT, 128_256)
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            model.generate(inputs[:1], params)
            seconds = world.timed(partial(model.generate, inputs, params))
            world.record(f"vllm_tokens_s_{batch}", batch * NEW / seconds)
