"""A script saves a context, and a script of another request opens it: in each language, and in both
runtimes of Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.protocol.tenants import Tenant
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.contexts import SavedTokens
from tokenbus.workers.controller.python.printed import captured
from tokenbus.workers.controller.python.script import ScriptProgram as ServedScript
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.state.durable import DurableVariables

from ..played import UNHURRIED
from ..python.runs import Run, tokens_of
from . import script_runs
from .script_runs import constraints, says

pytestmark = pytest.mark.process  # The interpreters are compiled in processes.

KINDS = pytest.mark.parametrize("kind", ["uploaded", "served", "javascript"])
SAVES = {
    "python": """
async def main(ctx):
    await ctx.gen(max_tokens=2)
    await ctx.save("chat", pin_s=60)
    await ctx.fixed(" and more")
    await ctx.save("longer", pin_s=0)
""",
    "javascript": """
async function main(ctx) {
  await ctx.gen({ maxTokens: 2 });
  await ctx.save("chat", { pinS: 60 });
  await ctx.fixed(" and more");
  await ctx.save("longer", { pinS: 0 });
}
""",
}
OPENS = {
    "python": """
async def main(ctx):
    await ctx.fixed("dropped")
    try:
        await ctx.open(ctx.arg)
    except ControllerError as error:
        ctx.log("refused:", str(error))
    ctx.log(ctx.text(ctx.prompt) + "|" + ctx.text(ctx.tokens))
    i = await ctx.fork(2)
    await ctx.fixed("!%d" % i)
    ctx.log(ctx.text(ctx.prompt))
""",
    "javascript": """
async function main(ctx) {
  await ctx.fixed("dropped");
  try {
    await ctx.open(ctx.arg);
  } catch (error) {
    ctx.log("refused: " + error.message);
  }
  ctx.log(ctx.text(ctx.prompt) + "|" + ctx.text(ctx.tokens));
  const i = await ctx.fork(2);
  await ctx.fixed(`!${i}`);
  ctx.log(ctx.text(ctx.prompt));
}
""",
}


class State:
    """The state worker's variables and contexts, for the requests of several tenants."""

    def __init__(self, folder: Path) -> None:
        self.variables = DurableVariables(folder)
        self._requests = 0

    def play(self, kind: str, scripts: dict[str, str], tenant: str = "a", arg: str = "") -> Run:
        """Runs a script of a tenant as a new request."""
        self._requests += 1
        request = self._requests

        def perform(op: Variable) -> VariableAnswer:
            op.request = request
            [answer] = self.variables.apply([(op, msgpack.encode(op))], [Tenant(tenant)])
            if answer.error is not None:
                raise ControllerError(Code.CONTROLLER_FAILED, answer.error)
            return answer

        text = scripts["javascript" if kind == "javascript" else "python"]
        how: dict[str, Any] = {"choose": says("Hello you there"), "prompt": "Q: "}
        how |= {"perform": perform, "arg": arg.encode(), "limits": UNHURRIED}
        if kind != "served":
            return script_runs.play(text, "python" if kind == "uploaded" else kind, **how)
        names: dict[str, Any] = {"__name__": "answer", "ControllerError": ControllerError}
        exec(compile(text, "answer.py", "exec"), names)
        with captured():
            return Run(ScriptProgram(ServedScript(names["main"]), constraints().get), **how)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    made = State(tmp_path / "state")
    yield made
    made.variables.close()


@KINDS
def test_a_context_is_opened_in_another_request_of_the_tenant(kind: str, state: State) -> None:
    saved = state.play(kind, SAVES)
    assert not saved.errors
    assert [(pin.seconds, pin.owner > 0) for pin in saved.pins] == [(60.0, True)]
    for name, whole in (("chat", saved.text()[: -len(" and more")]), ("longer", saved.text())):
        run = state.play(kind, OPENS, arg=name)
        assert not run.errors
        assert run.logs[0].splitlines()[0] == f"Q: {whole}|Q: {whole}"
        assert [run.texts[0], run.texts[1]] == ["!0", "!1"]
        assert run.logs[1].splitlines()[-1] == f"Q: {whole}"


@KINDS
def test_a_context_that_cannot_be_opened_is_an_error_and_the_sequence_does_not_change(
    kind: str, state: State
) -> None:
    """The script can handle the error."""
    state.play(kind, SAVES)
    foreign = msgpack.encode(SavedTokens("another model", 4096, b"\x05\0\0\0"))
    op = Variable(99, 1, 1, "save", "foreign", foreign)
    state.variables.apply([(op, msgpack.encode(op))], [Tenant("a")])
    for tenant, name, error in (
        ("a", "unknown", "the context 'unknown' does not exist"),
        ("b", "chat", "the context 'chat' does not exist"),
        ("a", "foreign", "saved with another model"),
        ("a", "n" * 300, "has 300 bytes; expected 1 to 256"),
    ):
        run = state.play(kind, OPENS, tenant, name)
        assert not run.errors
        lines = run.logs[0].splitlines()
        assert error in lines[0]
        assert lines[0].startswith("refused: ")
        assert lines[1] == "Q: |Q: dropped"
        assert run.texts == ["dropped!0", "dropped!1"]


@KINDS
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('save("")', "has 0 bytes; expected 1 to 256"),
        ('save("x", PIN4000)', "expected 0 to 3600 seconds"),
        ('save("x", PIN"y")', "expected a name"),
        ("save(5)", "expected a name"),
        ("open(5)", "expected the name of a context"),
    ],
)
def test_a_wrong_argument_is_an_error(kind: str, state: State, call: str, error: str) -> None:
    python = call.replace("PIN", "pin_s=")
    javascript = call.replace("PIN", "{ pinS: ").replace("0)", "0 })").replace('y")', 'y" })')
    run = state.play(
        kind,
        {
            "python": f"async def main(ctx):\n    await ctx.{python}\n",
            "javascript": f"async function main(ctx) {{ await ctx.{javascript}; }}",
        },
    )
    assert error in run.errors[0]


@KINDS
def test_a_program_goes_on_from_its_own_context(kind: str, state: State) -> None:
    """The script forks. Each sequence saves a context, continues, and opens its context again."""
    run = state.play(
        kind,
        {
            "python": """
async def main(ctx):
    await ctx.fixed("one ")
    await ctx.save("c%d" % await ctx.fork(2))
    await ctx.fixed("two ")
    await ctx.open("c%d" % (ctx.seq > 0))
    await ctx.fixed("three")
""",
            "javascript": """
async function main(ctx) {
  await ctx.fixed("one ");
  await ctx.save(`c${await ctx.fork(2)}`);
  await ctx.fixed("two ");
  await ctx.open(`c${ctx.seq > 0 ? 1 : 0}`);
  await ctx.fixed("three");
}
""",
        },
    )
    assert not run.errors
    assert run.texts == ["three", "three"]
    whole = [*tokens_of("Q: "), *tokens_of("one ")]
    assert whole == run.prompts[0] == run.prompts[1]
