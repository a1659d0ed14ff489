"""``gen`` of a script returns the log-probabilities of the sampled tokens. ``score`` computes the
same values. The tests run scripts in each language, and in both runtimes of Python."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Token
from tokenbus.protocol.worker_messages import Step
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import ScriptProgram as ServedScript
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.controller.wasm.compiled_modules import Loaded
from tokenbus.workers.gpu.model.loader import LoadedModel
from tokenbus.workers.variables import VariableStorage

from ...worlds.gpu_worker_loop import Loop
from ..controller.guests.remote_guests import running
from ..controller.scripts import script_runs
from ..controller.scripts.script_runs import constraints
from ..controller.wasm.guests import SDK
from .controlled import Workers, check_nothing_is_left
from .moved import TURNS, finished, give, token_messages, transcript

# The interpreters are compiled in processes.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_waiting")]
# Each sequence ends with the log of all its texts. So the log-probabilities of a text must survive
# a replay that begins after the text.
PYTHON = """
import json

async def text(ctx, **options):
    begin = ctx.label()
    found = await ctx.gen(logprobs=True, **options)
    written = ctx.tokens_since(begin)
    await ctx.fixed("", following=begin)
    [scores] = await ctx.score([found.tokens], per_token=True)
    same = [written == found.tokens, ctx.text(found.tokens) == found.text]
    return [found.text, found.tokens, found.logprobs, scores, same]

async def main(ctx):
    texts = [
        await text(ctx, max_tokens=6),
        await text(ctx, stop_at=["ite", "lf"]),
        await text(ctx, regex=r"[a-z]{2,4}\\(self, other\\):[a-z ]{5}", max_tokens=20),
        await text(ctx, yacc='%start s\\n%%\\ns : "x" "yy" | "z" s ;\\n', max_tokens=9),
        await text(ctx, allow=list(range(300, 700)), bias={333: 2.5}, stop_at="s", max_tokens=5),
    ]
    me = await ctx.fork(2)
    await ctx.fixed(" <%d> " % me)
    plain = await ctx.gen(max_tokens=2)
    assert isinstance(plain, str)
    texts.append(await text(ctx, max_tokens=3))
    await ctx.fixed(plain)
    print(json.dumps(texts))
"""
JAVASCRIPT = """
async function text(ctx, options) {
  const begin = ctx.label();
  const { text, tokens, logprobs } = await ctx.gen({ logprobs: true, ...options });
  const same = [show(ctx.tokensSince(begin)) === show(tokens), ctx.text(tokens) === text];
  await ctx.fixed("", { following: begin });
  const [scores] = await ctx.score([tokens], { perToken: true });
  return [text, tokens, logprobs, scores, same];
}
const show = JSON.stringify;

async function main(ctx) {
  const set = Array.from({ length: 400 }, (_, i) => 300 + i);
  const texts = [
    await text(ctx, { maxTokens: 6 }),
    await text(ctx, { stopAt: ["ite", "lf"] }),
    await text(ctx, { regex: "[a-z]{2,4}\\\\(self, other\\\\):[a-z ]{5}", maxTokens: 20 }),
    await text(ctx, { yacc: '%start s\\n%%\\ns : "x" "yy" | "z" s ;\\n', maxTokens: 9 }),
    await text(ctx, { allow: set, bias: { 333: 2.5 }, stopAt: "s", maxTokens: 5 }),
  ];
  const me = await ctx.fork(2);
  await ctx.fixed(` <${me}> `);
  const plain = await ctx.gen({ maxTokens: 2 });
  if (typeof plain !== "string") throw new Error("the text of a gen without logprobs");
  texts.push(await text(ctx, { maxTokens: 3 }));
  await ctx.fixed(plain);
  ctx.log(texts);
}
"""
BODY: dict[str, Any] = {
    "prompt": "def f(a):\n    ",
    "controller": "c",
    "max_tokens": 300,
    "temperature": 0.9,
    "top_p": 0.8,
    "seed": 3,
}
KINDS = pytest.mark.parametrize("kind", ["served", "uploaded", "javascript"])


@cache
def program_of(kind: str) -> Program:
    if kind == "javascript":
        return script_runs.program(JAVASCRIPT)
    if kind == "uploaded":
        return script_runs.program(PYTHON, "python")
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(PYTHON, "answer.py", "exec"), names)
    return ScriptProgram(ServedScript(names["main"]), constraints().get)


class World(Workers):
    def __init__(self, folder: Path, loaded: LoadedModel, kind: str, **how: Any) -> None:
        how.setdefault("program", program_of(kind))
        storage = how.pop("storage", None) or VariableStorage()
        super().__init__(Loop(folder, loaded, overlap=True), storage, Random(4), **how)

    def turn(self) -> None:
        with captured():
            super().turn()


def texts_of(messages: list[list[Token]]) -> list[list[Any]]:
    """The texts that both sequences have logged. Fails unless each log-probability is the score of
    its token."""
    logs: dict[int, str] = {}
    for entry in (entry for message in messages for entry in message):
        assert entry.error is None
        logs[entry.seq] = logs.get(entry.seq, "") + entry.logs
    assert len(logs) == 2
    every = [json.loads(log) for _, log in sorted(logs.items())]
    for _, tokens, logprobs, scores, same in every[0] + every[1]:
        assert same == [True, True]
        assert len(tokens) == len(logprobs) == len(scores) > 0
        sampled = [place for place, each in enumerate(logprobs) if each is not None]

        assert [logprobs[i] for i in sampled] == pytest.approx(
            [scores[i] for i in sampled], abs=1e-4
        )
    return every


@KINDS
@pytest.mark.parametrize("how", [{}, {"shared": True}, {"runs": False}])
def test_log_probabilities_of_a_text_are_its_scores(
    tmp_path: Path, embedded: LoadedModel, kind: str, how: dict[str, bool]
) -> None:
    world = World(tmp_path, embedded, kind, **how)
    give(world.loop, b"GENERATE", BODY, 0)
    first, second = texts_of(world.finish())
    free, stopped, matching, grammar, allowed, _ = first
    assert first[:5] == second[:5]
    assert None not in free[2]
    assert stopped[0].endswith(("ite", "lf"))
    assert None in stopped[2]
    assert "(self, other):" in matching[0]
    assert (None in matching[2]) is (kind != "served")  # A served script samples forced tokens.
    assert grammar[0].endswith("xyy")
    assert None not in allowed[2][:-1]
    check_nothing_is_left(world.loop)


def test_a_run_has_all_its_log_probabilities_in_one_step(
    tmp_path: Path, embedded: LoadedModel
) -> None:
    world = World(tmp_path, embedded, "uploaded")
    give(world.loop, b"GENERATE", BODY, 0)
    world.finish()
    steps = [decode_as(Step, frames[2]) for frames in world.loop.sent(b"STEP")]
    sequences = [sequence for step in steps for sequence in step.sequences]
    assert max(len(one.logprobs) for one in sequences) >= 6
    assert any(one.tokens and not one.logprobs for one in sequences)  # gen without logprobs
    assert not any(one.logprobs and len(one.logprobs) != len(one.tokens) for one in sequences)
    assert not any(one.distributions for one in sequences)


@KINDS
def test_a_replayed_script_gets_the_same_log_probabilities(
    tmp_path: Path, embedded: LoadedModel, kind: str
) -> None:
    storage = VariableStorage()
    whole = World(tmp_path, embedded, kind, storage=storage)
    give(whole.loop, b"GENERATE", BODY, 0)
    wanted = whole.finish()
    texts = texts_of(wanted)
    for cut in range(3, len(wanted), max(1, len(wanted) // 6)):
        second = World(tmp_path, embedded, kind, storage=storage)
        give(second.loop, b"GENERATE", BODY, Flag.MOVED, transcript(wanted[:cut]))
        _same(texts_of([*wanted[:cut], *second.finish()]), texts)
        check_nothing_is_left(second.loop)


@KINDS
def test_log_probabilities_survive_the_loss_of_controllers(
    tmp_path: Path, embedded: LoadedModel, kind: str
) -> None:
    whole = World(tmp_path, embedded, kind)
    give(whole.loop, b"GENERATE", BODY, 0)
    texts = texts_of(whole.finish())
    chance, losses = Random(1), 0
    second = World(tmp_path, embedded, kind)
    give(second.loop, b"GENERATE", BODY, 0)
    second.turn()
    for _ in range(TURNS):
        if finished(second.loop):
            break
        if chance.random() < 0.05:
            second.lose_controllers()
            losses += 1
        second.turn()
    assert losses > 2
    _same(texts_of(token_messages(second.loop)), texts)
    check_nothing_is_left(second.loop)


@pytest.mark.parametrize(("kind", "text"), [("uploaded", PYTHON), ("javascript", JAVASCRIPT)])
def test_log_probabilities_survive_the_ends_of_guest_processes(
    tmp_path: Path, embedded: LoadedModel, kind: str, text: str
) -> None:
    language = "python" if kind == "uploaded" else kind
    loaded = Loaded(language, script_runs.compiled(language), script=text.encode())  # type: ignore[arg-type]
    whole = World(tmp_path, embedded, kind)
    give(whole.loop, b"GENERATE", BODY, 0)
    texts = texts_of(whole.finish())
    with running() as guests:
        program = ScriptProgram(
            guests.runtime.program("tenant", "script", lambda: loaded), constraints().get
        )
        world = World(tmp_path, embedded, kind, program=program)
        give(world.loop, b"GENERATE", BODY, 0)
        for turn in range(TURNS):
            if finished(world.loop):
                break
            if turn % 8 == 7:
                guests.kill()
            world.turn()
        _same(texts_of(token_messages(world.loop)), texts)


def test_the_best_of_n_texts_is_found_without_scores(tmp_path: Path, embedded: LoadedModel) -> None:
    source = (SDK / "programs/best_of_n.py").read_text()
    program = script_runs.program(source, "python")
    world = World(tmp_path, embedded, "uploaded", program=program)
    give(world.loop, b"GENERATE", BODY | {"controller_arg": {"n": 3, "tokens": 8}}, 0)
    entries = [entry for message in world.finish() for entry in message]
    steps = [decode_as(Step, frames[2]) for frames in world.loop.sent(b"STEP")]
    sequences = [sequence for step in steps for sequence in step.sequences]
    means = [sum(one.logprobs) / len(one.logprobs) for one in sequences if one.logprobs]
    log = "".join(entry.logs for entry in entries)
    assert log == f"the best of 3 texts has {max(means):.3f} for each token\n"
    assert len(means) == 3
    assert not any(one.scores for one in sequences)


def _same(got: list[list[Any]], wanted: list[list[Any]]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert [text[:2] for text in one] == [text[:2] for text in other]
        for text, same in zip(one, other, strict=True):
            assert [each is None for each in text[2]] == [each is None for each in same[2]]
