"""Checkpoints that a stranger has made or changed: nothing in them runs, and nothing else breaks.

Each file of each kind of checkpoint is replaced by a bomb, changed, planted, linked and cut, with a
manifest that lists what is there. What comes of it is a state or a `CheckpointError`, never code
that runs, another exception, a hang, or memory without end.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import struct
import tarfile
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ciclo
from ciclo.checkpoints import folder as folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

# Orbax leaves what it has begun when something else goes wrong.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TIMEOUT_S = 30
MAX_GROWTH_BYTES = 400 << 20
KINDS = ("plain", "numpy", "torch", "spread", "jax", "loop")
SEEDS = {"plain": 40, "numpy": 40, "torch": 40, "spread": 40, "jax": 8, "loop": 30}
Pair = namedtuple("Pair", "left right")


class Bomb:
    """A pickle of this makes a folder, where it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hang, and memory that grows, are failures; nothing is forced to the disk."""
    monkeypatch.setattr(folders, "_sync", lambda path: None)
    monkeypatch.setattr(folders, "_sync_folder", lambda path: None)

    def late(*args: Any) -> None:
        raise AssertionError(f"not done after {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TIMEOUT_S)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < MAX_GROWTH_BYTES


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """The folder that a bomb makes; no test may leave it there."""
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


# -- real checkpoints ------------------------------------------------------------------------------


def state(kind: str, n: int) -> Any:
    """A state of each kind; what it is compared with has another number."""
    if kind == "plain":
        return {"a": [n, 2.5, None, 1j], (1, "k"): Pair(n, {n}), "b": b"bytes", "big": 2**200 + n}
    if kind == "numpy":
        return {"w": np.arange(6.0) + n, "g": np.random.RandomState(n), "s": np.float32(n)}
    if kind in ("torch", "loop"):
        torch.manual_seed(n)
        module = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        made = {"module": module, "optimizer": optimizer, "n": torch.tensor(n)}
        if kind == "loop":
            made["rates"] = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return made
    if kind == "spread":
        return {"w": torch.arange(12.0).reshape(4, 3) * n, "b": torch.ones(2) * n}
    return {"w": jax.numpy.arange(6.0) * n, "key": jax.random.key(n), "z": jax.numpy.ones((2, 2))}


def train(place: Path, stop: int) -> Any:
    def step(state: Any, batch: int) -> Any:
        return {"metrics": {"loss": -float(batch), "text": "x"}}, state

    tasks = [
        (ciclo.every(1), step),
        (ciclo.every(1), ciclo.early_stopping("loss", patience=9, restore_best_weights=True)),
        (ciclo.every(1), ciclo.checkpoint(place, monitor="loss")),
    ]
    return ciclo.loop(state("loop", 1), range(6), tasks, stop, resume=place)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of each kind."""
    root = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "_sync", lambda path: None)
        for kind in (*KINDS[:3], "jax"):
            ciclo.checkpoint(root / kind, asynchronous=False)(ciclo.Elapsed(), state(kind, 7))
        save_spread(root / "spread")
        train(root / "loop", 3)
    return root


def save_spread(place: Path) -> None:
    """A checkpoint with shards, of a job with one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        spread = {
            name: distribute_tensor(value, mesh, [Shard(0)])
            for name, value in state("spread", 7).items()
        }
        ciclo.checkpoint(place, asynchronous=False)(ciclo.Elapsed(), spread)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Gives a fresh copy of a checkpoint, to be changed: its step's folder."""
    count = iter(range(10_000))

    def copied(kind: str) -> Path:
        target = tmp_path / f"{kind}-{next(count)}"
        shutil.copytree(originals / kind, target)
        return max(target.glob("step-*"))

    return copied


def listed(place: Path) -> None:
    """Has the manifest list all that is there, with its size."""
    meta = json.loads((place / "meta.json").read_text())
    files = {
        path.relative_to(place).as_posix(): path.stat().st_size
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != "meta.json"
    }
    (place / "meta.json").write_text(json.dumps({**meta, "files": files}))


def files_of(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file() and path.name != "meta.json")


def attempt(place: Path, kind: str) -> list[str]:
    """All ways to read a checkpoint without trust: what each refused, "" where it did not."""
    where = place.parent
    save = ciclo.checkpoint(where, monitor="loss")
    ways: list[Any] = [
        lambda: save.restore(state(kind, 1)),
        lambda: save.restore(),
        lambda: save.restore(state(kind, 1), step="best" if kind == "loop" else 1),
        lambda: (save.latest_step, save.best_step, save.steps),
    ]
    if kind == "loop":
        ways.append(lambda: train(where, 6))
    return [refused(way) for way in ways]


def refused(way: Callable[..., Any], *args: Any) -> str:
    """What the error says; "" if there is none, and a failure if it is another."""
    try:
        way(*args)
    except ciclo.CheckpointError as error:
        return str(error) or "nothing was said"
    return ""


def all_refused(said: list[str], *but: int) -> bool:
    """Whether no way gave a state; the last of them only lists what is there."""
    return all(one for i, one in enumerate(said) if i != 3 and i not in but)


def replaced_structure(place: Path, structure: Any, name: str = "state") -> None:
    (place / f"{name}.json").write_text(json.dumps(structure))


def plain_file(*contents: tuple[str, Any, bytes]) -> bytes:
    """A file of our own format."""
    header = json.dumps([[kind, form, len(content)] for kind, form, content in contents]).encode()
    start = b"ciclo\x001" + len(header).to_bytes(8, "little") + header
    return start + b"".join(content for _, _, content in contents)


def archive(content: bytes, records: dict[str, bytes] | None = None, **options: Any) -> bytes:
    """A file as `torch.save` writes it, with another pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as made:
        made.writestr("archive/data.pkl", content)
        made.writestr("archive/version", "3\n")
        made.writestr("archive/byteorder", "little")
        for name, record in (records or {}).items():
            made.writestr(f"archive/data/{name}", record)
    return file.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def tar_of(content: bytes) -> bytes:
    """The oldest format of torch, which `weights_only` once let through."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return file.getvalue()


# -- nothing runs --------------------------------------------------------------------------------


def test_what_is_not_changed_is_restored(copy: Callable[[str], Path]) -> None:
    """Checkpoints of every kind, shards too, need no trust; what is planted beside is ignored."""
    for kind in KINDS:
        place = copy(kind)
        (place / "sitecustomize.py").write_text("raise SystemExit")

        assert [""] * (5 if kind == "loop" else 4) == attempt(place, kind), kind
    found = ciclo.checkpoint(copy("spread").parent).restore(state("spread", 1))
    assert torch.equal(state("spread", 7)["w"], found["w"])


def test_the_bomb_works(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """With trust the bombs of these tests go off: the canary can die."""
    canary = tmp_path / "seen"
    place = copy("plain")
    replaced_structure(place, {"pickle": ["Bomb", {"leaf": ["plain", 0, "bytes"]}]})
    (place / "state.plain").write_bytes(plain_file(("bytes", None, pickle.dumps(Bomb(canary)))))
    listed(place)
    ciclo.checkpoint(place.parent).restore(trusted=True)

    assert canary.exists()
    for name, content in (
        ("state.torch", saved([Bomb(canary)])),
        (SHARDS + "/.metadata", pickle.dumps(Bomb(canary))),
    ):
        canary.rmdir()
        place = copy("spread")
        (place / name).write_bytes(content)
        listed(place)
        with pytest.raises(ciclo.CheckpointError):
            ciclo.checkpoint(place.parent).restore(trusted=True)

        assert canary.exists()


SHARDS = "state.torch.spread"


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_a_bomb(kind: str, copy: Callable[[str], Path], canary: Path) -> None:
    """Whichever file is a pickle or an archive of one, listed or not, it does not go off."""
    bomb = Bomb(canary)
    bombs = [pickle.dumps(bomb), saved([bomb])]
    original = copy(kind)
    for name in [path.relative_to(original) for path in files_of(original)]:
        for content in bombs[: 1 if kind == "jax" else 2]:
            place = copy(kind)
            (place / name).write_bytes(content)
            assert "is damaged" in attempt(place, kind)[0]
            listed(place)
            attempt(place, kind)


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_files_are_not_opened(
    kind: str, is_listed: bool, copy: Callable[[str], Path], canary: Path
) -> None:
    """A file that the state does not need is not read, however it is called."""
    place = copy(kind)
    content = pickle.dumps(Bomb(canary))
    names = (
        "state.torch",
        f"{SHARDS}/.metadata",
        "state.plain",
        "state.jax/_METADATA",
        "loop-1.json",
    )
    planted = [name for name in (*names, "loop.jax/checkpoint") if not (place / name).exists()]
    for name in planted:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    if is_listed:
        listed(place)
    said = attempt(place, kind)

    assert ["", "", ""] == said[:3]


def test_unlisted_files_of_orbax(copy: Callable[[str], Path]) -> None:
    """Orbax opens what it finds, so that it gets no folder with a file that is not listed."""
    place = copy("jax")
    (place / "state.jax" / "d" / "extra").write_bytes(b"x")

    assert "does not list 'state.jax/d/extra'; remove that file" in attempt(place, "jax")[0]


NEST: dict[str, Callable[[Any], Any]] = {
    "alone": lambda node: node,
    "key": lambda node: {"dict": [[node, 1]]},
    "key in a tuple": lambda node: {"dict": [[{"tuple": [node]}, 1]]},
    "in a set": lambda node: {"set": [node]},
    "in a deque": lambda node: {"deque": [None, [node]]},
    "in a number": lambda node: {"complex": [node, 1]},
    "in place": lambda node: {"in_place": ["Linear", node]},
    "part": lambda node: {"parts": ["Pair", [["left", node], ["right", 1]]]},
    "key of a part": lambda node: {"parts": ["Pair", [[node, 1]]]},
    "in a pickle": lambda node: {"pickle": ["x", node]},
    "unknown kind": lambda node: {"build": node},
    "two kinds": lambda node: {"tuple": [], "pickle": node["pickle"]},
    "inner name": lambda node: {"differ": ["", "", node]},
}


@pytest.mark.parametrize("nest", NEST)
def test_pickles_wherever_they_stand(nest: str, copy: Callable[[str], Path], canary: Path) -> None:
    """A pickle in a state or a loop is refused at every place, with what to say if it is ours."""
    content = plain_file(("bytes", None, pickle.dumps(Bomb(canary))))
    node = NEST[nest]({"pickle": ["Bomb", {"leaf": ["plain", 0, "bytes"]}]})
    for kind, name in (("plain", "state"), ("loop", "state")):
        place = copy(kind)
        replaced_structure(place, node, name)
        (place / f"{name}.plain").write_bytes(content)
        listed(place)

        assert all_refused(attempt(place, kind))
    likes: list[Any] = [state("torch", 1)["module"], Pair(1, 2), {}, None, np.ones(3)]
    for like in likes:
        with pytest.raises(ciclo.CheckpointError):
            ciclo.checkpoint(place.parent).restore(like)


@pytest.mark.parametrize("part", ["callbacks", "history", "data", "elapsed", "tasks", "all"])
def test_pickles_in_a_loop(part: str, copy: Callable[[str], Path], canary: Path) -> None:
    """History, random states, the place in the data and callbacks are not unpickled by resume."""
    place = copy("loop")
    loop = json.loads((place / "loop.json").read_text())
    pickled = {"pickle": ["Bomb", {"leaf": ["plain", 0, "bytes"]}]}
    loop["dict"] = [[key, pickled if part in (key, "all") else one] for key, one in loop["dict"]]
    replaced_structure(place, loop, "loop")
    (place / "loop.plain").write_bytes(plain_file(("bytes", None, pickle.dumps(Bomb(canary)))))
    listed(place)

    said = attempt(place, "loop")
    assert ["", "", "", ""] == said[:4]
    assert said[4] != ""


def test_resume_needs_trust_for_pickles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop whose state has a pickle says so when it saves, and goes on where trust is given."""

    def run(stop: int, **options: Any) -> Any:
        def step(state: Any, batch: int) -> Any:
            return None, {"n": state["n"] + batch, "path": state["path"]}

        save = ciclo.checkpoint("run", **options)
        tasks = [(ciclo.every(1), step), (ciclo.every(1), save)]
        return ciclo.loop({"n": 0, "path": Path("x")}, range(9), tasks, stop, resume="run").state

    run(3)
    assert "state['path'] (PosixPath) is saved as a pickle" in caplog.text
    caplog.clear()
    with pytest.raises(ciclo.CheckpointError, match=r"resume=ciclo.checkpoint\(folder, trusted"):
        run(6)
    assert {"n": 15, "path": Path("x")} == run(6, trusted=True)
    assert "" == caplog.text
    found = ciclo.checkpoint("run").restore({"path": Path("y")}, trusted=True)
    assert Path("x") == found["path"]


# -- torch ---------------------------------------------------------------------------------------


def deep(count: int = 150_000) -> bytes:
    """A pickle of a dict whose key is a deep tuple: to hash it overflows the stack of C."""
    return b"\x80\x02}" + b")" + b"\x85" * count + b"K\x01s."


def numbers_of(kind: bytes, count: int, shape: int) -> bytes:
    """A pickle of a list with one tensor, of memory and size as given."""
    size = b"J" + struct.pack("<i", shape) + b"\x85"
    storage = b"(X\x07\0\0\0storagectorch\n" + kind + b"\nX\x01\0\0\x000X\x03\0\0\0cpuJ"
    return (
        b"\x80\x02]ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + struct.pack("<i", count) + b"tQK\0" + size)
        + b"K\x01\x85\x89ccollections\nOrderedDict\n)RtRa."
    )


def torch_attacks(canary: Path) -> dict[str, bytes]:
    bomb = Bomb(canary)
    legacy = {"_use_new_zipfile_serialization": False}
    called = b"cbuiltins\nopen\n(X%s" % struct.pack("<i", len(str(canary))) + str(canary).encode()
    return {
        "legacy": saved([bomb], **legacy),
        "legacy tensors": saved([torch.ones(3)], **legacy),
        "tar": tar_of(pickle.dumps(bomb)),
        "protocol 0": archive(pickle.dumps([bomb], 0)),
        "protocol 4": archive(pickle.dumps([bomb], 4)),
        "inst": archive(b"\x80\x02(X\x01\0\0\0wibuiltins\nopen\n."),
        "global": archive(b"\x80\x02" + called + b"X\x01\0\0\0wtR."),
        "build": archive(b"\x80\x02ccollections\nOrderedDict\n)R}b."),
        "copyreg": archive(b"\x80\x02\x82\x01."),
        "state of a tensor": archive(
            numbers_of(b"FloatStorage", 3, 3)[:-2] + b"}ba.", {"0": bytes(12)}
        ),
        "memory": archive(b"\x80\x02]cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Ra."),
        "tensor": archive(b"\x80\x02]ctorch\nTensor\nJ\xff\xff\xff\x7f\x85Ra."),
        "deep": archive(deep()),
        "deep list": archive(b"\x80\x02" + b"]" * 150_000 + b"a" * 149_999 + b"."),
        "deep in a dict": archive(
            b"\x80\x02ccollections\nOrderedDict\n]("
            + b")"
            + b"\x85" * 150_000
            + b"K\x01\x86e\x85R."
        ),
        "memo": archive(b"\x80\x02]r\xff\xff\xff\x7f."),
        "long string": archive(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx."),
        "numbers": archive(numbers_of(b"FloatStorage", 2**28, 2**28), {"0": bytes(12)}),
        "wide numbers": archive(numbers_of(b"DoubleStorage", 3, 3), {"0": bytes(12)}),
        "too long": archive(numbers_of(b"FloatStorage", 3, 2**28), {"0": bytes(12)}),
        "other storage": archive(numbers_of(b"Generator", 3, 3), {"0": bytes(12)}),
        "no record": archive(numbers_of(b"FloatStorage", 3, 3)),
        "compressed": archive(
            numbers_of(b"ByteStorage", 2**26, 2**26),
            {"0": bytes(2**26)},
            compression=zipfile.ZIP_DEFLATED,
        ),
        "no list": archive(b"\x80\x02K\x01."),
        "no tensors": archive(b"\x80\x02](K\x01K\x02e."),
        "no stop": archive(b"\x80\x02]"),
        "empty stack": archive(b"\x80\x02."),
        "no pickle": archive(b""),
        "no zip": b"PK\x03\x04" + bytes(50),
        "nothing": b"",
        "other tensors": saved([torch.ones(3)] * 30),
        "subclass": saved([torch.nn.Parameter(torch.ones(2))]),
    }


def test_files_of_torch(copy: Callable[[str], Path], canary: Path) -> None:
    """What is not plain tensors of what is in the file is refused before torch reads it."""
    for name, content in torch_attacks(canary).items():
        place = copy("torch")
        (place / "state.torch").write_bytes(content)
        listed(place)

        assert "" != refused(ciclo.checkpoint(place.parent).restore, state("torch", 1)), name


def test_what_needs_trust_says_so(copy: Callable[[str], Path], canary: Path) -> None:
    """A file that cannot be read safely says how to read it all the same."""
    for kind, name, content in (
        ("torch", "state.torch", saved([torch.nn.Parameter(torch.ones(2))])),
        ("spread", f"{SHARDS}/.metadata", pickle.dumps(Bomb(canary))),
    ):
        place = copy(kind)
        (place / name).write_bytes(content)
        listed(place)
        with pytest.raises(ciclo.CheckpointError, match=r"restore\(like, trusted=True\)"):
            ciclo.checkpoint(place.parent).restore(state(kind, 1))


class Marked(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor that only its own class can make again."""


def test_a_subclass_of_a_tensor_needs_trust() -> None:
    """It is refused without trust, and comes back with it."""
    save = ciclo.checkpoint("there")
    save(ciclo.Elapsed(), [torch.ones(2).as_subclass(Marked)])

    assert "_rebuild_from_type_v2" in refused(save.restore)
    (found,) = save.restore(trusted=True)
    assert (Marked, [1.0, 1.0]) == (type(found), found.tolist())


# -- shards --------------------------------------------------------------------------------------


def shard_attacks(index: Any, place: Path, canary: Path) -> dict[str, Callable[[], Any]]:
    """Ways to change the index of the shards, which is a pickle, in place."""
    from torch.distributed.checkpoint import metadata as kinds

    key = next(iter(index.storage_data))
    info, about = index.storage_data[key], index.state_dict_metadata[key.fqn]
    outside = place.parent / "outside"
    outside.write_bytes(saved([Bomb(canary)]))

    def sizes(*numbers: int) -> Any:
        return [kinds.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size(numbers))]

    def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    return {
        "above": put(info, "relative_path", "../../outside"),
        "absolute": put(info, "relative_path", str(outside)),
        "no path": put(info, "relative_path", 7),
        "path of a class": put(info, "relative_path", Path("__0_0.distcp")),
        "offset": put(info, "offset", -1),
        "far offset": put(info, "offset", 2**62),
        "length": put(info, "length", 2**62),
        "no length": put(info, "length", float("nan")),
        "encoded": put(info, "transform_descriptors", ["zstd"]),
        "bytes": lambda: index.state_dict_metadata.update({key.fqn: kinds.BytesStorageMetadata()}),
        "missing": lambda: index.state_dict_metadata.clear(),
        "no places": lambda: index.storage_data.clear(),
        "no parts": put(about, "chunks", []),
        "same parts": put(about, "chunks", about.chunks * 2),
        "huge part": put(about, "chunks", sizes(2**31, 2**31)),
        "huge": put(about, "size", torch.Size([2**31, 2**31])),
        "type": put(about.properties, "dtype", torch.float64),
        "bomb in the plan": put(index, "planner_data", {"x": Bomb(canary)}),
        "bomb for a size": put(about, "size", Bomb(canary)),
        "bomb for a key": lambda: index.storage_data.update({"x": Bomb(canary)}),
        "no index": lambda: index.__dict__.clear(),
    }


def test_the_index_of_shards(copy: Callable[[str], Path], canary: Path) -> None:
    """The index of torch is data: whatever it names is not called, and its places are checked."""
    names = list(shard_attacks(_index(copy("spread")), copy("spread"), canary))
    for name in names:
        place = copy("spread")
        index = _index(place)
        shard_attacks(index, place, canary)[name]()
        (place / SHARDS / ".metadata").write_bytes(pickle.dumps(index))
        listed(place)
        said = attempt(place, "spread")

        # What torch has no need of may be anything: it is not even looked up.
        assert (name == "bomb in the plan") == (not any(said)), (name, said)


def _index(place: Path) -> Any:
    return pickle.loads((place / SHARDS / ".metadata").read_bytes())


def test_shards_and_raw_indexes(copy: Callable[[str], Path], canary: Path) -> None:
    """A shard must be a plain tensor, and an index no more than torch writes."""
    place = copy("spread")
    info = next(iter(_index(place).storage_data.values()))
    attacks = {
        SHARDS + "/" + info.relative_path: {
            name: content + bytes(max(0, info.length - len(content)))
            for name, content in torch_attacks(canary).items()
        },
        SHARDS + "/.metadata": {
            "deep": deep(),
            "deep state": b"\x80\x02ctorch\nMetadata\n)\x81" + b")" + b"\x85" * 150_000 + b"b.",
            "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
            "bytes": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7fx.",
            "list": b"\x80\x02].",
            "nothing": b"",
        },
    }
    for file, contents in attacks.items():
        for name, content in contents.items():
            place = copy("spread")
            (place / file).write_bytes(content)
            listed(place)

            assert "" != refused(ciclo.checkpoint(place.parent).restore), (file, name)


# -- files that are none --------------------------------------------------------------------------


def make_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:  # a name may be long, and the address of a socket not
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


NOT_FILES: dict[str, Callable[[Path, Path], Any]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "link to itself": lambda path, outside: path.symlink_to(path),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "pipe": make_fifo,
    "socket": make_socket,
    "folder": lambda path, outside: path.mkdir(),
    "nothing": lambda path, outside: None,
}


@pytest.mark.parametrize("other", NOT_FILES)
def test_what_is_no_file(other: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Links, pipes, sockets and folders in the place of a file are not opened, nor waited for."""
    for kind, name in (
        ("plain", "meta.json"),
        ("plain", "state.json"),
        ("numpy", "state.plain"),
        ("torch", "state.torch"),
        ("spread", f"{SHARDS}/.metadata"),
        ("spread", f"{SHARDS}/__0_0.distcp"),
        ("jax", "state.jax/_METADATA"),
        ("loop", "loop.json"),
    ):
        place = copy(kind)
        outside = tmp_path / "outside"
        shutil.copy(place / name, outside)
        (place / name).unlink()
        NOT_FILES[other](place / name, outside)
        said = attempt(place, kind)

        assert all_refused(said), (kind, name)
        assert "is damaged" in said[0]


def test_linked_folders(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """A folder in a checkpoint, or the checkpoint itself, that is a link is not followed."""
    for kind, name in (
        ("jax", "state.jax"),
        ("jax", "state.jax/d"),
        ("spread", SHARDS),
        ("plain", "."),
    ):
        place = copy(kind)
        inner = place / name
        shutil.move(inner, tmp_path / "moved")
        inner.symlink_to(tmp_path / "moved")

        assert all_refused(attempt(place, kind)), name
        shutil.rmtree(tmp_path / "moved")


def test_links_where_a_checkpoint_is_written(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Links at the names that saving uses are removed, and what they lead to is as it was."""
    place = copy("plain")
    kept = tmp_path / "kept"
    shutil.copytree(place, kept)
    for name in (
        ".step-00000004.tmp",
        ".step-00000004.gone",
        ".step-00000005.old",
        "step-00000002",
    ):
        (place.parent / name).symlink_to(kept)
    save = ciclo.checkpoint(place.parent, overwrite=True)
    save(ciclo.Elapsed(steps=3), 7)

    assert ([4], 7) == (save.steps, save.restore())
    assert ["step-00000004"] == os.listdir(place.parent)
    assert {"meta.json", "state.json", "state.plain"} == set(os.listdir(kept))


# -- the manifest --------------------------------------------------------------------------------


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "absolute": lambda meta: meta["files"].update({"/etc/passwd": os.stat("/etc/passwd").st_size}),
    "above": lambda meta: meta["files"].update({"../outside": 7}),
    "above inside": lambda meta: meta["files"].update({"x/../../outside": 7}),
    "through itself": lambda meta: meta["files"].update(
        {"./state.json": meta["files"]["state.json"]}
    ),
    "backslash": lambda meta: meta["files"].update({"..\\outside": 7}),
    "zero byte": lambda meta: meta["files"].update({"state.json\0": 7}),
    "escape": lambda meta: meta["files"].update({"\x1b[2J": 7}),
    "empty name": lambda meta: meta["files"].update({"": 7}),
    "dot": lambda meta: meta["files"].update({".": 4096}),
    "long name": lambda meta: meta["files"].update({"x" * 100_000: 7}),
    "nan": lambda meta: meta["files"].update({"state.json": float("nan")}),
    "infinite": lambda meta: meta["files"].update({"state.json": float("inf")}),
    "float": lambda meta: meta["files"].update({"state.json": float(meta["files"]["state.json"])}),
    "text": lambda meta: meta["files"].update({"state.json": str(meta["files"]["state.json"])}),
    "none": lambda meta: meta["files"].update({"state.json": None}),
    "huge": lambda meta: meta["files"].update({"state.json": 10**4000}),
    "negative": lambda meta: meta["files"].update({"state.json": -1}),
    "list": lambda meta: meta.update(files=[*meta["files"]]),
    "no files": lambda meta: meta.update(files={}),
    "null": lambda meta: meta.update(files=None),
    "missing": lambda meta: meta.pop("files"),
    "format": lambda meta: meta.update(format=2),
    "value": lambda meta: meta.update(value="7"),
    "value nan": lambda meta: meta.update(value=float("nan")),
    "unlisted": lambda meta: meta["files"].pop("state.json"),
}
TEXTS = {
    "empty": b"",
    "not json": b"\xff\xfe{",
    "list": b"[]",
    "number": b"1e999",
    "deep": b'{"format": 1, "files": ' + b"[" * 150_000,
    "deep objects": b'{"a":' * 150_000,
    "long number": b'{"format": 1, "value": ' + b"1" * 100_000 + b"}",
    "twice": b'{"format": 1, "files": {}, "files": {"state.json": 1}}',
    "wide": "{}".encode("utf-32"),
}


def test_manifests(copy: Callable[[str], Path]) -> None:
    """Names stay inside, sizes are whole numbers, and all that is wrong is said to be damaged."""
    for name, change in MANIFESTS.items():
        place = copy("loop")
        (place.parent / "outside").write_bytes(b"outside")
        meta = json.loads((place / "meta.json").read_text())
        change(meta)
        (place / "meta.json").write_text(json.dumps(meta))

        assert all_refused(attempt(place, "loop")), name
    for name, text in TEXTS.items():
        place = copy("loop")
        (place / "meta.json").write_bytes(text)
        said = attempt(place, "loop")

        assert all_refused(said), name
        assert "is damaged" in said[0], name


def test_a_damaged_newest_is_passed_over(copy: Callable[[str], Path]) -> None:
    """Whatever a planted newest checkpoint is, the one before is used, and that is said."""
    place = copy("plain")
    (place.parent / "step-00000009").write_bytes(b"x")
    (place.parent / "step-00000008").symlink_to(place)
    (place.parent / "step-\u0660000000\u0667").mkdir()
    (place.parent / "step-0000000006").mkdir()
    save = ciclo.checkpoint(place.parent)

    assert ([1, 8, 9], 1) == (save.steps, save.latest_step)
    with pytest.raises(ciclo.CheckpointError, match="step-00000009 is not a folder"):
        save.restore(step=9)


def test_files_that_are_large(copy: Callable[[str], Path]) -> None:
    """Holes of a terabyte are not read: a file is as large as what it says of itself."""
    for kind, name in (
        ("plain", "meta.json"),
        ("plain", "state.json"),
        ("plain", "state.plain"),
        ("numpy", "state.plain"),
        ("torch", "state.torch"),
        ("spread", f"{SHARDS}/.metadata"),
        ("spread", f"{SHARDS}/__0_0.distcp"),
        ("jax", "state.jax/_METADATA"),
        ("loop", "loop.json"),
        ("loop", "loop.plain"),
    ):
        place = copy(kind)
        os.truncate(place / name, 1 << 40)
        if name != "meta.json":
            listed(place)
        said = attempt(place, kind)

        # A shard may be longer than what is read of it; of a loop, the state is another file.
        is_read = name != f"{SHARDS}/__0_0.distcp"
        assert all_refused(said[4:] if kind == "loop" else said) == is_read, name
    place = copy("plain")
    replaced_structure(place, {"leaf": ["plain", 0, "bytes"]})
    header = json.dumps([["bytes", None, 1 << 40]]).encode()
    (place / "state.plain").write_bytes(b"ciclo\x001" + len(header).to_bytes(8, "little") + header)
    os.truncate(place / "state.plain", 15 + len(header) + (1 << 40))
    listed(place)
    assert "this machine has" in attempt(place, "plain")[0]


# -- structures and arrays -----------------------------------------------------------------------


LEAF = ["plain", 0, "bytes"]
STRUCTURES: dict[str, Any] = {
    "no kind": {},
    "leaf of nothing": {"leaf": []},
    "leaf of no format": {"leaf": ["os", 0, "x"]},
    "leaf of a list": {"leaf": [[], 0, "x"]},
    "far leaf": {"leaf": ["plain", 10**9, "bytes"]},
    "leaf below": {"leaf": ["plain", -1, "bytes"]},
    "leaf of a fraction": {"leaf": ["plain", 0.0, "bytes"]},
    "leaf of a number": {"leaf": ["plain", 0, 7]},
    "same leaf": [{"leaf": LEAF}] * 1000,
    "other leaf": {"leaf": ["plain", 0, "float32[3]"]},
    "traits": {"leaf": [*LEAF, True, True, True]},
    "leaf of torch": {"leaf": ["torch", 0, "float32[3]"]},
    "leaf of JAX": {"leaf": ["jax", 0, "float32[3]"]},
    "key of a leaf": {"dict": [[{"leaf": LEAF}, 1]]},
    "key of a list": {"dict": [[[1], 1]]},
    "key of a dict": {"dict": [[{"dict": []}, 1]]},
    "same key": {"dict": [["a", 1], ["a", 2]]},
    "no pair": {"dict": [["a"]]},
    "pairs of text": {"dict": "ab"},
    "tuple of a number": {"tuple": 7},
    "set of lists": {"set": [[1]]},
    "int": {"int": "x"},
    "int of a number": {"int": 7},
    "float": {"float": "x"},
    "complex": {"complex": [1]},
    "complex of text": {"complex": ["a", "b"]},
    "deque": {"deque": [-1, []]},
    "deque of text": {"deque": "xy"},
    "in place": {"in_place": "x"},
    "parts": {"parts": ["Pair"]},
    "pickle": {"pickle": "x"},
    "underscore": {"_plan": [1]},
}


def test_structures(copy: Callable[[str], Path]) -> None:
    """A structure that is not one of ours is refused, whatever `like` is."""
    for name, structure in STRUCTURES.items():
        for kind in ("plain", "loop"):
            place = copy(kind)
            replaced_structure(place, structure)
            (place / "state.plain").write_bytes(plain_file(("bytes", None, b"x")))
            listed(place)
            # `Pair` is a part without its types, which come later.
            is_kept = (1,) if name in ("parts", "in place") else ()

            assert all_refused(attempt(place, kind), *is_kept), name
    for name, text in TEXTS.items():
        place = copy("plain")
        (place / "state.json").write_bytes(text)
        listed(place)

        assert all_refused(attempt(place, "plain")) or name in ("list", "number"), name


ARRAYS: dict[str, bytes] = {
    "no file of ours": b"numpy",
    "pickle": b"\x93NUMPY\x01\0",
    "long header": b"ciclo\x001" + b"\xff" * 8,
    "no header": b"ciclo\x001" + bytes(8),
    "cut": plain_file(("numpy", ["<f8", [3]], bytes(24)))[:-1],
    "more": plain_file(("numpy", ["<f8", [3]], bytes(24))) + b"x",
    "objects": plain_file(("numpy", ["|O", [3]], bytes(24))),
    "objects by name": plain_file(("numpy", ["object", [3]], bytes(24))),
    "records": plain_file(("numpy", ["<f8,<O", [3]], bytes(48))),
    "repeated": plain_file(("numpy", ["(9,9)<f8", [3]], bytes(24))),
    "no type": plain_file(("numpy", [7, [3]], bytes(24))),
    "unknown type": plain_file(("numpy", ["nothing", [3]], bytes(24))),
    "shape": plain_file(("numpy", ["<f8", [2**62, 2**62]], bytes(24))),
    "shape below": plain_file(("numpy", ["<f8", [-1]], bytes(24))),
    "shape of text": plain_file(("numpy", ["<f8", ["3"]], bytes(24))),
    "no shape": plain_file(("numpy", ["<f8", None], bytes(24))),
    "other type": plain_file(("numpy", ["<i8", [3]], bytes(24))),
    "array": plain_file(("array", "d", bytes(24))),
    "array of nothing": plain_file(("array", "O", bytes(24))),
    "other kind": plain_file(("pickle", None, bytes(24))),
    "none": plain_file(),
    "two": plain_file(("numpy", ["<f8", [3]], bytes(24)), ("bytes", None, b"x")),
}
HEADERS = [[], {}, 7, [7], [["bytes", None]], [["bytes", None, "1"]], [["bytes", None, -5]]]
HEADERS += [[["bytes", None, 10**30]], [["bytes", None, float("nan")]], [["bytes", None, True]]]


def test_arrays(copy: Callable[[str], Path]) -> None:
    """Arrays have the type, the shape and the size that the structure and the file say."""
    contents = dict(ARRAYS)
    for i, header in enumerate(HEADERS):
        text = json.dumps(header).encode()
        contents[f"header {i}"] = b"ciclo\x001" + len(text).to_bytes(8, "little") + text + b"x"
    for name, content in contents.items():
        place = copy("numpy")
        replaced_structure(place, {"leaf": ["plain", 0, "float64[3]"]})
        (place / "state.plain").write_bytes(content)
        listed(place)
        for like in (np.zeros(3), None):
            assert "" != refused(ciclo.checkpoint(place.parent).restore, like), name


def test_random_generators(copy: Callable[[str], Path]) -> None:
    """NumPy reads at whatever place a state says; ours must lie in its table."""
    key = {"leaf": ["plain", 0, "uint32[624]"]}
    content = plain_file(("numpy", ["<u4", [624]], bytes(624 * 4)))
    for like, wrapped in (
        (np.random.RandomState(0), lambda at: {"tuple": ["MT19937", key, at, 0, 0.0]}),
        (
            np.random.Generator(np.random.MT19937(0)),
            lambda at: {
                "dict": [
                    ["bit_generator", "MT19937"],
                    ["state", {"dict": [["key", key], ["pos", at]]}],
                ]
            },
        ),
    ):
        for at in (10**6, -(10**6), 2**62, "x", None):
            place = copy("numpy")
            replaced_structure(place, {"in_place": [type(like).__qualname__, wrapped(at)]})
            (place / "state.plain").write_bytes(content)
            listed(place)
            with pytest.raises(ciclo.CheckpointError):
                ciclo.checkpoint(place.parent).restore(like)
        like.random()


def test_arrays_of_jax(copy: Callable[[str], Path]) -> None:
    """What Orbax finds is what the structure says, and what this machine can hold."""
    tensorstore = pytest.importorskip("tensorstore")
    huge = 1 << 44
    for described in ("float32[6]", f"float32[{huge}]"):
        place = copy("jax")
        shutil.rmtree(place / "state.jax" / "ocdbt.process_0")
        kept = {"driver": "ocdbt", "base": (place / "state.jax").as_uri(), "path": "0/"}
        shape = {"shape": [huge], "chunks": [1024], "dtype": "<f4"}
        spec = {"driver": "zarr", "kvstore": kept, "metadata": shape}
        tensorstore.open(spec, create=True, delete_existing=True).result()
        structure = json.loads((place / "state.json").read_text())
        for pair in structure["dict"]:
            if pair[1]["leaf"][1] == 0:
                pair[1]["leaf"][2] = described
        replaced_structure(place, structure)
        listed(place)

        assert all_refused(attempt(place, "jax")), described


LOOPS: dict[str, Any] = {
    "elapsed": [7, {"dict": [["steps", "x"]]}, None],
    "last": [7, [1], "x"],
    "tasks": [7, {"dict": []}],
    "anchors": [7, [["x", [1, 2]], 7]],
    "history": [7, {"dict": []}, {"dict": [["index", {"dict": []}], ["columns", []]]}],
    "is_stopped": ["x", []],
    "epoch": ["x", []],
    "data": [
        7,
        {"dict": []},
        {"dict": [["kind", "count"], ["count", 10**30], ["ahead", 0], ["state", None]]},
        {"dict": [["kind", "count"], ["count", 1], ["ahead", 10**30], ["state", None]]},
    ],
    "callbacks": [7, [], [1, 2, 3]],
}


def test_loops(copy: Callable[[str], Path]) -> None:
    """What is not of a loop is refused before the loop begins."""
    for key, values in LOOPS.items():
        for value in values:
            place = copy("loop")
            loop = json.loads((place / "loop.json").read_text())
            loop["dict"] = [[name, value if name == key else one] for name, one in loop["dict"]]
            replaced_structure(place, loop, "loop")
            listed(place)

            assert attempt(place, "loop")[4] != "", (key, value)


def test_messages_are_safe_to_print(copy: Callable[[str], Path]) -> None:
    """A stranger's text in an error moves no cursor, and is not long."""
    place = copy("plain")
    replaced_structure(place, {"parts": ["\x1b[2J\u202e\x9b" + "x" * 10**6, []]})
    listed(place)
    said = attempt(place, "plain")[0]

    assert all(one == "\n" or one.isprintable() for one in said)
    assert "\\u001b" in said
    assert len(said) < 30_000


# -- chance --------------------------------------------------------------------------------------


def mutate(content: bytes, rng: random.Random) -> bytes:
    """The content with a few bytes that are changed, cut, doubled or put in."""
    at = rng.randrange(len(content) + 1)
    some = bytes(rng.randrange(256) for _ in range(rng.choice((1, 1, 2, 8))))
    way = rng.randrange(6)
    if way == 0:
        return content[:at]
    if way == 1:
        return content[:at] + some + content[at:]
    if way == 2:
        return content[:at] + content[at + len(some) :]
    if way == 3:
        return content[:at] + content[at : at + 64] * 3 + content[at + 64 :]
    if way == 4:
        return content[:at] + rng.choice((b"\0", b"\xff", b"9", b"[", b'"')) * 8 + content[at + 8 :]
    return content[:at] + some + content[at + len(some) :]


@pytest.mark.parametrize("kind", KINDS)
def test_changed_by_chance(kind: str, copy: Callable[[str], Path]) -> None:
    """Bytes that are changed anywhere give a state or a CheckpointError."""
    for seed in range(SEEDS[kind]):
        rng = random.Random(seed)
        place = copy(kind)
        for path in rng.sample(files_of(place), rng.choice((1, 1, 2))):
            path.write_bytes(mutate(path.read_bytes(), rng))
        listed(place)
        attempt(place, kind)


def test_swapped_files(copy: Callable[[str], Path]) -> None:
    """The file of one checkpoint, or of one name, in the place of another is found out."""
    for kind in ("torch", "spread", "loop", "numpy"):
        original = copy(kind)
        for path in files_of(original):
            for other in files_of(original):
                place = copy(kind)
                shutil.copy(other, place / path.relative_to(original))
                listed(place)
                attempt(place, kind)
