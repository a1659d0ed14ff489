"""The built-in constraints: what users name, and what makes their controllers."""

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
from ..interface import Controller, Program
from .grammar.combination import Part, automaton, read_combination
from .grammar.grammar_controller import GrammarController
from .grammar.grammar_tables import GrammarTables, choice_tables, regex_tables, substring_tables
from .grammar.parts import PartsController, Plan, make_plan
from .grammar.refusals import refusal
from .grammar.shared_instances import SharedInstances
from .llguidance.matchers import Matchers
from .llguidance.schema_and_lark import JsonSchemaProgram, LarkProgram

COMBINATIONS_KEPT = 64
"""Combinations whose tables are kept in memory; one may have a megabyte and more."""


class GrammarProgram:
    """A constraint whose argument becomes tables, which the guest of these tables runs."""

    def __init__(self, guests: SharedInstances, tables: Callable[[bytes], bytes]) -> None:
        self._guests = guests
        self._tables = tables

    def start(self, host: Host) -> Controller:
        """Raises RequestError where the argument is wrong."""
        shared = self._guests.get(self._tables(host.arg), host.vocabulary)
        try:
            return GrammarController(shared, host, shared.guest.start(), [])
        except BaseException:
            shared.release()
            raise


class Combination(NamedTuple):
    """An argument of ``combination``, ready to run: its tables by the places of their parts."""

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
    """The constraint ``combination``: one automaton where it can be, else parts in turn."""

    def __init__(self, guests: SharedInstances, others: Mapping[str, Program]) -> None:
        """``others``: what makes the controllers of parts that are no automata."""
        self._guests = guests
        self._others = others

    def start(self, host: Host) -> Controller:
        """Raises RequestError where the argument is wrong."""
        made = _combination(host.arg)
        if made.root.max_tokens is not None:
            host = replace(host, max_tokens=min(host.max_tokens, made.root.max_tokens))
        if made.root.regular:
            return self._part(made, made.root, host)
        # A part that is wrong is so now, and not when its turn comes.
        for part in {part.place: part for part in made.plan.parts}.values():
            self._part(made, part, host).close()
        return PartsController(made.plan, partial(self._part, made), host)

    def _part(self, made: Combination, part: Part, host: Host) -> Controller:
        if part.regular:
            return GrammarProgram(self._guests, lambda _: made.tables[part.place]).start(host)
        value = part.value
        arg = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        try:
            return self._others[part.kind].start(replace(host, arg=arg))
        except RequestError as error:
            raise refusal(f"combination: {part.place}: {error.message}") from None


class Constraints:
    """The constraints that this worker has, by name."""

    def __init__(self, engine: wasmtime.Engine, folder: Path | None) -> None:
        """``folder`` is where tables and masks are kept between runs; None: nowhere."""
        prepare()  # or else the first pattern waits for it
        memories = folder / "memories" if folder is not None else None
        tables = folder / "tables" if folder is not None else None
        self._guests = SharedInstances(engine, memories)
        self._matchers = Matchers()
        self._programs: dict[str, Program] = {
            "choice": GrammarProgram(self._guests, choice_tables),
            "json_schema": JsonSchemaProgram(self._matchers),
            "lark": LarkProgram(self._matchers),
            "regex": GrammarProgram(self._guests, regex_tables),
            "substring": GrammarProgram(self._guests, substring_tables),
            "yacc": GrammarProgram(self._guests, GrammarTables(tables)),
        }
        self._programs["combination"] = CombinationProgram(self._guests, self._programs)

    @property
    def names(self) -> set[str]:
        """What users name them."""
        return set(self._programs)

    def get(self, name: str) -> Program | None:
        """The constraint of a name; None where there is none."""
        return self._programs.get(name)

    def close(self) -> None:
        """Writes what is to be kept: the worker ends."""
        self._guests.close()
        self._matchers.close()
