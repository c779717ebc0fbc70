"""Computes the position of each span in its tree: path, epoch, step, enclosing spans.

A span closes after everything inside it, and rounds are processed newest first, so the parent of a
span is in the same round or in one processed before. After each round, `known` keeps the spans that
were open when the first spans of the round closed: they may be parents of older spans. Works on
tables of a DuckDB connection.
"""

from __future__ import annotations

from typing import Any

from cirron.runs.store import TABLES, nothing

MAX_LEVELS = 128
# If spans in several threads close at the same time, the first may be written last.
SLACK_NS = 10_000_000

# Limits of the columns, so that no query overflows: times up to the year 2116, and durations of
# which 63 can be added. An index has the limits of a time, because queries subtract one.
LAST_NS = 2**62
LONGEST_NS = 2**57
# Characters of a span's name. A path has the names of all enclosing spans, too.
MAX_NAME = 1_000

# A key is a hash of 63 bits of an id within its session. If a release of DuckDB changed its hash
# function, only spans that were open at the last update of a store would get a second key.
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

# A step directly in a training step is a part of it. Those of an evaluation count on their own.
_IS_OWN_STEP = "is_step(n.name) AND NOT COALESCE(p.is_training_step, false)"
# The position of a span `n`, given its parent `p` in `known`.
_PLACE = f"""
    p.name AS parent_name,
    CASE WHEN p.prefix IS NULL THEN n.name ELSE p.prefix || n.name END AS path,
    COALESCE(p.depth, 0) AS depth,
    CASE WHEN n.name = 'epoch' THEN n.index ELSE p.epoch END AS epoch,
    CASE WHEN n.name = 'epoch' THEN n.key ELSE p.epoch_key END AS epoch_key,
    CASE WHEN {_IS_OWN_STEP} THEN n.index ELSE p.step END AS step,
    CASE WHEN {_IS_OWN_STEP} THEN n.key ELSE p.step_key END AS step_key,
    COALESCE(p.in_evaluation, false) AS in_evaluation,
    COALESCE(p.in_aside, false) AS in_aside,
    is_step(n.name) AND p.step_key IS NULL
        AND NOT COALESCE(p.in_evaluation, false) AS is_training_step,
    COALESCE(p.thread_id = n.thread_id AND p.pid = n.pid, false) AS in_thread,
    COALESCE(p.is_training_step AND p.thread_id = n.thread_id AND p.pid = n.pid, false) AS in_step,
    COALESCE(p.is_lost, n.parent_key IS NOT NULL) AS is_lost
"""
# What `known` has of a span, for its children. `is_lost`: an ancestor is missing, or not yet read.
KNOWN = """session, key, name, path || '/' AS prefix, depth + 1 AS depth, epoch, epoch_key, step,
    step_key, in_evaluation OR is_evaluation(name) AS in_evaluation,
    in_aside OR is_aside(name) AS in_aside, is_training_step, pid, thread_id, start_ns, is_lost"""
_OWN = "n.session, n.key, n.parent_key, n.name, n.index, n.pid, n.thread_id, n.start_ns"
_IS_PARENT = "p.session = n.session AND p.key = n.parent_key"
_IS_SPAN = "p.session = n.session AND p.key = n.span_key"

# The new records of each table with their positions.
PLACED = {
    "spans": f"SELECT n.*, {_PLACE} FROM new_spans n LEFT JOIN known p ON {_IS_PARENT}",
    "marks": "SELECT n.*, p.name AS span_name, p.epoch, p.step, p.step_key,"
    " COALESCE(p.is_lost, n.span_id <> 'root') AS is_lost"
    f" FROM new_marks n LEFT JOIN known p ON {_IS_SPAN}",
    "snapshots": "SELECT n.*, p.epoch, COALESCE(p.is_lost, true) AS is_lost"
    f" FROM new_snapshots n LEFT JOIN known p ON {_IS_SPAN}",
}
# The parents of records in this round, and spans that may be parents of records in older files.
_ASKED_FOR = """
    SELECT session, parent_key AS key FROM new_spans WHERE parent_key IS NOT NULL
    UNION ALL SELECT session, span_key FROM new_marks
    UNION ALL SELECT session, span_key FROM new_snapshots
    UNION ALL SELECT n.session, n.key FROM new_spans n JOIN begun b ON b.session = n.session
        WHERE n.start_ns <= b.at_ns
"""
# Only spans that started before this time can be parents of records in older files: the time when
# the first span of the round closed, in each process that writes as this session. It is the first
# percentile, because a few spans may be written long after they closed.
_BEGUN = f"""
    SELECT session, LEAST(max(at_ns), {2**63 - 1 - SLACK_NS}) + {SLACK_NS} AS at_ns
    FROM (
        SELECT session, quantile_disc(end_ns, 0.01) AS at_ns FROM new_spans GROUP BY session, pid
    )
    GROUP BY session
"""
# `known`, plus the spans in `asked` with their positions, from the top of the tree down.
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
    """The time, within the limits of a column."""
    return min(max(ns, 0), LAST_NS)


class Placement:
    """The table `known` of a connection: possible parents, with their positions."""

    def __init__(self, connection: Any) -> None:
        self._db = connection
        connection.execute(_MACROS)

    def forget(self) -> None:
        """Empties `known`."""
        no_spans = nothing(TABLES["spans"] | {"is_lost": "BOOLEAN"})
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS SELECT {KNOWN} FROM ({no_spans})")

    def place(self, only: str = "") -> None:
        """Adds the spans of `new_spans` to `known`, or only some of them.

        A span whose parent is missing is placed at the top: the parent is still open, is lost, or
        closed before its child and comes in a later round. Spans in a cycle are not added.
        """
        self._db.execute(
            f"CREATE OR REPLACE TEMP TABLE asked AS SELECT {_OWN} FROM new_spans n {only}"
        )
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS {_KNOWN_AND_ASKED}")

    def place_round(self) -> None:
        """Adds the parents of records in this round, and possible parents of older records."""
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE begun AS {_BEGUN}")
        self.place(
            f"SEMI JOIN (SELECT DISTINCT session, key FROM ({_ASKED_FOR})) c"
            " ON c.session = n.session AND c.key = n.key"
        )

    def keep(self, only: str) -> None:
        """Keeps only some spans in `known`, for the next round."""
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE known AS SELECT k.* FROM known k {only}")

    def keep_older(self) -> None:
        """Keeps the possible parents of records in older files."""
        self.keep(
            "LEFT JOIN begun b ON b.session = k.session"
            " WHERE b.at_ns IS NULL OR k.start_ns <= b.at_ns"
        )
