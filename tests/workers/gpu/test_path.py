"""A worker reports which attention runs, whether graphs run, and why not: in its registration, the
status and the metrics."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from tokenbus.clients.cli.status import path_lines
from tokenbus.clients.gateway.metrics import of_status
from tokenbus.protocol.messages import ForwardPath, Status, WorkerStatus
from tokenbus.protocol.metrics import Series
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.model.cpu_native.library import instruction_set, library
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.model.kv_cache import Layout
from tokenbus.workers.gpu.model.loader import ModelLoadError, load_model
from tokenbus.workers.gpu.model.models import Failed, Models, Progress, model_info

STEP = """
import sys
sys.modules["torch.nn.attention.varlen"] = None  # As in torch 2.9.
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.model.cuda import varlen
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model.loader import load_model
loaded = load_model("embedded")
engine = Engine(loaded)
engine.add(1, [5, 6, 7], Sampling(max_tokens=2, ignore_eos=True))
tokens = [o.token for o in engine.step() + engine.step()]
assert len(tokens) == 2 and None not in tokens, tokens
print(varlen.why_no_kernel())
"""
SLOW = ForwardPath(
    attention="SDPA over gathered blocks",
    fallbacks=["attention: torch 2.11 has none"],
    why_not_exact="torch computes its steps",
)


@pytest.mark.process
def test_the_engine_runs_without_varlen_attn_and_names_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert torch.__version__ in done.stdout
    assert "2.13" in done.stdout


def test_a_varlen_attn_without_block_tables_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setattr(varlen, "varlen_attn", older)
    assert "no attention over blocks" in varlen.why_no_kernel()


def test_the_properties_of_a_model_say_how_it_is_computed() -> None:
    loaded = load_model("embedded")
    info = model_info(Engine(loaded, EngineConfig(kv_cache_bytes=2**21)))
    exact = ForwardPath(attention="native code over blocks", exact=True)
    exact.arithmetic = instruction_set()
    why = "torch computes its steps: no native code was compiled for this machine"
    torch_only = ForwardPath(attention="SDPA over gathered blocks", why_not_exact=why)
    exact.weights = torch_only.weights = loaded.weights
    assert info.path == (exact if library() is not None else torch_only)
    assert msgspec.json.decode(msgspec.json.encode(info), type=type(info)) == info


def test_a_layout_names_its_attention() -> None:
    assert Layout(256, "varlen").attention == "FlashAttention over blocks"


def test_a_model_is_refused_if_fast_attention_is_required_and_missing() -> None:
    config = EngineConfig(kv_cache_bytes=2**21, require_fast_attention=True)
    with pytest.raises(ModelLoadError, match=r"require_fast_attention.*the device is cpu"):
        Engine(load_model("embedded"), config)


def test_the_worker_takes_the_setting() -> None:
    settings = Settings(model="embedded", device="cpu", require_fast_attention=True)
    models = Models(settings, lambda: None)
    models.want("embedded")
    while isinstance(event := models.events.get(timeout=600), Progress):
        pass
    models.close()
    assert isinstance(event, Failed)
    assert "require_fast_attention" in str(event.error)


def status() -> Status:
    worker = WorkerStatus(
        name="gpu-1",
        role="gpu",
        pid=1,
        host="h",
        state="ready",
        models=["m"],
        requests=0,
        capacity=1,
        heartbeat_age_s=0.0,
        paths={"m": SLOW},
    )
    return Status(version="1", uptime_s=1.0, sessions=0, streams=0, queued=0, workers=[worker])


def test_status_shows_the_attention_and_each_fallback() -> None:
    assert path_lines(status()) == [
        "gpu-1 computes the attention of m with SDPA over gathered blocks of the KV cache",
        "  not exact: torch computes its steps",
        "  slower than possible: attention: torch 2.11 has none",
    ]


def test_the_gateway_shows_them_as_metrics() -> None:
    labels = {"worker": "gpu-1", "model_name": "m"}
    found = list(of_status(status()))
    assert Series("attention", {**labels, "attention": SLOW.attention}, 1) in found
    assert Series("cuda_graphs", labels, 0) in found
    assert Series("fallbacks", labels, 1) in found
