"""Spans that have closed and wait for their device's time survive a kill."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import cirron as ci

if TYPE_CHECKING:
    from tests.real.conftest import Scripts


def test_a_device_that_hangs(scripts: Scripts) -> None:
    """When a device never answers and the process is killed, what led up to it is there."""
    script = scripts.start(
        """
        import json, pathlib, time
        import cirron as ci
        from cirron.record import hot, value

        class Never(value.Deferred):
            def poll(self):
                return False

        class Hanging:
            def start(self, span): pass
            def stop(self, span): span.set(gpu_ns=Never(None))
            def drop(self, span): pass
            def copy(self, scalar): return None
            def settle(self): pass

        ci.profile(flush_interval=0.05)
        hot.use_device_clock(Hanging())
        for number in range(20):
            with ci.scope("step", number):
                pass
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for path in pathlib.Path(".cirron/blackbox").glob("*.json"):
                if len(json.loads(path.read_bytes())["closed"]) == 20:
                    print("kept", flush=True)
            time.sleep(0.02)
        """
    )
    script.wait_for("kept")
    script.kill(signal.SIGKILL)
    script.end()
    run = ci.open(scripts.folder)
    spans = run.spans.rows()

    assert "killed" == run.state
    assert list(range(20)) == sorted(span["index"] for span in spans if span["name"] == "step")
    assert {None} == {span["gpu_ns"] for span in spans}
