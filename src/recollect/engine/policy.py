"""Defines policies, which tell the tape what happens to each value between forward and backward.

One carries out a plan; the leanest one needs to know nothing of the model, or follows a plan for another step of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from recollect.errors import PlanMismatchWarning
from recollect.plans.action import Action
from recollect.plans.paths import unit_words
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind, module_of
from recollect.warning import warn_user


class Policy(Protocol):
    """Decides what happens to values. Asked once for each name; the answer holds for all later calls."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return what happens to a value between forward and backward."""
        ...

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Whether any value that this module itself computes may be dropped; if none, its ops need not be seen."""
        ...

    def output_action(self, unit_path: str) -> Action:
        """Return what happens to the unit's output: if dropped, the next unit's backward computes it again."""
        ...


class PlanPolicy:
    """Looks values up in units' plans, and keeps values that it does not know; warns once if the model computes such.

    A loop inside a module (over the experts that got tokens) may run an op more or fewer times than when the plan was
    made. A call that the plan does not name follows the named calls of the same op in the same module, if they agree.
    """

    def __init__(self, units: Mapping[str, UnitPlan]) -> None:
        self._units = units
        self._by_stem: dict[tuple[str, str], set[Action]] = {}
        self._acting = {
            (path, module_of(name))
            for path, unit in units.items()
            for name, action in unit.actions.items()
            if action is not Action.KEEP
        }
        for path, unit in units.items():
            for name, action in unit.actions.items():
                self._by_stem.setdefault((path, _without_count(name)), set()).add(action)
        self._has_warned = False

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return the plan's action for this value."""
        unit = self._units.get(unit_path)
        if unit is None:
            return Action.KEEP
        action = unit.actions.get(value_name)
        if action is not None:
            return action
        if collective_kind(value_name):
            return Action.KEEP  # Other ranks may run one more or fewer of them.
        alike = self._by_stem.get((unit_path, _without_count(value_name)), set())
        if len(alike) == 1:
            return next(iter(alike))
        self._warn(unit_path, value_name)
        return Action.KEEP

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Whether the plan does anything but keep all of a module's values."""
        return (unit_path, module_path) in self._acting

    def output_action(self, unit_path: str) -> Action:
        """Return the plan's action for the unit's output."""
        unit = self._units.get(unit_path)
        return Action.KEEP if unit is None else unit.output

    def _warn(self, unit_path: str, value_name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"the plan does not fit this model: {unit_words(unit_path)} computes {value_name!r}, which the plan does not name. "
            "That value and all others that the plan does not name are kept, so the step is exact but may need more "
            "memory than predicted. Record the model again and make a new plan.",
            PlanMismatchWarning,
        )


def _without_count(name: str) -> str:
    """Strip the "#2" of a repeated call: "mlp.mm#2.1" becomes "mlp.mm.1"."""
    stem, mark, rest = name.partition("#")
    if not mark:
        return name
    _, dot, output = rest.partition(".")
    return stem + dot + output


class DropAll:
    """Drops every value that can be dropped, but no unit's output; or follows a plan.

    Args:
        but: the plan of a step like the one that will run. What it keeps by name of a unit is kept, and a unit that it does not
            name keeps everything. None: there is none.
    """

    def __init__(self, but: Mapping[str, UnitPlan] | None = None) -> None:
        self._but = but

    def action(self, unit_path: str, value_name: str) -> Action:
        """Drop the value, unless the plan keeps it."""
        if self._but is None:
            return Action.RECOMPUTE
        unit = self._but.get(unit_path)
        is_kept = unit is None or unit.actions.get(value_name) is Action.KEEP
        return Action.KEEP if is_kept else Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Drop values of every module of a unit that the plan names."""
        return self._but is None or unit_path in self._but

    def output_action(self, unit_path: str) -> Action:
        """Drop a unit's output if the plan does."""
        unit = None if self._but is None else self._but.get(unit_path)
        return Action.KEEP if unit is None else unit.output
