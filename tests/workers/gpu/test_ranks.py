"""Two ranks on the CPU generate the same tokens as one rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenbus.clients import Client, RequestError
from tokenbus.workers.gpu.model.loader import load_model

from ...processes import Bus, until
from . import shapes

WAIT_S = 300.0
"""A limit in seconds that only bounds a hang."""

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def two_ranks(processes: None) -> Iterator[Bus]:
    """A worker whose model is divided between two processes."""
    with Bus(tp=2, threads=1) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        yield bus


@pytest.fixture
def spread(two_ranks: Bus) -> Iterator[Client]:
    with two_ranks.client() as client:
        yield client


def test_greedy_tokens_are_those_of_generate(spread: Client) -> None:
    model = load_model("embedded").model
    prompts = shapes.prompts(8, 300, 4096)
    streams = [spread.generate(p, max_tokens=12, ignore_eos=True) for p in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        wanted = shapes.greedy(model, prompt, 12)
        assert shapes.same_tokens(model, prompt, wanted, stream.tokens())


def test_sampled_tokens_are_those_of_one_rank(spread: Client, client: Client) -> None:
    options: Any = {"max_tokens": 20, "temperature": 0.8, "ignore_eos": True, "n": 2}
    for seed in range(2):
        one = [s.tokens for s in client.generate([5, 6 + seed], seed=seed, **options).wait()]
        two = [s.tokens for s in spread.generate([5, 6 + seed], seed=seed, **options).wait()]
        assert two == one


def test_scores_are_those_of_one_rank(spread: Client, client: Client) -> None:
    one, two = client.score("import ", "os, sys"), spread.score("import ", "os, sys")
    assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_bad_requests_disturb_no_rank(spread: Client) -> None:
    with pytest.raises(RequestError):
        spread.generate([5, 9999]).wait()
    assert len(spread.generate([5], max_tokens=3, ignore_eos=True).tokens()) == 3


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary folder for the processes that a test starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("lost", ["rank", "worker"])
def test_neither_a_worker_nor_its_rank_outlives_the_other(lost: str, temporary: Path) -> None:
    with Bus(tp=2, threads=1) as bus:
        worker = bus.start_worker()
        bus.wait_for_models("embedded")
        [rank] = psutil.Process(worker.pid).children()
        if lost == "rank":
            rank.kill()
            assert worker.wait(WAIT_S) == 1
            assert "rank 1 ended" in worker.log
        else:
            worker.kill()
            until(lambda: not rank.is_running(), WAIT_S, "the rank has ended")
        assert left_in(temporary) == []
        bus.workers.clear()


def test_a_worker_that_is_stopped_ends_its_ranks(temporary: Path) -> None:
    with Bus(tp=2, threads=1) as bus:
        worker = bus.start_worker()
        bus.wait_for_models("embedded")
        [rank] = psutil.Process(worker.pid).children()
        worker.send(signal.SIGTERM)
        assert worker.wait(WAIT_S) == 0
        until(lambda: not rank.is_running(), WAIT_S, "the rank has ended")
        assert left_in(temporary) == []
        bus.workers.clear()


def left_in(temporary: Path) -> list[str]:
    """The files in a temporary folder, except those that torch keeps there for all processes."""
    return [f.name for f in temporary.iterdir() if not f.name.startswith("torchinductor")]


def test_the_folder_of_a_model_can_be_spread(tmp_path: Path) -> None:
    shapes.make("qwen2").save_pretrained(tmp_path / "qwen2")
    name = str(tmp_path / "qwen2")
    with Bus(tp=2, threads=1, model=name) as bus:
        bus.start_worker()
        bus.wait_for_models(name)
        with bus.client() as client:
            tokens = client.generate([5, 6, 7], max_tokens=10, ignore_eos=True).tokens()
    assert tokens == shapes.greedy(shapes.make("qwen2"), [5, 6, 7], 10)
