"""What a history file holds, by version; a file of an older version is migrated, a newer or foreign one refused.

One file, and a rollback journal rather than a write-ahead log: a history is copied, cached by CI and kept on network
folders, where a log beside it would be left behind or not work. Writers wait for each other (docs/design/history.md).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fidelity.errors import HistoryBusy, OutputError, RequestError

APPLICATION = 0x46444C54
"""`PRAGMA application_id` of a history: "FDLT"."""
WAIT_SECONDS = 60.0
"""How long a writer waits for another one; each holds the file for a second or so."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE runs (id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, recorded TEXT NOT NULL, "
        "suite TEXT NOT NULL, suite_digest TEXT, commit_id TEXT, environment TEXT NOT NULL, versions TEXT NOT NULL, "
        "exit_status INTEGER NOT NULL)",
        "CREATE TABLE cases (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
        "CREATE TABLE series (id INTEGER PRIMARY KEY, case_id INTEGER NOT NULL REFERENCES cases, name TEXT NOT NULL, "
        "unit TEXT NOT NULL, better TEXT NOT NULL, UNIQUE (case_id, name))",
        "CREATE TABLE outcomes (run INTEGER NOT NULL REFERENCES runs, case_id INTEGER NOT NULL REFERENCES cases, "
        "verdict TEXT NOT NULL, surprise INTEGER NOT NULL, PRIMARY KEY (run, case_id)) WITHOUT ROWID",
        "CREATE TABLE points (run INTEGER NOT NULL REFERENCES runs, series INTEGER NOT NULL REFERENCES series, "
        "value REAL, PRIMARY KEY (run, series)) WITHOUT ROWID",
        "CREATE INDEX runs_in_order ON runs (suite, recorded, id)",
    ),
    (  # which golden a case leaned on, without which two runs cannot be compared; and what a value was held to
        "ALTER TABLE outcomes ADD COLUMN golden TEXT",
        "ALTER TABLE points ADD COLUMN floor REAL",
        "ALTER TABLE points ADD COLUMN bound REAL",
    ),
)
"""Statements that lead from each version to the next; the version is their number, kept as `PRAGMA user_version`."""
VERSION = len(MIGRATIONS)


def refuse(path: Path) -> None:
    """Raise RequestError unless `path` is a history that can be appended to, or can become one. Writes nothing.

    One that another run is writing to can: it is not waited for, since decoding takes longer than that.
    """
    if not path.exists():
        anchor = path.absolute().parent
        if not anchor.is_dir() or not os.access(anchor, os.W_OK | os.X_OK):
            raise OutputError(f"history {path} cannot be written: {anchor} is not a writable folder")
        return
    with contextlib.suppress(HistoryBusy), reading(path, wait=0.0):
        pass
    if not os.access(path, os.W_OK) or not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(f"history {path} cannot be written: make it and its folder writable, or name another")


@contextlib.contextmanager
def reading(path: Path, *, wait: float | None = None) -> Iterator[sqlite3.Connection]:
    """A connection with today's schema that writes nothing: of an older file, a migrated copy in memory.

    Raises RequestError if the file is missing, damaged, foreign or of a newer version; HistoryBusy if somebody else has
    held it for more than `wait` seconds, by default WAIT_SECONDS.
    """
    if path.is_dir():
        raise RequestError(f"history {path} is a folder: name a file, like history.db; `fidelity report` shows a run")
    if not path.is_file():
        raise RequestError(f"history {path} is missing: make one with `fidelity run SUITE --history {path}`")
    try:
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS if wait is None else wait, isolation_level=None)
        try:
            version = _version(connection, path)
            damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise RequestError(f"history {path} is damaged ({damage}): restore a copy of it, or name another")
            if version < VERSION:
                copy = sqlite3.connect(":memory:", isolation_level=None)
                connection.backup(copy)
                connection.close()
                connection = copy
                migrate(connection)
            yield connection
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            raise HistoryBusy(f"history {path}: another run is writing to it ({error}): try again") from error
        raise RequestError(f"history {path} cannot be read ({error}): name a file that fidelity wrote") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection within one transaction on today's schema, committed when the block ends well.

    Raises RequestError as `reading` does, and sqlite3.Error where the file cannot be written in time.
    """
    connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")  # before anything is read: two writers never see the same old state
        try:
            _version(connection, path)
            migrate(connection)
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    finally:
        connection.close()


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema to today's version, within the caller's transaction if there is one."""
    for number, statements in enumerate(MIGRATIONS[_user_version(connection) :], _user_version(connection) + 1):
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number}")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")


def _user_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The file's schema version; 0 for an empty one. Raises RequestError for what is no history, or a newer one."""
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    version = _user_version(connection)
    if application != APPLICATION and (application or tables or version):
        raise RequestError(f"{path} is a database of something else, not a history of fidelity: name another file")
    if version > VERSION:
        raise RequestError(
            f"history {path} has schema {version}, this version of fidelity knows {VERSION}: upgrade fidelity"
        )
    return version
