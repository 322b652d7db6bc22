"""Choose the plan under which a step runs that has none yet: the leanest of those for steps that are foreseen from others."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from recollect.attaching.lockstep import Lockstep
from recollect.attaching.planned_step import PlannedStep, own_plan
from recollect.attaching.step_shape import Call
from recollect.engine.policy import DropAll, Policy
from recollect.measuring.meter import storages_of
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.ranks.common import common_plan
from recollect.recording.next_step import foreseen, with_copies
from recollect.simulation.decisions import CallActions, decide_call
from recollect.simulation.playback import Playback, Token
from recollect.simulation.program import Key, Program
from recollect.simulation.simulate import Simulation, run


class LeanStart:
    """Foresees steps from recorded ones, and finds their leanest plans.

    Args:
        lockstep: of the processes that run one plan.
        device: whose gradients count.
    """

    def __init__(self, lockstep: Lockstep, device: torch.device) -> None:
        self._lockstep = lockstep
        self._device = device
        # Steps come again, as beside a profiler, and each costs a search.
        self._last: tuple[object, Profile, Planner, Plan] | None = None

    def units(
        self,
        planned: Sequence[PlannedStep],
        call: Call,
        parameters: Iterable[torch.Tensor],
        unit_paths: Iterable[str],
    ) -> Mapping[str, UnitPlan] | None:
        """Return the leanest plan that is foreseen for a step, alike in all processes; None if there is no other step to go by.

        Args:
            planned: the steps that were recorded.
            call: of the model, which is about to run without a plan.
            parameters: of the model, some with gradients.
            unit_paths: of its units; of one that did not run in the other step nothing is kept.
        """
        if not planned:
            return None
        profile, planner, own = self._lockstep.together(lambda: self._leanest(planned, call, parameters))
        ranks, place = self._lockstep.ranks, self._lockstep.place
        chosen, _ = common_plan(
            profile, own, plain_bytes=planner.plain_peak_bytes, budget_bytes=1, ranks=ranks, place=place
        )
        ran = {its.path for its in profile.calls}
        return {**{path: UnitPlan({}) for path in unit_paths if path not in ran}, **chosen.units}

    def _leanest(
        self, planned: Sequence[PlannedStep], call: Call, parameters: Iterable[torch.Tensor]
    ) -> tuple[Profile, Planner, Plan]:
        nearest = min(planned, key=lambda step: _distance(step, call))
        key = nearest.number, call
        if self._last is None or self._last[0] != key:
            gradients: list[torch.Tensor] = []
            if call.has_gradients and not nearest.calls[0].has_gradients:
                gradients = [g for p in parameters if (g := p.grad) is not None and g.device == self._device]
            profile = foreseen(
                nearest.profile,
                gradients_bytes=[storage.nbytes() for storage in storages_of(gradients)],
                growth=max(1.0, _growth(nearest, call)),
            )
            planner = Planner(with_copies(profile))
            # While it is recorded, the tape copies what a plan keeps: one that keeps less may need less.
            leanest = min(
                (own_plan(planner, 1)[0], classic_plan(profile, "full")),
                key=lambda plan: recorded_under(profile, DropAll(but=plan.units)).peak_bytes,
            )
            self._last = key, profile, planner, leanest
        return self._last[1:]


def _growth(step: PlannedStep, call: Call) -> float:
    return max(1, call.numel) / max(1, step.calls[0].numel)


def _distance(step: PlannedStep, call: Call) -> tuple[bool, float, bool, int]:
    """Return how little a step tells of another one that begins with a call; of equal ones, the last tells most."""
    first = step.calls[0]
    return (
        first.entry != call.entry,
        abs(math.log(_growth(step, call))),
        first.has_gradients != call.has_gradients,
        -step.number,
    )


def recorded_under(profile: Profile, policy: Policy) -> Simulation:
    """Simulate the step as a recording runs it: all units on a tape that follows a policy, and that copies what it holds."""
    known: dict[tuple[int, str], CallActions] = {}
    for call in profile.calls:
        if (call.graph, call.path) not in known:
            graph = profile.graph_of(call)
            names = (value.name for value in graph.values if value.producer is not None)
            unit = UnitPlan({name: policy.action(call.path, name) for name in names}, policy.output_action(call.path))
            known[call.graph, call.path] = decide_call(graph, unit)
    decisions = dict(enumerate(known[call.graph, call.path] for call in profile.calls))
    return run(_Copying(Program(profile), decisions, frozenset(decisions)))


class _Copy(Token):
    """Bytes of a copy, which all that hold it share."""

    __slots__ = ("__weakref__",)


class _Copying(Playback):
    """Plays a step whose tape holds copies of what the model has, for as long as anything needs them."""

    def __init__(self, program: Program, decisions: Mapping[int, CallActions], on_tape: Collection[int]) -> None:
        super().__init__(program, decisions, on_tape)
        self._copies: weakref.WeakValueDictionary[Key, _Copy] = weakref.WeakValueDictionary()

    def bytes_of(self, key: Key) -> object:
        """Return a copy."""
        own = self.tensors.get(key)
        if not isinstance(own, Token):
            return super().bytes_of(key)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = _Copy(self, own.nbytes, key)
        return copy
