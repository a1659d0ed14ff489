"""Measures the cost of scripts: the first decision, rounds, forks, and the memory of sequences.

A script and the built-in constraint ``regex`` run in this process, with the vocabulary of the
embedded model. Both constrain the text in the same way. Times are the minimum of several runs.

The name of each figure begins with ``js`` or ``py``, the language of the script.

- ``first_ms_more``: the time until the first mask of a script, minus the time until the first mask
  of the constraint.
- ``gen_round_us``: a round within ``ctx.gen({regex})``. ``gen_round_vs_regex`` is its ratio to a
  round of the constraint.
- ``js_own_round_us``: a round that the script decides itself, with ``decide.sample``.
- ``fork_us``: a copy of a sequence. ``fork_us_first``: the first copy, which cannot reuse an
  earlier instance.
- ``js_mb_200_live``, ``py_mb_50_live``: growth of this process's memory by 200 or 50 sequences that
  have generated ten tokens each, in MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import wasmtime
from _report import arguments, report
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.host import Host, allowed
from tokenbus.workers.controller.interface import Controller, Program
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.scripts.controller import ScriptProgram
from tokenbus.workers.controller.scripts.engines import engine as interpreter
from tokenbus.workers.controller.scripts.modules import script_module
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.module_compiler import compile_interpreter
from tokenbus.workers.controller.wasm.sandbox import make_engine
from tokenbus.workers.variables import VariableStorage

LIMITS = Limits(init_s=60.0, pre_s=60.0, mid_s=60.0, post_s=60.0, script_s=60.0)
PATTERN = "[a-z ]{200,400}"
GEN = {
    "javascript": f"async function main(ctx) {{ await ctx.gen({{regex: '{PATTERN}'}}); }}",
    "python": f"async def main(ctx): await ctx.gen(regex='{PATTERN}')",
}
OWN = """
class Main extends Controller {
  initPrompt() { this.set = new TokenSet(tokenize("abc")); }
  midProcess() { return decide.sample({allow: this.set}); }
}
"""
LIVE = {"javascript": 200, "python": 50}


class World:
    """The vocabulary, the constraints and the interpreter."""

    def __init__(self) -> None:
        self.engine = make_engine(LIMITS)
        folder = files("tokenbus.workers.gpu.embedded") / "model"
        text = (folder / "tokenizer.json").read_text()
        self.vocabulary = TokenizerVocabulary.from_json(
            text, size=4096, eos=(0,), fingerprint="embedded"
        )
        self.constraints = Constraints(self.engine, None)
        self.modules = {language: self._compiled(language) for language in GEN}
        self.mask = memoryview(bytearray(4 * -(-self.vocabulary.size // 32)))
        storage = VariableStorage()
        variables = SequenceVariables(1, 0, storage.apply, lambda: None)
        self.host = Host(1, 0, b"", self.vocabulary, variables, Log(1 << 20), LIMITS, 1000)

    def _compiled(self, language: str) -> wasmtime.Module:
        found = compile_interpreter(interpreter(language).wasm, Limits())
        return wasmtime.Module.deserialize(self.engine, found.code)

    def script(self, language: str, text: str) -> Program:
        """The program of a script."""
        module = self.modules[language]
        guests = script_module(self.engine, language, module, text.encode())
        return ScriptProgram(guests, self.constraints.get)

    def first(self, program: Program, arg: str = "") -> Controller:
        """A controller that has decided about its first token."""
        controller = program.start(replace(self.host, arg=arg.encode()))
        controller.init_prompt([1, 2])
        self.decide(controller)
        return controller

    def decide(self, controller: Controller) -> None:
        """Runs the second half of a round: the controller decides about the next token."""
        controller.pre_process()
        controller.mid_process((0,), self.mask)

    def rounds(self, controller: Controller, count: int) -> float:
        """Seconds of a round. Each round samples the same token: the first token that the first
        mask allows."""
        token = allowed(self.mask, self.vocabulary.size)[0]
        spent = 0.0
        for _ in range(count):
            began = time.perf_counter()
            controller.post_process([token], 0)
            self.decide(controller)
            spent += time.perf_counter() - began
        return spent / count


def best(measure: Callable[[], float], runs: int) -> float:
    """The shortest of several times."""
    return min(measure() for _ in range(runs))


def first_s(world: World, program: Program, arg: str = "") -> float:
    """Seconds until the first mask."""
    began = time.perf_counter()
    controller = world.first(program, arg)
    spent = time.perf_counter() - began
    controller.close()
    return spent


def round_s(world: World, program: Program, arg: str = "") -> float:
    """Seconds of a round."""
    controller = world.first(program, arg)
    try:
        return world.rounds(controller, 50)
    finally:
        controller.close()


def forks(world: World, program: Program) -> tuple[float, float]:
    """Seconds of the first fork, and of the fastest later fork."""
    controller = world.first(program)
    times = []
    for seq in range(1, 30):
        began = time.perf_counter()
        child = controller.fork(replace(world.host, seq=seq))
        times.append(time.perf_counter() - began)
        child.close()
    controller.close()
    return times[0], min(times[1:])


def resident_bytes() -> int:
    """The resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_bytes(world: World, program: Program, count: int) -> float:
    """Growth of this process's memory by ``count`` sequences, in bytes."""
    before = resident_bytes()
    live = [world.first(program) for _ in range(count)]
    for controller in live:
        world.rounds(controller, 10)
    grown = resident_bytes() - before
    for controller in live:
        controller.close()
    return grown


def measured(world: World, language: str, runs: int) -> dict[str, float]:
    """The results of a language."""
    gen, regex = world.script(language, GEN[language]), world.constraints.get("regex")
    assert regex is not None
    world.first(regex, PATTERN).close()
    script_s = best(lambda: first_s(world, gen), runs)
    module_s = best(lambda: first_s(world, regex, PATTERN), runs)
    gen_s = best(lambda: round_s(world, gen), runs)
    regex_s = best(lambda: round_s(world, regex, PATTERN), runs)
    fork_first_s, fork_s = forks(world, gen)
    return {
        "first_ms_more": 1e3 * (script_s - module_s),
        "gen_round_us": 1e6 * gen_s,
        "gen_round_vs_regex": gen_s / regex_s,
        "fork_us": 1e6 * fork_s,
        "fork_us_first": 1e6 * fork_first_s,
        f"mb_{LIVE[language]}_live": live_bytes(world, gen, LIVE[language]) / 1e6,
    }


NOTES = {
    "js_first_ms_more": "ms by which the first mask is later than that of regex; at most 20",
    "js_gen_round_us": "us of a round within ctx.gen; at most 150",
    "js_fork_us": "us of a fork; at most 1,000",
    "js_mb_200_live": "MB of memory of 200 sequences; at most 1,000",
    "py_first_ms_more": "ms by which the first mask is later than that of regex; at most 20",
    "py_gen_round_us": "us of a round within ctx.gen; at most 300",
    "py_fork_us": "us of a fork; at most 3,000",
    "py_mb_50_live": "MB of memory of 50 sequences; at most 2,000",
}


def main() -> None:
    """Measures and reports."""
    given = arguments(__doc__)
    runs = 3 if given.quick else 15
    world = World()
    results: dict[str, float] = {}
    for prefix, language in (("js", "javascript"), ("py", "python")):
        for name, value in measured(world, language, runs).items():
            results[f"{prefix}_{name}"] = value
    own = world.script("javascript", OWN)
    results["js_own_round_us"] = 1e6 * best(lambda: round_s(world, own), runs)
    world.constraints.close()
    report(results, NOTES, given.json)


if __name__ == "__main__":
    main()
