"""The table of a tenant in the module store: the tenant's modules and tags.

The state worker stores the tables of all tenants, so that controller workers on all machines use
the same tables. Each machine has copies of the tables (``table_copies``).
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable
from itertools import islice

import msgspec
from msgspec import Struct

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, RequestError, UnavailableError
from ....protocol.messages import StoredModule, Tagged
from ....protocol.pace import RETRY_AFTER_S
from ....protocol.worker_messages import CALL_TOOL
from ..scripts.sources import IN_ARGUMENT

MAX_MODULES = 1_000
"""Maximum modules of a tenant."""
MAX_BYTES = 1024**3
"""Maximum bytes of a tenant's modules, including their compiled forms."""
MAX_TAGS = 10_000
SHOWN = 20
SHOWN_CHARACTERS = 400
"""Maximum characters of the list of names in an error."""
COMPARED = 200
COMPARED_CHARACTERS = 40
"""``COMPARED`` is the maximum number of tags that are compared with an unknown name, in order to
name similar tags in the error. Tags longer than ``COMPARED_CHARACTERS`` are not compared. These
limits exist because the comparison is slow."""

_ID = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{8,63}")
"""Matches the first 8 or more characters of an id, which may be used instead of the id."""
_PYTHON = re.compile(r"[\w.]+:\w+")
"""Matches the name of a Python controller."""

BUILT_IN = (
    "choice",
    "combination",
    "json_schema",
    "lark",
    "regex",
    "structural",
    "substring",
    "yacc",
)
"""Names of built-in constraints, which need no module; a tag cannot have such a name."""


class Entry(Struct, omit_defaults=True):
    """A module of a tenant. ``size``: bytes of the uploaded module; ``uploaded``: the time of the
    upload, in Unix seconds."""

    size: int
    compiled: int
    """Bytes of the compiled form."""
    uploaded: float
    abi: str
    forks: bool = True
    why_no_fork: str = ""
    compile_ms: float = 0.0


class Table(Struct, omit_defaults=True):
    """The table of a tenant."""

    tenant: str
    modules: dict[str, Entry] = {}
    tags: dict[str, str] = {}
    tagged: dict[str, Tagged] = {}
    """For each tag: the time of its assignment, and who requested it."""
    version: int = 0
    """The version number that the state worker has given to this content of the table; 0 if the
    state worker does not have the table."""

    def named(self, name: str, path: str) -> str:
        """The id of the module that ``name`` denotes. ``name`` is a tag, an id, or the first 8 or
        more characters of an id.

        Raises ``unknown_controller``, whose message lists the existing names. ``path`` is the field
        of the request that has the name.
        """
        module = self.tags.get(name, name)
        if module in self.modules:
            return module
        found = [m for m in self.modules if m.startswith(name)] if _PREFIX.fullmatch(name) else []
        if len(found) == 1:
            return found[0]
        if found:
            raise RequestError(
                Code.INVALID_FIELD,
                f"the ids of {len(found)} modules begin with {name}: {', '.join(sorted(found))}",
                path=path,
            )
        raise RequestError(Code.UNKNOWN_CONTROLLER, _why_unknown(self, name, path), path=path)

    def stored(self, module: str, tags: list[str] | None = None) -> StoredModule:
        """A module in the form for clients, with the given tags or, by default, all of its tags."""
        entry = self.modules[module]
        if tags is None:
            tags = [tag for tag, named in self.tags.items() if named == module]
        # Earlier versions of Tokenbus did not record when a tag was assigned.
        earlier = Tagged(at=entry.uploaded, by=self.tenant)
        return StoredModule(
            module=module,
            tags=sorted(tags),
            size=entry.size,
            uploaded=entry.uploaded,
            abi=entry.abi,
            forks=entry.forks,
            why_no_fork=entry.why_no_fork,
            compiled_size=entry.compiled,
            compile_ms=entry.compile_ms,
            tagged={tag: self.tagged.get(tag, earlier) for tag in sorted(tags)},
        )

    def all_stored(self) -> list[StoredModule]:
        """All modules in the form for clients. Each tag is read once, because a tenant may have
        1,000 modules and 10,000 tags."""
        tags: dict[str, list[str]] = {module: [] for module in self.modules}
        for tag, module in self.tags.items():
            tags[module].append(tag)
        return [self.stored(module, named) for module, named in tags.items()]

    def assign(self, tags: Iterable[str], module: str, by: str) -> None:
        """Assigns ``tags`` to a module. ``by``: who requested the assignment; if empty, the
        tenant."""
        tagged = Tagged(at=time.time(), by=by or self.tenant)
        for tag in tags:
            self.tags[tag] = module
            self.tagged[tag] = tagged

    def drop_tags(self, tags: Iterable[str]) -> None:
        """Removes ``tags``."""
        for tag in tags:
            del self.tags[tag]
            self.tagged.pop(tag, None)


_decoder = json_decoder(Table)


def encode_table(table: Table) -> bytes:
    """A table as JSON."""
    return msgspec.json.encode(table)


def decode_table(content: bytes) -> Table:
    """A table from JSON."""
    return _decoder.decode(content)


def _why_unknown(table: Table, name: str, path: str) -> str:
    """The error for an unknown name; it lists the existing names, beginning with similar names."""
    runs = path == "$.controller"
    if not runs and _is_built_in(name):
        return f"{name!r} is the name of a built-in controller, which cannot be changed"
    parts = [f"unknown {'controller' if runs else 'module'} {name!r}"]
    if runs and _PYTHON.fullmatch(name):
        parts[0] += "; a Python controller needs a worker: tokenbus controller serve MODULE:NAME"
    if runs:
        parts.append(f"built in: {', '.join(BUILT_IN)}")
    if table.tags:
        parts.append(f"tags: {_some(table.tags, name)}")
    if untagged := len(table.modules.keys() - set(table.tags.values())):
        parts.append(f"modules without tags: {untagged}")
    if not table.modules:
        parts.append("no module has been uploaded")
    return "; ".join(parts)


def _some(tags: Iterable[str], name: str) -> str:
    """The tags that fit into a message, beginning with tags that are similar to ``name``."""
    every = sorted(tags)
    short = (tag for tag in every if len(tag) <= COMPARED_CHARACTERS)
    near = difflib.get_close_matches(name[:COMPARED_CHARACTERS], islice(short, COMPARED))
    shown: list[str] = []
    for tag in [*near, *(tag for tag in every if tag not in near)][:SHOWN]:
        if shown and len(", ".join([*shown, tag])) > SHOWN_CHARACTERS:
            break
        shown.append(tag)
    more = len(every) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _is_built_in(name: str) -> bool:
    return name in BUILT_IN or name in IN_ARGUMENT or name == CALL_TOOL


def check_tag(tag: str) -> None:
    """Raises RequestError if the tag is not valid."""
    if _is_built_in(tag):
        raise RequestError(
            Code.INVALID_FIELD, f"{tag!r} is the name of a built-in controller", path="$.tag"
        )
    if not tag or not tag.isprintable() or _ID.fullmatch(tag):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{tag!r} is not a valid tag; a tag has printable characters and is not a module id",
            path="$.tag",
        )


def check_tags(table: Table) -> None:
    """Raises RequestError if a tenant has too many tags."""
    if len(table.tags) > MAX_TAGS:
        raise RequestError(
            Code.TOO_LARGE,
            f"there would be {len(table.tags)} tags; at most {MAX_TAGS} are allowed",
            path="$.tags",
        )


def check_quota(table: Table, module: str, more: int, upload_bytes: int | None) -> None:
    """Raises RequestError or UnavailableError if the tenant does not have room for a module.
    ``more``: bytes of the module, and of its compiled form if the module has been compiled.
    ``upload_bytes``: the quota of the tenant's key; None if the key has no quota."""
    if module in table.modules:
        return
    if len(table.modules) >= MAX_MODULES:
        raise RequestError(
            Code.TOO_LARGE,
            f"{len(table.modules)} modules are stored, and no more are allowed; delete some first",
        )
    used = sum(entry.size + entry.compiled for entry in table.modules.values())
    if upload_bytes is not None and used + more > upload_bytes:
        raise UnavailableError(
            Code.CLIENT_LIMIT,
            f"the quota upload_bytes of this key is {upload_bytes} bytes: the stored modules with "
            f"their compiled forms have {used} bytes, and this module has {more}; delete modules, "
            "and try again",
            retry_after_s=RETRY_AFTER_S,
        )
    if used + more > MAX_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"the stored modules with their compiled forms have {used} bytes, and this module has "
            f"{more}; at most {MAX_BYTES} are allowed; delete modules first",
        )
