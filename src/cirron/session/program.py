"""Describes the program: script, arguments, folder, versions, GPUs, commit, tags, configuration.

`Description` copies what may change on the user's thread, and finds the rest on a background
thread. It imports no package and queries no device: the driver's files have the names of GPUs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from cirron import hooks, system, wire
from cirron.record import attrs
from cirron.session import git, masking

if TYPE_CHECKING:
    from collections.abc import Mapping

DRIVER = "/proc/driver/nvidia/gpus"

# Packages whose version is recorded if the program has imported them, besides the frameworks.
PACKAGES = (
    *hooks.PRECEDENCE,
    "accelerate",
    "ciclo",
    "datasets",
    "deepspeed",
    "diffusers",
    "equinox",
    "flax",
    "haiku",
    "jaxlib",
    "numpy",
    "optax",
    "peft",
    "timm",
    "torchvision",
)

MAX_BYTES = 2**16  # of the driver's file for a device
MAX_INT = 2**63


class Description:
    """The facts about a program; more become known while it runs."""

    def __init__(
        self,
        tags: Mapping[str, str],
        config: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        runs_git: bool,
    ) -> None:
        argv = getattr(sys, "argv", None) or [""]  # an embedded interpreter has none
        if "ipykernel" in sys.modules:  # sys.argv is the kernel's
            argv = [environ.get("JPY_SESSION_NAME", "")]
        # Copied together, so that they share the limits of attributes.
        self._given = attrs.preview(
            {"argv": list(argv), "tags": dict(tags), "config": dict(config)}
        )
        self._folder: str | None = None
        with contextlib.suppress(OSError):  # it was removed
            self._folder = os.getcwd()
        self._facts: dict[str, Any] = {}
        self._environ = environ
        self._runs_git = runs_git
        self._status = git.Status(environ)

    @property
    def known(self) -> wire.Program:
        return wire.Program(**self._facts)

    def find_out(self) -> None:
        """Finds the facts that take time, the quickest first. Runs on a background thread."""
        script, *arguments = [str(json_form(one)) for one in self._given["argv"]]
        self._facts |= {
            "script": masking.mask_text(script) or None,
            "arguments": masking.arguments(arguments),
            "folder": self._folder,
            "python": ".".join(map(str, sys.version_info[:3])),
            "tags": self._given["tags"],
            "config": masking.tree(json_form(self._given["config"])),
        }
        self.look_again()
        self._facts["gpus"] = gpus(self._environ)
        places = [self._folder or ""]
        if os.path.isfile(at := os.path.join(places[0], script)):
            places.insert(0, os.path.dirname(os.path.realpath(at)))
        repository = next(filter(None, map(git.find, filter(None, places))), None)
        if repository is not None:
            commit, branch = git.commit(repository)
            self._facts |= {"commit": commit, "branch": branch}
            if self._runs_git:
                self._facts["dirty"] = self._status.ask(repository)

    def look_again(self) -> None:
        """Updates the versions of imported packages. Takes microseconds."""
        self._facts["versions"] = versions()

    def give_up(self) -> None:
        self._status.give_up()

    def after_fork(self) -> None:
        """In a forked child: keeps the facts; a running git is the parent's child."""
        self._status = git.Status(self._environ)


def versions() -> dict[str, str]:
    """The versions of known packages that are imported."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    return {name: str(text) for name, text in found.items() if isinstance(text, str)}


def gpus(environ: Mapping[str, str], driver: str = DRIVER) -> list[str]:
    """The names of the NVIDIA devices that this process may use, from the driver's files.

    Empty if different devices are selected by number: CUDA numbers them in its own order.
    """
    present: list[tuple[str, str]] = []  # id and name
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted(os.listdir(driver)):
            said = system.read_regular(os.path.join(driver, folder, "information"), MAX_BYTES)
            lines = dict(line.partition(":")[::2] for line in said.decode("utf-8").split("\n"))
            present.append((lines.get("GPU UUID", "").strip(), lines.get("Model", "?").strip()))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [name for _, name in present]
    wanted = [one.strip() for one in chosen.split(",")]
    if any(one.startswith("GPU-") for one in wanted):
        return [name for one in wanted for id, name in present if id.startswith(one)]
    count = len([one for one in wanted if one not in ("", "-1")])
    names = {name for _, name in present}
    return [name for _, name in present[:count]] if len(names) == 1 else []


def json_form(value: Any) -> Any:
    """A settled value for JSON; other objects by the name of their class."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: json_form(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_form(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, int):
        return value if -MAX_INT <= value < MAX_INT else hex(value)
    return attrs.name_of(getattr(value, "value", value))
