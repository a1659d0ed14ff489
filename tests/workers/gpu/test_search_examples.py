"""The example controllers that read distributions, in C and in Python, on a real engine."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import wasmtime
from tokenbus.protocol.messages import Token
from tokenbus.protocol.metrics import Histogram
from tokenbus.protocol.sampling import Distribution
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.python import PythonProgram
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ..controller.wasm.guests import SDK, compile_guest
from .controlled import Workers
from .moved import give
from .shapes import logits_after

PROMPT = "def add(a, b):\n    "
KINDS = ["c", "py"]
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_waiting")]
wasm_engine = make_engine(Limits())


@cache
def example(name: str) -> Any:
    """The module of a Python example."""
    spec = importlib.util.spec_from_file_location(name, SDK / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@cache
def program(name: str, kind: str) -> Program:
    """The program of an example in C or in Python."""
    if kind == "c":
        wasm = compile_guest(SDK / f"examples/{name}.c")
        return NativeProgram(wasm_engine, wasmtime.Module(wasm_engine, wasm))
    return PythonProgram(getattr(example(name), name.capitalize()))


def arg_of(kind: str, arg: dict[str, Any], *names: str) -> Any:
    """The argument of an example: an object for Python, a line with the values for C."""
    return arg if kind == "py" else " ".join(str(arg[name]) for name in names)


class Generated(Workers):
    """Runs a request with an example as its controller to its end."""

    def __init__(
        self, folder: Path, loaded: LoadedModel, made: Program | None, arg: Any, **body: Any
    ) -> None:
        loop = Loop(folder, loaded, overlap=False)
        super().__init__(loop, VariableStorage(), Random(0), program=made)
        if made is not None:
            body |= {"controller": "c", "controller_arg": arg}
        give(self.loop, b"GENERATE", {"prompt": PROMPT} | body, 0)
        self.entries: list[Token] = [entry for entries in self.finish() for entry in entries]
        self.tokens: dict[int, list[int]] = {0: []}
        self.ends: dict[int, str] = {}
        self.seen: dict[int, list[Distribution]] = {}
        """The distributions from which tokens were sampled, by sequence."""
        self.before: list[tuple[tuple[int, ...], Distribution, int | None]] = []
        """For each distribution: the tokens before it, the distribution, and the sampled token."""
        for entry in self.entries:
            self._take(entry)

    def logs(self, seq: int) -> str:
        return "".join(entry.logs for entry in self.entries if entry.seq == seq)

    def _take(self, entry: Token) -> None:
        if entry.parent is not None:
            self.tokens[entry.seq] = list(self.tokens[entry.parent])
        tokens = self.tokens[entry.seq]
        del tokens[len(tokens) - entry.backtrack :]
        if entry.distribution is not None:
            self.before.append((tuple(tokens), entry.distribution, entry.token))
        if entry.token is not None:
            tokens.append(entry.token)
        if entry.finish_reason is not None:
            self.ends[entry.seq] = f"{entry.finish_reason} {entry.error or ''}".strip()


@pytest.mark.parametrize("path", sorted((SDK / "examples").glob("*.*")), ids=lambda p: p.name)
def test_the_examples_that_read_distributions_are_short(path: Path) -> None:
    if path.stem in ("watermark", "guidance", "contrastive", "beams"):
        assert len(path.read_text().splitlines()) <= 120


# --- beam search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_beams_find_the_text_of_a_beam_search(
    tmp_path: Path, embedded: LoadedModel, kind: str, width: int
) -> None:
    length = 8
    arg = arg_of(kind, {"width": width, "tokens": length}, "width", "tokens")
    run = Generated(tmp_path, embedded, program("beams", kind), arg, max_tokens=length + 1)
    seen = {before: found for before, found, _ in run.before}
    # Brute force, with the log-probabilities that the engine has reported for each text.
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for step in range(length):
        every = [
            (-(score + logprob), place, token)
            for place, (score, text) in enumerate(beams)
            for token, logprob in seen[text].top.items()
        ]
        chosen = sorted(every)[: 1 if step + 1 == length else width]
        beams = [(-cost, (*beams[place][1], token)) for cost, place, token in chosen]
    [(score, text)] = beams
    assert set(run.ends.values()) == {"controller"}
    # Each text of the search is computed once: the prompt, and one token for each later look.
    engine = run.loop.worker._models.engines["m"]
    computed = engine.metrics()["iteration_tokens_total"]
    assert isinstance(computed, Histogram)
    assert computed.total == len(embedded.tokenizer.encode(PROMPT)) + len(run.before) - 1
    [winner] = [seq for seq, tokens in run.tokens.items() if "score" in run.logs(seq)]
    assert tuple(run.tokens[winner]) == text
    assert float(run.logs(winner).split()[-1]) == pytest.approx(score, abs=0.01)
    greedy = Generated(tmp_path, embedded, None, None, max_tokens=length, ignore_eos=True)
    reached = sum(entry.logprob or 0.0 for entry in greedy.entries)
    assert score >= reached - 1e-3
    if width == 1:
        assert list(text) == greedy.tokens[0]


# --- contrastive sampling -------------------------------------------------------------------------


def distinct(tokens: list[int]) -> float:
    """The share of distinct pairs among the pairs of neighbouring tokens."""
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_contrastive_sampling_replaces_tokens_where_the_model_is_uncertain(
    tmp_path: Path, embedded: LoadedModel, kind: str
) -> None:
    contrastive, bound, penalty = example("contrastive"), 0.5, 2.0
    arg = arg_of(kind, {"entropy": bound, "penalty": penalty}, "entropy", "penalty")
    options = {"max_tokens": 80, "ignore_eos": True}
    made = program("contrastive", kind)
    run = Generated(tmp_path, embedded, made, arg, **options)
    prompt = embedded.tokenizer.encode(PROMPT)
    kept = 0
    # The token at the length limit cannot be replaced.
    for (text, seen, token), (after, _, _) in itertools.pairwise(run.before):
        best = token
        if seen.entropy > bound:
            before = [*prompt, *text]
            best = max(
                seen.top,
                key=lambda t: seen.top[t] - penalty * (1 + contrastive.repeated(before, t)),
            )
        kept += best == token
        assert after[: len(text) + 1] == (*text, best)
    assert 0 < kept < len(run.before) - 1
    greedy = Generated(tmp_path, embedded, None, None, **options)
    assert distinct(run.tokens[0]) > distinct(greedy.tokens[0])


# --- classifier-free guidance ---------------------------------------------------------------------

SECOND = "# a class\nclass A:\n    "


def logprobs(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of the token after these tokens, ``[vocab]``."""
    return torch.log_softmax(logits_after(loaded.model, tokens), -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_guidance_chooses_the_token_of_both_prompts(
    tmp_path: Path, embedded: LoadedModel, kind: str, scale: float
) -> None:
    encode: Callable[[str], list[int]] = embedded.tokenizer.encode
    first, second, length = encode(PROMPT), encode(SECOND), 16
    arg: Any = {"prompt": SECOND, "scale": scale}
    if kind == "c":
        arg = f"{scale} 0 {SECOND}"
    run = Generated(
        tmp_path,
        embedded,
        program("guidance", kind),
        arg,
        max_tokens=length + len(second) + 1,
        ignore_eos=True,
    )
    assert run.ends == {0: "controller", 1: "controller"}
    text = run.tokens[0]
    assert len(text) == length
    for place, token in enumerate(text):
        c = logprobs(embedded, [*first, *text[:place]])
        u = logprobs(embedded, [*first, *second, *text[:place]])
        u = u.clamp(min=u.topk(64).values[-1].item())
        guided = scale * c + (1 - scale) * u
        assert guided[token] >= guided.max() - 1e-2
    greedy = Generated(tmp_path, embedded, None, None, max_tokens=length, ignore_eos=True)
    assert (text == greedy.tokens[0]) == (scale == 1.0)


# --- the watermark --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_detector_finds_the_watermark_in_the_model_s_text(
    tmp_path: Path, embedded: LoadedModel, kind: str
) -> None:
    watermark, size = example("watermark"), embedded.vocab_size
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    arg: Any = {"key": 42} if kind == "py" else "42"
    marked = Generated(tmp_path, embedded, program("watermark", kind), arg, **options).tokens[0]
    plain = Generated(tmp_path, embedded, None, None, **options).tokens[0]
    scores = [watermark.z_score(marked, 42, size), watermark.z_score(plain, 42, size)]
    assert scores[0] > 4
    assert scores[1] < 2
    if kind == "c":
        # The module also contains the detector, which reads the tokens of a prompt.
        for tokens, score in zip((marked, plain), scores, strict=True):
            made = program("watermark", "c")
            run = Generated(tmp_path, embedded, made, "detect 42", prompt=tokens, max_tokens=2)
            assert float(run.logs(0).removeprefix("z ")) == pytest.approx(score, abs=0.01)
            assert run.ends == {0: "controller"}
