"""Implements the region engine: re-runs whole modules in backward, for modules that the tape cannot see into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recollect.engine.placed_forward import PlacedForward
from recollect.engine.unit_modules import unit_module

if TYPE_CHECKING:
    from recollect.plans.unit_plan import UnitPlan

__all__ = ["RegionEngine"]


class RegionEngine:
    """Runs each unit under `torch.utils.checkpoint`; `recollect.simulation.region_schedule` simulates the cost."""

    def apply(self, model: nn.Module, units: Mapping[str, UnitPlan]) -> list[PlacedForward]:
        """Return forwards that re-run each unit as a whole."""
        return [_RegionForward(unit_module(model, path)) for path in units]


class _RegionForward(PlacedForward):
    """Runs a unit, keeps only its inputs, and runs it again when backward needs what it saved.

    Non-reentrant, so that it works even if no input requires grad or only some outputs are used. The module's Python
    runs twice, so side effects (counters, caches) happen twice: that is why the tape is the preferred engine.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
