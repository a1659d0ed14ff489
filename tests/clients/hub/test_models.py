"""``tokenbus models`` and ``tokenbus rm``."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tokenbus.clients.cli.exits import FAILED, OK, REFUSED
from tokenbus.clients.cli.main import main
from tokenbus.clients.system.faults import SystemFault
from tokenbus.clients.system.model_check import check_model
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.model import checkpoint

from ...processes import Bus, free_port
from .hub_server import HubServer
from .test_pull import FILES, NAME, snapshot

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")
PROMPT = "def add(a, b):"
POOLING = json.dumps({"pooling_mode_mean_tokens": True}).encode()


@pytest.fixture
def away() -> list[str]:
    """Flags with which a command does not find a running system."""
    return ["--front", f"tcp://127.0.0.1:{free_port()}"]


@pytest.fixture
def two(hub: HubServer, cache: Path) -> tuple[str, str]:
    """The commits ``main`` and ``v1`` of a model in the cache; their weights are the same."""
    repository = hub.add(NAME, FILES)
    repository.publish(FILES | {"config.json": b'{"a": 1}'}, "v1")
    assert main(["pull", NAME]) == OK
    assert main(["pull", f"{NAME}@v1"]) == OK
    return repository.refs["main"], repository.refs["v1"]


def listed(capsys: pytest.CaptureFixture[str], flags: list[str]) -> dict[str, dict[str, Any]]:
    """The lines of ``tokenbus models --json``, by commit, or by name if a model has no commit."""
    capsys.readouterr()
    assert main(["models", "--json", *flags]) == OK
    lines = json.loads(capsys.readouterr().out)
    return {line["commit"] or line["model"]: line for line in lines}


def test_the_revisions_in_the_cache_are_listed_with_their_sizes(
    two: tuple[str, str], cache: Path, away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, away)
    assert set(found) == set(two)
    line = found[two[0]]
    assert (line["model"], line["refs"], line["workers"]) == (NAME, ["main"], [])
    assert line["size"] == sum(map(len, FILES.values()))
    assert Path(line["path"]).is_relative_to(cache)
    assert main(["models", *away]) == OK
    assert f"{NAME} {two[1][:8]} v1   300.0 kB" in capsys.readouterr().out


@pytest.mark.usefixtures("cache")
def test_the_models_of_a_running_system_are_listed(
    bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    line = listed(capsys, ["--front", bus.front])["embedded"]
    assert line["size"] > (embedded.path() / "model.safetensors").stat().st_size
    with bus.client() as client:
        assert line["workers"] == [worker.name for worker in client.status().workers]


def test_without_a_broker_the_stored_models_are_listed(
    two: tuple[str, str], away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["models", *away]) == OK
    output = capsys.readouterr()
    assert output.out.count(NAME) == len(two)
    assert output.err == (
        f"tokenbus: no broker answers at {away[1]}, so only the downloaded models are listed\n"
    )


@pytest.mark.usefixtures("cache")
def test_an_empty_cache_is_one_line(away: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *away]) == OK
    assert capsys.readouterr().out.startswith("no models are in ")
    assert main(["rm", NAME, *away]) == REFUSED
    assert f"has no model {NAME}; `tokenbus models` lists" in capsys.readouterr().err


def test_one_revision_is_removed_and_the_files_of_others_are_kept(
    two: tuple[str, str], cache: Path, away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["rm", f"{NAME}@{two[1][:10]}", *away]) == OK
    assert capsys.readouterr().out == f"removed {NAME}@v1; 8 bytes are free again\n"
    assert snapshot(cache, two[0]) == FILES
    assert list(listed(capsys, away)) == [two[0]]


@pytest.mark.usefixtures("two")
def test_a_name_without_a_revision_removes_all(
    cache: Path, away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rm", NAME, *away]) == OK
    assert not (cache / "models--org--tiny").exists()
    assert listed(capsys, away) == {}


def test_a_beginning_of_several_commits_is_refused(
    hub: HubServer, cache: Path, away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.add(NAME, FILES)
    for number in range(2):
        repository.commits[f"{number:0>40}"] = FILES
        assert main(["pull", f"{NAME}@{number:0>40}"]) == OK
    assert main(["rm", f"{NAME}@000", *away]) == REFUSED
    assert "has several commits that match org/tiny@000" in capsys.readouterr().err


def test_a_system_starts_only_with_a_revision_that_was_pulled(hub: HubServer, cache: Path) -> None:
    hub.add(NAME, FILES).publish(FILES, "v1")
    with pytest.raises(SystemFault, match=f"model: .* 'tokenbus pull {NAME}'"):
        check_model(Settings(model=NAME))
    assert main(["pull", NAME]) == OK
    check_model(Settings(model=NAME))
    with pytest.raises(SystemFault, match=f"draft_model: .* 'tokenbus pull {NAME}@v1'"):
        check_model(Settings(draft_model=f"{NAME}@v1"))


@pytest.mark.parametrize(("answer", "code"), [("n", FAILED), ("y", OK)])
def test_a_terminal_is_asked(
    answer: str,
    code: int,
    two: tuple[str, str],
    cache: Path,
    away: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keyboard, terminal = pty.openpty()
    os.write(keyboard, f"{answer}\n".encode())
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["rm", f"{NAME}@v1", *away]) == code
    os.close(keyboard)
    assert f"remove {NAME}@v1 (300.0 kB)? [y/N] " in capsys.readouterr().err
    assert (snapshot(cache, two[1]) != {}) == (code == FAILED)


def test_a_worker_finds_the_pulled_gguf_file_of_a_revision(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add(NAME, {"x.gguf": b"new"})
    commit = repository.publish({"x.gguf": b"old"}, "v1")
    assert main(["pull", f"{NAME}/x.gguf@v1"]) == OK
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = checkpoint.find(f"{NAME}/x.gguf@v1").fetched()
    assert found.options == {"gguf_file": "x.gguf"}
    assert Path(found.place) == cache / "models--org--tiny" / "snapshots" / commit
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        checkpoint.find(f"{NAME}/x.gguf").fetched()


def test_a_pulled_model_is_served_by_its_name_and_not_removed_while_it_is_served(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {path.name: path.read_bytes() for path in embedded.path().iterdir()}
    with HubServer() as hub, Bus(recover_s=0.1) as own:
        hub.add(NAME, files | {"1_Pooling/config.json": POOLING})
        own.environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
        pulled = subprocess.run([TOKENBUS, "pull", NAME], env=own.environment, timeout=300)
        assert pulled.returncode == OK
        own.start_worker(model=NAME)
        own.wait_for_models(NAME)
        assert len(hub.downloads("model.safetensors")) == 1
        with own.client() as client, bus.client() as other:
            expected = other.generate(PROMPT, max_tokens=12).text()
            assert client.generate(PROMPT, max_tokens=12).text() == expected
            assert client.embed([[1, 2]]).pooling == "mean"
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        flags = ["--front", own.front]
        (line,) = listed(capsys, flags).values()
        assert (line["model"], len(line["workers"])) == (NAME, 1)
        assert main(["rm", NAME, *flags]) == REFUSED
        assert f"{NAME}@main is served by {line['workers'][0]}; stop" in capsys.readouterr().err
        assert main(["rm", NAME, "--force", *flags]) == OK
        assert not (tmp_path / "models--org--tiny").exists()
