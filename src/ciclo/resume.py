"""Going on where a run was: what is read of the data, random numbers, and the rest of the loop.

`Feed` reads a dataset and knows where it is. `take_up` puts all that a checkpoint holds back into a
loop that is set up and has not begun.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ciclo.binding import Bound
from ciclo.checkpoints import tree
from ciclo.checkpoints.folder import Folder
from ciclo.errors import CheckpointError, CicloError, need, warn
from ciclo.processes import Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ciclo.loop import LoopState

# The methods that save and restore the position of a data iterator.
SAYS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
LOOP = re.compile(r"loop-[0-9]+\.json")  # of a process that is not the first


class Feed:
    """Reads a dataset, again for each epoch, and knows where it is.

    What can say and be told where it is (`state_dict` of torchdata, `get_state` of Grain) is asked;
    of what can be read again, as many batches are skipped, with the random numbers of that time.
    """

    def __init__(self) -> None:
        self.is_resumable = False  # whether data is refused that cannot be gone on with
        self._saved: dict[str, Any] | None = None
        self._dataset: Any = None
        self._items: Any = None
        self._before: dict[str, Any] = {}  # the random state when the reading began
        self._count = 0
        self.ahead: list[Any] = []  # read, and not yet handed out

    def read(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """The batches, from where a run was that goes on; nothing is begun before the first."""
        if self.is_resumable:
            check_source(dataset)
        return self._begun_later(dataset)

    def _begun_later(self, dataset: Iterable[Any]) -> Iterator[Any]:
        yield from self.begin(dataset)

    def begin(self, dataset: Iterable[Any], can_repeat: bool = False) -> Iterator[Any]:
        """The same, begun.

        can_repeat: whether the dataset was just made, and the next one will be the same
        """
        if self.is_resumable and not can_repeat:
            check_source(dataset)
        saved, self._saved = self._saved, None
        self._dataset = dataset
        if saved is None:
            self._before = random_state(dataset)
            self._items = iter(dataset)
            self._count = 0
        else:
            self._before = saved["before"]
            self._go_to(saved)
            self._count = saved["count"]
            set_random_state(saved["now"], dataset)
        return self._handed_out()

    def _handed_out(self) -> Iterator[Any]:
        for batch in self._items:
            self._count += 1
            yield batch

    def finish(self, dataset: Iterable[Any]) -> Iterable[Any] | None:
        """For a run that was at the end of an epoch: what is left of the stream, if it goes on.

        A loader may be at the end of what it has read, or already at the start of the next epoch.
        """
        saved = self._saved
        if saved is None or saved["kind"] == "count":
            if saved is not None:
                set_random_state(saved["now"], dataset)
                self._saved = None
            return None
        items = self.begin(dataset, can_repeat=True)
        for first in items:
            return itertools.chain([first], items)
        set_random_state(saved["now"], dataset)
        return None

    def settle(self) -> None:
        """For a run that has nothing left to read: random numbers go on all the same."""
        if self._saved is not None:
            set_random_state(self._saved["now"])

    def state_dict(self) -> dict[str, Any]:
        owner, get, _ = self._owner()
        return {
            "kind": "count" if owner is None else get,
            "count": self._count,
            "state": None if owner is None else getattr(owner, get)(),
            # What can be read again is not put into a checkpoint.
            "ahead": self.ahead if owner is not None else len(self.ahead),
            "before": self._before if owner is None else {},
            "now": random_state(self._dataset),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        count, ahead = saved["count"], saved["ahead"]
        is_read = type(ahead) is int and 0 <= ahead <= count <= sys.maxsize
        if not (is_read if saved["kind"] == "count" else isinstance(ahead, list)):
            raise ValueError(f"{count!r} batches were read, {ahead!r} of them ahead")
        if type(count) is not int or not {"state", "before", "now"} <= saved.keys():
            raise ValueError("the place in the data is missing")
        self._saved = saved

    def _owner(self) -> tuple[Any, str, str]:
        """Who can say where the reading is, and how it is asked and told."""
        for one in (self._dataset, self._items):
            for get, put in SAYS:
                if callable(getattr(one, get, None)) and callable(getattr(one, put, None)):
                    return one, get, put
        return None, "", ""

    def _go_to(self, saved: dict[str, Any]) -> None:
        dataset, count = self._dataset, saved["count"]
        if saved["kind"] == "count":
            set_random_state(saved["before"], dataset)
            self._items = iter(dataset)
            skipped = sum(1 for _ in itertools.islice(self._items, count - saved["ahead"]))
            self.ahead = list(itertools.islice(self._items, saved["ahead"]))
            if skipped + len(self.ahead) < count:
                raise CheckpointError(
                    f"the run has read {count} batches of the dataset, which has {skipped} now"
                )
            return
        self.ahead = saved["ahead"]
        if any(isinstance(batch, tree.Loose) for batch in self.ahead):
            raise CheckpointError("batches of your own type need fit(..., steps_per_epoch=...)")
        # A loader is told before it begins, an iterator when it is there.
        owner, _, put = self._owner()
        if owner is not None:
            _tell(owner, put, saved["state"])
        self._items = iter(dataset)
        if owner is None:
            owner, _, put = self._owner()
            if owner is None:
                raise CheckpointError(
                    f"the run read its data by {saved['kind']}, which {type(dataset).__name__} does"
                    " not have; give the same kind of dataset"
                )
            _tell(owner, put, saved["state"])


def _tell(owner: Any, put: str, state: Any) -> None:
    with checked(f"{type(owner).__name__} cannot go on where the checkpoint says"):
        getattr(owner, put)(state)


def check_source(dataset: Any) -> None:
    """Refuses what can be read only once and cannot say where it is."""
    if not hasattr(dataset, "__next__"):  # not iter(): that would start a loader's workers
        return
    if any(callable(getattr(dataset, name, None)) for pair in SAYS for name in pair):
        return
    raise CheckpointError(
        f"resume= needs data that can be read again, and a {type(dataset).__name__} can be read"
        " only once; give a list, a loader or an object whose __iter__ begins anew, or an"
        " iterator with state_dict() and load_state_dict(state)"
    )


# -- random numbers ------------------------------------------------------------------------------


def random_state(dataset: Any = None) -> dict[str, Any]:
    """The state of all random generators there are: Python's, NumPy's, torch's, a loader's own.

    Keys of JAX are in the state of the loop.
    """
    found: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        found["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state_all()
    found["loader"] = [generator.get_state() for generator in _generators(dataset)]
    if (sampler := _sampler(dataset)) is not None:
        found["epoch"] = sampler.epoch
    return found


def set_random_state(saved: dict[str, Any], dataset: Any = None) -> None:
    """Sets them all."""
    if not saved:
        return
    with checked("the random state of the checkpoint cannot be set"):
        random.setstate(saved["python"])
        if "numpy" in saved:
            tree.check_generator(saved["numpy"])
            need("numpy", "the random state of the run").random.set_state(saved["numpy"])
        if "torch" in saved:
            torch = need("torch", "the random state of the run")
            torch.set_rng_state(saved["torch"])
            if "cuda" in saved and len(saved["cuda"]) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(saved["cuda"])
        for generator, state in zip(_generators(dataset), saved["loader"], strict=False):
            generator.set_state(state)
        if "epoch" in saved and (sampler := _sampler(dataset)) is not None:
            sampler.set_epoch(int(saved["epoch"]))


def _generators(dataset: Any) -> list[Any]:
    """The generators that a DataLoader of torch and its sampler draw from."""
    owners = (dataset, getattr(dataset, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if hasattr(one, "get_state")}
    return list(unique.values())


def _sampler(dataset: Any) -> Any:
    """The sampler of a DataLoader that is told its epoch."""
    sampler = getattr(dataset, "sampler", None)
    is_told = hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch")
    return sampler if is_told else None


# -- the loop ------------------------------------------------------------------------------------


def take_up(run: LoopState[Any], folder: Folder, is_trusted: bool = False) -> bool:
    """Puts back into a loop what its newest checkpoint holds; False if there is none."""
    step = folder.latest()
    if step is None:
        return False
    manifest = folder.manifest(step)
    place = manifest.place
    if not manifest.is_resumable:
        raise CheckpointError(
            f"{place} was saved by hand and has only a state; take that with"
            " ciclo.checkpoint(...).restore(state)"
        )
    process = Process()
    name = f"loop-{process.rank}" if process.rank else "loop"
    count = 1 + sum(LOOP.fullmatch(one) is not None for one in manifest.files)
    if count != process.count:
        name = "loop"
        warn(
            f"{place} was saved by {count} processes, and this run has {process.count}: each goes"
            " on with the random numbers and the place in the data of the first"
        )
    saved = tree.load(manifest, name, is_trusted=is_trusted)
    with checked(f"{place} has no loop in {name}.json"):
        _check_tasks(saved["tasks"], run.described_tasks(), place)
        _check_loop(saved)
    run.state = tree.load(manifest, "state", run.state, is_trusted=is_trusted)
    with checked(f"{place} has another loop in {name}.json"):
        run.load_state_dict(saved)
    return True


@contextmanager
def checked(what: str) -> Iterator[None]:
    """An error about the checkpoint, for what the code that takes it up raises."""
    try:
        yield
    except CicloError:
        raise
    except Exception as error:  # the values in a checkpoint may be anything
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def set_up(run: LoopState[Any], callbacks: list[Bound], resume: Any) -> bool:
    """Has a loop keep what a checkpoint needs; puts back what is in the folder to go on from.

    callbacks: where there is nothing that saves, that gets something which saves the loop's end
    """
    from ciclo.callbacks.saving import checkpoint

    run._feed = Feed()
    savers = {id(one.owner): one.owner for one in callbacks if isinstance(one.owner, checkpoint)}
    places = [(saver.folder.path, saver.folder.prefix) for saver in savers.values()]
    if len(places) > len(set(places)):
        raise CheckpointError(
            f"two checkpoints of this loop save into {max(places, key=places.count)[0]}; use one,"
            " at both schedules, or give each a folder of its own"
        )
    for saver in savers.values():
        saver.folder.check()
    if resume is None:
        return False
    found = getattr(resume, "folder", None)
    if not isinstance(found, Folder) and not isinstance(resume, (str, os.PathLike)):
        raise CheckpointError(
            f"resume={resume!r} is not a folder; give the one that is saved into, as resume="
            '"runs/1", or the checkpoint that saves there'
        )
    folder = found if isinstance(found, Folder) else Folder(resume)
    if not isinstance(found, Folder):  # whoever saves there knows what its checkpoints are called
        same = (one.folder for one in savers.values() if one.folder.path == folder.path)
        folder = next(same, folder)
    folder.check()
    known = (resume, *savers.values())
    is_trusted = any(
        one.trusted
        for one in known
        if isinstance(one, checkpoint) and one.folder.path == folder.path
    )
    run._feed.is_resumable = True
    if not savers:
        saver = checkpoint(folder.path, keep=None)
        callbacks.append(Bound("checkpoint", saver.__loop_callback__, saver))
    return take_up(run, folder, is_trusted)


def _check_loop(saved: dict[str, Any]) -> None:
    """Whether counts are numbers, and rows of the history are there: a loop believes both."""
    last, *counts = [{}] if saved["last"] is None else saved["last"]
    counts += [] if saved["epoch"] is None else [saved["epoch"]]
    for one in (saved["elapsed"], last):
        counts += [value for name, value in one.items() if name != "before"]
        counts += one.get("before", ())
    for count in counts:
        if type(count) not in (int, float):
            raise TypeError(f"{count!r} is not a count")
    rows = {len(column) for column in saved["history"]["index"].values()}
    for _, name, places, held in saved["history"]["columns"]:
        if len(places) != len(held) or (places and not 0 <= min(places) <= max(places) < max(rows)):
            raise ValueError(f"{name!r} was logged in other steps")
    if len(rows) > 1 or type(saved["is_stopped"]) is not bool:
        raise ValueError("its history is not whole")


def _check_tasks(saved: list[str], given: list[str], place: Any) -> None:
    if saved == given:
        return
    lines = [f"only in the checkpoint: {one}" for one in saved if one not in given]
    lines += [f"only in this run: {one}" for one in given if one not in saved]
    lines = lines or [f"the checkpoint has the order {', '.join(saved)}"]
    text = "".join(f"\n  {line}" for line in lines)
    raise CheckpointError(f"{place} is of a loop with other tasks:{text}")
