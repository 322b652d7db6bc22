"""Turn Megatron's recompute settings into plans.

The names below are imported on first use; none of them needs PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.integrations.megatron.choice import BlockFull, NoRecompute, Selective, UniformFull
    from recollect.integrations.megatron.compile import megatron_plan, megatron_stage_plans
    from recollect.integrations.megatron.config import RecomputeConfig
    from recollect.integrations.megatron.nearest import bridge_lines, megatron_flags, nearest_settings
    from recollect.integrations.megatron.pipeline import model_chunks
    from recollect.integrations.megatron.roll import RollCheckpointing, roll_plan, roll_recompute_config
    from recollect.integrations.megatron.rules import RULES
    from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = [
    "RULES",
    "BlockFull",
    "NoRecompute",
    "RecomputeConfig",
    "RollCheckpointing",
    "Selective",
    "TrainingSetting",
    "UniformFull",
    "bridge_lines",
    "megatron_flags",
    "megatron_plan",
    "megatron_stage_plans",
    "model_chunks",
    "nearest_settings",
    "roll_plan",
    "roll_recompute_config",
]

_NAMES_BY_HOME = {
    "choice": ("BlockFull", "NoRecompute", "Selective", "UniformFull"),
    "compile": ("megatron_plan", "megatron_stage_plans"),
    "config": ("RecomputeConfig",),
    "nearest": ("bridge_lines", "megatron_flags", "nearest_settings"),
    "pipeline": ("model_chunks",),
    "roll": ("RollCheckpointing", "roll_plan", "roll_recompute_config"),
    "rules": ("RULES",),
    "training_setting": ("TrainingSetting",),
}
_HOME_OF_NAME = {name: home for home, names in _NAMES_BY_HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
