"""Model the costs of ops on fake tensors, where nothing can be measured.

See `op_costs.py` for ops that really run, `op_work.py` for the work of an op, `roofline.py` for its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recollect.costs.hardware import Hardware
from recollect.costs.op_costs import Again, Key, OpRun, key_of
from recollect.costs.op_work import work_of
from recollect.costs.roofline import seconds
from recollect.engine.facts import OpFacts


class ModelledCosts:
    """Runs ops on fake tensors and models their times on some hardware."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._seconds: dict[Key, float] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Do nothing: there is nothing to measure."""
        yield

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op on fake tensors; return its result and the key to its costs."""
        output = func(*args, **kwargs)
        key = key_of(func, args, kwargs)
        if key not in self._seconds:
            self._seconds[key] = seconds(work_of(func, facts, args, kwargs, output), self.hardware)
        return output, OpRun(key, 0)

    def run_function(self, args: Any, inner: Sequence[OpRun], again: Again) -> OpRun:
        """Return the key to the costs of a custom autograd Function: those of the ops `inner` that it has run."""
        key = key_of(again.kind, args, {})
        self._seconds[key] = math.fsum(self._seconds[run.key] for run in inner)
        return OpRun(key, 0)

    def seconds_of(self, run: OpRun | None) -> float:
        """Return the modelled time of an op; 0 for an unseen one."""
        return self._seconds[run.key] if run is not None else 0.0

    def working_bytes_of(self, run: OpRun | None) -> int:
        """Return 0: without kernels there are no workspaces, and the results count anyway."""
        return 0
