"""Runs scripts in their interpreters, as a controller worker does."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from importlib.metadata import version

import wasmtime
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.interface import Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.controller.scripts.engines import engine as interpreter
from tokenbus.workers.controller.scripts.modules import script_module
from tokenbus.workers.controller.wasm.module_compiler import compile_interpreter

from ..played import UNHURRIED, engine
from ..python.runs import Run, says, tokens_of, vocabulary, writes
from ..wasm.guests import CACHE

__all__ = ["play", "program", "says", "tokens_of", "vocabulary", "writes"]


@cache
def compiled(language: str) -> wasmtime.Module:
    """The interpreter of a language after its boot. Its compiled form is stored in
    ``build/guests``."""
    found = interpreter(language)
    file = CACHE / f"{found.id}-{version('wasmtime')}.compiled"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        code = compile_interpreter(found.wasm, Limits()).code
        with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as made:
            made.write(code)
        os.replace(made.name, file)
    return wasmtime.Module.deserialize(engine, file.read_bytes())


@cache
def constraints() -> Constraints:
    return Constraints(engine, None)


def program(text: str, language: str = "javascript") -> Program:
    module = script_module(engine, language, compiled(language), text.encode())
    return ScriptProgram(module, constraints().get)


def play(text: str, language: str = "javascript", **how: object) -> Run:
    """Runs a script to its end. ``how``: the arguments of ``Run``."""
    how.setdefault("limits", UNHURRIED)
    return Run(program(text, language), **how)  # type: ignore[arg-type]
