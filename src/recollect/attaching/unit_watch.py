"""Watch every run of a model's units, even if they keep everything, and run them at their leanest if no plan foresees it.

Two calls of equal shapes may do different work: a layer is skipped by chance, an argument adds an iteration, a head is used in
some steps only. A plan is made for a course, and holds if each unit runs at most as often in a call, and on at most as much, as
when it was recorded. The first run beyond that is a departure. From there on, the rest of the step drops everything
except unit outputs, on a separate tape, which needs no preparation; earlier units hold the values that the plan says.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn

from recollect._torch_functions import python_backward
from recollect._torch_private import accumulates_gradient, current_autograd_node
from recollect.applying import already_applied
from recollect.engine.own_checkpoints import running_unit, tell_once
from recollect.engine.placed_forward import PlacedForward, forward_name, forward_of_user, placed_call
from recollect.engine.policy import DropAll
from recollect.engine.tape import Tape
from recollect.errors import BudgetWarning
from recollect.plans.paths import unit_words
from recollect.warning import warn_user

_ANY_NUMBER: Final = sys.maxsize
# Looked up in every run of a unit.
_Tensor = torch.Tensor


class Runs(NamedTuple):
    """How often a unit ran with gradients on, and how many elements its first argument had at most."""

    number: int
    numel: int


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a call of the model."""

    units: Mapping[str, Runs] = field(default_factory=dict)
    """The runs of each unit, by its path."""
    num_backwards: int = 1
    """How often backward reached the call's output, or its first unit's; 1 also if it never did, as after an error."""
    builds_graph: bool = False
    """Whether backward built its own graph."""

    def is_at_least(self, other: Course) -> bool:
        """Whether the other one does nothing that this one does not do."""
        return not self.lacks(other) and self.foresees_backward(other)

    def foresees_backward(self, other: Course) -> bool:
        """Whether backward runs at most as often in the other one, and builds a graph only if it does here."""
        return self.num_backwards >= other.num_backwards and (self.builds_graph or not other.builds_graph)

    def lacks(self, other: Course) -> dict[str, int]:
        """Return how many more runs of each unit the other one has; one more where it has as many, but larger ones.

        Example:
            >>> Course({"0": Runs(1, 64)}).lacks(Course({"0": Runs(3, 64), "1": Runs(1, 64)}))
            {'0': 2, '1': 1}
        """
        found = {}
        for path, runs in other.units.items():
            number, numel = self.units.get(path, Runs(0, 0))
            if runs.number > number:
                found[path] = runs.number - number
            elif runs.numel > numel:
                found[path] = 1
        return found

    @property
    def without_sizes(self) -> Course:
        return replace(self, units={path: runs._replace(numel=0) for path, runs in self.units.items()})

    @property
    def num_runs(self) -> int:
        return sum(runs.number for runs in self.units.values())


def largest(courses: Iterable[Course]) -> Course:
    """Return the course in which each unit has the most runs, on the largest inputs, of any.

    Example:
        >>> largest([Course({"0": Runs(2, 8)}), Course({"0": Runs(1, 64), "1": Runs(1, 8)})]).units
        {'0': Runs(number=2, numel=64), '1': Runs(number=1, numel=8)}
    """
    found = list(courses)
    units: dict[str, Runs] = {}
    for course in found:
        for path, runs in course.units.items():
            known = units.get(path, Runs(0, 0))
            units[path] = Runs(max(known.number, runs.number), max(known.numel, runs.numel))
    return Course(
        units,
        max((course.num_backwards for course in found), default=1),
        any(course.builds_graph for course in found),
    )


class WatchedUnit(PlacedForward):
    """Wraps the forward that a plan puts in place of a unit's own, and counts the unit's runs.

    Attributes:
        allowed: runs in this call under the plan.
        left: allowed runs that have not begun.
        spare: further runs that the plan has reserved memory for, if they are lean.
        numel: elements of the largest first argument in this call.
        most_numel: the largest for which the plan holds.
    """

    def __init__(self, module: nn.Module, path: str, watch: UnitWatch) -> None:
        super().__init__(module)
        self.path = path
        self.watch = watch
        self.allowed = self.left = self.spare = 0
        self.numel = self.most_numel = 0
        self.has_told = False

    def look_for_other(self) -> None:
        """Warn, once, if the user has put a forward in place of this one that does not refer to it."""
        forward = forward_of_user(self.module)
        if forward is None or self.has_told:
            return
        if not any(held is self for held in gc.get_referents(forward, *(getattr(forward, "__closure__", None) or ()))):
            self.has_told = True
            warn_user(
                f"recollect: {unit_words(self.path)} was given a new forward after attach, "
                f"{forward_name(forward)}: it runs without a plan, and steps may exceed the "
                "budget. Call attached.remove(), and attach again.",
                BudgetWarning,
            )

    @placed_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch = self.watch
        if not watch.is_on or not self.recomputes():
            return self.forward(*args, **kwargs)
        if current_autograd_node() >= 0:
            watch.meet_other(self)
        with running_unit():
            output = self._run(args, kwargs)
        if watch.watches_all or not watch.is_watched:
            watch.is_watched |= watch.watcher.watch_inside(output, watch.is_watched)
        return output

    def _run(self, args: Any, kwargs: Any) -> Any:
        watch = self.watch
        self.left -= 1
        first = args[0] if args else next(iter(kwargs.values()), None)
        if type(first) is _Tensor:
            numel = first.numel()
            if numel > self.numel:
                self.numel = numel
                if numel > self.most_numel:
                    return watch.run_unforeseen(self, args, kwargs)
        if self.left < 0 or watch.is_lean:
            return watch.run_unforeseen(self, args, kwargs)
        return self.forward(*args, **kwargs)


class Told(Protocol):
    """Is told of departures, and of what units return."""

    departs: Callable[[str], object]

    def watch_inside(self, output: Any, only_within: bool) -> bool: ...


class UnitWatch:
    """State shared by a model's watched units: the runs allowed in the current call.

    Args:
        watcher: whose `departs` is called with what the first unit in a step did that no plan foresees, in words; may raise.

    Attributes:
        is_on: a call of a step is known, and runs belong to it.
        is_lean: the rest of the step runs at its leanest.
        is_watched: what a unit has returned in this call shows its backwards.
        watches_all: some backward may begin within this call, and not reach the first unit. Else a hook a unit would take time.
    """

    def __init__(self, model: nn.Module, unit_paths: Iterable[str], watcher: Told) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.units = [WatchedUnit(modules[path], path, self) for path in unit_paths]
        self.is_on = self.is_lean = self.is_watched = self.watches_all = False
        self.watcher = watcher
        self._has_departed = False
        self._keeps_to_plan = False
        self._tape = Tape(DropAll())

    def begin_step(self) -> None:
        self.is_on = self.is_lean = self._has_departed = False

    def allow(self, course: Course, spare: Mapping[str, int], *, keeps_to_plan: bool) -> None:
        """Begin a call under a plan.

        `spare`: further runs that there is memory for. `keeps_to_plan`: after a departure, run foreseen units as planned, since
        other processes follow the plan.
        """
        self.is_on, self._keeps_to_plan, self.is_watched = True, keeps_to_plan, False
        self.watches_all = course.num_backwards > 1
        units = course.units
        for unit in self.units:
            unit.allowed, unit.most_numel = units.get(unit.path, (0, 0))
            unit.left, unit.spare = unit.allowed, spare.get(unit.path, 0)
            unit.numel = 0

    def allow_all(self) -> None:
        """Begin a call that is recorded, or without a plan."""
        self.is_on, self.is_lean, self.is_watched, self.watches_all = True, False, False, True
        for unit in self.units:
            unit.allowed = unit.left = unit.most_numel = _ANY_NUMBER
            unit.numel = unit.spare = 0

    def course(self) -> Course:
        for unit in self.units:
            if unit.left == unit.allowed:
                unit.look_for_other()
        return Course(
            {unit.path: Runs(unit.allowed - unit.left, unit.numel) for unit in self.units if unit.left != unit.allowed}
        )

    def comes_to(self) -> int:
        """Return 0 if all foreseen runs have happened, 1 if some spare ones have, too, and -1 if some are missing."""
        if any(unit.left < 0 for unit in self.units):
            return 1
        return -any(unit.left > 0 for unit in self.units)

    def meet_other(self, unit: WatchedUnit) -> None:
        """Report that something other than a plan reruns a unit in backward; raise if that depends on what the unit saves."""
        function = python_backward()
        if function is None and accumulates_gradient():
            return  # A hook of a tensor runs the model: it has no other gradients.
        if function is None:
            by = "hooks of its own on saved tensors"
            raise already_applied(unit.path, by, "call it without them")
        tell_once(
            f"{function.__module__}.{function.__qualname__} runs layers again in backward, and no plan can change that. "
            "To have recollect decide, call torch.utils.checkpoint with use_reentrant=False, or the layers themselves."
        )

    def run_unforeseen(self, unit: WatchedUnit, args: Any, kwargs: Any) -> Any:
        """Run a unit more often, or on larger inputs, than the plan allows; or any unit after that."""
        is_foreseen = unit.left >= 0 and unit.numel <= unit.most_numel
        if not is_foreseen and unit.spare > 0:
            unit.spare -= 1
        elif not is_foreseen and not self._has_departed:
            self._has_departed = self.is_lean = True
            often = "often", f"run {unit.allowed - unit.left}", unit.allowed
            how, got, most = often if unit.left < 0 else ("elements", unit.numel, unit.most_numel)
            text = f"more {how} than its plan foresees (got {got}, expected at most {most})"
            self.watcher.departs(f"ran {unit_words(unit.path)} {'' if unit.left < 0 else 'on '}{text}")
        forward = unit.forward
        if is_foreseen and self._keeps_to_plan:
            return forward(*args, **kwargs)
        # Without the forward that a plan put in place.
        while isinstance(forward, PlacedForward):
            forward = forward.forward
        return self._tape.run(unit.path, forward, args, kwargs)
