"""The built-in constraint ``structural``: reads its argument, and makes the controllers of
sequences."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from .....protocol.errors import RequestError
from .....protocol.structure import Automaton, Structure, StructureError, decode_structure
from ...host import Host, Vocabulary
from ...interface import Constraint, ConstraintProgram
from ..grammar.refusals import refusal
from .free_masks import FreeMasks, TokenTable
from .structural_controller import Arg, StructuralController

MAX_BYTES = 1024 * 1024
"""Maximum bytes of an argument."""
KEPT_TABLES = 4
KEPT_STRUCTURES = 32
"""Maximum structures whose masks are cached."""

_Name = tuple[str, int, tuple[int, ...]]


class StructuralProgram:
    """The built-in constraint ``structural``: an answer that consists of text, thinking and tool
    calls (``protocol.structure``)."""

    def __init__(self, others: Mapping[str, ConstraintProgram]) -> None:
        """``others``: the constraints that may limit a value of a structure, by name. A value is
        the JSON of a tag, or the rest of the answer."""
        self._others = others
        self._lock = threading.Lock()
        self._tables_lock = threading.Lock()
        self._tables: OrderedDict[_Name, TokenTable] = OrderedDict()
        self._masks: OrderedDict[tuple[_Name, bytes], FreeMasks] = OrderedDict()

    def start(self, host: Host) -> StructuralController:
        """Makes the controller. Raises RequestError if the argument, or one of its schemas, is not
        valid."""
        if len(host.arg) > MAX_BYTES:
            raise refusal(
                f"the argument of structural has {len(host.arg)} bytes; at most {MAX_BYTES} are "
                "allowed"
            )
        masks = self._masks_of(host)
        return StructuralController(masks, self._value, host)

    def _masks_of(self, host: Host) -> FreeMasks:
        vocabulary = host.vocabulary
        name = (vocabulary.fingerprint, vocabulary.size, vocabulary.eos_ids)
        key = name, hashlib.sha256(host.arg).digest()
        with self._lock:
            found = self._masks.get(key)
            if found is not None:
                self._masks.move_to_end(key)
                return found
        try:
            structure = decode_structure(host.arg)
        except StructureError as error:
            raise refusal(f"structural: {error}") from None
        self._check_values(structure, host)
        automaton = Automaton(structure, vocabulary.special)
        masks = FreeMasks(automaton, self._table(name, vocabulary))
        with self._lock:
            self._masks[key] = masks
            while len(self._masks) > KEPT_STRUCTURES:
                self._masks.popitem(last=False)
        return masks

    def _check_values(self, structure: Structure, host: Host) -> None:
        """Checks the constraints of all values of a structure, so that an invalid constraint is
        refused when the request starts."""
        for number, phase in enumerate(structure.phases):
            if phase.controller:
                self._check(f"phases[{number}]", phase.controller, phase.arg, host)
        seen: list[Arg] = []
        for number, tag in enumerate(structure.tags):
            if tag.content == "json" and tag.schema is not None and tag.schema not in seen:
                seen.append(tag.schema)
                self._check(f"tags[{number}].schema", "json_schema", tag.schema, host)

    def _check(self, place: str, name: str, arg: Arg, host: Host) -> None:
        if name not in self._others or name == "structural":
            known = ", ".join(sorted(set(self._others) - {"structural"}))
            raise refusal(f"structural: {place}.controller is {name!r}; it must be one of {known}")
        try:
            self._value(name, arg, host).close()
        except RequestError as error:
            raise refusal(f"structural: {place}: {error.message}") from None

    def _value(self, name: str, arg: Arg, host: Host) -> Constraint:
        """The controller of a value. If ``json_schema`` has no schema, any JSON object is
        allowed."""
        if arg is None and name == "json_schema":
            arg = {"type": "object"}
        data = arg.encode() if isinstance(arg, str) else msgspec.json.encode(arg)
        return self._others[name].start(replace(host, arg=data))

    def _table(self, name: _Name, vocabulary: Vocabulary) -> TokenTable:
        with self._tables_lock:
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = TokenTable(vocabulary)
                while len(self._tables) > KEPT_TABLES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(name)
            return table
