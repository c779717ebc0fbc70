"""`ci.env`: the environment first, then the nearest `.env` file, JSON where a value looks so."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    (folder / ".env").write_bytes(data)


def test_the_environment_wins_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment is its text; one that is not there is the default."""
    monkeypatch.setenv("MODEL", "small")

    assert ("small", None, 3) == (ci.env("MODEL"), ci.env("NOT_SET"), ci.env("NOT_SET", 3))


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the environment wins over the file, also when it is empty."""
    write(tmp_path, "MODEL=file\nOTHER=file\nEMPTY=file\n")
    monkeypatch.setenv("MODEL", "environment")
    monkeypatch.setenv("EMPTY", "")

    assert ("environment", "file", "") == (ci.env("MODEL"), ci.env("OTHER"), ci.env("EMPTY"))


def test_the_file_is_not_put_into_the_environment(tmp_path: Path) -> None:
    """Reading a file changes nothing for the rest of the program."""
    write(tmp_path, "MODEL=file\n")

    assert ("file", None) == (ci.env("MODEL"), os.environ.get("MODEL"))


LINES = [
    ("A=x", "x"),
    ("  A = x  ", "x"),
    ("export A=x", "x"),
    ("export\tA=x", "x"),
    ("A=", ""),
    ("A= # nothing", ""),
    ("A=x # comment", "x"),
    ("A=x#y", "x#y"),
    ("A=#fff", "#fff"),
    ("A=two words", "two words"),
    ("A=x=y", "x=y"),
    ("A='x # y'", "x # y"),
    ("A='x' # comment", "x"),
    ('A="x # y" # comment', "x # y"),
    ('A=""', ""),
    (r"A='a\nb'", r"a\nb"),
    (r'A="a\nb\t\"c\" \\ \$ \d"', 'a\nb\t"c" \\ $ \\d'),
    ("A='one\ntwo'", "one\ntwo"),
    ('A="one\ntwo"', "one\ntwo"),
    ("A=it's", "it's"),
    ("a.b-c=x\nA=y", "y"),
    ("A=x\nA=y", "y"),
    ("# A=x\n\n  \nA=y", "y"),
    ("A=x\r\n", "x"),
    ("A='one\r\ntwo'\r\n", "one\ntwo"),
    ("\ufeffA=x", "x"),
    ("A=grün", "grün"),
    ('A={"b": [1, 2.5, null]}', {"b": [1, 2.5, None]}),
    ("A=[1, 2] # comment", [1, 2]),
    ("""A='{"b": "x # y"}'""", {"b": "x # y"}),
    ('A="{\\"b\\": 1}"', {"b": 1}),
    ("A='[\n1,\n2\n]'", [1, 2]),
    ("A=12", "12"),
    ("A=true", "true"),
]


@pytest.mark.parametrize(("content", "value"), LINES, ids=[repr(line) for line, _ in LINES])
def test_all_forms_of_lines_are_read(
    content: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Quotes, comments, `export`, blank lines, CRLF, a BOM, values of several lines, JSON."""
    write(tmp_path, content)

    assert value == ci.env("A")
    assert [] == caplog.messages


def test_utf_16_files_are_read(tmp_path: Path) -> None:
    """A file as PowerShell's `>` writes it is read."""
    write(tmp_path, "A=x\r\n".encode("utf-16"))

    assert "x" == ci.env("A")


BROKEN = ["just text", "= x", "A='x", "A='x'y", 'A="x', "A B=x", "export A", "'A'=x"]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_ignored_with_one_warning(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken line is told once, without its content, and the rest of the file is read."""
    write(tmp_path, f"FIRST=1\n{line}\nLAST=2\n")

    with caplog.at_level(logging.WARNING, "cirron"):
        assert ("1", None, "2") == (ci.env("FIRST"), ci.env("A"), ci.env("LAST"))
    assert [
        f"cirron: {tmp_path / '.env'}: line 2 is ignored, because it is not NAME=value"
    ] == caplog.messages


def test_many_broken_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Many broken lines are one warning, which names the first five."""
    write(tmp_path, "no\n\nA='1\n2'\n" + "no\n" * 6)

    assert "1\n2" == ci.env("A")
    assert [
        f"cirron: {tmp_path / '.env'}: lines 1, 5, 6, 7, 8 and 2 more are ignored, because they are"
        " not NAME=value"
    ] == caplog.messages


def test_the_nearest_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest file counts, here or in a folder above; a folder of that name is passed by."""
    write(tmp_path, "A=top\nB=top\n")
    inner = tmp_path / "inner" / "deep"
    inner.mkdir(parents=True)
    (inner / ".env").mkdir()  # a virtual environment, say
    monkeypatch.chdir(inner)
    assert "top" == ci.env("A")

    write(tmp_path / "inner", "A=inner\n")
    assert ("inner", None) == (ci.env("A"), ci.env("B"))


def test_a_file_that_changes(tmp_path: Path) -> None:
    """A file that has changed is read anew."""
    write(tmp_path, "A=1\n")
    assert "1" == ci.env("A")
    write(tmp_path, "A=two\n")
    assert "two" == ci.env("A")
    (tmp_path / ".env").unlink()
    assert None is ci.env("A")


@pytest.mark.skipif(os.name == "nt" or not os.geteuid(), reason="root may read everything")
def test_a_file_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that may not be read is told once, and the default is the answer."""
    write(tmp_path, "A=1\n")
    (tmp_path / ".env").chmod(0)

    assert (3, 3) == (ci.env("A", 3), ci.env("A", 3))
    assert [
        f"cirron: {tmp_path / '.env'} is ignored: it could not be read: Permission denied"
    ] == caplog.messages


def test_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that was deleted there is the environment alone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert 3 == ci.env("A", 3)


@pytest.mark.parametrize("value", ['{"a": }', "[1, 3", "{name}", "[" * 100_000])
def test_broken_json_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that begins as JSON and is none is an error, which names the variable."""
    monkeypatch.setenv("LIMITS", value)

    with pytest.raises(ci.SettingError) as raised:
        ci.env("LIMITS", {})
    text = str(raised.value)
    assert text.startswith(
        f"LIMITS, from the environment, starts with '{value[0]}' but is not valid JSON:"
    )
    assert text.endswith(
        " Write JSON, such as LIMITS='[1, 2]', or start the text with another character"
    )
    assert value not in text


@pytest.mark.parametrize("value", ["[INST] {question} [/INST]", "{name}"])
def test_text_where_text_is_wanted(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a text as the default, a value that is no JSON is a text; JSON is read all the same."""
    monkeypatch.setenv("PROMPT", value)
    monkeypatch.setenv("LIMITS", "[1]")

    assert (value, [1]) == (ci.env("PROMPT", ""), ci.env("LIMITS", "none"))


def test_broken_json_in_a_file(tmp_path: Path) -> None:
    """The error names the file where the value is from one."""
    write(tmp_path, "LIMITS={1\n")

    with pytest.raises(ValueError, match=r"LIMITS, from .*\.env, starts with"):
        ci.env("LIMITS")


def test_a_default_is_not_parsed() -> None:
    """The default is returned as it is."""
    assert "[1]" == ci.env("NOT_SET", "[1]")


def test_a_name_that_is_none() -> None:
    """A name that is no text is a TypeError."""
    with pytest.raises(
        ci.InputError, match=r"ci\.env\(\) needs the name of a variable as a string; got 3"
    ):
        ci.env(3)  # type: ignore[arg-type]


def test_only_what_is_needed() -> None:
    """`ci.env` does not load the rest of the library."""
    import subprocess
    import sys

    script = "import sys, cirron as ci; ci.env('A'); print('cirron.session' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert b"False" == ended.stdout.strip()
