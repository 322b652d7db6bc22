"""What an op costs where nothing can be measured, because its tensors are fake: a cost model.

See `op_costs.py` for ops that really run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from recollect._torch_private import tree_leaves
from recollect.engine.facts import OpFacts
from recollect.profile.op_costs import Key, OpRun, key_of


class ModelledCosts:
    """A roofline: the longer of arithmetic at peak rate and memory traffic at full bandwidth, and a launch.

    The default is an NVIDIA H100 SXM by its data sheet (989.5 TFLOP/s dense bf16, 3.35 TB/s) at the 70 % of it that large
    matrix products reach, and 5 us a launch. Good for choosing between values, not for promising seconds.
    """

    def __init__(
        self, *, flops_per_s: float = 0.7 * 989.5e12, bytes_per_s: float = 0.7 * 3.35e12, launch_s: float = 5e-6
    ) -> None:
        self._flops_per_s = flops_per_s
        self._bytes_per_s = bytes_per_s
        self._launch_s = launch_s
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
            self._seconds[key] = self._estimate(func, args, kwargs, output)
        return output, OpRun(key, 0)

    def seconds_of(self, run: OpRun | None) -> float:
        """Return the modelled time of an op; 0 for one that was not seen to run."""
        return self._seconds[run.key] if run is not None else 0.0

    def working_bytes_of(self, run: OpRun | None) -> int:
        """Fake tensors have no kernels, so no workspaces: only the results count, and those are known anyway."""
        return 0

    def _estimate(self, func: Any, args: Any, kwargs: Any, output: Any) -> float:
        tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, torch.Tensor)]
        traffic_bytes = sum(t.numel() * t.element_size() for t in tensors)
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        flops = formula(*args, **kwargs, out_val=output) if formula is not None else 0
        return self._launch_s + max(flops / self._flops_per_s, traffic_bytes / self._bytes_per_s)
