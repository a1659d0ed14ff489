"""The EMBEDs of a worker: batches over several requests, turns, ends and refusals."""

from __future__ import annotations

import json
import sys
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
from tokenbus.workers.gpu.model.pooling import pooled, pooling_of
from tokenbus.workers.gpu.serving.embeddings import MAX_BATCH_TOKENS, Embeddings
from tokenbus.workers.gpu.serving.live_streams import LiveStreams
from tokenbus.workers.gpu.serving.streams import Stream
from transformers import BertConfig, LlamaConfig, T5Config

SHORT = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(embedded.NAME, device="cpu")


class Sent:
    """A worker's EMBEDs, and the answers that it sent."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.engine = Engine(loaded, EngineConfig(kv_cache_bytes=1 << 22))
        self.frames: list[Any] = []
        streams = LiveStreams(self._post, lambda stream: None)
        self.embeddings = Embeddings(streams, self._post)

    def _post(self, frames: Any, link: int) -> None:
        self.frames.append(frames)

    def add(self, request: int, inputs: list[list[int]]) -> None:
        """Receives an EMBED."""
        stream = Stream(request, 1, request, "msgpack", "embedded", 1)
        self.embeddings.add(stream, self.engine, Embed(stream_id=request, inputs=inputs))

    def answers(self) -> list[tuple[int, int]]:
        """The stream ids of the answers, and their numbers of vectors."""
        found = [decode_as(Msg, body, "msgpack") for kind, _, body in self.frames if kind == b"MSG"]
        return [(one.stream_id, len(one.embedded.vectors) // 768) for one in found]


def test_inputs_of_several_requests_are_one_batch(loaded: LoadedModel) -> None:
    sent = Sent(loaded)
    sent.add(1, SHORT)
    sent.add(2, [[6]])
    assert [stream.request for stream in sent.embeddings.streams()] == [1, 2]
    sent.embeddings.step()
    assert sent.answers() == [(1, 2), (2, 1)]
    assert not sent.embeddings.has_work


def test_a_request_of_many_tokens_does_not_delay_another_one(loaded: LoadedModel) -> None:
    sent = Sent(loaded)
    long = [[7] * 1000] * (2 * MAX_BATCH_TOKENS // 1000)
    sent.add(1, long)
    sent.add(2, [[6]])
    sent.embeddings.step()
    assert sent.answers() == []
    sent.embeddings.step()
    assert (2, 1) in sent.answers()
    while sent.embeddings.has_work:
        sent.embeddings.step()
    assert sorted(sent.answers()) == [(1, len(long)), (2, 1)]


def test_a_vector_does_not_depend_on_the_padding(loaded: LoadedModel) -> None:
    poolings: list[Pooling] = ["last", "mean", "first"]
    together = pooled(loaded, [[1] * 40, *SHORT], poolings)
    pairs = zip([[1] * 40, *SHORT], poolings, strict=True)
    alone = torch.cat([pooled(loaded, [text], [pooling]) for text, pooling in pairs])
    np.testing.assert_allclose(together.numpy(), alone.numpy(), atol=1e-5)
    assert loaded.model.config._attn_implementation != "eager"


def test_embeddings_wait_for_a_forward_that_overlaps_with_them() -> None:
    """The forward by transformers' modules uses the attention that pooling changes."""
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
    sent.embeddings.step()
    assert sent.answers() == [(2, 1)]


def test_a_cancelled_request_does_not_keep_its_inputs(loaded: LoadedModel) -> None:
    """A client may cancel its EMBEDs before their turn, as often as it likes."""
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
