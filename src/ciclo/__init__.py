"""Ciclo: training loops as a small composable language. In the making; see CHANGELOG.md."""

from cirron._version import __version__

__all__ = ["__version__"]
