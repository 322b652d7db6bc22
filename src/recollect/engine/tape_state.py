"""Holds what a tape remembers between calls: the policy's answers, and which modules need not be watched.

The tape (`tape.py`) starts the calls of units; each call (`tape_mode.py`) reads this state while it runs.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import NamedTuple

import torch

from recollect._torch_private import is_fake_tensor
from recollect.engine.agreement import Agreement
from recollect.engine.facts import OpFacts
from recollect.engine.offload.flight import Offload, Place
from recollect.engine.policy import Policy
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.sharded_keep import Shards
from recollect.engine.values import UNWATCHED, alias_in_hook, alias_in_mode
from recollect.plans.action import Action
from recollect.plans.value_names import result_names, value_stem
from recollect.replay import KeptPass

# A unit that runs twice per step may get another unit's dropped output only the second time.
_RUNS_TO_SETTLE = 2

ModuleKey = tuple[str, str]
"""Paths of a unit and of a module in it; the second is empty for the unit itself."""

OpKey = tuple[str, str, str]
"""A `ModuleKey` and the name of an op that the module runs."""

OpActions = tuple[Action, ...]
"""Actions for the results of an op, in order: one action if it applies to all, and none to keep all."""
ALL_KEPT: OpActions = ()


class Watch(NamedTuple):
    """What to watch while a module itself runs: its ops, and the tensors that autograd saves."""

    ops: bool
    saves: bool


class TapeState:
    """State shared by all unit calls of one applied model.

    Attributes:
        policy: asked once for each value name.
        settled: what to watch in modules that have run often enough to tell.
        agreement: that of all ranks to drop the same, so that a collective may run again in all of them; None if there is none.
        shards: how values are held as parts; None if they are not.
        offload: what offloaded values need; None if there are none.
        may_offload: there are some, or may come to be.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        runs_to_settle: int = _RUNS_TO_SETTLE,
        agreement: Agreement | None = None,
        shards: Shards | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.policy = policy
        self.offload = offload
        self.may_offload = offload is not None
        self.agreement = agreement
        self.shards = shards
        self.settled: dict[ModuleKey, Watch] = {}
        self._runs_to_settle = runs_to_settle
        self._known: dict[OpKey, list[OpActions]] = {}
        self._watched: dict[ModuleKey, Watch] = {}
        self._num_runs: Counter[ModuleKey] = Counter()
        # The mode of the unit that is running on each thread.
        self._local = threading.local()
        # Of each backward that keeps its graph, held by that backward alone: if it fails, nothing stays behind.
        self._passes: weakref.WeakValueDictionary[int, KeptPass] = weakref.WeakValueDictionary()

    def learn(self, seen: dict[ModuleKey, Watch]) -> None:
        """Learn from one call of a unit what needs watching in the modules that ran: rule 9."""
        for key, watch_of in seen.items():
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
        held = alias_in_hook(tensor) if in_hook else alias_in_mode(tensor)
        return held, UNWATCHED if tensor.is_inference() else tensor._version

    def must_keep(self, facts: OpFacts) -> bool:
        """Whether the results of an op are kept whatever the policy says."""
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

    def _ask(self, unit_path: str, stem: str, facts: OpFacts) -> OpActions:
        names = result_names(stem, 1 if facts.writes else facts.num_returns)
        actions = tuple(self.policy.action(unit_path, name) for name in names)
        if self.must_keep(facts):
            # What cannot be made again can still be stored elsewhere.
            actions = tuple(action if action is Action.OFFLOAD else Action.KEEP for action in actions)
        if len(set(actions)) > 1:
            return actions
        return ALL_KEPT if actions[0] is Action.KEEP else actions[:1]
