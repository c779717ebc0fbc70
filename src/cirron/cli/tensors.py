"""`cirron tensors`: weights and gradients over the epochs, unhealthy ones first."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cirron import errors, export
from cirron.cli import output
from cirron.view import tables, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cirron.runs.opened import Run

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = str.maketrans(BARS, "_.:-=+*#")  # for a terminal that lacks them
MAX_ROWS = 50
WIDTH = 20  # of a curve
BAR_WIDTH = 24  # of a histogram
COLUMNS = ("tensor", "shape", "health", "norm", "mean", "std", "gradient norm", "change")
EPOCH_COLUMNS = ("epoch", "norm", "mean", "std", "min", "max", "gradient_norm", "change")


class TensorHistory(NamedTuple):
    """One tensor of one rank, with an entry per epoch."""

    name: str
    rank: int | None
    epochs: list[dict[str, Any]]
    problem: str  # empty if it is healthy

    @property
    def last(self) -> dict[str, Any]:
        return self.epochs[-1]


@click.command()
@click.argument("wanted", metavar="[RUN]", required=False)
@click.argument("name", metavar="[NAME]", required=False)
@output.in_folder
@click.option("--all", "is_all", is_flag=True, help=f"Show more than {MAX_ROWS} tensors.")
@output.as_json
def tensors(
    wanted: str | None, name: str | None, folder: str | None, is_all: bool, is_json: bool
) -> None:
    """Show the tensors of a run: norm, mean, std and gradient norm over the epochs.

    With NAME, show one tensor epoch by epoch, with the histograms of the last epoch. A single
    argument that is not a run is a tensor of the newest run. Unhealthy tensors come first: not
    finite, dead, exploding, vanishing, without a gradient.
    """
    folder, wanted = output.folder_or_run(folder, wanted)
    with output.naming(wanted):
        place = output.open_place(folder)
        try:
            run = output.chosen(place, wanted)
        except errors.UnknownRunError:
            if name is not None:
                raise
            run, name = place.runs.latest, wanted
    found = every = read(run)
    if name is not None:
        found = [one for one in every if one.name == name.removesuffix(".grad")]
    if not found:
        what = f"run {text.plain(run.id)} has no snapshots: call ci.watch(model) before training"
        if name is not None:
            kinds = "neither a run nor a tensor" if name == wanted else "not a tensor"
            hint = "`cirron tensors` lists its tensors" if every else what
            what = f"{text.plain(name)!r} is {kinds} of run {text.plain(run.id)}; {hint}"
        raise errors.UnknownRunError(what)
    if is_json:
        output.echo({"run_id": run.id, "tensors": [one._asdict() for one in found]})
    elif name is None:
        shown = found if is_all else found[:MAX_ROWS]
        left = len(found) - len(shown)
        more = f"and {text.plural(left, 'more tensor')}: --all shows them" if left else ""
        output.table(COLUMNS, [row(one) for one in shown], more)
    else:
        for one in found:
            show_one(run, one)


# -- the data -----------------------------------------------------------------------------------


def read(run: Run) -> list[TensorHistory]:
    """The tensors of a run's last attempt, unhealthy ones first."""
    by_tensor: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for entry in run.query("tensors"):
        if entry["attempt"] == run.attempts[-1]:
            entry["attrs"] = export.attributes(entry["attrs"])
            by_tensor.setdefault((entry["tensor"], entry["rank"]), []).append(entry)
    sick = health(run)
    found = [
        TensorHistory(name, rank, epochs, sick.get((name, rank)) or _problem(epochs[-1]["attrs"]))
        for (name, rank), epochs in by_tensor.items()
    ]
    return sorted(found, key=lambda one: not one.problem)


def health(run: Run) -> dict[tuple[str, int | None], str]:
    """The problem that each tensor, or its gradient, had last; empty once it has recovered."""
    found = {}
    for mark in run.sql(
        "SELECT attrs, rank FROM marks WHERE name = 'training_health' ORDER BY ts_ns"
    ):
        said = export.attributes(mark["attrs"])
        names, since = said.get("tensors"), said.get("sinces")
        for at, name in enumerate(names if isinstance(names, list) else []):
            problem = "" if said.get("problem") == "recovered" else str(said.get("problem"))
            began = since[at] if isinstance(since, list) and at < len(since) else None
            if problem and began is not None:
                problem += f" since {began}"
            found[str(name).removesuffix(".grad"), mark["rank"]] = text.plain(problem)
    return found


def _problem(attrs: dict[str, Any]) -> str:
    if attrs.get("nonfinite_count"):
        return f"{text.value(attrs['nonfinite_count'])} not finite"
    return "no gradient" if attrs.get("no_gradient") else ""


# -- as text ------------------------------------------------------------------------------------


def row(one: TensorHistory) -> list[str]:
    state = one.problem or ("frozen" if one.last["attrs"].get("frozen") else "ok")
    name = text.plain(one.name) + ("" if one.rank is None else f" @{one.rank}")
    change = one.last["change"]
    return [
        name,
        text.plain(one.last["shape"] or "-"),
        state,
        *(curve(one.epochs, key) for key in ("norm", "mean", "std", "gradient_norm")),
        "-" if change is None else f"{100 * change:.2g}%",
    ]


def curve(epochs: Sequence[dict[str, Any]], key: str) -> str:
    """The values over the epochs as a line of bars, and the last one."""
    values = [entry[key] for entry in epochs]
    last = "-" if values[-1] is None else text.value(float(values[-1]))
    if len(values) == 1:
        return last
    drawn = spark(values)
    is_drawable = drawn == text.encodable(drawn, sys.stdout)
    return f"{drawn if is_drawable else drawn.translate(ASCII_BARS)} {last}"


def spark(values: Sequence[float | None]) -> str:
    """A line of bars from the lowest value to the highest; `!` for one that is not finite.

    >>> spark([1.0, 2.0, None, 3.0])
    '▁▅ █'
    """
    if len(values) > WIDTH:  # the last of each stretch
        values = [values[(at + 1) * len(values) // WIDTH - 1] for at in range(WIDTH)]
    finite = [one for one in values if one is not None and one - one == 0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(one: float | None) -> str:
        if one is None:
            return " "
        if one - one != 0:
            return "!"
        # Halved first: the difference of two large numbers may overflow.
        share = 0.0 if high == low else (one / 2 - low / 2) / (high / 2 - low / 2)
        return BARS[round(share * (len(BARS) - 1))]

    return "".join(map(bar, values))


def show_one(run: Run, one: TensorHistory) -> None:
    """Prints a tensor: shape and dtype, its epochs, and the histograms of the last one."""
    rank = "" if one.rank is None else f", rank {one.rank}"
    shape, dtype = (text.plain(one.last[key] or "?") for key in ("shape", "dtype"))
    output.echo(f"{text.plain(one.name)}{rank}: {shape} {dtype}, {one.problem or 'ok'}")
    rows = [[entry[key] for key in EPOCH_COLUMNS] for entry in one.epochs]
    output.table(EPOCH_COLUMNS, tables.cells(EPOCH_COLUMNS, rows))
    beside = [drawn for name in (one.name, f"{one.name}.grad") if (drawn := draw(run, name, one))]
    widths = [max(map(len, drawn)) for drawn in beside]
    if beside:
        output.echo("")
    for lines in itertools.zip_longest(*beside, fillvalue=""):
        padded = (line.ljust(width) for line, width in zip(lines, widths, strict=True))
        output.echo("    ".join(padded).rstrip())


def draw(run: Run, name: str, of: TensorHistory) -> list[str]:
    """The newest histogram of a tensor, under a line that names it."""
    found = run.sql(
        "SELECT bins, counts, epoch FROM snapshots WHERE tensor = :tensor"
        " AND rank IS NOT DISTINCT FROM :rank ORDER BY ts_ns DESC LIMIT 1",
        tensor=name,
        rank=of.rank,
    ).rows()
    if not found or not found[0]["bins"] or not found[0]["counts"]:
        return []
    epoch = "" if found[0]["epoch"] is None else f" at epoch {found[0]['epoch']}"
    return [f"{text.plain(name)}{epoch}", *histogram(found[0]["bins"], found[0]["counts"])]


def histogram(bins: Sequence[float], counts: Iterable[int]) -> list[str]:
    """One line per bin: its start, a bar, and the count."""
    shown = list(counts)
    most = max(shown, default=0) or 1
    starts = [text.value(float(one)) for one in bins[: len(shown)]]
    width = max(map(len, starts), default=0)
    return [
        f"  {start:>{width}}  {'#' * -(-count * BAR_WIDTH // most):<{BAR_WIDTH}}  {count:,}"
        for start, count in zip(starts, shown, strict=False)
    ]
