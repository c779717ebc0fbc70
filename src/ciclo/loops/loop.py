"""What programs for Ciclo 0.1.9 import from here; it is in `ciclo` itself."""

from ciclo._compat import CallbackOutput, LoopCallbackBase, LoopElement
from ciclo.loop import LoopState, loop

__all__ = ["CallbackOutput", "LoopCallbackBase", "LoopElement", "LoopState", "loop"]
