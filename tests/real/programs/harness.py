"""Runs a program plain or profiled, and makes text of the tree that it leaves.

Reads the spool's files by itself: what the package's own reader makes of them is another matter.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Attributes that say what a span is; the others are measurements.
SHOWN = (
    "inferred",
    "model",
    "skipped",
    "optimizer_skipped",
    "truncated",
    "error",
    "function",
    "global_step",
)
PHASES = ("trace", "lower", "compile")  # of a function that JAX compiles
PROFILE = "import cirron as ci\nci.profile()\n"
# A program that needs nothing but torch is run in a fork of a process that has imported it.
PLAIN_IMPORTS = {"torch", "numpy", "common"} | set(sys.stdlib_module_names)
PRELOADED = ("torch", "torch.utils.data", "torch.optim.swa_utils", "torch.distributed", "numpy")
PRELOADED += ("torch._dynamo",)  # which the first optimizer step imports


@dataclass
class Program:
    """A script, and how it is run."""

    path: Path
    launcher: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    is_heavy: bool = False

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_plain(self) -> bool:
        """Whether it needs torch alone."""
        source = self.path.read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.M))
        is_alone = not self.launcher and not self.env and "multiprocessing" not in source
        return is_alone and imported <= PLAIN_IMPORTS

    @property
    def expected(self) -> str:
        return self.path.with_suffix(".tree").read_text()


def programs() -> list[Program]:
    return [read(path) for path in sorted(HERE.glob("*.py")) if path.with_suffix(".tree").exists()]


def read(path: Path) -> Program:
    program = Program(path)
    for line in path.read_text().splitlines():
        key, _, value = line.removeprefix("# ").partition(":")
        if not line.startswith("#"):
            break
        if key == "run":
            program.launcher = shlex.split(value)
        elif key == "env":
            program.env.update(one.split("=", 1) for one in shlex.split(value))
        elif key == "heavy":
            program.is_heavy = True
    return program


@dataclass
class Run:
    """What a run has printed and left."""

    result: dict[str, Any]
    folder: Path
    log: str


def run(program: Program, *, profiled: bool, folder: Path) -> Run:
    """In a process of its own, in an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if program.is_plain:
        status, out, err = forked(program, profiled=profiled, folder=folder)
    else:
        status, out, err = started(program, profiled=profiled, folder=folder)
    assert status == 0, out + err
    lines = [line for line in out.splitlines() if "RESULT {" in line]
    assert lines, out + err
    return Run(json.loads(lines[-1].partition("RESULT ")[2]), folder, out + err)


def started(program: Program, *, profiled: bool, folder: Path) -> tuple[int, str, str]:
    script = program.path
    if profiled:
        script = folder / script.name
        script.write_text(with_profile(program.path.read_text()))
    launcher = program.launcher
    if launcher[:1] == ["torchrun"]:
        launcher = ["-m", "torch.distributed.run", *launcher[1:]]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        env={**environment(), **program.env},
        text=True,
        capture_output=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


def with_profile(source: str) -> str:
    """With the lines that a user adds, where a process that is spawned runs them again."""
    lines = source.splitlines(keepends=True)
    place = next(
        number
        for number, line in enumerate(lines)
        if line.startswith(("import ", "from ")) and "__future__" not in line
    )
    return "".join([*lines[:place], PROFILE, *lines[place:]])


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "CIRRON_REPORT": "0",
    }


# -- forks ------------------------------------------------------------------------------------


@functools.cache
def server() -> subprocess.Popen[str]:
    """A process that has imported torch, and nothing of ours."""
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )


def forked(program: Program, *, profiled: bool, folder: Path) -> tuple[int, str, str]:
    process = server()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([str(program.path), profiled, str(folder)]) + "\n")
    process.stdin.flush()
    status = int(process.stdout.readline())
    return status, (folder / "out.txt").read_text(), (folder / "err.txt").read_text()


def serve() -> None:
    """Runs each program that it is told of in a fork, and answers with its exit status."""
    for name in PRELOADED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        path, profiled, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for number, name in ((1, "out.txt"), (2, "err.txt")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if profiled:
                import cirron as ci

                ci.profile()
            sys.argv = [path]
            sys.path[0] = str(HERE)
            runpy.run_path(path, run_name="__main__")
            sys.exit(0)  # as a script ends: what is registered for the exit runs
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


# -- the tree ---------------------------------------------------------------------------------


def records(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Spans and marks, each once, and the sessions that they are of, by a span's id."""
    spans: dict[str, Any] = {}
    marks: dict[str, Any] = {}
    sessions: dict[str, Any] = {}
    for path in sorted(folder.glob("**/.cirron/spool/*.json")):
        batch = json.loads(path.read_text())
        for span in batch["spans"]:
            spans[span["id"]] = span
            sessions[span["id"]] = batch["session"]
        for mark in batch["marks"]:
            marks[mark["id"]] = mark
    return list(spans.values()), list(marks.values()), sessions


def counted(folder: Path) -> Counter[str]:
    """How many spans there are of each name."""
    return Counter(span["name"] for span in records(folder)[0])


def tree(folder: Path) -> str:
    """The whole run as text: equal processes once."""
    spans, marks, sessions = records(folder)
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    ids = {span["id"] for span in spans}
    times = {span["id"]: (span["start_ns"], span["end_ns"]) for span in spans}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda one: (one["start_ns"], -(one["end_ns"] or 0), one["id"])):
        if not is_shown(span, source):
            continue
        parent = span["parent_id"]
        assert parent is None or parent in ids, f"{span['name']} has an unknown parent"
        assert is_inside(span, times.get(parent)), f"{span['name']} is not inside its parent"
        children.setdefault(parent, []).append(span)
    names: dict[str, set[str]] = {}
    for mark in marks:
        names.setdefault(mark["span_id"], set()).add(mark["name"])

    def lines(siblings: list[dict[str, Any]], depth: int) -> list[str]:
        shown = [
            (label(one, names), lines(children.get(one["id"], []), depth + 1)) for one in siblings
        ]
        out: list[str] = []
        place = 0
        while place < len(siblings):
            last = place
            while last + 1 < len(siblings) and shown[last + 1] == shown[place]:
                if not follows(siblings[last], siblings[last + 1]):
                    break
                last += 1
            text, below = shown[place]
            named = text.replace("#", numbers(siblings[place : last + 1]))
            out.append("  " * depth + " ".join(named.split()))
            out += below
            place = last + 1
        return out

    roots = children.get(None, [])
    ranks = {one["id"]: sessions[one["id"]]["rank"] for one in roots}
    texts: dict[str, list[Any]] = {}
    for root in sorted(roots, key=lambda one: (ranks[one["id"]] is not None, ranks[one["id"]])):
        texts.setdefault("\n".join(lines([root], 0)), []).append(ranks[root["id"]])
    out = []
    for text, its_ranks in texts.items():
        first, newline, rest = text.partition("\n")
        of = [str(rank) for rank in its_ranks if rank is not None]
        note = (
            f" rank {', '.join(of)}" if of else f" x{len(its_ranks)}" if len(its_ranks) > 1 else ""
        )
        out.append(first + note + newline + rest)
    return "\n".join(out) + "\n"


def is_shown(span: dict[str, Any], source: str) -> bool:
    """All but what JAX compiles for itself and its libraries: that is another with each release."""
    function = span["attrs"].get("function")
    return span["name"] not in PHASES or function is None or f"def {function}(" in source


def is_inside(span: dict[str, Any], parent: tuple[int, int] | None) -> bool:
    return parent is None or parent[0] <= span["start_ns"] <= span["end_ns"] <= parent[1]


def label(span: dict[str, Any], marks: dict[str, set[str]]) -> str:
    attrs = span["attrs"]
    parts = [span["name"], "#"]
    if "mode" in attrs:
        parts.append(attrs["mode"])
    for key in SHOWN:
        if key in attrs and key != "global_step":
            parts.append(f"{key}={str(attrs[key]).partition(':')[0]}")
    if span["id"] in marks:
        parts.append(f"[{', '.join(sorted(marks[span['id']]))}]")
    return " ".join(parts)


def follows(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["index"] is None or other["index"] is None:
        return one["index"] is other["index"]
    return bool(other["index"] == one["index"] + 1)


def numbers(equal: list[dict[str, Any]]) -> str:
    first, last = equal[0]["index"], equal[-1]["index"]
    if first is None:
        return f"x{len(equal)}" if len(equal) > 1 else ""
    return str(first) if first == last else f"{first}-{last}"


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            plain = run(read(HERE / f"{name}.py"), profiled=False, folder=Path(folder) / "plain")
            ours = run(read(HERE / f"{name}.py"), profiled=True, folder=Path(folder) / "profiled")
            print(tree(ours.folder), end="")
            print("the same result" if plain.result == ours.result else "ANOTHER RESULT")
            print(plain.result, dict(counted(ours.folder)), sep="\n")


if __name__ == "__main__":
    main()
