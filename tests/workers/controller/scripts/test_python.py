"""Scripts of clients in Python: the context of trusted scripts, AICI's interface, limits."""

from __future__ import annotations

import gc
import json
import re
import threading
from functools import partial

import pytest
import wasmtime
from tokenbus.protocol.errors import Code, ControllerError, TokenbusError
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Action, Constraint
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.controller.scripts.engines import engine as interpreter
from tokenbus.workers.controller.scripts.modules import script_module
from tokenbus.workers.controller.scripts.python_session import RESULT_BYTES, Image
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.module_compiler import compile_interpreter
from tokenbus.workers.controller.wasm.sandbox import Ticker, make_engine
from tokenbus.workers.variables import VariableStorage

from ..played import UNHURRIED, engine
from ..python.runs import Run, vocabulary
from . import script_runs
from .script_runs import says

pytestmark = pytest.mark.process  # Grammars and the interpreter are compiled in processes.

play = partial(script_runs.play, language="python")


def main(*lines: str) -> str:
    return "\n    ".join(["async def main(ctx):", *lines])


def test_a_script_has_the_context_of_trusted_scripts() -> None:
    script = main(
        "await ctx.fixed('The answer is ')",
        "here = ctx.label()",
        "number = await ctx.gen(regex='[0-9]+')",
        "await ctx.fixed(f', which is {int(number) + 1} less one')",
        "ctx.log(ctx.text_since(here), len(ctx.tokens) > len(ctx.prompt), ctx.arg, ctx.seq)",
        "await ctx.fixed('none', following=here)",
        "ctx.log(ctx.special_token('eos'), ctx.text(ctx.tokenize('h\u00e9')), 'n' in ctx.vars)",
        "return 'done'",
    )
    run = play(script, prompt="Q", arg=b'{"a": [1]}', choose=says("41"))
    assert not run.errors
    assert run.text() == "The answer is none"
    assert run.logs[0] == "41, which is 42 less one True {'a': [1]} 0\n0 h\u00e9 False\ndone\n"


def test_texts_of_every_constraint_follow_each_other() -> None:
    schema = "{'type': 'object', 'properties': {'a': {'type': 'boolean'}}, 'required': ['a']}"
    script = main(
        "print(await ctx.gen(regex='[0-9]{3}'))",
        "print(await ctx.gen(choice=['red', 'green']))",
        f"print(await ctx.gen(json_schema={schema}, max_tokens=30))",
        'print(await ctx.gen(lark=\'start: "a" | "b"\'))',
        "print(await ctx.gen(substring='hello world', max_tokens=4))",
        'print(await ctx.gen(yacc=\'%start s\\n%%\\ns : "x" "y" ;\\n\'))',
        "print(await ctx.gen(allow=ctx.tokenize('q'), max_tokens=3))",
        "print(await ctx.gen(allow=ctx.token_set(lambda data: data == b'z'), max_tokens=2))",
    )
    run = play(script, seed=3)
    assert not run.errors
    number, colour, made, letter, part, pair, allowed, found = run.logs[0].splitlines()
    assert re.fullmatch("[0-9]{3}", number)
    assert colour in ("red", "green")
    assert set(json.loads(made)) == {"a"}
    assert letter in "ab"
    assert part in "hello world"
    assert (pair, allowed, found) == ("xy", "qqq", "zz")


def test_a_text_ends_after_max_tokens_and_after_a_stop_text() -> None:
    script = main(
        "await ctx.gen(max_tokens=3)",
        "print(await ctx.gen(stop_at='wor'))",
    )
    run = play(script, choose=says("a b c hello world"))
    assert (run.logs[0], run.text()) == (" hello wor\n", "a b c hello wor")


def test_forks_continue_the_script_and_share_variables() -> None:
    script = main(
        "print('once')",
        "i = await ctx.fork(2)",
        "j = await ctx.fork(2)",
        "await ctx.fixed(f'{i}{j}')",
        "ctx.vars.append('all', f'{i}{j}')",
        "if not i + j:",
        "    print(len(await ctx.wait_var('all')) % 2, ctx.vars.get('none', 'no'))",
    )
    run = play(script)
    assert sorted(run.texts) == ["00", "01", "10", "11"]
    assert run.logs[0] == "once\n0 no\n"
    assert run.logs[1] == ""


def test_a_fork_has_a_copy_of_the_scripts_memory() -> None:
    script = (
        "class Node:\n    def __init__(self, below):\n        self.below = below\n"
        "def counted():\n    number = 0\n    while True:\n        number += 1\n"
        "        yield number\n"
    )
    script += main(
        "numbers, node, kept, text = counted(), None, [], ''",
        "for turn in range(40):",
        "    node = Node(node)",
        "    kept.extend([str(next(numbers))] * turn)",
        "    text += 'x' * turn",
        "    more = bytes(3000 * turn)",
        "    await ctx.fixed('a')",
        "try:",
        "    me = await ctx.fork(3)",
        "    kept.append(str(me))",
        "    [bytearray(10000) for _ in range(100)]",
        "    again = await ctx.fork(2)",
        "    for _ in range(40): await ctx.fixed('b')",
        "    raise ValueError(me, again)",
        "except ValueError as error:",
        "    depth = 0",
        "    while node: node, depth = node.below, depth + 1",
        "    print(error.args, depth, next(numbers), len(kept), kept[-2:], len(text), len(more))",
    )
    run = play(script, max_tokens=1000)
    assert not run.errors
    assert sorted(run.logs.values()) == [
        f"({me}, {again}) 40 41 781 ['40', '{me}'] 780 117000\n"
        for me in range(3)
        for again in range(2)
    ]


def test_a_fork_does_not_run_the_script_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized: list[bytes] = []

    def tokenize(text: bytes) -> list[int]:
        tokenized.append(text)
        return [1]

    monkeypatch.setattr(vocabulary(), "tokenize", tokenize)
    run = play(main("ctx.tokenize('once')", "await ctx.fork(4)", "await ctx.fork(2)"))
    assert not run.errors
    assert (len(run.texts), tokenized.count(b"once")) == (8, 1)


def test_what_a_waiting_script_refers_to_is_not_collected_as_garbage() -> None:
    names = [f"v{number}" for number in range(30)]
    script = (
        "async def part(ctx, x):\n    kept = [x * 2]\n    await ctx.fixed('a')\n    return kept\n"
    )
    script += main(
        *(f"{name} = ['{name}' * 2]" for name in names),
        "for i in range(40):",
        "    garbage = ['y' * 1000 for _ in range(500)]",
        "    assert (await part(ctx, f'w{i}')) == [f'w{i}w{i}']",
        f"print(*({' + '.join(names)}))",
    )
    run = play(script)
    assert not run.errors
    assert run.logs[0].split() == [name * 2 for name in names]


def test_a_script_without_memory_ends_with_the_line() -> None:
    script = main("for i in range(100000):", "    text = 'x' * 1000", "print('end')")
    assert "line 3: MemoryError" in play(script).errors[0]


def test_a_text_that_takes_long_to_tokenize_is_refused() -> None:
    script = main(
        "try:", "    ctx.tokenize('x' * 500_000)", "except ControllerError as e:", "    print(e)"
    )
    run = play(script, limits=Limits(init_s=60.0))
    assert re.fullmatch("the text to tokenize has 500000 bytes; at most .*\n", run.logs[0])


def test_all_instructions_of_a_call_are_counted_anew() -> None:
    limits = Limits(script_s=0.02, fuel_per_ms=500_000)
    engine = make_engine(limits)
    code = compile_interpreter(interpreter("python").wasm, limits).code
    module = wasmtime.Module.deserialize(engine, code)

    def run(loops: int, calls: int) -> Run:
        script = main(
            f"for _ in range({calls}):",
            f"    for _ in range({loops}): pass",
            "    await ctx.fixed('a')",
        )
        program = script_module(engine, "python", module, script.encode())
        return Run(ScriptProgram(program, lambda name: None), limits=limits)

    assert run(loops=5_000, calls=250).text() == "a" * 250
    assert "instructions" in run(loops=1_250_000, calls=1).errors[0]


def test_the_names_of_aici_have_their_meaning() -> None:
    script = """
import pyaici.server as aici
import re

async def main():
    prompt = await aici.GetPrompt()
    assert len(prompt) == aici.get_prompt_len()
    await aici.FixedTokens("one ")
    label = aici.Label()
    number = await aici.gen_text(regex="[0-9]{2}", store_var="n")
    assert re.match("[0-9][0-9]", number)
    aici.check_vars({"n": number})
    await aici.FixedTokens(" or ", following=label)
    tokens = await aici.gen_tokens(options=["red", "blue"])
    print(aici.detokenize(tokens), label.text_since(), aici.eos_token(), aici.self_seq_id())
    i = await aici.fork(3)
    if i:
        aici.set_var("of%d" % i, "value %d" % i)
        return
    print(await aici.wait_vars("of1", "of2"), aici.get_var("none"), aici.get_config("fork"))

aici.test(main())
"""
    run = play(script, prompt="Q", choose=says("42blue"))
    assert not run.errors
    assert run.logs[0].splitlines()[-2:] == ["[b'value 1', b'value 2'] None 1", "TEST OK"]


def test_a_script_that_is_served_can_be_uploaded_too() -> None:
    script = "from tokenbus.workers.controller.python import Context\n" + main(
        "await ctx.fixed('x')"
    ).replace("(ctx)", "(ctx: Context) -> None")
    assert play(script).text() == "x"


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (main("await ctx.fixed('a')", "nothing()"), "line 3: NameError"),
        (
            main("await ctx.gen(choice=['a'], regx='a')"),
            r"line 2: ControllerError: gen\(regx\) is unknown; expected regex, choice, .*, bias",
        ),
        (main("await ctx.gen('a')"), r"gen\('a'\) has no name; expected an option such as"),
        (main("await ctx.gen(regex='a', choice=['b'])"), r"\(regex, choice\): only one of these"),
        (main("await ctx.gen(regex=5)"), r"gen\(regex=5\); expected text"),
        (main("await ctx.gen(substring=5)"), r"gen\(substring=5\); expected text"),
        (main("await ctx.gen(allow=['a'])"), r"gen\(allow=…\): .*; expected ids of tokens"),
        (main("await ctx.fixed(5)"), r"fixed\(text\) with 5; expected text or bytes"),
        ("class Main:\n    pass", r"not a controller; expected class Main\(Controller\)"),
        ("# Controller\nclass Main:\n    pass", r"expected class Main\(Controller\)"),
        (main("await ctx.gen(regex='[')"), r"gen\(regex\): regex: unterminated"),
        (main("ctx.missing()"), "line 2: AttributeError"),
        ("x = 1", "does not define async def main"),
        ("def main(ctx): pass", r"main is not a coroutine function; expected async def main"),
        ("import numpy", "line 1: ImportError: no module named 'numpy'; a script may import only"),
        ("\nimport random", "line 2: ImportError: no module named 'random'; .*choice="),
        ("from random import choice", "line 1: ImportError: no module named 'random'; a script"),
        ("import requests", "line 1: ImportError: no module named 'requests'; a script may"),
        ("try: import random\nexcept ImportError: import random", "line 2: ImportError: no module"),
        ("open('notes.txt')", r"line 1: OSError: \[Errno 44\] ENOENT; a script has no files"),
        (
            "from tokenbus.workers.controller.python import ScriptProgram",
            "cannot import ScriptProgram; .* need: tokenbus controller serve",
        ),
        (main("x = = 1"), "line 2: SyntaxError"),
        ("def f(): f()\nf()", "RuntimeError: maximum recursion depth exceeded"),
        (main("import asyncio", "await asyncio.sleep(1)"), "line|await"),
    ],
)
def test_errors_name_the_line_of_the_script(script: str, error: str) -> None:
    run = play(script)
    assert re.search(error, run.errors[0]), run.errors[0]


@pytest.mark.parametrize(
    ("lines", "call", "line"),
    [
        (["ctx.fixed('a')"], "fixed", "2"),
        (["await ctx.fixed('a')", "return ctx.stop()"], "stop", "3"),
        (["ctx.log(ctx.gen(max_tokens=3) + 'a')"], "gen", "2"),
        (["if ctx.gen(choice=['yes']) == 'yes': pass", "await ctx.fixed('b')"], "gen", "2"),
        (["ctx.call('weather', city='Oslo')", "await ctx.fixed('b')"], "call", "2"),
        (["await ctx.fixed('a')  # ctx.fixed()", "", "ctx.fixed('b')"], "fixed", "4"),
        (["await (ctx.fixed('a'))", "ctx.fixed('b')", "ctx.fixed('c')"], "fixed", "3 or 4"),
        (["f = ctx.gen", "f(max_tokens=3)"], "gen", ""),
    ],
)
def test_a_call_that_is_not_awaited_is_an_error(lines: list[str], call: str, line: str) -> None:
    run = play(main(*lines))
    assert run.errors[0].endswith(
        f"{f'line {line}: ' if line else ''}ControllerError: ctx.{call}(…) was not awaited, so it "
        f"has no effect; expected await ctx.{call}(…)"
    )
    assert run.text() in ("", "a")


def test_a_call_may_be_awaited_after_it_is_made() -> None:
    run = play(main("later = ctx.fixed('a')", "ctx.log('before')", "await later"))
    assert not run.errors
    assert run.text() == "a"


@pytest.mark.parametrize(
    "script",
    [
        "while True: pass",
        main("while True: pass"),
        main("await ctx.fixed('a')", "while True: pass"),
        main("eval('[0 for _ in iter(int, 1)]')"),
        main("exec('while True: pass')"),
        main("import re", "re.match('(a+)+$', 'a' * 40 + 'b')"),
        main("a = []", "while True: a.append('x' * 100000)"),
        main("a = 'x'", "while True: a += a"),
        main("bytearray(2 ** 31)"),
        main("f = lambda: f() + f()", "f()"),
        main("while True: ctx.seq"),
        main("await ctx.fixed('a')", "while True: ctx.tokenize('x')"),
        main("while True: await ctx.fixed('')"),
        main("ctx.vars['a'] = 'b'", "while True: await ctx.wait_var('a')"),
        main("10 ** 10 ** 10"),
        main("import json", "json.loads('[' * 1000000)"),
        main("while True: print('x' * 10000)"),
        main("while True: ctx.tokenize('x' * 10000)"),
        main("await ctx.gen(regex='(a{1,1000}){1,1000}{1,1000}')"),
        main("while True: await ctx.gen(regex='')"),
        main("while True: await ctx.fork(2)"),
        main("while True:", "    try:", "        while True: pass", "    except: pass"),
    ],
)
def test_hostile_scripts_end_by_the_limits(script: str) -> None:
    with Ticker(engine):
        try:
            run = play(script, limits=Limits(init_s=0.3))
        except TokenbusError:
            return
    assert run.errors
    assert "outside its memory" not in run.errors[0]


def test_a_fork_that_would_get_too_little_memory_fails_with_the_sizes() -> None:
    run = play(main("while True: await ctx.fork(2)"), limits=Limits(memory_bytes=32 * 2**20))
    assert any("needs 9437184 bytes of memory; with its present" in e for e in run.errors.values())
    assert not any("outside its memory" in error for error in run.errors.values())


def test_a_script_cannot_ask_for_more_tokens_than_a_text_has() -> None:
    call = "host.call('ask', json.dumps(['token_bytes', [0, 10 ** 12], {}]))"
    run = play("import host, json\n" + main(call, "await ctx.fixed('a')"))
    assert run.text() == "a"


@pytest.mark.parametrize("call", ["detokenize", "replaced"])
def test_the_text_of_many_tokens_is_not_made(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary()
    token, made = type(words).token, []

    def counted(self: TokenizerVocabulary, number: int) -> bytes:
        made.append(number)
        return token(self, number)

    longest = max(range(words.size), key=lambda number: len(words.token(number)))
    number = 2 * RESULT_BYTES // len(words.token(longest))
    monkeypatch.setattr(type(words), "token", counted)
    asks = f"host.call('ask', json.dumps(['{call}', [[{longest}] * {number}], {{}}]))"
    run = play("import host, json\n" + main(f"print({asks})", "await ctx.fixed('a')"))
    assert f"the text of {number} tokens is too long" in run.logs[0]
    assert 0 < len(made) < number


def test_a_fork_does_not_keep_a_copy_of_the_interpreters_memory() -> None:
    def images() -> list[object]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, Image)]

    script = main("await ctx.fork(2)", "await ctx.receive()").encode()
    module = script_module(engine, "python", script_runs.compiled("python"), script)
    storage = VariableStorage()

    def host(seq: int) -> Host:
        variables = SequenceVariables(1, seq, storage.apply, lambda: None)
        return Host(1, seq, b"", vocabulary(), variables, Log(1000), UNHURRIED, 9)

    controller = ScriptProgram(module, lambda kind: None).start(host(0))
    controller.init_prompt(())
    assert controller.pre_process().action is Action.FORK
    before = len(images())
    child = controller.fork(host(1))
    assert len(images()) == before
    child.close()
    controller.close()


class Uncopied:
    """A constraint whose copies fail, as if there were not enough memory."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def __getattr__(self, name: str) -> object:
        return getattr(self._constraint, name)

    def fork(self, host: Host) -> Constraint:
        raise ControllerError(Code.CONTROLLER_FAILED, "no memory for a copy")


class UncopiedRegex:
    """A program that makes ``Uncopied`` constraints."""

    def start(self, host: Host) -> Constraint:
        regex = script_runs.constraints().get("regex")
        assert regex is not None
        return Uncopied(regex.start(host))  # type: ignore[return-value]


def test_a_fork_that_fails_in_a_text_frees_the_copy_of_the_script() -> None:
    script = main("await ctx.gen(regex='[ab]+')").encode()
    module = script_module(engine, "python", script_runs.compiled("python"), script)
    storage = VariableStorage()

    def host(seq: int) -> Host:
        variables = SequenceVariables(1, seq, storage.apply, lambda: None)
        return Host(1, seq, b"", vocabulary(), variables, Log(1000), UNHURRIED, 9)

    controller = ScriptProgram(module, lambda kind: UncopiedRegex()).start(host(0))
    controller.init_prompt(())
    controller.pre_process()
    controller.mid_process((0,), memoryview(bytearray(512)))
    threads = threading.active_count()
    with pytest.raises(ControllerError, match="no memory for a copy") as failure:
        controller.fork(host(1))
    assert failure.tb is not None
    assert threading.active_count() == threads
    controller.close()


def test_the_log_shows_a_variable_and_a_write() -> None:
    run = play(main("ctx.log(ctx.vars.set('x', 'one'))", "ctx.log(ctx.vars.read('x'))"))
    assert run.logs[0].splitlines() == [
        "Written(ok=True, version=1, value=b'')",
        "Stored(version=1, value=b'one')",
    ]
