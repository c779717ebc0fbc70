"""PyTorch that is imported after `profile()`, before it, or not at all."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from tests.real.conftest import Scripts


def test_profile_before_torch(scripts: Scripts) -> None:
    """The hook is installed when the program imports torch, and we do not import it."""
    ended = scripts.run("""
        import sys
        import cirron as ci

        ci.profile(output="none")
        print("torch" in sys.modules, ci.health()["frameworks_installed"])
        import torch
        print(ci.health()["frameworks_installed"], type(torch.__loader__).__name__)
        torch.nn.Linear(2, 1)(torch.ones(1, 2))
        (root,) = ci.trace(format="dict")["roots"]
        print([span["name"] for span in root["children"]])
        ci.shutdown()
        print([finder for finder in sys.meta_path if "cirron" in type(finder).__module__])
    """)

    lines = ["False []", "['torch'] SourceFileLoader", "['forward']", "[]", ""]
    assert (0, "", lines) == (ended.status, ended.err, ended.out.split("\n"))


def test_asking_for_torch_without_torch(scripts: Scripts) -> None:
    """`frameworks=["torch"]` where torch is not installed says so; without it all is well."""
    ended = scripts.run("""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Blocked())
        import cirron as ci

        try:
            ci.profile(frameworks=["torch"])
        except ValueError as error:
            print(error)
        ci.profile(output="none")
        print(ci.health()["frameworks_installed"])
    """)

    said = "frameworks=['torch']: torch is not installed. Install it, or leave it out"
    assert (0, "", f"{said}\n[]\n") == (ended.status, ended.err, ended.out)


def test_what_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error where the finders just do not find it."""
    find = PathFinder.find_spec

    def find_spec(name: str, *others: Any) -> Any:
        return None if name == "torch" else find(name, *others)

    monkeypatch.setattr(PathFinder, "find_spec", staticmethod(find_spec))
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    with pytest.raises(ci.errors.SettingError, match="torch is not installed"):
        ci.profile(frameworks=["torch"])
