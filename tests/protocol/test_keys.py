"""Key files, the folder of keys, and the command that manages them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tokenbus.clients.cli.keys import new_pair
from tokenbus.clients.cli.main import main
from tokenbus.protocol.keys import Allowed, KeyFault, KeyFolder, OwnKey, own_key
from tokenbus.protocol.settings import Settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENBUS_KEYS", str(tmp_path / "keys"))
    folder = KeyFolder(tmp_path / "keys")
    assert main(["keys", "new"]) == 0
    return folder


def test_a_new_folder_has_the_keys_of_this_machine(folder: KeyFolder) -> None:
    settings = Settings(keys=str(folder.path))
    client, worker = own_key(settings, "client"), own_key(settings, "worker")
    assert client is not None
    assert worker is not None
    assert client.broker == worker.broker == folder.broker().public
    local = folder.allowed("client")["local"]
    assert local == Allowed(public=client.public, operator=True)
    assert folder.allowed("worker")["local"].public == worker.public


def test_a_key_of_a_name_is_made_allowed_listed_and_revoked(
    folder: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "ann", "--streams", "3"]) == 0
    key = OwnKey.read(Path("ann.key"))
    assert (key.name, key.role, key.broker) == ("ann", "client", folder.broker().public)
    assert folder.allowed("client")["ann"] == Allowed(public=key.public, streams=3)
    assert main(["keys", "allow", "ann", "--streams", "none", "--tokens-per-minute", "50"]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    assert f"client  {key.public}  ann  tokens_per_minute=50\n" in capsys.readouterr().out
    assert main(["keys", "revoke", "ann"]) == 0
    assert "ann" not in folder.allowed("client")
    assert main(["keys", "revoke", "ann"]) == 2
    assert "the allowed names: local" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "tools", "shown"),
    [
        ("add, Calc*", ["add", "Calc*"], " tools=add,Calc*"),
        ("none", [], " tools=none"),
        ("default", None, ""),
    ],
)
def test_a_key_lists_the_tools_that_its_programs_may_call(
    folder: KeyFolder,
    capsys: pytest.CaptureFixture[str],
    given: str,
    tools: list[str] | None,
    shown: str,
) -> None:
    assert main(["keys", "new", "ann", "--tools", "first"]) == 0
    assert main(["keys", "allow", "ann", "--streams", "3"]) == 0
    assert folder.allowed("client")["ann"].tools == ["first"]
    assert main(["keys", "allow", "ann", "--tools", given]) == 0
    assert folder.allowed("client")["ann"].tools == tools
    assert main(["keys", "list"]) == 0
    assert f"  ann  streams=3{shown}\n" in capsys.readouterr().out


def test_a_key_is_made_where_it_is_used_and_allowed_at_the_broker(
    folder: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = folder.broker().public
    assert main(["keys", "new", "box2", "--worker", "--broker", broker]) == 0
    key = OwnKey.read(Path("box2.key"))
    assert "box2" not in folder.allowed("worker")
    *_, command = capsys.readouterr().out.strip().splitlines()
    assert main(command.split()[1:]) == 0
    assert folder.allowed("worker")["box2"].public == key.public


def test_only_this_user_can_read_the_files(folder: KeyFolder) -> None:
    assert main(["keys", "new", "ann"]) == 0
    for path in [folder.path, *folder.path.rglob("*"), Path("ann.key")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    Path("ann.key").chmod(0o640)
    with pytest.raises(KeyFault, match=r"open to other users \(mode 640\); chmod 600"):
        OwnKey.read(Path("ann.key"))


def test_a_run_directory_that_is_made_for_the_keys_is_for_this_user_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert KeyFolder(run_dir / "keys").make(new_pair)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_key_has_one_holder_in_one_role(folder: KeyFolder) -> None:
    pair = new_pair()
    folder.allow("client", "ann", Allowed(public=pair.public))
    for role, name in (("client", "ben"), ("worker", "ann")):
        with pytest.raises(KeyFault, match="already allowed as the client 'ann'"):
            folder.allow(
                "worker" if role == "worker" else "client", name, Allowed(public=pair.public)
            )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["new"], "the broker's keys exist already in .*; give the NAME"),
        (["new", "../ann"], "'../ann' is not a valid name of a key"),
        (["new", "local"], "'local' has a key already; revoke it first"),
        (["new", "w", "--worker", "--streams", "1"], "a worker's key has no quotas"),
        (["allow", "ann"], "the client 'ann' is unknown; allow its public key"),
        (["allow", "ann", "abc"], "'abc' is not a public key; expected 64 hexadecimal digits"),
        (["revoke", "ann"], "'ann' is not an allowed client or worker"),
        (["list", "--keys", "nowhere"], "nowhere has no broker.key; 'tokenbus keys new' makes one"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: KeyFolder, capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    assert main(["keys", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tokenbus: ")
    assert printed.count("\n") == 1
    import re

    assert re.search(fault, printed), printed


def test_a_file_that_is_not_a_key_is_named(folder: KeyFolder) -> None:
    file = folder.path / "clients" / "ann.toml"
    file.write_text('public = "abc"\n')
    with pytest.raises(KeyFault, match=r"ann\.toml is not a valid key file: .*public"):
        folder.allowed("client")
    faults: list[KeyFault] = []
    assert list(folder.allowed("client", faults)) == ["local"]
    assert len(faults) == 1
    file.write_bytes(b"\xff")
    with pytest.raises(KeyFault, match=r"ann\.toml is not a valid key file: it is not a text in"):
        folder.allowed("client")


def test_a_system_without_keys_has_none(tmp_path: Path) -> None:
    settings = Settings(run_dir=str(tmp_path))
    assert KeyFolder.of(settings) is None
    assert own_key(settings, "client") is None
