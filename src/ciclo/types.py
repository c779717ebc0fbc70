"""Types that programs for Ciclo 0.1.9 import from here."""

from ciclo._compat import B, Batch, CallbackOutput, S
from ciclo.logs import LogsLike
from ciclo.schedules import Schedule

__all__ = ["B", "Batch", "CallbackOutput", "LogsLike", "S", "Schedule"]
