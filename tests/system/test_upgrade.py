"""Processes of an earlier release together with processes of this release (docs/upgrading.md)."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client, GenerateOptions

from ..processes import Bus
from .conftest import ROOT

pytestmark = pytest.mark.process

WITHOUT_A_TAG = "2e1e3d5018301e9b1155f0f9196b508495015c2e"
"""The commit that is used as the earlier release if no release has a tag. This commit is older than
CHANGELOG.md."""
OPTIONS: GenerateOptions = {"max_tokens": 20, "ignore_eos": True, "retry_s": 300}
LONG: GenerateOptions = {"n": 4, "max_tokens": 300, "ignore_eos": True, "retry_s": 0}
STEERED: GenerateOptions = {
    "controller": "json_schema",
    "controller_arg": {"enum": ["os", "sys"]},
    "retry_s": 300,
}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that imports Tokenbus as of the last tag, or as of ``WITHOUT_A_TAG``."""
    tag = git("describe", "--tags", "--abbrev=0").stdout.strip() or WITHOUT_A_TAG
    if git("cat-file", "-e", f"{tag}^{{commit}}").returncode:
        pytest.skip(f"this clone does not have the commit {tag}")
    folder = tmp_path_factory.mktemp("old")
    git("archive", "--output", str(folder / "old.tar"), tag)
    with tarfile.open(folder / "old.tar") as archive:
        archive.extractall(folder / "tree", filter="data")
    # The build makes the files of a wheel, including the compiled guests.
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(folder / "path")]
    subprocess.run(build, cwd=folder / "tree", check=True, capture_output=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "path"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code = "import tokenbus.broker.core as core; print(core.__file__)"
    where = subprocess.check_output([python, "-c", code], text=True)
    assert Path(where.strip()).is_relative_to(folder)
    return str(python)


@pytest.fixture
def upgraded(processes: None, old: str) -> Iterator[Bus]:
    """A new broker with workers of the earlier release."""
    with Bus(worker_python=old) as bus:
        bus.start_all_roles()
        yield bus


def serve(client: Client) -> list[int]:
    """Runs a request with a controller and a plain request; returns the plain request's tokens."""
    assert client.generate("import ", **STEERED).text() in ('"os"', '"sys"')
    return client.generate([5, 6], **OPTIONS).tokens()


def test_workers_of_the_release_before_work_with_the_new_broker_until_new_ones_take_over(
    upgraded: Bus,
) -> None:
    bus = upgraded
    [old_gpu] = bus.workers
    _, old_controller = bus.others
    with bus.client() as client:
        assert len(serve(client)) == 20
        stream = client.generate([5, 6], **LONG)
        next(iter(stream))
        bus.worker_python = sys.executable
        bus.start_worker()
        bus.wait_for_models("embedded", workers=2)
        # The old worker's streams go to the new worker if they have not ended.
        old_gpu.send(signal.SIGTERM)
        assert [len(sequence.tokens) for sequence in stream.wait()] == [300] * 4
        assert old_gpu.wait() == 0
        bus.workers.remove(old_gpu)
        bus.start_other("controller")
        old_controller.send(signal.SIGTERM)
        assert old_controller.wait() == 0
        bus.others.remove(old_controller)
        bus.wait_for_roles("controller", "state", "gpu")
        assert len(serve(client)) == 20


def test_clients_move_from_the_old_system_to_the_new_one_beside_it(
    processes: None, old: str
) -> None:
    """``blue`` is a system of the earlier release, ``green`` a system of this release."""
    with Bus(python=old, worker_python=old) as blue, Bus() as green:
        for bus in (blue, green):
            bus.start_worker()
            bus.wait_for_models("embedded")
        with blue.client() as early, green.client() as late:
            stream = early.generate([5, 6], **LONG)
            next(iter(stream))
            assert len(late.generate([5, 6], **OPTIONS).tokens()) == 20
            # As with ``tokenbus down``, first the workers end, after their streams, and then the
            # broker.
            blue.workers[0].send(signal.SIGTERM)
            assert [len(sequence.tokens) for sequence in stream.wait()] == [300] * 4
            assert blue.workers[0].wait() == 0
            blue.broker.send(signal.SIGINT)
            assert blue.broker.wait() == 0
            assert len(late.generate([5, 6], **OPTIONS).tokens()) == 20


def test_the_changelog_has_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version = next(
        line.split('"')[1]
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if line.startswith("version")
    )
    assert f"\n## {version}" in changelog
