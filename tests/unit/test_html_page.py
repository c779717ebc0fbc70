"""The HTML page of a run: what its tables say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from click.testing import CliRunner

from cirron.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Made


def test_device_time_of_some_spans_is_extrapolated(made: Made, tmp_path: Path) -> None:
    """Of 20 forwards, 5 were measured with 2 ms each: about 40 ms, not 10."""
    session = made()
    epoch = session.span("epoch", 0, 100_000_000, index=0)
    for n in range(20):
        gpu_ns = None if n % 4 else 2_000_000
        session.span("forward", n * 1_000_000, (n + 1) * 1_000_000, epoch, gpu_ns=gpu_ns)
    session.write()
    to = tmp_path / "page.html"
    given = ["export", "--dir", str(tmp_path), "--format", "html", "-o", str(to)]
    assert 0 == CliRunner().invoke(main, given).exit_code

    assert 'title="extrapolated: 5 of 20 spans were measured">about 40.00ms<' in to.read_text(
        "utf-8"
    )
