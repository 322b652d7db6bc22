"""Reports what each layer keeps and recomputes under a plan: bytes, ops and seconds, by name.

Everything is read from a playback of the recorded step (`simulation/simulate.py`), so the layers add up to the plan's
predictions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import reduce
from operator import add

from recollect.arguments import check_kind
from recollect.plans.plan import Plan
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import calls_on_tape, decide
from recollect.simulation.lifetimes import Lifetimes, lifetimes
from recollect.simulation.playback import GENERATOR, OUTSIDE


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """What one run of a unit keeps and recomputes.

    Attributes:
        path: module path of the unit.
        kept: name and bytes of each of its values alive when the backward after its forward begins. Its input belongs to
            the unit before it. Bytes that ops wrote to in place go by the name of the value that autograd saved.
        generator_bytes: size of the random generator states held to repeat random ops.
        recomputed: ops that run again, named by their results, in order; an op that runs twice is listed twice.
        recompute_s: seconds of these ops, plus the tape's overhead in forward.
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
    """Return what each unit of a step keeps and recomputes under a plan.

    Args:
        profile: the recorded step.
        plan: a plan for this model.

    Returns:
        One account for each of `profile.calls`, in order. None covers what runs outside the units (the loss).

    Raises:
        ArgumentError: an argument is of another kind.

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
    on_tape = calls_on_tape(decisions)
    lives = lifetimes(profile, decisions)
    kept = _kept(lives)
    reruns: dict[int, list[OpRecord]] = {}
    for index, op in lives.reruns:
        reruns.setdefault(index, []).append(op)
    accounts = []
    for index, call in enumerate(profile.calls):
        graph, again = profile.graph_of(call), reruns.get(index, [])
        tape_s = graph.watched_s(decisions[index].values.dropped) if index in on_tape else 0.0
        names = _names(graph)
        accounts.append(
            LayerUsage(
                path=call.path,
                kept=tuple(
                    (names[value], nbytes) for value, nbytes in sorted(kept[index].items()) if value >= 0 and nbytes
                ),
                generator_bytes=kept[index][GENERATOR],
                recomputed=tuple(op.name for op in again),
                # One after the other: `sum` rounds in another way in newer Pythons.
                recompute_s=reduce(add, (op.time_s for op in again), 0.0) + tape_s,
                num_runs=call.num_runs,
            )
        )
    return tuple(accounts)


def kept_outside_bytes(profile: Profile, plan: Plan) -> int:
    """Return the bytes made outside of all units that are alive where `Simulation.kept_bytes` is counted.

    Complexity: about three simulations.
    """
    lives = lifetimes(profile, decide(profile, plan))
    alive = [[storage for storage in lives.storages if storage.is_alive_at(moment)] for moment in lives.backwards]
    most = max(alive, key=lambda storages: sum(storage.nbytes for storage in storages), default=[])
    return sum(storage.nbytes for storage in most if storage.owner[0] == OUTSIDE)


def _kept(lives: Lifetimes) -> defaultdict[int, Counter[int]]:
    """Return the bytes of each call's values, and of its `GENERATOR` states, when the backward after its forward begins."""
    moments = [*lives.backwards, len(lives.time_s)]
    after = {call: moments[bisect_left(lives.backwards, began)] for call, began in lives.began.items()}
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for storage in lives.storages:
        call, value = storage.owner if storage.owner[0] != GENERATOR else storage.owner[::-1]
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
