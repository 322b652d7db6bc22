"""Fits PyTorch training into the memory you have, at the least slowdown possible, and proves it.

The names below are the public API. They are imported on first use, so that `import recollect` is quick and the planner
works where PyTorch is not installed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.engine.apply import Applied, applied_to, apply
    from recollect.fitting import fit
    from recollect.loss.chunked import chunked_cross_entropy
    from recollect.megatron.compile import megatron_plan
    from recollect.megatron.config import RecomputeConfig
    from recollect.plan import Plan, UnitPlan
    from recollect.planning.accounts import LayerAccount, layer_accounts
    from recollect.planning.choose import plan
    from recollect.planning.classic import classic_plan
    from recollect.planning.frontier import Frontier, frontier
    from recollect.planning.timeline import PeakReport, Timeline, explain_peak, timeline
    from recollect.profile.graph import Profile
    from recollect.profile.meter import PeakMeasurement, measure_peak
    from recollect.profile.record import record
    from recollect.verify import Report, verify

__all__ = [
    "Applied",
    "Frontier",
    "LayerAccount",
    "PeakMeasurement",
    "PeakReport",
    "Plan",
    "Profile",
    "RecomputeConfig",
    "Report",
    "Timeline",
    "UnitPlan",
    "applied_to",
    "apply",
    "chunked_cross_entropy",
    "classic_plan",
    "explain_peak",
    "fit",
    "frontier",
    "layer_accounts",
    "measure_peak",
    "megatron_plan",
    "plan",
    "record",
    "timeline",
    "verify",
]

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "Applied": "recollect.engine.apply",
    "Frontier": "recollect.planning.frontier",
    "LayerAccount": "recollect.planning.accounts",
    "PeakMeasurement": "recollect.profile.meter",
    "PeakReport": "recollect.planning.timeline",
    "Plan": "recollect.plan",
    "Profile": "recollect.profile.graph",
    "RecomputeConfig": "recollect.megatron.config",
    "Report": "recollect.verify",
    "Timeline": "recollect.planning.timeline",
    "UnitPlan": "recollect.plan",
    "applied_to": "recollect.engine.apply",
    "apply": "recollect.engine.apply",
    "chunked_cross_entropy": "recollect.loss.chunked",
    "classic_plan": "recollect.planning.classic",
    "explain_peak": "recollect.planning.timeline",
    "fit": "recollect.fitting",
    "frontier": "recollect.planning.frontier",
    "layer_accounts": "recollect.planning.accounts",
    "measure_peak": "recollect.profile.meter",
    "megatron_plan": "recollect.megatron.compile",
    "plan": "recollect.planning.choose",
    "record": "recollect.profile.record",
    "timeline": "recollect.planning.timeline",
    "verify": "recollect.verify",
}


class _Package(ModuleType):
    """Keeps `recollect.plan` and `recollect.verify` the public functions, though modules of these names exist.

    Importing a submodule binds it as an attribute of its package, in whatever order users import things.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _HOME_OF_NAME:
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
