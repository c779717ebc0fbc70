"""Where each span of a round is in its tree: its path, its epoch and step, what it is inside of.

A span closes after all that is inside of it, and rounds are taken newest first, so the parents of
a round's spans are in it, or were in one before: of each round, what began before its first spans
closed is kept (`known`). Works on tables of a DuckDB connection.
"""

from __future__ import annotations

from typing import Any

from cirron.runs.store import TABLES, nothing

MAX_LEVELS = 128
# Of spans that close at the same time in several threads, the first may be written last.
SLACK_NS = 10_000_000

# What columns are cut to, so that no query fails for a number that no clock has shown: the year
# 2116, and a length of which 63 can be added up. Of an index, queries also take the one before.
LAST_NS = 2**62
LONGEST_NS = 2**57
# Of a span: its path has its own name after those of all that it is inside of.
MAX_NAME = 1_000

# 63 bits that stand for an id within its session. A DuckDB that hashes in another way splits only
# the spans that were open when a store was last brought up to date.
_MACROS = f"""
CREATE OR REPLACE TEMP MACRO key_of(id) AS
    CASE WHEN id IS NOT NULL THEN CAST(hash(id) >> 1 AS BIGINT) END;
CREATE OR REPLACE TEMP MACRO within(number, least, most) AS
    CASE WHEN number IS NOT NULL THEN GREATEST(LEAST(number, most), least) END;
CREATE OR REPLACE TEMP MACRO moment(ns) AS within(ns, 0, {LAST_NS});
CREATE OR REPLACE TEMP MACRO length_of_time(ns) AS within(ns, 0, {LONGEST_NS});
CREATE OR REPLACE TEMP MACRO ordinal(number) AS within(number, -{LAST_NS}, {LAST_NS});
CREATE OR REPLACE TEMP MACRO short(name) AS left(name, {MAX_NAME});
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
# Until when a span must have begun that something in an older file is in: until the first of the
# round closed, of each process that writes as this session. It is the first hundredth, since a few
# may have been written long after they closed.
_BEGUN = f"""
    SELECT session, LEAST(max(at_ns), {2**63 - 1 - SLACK_NS}) + {SLACK_NS} AS at_ns
    FROM (
        SELECT session, quantile_disc(end_ns, 0.01) AS at_ns FROM new_spans GROUP BY session, pid
    )
    GROUP BY session
"""
# What was known, with the spans in `asked` and their places, from the top of the tree down.
_KNOWN_AND_ASKED = f"""
    WITH RECURSIVE placed AS (
        SELECT {KNOWN}, 0 AS level
        FROM (
            SELECT {_OWN}, {_PLACE}
            FROM asked n
            LEFT JOIN known p ON {_IS_PARENT}
            ANTI JOIN asked o ON o.session = n.session AND o.key = n.parent_key
        )
        UNION ALL
        SELECT {KNOWN}, level
        FROM (
            SELECT {_OWN}, {_PLACE}, p.level + 1 AS level
            FROM asked n
            JOIN placed p ON {_IS_PARENT}
            WHERE p.level < {MAX_LEVELS}
        )
    )
    SELECT * EXCLUDE (level) FROM placed
    UNION ALL
    SELECT k.* FROM known k ANTI JOIN asked n ON n.session = k.session AND n.key = k.key
"""


def moment(ns: int) -> int:
    """The nearest moment that a column may have."""
    return min(max(ns, 0), LAST_NS)


class Placement:
    """The table `known` of a connection: spans that others may be in, and where these are."""

    def __init__(self, connection: Any) -> None:
        self._db = connection
        connection.execute(_MACROS)

    def forget(self) -> None:
        """Nothing is known."""
        no_spans = nothing(TABLES["spans"] | {"is_lost": "BOOLEAN"})
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS SELECT {KNOWN} FROM ({no_spans})")

    def place(self, only: str = "") -> None:
        """Makes the spans of `new_spans` known, or only some.

        A span whose parent is not there is at the top. Its parent is still open, or lost, or has
        closed before it did and comes in a later round. What is in a cycle stays unknown.
        """
        self._db.execute(
            f"CREATE OR REPLACE TEMP TABLE asked AS SELECT {_OWN} FROM new_spans n {only}"
        )
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS {_KNOWN_AND_ASKED}")

    def place_round(self) -> None:
        """Makes known what the rest of the round asks for, and what an older one may ask for."""
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE begun AS {_BEGUN}")
        self.place(
            f"SEMI JOIN (SELECT DISTINCT session, key FROM ({_ASKED_FOR})) c"
            " ON c.session = n.session AND c.key = n.key"
        )

    def keep(self, only: str) -> None:
        """Keeps some of what is known, for the next round."""
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS SELECT k.* FROM known k {only}")

    def keep_older(self) -> None:
        """Keeps what something in an older file may be in."""
        self.keep(
            "LEFT JOIN begun b ON b.session = k.session"
            " WHERE b.at_ns IS NULL OR k.start_ns <= b.at_ns"
        )
