"""``tokenbus up``, ``serve-model`` and ``down`` with a real supervisord."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tokenbus.clients import Client, GenerateOptions, UnavailableError
from tokenbus.clients.cli.main import main
from tokenbus.clients.system.processes import alive

from ..processes import Bus, clean_environment, free_port, until
from .foreground import TOKENBUS, Foreground, tokenbus

pytestmark = pytest.mark.process

Start = Callable[..., Foreground]

WITHOUT_MODEL = ("up", "--http", "none", "--gpu-workers", "0")
"""The command of a system that starts quickly: a broker, a state worker and a controller worker."""
STEERED: GenerateOptions = {
    "controller": "choice",
    "controller_arg": ["os", "sys"],
    "retry_s": 300,
}


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts systems, each in a separate folder; they end with the test."""
    started: list[Foreground] = []

    def begin(*arguments: str) -> Foreground:
        place = folder / str(len(started))
        place.mkdir()
        started.append(Foreground(place, *arguments))
        return started[-1]

    yield begin
    for system in started:
        system.kill()


def test_a_tool_worker_runs_with_the_system_and_is_restarted(start: Start, folder: Path) -> None:
    file = folder / "system_tools.py"
    file.write_text("def system_time() -> int:\n    return 7\n")
    system = start(*WITHOUT_MODEL, "--controller-workers", "0", "--tool", str(file))
    system.wait_until_ready()
    with Client(system.front, patience_s=300) as client:
        [worker] = client.status().workers
        assert (worker.role, worker.tools) == ("tool", ["system_time"])
        os.kill(worker.pid, signal.SIGKILL)
        until(
            lambda: [w.tools for w in client.status().workers if w.pid != worker.pid] != [],
            300.0,
            lambda: system.output,
        )
    assert system.end() == 0
    assert "tool-worker-0: killed by SIGKILL; it will be restarted" in system.output


def test_a_tool_worker_without_its_module_ends_the_start(folder: Path) -> None:
    flags = (*WITHOUT_MODEL, "--controller-workers", "0", "--run-dir", str(folder / "run"))
    front = f"tcp://127.0.0.1:{free_port()}"
    done = tokenbus("up", *flags[1:], "--tool", "missing.py", cwd=folder, front=front)
    assert done.returncode == 2
    assert "tool-worker-0 failed" in done.stderr
    assert "missing.py" in done.stderr


def test_a_system_without_controller_workers_refuses_requests_that_need_one_and_ends_by_down(
    folder: Path,
) -> None:
    """The terminal never shows that the broker does not answer. While the system starts or ends,
    the line with the load names this phase instead."""
    ours, theirs = os.openpty()
    front = f"tcp://127.0.0.1:{free_port()}"
    where = ["--run-dir", str(folder / "run"), "--front", front]
    environment = clean_environment() | {"TERM": "xterm", "COLUMNS": "160"}
    output = b""
    with subprocess.Popen(
        [TOKENBUS, "up", "--controller-workers", "0", *where],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        down: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # Reading fails when all writers have ended.
            while written := os.read(ours, 65536):
                output += written
                if down is None and b"try:" in output:
                    with Client(front, patience_s=300) as client:
                        assert [w.role for w in client.status().workers] == ["gpu"]
                        with pytest.raises(UnavailableError, match="no controller worker"):
                            _ = client.generate("import ", controller="choice", retry_s=0).text()
                    command = [TOKENBUS, "down", "--run-dir", str(folder / "run")]
                    down = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        assert process.wait(300) == 0, output[-3000:]
    os.close(ours)
    assert down is not None
    assert down.wait(300) == 0
    assert b"0 streams, 0 tokens/s" in output
    assert b"does not answer" not in output


@pytest.mark.long
def test_every_process_is_replaced_while_streams_run_and_ctrl_c_finishes_a_stream(
    start: Start,
) -> None:
    system = start("up", "--gpu-workers", "2")
    system.wait_until_ready()
    with Client(system.front, patience_s=300) as client:
        roles = sorted(w.role for w in client.status().workers)
        assert roles == ["controller", "gpu", "gpu", "state"]
        assert len(system.processes()) == 5
        before = {w.pid for w in client.status().workers}
        options: GenerateOptions = {"max_tokens": 400, "ignore_eos": True, "retry_s": 0}
        wanted = client.generate([5, 6], **options).tokens()
        rolling = subprocess.Popen(
            [
                TOKENBUS,
                "up",
                "--rolling",
                "--run-dir",
                system.run_dir.path,
                "--front",
                system.front,
            ],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        rounds = 0
        while rolling.poll() is None or not rounds:
            streams = [client.generate([5, 6], **options) for _ in range(4)]
            assert [stream.tokens() for stream in streams] == [wanted] * 4
            assert client.generate("import ", **STEERED | {"retry_s": 0}).text() in ("os", "sys")
            rounds += 1
        assert rolling.stdout is not None
        assert rolling.returncode == 0, rolling.stdout.read()
        assert rolling.stdout.read().count("replaced") == 5
        after = {w.pid for w in client.status().workers}
        assert len(after) == 4
        assert not before & after
        pids = system.processes()
        assert len(pids) == 5
        stream = client.generate("import ", max_tokens=600, ignore_eos=True, retry_s=0)
        entries = iter(stream)
        next(entries)
        system.process.send_signal(signal.SIGINT)
        for _ in entries:
            pass
        assert len(stream.tokens()) == 600
    assert system.process.wait(300) == 0
    assert not [pid for pid in pids if alive(pid)]
    assert "all processes have ended" in system.output
    assert not list(system.run_dir.path.glob("*.sock"))
    # Each process ended by itself, with code 0. supervisord may show "exited early" for a process.
    assert "killed by" not in system.output
    assert "exited with code" not in system.output


def test_rolling_finds_the_addresses_of_the_system_that_runs(start: Start, folder: Path) -> None:
    """The command gets only the run directory. Its other settings are those of another system."""
    system = start(*WITHOUT_MODEL)
    system.wait_until_ready()
    rolling = ("up", "--rolling", "--run-dir", str(system.run_dir.path))
    before = set(system.processes())
    [broker] = [pid for pid in before if "tokenbus.broker" in command_of(pid)]
    os.kill(broker, signal.SIGSTOP)
    try:
        done = tokenbus(*rolling, cwd=folder)
        assert done.returncode == 1
        assert f"the broker at {system.front} does not answer" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert set(system.processes()) == before
    finally:
        os.kill(broker, signal.SIGCONT)
    done = tokenbus(*rolling, cwd=folder, front=f"tcp://127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("replaced") == 3
    assert len(set(system.processes()) - before) == 3
    assert system.end() == 0


def command_of(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_down_ends_a_system_whose_run_directory_was_deleted(start: Start, folder: Path) -> None:
    system = start(*WITHOUT_MODEL)
    system.wait_until_ready()
    pids = system.processes()
    [supervisord] = {parent_of(pid) for pid in pids}
    gone = folder / "gone"
    system.run_dir.path.rename(gone)
    shutil.rmtree(gone)
    run_dir = str(system.run_dir.path)
    rolled = tokenbus("up", "--rolling", "--run-dir", run_dir, cwd=folder)
    assert rolled.returncode == 1
    assert "tokenbus down" in rolled.stderr
    done = tokenbus("down", "--run-dir", run_dir, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert not [pid for pid in (*pids, *system.processes(), supervisord) if alive(pid)]
    assert system.process.wait(300) == 0
    assert tokenbus("down", "--run-dir", run_dir, cwd=folder).returncode == 3


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_down_ends_it_from_elsewhere(start: Start, folder: Path) -> None:
    system = start("up", "--gpu-workers", "0")
    system.wait_until_ready()
    where = ("down", "--run-dir", str(system.run_dir.path))
    done = tokenbus(*where, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert system.process.wait(300) == 0
    again = tokenbus(*where, cwd=folder)
    assert again.returncode == 3
    assert len(again.stderr.splitlines()) == 1


def test_serve_model_says_what_lmtp_s_does_and_killed_processes_come_back(start: Start) -> None:
    system = start("serve-model", "embedded")
    system.wait_until_ready()
    assert "[Loading embedded]" in system.output
    assert f"======== Running on {system.front} ========" in system.output
    assert "[embedded ready on device cpu]" in system.output
    with Client(system.front, patience_s=300) as client:
        assert client.score("import ", "os").total < 0

        def workers() -> set[int]:
            return {w.pid for w in client.status().workers}

        before = workers()
        [broker] = set(system.processes()) - before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(workers() - before) == 3, 120.0, "all workers are there again")
        names = ("gpu-worker-0", "controller-worker-0", "state-worker-0")
        lines = [f"{name}: killed by SIGKILL; it will be restarted\n" for name in names]
        until(lambda: all(line in system.output for line in lines), 60.0, "output about each kill")
        assert client.generate("import ", **STEERED).text() in ("os", "sys")
        os.kill(broker, signal.SIGKILL)
        assert client.generate("import ", **STEERED).text() in ("os", "sys")
    assert system.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("up", "--model", "auto"), 2, "--allow"),
        (("up", "--model", "/no/such/model"), 2, "/no/such/model"),
        (("up", "--model", "/no/such.gguf"), 2, "model: the file /no/such.gguf does not exist"),
        (
            ("up", "--draft-model", "/no/such/draft"),
            2,
            "draft_model: the folder /no/such/draft does not exist",
        ),
        (("up", "--gpu-workers", "many"), 2, "--gpu-workers"),
        (("up", "--device", "abacus"), 2, "abacus"),
        (("up", "--device", "cuda"), 1, "cuda"),
        (("up", "--log-level", "loud"), 2, "--log-level"),
        (("up", "--quantize", "int2"), 2, "expected one of none, int8, int4, not 'int2'"),
        (("up", "--quantize", "int8", "--compile"), 2, "cannot be combined with compile"),
        (("up", "--lora", "x=/no/such"), 2, "lora: the folder /no/such does not exist"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(
    start: Start, arguments: tuple[str, ...], code: int, says: str
) -> None:
    system = start(*arguments)
    assert system.process.wait(300) == code, system.output + system.logs
    assert says in system.output
    assert "Traceback" not in system.output
    assert system.processes() == []


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "is empty; give 'embedded', 'auto', a path or a name on a hub"),
        ("missing.gguf", "the file missing.gguf does not exist"),
        ("empty.gguf", "the file empty.gguf is empty"),
        ("/" + "x" * 300, "x cannot be read: File name too long"),
        ("x" * 300 + ".gguf", ".gguf cannot be read: File name too long"),
        ("x/" + "x" * 300, "is neither a path nor a downloaded model"),
        ("bare", "the folder bare has no config.json"),
        ("a b", "is not the name of a model on a hub"),
        ("nosuch/name", "download it with 'tokenbus pull nosuch/name'"),
        ("nosuch/name/x.gguf", "download it with 'tokenbus pull nosuch/name/x.gguf'"),
        ("nosuch", "download it with 'tokenbus pull ORG/NAME'"),
    ],
)
def test_a_model_that_this_machine_does_not_have_is_refused_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.gguf").touch()
    Path("bare").mkdir()
    assert main(["up", "--model", model, "--run-dir", "run", "--http", "none"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenbus: model: ")
    assert (says in error, error.count("\n")) == (True, 1)
    assert not Path("run").exists()


def test_a_port_in_use_is_refused(folder: Path) -> None:
    with Bus() as other, other.client(patience_s=300) as client:
        assert client.status().workers == []
        run_dir = str(folder / "run")
        done = tokenbus("up", "--front", other.front, "--run-dir", run_dir, cwd=folder)
    assert done.returncode == 1
    assert other.front.rpartition(":")[2] in done.stderr
    assert len(done.stderr.splitlines()) == 1
