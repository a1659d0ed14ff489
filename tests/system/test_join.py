"""``tokenbus up --join``: workers of another machine, which connect with their key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenbus.clients.cli.keys import new_pair
from tokenbus.clients.system.commands import example
from tokenbus.clients.system.faults import SystemFault
from tokenbus.clients.system.up import joining
from tokenbus.protocol.keys import KeyFolder
from tokenbus.protocol.settings import Settings

from ..processes import until
from ..worlds.keyed_broker import KeyedBroker
from .foreground import Foreground, tokenbus


@pytest.mark.process
def test_workers_join_the_broker_of_another_machine() -> None:
    with KeyedBroker("tcp://127.0.0.1:*") as broker:
        key = broker.new_key("box2", "worker")
        key.write(broker.path / "box2.key")
        folder = broker.path / "second"
        folder.mkdir()
        at = broker.back.removeprefix("tcp://")
        arguments = ["up", "--join", at, "--key", str(broker.path / "box2.key")]
        joined = Foreground(folder, *arguments, "--gpu-workers", "0")
        try:
            workers = broker.server.core.state.workers

            def registered() -> bool:
                assert joined.process.poll() is None, joined.output
                return [w.role for w in list(workers.values())] == ["controller"]

            until(registered, 300.0, "a controller worker of the second machine")
            logs = {path.stem for path in joined.run_dir.logs.glob("*.log")}
            assert logs == {"supervisord", "controller-worker-0"}
        finally:
            ended = tokenbus("down", "--run-dir", str(joined.run_dir.path), cwd=folder)
            joined.process.wait(300)
        assert ended.returncode == 0, ended.stderr
        until(lambda: not workers, 300.0, "the worker has left")
        shutil.rmtree(folder, ignore_errors=True)


def test_joining_needs_a_workers_key(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "there")
    keys.make(new_pair)
    with pytest.raises(SystemFault, match="first:5556 need a worker's key; make one there"):
        joining(Settings(run_dir=str(tmp_path), join="first"))
    with pytest.raises(SystemFault, match="first:5556 need a worker's key; make one there"):
        joining(Settings(run_dir=str(tmp_path), join="first", key=str(keys.own("client"))))
    key = str(keys.own("worker"))
    found = joining(Settings(run_dir=str(tmp_path), join="first", key=key))
    assert (found.back, found.http) == ("tcp://first:5556", "none")


def test_the_example_of_up_has_the_key_of_a_system_in_a_run_directory_of_its_own(
    tmp_path: Path,
) -> None:
    settings = Settings(run_dir=str(tmp_path))
    assert "TOKENBUS_KEY" not in example(settings)
    keys = KeyFolder(settings.keys_folder)
    keys.make(new_pair)
    assert example(settings).startswith(f"TOKENBUS_KEY={keys.own('client')} ")
