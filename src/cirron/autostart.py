"""Profiles the process that `cirron run` starts, and its child processes, without changing them.

`cirron run` sets an environment variable, and `site/sitecustomize.py` calls `begin` before the
program runs. The program itself is profiled immediately. A child is profiled when it imports a
framework, so that the many small helpers of a training leave no sessions. Launchers are not
profiled.
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

# The same as `hooks.PRECEDENCE`, which takes too long to import in every small helper process.
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
# Programs that start other programs, or that are tools of a framework: the name of the script, or
# of the module after `-m`.
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
    """The environment for a program whose Python processes are profiled as one run."""
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
    """The script or module that this process runs, and its future `sys.argv`."""
    argv = list(sys.argv) or [""]
    if argv[0] != "-m":
        return argv[0], argv
    at = len(sys.orig_argv) - len(argv)  # while Python starts, sys.argv[0] is "-m"
    name = sys.orig_argv[at].removeprefix("-m") if 0 < at < len(sys.orig_argv) else ""
    return name, [f"-m {name}", *argv[1:]]


def start(argv: list[str] | None = None) -> None:
    """Profiles this process from now on."""
    given = sys.argv
    try:
        from cirron import session

        if argv is not None:
            sys.argv = argv  # recorded as the command line
        session.begin_by_itself()
    except Exception as error:  # noqa: BLE001  protects the program: it runs without a profiler
        print(f"cirron: this process is not profiled: {error}", file=sys.stderr)
    finally:
        sys.argv = given


class WaitForFramework:
    """An import finder that starts profiling at the first import of a framework."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Starts the profiler, and leaves the import to the other finders."""
        if name not in FRAMEWORKS or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        start()
        # `start` may have added the hooks' finder to the list that Python is iterating over.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
