"""Begins to profile a process that `cirron run` started, or a child of one, without its help.

`cirron run` leaves word in the environment; `site/sitecustomize.py` calls `begin` before the
program runs. The program itself is profiled at once, a child as soon as it imports a framework, so
that the many small helpers that a training starts leave no sessions. Launchers are not profiled.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# The process id of `cirron run`.
VARIABLE = "CIRRON_AUTOSTART"
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

# Those of `hooks.PRECEDENCE`: every small helper that a program starts would pay for that import.
FRAMEWORKS = {
    "jax",
    "keras",
    "lightgbm",
    "lightning",
    "pytorch_lightning",
    "sklearn",
    "tensorflow",
    "torch",
    "transformers",
    "xgboost",
}
# Programs that start the ones to look at, or that are tools of a framework: by the name of the
# script, or by the module after `-m`.
LAUNCHERS = {
    "torchrun",
    "accelerate",
    "deepspeed",
    "pip",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch._inductor.compile_worker",
}
HELPERS = (os.path.join("torch", "_inductor", "compile_worker", "__main__.py"),)


def environment(environ: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The environment for a program whose Python processes are to be profiled, as one run."""
    path = [SITE, *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(path),
        "CIRRON_PARENT_RUN": environ.get("CIRRON_PARENT_RUN", run_id),
    }


def begin() -> None:
    """Profiles this process now or later, or not at all. Never raises."""
    name, argv = program()
    script = sys.argv[0] if sys.argv else ""
    if os.path.basename(name) in LAUNCHERS or script.endswith(HELPERS):
        return
    if os.environ.get(VARIABLE) == str(os.getppid()):
        start(argv)
    else:
        sys.meta_path.insert(0, WaitForFramework())


def program() -> tuple[str, list[str]]:
    """What this process runs, and its arguments as `sys.argv` will have them."""
    argv = list(sys.argv) or [""]
    if argv[0] != "-m":
        return argv[0], argv
    at = len(sys.orig_argv) - len(argv)  # while Python starts, "-m" stands for the module's file
    name = sys.orig_argv[at].removeprefix("-m") if 0 < at < len(sys.orig_argv) else ""
    return name, [f"-m {name}", *argv[1:]]


def start(argv: list[str] | None = None) -> None:
    """Profiles this process from now on."""
    given = sys.argv
    try:
        from cirron import session

        if argv is not None:
            sys.argv = argv  # what is recorded as having run
        session.begin_by_itself()
    except Exception as error:  # noqa: BLE001  protects the program: it runs without a profiler
        print(f"cirron: this process is not profiled: {error}", file=sys.stderr)
    finally:
        sys.argv = given


class WaitForFramework:
    """In `sys.meta_path`: sees the first import of a framework, before it is done."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Starts the profiler, and leaves the import to those after it."""
        if name not in FRAMEWORKS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        start()
        # The list has changed under the loop that called this: the hooks' finder may be new in it.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
