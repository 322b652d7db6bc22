"""Defines policies, which tell the tape what happens to each value between forward and backward.

One carries out a plan; the leanest one knows nothing of the model, or follows a plan for a different step of it.

`TapeState` is the memory of a tape between calls: the policy's answers, and which modules need not be watched. The tape
(`tape.py`) starts the calls of units; each call (`tape_mode.py`) reads it while it runs.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch.nn import Parameter

from recollect._torch_private import is_fake_tensor
from recollect.engine.facts import OpFacts
from recollect.engine.offload.flight import Offload, Place
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.together import Agreement, Shards, is_partitioned
from recollect.engine.values import UNWATCHED, alias_in_hook, alias_in_mode, layout_of
from recollect.errors import PlanMismatchWarning
from recollect.measuring.stopwatch import Stopwatch
from recollect.plans.action import Action
from recollect.plans.paths import unit_words
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind, op_of, result_names, value_stem
from recollect.replay import KeptPass
from recollect.tensors import version_of
from recollect.warning import warn_user
from recollect.weak_map import WeakMap

ModuleKey = tuple[str, str]
"""Paths of a unit and of a module in it; the second is empty for the unit itself."""

OpKey = tuple[str, str, str]
"""A `ModuleKey` and the name of an op that the module runs."""


class Policy(Protocol):
    """Decides what happens to values. Asked once for each name; the answer holds for all later calls.

    Attributes:
        drops_outputs: it may drop a unit's output, which code between units may overwrite.
    """

    drops_outputs: bool

    def action(self, unit_path: str, value_name: str) -> Action:
        """Return the action for a value between forward and backward."""

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Whether any value that this module itself computes may be dropped; if none, its ops need not be seen."""

    def output_action(self, unit_path: str) -> Action:
        """Return the action for the unit's output: if dropped, the next unit's backward recomputes it."""


class PlanPolicy:
    """Looks values up in units' plans, and keeps values that it does not know; `tell` warns once if the model computes such.

    With `departs`, which is then told of unit and value, those of units that recompute others, or whose modules did not run
    when they were recorded, are recomputed, too.
    `unnamed` are units and values that it was asked for, did not know, and has not told of yet.

    A loop inside a module (over the experts that got tokens) may run an op more or fewer times than when the plan was
    made. A call that the plan does not name follows the named calls of the same op in the same module, if they agree.
    """

    def __init__(self, units: Mapping[str, UnitPlan]) -> None:
        self._units = units
        self._by_stem: dict[tuple[str, str], set[Action]] = {}
        # For the ops of each module of a unit, how many calls a run has that meets all values which are not kept.
        self._acting: dict[str, dict[str, Counter[str]]] = {}
        # The last of those for an op some of whose values are kept: a run without it may give their names to others.
        self._marks: dict[OpKey, str] = {}
        for path, unit in units.items():
            for name, action in unit.actions.items():
                self._by_stem.setdefault((path, _without_count(name)), set()).add(action)
                if action is not Action.KEEP:
                    module_path, op_name, count = op_of(name)
                    self._marks[path, module_path, op_name] = name
                    calls = self._acting.setdefault(path, {}).setdefault(module_path, Counter())
                    calls[op_name] = max(calls[op_name], count + 1)
        self._has_warned = False
        self.departs: Callable[[str, str], object] | None = None
        self.unnamed: set[tuple[str, str]] = set()
        self.drops_outputs = any(unit.output is Action.RECOMPUTE for unit in units.values())

    def action(self, unit_path: str, value_name: str) -> Action:
        unit = self._units.get(unit_path)
        if unit is None or (self.departs is None and unit.may_be_of_a_skip):
            return Action.KEEP
        action = unit.actions.get(value_name)
        if action is not None:
            return action
        if collective_kind(value_name):
            return Action.KEEP  # Other ranks may run one more or fewer of them.
        alike = self._by_stem.get((unit_path, _without_count(value_name)), set())
        if len(alike) == 1:
            return next(iter(alike))
        self.unnamed.add((unit_path, value_name))
        is_lean = self.departs is not None and (unit.recomputes_anything or unit.may_be_of_a_skip)
        return Action.RECOMPUTE if is_lean else Action.KEEP

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return module_path in self._acting.get(unit_path, ())

    def are_met(self, unit_path: str, counts: Mapping[OpKey, int]) -> bool:
        """Whether a run of a unit with so many calls of its ops has met all values that the plan does not keep.

        Otherwise its values may have the names of others; `departs` is told of one that is missing.
        """
        modules = self._acting.get(unit_path, {})
        keys = ((unit_path, module, op) for module, calls in modules.items() for op in calls)
        missed = [key for key in keys if counts.get(key, 0) < modules[key[1]][key[2]]]
        names = (self._marks[key] for key in missed)
        if self.departs is not None and (
            name := next((n for n in names if len(self._by_stem[unit_path, _without_count(n)]) > 1), None)
        ):
            self.departs(unit_path, name)
        return not missed

    def output_action(self, unit_path: str) -> Action:
        unit = self._units.get(unit_path)
        return Action.KEEP if unit is None else unit.output

    def tell(self, unit_path: str, value_name: str) -> None:
        if self.departs is not None:
            self.departs(unit_path, value_name)
            return
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
        but: the plan of a step like the one to run. Values that it keeps by name are kept, and units
            that it does not name keep everything. None: no plan.
    """

    def __init__(self, but: Mapping[str, UnitPlan] | None = None) -> None:
        self._but = but
        self.drops_outputs = any(unit.output is Action.RECOMPUTE for unit in (but or {}).values())

    def action(self, unit_path: str, value_name: str) -> Action:
        if self._but is None:
            return Action.RECOMPUTE
        unit = self._but.get(unit_path)
        is_kept = unit is None or unit.actions.get(value_name) is Action.KEEP
        return Action.KEEP if is_kept else Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return self._but is None or unit_path in self._but

    def output_action(self, unit_path: str) -> Action:
        unit = None if self._but is None else self._but.get(unit_path)
        return Action.KEEP if unit is None else unit.output


# A unit that runs twice per step may get a different unit's dropped output only the second time.
_RUNS_TO_SETTLE = 2

OpActions = tuple[Action, ...]
"""Actions for the results of an op, in order: one action if it applies to all, and none to keep all."""
ALL_KEPT: OpActions = ()


class Watch(NamedTuple):
    """Which to watch while a module itself runs: its ops, and the tensors that autograd saves."""

    ops: bool
    saves: bool


class TapeState:
    """State shared by all unit calls of one applied model.

    Attributes:
        settled: the ops and saves to watch in modules that have run often enough to tell.
        agreement: of all ranks to drop the same values, which lets collectives run again in all of them; None if there is none.
        shards: how values are held as parts; None if they are not.
        offload: the state for offloaded values; None if there are none.
        may_offload: some values are offloaded, or may be later.
        compares: the first call of a unit compares content, to find writes that nothing else shows.
        compared: the modules, or the code of functions, of which one has: checkpoints of several have one name.
        overwritten: the units whose outputs something overwrites unseen before the next unit reads them.
        reruns: counts the time in which backward runs ops again; None while nobody asks.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        runs_to_settle: int = _RUNS_TO_SETTLE,
        agreement: Agreement | None = None,
        shards: Shards | None = None,
        offload: Offload | None = None,
        compares: bool = True,
    ) -> None:
        self.policy = policy
        self.compares = compares
        self.compared = WeakMap[bool]()
        self.overwritten: set[str] = set()
        self.reruns: Stopwatch | None = None
        self.offload = offload
        self.may_offload = offload is not None
        self.agreement = agreement
        self.shards = shards
        self.settled: dict[ModuleKey, Watch] = {}
        self._runs_to_settle = runs_to_settle
        self._known: dict[OpKey, list[OpActions]] = {}
        self.unnamed = policy.unnamed if isinstance(policy, PlanPolicy) else set()
        self._watched: dict[ModuleKey, Watch] = {}
        self._num_runs: Counter[ModuleKey] = Counter()
        # The mode of the unit that is running on each thread.
        self._local = threading.local()
        # Of each backward that keeps its graph, held only by that backward: if it fails, nothing stays behind.
        self._passes: dict[int, weakref.ref[KeptPass]] = {}

    def learn(self, unit_path: str, counts: Mapping[OpKey, int], seen: dict[ModuleKey, Watch]) -> None:
        """Learn from a run of a unit which ops and saves of its modules need watching (rule 9); take that from `seen`.

        A run on shorter sequences may call ops less often than the plan foresees, and save none of what it drops.
        """
        own = {key: seen.pop(key) for key in tuple(seen) if key[0] == unit_path}
        if isinstance(self.policy, PlanPolicy) and not self.policy.are_met(unit_path, counts):
            return
        for key, watch_of in own.items():
            before = self._watched.get(key, Watch(self.policy.acts_in(*key), False))
            self._watched[key] = Watch(before.ops or watch_of.ops, before.saves or watch_of.saves)
            self._num_runs[key] += 1
            if self._num_runs[key] >= self._runs_to_settle:
                self.settled[key] = self._watched[key]

    def next_place(self) -> Place | None:
        """Return where among the units' calls the next one is; None if nothing depends on it."""
        if self.offload is None:
            return None
        return self.offload.begin_call(is_inside=getattr(self._local, "mode", None) is not None)

    def alias(self, tensor: torch.Tensor, in_hook: bool) -> tuple[torch.Tensor, int]:
        """Return a tensor to hold in place of one that is kept, and the version at which it is valid."""
        if is_fake_tensor(tensor):
            return tensor.detach(), UNWATCHED  # A dispatch mode makes fake tensors, so no guard may disable it.
        # ZeRO-3 assigns an empty tensor to it after each use: what the prediction counts is the gathered one.
        if in_hook and type(tensor) is Parameter and not is_partitioned(tensor):
            held: torch.Tensor = tensor  # As autograd does, which reads what is assigned to its `.data` later.
        else:
            held = alias_in_hook(tensor) if in_hook else alias_in_mode(tensor)
        return held, version_of(tensor)

    def must_keep(self, facts: OpFacts) -> bool:
        if facts.is_random and SwitchedOff.RANDOM_OPS in switched_off():
            return True
        return facts.keeps and (self.agreement is None or not facts.may_replay)

    def op_actions(self, key: OpKey, count: int, facts: OpFacts, asks: bool) -> OpActions:
        """Return the actions for the results of a module's `count`-th call of an op; all kept if `asks` is False."""
        if not asks or (self.offload is None and self.must_keep(facts)):
            return ALL_KEPT
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = []
        while len(known) <= count:
            unit_path, module_path, name = key
            known.append(self._ask(unit_path, value_stem(module_path, name, len(known)), facts))
        return known[count]

    def tell(self, key: OpKey, count: int, facts: OpFacts, are_values: Iterable[bool]) -> None:
        """Say which values the plan does not name, of the results of a module's `count`-th call of an op."""
        unit_path, module_path, name = key
        names = result_names(value_stem(module_path, name, count), 1 if facts.writes else facts.num_returns)
        for value_name, is_value in zip(names, are_values, strict=False):
            if (unit_path, value_name) in self.unnamed and isinstance(self.policy, PlanPolicy):
                self.unnamed.discard((unit_path, value_name))
                if is_value:
                    self.policy.tell(unit_path, value_name)

    def _ask(self, unit_path: str, stem: str, facts: OpFacts) -> OpActions:
        names = result_names(stem, 1 if facts.writes else facts.num_returns)
        actions = tuple(self.policy.action(unit_path, name) for name in names)
        if self.must_keep(facts):
            # Values that cannot be recomputed can still be stored elsewhere.
            actions = tuple(action if action is Action.OFFLOAD else Action.KEEP for action in actions)
        if len(set(actions)) > 1:
            return actions
        return ALL_KEPT if actions[0] is Action.KEEP else actions[:1]


def is_alias(held: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a tensor is still what a parameter holds: not once its `.data` was assigned to, or it is another at its address.

    ZeRO-3 gathers the same content again for each reader.
    """
    is_same = held.untyped_storage() is parameter.untyped_storage() and layout_of(held) == layout_of(parameter)
    return is_same or is_partitioned(parameter)
