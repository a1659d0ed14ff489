"""The native code for rows of logits gives the results of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.model.cpu_native import library as native_library
from tokenbus.workers.gpu.model.cpu_native.library import library
from tokenbus.workers.gpu.sampling import sampler
from tokenbus.workers.gpu.sampling.native_rows import reduce_rows
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import NAN, sample

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="no native code for this processor",
)
INF = float("inf")
SIZES = (1, 7, 8, 16, 17, 500, 1024, 4097, 151_936)


def kinds() -> list[str]:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return ["x86_64_v3", *["x86_64_v4"] * wide]


@pytest.fixture(params=kinds())
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a test with the vectors of AVX2, and with those of AVX-512 if the processor has them."""
    monkeypatch.setattr(native_library, "_processor", lambda machine: request.param)
    library.cache_clear()
    yield
    monkeypatch.undo()
    library.cache_clear()


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 30.0, 1e4])
def test_it_gives_the_best_token_and_its_log_probability(size: int, spread: float) -> None:
    torch.manual_seed(size)
    logits = spread * torch.randn(3, size) - 50.0
    logits[1, size // 2] = logits[1].max() + spread
    logits[2, : size // 2] = -INF
    reduced = reduce_rows(logits)
    assert reduced is not None
    tokens, numbers = reduced
    wanted = torch.log_softmax(logits.double(), -1).max(-1).values
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert numbers[0].tolist() == tokens.tolist()
    assert numbers[2].tolist() == [1.0] * 3
    assert torch.allclose(torch.from_numpy(numbers[1]), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("processor")
def test_the_first_of_equal_values_is_taken() -> None:
    logits = torch.zeros(1, 100)
    for place in (99, 64, 33, 17, 16, 1):
        logits[0, place] = 2.0
        reduced = reduce_rows(logits)
        assert reduced is not None
        assert reduced[0].tolist() == [place]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("place", [0, 15, 16, 99])
def test_what_is_no_number_is_seen(place: int) -> None:
    logits = torch.randn(3, 100)
    logits[1, place] = float("nan")
    logits[2] = -INF
    reduced = reduce_rows(logits)
    assert reduced is not None
    first, *others = reduced[1][1].tolist()
    assert first == pytest.approx(torch.log_softmax(logits[0], -1).max().item(), abs=1e-5)
    assert all(value != value for value in others)
    result = sample(logits, [0, 1, 2], [Row(Sampling(temperature=0.0), 1, 0, 0)] * 3)
    assert result.errors == {1: NAN, 2: NAN}


def test_others_are_left_to_torch() -> None:
    assert reduce_rows(torch.zeros(2, 8, dtype=torch.float64)) is None
    assert reduce_rows(torch.zeros(8, 2).t()) is None
    assert reduce_rows(torch.zeros(2, 8, device="meta")) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_step_draws_the_same_with_it_and_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has rows of each kind: greedy, random, with a bias, with penalties and with masks."""
    torch.manual_seed(seed)
    size = 4096
    logits = 4 * torch.randn(12, size)
    words = torch.randint(-(2**31), 2**31, (size // 32,)).to(torch.int32).numpy()
    ways = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=0.0, logit_bias={7: 40.0}),
        Sampling(temperature=1.2, top_k=40, frequency_penalty=0.5),
    ]
    rows = [
        Row(way, 40 + seed, number, 3, mask=words if masked else None)
        for number, (way, masked) in enumerate((w, m) for m in (False, True, False) for w in ways)
    ]
    which = list(range(len(rows)))
    with_it = sample(logits, which, rows)
    monkeypatch.setattr(sampler, "reduce_rows", lambda own: None)
    without = sample(logits, which, rows)
    assert with_it.tokens == without.tokens
    assert with_it.errors == without.errors == {}
    assert with_it.logprobs == pytest.approx(without.logprobs, abs=1e-5)
