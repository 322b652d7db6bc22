"""Plans of their own for the micro-batches of a pipeline's stage: one after the other, in the order of forwards."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from recollect.engine.placed_forward import PlacedForward, placed_call
from recollect.errors import ConfigError


class PlanPerMicroBatch(PlacedForward):
    """Switches on, for each forward of a module, the forwards that one plan placed on the modules in it.

    Nothing changes while training runs: the forwards of all plans stay in place, one around the other, and those that are
    off pass calls through. Backward needs no switching, since each graph has the recipes of the plan under which it was made.
    """

    def __init__(self, module: nn.Module, forwards: Sequence[Sequence[PlacedForward]]) -> None:
        super().__init__(module)
        self._next = 0
        self._forwards = forwards

    def put(self) -> None:
        """Place this on the module, and switch off the plans until it is their turn."""
        super().put()
        for own in self._forwards:
            _switch(own, is_on=False)

    def begin(self, micro_batch: int) -> None:
        if not 0 <= micro_batch < len(self._forwards):
            raise ConfigError(
                settings={"micro_batch": micro_batch},
                reason=f"there are {len(self._forwards)} plans, one for each micro-batch of a step",
                advice="Apply as many plans as a step has micro-batches.",
            )
        self._next = micro_batch

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputes():
            return self.forward(*args, **kwargs)
        own = self._forwards[self._next]
        self._next = (self._next + 1) % len(self._forwards)
        _switch(own, is_on=True)
        try:
            return self.forward(*args, **kwargs)
        finally:
            _switch(own, is_on=False)


def _switch(forwards: Sequence[PlacedForward], *, is_on: bool) -> None:
    for forward in forwards:
        forward.is_on = is_on
