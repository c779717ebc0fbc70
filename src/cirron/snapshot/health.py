"""Finds problems in the statistics: NaN, dead layers, exploding and vanishing gradients.

Each tensor is compared with its own history only, because no norm is right for all. Gradients that
a step has cleared are ignored. Runs on the worker; knows nothing about spans or records.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cirron.snapshot.host import Tensor
    from cirron.snapshot.stats import Summary

# A norm is compared with the last PAST epochs, as soon as there are ENOUGH.
PAST = 10
ENOUGH = 3

# Factors of the median. In normal training a layer's norm changes less than tenfold within a few
# epochs. A hundredfold norm has blown up, and a thousandth means that the layer stopped learning.
EXPLODING = 100.0
VANISHING = 1e-3

# A smaller gradient may be 0 by chance. With a mean absolute error, the gradient of a bias is a sum
# of signs, which is 0 for a quarter of all batches of 8.
DEAD_SIZE = 8

MAX_NAMES = 20  # tensors that a mark lists; it counts all of them
SHOWN_NAMES = 3  # tensors in the text of a mark or a warning


class Finding(NamedTuple):
    """A problem of one tensor at one boundary, or its recovery."""

    problem: str
    tensor: str
    since: int | None  # the epoch in which it started
    detail: str
    is_new: bool  # the tensor has not had it before


def find_cleared(measured: Iterable[tuple[Tensor, Summary]]) -> set[str | None]:
    """The models whose gradients are all 0, because the loop has cleared them: no layer is dead."""
    gradients = [(its, summary) for its, summary in measured if its.is_gradient and summary.size]
    alive = {its.model for its, summary in gradients if not summary.is_all_zero}
    return {its.model for its, _ in gradients} - alive - {None}


class History:
    """The earlier norms and problems of a tensor."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=PAST)  # of a gradient
        self.problem: str | None = None
        self.since: int | None = None  # the epoch in which the problem started
        self.seen: set[str] = set()  # problems


class Judge:
    """Finds the problems of each boundary, and remembers the history of each tensor."""

    def __init__(self) -> None:
        self._histories: defaultdict[str, History] = defaultdict(History)

    def forget(self, names: Iterable[str]) -> None:
        """Forgets the history of these names, which now belong to another model."""
        for name in names:
            for its in (name, f"{name}.grad"):
                self._histories.pop(its, None)

    def report(
        self, epoch: int | None, measured: list[tuple[Tensor, Summary]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """A text and attributes for each problem. Warns about tensors that have a new one."""
        cleared = find_cleared(measured)
        by_problem: defaultdict[str, list[Finding]] = defaultdict(list)
        for tensor, summary in measured:
            if not (tensor.is_gradient and tensor.model in cleared):
                finding = self.judge(epoch, tensor, summary)
                if finding is not None:
                    by_problem[finding.problem].append(finding)
        for problem, found in by_problem.items():
            found.sort(key=lambda one: one.since != epoch)  # new ones first
            new = [one for one in found if one.is_new]
            if new:
                guard.warn(
                    "training health: %s: %s, since %s: %s. The marks named"
                    " training_health say more",
                    problem,
                    listed([one.tensor for one in new], ", "),
                    "this epoch" if epoch is None else f"epoch {epoch}",
                    new[0].detail,
                )
            attrs = {
                "problem": problem,
                "tensor": found[0].tensor,
                "epoch": epoch,
                "since": found[0].since,
                "detail": found[0].detail,
                "tensors": [one.tensor for one in found[:MAX_NAMES]],
                "sinces": [one.since for one in found[:MAX_NAMES]],
                "tensor_count": len(found),
            }
            yield f"{problem}: {listed([dated(one) for one in found], '; ')}", attrs

    def judge(self, epoch: int | None, tensor: Tensor, summary: Summary) -> Finding | None:
        """The tensor's problem or recovery, if there is one."""
        history = self._histories[tensor.name]
        found = find_problem(tensor, summary, history.norms)
        if found is None:
            before, history.problem = history.problem, None
            was = Finding("recovered", tensor.name, history.since, f"it was {before}", is_new=False)
            return None if before is None else was
        problem, detail = found
        if problem != history.problem:
            history.problem, history.since = problem, epoch
        is_new = problem not in history.seen
        history.seen.add(problem)
        return Finding(problem, tensor.name, history.since, detail, is_new)


def find_problem(tensor: Tensor, summary: Summary, norms: deque[float]) -> tuple[str, str] | None:
    """A problem and its detail; if there is none, the norm of a gradient is added to `norms`."""
    if summary.broken_count:
        return "not finite", f"{summary.broken_count} of {summary.size} values are NaN or infinite"
    norm = summary.stats.norm
    if not tensor.is_gradient or norm is None:
        return None
    if summary.is_all_zero:
        return ("dead", "every value of its gradient is 0") if summary.size >= DEAD_SIZE else None
    if len(norms) >= ENOUGH:
        usual = median(norms)
        detail = f"its gradient's norm is {norm:.3g}, it was {usual:.3g}"
        if norm > EXPLODING * usual:
            return "exploding", detail
        if norm < VANISHING * usual:
            return "vanishing", detail
    norms.append(norm)
    return None


def dated(finding: Finding) -> str:
    return finding.tensor if finding.since is None else f"{finding.tensor}, since {finding.since}"


def listed(names: list[str], between: str) -> str:
    more = len(names) - SHOWN_NAMES
    return between.join(names[:SHOWN_NAMES] + ([f"and {more} more"] if more > 0 else []))
