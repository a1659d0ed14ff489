"""The native code computes the logits that torch computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.block_manager import BlockManager
from tokenbus.workers.gpu.engine.scheduler import Batch, Chunk
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.model.backends import ForwardOptions
from tokenbus.workers.gpu.model.cpu_native import library as native_library
from tokenbus.workers.gpu.model.cpu_native.backend import CpuBackend
from tokenbus.workers.gpu.model.cpu_native.decoder import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    NativeDecoder,
)
from tokenbus.workers.gpu.model.cpu_native.huge_pages import HUGE, collapse
from tokenbus.workers.gpu.model.cpu_native.library import library
from tokenbus.workers.gpu.model.cuda.choice import choose_layout
from tokenbus.workers.gpu.model.loader import wrap_model
from tokenbus.workers.gpu.model.runner import Runner

from .shapes import VOCAB
from .test_architectures import CASES, make
from .test_fused import NOT_FUSED

BLOCKS = 64

pytestmark = pytest.mark.skipif(
    library() is None, reason="no native code was compiled for this machine"
)


def native_of(runner: Runner) -> NativeDecoder | None:
    """The native code of a runner; None if it has none."""
    assert isinstance(runner.backend, CpuBackend)
    return runner.backend.native


class Both:
    """Computes sequences by the native code and by torch, each with its own cache."""

    def __init__(self, name: str) -> None:
        loaded = wrap_model(name, make(name))
        layout = choose_layout(loaded)
        self.runners = [Runner(loaded, BLOCKS, layout), Runner(loaded, BLOCKS, layout)]
        native = native_of(self.runners[0])
        assert native is not None
        self.native = native
        backend = self.runners[1].backend
        assert isinstance(backend, CpuBackend)
        backend.native = None
        self._blocks = BlockManager(BLOCKS, layout.block_size)
        self._generator = torch.Generator().manual_seed(3)

    def sequence(self, length: int) -> Sequence:
        """A sequence of random tokens."""
        tokens = torch.randint(0, 500, (length,), generator=self._generator).tolist()
        return Sequence(0, 0, tokens, length, Sampling(), 1000)

    def difference(self, *parts: tuple[Sequence, int] | tuple[Sequence, int, list[int]]) -> float:
        """Runs a step with both. ``parts``: for each sequence, the sequence, the number of its
        tokens to compute, and a draft if any. Returns the greatest difference of the logits,
        divided by their standard deviation."""
        chunks = []
        for sequence, count, *drafts in parts:
            draft = drafts[0] if drafts else []
            start = sequence.num_computed_tokens
            assert (
                self._blocks.reserve(sequence.block_table, start, start + count + len(draft)) == []
            )
            chunks.append(Chunk(sequence, start, start + count + len(draft), draft))
            sequence.num_computed_tokens += count
        native, wanted = (runner.forward(runner.pack(Batch(chunks))[1]) for runner in self.runners)
        if not len(wanted):
            return 0.0
        return ((native - wanted).abs().max() / wanted.std()).item()

    def decode(self, *sequences: Sequence) -> float:
        """The difference for a step that computes one more token of each sequence."""
        for sequence in sequences:
            sequence.tokens.append(len(sequence.tokens) * 7 % 500)
        return self.difference(*((sequence, 1) for sequence in sequences))


@pytest.fixture(params=[name for name in CASES if name not in NOT_FUSED])
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


def test_logits_are_those_of_torch(both: Both) -> None:
    long, short, other = (both.sequence(length) for length in (60, 5, 11))
    # A short prompt in one step, a prompt in two chunks, and a long prompt in one step.
    assert both.difference((short, 5)) < 1e-3
    assert both.difference((other, 6)) < 1e-3
    assert both.difference((other, 5)) < 1e-3
    assert both.difference((long, 60)) < 1e-3
    for _ in range(7):
        assert both.decode(long, short, other) < 1e-3
    # Only one of the two sequences has a draft after its last token.
    long.tokens.append(3)
    short.tokens.append(4)
    assert both.difference((long, 1, [7, 8, 9]), (short, 1)) < 1e-3
    # The draft was refused. Other tokens take its positions.
    for _ in range(3):
        assert both.decode(long, short, other) < 1e-3


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads the code for processors with vectors half as wide as AVX-512's."""
    monkeypatch.setattr(native_library, "_processor", lambda machine: "x86_64_v3")
    library.cache_clear()
    yield
    monkeypatch.undo()
    library.cache_clear()


@pytest.fixture(params=["", "x86_64_v3"])
def processor(request: pytest.FixtureRequest) -> None:
    """Runs a test with the code for this processor, and with the code for narrower vectors."""
    if request.param:
        request.getfixturevalue("narrow")


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the processor has no AVX-512"
)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama: one key head for all",
        "gemma2: soft caps, windows in every other layer",
    ],
)
def test_narrower_vectors_give_the_same(name: str) -> None:
    both = Both(name)
    sequence = both.sequence(13)
    assert both.difference((sequence, 13)) < 1e-3
    for _ in range(5):
        assert both.decode(sequence) < 1e-3


@pytest.mark.usefixtures("processor")
def test_a_row_does_not_depend_on_the_others_or_on_the_threads() -> None:
    both = Both("llama")
    sequences = [both.sequence(4) for _ in range(22)]
    for sequence in sequences:
        both.difference((sequence, 4))
        sequence.num_computed_tokens = 3

    def logits(some: list[Sequence], threads: int) -> Any:
        _, packed = both.runners[0].pack(Batch([Chunk(one, 3, 4) for one in some]))
        return both.native.forward(packed.ids, packed, threads)

    together = logits(sequences, 1)
    assert torch.equal(logits(sequences, 3), together)
    for first, end in ((0, 1), (0, 2), (1, 4), (2, 7), (3, 12), (0, 17), (5, 22)):
        assert torch.equal(logits(sequences[first:end], 2), together[first:end])


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama: one key head for all",
        "llama: a key head for each",
        "mistral with a sliding window",
    ],
)
def test_rows_of_a_draft_are_those_of_single_tokens(name: str) -> None:
    """The attention of several rows is computed together, although their windows begin at different
    keys."""
    both = Both(name)
    sequence = both.sequence(68)
    both.difference((sequence, 68))
    ids = sequence.tokens[37:]

    def logits(start: int, draft: list[int]) -> Any:
        sequence.tokens[37:] = ids[: start - 36]
        _, packed = both.runners[0].pack(
            Batch([Chunk(sequence, start, start + 1 + len(draft), draft)])
        )
        return both.native.forward(packed.ids, packed, 2)

    together = logits(37, ids[1:])
    assert len(together) == len(ids) == 31
    for i in range(len(ids)):
        assert torch.equal(logits(37 + i, []), together[i : i + 1])


def test_weights_are_in_huge_pages_where_the_system_has_them() -> None:
    weight = torch.rand(4096, 512)
    before = weight.clone()
    address = weight.data_ptr()
    assert 0 <= collapse([weight]) <= weight.nbytes // HUGE + 1
    assert weight.data_ptr() == address
    assert torch.equal(weight, before)
    assert collapse([torch.rand(8, 8)]) == 0


def test_what_it_does_not_know_is_left_to_torch() -> None:
    model = make("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    loaded = wrap_model("llama", model)
    assert loaded.decoder is not None
    assert native_of(Runner(loaded, BLOCKS, choose_layout(loaded))) is None


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_an_id_without_an_embedding_is_an_error(token: int) -> None:
    both = Both("llama")
    sequence = both.sequence(3)
    sequence.tokens[1] = token
    with pytest.raises(IndexError, match=f"one of the tokens .*{token}.* is outside"):
        both.difference((sequence, 3))
    sequence.tokens[1], sequence.num_computed_tokens = 5, 0
    assert both.difference((sequence, 3)) < 1e-3


def test_embeddings_that_are_more_than_a_matrix_are_left_to_torch() -> None:
    model = make("llama")
    table = model.model.embed_tokens

    class Shifted(torch.nn.Module):
        weight = table.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return table(ids) + 1.0

    model.model.embed_tokens = Shifted()
    loaded = wrap_model("llama", model)
    assert loaded.decoder is not None
    assert native_of(Runner(loaded, BLOCKS, choose_layout(loaded))) is None


def test_a_library_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError(f"{path}: wrong ELF class")

    monkeypatch.setattr(native_library, "CDLL", fail)
    library.cache_clear()
    try:
        assert library() is None
        assert "wrong ELF class" in caplog.text
    finally:
        monkeypatch.undo()
        library.cache_clear()


def test_longer_steps_are_left_to_torch_unless_exact() -> None:
    loaded = wrap_model("llama", make("llama"))
    runner = Runner(loaded, BLOCKS, choose_layout(loaded), options=ForwardOptions(exact=False))
    assert runner.mirrors_for(MAX_TOKENS, MAX_SEQUENCES) is None
    assert runner.mirrors_for(MAX_TOKENS + 1, 1) is not None
    assert runner.mirrors_for(MAX_SEQUENCES + 1, MAX_SEQUENCES + 1) is not None


def test_no_step_is_left_to_torch_if_the_logits_must_be_exact() -> None:
    runner = Both("llama").runners[0]
    assert runner.path.exact
    assert runner.mirrors_for(2048, 256) is None


def test_long_drafts_and_many_streams_are_computed_in_turn() -> None:
    both = Both("llama")
    few, more = both.sequence(5), [both.sequence(4) for _ in range(MAX_SEQUENCES)]
    assert both.difference(*((one, len(one.tokens)) for one in (few, *more))) < 1e-3
    for _ in range(2):
        # Steps with many sequences, and then a step with the longest draft.
        assert both.decode(few, *more) < 1e-3
        assert both.decode(few, *more) < 1e-3
        few.tokens.append(9)
        assert both.difference((few, 1, list(range(40, 40 + MAX_TOKENS - 1)))) < 1e-3


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama: one key head for all",
        "gemma2: soft caps, windows in every other layer",
        "qwen3",
        "granite",
    ],
)
def test_rows_of_a_prompt_are_the_same_in_chunks_of_any_size(name: str) -> None:
    both = Both(name)
    sequence, beside = both.sequence(150), both.sequence(90)
    for one in (sequence, beside):
        both.difference((one, len(one.tokens)))

    def logits(threads: int, *chunks: Chunk) -> Any:
        """The logits of all tokens of the last chunk."""
        placed, packed = both.runners[0].pack(Batch(list(chunks)))
        first = sum(c.end - c.start for c in placed[: placed.index(chunks[-1])])
        count = chunks[-1].end - chunks[-1].start
        packed.rows = first + torch.arange(count).numpy()
        return both.native.forward(packed.ids, packed, threads)

    whole = logits(1, Chunk(sequence, 0, 150))
    for start, end in ((0, 1), (1, 38), (38, 39), (39, 103), (103, 150)):
        assert torch.equal(logits(2, Chunk(sequence, start, end)), whole[start:end])
        together = logits(3, Chunk(beside, 0, 90), Chunk(sequence, start, end))
        assert torch.equal(together, whole[start:end])
