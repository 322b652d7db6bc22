"""The cost of a unit inside `torch.compile` when it keeps a given set of values."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class VariantRecord:
    """One way to run a unit compiled: the values it keeps for backward, the memory and the time of one run.

    Measured, or estimated, between a source and a sink: the unit's inputs exist before, and the gradient of its
    output comes from outside.
    """

    kept: tuple[int, ...]
    """Indices of the values that ops of the unit compute and that are in memory between forward and backward."""
    held: tuple[int, ...]
    """Indices of the inputs and outputs that it keeps as well. Others may hold them too, so they count once."""
    own_bytes: int
    """All other bytes alive between forward and backward: kept values, random states, unnamed values."""
    forward_bytes: int
    """The most that forward needs above its inputs, with its outputs and kept values."""
    backward: tuple[Annotated[tuple[int, int, int], "most bytes", "change", "value let go"], ...]
    """For each stretch of backward, the most bytes above its start, the change at its end, and the index of the value
    in `held` released there, -1 for none. Values in `held` are not in the changes."""
    step_s: float
    is_default: bool = False
    """It keeps PyTorch's choice without a plan."""
    is_estimated: bool = False
    """Nothing ran; bytes and seconds are from a model of the compiled code."""

    def __post_init__(self) -> None:
        if self.own_bytes < 0 or self.forward_bytes < 0:
            raise ValueError(f"variant: got {self.own_bytes} and {self.forward_bytes} bytes, expected 0 or more")
        if not (math.isfinite(self.step_s) and self.step_s >= 0):
            raise ValueError(f"variant: got {self.step_s} s, expected a finite number, 0 or more")
        for most_bytes, _, let_go in self.backward:
            if most_bytes < 0:
                raise ValueError(f"variant: got {most_bytes} bytes in backward, expected 0 or more")
            if let_go >= 0 and let_go not in self.held:
                raise ValueError(f"variant: lets go of value {let_go}, which it does not hold")
