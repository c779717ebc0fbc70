"""Settings: where a value comes from, and what is said about a bad one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

# name, default, and the same setting from an argument, the environment and pyproject.toml
PLACES: list[tuple[str, Any, Any, tuple[str, Any], tuple[str, Any]]] = [
    ("enabled", True, False, ("off", False), ("false", False)),
    ("api_key", None, "key-a", ("key-e", "key-e"), ('"key-p"', "key-p")),
    (
        "api_endpoint",
        "https://api.cirron.com",
        "http://a",
        ("http://e/", "http://e"),
        ('"http://p"', "http://p"),
    ),
    ("allow_insecure", False, True, ("1", True), ("true", False)),  # not from a file
    ("output_dir", "./.cirron", "a", ("e", "e"), ('"/p"', "/p")),
    ("access", "private", "group", ("all", "all"), ('"group"', "group")),
    ("output", ("spool",), "log", ("spool,stdout", ("spool", "stdout")), ('["log"]', ("log",))),
    ("snapshots", "stats", "full", ("sampled", "sampled"), ('"full"', "full")),
    ("sample_rate", 0.01, 0.5, ("0.25", 0.25), ("1", 1.0)),
    ("overhead", 0.01, 0.5, ("0.25", 0.25), ("1", 1.0)),
    ("loss_marks", True, False, ("0", False), ("false", False)),
    ("steps_per_epoch", 1000, 5, ("6", 6), ("7", 7)),
    ("loggers", True, False, ("0", False), ("false", False)),
    ("flush_interval", 1.0, 2, ("0.5", 0.5), ("3", 3.0)),
    ("spool_max_bytes", 1_000_000_000, 5, ("1e6", 1_000_000), ("7", 7)),
    ("max_pending_records", 1_000_000, 5, ("6", 6), ("7", 7)),
    ("silence_after", 60.0, 5, ("6", 6.0), ("7.5", 7.5)),
    ("exit_timeout", 5.0, 1, ("2", 2.0), ("3", 3.0)),
    ("report", True, False, ("0", False), ("false", False)),
    ("tags", {}, {"a": "b"}, ("c, d=e", {"c": "", "d": "e"}), ('["f"]', {"f": ""})),
]


def write_project(content: str, folder: Path | None = None) -> None:
    ((folder or Path.cwd()) / "pyproject.toml").write_text(content)


def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> settings.Settings:
    return settings.resolve(settings.check(arguments), environ or {})


def test_the_table_is_whole() -> None:
    """Every setting is tested here, has a line of doc, and is an attribute of the result."""
    assert [row[0] for row in PLACES] == [setting.name for setting in settings.TABLE]
    assert all(setting.doc for setting in settings.TABLE)
    assert set(settings.BY_NAME) == set(settings.Settings.__annotations__)


@pytest.mark.parametrize(("name", "default", "argument", "variable", "project"), PLACES)
def test_the_call_wins_over_the_environment_and_the_file(
    name: str, default: Any, argument: Any, variable: tuple[str, Any], project: tuple[str, Any]
) -> None:
    """The call wins over the environment, that over pyproject.toml, and that over the default."""
    environ = {f"CIRRON_{name.upper()}": variable[0]}
    assert default == getattr(resolve(), name)

    write_project(f"[tool.cirron]\n{name} = {project[0]}\n")
    assert project[1] == getattr(resolve(), name)
    assert variable[1] == getattr(resolve(environ), name)

    given = getattr(resolve(environ, **{name: argument}), name)
    assert given in (argument, (argument,))


def test_an_empty_variable_is_none() -> None:
    """A variable that is set to nothing counts as not set."""
    assert 1.0 == resolve({"CIRRON_FLUSH_INTERVAL": ""}).flush_interval


def test_the_nearest_project_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `[tool.cirron]` of a folder above is found; the nearest one hides those above it."""
    write_project("[tool.cirron]\nflush_interval = 7\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert 7.0 == resolve().flush_interval

    write_project("[project]\nname = 'other'\n", tmp_path / "a")
    assert 7.0 == resolve().flush_interval

    write_project("[tool.cirron]\nflush_interval = 8\n", tmp_path / "a")
    assert 8.0 == resolve().flush_interval


def test_a_relative_folder_of_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative output_dir in pyproject.toml is in the folder of that file."""
    write_project("[tool.cirron]\noutput_dir = 'runs'\n")
    inner = tmp_path / "a"
    inner.mkdir()
    monkeypatch.chdir(inner)

    assert str(tmp_path / "runs") == resolve().output_dir


def test_a_broken_project_file_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A file that is not ours to mend stops nobody."""
    write_project("[tool.cirron\n")

    assert 1.0 == resolve().flush_interval
    assert re.search(
        r"pyproject\.toml could not be read, so its \[tool\.cirron\] is ignored", caplog.text
    )


@pytest.mark.parametrize("content", ["[tool]\ncirron = 3", "[[tool.cirron]]\na = 1"])
def test_a_project_file_without_a_table(content: str, caplog: pytest.LogCaptureFixture) -> None:
    """A [tool.cirron] that is no table is ignored, with a warning that says so."""
    write_project(content)

    assert 1.0 == resolve().flush_interval
    assert re.search(r"\[tool\.cirron\]=.* is not valid; it must be a table", caplog.text)


def test_a_project_file_of_another_shape() -> None:
    """A file whose `tool` is something else is nobody's error here."""
    write_project("tool = 3")

    assert 1.0 == resolve().flush_interval


def test_an_unknown_key(caplog: pytest.LogCaptureFixture) -> None:
    """A key that does not exist is ignored, with a warning that names it and those that do."""
    write_project("[tool.cirron]\nflush_intervall = 1\nsilence_after = 7\n")

    assert (1.0, 7.0) == (resolve().flush_interval, resolve().silence_after)
    (message,) = caplog.messages
    assert "[tool.cirron] key='flush_intervall' is not valid; use one of 'enabled', " in message
    assert "pyproject.toml has settings that are ignored: " in message
    assert all(repr(name) in message for name in settings.BY_NAME if name != "allow_insecure")


def test_many_unknown_keys(caplog: pytest.LogCaptureFixture) -> None:
    """A warning names five faults of a file and counts the others."""
    write_project("[tool.cirron]\n" + "".join(f"k{i} = 1\n" for i in range(8)))
    resolve()

    (message,) = caplog.messages
    assert (5, True) == (message.count("is not valid"), message.endswith("; and 3 more"))


BAD: list[tuple[str, list[Any], str]] = [
    ("enabled", ["maybe", 2, []], "use one of True, False"),
    (
        "api_endpoint",
        ["api.cirron.com", "ftp://x", "http://", "http://x:y", 5],
        "it must be an address such as https://api.cirron.com",
    ),
    ("output_dir", ["", 5, b"x"], "it must be the path of a folder"),
    ("allow_insecure", ["maybe", 2], "use one of True, False"),
    ("access", ["everyone", "", 0o755, ["all"]], "use one of 'private', 'group', 'all'"),
    ("output", ["disk", ["spool", "x"], ["none", "log"], [], 5, {"spool": 1}], ""),
    ("snapshots", ["all", "", 1, ["stats"]], "use one of 'stats', 'sampled', 'full'"),
    ("sample_rate", [-0.1, 1.1, "x", float("nan"), True, [0.5]], "it must be a number from 0 to 1"),
    (
        "flush_interval",
        [0, -1, 3601, "x", float("inf"), False, 10**400],
        "it must be a number of seconds above 0, at most 3600",
    ),
    (
        "spool_max_bytes",
        [0, -5, 1.5, "x", float("inf"), True, 10**400],
        "it must be an integer above 0",
    ),
    ("max_pending_records", [0, 0.5], "it must be an integer above 0"),
    ("silence_after", [0], "seconds above 0"),
    ("exit_timeout", [0], "seconds above 0"),
]


@pytest.mark.parametrize(
    ("name", "given", "rule"),
    [(name, given, rule) for name, values, rule in BAD for given in values],
    ids=lambda value: repr(value)[:24],
)
def test_a_bad_value_names_the_setting_and_what_is_allowed(
    name: str, given: Any, rule: str
) -> None:
    """A bad value is a ValueError with the setting, what was given, and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(f"{name}={given!r} is not valid; ")) as caught:
        settings.check({name: given})

    assert isinstance(caught.value, ci.CirronError)
    assert rule in str(caught.value)


@pytest.mark.parametrize("given", ["", "  ", 5, "se\ncret", "sécret"])
def test_a_bad_key_is_not_shown(given: Any) -> None:
    """An invalid key is an error that says what to do and does not show the key."""
    with pytest.raises(ValueError, match=r"api_key is empty or has.*copy the key again") as caught:
        settings.check({"api_key": given})

    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("disk", "output='disk' is not valid; use one of 'spool', 'log', 'stdout', 'none'"),
        (
            ["spool", "x"],
            "output=['spool', 'x'] is not valid; use one of 'spool', 'log', 'stdout', 'none'",
        ),
        (
            ["none", "log"],
            "output=['none', 'log'] is not valid; 'none' cannot be combined with other outputs",
        ),
        ([], "output=[] is not valid; use one of 'spool', 'log', 'stdout', 'none' or a list"),
    ],
)
def test_a_bad_output_lists_the_allowed_ones(given: Any, text: str) -> None:
    """The error for a bad output shows all of them."""
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        settings.check({"output": given})


def test_bad_values_from_the_environment() -> None:
    """The error names the variable that the bad value came from."""
    with pytest.raises(ValueError, match="CIRRON_SAMPLE_RATE='2' is not valid"):
        resolve({"CIRRON_SAMPLE_RATE": "2"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sample_rate", "2"),
        ("output", '["disk"]'),
        ("output_dir", '"a\\u0000b"'),
        ("enabled", "{}"),
    ],
)
def test_bad_values_from_a_file(name: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A bad value in a file is ignored, and named in a warning; what is good there counts."""
    write_project(f"[tool.cirron]\n{name} = {text}\nsilence_after = 7\n")
    found = resolve()

    assert settings.BY_NAME[name].default == getattr(found, name)
    assert 7.0 == found.silence_after
    (message,) = caplog.messages
    assert f"pyproject.toml has settings that are ignored: [tool.cirron] {name}=" in message


def test_a_misspelled_variable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with the one that is meant. A variable of another program is not."""
    monkeypatch.setenv("CIRRON_OUTPT", "none")
    monkeypatch.setenv("CIRRON_FOO", "1")
    settings.resolve({})

    assert ["cirron: CIRRON_OUTPT has no effect; did you mean CIRRON_OUTPUT?"] == caplog.messages
    assert {"CIRRON_FOO": "", "CIRRON_OUTPT": "CIRRON_OUTPUT"} == settings.unknown_variables()


def test_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often settings are read, a file's fault is told once."""
    write_project("[tool.cirron]\nsample_rate = 2\n")
    resolve()
    resolve()

    assert 1 == len(caplog.messages)


def test_an_error_shows_no_more_than_needed() -> None:
    """The error for a bad value shows at most a thousand characters of it, and never fails."""
    with pytest.raises(ValueError, match=re.escape("output='" + "x" * 999 + "... is not valid")):
        settings.check({"output": "x" * 100_000})
    with pytest.raises(ValueError, match="sample_rate=<int> is not valid"):
        settings.check({"sample_rate": 1 << 100_000})


def test_duplicates_and_order_of_outputs() -> None:
    """An output that is named twice is there once."""
    assert ("log", "spool") == resolve(output=["log", "spool", "log"]).output


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may begin with ~, and may be a Path."""
    monkeypatch.setenv("HOME", "/somewhere")

    assert "/somewhere/traces" == resolve(output_dir="~/traces").output_dir
    assert "traces" == resolve(output_dir=Path("traces")).output_dir


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (ci.profile, "outpt", r"ci\.profile\(\) has no argument 'outpt'; did you mean output=\?"),
        (ci.profile, "foo", r"'foo'; it has config, frameworks, .*, loss_marks$"),
        (
            ci.profile,
            "output_dir",
            r"; write ci\.Cirron\(output_dir=\.\.\.\)\.profile\(\)$",
        ),
        (ci.Cirron, "snapshot", r"ci\.Cirron\(\) .* did you mean snapshots=\?"),
        (ci.Cirron, "enabled", r"; it has"),
    ],
)
def test_an_argument_that_does_not_exist(function: Any, given: str, said: str) -> None:
    """It is an error that names the argument that was meant, and nothing is started."""
    with pytest.raises(TypeError, match=said) as caught:
        function(**{given: "x"})

    assert isinstance(caught.value, ci.CirronError)
    assert not ci.health()["enabled"]


@pytest.mark.parametrize("given", [{"output": "nowhere"}, {"frameworks": ["torhc"]}])
def test_a_second_call_checks_its_arguments(given: dict[str, Any]) -> None:
    """They are wrong, whether or not a profiler runs."""
    ci.profile(output="none")

    with pytest.raises(ci.SettingError, match="is not valid; use one of"):
        ci.profile(**given)


class TestSwitch:
    @pytest.mark.parametrize("text", ["0", "false", "off", "False", "OFF"])
    def test_the_environment_turns_it_off(
        self, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """CIRRON_ENABLED=0 turns a run off, whatever the code says."""
        monkeypatch.setenv("CIRRON_ENABLED", text)

        assert not ci.profile(enabled=True).enabled
        assert [] == list(tmp_path.iterdir())

    def test_the_environment_does_not_turn_it_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CIRRON_ENABLED=1 leaves the code's own decision alone."""
        monkeypatch.setenv("CIRRON_ENABLED", "1")

        assert not ci.profile(enabled=False).enabled

    def test_a_bad_switch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A switch that is neither is an error that names it."""
        monkeypatch.setenv("CIRRON_ENABLED", "perhaps")

        with pytest.raises(ValueError, match=r"CIRRON_ENABLED='perhaps' is not valid; .* 1 or 0"):
            ci.profile()

    @pytest.mark.parametrize("given", ["0", "off", "No", "FALSE"])
    def test_words_for_off(self, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The environment may say it in the usual words."""
        monkeypatch.setenv("CIRRON_ENABLED", given)

        assert not ci.profile().enabled


class TestFlags:
    def test_explicit_flags_win(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A flag comes from the call, then from the platform, then from the reader's default."""
        monkeypatch.setenv("CIRRON_CONFIG", '{"a": 1, "b": 2}')
        config = ci.profile(config={"b": 3, "c": 4}, output="none").config

        assert {"a": 1, "b": 3, "c": 4} == dict(config)
        assert (1, 3, "default") == (config.get("a"), config["b"], config.get("z", "default"))

    def test_without_flags_the_mapping_is_empty(self) -> None:
        """Without any, there is an empty mapping."""
        assert {} == dict(ci.profile(output="none").config)

    def test_they_cannot_be_changed(self) -> None:
        """Neither the handle's mapping nor a later change of the dict changes the flags."""
        given = {"a": 1}
        config: Any = ci.profile(config=given, output="none").config
        given["a"] = 2

        assert 1 == config["a"]
        with pytest.raises(TypeError):
            config["a"] = 3

    def test_off_has_flags_too(self) -> None:
        """The user's code reads its flags also when profiling is off."""
        assert 1 == ci.profile(config={"a": 1}, enabled=False).config.get("a")

    def test_the_library_does_not_look_there(self) -> None:
        """Settings of the library are not taken from config=."""
        ci.profile(config={"output": "none", "flush_interval": "x"})

        assert Path(".cirron/spool").is_dir()

    @pytest.mark.parametrize("given", ["a", 3, ["a"]])
    def test_flags_must_be_a_dict(self, given: Any) -> None:
        """Flags that are no dict are an error."""
        with pytest.raises(
            ValueError, match=r"config=.* is not valid; it must be a dict, such as vars"
        ):
            ci.profile(config=given)

    @pytest.mark.parametrize("text", ["{", "[1]", "3"])
    def test_bad_platform_flags(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A CIRRON_CONFIG that is no JSON object is an error."""
        monkeypatch.setenv("CIRRON_CONFIG", text)

        with pytest.raises(ValueError, match=r"CIRRON_CONFIG=.* is not valid; it must be a JSON"):
            ci.profile()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("baseline", {"baseline": ""}),
        (["baseline", "team=vision"], {"baseline": "", "team": "vision"}),
        (("a",), {"a": ""}),
        ({"team": "vision"}, {"team": "vision"}),
        ([], {}),
    ],
)
def test_tags_are_accepted_in_every_form(given: Any, expected: dict[str, str]) -> None:
    """Tags are names, or names with a value, in whichever form they are given."""
    assert expected == resolve(tags=given).tags


@pytest.mark.parametrize("given", [7, ["a", 7], {"a": 7}, {7: "a"}, {"a"}, b"a"])
def test_tags_that_are_none(given: Any) -> None:
    """Tags that are not text raise, and the error shows both forms."""
    with pytest.raises(ValueError, match=r"tags=.*\['baseline'\] or \{'team': 'vision'\}"):
        ci.profile(tags=given)
