"""``tokenbus controller`` with a running system: its output, its exit codes, and stored modules."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client
from tokenbus.clients.cli.controller_run import _lent
from tokenbus.protocol.messages import MAX_INPUT_BYTES, StoredModule

from ..processes import Bus, clean_environment, free_port, until, without_hint
from ..worlds.controllers import serving_main
from .controller_command import PROMPT, TOKENBUS, start_long_run, tokenbus
from .test_cli import tokenbus as every_command
from .wasm_guests import FAILS, FORKS, LOGS, SPLICES, endless, guest

pytestmark = pytest.mark.anyio


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def test_a_module_is_uploaded_named_and_run_from_the_command_line(
    steered: Bus, tmp_path: Path
) -> None:
    file = tmp_path / "logs.wasm"
    file.write_bytes(LOGS + b"\0\2\1x")  # An empty custom section changes the hash.
    done = tokenbus(steered, "upload", str(file), "--tag", "cli")
    module = done.stdout.split()[0]
    assert (done.returncode, done.stderr, len(module)) == (0, "", 64)
    assert "cli more" in tokenbus(steered, "tag", "cli", "more").stdout
    listed = json.loads(tokenbus(steered, "list", "--json").stdout)
    assert ["cli", "more"] in [m["tags"] for m in listed]
    assert module in tokenbus(steered, "list").stdout
    for program in (str(file), "cli", module):
        run = tokenbus(steered, "run", program, "--prompt", PROMPT, "--max-tokens", "4", "--json")
        [sequence] = json.loads(run.stdout)["sequences"]
        assert run.stderr == ""
        assert set(sequence) == {
            "seq", "parent", "text", "tokens", "logs", "storage", "messages", "waiting",
            "finish_reason", "constraint", "error",
        }  # fmt: skip
        assert sequence["logs"] == "round\n" * 4
        assert (sequence["finish_reason"], len(sequence["tokens"])) == ("length", 4)
    shown = tokenbus(steered, "run", module[:8], "--prompt", PROMPT, "--max-tokens", "4")
    assert shown.stdout == f"{sequence['text']}\n"
    assert shown.stderr == "--- log of 0\n" + "round\n" * 4
    done = tokenbus(steered, "delete", "more")
    assert done.stdout == f"deleted the tag more; the module {module[:12]} stays\n"
    tokenbus(steered, "tag", "cli", "more")
    done = tokenbus(steered, "delete", module[:20])
    assert done.stdout == f"deleted the module {module[:12]} and its tags cli, more\n"
    assert tokenbus(steered, "run", "cli").returncode == 4


ANSWER = """\
import type { Context } from "tokenbus";

interface Answer {
  number: number;
}

async function main(ctx: Context): Promise<void> {
  const text: string = await ctx.gen({ regex: "[0-9]", maxTokens: 2 });
  const answer = { number: Number(text) } as Answer;
  ctx.log("digit", answer.number < 10);
}
"""


def test_a_script_in_typescript_runs_and_its_errors_name_the_line(
    steered: Bus, tmp_path: Path
) -> None:
    file = tmp_path / "answer.ts"
    file.write_text(ANSWER)
    run = tokenbus(steered, "run", str(file), "--prompt", PROMPT, "--max-tokens", "8", "--json")
    [sequence] = json.loads(run.stdout)["sequences"]
    assert (run.stderr, sequence["error"]) == ("", None)
    assert sequence["logs"].splitlines()[-1] == "digit true"
    file.write_text(ANSWER.replace("answer.number < 10", "missing as number"))
    run = tokenbus(steered, "run", str(file), "--max-tokens", "8")
    assert "line 10: ReferenceError: 'missing' is not defined" in run.stderr
    file.write_text(ANSWER.replace("interface Answer {", "enum Answer {"))
    run = tokenbus(steered, "run", str(file))
    assert run.stderr.count("\n") == 1
    assert f"{file}: line 4: SyntaxError" in run.stderr
    assert run.returncode == tokenbus(steered, "run", str(tmp_path / "none.ts")).returncode != 0


def test_served_python_controllers_are_listed(steered: Bus, tmp_path: Path) -> None:
    line = re.compile(r"^listed_own:main  served by (controller-\S+)$", re.MULTILINE)
    with serving_main(steered, tmp_path, "listed_own"):
        until(lambda: line.search(tokenbus(steered, "list").stdout), 300.0, "the controller")
        found = line.search(tokenbus(steered, "list").stdout)
        assert found is not None
        shown = every_command(steered, "status").stdout
        assert re.search(rf"{found[1]} +controller +ready +listed_own:main ", shown)
        assert "listed_own" not in tokenbus(steered, "list", "--json").stdout


def test_an_upload_may_get_several_tags(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "tagged.wasm"
    file.write_bytes(LOGS + b"\0\2\1y")
    done = tokenbus(steered, "upload", str(file), "--tag", "race", "--tag", "race2", "--json")
    stored = json.loads(done.stdout)
    assert stored["tags"] == ["race", "race2"]
    assert json.loads(tokenbus(steered, "delete", stored["module"], "--json").stdout) == stored


def test_a_run_leaves_its_file_s_module_only_where_it_was_before(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "left.wasm"
    file.write_bytes(LOGS + b"\0\2\1z")
    before = client.controllers()

    def run(*more: str) -> int:
        return tokenbus(steered, "run", str(file), "--max-tokens", "2", *more).returncode

    assert (run(), client.controllers()) == (0, before)
    assert (run("--model", "gpt-9"), client.controllers()) == (4, before)
    stored = client.upload_controller(file)
    assert (run(), client.controllers()) == (0, [stored, *before])
    client.delete_controller(stored.module)


@pytest.mark.parametrize("wish", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_takes_its_module_along(
    steered: Bus, client: Client, tmp_path: Path, wish: signal.Signals
) -> None:
    file = tmp_path / "told.wasm"
    file.write_bytes(endless(20) + b"\0\2\1t")
    before = client.controllers()
    process = start_long_run(steered, file)
    assert len(client.controllers()) == len(before) + 1
    process.send_signal(wish)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, without_hint(errors).strip()) == (130, "")
    assert client.controllers() == before


def test_a_run_that_is_stopped_during_its_upload_takes_its_module_along(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def upload(wasm: bytes, tag: str) -> StoredModule:
        os.kill(os.getpid(), signal.SIGTERM)
        stored = Client.upload_controller(client, wasm, tag)
        done.append("stored")
        return stored

    def delete(name: str) -> StoredModule:
        done.append("deleted")
        return Client.delete_controller(client, name)

    before = client.controllers()
    monkeypatch.setattr(client, "upload_controller", upload)
    monkeypatch.setattr(client, "delete_controller", delete)
    with pytest.raises(KeyboardInterrupt), _lent(client, LOGS + b"\0\2\1v"):
        pass
    assert (done, client.controllers()) == (["stored", "deleted"], before)


def test_of_several_runs_of_a_file_the_last_one_drops_its_module(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "twice.wasm"
    file.write_bytes(endless(20) + b"\0\2\1u")
    before = client.controllers()
    first, second = (start_long_run(steered, file) for _ in range(2))
    [module] = [m for m in client.controllers() if m not in before]
    assert len(module.tags) == 2
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=300)
    [module] = [m for m in client.controllers() if m not in before]
    assert len(module.tags) == 1
    kept = client.tag_controller(module.module, "kept")
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=300)
    [module] = [m for m in client.controllers() if m not in before]
    assert (module.module, module.tags) == (kept.module, ["kept"])
    client.delete_controller(module.module)


def test_what_is_taken_back_is_marked_and_nothing_is_printed_twice(
    steered: Bus, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "splices.wasm"
    file.write_bytes(SPLICES)
    client.upload_controller(file, "splices")
    free = client.generate(PROMPT, max_tokens=3, ignore_eos=True).text()
    text = client.generate(PROMPT, controller="splices", max_tokens=8, ignore_eos=True).text()
    shown = f"{free}\n--- 3 tokens removed\n{text}\n"
    more = ("--max-tokens", "8", "--set", "ignore_eos=true")
    assert text[:2] == "ab"
    run = tokenbus(steered, "run", str(file), "--prompt", PROMPT, *more)
    assert (run.stdout, run.stderr) == (shown, "")
    for words, typed in (
        (["generate", PROMPT, *more, "--set", "controller=splices"], ""),
        (["client"], f"{PROMPT} max_tokens=8 ignore_eos=true controller=splices\n"),
    ):
        done = subprocess.run(
            [TOKENBUS, *words],
            env=clean_environment(front=steered.front),
            input=typed,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        errors = without_hint(done.stderr)
        assert (done.stdout.removeprefix(PROMPT), errors) == (shown, "")
    client.delete_controller("splices")


def test_a_run_takes_the_sampling_flags_of_generate(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "free.wasm"
    file.write_bytes(guest())

    def text(*more: str) -> str:
        given = ("--prompt", PROMPT, "--max-tokens", "12", "--set", "ignore_eos=true")
        run = tokenbus(steered, "run", str(file), *given, *more)
        assert run.returncode == 0, run.stderr
        return run.stdout

    hot = ("--temperature", "1.5", "--top-p", "0.95")
    assert text(*hot, "--seed", "3") == text(*hot, "--seed", "3")
    assert text(*hot, "--seed", "3") != text(*hot, "--seed", "4")
    assert text("--set", "temperature=1.5", "--set", "seed=3") != text()


def test_several_sequences_are_shown_one_after_the_other(steered: Bus, tmp_path: Path) -> None:
    file = tmp_path / "forks.wasm"
    file.write_bytes(FORKS)
    run = tokenbus(steered, "run", str(file), "--prompt", PROMPT, "--max-tokens", "6")
    assert (run.returncode, run.stderr) == (0, "")
    assert "--- sequence 0 (length)\n" in run.stdout
    assert "--- sequence 1, fork of 0 (length)\n" in run.stdout


def test_the_argument_of_a_controller_is_read_from_a_file(steered: Bus, tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text('["sys"]')
    controller = ("--json", "--set", "controller=choice", "--set")
    given = f"controller_arg=@{tmp_path}/words.json"
    done = every_command(steered, "generate", "import ", *controller, given)
    [sequence] = json.loads(done.stdout)["sequences"]
    assert (sequence["text"], sequence["constraint"]) == ("sys", "complete")
    missing = every_command(steered, "generate", "x", *controller, "controller_arg=@nowhere")
    says = "--set: controller_arg @nowhere: cannot read nowhere: No such file or directory"
    check_refused(missing, 2, says)


def test_a_failure_is_one_line_and_an_exit_code_and_the_json_is_whole(
    steered: Bus, tmp_path: Path
) -> None:
    file = tmp_path / "fails.wasm"
    file.write_bytes(FAILS)
    run = tokenbus(steered, "run", str(file), "--json")
    [sequence] = json.loads(run.stdout)["sequences"]
    assert "bad luck" in sequence["error"]
    assert (run.returncode, len(run.stderr.splitlines())) == (4, 1)
    assert "bad luck" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "no-such-tag"], 4, "unknown controller 'no-such-tag'"),
        (["run", "/nowhere/x.wasm"], 2, "/nowhere/x.wasm"),
        (["upload", "/nowhere/x.wasm"], 2, "No such file"),
        (["upload", "/etc/passwd"], 4, "not Wasm"),
        (["delete", "no-such-tag"], 4, "no-such-tag"),
        (
            ["run", "x", "--max-tokens", "0"],
            2,
            "--max-tokens: expected a whole number of at least 1, not '0'",
        ),
        (
            ["run", "x", "--max-tokens", "abc"],
            2,
            "--max-tokens: expected a whole number, not 'abc'",
        ),
        (["run", "x", "--timeout", "-1"], 2, "--timeout: expected a number above 0.0, not '-1'"),
        (["run", "x", "--temperature", "nan"], 2, "--temperature: expected"),
        (["run", "x", "--set", "colour=red"], 2, "'colour'"),
        (["run", "x", "--set", "controller=y"], 2, "--set controller"),
        (["run", "chioce"], 4, "built in: choice"),
        (["run", "mine.rb"], 4, "; the name of a file ends with one of .wasm, .c, "),
        (["run", "my:Class"], 4, "a Python controller needs a worker: tokenbus controller serve"),
        (["run", "my.py"], 2, "cannot read my.py: No such file or directory"),
        (["upload", "my.py"], 2, "cannot read my.py: No such file or directory"),
        (["run", "./nowhere"], 2, "nowhere"),
        (
            ["run", "choice", "--arg", "@nowhere.y"],
            2,
            "--arg @nowhere.y: cannot read nowhere.y: No such file or directory",
        ),
        (["tag", "x"], 2, "TAG"),
        ([], 2, "ACTION is missing; valid: upload, tag, list"),
    ],
)
def test_what_is_wrong_is_reported_with_an_exit_code(
    steered: Bus, arguments: list[str], code: int, says: str
) -> None:
    check_refused(tokenbus(steered, *arguments), code, says)


def test_a_program_that_reaches_max_tokens_is_reported(steered: Bus, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("async def main(ctx):\n    await ctx.gen()\n    ctx.log('finished')\n")
    run = tokenbus(steered, "run", str(script), "--prompt", "x", "--max-tokens", "3")
    assert run.stderr == (
        "tokenbus: sequence 0 reached its maximum of tokens, so its program may not have finished; "
        "raise --max-tokens, unless the context is full\n"
    )


def test_one_sequence_that_fails_makes_the_exit_code_of_a_program(
    steered: Bus, tmp_path: Path
) -> None:
    """The other sequence of the program finishes."""
    script = tmp_path / "spawns.py"
    script.write_text('async def main(ctx):\n    await ctx.spawn("a b " * 2000)\n')
    run = tokenbus(steered, "run", str(script), "--prompt", "x")
    assert run.returncode == 4
    [line] = [line for line in run.stderr.splitlines() if line.startswith("tokenbus: ")]
    assert line.startswith("tokenbus: sequence 1: its new prompt is not valid: the request needs")
    assert line.endswith("embedded takes at most 1024 [prompt_too_long]")


def test_an_argument_that_is_almost_json_is_reported(steered: Bus, tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text("async def main(ctx):\n    print(ctx.arg)\n")
    wrong = tokenbus(steered, "run", str(script), "--arg", '{"n": 1')
    assert wrong.stderr.startswith("tokenbus: --arg begins like a JSON object but is not JSON (")
    assert wrong.stderr.endswith('--- log of 0\n{"n": 1\n')
    right = tokenbus(steered, "run", str(script), "--arg", '{"n": 1}')
    assert right.stderr == "--- log of 0\n{'n': 1}\n"


def test_a_message_after_a_fork_begins_a_line(steered: Bus, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text("""
async def main(ctx):
    await ctx.fixed("one line")
    if await ctx.fork(2):
        await ctx.stop()
    ctx.send("two")
    await ctx.fixed("!")
""")
    assert tokenbus(steered, "run", str(script)).stderr == "\n--- message of 0\ntwo\n"


@pytest.mark.process
def test_an_address_without_a_broker_is_reported_with_an_exit_code() -> None:
    address = "tcp://127.0.0.1:9"
    done = tokenbus(None, "list", "--front", address, TOKENBUS_COMMAND_TIMEOUT_S="0.5")
    check_refused(done, 3, address)


def check_refused(done: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_name_without_a_suffix_or_a_slash_is_no_file_s(steered: Bus, tmp_path: Path) -> None:
    (tmp_path / "named").write_bytes(LOGS)
    (tmp_path / "named.wasm").write_bytes(LOGS)

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [TOKENBUS, "controller", "run", program, "--max-tokens", "2"],
            env=clean_environment(front=steered.front),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert run("./named").returncode == run("named.wasm").returncode == 0
    assert "unknown controller 'named'" in run("named").stderr


LETTER = """
async def main(ctx):
    await ctx.fixed("Dear ")
    ctx.send("Your name?")
    await ctx.fixed(await ctx.receive())
    ctx.send("And your town?")
    await ctx.fixed(" of " + await ctx.receive())
"""


SLOW = """
async def main(ctx):
    ctx.send("begin")
    await ctx.gen(max_tokens=300)
    for _ in range(70):
        await ctx.fixed(await ctx.receive())
"""
"""A program that receives more inputs than may wait for a program at the same time."""


def start_script(
    bus: Bus, folder: Path, *flags: str, script: str = LETTER
) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script, encoding="utf-8")
    return subprocess.Popen(
        [TOKENBUS, "controller", "run", "script.py", *flags],
        env=clean_environment(front=bus.front),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_s_messages_are_printed_and_lines_are_its_inputs(
    steered: Bus, tmp_path: Path
) -> None:
    process = start_script(steered, tmp_path)
    assert process.stdin is not None
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(3)] == [
        "\n",
        "--- message of 0\n",
        "Your name?\n",
    ]
    process.stdin.write("Ada\nOslo\n")
    process.stdin.flush()  # Stdin stays open. The command does not wait for its end.
    assert process.wait(300) == 0
    assert process.stderr.read() == "\n--- message of 0\nAnd your town?\n"
    assert process.stdout is not None
    assert process.stdout.read() == "Dear Ada of Oslo\n"
    process.communicate()


def test_the_interactive_client_shows_the_messages_and_logs_of_a_program(
    steered: Bus, tmp_path: Path
) -> None:
    script = tmp_path / "says.py"
    script.write_text("""
async def main(ctx):
    ctx.send("Ready?")
    print("started")
    await ctx.gen(max_tokens=2)
    ctx.send("Done.")
""")
    tokenbus(steered, "upload", str(script), "--tag", "says")
    done = every_command(steered, "client", stdin="Hi controller=says\nquit\n")
    tokenbus(steered, "delete", "says")
    assert done.stdout.startswith("Hi")
    assert re.sub(r"\n+", "\n", done.stderr) == (
        "--- message of 0\nReady?\n--- message of 0\nDone.\n--- log of 0\nstarted\n"
    )
    assert done.returncode == 0


def test_json_has_the_messages_of_a_program(steered: Bus, tmp_path: Path) -> None:
    output, _ = start_script(steered, tmp_path, "--json").communicate("Ada\nOslo", timeout=300)
    [sequence] = json.loads(output)["sequences"]
    assert sequence["messages"] == ["Your name?", "And your town?"]
    assert sequence["text"] == "Dear Ada of Oslo"


@pytest.mark.parametrize("given", ["", "Ada\n"])
def test_a_program_that_waits_after_the_end_of_standard_input_ends_with_an_error(
    steered: Bus, tmp_path: Path, given: str
) -> None:
    process = start_script(steered, tmp_path)
    _, errors = process.communicate(given, timeout=300)
    number = 2 if given else 1
    assert errors.splitlines()[-1].startswith(
        f"tokenbus: the program waits for input {number}, and standard input has ended"
    )
    assert process.returncode == 4


def test_a_last_input_that_is_refused_is_the_only_error(steered: Bus, tmp_path: Path) -> None:
    process = start_script(steered, tmp_path)
    _, errors = process.communicate("Ada\n" + 40_000 * "x" + "\n", timeout=300)
    lines = [line for line in errors.splitlines() if line.startswith("tokenbus")]
    assert lines == [
        "tokenbus: the input has 40000 bytes; at most 32768 are allowed [too_large]",
    ]
    assert process.returncode == 4


def test_the_interactive_client_cannot_send_an_input(steered: Bus, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(LETTER)
    tokenbus(steered, "upload", str(tmp_path / "asks.py"), "--tag", "asks")
    done = every_command(steered, "client", stdin="Hi controller=asks\nquit\n")
    tokenbus(steered, "delete", "asks")
    assert "the program waits for input 1, which this command cannot send" in done.stderr


def test_an_input_that_is_refused_does_not_end_the_dialogue(steered: Bus, tmp_path: Path) -> None:
    """One line is too long, and the program receives lines more slowly than they arrive."""
    flags = ("--json", "--max-tokens", "600", "--set", "ignore_eos=true", "--timeout", "120")
    process = start_script(steered, tmp_path, *flags, script=SLOW)
    numbers = [str(number) for number in range(70)]
    lines = ["x" * (MAX_INPUT_BYTES + 9), *numbers]
    output, errors = process.communicate("\n".join(lines), timeout=300)
    [sequence] = json.loads(output)["sequences"]
    assert sequence["text"].endswith("".join(numbers))
    assert without_hint(errors) == (
        "--- message of 0\nbegin\n"
        f"tokenbus: the input has {MAX_INPUT_BYTES + 9} bytes; at most {MAX_INPUT_BYTES} are "
        "allowed [too_large]\n"
    )


@pytest.mark.process
@pytest.mark.parametrize("flag", ["--run-dir", "--back"])
def test_serve_says_that_it_waits_where_no_broker_is(tmp_path: Path, flag: str) -> None:
    folder, tcp = str(tmp_path), f"tcp://127.0.0.1:{free_port()}"
    value, address = (folder, f"ipc://{folder}/back.sock") if flag == "--run-dir" else (tcp, tcp)
    process = subprocess.Popen(
        [TOKENBUS, "controller", "serve", "tokenbus_example:None", flag, value],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate(timeout=300)
    first, second = errors.splitlines()
    assert first == (
        f"tokenbus: waiting for a broker at {address}; is a system running with {flag} {value}?"
    )
    assert (process.returncode, "tokenbus_example" in second) == (2, True)
