"""Trainers of other libraries, run under a meter without a budget and within one, as a program, in a process of its own.

echo llama | PYTHONPATH=src:benchmarks:tests/support LD_PRELOAD=<the meter> python tests/support/metered_trainers.py \
    trl_trainers
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from case_server import serve
from recollect.errors import BudgetTooSmallError, BudgetWarning

if TYPE_CHECKING:
    from allocator_meter import AllocatorMeter

# Above the least peak of the recorded step, which also times single units.
_ROOM = 1.02
# Of the way from the least peak to the peak without a budget.
_PART = 0.15
# Steps of a training, and of one with FSDP2, of which one step in ten may be late.
NUM_STEPS = 8
SHARDED_STEPS = 10


@dataclass(frozen=True)
class Row:
    """A training within a budget.

    `peaks_bytes`: of each optimizer's step, with what comes before it. `recorded_steps`: how many were recorded.
    `warnings`: those about the budget.
    """

    budget_bytes: int
    plain_bytes: int
    least_bytes: int
    peaks_bytes: list[int]
    recorded_steps: int
    weights_equal: bool
    warnings: list[str]


class StepPeaks:
    """The most that was alive in each step, counted from when this was made."""

    def __init__(self, meter: AllocatorMeter) -> None:
        gc.collect()
        gc.freeze()
        self._meter = meter
        self._before_bytes = meter.now_bytes()
        self.bytes: list[int] = []
        self.begin()

    def begin(self) -> None:
        gc.collect()
        self._meter.restart()

    def end(self) -> None:
        self.bytes.append(self._meter.peak_bytes() - self._before_bytes)
        self.begin()


Case = Callable[[int | str | None, StepPeaks], tuple[nn.Module, int]]
"""Trains a new model in some steps, within a budget or without; returns the model, and how many steps were recorded."""


def row_of(case: Case, meter: AllocatorMeter) -> Row:
    """Train without a budget, and within one near the least."""
    plain = StepPeaks(meter)
    expected = digest_of(case(None, plain)[0])
    try:
        case(1, StepPeaks(meter))
    except BudgetTooSmallError as error:
        least_bytes = int(error.least_peak_bytes * _ROOM)
    else:
        raise AssertionError("a budget of one byte was not refused")
    budget_bytes = _largest(int(least_bytes + _PART * (max(plain.bytes) - least_bytes)))
    peaks = StepPeaks(meter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, recorded_steps = case(budget_bytes, peaks)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, BudgetWarning)]
    is_equal = digest_of(model) == expected
    return Row(budget_bytes, max(plain.bytes), least_bytes, peaks.bytes, recorded_steps, is_equal, said)


def _largest(nbytes: int) -> int:
    """Return the largest number of all processes that train together, which share one budget."""
    if not dist.is_initialized():
        return nbytes
    largest = torch.tensor(nbytes)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def digest_of(model: nn.Module) -> str:
    """Return a digest of all weights and buffers, whole ones of what is sharded, and of the state of the random generator."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Serve the cases and mistakes of a module that is named."""
    from allocator_meter import AllocatorMeter

    module = importlib.import_module(sys.argv[1])
    cases: Mapping[str, Case] = module.CASES
    mistakes: Mapping[str, Callable[[], None]] = getattr(module, "MISTAKES", {})
    torch.set_num_threads(1)
    meter = AllocatorMeter()

    def run(name: str) -> dict[str, Any]:
        if name in cases:
            return asdict(row_of(cases[name], meter))
        mistakes[name]()
        raise AssertionError("no error")

    serve(run)


if __name__ == "__main__":
    main()
