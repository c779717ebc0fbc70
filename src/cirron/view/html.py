"""A run as one self-contained HTML page, without scripts.

Its Content-Security-Policy allows nothing to load or run, except its own style, by hash. Charts are
SVG. All queries are downsampled or limited, so the page does not grow with the run. All text of the
run goes through `say`, because names come from untrusted files.
"""

from __future__ import annotations

import base64
import hashlib
import math
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cirron.runs import engine
from cirron.view import report, tables, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cirron.runs.opened import Run, Session

WIDTH = 1000  # of a wide chart, in SVG units
STEP_BUCKETS = 160
CURVE_BUCKETS = 80
TIMELINE_BUCKETS = 200
MAX_CURVES = 16
MAX_DEPTH = 8
MAX_TRACKS = 10  # of the timeline, for all threads together
MAX_ROWS = 40
MAX_TENSORS = 40
MAX_POINTS = 60  # of a sparkline
MAX_NAME = 60

# Phases, the spans around them and parts of the account have fixed colours, the same in every view;
# other names share the rest.
PHASES = ("data_load", "forward", "backward", "optimizer_step", "evaluation", "other", "self")
COLOURS = {name: number for number, name in enumerate(PHASES)} | {
    "loader set-up": 0,
    "other scopes": 5,
    "cirron.session": 6,
    "in no phase": 6,
    "epoch": 7,
    "step": 8,
    "batch": 8,
    "checkpoint": 9,
    "compile": 10,
    "snapshot": 11,
    "between steps": 12,
}
ENDED_BADLY = ("killed", "signal", "exception")
LABELS = {"other": "other spans", "self": "in no phase"}
SHARED = range(len(PHASES), 12)

STYLE = """
:root{color-scheme:light dark;--back:#fff;--card:#f6f7f9;--line:#dfe3e8;--text:#1c2128;
--faint:#616b78;--bad:#c62f2a;--good:#1a7f4b;--curve:#2f6fd0;
--c0:#e39b1d;--c1:#5aa9e6;--c2:#2f62c4;--c3:#2a9d78;--c4:#c9654c;--c5:#a374c8;--c6:#b4bcc6;
--c7:#4f9aa8;--c8:#8a9a3b;--c9:#b35a8f;--c10:#7a7fd0;--c11:#8d7b68;--c12:#d8dde3}
@media (prefers-color-scheme:dark){:root{--back:#14171b;--card:#1d2126;--line:#333a42;
--text:#e4e8ec;--faint:#98a2ae;--bad:#ff7b72;--good:#56d391;--curve:#79aef5;
--c2:#4d83ea;--c6:#5b6570;--c12:#3b434c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px;background:var(--back);color:var(--text);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:15px;margin:0 0 10px}
p{margin:2px 0;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;
margin-top:16px;overflow-x:auto}
.faint,.note{color:var(--faint)}.note{font-size:12px;margin-top:8px}
.bad{color:var(--bad)}.good{color:var(--good)}
.facts{display:flex;flex-wrap:wrap;gap:8px 28px;margin-top:12px}
.facts b{display:block;font-size:17px;font-weight:600}
.facts span{color:var(--faint);font-size:12px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--faint);font-weight:500;font-size:12px}
th:first-child,td:first-child{text-align:left;padding-left:0}
tr:last-child td{border-bottom:0}
td:first-child{max-width:420px;overflow:hidden;text-overflow:ellipsis}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--faint);font-size:11px}
svg.spark{width:120px;height:22px;display:inline-block;vertical-align:middle}
svg.bar{width:90px;height:8px;display:inline-block;vertical-align:middle;margin-right:6px}
svg text.on{fill:#fff;pointer-events:none}
.part{display:inline-block;width:48px}
.grid{stroke:var(--line);stroke-width:1}
.curve{fill:none;stroke:var(--curve);stroke-width:1.4;stroke-linejoin:round}
.track{fill:var(--line)}.fail{fill:var(--bad)}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(310px,1fr));gap:20px}
.curves h3{margin:0;font-size:13px;font-weight:600;overflow-wrap:anywhere}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:12px;color:var(--faint);margin-top:8px}
.key svg{width:10px;height:10px;display:inline-block;margin-right:6px}
""" + "".join(f".c{number}{{fill:var(--c{number})}}" for number in range(13))


def page(run: Run) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    parts = (_verdict, _problems, _steps, _phases, _curves, _ranks, _timeline, _outline, _tensors)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{say(run.id)}</title><style>{STYLE}</style></head><body>"
        f"{_header(run)}{''.join(part(run) for part in parts)}</body></html>\n"
    )


def say(given: object, limit: int = MAX_NAME) -> str:
    """Text of the run, truncated and escaped."""
    return escape(text.plain(str(given), limit)) or "(no name)"


# -- sections -----------------------------------------------------------------------------------


def _header(run: Run) -> str:
    count = run.sql(
        "SELECT (SELECT count(*) FROM spans) AS spans, (SELECT count(*) FROM marks) AS marks"
    ).fetch()
    spans, marks = count.rows[0]
    state = {"clean": "good", "running": "good", "unknown": "faint"}.get(run.state, "bad")
    hosts = list({one.info.host for one in run.sessions if one.info is not None})
    facts = {
        "state": f'<b class="{state}">{say(run.state)}</b>',
        "started": f"<b>{say(tables.moment(run.started_ns))}</b>",
        "lasted": f"<b>{say(text.duration(run.ended_ns - run.started_ns))}</b>",
        "ranks": f"<b>{len(run.ranks) or '-'}</b>",
        "hosts": f"<b>{say(hosts[0]) if len(hosts) == 1 else len(hosts) or '-'}</b>",
        "attempts": f"<b>{len(run.attempts)}</b>",
        "spans": f"<b>{spans:,}</b>",
        "marks": f"<b>{marks:,}</b>",
    }
    shown = "".join(f"<div><span>{name}</span>{fact}</div>" for name, fact in facts.items())
    lines = "".join(f'<p class="faint">{escape(line)}</p>' for line in text.program(run.program))
    return f'<h1>run {say(run.id, 200)}</h1>{lines}<div class="facts">{shown}</div>'


def _verdict(run: Run) -> str:
    """Why the run is slow or died, what to do about it, and what that saves."""
    found = run.report().verdict
    lines = "".join(
        f'<p><span class="part faint">{word}</span>{escape(said.strip())}</p>'
        for word, _, said in (line.strip().partition(" ") for line in report.told(found))
    )
    return _section("Verdict", f"<p><b>{say(found.kind)}: {say(found.summary, 200)}</b></p>{lines}")


def _problems(run: Run) -> str:
    found = []
    within = run.sql(
        "SELECT session, max_by(path, depth) AS path FROM spans WHERE end_ns IS NULL"
        " GROUP BY session"
    )
    places = dict(within.fetch().rows)
    for one in run.sessions:
        content = {} if one.box is None else one.box.content
        if one.state in ENDED_BADLY:
            detail = (content.get("ended") or {}).get("detail")
            place = f"it was in {places[one.key]}" if one.key in places else None
            said = "; ".join(str(part) for part in (detail, place) if part) or "no more is known"
            found.append(f"{_who(one)}: {one.state}: {said}")
        if lost := tables.losses(one):
            found.append(f"{_who(one)}: lost: {', '.join(lost)}")
    errors = run.sql(
        "SELECT name, error, count(*) AS spans FROM spans WHERE error IS NOT NULL"
        " GROUP BY name, error ORDER BY spans DESC, name, error LIMIT 20"
    )
    found += [f"{count:,} x {name}: {error}" for name, error, count in errors.fetch().rows]
    odd = run.sql(
        "SELECT name, count(*) AS points FROM marks"
        " WHERE isnan(value) OR abs(value) = CAST('Infinity' AS DOUBLE)"
        " GROUP BY name ORDER BY points DESC, name LIMIT 20"
    )
    found += [f"mark {name}: {count:,} x not a finite number" for name, count in odd.fetch().rows]
    health = run.sql(
        "SELECT text, count(*) AS times FROM marks WHERE name = 'training_health'"
        " AND text IS NOT NULL GROUP BY text ORDER BY min(ts_ns) LIMIT 20"
    )
    found += [f"{said} ({count:,} x)" for said, count in health.fetch().rows]
    found += run.problems
    if not found:
        return ""
    lines = "".join(f'<p class="bad">{say(one, 400)}</p>' for one in found[:MAX_ROWS])
    return _section("Problems", lines + _more(len(found) - MAX_ROWS))


def _steps(run: Run) -> str:
    """The mean step time of each bucket by phase, of the main session."""
    rows = run.query("step_buckets", session=run.main.key, first=0, last=2**62, width=STEP_BUCKETS)
    steps = [row for row in rows if row["first"] is not None]  # else there are no steps
    if not steps:
        return ""
    height, left, below = 200, 60, 20
    # A few steps that compile would flatten the rest: they are cut off.
    tops = sorted(sum(step[name] for name in PHASES) for step in steps)
    top = max(1.0, min(tops[-1], 2 * tops[int(len(tops) * 0.9)]))
    total = steps[0]["total"]
    top *= 1.05
    drawn = [_grid(top, left, height)]
    for step in steps:
        x = left + (WIDTH - left) * step["first"] / total
        wide = (WIDTH - left) * (step["last"] + 1 - step["first"]) / total
        told = f"steps {step['first']:,} to {step['last']:,}: "
        told += f"mean {_time(step['wall'])}, worst {_time(step['worst'])}"
        base, rects = 0.0, []
        for name in PHASES:
            high = min(step[name], top - base)
            if high > 0:
                y = height * (1 - (base + high) / top)
                rects.append(_rect(name, x, y, wide * 0.92, height * high / top))
                base += high
        drawn.append(f"<g><title>{told}</title>{''.join(rects)}</g>")
    drawn.append(_label(left, height + 15, "step 0", "start"))
    drawn.append(_label(WIDTH, height + 15, f"step {total - 1:,}", "end"))
    used = [name for name in PHASES if any(step[name] for step in steps)]
    many = math.ceil(total / STEP_BUCKETS)
    note = f"{_who(run.main)}; each bar is " + (
        f"the mean of {many:,} steps." if many > 1 else "one step."
    )
    if tops[-1] > top:
        note += f" Bars above {_time(top)} are cut off."
    chart = _svg(WIDTH, height + below, drawn)
    return _section("Step time", chart + _key(used) + f'<p class="note">{say(note, 300)}</p>')


def _phases(run: Run) -> str:
    rows = run.phases.rows()
    lines = []
    for row in rows[:MAX_ROWS]:
        mode = f' <span class="faint">{say(row["mode"])}</span>' if row["mode"] else ""
        errors = f'<span class="bad">{row["errors"]:,}</span>' if row["errors"] else "-"
        lines.append(
            [
                say(row["name"]) + mode,
                f"{row['spans']:,}",
                _bar(row["share"] or 0),
                *(_time(row[f"{name}_ns"]) for name in ("total", "median", "p95", "worst")),
                _device_time(row),
                _size(row["memory_peak_bytes"]),
                errors,
            ]
        )
    names = ("span", "count", "share", "total", "median", "p95", "worst", "GPU", "memory", "errors")
    return _section("Phases", _table(names, lines) + _more(len(rows) - MAX_ROWS))


def _device_time(row: dict[str, Any]) -> str:
    """The device time of all spans, extrapolated from those that were measured."""
    total, spans, measured = row["gpu_ns"], row["spans"], row["gpu_spans"]
    if total is None or measured == spans:
        return _time(total)
    title = f"extrapolated: {measured:,} of {spans:,} spans were measured"
    return f'<span title="{title}">about {_time(total * spans / measured)}</span>'


def _curves(run: Run) -> str:
    """The marks of the main session's rank, over all attempts."""
    rows = run.sql(
        f"SELECT * FROM ({engine.query('curves')}) c WHERE session_id IN"  # noqa: S608
        " (SELECT session_id FROM sessions WHERE COALESCE(rank, -1) = :rank)"
        " ORDER BY name, first_ns",
        width=CURVE_BUCKETS,
        rank=-1 if run.main.rank is None else run.main.rank,
    ).rows()
    by_name = [(name, list(its)) for name, its in groupby(rows, key=lambda row: row["name"])]
    by_name.sort(key=lambda one: (one[0] != "loss", -sum(row["points"] for row in one[1]), one[0]))
    charts = [_curve(run, name, its) for name, its in by_name[:MAX_CURVES]]
    if not charts:
        return ""
    body = f'<div class="curves">{"".join(charts)}</div><p class="note">{say(_who(run.main))}</p>'
    return _section("Marks", body + _more(len(by_name) - MAX_CURVES))


def _curve(run: Run, name: str, rows: list[dict[str, Any]]) -> str:
    height, wide, left = 110, 330, 56
    lines = []
    for _, its in groupby(rows, key=lambda row: row["session_id"]):
        points = set()
        for row in its:
            for value in ("lowest", "highest", "first_value", "last_value"):
                points.add((row[f"{value.removesuffix('_value')}_ns"], row[value]))
        lines.append(sorted((at, value) for at, value in points if _is_finite(value)))
    every = [point for line in lines for point in line]
    if not every:
        return f"<div><h3>{say(name)}</h3><p class='note'>no finite values</p></div>"
    first, last = min(every)[0], max(every)[0]
    low, high = min(value for _, value in every), max(value for _, value in every)
    latest = max(every)[1]
    drawn = []
    for value, y in ((high, 4), (low, height)) if high > low else ((high, height / 2),):
        drawn.append(f'<path class="grid" d="M{left} {_n(y)}H{wide}"/>')
        drawn.append(_label(left - 4, y + 4, f"{value:.3g}", "end"))
    for line in lines:
        path = " ".join(
            f"{_n(left + (wide - left) * _share(at - first, last - first))},"
            f"{_n(height - (height - 4) * _share(value / 2 - low / 2, high / 2 - low / 2))}"
            for at, value in line
        )
        drawn.append(_line(path) if len(line) > 1 else _dot(path))
    drawn.append(_label(left, height + 15, f"+{_time(first - run.started_ns)}", "start"))
    drawn.append(_label(wide, height + 15, f"+{_time(last - run.started_ns)}", "end"))
    count = sum(row["points"] for row in rows)
    told = f'<span class="faint">last {latest:.4g}, {count:,} points</span>'
    return f"<div><h3>{say(name)}</h3>{told}{_svg(wide, height + 20, drawn)}</div>"


def _ranks(run: Run) -> str:
    if len(run.sessions) < 2:
        return ""
    stalls = {row["session_id"]: row for row in run.query("stalls").rows()}
    lines = []
    for one in run.sessions[:MAX_ROWS]:
        row = stalls.get(one.id, {})
        mean_ns = row["step_ns"] / row["steps"] if row.get("steps") else None
        state = say(one.state)
        lines.append(
            [
                say(_who(one)),
                f'<span class="bad">{state}</span>' if one.state in ENDED_BADLY else state,
                str(one.pid),
                _time(one.last_ns - one.first_ns),
                f"{row.get('steps', 0):,}",
                _time(mean_ns),
                _bar(row.get("share") or 0),
            ]
        )
    names = ("process", "state", "pid", "lasted", "steps", "mean step", "waiting for data")
    return _section("Processes", _table(names, lines) + _more(len(run.sessions) - MAX_ROWS))


def _timeline(run: Run) -> str:
    one = run.main
    rank = -1 if one.rank is None else one.rank
    given = engine.timeline(
        from_ns=one.first_ns,
        to_ns=max(one.last_ns, one.first_ns + 1),
        width=TIMELINE_BUCKETS,
        first_rank=rank,
        last_rank=rank,
        max_depth=MAX_DEPTH - 1,
    )
    from_ns, to_ns = given["from_ns"], given["to_ns"]  # whole buckets
    rows = run.sql(
        f"SELECT * FROM ({engine.query('timeline')}) t"  # noqa: S608
        " WHERE session_id = :session ORDER BY thread_id, depth, bucket",
        session=one.id,
        **given,
    ).rows()
    if not rows:
        return ""
    busy: dict[int, int] = {}
    for row in rows:
        if row["depth"] == 0 or row["thread_id"] not in busy:
            busy[row["thread_id"]] = busy.get(row["thread_id"], 0) + int(row["busy_ns"])
    drawn: list[str] = []
    names: dict[str, int] = {}
    y = tracks = threads = 0
    for thread in sorted(busy, key=lambda thread: -busy[thread]):
        if tracks >= MAX_TRACKS:
            break
        threads += 1
        drawn.append(_label(0, y + 12, f"thread {thread}", "start"))
        y += 18
        of_thread = [row for row in rows if row["thread_id"] == thread]
        for _, its in groupby(of_thread, key=lambda row: row["depth"]):
            drawn += _slices(list(its), given, y, names)
            y += 18
            tracks += 1
    drawn.append(_label(0, y + 12, tables.moment(from_ns, "%H:%M:%S"), "start"))
    drawn.append(_label(WIDTH, y + 12, f"+{_time(to_ns - from_ns)}", "end"))
    most = sorted(names, key=lambda name: -names[name])[:12]
    told = "Short spans are merged into blocks, darker where they fill more of the time."
    note = f'<p class="note">{say(_who(one))}. {told}</p>'
    body = _svg(WIDTH, y + 18, drawn) + _key(most) + note
    return _section("Timeline", body + _more(len(busy) - threads, "threads"))


def _slices(
    rows: list[dict[str, Any]], given: dict[str, int], y: int, names: dict[str, int]
) -> list[str]:
    """A row of the timeline: long spans, and blocks of short ones, shaded by how busy they are."""
    from_ns, bucket_ns = given["from_ns"], given["bucket_ns"]
    whole = given["to_ns"] - from_ns
    blocks: list[tuple[float, float, str, float, int, bool]] = []
    for row in rows:
        name, spans, has_failed = row["longest"], int(row["spans"]), bool(row["errors"])
        names[name] = names.get(name, 0) + int(row["busy_ns"])
        start, end = (
            min(whole, max(0, row[f"longest_{side}_ns"] - from_ns)) for side in ("start", "end")
        )
        if end - start > bucket_ns or spans == 1:
            blocks.append((start, end, name, 1.0, 1, has_failed))
            continue
        full = math.ceil(4 * min(1.0, float(row["busy_ns"]) / bucket_ns)) / 4
        start = row["bucket"] * bucket_ns
        end = start + bucket_ns
        if blocks:  # adjacent blocks that look the same are merged
            first, *like, more, failed = blocks[-1]
            if more > 1 and [*like, failed] == [start, name, full, has_failed]:
                start, spans = first, more + spans
                blocks.pop()
        blocks.append((start, end, name, full, spans, has_failed))
    drawn = []
    for start, end, name, full, spans, has_failed in blocks:
        told = f"{spans:,} spans, mostly {say(name)}"
        if spans == 1:
            told = f"{say(name)}, {_time(end - start)}"
        wide = max(0.7, WIDTH * (end - start) / whole)
        x = WIDTH * start / whole
        drawn.append(_rect("!" if has_failed else name, x, y, wide, 15, 0.25 + 0.75 * full, told))
        if len(name) * 7 + 8 < wide:
            drawn.append(f'<text class="on" x="{_n(x + 4)}" y="{y + 11}">{say(name)}</text>')
    return drawn


def _outline(run: Run) -> str:
    rows = run.sql(
        f"SELECT o.*, n.name FROM ({engine.query('outline')}) o JOIN"  # noqa: S608
        " (SELECT path, min(name) AS name FROM spans GROUP BY path) n ON n.path = o.path"
    ).rows()
    rows.sort(key=lambda row: -(2**63 if row["total_ns"] is None else row["total_ns"]))
    kept = sorted(rows[:MAX_ROWS], key=lambda row: row["path"].split("/"))
    lines = [
        [
            "\u2003" * min(row["depth"], MAX_DEPTH) + say(row["name"]),  # wide spaces
            f"{row['spans']:,}",
            *(_time(row[f"{name}_ns"]) for name in ("total", "self", "median", "worst")),
        ]
        for row in kept
    ]
    names = ("span", "count", "total", "self", "median", "worst")
    return _section("Outline of all processes", _table(names, lines) + _more(len(rows) - MAX_ROWS))


def _tensors(run: Run) -> str:
    rows = run.sql(
        f"SELECT * FROM ({engine.query('tensors')}) t WHERE session_id = :session AND tensor IN"  # noqa: S608
        f" (SELECT tensor FROM snapshots WHERE tensor NOT LIKE '%.grad' GROUP BY tensor"
        f" ORDER BY tensor LIMIT {MAX_TENSORS + 1}) ORDER BY tensor, ts_ns",
        session=run.main.id,
    ).rows()
    lines = []
    found = [list(its) for _, its in groupby(rows, key=lambda row: row["tensor"])]
    for its in found[:MAX_TENSORS]:
        last = its[-1]
        lines.append(
            [
                say(last["tensor"]),
                say(f"{last['dtype']} {last['shape']}"),
                *(_number(last[name]) for name in ("mean", "std", "min", "max")),
                f"{_number(last['norm'])} {_spark([row['norm'] for row in its])}",
                f"{_number(last['gradient_norm'])} {_spark([row['gradient_norm'] for row in its])}",
            ]
        )
    if not lines:
        return ""
    names = ("tensor", "type", "mean", "std", "min", "max", "norm by epoch", "grad norm by epoch")
    more = '<p class="note">and more</p>' if len(found) > MAX_TENSORS else ""
    return _section("Tensors", _table(names, lines) + more)


# -- pieces -------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _more(count: int, what: str = "") -> str:
    return f'<p class="note">and {count:,} more {what}</p>' if count > 0 else ""


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; the cells are already HTML."""
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _svg(wide: float, high: float, drawn: Iterable[str], kind: str = "") -> str:
    named = f' class="{kind}" preserveAspectRatio="none"' if kind else ""
    return f'<svg{named} viewBox="0 0 {_n(wide)} {_n(high)}">{"".join(drawn)}</svg>'


def _rect(
    name: str, x: float, y: float, wide: float, high: float, full: float = 1.0, told: str = ""
) -> str:
    seen = "" if full >= 1 else f' opacity="{_n(full)}"'
    kind = "fail" if name == "!" else f"c{colour_of(name)}"
    end = f"><title>{told}</title></rect>" if told else "/>"
    at = f'x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(high)}"'
    return f'<rect class="{kind}" {at}{seen}{end}'


def colour_of(name: str) -> int:
    """The number of a span's colour, the same in every view."""
    number = COLOURS.get(name)
    if number is None:
        digest = hashlib.sha256(name.encode("utf-8", "replace")).digest()
        number = SHARED[digest[0] % len(SHARED)]
    return number


def _line(points: str) -> str:
    return f'<polyline class="curve" points="{points}"/>'


def _dot(point: str) -> str:
    x, y = point.split(",")
    return f'<circle class="c1" cx="{x}" cy="{y}" r="3"/>'


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def _grid(top_ns: float, left: float, height: float) -> str:
    """Grid lines at round durations."""
    unit = 10.0 ** math.floor(math.log10(top_ns))
    unit = next(one for one in (unit / 5, unit / 2, unit, 2 * unit) if top_ns / one <= 6)
    lines = []
    for number in range(int(top_ns / unit) + 1):
        y = height * (1 - number * unit / top_ns)
        lines.append(f'<path class="grid" d="M{left} {_n(y)}H{WIDTH}"/>')
        lines.append(
            _label(left - 6, max(y + 4, 9), _time(number * unit) if number else "0", "end")
        )
    return "".join(lines)


def _key(names: Iterable[str]) -> str:
    boxes = "".join(
        f"<span>{_svg(10, 10, [_rect(name, 0, 0, 10, 10)])}{say(LABELS.get(name, name))}</span>"
        for name in names
    )
    return f'<div class="key">{boxes}</div>'


def _bar(share: float) -> str:
    inside = _rect("forward", 0, 0, 90 * min(1.0, share), 8)
    bar = _svg(90, 8, ['<rect class="track" width="90" height="8"/>', inside], "bar")
    return f'{bar}<span class="part">{100 * share:.1f}%</span>'


def _spark(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None and _is_finite(value)]
    found = found[:: max(1, math.ceil(len(found) / MAX_POINTS))]
    if len(found) < 2:
        return ""
    low, high = min(found), max(found)
    points = " ".join(
        f"{_n(118 * number / (len(found) - 1) + 1)},"
        f"{_n(20 - 18 * _share(value / 2 - low / 2, high / 2 - low / 2))}"
        for number, value in enumerate(found)
    )
    return _svg(120, 22, [_line(points)], "spark")


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.5


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _time(ns: float | None) -> str:
    return "-" if ns is None else text.duration(round(ns))


def _size(count: float | None) -> str:
    return "-" if count is None else text.size(count)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _who(session: Session) -> str:
    host = "" if session.info is None else f" on {session.info.host}"
    who = f"pid {session.pid}" if session.rank is None else f"rank {session.rank}"
    attempt = f", attempt {session.attempt}" if session.attempt else ""
    return f"{who}{host}{attempt}"
