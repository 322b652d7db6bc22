"""Has the ranks of a model compare their plans at the end of its first call, where none of them waits for another.

The tape sees the collectives of the units that it runs, which are others under another plan, and none where a plan drops
nothing. So the first call runs under a mode that sees all of them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import name_of_group
from recollect._torch_private import desugars, uncompiled
from recollect.engine.agreement import Agreement
from recollect.engine.facts import facts_of
from recollect.engine.op_mode import OpMode
from recollect.engine.placed_forward import PlacedForward

__all__ = ["FirstCall", "first_call_forwards"]


def first_call_forwards(model: nn.Module, agreement: Agreement) -> list[PlacedForward]:
    """Return the forward that has the ranks compare, if the model's ops may be those of several ranks.

    Args:
        model: with parameters that a device mesh spreads, as tensor parallelism does.
        agreement: of its ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    is_spread = any(getattr(parameter, "device_mesh", None) is not None for parameter in model.parameters())
    return [FirstCall(model, agreement)] if is_spread else []


class FirstCall(PlacedForward):
    """Runs a model's first call with gradients, compares the plans of its ranks, and takes itself off."""

    def __init__(self, module: nn.Module, agreement: Agreement) -> None:
        super().__init__(module)
        self.agreement = agreement

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward."""
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        self.take_off()
        with _Meets(self.agreement):
            output = self.forward(*args, **kwargs)
        self.agreement.compare()
        return output


class _Meets(OpMode):
    """Tells the ranks of each group whose collective it sees."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.agreement = agreement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented
        if not self.is_foreign() and facts_of(func).may_replay:
            self.agreement.meet(name_of_group(args, kwargs))
        return func(*args, **kwargs)
