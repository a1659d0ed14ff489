"""Measures the cost of scripts: the first decision, rounds, forks, and the memory of sequences.

A script and the built-in constraint ``regex`` run in this process, with the vocabulary of the
embedded model. Both use the same regular expression. Each time is the shortest of several runs.

The name of each figure begins with the language of the script, ``js`` or ``py``.

- ``first_ms_more``: the time from the start of a script to its first mask, minus this time for the
  constraint.
- ``gen_round_us``: the time of a round within ``ctx.gen({regex})``. ``gen_round_vs_regex`` is this
  time, divided by the time of a round of the constraint.
- ``js_own_round_us``: the time of a round in which the script itself returns ``decide.sample``.
- ``fork_us``: the time to copy a sequence. ``fork_us_first``: the time of the first copy, which
  cannot reuse an earlier instance.
- ``js_mb_200_live``, ``py_mb_50_live``: the number of MB by which this process's memory grows for
  200 or 50 sequences. Each sequence has generated ten tokens.
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
        """Starts a controller and runs its first round."""
        controller = program.start(replace(self.host, arg=arg.encode()))
        controller.init_prompt([1, 2])
        self.decide(controller)
        return controller

    def decide(self, controller: Controller) -> None:
        """Runs the part of a round in which the controller decides about the next token."""
        controller.pre_process()
        controller.mid_process((0,), self.mask)

    def rounds(self, controller: Controller, count: int) -> float:
        """Mean time of a round in seconds. In each round, the sampled token is the first token that
        the first mask allows."""
        token = allowed(self.mask, self.vocabulary.size)[0]
        spent = 0.0
        for _ in range(count):
            began = time.perf_counter()
            controller.post_process([token], 0)
            self.decide(controller)
            spent += time.perf_counter() - began
        return spent / count


def best(measure: Callable[[], float], runs: int) -> float:
    """The shortest time of ``runs`` measurements."""
    return min(measure() for _ in range(runs))


def first_s(world: World, program: Program, arg: str = "") -> float:
    """Seconds from the start of a controller to its first mask."""
    began = time.perf_counter()
    controller = world.first(program, arg)
    spent = time.perf_counter() - began
    controller.close()
    return spent


def round_s(world: World, program: Program, arg: str = "") -> float:
    """Mean time of a round of a new controller, in seconds."""
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
    """Number of bytes by which this process's memory grows for ``count`` sequences. Each sequence
    has generated ten tokens."""
    before = resident_bytes()
    live = [world.first(program) for _ in range(count)]
    for controller in live:
        world.rounds(controller, 10)
    grown = resident_bytes() - before
    for controller in live:
        controller.close()
    return grown


def measured(world: World, language: str, runs: int) -> dict[str, float]:
    """The figures of a language, by name."""
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
    "js_first_ms_more": "milliseconds to the first mask of a script in JavaScript, minus those "
    "of the constraint regex; at most 20",
    "js_gen_round_us": "microseconds of a round within ctx.gen of a script in JavaScript; at "
    "most 150",
    "js_fork_us": "microseconds to fork a sequence of a script in JavaScript; at most 1,000",
    "js_mb_200_live": "MB of memory for 200 sequences of a script in JavaScript; at most 1,000",
    "py_first_ms_more": "milliseconds to the first mask of a script in Python, minus those of "
    "the constraint regex; at most 20",
    "py_gen_round_us": "microseconds of a round within ctx.gen of a script in Python; at most 300",
    "py_fork_us": "microseconds to fork a sequence of a script in Python; at most 3,000",
    "py_mb_50_live": "MB of memory for 50 sequences of a script in Python; at most 2,000",
}


def main() -> None:
    """Runs all measurements and reports the figures."""
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
