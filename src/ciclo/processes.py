"""The rank of this process, according to torch or JAX if the program has imported them."""

from __future__ import annotations

import sys
from typing import Any

from ciclo import _seam
from ciclo.errors import need


class Process:
    """The rank and the number of processes that torch or JAX has connected; else 0 of 1."""

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        self.torch: Any = None  # torch.distributed, if it is initialised
        torch = getattr(sys.modules.get("torch"), "distributed", None)
        jax = sys.modules.get("jax")
        is_connected = getattr(getattr(jax, "distributed", None), "is_initialized", None)
        if torch is not None and torch.is_available() and torch.is_initialized():
            self.rank, self.count, self.torch = torch.get_rank(), torch.get_world_size(), torch
        elif jax is not None and is_connected is not None and is_connected():
            self.rank, self.count = jax.process_index(), jax.process_count()

    def wait_for_all(self) -> None:
        """A barrier."""
        if self.count == 1:
            return
        if self.torch is not None:
            self.torch.barrier()
        else:
            need("jax.experimental.multihost_utils", "").sync_global_devices("ciclo")


def is_first() -> bool:
    """Whether this process is rank 0, even if the processes are not connected yet."""
    launched = _seam.launched_rank()
    return (Process().rank if launched is None else launched) == 0
