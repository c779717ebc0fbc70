"""What users may write, as a type checker sees it. Checked by mypy, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, assert_type

import cirron as ci
from cirron import testing
from cirron.verdict.findings import Report

# -- profile ---------------------------------------------------------------------------------

profiler = ci.profile()
assert_type(profiler, ci.Profiler)
assert_type(profiler.config, Mapping[str, Any])
assert_type(profiler.enabled, bool)
assert_type(profiler.health(), dict[str, Any])
assert_type(profiler.flush(), ci.Flushed)
assert_type(profiler.report(), Report)
assert_type(ci.report().verdict.summary, str)
profiler.shutdown()

ci.profile(
    config={"flag": True},
    frameworks=["torch"],
    snapshots="sampled",
    sample_rate=0.05,
    flush_interval=2,
    enabled=True,
    path="traces",
    output=["spool", "log"],
    report=False,
    loss_marks=False,
)
ci.profile({"flag": 1}, None, None, None, None, False, None, "none")
ci.profile(snapshots="all")  # type: ignore[arg-type]
ci.profile(output=3)  # type: ignore[arg-type]
ci.profile(frameworks="torch")  # type: ignore[arg-type]
ci.profile(unknown=1)  # type: ignore[call-arg]

instance = ci.Cirron(api_key="k", api_endpoint="http://localhost", output_dir="x", output="log")
assert_type(instance.profile(), ci.Profiler)
with instance.scope("x"):
    instance.mark("loss", 0.5)

# -- scopes ----------------------------------------------------------------------------------

with ci.scope("plain"):
    pass
with ci.scope("full", index=3, variant="beam", size=2) as scope:
    scope.set(hit=True)
    assert_type(scope.id, str)
    assert_type(scope.index, int | None)
ci.scope(3)  # type: ignore[arg-type]
ci.scope("x", index="3")  # type: ignore[arg-type]


@ci.scope("work")
def work(a: int, b: str = "") -> float:
    return 0.5


@ci.scope("work")
async def work_async(a: int) -> str:
    return ""


@ci.scope("stream")
def stream() -> Iterator[int]:
    yield 1


@ci.scope("stream")
async def stream_async() -> AsyncIterator[bytes]:
    yield b""


assert_type(work(1, b="x"), float)
assert_type(stream(), Iterator[int])
assert_type(stream_async(), AsyncIterator[bytes])
work("1")  # type: ignore[arg-type]


async def use() -> None:
    assert_type(await work_async(1), str)


# -- inference -------------------------------------------------------------------------------


@ci.inference
def predict(a: int, *, b: str = "") -> float:
    return 0.5


@ci.inference(config={"capture_inputs": True, "model": "small"})
async def predict_async(a: int) -> str:
    return ""


@ci.inference()
def words() -> Iterator[str]:
    yield ""


@ci.inference
async def words_async() -> AsyncIterator[bytes]:
    yield b""


class Model:
    @ci.inference
    def predict(self, a: int) -> float:
        return 0.5

    @ci.inference
    @classmethod
    def of_class(cls, a: int) -> float:
        return 0.5

    @staticmethod
    @ci.inference
    def of_none(a: int) -> float:
        return 0.5


assert_type(predict(1, b="x"), float)
assert_type(words(), Iterator[str])
assert_type(words_async(), AsyncIterator[bytes])
assert_type(Model().predict(1), float)
assert_type(Model.of_class(1), float)
assert_type(Model.of_none(1), float)
assert_type(ci.inference(predict, config={})(1), float)
predict("1")  # type: ignore[arg-type]
predict(1, c=1)  # type: ignore[call-arg]
Model().predict("1")  # type: ignore[arg-type]
ci.inference("name")  # type: ignore[call-overload]
ci.inference(config="fast")  # type: ignore[call-overload]


async def use_inference() -> None:
    assert_type(await predict_async(1), str)
    await predict_async("1")  # type: ignore[arg-type]


# -- estimators ------------------------------------------------------------------------------


class Estimator:
    def fit(self) -> Estimator:
        return self

    def get_params(self) -> dict[str, Any]:
        return {}


assert_type(ci.wrap(Estimator()), Estimator)
assert_type(ci.wrap(Estimator()).fit(), Estimator)
assert_type(ci.wrap(3), int)
ci.wrap()  # type: ignore[call-arg]

# -- the environment -------------------------------------------------------------------------

assert_type(ci.env("NAME"), Any)
ci.env("NAME", {"tokens": 256})
ci.env(3)  # type: ignore[arg-type]

# -- marks -----------------------------------------------------------------------------------

ci.mark("loss", 0.5)
ci.mark("loss", 3, kind="summary", split="val")
ci.mark("note", "text", "point")
ci.mark(3, 0.5)  # type: ignore[arg-type]

# -- loops -----------------------------------------------------------------------------------

assert_type(ci.epochs(range(20)), Iterator[int])
assert_type(ci.batches(["a", "b"]), Iterator[str])
for epoch in ci.epochs(range(20)):
    assert_type(epoch, int)
    for index, (left, right) in enumerate(ci.batches([(1, "a")])):
        assert_type(index, int)
        assert_type(left, int)
        assert_type(right, str)
ci.epochs(20)  # type: ignore[arg-type]

# -- reading back and lifecycle --------------------------------------------------------------

ci.trace()
ci.trace(format="df", name="epoch", last=10)
assert_type(ci.health(), dict[str, Any])
flushed = ci.flush()
assert_type(flushed, ci.Flushed)
assert_type(flushed.ok, bool)
assert_type(flushed.on_disk, int)
assert_type(flushed.why, str | None)
ci.shutdown()

# -- the test kit ----------------------------------------------------------------------------

with testing.capture(testing.FakeClock(tick_ns=0)) as captured:
    assert_type(captured, testing.Captured)
    assert_type(captured.text(), str)

# -- what tells runs apart -------------------------------------------------------------------

ci.profile(tags=["baseline"], config={"lr": 0.1})
ci.Cirron(tags={"team": "vision"}).profile(tags=["a"])
ci.profile(tags={"team": 7})  # type: ignore[dict-item]

# -- sinks of one's own ----------------------------------------------------------------------


class Printed:
    """A sink of the user's: one method."""

    def emit(self, batch: ci.Sealed) -> ci.Outcome:
        return ci.Outcome.DONE


class Mistaken:
    """Not a sink: it has no outcome."""

    def emit(self, batch: Any) -> int:
        return 0


ci.profile(sinks=[Printed(), testing.MemorySink()])
ci.Cirron(sinks=(Printed(),)).profile()
ci.profile(sinks=[Mistaken()])  # type: ignore[list-item]
ci.profile(sinks=Printed())  # type: ignore[arg-type]
