"""A process writes and touches a file by which probes see that the process works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenbus.protocol.health_file import NOT_READY, READY, STANDBY, HealthFile
from tokenbus.protocol.settings import Settings

from ..processes import Bus, Process, until

PATIENCE_S = 300


def text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def age_everything(path: Path) -> None:
    os.utime(path, (0, 0))


def touched(path: Path) -> bool:
    return path.stat().st_mtime > 0


def test_a_beat_renews_the_time_and_a_hung_step_does_not(tmp_path: Path) -> None:
    path = tmp_path / "health"
    health = HealthFile(Settings(health_file=str(path), hung_step_s=60))
    health.beat(False, None, 10.0)
    assert text(path) == NOT_READY
    health.beat(True, 59.0, 10.1)
    assert text(path) == READY, "a change is written at once"
    age_everything(path)
    health.beat(True, 60.1, 12.0)
    assert not touched(path)
    health.beat(True, None, 13.0)
    assert touched(path)


def test_the_file_is_touched_once_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "health"
    health = HealthFile(Settings(health_file=str(path)))
    health.touch(READY, 1.0)
    age_everything(path)
    health.touch(READY, 1.9)
    assert not touched(path)
    health.touch(READY, 2.0)
    assert touched(path)


def test_a_file_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "health"
    health = HealthFile(Settings(health_file=str(path)))
    health.touch(READY, 1.0)
    path.unlink()
    health.touch(READY, 3.0)
    assert text(path) == READY


def test_a_file_that_cannot_be_written_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    health = HealthFile(Settings(health_file=str(tmp_path / "none" / "health")))
    health.touch(READY, 1.0)
    health.touch(READY, 3.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_without_the_setting_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    HealthFile(Settings()).beat(True, None, 1.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_worker_says_whether_it_serves_and_works_on_without_a_broker(tmp_path: Path) -> None:
    def health(name: str) -> Path:
        return tmp_path / name

    def state_worker(name: str, *arguments: str) -> Process:
        environment = bus.environment | {"TOKENBUS_HEALTH_FILE": str(health(name))}
        log = bus.folder / f"{name}.log"
        process = Process("tokenbus.workers.state", log, environment, arguments=arguments)
        bus.others.append(process)
        return process

    with Bus(heartbeat_s=0.1, expiry_s=2, health_file=health("broker")) as bus:
        until(lambda: text(health("broker")) == READY, PATIENCE_S, "a broker that works")
        first = state_worker("first", "--standby")
        until(lambda: text(health("first")) == READY, PATIENCE_S, "a worker that is registered")
        state_worker("second", "--standby")
        until(lambda: text(health("second")) == STANDBY, PATIENCE_S, "a worker that stands by")

        bus.broker.kill()
        until(lambda: text(health("first")) == NOT_READY, PATIENCE_S, "a worker without a broker")
        age_everything(health("first"))
        until(lambda: touched(health("first")), PATIENCE_S, "a worker that works without a broker")
        age_everything(health("broker"))
        bus.start_broker()
        until(lambda: touched(health("broker")), PATIENCE_S, "another broker that works")
        until(lambda: text(health("first")) == READY, PATIENCE_S, "a worker with a broker again")

        first.kill()
        until(lambda: text(health("second")) == READY, PATIENCE_S, "the second takes over")
