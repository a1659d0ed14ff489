"""The types of a TypeScript script are erased, and all other text keeps its position."""

from __future__ import annotations

import re

import pytest
from tokenbus.clients.cli.type_eraser import TypeScriptFault, erase_types

ERASED = {
    # Declarations.
    "interface A<T> { a: T }": "; ",
    "type A = { a: number };": "; ",
    "import type { A } from 'a';": "; ",
    "import { type A, b } from 'aici';": "import { b } from 'aici';",
    "import { b, type A } from 'aici';": "import { b, } from 'aici';",
    "export type { A };": "; ",
    "export interface A {}": "; ",
    "declare const a: number;": "; ",
    "function f(a: string): void;\nfunction f(a) {}": "; \nfunction f(a) {}",
    # Functions and variables.
    "let a: number = 1;": "let a = 1;",
    "function f<T>(this: A, a?: T, ...b: T[]): a is T {}": "function f ( a , ...b ) {}",
    "const f = async <T,>(a: T): Promise<T> => a;": "const f = async (a ) => a;",
    "const f = (a): {\n b: number } => a;": "const f = (a \n ) => a;",
    "try {} catch (e: unknown) {}": "try {} catch (e ) {}",
    # Expressions.
    "f<T>(a!, b as T, c satisfies T, <T>d);": "f (a , b , c , d);",
    "new Map<string, number>();": "new Map ();",
    "for (const a of b as T[]) {}": "for (const a of b ) {}",
    # Classes.
    "abstract class A<T> extends B<T> implements C {}": " class A extends B {}",
    "class A { private static readonly a?: number = 1; }": "class A { ; static a = 1; }",
    "class A { static readonly a = 1; m?(): void {} }": "class A { static a = 1; m () {} }",
    "class A { declare a: T; [k: string]: T; b!: T; }": "class A { ; ; ; ; b ; ; }",
    "class A { abstract m(): void; override m() {} }": "class A { ; ; ; m() {} }",
    # A line break still ends the statement after the type is erased.
    "let a: T\n(b)": "let a; \n(b)",
    "let a = b as T\n(c)": "let a = b ; \n(c)",
    "class A { a: T\n['b'] = 1 }": "class A { a; \n['b'] = 1 }",
    # Text that only looks like a type.
    "a < b; c > (d);": "a < b; c > (d);",
    "'a: T' + `${a as T}: T`; // b: T": "'a: T' + `${a }: T`; // b: T",
    "const a = b ? c : d;": "const a = b ? c : d;",
    "é: for (const a = 'é' as T;;) {}": "é: for (const a = 'é' ;;) {}",
}


@pytest.mark.parametrize("text", ERASED)
def test_types_are_replaced_with_spaces(text: str) -> None:
    made = erase_types(text.encode()).decode()
    assert re.sub(" +", " ", made) == ERASED[text]
    assert len(made) == len(text)
    # Each character is kept, or replaced with a space, a semicolon or a closing parenthesis.
    assert all(new in (old, " ", ";", ")") for old, new in zip(text, made, strict=True))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a;\nenum A { B }", r"line 2: .* an enum; expected a const object"),
        ("namespace A { export const b = 1 }", "line 1: .* a namespace with values"),
        ("class A {\n\nconstructor(private a: T) {}\n}", "line 3: .* a parameter property"),
        ("import a = require('a');", r"line 1: .* import … = require\(…\)"),
        ("a;\nexport = a;", "line 2: .* export ="),
        ("return <T>\na;", "line 1: .* expected value as T"),
        ("a = b as T\n[0];", "line 1: .* expected a semicolon"),
        ("async function main(ctx: A) {\n  await ctx.gen(;\n}", r"line 2: SyntaxError: at '\(;'"),
        ("function f(a: number {\n}", "line 1: SyntaxError"),
    ],
)
def test_errors_name_the_line(text: str, error: str) -> None:
    with pytest.raises(TypeScriptFault, match=error):
        erase_types(text.encode())


def test_a_long_expression_is_parsed() -> None:
    text = b"a" + b" + a" * 20_000
    assert erase_types(text) == text
