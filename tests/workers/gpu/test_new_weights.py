"""New weights of a loaded model: how they are read from a folder, and how an engine uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine.engine import Engine, EngineConfig
from tokenbus.workers.gpu.engine.sequence import TokenOutput
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model, wrap_model
from tokenbus.workers.gpu.model.new_weights import WeightsError, read_weights
from tokenbus.workers.gpu.model.weights import weights_version

from .changed_weights import changed, embedded_tensors, write
from .test_architectures import make

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    """A model that no test changes."""
    return load_model("embedded")


def without(tensors: Tensors) -> None:
    del tensors[NORM]


def with_another(tensors: Tensors) -> None:
    tensors["model.other.weight"] = torch.ones(2)


def longer(tensors: Tensors) -> None:
    tensors[NORM] = torch.ones(len(tensors[NORM]) + 1)


def whole_numbers(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].to(torch.int32)


def infinite(tensors: Tensors) -> None:
    tensors[NORM][3] = float("inf")


def untied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (without, f"the tensor '{NORM}' of the model is missing"),
        (with_another, "has a tensor 'model.other.weight', which the model does not have"),
        (longer, f"the tensor '{NORM}' in model.safetensors has the shape"),
        (whole_numbers, f"the tensor '{NORM}' in model.safetensors has the type I32"),
        (infinite, f"the tensor '{NORM}' in model.safetensors has values that are not finite"),
        (untied, "is tied to"),
    ],
)
def test_a_fault_is_named_with_its_tensor_and_changes_nothing(
    tmp_path: Path, embedded: LoadedModel, fault: Callable[[Tensors], None], said: str
) -> None:
    tensors = embedded_tensors()
    fault(tensors)
    with pytest.raises(WeightsError, match=said):
        read_weights(embedded, write(tmp_path, tensors), 1)
    assert weights_version(embedded.model) == embedded.weights


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, embedded: LoadedModel) -> None:
    with pytest.raises(WeightsError, match="is not a folder"):
        read_weights(embedded, str(tmp_path / "gone"), 1)
    with pytest.raises(WeightsError, match="has 0 safetensors files"):
        read_weights(embedded, str(tmp_path), 1)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(WeightsError, match="cannot read"):
        read_weights(embedded, str(tmp_path), 1)
    index = {"weight_map": {NORM: "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="expected a file of the same folder"):
        read_weights(embedded, str(tmp_path), 1)


def test_weights_in_several_files_are_those_of_one(tmp_path: Path, embedded: LoadedModel) -> None:
    tensors = changed(embedded_tensors())
    whole = read_weights(embedded, write(tmp_path / "whole", tensors), 1)
    parts = tmp_path / "parts"
    parts.mkdir()
    names = sorted(tensors)
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"unused": torch.ones(1)}, parts / "optimizer.safetensors")
    assert read_weights(embedded, str(parts), 1).weights == whole.weights
    assert whole.weights != embedded.weights


def computed(engine: Engine) -> list[TokenOutput]:
    """The outputs of one request. Its prompt fills a block, and its steps have different sizes."""
    sampling = Sampling(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True, n=2)
    engine.add(1, list(range(1, 40)), sampling)
    found = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize("exact", ["auto", "off"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "gemma3", "phi"])
def test_an_engine_with_new_weights_computes_as_one_that_began_with_them(
    tmp_path: Path, name: str, exact: str
) -> None:
    config = EngineConfig(kv_cache_bytes=2**22, exact=exact)  # type: ignore[arg-type]
    model = make(name)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    tied = tied if model.config.tie_word_embeddings else set()
    tensors = changed({k: v for k, v in model.state_dict().items() if k not in tied})
    folder = write(tmp_path, tensors)
    engine = Engine(wrap_model(name, model), config)
    before = computed(engine)
    new = read_weights(engine.loaded, folder, 7)
    assert engine.replace_weights(new, keep=False) == set()
    assert weights_version(model) == engine.path.weights == new.weights
    assert engine.path.version == 7
    fresh = make(name)
    fresh.load_state_dict(tensors, strict=False)
    wanted = computed(Engine(wrap_model(name, fresh), config))
    got = computed(engine)
    assert [(o.token, o.logprob) for o in got] == [(o.token, o.logprob) for o in wanted]
    assert [o.logprob for o in got] != [o.logprob for o in before]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_score_that_is_computed_again_reports_each_token_once(
    tmp_path: Path, keep: bool, overlap: bool
) -> None:
    """The tokens of the first steps are scored again with the new weights, because their blocks
    are freed."""
    loaded = load_model("embedded")
    engine = Engine(loaded, EngineConfig(kv_cache_bytes=2**24, overlap=overlap))
    scored = [5 + 7 * i % 300 for i in range(600)]
    engine.score(1, [1, 2, 3], scored, text=True)
    found = [*engine.step(), *engine.step()]
    assert 0 < len(found) < len(scored)
    new = read_weights(loaded, write(tmp_path, changed(embedded_tensors())), 1)
    engine.replace_weights(new, keep)
    while engine.has_work:
        found += engine.step()
    assert [(o.pos, o.token) for o in found] == list(enumerate(scored))
    assert [o.finish_reason for o in found if o.finish_reason] == ["length"]
    assert "".join(o.text or "" for o in found) == loaded.tokenizer.decode(scored)
