"""Settings that somebody else tries to make for the user, and files that try to hold up a program.

A planted `pyproject.toml` must not name the place that the user's key is sent to.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import project, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.conftest import Scripts

SOMEBODY = 12345  # a user who is neither us nor root
DEFAULT = settings.BY_NAME["api_endpoint"].default
KEY = {"CIRRON_API_KEY": "users-key"}
EVIL = "[tool.cirron]\napi_endpoint = 'https://evil.example'\noutput_dir = '/evil'\n"

needs_owners = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give files away"
)


def resolve(environ: dict[str, str] | None = None, **arguments: Any) -> settings.Settings:
    return settings.resolve(settings.check(arguments), environ or {})


def write(content: str | bytes, folder: Path | None = None, name: str = "pyproject.toml") -> Path:
    path = (folder or Path.cwd()) / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder two below `tmp_path`, as the working directory."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


# -- files of somebody else ----------------------------------------------------------------------


def give_file(path: Path) -> None:
    os.chown(path, SOMEBODY, SOMEBODY)


def give_folder(path: Path) -> None:
    os.chown(path.parent, SOMEBODY, SOMEBODY)


def let_all_write(path: Path) -> None:
    path.chmod(0o646)


def let_group_write(path: Path) -> None:
    path.chmod(0o664)


def give_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")
    os.lchown(path, SOMEBODY, SOMEBODY)


def give_target(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")
    os.chown(path.with_name("target"), SOMEBODY, SOMEBODY)


def give_folder_of_target(path: Path) -> None:
    folder = path.with_name("elsewhere")
    folder.mkdir()
    path.rename(folder / "target")
    path.symlink_to(folder / "target")
    os.chown(folder, SOMEBODY, SOMEBODY)


FOREIGN = [
    give_file,
    give_folder,
    let_all_write,
    let_group_write,
    give_link,
    give_target,
    give_folder_of_target,
]


@needs_owners
@pytest.mark.parametrize("is_project", [False, True], ids=["above", "in-the-project"])
@pytest.mark.parametrize("spoil", FOREIGN)
def test_a_file_of_somebody_else_is_ignored(
    spoil: Callable[[Path], None],
    is_project: bool,
    below: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A file that somebody else can have written counts for nothing, with one warning."""
    path = write(EVIL, tmp_path)
    spoil(path)
    if is_project:
        (tmp_path / ".git").mkdir()
    found = resolve(KEY)

    assert (DEFAULT, "users-key", "./.cirron") == (
        found.api_endpoint,
        found.api_key,
        found.output_dir,
    )
    (message,) = caplog.messages
    assert message.startswith(f"cirron: {path} is ignored: ")
    assert "belongs to user 12345, and you are user 0" in message or "may write to it" in message


@needs_owners
@pytest.mark.parametrize("spoil", FOREIGN)
def test_an_env_file_of_somebody_else_is_ignored(
    spoil: Callable[[Path], None], below: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does `ci.env` take a value from such a file; one of the user's own above it counts."""
    write("PLACE=home\n", tmp_path, ".env")
    path = write("PLACE=evil\n", tmp_path / "a", ".env")
    spoil(path)

    assert "home" == ci.env("PLACE")
    (message,) = caplog.messages
    assert message.startswith(f"cirron: {path} is ignored: ")


@needs_owners
def test_the_file_above_a_planted_one_counts(below: Path, tmp_path: Path) -> None:
    """A planted file does not hide the user's own settings in a folder above."""
    write("[tool.cirron]\nsilence_after = 7\n", tmp_path)
    give_file(write(EVIL, tmp_path / "a"))

    assert 7.0 == resolve().silence_after


@needs_owners
def test_a_file_of_somebody_else_without_settings(
    below: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A project file of somebody else that says nothing about us is nothing to warn of."""
    give_file(write("[project]\ndependencies = ['cirron']\n", tmp_path))
    resolve()

    assert [] == caplog.messages


@pytest.mark.parametrize(
    ("name", "members", "gid", "is_private"),
    [
        ("ada", [], 1000, True),
        ("ada", ["ada"], 1000, True),
        ("ada", ["ada", "bob"], 1000, False),
        ("users", [], 1000, False),
        ("ada", [], 100, False),
    ],
    ids=["own", "own-listed", "shared", "of-all", "not-the-first"],
)
def test_a_group_of_ones_own(
    name: str, members: list[str], gid: int, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each user has a group of their own, a file that it may write to is the user's alone."""
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    user = pwd.struct_passwd(("ada", "x", 1000, 1000, "", "/home/ada", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    status = os.stat_result((stat.S_IFREG | 0o664, 1, 1, 1, 1000, gid, 0, 0, 0, 0))

    assert is_private == project.is_private(status)


@needs_owners
def test_the_key_does_not_reach_a_planted_address(
    scripts: Scripts, server: Server, tmp_path: Path
) -> None:
    """A program started below a planted file runs as ever, and its key stays here."""
    inner = tmp_path / "inner"
    inner.mkdir()
    give_file(write(f"[tool.cirron]\napi_endpoint = '{server.url}'\n", tmp_path))
    ended = scripts.run(
        f"""
        import os, socket

        os.chdir({str(inner)!r})
        resolve = socket.getaddrinfo

        def resolve_here(host, *args, **kwargs):  # nothing leaves this machine
            if host != "127.0.0.1":
                raise socket.gaierror("a test has no network")
            return resolve(host, *args, **kwargs)

        socket.getaddrinfo = resolve_here
        import cirron as ci

        ci.profile()
        print(ci.health()["transport"])
        """,
        CIRRON_API_KEY="users-key",
        CIRRON_EXIT_TIMEOUT="0.5",
    )

    assert (0, "http\n") == (ended.status, ended.out)
    assert [] == server.keys
    assert f"{tmp_path / 'pyproject.toml'} is ignored: it belongs to user {SOMEBODY}" in ended.err


class Server:
    """Notes the keys that reach it."""

    def __init__(self) -> None:
        keys = self.keys = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                keys.append(self.headers["Authorization"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


# -- an endpoint from the user's own file --------------------------------------------------------

NAMED = "https://own.example"
ENDPOINT = f"[tool.cirron]\napi_endpoint = '{NAMED}'\n"
BOTH = f"{ENDPOINT}api_key = 'files-key'\n"


def destination(environ: dict[str, str], **arguments: Any) -> tuple[str, str | None]:
    found = resolve(environ, **arguments)
    return found.api_endpoint, found.api_key


@pytest.mark.parametrize("git", ["", "a", "a/b"])
def test_a_file_inside_the_project_names_the_endpoint(
    git: str, below: Path, tmp_path: Path
) -> None:
    """Up to the nearest folder with `.git`, the user's own file says where the key goes."""
    (tmp_path / git / ".git").write_text("gitdir: elsewhere")  # a file, in a work tree
    write(ENDPOINT, tmp_path / git)

    assert (NAMED, "users-key") == destination(KEY)


@pytest.mark.parametrize("git", [None, "a", "a/b"])
def test_a_file_outside_the_project_does_not(
    git: str | None, below: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Above that folder a file names no endpoint for a key of another place: nothing is sent."""
    if git is not None:
        (tmp_path / git / ".git").mkdir()
    write(ENDPOINT + "silence_after = 7\n", tmp_path)

    assert (DEFAULT, None) == destination(KEY)
    assert (DEFAULT, None) == destination({}, api_key="users-key")
    (message,) = caplog.messages
    assert "nothing is sent, because the API key was not meant for https://own.example" in message
    assert 7.0 == resolve(KEY).silence_after


def test_a_file_with_its_own_key(below: Path, tmp_path: Path) -> None:
    """A file outside the project names an endpoint for its own key, and for no other one."""
    write(BOTH, tmp_path)

    assert (NAMED, "files-key") == destination({})
    assert (DEFAULT, None) == destination(KEY)
    elsewhere = {"CIRRON_API_ENDPOINT": "https://users.example"}
    assert ("https://users.example", "users-key") == destination(KEY | elsewhere)


def test_the_working_directory_is_the_project() -> None:
    """Without `.git`, the working directory's own file names the endpoint."""
    write(ENDPOINT)

    assert (NAMED, "users-key") == destination(KEY)


@pytest.mark.parametrize(
    "endpoint", ["ftp://x", "http://u:secret@own.example", "own.example", "https://u@own.example"]
)
def test_a_bad_endpoint_in_a_file(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """What was meant for an address that cannot be used is not sent to another one instead."""
    write(f"[tool.cirron]\napi_endpoint = '{endpoint}'\n")

    assert (DEFAULT, None) == destination(KEY)
    assert "api_endpoint" in caplog.messages[0]
    assert "nothing is sent, because the API key has no endpoint" in caplog.messages[1]
    assert "secret" not in caplog.text


# -- http:// -------------------------------------------------------------------------------------

LOCAL = [
    "http://localhost:8000",
    "http://localhost",
    "HTTP://LOCALHOST:8000/base",
    "http://127.0.0.1:9",
    "http://127.255.255.254",
    "http://[::1]:8000",
    "http://[0:0:0:0:0:0:0:1]",
]
REMOTE = [
    "http://example.com",
    "HTTP://EXAMPLE.COM",
    "http://10.0.0.1",
    "http://localhost.evil.com",
    "http://evil.localhost",
    "http://127.0.0.1.evil.com",
    "http://127.0.0.1.",
    "http://localhost.",
    "http://2130706433",
    "http://0x7f000001",
    "http://0x7f.0.0.1",
    "http://0177.0.0.1",
    "http://127.1",
    "http://0.0.0.0",
    "http://[::]",
    "http://[::ffff:8.8.8.8]",
    "http://[::ffff:127.0.0.1]",
    "http://[::1%25eth0]",
    "http://128.0.0.1",
    "http://\uff11\uff12\uff17.0.0.1",
    "http://ⓛocalhost",
    "http://127。0。0。1",
]
NOT_ADDRESSES = [
    "http://localhost@evil.com",
    "http://localhost:80@evil.com",
    "http://user:secret@localhost",
    "https://user:secret@own.example",
    "http://localhost\\@evil.com",
    "http://evil.com\\.localhost",
    "http://local\nhost",
    "http://local host",
    "http://localhost:80:90",
    "http://[localhost]",
    "user:secret@localhost",
]


@pytest.mark.parametrize("endpoint", LOCAL)
def test_a_key_goes_to_this_machine_unencrypted(endpoint: str) -> None:
    """The loopback addresses need no encryption."""
    assert (endpoint, "k") == destination({}, api_endpoint=endpoint, api_key="k")


@pytest.mark.parametrize("endpoint", REMOTE)
def test_a_key_goes_nowhere_else_unencrypted(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other http:// address with a key is an error that says how to allow it."""
    told = r"is not encrypted.*use https://, or allow it with CIRRON_ALLOW_INSECURE=1 or"
    with pytest.raises(ci.SettingError, match=told):
        resolve({}, api_endpoint=endpoint, api_key="k")
    with pytest.raises(ci.SettingError, match=told):
        resolve({"CIRRON_API_ENDPOINT": endpoint, "CIRRON_API_KEY": "k"})

    assert endpoint == resolve({}, api_endpoint=endpoint).api_endpoint  # no key, no harm
    allowed = {"CIRRON_ALLOW_INSECURE": "1"}
    assert (endpoint, "k") == destination(allowed, api_endpoint=endpoint, api_key="k")
    assert (endpoint, "k") == destination(
        {}, api_endpoint=endpoint, api_key="k", allow_insecure=True
    )

    # From a file it is not used, and that is said.
    write(f"[tool.cirron]\napi_endpoint = '{endpoint}'\n")
    assert (DEFAULT, None) == destination(KEY)
    assert "nothing is sent, because the API key would be sent unencrypted" in caplog.text
    assert (endpoint, "users-key") == destination(KEY | allowed)
    write(f"[tool.cirron]\napi_endpoint = '{endpoint}'\napi_key = 'files-key'\n")
    assert (DEFAULT, None) == destination({})
    write("[tool.cirron]\napi_key = 'files-key'\n")
    assert (endpoint, None) == destination({}, api_endpoint=endpoint)


@pytest.mark.parametrize("endpoint", NOT_ADDRESSES)
def test_addresses_that_mean_two_things(endpoint: str) -> None:
    """An address with a user name, or that programs read in two ways, is an error."""
    with pytest.raises(ci.SettingError) as caught:
        settings.check({"api_endpoint": endpoint})

    assert "secret" not in str(caught.value)
    if "@" in endpoint:
        assert "contains a user name or password before an '@'" in str(caught.value)


def test_a_file_does_not_allow_it(caplog: pytest.LogCaptureFixture) -> None:
    """No file can turn the protection off."""
    write("[tool.cirron]\napi_endpoint = 'http://own.example'\nallow_insecure = true\n")

    assert (DEFAULT, None) == destination(KEY)
    assert "allow_insecure is not allowed in a file; set CIRRON_ALLOW_INSECURE" in caplog.text


def test_the_example_of_a_server_on_this_machine(server: Server) -> None:
    """A server of one's own on this machine needs nothing but its address and key."""
    ci.Cirron(api_endpoint=server.url, api_key="secret").profile()
    ci.shutdown()

    assert {"Bearer secret"} == set(server.keys)


# -- files that are no good ----------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)  # in the working directory: a whole path may be too long


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(50 << 30)  # of which nothing is on disk


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD = [fifo, link_to_fifo, socket_file, device, huge, folder, loop]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", ["pyproject.toml", ".env"])
def test_no_file_holds_up_a_program(
    name: str, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe, a device, a huge file: not waited for, not read whole, and told once."""
    path = Path.cwd() / name
    make(path)
    for _ in range(2):
        assert "default" == ci.env("PLACE", "default")
        assert 1.0 == resolve().flush_interval

    expected = 0 if make in (folder, loop) else 1
    assert expected == len(caplog.messages)
    if expected:
        assert caplog.messages[0].startswith(f"cirron: {path} is ignored: it ")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "content",
    [
        b"[tool.cirron]\nflush_interval = \xff\n",
        b"[tool.cirron]\0",
        b"\xff\xfe[\0t\0o\0o\0l\0.\0cirron",
        b"[tool.cirron]\nflush_interval = " + b"[" * 100_000,
        b"[tool.cirron]\nflush_interval = " + b"{a=" * 100_000,
        b"[tool.cirron]\n" + b"a." * 100_000 + b"a = 1",
        b"[tool.cirron]\nflush_interval = " + b"1" * 100_000,
        b"[tool.cirron]\nflush_interval = 0x" + b"f" * 100_000,
        b"[tool.cirron]\nflush_interval = nan\n",
        b"[tool.cirron]\nflush_interval = 1979-05-27\n",
        b"[tool.cirron]\n'\x1b[31m' = 1\n",
        b'[tool.cirron]\n"\\u001b[31m\\u202e" = 1\n',
        b"[tool.cirron]\nflush_interval = 1\nflush_interval = 2\n",
        b"[tool.cirron.flush_interval]\na = 1\n",
    ],
    ids=range(14),
)
def test_no_content_hurts_a_program(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is in the user's file, the program starts; one warning says what is ignored."""
    write(content)

    assert 1.0 == resolve().flush_interval
    (message,) = caplog.messages
    assert str(Path.cwd() / "pyproject.toml") in message
    assert len(message) < 2_000
    assert message.isprintable()


def test_a_bad_file_does_not_stop_profiling(caplog: pytest.LogCaptureFixture) -> None:
    """`ci.profile()` starts with a bad file as it does without."""
    write("[tool.cirron]\nsnapshots = 5\nno_such = 1\n")

    assert ci.profile(output="none").enabled


def test_a_file_that_the_user_may_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file without read permission is told once, and passed by."""
    paths = [write("[tool.cirron]\nflush_interval = 7\n"), write("A=1\n", name=".env")]

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # root may read everything

    assert (1.0, 1.0) == (resolve().flush_interval, resolve().flush_interval)
    assert (None, None) == (ci.env("A"), ci.env("A"))
    for path, message in zip(paths, caplog.messages, strict=True):
        told = f"cirron: {path} is ignored: it could not be read: Permission denied"
        assert message.startswith(told)


# -- wrong values that do not let themselves be shown ----------------------------------------------


class Unshown:
    """Its repr would end the program."""

    def __repr__(self) -> str:
        raise SystemExit("of the value")


class Long:
    def __repr__(self) -> str:
        return "x" * 10_000_000


@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: ci.profile(tags={"team": wrong}),
        lambda wrong: ci.profile(flush_interval=wrong),
        lambda wrong: ci.scope("name", index=wrong),
        lambda wrong: ci.scope(wrong),
        lambda wrong: ci.mark(wrong, 1.0),
        lambda wrong: ci.mark("name", 1.0, kind=wrong),
        lambda wrong: ci.epochs(wrong),
    ],
)
@pytest.mark.parametrize("wrong", [Unshown(), Long()], ids=["unshown", "long"])
def test_a_wrong_value_is_refused_with_a_message(call: Callable[[Any], Any], wrong: Any) -> None:
    """Whatever the repr of a wrong value does, the error is ours, and short."""
    with pytest.raises(ci.CirronError) as raised:
        call(wrong)

    assert len(str(raised.value)) < 3_000


@pytest.mark.parametrize("given", ["[" * 100_000, '{"a": ' + "9" * 5_000 + "}", "[]", "{"])
def test_a_config_that_is_no_object(given: str) -> None:
    """A `CIRRON_CONFIG` of any text that is no JSON object is refused with a message."""
    with pytest.raises(ci.CirronError, match="must be a JSON object"):
        settings.flags({}, {"CIRRON_CONFIG": given})
