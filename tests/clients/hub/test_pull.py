"""``tokenbus pull``: downloads from a hub, their resumption, and their errors."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants
from tokenbus.clients.cli.exits import FAILED, OK, REFUSED, UNAVAILABLE, WRONG_USAGE
from tokenbus.clients.cli.hub import download
from tokenbus.clients.cli.hub.download import Hub, wanted
from tokenbus.clients.cli.hub.faults import HubFault, explained
from tokenbus.clients.cli.main import main
from tokenbus.protocol.hub_names import HubName

from ...processes import free_port
from .hub_server import HubServer

WEIGHTS = random.Random(3).randbytes(300_000)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
}
NAME = "org/tiny"
CHUNK = constants.DOWNLOAD_CHUNK_SIZE
"""The size of the parts that huggingface_hub writes to the disk."""


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def snapshot(cache: Path, commit: str) -> dict[str, bytes]:
    """The files of a commit of ``NAME`` in the cache."""
    return files_of(cache / "models--org--tiny" / "snapshots" / commit)


def main_of(cache: Path) -> str:
    """The commit to which the cache's branch ``main`` of ``NAME`` refers."""
    return (cache / "models--org--tiny" / "refs" / "main").read_text()


def test_only_the_files_that_a_worker_reads_are_downloaded(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = FILES | {"1_Pooling/config.json": b"{}", "chat_template.jinja": b"x"}
    others = {
        "consolidated.safetensors": WEIGHTS,
        "pytorch_model.bin": WEIGHTS,
        "README.md": b"x",
        "onnx/config.json": b"{}",
    }
    repository = hub.add(NAME, needed | others)
    assert main(["pull", NAME]) == OK
    commit = repository.refs["main"]
    assert snapshot(cache, commit) == needed
    assert main_of(cache) == commit
    output = capsys.readouterr()
    assert output.out.startswith(f"{NAME}, commit {commit[:8]}: downloaded 5 files (300.0 kB) to ")
    assert output.out.count("\n") == 1
    assert output.err == ""


def test_a_complete_model_is_not_downloaded_again(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, FILES)
    assert main(["pull", NAME]) == OK
    assert main(["pull", NAME]) == OK
    assert "all files are in" in capsys.readouterr().out.splitlines()[1]
    assert len(hub.downloads("model.safetensors")) == 1


def test_a_download_continues_where_the_connection_was_cut(hub: HubServer, cache: Path) -> None:
    large = FILES | {"model.safetensors": random.Random(4).randbytes(CHUNK + 2_000)}
    repository = hub.add(NAME, large)
    hub.cuts["model.safetensors"] = CHUNK + 1_000
    assert main(["pull", NAME]) == OK
    first, second = hub.downloads("model.safetensors")
    assert (first.range, second.range) == ("", f"bytes={CHUNK}-")
    assert snapshot(cache, repository.refs["main"]) == large


def test_a_branch_keeps_its_commit_until_the_next_one_is_complete(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub.add(NAME, FILES)
    assert main(["pull", NAME]) == OK
    old = repository.refs["main"]
    new = repository.publish(FILES | {"model.safetensors": WEIGHTS[::-1]})
    hub.broken.add("model.safetensors")
    assert main(["pull", NAME]) == UNAVAILABLE
    assert main_of(cache) == old
    assert snapshot(cache, old) == FILES
    hub.broken.clear()
    assert main(["pull", NAME]) == OK
    assert main_of(cache) == new
    assert snapshot(cache, new)["model.safetensors"] == WEIGHTS[::-1]
    # The new commit shares the files that have not changed.
    assert len(hub.downloads("tokenizer.json")) == 1


def test_a_revision_is_downloaded_by_its_name(hub: HubServer, cache: Path) -> None:
    repository = hub.add(NAME, FILES)
    tagged = repository.publish(FILES | {"config.json": b'{"a": 1}'}, "v1")
    assert main(["pull", f"{NAME}@v1"]) == OK
    assert snapshot(cache, tagged)["config.json"] == b'{"a": 1}'
    assert not (cache / "models--org--tiny" / "refs" / "main").exists()


def test_one_gguf_file_is_downloaded_by_its_name(hub: HubServer, cache: Path) -> None:
    files = {"tiny.Q4_0.gguf": b"small", "tiny.Q8_0.gguf": b"larger", "README.md": b"x"}
    repository = hub.add(NAME, files)
    assert main(["pull", f"{NAME}/tiny.Q4_0.gguf"]) == OK
    assert snapshot(cache, repository.refs["main"]) == {"tiny.Q4_0.gguf": b"small"}


def refusal(capsys: pytest.CaptureFixture[str], name: str, code: int = REFUSED) -> str:
    """The error of a pull: one line."""
    assert main(["pull", name]) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("tokenbus: ")


@pytest.mark.usefixtures("cache")
def test_a_model_that_cannot_be_read_is_one_clear_line(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/private", FILES, token="secret")
    hub.add("org/gated", FILES, is_gated=True)
    hub.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("org/gguf", {"a.gguf": b"x", "b.gguf": b"x"})
    for name in ("org/unknown", "org/private"):
        line = refusal(capsys, name)
        assert line.startswith(f"{hub.url} has no model '{name}', or the model is private: ")
        assert "HF_TOKEN" in line
    assert "accept its terms at" in refusal(capsys, "org/gated")
    assert "has no revision 'v9'" in refusal(capsys, "org/pickled@v9")
    assert refusal(capsys, "org/pickled").startswith("org/pickled has no safetensors files")
    assert "ORG/NAME/FILE: a.gguf, b.gguf" in refusal(capsys, "org/gguf")
    assert "has no file 'c.gguf'" in refusal(capsys, "org/gguf/c.gguf")


def test_a_private_model_is_read_with_its_token(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add(NAME, FILES, token="secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["pull", NAME]) == OK
    assert snapshot(cache, repository.refs["main"]) == FILES


def test_a_hub_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(download, "Hub", partial(Hub, away, str(tmp_path)))
    assert refusal(capsys, NAME, UNAVAILABLE).startswith(f"cannot download from {away}: ")
    monkeypatch.setenv("HF_ENDPOINT", away)
    assert "check HF_ENDPOINT, or try again" in refusal(capsys, NAME, UNAVAILABLE)


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://hub", "https://", "http://hub:port"])
def test_a_wrong_address_of_the_hub_is_named(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert refusal(capsys, NAME, WRONG_USAGE).startswith(
        f"HF_ENDPOINT: {endpoint!r} is not the address of a hub; use one like https://"
    )


def test_a_model_that_does_not_fit_on_the_disk_is_refused_before_the_download(
    hub: HubServer, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(NAME, FILES, claimed_sizes={"model.safetensors": 10**17})
    line = refusal(capsys, NAME)
    assert line.startswith(f"{NAME} needs 100.0 PB, but the disk of {cache} has ")
    assert hub.downloads("model.safetensors") == hub.downloads("config.json") == []
    assert not cache.exists()


def test_a_full_disk_is_one_clear_line() -> None:
    with pytest.raises(HubFault) as caught, explained(HubName(NAME), "http://hub"):
        Path("/dev/full").write_text("x")
    assert str(caught.value).startswith("the disk is full; free some space and pull org/tiny again")
    assert caught.value.exit_code == FAILED


@pytest.mark.parametrize("command", [["pull", NAME], ["models"], ["rm", NAME]])
def test_without_huggingface_hub_the_commands_say_how_to_install_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(command) == WRONG_USAGE
    assert capsys.readouterr().err == (
        "tokenbus: huggingface_hub is not installed; pip install 'tokenbus[gpu]' installs it\n"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../models", "expected ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf"),
        ("nosuch", "'nosuch' has no organization; expected ORG/NAME"),
        ("x.gguf", "'x.gguf' has no organization; expected ORG/NAME"),
    ],
)
def test_a_wrong_name_is_refused_with_the_form_of_a_name(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["pull", name])
    assert caught.value.code == WRONG_USAGE
    assert says in capsys.readouterr().err


def test_parts_of_large_weights_are_wanted_with_their_index() -> None:
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    paths = [*parts, "model.safetensors.index.json", "text_encoder/model.safetensors"]
    assert wanted(HubName(NAME), paths) == [*parts, "model.safetensors.index.json"]
