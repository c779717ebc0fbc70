"""The page in the package: built from the sources beside it, small, and with no code inline."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import cirron

ROOT = Path(__file__).parents[2]
VIEWER = ROOT / "viewer"
PAGE = Path(cirron.__file__).parent / "server" / "page"
BESIDE_SOURCES = ("index.html", "package.json", "package-lock.json", "vite.config.ts")


def test_build_is_of_these_sources() -> None:
    """`make page` was run after the last change; as in `vite.config.ts`, files by name."""
    files = [
        path
        for folder in ("src", "public")
        for path in (VIEWER / folder).rglob("*")
        if path.is_file()
    ]
    files += [VIEWER / name for name in BESIDE_SOURCES]
    named = {path.relative_to(VIEWER).as_posix(): path for path in files}
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(name.encode() + b"\0" + named[name].read_bytes() + b"\0")

    built = json.loads((PAGE / "sources.json").read_text())
    assert digest.hexdigest() == built["sha256"], "run `make page` and commit what it builds"


def test_scripts_are_small() -> None:
    """All JavaScript together is below 250 KB compressed."""
    scripts = list(PAGE.rglob("*.js"))

    assert scripts
    assert sum(len(gzip.compress(path.read_bytes())) for path in scripts) < 250_000


def test_page_runs_under_a_strict_policy() -> None:
    """No script or style is inline, nothing is loaded from elsewhere, and nothing is evaluated."""
    html = (PAGE / "index.html").read_text()
    code = "".join(path.read_text() for path in PAGE.rglob("*.js"))

    assert [] == re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\son\w+=|\sstyle=", html)
    assert [] == re.findall(r'(?:src|href)="(?!\./)[^"]*"', html)
    assert [] == re.findall(r"\beval\(|new Function\(", code)


def test_no_registry_is_named() -> None:
    """The lock file says what and not from where: that is up to whoever installs."""
    lock = json.loads((VIEWER / "package-lock.json").read_text())

    assert lock["packages"]
    assert [] == [name for name, its in lock["packages"].items() if "resolved" in its]
