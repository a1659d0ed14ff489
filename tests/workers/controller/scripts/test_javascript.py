"""Scripts in JavaScript: their context, forks, errors, and texts under the worker's constraints."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tokenbus.protocol.errors import ControllerError, TokenbusError
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.wasm.sandbox import Ticker

from ..played import UNHURRIED, engine
from .script_runs import play, says, tokens_of

pytestmark = pytest.mark.process  # Grammars and the interpreter are compiled in processes.


def main(body: str) -> str:
    return "async function main(ctx) {\n" + body + "\n}"


def test_a_script_writes_fixed_text_and_logs_its_result() -> None:
    run = play(main("await ctx.fixed('The answer is '); await ctx.fixed('42'); return 'done'"))
    assert run.text() == "The answer is 42"
    assert (run.ended, run.logs, run.sampled) == ({0: "stop"}, {0: "done\n"}, 0)


def test_a_script_sees_its_prompt_its_argument_and_its_text() -> None:
    script = main(
        """ctx.log(ctx.prompt, ctx.arg, ctx.seq);
        await ctx.fixed('one ');
        const here = ctx.label();
        await ctx.fixed('two');
        ctx.log(ctx.textSince(here), ctx.tokens.length);"""
    )
    run = play(script, prompt="def f", arg=b'{"a":1}')
    prompt = tokens_of("def f")
    length = len([*prompt, *tokens_of("one "), *tokens_of("two")])
    assert run.logs[0] == f'{json.dumps(prompt, separators=(",", ":"))} {{"a":1}} 0\ntwo {length}\n'


def test_a_text_of_a_regex_ends_where_the_model_ends_it() -> None:
    run = play(
        main("const n = await ctx.gen({regex: '[0-9]+'}); await ctx.fixed(` is ${+n + 1} less 1`)"),
        choose=says("120"),
    )
    assert run.text() == "120 is 121 less 1"


def test_texts_of_every_constraint_follow_each_other() -> None:
    script = main(
        """ctx.log(await ctx.gen({regex: /[0-9]{3}/}));
        ctx.log(await ctx.gen({choice: ['red', 'green']}));
        ctx.log(await ctx.gen({jsonSchema: {type: 'object', properties: {a: {type: 'boolean'}},
                                            required: ['a']}, maxTokens: 30}));
        ctx.log(await ctx.gen({lark: 'start: "a" | "b"'}));
        ctx.log(await ctx.gen({substring: 'hello world', maxTokens: 4}));
        ctx.log(await ctx.gen({yacc: "%start s\\n%%\\ns : 'x' 'y' ;\\n"}));
        ctx.log(await ctx.gen({allow: ctx.tokenize('q'), maxTokens: 3}));"""
    )
    run = play(script, seed=3)
    assert not run.errors
    number, colour, schema, letter, part, pair, allowed = run.logs[0].splitlines()
    assert re.fullmatch("[0-9]{3}", number)
    assert colour in ("red", "green")
    assert set(json.loads(schema)) == {"a"}
    assert letter in "ab"
    assert part in "hello world"
    assert (pair, allowed) == ("xy", "qqq")


def test_a_text_ends_after_max_tokens_and_after_a_stop_text() -> None:
    script = main(
        """const here = ctx.label();
        await ctx.gen({maxTokens: 3});
        ctx.log(ctx.tokensSince(here).length);
        ctx.log(await ctx.gen({stopAt: 'wor'}));"""
    )
    run = play(script, choose=says("a b c hello world"))
    assert run.logs[0] == "3\n hello wor\n"
    assert run.text() == "a b c hello wor"


def test_a_text_under_a_constraint_is_closed_before_max_tokens() -> None:
    run = play(main("ctx.log(await ctx.gen({regex: '\\\\([a-z]+\\\\)', maxTokens: 6}))"))
    assert re.search(r"^\([a-z]+\)$", run.logs[0], re.MULTILINE)


def test_a_script_backtracks_to_a_label() -> None:
    script = main(
        """await ctx.fixed('The answer is ');
        const start = ctx.label();
        await ctx.fixed('41');
        await ctx.fixed('42', {following: start});"""
    )
    assert play(script).text() == "The answer is 42"


def test_forks_continue_the_script_and_share_variables() -> None:
    script = main(
        """const i = await ctx.fork(2);
        const j = await ctx.fork(2);
        await ctx.fixed(`${i}${j}`);
        ctx.vars.append('all', `${i}${j}`);
        if (i + j) return;
        ctx.log((await ctx.waitVar('all')).length % 2, ctx.vars.get('none', 'no'));"""
    )
    run = play(script)
    assert sorted(run.texts) == ["00", "01", "10", "11"]
    assert run.logs[0] == "0 no\n"


def test_a_fork_after_a_text_under_a_constraint_needs_no_model() -> None:
    run = play(main("await ctx.gen({regex: 'ab'}); await ctx.fixed(`${await ctx.fork(2)}`)"))
    assert sorted(run.texts) == ["ab0", "ab1"]


def test_a_class_makes_the_four_calls() -> None:
    script = """class Main extends Controller {
        initPrompt(prompt) { this.left = 2; }
        midProcess(group) {
            if (!this.left--) return decide.stop();
            return decide.sample({allow: host_tokens});
        }
    }
    const host_tokens = tokenize('z');"""
    assert play(script).text() == "zz"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (main("await ctx.fixed('a');\nnothing();"), "line 3: ReferenceError"),
        (main("await ctx.gen({regex: '['});"), r"line 2: Error: gen\(regex\)"),
        (main("await ctx.gen({regx: 'a'});"), r"line 2: TypeError: gen\(\{regx\}\) is unknown"),
        (main("await ctx.gen({regex: 'a', choice: ['b']});"), "only one of these"),
        (main("await ctx.gen('a');"), r'gen\("a"\); expected an object such as'),
        (main("await ctx.gen({substring: 5});"), r"gen\(\{substring: 5\}\); expected text"),
        (main("await ctx.gen({maxTokens: '5'});"), r'maxTokens\}\) with "5"; expected a number'),
        (main("ctx.vars.set('x', 5);"), r'variable "x" was set to 5; expected text or bytes'),
        (main("ctx.fixed('a');\nawait ctx.fixed('b');"), "line 3: Error: fixed: .* await"),
        (main("await ctx.fixed('a');\nctx.gen({regex: '['});"), r"line 3: Error: gen\(regex\)"),
        (main("ctx.generate();"), "line 2: TypeError: ctx has no generate; expected one of fixed"),
        (main("ctx.vars.put(1);"), "line 2: TypeError: ctx.vars has no put; expected one of read"),
        (main("await new Promise(() => 0);"), "never happens"),
        (main("throw 'x';"), "the script threw x"),
        ("let x = 1;", "does not define async function main"),
        ("import * as fs from 'fs';", "cannot import 'fs'"),
        (main("const f = () => f();\nf();"), r"line [23]: InternalError: stack overflow"),
    ],
)
def test_errors_name_the_line_of_the_script(script: str, error: str) -> None:
    try:
        run = play(script)
    except ControllerError as failed:
        said = failed.message
    else:
        said = run.errors[0]
    assert re.search(error, said), said


def test_a_call_before_the_earlier_call_was_awaited_is_an_error() -> None:
    run = play(main("ctx.fixed('a');\nctx.log(ctx.gen({regex: '[0-9]'}));"))
    [error] = run.errors.values()
    assert error.endswith("line 3: Error: gen: the script has to await its previous call first")


@pytest.mark.parametrize("before", ["", "await ctx.fixed('a');"])
def test_an_endless_loop_is_an_error_of_the_script(before: str) -> None:
    with Ticker(engine):
        run = play(main(before + "for (;;);"), limits=Limits(init_s=0.1))
    assert re.fullmatch(r"the script ran for longer than its \d+ ms", run.errors[0])


@pytest.mark.parametrize(
    ("language", "script"),
    [
        ("python", "async def main(ctx):\n    await ctx.fixed('a')\n    {}"),
        ("javascript", "async function main(ctx) {{ await ctx.fixed('a'); {} }}"),
    ],
)
def test_a_script_has_a_limit_of_its_own(language: str, script: str) -> None:
    endless = {"python": "while True: pass", "javascript": "for (;;);"}[language]
    loop = {
        "python": "for i in range(1_000_000): pass",
        "javascript": "for (let i = 0; i < 3_000_000; i++);",
    }[language]
    with Ticker(engine):
        short = replace(UNHURRIED, script_s=0.03)
        run = play(script.format(endless), language, limits=short)
        assert run.errors[0] == "the script ran for longer than its 30 ms"
        others_short = Limits(init_s=60.0, pre_s=1e-6, mid_s=1e-6, post_s=1e-6, script_s=60.0)
        run = play(script.format(loop), language, limits=others_short)
        assert not run.errors
        assert run.text() == "a"


@pytest.mark.parametrize(
    "script",
    [
        main("for (;;);"),
        main("await ctx.fixed('a');\nfor (;;);"),
        main("for (;;) await null;"),
        main("/^(a+)+$/.test('a'.repeat(40) + 'b');"),
        main("eval('for (;;);');"),
        main("new Function('for (;;);')();"),
        main("const all = []; for (;;) all.push('x'.repeat(100000) + all.length);"),
        main("let s = 'x'; for (;;) s += s;"),
        main("new ArrayBuffer(2 ** 31);"),
        main("eval('const f = () => f() + f(); f();');"),
        main("let o = {}; for (;;) o = {o}; "),
        main("JSON.parse('['.repeat(1e6));"),
        main("for (let i = 0; ; i++) ctx.log('x'.repeat(10000));"),
        main("for (let i = 0; ; i++) ctx.tokenize('x'.repeat(10000));"),
        main("await ctx.gen({regex: '(a{1,1000}){1,1000}{1,1000}'});"),
        main("for (;;) await ctx.gen({regex: ''});"),
        main("for (;;) await ctx.fork(2);"),
        "for (;;);",
    ],
)
def test_hostile_scripts_end_by_the_limits(script: str) -> None:
    limits = Limits(init_s=0.3)
    with Ticker(engine):
        try:
            run = play(script, limits=limits)
        except TokenbusError:
            return
    assert run.errors


def test_the_log_shows_the_value_of_a_variable_and_the_size_of_a_set() -> None:
    script = main(
        """ctx.log(ctx.vars.set('x', 'one'), ctx.vars.read('x'));
        const set = ctx.tokenSet((bytes) => bytes.decode() === 'a');
        ctx.log(set.numSet(), set);"""
    )
    first, second = play(script).logs[0].splitlines()
    assert first == '{"ok":true,"version":1} {"version":1,"value":"one"}'
    assert re.fullmatch(r'1 "TokenSet\(1 of \d+ tokens\)"', second)
