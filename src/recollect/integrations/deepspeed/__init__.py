"""DeepSpeed: a memory budget for its engine, a stand-in for its `checkpointing`, and its settings as plans.

The names below are imported on first use; none of them imports DeepSpeed before it is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect.integrations.deepspeed.engine import initialize
    from recollect.integrations.deepspeed.section import ActivationCheckpointing, deepspeed_plan

__all__ = ["ActivationCheckpointing", "deepspeed_plan", "initialize"]

_HOME_OF_NAME = {"ActivationCheckpointing": "section", "deepspeed_plan": "section", "initialize": "engine"}


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
