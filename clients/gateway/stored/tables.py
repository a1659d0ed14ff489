"""The tables of stored responses, and the file that contains them."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from .write_turns import BUSY_S, WriteTurns

log = logging.getLogger(__name__)

FILE = "responses.sqlite"
VERSION = 3
"""The version of the tables, which the file stores as ``user_version``."""

# SQLite reads and writes whole rows. The rows of ``responses`` are updated and searched often, so
# the large columns are in the separate table ``contents``.
SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    user TEXT NOT NULL,
    id TEXT NOT NULL,
    previous TEXT,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    owner TEXT,
    lease REAL NOT NULL DEFAULT 0,
    events INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL,
    used REAL NOT NULL,
    UNIQUE (user, id)
);
CREATE INDEX IF NOT EXISTS oldest ON responses (user, (status IN ('queued', 'in_progress')), used);
CREATE TABLE IF NOT EXISTS contents (
    response INTEGER PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    answer BLOB NOT NULL,
    body BLOB
);
CREATE TABLE IF NOT EXISTS items (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    place INTEGER NOT NULL,
    given INTEGER NOT NULL,
    id TEXT NOT NULL,
    data BLOB NOT NULL,
    user TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (response, place)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_of_users ON items (user, id, given, response DESC);
CREATE TABLE IF NOT EXISTS events (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    first INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS users (
    user TEXT PRIMARY KEY, bytes INTEGER NOT NULL, responses INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO users VALUES (new.user, new.size, 1)
    ON CONFLICT DO UPDATE SET bytes = bytes + new.size, responses = responses + 1;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF size ON responses BEGIN
    UPDATE users SET bytes = bytes + new.size - old.size WHERE user = new.user;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE users SET bytes = bytes - old.size, responses = responses - 1 WHERE user = old.user;
    DELETE FROM users WHERE user = old.user AND responses = 0;
END;
"""

FROM_VERSION_2 = """
ALTER TABLE items ADD COLUMN user TEXT NOT NULL DEFAULT '';
UPDATE items SET user = (SELECT user FROM responses WHERE number = response);
DROP INDEX item_ids;
"""
"""Changes the tables of version 2. Without the users, a search for the items of a user read the
items of all users that had the same id."""


def connect(folder: Path) -> sqlite3.Connection:
    """A connection to the database in a run directory. The database is created if it does not
    exist. If the file cannot be used, the database is in the memory of this process."""
    try:
        return _opened(folder / FILE)
    except (OSError, sqlite3.Error) as error:
        log.warning(
            "responses are stored only in the memory of this gateway: cannot use %s: %s",
            folder / FILE,
            error,
        )
        return _with_tables(_connection(":memory:"))


def _opened(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    # SQLite creates the other files of the database (the log) with the permissions of this file.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = _connection(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        return _with_tables(connection)
    except BaseException:
        connection.close()
        raise


def _connection(path: str) -> sqlite3.Connection:
    # Calls come from different threads, but only one at a time (``StoredResponses.call``).
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    return connection


def _with_tables(connection: sqlite3.Connection) -> sqlite3.Connection:
    turns = WriteTurns(connection)
    with closing(turns), turns.next():
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, 2, VERSION):
            raise sqlite3.DatabaseError(
                f"the file has version {version} of the tables; this gateway needs version "
                f"{VERSION}"
            )
        change = FROM_VERSION_2 if version == 2 else ""
        connection.executescript(
            f"BEGIN IMMEDIATE; {change} {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
        )
    return connection
