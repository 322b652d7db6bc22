"""What a traced unit saves for backward, beside what the plan keeps."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.table import Table

import recollect
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.graph.node import TracedUnit, running
from recollect.engine.graph.traced_op import TracedTensor
from recollect.engine.placed_forward import Applied
from recollect.plans.action import Action
from recollect.plans.value_names import result_names
from results_csv import Number

__all__ = ["Traces", "saved_and_kept"]

_INPUT = "input or parameter"


class Traces:
    """In a with-block, notes each unit that is traced, with its path; equal ones share a trace."""

    def __init__(self) -> None:
        self.units: list[tuple[str, TracedUnit]] = []

    def __enter__(self) -> Traces:
        self._before = before = TracedUnit.__init__

        def noting(unit: TracedUnit, *args: Any, **kwargs: Any) -> None:
            before(unit, *args, **kwargs)
            self.units.append((running.path, unit))

        TracedUnit.__init__ = noting  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TracedUnit.__init__ = self._before  # type: ignore[method-assign]

    @staticmethod
    def reasons(applied: Applied) -> list[str]:
        """Return why units that should run from a trace stay on the tape, with their paths."""
        forwards = [forward for forward in applied._forwards if isinstance(forward, GraphForward)]
        return [f"{forward.path}: {forward.why_not}" for forward in forwards if forward.why_not]


def saved_and_kept(
    name: str, units: list[tuple[str, TracedUnit]], plan: recollect.Plan, profile: recollect.Profile
) -> tuple[list[Number], Table]:
    """Compare the two for the unit in the middle.

    Args:
        name: of the way to run, for the rows.
        units: traced under the plan.
        plan: what to keep.
        profile: of the step.

    Returns:
        Rows: bytes saved and bytes kept, and the names on one side only. A table of all names, with bytes.
    """
    path, unit = units[len(units) // 2]
    saved, inputs = _saved(unit)
    actions = plan.units[path].actions
    call = next(call for call in profile.calls if call.path == path)
    kept = {
        value.name: value.nbytes
        for value in profile.graph_of(call).values
        if value.producer is not None
        and (value.saved or value.name in saved)
        and actions.get(value.name, Action.KEEP) is not Action.RECOMPUTE
    }
    saved_only = {one: nbytes for one, nbytes in saved.items() if one not in kept}
    kept_only = {one: nbytes for one, nbytes in kept.items() if one not in saved}
    table = Table(title=f"{name}: {path}, bytes", title_justify="left")
    for heading in ("value", "saved by the trace", "kept by the plan"):
        table.add_column(heading, justify="left" if heading == "value" else "right")
    for one in {**kept, **saved}:
        table.add_row(one, *(f"{side[one]:,}" if one in side else "" for side in (saved, kept)))
    for tensor in inputs:
        table.add_row(f"{_INPUT} {list(tensor.layout[0])}", f"{tensor.storage_bytes:,}", "")
    rows = [
        Number("saved_bytes", "bytes", name, sum(saved.values())),
        Number("kept_bytes", "bytes", name, sum(kept.values())),
        Number("saved_only", "text", name, _listed(saved_only)),
        Number("kept_only", "text", name, _listed(kept_only)),
    ]
    return rows, table


def _saved(unit: TracedUnit) -> tuple[dict[str, int], list[TracedTensor]]:
    """Return the memory that is saved: what forward makes, by the name of the value that it was made for, and inputs."""
    made: dict[int, str] = {}
    for op in unit.trace.ops:
        for output, result in zip(op.outputs, result_names(op.name, len(op.outputs)), strict=True):
            if output is not None:
                made.setdefault(output.storage, result or f"a result of {op.func}")
    saved = unit.program(unit.trace.usual_tangents).cut.saved
    storages = {tensor.storage for tensor in saved}
    inputs = {tensor.storage: tensor for tensor in unit.trace.inputs if tensor.storage in storages}
    own = {made[one.storage]: one.storage_bytes for one in saved if one.storage not in inputs}
    return own, list(inputs.values())


def _listed(values: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes}" for name, nbytes in values.items()) or "none"
