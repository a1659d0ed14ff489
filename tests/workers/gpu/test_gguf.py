"""Models of GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.engine.engine import Engine
from tokenbus.workers.gpu.model import checkpoint
from tokenbus.workers.gpu.model.checkpoint import Checkpoint
from tokenbus.workers.gpu.model.loader import LoadedModel, ModelLoadError, load_model
from transformers import LlamaConfig, LlamaForCausalLM

from . import gguf_file
from .gguf_file import Kind


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and the tokenizer of the embedded model."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.path() / name, folder)
    return folder


def generated(loaded: LoadedModel) -> list[int]:
    """Greedy tokens after a prompt."""
    engine = Engine(loaded)
    engine.add(1, prompt=[12, 7, 300], sampling=Sampling(max_tokens=8))
    found = []
    while engine.has_work:
        found += [output.token for output in engine.step() if output.token is not None]
    return found


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gguf_file_gives_the_tokens_of_its_weights(
    kind: Kind, small: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "rounded", tmp_path / "small.gguf"
    shutil.copytree(small, folder)
    weights = load_file(folder / "model.safetensors")
    rounded = {
        name: torch.tensor(gguf_file.rounded(weight.numpy(), kind))
        for name, weight in weights.items()
    }
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    gguf_file.write(small, file, kind)
    expected, found = load_model(str(folder)), load_model(str(file))
    assert found.weights == expected.weights
    assert found.decoder is not None
    assert found.eos_token_ids == expected.eos_token_ids
    assert generated(found) == generated(expected)
    assert found.tokenizer.decode([300, 301]) == expected.tokenizer.decode([300, 301])


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("small.gguf", b"PK" + bytes(100), r"is not a GGUF file: it begins with b'PK"),
        ("small.gguf", b"", "is empty; download it again"),
        ("model.bin", b"x", r"is a file; expected a folder, or a file that ends with \.gguf"),
        ("folder/readme", b"x", r"has no config\.json; expected a folder"),
        ("folder/a.gguf", b"x", r"has no config\.json; expected .* such as .*/folder/a\.gguf"),
    ],
)
def test_a_path_without_a_model_is_refused_with_the_reason(
    tmp_path: Path, path: str, content: bytes, says: str
) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"^cannot load the model .*{says}"):
        load_model(str(tmp_path / path.partition("/")[0]))


def test_a_name_is_a_folder_a_file_or_a_model_of_a_hub(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    gguf = {"gguf_file": "a.gguf"}
    assert checkpoint.find(str(tmp_path)) == Checkpoint(str(tmp_path))
    assert checkpoint.find(str(tmp_path / "a.gguf")) == Checkpoint(str(tmp_path), gguf)
    assert checkpoint.find("org/name@v1") == Checkpoint("org/name", {"revision": "v1"})
    assert checkpoint.find("org/name/a.gguf") == Checkpoint("org/name", gguf)
    assert checkpoint.find("/no/such/folder") == Checkpoint("/no/such/folder")
