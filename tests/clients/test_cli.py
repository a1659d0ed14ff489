"""The command line, each command in a separate process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients.cli import generate
from tokenbus.clients.cli.exits import report
from tokenbus.clients.cli.interactive import split_parameters
from tokenbus.clients.cli.main import main
from tokenbus.clients.cli.options import client_for, parameter
from tokenbus.clients.results import GeneratedSequence
from tokenbus.clients.system.started import is_started
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.messages import Token
from tokenbus.protocol.settings import Settings
from tokenbus.workers.gpu import embedded
from tokenizers import Tokenizer

from ..processes import Bus, clean_environment, free_port, until, without_hint

TOKENBUS = str(Path(sys.executable).parent / "tokenbus")
PROMPT = "def add(a, b):"
LONG = 16 * "="
"""A text that is one token of the embedded model."""


def tokenbus(
    bus: Bus | None, *arguments: str, stdin: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command of ``tokenbus`` to its end."""
    front = {"front": bus.front} if bus is not None else {}
    done = subprocess.run(
        [TOKENBUS, *arguments],
        env=clean_environment(**front, **settings),
        cwd="/tmp",
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    done.stderr = without_hint(done.stderr)
    return done


def test_generate_prints_the_text_and_nothing_else(bus: Bus) -> None:
    done = tokenbus(bus, "generate", PROMPT, "--max-tokens", "12")
    assert (done.returncode, done.stderr) == (0, "")
    with bus.client() as client:
        assert done.stdout == client.generate(PROMPT, max_tokens=12).text() + "\n"


def test_generate_reads_the_prompt_from_stdin_and_prints_json(bus: Bus) -> None:
    done = tokenbus(
        bus, "generate", "-", "--json", "--n", "2", "--temperature", "1", "--seed", "3",
        "--max-tokens", "5", "--set", "ignore_eos=true", stdin=PROMPT,
    )  # fmt: skip
    sequences = json.loads(done.stdout)["sequences"]
    assert [len(s["tokens"]) for s in sequences] == [5, 5]
    assert {s["finish_reason"] for s in sequences} == {"length"}


def test_several_sequences_are_printed_one_after_the_other(bus: Bus) -> None:
    arguments = ("--n", "2", "--temperature", "1", "--max-tokens", "4")
    done = tokenbus(bus, "generate", PROMPT, *arguments)
    assert done.stdout.count("--- sequence ") == 2


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_one_failed_sequence_of_several_makes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    good = GeneratedSequence(0, finish_reason="length")
    bad = GeneratedSequence(1, finish_reason="error", error="too slow", code="controller_timeout")

    class Ended:
        sequences = [good, bad]

        def __iter__(self) -> Iterator[Token]:
            return iter(())

        def wait(self) -> list[GeneratedSequence]:
            return self.sequences

    monkeypatch.setattr(generate, "begin", lambda *_: Ended())
    front = f"ipc://{tempfile.gettempdir()}/none.sock"
    assert main(["generate", "x", "--n", "2", "--front", front, *form]) == 4
    assert "sequence 1: too slow" in capsys.readouterr().err


def test_score_prints_a_table_or_json(bus: Bus) -> None:
    table = tokenbus(bus, "score", "import ", "os")
    assert "total" in table.stdout
    assert "os" in table.stdout
    done = tokenbus(bus, "score", "import ", "os", "--json")
    fields = json.loads(done.stdout)
    assert fields["total"] == pytest.approx(sum(fields["logprobs"]))


def test_status_shows_the_workers(bus: Bus) -> None:
    shown = tokenbus(bus, "status").stdout
    with bus.client() as client:
        assert all(worker.name in shown for worker in client.status().workers)
    assert "embedded" in shown
    assert "ready" in shown
    assert re.search("over (gathered )?blocks of the KV cache\n", shown)
    assert json.loads(tokenbus(bus, "status", "--json").stdout)["workers"][0]["role"] == "gpu"


def test_status_shows_which_of_several_brokers_does_not_answer(bus: Bus) -> None:
    away = f"tcp://127.0.0.1:{free_port()}"
    fronts = f"{away},{bus.front}"
    title = f"brokers {away} (does not answer), {bus.front}   up "

    def shows_both() -> bool:
        """Whether the command shows the running broker, which must answer within 3 s."""
        shown = tokenbus(None, "status", front=fronts, command_timeout_s="3").stdout
        return shown.startswith(title) and bool(re.search(r"gpu-\S+ +gpu +ready", shown))

    until(shows_both, 300.0, title)


def test_the_interactive_client_takes_parameters_at_the_line_s_end(bus: Bus) -> None:
    lines = f"{PROMPT} max_tokens=5 ignore_eos=true\n\n{PROMPT} temperature=hot\nHello there\n"
    done = tokenbus(bus, "client", stdin=lines)
    with bus.client() as client:
        text = client.generate(PROMPT, max_tokens=5, ignore_eos=True).text()
    assert PROMPT + text in done.stdout
    assert "temperature: expected a number, not 'hot'" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("command", [["generate", "-"], ["generate"], ["record", "x.json"]])
def test_a_prompt_of_bytes_that_are_no_text_is_one_line(bus: Bus, command: list[str]) -> None:
    done = subprocess.run(
        [TOKENBUS, *command],
        env=clean_environment(front=bus.front) | {"PYTHONUTF8": "1"},
        input=b"caf\xe9",
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr == (
        b"tokenbus: standard input is not valid UTF-8 at byte 3 (0xe9); convert it, as with: "
        b"iconv -f latin1 -t utf-8\n"
    )


def test_a_slip_in_a_parameter_s_name_is_pointed_out(bus: Bus) -> None:
    done = tokenbus(bus, "client", stdin="foo maxtokens=5 max_tokens=2\n")
    assert "'max_tokens'" in done.stderr


def test_the_interactive_client_can_trace_entries_as_lmtp_s_does(bus: Bus) -> None:
    done = tokenbus(
        bus, "client", "embedded", "--trace", stdin="Hello max_tokens=2 ignore_eos=true\n"
    )
    entry = json.loads(done.stdout.splitlines()[0].removeprefix(">>>> "))
    assert {"token", "stream_id", "logprob", "finish_reason", "top_logprobs"} <= set(entry)


def test_help_and_quit_are_commands_of_the_interactive_client(bus: Bus) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [TOKENBUS, "client"],
        env=clean_environment(front=bus.front) | {"TERM": "dumb"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(ours, b"help\nHello temperature=hot\nquit\n")
        output, errors = process.communicate(timeout=300)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert errors == "tokenbus: temperature: expected a number, not 'hot' [invalid_field]\n"
    assert "repetition_penalty" in output
    assert output.count(">>>> ") == 3
    done = tokenbus(bus, "client", stdin="quit max_tokens=3\nhelp\na temperature=hot\nquit\nb\n")
    assert done.returncode == 4
    assert done.stdout.startswith("quit")
    assert "repetition_penalty" in done.stdout


def test_a_name_that_looks_like_a_number_stays_a_name() -> None:
    assert parameter("controller", "12345678") == "12345678"
    assert parameter("controller", "1234e999") == "1234e999"
    assert parameter("controller_arg", "5") == "5"
    assert parameter("controller_arg", '{"n": 5}') == {"n": 5}


def test_an_error_of_several_lines_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestError("invalid_field", "no such\n  regex:\n\n  (a\n  ^\nunclosed")
    assert report(error) == 4
    said = "tokenbus: no such | regex: | (a | ^ | unclosed [invalid_field]\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("line", "prompt", "options"),
    [
        ("Hi temperature=.5 top_p=1.", "Hi", {"temperature": 0.5, "top_p": 1.0}),
        (
            "Hello there temperature=1.2 max_tokens=5",
            "Hello there",
            {"temperature": 1.2, "max_tokens": 5},
        ),
        ("a = b x=1", "a = b x=1", {}),
        ('say stop=["a", "b c"] n=2', "say", {"stop": ["a", "b c"], "n": 2}),
        ('say stop="b c"', "say", {"stop": ["b c"]}),
        ("say logit_bias={5: 1.0}", None, None),
        ('say logit_bias={"5": 1.0}', "say", {"logit_bias": {5: 1.0}}),
        ("seed=3", "", {"seed": 3}),
        ("x ignore_eos=true", "x", {"ignore_eos": True}),
    ],
)
def test_parameters_are_split_from_a_line(
    line: str, prompt: str | None, options: dict[str, object] | None
) -> None:
    if prompt is None:
        with pytest.raises(RequestError, match="logit_bias"):
            split_parameters(line)
    else:
        assert split_parameters(line) == (prompt, options)


def test_ctrl_c_while_a_command_is_imported_is_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[main.__module__], "import_module", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", "x", "--max-tokens", "-1"], 2,
         "--max-tokens: expected a whole number of at least 1, not '-1' (see: tokenbus generate "
         "--help)"),
        (["generate", "x", "--max-tokens", "abc"], 2,
         "--max-tokens: expected a whole number, not 'abc'"),
        (["generate", "x", "--max-tokens", "2", "--min-tokens", "3"], 4,
         "min_tokens is 3; expected at most max_tokens, which is 2"),
        (["generate", "x", "--top-p", "2"], 2,
         "--top-p: expected a number of at most 1.0, not '2'"),
        (["generate", "x", "--seed", "null"], 2, "--seed: expected a number, not 'null'"),
        (["generate", "x", "--timeout", "x"], 2,
         "--timeout: expected a number, not 'x'"),
        (["generate", "x", "--timeout", "-1"], 2,
         "--timeout: expected a number above 0.0, not '-1'"),
        (["generate", "x", "--timeout", "inf"], 2,
         "--timeout: expected a number of at most 86400.0"),
        (["score", "x", "y", "--timeout", "0"], 2, "--timeout"),
        (["generate", "x", "--set", "controller_arg=a"], 4, "controller_arg is given"),
        (["generate", "x", "--model", "gpt-9"], 4, "gpt-9"),
        (["generate", "x", "--set", "colour=red"], 2, "--set: unknown parameter 'colour'"),
        (["generate", "x", "--front", "tcp:/nowhere"], 2, "tcp:/nowhere"),
        (["generate", "x" * 9000], 4, "prompt_too_long"),
        (["score", "x", ""], 4, "a SCORE needs at least one token"),
        (["generate", "a", "--max-tokens", "900", "--set", "ignore_eos=true", "--n", "64",
          "--timeout", "1.5"], 5, "timeout"),
        (["generate", "caf\udce9"], 4, "UTF-8"),
        (["generate", "x", "--max-token", "3"], 2,
         "unknown flag '--max-token'; did you mean '--max-tokens'?"),
        (["generate", "x", "--set", "temperature"], 2, "use --set temperature=VALUE"),
        (["generate", "x", "--set", "temperature=warm"], 2,
         "temperature: expected a number, not 'warm'"),
        (["generate", "x", "--set", "temprature=1"], 2, "did you mean 'temperature'?"),
        (["generate", "x", "--controller", "y"], 2, "has no flag; use --set controller=VALUE"),
        (["generate", "x", "--record", "/nowhere/x.json"], 2, "folder /nowhere does not exist"),
        (["record", "/nowhere/x.json", "x"], 2, "folder /nowhere does not exist"),
        (["record", "/nowhere/x.json", "x", "--controller", "regex", "--controller-arg", "a"], 2,
         "folder /nowhere does not exist"),
        (["record", "/tmp", "x"], 2, "cannot write /tmp, because it is a folder"),
        (["replay", "x", "--until", "y"], 2, "--until: expected a whole number, not 'y'"),
        (["replay", "x", "--until", "-1"], 2,
         "--until: expected a whole number of at least 1, not '-1'"),
        (["status", "all"], 2, "unexpected argument 'all'"),
        (["replay", "x", "--show", "mask"], 2, "did you mean 'masks'?"),
        (["controller", "uplod", "x"], 2, "did you mean 'upload'?"),
        (["--front", "tcp://127.0.0.1:1", "status"], 2,
         "--front must follow the command: tokenbus status --front"),
        (["controller", "--front=tcp://127.0.0.1:1", "run", "x"], 2,
         "--front must follow the command: tokenbus controller run --front"),
        (["client", "gpt-9"], 4, "gpt-9"),
        (["fly"], 2, "COMMAND: unknown value 'fly'"),
        ([], 2, "COMMAND is missing; valid: up, down, "),
        (["controller"], 2, "ACTION is missing; valid: upload, tag, list, delete, run, serve"),
        (["controller", "serve", "x:y", "--front", "tcp://127.0.0.1:1"], 2,
         "unknown flag '--front'; a worker connects to the broker's address for workers: use "
         "--back ADDRESS"),
        (["tool", "serve", "x.py", "--front=tcp://127.0.0.1:1"], 2, "use --back ADDRESS"),
        (["--nonsense"], 2, "unknown flag '--nonsense' before COMMAND; valid: up, down, "),
        (["up", "--exact", "on"], 2, "the setting 'exact' has no flag; set TOKENBUS_EXACT=VALUE"),
        (["up", "--device", "gpu"], 2,
         "--device: expected auto, cpu, cuda, or one device such as cuda:1, not 'gpu'"),
        (["--versoin"], 2, "did you mean '--version'?"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_an_exit_code(
    bus: Bus, arguments: list[str], code: int, says: str
) -> None:
    done = tokenbus(bus, *arguments)
    assert done.returncode == code
    assert says in done.stderr
    if code not in (0, 5):
        assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.process
def test_without_a_broker_the_error_says_how_to_start_one() -> None:
    front = f"tcp://127.0.0.1:{free_port()}"
    for command in ("generate", "score", "status", "lmtp"):
        arguments = {"generate": ["x"], "score": ["x", "y"], "lmtp": ["--stdio"]}.get(command, [])
        done = tokenbus(None, command, *arguments, "--front", front, stdin="PING {}\n")
        assert done.returncode == 3
        assert done.stderr == (
            f"tokenbus: no broker answers at {front}; is that the address of a running system? "
            f"Start one with: tokenbus up --front {front} [connection_lost]\n"
        )


@pytest.mark.process
def test_a_command_waits_longer_if_its_system_is_started_here() -> None:
    started, other = (Settings(front=f"ipc:///tmp/tb-{name}.sock") for name in ("a", "b"))
    supervisor = subprocess.Popen(
        [sys.executable, "-c", "input()", "supervisord"],
        env=clean_environment(front=started.front),
        stdin=subprocess.PIPE,
    )
    try:
        until(lambda: is_started(started.front_endpoint), 60, "the start of the process")
        for settings, patience_s in ((started, 30.0), (other, 3.0)):
            with client_for(settings) as client:
                assert client._connection._session._patience_s == patience_s
    finally:
        supervisor.communicate(b"\n")


@pytest.mark.process
def test_a_wrong_setting_is_named_with_its_place(tmp_path: Path) -> None:
    done = tokenbus(None, "status", fron="x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "TOKENBUS_FRON" in done.stderr
    assert "'front'" in done.stderr
    config = tmp_path / "tokenbus.toml"
    config.write_text("max_running = 'many'")
    done = tokenbus(None, "status", config=str(config))
    assert done.returncode == 2
    assert "max_running" in done.stderr
    assert str(config) in done.stderr
    missing = tmp_path / "missing.toml"
    done = tokenbus(None, "status", config=str(missing))
    assert (done.returncode, done.stderr) == (
        2, f"tokenbus: cannot read {missing}: No such file or directory\n",
    )  # fmt: skip


def test_ctrl_c_ends_a_generation_quietly(bus: Bus) -> None:
    """The output does not fit into the pipe, so the command cannot end before the signal."""
    tokenizer = Tokenizer.from_file(str(Path(embedded.path()) / "tokenizer.json"))
    [long] = tokenizer.encode(LONG).ids
    bias = f"logit_bias={json.dumps({long: 100})}"
    process = subprocess.Popen(
        [TOKENBUS, "generate", PROMPT, "--max-tokens", "900", "--set", bias],
        env=clean_environment(front=bus.front),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=4096,
    )
    assert process.stdout is not None
    assert process.stdout.read(5) == LONG[:5].encode()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    with bus.client() as client:
        until(lambda: client.status().streams == 0, 120.0, "the stream ended")


@pytest.mark.process
def test_the_help_names_the_first_steps() -> None:
    done = tokenbus(None, "--help")
    assert done.returncode == 0
    for command in ("up", "down", "serve-model", "status", "client", "generate", "score"):
        assert f"tokenbus {command}" in done.stdout or f"    {command}" in done.stdout
