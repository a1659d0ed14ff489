"""Every stream is the same with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, wrap_model
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.speculation.lengths import Costs

from ...counts import rounds
from . import shapes
from .test_architectures import make
from .ties import Outputs, RecordingEngine

pytestmark = pytest.mark.long

NEW = rounds(36, 60)
ROOM = 32 * 2**20
CODE = "def first(a, b):\n    return a + b\n\n\ndef second(a, b):\n    return a - b\n\n\ndef third("
LIST = "names = ['Ada', 'Alan', 'Barbara', 'Claude', 'Donald', 'Edsger', 'Frances', 'Grace', "
NUMBERS = list(range(1, 20)) * 3
FEW = dict.fromkeys((3, 5, 9), 80.0)
"""A bias that leaves three tokens to a model of random weights. Its text repeats itself, but not
for long."""


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return wrap_model("llama", shapes.make("llama"))


@pytest.fixture(scope="module", params=["embedded", "llama"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    found: LoadedModel = request.getfixturevalue(request.param)
    return found


def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Prompts that are likely to be continued with text that they contain."""
    if loaded.tokenizer is not None:
        return [loaded.tokenizer.encode(text) for text in (CODE, LIST)]
    return [[*NUMBERS[:9], 3, 5, 9, 9, 5, 3, 3, 3, 5, 5, 5, 9], NUMBERS]


def sampling_of(loaded: LoadedModel, **options: Any) -> Sampling:
    """Sampling with which the model repeats itself."""
    bias = {} if loaded.tokenizer is not None else {"logit_bias": FEW}
    return Sampling(**{"max_tokens": NEW, "ignore_eos": True} | bias | options)


def engine_of(loaded: LoadedModel, speculation: bool, overlap: bool = False) -> RecordingEngine:
    config = EngineConfig(speculation=speculation, overlap=overlap, kv_cache_bytes=ROOM)
    return eager(RecordingEngine(loaded, config))


AnyEngine = TypeVar("AnyEngine", bound=Engine)


def eager(engine: AnyEngine) -> AnyEngine:
    """The engine, with costs that make every draft worthwhile."""
    if engine._speculation._costs is not None:
        engine._speculation._costs = Costs(1, 0.0, 0.01, 0.0, 64)
    return engine


WAYS = ((False, False), (True, False), (True, True))
"""Whether the engine has drafts, and whether its steps overlap."""


def drained(engine: Engine) -> list[TokenOutput]:
    """Runs steps until the engine has no work."""
    outputs: list[TokenOutput] = []
    for _ in range(10_000):
        if not engine.has_work:
            assert engine.stats()["kv_blocks_used"] == 0
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine still has work")


def drained_outputs(engine: RecordingEngine) -> Outputs:
    """Runs steps until the engine has no work; returns the outputs by sequence."""
    return Outputs.of(engine, drained(engine))


def check_same(plain: Outputs, *drafted: Outputs) -> None:
    """Fails if a stream has other tokens, log-probabilities, texts or ends. If an engine is not
    exact, entries after a tie are not compared."""
    for outputs in drafted:
        assert plain.streams.keys() == outputs.streams.keys()
        tolerance = plain.tolerance(outputs)
        for key, expected in plain.streams.items():
            found = outputs.streams[key]
            if tolerance:
                count = plain.compared(key, found)
                expected, found = expected[:count], found[:count]
            _check_same(expected, found, tolerance)


def _check_same(
    expected: Sequence[TokenOutput], found: Sequence[TokenOutput], tolerance: float
) -> None:
    assert [o.token for o in found] == [o.token for o in expected]
    assert [o.pos for o in found] == [o.pos for o in expected]
    for a, b in zip(found, expected, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        assert (a.logprob or 0.0) == pytest.approx(b.logprob or 0.0, rel=0, abs=tolerance)
        assert (a.finish_reason, a.stop, a.error) == (b.finish_reason, b.stop, b.error)
        assert (a.text, a.shortened, a.parent) == (b.text, b.shortened, b.parent)
        if a.top_logprobs and b.top_logprobs and len(b.top_logprobs) > 1:
            assert a.top_logprobs == pytest.approx(b.top_logprobs, rel=0, abs=tolerance)


def accepted(engine: Engine) -> int:
    found = engine.metrics()["spec_decode_num_accepted_tokens"]
    assert isinstance(found, int)
    return found


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.6, "seed": 5},
    "cut": {"temperature": 0.9, "seed": 6, "top_p": 0.8, "top_k": 20, "min_p": 0.05},
    "penalised": {"repetition_penalty": 1.05, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "penalised and sampled": {"temperature": 0.5, "seed": 7, "frequency_penalty": 0.2},
    "biased": {"logit_bias": {5: 4.0, 9: -100.0, 17: 3.0}},
    "several": {"n": 3, "temperature": 0.5, "seed": 8},
    "likely": {"top_logprobs": 3},
    "short": {"max_tokens": 7},
}


@pytest.mark.parametrize("names", [["greedy"], ["sampled"], list(REQUESTS)], ids=str)
def test_a_stream_is_the_same_with_drafts(loaded: LoadedModel, names: list[str]) -> None:
    found = []
    for way in WAYS:
        engine = engine_of(loaded, *way)
        for i, prompt in enumerate(prompts(loaded)):
            for j, name in enumerate(names):
                sampling = sampling_of(loaded, **REQUESTS[name])
                engine.add(100 * i + j, prompt, sampling, text=loaded.tokenizer is not None)
        found.append(drained_outputs(engine))
    check_same(*found)
    assert accepted(engine) > 0


@pytest.mark.parametrize(
    "name", ["mistral with a sliding window", "gemma2: soft caps, windows in every other layer"]
)
def test_windows_and_soft_caps_hold_within_a_draft(name: str) -> None:
    found = []
    loaded = wrap_model(name, make(name))
    for speculation in (False, True):
        engine = engine_of(loaded, speculation)
        for i in range(3):
            engine.add(i, [*NUMBERS[i:], *prompts(loaded)[0]], sampling_of(loaded))
        found.append(drained_outputs(engine))
    check_same(*found)
    assert accepted(engine) > 0


def test_a_text_that_repeats_takes_fewer_steps(embedded: LoadedModel) -> None:
    engine = engine_of(embedded, True)
    engine.add(1, prompts(embedded)[0], sampling_of(embedded, max_tokens=60))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps < 60 / 2
    assert accepted(engine) >= 60 - steps - 1


def test_a_session_drafts_from_its_earlier_requests_and_no_others(embedded: LoadedModel) -> None:
    prompt = prompts(embedded)[0]
    plain = engine_of(embedded, False)
    sampling = sampling_of(embedded, temperature=0.9, seed=11)
    found, drafted = [], []
    engine = engine_of(embedded, True)
    for request, client in enumerate((1, 1, 2)):
        plain.add(request, prompt, sampling, client=client)
        engine.add(request, prompt, sampling, client=client)
        before = accepted(engine)
        found.append((drained_outputs(plain), drained_outputs(engine)))
        drafted.append(accepted(engine) - before)
    for expected, outputs in found:
        check_same(expected, outputs)
    # The session has seen this text, so nearly all tokens are drafted.
    assert drafted[1] > NEW - 8
    assert drafted[2] == drafted[0] < drafted[1]


def test_an_end_within_a_draft_is_where_it_was(embedded: LoadedModel) -> None:
    prompt = prompts(embedded)[0]
    whole = engine_of(embedded, False)
    whole.add(1, prompt, Sampling(max_tokens=NEW, ignore_eos=True), text=True)
    outputs = drained(whole)
    text = "".join(o.text or "" for o in outputs)
    late = outputs[-NEW // 3].token
    assert late is not None
    stops: list[Any] = [[text[-80:-70]], [text[-40:-37]], [late], [text[-60:-50], late]]
    for stop in stops:
        found = []
        for way in WAYS:
            engine = engine_of(embedded, *way)
            for request in range(2):
                sampling = Sampling(max_tokens=NEW, ignore_eos=True, stop=stop)
                engine.add(request, prompt, sampling, text=not request)
            found.append(drained_outputs(engine))
        check_same(*found)


def test_every_length_ends_where_it_should(llama: LoadedModel) -> None:
    engine = engine_of(llama, True)
    for count in range(1, 25):
        engine.add(count, prompts(llama)[0], sampling_of(llama, max_tokens=count))
    found = drained_outputs(engine).streams
    longest = [o.token for o in found[24, 0]]
    for count in range(1, 25):
        outputs = found[count, 0]
        assert [o.token for o in outputs] == longest[:count]
        assert [o.finish_reason for o in outputs] == [None] * (count - 1) + ["length"]
    assert accepted(engine) > 0


def test_streams_are_the_same_where_blocks_run_out(llama: LoadedModel) -> None:
    found = []
    for speculation, overlap in WAYS:
        block = 16 * 2 * 2 * 8 * 4 * 3
        config = EngineConfig(
            kv_cache_bytes=(24 if speculation else 2000) * block,
            max_num_batched_tokens=48,
            speculation=speculation,
            overlap=overlap,
        )
        engine = eager(RecordingEngine(llama, config))
        for i, prompt in enumerate(shapes.prompts(8, 90, llama.vocab_size)):
            sampling = sampling_of(
                llama, max_tokens=rounds(50, 80), temperature=0.1 * (i % 2), seed=i
            )
            engine.add(i, prompt, sampling)
        found.append(drained_outputs(engine))
    check_same(*found)
    assert engine.stats()["preemptions"] > 0
    assert accepted(engine) > 0


def test_forks_and_splices_beside_drafts(loaded: LoadedModel) -> None:
    """One request is forked and spliced, the others have drafts. Neither changes the other."""
    first, second = prompts(loaded)

    def steer(engine: Engine, outputs: list[TokenOutput], seen: set[int]) -> None:
        for output in outputs:
            if output.request == 9 and output.token is not None and not output.finish_reason:
                if output.seq == 0 and output.pos == 10:
                    engine.fork(9, 0, 2)
                elif output.seq == 1 and output.pos == 20 and 20 not in seen:
                    seen.add(20)
                    engine.splice(9, 1, 4, [3, 4, 5])
                elif output.seq == 2 and output.pos % 7 == 0:
                    words = np.full(engine.mask_words, 0x55555555, np.uint32)
                    engine.set_mask(9, 2, words)

    found = []
    for way in WAYS:
        engine = engine_of(loaded, *way)
        engine.add(9, first, sampling_of(loaded), speculate=False)
        for i, prompt in enumerate((first, second)):
            engine.add(i, prompt, sampling_of(loaded))
        outputs: list[TokenOutput] = []
        seen: set[int] = set()
        while engine.has_work:
            new = list(engine.step())
            steer(engine, new, seen)
            outputs += new
        found.append(Outputs.of(engine, outputs))
    check_same(*found)
    assert accepted(engine) > 0


Steer = Callable[[Engine], object]


def steered_in_step(loaded: LoadedModel, steer: Steer) -> tuple[RecordingEngine, list[TokenOutput]]:
    """A request to which ``steer`` applies an operation between the forward and the sampling of the
    first draft."""
    engine = engine_of(loaded, True)
    engine.add(1, prompts(loaded)[0], sampling_of(loaded, max_tokens=30))
    outputs: list[TokenOutput] = []
    while engine.has_work:
        step = engine.begin()
        if step.drafted:
            steer(engine)
            outputs += engine.finish(step)
            return engine, [*outputs, *drained(engine)]
        outputs += engine.finish(step)
    raise AssertionError("there was no draft")


def test_a_mask_is_applied_where_a_draft_is_under_way(llama: LoadedModel) -> None:
    only = np.zeros(16, np.uint32)
    only[1] = 4  # token 34
    _, outputs = steered_in_step(llama, lambda engine: engine.set_mask(1, 0, only))
    assert [o.token for o in outputs].count(34) == 1
    assert len([o for o in outputs if o.token is not None]) == 30


def test_a_bias_is_applied_where_a_draft_is_under_way(llama: LoadedModel) -> None:
    """The biases along the draft are unknown, so no token of the draft is verified."""
    bias = Bias(np.array([1000.0], dtype=np.float32), np.array([34]))
    _, outputs = steered_in_step(llama, lambda engine: engine.set_mask(1, 0, None, bias))
    assert [o.token for o in outputs].count(34) == 1
    assert len([o for o in outputs if o.token is not None]) == 30


def test_a_fork_is_sampled_where_a_draft_is_under_way(llama: LoadedModel) -> None:
    engine, outputs = steered_in_step(llama, lambda engine: engine.fork(1, 0, 1))
    found = Outputs.of(engine, outputs).streams
    start = found[1, 1][0].pos
    parent = [o.token for o in found[1, 0] if o.token is not None]
    child = [o.token for o in found[1, 1] if o.token is not None]
    assert child == parent[start:]


@pytest.mark.parametrize("kind", ["splice", "defer", "suspend", "end", "abort"])
def test_a_draft_that_is_not_verified_leaves_nothing(llama: LoadedModel, kind: str) -> None:
    def steer(engine: Engine) -> None:
        if kind == "splice":
            engine.splice(1, 0, 0, [5])
        elif kind == "defer":
            engine.defer(1, 0)
            engine.reschedule(1, 0)
        elif kind == "suspend":
            engine.suspend(1, 0)
            engine.resume(1, 0)
        elif kind == "end":
            engine.end(1, 0)
        else:
            engine.abort(1)

    engine, outputs = steered_in_step(llama, steer)
    tokens = [o.token for o in outputs if o.token is not None]
    if kind in ("defer", "suspend"):
        plain = engine_of(llama, False)
        plain.add(1, prompts(llama)[0], sampling_of(llama, max_tokens=30))
        assert tokens == [o.token for o in drained(plain)]
    assert engine.stats()["kv_blocks_used"] == 0
    assert not engine.has_requests


def test_nan_behind_a_refused_draft_changes_nothing(llama: LoadedModel) -> None:
    """The logits after the first wrong token of a draft are NaN. The engine computes the sequence
    again, with the same tokens."""
    prompt, sampling = prompts(llama)[0], sampling_of(llama)
    plain = engine_of(llama, False)
    plain.add(1, prompt, sampling)
    expected = drained_outputs(plain)
    engine = engine_of(llama, True)
    engine.add(1, prompt, sampling)
    outputs: list[TokenOutput] = []
    spoiled = 0
    while engine.has_work:
        step = engine.begin()
        for sequence in step.drafted:
            row, draft = step.rows[sequence], sequence.draft
            assert step.logits is not None
            few = step.logits[row : row + len(draft), list(FEW)].argmax(-1).tolist()
            wrong = [i for i, n in enumerate(few) if list(FEW)[n] != draft[i]]
            if wrong:
                with torch.inference_mode():
                    step.logits[row + wrong[0] + 1 :] = torch.nan
                spoiled += 1
        outputs += engine.finish(step)
    assert spoiled == 1
    check_same(expected, Outputs.of(engine, outputs))
