"""The tokens and log-probabilities of a sequence have the same bits in every batch.

The reference of each request is an engine that runs only this request, with one token of its prompt
in each step. Both engines use the kernels for this processor, so bits may be compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Continued, Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.backends import ForwardOptions
from tokenbus.workers.gpu.model.cpu_native.backend import CpuBackend
from tokenbus.workers.gpu.model.cpu_native.functions import exact_functions
from tokenbus.workers.gpu.model.cpu_native.library import library
from tokenbus.workers.gpu.model.cuda.choice import choose_layout
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model, wrap_model
from tokenbus.workers.gpu.model.runner import Runner
from tokenbus.workers.gpu.sampling.sampler import score

from .test_architectures import make

native = pytest.mark.skipif(
    library() is None, reason="no native code was compiled for this machine"
)
Stream = list[tuple[int | None, float | None]]
"""The tokens and log-probabilities of a sequence."""


@dataclass(frozen=True)
class Job:
    """A request. Its prompt begins with the first ``shared`` tokens of a text that all requests
    share."""

    shared: int
    own: int
    sampling: Sampling

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt."""
        of = random.Random(self.own)
        period = [of.randrange(4096) for _ in range(5)]
        # The end of the text repeats itself, so that the engine has drafts.
        return [*random.Random(0).choices(range(4096), k=self.shared), *period * 3]


@cache
def loaded() -> LoadedModel:
    """The embedded model."""
    return load_model("embedded")


def engine_of(model: LoadedModel, **config: int | bool) -> Engine:
    """An engine in exact mode."""
    given: dict[str, int | bool] = {"kv_cache_bytes": 2**24, **config}
    return Engine(model, EngineConfig(exact="on", **given))  # type: ignore[arg-type]


def streams(outputs: list[TokenOutput]) -> dict[tuple[int, int], Stream]:
    """The tokens and log-probabilities of some outputs, by request and sequence."""
    found: dict[tuple[int, int], Stream] = {}
    for output in outputs:
        if output.token is not None:
            stream = found.setdefault((output.request, output.seq), [])
            stream.append((output.token, output.logprob))
    return found


def run(engine: Engine) -> dict[tuple[int, int], Stream]:
    """Runs all requests to their ends; returns their streams."""
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return streams(outputs)


@cache
def reference() -> Engine:
    """The engine that runs one request at a time."""
    return engine_of(loaded(), max_num_batched_tokens=1)


_alone: dict[str, dict[int, Stream]] = {}
"""The results of ``alone``, by request."""


def alone(job: Job) -> dict[int, Stream]:
    """The streams of a request that runs alone, with one prompt token in each step. They are
    computed once."""
    found = _alone.get(repr(job))
    if found is None:
        engine = reference()
        engine.add(0, job.prompt, job.sampling)
        found = _alone[repr(job)] = {seq: stream for (_, seq), stream in run(engine).items()}
    return found


def jobs() -> st.SearchStrategy[Job]:
    sampling = st.builds(
        Sampling,
        max_tokens=st.integers(1, 24),
        ignore_eos=st.just(True),
        temperature=st.sampled_from([0.0, 0.8]),
        top_p=st.sampled_from([1.0, 0.9]),
        n=st.sampled_from([1, 1, 1, 3]),
        seed=st.integers(0, 5),
        top_logprobs=st.sampled_from([0, 0, 2]),
    )
    return st.builds(Job, st.sampled_from([0, 3, 40, 70]), st.integers(0, 3), sampling)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of threads that each forward of a test uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@native
@settings(max_examples=8, deadline=None)
@given(
    batch=st.lists(jobs(), min_size=1, max_size=32),
    chunk=st.sampled_from([7, 33, 256, 2048]),
    slots=st.sampled_from([2, 256]),
    blocks=st.sampled_from([24, 400]),
    drafts=st.booleans(),
    late=st.integers(0, 6),
)
def test_a_stream_does_not_depend_on_batch_chunks_prefix_hits_drafts_forks_or_preemption(
    batch: list[Job], chunk: int, slots: int, blocks: int, drafts: bool, late: int
) -> None:
    model = loaded()
    per_block = 16 * sum(2 * 4 * s.kv_heads * s.key_dim for s in model.layers.values())
    engine = engine_of(
        model,
        max_num_batched_tokens=chunk,
        max_num_seqs=slots,
        kv_cache_bytes=blocks * per_block,
        speculation=drafts,
    )
    outputs: list[TokenOutput] = []
    for number, job in enumerate(batch):
        engine.add(number, job.prompt, job.sampling)
        for _ in range(late if number % 3 == 0 else 0):
            outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    found = streams(outputs)
    for number, job in enumerate(batch):
        for seq, stream in alone(job).items():
            assert found[number, seq] == stream


@native
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("after", [1, 5])
def test_a_stream_that_moves_continues_with_equal_bits(after: int) -> None:
    jobs = [Job(40, i, Sampling(max_tokens=12, ignore_eos=True, seed=i)) for i in range(20)]
    moved = engine_of(loaded(), speculation=True)
    for number, job in enumerate(jobs):
        begun = [token for token, _ in alone(job)[0][:after]]
        tokens = [token for token in begun if token is not None]
        moved.add(number, job.prompt, job.sampling, continued=Continued({0: tokens}, 1))
    for (number, _), stream in run(moved).items():
        assert stream == alone(jobs[number])[0][after:]


@native
def test_a_score_has_the_log_probabilities_of_the_stream() -> None:
    job = Job(70, 1, Sampling(max_tokens=20, ignore_eos=True, seed=4))
    stream = alone(job)[0]
    engine = engine_of(loaded())
    engine.score(9, job.prompt, [token for token, _ in stream if token is not None])
    assert run(engine)[9, 0] == stream


@native
@pytest.mark.parametrize(
    "name", ["qwen3", "granite", "gemma2: soft caps, windows in every other layer"]
)
def test_other_architectures_are_exact_too(name: str) -> None:
    model = wrap_model(name, make(name))
    sampling = Sampling(max_tokens=8, ignore_eos=True, temperature=0.0)
    prompts = [random.Random(i).choices(range(500), k=20 + 9 * i) for i in range(24)]
    together = engine_of(model, max_num_batched_tokens=100)
    for number, prompt in enumerate(prompts):
        together.add(number, prompt, sampling)
    found = run(together)
    for number in (0, 11, 23):
        one = engine_of(model)
        one.add(number, prompts[number], sampling)
        assert run(one)[number, 0] == found[number, 0]


@native
def test_an_exact_engine_has_no_second_copy_of_the_weights() -> None:
    model = wrap_model("llama", make("llama"))
    layout = choose_layout(model)
    assert model.decoder is not None
    Runner(model, 4, layout)
    assert model.decoder.head._packed is None
    Runner(model, 4, layout, options=ForwardOptions(exact=False))
    assert model.decoder.head._packed is not None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt-neox", "its layers run as transformers' modules"),
        ("embedded", "its weights are torch.bfloat16"),
        ("llama with dynamic rotary embeddings", "depend on the longest text of a step"),
    ],
)
def test_a_model_that_cannot_be_exact_says_why(name: str, why: str) -> None:
    if library() is None and name != "gpt-neox":
        why = "no native code was compiled for this machine"
    if name == "embedded":
        model = load_model(name, dtype="bfloat16")
    else:
        module = make(name.split()[0])
        if "dynamic" in name:
            rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            module.config.rope_parameters = rotary
            module = type(module)(module.config).eval()
        model = wrap_model(name, module)
    engine = Engine(model, EngineConfig(kv_cache_bytes=2**22))
    assert not engine.path.exact
    assert why in engine.path.why_not_exact
    with pytest.raises(ModelLoadError, match=r"exact is on, but .* batch"):
        Engine(model, EngineConfig(kv_cache_bytes=2**22, exact="on"))


def test_exact_can_be_off() -> None:
    engine = Engine(loaded(), EngineConfig(kv_cache_bytes=2**22, exact="off"))
    assert not engine.path.exact
    assert isinstance(engine._runner.backend, CpuBackend)
    if library() is not None:
        assert engine.path.why_not_exact == "the setting exact is off"


@native
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["embedded", "llama: one key head for all", "qwen3", "granite"])
def test_a_plain_forward_with_the_native_functions_gives_the_bits_of_the_stream(name: str) -> None:
    model = loaded() if name == "embedded" else wrap_model(name, make(name))
    prompts = [random.Random(i).choices(range(500), k=20 + 7 * i) for i in range(18)]
    engine = engine_of(model, max_num_batched_tokens=100)
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, Sampling(max_tokens=20, ignore_eos=True, seed=number))
    found = run(engine)
    for number in (0, 17):
        tokens = [token for token, _ in found[number, 0] if token is not None]
        ids = torch.tensor([[*prompts[number], *tokens]])
        with exact_functions(model.model):
            logits = model.model(ids, use_cache=False).logits[0]
        values, _ = score(logits[len(prompts[number]) - 1 : -1].contiguous(), tokens).fetch()
        assert list(zip(tokens, values, strict=True)) == found[number, 0]
