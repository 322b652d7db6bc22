"""Simulates how the tape runs an op again: on byte counts instead of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recollect.simulation.program import ProgramOp
from recollect.simulation.schedule import PlayedStep

__all__ = ["Rerun"]


class Rerun:
    """Runs an op again: allocates its results anew and counts its time."""

    __slots__ = ("op", "results", "sizes", "state", "step")

    def __init__(self, step: PlayedStep, run: ProgramOp, sizes: Sequence[int]) -> None:
        self.step = step
        self.op = run.op
        self.results = run.results
        self.sizes = sizes
        self.state = self._new_state()

    def _new_state(self) -> Any:
        if not self.op.state_bytes:
            return None
        return self.step.generator_state(self.results[0][0][0], self.op.state_bytes)

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        """Run the op when `recollect.replay` asks for it."""
        self.step.runs_again(self.results[0][0][0], self.op)
        self.step.work(self.op)
        if self.op.mutates and may_overwrite_first:
            return (tensors[0],)
        results = zip(self.results, self.sizes, strict=True)
        return tuple([self.step.make(key, nbytes) for (key, _), nbytes in results])
