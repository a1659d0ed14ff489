"""The built-in constraints by name, and the programs that make their controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import wasmtime

from ....grammars.regex import prepare
from ....protocol.errors import RequestError
from ..host import Host
from ..interface import Constraint, ConstraintProgram
from .grammar.combination import Part, automaton, read_combination
from .grammar.grammar_controller import GrammarController
from .grammar.grammar_tables import GrammarTables, choice_tables, regex_tables, substring_tables
from .grammar.parts import PartsController, Plan, make_plan
from .grammar.refusals import refusal
from .grammar.shared_instances import SharedInstances
from .llguidance.matchers import Matchers
from .llguidance.schema_and_lark import JsonSchemaProgram, LarkProgram

COMBINATIONS_KEPT = 64
"""Combinations whose tables are cached in memory; one may take a megabyte and more."""


class GrammarProgram:
    """A constraint whose argument is compiled to tables, which a grammar instance runs."""

    def __init__(self, instances: SharedInstances, tables: Callable[[bytes], bytes]) -> None:
        self._instances = instances
        self._tables = tables

    def start(self, host: Host) -> GrammarController:
        """Raises RequestError if the argument is not valid."""
        shared = self._instances.get(self._tables(host.arg), host.vocabulary)
        try:
            return GrammarController(shared, host, shared.guest.start(), [])
        except BaseException:
            shared.release()
            raise


class Combination(NamedTuple):
    """A compiled argument of ``combination``: its tables, by the path of their part."""

    root: Part
    plan: Plan
    tables: dict[str, bytes]


@lru_cache(maxsize=COMBINATIONS_KEPT)
def _combination(arg: bytes) -> Combination:
    root = read_combination(arg)
    plan = make_plan(root)
    regular = {part.place: part for part in plan.parts if part.regular}
    tables = {place: automaton(part).to_bytes() for place, part in regular.items()}
    return Combination(root, plan, tables)


class CombinationProgram:
    """The constraint ``combination``: one automaton if possible, else its parts in turn."""

    def __init__(self, instances: SharedInstances, others: Mapping[str, ConstraintProgram]) -> None:
        """``others``: the programs for parts that are not automata, by their kind."""
        self._instances = instances
        self._others = others

    def start(self, host: Host) -> Constraint:
        """Raises RequestError if the argument is not valid."""
        made = _combination(host.arg)
        if made.root.max_tokens is not None:
            host = replace(host, max_tokens=min(host.max_tokens, made.root.max_tokens))
        if made.root.regular:
            return self._part(made, made.root, host)
        # An invalid part is refused now, not when the sequence reaches it.
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

    def __init__(self, engine: wasmtime.Engine, folder: Path | None) -> None:
        """``folder`` is where tables and masks are stored between runs; None: nowhere."""
        prepare()  # Otherwise the first pattern waits for it.
        snapshots = folder / "memories" if folder is not None else None
        tables = folder / "tables" if folder is not None else None
        self._instances = SharedInstances(engine, snapshots)
        self._matchers = Matchers()
        self._programs: dict[str, ConstraintProgram] = {
            "choice": GrammarProgram(self._instances, choice_tables),
            "json_schema": JsonSchemaProgram(self._matchers),
            "lark": LarkProgram(self._matchers),
            "regex": GrammarProgram(self._instances, regex_tables),
            "substring": GrammarProgram(self._instances, substring_tables),
            "yacc": GrammarProgram(self._instances, GrammarTables(tables)),
        }
        self._programs["combination"] = CombinationProgram(self._instances, self._programs)

    @property
    def names(self) -> set[str]:
        """The names that a request can give."""
        return set(self._programs)

    def get(self, name: str) -> ConstraintProgram | None:
        """The constraint with this name; None if it is unknown."""
        return self._programs.get(name)

    def close(self) -> None:
        """Writes snapshots to disk and frees everything, when the worker stops."""
        self._instances.close()
        self._matchers.close()
