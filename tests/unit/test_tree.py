"""Trees: building, selecting, folding and converting."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cirron as ci
from cirron import errors, wire
from cirron.runs import tree as trees


def span(
    id: str,
    name: str = "step",
    parent: str | None = None,
    *,
    index: int | None = None,
    start: int = 0,
    end: int | None = 10,
    **attrs: Any,
) -> wire.Span:
    return wire.Span(id, name, parent, index, start, end, None, None, None, 1, 1, None, attrs, [])


def mark(
    id: str, span_id: str, name: str = "loss", value: Any = 0.5, ts: int = 0, **more: Any
) -> wire.Mark:
    return wire.Mark(id, span_id, name, "float", value, {}, ts, more.pop("kind", "point"), **more)


def names(nodes: list[trees.Node]) -> list[Any]:
    return [(node.name, names(node.children)) if node.children else node.name for node in nodes]


class TestBuild:
    def test_children_hang_under_their_parent_in_start_order(self) -> None:
        """Children come in start order, whatever the order of the records."""
        tree = trees.build(
            [
                span("c", "late", "a", start=5),
                span("b", "early", "a", start=1),
                span("a", "root", start=0),
            ],
            [],
        )

        assert [("root", ["early", "late"])] == names(tree.roots)
        assert 3 == tree.span_count
        assert [0, 1, 1] == [node.depth for node in trees.walk(tree.roots)]

    def test_second_copies_are_dropped(self) -> None:
        """A record that was sent twice is there once, marks too."""
        tree = trees.build([span("a"), span("a")], [mark("m", "a"), mark("m", "a")])

        assert 1 == tree.span_count
        assert 1 == len(tree.roots[0].marks)

    @pytest.mark.parametrize("is_open_first", [True, False])
    def test_a_closed_record_wins_over_an_open_one(self, is_open_first: bool) -> None:
        """A span that closed after the black box was written is closed."""
        records = [span("a", end=None), span("a", end=7)]
        if is_open_first:
            tree = trees.build(records, [])
        else:
            tree = trees.build([*records[1:], *records[:1]], [])

        assert 7 == tree.roots[0].end_ns
        assert not tree.roots[0].is_open

    def test_a_span_without_its_parent_is_a_root(self) -> None:
        """An orphan keeps its parent's id and becomes a root."""
        tree = trees.build([span("a", parent="gone")], [])

        assert ["gone"] == [root.parent_id for root in tree.roots]

    def test_open_spans_count_up_to_now(self) -> None:
        """The duration of an open span is the time until `now_ns`."""
        tree = trees.build([span("a", start=10, end=None)], [], now_ns=50)

        assert tree.roots[0].is_open
        assert 40 == tree.roots[0].wall_ns(tree.now_ns)

    def test_without_now_the_latest_record_is_now(self) -> None:
        """No clock is read: the latest known moment stands for now."""
        tree = trees.build([span("a", end=30)], [mark("m", "a", ts=40)])

        assert 40 == tree.now_ns
        assert 0 == trees.build([], []).now_ns

    def test_marks_are_sorted_by_time(self) -> None:
        """Marks of a span come in the order in which they were made."""
        tree = trees.build([span("a")], [mark("2", "a", ts=2), mark("1", "a", ts=1)])

        assert ["1", "2"] == [found.id for found in tree.roots[0].marks]

    def test_marks_outside_any_span_are_kept_by_the_tree(self) -> None:
        """A mark on "root" has no span and is not lost; one of an unknown span is."""
        tree = trees.build([], [mark("1", "root"), mark("2", "gone")])

        assert ["1"] == [found.id for found in tree.marks]

    def test_a_circle_of_parents_loses_no_span(self) -> None:
        """A broken file whose spans are each other's parents still shows each span once."""
        tree = trees.build(
            [span("a", parent="b"), span("b", parent="a"), span("c", parent="c")], []
        )

        assert ["a", "b", "c"] == sorted(node.id for node in trees.walk(tree.roots))

    def test_what_hangs_on_a_circle_stays_there(self) -> None:
        """A circle is cut once, in itself; the spans below it keep their parent."""
        leaves = [span(f"leaf{n}", parent="a", start=n) for n in range(1_000)]
        tree = trees.build([*leaves, span("a", parent="b", start=2_000), span("b", parent="a")], [])
        (root,) = tree.roots

        assert 1_002 == sum(1 for _ in trees.walk(tree.roots))
        assert "a" == root.id or "a" == root.children[0].id

    def test_any_depth_can_be_converted(self) -> None:
        """A chain of 5,000 spans is cut into roots rather than breaking an encoder."""
        chain = [span(str(n), parent=str(n - 1), start=n) for n in range(5_000)]
        tree = trees.build(chain, [])

        assert 5_000 == json.loads(trees.to_json(tree))["span_count"]
        assert 5_000 == sum(1 for _ in trees.walk(tree.roots))
        assert trees.MAX_DEPTH - 1 == max(node.depth for node in trees.walk(tree.roots))


class TestSelect:
    def tree(self) -> trees.Tree:
        return trees.build(
            [
                span("s", "session", start=0, end=100),
                span("e0", "epoch", "s", index=0, start=1, end=40),
                span("b0", "batch", "e0", start=2, end=10),
                span("i", "epoch", "b0", start=3, end=4),
                span("e1", "epoch", "s", index=1, start=50, end=90),
                span("b1", "batch", "e1", start=51, end=60),
                span("o", "batch", "e1", start=70, end=None),
            ],
            [mark("m", "b1")],
            now_ns=95,
        )

    def test_nothing_asked_is_everything(self) -> None:
        """Without a filter the tree stays as it is."""
        tree = self.tree()

        assert tree is trees.select(tree)

    def test_name_keeps_matches_with_all_below(self) -> None:
        """Matching spans become roots; a match inside a match stays where it is."""
        found = trees.select(self.tree(), name="epoch")

        assert [("epoch", [("batch", ["epoch"])]), ("epoch", ["batch", "batch"])] == names(
            found.roots
        )
        assert 6 == found.span_count
        assert [0, 0] == [root.depth for root in found.roots]

    def test_last_keeps_those_that_closed_last(self) -> None:
        """The last n closed stay nested among themselves; open spans have not closed."""
        found = trees.select(self.tree(), last=3)

        assert [("session", [("epoch", ["batch"])])] == names(found.roots)
        assert [1] == [len(node.marks) for node in trees.walk(found.roots) if node.name == "batch"]

    def test_name_then_last(self) -> None:
        """Of the spans that `name` keeps, `last` takes the ones that closed last."""
        found = trees.select(self.tree(), name="batch", last=1)

        assert ["b1"] == [root.id for root in found.roots]

    def test_the_last_of_a_name_come_whole(self) -> None:
        """The last epoch is the epoch that closed last, with everything inside it."""
        found = trees.select(self.tree(), name="epoch", last=1)

        assert [("epoch", ["batch", "batch"])] == names(found.roots)

    def test_last_may_be_more_than_there_is(self) -> None:
        """Asking for more spans than exist gives all closed ones; 0 gives none."""
        assert 6 == trees.select(self.tree(), last=100).span_count
        assert 0 == trees.select(self.tree(), last=0).span_count

    def test_a_negative_last_is_refused(self) -> None:
        """The error names the argument and what it means."""
        with pytest.raises(errors.SettingError, match="last=-1 is not valid; it must be a whole"):
            ci.trace(last=-1)

    def test_the_tree_it_came_from_is_unchanged(self) -> None:
        """Selecting copies: depths and children of the original stay."""
        tree = self.tree()
        before = trees.to_dict(tree)
        trees.select(tree, name="epoch", last=2)

        assert before == trees.to_dict(tree)


class TestFold:
    def steps(self, count: int, **more: Any) -> list[trees.Node]:
        spans = [span(f"s{n}", index=n, start=n * 10, end=n * 10 + n % 10) for n in range(count)]
        inside = [
            span(f"f{n}", "forward", f"s{n}", start=n * 10, end=n * 10 + 1) for n in range(count)
        ]
        marks = [mark(f"m{n}", f"s{n}", value=1.0 - n / count, ts=n) for n in range(count)]
        return trees.build(spans + inside, marks, **more).roots

    def test_few_siblings_stay_single(self) -> None:
        """Up to the threshold nothing is folded."""
        assert self.steps(20)[0].id == trees.fold(self.steps(20))[0].id  # type: ignore[union-attr]
        assert 20 == len(trees.fold(self.steps(20)))

    def test_many_siblings_become_one_row(self) -> None:
        """The row says how many, how long in the middle, at worst, where that was, and in all."""
        (row,) = trees.fold(self.steps(100))

        assert isinstance(row, trees.Folded)
        assert ("step", 100, 4, 9, 9, 450) == (
            row.name,
            row.count,
            row.median_ns,
            row.worst_ns,
            row.worst_index,
            row.total_ns,
        )

    @pytest.mark.parametrize(("name", "rows"), [("forward", 1), ("data_load", 1), ("load", 6)])
    def test_what_loops_repeat_is_folded_early(self, name: str, rows: int) -> None:
        """Six forwards of an evaluation, or six fetches, are one row; six scopes are not."""
        nodes = trees.build([span(f"f{n}", name, start=n, end=n + 1) for n in range(6)], []).roots

        assert rows == len(trees.fold(nodes, is_inside=True))

    def test_marks_are_summarised(self) -> None:
        """A folded row has the number of values of each mark, the first and the last."""
        (row,) = trees.fold(self.steps(100))
        assert isinstance(row, trees.Folded)
        loss = row.marks["loss"]

        assert (100, 1.0, 0.01) == pytest.approx((loss.count, loss.first, loss.last))

    def test_children_are_pooled_and_folded(self) -> None:
        """What is inside the members is one row too."""
        (row,) = trees.fold(self.steps(100))
        assert isinstance(row, trees.Folded)
        (inner,) = row.children

        assert ("forward", 100) == (inner.name, trees.span_count(inner))

    def test_open_and_failed_spans_are_not_folded_away(self) -> None:
        """Of 100 steps the failed one and the open one are rows of their own."""
        spans = [span(str(n), index=n, start=n) for n in range(98)]
        failed = span("bad", index=98, start=98, error="ValueError: x")
        tree = trees.build([*spans, failed, span("open", index=99, start=99, end=None)], [])
        rows = trees.fold(tree.roots)

        assert [98, 1, 1] == [trees.span_count(row) for row in rows]
        assert [None, "ValueError: x", None] == [row.error for row in rows]
        assert [False, False, True] == [row.is_open for row in rows]

    def test_many_names_are_capped(self) -> None:
        """Of 1,000 different children 50 are shown and the rest are counted, with all inside."""
        spans = [span(f"s{n}", f"name{n}", start=n) for n in range(1_000)]
        inside = [span(f"f{n}", "forward", f"s{n}", start=n) for n in range(1_000)]
        rows = trees.fold(trees.build(spans + inside, []).roots)

        assert 51 == len(rows)
        assert isinstance(rows[-1], trees.Rest)
        assert (1_900, 50) == (rows[-1].count, rows[-1].shown)

    def test_an_open_span_is_never_past_the_cap(self) -> None:
        """The one that is open is shown, however many siblings it has."""
        spans = [span(f"s{n}", f"name{n}", start=n) for n in range(1_000)]
        tree = trees.build([*spans, span("o", "here", start=2_000, end=None)], [])

        assert "here" in [row.name for row in trees.fold(tree.roots)]

    def test_a_value_that_was_not_finite_is_counted(self) -> None:
        """NaN is counted as a value, and as one that is not finite."""
        tree = trees.build(
            [span("a")],
            [
                mark("1", "a", value=1.0, ts=1),
                mark("2", "a", value=None, ts=2, value_nonfinite="nan"),
                mark("3", "a", value=3.0, ts=3),
            ],
        )
        loss = trees.series(tree.roots)["loss"]

        assert (1, 3) == (loss.nonfinite_count, loss.count)

    def test_a_summary_stands_for_the_points(self) -> None:
        """When a span has a summary value of a mark, that is its value."""
        points = [mark(str(n), "a", value=float(n), ts=n) for n in range(5)]
        tree = trees.build([span("a")], [*points, mark("s", "a", value=9.0, ts=9, kind="summary")])

        assert (1, 9.0) == (
            trees.series(tree.roots)["loss"].count,
            trees.series(tree.roots)["loss"].last,
        )

    def test_an_epoch_of_few_steps_is_short(self) -> None:
        """Steps inside something are folded from 6 on, with their phases; those at the top, which
        were asked for by name, are not.
        """
        spans = [span("e", "epoch", start=0, end=100)]
        for n in range(8):
            spans.append(span(f"s{n}", "step", "e", index=n, start=n))
            spans += [span(f"{p}{n}", p, f"s{n}", start=n) for p in ("forward", "backward")]
        spans.append(span("v", "evaluation", "s7", start=7))
        tree = trees.build(spans, [])
        rows = list(trees.flatten(trees.outline(tree)))
        steps = list(trees.flatten(trees.outline(trees.select(tree, name="step", last=7))))

        assert [("epoch", 1), ("step", 8), ("forward", 8), ("backward", 8), ("evaluation", 1)] == [
            (row.item.name, trees.span_count(row.item)) for row in rows
        ]
        assert [1] * 22 == [trees.span_count(row.item) for row in steps]

    def test_a_tree_shows_itself(self) -> None:
        """At a prompt as text, in a notebook as HTML."""
        tree = trees.build([span("e", "epoch", index=0), span("s", "step", "e")], [])

        assert "epoch[0] - 0.0us\n  step - 0.0us" == repr(tree)
        assert "<details" in tree._repr_html_()

    def test_too_many_rows_are_folded_harder(self) -> None:
        """20 x 20 x 20 spans, which no threshold of 20 folds, still make a short outline."""
        spans = [span("r", "root", start=0, end=10**6)]
        for a in range(20):
            spans.append(span(f"{a}", "a", "r", start=a))
            for b in range(20):
                spans.append(span(f"{a}.{b}", "b", f"{a}", start=a))
                spans += [span(f"{a}.{b}.{c}", "c", f"{a}.{b}", start=a) for c in range(20)]
        rows = list(trees.flatten(trees.outline(trees.build(spans, []))))

        assert [1, 20, 400, 8_000] == [trees.span_count(row.item) for row in rows]

    def test_a_run_of_many_short_epochs_fits_on_a_screen(self) -> None:
        """Epochs of three steps are folded, too; steps that were selected are not."""
        spans = [span("r", "root", start=0, end=10**6)]
        for e in range(300):
            spans.append(span(f"{e}", "epoch", "r", index=e, start=10 * e))
            for n in range(3):
                spans.append(span(f"{e}.{n}", "step", f"{e}", index=n, start=10 * e + n))
                spans += [
                    span(f"{e}.{n}{p}", p, f"{e}.{n}", start=10 * e + n) for p in ("data", "work")
                ]
        tree = trees.build(spans, [])
        steps = trees.select(tree, name="step", last=20)

        assert trees.GOAL_ROWS >= len(list(trees.flatten(trees.outline(tree))))
        assert 60 == len(list(trees.flatten(trees.outline(steps))))

    def test_different_estimators_have_separate_rows(self) -> None:
        """Folding many fits must not hide which estimator took the time."""
        spans = [
            span(f"{kind}{n}", "fit", start=n, estimator=kind)
            for kind in ("Forest", "Ridge")
            for n in range(30)
        ]

        assert [("Forest", 30), ("Ridge", 30)] == [
            (row.item.traits["estimator"], row.item.count)  # type: ignore[union-attr]
            for row in trees.outline(trees.build(spans, []))
        ]

    def test_what_does_not_fit_at_all_is_counted(self) -> None:
        """40 x 40 different names do not fit into 100 rows: whole insides are left out, counted."""
        spans = [span(f"{a}", f"a{a}", start=a) for a in range(40)]
        spans += [
            span(f"{a}.{b}", f"b{a}.{b}", f"{a}", start=a) for a in range(40) for b in range(40)
        ]
        rows = list(trees.flatten(trees.outline(trees.build(spans, []), max_rows=100)))

        assert 1_640 == sum(trees.span_count(row.item) for row in rows)
        assert 140 >= len(rows)


def forest(rows: list[tuple[int, int | None, int, int, int | None]]) -> list[wire.Span]:
    """Spans from random numbers: parents that exist or not, circles and second copies included."""
    return [
        span(
            str(id),
            "ab"[kind % 2] + str(id if kind == 5 else 0),
            None if parent is None else str(parent),
            start=start,
            end=None if length is None else start + length,
        )
        for id, parent, kind, start, length in rows
    ]


forests = st.lists(
    st.tuples(
        st.integers(0, 80),
        st.none() | st.integers(0, 90),
        st.integers(0, 5),
        st.integers(0, 50),
        st.none() | st.integers(0, 10),
    ),
    max_size=80,
).map(forest)


class TestProperties:
    @given(forests)
    def test_no_span_is_lost_or_doubled(self, spans: list[wire.Span]) -> None:
        """A built tree holds each id once, children in start order, one level below the parent."""
        tree = trees.build(spans, [])
        nodes = list(trees.walk(tree.roots))

        assert sorted({one.id for one in spans}) == sorted(node.id for node in nodes)
        assert tree.span_count == len(nodes)
        for node in nodes:
            assert [child.start_ns for child in node.children] == sorted(
                child.start_ns for child in node.children
            )
            assert {node.depth + 1} >= {child.depth for child in node.children}

    @given(forests, st.integers(1, 60))
    def test_an_outline_stands_for_every_span(self, spans: list[wire.Span], limit: int) -> None:
        """The counts of all rows add up to the number of spans, however few rows there may be."""
        tree = trees.build(spans, [])
        rows = list(trees.flatten(trees.outline(tree, limit)))

        assert tree.span_count == sum(trees.span_count(row.item) for row in rows)

    @given(forests, st.integers(0, 30))
    def test_folding_keeps_counts_and_time(self, spans: list[wire.Span], threshold: int) -> None:
        """Siblings folded have the same number and the same total time as before."""
        tree = trees.build(spans, [])
        rows = trees.fold(tree.roots, threshold, tree.now_ns)
        if not any(isinstance(row, trees.Rest) for row in rows):
            total = sum(
                row.total_ns if isinstance(row, trees.Folded) else row.wall_ns(tree.now_ns)
                for row in rows
                if not isinstance(row, trees.Rest)
            )

            assert len(tree.roots) == sum(trees.span_count(row) for row in rows)
            assert sum(root.wall_ns(tree.now_ns) for root in tree.roots) == total

    @given(forests, st.integers(0, 150))
    def test_last_keeps_exactly_the_last(self, spans: list[wire.Span], last: int) -> None:
        """`last` keeps that many closed spans, none of which closed before one left out."""
        tree = trees.build(spans, [])
        kept = {node.id for node in trees.walk(trees.select(tree, last=last).roots)}
        ends = {node.id: node.end_ns for node in trees.walk(tree.roots) if node.end_ns is not None}

        assert min(last, len(ends)) == len(kept)
        left_out = [end for id, end in ends.items() if id not in kept]
        if kept and left_out:
            assert max(left_out) <= min(ends[id] for id in kept)

    @given(forests)
    def test_name_keeps_matches_and_descendants(self, spans: list[wire.Span]) -> None:
        """`name` keeps a span exactly when it or one above it has the name."""
        tree = trees.build(spans, [])
        expected = set()
        pending = [(root, False) for root in tree.roots]
        while pending:
            node, is_inside = pending.pop()
            is_inside = is_inside or node.name == "a0"
            if is_inside:
                expected.add(node.id)
            pending += [(child, is_inside) for child in node.children]
        found = trees.select(tree, name="a0")

        assert expected == {node.id for node in trees.walk(found.roots)}
        assert all(root.name == "a0" for root in found.roots)


class TestForms:
    def tree(self) -> trees.Tree:
        return trees.build(
            [
                span("a", "epoch", index=0, start=1_000, end=143_500, mode="train"),
                span("b", "step", "a", start=2_000, end=None),
            ],
            [
                mark("m", "a", value=None, ts=1, value_nonfinite="-inf"),
                wire.Mark("n", "a", "note", "string", "x", {"k": 1}, 2, "summary"),
            ],
            now_ns=3_234,
        )

    def test_a_node_has_the_documented_keys(self) -> None:
        """A node has the documented keys first, and whatever else is known of the span."""
        expected = {
            "name": "epoch",
            "index": 0,
            "wall_us": 142.5,
            "attrs": {"mode": "train"},
            "marks": [
                {"name": "loss", "value": None, "kind": "point", "value_nonfinite": "-inf"},
                {"name": "note", "value": "x", "kind": "summary", "attrs": {"k": 1}},
            ],
            "id": "a",
            "parent_id": None,
            "start_ns": 1_000,
            "end_ns": 143_500,
            "cpu_ns": None,
            "gpu_ns": None,
            "memory_peak_bytes": None,
            "open": False,
        }
        found = trees.to_dict(self.tree())
        (child,) = found["roots"][0].pop("children")

        assert {"roots": [expected], "span_count": 2} == found
        assert (True, None, 1.234) == (child["open"], child["end_ns"], child["wall_us"])

    def test_json_is_the_dict_and_strict(self) -> None:
        """The JSON text has no NaN or Infinity and reads back as the dict."""

        def refuse(token: str) -> None:
            raise AssertionError(token)

        found = json.loads(trees.to_json(self.tree()), parse_constant=refuse)

        assert trees.to_dict(self.tree()) == found

    def test_a_raw_nan_is_named_too(self) -> None:
        """A NaN that comes as a float is written as null with its name."""
        tree = trees.build([span("a")], [mark("m", "a", value=math.nan)])

        assert [{"name": "loss", "value": None, "kind": "point", "value_nonfinite": "nan"}] == (
            trees.to_dict(tree)["roots"][0]["marks"]
        )

    def test_the_frame_has_the_documented_columns(self) -> None:
        """The frame has exactly the documented columns, a row a span, by start."""
        frame = trees.to_frame(self.tree())

        assert [
            "id",
            "parent_id",
            "name",
            "index",
            "wall_us",
            "cpu_ns",
            "gpu_ns",
            "memory_peak_bytes",
            "mark_count",
            "depth",
            "start_ns",
            "end_ns",
            "path",
            "attrs",
            "marks",
        ] == list(frame.columns)
        assert [["a", None, "epoch", 142.5, 2, 0], ["b", "a", "step", 1.234, 0, 1]] == (
            frame[["id", "parent_id", "name", "wall_us", "mark_count", "depth"]].values.tolist()
        )
        assert 0 == frame["index"][0]
        assert frame["index"].isna()[1]
        assert ["epoch", "epoch/step"] == frame["path"].to_list()
        assert 142_500 == frame["end_ns"][0] - frame["start_ns"][0]
        assert 2 == len(frame["marks"][0])

    def test_a_frame_with_a_huge_index(self) -> None:
        """An index past 63 bits is kept as it is."""
        for index in (2**63, 2**64 - 1, 10**30):
            tree = trees.build([span("a", "step", index=index), span("b", "step")], [])

            assert [index] == trees.to_frame(tree)["index"].dropna().to_list()

    def test_an_empty_frame_has_the_same_types(self) -> None:
        """No spans: no rows, the same columns and dtypes, so that code on it still runs."""
        empty, full = trees.to_frame(trees.build([], [])), trees.to_frame(self.tree())

        assert 0 == len(empty)
        assert full.dtypes.to_dict() == empty.dtypes.to_dict()
        assert {"Int64"} == {
            str(full.dtypes[name]) for name in ("index", "cpu_ns", "gpu_ns", "memory_peak_bytes")
        }

    def test_without_pandas_the_error_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A missing pandas is an error with the pip line."""
        monkeypatch.setitem(sys.modules, "pandas", None)

        with pytest.raises(errors.MissingDependencyError, match="pip install pandas"):
            trees.to_frame(self.tree())


class TestWhatIsKeptOutOfFolds:
    def test_epochs_are_shown_one_by_one(self) -> None:
        """Fifty epochs are fifty rows; their many batches are one row each."""
        spans = [span(f"e{n}", "epoch", index=n, start=n * 100) for n in range(50)]
        spans += [span(f"b{n}-{k}", "batch", f"e{n}") for n in range(50) for k in range(30)]
        rows = trees.outline(trees.build(spans, []))

        assert ["epoch"] * 50 == [row.item.name for row in rows]
        assert {30} == {trees.span_count(row.rows[0].item) for row in rows}

    def test_of_many_epochs_inside_a_session_the_outer_ones_are_shown(self) -> None:
        """The tree of a long training is a screen: the epochs in between are one row."""
        spans = [span("s", "cirron.session")]
        spans += [span(f"e{n}", "epoch", "s", index=n, start=n * 100) for n in range(30)]
        spans += [span(f"b{n}-{k}", "batch", f"e{n}") for n in range(30) for k in range(30)]
        (root,) = trees.outline(trees.build(spans, []))

        assert [1, 1, 26, 1, 1] == [trees.span_count(row.item) for row in root.rows]

    def test_a_truncated_one_stands_alone(self) -> None:
        """The step that the end of the process cut short is not lost among the others."""
        spans = [span(str(n), "step", start=n) for n in range(40)]
        spans[-1].attrs = {"truncated": True}
        items = trees.fold(trees.build(spans, []).roots)

        assert [39, 1] == [trees.span_count(item) for item in items]

    def test_waiting_for_data_is_summed_up(self) -> None:
        """An attribute in ns that all folded spans have shows as its total and median."""
        spans = [span(str(n), "batch", start=n) for n in range(40)]
        for number, one in enumerate(spans):
            one.attrs = {"data_load_ns": 1_000_000 + number}
        (item,) = trees.fold(trees.build(spans, []).roots)

        assert isinstance(item, trees.Folded)
        assert {"data_load_ns": (40_000_780, 1_000_020)} == item.times
