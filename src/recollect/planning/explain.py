"""Explain a plan layer by layer, and compare it with the plan that the planner makes for the same peak."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recollect.errors import BudgetTooSmallError
from recollect.planning.planners import planner_for
from recollect.planning.trips import link_of
from recollect.plans.paths import compress_paths
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import waits_of
from recollect.simulation.decisions import decide
from recollect.simulation.layer_usage import LayerUsage, kept_outside_bytes, layer_usage
from recollect.simulation.simulate import simulate


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep and recompute the same values.

    Attributes:
        paths: their module paths, shortened: ("decoder.layers.0-7",).
        num_layers: number of layers; a unit that runs twice counts twice.
        kept: bytes that one layer holds when backward begins, by value, largest first.
        generator_bytes: bytes of random generator states that one layer holds.
        recomputed: how often each op of one layer runs again, in order of its first run.
        recompute_s: seconds of these ops for one layer, plus the overhead of the tape in forward.
    """

    paths: tuple[str, ...]
    num_layers: int
    kept: Mapping[str, int]
    generator_bytes: int
    recomputed: Mapping[str, int]
    recompute_s: float

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that one layer holds for backward."""
        return sum(self.kept.values()) + self.generator_bytes

    @property
    def recomputed_ops(self) -> int:
        """Return the number of op runs that recompute adds for one layer."""
        return sum(self.recomputed.values())


@dataclass(frozen=True, slots=True)
class Explained:
    """One plan, layer by layer.

    Attributes:
        plan: with its predictions.
        groups: groups of layers, in forward order of the first layer.
        kept_bytes: alive when backward begins, apart from what lives through the whole step; if it begins several times,
            the most of them.
        outside_bytes: the part of `kept_bytes` made outside of all units, such as the loss and its logits.
        recomputed_ops, recompute_s: of the whole step.
        peak_bytes: peak of the whole step; `peak_at` says where.
        host_bytes: host memory of offloaded values.
        wait_s: of the whole step, for copies, where the profile knows the link to the host.
        slowdown: `recompute_s` and `wait_s`, divided by the seconds of forward and backward without recompute.
    """

    plan: Plan
    groups: tuple[LayerGroup, ...]
    kept_bytes: int
    outside_bytes: int
    recomputed_ops: int
    recompute_s: float
    peak_bytes: int
    peak_at: str
    host_bytes: int
    wait_s: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, the planner's plan for the same peak, and the bound on all plans.

    Attributes:
        plain: the step that keeps everything.
        given: the plan to explain.
        budget: the planner's plan for the peak of `given`, and its host memory; None if it finds none, and `problem` says why.
        bound_slowdown: lower bound on the slowdown of any plan within these; None if unknown.
        step_s: seconds of forward and backward without recompute.
        persistent: bytes that live through the whole step, by kind.
    """

    plain: Explained
    given: Explained
    budget: Explained | None
    problem: str
    bound_slowdown: float | None
    step_s: float
    persistent: Mapping[str, int]

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
    """Return what a plan keeps and recomputes, and what the planner would for the same peak and host memory.

    Args:
        profile: the recorded step.
        plan: a plan for this model, such as one that `recollect.megatron_plan` makes from Megatron's settings.

    Returns:
        The explanation, with the numbers of the simulator; the parts add up to the totals.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.gpt import GPTModel
        >>> from recollect.lab.models.sizes import NAMED_CONFIGS
        >>> tokens = torch.randint(0, 256, (2, 32))
        >>> profile = recollect.record(
        ...     GPTModel(NAMED_CONFIGS["gpt-tiny"]), {"tokens": tokens, "labels": tokens}, fake=True
        ... )
        >>> config = recollect.RecomputeConfig(
        ...     recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ... )
        >>> explanation = explain_plan(profile, recollect.megatron_plan(profile, config))
        >>> explanation.budget.slowdown <= explanation.given.slowdown
        True
    """
    given = _explained(profile, plan)
    planner = planner_for(profile, given.host_bytes if link_of(profile) else 0)
    budget, problem = None, ""
    try:
        budget = _explained(profile, planner.plan(given.peak_bytes))
    except BudgetTooSmallError as error:
        problem = str(error)
    bound = planner.bound_slowdown(given.peak_bytes)
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
    simulation = simulate(profile, decisions)
    link = link_of(profile) if plan.offloads else None
    wait_s = 0.0 if link is None else waits_of(profile, decisions, link)
    accounts = layer_usage(profile, plan)
    return Explained(
        plan=plan,
        groups=_groups(accounts),
        kept_bytes=simulation.kept_bytes,
        outside_bytes=kept_outside_bytes(profile, plan),
        recomputed_ops=simulation.recomputed_ops,
        recompute_s=simulation.recompute_s,
        peak_bytes=simulation.peak_bytes,
        peak_at=simulation.peak_note,
        host_bytes=simulation.host_bytes,
        wait_s=wait_s,
        slowdown=(simulation.recompute_s + wait_s) / profile.step_s if profile.step_s > 0 else 0.0,
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
            kept=dict(_added_up(group[0]).most_common()),
            generator_bytes=group[0].generator_bytes,
            recomputed=dict(Counter(group[0].recomputed)),
            recompute_s=group[0].recompute_s,
        )
        for group in alike.values()
    )


def _added_up(account: LayerUsage) -> Counter[str]:
    """Return bytes by name; leaves can share a name."""
    total: Counter[str] = Counter()
    for name, nbytes in account.kept:
        total[name] += nbytes
    return total


def _data(explained: Explained) -> dict[str, Any]:
    numbers: tuple[str, ...] = ("kept_bytes", "outside_bytes", "host_bytes", "recomputed_ops", "recompute_s")
    numbers += ("peak_bytes", "peak_at", "wait_s", "slowdown")
    layers = [
        {**asdict(group), "kept_bytes": group.kept_bytes, "recomputed_ops": group.recomputed_ops}
        for group in explained.groups
    ]
    return {"note": explained.plan.note, **{name: getattr(explained, name) for name in numbers}, "layers": layers}
