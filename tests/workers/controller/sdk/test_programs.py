"""Runs the programs of ``workers/controller/sdk/programs/`` on a system with a tool worker."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import Client, ControllerError
from tokenbus.clients.results import GeneratedSequence
from tokenbus.protocol.scripts import marked_script

from ....processes import Bus, Process, until
from ..wasm.guests import SDK

pytestmark = pytest.mark.process
TOOLS = """
def weather(city: str, days: int) -> list[str]:
    return [f"rain in {city}"] * min(days, 2)

def vowels(text: str) -> float:
    return min(1.0, sum(map(text.count, "aeiou")) / 60)

attempts = []

def third(text: str) -> str | None:
    attempts.append(text)
    return None if len(attempts) == 3 else "too short"

def never(text: str) -> str:
    return "too short"

def ordered(begin: str, end: str) -> list[str]:
    return [] if begin < end else ["begin", "end"]
"""


@pytest.fixture(scope="module")
def client(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    file = tmp_path_factory.mktemp("tools") / "program_tools.py"
    file.write_text(TOOLS)
    with Bus(allow_tools="*", expiry_s=30) as bus:
        bus.start_worker()
        bus.start_other("controller")
        bus.start_other("state")
        arguments = ["tool", "serve", str(file)]
        log = file.parent / "tool.log"
        tools = Process("tokenbus.clients.cli", log, bus.environment, arguments=arguments)
        try:
            bus.wait_for_roles("gpu", "controller", "state", "tool")
            bus.wait_for_models("embedded")
            with bus.client() as client:
                yield client
        finally:
            tools.kill()
            until(lambda: not tools.alive, 60, "the end of the tool worker")


def run(client: Client, name: str, arg: dict[str, Any], **options: Any) -> list[GeneratedSequence]:
    """Runs a program; returns its sequences. Fails if one of them ends with an error."""
    path = SDK / f"programs/{name}.py"
    module = client.upload_controller(marked_script(Path(path).read_bytes(), "python")).module
    given: dict[str, Any] = {"max_tokens": 600, "temperature": 0.8, "seed": 7, **options}
    stream = client.generate("Q:\n", controller=module, controller_arg=json.dumps(arg), **given)
    stream.wait()
    assert [(s.error, s.finish_reason) for s in stream.sequences] == [
        (None, "controller") for _ in stream.sequences
    ]
    return list(stream.sequences)


def test_react_calls_tools_and_answers(client: Client) -> None:
    tools = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    calls = 0
    # With some seeds, the program answers without a call. With at least one of twenty seeds, it
    # almost certainly makes a call.
    for seed in range(20):
        [sequence] = run(client, "react", {"tools": tools, "turns": 3, "tokens": 40}, seed=seed)
        lines = sequence.text.splitlines()
        assert lines[0].startswith("Thought: ")
        assert any(line.startswith("Action: answer ") for line in lines)
        for place, line in enumerate(lines):
            if line.startswith("Action: weather "):
                calls += 1
                given = json.loads(line.removeprefix("Action: weather "))
                seen = json.loads(lines[place + 1].removeprefix("Observation: "))
                assert seen == [f"rain in {given['city']}"] * min(given["days"], 2)
        if calls:
            return
    raise AssertionError("no program called the tool")


def test_the_likeliest_text_wins(client: Client) -> None:
    sequences = run(client, "best_of_n", {"n": 4, "tokens": 12})
    found = re.fullmatch(r"the best of 4 texts has (-[\d.]+) for each token\n", sequences[0].logs)
    assert found is not None
    scored = [client.score("Q:\n", sequence.text).logprobs for sequence in sequences]
    means = [sum(each) / len(each) for each in scored]
    assert means[0] == pytest.approx(float(found[1]), abs=0.01)
    assert means[0] >= max(means) - 0.001
    assert len({sequence.text for sequence in sequences}) >= 3


def test_the_most_frequent_answer_wins(client: Client) -> None:
    sequences = run(client, "self_consistency", {"answer": "[12]", "n": 5, "tokens": 12})
    cue = "\nSo the answer is "
    winner = sequences[0].text[-1]
    said, best = re.fullmatch(r"(\d) of 5 sequences answer (\d)\n", sequences[0].logs).groups()  # type: ignore[union-attr]
    others = Counter(sequence.text[-1] for sequence in sequences[1:])
    assert all(sequence.text[:-1].endswith(cue) for sequence in sequences)
    assert winner == best
    assert others[best] in (int(said), int(said) - 1)


def test_a_tree_keeps_the_best_thoughts_of_each_level(client: Client) -> None:
    sequences = run(client, "tree_of_thoughts", {"width": 3, "depth": 2, "keep": 2, "tokens": 12})
    assert len(sequences) == 3 + 2 * 2
    [whole] = [sequence for sequence in sequences if "\nAnswer: " in sequence.text]
    assert re.fullmatch(r"Step 1: [^\n]*\nStep 2: [^\n]*\nAnswer: [^\n]*\n", whole.text)
    assert sum("pruned" in sequence.logs for sequence in sequences) == 5


def test_a_tree_search_ends_with_the_best_text(client: Client) -> None:
    arg = {"verifier": "vowels", "rollouts": 8, "parallel": 2, "width": 2, "depth": 3, "tokens": 12}
    sequence, root, *lines = run(client, "tree_search", arg)
    found = re.fullmatch(r"(\d+) texts were rated, the best one ([\d.]+)\n", sequence.logs)
    assert found is not None
    assert root.text == ""
    assert sequence.text in [line.text for line in lines]
    assert len(lines) == int(found[1])
    rating = min(1.0, sum(map(sequence.text.count, "aeiou")) / 60)
    assert float(found[2]) == pytest.approx(rating, abs=1e-4)
    ratings = [min(1.0, sum(map(line.text.count, "aeiou")) / 60) for line in lines]
    assert rating == max(ratings) > 0


@pytest.mark.parametrize(
    ("verifier", "log"),
    [
        ("third", "3 attempts; the last one is right\n"),
        ("never", "4 attempts; the last one is wrong: too short\n"),
    ],
)
def test_only_the_last_attempt_stays(client: Client, verifier: str, log: str) -> None:
    [sequence] = run(client, "reflexion", {"verifier": verifier, "tries": 4, "tokens": 20})
    assert "Lesson: " not in sequence.text
    assert sequence.logs == log


def test_only_wrong_fields_are_generated_again(client: Client) -> None:
    fields = {"begin": "[3-9][0-9]", "end": "[0-9][0-9]"}
    arg = {"fields": fields, "validator": "ordered", "tries": 30}
    [sequence] = run(client, "repair", arg, temperature=5.0)
    begin, end = re.fullmatch(r"begin: (\d\d)\nend: (\d\d)\n", sequence.text).groups()  # type: ignore[union-attr]
    assert begin < end
    assert sequence.logs.endswith(" checks; wrong: []\n")


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("react", "tools"),
        ("reflexion", "verifier"),
        ("repair", "fields and validator"),
        ("self_consistency", "answer"),
        ("tree_search", "verifier"),
    ],
)
def test_a_missing_argument_is_named(client: Client, name: str, needs: str) -> None:
    with pytest.raises(ControllerError, match=f"ValueError: the argument needs {needs}, "):
        run(client, name, {})
