"""The ledger: every reply that cost money or time, committed before it is used and never asked for again.

SQLite with a write-ahead log and full synchronisation, one file for all runs under a root, safe for several processes.
A key is the sha256 of the canonical JSON of (engine identity, messages, sampling, choices).
"""

import contextlib
import hashlib
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tenacity
from pydantic import JsonValue

from rbd_train.errors import DataError
from rbd_train.store import canonical

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL, provenance TEXT NOT NULL, "
    "final INTEGER NOT NULL, attempts INTEGER NOT NULL, seconds REAL NOT NULL) WITHOUT ROWID",
    # calls that were begun: what a killed run leaves here was in flight
    "CREATE TABLE IF NOT EXISTS begun (key TEXT PRIMARY KEY) WITHOUT ROWID",
    # how often a row's failures were taken for an outage
    "CREATE TABLE IF NOT EXISTS forgiven (key TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID",
)


FORGIVEN = 5  # runs in which a row's failures may count as an outage's


class Stored(NamedTuple):
    """A reply as the ledger holds it; `attempts` counts the calls that were made for it over all runs."""

    reply: str
    final: bool
    attempts: int


class Answer(NamedTuple):
    """A reply to store under its key."""

    key: str
    reply: str
    provenance: Mapping[str, JsonValue]
    final: bool


class Ledger:
    """Replies by key; open it once per process."""

    def __init__(self, path: Path, dry_run: bool = False) -> None:
        """Open or create the ledger.

        Args:
            path: the file.
            dry_run: whether engines tell which calls they would make, instead of making them.

        Raises:
            DataError: the file is there but is no ledger, or can't be written.
        """
        self.path, self.dry_run = path, dry_run
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # the HTTP backend commits from the thread of its event loop while the caller waits
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path}: can't be used as a ledger ({error}); move it away to start a new one") from error

    @tenacity.retry(
        retry=tenacity.retry_if_exception_message(match=".*locked"), reraise=True,
        stop=tenacity.stop_after_delay(60), wait=tenacity.wait_random(0.01, 0.1),
    )  # fmt: skip
    def _prepare(self) -> None:
        """Turn the log on and make the table; another process doing the same locks the file, timeout or not."""
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        for statement in _SCHEMA:
            self._db.execute(statement)

    @staticmethod
    def key(text: str) -> str:
        """Hash the canonical JSON of a request."""
        return hashlib.sha256(text.encode()).hexdigest()

    def replies(self, keys: Sequence[str]) -> dict[str, Stored]:
        """Return the stored replies among these keys.

        Raises:
            DataError: the file is damaged.
        """
        found: dict[str, Stored] = {}
        for start in range(0, len(keys), 500):
            part = keys[start : start + 500]
            marks = ",".join("?" * len(part))
            query = f"SELECT key, reply, final, attempts FROM replies WHERE key IN ({marks})"
            try:
                rows = self._db.execute(query, part).fetchall()
            except sqlite3.DatabaseError as error:
                raise DataError(f"{self.path}: can't be read ({error}); move it away to start a new one") from error
            found |= {key: Stored(reply, bool(final), attempts) for key, reply, final, attempts in rows}
        return found

    def commit(self, key: str, reply: str, provenance: Mapping[str, JsonValue], final: bool) -> None:
        """Store one reply; see `commit_all`."""
        self.commit_all([Answer(key, reply, provenance, final)])

    def commit_all(self, answers: Sequence[Answer], begun: Sequence[str] = ()) -> None:
        """Store replies durably, all or none; a final one is never replaced, a failed one counts its attempts.

        Args:
            answers: what came back.
            begun: keys of the calls that are made next; a killed run leaves them to be counted.
        """
        if not answers and not begun:
            return
        rows = [(a.key, a.reply, canonical(dict(a.provenance)), int(a.final), time.time()) for a in answers]
        with self._writing():
            self._db.executemany(
                "INSERT INTO replies VALUES (?, ?, ?, ?, 1, ?) ON CONFLICT(key) DO UPDATE SET "
                "reply = excluded.reply, final = excluded.final, attempts = attempts + 1, seconds = excluded.seconds "
                "WHERE replies.final = 0",
                rows,
            )
            self._db.executemany("DELETE FROM begun WHERE key = ?", [(a.key,) for a in answers if a.final])
            self._db.executemany("INSERT OR IGNORE INTO begun VALUES (?)", [(key,) for key in begun])

    def begun(self, keys: Sequence[str]) -> int:
        """Count which of these calls a killed run had begun, and forget that it had."""
        with self._writing():
            return sum(self._db.execute("DELETE FROM begun WHERE key = ?", (key,)).rowcount for key in keys)

    def forget(self, keys: Sequence[str]) -> None:
        """Drop the replies of failed and refused calls, so that they count as never made; an answer stays.

        Up to FORGIVEN times a row: neighbours that fail for reasons of their own look like an outage, and end some day.
        """
        refused = '%"status":"bad_request"%'
        with self._writing():
            self._db.executemany(
                "INSERT INTO forgiven VALUES (?, 1) ON CONFLICT(key) DO UPDATE SET times = times + 1",
                [(key,) for key in dict.fromkeys(keys)],
            )
            self._db.executemany(
                "DELETE FROM replies WHERE key = ? AND (final = 0 OR substr(reply, 1, 60) LIKE ?) "
                "AND (SELECT times FROM forgiven WHERE forgiven.key = replies.key) <= ?",
                [(key, refused, FORGIVEN) for key in keys],
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold a transaction; what it writes is on the disk when it ends, or not at all."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise DataError(f"{self.path}: can't store a reply ({error}); free space and run again") from error
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path}: can't be written ({error}); move it away to start a new one") from error

    def reasons(self, keys: Sequence[str]) -> str:
        """Say why these calls have no final answer, for an error message."""
        counts: Counter[str] = Counter()
        stored = self.replies(keys)
        for key in keys:
            row = stored.get(key)
            status = row.reply.split('"status":"', 1)[-1].split('"', 1)[0] if row else "no answer"
            counts[status] += 1
        return ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
