"""Hostile scripts in JavaScript and Python, which a client uploads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tokenbus.protocol.scripts import marked_script

from .attack import Attack, Expected

ENDED = Expected(("controller_timeout", "controller_failed"))
TRIES = {
    "loop": "never ends",
    "late": "never ends after its first token",
    "allocation": "fills its memory",
    "recursion": "overflows the stack of the interpreter",
    "regex": "matches a regular expression that takes exponential time",
    "eval": "never ends a text that it evaluates",
    "constraint": "generates under a regular expression with too many states",
}
JAVASCRIPT = {
    "loop": "for (;;);",
    "late": "await ctx.gen({maxTokens: 1}); for (;;);",
    "allocation": "const all = []; for (;;) all.push('x'.repeat(100000) + all.length);",
    "recursion": "const f = () => f() + f(); f();",
    "regex": "/^(a+)+$/.test('a'.repeat(40) + 'b');",
    "eval": "eval('for (;;);');",
    "constraint": "await ctx.gen({regex: '(a{1,1000}){1,1000}{1,1000}'});",
}
PYTHON = {
    "loop": ["while True: pass"],
    "late": ["await ctx.gen(max_tokens=1)", "while True: pass"],
    "allocation": ["a = []", "while True: a.append('x' * 100000)"],
    "recursion": ["f = lambda: f() + f()", "f()"],
    "regex": ["import re", "re.match('(a+)+$', 'a' * 40 + 'b')", "while True: pass"],
    "eval": ["exec('while True: pass')"],
    "constraint": ["await ctx.gen(regex='(a{1,1000}){1,1000}{1,1000}')"],
}


def _attack(language: str, name: str, text: str) -> Attack:
    source: Callable[[], bytes] = partial(marked_script, text.encode(), language)
    return Attack(f"{language}-{name}", f"{TRIES[name]}, in {language}", ENDED, source)


ATTACKS = (
    *(
        _attack("javascript", name, f"async function main(ctx) {{\n  {body}\n}}\n")
        for name, body in JAVASCRIPT.items()
    ),
    *(
        _attack("python", name, "\n    ".join(["async def main(ctx):", *lines]) + "\n")
        for name, lines in PYTHON.items()
    ),
)
