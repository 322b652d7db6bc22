"""Have the processes that attached together decide alike in every step: what is recorded, and which plan runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from recollect._torch_parallel import allows_uneven_inputs, is_data_parallel
from recollect.attaching.planned_step import PlannedStep, common_steps
from recollect.errors import RecordError
from recollect.ranks.group import Place, Ranks

__all__ = ["Lockstep"]

T = TypeVar("T")


class Lockstep:
    """What one process of several asks the others, each time at the same place of the loop; alone, it asks itself.

    Args:
        model: that they train.
        ranks: the processes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self._place = Place.FIRST_CALL
        self._replicas = [module for module in model.modules() if is_data_parallel(module)]

    @property
    def is_alone(self) -> bool:
        """Whether there is one process only."""
        return self.ranks.is_alone

    def at_call(
        self, covering: Sequence[PlannedStep], num_recorded: int, *, is_first: bool, is_calm: bool
    ) -> tuple[bool, list[PlannedStep]]:
        """Return whether all are calm, and the steps that cover the calls so far in all processes, the fastest first.

        Args:
            covering: those that cover the calls of this process.
            num_recorded: recordings so far.
            is_first: the call is the first of its step.
            is_calm: nothing disturbs the plan in this process.

        Raises:
            RecordError: a process may have fewer batches than others, or calls the model less often.
        """
        if is_first and any(map(allows_uneven_inputs, self._replicas)):
            raise RecordError(
                "attach: the loop runs in join(), in which some processes have fewer batches than others, and then do not "
                'answer which plan they can run. Have as many batches in each; or pass group="alone" to have each plan for '
                "itself."
            )
        self._place = Place.FIRST_CALL if is_first else Place.LATER_CALL
        return common_steps(covering, num_recorded, self.ranks, self._place, is_calm=is_calm)

    def all_can(self, flag: bool) -> bool:
        """Return whether all can do something at this call."""
        return self.ranks.all_of([flag], self._place)[0]

    def all_end(self, flag: bool) -> bool:
        """Return whether something is so in all processes, at the end of a recorded step."""
        return self.ranks.all_of([flag], Place.STEP_END)[0]

    def together(self, action: Callable[[], T], *, is_end: bool = False) -> T:
        """Do something that fails in all processes if it fails in one; see `Ranks.together`."""
        return self.ranks.together(action, Place.STEP_END if is_end else self._place)

    def first_text(self, text: str | None) -> str:
        """Return the text of the first process that has one, which some process has, in all of them."""
        texts: list[str | None] = self.ranks.gather(text, self._place)
        return next(its for its in texts if its is not None)
