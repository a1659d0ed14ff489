"""The built-in constraints: what users name, and what makes their controllers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import wasmtime

from ...grammars.regex import prepare
from .grammar.combination import combine
from .grammar.controller import GrammarController
from .grammar.guests import GrammarGuests
from .grammar.tables import GrammarTables, choice_tables, regex_tables, substring_tables
from .host import Host
from .interface import Controller, Program
from .llguidance.matchers import Matchers
from .llguidance.programs import JsonSchemaProgram, LarkProgram


class GrammarProgram:
    """A constraint whose argument becomes tables, which the guest of these tables runs."""

    def __init__(self, guests: GrammarGuests, tables: Callable[[bytes], bytes]) -> None:
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


class CombinationProgram:
    """The constraint ``combination``, whose argument may also bound the tokens of its text."""

    def __init__(self, guests: GrammarGuests) -> None:
        self._guests = guests

    def start(self, host: Host) -> Controller:
        """Raises RequestError where the argument is wrong."""
        made = combine(host.arg)
        if made.max_tokens is not None:
            host = replace(host, max_tokens=min(host.max_tokens, made.max_tokens))
        return GrammarProgram(self._guests, lambda _: made.tables).start(host)


class Constraints:
    """The constraints that this worker has, by name."""

    def __init__(self, engine: wasmtime.Engine, folder: Path | None) -> None:
        """``folder`` is where tables and masks are kept between runs; None: nowhere."""
        prepare()  # or else the first pattern waits for it
        memories = folder / "memories" if folder is not None else None
        tables = folder / "tables" if folder is not None else None
        self._guests = GrammarGuests(engine, memories)
        self._matchers = Matchers()
        self._programs: dict[str, Program] = {
            "choice": GrammarProgram(self._guests, choice_tables),
            "combination": CombinationProgram(self._guests),
            "json_schema": JsonSchemaProgram(self._matchers),
            "lark": LarkProgram(self._matchers),
            "regex": GrammarProgram(self._guests, regex_tables),
            "substring": GrammarProgram(self._guests, substring_tables),
            "yacc": GrammarProgram(self._guests, GrammarTables(tables)),
        }

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
