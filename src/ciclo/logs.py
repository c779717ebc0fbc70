"""What an iteration logs: values in named collections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciclo import _trees
from ciclo.errors import CallbackError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    LogsLike: TypeAlias = Mapping[str, Mapping[str, Any]]

# In which order a name without its collection is looked for; own collections come after these.
COLLECTIONS = ("metrics", "losses", "stateful_metrics", "outputs")


class Logs(dict[str, dict[str, Any]]):
    """Values by collection and name, as `{"metrics": {"loss": 0.5}}`.

    >>> logs = ciclo.logs()
    >>> logs.add_metric("loss", 0.5)
    >>> logs.metrics, logs.loss
    ({'loss': 0.5}, 0.5)
    """

    __slots__ = ()

    def __init__(self, given: LogsLike | None = None) -> None:
        _trees.register()
        if given:
            self.merge(given)

    @classmethod
    def _of(cls, collections: dict[str, dict[str, Any]]) -> Logs:
        logs = cls()
        dict.update(logs, collections)
        return logs

    def add(self, collection: str, name: str, value: Any) -> None:
        """Adds a value to a collection, which may be one of your own."""
        if (found := self.get(collection)) is None:
            found = self[collection] = {}
        found[name] = value

    def add_metric(self, name: str, value: Any) -> None:
        """Adds a value of this step alone."""
        self.add("metrics", name, value)

    def add_loss(self, name: str, value: Any) -> None:
        """Adds a loss."""
        self.add("losses", name, value)

    def add_stateful_metric(self, name: str, value: Any) -> None:
        """Adds a value that already stands for all steps so far, such as a running mean."""
        self.add("stateful_metrics", name, value)

    def add_output(self, name: str, value: Any) -> None:
        """Adds what a model put out."""
        self.add("outputs", name, value)

    def merge(self, other: LogsLike) -> None:
        """Takes over all values of other logs, over those of the same name."""
        for collection, values in other.items():
            try:
                if (found := self.get(collection)) is None:
                    self[collection] = dict(values)
                else:
                    found.update(values)
            except (TypeError, ValueError):
                raise CallbackError(
                    f'logs are a dict of dicts; write {{"metrics": {{{collection!r}: ...}}}}'
                ) from None

    @property
    def updates(self) -> Logs:
        """Assign to it to merge: `logs.updates, state = train_step(state, batch)`."""
        return self

    @updates.setter
    def updates(self, other: LogsLike | None) -> None:
        if other is not None:
            self.merge(other)

    def find(self, name: str) -> tuple[str, str] | None:
        """The collection and the name of `"loss"` or `"metrics.loss"`; None if it is not here."""
        for collection in (*COLLECTIONS, *self):
            if name in self.get(collection, ()):
                return collection, name
        collection, dot, rest = name.partition(".")
        return (collection, rest) if dot and rest in self.get(collection, ()) else None

    def value(self, name: str) -> Any:
        """The value of `"loss"` or `"metrics.loss"`; KeyError says what there is."""
        found = self.find(name)
        if found is None:
            raise KeyError(f"{name!r} is not in the logs, which have {self.names()}")
        return self[found[0]][found[1]]

    def scalars(self) -> dict[str, Any]:
        """The metrics and losses by name: what bars and loggers show."""
        found: dict[str, Any] = {}
        for collection in ("losses", "stateful_metrics", "metrics"):
            found.update(self.get(collection, {}))
        return found

    def names(self) -> list[str]:
        """All values as `collection.name`."""
        return [f"{collection}.{name}" for collection, values in self.items() for name in values]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self:
            return self[name]
        if name in COLLECTIONS:
            return self.setdefault(name, {})  # it may be filled
        found = self.find(name)
        if found is None:
            raise AttributeError(f"the logs have no {name!r}; they have {self.names()}")
        return self[found[0]][found[1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Logs, (dict(self),)


def logs() -> Logs:
    """Empty logs, to be filled; inside a `jax.jit` function too."""
    return Logs()
