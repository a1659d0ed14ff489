"""Checks finished answers against the keywords of their schemas that token masks cannot enforce.

Some keywords are rewritten, so that masks enforce them. Masks are computed from the rewritten
schema without the keywords that cannot be rewritten. Another process checks the finished text with
``jsonschema``, and the answer's receipt (``constraints.py``) reports the outcome of each keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from ....protocol.json_schema import Rewritten, needs_rewriting
from ....protocol.json_schema.parts import objects
from ....protocol.json_schema.relaxing import relaxed
from ....protocol.messages import Token
from ..answer_parts import AnswerForm
from ..errors import ApiError
from ..models import ServedModel
from ..templates.templates import Templates
from ..tokenization import MAX_LOOP_ITEMS
from .answers import Answer
from .constraints import KeywordState, Schema
from .growing import GrowingChoices
from .parts import Call, of_kind, text_of

MAX_SCHEMA_BYTES = 256 * 1024
"""Maximum size of a checked schema as JSON, in bytes. For each value that is checked, the event
loop sends the schema to another process, and serves no requests meanwhile."""
MAX_CHECKED_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes of the schemas and values in all checks of a request together."""


class Enforceable(NamedTuple):
    """A schema that masks can enforce. It was made from a client's schema: some keywords were
    rewritten, and others were left out."""

    schema: Schema
    enforced: list[str]
    """The keywords that were rewritten (``protocol.json_schema``), so that masks enforce them."""
    left_out: list[str]
    """The keywords that were left out, because masks cannot enforce them."""


def enforceable(found: Rewritten) -> Enforceable:
    """Leaves out the keywords of a rewritten schema that masks cannot enforce."""
    made = relaxed(found.schema, found.schema, frozenset(("look_around",)))
    left_out = list(dict.fromkeys((*made.keywords, *found.ignored)))
    kept = [name for name in found.enforced if name not in left_out]
    return Enforceable(made.schema, kept, left_out)


@dataclass(frozen=True)
class Checked:
    """A schema against which a finished text is checked, and the keywords to check."""

    schema: Schema
    keywords: list[str]
    enforced: list[str] = field(default_factory=list)
    """The keywords that masks enforce."""

    @cached_property
    def encoded(self) -> bytes:
        """The schema as JSON."""
        return msgspec.json.encode(self.schema)


def checked_schema(schema: Schema, found: Rewritten, strict: bool) -> tuple[Schema, Checked | None]:
    """Returns the schema for the masks, and the check of the finished text. The check is None if no
    keyword has to be reported. ``found``: the rewritten schema. ``strict``: whether the schema for
    the masks keeps all keywords, so that the controller enforces all of them or refuses it."""
    if strict:
        rest = relaxed(schema, found.schema).keywords
        made, left_out = schema, [name for name in rest if name == "format"] or found.ignored
        enforced = [name for name in (*found.enforced, *rest) if name not in left_out]
        enforced = list(dict.fromkeys(enforced))
    else:
        made, enforced, left_out = enforceable(found)
    if not enforced and not left_out:
        return schema, None
    return made, Checked(schema, left_out, enforced)


async def enforced_schema(
    templates: Templates, model: ServedModel, schema: dict[str, Any], strict: bool
) -> tuple[Schema, Checked | None]:
    """Rewrites a client's schema in another process, and returns the result of ``checked_schema``.
    The rest of the work on a large schema runs on a thread in the user's turn. Raises ApiError."""
    prepare = model.tokenization.prepare
    size = sum(1 for _ in islice(objects(schema), MAX_LOOP_ITEMS + 1))
    found = Rewritten(schema, [], [])
    if await prepare(size, lambda: needs_rewriting(schema)):
        found = await templates.rewritten(schema)
    return await prepare(size, lambda: checked_schema(schema, found, strict))


@dataclass
class Checks:
    """Checks the finished sequences of one request."""

    templates: Templates
    """Runs the checks. A gateway runs them in a separate process, because a client's schema may
    need much CPU time."""
    form: AnswerForm | None
    text: Checked | None = None
    """The schema of the text outside calls, or None if this text is not checked."""
    functions: dict[str, Checked] = field(default_factory=dict)
    """The schemas of arguments by the names of functions. Other arguments are not checked."""
    outcomes: dict[int, dict[str, KeywordState]] = field(default_factory=dict)
    """The outcome of each keyword, by the number of the sequence."""
    _choices: GrowingChoices = field(init=False)
    _bytes_left: int = MAX_CHECKED_BYTES
    """Number of bytes that may still be checked; 0 after the process that checks has failed."""

    def __post_init__(self) -> None:
        self._choices = GrowingChoices(self.form)

    @property
    def _has_schemas(self) -> bool:
        return self.text is not None or bool(self.functions)

    async def read(self, entries: Sequence[Token]) -> None:
        """Stores the texts of entries, and checks the sequences that end with these entries."""
        if not self._has_schemas:
            return
        for entry in entries:
            _, _, choice = self._choices.take(entry)
            if entry.finish_reason is not None:
                await self.check(entry.seq, "".join(choice.pieces))

    async def check(self, seq: int, text: str) -> None:
        """Checks the whole text of a finished sequence, in the form that ``entry_text`` returns."""
        if not self._has_schemas:
            return
        answer = Answer(self.form)
        answer.feed(text)
        answer.end()
        found: dict[str, KeywordState] = {}
        calls = of_kind(answer.parts, Call)
        values = [(self.functions.get(call.name), str(call.arguments)) for call in calls]
        if not calls:
            values.append((self.text, text_of(answer.parts)))
        for checked, value in values:
            if checked is not None:
                _add(found, await self._states(checked, value))
        if found:
            self.outcomes[seq] = found

    async def _states(self, checked: Checked, text: str) -> dict[str, KeywordState]:
        states: dict[str, KeywordState] = dict.fromkeys(checked.enforced, "enforced")
        if checked.keywords:
            states |= await self._checked(checked, text)
        return states

    async def _checked(self, checked: Checked, text: str) -> dict[str, KeywordState]:
        not_checked: dict[str, KeywordState] = dict.fromkeys(checked.keywords, "not checked")
        if not self._may_check(checked, text):
            return not_checked
        try:
            value = msgspec.json.decode(text)
            return await self.templates.validate(checked.encoded, value, checked.keywords)
        except (msgspec.MsgspecError, RecursionError):
            return not_checked
        except ApiError:
            self._bytes_left = 0
            return not_checked

    def _may_check(self, checked: Checked, text: str) -> bool:
        """Counts the bytes of a check. Returns False if the schema is too large, or if the checks
        of the request would have too many bytes."""
        try:
            schema_bytes = len(checked.encoded)
        except (OverflowError, RecursionError):
            return False
        if schema_bytes > MAX_SCHEMA_BYTES or schema_bytes + len(text) > self._bytes_left:
            return False
        self._bytes_left -= schema_bytes + len(text)
        return True


_ORDER: tuple[KeywordState, ...] = ("enforced", "checked", "not checked", "failed")


def _add(found: dict[str, KeywordState], more: dict[str, KeywordState]) -> None:
    """Adds the states of one value to ``found``, which keeps the worst state of each keyword."""
    for name, state in more.items():
        found[name] = max(state, found.get(name, state), key=_ORDER.index)
