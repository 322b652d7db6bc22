"""What an op costs where nothing can be measured, because its tensors are fake: a cost model.

See `op_costs.py` for ops that really run, `op_work.py` for what an op does, `roofline.py` for how long that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recollect.costs.hardware import Hardware
from recollect.costs.op_costs import Key, OpRun, key_of
from recollect.costs.op_work import work_of
from recollect.costs.roofline import seconds
from recollect.engine.facts import OpFacts


class ModelledCosts:
    """Runs ops on fake tensors and says how long they would take on some hardware."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._seconds: dict[Key, float] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing has to be switched on."""
        yield

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op on fake tensors; return its result, and what to ask for its costs with."""
        output = func(*args, **kwargs)
        key = key_of(func, args, kwargs)
        if key not in self._seconds:
            self._seconds[key] = seconds(work_of(func, facts, args, kwargs, output), self.hardware)
        return output, OpRun(key, 0)

    def seconds_of(self, run: OpRun | None) -> float:
        """Return the modelled time of an op; 0 for one that was not seen to run."""
        return self._seconds[run.key] if run is not None else 0.0

    def working_bytes_of(self, run: OpRun | None) -> int:
        """Fake tensors have no kernels, so no workspaces: only the results count, and those are known anyway."""
        return 0
