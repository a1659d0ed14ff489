"""The wheel contains all files that an installation needs, and is for any platform."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from .conftest import PACKAGES, ROOT

pytestmark = pytest.mark.process


@pytest.fixture
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    """The wheel's content."""
    return zipfile.ZipFile(wheel_file)


def test_the_wheel_is_for_any_platform(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert wheel.filename.endswith("-py3-none-any.whl")


def test_the_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    sources = {
        f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder)}"
        for package, folder in PACKAGES.items()
        for file in (ROOT / folder).rglob("*.py")
        if "typescript" not in file.parts  # This npm package is not part of the wheel.
    }
    assert sources - set(wheel.namelist()) == set()


def test_the_wheel_holds_the_files_that_are_not_modules(wheel: zipfile.ZipFile) -> None:
    model = "tokenbus/workers/gpu/embedded/model"
    controller = "tokenbus/workers/controller"
    wanted = {
        "tokenbus/clients/supervisord.conf",
        *(f"tokenbus/clients/console/{p.name}" for p in (ROOT / "clients/console").iterdir()),
        *(f"tokenbus/clients/chat/{p.name}" for p in (ROOT / "clients/chat").iterdir()),
        *(f"{package.replace('.', '/')}/py.typed" for package in PACKAGES),
        "tokenbus/grammars/guest/grammar.wasm",
        "tokenbus/clients/console/best_of.wasm",
        f"{controller}/sdk/tokenbus.h",
        f"{controller}/sdk/tokenbus/trie.h",
        f"{controller}/sdk/examples/upper4.c",
        *(f"{model}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
    }
    assert wanted - set(wheel.namelist()) == set()


def test_the_wheel_has_the_supervisord_conf_of_the_top_level(wheel: zipfile.ZipFile) -> None:
    packaged = wheel.read("tokenbus/clients/supervisord.conf")
    assert packaged == (ROOT / "supervisord.conf").read_bytes()


def test_nothing_of_torch_is_needed_by_the_base_install(wheel: zipfile.ZipFile) -> None:
    [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    lines = wheel.read(name).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra" not in line]
    assert needed
    assert not [line for line in needed if "torch" in line or "transformers" in line]
