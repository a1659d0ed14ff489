"""The stored responses of all users. The methods of this module block the calling thread."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from ..bodies.value_counts import SMALL_BODY_BYTES, ValueCounts
from .tables import connect
from .write_turns import WriteTurns

MAX_BYTES = 512 * 1024 * 1024
"""Maximum bytes of the stored responses of all users. Above this size, responses of the user with
the most bytes are deleted. Finished responses are deleted first, the least recently used first."""
MAX_BYTES_OF_ONE = 64 * 1024 * 1024
"""Maximum bytes of the stored responses of one user."""
MAX_RESPONSE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of a response, its items and the body of its request when it is first stored. One
transaction writes them, and other users wait for its end."""
MAX_RESPONSES_OF_ONE = 4096
"""Maximum number of stored responses of one user."""
MAX_CONTEXT_BYTES = 8 * 1024 * 1024
"""Maximum bytes of the items that earlier responses add to one input."""
OVERHEAD_BYTES = 512
"""Number of bytes that are counted for each response, each item and each group of events in
addition to its data."""
EVENT_GROUPS, EVENT_BYTES = 64, 1024 * 1024
"""Maximum number of groups of events that are read at a time, and the number of bytes after which
no further group is read."""
LEASE_S = 15.0
"""Duration of a lease in seconds. The gateway that generates a background response has a lease on
the response. If this gateway does not renew the lease for this time, another gateway may continue
the response."""
ACTIVE = ("queued", "in_progress")
"""The statuses of a response that is not finished."""


class Item(Struct, frozen=True):
    """An item of a response."""

    id: str
    data: bytes
    """The item as JSON."""
    given: bool
    """Whether the item belongs to the response's input, not to its output."""


class Stored(Struct):
    """A stored response."""

    id: str
    status: str
    answer: bytes
    """The response as JSON."""
    previous: str | None = None
    """The id of the response that this response continues, if any."""
    background: bool = False
    body: bytes | None = None
    """The request's body, while a background response is unfinished; otherwise None."""
    events: int = 0
    """Number of stored events."""
    expired: bool = False
    """Whether the response is unfinished and its lease has expired."""

    @property
    def active(self) -> bool:
        """Whether the response is not finished."""
        return self.status in ACTIVE


class NotStoredError(Exception):
    """A response is not stored for this user."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class UnfinishedError(NotStoredError):
    """A response cannot be continued, because it is not finished, was cancelled or failed."""

    def __init__(self, id: str, status: str) -> None:
        super().__init__(id)
        self.status = status


class ContextTooLargeError(Exception):
    """The items of earlier responses exceed ``MAX_CONTEXT_BYTES``, or have more values than a body
    may have."""


class Database:
    """One connection to the database. Only one call may run at a time, on any thread."""

    def __init__(self, folder: Path) -> None:
        self._connection = connect(folder)
        self._turns = WriteTurns(self._connection)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()
        self._turns.close()

    def save(
        self, user: str, response: Stored, items: Sequence[Item], owner: str | None = None
    ) -> bool:
        """Stores a response; replaces an older one with the same id. ``owner``: the gateway that
        generates the response, or None if the response is finished. Returns False if the response
        is larger than ``MAX_RESPONSE_BYTES``, and is therefore not stored."""
        size = len(response.answer) + len(response.body or b"") + OVERHEAD_BYTES + _size_of(items)
        if size > MAX_RESPONSE_BYTES:
            return False
        now = time.time()
        with self._transaction() as run:
            run.execute("DELETE FROM responses WHERE user = ? AND id = ?", (user, response.id))
            [number] = run.execute(
                "INSERT INTO responses (user, id, previous, status, background, owner, lease, size,"
                " used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number",
                (
                    user,
                    response.id,
                    response.previous,
                    response.status,
                    response.background,
                    owner,
                    now + LEASE_S,
                    size,
                    now,
                ),
            ).fetchone()
            contents = (number, response.answer, response.body)
            run.execute("INSERT INTO contents VALUES (?, ?, ?)", contents)
            _insert_items(run, user, number, items, 0)
            self._shrink(user)
        return True

    def find(self, user: str, id: str, contents: bool = True) -> Stored | None:
        """The response of a user with this id; None if it is not stored. If ``contents`` is False,
        the answer and the body are left empty, because they may be large."""
        answer, body = ("answer", "body") if contents else ("x''", "NULL")
        join = "JOIN contents ON response = number" if contents else ""
        row = self._connection.execute(
            f"SELECT id, status, {answer}, previous, background, {body}, events, lease"
            f" FROM responses {join}"
            " WHERE user = ? AND id = ?",
            (user, id),
        ).fetchone()
        if row is None:
            return None
        *fields, lease = row
        found = Stored(*fields)
        found.background = bool(found.background)
        found.expired = found.active and lease < time.time()
        return found

    def delete(self, user: str, id: str) -> bool:
        """Deletes a response; returns whether it was stored."""
        with self._transaction() as run:
            sql = "DELETE FROM responses WHERE user = ? AND id = ?"
            return run.execute(sql, (user, id)).rowcount > 0

    def items(self, user: str, ids: Sequence[str]) -> dict[str, bytes]:
        """The stored items of a user with these ids, by id. If several items have the same id, an
        item of an output takes precedence over an item of an input. Raises ContextTooLargeError.
        The bytes of an item count as often as ``ids`` names the item."""
        found: dict[str, bytes] = {}
        sql = (
            "SELECT data FROM items WHERE user = ? AND id = ? ORDER BY given, response DESC LIMIT 1"
        )
        size = 0
        for id, count in Counter(ids).items():
            row = self._connection.execute(sql, (user, id)).fetchone()
            if row is not None:
                found[id] = row[0]
                size += count * len(row[0])
            if size > MAX_CONTEXT_BYTES:
                raise ContextTooLargeError
        _check_values([found[id] for id in ids if id in found])
        return found

    def context(self, user: str, id: str) -> list[bytes]:
        """The items of a finished response and of the responses that it continues, oldest first.

        Raises NotStoredError, UnfinishedError and ContextTooLargeError.
        """
        chain: dict[int, None] = {}
        size = 0
        next_id: str | None = id
        while next_id is not None:
            row = self._connection.execute(
                "SELECT number, status, previous FROM responses WHERE user = ? AND id = ?",
                (user, next_id),
            ).fetchone()
            if row is None or row[0] in chain:
                raise NotStoredError(next_id)
            if row[1] not in ("completed", "incomplete"):
                raise UnfinishedError(next_id, row[1])
            chain[row[0]] = None
            size += self._bytes_of_items(row[0])
            if size > MAX_CONTEXT_BYTES:
                raise ContextTooLargeError
            next_id = row[2]
        with self._transaction() as run:
            sql = "UPDATE responses SET used = ? WHERE number = ?"
            now = time.time()
            run.executemany(sql, [(now, number) for number in chain])
        sql = "SELECT data FROM items WHERE response = ? ORDER BY place"
        rows = (self._connection.execute(sql, (number,)) for number in reversed(chain))
        items = [data for found in rows for (data,) in found]
        _check_values(items)
        return items

    def given(self, user: str, id: str) -> list[bytes]:
        """The items of a response's input, without the items of earlier responses."""
        return [
            data
            for (data,) in self._connection.execute(
                "SELECT data FROM items JOIN responses ON response = number"
                " WHERE responses.user = ? AND responses.id = ? AND given ORDER BY place",
                (user, id),
            )
        ]

    def append(self, user: str, id: str, owner: str, first: int, events: bytes, count: int) -> bool:
        """Adds a group of ``count`` events, the first of which has the number ``first``, and renews
        the lease of ``owner``. Returns False if ``owner`` may not generate the response any
        more."""
        with self._transaction() as run:
            number = self._owned(user, id, owner)
            if number is None:
                return False
            run.execute(
                "UPDATE responses SET status = 'in_progress', lease = ? WHERE number = ?",
                (time.time() + LEASE_S, number),
            )
            self._add_events(number, first, events, count)
            self._shrink(user)
            return self._owned(user, id, owner) is not None

    def finish(
        self,
        user: str,
        response: Stored,
        owner: str,
        items: Sequence[Item],
        first: int,
        events: bytes,
        count: int,
    ) -> bool:
        """Stores the answer, the items and the last group of events of a finished background
        response. Returns False if ``owner`` may not generate the response any more."""
        with self._transaction() as run:
            number = self._owned(user, response.id, owner)
            if number is None:
                return False
            [body] = run.execute(
                "SELECT coalesce(length(body), 0) + length(answer) FROM contents"
                " WHERE response = ?",
                (number,),
            ).fetchone()
            [place] = run.execute(
                "SELECT count(*) FROM items WHERE response = ?", (number,)
            ).fetchone()
            _insert_items(run, user, number, items, place)
            _replace_contents(run, number, response.answer)
            run.execute(
                "UPDATE responses SET status = ?, owner = NULL, size = size + ?, used = ?"
                " WHERE number = ?",
                (
                    response.status,
                    len(response.answer) + _size_of(items) - body,
                    time.time(),
                    number,
                ),
            )
            self._add_events(number, first, events, count)
            self._shrink(user)
            return True

    def adopt(self, user: str, id: str, owner: str) -> Stored | None:
        """Gives ``owner`` the lease of an unfinished response if the lease has expired; returns the
        response. None if the response is finished or not stored, or if its lease has not
        expired."""
        with self._transaction() as run:
            found = self.find(user, id)
            if found is None or not found.expired or found.body is None:
                return None
            run.execute(
                "UPDATE responses SET owner = ?, lease = ? WHERE user = ? AND id = ?",
                (owner, time.time() + LEASE_S, user, id),
            )
            return found

    def release(self, user: str, id: str, owner: str) -> None:
        """Ends the lease of ``owner``, so that another gateway may continue the response at
        once."""
        with self._transaction() as run:
            run.execute(
                "UPDATE responses SET lease = 0 WHERE user = ? AND id = ? AND owner = ?",
                (user, id, owner),
            )

    def cancel(self, user: str, id: str) -> Stored | None:
        """Cancels a response unless it is finished; returns the response, or None if it is not
        stored."""
        with self._transaction() as run:
            found = self.find(user, id)
            if found is None or not found.active:
                return found
            answer = msgspec.json.decode(found.answer)
            answer["status"] = found.status = "cancelled"
            found.answer = msgspec.json.encode(answer)
            sql = (
                "UPDATE responses SET status = ?, owner = NULL WHERE user = ? AND id = ?"
                " RETURNING number"
            )
            [number] = run.execute(sql, (found.status, user, id)).fetchone()
            _replace_contents(run, number, found.answer)
            return found

    def events(self, user: str, id: str, after: int) -> list[tuple[int, bytes]]:
        """The next groups of events after the event with the number ``after``, within
        ``EVENT_GROUPS`` and ``EVENT_BYTES``. For each group, returns the number of its first event,
        and its events. The first group may also contain earlier events."""
        rows = self._connection.execute(
            "SELECT first, data FROM events JOIN responses ON response = number"
            " WHERE user = :user AND id = :id AND responses.events > :next AND first >= (SELECT"
            " max(e.first) FROM events AS e WHERE e.response = number AND e.first <= :next)"
            " ORDER BY first LIMIT :limit",
            {"user": user, "id": id, "next": after + 1, "limit": EVENT_GROUPS},
        )
        found: list[tuple[int, bytes]] = []
        size = 0
        for first, data in rows:
            found.append((first, data))
            size += len(data)
            if size >= EVENT_BYTES:
                break
        rows.close()
        return found

    def _owned(self, user: str, id: str, owner: str) -> int | None:
        row = self._connection.execute(
            "SELECT number FROM responses WHERE user = ? AND id = ? AND owner = ?"
            " AND status IN (?, ?)",
            (user, id, owner, *ACTIVE),
        ).fetchone()
        return None if row is None else int(row[0])

    def _add_events(self, number: int, first: int, events: bytes, count: int) -> None:
        if not count:
            return
        run = self._connection
        run.execute("INSERT INTO events VALUES (?, ?, ?)", (number, first, events))
        run.execute(
            "UPDATE responses SET events = ?, size = size + ? WHERE number = ?",
            (first + count, len(events) + OVERHEAD_BYTES, number),
        )

    def _bytes_of_items(self, number: int) -> int:
        [size] = self._connection.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM items WHERE response = ?", (number,)
        ).fetchone()
        return int(size)

    def _shrink(self, user: str) -> None:
        """Deletes responses until the bounds for ``user`` and for all users together hold."""
        run = self._connection
        while True:
            row = run.execute(
                "SELECT bytes, responses FROM users WHERE user = ?", (user,)
            ).fetchone()
            if row is None or (row[0] <= MAX_BYTES_OF_ONE and row[1] <= MAX_RESPONSES_OF_ONE):
                break
            self._delete_oldest(user)
        while True:
            [total] = run.execute("SELECT coalesce(sum(bytes), 0) FROM users").fetchone()
            if total <= MAX_BYTES:
                break
            [largest] = run.execute("SELECT user FROM users ORDER BY bytes DESC LIMIT 1").fetchone()
            self._delete_oldest(largest)

    def _delete_oldest(self, user: str) -> None:
        # Finished responses are deleted first. The index "oldest" has this order.
        self._connection.execute(
            "DELETE FROM responses WHERE number = (SELECT number FROM responses WHERE user = ?"
            " ORDER BY status IN ('queued', 'in_progress'), used LIMIT 1)",
            (user,),
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        run = self._connection
        with self._turns.next():
            run.execute("BEGIN IMMEDIATE")
        try:
            yield run
        except BaseException:
            run.execute("ROLLBACK")
            raise
        run.execute("COMMIT")


def _check_values(items: Sequence[bytes]) -> None:
    """Raises ContextTooLargeError if items have more values together than a body may have. The
    bound is necessary because the gateway decodes all items without a pause."""
    is_small = sum(map(len, items)) <= SMALL_BODY_BYTES
    if not is_small and ValueCounts.of(items).excess is not None:
        raise ContextTooLargeError


def _size_of(items: Sequence[Item]) -> int:
    return sum(OVERHEAD_BYTES + len(item.data) for item in items)


def _replace_contents(run: sqlite3.Connection, number: int, answer: bytes) -> None:
    """Stores the answer of a finished response, and deletes the body of its request."""
    run.execute("UPDATE contents SET answer = ?, body = NULL WHERE response = ?", (answer, number))


def _insert_items(
    run: sqlite3.Connection, user: str, number: int, items: Sequence[Item], place: int
) -> None:
    run.executemany(
        "INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)",
        [(number, place + i, one.given, one.id, one.data, user) for i, one in enumerate(items)],
    )
