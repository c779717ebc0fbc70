"""The logs of an iteration: values in named collections."""

from __future__ import annotations

from collections.abc import Mapping
from sys import modules
from typing import Any, Never

from ciclo import _trees
from ciclo.device_values import describe, is_running
from ciclo.errors import CallbackError, did_you_mean

LogsLike = Mapping[str, Mapping[str, Any]]

# The order in which a short name is looked up; the user's own collections come last. Rows of a
# history also have "elapsed".
COLLECTIONS = ("metrics", "losses", "stateful_metrics", "outputs")
ORDER = ("elapsed", *COLLECTIONS)


class Collection(dict[str, Any]):
    """Values by name, also available as attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"there is no {name!r}; there is {list(self)}{did_you_mean(name, self)}"
        )


DICTS: frozenset[Any] = frozenset((dict, Collection))  # the usual types of collections


class Logs(dict[str, dict[str, Any]]):
    """Values by collection and name: `{"metrics": {"loss": 0.5}}`.

    >>> logs = ciclo.logs().add_metric("loss", 0.5).add_metric("accuracy", 0.9)
    >>> logs.metrics.loss, logs.loss, logs["metrics"]["loss"]
    (0.5, 0.5, 0.5)
    """

    __slots__ = ()

    def __init__(self, given: LogsLike | None = None, **collections: Mapping[str, Any]) -> None:
        if "jax" in modules and not _trees.is_done:
            _trees.register()
        if given is not None:
            self.merge(given)
        if collections:
            self.merge(collections)

    @classmethod
    def _of(cls, collections: Mapping[str, dict[str, Any]]) -> Logs:
        """Logs from a dict of dicts, without checks; JAX may put placeholders in it."""
        logs = cls.__new__(cls)
        for collection, named in collections.items():
            logs[collection] = Collection(named) if isinstance(named, dict) else named
        return logs

    def add(self, collection: str, name: str, value: Any) -> Logs:
        """Adds a value to any collection, and returns the logs."""
        for one in () if type(name) is type(collection) is str else (name, collection):
            if not isinstance(one, str):
                raise CallbackError(f"log names must be strings: got {name!r} in {collection!r}")
        if (found := self.get(collection)) is None:
            found = self[collection] = Collection()
        found[name] = value
        return self

    add_entry = add

    def add_metric(self, name: str, value: Any) -> Logs:
        """Adds a value of this step."""
        if type(value) is not float and is_running(type(value)):
            raise CallbackError(
                f"the metric {name!r} is a {type(value).__name__}, which accumulates over steps;"
                f" write logs.add_stateful_metric({name!r}, ...), or log its compute()"
            )
        return self.add("metrics", name, value)

    def add_loss(self, name: str, value: Any, *, add_metric: bool = False) -> Logs:
        """Adds a loss, and with `add_metric` the same value as a metric."""
        if add_metric:
            self.add_metric(name, value)
        return self.add("losses", name, value)

    def add_stateful_metric(self, name: str, value: Any) -> Logs:
        """Adds a value that covers all steps so far, such as a running mean."""
        return self.add("stateful_metrics", name, value)

    def add_output(self, name: str, value: Any) -> Logs:
        """Adds an output of the model."""
        return self.add("outputs", name, value)

    def add_entries(self, collection: str, /, *unnamed: Never, **values: Any) -> Logs:
        """Adds several values to a collection."""
        if unnamed:
            raise CallbackError(f"{collection} are given by name; write **{collection}")
        for name, value in values.items():
            self.add(collection, name, value)
        return self

    def add_metrics(self, *unnamed: Never, **values: Any) -> Logs:
        """Adds several values of this step."""
        for name, value in values.items():
            self.add_metric(name, value)
        return self.add_entries("metrics", *unnamed)

    def add_losses(self, add_metrics: bool = False, **values: Any) -> Logs:
        """Adds several losses, and with `add_metrics` the same values as metrics."""
        if not isinstance(add_metrics, bool):
            raise CallbackError("losses are given by name; write logs.add_losses(**losses)")
        for name, value in values.items():
            self.add_loss(name, value, add_metric=add_metrics)
        return self

    def add_stateful_metrics(self, *unnamed: Never, **values: Any) -> Logs:
        """Adds several values that cover all steps so far."""
        return self.add_entries("stateful_metrics", *unnamed, **values)

    def add_outputs(self, *unnamed: Never, **values: Any) -> Logs:
        """Adds several outputs of the model."""
        return self.add_entries("outputs", *unnamed, **values)

    def merge(self, other: LogsLike) -> Logs:
        """Adds all values of other logs; they replace values of the same name."""
        check_logs(other)
        for collection, values in other.items():
            try:
                if (found := self.get(collection)) is None:
                    self[collection] = Collection(values)
                else:
                    found.update(values)
            except (TypeError, ValueError):
                raise CallbackError(
                    f'logs are a dict of dicts; write {{"metrics": {{{collection!r}: ...}}}}'
                ) from None
        return self

    @property
    def updates(self) -> Logs:
        """Assign to it to merge: `logs.updates, state = train_step(state, batch)`."""
        return self

    @updates.setter
    def updates(self, other: LogsLike | None) -> None:
        if other is not None:
            self.merge(other)

    # -- to find values ------------------------------------------------------------------------

    def find(self, name: str) -> tuple[str, str] | None:
        """The collection and the name of `"loss"` or `"metrics.loss"`; None if it is missing."""
        if not isinstance(name, str):
            raise KeyError(f"{name!r} is not a name in the logs, which have {self.names()}")
        for collection in (*ORDER, *self):
            if name in self.get(collection, ()):
                return collection, name
        collection, dot, rest = name.partition(".")
        return (collection, rest) if dot and rest in self.get(collection, ()) else None

    def value(self, name: str) -> Any:
        """The value of `"loss"` or `"metrics.loss"`."""
        found = self.find(name)
        if found is None:
            hint = did_you_mean(name, self._readable())
            raise KeyError(f"{name!r} is not in the logs, which have {self.names()}{hint}")
        return self[found[0]][found[1]]

    def entry_path(self, name: str) -> tuple[str, str] | None:
        """Like `find`; a ValueError if several collections have the name."""
        path = self.find(name)
        owners = [collection for collection, values in self.items() if name in values]
        if len(owners) > 1:
            paths = " or ".join(repr(f"{collection}.{name}") for collection in owners)
            raise ValueError(f"{name!r} is in several collections: {owners}; write {paths}")
        return path

    def entry_collection(self, name: str) -> str | None:
        """The collection of a name."""
        path = self.entry_path(name)
        return None if path is None else path[0]

    def entry_value(self, name: str) -> Any:
        """Like `value`; a ValueError if several collections have the name."""
        self.entry_path(name)
        return self.value(name)

    def names(self) -> list[str]:
        """All names as `collection.name`."""
        return [f"{collection}.{name}" for collection, values in self.items() for name in values]

    def __missing__(self, name: str) -> Any:
        return self.value(name)

    def __contains__(self, name: object) -> bool:
        """Whether there is a collection or a value of this name."""
        return dict.__contains__(self, name) or (
            isinstance(name, str) and self.find(name) is not None
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (collection := self.get(name)) is not None or name in COLLECTIONS:
            if not isinstance(collection, Collection):  # a new one may be filled
                collection = self[name] = Collection(collection or {})
            return collection
        found = self.find(name)
        if found is None:
            names = [*self._readable(), *(one for one in dir(Logs) if not one.startswith("_"))]
            raise AttributeError(
                f"the logs have no {name!r}; they have {self.names()}{did_you_mean(name, names)}"
            )
        return self[found[0]][found[1]]

    def _readable(self) -> list[str]:
        """All short names that can be looked up."""
        return [*self, *COLLECTIONS, *(name for values in self.values() for name in values)]

    def __reduce__(self) -> tuple[Any, ...]:
        return Logs, (dict(self),)


def check_logs(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise CallbackError(
            f'got {describe(given)} as logs; write a dict of dicts: {{"metrics": {{"loss": 0.5}}}}'
        )


def logs(given: LogsLike | None = None, **collections: Mapping[str, Any]) -> Logs:
    """Empty logs, or logs from a dict of dicts; also inside a `jax.jit` function."""
    return Logs(given, **collections)
