"""A system on two machines. A test disturbs the link between the machines."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..processes import KV_CACHE_BYTES, clean_environment, free_port, until
from ..system.conftest import ROOT
from ..system.foreground import Foreground, tokenbus
from ..system.two_machines import Link, Machine
from ..workers.controller.wasm.hostile.guests import COUNTS, N, guest, set_word

FORKS = guest(
    pre=f"(if (i32.eq (global.get $round) (i32.const 4)) "
    f"(then {set_word(N, 3)} (return (i32.const 3))))"
)
"""A guest that forks into three sequences after its third token."""


class RemoteClient:
    """A client process on one of the machines."""

    def __init__(self, machine: Machine, log: Path, **settings: object) -> None:
        with log.open("w") as errors:
            self._process = machine.run(
                lambda: subprocess.Popen(
                    [sys.executable, "-m", "tests.system.remote_client"],
                    cwd=ROOT,
                    env=clean_environment(**settings),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
        self._log = log

    def ask(self, do: str, **fields: Any) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The answer to the oldest unanswered command."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        return json.loads(line)

    def do(self, do: str, **fields: Any) -> Any:
        """Sends a command and waits for the answer."""
        self.ask(do, **fields)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


class System:
    """A broker and a state worker on one machine, GPU and controller workers on the other."""

    def __init__(self, near: Machine, far: Machine, link: Link, folder: Path) -> None:
        self.near, self.far, self.link = near, far, link
        self._folder = folder
        self._stack = ExitStack()
        self._back = f"tcp://{near.address}:{free_port()}"

    def start(self) -> None:
        """Starts the system, with keys that the command ``tokenbus keys`` makes and allows."""
        here, there = self._folder / "near", self._folder / "far"
        run = ["--run-dir", str(here / "run")]
        here.mkdir()
        there.mkdir()
        worker, client = there / "worker.key", there / "client.key"
        self._keys("new", "far", "--worker", "--file", str(worker), *run, cwd=here)
        listed = self._keys("list", *run, cwd=here).splitlines()
        broker = next(line.split()[1] for line in listed if line.startswith("broker"))
        made = self._keys("new", "ann", "--broker", broker, "--file", str(client), cwd=there)
        self._keys(*made.splitlines()[-1].split()[2:], *run, cwd=here)
        arguments = ["up", "--back", self._back, "--http", "none"]
        none = ["--gpu-workers", "0", "--controller-workers", "0"]
        host = self.near.address
        self.up = self.near.run(lambda: Foreground(here, *arguments, *none, host=host))
        self._stack.callback(self.up.kill)
        self._state_worker(here / "state.log")
        join = ["up", "--join", self._back.removeprefix("tcp://"), "--key", str(worker)]
        settings = f"kv_cache_bytes = {KV_CACHE_BYTES}\nlog_level = 'debug'\n"
        (there / "tokenbus.toml").write_text(settings)
        self.joined = self.far.run(lambda: Foreground(there, *join, "--threads", "1"))
        self._stack.callback(self.joined.kill)
        front = {"front": self.up.front}
        self.client = RemoteClient(self.near, here / "client.log", run_dir=here / "run", **front)
        self._stack.callback(self.client.close)
        self.far_client = RemoteClient(self.far, there / "client.log", key=client, **front)
        self._stack.callback(self.far_client.close)
        self.up.wait_until_ready()
        self.wait_for_roles("controller", "gpu", "state")
        for tag, wasm in (("counts", COUNTS), ("forks", FORKS)):
            self.client.do("upload", tag=tag, wasm=wasm.hex())

    def close(self) -> None:
        """Ends the system."""
        self.link.cut, self.link.delay_s, self.link.loss = False, 0.0, 0.0
        self._stack.close()

    def wait_for_roles(self, *roles: str) -> None:
        """Waits until exactly the workers with these roles have registered, and GPU workers have
        loaded a model."""

        def ready() -> bool:
            assert self.joined.process.poll() is None, self.joined.output + self.joined.logs
            there = self.client.do("workers")
            return sorted(role for role, models in there if models or role != "gpu") == [*roles]

        until(ready, 300.0, f"workers of the roles {roles}")

    @property
    def logs(self) -> str:
        """The logs of all processes."""
        own = sorted(self._folder.glob("*/*.log"))
        others = "".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in own)
        return self.up.logs + self.joined.logs + others

    def _state_worker(self, log: Path) -> None:
        """Starts the state worker on the broker's machine, where it finds its key in the key
        folder."""
        run_dir = self._folder / "near" / "run"
        environment = clean_environment(run_dir=run_dir, back=self._back)
        with log.open("w") as output:
            process = self.near.run(
                lambda: subprocess.Popen(
                    [sys.executable, "-m", "tokenbus.workers.state"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _keys(self, *arguments: str, cwd: Path) -> str:
        ended = tokenbus("keys", *arguments, cwd=cwd)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout
