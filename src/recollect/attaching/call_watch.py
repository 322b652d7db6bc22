"""Hold each call of the model against the plan that is in place for it: the runs of its units, and what it holds."""

from __future__ import annotations

import torch

from recollect.attaching.departure import Departure
from recollect.attaching.held import HeldBytes
from recollect.attaching.placement import Placement
from recollect.attaching.step_under_way import StepUnderWay


class CallWatch:
    """Begins and ends with the calls of one model.

    Args:
        device: where it runs.
        keeps_to_plan: after a departure, run as planned what is foreseen.
        joins_others: other processes go by the same plan.
    """

    def __init__(self, device: torch.device, *, keeps_to_plan: bool, joins_others: bool) -> None:
        self._held = HeldBytes(device)
        self._keeps_to_plan = keeps_to_plan
        self._joins_others = joins_others

    def missing_room(self, placement: Placement) -> int:
        """Return how much more is in memory before a step than there was before others under its plan."""
        if placement.active is None:
            return 0
        self._held.begin_call(placement.active)
        return self._held.excess_before(placement.active)

    def begin(self, step: StepUnderWay, placement: Placement, *, is_planned: bool, is_on: bool) -> None:
        """Say which runs of units a call may have.

        Args:
            step: of which it is the last call so far.
            placement: of plans.
            is_planned: the plan in place is meant for it.
            is_on: something is in place, so that its runs count.
        """
        active = placement.active if is_planned else None
        foreseen = None if active is None else active.foreseen(step.calls, step.group)
        if active is None or foreseen is None:
            step.foresee(None)
            placement.units.allow_all(is_on=is_on)
            return
        course, spare = foreseen
        step.foresee(course)
        step.planned = active
        self._held.begin_call(active)
        # Where others run collectives again in backward, this process has to, too.
        keeps_to_plan = self._keeps_to_plan or (self._joins_others and active.needs_all_ranks)
        placement.units.allow(course, spare, keeps_to_plan=keeps_to_plan)

    def end(self, step: StepUnderWay, placement: Placement) -> None:
        """Read, where forward is over, how much a call holds; a departure if that is more than its plan foresees."""
        active = placement.active
        comes_to = placement.units.comes_to()
        # What spare runs hold has room of its own.
        if active is not None and step.departure is None and step.is_last_foreseen() and comes_to <= 0:
            more_bytes = self._held.excess_in_call(active, len(step.calls), step.calls[-1], is_whole=not comes_to)
            if more_bytes:
                step.departure = Departure("held more after forward than its plan foresees", more_bytes)
        self._held.end_call()
