"""The spans of a run as a tree: building, selecting, folding and converting it.

Pure data and pure functions: no files, no clock, no formatting (a tree's `repr` calls the view).
Views call `outline`, which returns a short list of rows for a tree of any size.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from msgspec import Struct, field
from msgspec.structs import astuple, replace

from cirron import errors, wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pandas import DataFrame

# More siblings of one name than this are folded into one row.
FOLD_ABOVE = 20
# The same for these, which loops repeat, and for the children of a folded row.
FOLD_STEPS_ABOVE = 5
REPEATED = ("step", "batch", "data_load", "forward", "backward")
# More epochs than this are folded, except the first and the last few.
FOLD_EPOCHS_ABOVE = 10
OUTER_EPOCHS = 2
# These thresholds are tried if there would be more rows than a screen or two.
FOLD_HARDER = (5, 1)
GOAL_ROWS = 60
# Spans that differ in these attributes are not folded into one row.
TRAITS = ("mode", "estimator")
# A child that at most one in this many folded siblings has is shown with its parent.
FEW = 2
# Rows under one parent.
MAX_SIBLINGS = 50
MAX_ROWS = 400
# The recorder stops at 64. Files of other programs may have any depth, and JSON encoders recurse.
MAX_DEPTH = 128

# The types of a mark's value; None for a type that only a newer writer knows.
Value: TypeAlias = float | int | str | bool | None

NONFINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Node(wire.Span, eq=False):
    """A span in a tree. Its parent may be missing there."""

    marks: list[wire.Mark] = field(default_factory=list)  # by time
    children: list[Node] = field(default_factory=list)  # by start
    depth: int = -1  # 0 for a root; -1 until it is known

    @property
    def is_open(self) -> bool:
        """Whether the span had not ended at its last sign of life."""
        return self.end_ns is None

    @property
    def error(self) -> str | None:
        """The exception that ended the span."""
        text = self.attrs.get("error")
        return None if text is None else str(text)

    def wall_ns(self, now_ns: int) -> int:
        """The duration of the span, up to `now_ns` if it is open."""
        end_ns = now_ns if self.end_ns is None else self.end_ns
        return max(0, end_ns - self.start_ns)

    def __repr__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"<Node {self.name}{index}, {len(self.children)} children>"


class Tree:
    """Spans by parent. Open spans last until `now_ns`."""

    def __init__(self, nodes: list[Node], now_ns: int, marks: Sequence[wire.Mark] = ()) -> None:
        self.is_partial = False  # older spans were dropped
        self.is_selection = False  # made by `select`
        self.roots = _assemble(nodes)
        self.span_count = len(nodes)
        self.now_ns = now_ns
        self.marks = list(marks)  # recorded while no span was open

    def __repr__(self) -> str:
        from cirron.view import text

        return text.render(self)

    def _repr_html_(self) -> str:
        from cirron.view import notebook

        return notebook.to_html(self)


def build(
    spans: Iterable[wire.Span], marks: Iterable[wire.Mark], now_ns: int | None = None
) -> Tree:
    """The tree of these records. Duplicates are dropped; a closed span replaces an open copy.

    By default, `now_ns` is the latest time in any record.
    """
    nodes: dict[str, Node] = {}
    for span in spans:
        known = nodes.get(span.id)
        if known is None or (known.end_ns is None and span.end_ns is not None):
            nodes[span.id] = Node(*astuple(span))

    latest_ns = 0
    outside: list[wire.Mark] = []
    unique = {mark.id: mark for mark in marks}
    for mark in sorted(unique.values(), key=attrgetter("ts_ns")):
        latest_ns = mark.ts_ns
        owner = nodes.get(mark.span_id)
        if owner is not None:
            owner.marks.append(mark)
        elif mark.span_id == "root":
            outside.append(mark)
    if now_ns is None:
        ends = (node.start_ns if node.end_ns is None else node.end_ns for node in nodes.values())
        now_ns = max(latest_ns, max(ends, default=0))
    return Tree(list(nodes.values()), now_ns, outside)


def select(tree: Tree, name: str | None = None, last: int | None = None) -> Tree:
    """The spans called `name` with their descendants, or the `last` spans that closed.

    With both, the last spans of that name with their descendants. If a span and its parent are both
    kept, they stay nested.
    """
    if name is None and last is None:
        return tree
    kept = list(walk(tree.roots)) if name is None else list(_matches(tree.roots, name))
    if last is not None:
        closed = [node for node in kept if node.end_ns is not None]
        # Of two spans that ended in the same nanosecond, the outer one closed later.
        closed.sort(key=lambda node: (node.end_ns, -node.depth, node.start_ns))
        kept = closed[max(0, len(closed) - last) :]
    if name is not None:
        kept = list(walk(kept))
    copies = [replace(node, children=[], depth=-1) for node in kept]
    selected = Tree(copies, tree.now_ns)
    selected.is_partial = tree.is_partial
    selected.is_selection = True
    return selected


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes and their descendants, parents first."""
    pending = list(nodes)[::-1]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))


def _matches(nodes: Iterable[Node], name: str) -> Iterator[Node]:
    """The outermost nodes of this name."""
    for node in nodes:
        if node.name == name:
            yield node
        else:
            yield from _matches(node.children, name)


def _assemble(nodes: list[Node]) -> list[Node]:
    """Links parents with children, sets the depths, and returns the roots."""
    nodes = sorted(nodes, key=attrgetter("start_ns"))
    by_id: dict[str | None, Node] = {node.id: node for node in nodes}
    roots: list[Node] = []
    parentless = []
    for node in nodes:
        parent = by_id.get(node.parent_id)
        if parent is None:
            parentless.append(node)
        else:
            parent.children.append(node)
    _place(parentless, roots)
    for node in nodes:
        if node.depth < 0:  # its parents form a cycle, which only a damaged file has
            first = _on_circle(node, by_id)
            by_id[first.parent_id].children.remove(first)
            _place([first], roots)
    roots.sort(key=attrgetter("start_ns"))
    return roots


def _on_circle(node: Node, by_id: Mapping[str | None, Node]) -> Node:
    """A node of the cycle that this node's parents lead to."""
    seen = set()
    while node.id not in seen:
        seen.add(node.id)
        node = by_id[node.parent_id]
    return node


def _place(level: list[Node], roots: list[Node]) -> None:
    """Sets the depths from here down. Spans that are too deep become roots."""
    roots += level
    depth = 0
    while level:
        below: list[Node] = []
        for node in level:
            node.depth = depth
            below += node.children
        depth += 1
        if depth == MAX_DEPTH:
            for node in level:
                node.children = []
            roots += below
            depth = 0
        level = below


# -- folding: many similar siblings become one row -----------------------------------------------


class Series:
    """The values of a mark over time: how many, the first and the last."""

    def __init__(self, first: Value) -> None:
        self.count = 0
        self.first = self.last = first
        self.nonfinite_count = 0

    def add(self, value: Value) -> None:
        self.count += 1
        self.last = value
        self.nonfinite_count += isinstance(value, float) and value - value != 0


class Folded:
    """Siblings with the same name that are shown as one row."""

    def __init__(self, members: Sequence[Node], threshold: int, now_ns: int) -> None:
        walls = [node.wall_ns(now_ns) for node in members]
        self.name = members[0].name
        self.traits = {key: known for key in TRAITS if (known := members[0].attrs.get(key))}
        self.count = len(members)
        self.worst_ns = max(walls)
        self.worst_index = members[walls.index(self.worst_ns)].index
        self.total_ns = sum(walls)
        walls.sort()
        middle = len(walls) // 2
        self.median_ns = (walls[middle] + walls[-middle - 1]) // 2
        self.start_ns = members[0].start_ns
        self.end_ns = max(now_ns if node.end_ns is None else node.end_ns for node in members)
        self.is_open = members[0].is_open
        self.error = members[0].error
        self.marks = series(members)
        self.times = shared_times(members)
        self.pooled = [child for node in members for child in node.children]
        self.owners = {node.id: node for node in members}
        self.parents = list(dict.fromkeys(node.parent_id for node in members))
        self.threshold = min(threshold, FOLD_STEPS_ABOVE)
        self.now_ns = now_ns

    @property
    def children(self) -> list[Item]:
        """The children of all members together, folded in turn."""
        return fold(self.pooled, self.threshold, self.now_ns)


class Rest(Struct, eq=False):
    """Spans that are not shown: those past `shown` rows of a parent, or all inside a row."""

    name: ClassVar[str] = "..."
    error: ClassVar[str | None] = None
    is_open: ClassVar[bool] = False
    count: int
    shown: int
    start_ns: int


Item: TypeAlias = Node | Folded | Rest


def fold(
    nodes: Sequence[Node],
    threshold: int = FOLD_ABOVE,
    now_ns: int = 0,
    *,
    is_inside: bool = False,
) -> list[Item]:
    """The rows of these siblings, by start. More than `threshold` similar ones share a row.

    Spans that are open, failed or truncated have separate rows, because they are the ones to look
    at. So have spans with different `TRAITS`: a forward in training says nothing about one in an
    evaluation. Of many epochs, the first and the last have separate rows. Epochs at the top of the
    tree were selected by name, so they are folded only above `MAX_SIBLINGS`. After `MAX_SIBLINGS`
    rows, the rest is only counted.
    """
    epoch_threshold = min(max(threshold, 2 * OUTER_EPOCHS + 1), FOLD_EPOCHS_ABOVE)
    step_threshold = min(threshold, FOLD_STEPS_ABOVE if is_inside else FOLD_ABOVE)
    limits = {"epoch": MAX_SIBLINGS, **dict.fromkeys(REPEATED, step_threshold)}
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in sorted(nodes, key=attrgetter("start_ns")):
        is_cut = "truncated" in node.attrs
        traits = tuple(str(node.attrs.get(key)) for key in TRAITS)
        key = (node.name, traits, node.is_open, node.error is not None, is_cut)
        groups.setdefault(key, []).append(node)
    items: list[Item] = []
    for members in groups.values():
        if is_inside and members[0].name == "epoch" and len(members) > epoch_threshold:
            items += members[:OUTER_EPOCHS] + members[-OUTER_EPOCHS:]
            items.append(Folded(members[OUTER_EPOCHS:-OUTER_EPOCHS], threshold, now_ns))
        elif len(members) > limits.get(members[0].name, threshold):
            items.append(Folded(members, threshold, now_ns))
        else:
            items += members
    items.sort(key=attrgetter("start_ns"))
    if len(items) <= MAX_SIBLINGS:
        return items
    # Open spans show where the process is, so they are always kept.
    ranked = sorted(items, key=lambda item: not item.is_open)
    shown = sorted(ranked[:MAX_SIBLINGS], key=attrgetter("start_ns"))
    hidden = ranked[MAX_SIBLINGS:]
    count = sum(span_count(item) + _count(_inner(item)) for item in hidden)
    return [*shown, Rest(count, len(shown), hidden[0].start_ns)]


class Row(Struct, eq=False):
    """One line of an outline, with the lines below it.

    If the line above is folded and only a few of its spans contain this one, `inside` has the first
    and the last of them.
    """

    item: Item
    depth: int
    inside: tuple[Node, Node] | None = None
    rows: list[Row] = field(default_factory=list)


def outline(tree: Tree, max_rows: int = MAX_ROWS) -> list[Row]:
    """The nested rows to show for a tree. Together they stand for every span.

    Folds harder above `GOAL_ROWS` rows, or above `max_rows` for a selection. If that is not enough,
    there are up to `max_rows`, and the innermost spans are left out.
    """
    goal = max_rows if tree.is_selection else min(GOAL_ROWS, max_rows)
    for threshold in (FOLD_ABOVE, *FOLD_HARDER):
        rows = _expand(tree, threshold, goal)
        if rows is not None:
            return rows
    return _expand(tree, threshold, max_rows, may_cut=True) or []


def flatten(rows: Iterable[Row]) -> Iterator[Row]:
    """These rows and all rows below them, in reading order."""
    pending = list(rows)[::-1]
    while pending:
        row = pending.pop()
        yield row
        pending.extend(reversed(row.rows))


def span_count(item: Item) -> int:
    """The number of spans in a row, without those in the rows below it."""
    return 1 if isinstance(item, Node) else item.count


def _expand(
    tree: Tree, threshold: int, max_rows: int, *, may_cut: bool = False
) -> list[Row] | None:
    """The rows, level by level, so that the innermost are cut; None if any would be cut."""
    top = [Row(item, 0) for item in fold(tree.roots, threshold, tree.now_ns)]
    count = len(top)
    level = top
    while level:
        below: list[Row] = []
        for row in sorted(level, key=lambda row: not row.item.is_open):
            inner = _inner(row.item)
            if not inner:
                continue
            if isinstance(row.item, Folded):
                items = row.item.children
            else:
                items = fold(inner, threshold, tree.now_ns, is_inside=True)
            if count + len(items) > max_rows:
                if not may_cut:
                    return None
                items = [Rest(_count(inner), 0, inner[0].start_ns)]
            count += len(items)
            row.rows = [Row(item, row.depth + 1, _inside(row.item, item)) for item in items]
            below += row.rows
        level = below
    return top


def _inside(above: Item, item: Item) -> tuple[Node, Node] | None:
    """The first and the last span of a folded row that contain this item; None if most do."""
    if not isinstance(above, Folded) or isinstance(item, Rest):
        return None
    owners = [item.parent_id] if isinstance(item, Node) else item.parents
    if len(owners) * FEW > above.count:
        return None
    return above.owners[owners[0] or ""], above.owners[owners[-1] or ""]


def _inner(item: Item) -> list[Node]:
    """The direct children of the spans in a row."""
    if isinstance(item, Node):
        return item.children
    return item.pooled if isinstance(item, Folded) else []


def _count(nodes: Iterable[Node]) -> int:
    return sum(1 for _ in walk(nodes))


def members(item: Node | Folded) -> list[Node]:
    return [item] if isinstance(item, Node) else list(item.owners.values())


def total_ns(item: Node | Folded, now_ns: int) -> int:
    """The total duration of the spans in a row."""
    return item.wall_ns(now_ns) if isinstance(item, Node) else item.total_ns


def uncovered_ns(node: Node, now_ns: int) -> int:
    """The part of a span's time that no child covers, in any thread."""
    left, at = 0, node.start_ns
    end_ns = now_ns if node.end_ns is None else node.end_ns
    for child in node.children:  # by start
        if child.start_ns > at:
            left += min(child.start_ns, end_ns) - min(at, end_ns)
        at = max(at, now_ns if child.end_ns is None else child.end_ns)
    return left + max(0, end_ns - at)


def shared_times(nodes: Sequence[Node]) -> dict[str, tuple[int, int]]:
    """Attributes in ns that all these spans have: their total and their median."""
    first = nodes[0].attrs
    found = {}
    for key in [key for key in first if key.endswith("_ns")]:
        values = sorted(v for node in nodes if isinstance(v := node.attrs.get(key), int))
        if len(values) == len(nodes):
            found[key] = (sum(values), values[len(values) // 2])
    return found


def series(nodes: Iterable[Node]) -> dict[str, Series]:
    """The marks of these spans by name. The summary of a span replaces its points."""
    found: dict[str, Series] = {}
    for node in nodes:
        summed_up = {mark.name for mark in node.marks if mark.kind == "summary"}
        for mark in node.marks:
            if mark.kind != "summary" and mark.name in summed_up:
                continue
            value = mark_value(mark)
            known = found.get(mark.name)
            if known is None:
                known = found[mark.name] = Series(value)
            known.add(value)
    return found


def mark_value(mark: wire.Mark) -> Value:
    """The value of a mark; on the wire, a non-finite number is null."""
    if mark.value is None and mark.value_nonfinite is not None:
        return NONFINITE.get(mark.value_nonfinite)
    return mark.value


# -- other forms ----------------------------------------------------------------------------------


def to_dict(tree: Tree) -> dict[str, Any]:
    """The tree as plain dicts and lists that JSON can hold."""
    return {
        "roots": [_node_dict(node, tree.now_ns) for node in tree.roots],
        "span_count": tree.span_count,
    }


def to_json(tree: Tree) -> str:
    return wire.encode(to_dict(tree)).decode()


def to_frame(tree: Tree) -> DataFrame:
    """One row per span, by start."""
    pandas = errors.need("pandas", "ci.trace(format='df')")
    nodes = sorted(walk(tree.roots), key=attrgetter("start_ns"))
    now_ns = tree.now_ns
    # Text stays `object` with None for missing values: comparing with pandas.NA raises.
    columns: Mapping[str, tuple[str, list[Any]]] = {
        "id": ("object", [node.id for node in nodes]),
        "parent_id": ("object", [node.parent_id for node in nodes]),
        "name": ("object", [node.name for node in nodes]),
        "index": ("Int64", [node.index for node in nodes]),
        "wall_us": ("float64", [_microseconds(node.wall_ns(now_ns)) for node in nodes]),
        "cpu_ns": ("Int64", [node.cpu_ns for node in nodes]),
        "gpu_ns": ("Int64", [node.gpu_ns for node in nodes]),
        "memory_peak_bytes": ("Int64", [node.memory_peak_bytes for node in nodes]),
        "mark_count": ("int64", [len(node.marks) for node in nodes]),
        "depth": ("int64", [node.depth for node in nodes]),
        "start_ns": ("Int64", [node.start_ns for node in nodes]),
        "end_ns": ("Int64", [node.end_ns for node in nodes]),
        "path": ("object", _paths(nodes)),
        "attrs": ("object", [node.attrs for node in nodes]),
        "marks": ("object", [{m.name: mark_value(m) for m in node.marks} for node in nodes]),
    }

    def series(dtype: str, values: list[Any]) -> Any:
        try:
            return pandas.Series(values, dtype=dtype)
        except (OverflowError, TypeError):  # an index may be larger than 63 bits
            return pandas.Series(values, dtype="object")

    frame: DataFrame = pandas.DataFrame({name: series(*one) for name, one in columns.items()})
    return frame


def _paths(nodes: Sequence[Node]) -> list[str]:
    """The path of names to each node, from the root. `nodes` has parents first."""
    paths: dict[str, str] = {}
    for node in nodes:
        above = paths.get(node.parent_id or "")
        paths[node.id] = node.name if above is None else f"{above}/{node.name}"
    return [paths[node.id] for node in nodes]


def _node_dict(node: Node, now_ns: int) -> dict[str, Any]:
    return {
        "name": node.name,
        "index": node.index,
        "wall_us": _microseconds(node.wall_ns(now_ns)),
        "attrs": node.attrs,
        "marks": [_mark_dict(mark) for mark in node.marks],
        "children": [_node_dict(child, now_ns) for child in node.children],
        "id": node.id,
        "parent_id": node.parent_id,
        "start_ns": node.start_ns,
        "end_ns": node.end_ns,
        "cpu_ns": node.cpu_ns,
        "gpu_ns": node.gpu_ns,
        "memory_peak_bytes": node.memory_peak_bytes,
        "open": node.is_open,
    }


def _mark_dict(mark: wire.Mark) -> dict[str, Any]:
    value = mark_value(mark)
    entry: dict[str, Any] = {"name": mark.name, "value": value, "kind": mark.kind}
    if isinstance(value, float) and value - value != 0:
        entry |= {"value": None, "value_nonfinite": str(value)}
    if mark.attrs:
        entry["attrs"] = mark.attrs
    return entry


def _microseconds(ns: int) -> float:
    return round(ns / 1000, 3)
