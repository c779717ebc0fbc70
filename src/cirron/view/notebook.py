"""Renders a tree for a notebook cell: nested rows with bars, in HTML without scripts.

Self-contained: one block of CSS, scoped by a class, that takes text colours from the notebook's
theme, so it reads in light and dark ones alike.
"""

from __future__ import annotations

import sys
from html import escape

from cirron.runs import tree as trees
from cirron.view import text

MAX_ROWS = 300
# Rows down to this depth are unfolded at first; those on the way to an open span always are.
UNFOLDED_DEPTH = 2

STYLE = """
.cirron-trace{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:inherit;
overflow-x:auto}
.cirron-trace details{margin:0;padding:0;border:0}
.cirron-trace .in{padding-left:1.1em;margin-left:.35em;border-left:1px solid rgba(128,128,128,.25)}
.cirron-trace .row{display:flex;align-items:center;gap:.8em;list-style:none;min-width:44em}
.cirron-trace summary.row{cursor:pointer}
.cirron-trace summary.row::-webkit-details-marker{display:none}
.cirron-trace .row:hover{background:rgba(128,128,128,.12)}
.cirron-trace .row::before{content:"";flex:0 0 .7em;text-align:center}
.cirron-trace summary.row::before{content:"\\25B8"}
.cirron-trace details[open]>summary.row::before{content:"\\25BE"}
.cirron-trace .what{flex:1 1 auto;min-width:0;overflow:hidden;text-overflow:ellipsis;
white-space:nowrap}
.cirron-trace .name{font-weight:600}
.cirron-trace .marks{color:#2a8a57}
.cirron-trace .notes{opacity:.65}
.cirron-trace .bad{color:#d0453f;opacity:1}
.cirron-trace .time{flex:0 0 auto;text-align:right;white-space:nowrap}
.cirron-trace .line{flex:0 0 14em;height:.75em;position:relative;border-radius:2px;
background:rgba(128,128,128,.14);overflow:hidden}
.cirron-trace .bar{position:absolute;top:0;bottom:0;min-width:2px;background:#3f83d1;
border-radius:2px}
.cirron-trace .many{background:repeating-linear-gradient(90deg,#3f83d1 0 3px,#3f83d180 3px 5px)}
.cirron-trace .open{background:#d99a2b}
.cirron-trace .failed{background:#d0453f}
"""


def in_notebook() -> bool:
    """Whether a cell of a Jupyter kernel would render what is returned to it."""
    # A kernel has imported IPython already; other programs should not have to.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if get_ipython is None:
        return False
    shell = get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell" or hasattr(shell, "kernel")


def to_html(tree: trees.Tree) -> str:
    """The tree as one HTML element. Similar spans share a row, so it is small for any run."""
    # Names may contain "$". The other classes stop MathJax 2 and 3 from looking for formulas.
    names = "cirron-trace tex2jax_ignore mathjax_ignore"
    parts = [f'<div class="{names}"><style>{STYLE}</style>']
    for root in trees.outline(tree, MAX_ROWS):
        _write(root, _extent(root.item, tree.now_ns), tree.now_ns, parts)
    if tree.marks:
        parts.append(f'<div class="row">{escape(text.outside(tree.marks))}</div>')
    if tree.is_partial:
        parts.append(f"<div>{escape(text.PARTIAL)}</div>")
    if len(parts) == 1:
        parts.append(f"<div>{escape(text.EMPTY)}</div>")
    parts.append("</div>")
    return "".join(parts)


def _extent(item: trees.Item, now_ns: int) -> tuple[int, int]:
    """The start and the end of a row."""
    end_ns = item.start_ns if isinstance(item, trees.Rest) else item.end_ns
    return item.start_ns, max(item.start_ns, now_ns if end_ns is None else end_ns)


def _write(row: trees.Row, root: tuple[int, int], now_ns: int, parts: list[str]) -> None:
    content = _row(row, root, now_ns)
    if not row.rows:
        parts.append(f'<div class="row">{content}</div>')
        return
    is_unfolded = row.depth < UNFOLDED_DEPTH or row.item.is_open
    parts.append(f"<details{' open' if is_unfolded else ''}>")
    parts.append(f'<summary class="row">{content}</summary><div class="in">')
    for below in row.rows:
        _write(below, root, now_ns, parts)
    parts.append("</div></details>")


def _row(row: trees.Row, root: tuple[int, int], now_ns: int) -> str:
    words = text.cells(row, now_ns)
    what = f'<span class="name">{escape(words.label)}</span>'
    if words.marks:
        what += f' <span class="marks">{escape(", ".join(words.marks))}</span>'
    if words.notes:
        bad = " bad" if row.item.error is not None else ""
        what += f' <span class="notes{bad}">({escape(", ".join(words.notes))})</span>'
    cells = f'<span class="what">{what}</span>'
    if isinstance(row.item, trees.Rest):
        return cells
    return f'{cells}<span class="time">{escape(words.time)}</span>{_bar(row.item, root, now_ns)}'


def _bar(item: trees.Item, root: tuple[int, int], now_ns: int) -> str:
    whole_ns = max(1, root[1] - root[0])
    # A thread may outlive the span it was started in: its bar ends with the root's.
    left, right = (
        min(100.0, max(0.0, 100 * (at_ns - root[0]) / whole_ns)) for at_ns in _extent(item, now_ns)
    )
    kinds = ["bar"]
    if isinstance(item, trees.Folded):
        kinds.append("many")
    if item.error is not None:
        kinds.append("failed")
    elif item.is_open:
        kinds.append("open")
    style = f"left:min({left:.2f}%,100% - 2px);width:{max(0.0, right - left):.2f}%"
    return f'<span class="line"><span class="{" ".join(kinds)}" style="{style}"></span></span>'
