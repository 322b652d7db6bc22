"""Make processes that attached together agree on which steps to record and which plan to run.

Asking costs each call of the model an exchange over gloo, which waits for the slower process. After some steps with
nothing new, they ask only in every 16th step. This is safe because:

* **They agree on when to ask next.** The next question comes a fixed number of steps after one that all have answered. A
  call that fails and is tried again in one process ends no step; if it is not, the optimizer's step ends it, as in the
  others. So in each step either all ask or none does, and none waits for an answer to a question that the others do not ask.
* **In between, each process chooses among plans that all have.** They may then run different ones, which is harmless if no
  plan does anything in backward that the others have to join: run a collective again, or gather parts of a value or
  of a parameter. If one does, they ask in every call.
* **A process that no plan covers in between does not record**, since the others would have to take part at the end of
  the recording. It runs that step at its leanest, which needs no other process, and says so at the next question; until
  then, if the step may have been over the budget, all later ones are lean, too. Then all record, and ask in each step
  again until some were covered in all of them.
* **None raises by itself in between.** With `on_larger` "warn" or "raise" they ask in every call.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from torch import nn

from recollect._torch_parallel import allows_uneven_inputs, is_data_parallel
from recollect._torch_private import disable_torch_dispatch
from recollect.attaching.planned_step import PlannedStep
from recollect.engine.together import is_partitioned
from recollect.errors import RecordError
from recollect.ranks.group import Place, Ranks

T = TypeVar("T")

# After this many steps that ask and find nothing new, ask only once in this many steps.
_STEADY_STEPS: Final = 8
_ASKS_EVERY: Final = 16


class Lockstep:
    """The questions that one process asks the others, always at the same place in the loop; a single process asks itself.

    `may_differ`: they may decide separately for some steps; not if one might have to raise alone.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, may_differ: bool) -> None:
        self.ranks = ranks
        self.place = Place.FIRST_CALL
        self._may_differ = may_differ and not any(map(is_partitioned, model.parameters()))
        self._num_recorded = 0
        self._next_step = 0
        self._num_steady = 0
        self.asks = True
        self._replicas = [module for module in model.modules() if is_data_parallel(module)]

    def at_call(
        self, covering: Sequence[PlannedStep], step: int, *, is_first: bool, missed: bool
    ) -> tuple[list[PlannedStep], bool]:
        """Exchange the facts about a call in all processes; use only this one's if they have agreed not to ask in this step.

        Return the steps that cover the calls so far, the least recompute first; and whether a step of some process was not
        covered, and has to be recorded.
        """
        if is_first and any(map(allows_uneven_inputs, self._replicas)):
            raise RecordError(
                "attach: the loop runs in join(), in which some processes have fewer batches than others, and then do not "
                'answer which plan they can run. Have as many batches in each; or pass group="alone" to have each plan for '
                "itself."
            )
        if is_first:
            self.asks = step >= self._next_step
        if not self.asks:
            return _least_recompute_first(covering), missed
        self.place = Place.FIRST_CALL if is_first else Place.LATER_CALL
        own = {planned.number: planned for planned in covering}
        flags = [*(number in own for number in range(self._num_recorded)), not missed]
        *is_common, none_missed = self.ranks.all_of(flags, self.place)
        steps = _least_recompute_first(own[number] for number, is_so in enumerate(is_common) if is_so)
        is_steady = self._may_differ and none_missed and bool(steps)
        self._num_steady = self._num_steady + is_first if is_steady else 0
        if is_first and self._num_steady >= _STEADY_STEPS:
            self._next_step = step + _ASKS_EVERY
        return steps, not none_missed

    def at_recorded_call(self) -> None:
        """Check that all call the model once more in the step that they record; one in which a call raised begins it again."""
        with disable_torch_dispatch():  # It is not part of the step.
            self.ranks.all_of([], Place.LATER_CALL)

    def note_plan(self, planned: PlannedStep) -> None:
        self._num_recorded += 1
        self._may_differ = self._may_differ and not planned.needs_all_ranks

    def all_can(self, flag: bool) -> bool:
        """Return whether all can do something at this call; not where they do not ask."""
        return self.asks and self.ranks.all_of([flag], self.place)[0]

    def all_end(self, flag: bool) -> bool:
        """Return whether something holds in all processes, at the end of a recorded step."""
        return self.ranks.all_of([flag], Place.STEP_END)[0]

    def together(self, action: Callable[[], T], *, is_end: bool = False) -> T:
        """Do something that fails in all processes if it fails in one; see `Ranks.together`."""
        return self.ranks.together(action, Place.STEP_END if is_end else self.place)

    def first_text(self, text: str | None) -> str:
        """Return, in all processes, the text of the first one that has a text; some process has one."""
        texts: list[str | None] = self.ranks.gather(text, self.place)
        return next(its for its in texts if its is not None)


def _least_recompute_first(steps: Iterable[PlannedStep]) -> list[PlannedStep]:
    return sorted(steps, key=lambda step: (step.worst_slowdown, step.number))
