"""Controllers written as scripts: fixed text, sampled text under constraints, and labels."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.workers.controller.host import allowed
from tokenbus.workers.controller.python import Context, TokenSet
from tokenbus.workers.controller.python.script_constraints import Grammar, regex
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ....counts import examples
from .runs import play_script, says, tokens_of, vocabulary, writes


def test_a_script_writes_fixed_text_and_ends() -> None:
    async def main(ctx: Context) -> str:
        await ctx.fixed("The answer is ")
        await ctx.fixed(b"42")
        await ctx.fixed("")
        return "done"

    run = play_script(main, prompt="Q: ")
    assert run.text() == "The answer is 42"
    assert (run.ended, run.logs, run.sampled) == ({0: "stop"}, {0: "done\n"}, 0)


def test_a_script_sees_its_prompt_its_argument_and_its_text() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(ctx.prompt == tokens_of("def f"), ctx.arg, ctx.seq)
        await ctx.fixed("one ")
        here = ctx.label()
        await ctx.fixed("two")
        ctx.log(ctx.text_since(here), ctx.tokens_since(here) == tokens_of("two"))
        ctx.log(ctx.tokens == tokens_of("def f") + tokens_of("one ") + tokens_of("two"))

    run = play_script(main, prompt="def f", arg=b'{"a":1}')
    assert run.logs[0] == "True {'a': 1} 0\ntwo True\nTrue\n"


def test_a_text_of_a_regex_ends_where_the_model_ends_it() -> None:
    async def main(ctx: Context) -> None:
        number = await ctx.gen(regex="[0-9]+")
        await ctx.fixed(f" is {int(number) + 1} less one")

    run = play_script(main, choose=says("120"))
    assert run.text() == "120 is 121 less one"
    assert run.sent_back == 1, "the token that ends a sequence is dropped"


def test_a_text_of_a_regex_ends_where_nothing_may_follow() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(regex="[0-9]{3}"), await ctx.gen(regex=""), await ctx.gen(regex="x?"))

    run = play_script(main, choose=says("120x"))
    assert (run.logs[0], run.text(), run.sampled) == ("120  x\n", "120x", 4)


def test_a_text_ends_after_max_tokens() -> None:
    async def main(ctx: Context) -> None:
        here = ctx.label()
        text = await ctx.gen(max_tokens=3)
        assert len(ctx.tokens_since(here)) == 3
        assert ctx.text_since(here) == text
        await ctx.gen(regex="[0-9]+", max_tokens=5)

    run = play_script(main, choose=says("a b c1234567"))
    assert run.sampled == 8
    assert run.text() == "a b c12345"


def test_a_script_backtracks_to_a_label() -> None:
    async def main(ctx: Context) -> None:
        await ctx.fixed("The answer is ")
        start = ctx.label()
        number = await ctx.gen(regex=r"[0-9]+", max_tokens=5)
        if int(number) > 10:
            await ctx.fixed("too much", following=start)
        after = ctx.label()
        await ctx.fixed("!", following=after)
        ctx.log(ctx.text_since(start))

    run = play_script(main, choose=says("99"))
    assert run.text() == "The answer is too much!"
    assert run.logs[0] == "too much!\n"
    assert play_script(main, choose=says("9")).text() == "The answer is 9!"


def test_a_label_that_was_taken_back_is_an_error() -> None:
    async def main(ctx: Context) -> None:
        start = ctx.label()
        await ctx.fixed("a b c d")
        late = ctx.label()
        await ctx.fixed("x", following=start)
        await ctx.fixed("y", following=late)

    run = play_script(main)
    assert "was cut back to 1" in run.errors[0]
    assert 'in main: await ctx.fixed("y", following=late)' in run.errors[0]


def test_what_is_no_label_is_refused() -> None:
    async def fixed(ctx: Context) -> None:
        await ctx.fixed("x", following=99)  # type: ignore[arg-type]

    async def text_since(ctx: Context) -> None:
        ctx.text_since("start")  # type: ignore[arg-type]

    assert (
        "fixed(following=label) with 99; expected a label from ctx.label(), at "
        in (play_script(fixed).errors[0])
    )
    error = play_script(text_since).errors[0]
    assert "text_since(label) with 'start'; expected a label from ctx.label()" in error
    assert 'in text_since: ctx.text_since("start")' in error


def test_a_text_stops_in_the_middle_of_a_token() -> None:
    assert len(tokens_of("    ")) == 1
    run = play_script(_until_two_spaces, choose=says("return    x"))
    assert run.logs[0] == "'return  '\n"
    assert run.text() == "return  |"
    assert run.sent_back == 1


async def _until_two_spaces(ctx: Context) -> None:
    ctx.log(repr(await ctx.gen(stop_at="  ")))
    await ctx.fixed("|")


def test_a_stop_text_may_lie_over_several_tokens() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(repr(await ctx.gen(stop_at=["turn x\n", "never"])))

    run = play_script(main, choose=says("return x\n\n    return y"))
    assert run.logs[0] == "'return x\\n'\n"
    assert run.text() == "return x\n"


@given(st.text("ab \n", max_size=12), st.text("ab \n", min_size=1, max_size=3), st.integers(0, 9))
@settings(max_examples=examples(50))
def test_what_is_kept_ends_with_the_first_stop_text(said: str, stop_at: str, seed: int) -> None:
    chance = random.Random(seed)

    def choose(_seq: int, tokens: list[int], may: list[int]) -> int:
        done = b"".join(map(vocabulary().token, tokens))
        rest = said.encode()[len(done) :]
        fits = [t for t in may if (text := vocabulary().token(t)) and rest.startswith(text)]
        return chance.choice(fits) if fits else 0

    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(stop_at=stop_at), end="")

    run = play_script(main, choose=choose)
    before, found, _ = said.partition(stop_at)
    assert run.text() == run.logs[0] == before + found


def test_a_choice_is_one_of_its_texts() -> None:
    options = ["yes", "yes sir", 'no "\n', "é / \\d"]

    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(choice=options), end="")

    seen = {play_script(main, seed=seed).logs[0] for seed in range(60)}
    assert seen == set(options)
    assert play_script(main, choose=writes("yes sir")).text() == "yes sir"


def test_only_allowed_tokens_are_sampled() -> None:
    async def main(ctx: Context) -> None:
        digits = ctx.token_set(bytes.isdigit)
        await ctx.gen(allow=digits, max_tokens=20)
        await ctx.gen(allow=TokenSet(digits.size, tokens_of("x")), max_tokens=1)
        await ctx.gen(allow={ctx.prompt[0], 0})

    run = play_script(main, prompt=" return", seed=3)
    assert re.fullmatch("[0-9]{20,}x( return)*", run.text())


@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]+",
        r"(ab|a)*c",
        r"[A-Z][a-z]{2,5}, [0-9]{4}",
        r"[0-9]{3}-[0-9]{4}|none",
        r"é+x?",
        r".{4}",
    ],
)
def test_sampled_texts_match_their_regex(regex: str) -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(regex=regex), end="")

    for seed in range(40):
        run = play_script(main, seed=seed)
        if run.sampled < 300:
            assert re.fullmatch(regex, run.logs[0])
            assert run.text() == run.logs[0]


class Person(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    age: int
    tags: list[str] = []
    home: dict[str, bool] | None = None


SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_sampled_json_is_of_its_schema() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(json_schema=SCHEMA), end="")

    for seed in range(40):
        run = play_script(main, seed=seed)
        assert run.ended == {0: "stop"}, run.errors
        person = msgspec.json.decode(run.logs[0], type=Person)
        assert len(person.name) <= 8
        assert 0 <= person.age <= 120
        assert len(person.tags) <= 3
        assert set(person.tags) <= {"a", "b c"}


def test_a_lark_grammar_constrains_too() -> None:
    async def main(ctx: Context) -> None:
        ctx.log(await ctx.gen(lark='start: "(" start ")" | "x"'), end="")

    for seed in range(20):
        text = play_script(main, seed=seed).logs[0]
        assert text.count("(") == text.count(")")
        assert text.strip("()") == "x"


WRONG_GENS = [
    ({"regex": "[a"}, "gen(regex='[a'): llguidance: "),
    ({"lark": "start: foo"}, 'unknown name: "foo"'),
    ({"json_schema": {"type": "objct"}}, "Invalid type: objct"),
    ({"json_schema": "{"}, "gen(json_schema=…): "),
    ({"regex": "a", "lark": "b"}, "gen(regex, lark): only one of these is allowed at a time"),
    ({"regex": 3}, "gen(regex=3); expected text"),
    ({"regex": "[0-9"}, 'invalid regex "[0-9" (in regex): regex parse error: unclosed character'),
    ({"choice": []}, "gen(choice=[]); expected a list of at least one text"),
    ({"choice": ["a", 3]}, "gen(choice=['a', 3]); expected a list of at least one text"),
    ({"choice": "yes"}, "gen(choice='yes'); expected a list of at least one text, as in"),
    ({"choice": b"yes"}, "gen(choice=b'yes'); expected a list of at least one text"),
    ({"choice": 5}, "gen(choice=5); expected a list of at least one text"),
    ({"allow": [4096]}, "token 4096 is not in the vocabulary, which is 0 to 4095"),
    ({"allow": []}, "expected some of 4096 tokens"),
    ({"stop_at": ""}, "expected text that is not empty"),
    ({"max_tokens": 0}, "expected a number, at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_GENS)
def test_a_wrong_gen_fails_at_the_call(arguments: dict[str, Any], message: str) -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(**arguments)

    error = play_script(main).errors[0]
    assert message in error
    assert "\n" not in error
    assert "in main: await ctx.gen(**arguments)" in error


def test_all_that_llguidance_says_is_in_the_log() -> None:
    async def main(ctx: Context) -> None:
        await ctx.gen(lark="start: ((\nx")

    run = play_script(main)
    assert "llguidance: 1(10): Expected token ')', found" in run.errors[0]
    assert "   1 | start: ((" in run.logs[0]
    assert "   1 | start: ((" not in run.errors[0]


def test_a_vocabulary_without_an_end_is_never_allowed_to_end() -> None:
    letters = [bytes([byte]) for byte in range(256)] + [b"ab"]
    without = TokenizerVocabulary.from_tokens(letters, (), "letters")
    mask = memoryview(bytearray(b"\xff" * 36))
    text = Grammar(without, regex("[ab]+x?"))
    assert text.mask(mask)
    assert list(allowed(mask, 288)) == [ord("a"), ord("b"), 256]
    assert not text.advance([256])
    assert text.complete
    assert text.mask(mask)
    assert list(allowed(mask, 288)) == [ord("a"), ord("b"), ord("x"), 256]
    assert text.advance([ord("x")])
    assert not text.mask(mask)
