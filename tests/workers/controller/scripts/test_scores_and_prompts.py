"""A script scores texts and begins sequences with fresh prompts: in each language, and in both
runtimes of Python."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import ScriptProgram as ServedScript
from tokenbus.workers.controller.scripts.controller import ScriptProgram

from ..played import UNHURRIED
from ..python.runs import Run, tokens_of
from . import script_runs
from .script_runs import constraints, says

pytestmark = pytest.mark.process  # The interpreters are compiled in processes.

PYTHON = """
import json

async def main(ctx):
    await ctx.fixed("The answer is ")
    print(json.dumps(await ctx.score([" yes", "no", [5, 6]])))
    print(json.dumps(await ctx.score([" yes", "no", [5, 6]], per_token=True)))
    i = await ctx.fork(2)
    print(json.dumps(await ctx.score(["%d" % i, "ab"])), len(ctx.tokens))
    await ctx.gen(max_tokens=2)
"""
JAVASCRIPT = """
async function main(ctx) {
  await ctx.fixed("The answer is ");
  ctx.log(await ctx.score([" yes", "no", [5, 6]]));
  ctx.log(await ctx.score([" yes", "no", [5, 6]], { perToken: true }));
  const i = await ctx.fork(2);
  ctx.log(await ctx.score([`${i}`, "ab"]), ctx.tokens.length);
  await ctx.gen({ maxTokens: 2 });
}
"""
KINDS = pytest.mark.parametrize("kind", ["uploaded", "served", "javascript"])


def play(kind: str, python: str, javascript: str) -> Run:
    if kind != "served":
        language = "python" if kind == "uploaded" else kind
        return script_runs.play(python if kind == "uploaded" else javascript, language, **how())
    names: dict[str, Any] = {"__name__": "answer", "ControllerError": ControllerError}
    exec(compile(python, "answer.py", "exec"), names)
    served = ScriptProgram(ServedScript(names["main"]), constraints().get)
    with captured():
        return Run(served, limits=UNHURRIED, **how())  # type: ignore[arg-type]


def how() -> dict[str, object]:
    return {"choose": says("ok ok ok ok"), "prompt": "Q"}


def scores_of(*texts: str | list[int]) -> list[list[float]]:
    """The scores that ``Run`` gives to texts."""
    tokens = [tokens_of(text) if isinstance(text, str) else text for text in texts]
    return [[-token / 8 for token in text] for text in tokens]


def read(log: str) -> list[Any]:
    """The JSON values in a log."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(log.rstrip()):
        value, at = decoder.raw_decode(log, at)
        values.append(value)
        at += 1
    return values


@KINDS
def test_texts_are_scored_and_the_sequence_does_not_change(kind: str) -> None:
    run = play(kind, PYTHON, JAVASCRIPT)
    assert not run.errors
    first = scores_of(" yes", "no", [5, 6])
    length = len(tokens_of("Q")) + len(tokens_of("The answer is "))
    logged = [read(run.logs[seq]) for seq in (0, 1)]
    assert logged[0][:2] == [[sum(text) for text in first], first]
    after = [[[sum(text) for text in scores_of(f"{i}", "ab")], length] for i in (0, 1)]
    assert [logged[0][2:], logged[1]] == after
    assert len(run.tokens[1]) == len(tokens_of("The answer is ")) + 2


LOOKS = """
import json

async def main(ctx):
    print(json.dumps(await ctx.distribution(top=3)))
    print(json.dumps(await ctx.distribution(top=0)))
    await ctx.fork(2)
    print(json.dumps(await ctx.distribution()), len(ctx.tokens))
"""
LOOKS_JAVASCRIPT = """
async function main(ctx) {
  ctx.log(await ctx.distribution({ top: 3 }));
  ctx.log(await ctx.distribution({ top: 0 }));
  await ctx.fork(2);
  ctx.log(await ctx.distribution(), ctx.tokens.length);
}
"""


@KINDS
def test_a_script_reads_the_distribution_of_the_next_token(kind: str) -> None:
    run = play(kind, LOOKS, LOOKS_JAVASCRIPT)
    assert not run.errors
    pairs = [[token, -token / 8] for token in range(8)]
    assert read(run.logs[0]) == [pairs[:3], [], pairs, len(tokens_of("Q"))]
    assert read(run.logs[1]) == [pairs, len(tokens_of("Q"))]
    assert run.sampled == 0


@KINDS
@pytest.mark.parametrize("top", ["65", "-1", "'x'"])
def test_a_distribution_of_a_wrong_number_of_tokens_is_refused(kind: str, top: str) -> None:
    python = f"async def main(ctx): await ctx.distribution(top={top})"
    javascript = f"async function main(ctx) {{ await ctx.distribution({{ top: {top} }}); }}"
    assert play(kind, python, javascript).errors


@KINDS
@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ("[]", "score("),
        ('["a", ""]', "score("),
        ('"ab"', "score("),
        ("[[99999]]", "token 99999; token ids of this model are 0 to 4095"),
        ("[[5.5]]", "score"),
    ],
)
def test_texts_that_are_not_valid_are_an_error(kind: str, texts: str, error: str) -> None:
    run = play(
        kind,
        f"async def main(ctx):\n    await ctx.score({texts})\n",
        f"async function main(ctx) {{ await ctx.score({texts}); }}",
    )
    assert error in run.errors[0]


@KINDS
def test_too_many_texts_are_an_error(kind: str) -> None:
    run = play(
        kind,
        'async def main(ctx):\n    await ctx.score(["a"] * 65)\n',
        'async function main(ctx) { await ctx.score(Array(65).fill("a")); }',
    )
    assert "65 texts; expected 1 to 64" in run.errors[0]


EMPTY = """
async def main(ctx):
    await ctx.score(["ab"])
    text = await ctx.gen(regex="a{0}")
    print([text], list(await ctx.gen(regex="a{0}", logprobs=True)), ctx.tokens)
    await ctx.fixed("x")
"""
EMPTY_JAVASCRIPT = """
async function main(ctx) {
  await ctx.score(["ab"]);
  const text = await ctx.gen({ regex: "a{0}" });
  const { text: again, tokens, logprobs } = await ctx.gen({ regex: "a{0}", logprobs: true });
  ctx.log([text], [again, tokens, logprobs], ctx.tokens);
  await ctx.fixed("x");
}
"""


@KINDS
def test_an_empty_text_after_scores_has_neither_tokens_nor_logprobs(kind: str) -> None:
    run = play(kind, EMPTY, EMPTY_JAVASCRIPT)
    assert not run.errors
    logged = read(run.logs[0].replace("'", '"'))
    assert logged == [[""], ["", [], []], tokens_of("Q")]


@KINDS
@pytest.mark.parametrize("options", ["", ", allow: [5]"])
def test_a_wrong_value_of_logprobs_is_an_error(kind: str, options: str) -> None:
    python = options.replace(":", "=")
    run = play(
        kind,
        f"async def main(ctx):\n    await ctx.gen(logprobs=5{python})\n",
        f"async function main(ctx) {{ await ctx.gen({{logprobs: 5{options}}}); }}",
    )
    assert re.search("gen.*logprobs.*5.*; expected [Tt]rue or [Ff]alse", run.errors[0])


SPAWNS = """
async def main(ctx):
    await ctx.fixed("one ")
    first = await ctx.spawn("Hello")
    if first:
        second = await ctx.spawn(ctx.prompt)
        await ctx.fixed("two %d" % second)
        ctx.log(ctx.text(ctx.tokens), ctx.text(ctx.prompt))
    await ctx.gen(max_tokens=2)
"""
SPAWNS_JS = """
async function main(ctx) {
  await ctx.fixed("one ");
  if (await ctx.spawn("Hello")) {
    const second = await ctx.spawn(ctx.prompt);
    await ctx.fixed(`two ${second}`);
    ctx.log(ctx.text(ctx.tokens), ctx.text(ctx.prompt));
  }
  await ctx.gen({ maxTokens: 2 });
}
"""


@KINDS
def test_a_sequence_begins_with_a_fresh_prompt(kind: str) -> None:
    run = play(kind, SPAWNS, SPAWNS_JS)
    assert not run.errors
    first, second = sorted(seq for seq in run.tokens if seq)
    assert run.text().startswith("one ")
    texts = [run.text(seq)[:5] for seq in (first, second)]
    assert texts == ["two 0", "two 1"]
    assert [run.logs[seq] for seq in (first, second)] == [
        "Hellotwo 0 Hello\n",
        "Hellotwo 1 Hello\n",
    ]


@KINDS
@pytest.mark.parametrize("prompt", ['""', "[]", "[99999]", "5"])
def test_a_fresh_prompt_that_is_not_valid_is_an_error(kind: str, prompt: str) -> None:
    run = play(
        kind,
        f"async def main(ctx):\n    await ctx.spawn({prompt})\n",
        f"async function main(ctx) {{ await ctx.spawn({prompt}); }}",
    )
    assert run.errors
