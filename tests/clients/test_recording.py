"""Streams are recorded in a file, run again and compared, by the client and by commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tokenbus.clients import (
    AsyncClient,
    Client,
    ConnectionLostError,
    ControllerError,
    GenerateOptions,
    RequestError,
)
from tokenbus.clients.cli.main import main
from tokenbus.clients.recording import (
    Recorder,
    Recording,
    again,
    first_difference,
    read_recording,
)
from tokenbus.protocol.sampling import SAMPLING_VERSION

from ..processes import Bus
from .wasm_guests import BIASED, FAILS, FORKS, LOGS

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stream.json"


def assert_the_same_again(client: Client, recording: Recording) -> None:
    assert recording.complete
    assert recording.entries
    assert first_difference(recording.entries, again(client, recording)) is None


def test_a_sampled_stream_is_the_same_again(client: Client, file: Path) -> None:
    stream = client.generate(PROMPT, temperature=1.0, n=3, max_tokens=12, stop=["zzz"], record=file)
    sequences = stream.wait()
    recording = read_recording(file)
    assert recording.model is not None
    assert recording.request.seed is not None
    assert sum(entry.token is not None for entry in recording.entries) == sum(
        len(sequence.tokens) for sequence in sequences
    )
    assert_the_same_again(client, recording)


def test_a_stream_that_is_read_entry_by_entry_is_recorded_as_it_was_read(
    client: Client, file: Path
) -> None:
    entries = list(client.generate([5, 6, 7], max_tokens=8, record=str(file)))
    recording = read_recording(file)
    assert recording.entries == entries
    assert recording.request.prompt == [5, 6, 7]
    assert_the_same_again(client, recording)


@pytest.mark.anyio
async def test_an_async_client_records_too(client: Client, steered: Bus, file: Path) -> None:
    async with AsyncClient(steered.front) as other:
        await other.buffer("recorded", "import os\n")
        options: GenerateOptions = {"temperature": 1.0, "n": 2, "max_tokens": 8}
        options["buffers"] = ["recorded"]
        stream = other.generate(PROMPT, record=file, **options)
        entries = [entry async for entry in stream]
        with pytest.raises(RequestError, match="'unknown' cannot be recorded"):
            other.generate(PROMPT, record=file, buffers=["unknown"])
    recording = read_recording(file)
    assert recording.entries == entries
    assert recording.model == client.model_info()
    assert_the_same_again(client, recording)


def test_buffers_of_the_prompt_go_along(client: Client, file: Path) -> None:
    client.buffer("recorded", "import os\n")
    client.buffer("ids", [7, 8, 9])
    given = {"buffers": ["recorded", "ids"], "max_tokens": 6}
    client.generate(PROMPT, record=file, **given).wait()  # type: ignore[arg-type]
    client.drop_buffer("recorded")
    recording = read_recording(file)
    assert [buffer.text for buffer in recording.buffers] == ["import os\n", None]
    assert_the_same_again(client, recording)
    with pytest.raises(RequestError, match="'recorded' cannot be recorded"):
        client.generate(PROMPT, record=file, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("wasm", [FORKS, LOGS], ids=["forks", "logs and variables"])
def test_a_module_goes_along(client: Client, file: Path, wasm: bytes) -> None:
    module = client.upload_controller(wasm).module
    client.generate(
        PROMPT, controller=module, max_tokens=12, temperature=0.7, record=Recorder(file, wasm)
    ).wait()
    recording = read_recording(file)
    assert recording.module == wasm
    assert_the_same_again(client, recording)


def test_a_stream_that_was_closed_is_compared_as_far_as_it_was_read(
    client: Client, file: Path
) -> None:
    with client.generate(PROMPT, max_tokens=50, record=file) as stream:
        next(stream)
    recording = read_recording(file)
    assert not recording.complete
    came = again(client, recording, until=4)
    assert first_difference(recording.entries, came, prefix=True) is None


def test_the_first_difference_is_named(client: Client, file: Path) -> None:
    client.generate(PROMPT, max_tokens=6, record=file).wait()
    recording = read_recording(file)
    changed = [*recording.entries]
    changed[3] = msgspec.structs.replace(changed[3], token=1)
    difference = first_difference(changed, recording.entries)
    assert difference is not None
    assert (difference.seq, difference.at) == (0, 3)
    assert "entry 3 of sequence 0 differs: recorded token 1" in str(difference)
    difference = first_difference(recording.entries, recording.entries[:-1])
    assert difference is not None
    assert str(difference).endswith("now nothing")
    difference = first_difference(recording.entries[:-1], recording.entries)
    assert difference is not None
    assert "recorded nothing" in str(difference)


def test_another_tokenizer_is_refused(client: Client, file: Path) -> None:
    client.generate(PROMPT, max_tokens=2, record=file).wait()
    recording = read_recording(file)
    assert recording.model is not None
    recording.model.fingerprint = "another"
    with pytest.raises(RequestError, match="embedded has the tokenizer"):
        list(again(client, recording))


def test_tokens_of_another_version_of_sampling_are_refused(client: Client, file: Path) -> None:
    client.generate(PROMPT, max_tokens=2, temperature=1.0, record=file).wait()
    recording = read_recording(file)
    assert recording.model is not None
    recording.model.sampling -= 1
    with pytest.raises(
        RequestError, match=f"sampled by version {SAMPLING_VERSION - 1}; the worker samples by"
    ):
        list(again(client, recording))
    recording.request.temperature = 0.0
    assert list(again(client, recording))


def test_only_failures_are_recorded_where_that_is_asked_for(client: Client, file: Path) -> None:
    client.generate(PROMPT, max_tokens=2, record=Recorder(file, only_failures=True)).wait()
    assert not file.exists()
    module = client.upload_controller(FAILS).module
    recorder = Recorder(file, FAILS, only_failures=True)
    with pytest.raises(ControllerError):
        client.generate(PROMPT, controller=module, max_tokens=8, record=recorder).wait()
    assert "bad luck" in read_recording(file).failure


def test_a_request_that_no_broker_answers_leaves_the_file_as_it_is(file: Path) -> None:
    file.write_text("an earlier recording", encoding="utf-8")
    with (
        Client("ipc:///nowhere/front.sock", patience_s=0.1) as client,
        pytest.raises(ConnectionLostError),
    ):
        client.generate(PROMPT, record=file).wait()
    assert file.read_text(encoding="utf-8") == "an earlier recording"


def test_what_is_no_recording_is_refused(file: Path) -> None:
    file.write_text("{}")
    with pytest.raises(RequestError, match="is not a recording: the field 'format' is missing"):
        read_recording(file)


# --- the commands ---------------------------------------------------------------------------------


def test_the_commands_record_replay_and_show(
    steered: Bus, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front = ["--front", steered.front]
    given = ["--max-tokens", "6", "--controller", "regex", "--arg", "[a-z]{3,9}"]
    assert main(["record", str(file), PROMPT, *front, *given]) == 0
    capsys.readouterr()
    assert main(["replay", str(file), *front]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert main(["replay", str(file), *front, "--until", "2", "--show", "masks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    # The line has texts of allowed tokens, including the sampled token, and of forbidden tokens.
    shown = re.search(
        r"0:0  \d+ ('[a-z]+')  \S+  \d+ tokens are allowed: (.*?); forbidden: '", lines[0]
    )
    assert shown, lines[0]
    assert shown[1] in shown[2]
    assert all(re.fullmatch("'[a-z]+'", text) for text in shown[2].removesuffix(", …").split(", "))
    recording = read_recording(file)
    recording.entries[1].token = 5
    file.write_bytes(msgspec.json.encode(recording))
    assert main(["replay", str(file), *front]) == 1
    assert "entry 1 of sequence 0 differs" in capsys.readouterr().out


def test_a_replay_without_a_controller_says_that_every_token_is_allowed(
    steered: Bus, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front = ["--front", steered.front]
    assert main(["record", str(file), PROMPT, *front, "--max-tokens", "1"]) == 0
    capsys.readouterr()
    assert main(["replay", str(file), *front, "--show", "masks"]) == 0
    step, result = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"0:0  \d+ '.*'  -\S+  every token is allowed  ends: length", step)
    assert result == "the same: 1 entry"
    assert main(["replay", str(file), *front, "--expect", "success"]) == 0
    assert capsys.readouterr().out == "1 entry without an error, as expected\n"


def test_masks_are_shown_with_what_a_bias_added(
    client: Client, steered: Bus, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front = ["--front", steered.front]
    module = client.upload_controller(BIASED).module
    given = ["--max-tokens", "2", "--controller", module]
    assert main(["record", str(file), PROMPT, *front, *given]) == 0
    capsys.readouterr()
    assert main(["replay", str(file), *front, "--until", "2", "--show", "masks"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert re.search(r"4096 tokens are allowed: .*; bias: '.*' \+500", line), line


def test_generate_records_too(steered: Bus, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    front = ["--front", steered.front]
    assert main(["generate", PROMPT, *front, "--max-tokens", "3", "--record", str(file)]) == 0
    assert read_recording(file).complete


def test_a_failure_becomes_a_test_that_holds_once_it_is_mended(
    client: Client, steered: Bus, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = client.upload_controller(FAILS).module
    with pytest.raises(ControllerError):
        client.generate(
            PROMPT, controller=module, max_tokens=8, record=Recorder(file, FAILS)
        ).wait()
    front = ["--front", steered.front]
    assert "bad luck" in read_recording(file).failure
    assert main(["replay", str(file), *front]) == 0, "the replay fails like the recorded run"
    assert "bad luck" in capsys.readouterr().out
    assert main(["replay", str(file), *front, "--expect", "success"]) == 1
    mended = tmp_path / "mended.wasm"
    mended.write_bytes(LOGS)
    given = ["--expect", "success", "--controller", str(mended)]
    assert main(["replay", str(file), *front, *given]) == 0
    test = tmp_path / "test_bad_luck.py"
    assert main(["replay", str(file), "--test", str(test)]) == 0
    assert read_recording(tmp_path / "test_bad_luck.recording.json").failure
    tree = ast.parse(test.read_text())
    assert "test_bad_luck" in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert "'success'" in test.read_text()
    assert main(["replay", str(file), "--test", str(test)]) != 0, "an existing file is kept"
    capsys.readouterr()
    assert main(["replay", str(file), "--test", str(tmp_path / "none" / "test_a.py")]) == 2
    assert f"the folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
