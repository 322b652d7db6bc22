"""Explain a plan layer by layer, and compare it with the plan that the planner makes for the same peak.

What each layer keeps and recomputes, in bytes, ops and seconds, by name, is read from a playback of the recorded step
(`simulation/lifetimes.py`), so the layers add up to the plan's predictions.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from recollect.arguments import check_kind
from recollect.errors import BudgetTooSmallError
from recollect.planning.planners import planner_for
from recollect.planning.trips import link_of
from recollect.plans.action import EngineChoice
from recollect.plans.paths import compress_paths
from recollect.plans.plan import Plan
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.programs.unit import again_s, ops_again
from recollect.simulation.copy_clock import waits_of
from recollect.simulation.decisions import CallActions, calls_on_tape, decide
from recollect.simulation.lifetimes import Lifetimes, lifetimes
from recollect.simulation.playback import COMPILED, GENERATOR, OUTSIDE
from recollect.simulation.simulate import Simulation
from recollect.simulation.timeline import timeline


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """The values that one run of a unit keeps and recomputes.

    Attributes:
        path: module path of the unit.
        kept: name and bytes of each of its values alive when the backward after its forward begins. Its input belongs to
            the unit before it. Bytes that ops wrote to in place go by the name of the value that autograd saved.
        generator_bytes: size of the random generator states held to repeat random ops.
        recomputed: ops that run again, named by their results, in order; an op that runs twice is listed twice.
        recompute_s: seconds of these ops, plus the tape's overhead in forward; of a compiled unit, the additional seconds over
            PyTorch's own choice of values to keep.
        num_runs: the number of equal runs of the step that this one stands for.
    """

    path: str
    kept: tuple[tuple[str, int], ...]
    generator_bytes: int
    recomputed: tuple[str, ...]
    recompute_s: float
    num_runs: int = 1

    @property
    def kept_bytes(self) -> int:
        """Bytes that the unit holds for backward."""
        return sum(nbytes for _, nbytes in self.kept) + self.generator_bytes

    @property
    def replayed_collectives(self) -> dict[str, int]:
        """Number of collectives that run again, by kind ("all_gather_into_tensor"), in each run."""
        return dict(Counter(kind for name in self.recomputed if (kind := collective_kind(name))))

    @property
    def recomputed_ops(self) -> int:
        """Number of ops that run again."""
        return len(self.recomputed)


def layer_usage(profile: Profile, plan: Plan) -> tuple[LayerUsage, ...]:
    """Return, for each unit of a step, the values kept and recomputed under a plan.

    Args:
        profile: the recorded step.
        plan: a plan for this model.

    Returns:
        One account for each of `profile.calls`, in order. None covers ops outside the units (the loss).

    Raises:
        ArgumentError: an argument is of the wrong type.

    Complexity: about three simulations.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> from recollect.profile.profile import Profile
        >>> layer_usage(Profile((), (), StepLog(), step_s=0.0), Plan({}))
        ()
    """
    check_kind("layer_usage(profile, plan)", "profile", profile, Profile, "recollect.Profile")
    check_kind("layer_usage(profile, plan)", "plan", plan, Plan, "recollect.Plan")
    decisions = decide(profile, plan)
    return usage_in(profile, decisions, lifetimes(profile, decisions))


def usage_in(profile: Profile, decisions: Sequence[CallActions], lives: Lifetimes) -> tuple[LayerUsage, ...]:
    """Return, for each unit, the values kept and recomputed in a playback under these decisions."""
    on_tape = calls_on_tape(decisions)
    kept = _kept(lives)
    reruns: dict[int, list[OpRecord]] = {}
    for index, op, _ in lives.reruns:
        reruns.setdefault(index, []).append(op)
    accounts = []
    for index, call in enumerate(profile.calls):
        graph, decision = profile.graph_of(call), decisions[index]
        ops: Sequence[OpRecord] = reruns.get(index, ())
        # One after the other: `sum` rounds differently in newer Pythons.
        rerun_s = reduce(add, map(graph.again_s, ops), 0.0)
        around_s = graph.watched_s(decision.watched) if index in on_tape else 0.0
        if decision.engine is EngineChoice.GRAPH:
            ops, rerun_s = ops_again(graph, decision.values.recomputed), again_s(graph, decision.values.recomputed)
            around_s = profile.host.traced_unit_s if profile.host else 0.0
        elif decision.variant >= 0:
            around_s = max(0.0, graph.variants[decision.variant].step_s - graph.variants[0].step_s)
        names = _names(graph)
        accounts.append(
            LayerUsage(
                path=call.path,
                kept=tuple(
                    (names[value] if value >= 0 else "compiled code's own", nbytes)
                    for value, nbytes in sorted(kept[index].items())
                    if (value >= 0 or value == COMPILED) and nbytes
                ),
                generator_bytes=kept[index][GENERATOR],
                recomputed=tuple(op.name for op in ops),
                recompute_s=rerun_s + around_s,
                num_runs=call.num_runs,
            )
        )
    return tuple(accounts)


def kept_outside_bytes(lives: Lifetimes) -> int:
    """Return the bytes made outside of all units that are alive where `Simulation.kept_bytes` is counted."""
    alive = [[storage for storage in lives.storages if storage.is_alive_at(moment)] for moment in lives.backwards]
    most = max(alive, key=lambda storages: sum(storage.nbytes for storage in storages), default=[])
    return sum(storage.nbytes for storage in most if storage.owner[0] == OUTSIDE)


def _kept(lives: Lifetimes) -> defaultdict[int, Counter[int]]:
    """Return the bytes of each call's values, and of its `GENERATOR` states, when the backward after its forward begins."""
    moments = [*lives.backwards, len(lives.time_s)]
    after = {call: moments[bisect_left(lives.backwards, began)] for call, began in lives.began.items()}
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for storage in lives.storages:
        call, value = storage.owner if storage.owner[0] >= OUTSIDE else storage.owner[::-1]
        if call in after and storage.is_alive_at(after[call]):
            found[call][value] += storage.nbytes
    return found


def _names(graph: UnitGraph) -> list[str]:
    """Name each value.

    The first value of a chain of in-place writes owns the bytes; it is named after the one that autograd saved or, if
    none was, after the last one, which the bytes are when backward begins.
    """
    written = {op.inputs[0]: op.outputs[0] for op in graph.ops if op.mutates}
    names = [value.name for value in graph.values]
    for first in written.keys() - written.values():
        chain = [first]
        while chain[-1] in written:
            chain.append(written[chain[-1]])
        saved = [value for value in chain if graph.values[value].saved]
        names[first] = graph.values[(saved or chain)[-1]].name
    return names


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep and recompute the same values."""

    paths: tuple[str, ...]
    """Their module paths, shortened: ("decoder.layers.0-7",)."""
    num_layers: int
    """Number of layers; a unit that runs twice counts twice."""
    layer: LayerUsage
    """What one of them keeps and recomputes."""

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that one layer holds when backward begins, by value, largest first; leaves can share a name."""
        total: Counter[str] = Counter()
        for name, nbytes in self.layer.kept:
            total[name] += nbytes
        return dict(total.most_common())

    @property
    def recomputed(self) -> dict[str, int]:
        """Reruns of each op of one layer, in order of its first run."""
        return dict(Counter(self.layer.recomputed))


@dataclass(frozen=True, slots=True)
class Explained:
    """One plan, layer by layer."""

    plan: Plan
    simulation: Simulation
    groups: tuple[LayerGroup, ...]
    """Groups of layers, in forward order of the first layer."""
    outside_bytes: int
    """The part of `simulation.kept_bytes` made outside of all units, such as the loss and its logits."""
    wait_s: float
    """Seconds that the whole step waits for copies, where the profile knows the link to the host."""
    slowdown: float
    """The seconds of recompute and `wait_s`, divided by those of forward and backward without recompute."""
    tenants: tuple[str, ...]
    """The contents of the peak, with amounts, the largest first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, the planner's plan for the same peak, and the bound on all plans."""

    plain: Explained
    """The step that keeps everything."""
    given: Explained
    budget: Explained | None
    """The planner's plan for the peak of `given`, and its host memory; None if it finds none, and `problem` says why."""
    problem: str
    bound_slowdown: float | None
    """Lower bound on the slowdown of any plan within these; None if unknown."""
    step_s: float
    """Seconds of forward and backward without recompute."""
    persistent: Mapping[str, int]
    """Bytes that live through the whole step, by kind."""

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain data for JSON: bytes, seconds, counts."""
        plans = {"plain": self.plain, "given": self.given, "budget": self.budget}
        return {
            **{name: None if explained is None else _data(explained) for name, explained in plans.items()},
            "problem": self.problem,
            "bound_slowdown": self.bound_slowdown,
            "step_s": self.step_s,
            "persistent_bytes": dict(self.persistent),
        }


def explain_plan(profile: Profile, plan: Plan) -> Explanation:
    """Explain a plan's choices, compared with the planner's for the same peak and host memory.

    The numbers are those of the simulator; the parts add up to the totals.
    """
    given = _explained(profile, plan)
    planner = planner_for(profile, given.simulation.host_bytes if link_of(profile) else 0)
    budget, problem = None, ""
    try:
        budget = _explained(profile, planner.plan(given.simulation.peak_bytes))
    except BudgetTooSmallError as error:
        problem = str(error)
    bound = planner.bound_slowdown(given.simulation.peak_bytes)
    return Explanation(
        plain=_explained(profile, Plan({})),
        given=given,
        budget=budget,
        problem=problem,
        bound_slowdown=bound if bound is not None and math.isfinite(bound) else None,
        step_s=profile.step_s,
        persistent=profile.persistent,
    )


def _explained(profile: Profile, plan: Plan) -> Explained:
    decisions = decide(profile, plan)
    over_time = timeline(profile, plan)
    lives = over_time.lives
    link = link_of(profile) if plan.offloads else None
    wait_s = 0.0 if link is None else waits_of(profile, decisions, link)
    added_s = lives.simulation.recompute_s + wait_s
    return Explained(
        plan,
        lives.simulation,
        _groups(usage_in(profile, decisions, lives)),
        kept_outside_bytes(lives),
        wait_s,
        added_s / profile.step_s if profile.step_s > 0 else 0.0,
        tuple(over_time.report.tenants()),
    )


def _groups(accounts: tuple[LayerUsage, ...]) -> tuple[LayerGroup, ...]:
    alike: dict[tuple[object, ...], list[LayerUsage]] = {}
    for account in accounts:
        # Sums of the same seconds in a different order differ in their last bits.
        key = (account.kept, account.generator_bytes, account.recomputed, round(account.recompute_s, 12))
        alike.setdefault(key, []).append(account)
    return tuple(
        LayerGroup(
            paths=tuple(compress_paths(list(dict.fromkeys(account.path for account in group)))),
            num_layers=sum(account.num_runs for account in group),
            layer=group[0],
        )
        for group in alike.values()
    )


def _data(explained: Explained) -> dict[str, Any]:
    simulation = explained.simulation
    layers = [
        {
            "paths": group.paths,
            "num_layers": group.num_layers,
            "kept": group.kept,
            "generator_bytes": group.layer.generator_bytes,
            "recomputed": group.recomputed,
            "recompute_s": group.layer.recompute_s,
            "kept_bytes": group.layer.kept_bytes,
            "recomputed_ops": group.layer.recomputed_ops,
        }
        for group in explained.groups
    ]
    return {
        "note": explained.plan.note,
        "kept_bytes": simulation.kept_bytes,
        "outside_bytes": explained.outside_bytes,
        "host_bytes": simulation.host_bytes,
        "recomputed_ops": simulation.recomputed_ops,
        "recompute_s": simulation.recompute_s,
        "peak_bytes": simulation.peak_bytes,
        "peak_at": simulation.peak_note,
        "tenants": explained.tenants,
        "wait_s": explained.wait_s,
        "slowdown": explained.slowdown,
        "layers": layers,
    }
