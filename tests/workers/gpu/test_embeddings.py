"""The EMBED requests of a worker: batches over several requests, turns, ends and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.errors import Code, RequestError
from tokenbus.protocol.messages import Embed, Error, Msg, Pooling
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.loader import LoadedModel, is_encoder, load_model
from tokenbus.workers.gpu.model.pooling import ChunkedText, pool_chunk, pooled, pooling_of
from tokenbus.workers.gpu.serving import embeddings as module
from tokenbus.workers.gpu.serving.embeddings import (
    BATCH_S,
    FIRST_BATCH_TOKENS,
    IDLE_AFTER_S,
    IDLE_BATCH_S,
    MAX_BATCH_TOKENS,
    MAX_CPU_ENCODER_TOKENS,
    MAX_WIDTH,
    MIN_BATCH_TOKENS,
    Embeddings,
)
from tokenbus.workers.gpu.serving.live_streams import LiveStreams
from tokenbus.workers.gpu.serving.streams import Stream
from transformers import BertConfig, LlamaConfig, T5Config

from ...worlds.gpu_worker_loop import Loop

SHORT = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded.NAME, device="cpu")


class Sent:
    """A worker's EMBED requests, and its answers. The clock advances only in batches, by
    ``token_s`` for each token of a batch, including padding."""

    def __init__(self, loaded: LoadedModel, token_s: float = 0.0) -> None:
        self.engine = Engine(loaded, EngineConfig(kv_cache_bytes=1 << 22))
        self.frames: list[Any] = []
        self.now = 100.0
        self.token_s = token_s
        self.batches: list[list[list[int]]] = []
        """The inputs of each batch. A chunk of an input counts as a batch."""
        streams = LiveStreams(self._post, lambda stream: None)
        self.embeddings = Embeddings(streams, self._post, clock=lambda: self.now)

    def pooled(
        self, loaded: LoadedModel, texts: Sequence[list[int]], poolings: list[Pooling]
    ) -> torch.Tensor:
        """Calls the real ``pooled``, and advances the clock by the time of the batch's tokens."""
        self.batches.append(list(texts))
        self.now += self.token_s * len(texts) * max(map(len, texts))
        return pooled(loaded, texts, poolings)

    def pool_chunk(
        self, loaded: LoadedModel, text: ChunkedText, num_tokens: int
    ) -> torch.Tensor | None:
        """Calls the real ``pool_chunk``, and advances the clock by the time of its tokens."""
        start = text.num_computed_tokens
        vector = pool_chunk(loaded, text, num_tokens)
        self.batches.append([text.tokens[start : text.num_computed_tokens]])
        self.now += self.token_s * (text.num_computed_tokens - start)
        return vector

    def _post(self, frames: Any, link: int) -> None:
        self.frames.append(frames)

    def add(
        self,
        request: int,
        inputs: list[list[int]],
        session: int = 1,
        by: str = "",
        engine: Engine | None = None,
    ) -> None:
        """Receives an EMBED request."""
        stream = Stream(request, session, request, "msgpack", "embedded", 1)
        message = Embed(stream_id=request, inputs=inputs, by=by)
        self.embeddings.add(stream, engine or self.engine, message)

    def sizes(self, steps: int, busy: bool = True) -> list[int]:
        """Runs ``steps`` batches; returns the number of tokens of each."""
        before = len(self.batches)
        for _ in range(steps):
            self.embeddings.step(busy)
        return [sum(map(len, batch)) for batch in self.batches[before:]]

    def answers(self) -> list[tuple[int, int]]:
        """The stream ids of the answers, and their numbers of vectors."""
        found = [decode_as(Msg, body, "msgpack") for kind, _, body in self.frames if kind == b"MSG"]
        return [(one.stream_id, len(one.embedded.vectors) // 768) for one in found]


@pytest.fixture
def timed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """EMBED requests of a model of such a speed that the bound of a batch does not change."""
    sent = Sent(loaded, BATCH_S / FIRST_BATCH_TOKENS)
    monkeypatch.setattr(module, "pooled", sent.pooled)
    monkeypatch.setattr(module, "pool_chunk", sent.pool_chunk)
    return sent


def test_inputs_of_several_requests_are_one_batch(loaded: LoadedModel) -> None:
    sent = Sent(loaded)
    sent.add(1, SHORT)
    sent.add(2, [[6]])
    assert [stream.request for stream in sent.embeddings.streams()] == [1, 2]
    sent.embeddings.step(True)
    assert sent.answers() == [(1, 2), (2, 1)]
    assert not sent.embeddings.has_work


def test_a_request_of_many_tokens_does_not_delay_another_one(timed: Sent) -> None:
    timed.add(1, [[7] * 100] * 11)
    timed.add(2, [[6]], session=2)
    assert timed.sizes(1) == [500]
    assert timed.answers() == []
    timed.sizes(1)
    assert timed.answers() == [(2, 1)]
    while timed.embeddings.has_work:
        timed.sizes(1)
    assert timed.answers() == [(2, 1), (1, 11)]


FULL = FIRST_BATCH_TOKENS // 2 + 1
"""Number of tokens of an input. Two such inputs do not fit into one batch."""


def test_sessions_take_turns_and_so_do_their_users(timed: Sent) -> None:
    """Each batch has one input, because two do not fit."""
    for request in (1, 2, 3, 4):
        timed.add(request, [[request] * FULL] * 2, session=1, by="a")
    timed.add(5, [[5] * FULL] * 2, session=1, by="b")
    timed.add(6, [[6] * FULL] * 2, session=2)
    timed.sizes(8)
    assert [batch[0][0] for batch in timed.batches] == [1, 6, 5, 6, 1, 5, 2, 2]
    assert timed.answers() == [(6, 2), (1, 2), (5, 2), (2, 2)]


def test_a_batch_has_inputs_of_one_session_and_then_of_the_next(timed: Sent) -> None:
    timed.add(1, [[1] * 100] * 2, session=1)
    timed.add(2, [[2] * 100] * 2, session=1)
    timed.add(3, [[3] * 100] * 2, session=2)
    timed.sizes(2)
    assert [[text[0] for text in batch] for batch in timed.batches] == [[1, 1, 3, 3, 2], [2]]


def test_an_input_that_does_not_fit_has_the_next_turn(timed: Sent) -> None:
    timed.add(1, [[1]] * 3, session=1)
    timed.add(2, [[2] * (FIRST_BATCH_TOKENS // 2)] * 2, session=2)
    timed.add(3, [[3]], session=1)
    timed.sizes(2)
    assert [[text[0] for text in batch] for batch in timed.batches] == [[1, 1, 1], [2, 2]]


def test_a_model_of_another_engine_keeps_its_turn(timed: Sent) -> None:
    other = Engine(timed.engine.loaded, EngineConfig(kv_cache_bytes=1 << 22))
    timed.add(1, [[1]], session=1)
    timed.add(2, [[2]], session=2, engine=other)
    timed.add(3, [[3]], session=3)
    timed.add(4, [[4]], session=3)
    timed.sizes(2)
    assert timed.batches == [[[1], [3], [4]], [[2]]]


def test_a_cancelled_turn_is_left_out(timed: Sent) -> None:
    for request in (1, 2, 3):
        timed.add(request, [[request] * FULL], session=request)
    timed.embeddings.cancel(2)
    timed.sizes(2)
    assert [batch[0][0] for batch in timed.batches] == [1, 3]
    assert not timed.embeddings.has_work


def test_the_bound_of_a_batch_follows_the_time_of_the_last_one(timed: Sent) -> None:
    timed.add(1, [[1] * 8] * 4000)
    # The bound is 512 tokens at first, and then the number that takes BATCH_S.
    timed.token_s = BATCH_S / 130
    assert timed.sizes(3) == [FIRST_BATCH_TOKENS, 128, 128]
    # The bound at most doubles from batch to batch.
    timed.token_s = BATCH_S / 1030
    assert timed.sizes(5) == [128, 256, 512, 1024, 1024]
    # Even if the model is very slow, a batch has some tokens.
    timed.token_s = BATCH_S
    assert timed.sizes(3) == [1024, MIN_BATCH_TOKENS, MIN_BATCH_TOKENS]


def test_a_small_batch_does_not_lower_the_bound(timed: Sent) -> None:
    timed.add(1, [[1]])
    assert timed.sizes(1) == [1]
    timed.add(2, [[2] * 8] * 64)
    assert timed.sizes(1) == [FIRST_BATCH_TOKENS]


def test_each_model_has_its_own_bound(timed: Sent) -> None:
    timed.token_s = BATCH_S / 128
    timed.add(1, [[1] * 8] * 64)
    timed.sizes(1)
    other = Engine(timed.engine.loaded, EngineConfig(kv_cache_bytes=1 << 22))
    timed.add(2, [[2] * 8] * 64, engine=other)
    assert timed.sizes(1) == [FIRST_BATCH_TOKENS]


def test_an_idle_worker_takes_large_batches(timed: Sent) -> None:
    timed.add(1, [[1] * 64] * 1000)
    timed.token_s = IDLE_BATCH_S / MAX_BATCH_TOKENS
    grown = [512, 1024, 2048, 4096, MAX_BATCH_TOKENS]
    assert timed.sizes(5, busy=False) == grown
    # A request arrives. From then on, batches take BATCH_S until the engines have been idle for
    # IDLE_AFTER_S.
    small = int(MAX_BATCH_TOKENS * BATCH_S / IDLE_BATCH_S) // 64 * 64
    timed.embeddings.note_step()
    assert timed.sizes(2, busy=True) == [small, small]
    assert timed.sizes(1, busy=False) == [small]
    timed.now += IDLE_AFTER_S
    assert timed.sizes(1, busy=False) == [MAX_BATCH_TOKENS]


def test_an_input_above_the_bound_runs_alone_and_in_chunks(timed: Sent) -> None:
    timed.add(1, [[1], [2] * (FIRST_BATCH_TOKENS + 1), [3]])
    assert timed.sizes(4) == [1, FIRST_BATCH_TOKENS, 1, 1]
    assert timed.answers() == [(1, 3)]


def test_the_chunks_of_a_long_input_have_their_own_bound(timed: Sent) -> None:
    timed.token_s = BATCH_S / 128.5
    timed.add(1, [[1] * 1024])
    assert timed.sizes(5) == [FIRST_BATCH_TOKENS, 128, 128, 128, 128]
    timed.add(2, [[2] * 8] * 64)
    assert timed.sizes(1) == [FIRST_BATCH_TOKENS]


def test_a_long_input_has_chunks_even_after_large_batches_of_short_inputs(timed: Sent) -> None:
    timed.token_s = 0.0
    timed.engine.loaded = replace(timed.engine.loaded, context_length=4 * MAX_WIDTH)
    timed.add(1, [[1] * 512] * 40)
    while timed.embeddings.has_work:
        timed.sizes(1)
    timed.add(2, [[2] * (MAX_WIDTH + 1)])
    assert timed.sizes(2) == [MAX_WIDTH, 1]


def test_other_inputs_are_computed_between_the_chunks_of_a_long_input(timed: Sent) -> None:
    """Only one long input of about this length is computed at a time, because each has a KV
    cache."""
    timed.add(1, [[1] * 1024], session=1)
    timed.add(2, [[2] * 1024], session=2)
    timed.add(3, [[3], [3], [3] * FULL], session=3)
    timed.sizes(6)
    assert [batch[0][0] for batch in timed.batches] == [1, 3, 1, 2, 3, 2]
    assert timed.answers() == [(1, 1), (3, 3), (2, 1)]


def test_a_long_input_does_not_wait_for_a_much_longer_one(timed: Sent) -> None:
    timed.add(1, [[1] * 1024], session=1)
    timed.add(2, [[2] * (FIRST_BATCH_TOKENS + 1)], session=2)
    timed.sizes(4)
    assert [batch[0][0] for batch in timed.batches] == [1, 2, 1, 2]
    assert timed.answers() == [(1, 1), (2, 1)]


def counted(loaded: LoadedModel, text: ChunkedText, num_tokens: int) -> torch.Tensor | None:
    """Stands for ``pool_chunk`` where only the numbers of tokens matter."""
    text.num_computed_tokens = min(text.num_computed_tokens + num_tokens, len(text.tokens))
    return torch.zeros(1, 192) if text.num_computed_tokens == len(text.tokens) else None


def test_long_inputs_end_in_the_order_of_their_lengths(
    timed: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owners of the inputs take turns by chunk."""
    monkeypatch.setattr(sys.modules[__name__], "pool_chunk", counted)
    timed.engine.loaded = replace(timed.engine.loaded, context_length=1 << 15)
    for request, tokens in ((1, 8192), (2, 4096), (3, 2048), (4, 600)):
        timed.add(request, [[request] * tokens], session=request)
    timed.sizes(8)
    assert [batch[0][0] for batch in timed.batches] == [1, 2, 3, 4, 1, 2, 3, 4]
    while timed.embeddings.has_work:
        timed.sizes(1)
    assert [request for request, _ in timed.answers()] == [4, 3, 2, 1]


def test_the_caches_of_suspended_inputs_are_bounded(
    timed: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than twice as many tokens as the longest input have keys and values at a time."""
    monkeypatch.setattr(sys.modules[__name__], "pool_chunk", counted)
    longest = 1 << 14
    timed.engine.loaded = replace(timed.engine.loaded, context_length=longest)
    for request in range(1, 40):
        timed.add(request, [[request] * (longest * request // 39)], session=request)
    most = 0
    while timed.embeddings.has_work:
        timed.sizes(1)
        held = sum(long.text.num_computed_tokens for long in timed.embeddings._long.values())
        most = max(most, held)
    assert longest // 2 < most < 2 * longest


def test_a_cancelled_request_computes_no_further_chunk(timed: Sent) -> None:
    timed.add(1, [[1] * 1024])
    timed.sizes(1)
    timed.embeddings.cancel(1)
    assert not timed.embeddings.has_work
    timed.add(2, [[2] * 1024])
    timed.sizes(2)
    assert [batch[0][0] for batch in timed.batches] == [1, 2, 2]
    assert timed.answers() == [(2, 1)]


def test_new_weights_begin_a_long_input_again(timed: Sent) -> None:
    timed.add(1, [[1] * 1024])
    timed.sizes(1)
    timed.embeddings.restart(timed.engine)
    assert timed.sizes(2) == [512, 512]
    assert timed.answers() == [(1, 1)]


def test_a_failed_chunk_ends_only_its_request(timed: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loaded: LoadedModel, text: ChunkedText, num_tokens: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "pool_chunk", fail)
    timed.add(1, [[1] * 1024], session=1)
    timed.add(2, [[2]], session=2)
    timed.sizes(2)
    assert timed.answers() == [(2, 1)]
    assert not timed.embeddings.has_work


def test_engines_have_as_much_time_as_embeds(loaded: LoadedModel, tmp_path: Path) -> None:
    """While an engine has work, each batch is followed by steps that take as long as the batch."""
    loop = Loop(tmp_path, loaded)
    now = 0.0
    embeddings = loop.worker._arrivals.embeddings
    embeddings._clock = lambda: now
    batches = []

    def timed(model: LoadedModel, texts: list[list[int]], poolings: list[Pooling]) -> torch.Tensor:
        nonlocal now
        now += 4.0
        batches.append((len(loop.entries(1)), len(texts)))
        return pooled(model, texts, poolings)

    loop.generate(1, max_tokens=12)
    inputs = [[1] * MIN_BATCH_TOKENS] * 5
    loop.give(b"EMBED", Embed(stream_id=2, model="m", inputs=inputs), 2, 102)
    engine = loop.worker._models.engines["m"]
    embeddings._bounds[engine] = module._Bounds(MIN_BATCH_TOKENS, MIN_BATCH_TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "pooled", timed)
        for _ in range(14):
            loop.turn()
            now += 1.0
        assert [steps for steps, _ in batches] == [1, 5, 9, 12, 12]


def test_streams_go_on_between_the_chunks_of_a_long_input(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, loaded)
    now = 0.0
    loop.worker._arrivals.embeddings._clock = lambda: now
    tokens = []

    def timed(model: LoadedModel, text: ChunkedText, num_tokens: int) -> torch.Tensor | None:
        nonlocal now
        now += 0.9 * BATCH_S
        tokens.append(len(loop.entries(1)))
        return pool_chunk(model, text, num_tokens)

    monkeypatch.setattr(module, "pool_chunk", timed)
    loop.generate(1, max_tokens=12)
    loop.give(b"EMBED", Embed(stream_id=2, model="m", inputs=[[1] * 1024]), 2, 102)
    for _ in range(8):
        loop.turn()
        now += BATCH_S
    assert tokens == [1, 2]


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_chunks_give_the_vector_of_one_batch(
    loaded: LoadedModel, pooling: Pooling, num_tokens: int
) -> None:
    tokens = [(7 * i) % 4000 + 5 for i in range(40)]
    text = ChunkedText(tokens, pooling)
    vector = None
    while vector is None:
        vector = pool_chunk(loaded, text, num_tokens)
    assert text.num_computed_tokens == 40
    whole = pooled(loaded, [tokens], [pooling])
    np.testing.assert_allclose(vector.numpy(), whole.numpy(), atol=1e-5)


def test_inputs_of_equal_length_have_no_mask(loaded: LoadedModel) -> None:
    """A mask of the attention has an element for each pair of tokens."""
    masks: list[Any] = []
    body = loaded.model.base_model
    hook = body.register_forward_pre_hook(
        lambda module, args, options: masks.append(options["attention_mask"]), with_kwargs=True
    )
    try:
        pooled(loaded, [[1, 2], [3, 4]], ["last", "last"])
        pooled(loaded, SHORT, ["last", "last"])
    finally:
        hook.remove()
    assert masks[0] is None
    assert masks[1].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("device", "most"), [("cpu", MAX_CPU_ENCODER_TOKENS), ("cuda", MAX_BATCH_TOKENS)]
)
def test_an_encoder_refuses_an_input_above_the_bound(
    loaded: LoadedModel, device: str, most: int
) -> None:
    sent = Sent(loaded)
    long = replace(loaded, causal=False, context_length=2 * most, device=torch.device(device))
    sent.engine.loaded = long
    sent.add(1, [[1] * most])
    with pytest.raises(RequestError, match=f"at most {most}") as caught:
        sent.add(2, [[1], [1] * (most + 1)])
    assert (caught.value.code, caught.value.path) == (Code.PROMPT_TOO_LONG, "$.inputs[1]")


def test_the_owners_of_an_encoder_take_turns_by_input(timed: Sent) -> None:
    """An encoder computes each input in one forward, so the other owner waits for one input."""
    timed.engine.loaded = replace(timed.engine.loaded, causal=False)
    timed.add(1, [[1] * 1024] * 3, session=1)
    timed.add(2, [[2]], session=2)
    timed.sizes(2)
    assert [batch[0][0] for batch in timed.batches] == [1, 2]
    assert timed.answers() == [(2, 1)]


def test_a_vector_does_not_depend_on_the_padding(loaded: LoadedModel) -> None:
    poolings: list[Pooling] = ["last", "mean", "first"]
    together = pooled(loaded, [[1] * 40, *SHORT], poolings)
    pairs = zip([[1] * 40, *SHORT], poolings, strict=True)
    alone = torch.cat([pooled(loaded, [text], [pooling]) for text, pooling in pairs])
    np.testing.assert_allclose(together.numpy(), alone.numpy(), atol=1e-5)
    assert loaded.model.config._attn_implementation != "eager"


def test_embeddings_wait_for_a_forward_that_overlaps_with_them() -> None:
    """Pooling changes the attention setting that the forward of transformers' modules uses."""
    loaded = load_model(embedded.NAME, device="cpu")
    loaded.decoder = None

    def generated(embeds: bool) -> list[int | None]:
        config = EngineConfig(kv_cache_bytes=1 << 22, overlap=True)
        engine = Engine(loaded, config)
        engine.add(1, [1, 2, 3], Sampling(max_tokens=12, ignore_eos=True))
        found: list[int | None] = []
        while engine.has_work:
            found += [output.token for output in engine.step()]
            if embeds:
                engine.run(lambda: pooled(loaded, SHORT, ["last", "last"]))
        return found

    assert generated(True) == generated(False)


def test_a_cancelled_request_ends_with_one_error(loaded: LoadedModel) -> None:
    sent = Sent(loaded)
    sent.add(1, SHORT)
    assert sent.embeddings.cancel(1)
    assert not sent.embeddings.cancel(1)
    [(kind, _, body)] = sent.frames
    assert kind == b"ERROR"
    assert decode_as(Error, body, "msgpack").code == Code.TIMEOUT
    sent.add(2, [[6]])
    sent.embeddings.step(True)
    assert sent.answers() == [(2, 1)]


def test_a_cancelled_request_does_not_keep_its_inputs(loaded: LoadedModel) -> None:
    """A client may cancel EMBED requests before their turn, again and again."""
    sent = Sent(loaded)
    inputs = [[1], [2]]
    before = sys.getrefcount(inputs)
    sent.add(1, inputs)
    assert sys.getrefcount(inputs) > before
    sent.embeddings.cancel(1)
    assert sys.getrefcount(inputs) == before


@pytest.mark.parametrize(
    ("inputs", "code", "path"),
    [
        ([[1], [5000]], Code.TOKEN_OUT_OF_RANGE, "$.inputs[1]"),
        ([[1] * 1025], Code.PROMPT_TOO_LONG, "$.inputs[0]"),
    ],
)
def test_a_wrong_input_is_refused(
    loaded: LoadedModel, inputs: list[list[int]], code: Code, path: str
) -> None:
    with pytest.raises(RequestError) as caught:
        Sent(loaded).add(1, inputs)
    assert (caught.value.code, caught.value.path) == (code, path)


def test_a_checkpoint_names_its_pooling(loaded: LoadedModel, tmp_path: Path) -> None:
    assert pooling_of(loaded) == "last"
    before = loaded.model.name_or_path
    (tmp_path / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    loaded.model.name_or_path = str(tmp_path)
    try:
        assert pooling_of(loaded) == "mean"
    finally:
        loaded.model.name_or_path = before


def test_an_encoder_is_known_by_its_configuration() -> None:
    assert is_encoder(BertConfig(architectures=["BertForMaskedLM"]))
    assert is_encoder(BertConfig())
    assert not is_encoder(BertConfig(architectures=["BertLMHeadModel"]))
    assert not is_encoder(LlamaConfig())
    assert not is_encoder(T5Config())
