"""What programs for Ciclo 0.1.9 import from here; it is in `ciclo` itself."""

from ciclo.elapsed import Elapsed, Period, elapse
from ciclo.schedules import at

__all__ = ["Elapsed", "Period", "at", "elapse"]
