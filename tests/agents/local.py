"""Runs unmodified clients against a gateway on this machine, and checks the prompts of the model.

The model thinks, calls a tool, and answers after the result (``scripted_model``). Its template
refuses messages in an unusual order.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ..processes import Bus, Gateway, Process, free_port, until
from . import scripted_model
from .install import FOLDER

PROGRAMS = Path(__file__).parent / "programs"
RUN_S = 600.0
"""Time limit of a client's run, in seconds. Only a hang reaches this limit."""
QUESTIONS = [f"Question {number}?" for number in range(5)]
INTERRUPTED = 2
"""Index of the question during whose answer the client is interrupted."""
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""Environment variables that keep clients from sending data to other servers."""
NOWHERE = "http://127.0.0.1:9"
"""The address of a proxy that does not exist, so that requests to other servers fail."""


class Local:
    """A running system that serves the scripted model under every model name."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._prompts = bus.folder / "prompts"
        model = scripted_model.write(bus.folder / "scripted")
        bus.start_worker(model=model)
        bus.start_other("controller")
        bus.start_other("state")
        bus.wait_for_roles("gpu", "controller")
        self.url = self._start_gateway()

    def _start_gateway(self) -> str:
        address = f"127.0.0.1:{free_port()}"
        environment = self._bus.environment | {
            "TOKENBUS_HTTP": address,
            "TOKENBUS_SERVED_MODEL_NAME": "*",
            "PROMPTS": str(self._prompts),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        log = self._bus.folder / "gateway.log"
        process = Process("tests.agents.recording_gateway", log, environment)
        gateway = Gateway(process, f"http://{address}")
        self._bus.gateways.append(gateway)
        until(lambda: gateway.answers, 300.0, "a gateway that answers")
        return gateway.url

    @property
    def prompts(self) -> list[str]:
        """All prompts that were rendered since the last call of ``forget``."""
        if not self._prompts.exists():
            return []
        return [json.loads(line) for line in self._prompts.read_text().splitlines()]

    def forget(self) -> None:
        """Deletes the recorded prompts."""
        self._prompts.unlink(missing_ok=True)

    def run(
        self, command: Sequence[str | Path], home: Path, *, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a client in the folder ``home``, which is also its home folder. Fails the test if
        the client fails."""
        done = subprocess.run(
            [str(one) for one in command],
            cwd=home,
            env=self._environment(home),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def interrupt(self, command: Sequence[str | Path], home: Path) -> None:
        """Runs a client like ``run``, and interrupts it after its first request has arrived."""
        before = len(self.prompts)
        process = subprocess.Popen(
            [str(one) for one in command],
            cwd=home,
            env=self._environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: len(self.prompts) > before, RUN_S, "a request of the client")
            process.send_signal(signal.SIGINT)
            process.wait(RUN_S)
        finally:
            process.kill()

    def _environment(self, home: Path) -> dict[str, str]:
        return QUIET | {
            "PATH": f"{Path(shutil.which('node') or '/usr/bin/node').parent}:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_BASE": self.url,
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
        }

    def run_python(self, client: str, program: str, home: Path) -> str:
        """Runs a program in ``programs`` with the packages of a client, and returns its output."""
        return self.run([FOLDER / client / "bin" / "python", PROGRAMS / program], home).stdout


def plain(prompt: str, thinking: bool = True) -> str:
    """A prompt without white space. If ``thinking`` is false, thinking is removed, too."""
    if not thinking:
        prompt = re.sub(r"<think>.*?</think>", "", prompt, flags=re.DOTALL)
        prompt = prompt.removesuffix("<think>\n").removesuffix("<think>\n\n")
    return re.sub(r"\s+", "", prompt)


def check_conversation(prompts: Sequence[str], *, thinking: bool = True) -> None:
    """Checks the prompts of one conversation of five questions, with a call for each question that
    is not interrupted.

    Each prompt must begin with the previous prompt, except after the interruption. So a turn is
    rendered in the same way in all later prompts. ``thinking`` is false if the client does not send
    back thinking.
    """
    assert prompts, "the client has sent no request"
    check_turns(prompts[-1], thinking)
    for before, after in pairwise(prompts):
        ends = f"{QUESTIONS[INTERRUPTED]}<|assistant|>"
        if plain(ends) not in plain(before[-200:]):
            assert plain(after, thinking).startswith(plain(before, thinking)), (before, after)


def check_turns(prompt: str, thinking: bool = True) -> None:
    """Checks that a prompt has all questions in order, except the interrupted question, which may
    be missing. Each other question must be followed by thinking (if ``thinking`` is true), a call
    and the call's result."""
    text = plain(prompt, thinking)
    place = 0
    for number, question in enumerate(QUESTIONS):
        asked = question.replace(" ", "")
        found = text.find(asked, place)
        if number == INTERRUPTED:
            continue
        assert found >= 0, f"{question} is missing in {prompt}"
        place = found
        expected = "Ineedatool.</think>" if thinking else ""
        for part in (expected, "<tool_call>", "<|result|>"):
            place = text.find(part, place)
            assert place >= 0, f"{part} does not follow {question} in {prompt}"


def conversations(prompts: Sequence[str]) -> list[list[str]]:
    """Splits prompts into conversations. A prompt that has only the first question, and no result,
    begins a conversation."""
    found: list[list[str]] = []
    for prompt in prompts:
        begins = prompt.count("<|user|>") == 1 and "<|result|>" not in prompt
        if begins and QUESTIONS[0] in prompt:
            found.append([])
        found[-1].append(prompt)
    return found
