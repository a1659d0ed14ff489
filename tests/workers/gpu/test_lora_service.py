"""LoRA adapters over the bus and over HTTP, and streams with adapters that move."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenbus.clients import RequestError
from tokenbus.clients.operator import Operator
from tokenbus.protocol.messages import System
from tokenbus.workers.gpu.model.loader import load_model
from tokenbus.workers.gpu.model.lora.peft_layout import read_adapter

from ...processes import Bus, Gateway, Process
from . import shapes
from .peft import ATTENTION, MLP, merged, write_adapter

PROMPT = [5, 6, 7, 8]
WAIT_S = 300.0


@dataclass
class Service:
    """A system whose only worker serves the embedded model with the adapters ``sql`` and
    ``chat``."""

    bus: Bus
    gateway: Gateway
    worker: Process
    folder: Path
    settings: str


@pytest.fixture(scope="module")
def service(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_model("embedded").model
    write_adapter(folder / "sql", model, strength=0.7)
    write_adapter(folder / "chat", model, (*ATTENTION, *MLP), seed=1, strength=0.7)
    settings = f"sql={folder / 'sql'},chat={folder / 'chat'}"
    with Bus(recover_s=0.1, kv_cache_bytes=2**24) as bus:
        worker = bus.start_worker(lora=settings)
        bus.wait_for_models("embedded", "sql", "chat")
        yield Service(bus, bus.start_gateway(), worker, folder, settings)


def test_a_request_chooses_an_adapter_by_name(service: Service) -> None:
    url = f"{service.gateway.url}/v1"
    listed = httpx.get(f"{url}/models", timeout=WAIT_S).json()["data"]
    parents = {one["id"]: one.get("parent") for one in listed}
    assert parents == {"embedded": None, "sql": "embedded", "chat": "embedded"}
    assert listed[0]["id"] == "embedded"
    found = {}
    for name in ("embedded", "sql", "chat"):
        body: dict[str, Any] = {
            "model": name,
            "prompt": PROMPT,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        body |= {"temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        found[name] = choice["token_ids"]
        model = load_model("embedded").model
        if name != "embedded":
            adapter = read_adapter(name, service.folder / name)
            [span] = choice["spans"]
            assert span["weights"].endswith(f"+{name}@{adapter.hash}")
            merged(model, service.folder / name)
        wanted = shapes.greedy(model, PROMPT, 8)
        assert shapes.same_tokens(model, PROMPT, wanted, found[name])
    assert len({tuple(one) for one in found.values()}) == 3
    doors: tuple[tuple[str, dict[str, Any]], ...] = (
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("responses", {"input": "x", "max_output_tokens": 2}),
    )
    for path, more in doors:
        body = {"model": "sql", **more}
        answer = httpx.post(f"{url}/{path}", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "sql"


def test_an_unknown_adapter_is_an_unknown_model(service: Service) -> None:
    with service.bus.client() as client:
        with pytest.raises(RequestError, match=r"'none'; the served models: chat, embedded, sql "):
            client.generate(PROMPT, model="none").tokens()
        with pytest.raises(RequestError, match=r"'sql' does not give embeddings; use .*'embedded'"):
            client.embed([PROMPT], model="sql")
        with pytest.raises(RequestError, match=r"'sql' is a LoRA adapter.* name the model 'emb"):
            Operator(client).pause("sql")
    body = {"model": "none", "prompt": "x"}
    answer = httpx.post(f"{service.gateway.url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 404
    assert "served models: chat, embedded, sql" in answer.json()["error"]["message"]


def test_a_stream_moves_to_a_worker_that_has_the_same_adapter(service: Service) -> None:
    bus = service.bus
    options: Any = {"model": "sql", "max_tokens": 500, "ignore_eos": True, "retry_s": 0}
    with bus.client() as client:
        notices: list[System] = []
        stream = client.generate(PROMPT, on_system=notices.append, **options)
        entries = iter(stream)
        next(entries)
        Operator(client).pause("embedded", mode="keep")
        service.worker.kill()
        bus.workers.remove(service.worker)
        copy = shutil.copytree(service.folder, service.folder.with_name("copy"))
        settings = service.settings.replace(str(service.folder), str(copy))
        service.worker = bus.start_worker(lora=settings)
        bus.wait_for_models("embedded", "sql", "chat")
        Operator(client).resume("embedded")
        for _ in entries:
            pass
        [sequence] = stream.wait()
        assert len(sequence.tokens) == 500
        assert "moved" in [notice.event for notice in notices]
        adapter = read_adapter("sql", service.folder / "sql")
        assert {span.weights.partition("+")[2] for _, span in sequence.spans} == {
            f"sql@{adapter.hash}"
        }
    model = merged(load_model("embedded").model, service.folder / "sql")
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + sequence.tokens])).logits[0, len(PROMPT) - 1 : -1]
    # Each token has the greatest logit, except for rounding.
    chosen = logits.gather(1, torch.tensor(sequence.tokens).unsqueeze(1))
    assert (logits.amax(1, keepdim=True) - chosen).max() < 1e-2
