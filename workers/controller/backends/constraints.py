"""The built-in constraints by name, and the programs that make their controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import wasmtime

from ....grammars.regex import prepare
from ....protocol.errors import RequestError
from ....protocol.metrics import Series
from ..host import Host
from ..interface import Constraint, ConstraintProgram
from .compiling.bounds import Bounds
from .compiling.meter import CompileMeter
from .compiling.processes import Processes
from .grammar.combination import Part, read_combination
from .grammar.grammar_controller import GrammarController
from .grammar.grammar_tables import Tables
from .grammar.parts import PartsController, Plan, make_plan
from .grammar.refusals import refusal
from .grammar.shared_instances import SharedInstances
from .llguidance.matchers import Matchers
from .llguidance.schema_and_lark import JsonSchemaProgram, LarkProgram
from .structural.program import StructuralProgram


class GrammarProgram:
    """A constraint whose argument is compiled to the tables of an automaton or a parser. A grammar
    instance (``grammar_instance``) then computes masks from the tables."""

    def __init__(self, instances: SharedInstances, tables: Callable[[bytes], bytes]) -> None:
        self._instances = instances
        self._tables = tables

    def start(self, host: Host) -> GrammarController:
        """Makes the controller. Raises RequestError if the argument is not valid."""
        shared = self._instances.get(self._tables(host.arg), host.vocabulary)
        try:
            return GrammarController(shared, host, shared.guest.start(), [])
        except BaseException:
            shared.release()
            raise


class Combination(NamedTuple):
    """A parsed argument of ``combination``. ``tables`` has the compiled tables of each regular part
    (``grammar/combination.py``), by the part's path (``Part.place``)."""

    root: Part
    plan: Plan
    tables: dict[str, bytes]


class CombinationProgram:
    """The constraint ``combination``. If its argument is regular, the argument is compiled to one
    automaton. If not, ``PartsController`` runs the parts of the argument one after another."""

    def __init__(
        self,
        instances: SharedInstances,
        tables: Tables,
        others: Mapping[str, ConstraintProgram],
    ) -> None:
        """``others``: the programs for parts that are not compiled to automata, by the kind of the
        part."""
        self._instances = instances
        self._tables = tables
        self._others = others

    def start(self, host: Host) -> Constraint:
        """Makes the controller. Raises RequestError if the argument is not valid."""
        root = read_combination(host.arg)
        made = Combination(root, make_plan(root), self._tables.combination(host.arg))
        if made.root.max_tokens is not None:
            host = replace(host, max_tokens=min(host.max_tokens, made.root.max_tokens))
        if made.root.regular:
            return self._part(made, made.root, host)
        # This call refuses an invalid part when the request starts. Without it, the sequence would
        # fail when it reaches the part.
        for part in {part.place: part for part in made.plan.parts}.values():
            self._part(made, part, host).close()
        return PartsController(made.plan, partial(self._part, made), host)

    def _part(self, made: Combination, part: Part, host: Host) -> Constraint:
        if part.regular:
            return GrammarProgram(self._instances, lambda _: made.tables[part.place]).start(host)
        value = part.value
        arg = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        try:
            return self._others[part.kind].start(replace(host, arg=arg))
        except RequestError as error:
            raise refusal(f"combination: {part.place}: {error.message}") from None


class Constraints:
    """The built-in constraints of this worker, by name."""

    def __init__(
        self, engine: wasmtime.Engine, folder: Path | None, bounds: Bounds | None = None
    ) -> None:
        """``folder`` stores tables and masks between runs of the worker. If it is None, nothing is
        stored. ``bounds``: the bounds of compiling one grammar."""
        prepare()  # Takes 40 ms; done here so that the first pattern does not wait.
        snapshots = folder / "memories" if folder is not None else None
        self._meter = CompileMeter()
        self._processes = Processes(bounds or Bounds())
        tables = Tables(
            folder / "tables" if folder is not None else None, self._processes, self._meter
        )
        self._instances = SharedInstances(engine, snapshots)
        self._matchers = Matchers(self._processes, self._meter)
        self._programs: dict[str, ConstraintProgram] = {
            "choice": GrammarProgram(self._instances, tables.choice),
            "json_schema": JsonSchemaProgram(self._matchers),
            "lark": LarkProgram(self._matchers),
            "regex": GrammarProgram(self._instances, tables.regex),
            "substring": GrammarProgram(self._instances, tables.substring),
            "yacc": GrammarProgram(self._instances, tables.yacc),
        }
        self._programs["structural"] = StructuralProgram(self._programs)
        self._programs["combination"] = CombinationProgram(self._instances, tables, self._programs)

    @property
    def names(self) -> set[str]:
        """The names of all built-in constraints."""
        return set(self._programs)

    def get(self, name: str) -> ConstraintProgram | None:
        """The constraint with this name; None if the name is unknown."""
        return self._programs.get(name)

    def series(self) -> list[Series]:
        """The metrics of compiling."""
        return self._meter.series()

    def close(self) -> None:
        """Called when the worker stops: writes snapshots of grammar instances to disk, and ends the
        processes that compile."""
        self._instances.close()
        self._processes.close()
