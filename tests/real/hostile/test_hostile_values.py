"""No value can hurt recording: whatever an attribute is, its span and its neighbours are there."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Script, Scripts

NEIGHBOURS = 5  # on each side of each value
ON_DISK_S = 3.0
CALL_S = 1.0
HELD_UP_S = 0.5  # the most that one value may take of the user's thread
GROWTH_BYTES = 300 * 2**20
EXIT_S = 4.0  # with exit_timeout=2

GROUPS = [
    *("Exception", "SystemExit", "KeyboardInterrupt", "CancelledError", "RecursionError"),
    *(
        "MemoryError",
        "GeneratorExit",
        "Elusive",
        "blocking",
        "cyclic",
        "shared",
        "large",
        "ordinary",
    ),
    "arrays",
]

SCRIPT = f"""
import os, sys, threading, time
import cirron as ci
import odd_values

values = odd_values.GROUPS[os.environ["GROUP"]]()
labels = [label for label, _ in values]

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def neighbours(side, number):
    for index in range({NEIGHBOURS}):
        with ci.scope(side, number * {NEIGHBOURS} + index, fine=True):
            ci.mark(side, number * {NEIGHBOURS} + index)

def record_all():
    slowest = (0.0, "")
    for number, (label, value) in enumerate(values):
        neighbours("before", number)
        began = time.perf_counter()
        with ci.scope("own", number, fine=True, value=value) as span:
            ci.mark("own", number, given=value)
            span.set(late=value)
        with ci.scope("nested", number, value=[1, value, {{"in": (value,)}}]):
            pass
        slowest = max(slowest, (time.perf_counter() - began, label))
        neighbours("after", number)
    return slowest

def timed(call):
    'How long a call took, and what it returned; None when it has not returned after 5 s.'
    found = []
    def run():
        began = time.perf_counter()
        value = call()
        found.append((time.perf_counter() - began, value))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    return found[0] if found else None

ci.Cirron(exit_timeout=2).profile(flush_interval=0.1)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts here
resident = memory("VmRSS")
"""


def missing(scripts: Scripts, labels: list[str]) -> dict[str, list[str]]:
    """By kind of record, the labels of the values whose record, or a neighbour, is not on disk."""
    spans: dict[str, dict[int, dict[str, Any]]] = {}
    marks: dict[str, set[Any]] = {}
    for run in scripts.sessions():
        for span in run.spans:
            spans.setdefault(span.name, {})[span.index or 0] = span.attrs
        for mark in run.marks:
            key = mark.name if mark.attrs.get("given") is not None else f"{mark.name} bare"
            marks.setdefault(key, set()).add(mark.value)
    found: dict[str, list[str]] = {}
    for number, label in enumerate(labels):
        around = range(number * NEIGHBOURS, (number + 1) * NEIGHBOURS)
        kinds = {
            f"{side} {what}": all(index in have for index in around)
            for side in ("before", "after")
            for what, have in (
                ("span", spans.get(side, {})),
                ("mark", marks.get(f"{side} bare", set())),
            )
        }
        own = spans.get("own", {}).get(number, {})
        kinds["own span"] = True is own.get("fine")
        kinds["value of the span"] = own.get("value") is not None
        kinds["value set later"] = own.get("late") is not None
        kinds["value in a list"] = spans.get("nested", {}).get(number, {}).get("value") is not None
        kinds["value of the mark"] = number in marks.get("own", set())
        for kind, is_there in kinds.items():
            if not is_there:
                found.setdefault(kind, []).append(label)
    return found


def wait_for_disk(scripts: Scripts, labels: list[str]) -> dict[str, list[str]]:
    """What is not on disk after the time that it may take."""
    deadline = time.monotonic() + ON_DISK_S
    while (lost := missing(scripts, labels)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return lost


def say(lost: dict[str, list[str]]) -> str:
    return "not on disk: " + "; ".join(
        f"{kind}: {len(labels)}, such as {labels[:3]}" for kind, labels in lost.items()
    )


def assert_quick(script: Script, call: str) -> Any:
    """The call returns within a second; gives what it returned."""
    answer = script.ask(f"timed(lambda: {call})")
    assert answer is not None, f"{call} had not returned after 5 s"
    assert answer[0] < CALL_S, f"{call} took {answer[0]:.2f} s"
    return answer[1]


@pytest.mark.parametrize("group", GROUPS)
def test_a_value_loses_nothing(scripts: Scripts, importable: dict[str, str], group: str) -> None:
    """All neighbours of a hostile value, and its own records, are on disk within 3 s; the worker
    lives, health() and trace() return at once, memory is bounded, and the exit is clean.
    """
    script = scripts.start(SCRIPT, driven=True, GROUP=group, **importable)
    labels = script.ask("labels")
    slowest_s, slowest = script.ask("record_all()")

    assert slowest_s < HELD_UP_S, f"{slowest!r} held the user's thread for {slowest_s:.2f} s"
    lost = wait_for_disk(scripts, labels)
    assert {} == lost, say(lost)
    health = assert_quick(script, "ci.health()")
    assert (True, {}) == (health["flusher_alive"], health["errors"])
    assert 5 == len(assert_quick(script, "ci.trace(format='dict', last=5)")["roots"])
    grown = script.ask("memory('VmHWM') - resident")
    assert grown < GROWTH_BYTES, f"memory grew by {grown / 2**20:.0f} MB"

    began = time.monotonic()
    assert 0 == script.end().status
    took_s = time.monotonic() - began
    assert took_s < EXIT_S, f"the exit took {took_s:.2f} s"
    assert "clean" == scripts.state()


def test_what_people_pass_keeps_its_meaning(scripts: Scripts, importable: dict[str, str]) -> None:
    """Limits cost nothing of what users pass every day: it reads on disk as it always did."""
    script = scripts.start(SCRIPT, driven=True, GROUP="ordinary", **importable)
    labels = script.ask("labels")
    script.ask("record_all()")
    lost = wait_for_disk(scripts, labels)
    assert {} == lost, say(lost)
    script.end()
    found = {
        labels[span.index or 0]: span.attrs["value"]
        for span in scripts.session().spans
        if span.name == "own"
    }

    expected = {
        "a dead proxy": found["a dead proxy"],
        "an enum": "Colour.RED",
        "an IntEnum": 1,
        "a str subclass": "w",
        "a path": "some/where",
        "a time": "2020-01-02 00:00:00+00:00",
        "nan": "nan",
        "infinity": "-inf",
        "a lone surrogate": "a?b",
        "NUL": "a\0b",
        "a complex": "(1+2j)",
        "a uuid": "00000000-0000-0000-0000-000000000007",
    }
    assert expected == {label: found[label] for label in expected}
    assert "proxy" in found["a dead proxy"].lower()


def test_names(scripts: Scripts) -> None:
    """Names that are subclasses of str, or hold what no terminal shows, lose nothing."""
    ended = scripts.run("""
        import cirron as ci

        def broken(*args):
            raise SystemExit("a user's method was called")

        methods = ("__str__", "__repr__", "__len__", "__eq__", "__hash__", "__iter__", "encode",
                   "__getitem__", "__format__", "__mod__", "__add__", "__contains__")
        Name = type("Name", (str,), dict.fromkeys(methods, broken))
        ci.profile(flush_interval=0.05)
        for number, name in enumerate([Name("sub"), "lone \\ud800", "nul \\0", "", "x" * 1000]):
            with ci.scope("before", number):
                pass
            with ci.scope(name, number):
                ci.mark(name, number)
                ci.mark("value", Name("text"))
            with ci.scope("after", number, **{"key \\ud800": 1, "\\0": 2}):
                pass
        print(ci.health()["errors"])
    """)

    assert (0, "{}\n", "") == ended
    run = scripts.session()
    names = [span.name for span in sorted(run.spans, key=lambda span: span.start_ns)]
    assert [5, 5] == [names.count(name) for name in ("before", "after")]
    assert ["sub", "lone ?", "nul \0", ""] == names[2::3][:4]
    assert ["sub", "lone ?", "nul \0", ""] == [
        mark.name for mark in run.marks if mark.name != "value"
    ][:4]
    assert ["text"] * 5 == [mark.value for mark in run.marks if mark.name == "value"]


def test_marks_of_subclasses(scripts: Scripts) -> None:
    """A mark of an int, float, bool-like or str whose own methods raise is the value that it is."""
    ended = scripts.run("""
        import cirron as ci

        def broken(*args):
            raise SystemExit("a user's method was called")

        methods = ("__str__", "__repr__", "__int__", "__float__", "__index__", "__eq__", "__hash__",
                   "__sub__", "__rsub__", "__bool__", "__len__", "__lt__", "__gt__", "__trunc__")
        ci.profile(flush_interval=0.05)
        for number, base in enumerate([int, float, str]):
            value = type("Value", (base,), dict.fromkeys(methods, broken))("7")
            for method in methods:
                one = type("Value", (base,), {method: broken, "__hash__": None})("7")
                ci.mark(f"{base.__name__} {method}", one)
            ci.mark(f"{base.__name__} all", value)
        ci.mark("huge", type("Int", (int,), {})(10**400))
        print("alive")
    """)

    assert (0, "alive\n", "") == ended
    values = {mark.name: mark.value for mark in scripts.session().marks}
    assert [7, 7.0, "7"] == [values[f"{base} all"] for base in ("int", "float", "str")]
    assert {7} == {value for name, value in values.items() if name.startswith(("int", "float"))}
    assert 3 * 15 + 1 == len(values)


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exception_without_a_text(scripts: Scripts, error: str) -> None:
    """An exception whose own `__str__` raises passes through a scope as it is, and ends the
    process as without us.
    """
    body = f"""
        import contextlib, os
        import cirron as ci

        class Odd(Exception):
            def __str__(self):
                raise {error}("of the exception")

        scope = contextlib.nullcontext
        if os.environ["PROFILE"] == "yes":
            ci.profile(flush_interval=3600)
            scope = ci.scope
        try:
            with scope("caught"):
                raise Odd
        except Odd:
            print("caught")
        with scope("fatal"):
            raise Odd
    """
    bare = scripts.run(body, PROFILE="no")
    ended = scripts.run(body, PROFILE="yes")

    assert (1, "caught\n") == bare[:2] == ended[:2]
    assert ["Odd", "Odd"] == [scripts.spans(name)[0].attrs["error"] for name in ("caught", "fatal")]
    assert ("exception", "Odd") == (
        scripts.box()["ended"]["how"],
        scripts.box()["ended"]["detail"],
    )


def test_an_exception_that_cannot_be_asked(scripts: Scripts, importable: dict[str, str]) -> None:
    """An exception whose `__class__` and `__traceback__` raise passes through scopes and wrapped
    functions as it is; a value that raises it is lost, and counted.
    """
    ended = scripts.run(
        """
        import cirron as ci
        from odd_values import Elusive

        class Value:
            def __float__(self):
                raise Elusive

            item = __float__

        class Text(Exception):
            def __str__(self):
                raise Elusive

        @ci.inference
        def answer():
            raise Elusive

        def scoped(error):
            with ci.scope("scope"):
                raise error

        def stream():
            with ci.scope("stream"):
                yield 1
                raise Elusive

        ci.profile(flush_interval=3600)
        calls = [answer, lambda: scoped(Elusive()), lambda: scoped(Text()), lambda: list(stream())]
        for call in calls:
            try:
                call()
            except BaseException as error:
                print(type(error).__name__)
        ci.mark("value", Value())
        ci.flush()
        print(ci.health()["mark_drop_count"], ci.health()["errors"])
        raise Elusive
        """,
        PYTHONPATH=importable["PYTHONPATH"],
    )

    assert (1, "Elusive\nElusive\nText\nElusive\n1 {}\n") == ended[:2]
    assert "cirron" not in ended.err
    assert ("exception", "Elusive") == tuple(
        scripts.box()["ended"][name] for name in ("how", "detail")
    )
    assert ["Elusive", "Text"] == [one.attrs["error"] for one in scripts.spans("scope")]


CHANGES = """
import cirron as ci

ci.profile(flush_interval=3600)
for number in range(2_000):
    items, table, nested = [number], {"number": number}, {"in": [{"number": number}]}
    group, raw = {number}, bytearray(b"%d" % number)
    with ci.scope("span", number, items=items, table=table, nested=nested, group=group, raw=raw,
                  pair=(items, table)) as span:
        late = [0]
        span.set(late=late)
        late[0] = number  # while the scope is open: the attribute is what it is at the close
        ci.mark("mark", number, items=items, table=table, nested=nested)
    items.append("changed")
    table.clear()
    nested["in"][0]["number"] = "changed"
    group.clear()
    raw.clear()
    late[0] = "changed"
"""


def test_what_changes_after_the_close(scripts: Scripts) -> None:
    """A list, dict, set or bytearray that changes after its span closed is recorded as it was."""
    ended = scripts.run(CHANGES)

    assert (0, "") == (ended.status, ended.err)
    spans = scripts.spans("span")
    assert list(range(2_000)) == [span.index for span in spans]
    for span in spans:
        number = span.index
        assert {
            "items": [number],
            "table": {"number": number},
            "nested": {"in": [{"number": number}]},
            "group": f"{{{number}}}",
            "raw": f"bytearray(b'{number}')",
            "pair": [[number], {"number": number}],
            "late": [number],
        } == span.attrs
    for mark in scripts.session().marks:
        number = int(mark.value or 0)
        assert {
            "items": [number],
            "table": {"number": number},
            "nested": {"in": [{"number": number}]},
        } == mark.attrs


def test_changes_while_it_is_read(scripts: Scripts) -> None:
    """A dict and a list that other threads change all the time lose no record, and no worker."""
    ended = scripts.run("""
        import threading
        import cirron as ci

        ci.profile(flush_interval=0.02)
        table, items, stopping = {}, [], threading.Event()

        def change():
            number = 0
            while not stopping.is_set():
                number += 1
                table[number % 997] = items
                table.pop(number % 991, None)
                items.append(number) if len(items) < 100 else items.clear()
                if number % 100 == 0:
                    stopping.wait(0.001)

        threads = [threading.Thread(target=change) for _ in range(2)]
        for thread in threads:
            thread.start()
        with ci.scope("open", table=table, items=items):
            for number in range(100):
                with ci.scope("span", number, table=table, items=items, both=[table, {"t": table}]):
                    ci.mark("mark", number, table=table)
        stopping.set()
        for thread in threads:
            thread.join()
        print(ci.health()["flusher_alive"], ci.health()["errors"])
    """)

    assert (0, "True {}\n", "") == ended
    assert list(range(100)) == [span.index for span in scripts.spans("span")]
    assert 100 == len(scripts.session().marks)
    assert all(len(span.attrs) == 3 for span in scripts.spans("span"))


COUNTED = """
import collections, time
import cirron as ci

calls = collections.Counter()

def counting(base, *methods):
    def count(method):
        def counted(self, *args):
            calls[f"{base.__name__}.{self.number}.{method}"] += 1
            if method in ("__str__", "__repr__", "__format__"):
                return "counted"  # object's own would call another of them
            return getattr(base, method)(self, *args)
        return counted
    body = {method: count(method) for method in methods}
    return type(f"Counting{base.__name__.title()}", (base,), {**body, "number": 0})

kinds = [
    counting(object, "__str__", "__repr__", "__format__", "__hash__", "__eq__"),
    counting(list, "__str__", "__repr__", "__iter__", "__len__", "__getitem__"),
    counting(dict, "__str__", "__repr__", "__iter__", "__len__", "items", "keys", "__getitem__"),
    counting(str, "__str__", "__repr__", "__len__", "encode", "__eq__"),
]

def make():
    made = []
    for kind in kinds:
        value = kind()
        value.number = make.number = make.number + 1
        made.append(value)
    return made
make.number = 0

def heartbeats(count):
    import json, pathlib
    seen = set()
    while len(seen) < count:
        for path in pathlib.Path(".cirron/blackbox").glob("*.json"):
            seen.add(json.loads(path.read_bytes())["heartbeat_ns"])
        time.sleep(0.005)

ci.profile(flush_interval=0.03, output=["spool", "log"])
"""


def test_a_users_method_is_called_once_at_most(scripts: Scripts) -> None:
    """However long a span is open, and whoever looks, a method of its value runs once at most."""
    ended = scripts.run(
        COUNTED
        + """
a, b, c, d = make()
with ci.scope("open", a=a, b=b, c=c, d=d):
    heartbeats(4)
    ci.trace(format="dict")
    ci.health()
    heartbeats(4)
a, b, c, d = make()
with ci.scope("closed", a=a, b=b, c=c, d=d):
    pass
a, b, c, d = make()
ci.mark("mark", 1, a=a, b=b, c=c, d=d)
ci.flush()
ci.trace(format="dict")
ci.flush()
ci.shutdown()
import json
print(json.dumps({method: count for method, count in calls.items() if count > 1}))
objects = collections.Counter()
for method, count in calls.items():
    if method.endswith(("__str__", "__repr__", "__format__")):
        objects[method.rpartition(".")[0]] += count
print(json.dumps({one: count for one, count in objects.items() if count > 1}))
"""
    )

    assert 0 == ended.status
    methods, objects = map(json.loads, ended.out.splitlines())
    assert {} == methods, f"called more than once: {methods}"
    assert {} == objects, f"text made more than once: {objects}"
    assert 1 == len(scripts.spans("open")) == len(scripts.spans("closed"))


def test_ctrl_c_while_a_value_blocks(scripts: Scripts, importable: dict[str, str]) -> None:
    """While a `__str__` blocks, Ctrl-C still is a KeyboardInterrupt in the main thread, at once."""
    body = """
        import os, sys, time
        import cirron as ci
        import odd_values

        values = odd_values.blocking()
        if os.environ["PROFILE"] == "yes":
            ci.Cirron(exit_timeout=2).profile(flush_interval=0.05)
        try:
            with ci.scope("outer"):
                for number, (label, value) in enumerate(values):
                    with ci.scope("own", number, value=value):
                        pass
                print("ready")
                time.sleep(600)
        except KeyboardInterrupt:
            print("caught")
            raise
    """
    ends = []
    for profile in ("no", "yes"):
        script = scripts.start(body, driven=False, PROFILE=profile, **importable)
        script.wait_for("ready")
        if profile == "yes":
            scripts.wait_until(lambda: any(scripts.batch_files()), "a batch", timeout_s=3)
        began = time.monotonic()
        script.kill(signal.SIGINT)
        ended = script.end()
        ends.append((ended.status, ended.out))
        took_s = time.monotonic() - began

    assert ends[0] == ends[1] == (-signal.SIGINT, "ready\ncaught\n")
    assert took_s < EXIT_S, f"the exit took {took_s:.2f} s"
    assert "signal" == scripts.state()
    assert 34 == len(scripts.spans("own"))


def test_a_worker_that_dies_is_told(scripts: Scripts) -> None:
    """A `__str__` that raises SystemExit makes no flush() wait, and no clean end look killed."""
    ended = scripts.run(
        """
        import time
        import cirron as ci

        class Odd:
            def __str__(self):
                raise SystemExit
            __repr__ = __str__

        ci.profile(flush_interval=0.05)
        for number in range(800):
            with ci.scope("span", number, odd=Odd() if number == 400 else 1):
                pass
        began = time.monotonic()
        ci.flush()
        print(time.monotonic() - began < 1, ci.health()["flusher_alive"])
    """,
        timeout_s=8,
    )

    assert (0, "True True\n", "") == ended
    assert list(range(800)) == [span.index for span in scripts.spans("span")]
    assert "clean" == scripts.state()


def test_what_a_program_sets_on_a_span(scripts: Scripts) -> None:
    """A program that sets a span's own fields to anything spoils no other record, and no file."""
    ended = scripts.run("""
        import cirron as ci
        import numpy as np

        ci.profile()
        for field, given in [
            ("name", 5), ("name", []), ("name", "x" * 10**6), ("index", "seven"), ("index", 10**40),
            ("index", np.int64(7)), ("attrs", [1, 2]), ("attrs", {(1, 2): 3}),
        ]:
            with ci.scope("before"), ci.scope("set") as span:
                setattr(span, field, given)
                ci.trace(format="dict")
        try:
            with ci.scope("failed") as span:
                span.attrs = [1, 2]
                raise ValueError
        except ValueError:
            pass
        with ci.scope("step"):
            pass
        print(ci.flush().ok, ci.health()["errors"])
    """)

    assert (0, "True {}\n", "") == ended
    assert 8 == len(scripts.spans("before"))
    assert 1 == len(scripts.spans("<int>")) == len(scripts.spans("<list>"))
    assert 1 == len(scripts.spans("x" * 1000)) == len(scripts.spans("step"))
    assert [None, 2**63 - 1, 7, None, None] == [span.index for span in scripts.spans("set")]
    assert [{"attrs": [1, 2]}, {"<tuple>": 3}] == [s.attrs for s in scripts.spans("set")[3:]]
    assert [{"error": "ValueError"}] == [span.attrs for span in scripts.spans("failed")]


def test_a_finalizer_that_opens_a_scope(scripts: Scripts) -> None:
    """The garbage collector may run a finalizer inside any call of ours, and that may record."""
    ended = scripts.run("""
        import gc
        import cirron as ci

        class Cyclic:
            def __init__(self):
                self.itself = self

            def __del__(self):
                with ci.scope("finalizer"):
                    ci.mark("value", 1)

        callbacks = list(gc.callbacks)
        ci.profile()
        for _ in range(3000):
            Cyclic()
            with ci.scope("span"):
                pass
        gc.collect()
        ci.shutdown()
        print(callbacks == gc.callbacks)
    """)

    assert (0, "True\n", "") == ended
    assert 3000 == len(scripts.spans("span")) == len(scripts.spans("finalizer"))
