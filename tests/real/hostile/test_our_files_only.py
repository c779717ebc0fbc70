"""Only our own files are ever removed or written to, and nobody else may read them."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.real.conftest import Scripts

FOLDERS = ("spool", "blackbox", "outbox", "snapshots")
OURS = f"{1:020d}-{'0' * 32}.json"  # what a batch is called
OLD = time.time() - 10 * 86_400

# Writes far past a cap of 20 kB, at many flushes: everything that tidies up has its turn.
WRITES = """
import os, sys, time
import cirron as ci

ci.Cirron(spool_max_bytes=20_000, **{options}).profile(flush_interval=0.01)
for number in range(100):
    for _ in range(20):
        with ci.scope("span", number, text="x" * 200):
            ci.mark("value", number)
    ci.flush()
    time.sleep({pause_s})
print(ci.health()["spool_drop_count"])
"""
# An endpoint that refuses, so that there is an outbox, which keeps what it has.
ENDPOINT = {"api_key": "k", "api_endpoint": "http://127.0.0.1:9"}


def writes(options: dict[str, str] | None = None, pause_s: float = 0.0) -> str:
    return WRITES.format(options=options or {}, pause_s=pause_s)


def plant(folder: Path) -> list[Path]:
    """Puts files of a user's into a folder of ours: old ones, and some that look like ours."""
    folder.mkdir(parents=True, exist_ok=True)
    elsewhere = folder.parents[1] / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    precious = elsewhere / f"{folder.name}.json"
    precious.write_text("precious")
    names = (
        *("notes.txt", "model.ckpt", "model.tmp", ".hidden", "no extension", "results.json"),
        *("0.json", "2020-01-01.json", "a-b.json", "weights.safetensors", "x.json.tmp", "lock"),
        *(f"{1:019d}-{'0' * 32}.json", f"{1:020d}-{'0' * 31}.json", f"{OURS}.bak", f"{OURS}~"),
        *(f"{1:020d}-{'G' * 32}.json", f" {OURS}", OURS.upper(), f"copy of {OURS}"),
        *(f"{'0' * 31}-1.json", f"{'0' * 32}-x.json", f"{'0' * 32}.json"),
    )
    planted = [precious]
    for name in names:
        (folder / name).write_text(f"the user's {name}" + "x" * 2_000)
        planted.append(folder / name)
    for name in (OURS, f"{'f' * 32}-1.json"):
        (folder / name).mkdir()
        (folder / name / "inside.txt").write_text("in a folder that has a name of ours")
        planted += [folder / name, folder / name / "inside.txt"]
    for name, target in {
        f"{2:020d}-{'1' * 32}.json": precious,
        f"{'1' * 32}-1.json": precious,
        f"{3:020d}-{'2' * 32}.json": folder / "nowhere",
        f"{4:020d}-{'3' * 32}.json.tmp": precious,
    }.items():
        (folder / name).symlink_to(target)
        planted.append(folder / name)
    for path in planted:
        os.utime(path, (OLD, OLD), follow_symlinks=False)
    return planted


def contents(paths: Iterable[Path]) -> dict[Path, str]:
    """What each is: nothing, a link, a folder, or a file with this content."""
    return {
        path: f"-> {os.readlink(path)}"
        if path.is_symlink()
        else "a folder"
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        if path.exists()
        else "nothing"
        for path in paths
    }


def assert_untouched(before: dict[Path, str]) -> None:
    after = contents(before)
    gone = [path.name for path, found in after.items() if found == "nothing" != before[path]]
    changed = [path.name for path in before if after[path] != before[path]]
    assert [] == changed, f"removed: {len(gone)} ({gone[:5]}); changed: {len(changed) - len(gone)}"


@pytest.mark.parametrize("options", [{}, ENDPOINT], ids=["file only", "with an endpoint"])
def test_files_in_folders_that_we_made(scripts: Scripts, options: dict[str, str]) -> None:
    """In our own folders, past the cap and however old, what is not ours stays as it is."""
    assert 0 == scripts.run(writes(options)).status
    before = contents(path for name in FOLDERS for path in plant(scripts.home / name))
    ended = scripts.run(writes(options))

    assert 0 == ended.status, ended.err
    assert int(ended.out) > 0, "nothing was evicted: the cap had no effect"
    assert_untouched(before)


@pytest.mark.parametrize("name", ["spool", "blackbox"])
def test_a_folder_that_the_user_made(scripts: Scripts, name: str) -> None:
    """In a folder that we did not make, nothing is removed, even if it looks exactly like ours."""
    scripts.run(writes())
    made = scripts.folder / "made"
    scripts.home.rename(made)
    (scripts.home / name).mkdir(parents=True)
    original = next((made / name).glob("*.json"))
    for number in range(2_000):
        copy = f"{number:020d}-{'a' * 32}" if name == "spool" else f"{number:032x}-4000000"
        os.link(original, scripts.home / name / f"{copy}.json")
    os.utime(original, (OLD, OLD))
    before = contents((scripts.home / name).iterdir())
    ended = scripts.run(writes())

    assert 0 == ended.status, ended.err
    assert_untouched(before)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_spool_that_is_a_link(scripts: Scripts, when: str) -> None:
    """Through a link in place of our folder nothing of the user's is removed or changed."""
    mine = scripts.folder / "mine"
    mine.mkdir()
    for number in range(30):
        for name in (f"{number:020d}-{'a' * 32}.json", f"{number}.json", f"{number}.tmp"):
            (mine / name).write_text("the user's" + "x" * 3_000)
            os.utime(mine / name, (OLD, OLD))
    before = contents(mine.iterdir())
    if when == "before":
        scripts.home.mkdir()
        (scripts.home / "spool").symlink_to(mine)
        assert 0 == scripts.run(writes()).status
    else:
        script = scripts.start(writes(pause_s=0.01))
        scripts.wait_until(scripts.batch_files, "a batch")
        (scripts.home / "spool").rename(scripts.home / "moved")
        (scripts.home / "spool").symlink_to(mine)
        assert 0 == script.end().status

    assert_untouched(before)


def test_a_spool_that_becomes_a_link(scripts: Scripts) -> None:
    """What no reader would find is not called stored; once the folder is back, all is there."""
    script = scripts.start(
        """
import cirron as ci
def record():
    with ci.scope("step"):
        pass
    told = ci.flush()
    return [told.ok, told.on_disk, told.held, told.why]
ci.profile(frameworks=[], flush_interval=0.05)
""",
        driven=True,
    )
    spool, large = scripts.home / "spool", scripts.folder / "large"
    assert [True, 1, 0, None] == script.ask("record()")
    spool.rename(large)
    spool.symlink_to(large)
    why = f"cannot write to {spool}: it is a symbolic link, which is not followed"
    assert [False, 1, 1, why] == script.ask("record()")
    spool.unlink()
    large.rename(spool)
    assert [True, 3, 0, None] == script.ask("record()")
    assert 0 == script.end().status


def test_a_home_that_is_a_link(scripts: Scripts) -> None:
    """`.cirron` itself may be a link, to a larger disk for one: all is recorded there."""
    (scripts.folder / "large").mkdir()
    scripts.home.symlink_to("large")
    ended = scripts.run(writes())

    assert 0 == ended.status, ended.err
    assert 99 in {span.index for span in scripts.session().spans}
    assert "clean" == scripts.state()


def test_links_at_the_black_boxs_temporary_name(scripts: Scripts) -> None:
    """A link at any name beside the black box leads nowhere, and the box is written as ever."""
    victim = scripts.folder / "victim"
    victim.write_text("precious")
    script = scripts.start("""
        import time
        import cirron as ci

        ci.profile(flush_interval=0.02)
        time.sleep(600)
    """)
    box = scripts.wait_for_box(lambda box: True, "anything")
    (path,) = (scripts.home / "blackbox").glob("*.json")
    for _ in range(10):
        for name in (f"{path.stem}.tmp", f"{path.name}.tmp", f".{path.name}.tmp", f"{path.name}~"):
            link = path.with_name(name)
            if not link.is_symlink():
                try:
                    link.symlink_to(victim)
                except FileExistsError:  # it is just being written
                    pass
        before = scripts.box()["heartbeat_ns"]
        scripts.wait_until(
            lambda before=before: scripts.box()["heartbeat_ns"] > before,  # type: ignore[misc]
            "the next heartbeat",
            timeout_s=2,
        )

    assert "precious" == victim.read_text()
    assert not path.is_symlink()
    assert script.pid == box["pid"]


# Sees every file that the process is about to create, and puts a link there first.
PLANTING = """
import os, sys, threading
victim = os.path.abspath("victim")
with open(victim, "w") as file:
    file.write("precious")
flags_seen, planted = [], set()

def watch(event, args):
    if event != "open" or not args[2] & os.O_CREAT:
        return
    if isinstance(args[0], int):
        return
    path = os.fsdecode(args[0])
    ours = ".cirron" in path
    if not ours and (os.path.isabs(path) or threading.current_thread() is threading.main_thread()):
        return
    flags_seen.append((path, args[2]))
    if "/.cirron-" not in path and len(planted) < int(os.environ["PLANT"]):
        for name in [path] if ours else [f".cirron/{one}/{path}" for one in ("spool", "blackbox")]:
            if name not in planted:
                planted.add(name)
                try:
                    os.symlink(victim, name)
                except OSError:
                    pass
sys.addaudithook(watch)
import cirron as ci
"""


def test_links_at_every_name_that_we_create(scripts: Scripts) -> None:
    """A link that appears at a name right before we create it leads nowhere: its target is as
    before, and every record and the black box are written in the end.
    """
    ended = scripts.run(
        PLANTING
        + """
ci.profile(flush_interval=0.02)
for number in range(200):
    with ci.scope("span", number):
        ci.mark("value", number)
    if number % 20 == 0:
        ci.flush()
import time
time.sleep(0.3)  # some flush intervals: what was held is tried again
ci.flush()
print(open(victim).read(), len(planted))
""",
        PLANT="6",
    )

    said, planted = ended.out.split()
    assert "precious" == said
    assert int(planted) >= 4, "the test planted nothing: it does not see what is created"
    assert 0 == ended.status
    run = scripts.session()
    assert list(range(200)) == sorted(span.index or 0 for span in run.spans if span.name == "span")
    assert 200 == len(run.marks)
    assert "clean" == scripts.state()


def test_every_file_is_created_exclusively(scripts: Scripts) -> None:
    """Whatever we create is created with O_EXCL and O_NOFOLLOW: batches, merged ones, black boxes,
    the outbox, in a forked child too.
    """
    ended = scripts.run(
        PLANTING
        + f"""
ci.Cirron(**{ENDPOINT}).profile(flush_interval=0.02)
for number in range(150):
    with ci.scope("span", number):
        pass
    ci.flush()
pid = os.fork()
with ci.scope("after the fork"):
    pass
ci.shutdown()
def is_loose(path, flags):
    # What lists our folders is shared by processes, and appended to; all else is new.
    needed = os.O_NOFOLLOW if "/.cirron-" in path else os.O_EXCL | os.O_NOFOLLOW
    return flags & needed != needed
loose = sorted({{os.path.basename(os.path.dirname(path)) + "/*" + os.path.splitext(path)[1]
                for path, flags in flags_seen if is_loose(path, flags)}})
if pid == 0:
    print("child", loose, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("parent", loose, len(flags_seen) > 150)
""",
        PLANT="0",
    )

    assert 0 == ended.status, ended.err
    assert ["child []", "parent [] True"] == ended.out.splitlines()
    assert {"folders": "700", "files": "600"} == modes(scripts.home)


def modes(home: Path) -> dict[str, str]:
    """The modes of all folders and files, as octal text, by kind."""
    found: dict[str, set[str]] = {"folders": set(), "files": set()}
    for path in (home, *home.rglob("*")):
        mode = f"{stat.S_IMODE(path.lstat().st_mode):o}"
        found["folders" if path.is_dir() else "files"].add(mode)
    return {kind: " ".join(sorted(some)) for kind, some in found.items()}


@pytest.mark.parametrize(
    ("umask", "access"), [("0o022", ""), ("0o000", ""), ("0o022", "group"), ("0o077", "group")]
)
def test_who_may_read(scripts: Scripts, umask: str, access: str) -> None:
    """Whatever the umask, folders are 700 and files 600; `access="group"` makes it 750 and 640."""
    body = f"""
        import os
        os.umask({umask})
        import cirron as ci

        ci.Cirron(**{ENDPOINT}).profile(flush_interval=0.02)
        for number in range(5):
            with ci.scope("span", number):
                pass
            ci.flush()
        print(f"{{os.umask(0):o}}")
    """
    ended = scripts.run(body, CIRRON_ACCESS=access)

    assert (0, f"{int(umask, 8):o}\n") == ended[:2]  # the program's own umask is as it was
    expected = {"folders": "750", "files": "640"} if access else {"folders": "700", "files": "600"}
    assert expected == modes(scripts.home)
    assert {"spool", "blackbox"} <= {path.name for path in scripts.home.iterdir()}


def test_access_as_an_argument(scripts: Scripts) -> None:
    """`access` is a setting as any other, and a bad value names the good ones."""
    ended = scripts.run("""
        import cirron as ci

        try:
            ci.Cirron(access="everybody")
        except ci.SettingError as error:
            print("group" in str(error), "everybody" in str(error))
        ci.Cirron(access="group").profile()
    """)

    assert (0, "True True\n", "") == ended
    assert {"folders": "750", "files": "640"} == modes(scripts.home)


def test_what_a_dead_process_left_is_removed(scripts: Scripts) -> None:
    """A temporary file of ours that a killed process left is gone an hour later."""
    scripts.run(writes())
    spool = scripts.home / "spool"
    seen: set[str] = set()
    script = scripts.start(writes())
    while script.process.poll() is None:
        seen |= {path.name for path in spool.iterdir()}
    names = {name for name in seen if not name.endswith(".json") and ".cirron-" not in name}
    if not names:
        pytest.skip("no temporary file was ever seen, so there is none to leave")
    left = [spool / name for name in names]
    for path in left:
        path.write_text("{")
        os.chmod(path, 0o600)
        os.utime(path, (OLD, OLD))
    scripts.run(writes())

    assert [] == [path.name for path in left if path.exists()]
