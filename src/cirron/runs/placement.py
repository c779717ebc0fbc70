"""Where each span of a round is in its tree: its path, its epoch and step, what it is inside of.

A span closes after all that is inside of it, and rounds are taken newest first, so the parents of
a round's spans are in it, or were in one before: of each round, what began before its files is kept
(`known`). Works on tables of a DuckDB connection, one statement a level of the tree.
"""

from __future__ import annotations

from typing import Any

from cirron.runs.store import TABLES, nothing

MAX_LEVELS = 128
# A file may hold what was closed a little after its name says that it was begun.
SLACK_NS = 10_000_000

# 63 bits that stand for an id within its session. A DuckDB that hashes in another way splits only
# the spans that were open when a store was last brought up to date.
_MACROS = """
CREATE OR REPLACE TEMP MACRO key_of(id) AS
    CASE WHEN id IS NOT NULL THEN CAST(hash(id) >> 1 AS BIGINT) END;
CREATE OR REPLACE TEMP MACRO is_step(name) AS name IN ('step', 'batch');
CREATE OR REPLACE TEMP MACRO is_evaluation(name) AS name IN ('evaluation', 'prediction');
CREATE OR REPLACE TEMP MACRO is_aside(name) AS name IN ('evaluation', 'prediction', 'checkpoint',
    'snapshot', 'compile', 'trace', 'lower');
"""

# Where a span is, given what is known of its parent `p`.
_PLACE = """
    p.name AS parent_name,
    CASE WHEN p.prefix IS NULL THEN n.name ELSE p.prefix || n.name END AS path,
    COALESCE(p.depth, 0) AS depth,
    CASE WHEN n.name = 'epoch' THEN n.index ELSE p.epoch END AS epoch,
    CASE WHEN n.name = 'epoch' THEN n.key ELSE p.epoch_key END AS epoch_key,
    CASE WHEN is_step(n.name) THEN n.index ELSE p.step END AS step,
    CASE WHEN is_step(n.name) THEN n.key ELSE p.step_key END AS step_key,
    COALESCE(p.in_evaluation, false) AS in_evaluation,
    COALESCE(p.in_aside, false) AS in_aside,
    is_step(n.name) AND p.step_key IS NULL
        AND NOT COALESCE(p.in_evaluation, false) AS is_training_step,
    COALESCE(p.thread_id = n.thread_id AND p.pid = n.pid, false) AS in_thread,
    COALESCE(p.is_training_step AND p.thread_id = n.thread_id AND p.pid = n.pid, false) AS in_step,
    COALESCE(p.is_lost, n.parent_key IS NOT NULL) AS is_lost
"""
# What is known of a span that has its place, for what is below it: there are far fewer parents
# than children. `is_lost`: something above it is not there, or not yet.
KNOWN = """session, key, name, path || '/' AS prefix, depth + 1 AS depth, epoch, epoch_key, step,
    step_key, in_evaluation OR is_evaluation(name) AS in_evaluation,
    in_aside OR is_aside(name) AS in_aside, is_training_step, pid, thread_id, start_ns, is_lost"""
# The columns of each table that say where a record is.
PLACES = {
    "spans": (
        *("parent_name", "path", "depth", "epoch", "epoch_key", "step", "step_key"),
        *("in_evaluation", "in_aside", "is_training_step", "in_thread", "in_step"),
    ),
    "marks": ("span_name", "epoch", "step", "step_key"),
    "snapshots": ("epoch",),
}
_OWN = "n.session, n.key, n.parent_key, n.name, n.index, n.pid, n.thread_id, n.start_ns"
_IS_PARENT = "p.session = n.session AND p.key = n.parent_key"
_IS_SPAN = "p.session = n.session AND p.key = n.span_key"

# Each table's new records with their places.
PLACED = {
    "spans": f"SELECT n.*, {_PLACE} FROM new_spans n LEFT JOIN known p ON {_IS_PARENT}",
    "marks": "SELECT n.*, p.name AS span_name, p.epoch, p.step, p.step_key,"
    " COALESCE(p.is_lost, n.span_id <> 'root') AS is_lost"
    f" FROM new_marks n LEFT JOIN known p ON {_IS_SPAN}",
    "snapshots": "SELECT n.*, p.epoch, COALESCE(p.is_lost, true) AS is_lost"
    f" FROM new_snapshots n LEFT JOIN known p ON {_IS_SPAN}",
}
# The spans that something in the round is in, or may be in an older file.
_ASKED_FOR = """
    SELECT session, parent_key AS key FROM new_spans WHERE parent_key IS NOT NULL
    UNION ALL SELECT session, span_key FROM new_marks
    UNION ALL SELECT session, span_key FROM new_snapshots
    UNION ALL SELECT n.session, n.key FROM new_spans n JOIN begun b ON b.session = n.session
        WHERE n.start_ns <= b.at_ns
"""


class Placement:
    """The table `known` of a connection: spans that others may be in, and where these are."""

    def __init__(self, connection: Any) -> None:
        self._db = connection
        connection.execute(_MACROS)

    def forget(self) -> None:
        """Nothing is known."""
        no_spans = nothing(TABLES["spans"] | {"is_lost": "BOOLEAN"})
        self._db.execute(
            f"CREATE OR REPLACE TEMP TABLE known AS SELECT {KNOWN}, -1 AS level FROM ({no_spans})"
        )

    def place(self, only: str = "") -> None:
        """Makes the spans of `new_spans` known, or only some.

        A span whose parent is not there is at the top. Its parent is still open, or lost, or has
        closed before it did and comes in a later round.
        """
        db = self._db
        left = db.execute(
            f"CREATE OR REPLACE TEMP TABLE asked AS SELECT {_OWN} FROM new_spans n {only}"
        ).fetchone()[0]
        db.execute(
            "DELETE FROM known k USING asked n WHERE k.session = n.session AND k.key = n.key"
        )
        left -= self._know(
            f"LEFT JOIN known p ON {_IS_PARENT} WHERE n.parent_key IS NULL OR p.key IS NOT NULL", 0
        )
        left = self._descend(0, left)
        if left:
            left -= self._know(
                "LEFT JOIN known p ON false ANTI JOIN known k ON k.session = n.session"
                " AND k.key = n.parent_key ANTI JOIN asked o ON o.session = n.session"
                " AND o.key = n.parent_key WHERE n.parent_key IS NOT NULL",
                MAX_LEVELS + 1,
            )
            self._descend(MAX_LEVELS + 1, left)

    def place_round(self) -> None:
        """Makes known what the rest of the round asks for, and what an older one may ask for.

        A table `begun` says when the oldest file of each session was begun.
        """
        self.place(
            f"SEMI JOIN (SELECT DISTINCT session, key FROM ({_ASKED_FOR})) c"
            " ON c.session = n.session AND c.key = n.key"
        )

    def _descend(self, level: int, left: int) -> int:
        """Places what is below a level, and below that. Gives the number that is left."""
        for above in range(level, level + MAX_LEVELS):
            found = left and self._know(
                f"JOIN known p ON {_IS_PARENT} WHERE p.level = {above}", above + 1
            )
            if not found:
                break
            left -= found
        return left

    def _know(self, join: str, level: int) -> int:
        """Makes known the spans that were asked for, given a join with their parents `p`."""
        return int(
            self._db.execute(
                f"INSERT INTO known SELECT {KNOWN}, {level}"
                f" FROM (SELECT {_OWN}, {_PLACE} FROM asked n {join})"
            ).fetchone()[0]
        )

    def keep(self, only: str) -> None:
        """Keeps some of what is known, for the next round."""
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE known AS SELECT k.* REPLACE (-1 AS level)"
            f" FROM known k {only}"
        )

    def keep_older(self) -> None:
        """Keeps what something in an older file may be in."""
        self.keep(
            "LEFT JOIN begun b ON b.session = k.session"
            " WHERE b.at_ns IS NULL OR k.start_ns <= b.at_ns"
        )
