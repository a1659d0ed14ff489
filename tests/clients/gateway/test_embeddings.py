"""Embeddings of a decoder and of an encoder equal those of transformers. Reranking and scores
compare embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenbus.clients.gateway.context import Gateway as InProcess
from tokenbus.clients.gateway.embeddings import ANSWER_BYTES, Texts, vectors
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import UnavailableError
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu import embedded
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from ...processes import Bus, Gateway
from .openai_requests import MODEL, openai_client

pytestmark = pytest.mark.process

TEXTS = ["def add(a, b):", "import os", "a much longer text about bread and butter " * 6]


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


@pytest.fixture(scope="module")
def encoder(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with random weights and the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=4096,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded.path()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoding(encoder: Path) -> Iterator[Gateway]:
    """A gateway of a system that serves only the encoder."""
    with Bus(recover_s=0.1, model=encoder) as bus:
        bus.start_worker()
        bus.wait_for_models(str(encoder))
        yield bus.start_gateway()


def expected(path: Path, texts: list[str], pooling: str, causal: bool) -> np.ndarray[Any, Any]:
    """The vectors that transformers computes, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    model = kind.from_pretrained(path, dtype=torch.float32).eval().base_model
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text)])
            states = model(ids).last_hidden_state[0]
            found.append(states[-1] if pooling == "last" else states.mean(0))
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json=body, timeout=300.0)


def test_a_decoder_gives_its_last_states(api: openai.OpenAI) -> None:
    answer = api.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    found = np.array([one.embedding for one in answer.data])
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    np.testing.assert_allclose(found, expected(embedded.path(), TEXTS, "last", True), atol=1e-4)
    # By default, the client requests the vectors in base64.
    default = api.embeddings.create(model=MODEL, input=TEXTS)
    np.testing.assert_allclose([one.embedding for one in default.data], found, atol=1e-6)


def test_an_encoder_gives_the_mean_of_its_states(encoding: Gateway, encoder: Path) -> None:
    answer = post(encoding, "/v1/embeddings", input=TEXTS, model=str(encoder))
    found = np.array([one["embedding"] for one in answer.json()["data"]])
    np.testing.assert_allclose(found, expected(encoder, TEXTS, "mean", False), atol=1e-4)
    chat = post(encoding, "/v1/completions", prompt="x", model=str(encoder))
    assert chat.status_code == 400
    assert "is an encoder" in chat.json()["error"]["message"]


def test_base64_has_the_same_floats_and_fewer_dimensions_are_scaled(gateway: Gateway) -> None:
    whole = post(gateway, "/v1/embeddings", input="hello").json()["data"][0]["embedding"]
    encoded = post(gateway, "/v1/embeddings", input="hello", encoding_format="base64").json()
    raw = base64.b64decode(encoded["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.array(whole, dtype=np.float32))
    short = post(gateway, "/v1/embeddings", input="hello", dimensions=8).json()
    part = np.array(whole[:8])
    np.testing.assert_allclose(
        short["data"][0]["embedding"], part / np.linalg.norm(part), atol=1e-6
    )


def test_ids_and_many_texts_are_embedded_in_their_order(gateway: Gateway) -> None:
    texts = [f"text number {number}" for number in range(70)]
    many = post(gateway, "/v1/embeddings", input=texts).json()["data"]
    for place in (0, 69):
        alone = post(gateway, "/v1/embeddings", input=texts[place]).json()["data"][0]
        np.testing.assert_allclose(many[place]["embedding"], alone["embedding"], atol=1e-4)
    ids = post(gateway, "/tokenize", prompt="hello").json()["tokens"]
    for given in (ids, [ids]):
        by_ids = post(gateway, "/v1/embeddings", input=given).json()["data"][0]["embedding"]
        by_text = post(gateway, "/v1/embeddings", input="hello").json()["data"][0]["embedding"]
        np.testing.assert_allclose(by_ids, by_text, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input[0]", "no tokens"),
        ({"input": []}, "input", "must be a text"),
        ({"input": ["a", 1]}, "input", "must be a text"),
        ({"input": "a", "dimensions": 100_000}, "dimensions", "the vectors of embedded have 192"),
        ({"input": ["a", "word " * 3000]}, "input[1]", "takes at most 1024"),
        ({"input": [[1], [99_999]]}, "input[1]", "use ids below 4096"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "model": "none"}, "model", "none"),
    ],
)
def test_a_wrong_request_gets_an_error_at_its_field(
    gateway: Gateway, body: dict[str, Any], param: str, words: str
) -> None:
    answer = post(gateway, "/v1/embeddings", **body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_a_long_text_is_cut_on_request(gateway: Gateway) -> None:
    answer = post(gateway, "/v1/embeddings", input="word " * 3000, truncate_prompt_tokens=-1)
    assert answer.json()["usage"]["prompt_tokens"] == 1024


@pytest.mark.anyio
async def test_the_vectors_of_an_answer_count_towards_the_user_s_memory(bus: Bus) -> None:
    gateway = InProcess(Settings(front=bus.front))
    gateway.shares = UserShares(8, max_body_bytes=2 * ANSWER_BYTES * 192 * 4)
    try:
        model = await gateway.models.get(MODEL)
        texts = Texts("input", [[1]])
        with gateway.shares.request():
            await vectors(gateway, model, texts, None)
            with pytest.raises(UnavailableError, match="the bodies, messages and vectors of your"):
                await vectors(gateway, model, texts, None)
        with gateway.shares.request():
            await vectors(gateway, model, texts, None)
    finally:
        await gateway.close()


def test_documents_are_sorted_by_similarity(gateway: Gateway) -> None:
    documents = ["bread and butter", "import os", "import sys"]
    answer = post(gateway, "/v1/rerank", query="import os", documents=documents, top_n=2).json()
    results = answer["results"]
    assert results[0]["index"] == 1
    assert len(results) == 2
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-4)
    assert results[0]["document"] == {"text": "import os"}
    scored = post(gateway, "/score", text_1="import os", text_2=documents).json()["data"]
    assert scored[1]["score"] == pytest.approx(1.0, abs=1e-4)
    assert results[1]["relevance_score"] == pytest.approx(
        max(scored[0]["score"], scored[2]["score"]), abs=1e-4
    )
    wrong = post(gateway, "/score", text_1=["a", "b"], text_2=documents)
    assert wrong.json()["error"]["param"] == "text_1"


def test_the_python_client_embeds_while_streams_run(bus: Bus) -> None:
    with bus.client() as client, client.generate("x", max_tokens=200, ignore_eos=True) as stream:
        next(stream)
        found = client.embed([[1, 2, 3], [4]])
        assert (found.dimensions, found.pooling) == (192, "last")
        vectors = np.frombuffer(found.vectors, "<f4").reshape(2, 192)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        assert client.embed([[4]], pooling="mean").pooling == "mean"
