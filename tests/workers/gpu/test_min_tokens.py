"""No sequence ends before it has ``min_tokens`` tokens, whichever path of the engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.sampling import Override, Sampling
from tokenbus.workers.gpu import worker as module
from tokenbus.workers.gpu.engine.engine import Continued, EngineConfig, TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model
from tokenbus.workers.gpu.sampling import races, sampler
from tokenbus.workers.gpu.sampling.biases import Bias
from tokenbus.workers.gpu.sampling.distributions import TokenOptions
from tokenbus.workers.gpu.sampling.min_tokens import Least
from tokenbus.workers.gpu.sampling.row_parameters import Row
from tokenbus.workers.gpu.sampling.sampler import sample
from transformers import GenerationConfig

from ...worlds.engine_client import ClientView, run
from ...worlds.steered_engine import one_thread
from . import shapes
from .moved import Moving
from .test_draft_model import engine_of as engine_with_draft_model
from .test_speculation import check_same, drained, drained_outputs, eager
from .ties import RecordingEngine

EOS = 0
NEWLINE = 199
NONE = 376
"""The token id of `` None``."""
ENDING = (
    "def add(a, b):\n    return a + b\n",
    "if __name__ == '__main__':\n    main()\n",
    "def add(a, b):\n    return",
)
"""Texts after which the embedded model ends the sequence: immediately after the first two, and 18
tokens after the third."""
VOCAB = 300
ENDS = (3, 70, 299)


@pytest.fixture(scope="module")
def embedded() -> Iterator[LoadedModel]:
    with one_thread():
        yield load_model("embedded")


def engine_of(loaded: LoadedModel, **config: Any) -> RecordingEngine:
    return eager(RecordingEngine(loaded, EngineConfig(kv_cache_bytes=2**23, **config)))


def prompts(loaded: LoadedModel) -> list[list[int]]:
    return [loaded.tokenizer.encode(text) for text in ENDING]


@pytest.fixture(scope="module")
def unchanged() -> Any:
    """The embedded model as transformers loads it."""
    return load_model("embedded").model


def generated(model: Any, prompt: Sequence[int], **fields: Any) -> list[int]:
    """The new tokens of ``generate`` in transformers."""
    config = GenerationConfig(do_sample=False, pad_token_id=EOS, **fields)
    tokens = model.generate(torch.tensor([list(prompt)]), generation_config=config)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def tokens_of(outputs: Sequence[TokenOutput]) -> dict[int, list[int]]:
    """The tokens of each request. If there is only one request, the tokens of each of its
    sequences."""
    several = len({o.request for o in outputs}) > 1
    found: dict[int, list[int]] = {}
    for output in outputs:
        if output.token is not None:
            found.setdefault(output.request if several else output.seq, []).append(output.token)
    return found


# --- compared with transformers -------------------------------------------------------------------


def test_greedy_equals_generate_with_a_minimum(embedded: LoadedModel, unchanged: Any) -> None:
    wanted: dict[int, list[int]] = {}
    asked = {
        0: (prompts(embedded)[0], 9, []),
        1: (prompts(embedded)[1], 9, [NEWLINE]),
        2: (prompts(embedded)[2], 18, []),
        3: (prompts(embedded)[2], 19, [NEWLINE]),
        4: (prompts(embedded)[2], 24, []),
    }
    for number, (prompt, least, stop) in asked.items():
        ends = {"eos_token_id": [EOS, *stop], "max_new_tokens": 24}
        wanted[number] = generated(unchanged, prompt, min_new_tokens=least, **ends)
        assert len(generated(unchanged, prompt, **ends)) < len(wanted[number])
        assert len(wanted[number]) > least or least == 24
    for speculation, overlap in ((False, False), (False, True), (True, False), (True, True)):
        engine = engine_of(embedded, speculation=speculation, overlap=overlap)
        for number, (prompt, least, stop) in asked.items():
            engine.add(number, prompt, Sampling(max_tokens=24, min_tokens=least, stop=[*stop]))
        assert tokens_of(drained(engine)) == wanted


# --- rows of logits -------------------------------------------------------------------------------


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "from the model's distribution": {"temperature": 1.0},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {9: 4.0, 70: 30.0}},
}


def words(*, without: Sequence[int] = (), only: Sequence[int] | None = None) -> np.ndarray:
    """A mask that allows the tokens ``only`` (None: all tokens), except those in ``without``."""
    allowed = np.ones(VOCAB, dtype=bool) if only is None else np.isin(np.arange(VOCAB), only)
    allowed[list(without)] = False
    packed = np.packbits(np.pad(allowed, (0, -VOCAB % 32)), bitorder="little")
    return packed.view(np.uint32)


def likely_ends(rows: int) -> torch.Tensor:
    """Logits in which a token that ends the sequence is the likeliest of each row."""
    torch.manual_seed(3)
    logits = 2 * torch.randn(rows, VOCAB)
    for row in range(rows):
        logits[row, ENDS[row % len(ENDS)]] = 9.0
    return logits


def rows_of(name: str, position: int, masks: Sequence[np.ndarray | None], least: bool) -> list[Row]:
    """Rows with these masks. ``least``: whether two of three rows still have to reach
    ``min_tokens``."""
    fields = {"processed_logprobs": True, "kept": True, "min_tokens": 5} | SAMPLED[name]
    return [
        Row(
            Sampling(**fields),
            seed=number,
            seq=0,
            position=position,
            prompt=[9, 4, 70],
            generated=[4, 8],
            mask=mask,
            least=Least(5, ENDS) if least and number % 3 else None,
        )
        for number, mask in enumerate(masks)
    ]


@pytest.mark.parametrize("launches", [False, True], ids=["CPU", "device"])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_row_is_sampled_as_under_a_mask_without_the_ends(
    monkeypatch: pytest.MonkeyPatch, name: str, launches: bool
) -> None:
    if launches:
        for one in (races, sampler):
            monkeypatch.setattr(one, "costs_launches", lambda tensor: True)
    some = list(range(0, VOCAB, 2))
    masks: list[np.ndarray | None] = [None, None, None, words(only=some), words(only=some)]
    without = [
        mask if not number % 3 else words(without=ENDS, only=None if mask is None else some)
        for number, mask in enumerate(masks)
    ]
    logits = likely_ends(len(masks))
    indices = range(len(masks))
    found = sample(logits, indices, rows_of(name, 4, masks, True))
    wanted = sample(logits, indices, rows_of(name, 4, without, False))
    assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    assert (found.candidates, found.errors) == (wanted.candidates, wanted.errors)
    assert not {found.tokens[i] for i in (1, 2, 4)} & set(ENDS)
    reached = sample(logits, indices, rows_of(name, 5, masks, True))
    plain = sample(logits, indices, rows_of(name, 5, masks, False))
    assert (reached.tokens, reached.candidates) == (plain.tokens, plain.candidates)


@pytest.mark.parametrize("name", ["greedy", "temperature"])
@pytest.mark.parametrize("by", ["mask", "bias", "logit_bias"])
def test_a_row_that_allows_only_an_end_takes_it(name: str, by: str) -> None:
    others = [token for token in range(VOCAB) if token != 70]
    forbidden = Bias(np.full(VOCAB - 1, -np.inf, np.float32), np.array(others))
    fields: dict[str, Any] = {"min_tokens": 5} | SAMPLED[name]
    if by == "logit_bias":
        fields["logit_bias"] = dict.fromkeys(others, -float("inf"))
    row = Row(
        Sampling(**fields),
        seed=1,
        seq=0,
        position=0,
        mask=words(only=[70]) if by == "mask" else None,
        bias=forbidden if by == "bias" else None,
        least=Least(5, ENDS),
    )
    other = Row(Sampling(**fields), 2, 0, 0, mask=words(only=[70, 8]), least=Least(5, ENDS))
    found = sample(likely_ends(2), [0, 1], [row, other])
    assert (found.tokens[0], found.errors) == (70, {})
    if by == "mask":
        assert found.tokens[1] == 8


def test_a_row_that_allows_nothing_is_an_error() -> None:
    row = Row(Sampling(min_tokens=5), 1, 0, 0, mask=words(only=[]), least=Least(5, ENDS))
    assert sample(likely_ends(1), [0], [row]).errors == {0: sampler.NOTHING_ALLOWED}


# --- sequences ------------------------------------------------------------------------------------


REQUESTS: tuple[dict[str, Any], ...] = (
    {"stop": [NEWLINE, "return"]},
    {"n": 3, "temperature": 0.9, "seed": 3, "stop": [NEWLINE]},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "frequency_penalty": 0.2},
    {"min_tokens": 20},
)
WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"overlap": True},
    {"speculation": True},
    {"speculation": True, "overlap": True},
)


def test_streams_are_the_same_with_drafts_and_overlap(embedded: LoadedModel) -> None:
    found = []
    for way in WAYS:
        engine = engine_of(embedded, **way)
        for i, prompt in enumerate(prompts(embedded)):
            for j, fields in enumerate(REQUESTS):
                sampling = Sampling(**{"max_tokens": 20, "min_tokens": 12} | fields)
                engine.add(10 * i + j, prompt, sampling, text=True)
        found.append(drained_outputs(engine))
    check_same(*found)
    lengths = {key: outputs[-1].pos + 1 for key, outputs in found[0].streams.items()}
    assert min(lengths.values()) >= 12
    assert any(lengths[key] < 20 for key in lengths if key[0] % 10 < 3)
    # A request that runs alone has the same stream.
    for i, prompt in enumerate(prompts(embedded)):
        engine = engine_of(embedded)
        sampling = Sampling(max_tokens=20, min_tokens=12, **REQUESTS[0])
        engine.add(10 * i, prompt, sampling, text=True)
        own = {(10 * i, 0): found[0].streams[10 * i, 0]}
        check_same(dataclasses.replace(found[0], streams=own), drained_outputs(engine))


def test_a_draft_model_does_not_write_ends_that_are_excluded() -> None:
    llama = wrap_model("llama", shapes.make("llama"))
    plain = engine_of(llama)
    bias = dict.fromkeys((3, 5, 9), 80.0)
    sampling = Sampling(max_tokens=24, min_tokens=16, stop=[5, 9], logit_bias=bias)
    plain.add(1, [3, 5, 9, 9], sampling)
    found = drained_outputs(plain)
    assert tokens_of(found.streams[1, 0])[0][:16] == [3] * 16
    for way in ((True, False), (True, True)):
        engine = engine_with_draft_model(llama, llama, way)
        engine.add(1, [3, 5, 9, 9], sampling)
        check_same(found, drained_outputs(engine))
        metrics = engine.metrics()
        # The draft model samples like the large model, so each of its tokens is accepted.
        assert metrics["spec_decode_num_accepted_tokens"]
        assert metrics["spec_decode_num_accepted_tokens"] == metrics["spec_decode_num_draft_tokens"]


@pytest.fixture(scope="module")
def wanted(embedded: LoadedModel, unchanged: Any) -> list[int]:
    """The tokens that follow the last prompt with ``SAMPLING``. Without the minimum, there would be
    9."""
    prompt, ends = prompts(embedded)[2], {"eos_token_id": [EOS, NONE], "max_new_tokens": 20}
    assert generated(unchanged, prompt, **ends)[8:] == [NONE]
    found = generated(unchanged, prompt, min_new_tokens=12, **ends)
    assert NONE not in found[:12]
    return found


SAMPLING = Sampling(max_tokens=20, min_tokens=12, stop=[NONE])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_fork_counts_the_tokens_of_its_parent(
    embedded: LoadedModel, wanted: list[int], way: dict[str, bool]
) -> None:
    engine, client = engine_of(embedded, **way), ClientView()
    engine.add(1, prompts(embedded)[2], SAMPLING)
    while len(client.tokens[0]) < 6:
        client.take(engine.step())
    engine.fork(1, 0, 2)
    assert run(engine, client).tokens == {0: wanted, 1: wanted, 2: wanted}


def test_the_text_of_a_fork_counts_the_tokens_of_its_parent(
    embedded: LoadedModel,
) -> None:
    # The stop string is complete after the fork, but before the minimum.
    sampling = msgspec.structs.replace(SAMPLING, stop=[embedded.tokenizer.decode(NONE)])
    found = []
    for forks in (0, 1):
        engine, client = engine_of(embedded), ClientView()
        engine.add(1, prompts(embedded)[2], sampling)
        while len(client.tokens[0]) < 6:
            client.take(engine.step())
        if forks:
            engine.fork(1, 0, forks)
        found.append(run(engine, client).tokens)
    assert found[1] == {0: found[0][0], 1: found[0][0]}
    assert len(found[0][0]) > 12 > found[0][0].index(NONE) >= 6


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_sequence_from_another_worker_counts_the_tokens_that_it_had(
    embedded: LoadedModel, wanted: list[int], way: dict[str, bool]
) -> None:
    engine, client = engine_of(embedded, **way), ClientView()
    begun = {seq: wanted[: 3 + 2 * seq] for seq in range(3)}
    sampling = msgspec.structs.replace(SAMPLING, n=3)
    engine.add(1, prompts(embedded)[2], sampling, continued=Continued(begun, 3))
    client.tokens = {seq: list(tokens) for seq, tokens in begun.items()}
    client.texts = {seq: [""] * len(tokens) for seq, tokens in begun.items()}
    assert run(engine, client).tokens == {0: wanted, 1: wanted, 2: wanted}


@pytest.mark.parametrize("cut", [0, 5, 12, 14])
def test_a_stream_moves_before_and_after_its_minimum(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embedded: LoadedModel,
    wanted: list[int],
    cut: int,
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    # This token completes the stop string after the minimum. It also occurs before the minimum,
    # where it must not end the stream.
    end = next(i for i, token in enumerate(wanted) if i >= 12 and token in wanted[:12])
    stop = embedded.tokenizer.decode(wanted[end])
    body = {"prompt": ENDING[2], "max_tokens": 20, "min_tokens": 12, "stop": [NONE, stop]}
    moving = Moving(tmp_path, embedded, b"GENERATE", body)
    entries = [entry for message in moving.messages for entry in message]
    assert [entry.token for entry in entries] == wanted[: end + 1]
    assert entries[-1].stop == stop
    moving.check(cut, overlap=bool(cut % 2))


# --- controllers ----------------------------------------------------------------------------------


def mask_of(loaded: LoadedModel, *tokens: int) -> np.ndarray:
    words = np.zeros(-(-loaded.vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def test_a_mask_that_allows_only_an_end_ends_the_sequence(embedded: LoadedModel) -> None:
    engine = engine_of(embedded)
    for number, ignores in enumerate((False, True)):
        sampling = Sampling(max_tokens=9, min_tokens=6, ignore_eos=ignores, stop=[NEWLINE])
        engine.add(number, prompts(embedded)[0], sampling, speculate=False)
    outputs: list[TokenOutput] = []
    for allowed in ((EOS, NEWLINE, 5), (EOS, NEWLINE)):
        step = engine.begin()
        for number in range(2):
            engine.set_mask(number, 0, mask_of(embedded, *allowed))
        outputs += engine.finish(step).as_outputs()
    assert {number: tokens[0] for number, tokens in tokens_of(outputs).items()} == {0: 5, 1: 5}
    assert {tokens[1] for tokens in tokens_of(outputs).values()} <= {EOS, NEWLINE}
    # If a request has a controller, the engine ignores ends, because the controller decides.
    assert [o.finish_reason for o in outputs if o.request == 0] == [None, "stop"]


def test_an_override_of_a_controller_leaves_the_minimum(embedded: LoadedModel) -> None:
    engine = engine_of(embedded)
    engine.add(1, prompts(embedded)[0], Sampling(max_tokens=9, min_tokens=6), speculate=False)
    step = engine.begin()
    engine.set_mask(1, 0, None, options=TokenOptions(override=Override(temperature=0.01)))
    [output] = engine.finish(step)
    assert output.token != EOS


# --- stop strings and errors ----------------------------------------------------------------------


def test_a_stop_string_does_not_end_the_text_before_the_minimum(embedded: LoadedModel) -> None:
    prompt = prompts(embedded)[2]
    engine = engine_of(embedded)
    for number, least in enumerate((0, 12)):
        sampling = Sampling(max_tokens=18, min_tokens=least, stop=["b"])
        engine.add(number, prompt, sampling, text=True)
    outputs = drained(engine)
    texts = {n: "".join(o.text or "" for o in outputs if o.request == n) for n in range(2)}
    ends = [o for o in outputs if o.finish_reason]
    assert texts[0] == " a = "
    assert texts[1].startswith(" a = b\n    if b is None:")
    assert [(o.finish_reason, o.stop) for o in ends] == [("stop", "b")] * 2
    assert ends[1].pos >= 12


def test_a_minimum_above_the_maximum_is_refused(embedded: LoadedModel) -> None:
    engine = engine_of(embedded)
    with pytest.raises(RequestError) as error:
        engine.add(1, [5, 6], Sampling(max_tokens=3, min_tokens=4))
    assert (error.value.code, error.value.path) == (Code.INVALID_FIELD, "$.min_tokens")
    assert error.value.message == "min_tokens is 4; expected at most max_tokens, which is 3"
    assert not engine.has_requests
    most = 2**70
    engine.add(1, [5, 6], Sampling(max_tokens=most, min_tokens=most, stop=[NEWLINE]))
    assert engine.step()
