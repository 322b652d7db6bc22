"""Reserve memory for runs of units that a recorded step did not have, but other steps do: layers that are skipped by chance.

Such runs drop all that can be dropped. Each then holds what it returns and what has no recipe, and one at a time computes the
rest again. A unit that was never recorded is taken to be like one of its class, with parameters of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from recollect.attaching.unit_watch import Course
from recollect.measuring.meter import storage_bytes
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.recording.optimizers import present_state_bytes, state_tensors

_KIND: Final = "units_of_other_steps"
"""Under this name the bytes count in a profile as alive throughout the step."""


class Reserve:
    """Knows what runs of the units of a model need at their leanest, from profiles of steps in which units like them ran.

    Args:
        model: with its units.
        unit_paths: of the units.
        optimizers: whose state of a unit's parameters exists once it has run.
        device: where the model runs.
    """

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
        """Return spare runs for all units like those that have some: where layers are skipped by chance, any may come.

        Args:
            course: of the recorded call.
            spare: runs that others like it had beyond it.
        """
        kinds = {self._kinds[path] for path in spare if path in self._kinds}
        alike = [path for path, kind in self._kinds.items() if kind in kinds]
        ran = {path: course.units[path].number if path in course.units else 0 for path in alike}
        most: dict[object, int] = {}
        for path in alike:
            most[self._kinds[path]] = max(most.get(self._kinds[path], 0), ran[path] + spare.get(path, 0))
        missing = {path: most[self._kinds[path]] - ran[path] for path in alike}
        return {**spare, **{path: max(number, spare.get(path, 0)) for path, number in missing.items() if number > 0}}

    def with_room(self, profile: Profile, spare: Sequence[Mapping[str, int]], more_bytes: int) -> Profile:
        """Return the profile with memory for further runs of units, as far as units like them are known.

        Args:
            profile: a recorded step.
            spare: for each group of calls of which all may wait for backward at once, the further runs of each unit.
            more_bytes: that other steps held beyond it for reasons that nothing tells.
        """
        persistent = {kind: nbytes for kind, nbytes in profile.persistent.items() if kind != _KIND}
        persistent["optimizer_state"] = max(persistent.get("optimizer_state", 0), self.optimizer_bytes())
        nbytes = (self.needed_bytes(profile, spare) or 0) + more_bytes
        return replace(profile, persistent={**persistent, _KIND: nbytes} if nbytes else persistent)

    def needed_bytes(self, profile: Profile, spare: Sequence[Mapping[str, int]]) -> int | None:
        """Return what further runs of units need in a step; None if no unit like one of them has run in it."""
        graphs = {call.path: profile.graph_of(call) for call in profile.calls}
        kinds = {self._kinds[path]: graph for path, graph in graphs.items() if path in self._kinds}
        paths = set[str]().union(*spare)
        found = {path: graphs.get(path) or kinds.get(self._kinds.get(path, ())) for path in paths}
        known = {path: graph for path, graph in found.items() if graph is not None}
        if len(known) < len(paths):
            return None
        runs = [sum(number * _lean_bytes(known[path]) for path, number in group.items()) for group in spare]
        working_bytes = max(map(_working_bytes, known.values()), default=0)
        return max(runs, default=0) + working_bytes + self._state_bytes(path for path in paths if path not in graphs)

    def optimizer_bytes(self) -> int:
        """Return the bytes of the state that the optimizers have now on the device."""
        return present_state_bytes(self._optimizers, self._device)

    def held_bytes(self, profile: Profile, plan: Plan, skipped: Mapping[str, int]) -> int:
        """Return what runs of units hold under a plan between their forward and their backward.

        Args:
            profile: the step that the plan was made for.
            plan: for it.
            skipped: the runs.
        """
        graphs = {call.path: profile.graph_of(call) for call in profile.calls}
        total = 0
        for path, number in skipped.items():
            actions = plan.units[path].actions if path in plan.units else {}
            kept = (v for v in graphs[path].values if v.saved and actions.get(v.name, Action.KEEP) is Action.KEEP)
            total += number * sum(value.nbytes for value in kept if value.producer is not None)
        return total

    def _state_bytes(self, paths: Iterable[str]) -> int:
        """Return the bytes of gradients of units, and of the state that the optimizers do not have yet for their parameters."""
        trained = [p for path in paths for p in self._modules[path].parameters() if p.requires_grad]
        with_state = [p for optimizer in self._optimizers for p, state in optimizer.state.items() if state]
        known = set(map(id, with_state))
        new_bytes = storage_bytes([p for p in trained if id(p) not in known])
        ratio = storage_bytes(state_tensors(self._optimizers)) / max(1, storage_bytes(with_state))
        return storage_bytes(trained) + int(new_bytes * ratio)


def _kind(module: nn.Module) -> tuple[object, ...]:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _lean_bytes(graph: UnitGraph) -> int:
    return sum(value.nbytes for value in graph.values if value.is_output or (value.must_keep and value.saved))


def _working_bytes(graph: UnitGraph) -> int:
    return sum(value.nbytes for value in graph.values if value.producer is not None)
