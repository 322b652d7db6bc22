"""Find the processes that train a model together, check that they are about to do the same, and give them the same times.

Also choose one of their plans for all of them.

A process without a memory budget never asks the others for a plan: it goes on to its first collective, and deadlocks there.
So each process that has one leaves a note at the store where all of them met, before it does anything that needs the others.
"""

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import RankNotes, has_process_group, meeting_place, processes_of
from recollect.errors import ArgumentError, ConfigError, PlanError, RecordError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan, digest_of
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.group import ALONE, Place, Ranks, group_of
from recollect.simulation.predicted import predicted_plan

# A DeviceMesh is imported only where there is one.
GroupChoice: TypeAlias = "dist.ProcessGroup | Any | Literal['alone'] | None"
"""Which processes run one plan: a process group, a device mesh, "alone", or None for those that the model is spread over."""


def ranks_of(model: nn.Module, group: GroupChoice, call: str) -> Ranks:
    """Return the processes that run one plan, once all of them are here; `call` is the one under way, for errors.

    There are several if DistributedDataParallel wraps the model, or FSDP2 or a device mesh spreads its parameters.
    """
    if isinstance(group, str) and group == "alone":
        return ALONE
    if not has_process_group():
        if group is not None:
            raise _no_group(group, call, "there are no process groups yet")
        return ALONE
    if group is not None:
        return group_of(_chosen(group, call), call)
    found = sorted({tuple(sorted(ranks)) for ranks in processes_of(model)}, key=len)
    if not found:
        return ALONE
    *others, largest = found
    for other in others:
        if not set(other) <= set(largest):
            raise RecordError(
                f"recollect.{call}: {type(model).__name__} is spread over the processes {list(other)} and {list(largest)}, of "
                "which neither contains the other, so it is unclear which run one plan. Pass group=, a process group "
                'or device mesh of all that train the model; or group="alone" to have each plan for itself.'
            )
    return group_of(largest, call)


def _chosen(group: GroupChoice, call: str) -> list[int]:
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    elif not isinstance(group, str) and type(group).__name__ == "DeviceMesh":
        ranks = group.mesh.flatten().tolist()  # type: ignore[union-attr]
    else:
        raise _no_group(group, call, "expected a process group, a device mesh, or 'alone'")
    if dist.get_rank() not in ranks:
        raise _no_group(group, call, f"this process, rank {dist.get_rank()}, is not in it")
    return ranks


def _no_group(group: object, call: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"recollect.{call}: got {group!r} as group: {reason}. Leave it out to take the processes that the model is spread over."
    )


def check_alike(ranks: Ranks, model: nn.Module, settings: Mapping[str, object]) -> None:
    """Check that all processes have the same model and settings."""
    if ranks.is_alone:
        return
    own = _Described(
        type(model).__name__,
        [f"{name} ({p.dtype}, {'trained' if p.requires_grad else 'frozen'})" for name, p in model.named_parameters()],
        {name: str(value) for name, value in settings.items()},
    )
    found: list[_Described] = ranks.gather(own, Place.START)
    at, first = ranks.ranks[0], found[0]
    for rank, other in zip(ranks.ranks, found, strict=True):
        if (other.model, other.parameters) != (first.model, first.parameters):
            raise RecordError(
                f"the processes of one group have different models: {first} in rank {at}, {other} in rank {rank}"
                f"{_difference(at, first, rank, other)}; expected the same, since they run one plan. Build the same model in "
                'all; or pass group=, those that have the same one; or group="alone" to have each plan for itself.'
            )
        for name, value in first.settings.items():
            if other.settings.get(name) != value:
                raise ConfigError(
                    settings={f"{name} in rank {at}": value, f"{name} in rank {rank}": other.settings.get(name)},
                    reason=f"two values of {name} in one group, whose processes run one plan",
                    advice=f'Pass the same {name} in all of them; or group="alone" to have each plan for itself.',
                )


@dataclass(frozen=True)
class _Described:
    """The action that a process is about to take."""

    model: str
    parameters: list[str]
    settings: dict[str, str]

    def __str__(self) -> str:
        return f"{self.model} with {len(self.parameters)} parameters"


def _difference(first_rank: int, first: _Described, other_rank: int, other: _Described) -> str:
    for rank, its, others in ((first_rank, first, other), (other_rank, other, first)):
        only = [parameter for parameter in its.parameters if parameter not in set(others.parameters)]
        if only:
            return f"; only rank {rank} has {only[0]}"
    return ""


# The number of processes whose plans all others try: those that need the most memory.
_MOST_TRIED: Final = 4


def common_plan(
    profile: Profile,
    own: Plan,
    *,
    plain_bytes: int,
    budget_bytes: int,
    ranks: Ranks,
    place: Place = Place.START,
    predicted: Callable[[Profile, Plan], Plan] = predicted_plan,
) -> tuple[Plan, float]:
    """Return the plan that all processes run, with the predictions for this one; and the slowdown in the slowest.

    Of the plans that keep all of them within their budgets, take the one whose slowest process is fastest; if none
    does, the one with the smallest excess.
    """
    if ranks.is_alone:
        return own, own.predicted_slowdown or 0.0
    offered = ranks.gather((plain_bytes, own, [*profile.calls_by_path]), place)
    hungriest = sorted(range(len(offered)), key=lambda process: (-offered[process][0], process))
    # A plan that offloads names all units, also those that ran in other processes only.
    keeping = {path: UnitPlan({}) for *_, paths in offered for path in paths}
    # From the same profile, all have made the same plan.
    plans = (
        replace(plan, units={**keeping, **plan.units}) if plan.offloads else plan
        for plan in (offered[process][1] for process in hungriest)
    )
    tried = list({digest_of(plan.units, plan.loss_chunks): plan for plan in plans}.values())[:_MOST_TRIED]
    mine = [predicted(profile, plan) for plan in tried]
    results = ranks.gather(
        [(max(0, (p.predicted_peak_bytes or 0) - budget_bytes), p.predicted_slowdown or 0.0) for p in mine], place
    )

    def cost(index: int) -> tuple[int, float, int]:
        excesses, slowdowns = zip(*(result[index] for result in results), strict=True)
        return max(excesses), max(slowdowns), index

    best = min(range(len(tried)), key=cost)
    chosen = replace(mine[best], budget_bytes=budget_bytes, bound_slowdown=own.bound_slowdown)
    return chosen, cost(best)[1]


def check_same_plans(plans: Sequence[Plan], ranks: Ranks) -> None:
    """Check that all processes are about to run the same plan, or the same plans of micro-batches."""
    if ranks.is_alone:
        return
    found = ranks.gather([digest_of(plan.units, plan.loss_chunks)[:8] for plan in plans], Place.START)
    if any(digests != found[0] for digests in found):
        shown = ", ".join(f"{'+'.join(own)} in rank {rank}" for rank, own in zip(ranks.ranks, found, strict=True))
        raise PlanError(
            f"cannot run the plan: the processes of its group have different ones ({shown}), expected one plan. Let one "
            "process save it and all load it, or record in all with the same group; without group= each runs its own."
        )


def with_common_times(profile: Profile, ranks: Ranks, place: Place = Place.START) -> Profile:
    """Return a profile with the median of the times of all processes, where their units run the same ops on as many bytes.

    So they make the same plan of them. It is the median, since each process measured each time once, and a disturbed one
    says nothing about the step. The slowest process sets the pace, but of equal devices none is slower than
    the others in every step. Links to the hosts' memory differ, so the slowest link counts.
    """
    if ranks.is_alone or profile.fake:
        return profile
    own = list(_times(profile))
    link = profile.to_host_bytes_per_s, profile.from_host_bytes_per_s, profile.host_latency_s
    found = ranks.gather((_fingerprint(profile), own, link), place)
    fingerprints, times_of_all, links = zip(*found, strict=True)
    if len(set(fingerprints)) > 1:
        return profile
    common = _with_times(profile, (statistics.median(times) for times in zip(*times_of_all, strict=True)))
    to_host, from_host, latencies_s = zip(*links, strict=True)
    return replace(
        common, to_host_bytes_per_s=min(to_host), from_host_bytes_per_s=min(from_host), host_latency_s=max(latencies_s)
    )


def _times(profile: Profile) -> Iterator[float]:
    yield from (profile.step_s, profile.gather_latency_s, profile.gather_s_per_byte)
    for graph in profile.graphs:
        yield from (graph.tape_s, graph.again_op_s)
        yield from (seconds for _, seconds in graph.module_tape_s)
        yield from (op.time_s for op in graph.ops)
        yield from (part.gather_s for part in graph.parts)
        yield from (graph.eager_s, *(variant.step_s for variant in graph.variants))


def _with_times(profile: Profile, times: Iterator[float]) -> Profile:
    """Return a profile with other times, in the order of `_times`."""
    step_s, gather_latency_s, gather_s_per_byte = (next(times) for _ in range(3))
    graphs = tuple(
        replace(
            graph,
            tape_s=next(times),
            again_op_s=next(times),
            module_tape_s=tuple((module, next(times)) for module, _ in graph.module_tape_s),
            ops=tuple(replace(op, time_s=next(times)) for op in graph.ops),
            parts=tuple(replace(part, gather_s=next(times)) for part in graph.parts),
            eager_s=next(times),
            variants=tuple(replace(variant, step_s=next(times)) for variant in graph.variants),
        )
        for graph in profile.graphs
    )
    return replace(
        profile, graphs=graphs, step_s=step_s, gather_latency_s=gather_latency_s, gather_s_per_byte=gather_s_per_byte
    )


def _fingerprint(profile: Profile) -> str:
    words = [repr([(call.path, call.graph, call.num_runs) for call in profile.calls])]
    words += [_words(graph) for graph in profile.graphs]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _words(graph: UnitGraph) -> str:
    ops = [(op.name, op.inputs, op.outputs) for op in graph.ops]
    parts = [(part.value, part.nbytes) for part in graph.parts]
    variants = [replace(variant, step_s=0.0) for variant in graph.variants]
    values = [value.nbytes for value in graph.values]
    return repr(([module for module, _ in graph.module_tape_s], values, ops, parts, variants))


# Where nothing made the processes wait for each other just before, loading data may take one of them longer.
_PATIENCE_S: Final = 60.0
_PATIENCE_AFTER_BARRIER_S: Final = 10.0

# The number of messages in this process: the same in all processes of a training.
_num_told: Counter[str] = Counter()


class Presence:
    """Messages between training processes about something that all need, before they wait for those without it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._notes: RankNotes | None = None

    def tell(self) -> None:
        """Tell the others, the first time; do nothing where there are none."""
        is_alone = not has_process_group() or dist.get_backend() == "fake"
        if self._notes is not None or is_alone or dist.get_world_size() == 1:
            return
        _num_told[self._what] += 1
        key = f"recollect/{self._what}/{_num_told[self._what]}"
        self._notes = RankNotes(key, list(range(dist.get_world_size())), meeting_place())
        self._notes.leave("here")

    def check(self, *, is_after_barrier: bool) -> None:
        """Check that all processes have left their messages."""
        self.tell()
        if self._notes is None:
            return
        found = self._notes.read(_PATIENCE_AFTER_BARRIER_S if is_after_barrier else _PATIENCE_S)
        missing = next((rank for rank, text in found.items() if text is None), None)
        if missing is not None:
            _num_told[self._what] -= 1
            self._notes = None
            raise RecordError(
                f"{self._what}: rank {missing} of {dist.get_world_size()} trains without it, expected it in every process of "
                "the training, since they run one plan. Pass it in all of them, or in none."
            )
