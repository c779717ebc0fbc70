"""The public list: what `import cirron` gives, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import cirron as ci
from cirron import errors

PUBLIC = [
    "Cirron",
    "CirronError",
    "Flushed",
    "InputError",
    "MissingDependencyError",
    "Outcome",
    "Profiler",
    "ScopeReusedError",
    "Sealed",
    "SettingError",
    "UnknownRunError",
    "__version__",
    "batches",
    "env",
    "epochs",
    "flush",
    "health",
    "inference",
    "mark",
    "open",
    "profile",
    "report",
    "scope",
    "shutdown",
    "trace",
    "watch",
    "wrap",
]
LAZY = sorted(set(ci.__all__) - {"__version__", "batches", "epochs", "mark", "scope"})


def run(script: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_the_list_is_what_is_exported() -> None:
    """`__all__` is sorted, and is exactly what can be had; `dir` shows it."""
    exported = {
        name
        for name, value in vars(ci).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }

    assert PUBLIC == ci.__all__
    assert sorted(ci.__all__) == sorted(set(ci.__all__))
    assert exported - {"TYPE_CHECKING"} <= set(ci.__all__)
    assert sorted(ci.__all__) == dir(ci)
    assert all(getattr(ci, name) is not None for name in ci.__all__)


@pytest.mark.parametrize("name", [name for name in ci.__all__ if name != "__version__"])
def test_every_name_has_a_docstring(name: str) -> None:
    """Each public name says what it is, in its first line; so do its public methods."""
    value = getattr(ci, name)

    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for method_name, method in inspect.getmembers(value, inspect.isfunction):
            if not method_name.startswith("_"):
                assert inspect.getdoc(method), f"{name}.{method_name}"


@pytest.mark.parametrize("name", LAZY)
def test_lazy_names_are_the_things_themselves(name: str) -> None:
    """A name that is loaded on first use is from then on an attribute like any other."""
    script = (
        f"import cirron as ci; before = {name!r} in vars(ci); ci.{name};"
        f"print(before, {name!r} in vars(ci), ci.{name} is vars(ci)[{name!r}])"
    )

    assert "False True True" == run(script)


def test_star_import() -> None:
    """`from cirron import *` gives the public names."""
    names: dict[str, Any] = {}
    exec("from cirron import *", names)

    assert set(ci.__all__) - {"__version__"} <= set(names)


@pytest.mark.parametrize("name", ["profil", "Scope", "hot", "__wrapped__"])
def test_unknown_names(name: str) -> None:
    """A name that does not exist is an AttributeError that shows it."""
    if name == "hot":
        name = "hott"
    with pytest.raises(AttributeError, match=f"module 'cirron' has no attribute '{name}'"):
        getattr(ci, name)


def test_public_functions_are_the_real_ones() -> None:
    """The recording functions are bound directly: nothing forwards to them."""
    from cirron.record import hot

    assert (hot.scope, hot.mark, hot.epochs, hot.batches) == (
        ci.scope,
        ci.mark,
        ci.epochs,
        ci.batches,
    )
    assert (hot.scope, hot.mark) == (ci.Cirron.scope, ci.Cirron.mark)


def test_what_a_flush_says() -> None:
    """`ci.Flushed` and `ci.Outcome` are what users compare with."""
    assert ("ok", "on_disk", "sent", "held", "lost", "why") == ci.Flushed._fields
    assert ["DONE", "HELD", "DROPPED"] == [outcome.name for outcome in ci.Outcome]
    assert isinstance(ci.flush(), ci.Flushed)


def test_version() -> None:
    """The version is a text that packaging knows."""
    from importlib.metadata import version

    assert version("cirron") == ci.__version__


def test_the_error_tree() -> None:
    """Every error of ours is a CirronError and the built-in kind that callers expect."""
    assert issubclass(ci.SettingError, ValueError)
    assert issubclass(ci.InputError, TypeError)
    assert issubclass(ci.ScopeReusedError, ci.InputError)
    assert issubclass(ci.MissingDependencyError, ImportError)
    for name in ci.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(ci, name), ci.CirronError)


def test_a_missing_package_says_what_to_install() -> None:
    """The error for a missing extra has the pip line."""
    said = "ci.trace(format='df') needs pandas, which is not installed: pip install pandas"

    assert said == str(errors.missing("ci.trace(format='df')", "pandas"))


def test_without_pandas() -> None:
    """Where pandas is absent, the data frame is an ImportError with the pip line, and no more."""
    script = (
        "import sys; sys.modules['pandas'] = None\n"
        "import cirron as ci\n"
        "try: ci.trace(format='df')\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )

    assert run(script).startswith("MissingDependencyError ci.trace(format='df') needs pandas")
    assert "pip install pandas" in run(script)


HEAVY = (
    "msgspec",
    "logging",
    "typing",
    "asyncio",
    "inspect",
    "urllib3",
    "click",
    "pathlib",
    "json",
)


def test_the_import_is_light() -> None:
    """`import cirron` loads nothing of others, and recording works from there."""
    script = (
        "import sys; before = set(sys.modules); import cirron as ci;"
        "ci.mark('a', 1)\nwith ci.scope('x'): pass\n"
        "print(sorted(set(sys.modules) - before))"
    )
    loaded = eval(run(script))
    ours = {name for name in loaded if name.split(".")[0] == "cirron"}

    assert {
        "cirron",
        "cirron._version",
        "cirron.errors",
        "cirron.guard",
        "cirron.record",
        "cirron.record.attrs",
        "cirron.record.clock",
        "cirron.record.hot",
        "cirron.record.value",
    } == ours
    assert set() == {name for name in loaded if name.split(".")[0] in HEAVY}


def test_the_check_of_imports_can_fail() -> None:
    """The same script sees a module that is imported."""
    script = (
        "import sys; before = set(sys.modules); import cirron as ci; ci.profile;"
        "print(sorted(set(sys.modules) - before))"
    )

    assert "'msgspec'" in run(script)


class TestHints:
    """Common slips get an answer that can be typed."""

    def test_a_decorator_without_a_name(self) -> None:
        """`@ci.scope` without a name shows the line to write."""
        with pytest.raises(TypeError, match=r'write @ci\.scope\("train"\) above the function'):

            @ci.scope  # type: ignore[arg-type]
            def train() -> None: ...

    def test_a_path_is_called_path(self) -> None:
        """The error for `path=` names what was typed."""
        with pytest.raises(ValueError, match="path=3 is not valid"):
            ci.profile(path=3)  # type: ignore[arg-type]

    def test_a_path_that_no_system_takes(self) -> None:
        """A path with a zero byte is refused before anything is touched."""
        with pytest.raises(ValueError, match="path="):
            ci.profile(path="a\0b")

    def test_decorating_something_else(self) -> None:
        """A scope decorates what can be called."""
        with pytest.raises(TypeError, match="a scope decorates functions; got 3"):
            ci.scope("x")(3)  # type: ignore[type-var]
