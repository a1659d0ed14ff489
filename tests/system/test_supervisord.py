"""``supervisord -c supervisord.conf`` in a checkout, without settings in the environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenbus.clients import Client, GenerateOptions, Stream
from tokenbus.clients.system.conf import CONF
from tokenbus.clients.system.processes import started_by
from tokenbus.clients.system.run_dir import RunDir

from ..processes import free_port, until
from .conftest import ROOT

pytestmark = pytest.mark.process

WAIT_S = 300.0
BIN = Path(sys.executable).parent
CLEAN = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}


@pytest.fixture
def checkout(folder: Path) -> Path:
    """The files of a checkout that supervisord needs, with free ports for clients in the
    settings."""
    tracked = subprocess.check_output(
        ["git", "ls-files", "supervisord.conf", "run"], cwd=ROOT, text=True
    )
    for name in tracked.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    front, http = f"tcp://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    (folder / "tokenbus.toml").write_text(f'front = "{front}"\nhttp = "{http}"\nthreads = 1\n')
    return folder


@pytest.fixture
def patient(checkout: Path) -> Path:
    """A checkout whose workers have ten minutes to finish their streams."""
    conf = checkout / "supervisord.conf"
    text = conf.read_text().replace("startsecs=30", "startsecs=1")
    conf.write_text(text.replace("stopwaitsecs=40", "stopwaitsecs=610"))
    with (checkout / "tokenbus.toml").open("a") as settings:
        # With this lease, a worker that the test stops for a moment is not treated as lost.
        settings.write("drain_s = 600\nexpiry_s = 60\n")
    return checkout


@pytest.fixture
def supervisord(checkout: Path) -> Iterator[subprocess.Popen[str]]:
    """A running supervisord with the ``supervisord.conf`` of ``checkout``."""
    with (checkout / "output").open("w") as output:
        process = subprocess.Popen(
            [BIN / "supervisord", "-c", "supervisord.conf"],
            cwd=checkout,
            env=CLEAN,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield process
    # pytest shows this output if the test has failed.
    for log in sorted((checkout / "run" / "log").glob("*.log")):
        print(f"--- {log.name}\n{log.read_text()}")
    if process.poll() is None:
        process.kill()
        process.wait()
    for pid in started_by(RunDir(checkout / "run")):
        os.kill(pid, signal.SIGKILL)


def ctl(checkout: Path, *arguments: str) -> str:
    """Runs supervisorctl with these arguments; returns its output."""
    done = subprocess.run(
        [BIN / "supervisorctl", "-c", "supervisord.conf", *arguments],
        cwd=checkout,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout


def is_to_end(pid: int) -> bool:
    """Whether a stopped process has a pending SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    [pending] = re.findall(r"ShdPnd:\s*([0-9a-f]+)", status)
    return bool(int(pending, 16) >> signal.SIGTERM - 1 & 1)


def live(http: str) -> bool:
    """Whether the gateway at this address answers."""
    try:
        return httpx.get(f"http://{http}/live").status_code == 200
    except httpx.TransportError:
        return False


def test_it_runs_the_whole_system_restarts_its_parts_and_tokenbus_down_ends_it(
    checkout: Path, supervisord: subprocess.Popen[str]
) -> None:
    _, front, _, http, _ = (checkout / "tokenbus.toml").read_text().split('"')
    with Client(front, patience_s=WAIT_S) as client:
        text = client.generate("import ", max_tokens=3, ignore_eos=True, retry_s=WAIT_S).text()
        assert text, (checkout / "output").read_text()
        steered = client.generate(
            "import ", controller="choice", controller_arg=["os", "sys"], retry_s=WAIT_S
        )
        assert steered.text() in ("os", "sys")
        until(lambda: live(http), WAIT_S, "the gateway answers")
        until(
            lambda: (
                sorted(w.role for w in client.status().workers) == ["controller", "gpu", "state"]
            ),
            WAIT_S,
            "a worker of each role",
        )
    names = {line.split()[0].rpartition(":")[2] for line in ctl(checkout, "status").splitlines()}
    assert names == {"broker", "state-worker-0", "controller-worker-0", "gpu-worker-0", "gateway-0"}
    with Client(front, patience_s=WAIT_S) as client:
        # With ``retry_s`` 0, a stream is not sent again.
        plain: GenerateOptions = {"max_tokens": 900, "ignore_eos": True, "retry_s": 0}
        constrained: GenerateOptions = {
            **plain,
            "controller": "regex",
            "controller_arg": "[a-z]{800}",
        }
        wanted = [client.generate([5, 6], **options).tokens() for options in (plain, constrained)]
        for program in ("broker", "state-worker:*", "controller-worker:*"):
            streams = [client.generate([5, 6], **options) for options in (plain, constrained)]
            for stream in streams:
                next(iter(stream))
            assert "started" in ctl(checkout, "restart", program)
            assert [stream.tokens() for stream in streams] == wanted, program
    run_dir = RunDir(checkout / "run")
    # The gateway consists of two processes: one that supervisord waits for, and one that serves.
    until(lambda: len(started_by(run_dir)) == 6, WAIT_S, "the replaced processes have ended")
    subprocess.run(
        [BIN / "tokenbus", "down", "--run-dir", "run"],
        cwd=checkout,
        env=CLEAN,
        timeout=WAIT_S,
        check=True,
        capture_output=True,
    )
    assert supervisord.wait(WAIT_S) == 0
    assert started_by(run_dir) == []


def test_streams_leave_a_worker_that_is_restarted_and_are_finished_before_the_end(
    patient: Path, supervisord: subprocess.Popen[str]
) -> None:
    """The timeouts of this test are shorter than ``drain_s``. So the test fails if a worker waits
    for ``drain_s``."""
    checkout = patient
    _, front, *_ = (checkout / "tokenbus.toml").read_text().split('"')
    with Client(front, patience_s=WAIT_S) as client:
        client.generate([5], max_tokens=3, retry_s=WAIT_S).wait()

        def begin() -> tuple[Stream, int]:
            """Begins a stream, and stops the worker of the stream. Returns the stream and the
            process id of the worker."""
            stream = client.generate([5, 6], n=4, max_tokens=900, ignore_eos=True, retry_s=0)
            next(iter(stream))
            [worker] = [w.pid for w in client.status().workers if w.role == "gpu"]
            os.kill(worker, signal.SIGSTOP)
            assert client.status().streams == 1
            return stream, worker

        stream, worker = begin()
        with ThreadPoolExecutor() as pool:
            restarted = pool.submit(ctl, checkout, "restart", "gpu-worker:*")
            until(lambda: is_to_end(worker), WAIT_S, "supervisord ends the worker")
            os.kill(worker, signal.SIGCONT)
            assert "started" in restarted.result()
        assert [len(s.tokens) for s in stream.wait()] == [900] * 4
        log = (checkout / "run" / "log" / "broker.log").read_text()
        assert "WARNING" not in log
        assert re.search("worker gpu-.* has left: SIGTERM; of its 1 stream, 1 waits", log)
        stream, worker = begin()
        supervisord.send_signal(signal.SIGTERM)
        until(lambda: is_to_end(worker), WAIT_S, "supervisord ends the worker")
        os.kill(worker, signal.SIGCONT)
        assert [len(s.tokens) for s in stream.wait()] == [900] * 4
    assert supervisord.wait(WAIT_S) == 0
    run_dir = RunDir(checkout / "run")
    until(lambda: not started_by(run_dir), WAIT_S, "no process is left")
    assert sorted(f.name for f in run_dir.path.glob("*.sock")) == []
    assert not (run_dir.path / "supervisord.pid").exists()


def test_the_package_has_the_file_of_the_top_level() -> None:
    assert CONF.resolve() == ROOT / "supervisord.conf"
