"""How calls of loggers are read, and what of them is marked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import cirron as ci
from cirron import testing
from cirron.hooks import loggers
from cirron.record import hot


class TestReading:
    """A call is read as the logger would read it."""

    @pytest.mark.parametrize(
        ("logger", "method", "args", "kwargs", "found"),
        [
            ("tensorboard", "add_scalar", ("a", 1, 2, 3.0), {}, [("a", 1, 2)]),
            ("tensorboard", "add_scalar", (), {"tag": "a", "scalar_value": 1}, [("a", 1, None)]),
            ("tensorboard", "add_scalars", ("a", {"b": 1}), {"global_step": 2}, [("a/b", 1, 2)]),
            ("tensorboard", "add_image", ("a", object()), {}, [(None, None, None)]),
            ("wandb", "log", ({"a": 1},), {"commit": True}, [("a", 1, None)]),
            ("wandb", "log", (), {}, [(None, None, None)]),
            ("mlflow", "log_metric", ("run", "a", 1, 99, 2, True), {}, [("a", 1, 2)]),
            ("comet", "log_metrics", ({"a": 1},), {"prefix": "p"}, [("p/a", 1, None)]),
            ("aim", "track", ({"a": 1},), {"step": 2, "context": {}}, [("a", 1, 2)]),
        ],
    )
    def test_arguments_are_found_by_position_or_name(
        self, logger: str, method: str, args: Any, kwargs: Any, found: Any
    ) -> None:
        """By position or by name; other arguments are ignored."""
        methods = next(one.methods for one in loggers.LOGGERS if one.name == logger)

        assert found == loggers.read(methods[method], args, kwargs)

    def test_metrics_that_can_be_read_once(self) -> None:
        """A generator is the logger's to read."""
        metrics = (SimpleNamespace(key=key, value=1, step=0) for key in "ab")
        found = loggers.read(loggers.MLFLOW["log_batch"], ("run", metrics), {})

        assert [(None, metrics, None)] == found
        assert 2 == len(list(metrics))

    def test_dicts_in_dicts(self) -> None:
        """Names are joined by a slash; a key that is no text is left out."""
        found = loggers.flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}, 4: 5}, None)

        assert [("a", 1, None), ("b/c", 2, None), ("b/d/e", 3, None)] == found

    def test_endless_dicts_are_read_up_to_a_limit(self) -> None:
        """A dict that holds itself, or very many values, is read up to a limit."""
        endless: dict[str, Any] = {"a": 1}
        endless["b"] = endless
        large = {str(number): number for number in range(10 * loggers.MAX_VALUES)}

        assert loggers.MAX_VALUES > len(loggers.flatten(endless, None)) > 0
        assert loggers.MAX_VALUES == len(loggers.flatten(large, None))


class TestMarks:
    """What is marked of that."""

    @pytest.fixture(autouse=True)
    def names(self) -> Any:
        hot.keep_names(True)
        yield
        hot.keep_names(False)

    @pytest.mark.parametrize("given", ["text", None, [1.0], {"a": 1}, object(), 1j, b"1"])
    def test_values_that_are_not_scalars_are_skipped(self, given: Any) -> None:
        """What is no scalar is left alone, and nothing is raised."""
        with testing.capture() as captured, ci.scope("step") as span:
            loggers.mark(span, "x", "a", given, 1)

        assert [] == captured.marks

    @pytest.mark.parametrize(
        ("step", "attrs"), [(None, {}), (3, {"step": 3}), ("3", {}), (object(), {})]
    )
    def test_a_numeric_step_becomes_an_attribute(self, step: Any, attrs: Any) -> None:
        """A step that is a number is an attribute."""
        with testing.capture() as captured, ci.scope("step") as span:
            loggers.mark(span, "x", "a", 1.0, step)

        assert [{"logger": "x", **attrs}] == [mark.attrs for mark in captured.marks]

    def test_each_name_has_one_source_per_span(self) -> None:
        """The first source of a name is the only one in a span."""
        with testing.capture() as captured, ci.scope("step") as span:
            ci.mark("own", 0)
            for logger in ("x", "x", "y"):
                loggers.mark(span, logger, "own", 1, None)
                loggers.mark(span, logger, "other", 1, None)

        assert ["own", "other", "other"] == [mark.name for mark in captured.marks]

    def test_names_that_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A span keeps so many names, and none while nobody asks for them."""
        monkeypatch.setattr(hot, "MAX_MARKED", 2)
        with testing.capture(), ci.scope("step") as span:
            for name in "abc":
                ci.mark(name, 1)
            assert {"a", "b"} == set(span.marked)
        hot.keep_names(False)
        with testing.capture(), ci.scope("step") as span:
            ci.mark("a", 1)
            assert not hasattr(span, "marked")


def test_every_logger_has_its_own_name() -> None:
    """Marks say which logger they come from."""
    names = [logger.name for logger in loggers.LOGGERS]

    assert len(names) == len(set(names))
