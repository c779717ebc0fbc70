"""Which frameworks are hooked: those that are asked for, installed, and new enough."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import cirron as ci
from cirron import errors, hooks


@pytest.mark.parametrize("name", ["transformers", "lightning", "keras", "tensorflow", "jax"])
def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Asking for it is an error that says so, and what to do."""
    monkeypatch.setattr(hooks, "is_installed", lambda module: False)

    with pytest.raises(errors.SettingError, match=f"{name} is not installed. Install it, or leave"):
        ci.profile(frameworks=[name])


@pytest.mark.parametrize(
    ("asked", "name", "version", "oldest"),
    [
        ("keras", "keras", "2.15.0", "3.12"),
        ("tensorflow", "keras", "2.15.0", "3.12"),  # which means Keras on it
        ("transformers", "transformers", "4.30.2", "4.57"),
        ("jax", "jax", "0.4.30", "0.6"),
    ],
)
def test_an_older_release(
    asked: str,
    name: str,
    version: str,
    oldest: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A release that is older than the table says is left alone, and one line says so."""
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    for one in (name, hooks.HOOKS[name][0]):
        monkeypatch.setitem(sys.modules, one, module)
    monkeypatch.setattr(hooks, "is_installed", lambda module: True)
    ci.profile(frameworks=[asked], output="none")

    assert [] == ci.health()["frameworks_installed"]
    said = f"{name} {version} is not hooked: cirron supports {oldest} and newer"
    assert said in caplog.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5.22.2", (5, 22, 2)), ("2.13.0+cpu", (2, 13)), ("5.0.0rc1", (5, 0)), (None, None)],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, text: Any, expected: Any) -> None:
    """A release is read as far as it is a number."""
    module = ModuleType("made_up")
    module.__version__ = text  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up", module)

    assert expected == hooks.version("made_up")
