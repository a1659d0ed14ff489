"""Through the whole system, the tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import Client
from tokenbus.workers.gpu.model.loader import load_model

from ...processes import Bus
from . import shapes

pytestmark = pytest.mark.process

NEW = 12
COUNT = 50
LONGEST = 700


class Served:
    """A model that a worker serves, and the same model in this process."""

    def __init__(self, name: str, model: Any, vocab: int) -> None:
        self.name = name
        self.model = model
        self.prompts = shapes.prompts(COUNT, LONGEST, vocab)
        self.wanted = [shapes.greedy(model, p, NEW) for p in self.prompts]

    def check(self, got: list[list[int]]) -> None:
        """Fails if a continuation differs from ``model.generate`` before the first tie."""
        wrong = [
            i
            for i, (prompt, wanted, tokens) in enumerate(
                zip(self.prompts, self.wanted, got, strict=True)
            )
            if not shapes.same_tokens(self.model, prompt, wanted, tokens)
        ]
        assert wrong == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def shape_bus(processes: None, folder: Path) -> Iterator[Bus]:
    """A bus whose worker loads the random models from disk, on demand."""
    with Bus(allow=f"{folder}/*", max_models=4) as bus:
        bus.start_worker()
        bus.wait_for_models("embedded")
        yield bus


@pytest.fixture(scope="module", params=["embedded", *shapes.SHAPES])
def served(request: pytest.FixtureRequest, folder: Path) -> Served:
    if request.param == "embedded":
        return Served("embedded", load_model("embedded").model, 4096)
    model = shapes.make(request.param)
    model.save_pretrained(folder / request.param)
    return Served(str(folder / request.param), model, shapes.VOCAB)


@pytest.fixture
def shape_client(shape_bus: Bus) -> Iterator[Client]:
    with shape_bus.client() as client:
        yield client


def test_greedy_alone_equals_generate(served: Served, shape_client: Client) -> None:
    options: Any = {"model": served.name, "max_tokens": NEW, "ignore_eos": True}
    served.check([shape_client.generate(p, **options).tokens() for p in served.prompts])


def test_greedy_all_at_once_equals_generate(served: Served, shape_client: Client) -> None:
    options: Any = {"model": served.name, "max_tokens": NEW, "ignore_eos": True}
    streams = [shape_client.generate(p, **options) for p in served.prompts]
    served.check([s.tokens() for s in streams])


def test_score_equals_a_plain_forward(served: Served, shape_client: Client) -> None:
    for prompt, scored in ((served.prompts[3], served.prompts[9]), ([5], [7])):
        found = shape_client.score(prompt, scored, model=served.name)
        assert found.tokens == scored
        wanted = shapes.log_probs(served.model, prompt, scored)
        assert found.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_seed_gives_the_same_alone_and_in_a_batch_of_32(
    served: Served, shape_client: Client
) -> None:
    def begin(seed: int) -> Any:
        return shape_client.generate(
            served.prompts[seed],
            model=served.name,
            max_tokens=NEW,
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            ignore_eos=True,
        )

    alone = [begin(seed).tokens() for seed in range(32)]
    together = [s.tokens() for s in [begin(seed) for seed in range(32)]]
    assert together == alone
    assert len({tuple(t) for t in alone}) > 16


def test_each_of_n_sequences_is_sampled_for_itself(served: Served, shape_client: Client) -> None:
    options: Any = {"model": served.name, "max_tokens": NEW, "ignore_eos": True, "seed": 3}
    stream = shape_client.generate(served.prompts[5], n=4, temperature=1.0, **options)
    four = [s.tokens for s in stream.wait()]
    assert len(four) == 4
    assert len({tuple(t) for t in four}) == 4
    first = shape_client.generate(served.prompts[5], temperature=1.0, **options).tokens()
    assert four[0] == first
