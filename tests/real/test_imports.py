"""What cirron imports: next to nothing at first, and never a framework."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cirron import hooks

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

# What `import cirron` may load on top of what an interpreter has loaded anyway. Each costs time in
# every program: think twice before you add one.
ALLOWED = {
    "__future__",
    "_collections",
    "_contextvars",
    "_operator",
    "collections",
    "contextvars",
    "itertools",
    "keyword",
    "math",
    "operator",
    "reprlib",
}

FRAMEWORKS = {
    *hooks.PRECEDENCE,
    "accelerate",
    "flax",
    "jaxlib",
    "numpy",
    "optax",
    "pandas",
    "pytorch_lightning",
    "scipy",
    "IPython",
    "ipykernel",
}

# All that a program does with the core.
USE = """
import json, sys
before = set(sys.modules)
import cirron as ci

with ci.scope("before"):
    ci.mark("loss", 1.0)
ci.profile(output=["spool", "log", "stdout"], flush_interval=0.05)
for epoch in ci.epochs(range(2)):
    for batch in ci.batches([1, 2]):
        with ci.scope("inner", note=[1, {"a": object()}]):
            ci.mark("loss", 0.5)
ci.flush()
ci.health()
ci.trace()
ci.trace(format="dict")
ci.trace(format="json")
ci.shutdown()
from cirron.cli import main
from cirron import testing
with testing.capture():
    pass
"""


def frameworks_after(scripts: Scripts, body: str) -> set[str]:
    """The frameworks that a script has imported when it ends."""
    ended = scripts.run(
        body + "\nprint('modules', json.dumps(sorted(name for name in sys.modules)), flush=True)"
    )
    assert 0 == ended.status, ended.err
    line = next(line for line in ended.out.splitlines() if line.startswith("modules "))
    top = {name.partition(".")[0] for name in json.loads(line.removeprefix("modules "))}
    return top & FRAMEWORKS


def test_no_framework_is_imported(scripts: Scripts) -> None:
    """Whatever a program does with cirron, no framework is imported that it did not import."""
    assert set() == frameworks_after(scripts, USE)


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_the_check_can_fail(scripts: Scripts, framework: str) -> None:
    """The check above sees a framework that is imported, and naming one imports no other."""
    pytest.importorskip(framework)
    found = frameworks_after(scripts, f"import {framework}\n" + USE)

    assert framework in found
    assert set() == {"torch", "jax"} & found - {framework}


def test_asking_for_a_framework_does_not_import_it(scripts: Scripts) -> None:
    """Hooks wait for the program to import a framework, also when it was asked for by name."""
    asked = USE.replace("output=[", 'frameworks=["torch", "jax"], output=[')

    assert asked != USE
    assert set() == frameworks_after(scripts, asked)


def test_what_import_cirron_loads(scripts: Scripts) -> None:
    """`import cirron` loads a few modules of the standard library, all on the list, and its own."""
    ended = scripts.run(
        """
        import json, sys
        before = set(sys.modules)
        import cirron
        print(json.dumps(sorted(set(sys.modules) - before - set(sys.builtin_module_names))))
        """
    )
    # json is here to print with; a list that is empty without it would prove nothing.
    loaded = {name for name in json.loads(ended.out) if not name.startswith("cirron")}

    assert set() == loaded - ALLOWED


def test_what_import_cirron_does_not_load(scripts: Scripts) -> None:
    """In a bare interpreter `import cirron` loads what is on the list, and no more."""
    ended = scripts.run(
        """
        import sys
        before = set(sys.modules)
        import cirron as ci
        loaded = set(sys.modules) - before
        for slow in ("msgspec", "logging", "typing", "threading", "re", "json", "pathlib", "enum"):
            assert slow not in loaded, slow
        print(*sorted(name for name in loaded if not name.startswith("cirron")))
        print(*sorted(name for name in loaded if name.startswith("cirron")))
        with ci.scope("still"), ci.scope("nothing"):
            ci.mark("more", 1.0)
        print(*sorted(set(sys.modules) - before - loaded))
        """
    )

    others, own, later = ended.out.split("\n")[:3]
    assert (0, "") == (ended.status, ended.err)
    assert set() == set(others.split()) - ALLOWED
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
    } == set(own.split())
    assert "" == later
