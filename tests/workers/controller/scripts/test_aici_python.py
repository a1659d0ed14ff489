"""Scripts in Python can use the names of AICI's interface."""

from __future__ import annotations

from functools import partial

import pytest

from . import script_runs
from .script_runs import says

pytestmark = pytest.mark.process

play = partial(script_runs.play, language="python")
NAMES = """start test GetPrompt FixedTokens gen_tokens gen_text fork fork_supported wait_vars
get_var set_var append_var check_var check_vars Label get_tokens get_prompt_len tokenize
detokenize token_repr tokens_repr eos_token self_seq_id get_config TokenSet Constraint
RegexConstraint CfgConstraint SubStrConstraint ChooseConstraint NextToken
PreProcessResult MidProcessResult PostProcessResult StopToken ConstrainedToken PreToken
Noop"""


def script(*lines: str) -> str:
    body = "\n    ".join(lines)
    return f"import pyaici.server as aici\nasync def main():\n    {body}\naici.start(main())\n"


def test_each_name_is_in_the_module() -> None:
    names = NAMES.split()
    lines = [f"assert callable(aici.{name}), {name!r}" for name in names]
    more = "from aici import TokenSet, gen_text\nimport aici\nfrom pyaici.server import NextToken\n"
    run = play(more + script(*lines, "print(aici.log_level, NextToken is aici.NextToken)"))
    assert run.logs[0] == "0 True\n"


def test_a_set_of_tokens_counts_its_tokens() -> None:
    run = play(
        script(
            "s = aici.TokenSet()",
            "s[5] = True",
            "print(len(s), s.num_set(), s[5], s[6])",
            "s.set_all(True)",
            "s[5] = False",
            "print(s.num_set(), s[5], s[4095])",
            "s[4096]",
        )
    )
    assert run.logs[0] == "4096 1 True False\n4095 False True\n"
    assert "line 9: IndexError: token 4096" in run.errors[0]


def test_the_constraints_answer_about_single_tokens() -> None:
    told = """
def told(name, constraint, *texts):
    found = []
    for text in ("",) + texts:
        for token in aici.tokenize(text):
            assert constraint.token_allowed(token), name
            constraint.append_token(token)
        s = aici.TokenSet()
        constraint.allow_tokens(s)
        assert s[aici.eos_token()] == constraint.eos_allowed()
        found.append("%d%d%d" % (constraint.eos_allowed(), constraint.eos_forced(),
                                 s[aici.tokenize("b")[0]]))
    print(name, *found)
"""
    run = play(
        script(
            "told('free', aici.Constraint(), 'a')",
            "told('regex', aici.RegexConstraint('a(bc)?'), 'a', 'b')",
            r"told('cfg', aici.CfgConstraint('%start s\n%%\ns : \"a\" \"b\" ;\n'), 'a', 'b')",
            "told('substr', aici.SubStrConstraint('abc', '.'), 'a', 'b', '.')",
            "told('choose', aici.ChooseConstraint(['a', 'ab']), 'a', 'b')",
            "next_token = aici.ConstrainedToken(lambda: aici.RegexConstraint('q{2}'))",
            "tokens = []",
            "while not next_token.finished: tokens += await next_token",
            "print(aici.detokenize(tokens))",
            "aici.RegexConstraint('(').eos_allowed()",
        ).replace("async def main", told + "async def main")
    )
    assert run.logs[0].splitlines() == [
        "free 101 101",
        "regex 000 101 000",
        "cfg 000 001 110",
        "substr 001 001 000 110",
        "choose 000 101 110",
        "b'qq'",
    ]
    assert run.text() == "qq"
    assert "line 25: ControllerError: regex: missing )" in run.errors[0]


STEPS = """
import pyaici.server as aici

class Forced(aici.NextToken):
    def mid_process(self):
        found = aici.TokenSet()
        found[aici.tokenize("q")[0]] = True
        return aici.MidProcessResult.bias(found)

class Spliced(aici.NextToken):
    def mid_process(self):
        return aici.MidProcessResult.splice(1, aici.tokenize("spliced"))

class Appended(aici.NextToken):
    def pre_process(self):
        return aici.PreProcessResult.ff_tokens_pre(aici.tokenize(" pre "))

class Forked(aici.PreToken):
    def pre_process(self):
        return aici.PreProcessResult.fork(2)

class Waits(aici.PreToken):
    waited = 0
    def pre_process(self):
        if aici.get_var("set"):
            return aici.PreProcessResult.continue_()
        self.waited += 1
        return aici.PreProcessResult.suspend()

class Last(aici.NextToken):
    def post_process(self, tokens):
        print("last", aici.get_tokens()[-1] == tokens[-1])
        return aici.PostProcessResult.stop()

async def main():
    await aici.FixedTokens("a")
    assert len(await Forced()) == 1
    print(aici.detokenize(await Spliced()), aici.detokenize(await Appended()))
    assert await aici.Noop() == []
    forked = Forked()
    assert await forked is None
    if forked.fork_group.index(aici.self_seq_id()) == 1:
        aici.set_var("set", "yes")
        await aici.FixedTokens("one")
        await aici.StopToken()
        print("never")
    waits = Waits()
    await waits
    print(waits.waited > 0, aici.get_var("set"))
    await aici.FixedTokens("zero ")
    await Last()
    print("never")

aici.start(main())
"""


def test_next_token_steps_through_single_tokens() -> None:
    run = play(STEPS, choose=says("qx"))
    assert not run.errors
    assert run.texts == ["aspliced pre zero x", "aspliced pre one"]
    assert run.logs == {0: "b'spliced' b' pre '\nTrue b'yes'\nlast True\n", 1: ""}


def test_the_log_level_shows_steps() -> None:
    levels = ["aici.log_level = 2", "await aici.gen_text(regex='[0-9]')", "await aici.NextToken()"]
    run = play(script(*levels), choose=says("7x"))
    assert run.logs[0] == "GEN b'7'\nSTEP b'x'\n"


def test_a_result_that_is_not_one_is_an_error() -> None:
    text = """
import aici
class Wrong(aici.NextToken):
    def mid_process(self):
        return aici.MidProcessResult.bias(aici.TokenSet())
async def main():
    await Wrong()
aici.start(main())
"""
    assert "line 7: ControllerError: sample: no token is allowed" in play(text).errors[0]
