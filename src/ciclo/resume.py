"""Resuming a run: the position in the data, random numbers, and the rest of the loop.

`Feed` reads a dataset and tracks its position. `take_up` restores a checkpoint into a loop that is
set up but has not started.
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
LOOP = re.compile(r"loop-[0-9]+\.json")  # of ranks other than 0


class Feed:
    """Reads a dataset, once per epoch, and tracks its position.

    A dataset that saves its own position (`state_dict` of torchdata, `get_state` of Grain) is used
    for that. Otherwise resuming restores the random state, and skips the batches that were read.
    """

    def __init__(self) -> None:
        self.is_resumable = False  # whether to refuse data that cannot be resumed
        self._saved: dict[str, Any] | None = None
        self._dataset: Any = None
        self._items: Any = None
        self._before: dict[str, Any] = {}  # the random state when reading started
        self._count = 0
        self.ahead: list[Any] = []  # read, but not yielded yet

    def read(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """The batches, from the resumed position; reading starts with the first one."""
        if self.is_resumable:
            check_source(dataset)
        return self._begun_later(dataset)

    def _begun_later(self, dataset: Iterable[Any]) -> Iterator[Any]:
        yield from self.begin(dataset)

    def begin(self, dataset: Iterable[Any], can_repeat: bool = False) -> Iterator[Any]:
        """Starts reading.

        can_repeat: whether the dataset was just created, and would be created the same again
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
        """For a run resumed at the end of an epoch: the rest of the stream, if there is any.

        The saved position of a loader may be its end, or the start of the next epoch.
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
        """Restores the random state of a resumed run that has nothing left to read."""
        if self._saved is not None:
            set_random_state(self._saved["now"])

    def state_dict(self) -> dict[str, Any]:
        owner, get, _ = self._owner()
        return {
            "kind": "count" if owner is None else get,
            "count": self._count,
            "state": None if owner is None else getattr(owner, get)(),
            # Batches that can be read again are not saved.
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
            raise ValueError("the position in the data is missing")
        self._saved = saved

    def _owner(self) -> tuple[Any, str, str]:
        """The object that knows the position, and the names of its methods."""
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
                    f"the run had read {count} batches of the dataset, which now has {skipped}"
                )
            return
        self.ahead = saved["ahead"]
        if any(isinstance(batch, tree.Loose) for batch in self.ahead):
            raise CheckpointError("batches of your own type need fit(..., steps_per_epoch=...)")
        # A loader is restored before it is iterated, an iterator once it exists.
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
    with checked(f"{type(owner).__name__} cannot restore the position in the checkpoint"):
        getattr(owner, put)(state)


def check_source(dataset: Any) -> None:
    """Refuses data that can be read only once and cannot save its position."""
    if not hasattr(dataset, "__next__"):  # not iter(): that would start a loader's workers
        return
    if any(callable(getattr(dataset, name, None)) for pair in SAYS for name in pair):
        return
    raise CheckpointError(
        f"resume= needs data that can be read again, but a {type(dataset).__name__} can be read"
        " only once; give a list, a loader or an object whose __iter__ starts again, or an"
        " iterator with state_dict() and load_state_dict(state)"
    )


# -- random numbers ------------------------------------------------------------------------------


def random_state(dataset: Any = None) -> dict[str, Any]:
    """The random state of Python, NumPy, torch and a loader.

    JAX keys are part of the loop's state.
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
    """Restores what `random_state` returned."""
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
    """The generators of a torch DataLoader and its sampler."""
    owners = (dataset, getattr(dataset, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(one): one for one in found if hasattr(one, "get_state")}
    return list(unique.values())


def _sampler(dataset: Any) -> Any:
    """The sampler of a DataLoader, if it has `set_epoch`."""
    sampler = getattr(dataset, "sampler", None)
    is_told = hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch")
    return sampler if is_told else None


# -- the loop ------------------------------------------------------------------------------------


def take_up(run: LoopState[Any], folder: Folder, is_trusted: bool = False) -> bool:
    """Restores the latest checkpoint into a loop; False if there is none."""
    step = folder.latest()
    if step is None:
        return False
    manifest = folder.manifest(step)
    place = manifest.place
    if not manifest.is_resumable:
        raise CheckpointError(
            f"{place} was saved by hand and contains only a state; load it with"
            " ciclo.checkpoint(...).restore(state)"
        )
    process = Process()
    name = f"loop-{process.rank}" if process.rank else "loop"
    count = 1 + sum(LOOP.fullmatch(one) is not None for one in manifest.files)
    if count != process.count:
        name = "loop"
        warn(
            f"{place} was saved by {count} processes, but this run has {process.count}: each uses"
            " the random state and the position in the data of rank 0"
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
    """Turns any error about the content of a checkpoint into a CheckpointError."""
    try:
        yield
    except CicloError:
        raise
    except Exception as error:  # the values in a checkpoint may be anything
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def set_up(run: LoopState[Any], callbacks: list[Bound], resume: Any) -> bool:
    """Prepares a loop for saving, and restores the checkpoint of `resume`; whether there is one.

    callbacks: with `resume` but no checkpoint, one is appended that saves the end of the loop
    """
    from ciclo.callbacks.saving import checkpoint

    run._feed = Feed()
    savers = {id(one.owner): one.owner for one in callbacks if isinstance(one.owner, checkpoint)}
    places = [(saver.folder.path, saver.folder.prefix) for saver in savers.values()]
    if len(places) > len(set(places)):
        raise CheckpointError(
            f"two checkpoints of this loop save into {max(places, key=places.count)[0]}; use one"
            " for both schedules, or give each its own folder"
        )
    for saver in savers.values():
        saver.folder.check()
    if resume is None:
        return False
    found = getattr(resume, "folder", None)
    if not isinstance(found, Folder) and not isinstance(resume, (str, os.PathLike)):
        raise CheckpointError(
            f"resume={resume!r} is not a folder; give the folder with the checkpoints, as resume="
            '"runs/1", or the ciclo.checkpoint that saves there'
        )
    folder = found if isinstance(found, Folder) else Folder(resume)
    if not isinstance(found, Folder):  # a checkpoint that saves there knows their prefix
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
    """Checks counts and history rows, which the loop relies on."""
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
        raise ValueError("its history is incomplete")


def _check_tasks(saved: list[str], given: list[str], place: Any) -> None:
    if saved == given:
        return
    lines = [f"only in the checkpoint: {one}" for one in saved if one not in given]
    lines += [f"only in this run: {one}" for one in given if one not in saved]
    lines = lines or [f"the checkpoint has the order {', '.join(saved)}"]
    # A lambda is the schedule of a moment, such as the end of an epoch.
    text = "".join(f"\n  {line.replace('<lambda>: ', '')}" for line in lines)
    raise CheckpointError(f"{place} is of a loop with other tasks:{text}")
