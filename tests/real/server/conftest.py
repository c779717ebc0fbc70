"""Fixtures: a server per test, or per module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.server.serving import Serving
else:
    from serving import Serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts servers in the test's folder and stops them at the end."""
    started: list[Serving] = []

    def start(*arguments: str, port: int = 0, **environ: str) -> Serving:
        one = Serving(tmp_path, *arguments, port=port, **environ)
        started.append(one)
        return one

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture
def server(serve: Callable[..., Serving]) -> Serving:
    return serve()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One server for all tests of a module that do not affect each other."""
    one = Serving(tmp_path_factory.mktemp("served"))
    yield one
    one.kill()
