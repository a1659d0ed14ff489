"""Chooses the class that runs a script, by the script's language."""

from __future__ import annotations

import wasmtime

from .guest import ScriptModule
from .python_guest import PythonModule


def script_module(
    engine: wasmtime.Engine, language: str, module: wasmtime.Module, text: bytes | None
) -> ScriptModule | PythonModule:
    """Returns the program that starts a script for each sequence. ``module``: the compiled
    interpreter. ``text``: the script; None if the request's argument is the script."""
    make = PythonModule if language == "python" else ScriptModule
    return make(engine, module, text)
