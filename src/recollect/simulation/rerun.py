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
        op = run.op
        self.state = step.generator_state(run.results[0][0][0], op.state_bytes) if op.state_bytes else None

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        """Run the op when `recollect.replay` asks for it."""
        step, op, results = self.step, self.op, self.results
        step.runs_again(results[0][0][0], op)
        if op.working_bytes:
            step.work(op)
        if op.mutates and may_overwrite_first:
            return (tensors[0],)
        if len(results) == 1:
            return (step.make(results[0][0], self.sizes[0]),)
        return [step.make(key, nbytes) for (key, _), nbytes in zip(results, self.sizes, strict=True)]
