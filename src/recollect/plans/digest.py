"""Tell by a short text whether processes have the same plan, without sending the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from recollect.plans.unit_plan import UnitPlan

__all__ = ["digest_of"]


def digest_of(units: Mapping[str, UnitPlan], loss_chunks: int = 1) -> str:
    """Return a text that is equal for equal plans of units, in every process: what they do, without predictions.

    Example:
        >>> digest_of({"layers.0": UnitPlan({"up.mm": "recompute"})}) == digest_of(
        ...     {"layers.0": UnitPlan({"up.mm": "keep"})}
        ... )
        False
    """
    rows = [
        (path, unit.engine.word, str(unit.output), sorted((name, str(action)) for name, action in unit.actions.items()))
        for path, unit in sorted(units.items())
    ]
    return hashlib.sha256(repr((rows, loss_chunks)).encode()).hexdigest()[:12]
