"""Tell by a short text whether processes have the same plan, without sending the plan; and whether they have to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from recollect.plans.action import Action
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind


def digest_of(units: Mapping[str, UnitPlan], loss_chunks: int = 1) -> str:
    """Return a text that is equal for equal plans of units, in every process: what they do, without predictions.

    Example:
        >>> digest_of({"layers.0": UnitPlan({"up.mm": "recompute"})}) == digest_of(
        ...     {"layers.0": UnitPlan({"up.mm": "keep"})}
        ... )
        False
    """
    rows = [
        (path, unit.engine.word, str(unit.output), sorted(_words(unit).items())) for path, unit in sorted(units.items())
    ]
    return hashlib.sha256(repr((rows, loss_chunks)).encode()).hexdigest()[:12]


def _words(unit: UnitPlan) -> dict[str, str]:
    """Return what happens to each value, in words; of an offloaded one, also when."""
    words = {name: str(action) for name, action in unit.actions.items()}
    return words | {name: f"{words[name]} {tuple(trip)}" for name, trip in unit.trips.items()}


def needs_all_ranks(units: Mapping[str, UnitPlan]) -> bool:
    """Return whether a rank needs the others to carry a plan out: to run a collective again, or to gather a value's parts.

    Example:
        >>> needs_all_ranks({"layers.0": UnitPlan({"o._c10d_functional:all_reduce": "recompute"})})
        True
    """
    return any(
        action is Action.SHARD or (action is Action.RECOMPUTE and bool(collective_kind(name)))
        for unit in units.values()
        for name, action in unit.actions.items()
    )
