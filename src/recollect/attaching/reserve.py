"""Reserve memory for unit runs that a recorded step lacked but other steps have: layers that are skipped by chance.

A unit that was never recorded is assumed to be like one of its class with parameters of the same shapes.

A step that has no plan yet runs under the leanest of those for steps that are foreseen from others.
"""

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from recollect.attaching.lockstep import Lockstep
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.room import Room, room_for
from recollect.attaching.step_shape import Call, Structure
from recollect.attaching.unit_watch import Course, largest
from recollect.engine.policy import DropAll, Policy
from recollect.measuring.meter import storage_bytes, storages_of
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import Key
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.members import common_plan
from recollect.recording.next_step import foreseen, with_copies
from recollect.recording.optimizers import present_state_bytes, state_tensors
from recollect.simulation.decisions import CallActions, decide_call
from recollect.simulation.playback import Playback, Token
from recollect.simulation.program import Program
from recollect.simulation.simulate import Simulation, run


class Reserve:
    """Knows the memory of a model's unit runs at their leanest, from profiles of steps that ran units like them."""

    def __init__(
        self,
        model: nn.Module,
        unit_paths: Iterable[str],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._modules = {path: modules[path] for path in unit_paths}
        self._kinds = {path: _kind(module) for path, module in self._modules.items()}
        self._optimizers = optimizers
        self._device = device

    def completed(self, course: Course, spare: Mapping[str, int]) -> dict[str, int]:
        """Return spare runs for all units like those that have some: if layers are skipped at random, any may run.

        `spare`: runs that others like the recorded call had beyond it.
        """
        kinds = {self._kinds[path] for path in spare if path in self._kinds}
        alike = [path for path, kind in self._kinds.items() if kind in kinds]
        ran = {path: course.units[path].number if path in course.units else 0 for path in alike}
        most: dict[object, int] = {}
        for path in alike:
            most[self._kinds[path]] = max(most.get(self._kinds[path], 0), ran[path] + spare.get(path, 0))
        missing = {path: most[self._kinds[path]] - ran[path] for path in alike}
        return {**spare, **{path: max(number, spare.get(path, 0)) for path, number in missing.items() if number > 0}}

    def with_state(self, profile: Profile) -> Profile:
        """Return the profile with the state that the optimizers have now, if that is more."""
        state_bytes = max(profile.persistent.get("optimizer_state", 0), self.optimizer_bytes())
        return replace(profile, persistent={**profile.persistent, "optimizer_state": state_bytes})

    def room(self, profile: Profile, spare: Sequence[Mapping[str, int]]) -> Room | None:
        """Return the memory that further unit runs need in a step; None if no unit like one of them ran in it.

        `spare`: those of each unit, for each group of calls that may wait for backward together.
        """
        graphs = {call.path: profile.graph_of(call) for call in profile.calls}
        kinds = {self._kinds[path]: graph for path, graph in graphs.items() if path in self._kinds}
        paths = set[str]().union(*spare)
        found = {path: graphs.get(path) or kinds.get(self._kinds.get(path, ())) for path in paths}
        known = {path: graph for path, graph in found.items() if graph is not None}
        if len(known) < len(paths):
            return None
        if not paths:
            return Room()
        runs = [sum(number * _lean_bytes(known[path]) for path, number in group.items()) for group in spare]
        held_bytes = max(runs) + self._state_bytes(path for path in paths if path not in graphs)
        alike = {self._kinds.get(path, path) for path in paths}
        calls = [number for number, call in enumerate(profile.calls) if self._kinds.get(call.path, call.path) in alike]
        return room_for(profile, held_bytes, calls)

    def optimizer_bytes(self) -> int:
        return present_state_bytes(self._optimizers, self._device)

    def held_bytes(self, profile: Profile, plan: Plan, skipped: Mapping[str, int]) -> int:
        """Return the bytes that unit runs hold under a plan between their forward and backward."""
        graphs = {call.path: profile.graph_of(call) for call in profile.calls}
        total = 0
        for path, number in skipped.items():
            actions = plan.units[path].actions if path in plan.units else {}
            kept = (v for _, v in graphs[path].made if v.saved and actions.get(v.name, Action.KEEP) is Action.KEEP)
            total += number * sum(value.nbytes for value in kept)
        return total

    def _state_bytes(self, paths: Iterable[str]) -> int:
        """Return the bytes of gradients of units, and of the state that the optimizers do not have yet for their parameters."""
        trained = [p for path in paths for p in self._modules[path].parameters() if p.requires_grad]
        with_state = [p for optimizer in self._optimizers for p, state in optimizer.state.items() if state]
        known = set(map(id, with_state))
        new_bytes = storage_bytes([p for p in trained if id(p) not in known])
        ratio = storage_bytes(state_tensors(self._optimizers)) / max(1, storage_bytes(with_state))
        return storage_bytes(trained) + int(new_bytes * ratio)


def without_last_output(profile: Profile, nbytes: int) -> Profile:
    """Return a profile that does not count what the step before returned and the loop still holds: plans get room for that."""
    if not nbytes:
        return profile
    other_bytes = max(0, profile.persistent.get("other_allocations", 0) - nbytes)
    return replace(profile, persistent={**profile.persistent, "other_allocations": other_bytes})


def varying_bytes(profile: Profile, calls: Sequence[Call]) -> int:
    """Return by how much steps with these calls may differ, as far as their first one shows it; 0 if it does not.

    If calls are alike and their units had as many values, of other sizes, then shapes within the units depend on data.
    """
    # Where other layers are frozen, as by loops whose optimizers take turns, units save other values at any data.
    kinds = {(call.shapes, call.trained, call.traced) for call in calls}
    if len(kinds) > 1 or not all(call.is_alike(calls[0]) for call in calls):
        return 0
    runs, begun = Counter(call.path for call in profile.calls), Counter[str]()
    saved, whole = defaultdict[object, list[int]](list), defaultdict[object, list[int]](list)
    for call in profile.calls:
        # Two runs within a call may differ at any data, as those of a head on several scales do.
        in_each, rest = divmod(runs[call.path], len(calls))
        run = 0 if rest else begun[call.path] % in_each
        begun[call.path] += 1
        values = profile.graph_of(call).values
        saved[call.path, run, len(values)].append(sum(value.nbytes for value in values if value.saved))
        whole[call.path, run, len(values)].append(sum(value.nbytes for value in values))
    kept_bytes = sum(max(sizes) - min(sizes) for sizes in saved.values())
    return kept_bytes + max((max(sizes) - min(sizes) for sizes in whole.values()), default=0)


def _kind(module: nn.Module) -> tuple[object, ...]:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _lean_bytes(graph: UnitGraph) -> int:
    return sum(value.nbytes for value in graph.values if value.is_output or (value.must_keep and value.saved))


class LeanStart:
    """Foresees steps from recorded ones, and finds their leanest plans."""

    def __init__(self, lockstep: Lockstep, structure: Structure, device: torch.device) -> None:
        self._lockstep, self._structure, self._device = lockstep, structure, device
        # Steps repeat, as under a profiler, and each costs a search.
        self._last: tuple[object, Profile, Planner, Plan] | None = None

    def units(
        self, planned: Sequence[PlannedStep], call: Call, unit_paths: Iterable[str]
    ) -> Mapping[str, UnitPlan] | None:
        """Return the leanest plan that is foreseen for a step, alike in all processes; None without a similar step.

        It keeps nothing of a unit that did not run in the other step.
        """
        if not planned:
            return None
        profile, planner, own = self._lockstep.together(lambda: self._leanest(_nearest(planned, call), call))
        ranks, place = self._lockstep.ranks, self._lockstep.place
        chosen, _ = common_plan(
            profile, own, plain_bytes=planner.plain_peak_bytes, budget_bytes=1, ranks=ranks, place=place
        )
        ran = {its.path for its in profile.calls}
        return {**{path: UnitPlan({}) for path in unit_paths if path not in ran}, **chosen.units}

    def peak_bytes(self, planned: Sequence[PlannedStep], call: Call, course: Course) -> int | None:
        """Return the peak of a call and its backward under that plan; None if it ran units that the other step did not."""
        nearest = _nearest(planned, call)
        known = largest(nearest.courses).units
        if any(path not in known or runs.number > known[path].number for path, runs in course.units.items()):
            return None
        return self._leanest(nearest, call)[2].predicted_peak_bytes

    def _leanest(self, nearest: PlannedStep, call: Call) -> tuple[Profile, Planner, Plan]:
        key = nearest.number, call
        if self._last is None or self._last[0] != key:
            gradients: list[torch.Tensor] = []
            if call.has_gradients and not nearest.calls[0].has_gradients:
                parameters = self._structure.parameters
                gradients = [g for p in parameters if (g := p.grad) is not None and g.device == self._device]
            profile = foreseen(
                nearest.profile,
                gradients_bytes=[storage.nbytes() for storage in storages_of(gradients)],
                growth=max(1.0, _growth(nearest, call)),
            )
            planner = Planner(with_copies(profile))
            # While it is recorded, the tape copies the values that a plan keeps: a plan that keeps less may need less.
            leanest = min(
                (planner.plan_or_leanest(1)[0], classic_plan(profile, "full")),
                key=lambda plan: recorded_under(profile, DropAll(but=plan.units)).peak_bytes,
            )
            self._last = key, profile, planner, leanest
        return self._last[1:]


def _growth(step: PlannedStep, call: Call) -> float:
    alike = [its.numel for its in step.calls if its.entry == call.entry] or [step.calls[0].numel]
    return max(1, call.numel) / max(1, *alike)


def _nearest(planned: Sequence[PlannedStep], call: Call) -> PlannedStep:
    return min(planned, key=lambda step: _distance(step, call))


def _distance(step: PlannedStep, call: Call) -> tuple[bool, float, bool, int]:
    """Return a key for how little a step tells of others that begin with a call; of equal ones, the last tells most."""
    first = step.calls[0]
    return (
        first.entry != call.entry,
        abs(math.log(_growth(step, call))),
        first.has_gradients != call.has_gradients,
        -step.number,
    )


def recorded_under(profile: Profile, policy: Policy) -> Simulation:
    """Simulate the step as a recording runs it: all units on a tape that follows a policy and copies its values."""
    known: dict[tuple[int, str], CallActions] = {}
    for call in profile.calls:
        if (call.graph, call.path) not in known:
            graph = profile.graph_of(call)
            actions = {value.name: policy.action(call.path, value.name) for _, value in graph.made}
            unit = UnitPlan(actions, policy.output_action(call.path))
            known[call.graph, call.path] = decide_call(graph, unit)
    decisions = dict(enumerate(known[call.graph, call.path] for call in profile.calls))
    return run(_Copying(Program(profile), decisions, frozenset(decisions)))


class _Copying(Playback):
    """Plays a step whose tape holds copies of the model's tensors, as long as anything needs them."""

    def __init__(self, program: Program, decisions: Mapping[int, CallActions], on_tape: Collection[int]) -> None:
        super().__init__(program, decisions, on_tape)
        # Each shared by everything that holds it.
        self._copies: dict[Key, weakref.ref[Token]] = {}

    def bytes_of(self, key: Key) -> object:
        own = self.tensors.get(key)
        if not isinstance(own, Token):
            return super().bytes_of(key)
        known = self._copies.get(key)
        copy = None if known is None else known()
        if copy is None:
            copy = self.make(key, own.nbytes)
            self._copies[key] = weakref.ref(copy)
        return copy
