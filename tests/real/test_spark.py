"""The queries answer alike on DuckDB and on a real Spark: a master and two workers on loopback."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.questions import ONE_ROW, given_to, outsize

import cirron as ci
from cirron.runs import derived, engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Made
    from tests.real.conftest import Scripts

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # py4j's sockets
]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
LOOPBACK = ("--host", "127.0.0.1", "--webui-port", "0")
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # for processes that live for a minute
CONF = {
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "600m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    # Small queries: to compile them takes longer than to run them.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.log.level": "ERROR",
}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on a cluster of our own, which is stopped whatever happens."""
    pyspark = pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    home = Path(pyspark.__file__).parent
    spark_class = str(home / "bin" / "spark-class")
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{len(started)}.log"
        with open(log, "wb") as out:
            started.append(
                subprocess.Popen(
                    [spark_class, f"org.apache.spark.deploy.{name}", *LOOPBACK, *arguments],
                    env=os.environ | {"SPARK_HOME": str(home), "SPARK_DAEMON_JAVA_OPTS": JAVA},
                    cwd=folder,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        return log

    def said(log: Path, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, log.read_text())):
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain for {pattern!r} in:\n{log.read_text()}")
            time.sleep(0.05)
        return found[0]

    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    gateway: Any = None
    try:
        master = said(start("master.Master", "--port", "0"), r"spark://127\.0\.0\.1:\d+")
        for number in range(2):
            given = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / str(number))]
            said(start("worker.Worker", *given, master), "Successfully registered with master")
        builder = SparkSession.builder.master(master).appName("cirron")
        for name, value in CONF.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        gateway = session.sparkContext._gateway
        yield session
        session.stop()
    finally:
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()  # on which its Java ends
            gateway.proc.wait(PATIENCE_S)
        for process in reversed(started):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.environ.pop("SPARK_LOCAL_IP")
        if before is not None:
            os.environ["SPARK_LOCAL_IP"] = before


def generated(folder: Path) -> None:
    """Two ranks, one of them slow."""
    script = [sys.executable, str(ROOT / "bench" / "spools.py"), str(folder)]
    given = ["--spans", "4000", "--ranks", "2", "--slow-rank", "1"]
    subprocess.run([*script, *given], check=True, stdout=subprocess.DEVNULL)


def odd(made: Made) -> None:
    """Two attempts of two ranks and of a process without one, with all that is out of the ordinary:
    evaluations inside steps and epochs, steps inside steps, threads, ties, open spans, errors,
    values that are no numbers, gradients, and names with quotes, slashes and from other scripts.
    """
    text, inf = 'naïve "text" 名', float("inf")
    values: tuple[float | str, ...] = (0.5, float("nan"), inf, -inf, True, 3, text, 1e-7, 1e22)
    for attempt in range(2):
        for rank in (1, 0, None):
            at = 100_000 * attempt
            of = made(attempt=attempt, rank=rank, start=at, run_id='it\'s a "run"/名: 50%')
            root = of.span("cirron.session", at, at + 9_000)
            for index in range(2 + attempt):
                is_open = attempt == 1 and index == 2
                epoch = of.span("epoch", at, None if is_open else at + 400, root, index, cpu_ns=5)
                of.span("data_load", at, at + 7, epoch)
                for number in range(3 * attempt, 4 + attempt):
                    step = of.span("step", at, at + 60, epoch, number, memory=number)
                    of.span("data_load", at, at + 20 * (rank or 1), step)
                    of.span("data_load", at, at + 50, step, thread=2)
                    of.span("forward", at + 20, at + 30, step, mode="train", gpu_ns=number)
                    of.span('it\'s "odd"/名 😀', at + 30, at + 35, step, error="Boom: 'é'")
                    evaluation = of.span("evaluation", at + 35, at + 50, step)
                    batch = of.span("batch", at + 36, at + 49, evaluation, 0)
                    of.span("step", at + 50, at + 55, step, 0)
                    for value in values:  # at one moment
                        of.mark(step, "text" if isinstance(value, str) else "loss", value, at + 9)
                    of.mark(batch, "loss", 99.0, at + 40)
                    at += 70
                of.span("evaluation", at, at + 30, epoch)
                of.span("checkpoint", at + 30, at + 40, epoch)
                of.mark(epoch, 'it\'s "odd" 名', 0.25, at, "summary")
                for tensor, norm in (("w", 2.0 + index), ("w.grad", 0.5), ("名", None), ("z", 0.0)):
                    of.snapshot(epoch, tensor, norm, at)
                at += 200
            of.write()


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def plain(row: dict[str, Any]) -> list[Any]:
    """The values of a row; marks are JSON, which both write in their own way."""
    marks = json.loads(row.get("marks") or "[]")
    kept = [value for name, value in row.items() if name != "marks"]
    return [*kept, *(list(one.values()) for one in marks)]


def assert_same(folder: Path, spark: Any, queries: list[str]) -> dict[str, int]:
    """Asks both, and says how many rows each query had."""
    here, there = ci.open(folder), ci.open(folder, engine=spark)
    assert here.id == there.id
    counts = {}
    with ThreadPoolExecutor(3) as pool:
        answers = {
            query: pool.submit(there.query(query, **given_to(here, query)).fetch)
            for query in queries
        }
        for query, answer in answers.items():
            expected, found = here.query(query, **given_to(here, query)).fetch(), answer.result()
            assert expected.columns == found.columns, query
            assert len(expected.rows) == len(found.rows), query
            for rows in zip(expected.rows, found.rows, strict=True):
                one, other = (dict(zip(found.columns, row, strict=True)) for row in rows)
                assert is_same(plain(one), plain(other)), (query, one, other)
            counts[query] = len(found.rows)
    first = [plain(row) for row in here.spans.head(5).rows()]
    assert is_same(first, [plain(row) for row in there.spans.head(5).rows()])
    return counts


def test_every_query_over_a_generated_run(spark: Any, tmp_path: Path) -> None:
    """Two ranks with 800 steps: the same rows, and the work was shared by two executors."""
    generated(tmp_path)

    counts = assert_same(tmp_path, spark, engine.queries())
    none = {name for name, count in counts.items() if not count}
    rare = {"asides", "compiles", "failed", "health", "histograms", "long_steps", "marks_since"}
    assert rare | {"texts"} == none
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1  # and the driver
    assert 2 == executors


def test_every_query_over_an_odd_run(spark: Any, made: Made, tmp_path: Path) -> None:
    """Attempts, ties, values that are no numbers, strange names and paths: the same rows."""
    folder = tmp_path / "it's [a] {folder} 100%41 #名"
    odd(lambda **given: made(folder=folder, **given))

    counts = assert_same(folder, spark, engine.queries())
    none = {"compiles", "health", "long_steps"}
    assert none == {name for name, count in counts.items() if not count}


def test_every_query_over_sums_that_64_bits_cannot_hold(
    spark: Any, made: Made, tmp_path: Path
) -> None:
    """They are null for both."""
    outsize(made)

    assert_same(tmp_path, spark, engine.queries())


def test_timelines_from_a_pyramid(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the levels of a large run both draw what DuckDB draws from its spans."""
    generated(tmp_path)
    plain = ci.open(tmp_path)
    length = plain.ended_ns - plain.started_ns
    windows = [
        {
            "from_ns": plain.started_ns + int(length * low),
            "to_ns": plain.started_ns + int(length * high),
            "width": width,
            "last_rank": last_rank,
        }
        for low, high, width, last_rank in ((0, 1, 300, 9), (0.31, 0.64, 50, 0), (0.5, 0.501, 9, 9))
    ]
    expected = [plain.query("timeline", **one).rows() for one in windows]
    monkeypatch.setattr(derived, "MIN_SPANS", 1)
    folder = tmp_path / "levels"
    shutil.copytree(tmp_path / ".cirron" / "spool", folder / ".cirron" / "spool")

    here, there = ci.open(folder), ci.open(folder, engine=spark)
    assert here.sql("SELECT level FROM cells").rows()
    assert all(expected)
    assert expected == [here.query("timeline", **one).rows() for one in windows]
    assert expected == [there.query("timeline", **one).rows() for one in windows]


def test_every_query_over_an_empty_run(spark: Any, made: Made, tmp_path: Path) -> None:
    """A session that recorded nothing: no rows, and no error."""
    made().write()

    counts = assert_same(tmp_path, spark, engine.queries())
    found = {name: count for name, count in counts.items() if count}
    assert dict.fromkeys(ONE_ROW, 1) == found


def test_killed_run(spark: Any, scripts: Scripts) -> None:
    """What only a black box knows is not on the workers' disks, and is in the answers."""
    ended = scripts.run("""
        import os, signal
        import cirron as ci
        ci.profile()
        with ci.scope("outer"):
            with ci.scope("inner"):
                ci.mark("loss", 0.5)
            ci.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert -signal.SIGKILL == ended.status

    assert_same(scripts.folder, spark, ["spans", "outline", "times"])
    opened = ci.open(scripts.folder, engine=spark)
    assert ["killed"] == [row["state"] for row in opened.sql("SELECT state FROM sessions")]
    names = opened.sql("SELECT name FROM spans WHERE end_ns IS NULL ORDER BY depth").rows()
    assert ["cirron.session", "outer"] == [row["name"] for row in names]


def test_two_runs_and_the_users_session(spark: Any, made: Made, tmp_path: Path) -> None:
    """Each run has its own views, frames are those of pandas, Arrow and polars, and the session
    that was given has neither views nor settings of ours.
    """
    for run_id, count in (("first", 1), ("second", 2)):
        of = made(run_id=run_id)
        for _ in range(count):
            of.span("x", 0, 10)
        of.write()
    before = spark.conf.get("spark.sql.ansi.doubleQuotedIdentifiers")

    first, second = (ci.open(tmp_path, run=one, engine=spark) for one in ("first", "second"))
    assert (1, 2, 1) == tuple(
        len(run.sql("SELECT id FROM spans")) for run in (first, second, first)
    )
    assert 20 == second.phases.df()["total_ns"].sum()
    assert [2] == second.phases.arrow()["spans"].to_pylist()
    assert [2] == second.phases.pl()["spans"].to_list()
    assert [] == spark.catalog.listTables()
    assert before == spark.conf.get("spark.sql.ansi.doubleQuotedIdentifiers")
