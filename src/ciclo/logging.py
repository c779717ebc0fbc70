"""What programs for Ciclo 0.1.9 import from here; it is in `ciclo` itself."""

from ciclo.history import History, history
from ciclo.logs import Logs, logs

__all__ = ["History", "Logs", "history", "logs"]
