"""Finding the records of a run, wherever somebody points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import cirron
from cirron import errors
from cirron.runs import folders

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Made


@pytest.mark.parametrize("given", [".", ".cirron", ".cirron/spool", ".cirron/blackbox"])
def test_all_the_folders_that_people_name(tmp_path: Path, made: Made, given: str) -> None:
    """The project, its .cirron and what is in there all lead to the same records."""
    made().write()
    (tmp_path / ".cirron" / "blackbox").mkdir()

    assert tmp_path / ".cirron" == folders.find(tmp_path / given)


def test_inside_of_the_spool(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "." works from inside the spool as well."""
    made().write()
    monkeypatch.chdir(tmp_path / ".cirron" / "spool")

    assert (tmp_path / ".cirron").resolve() == folders.find(".")


def test_a_folder_of_another_name(tmp_path: Path, made: Made) -> None:
    """ci.profile(path=...) may put the records anywhere."""
    made().write()
    (tmp_path / ".cirron").rename(tmp_path / "traces")

    assert tmp_path / "traces" == folders.find(tmp_path / "traces")


def test_copied_batches(tmp_path: Path, made: Made) -> None:
    """A folder with nothing but batches, copied from somewhere, can be read."""
    one = made()
    one.span("step", 0, 1)
    one.write()
    (tmp_path / ".cirron" / "spool").rename(tmp_path / "copied")

    assert 1 == len(cirron.open(tmp_path / "copied").spans)


def test_nothing_there(tmp_path: Path) -> None:
    """The error says what was looked for and what to type next."""
    (tmp_path / "package.json").write_text("{}")

    with pytest.raises(errors.SettingError, match=r"no \.cirron, spool.*cirron show FOLDER"):
        folders.find(tmp_path)
    with pytest.raises(errors.SettingError, match="the folder does not exist"):
        folders.find(tmp_path / "absent")
    with pytest.raises(errors.SettingError, match=r'ci\.open\(run="4fb5"\)'):
        cirron.open("4fb5")
    with pytest.raises(errors.SettingError, match="it is not a folder"):
        folders.find(tmp_path / "package.json")
    with pytest.raises(errors.SettingError, match="the folder does not exist"):
        folders.find(f"{tmp_path}/a\0b")
    (tmp_path / ".cirron").symlink_to(".cirron")
    with pytest.raises(errors.SettingError, match=r"its \.cirron is not a folder"):
        folders.find(tmp_path)


def test_a_link_to_the_records(tmp_path: Path, made: Made) -> None:
    """A .cirron that is kept on another disk is found through its link."""
    one = made(tmp_path / "scratch")
    one.span("step", 0, 1)
    one.write()
    (tmp_path / ".cirron").symlink_to(tmp_path / "scratch" / ".cirron")

    assert 1 == len(cirron.open(tmp_path).spans)
