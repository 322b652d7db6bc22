"""Reports what each layer keeps and recomputes under a plan: bytes, ops and seconds, by name.

Everything is read from a playback of the recorded step (`simulation/simulate.py`), so the layers add up to the plan's
predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from recollect.arguments import check_kind
from recollect.plans.plan import Plan
from recollect.plans.value_names import collective_kind
from recollect.profile.events import BACKWARD
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, decide
from recollect.simulation.playback import GENERATOR, OUTSIDE, EveryToken, Owner, WatchedPlayback
from recollect.simulation.program import ProgramOp
from recollect.simulation.simulate import run

__all__ = ["LayerUsage", "kept_outside_bytes", "layer_usage"]


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

    Complexity: about two simulations.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> from recollect.profile.profile import Profile
        >>> layer_usage(Profile((), (), StepLog(), step_s=0.0), Plan({}))
        ()
    """
    check_kind("layer_usage(profile, plan)", "profile", profile, Profile, "recollect.Profile")
    check_kind("layer_usage(profile, plan)", "plan", plan, Plan, "recollect.Plan")
    playback = _played(profile, plan)
    accounts = []
    for index, call in enumerate(profile.calls):
        graph, count = profile.graph_of(call), playback.counts[index]
        dropped = playback.decisions[index].values.dropped
        tape_s = graph.watched_s(dropped) if index in playback.on_tape else 0.0
        names = _names(graph)
        accounts.append(
            LayerUsage(
                path=call.path,
                kept=tuple((names[value], nbytes) for value, nbytes in sorted(count.kept.items())),
                generator_bytes=count.generator_bytes,
                recomputed=tuple(count.recomputed),
                recompute_s=count.recompute_s + tape_s,
                num_runs=call.num_runs,
            )
        )
    return tuple(accounts)


def kept_outside_bytes(profile: Profile, plan: Plan) -> int:
    """Return the bytes made outside of all units that are alive where `Simulation.kept_bytes` is counted.

    Complexity: about two simulations.
    """
    return _played(profile, plan).outside_bytes


def _played(profile: Profile, plan: Plan) -> _CountingPlayback:
    playback = _CountingPlayback(EveryToken(profile), decide(profile, plan))
    run(playback)
    return playback


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


@dataclass(slots=True)
class _Count:
    kept: dict[int, int] = field(default_factory=dict)
    generator_bytes: int = 0
    recomputed: list[str] = field(default_factory=list)
    recompute_s: float = 0.0
    has_run: bool = False


class _CountingPlayback(WatchedPlayback[tuple[Owner, int]]):
    """Charges bytes to their owner's account while they are alive."""

    def __init__(self, program: EveryToken, decisions: Sequence[CallActions]) -> None:
        self.counts = [_Count() for _ in program.profile.calls]
        # The calls whose backward has begun; the bytes of all units; and those of nobody, where most were kept.
        self.closed: set[int] = set()
        self.units_bytes = 0
        self.outside_bytes = 0
        self.most_kept_bytes = -1
        super().__init__(program, decisions)

    def runs_again(self, call: int, op: OpRecord) -> None:
        super().runs_again(call, op)
        self.counts[call].recomputed.append(op.name)
        self.counts[call].recompute_s += op.time_s

    def begin(self, owner: Owner, nbytes: int) -> tuple[Owner, int]:
        self._add(owner, nbytes)
        return owner, nbytes

    def end(self, made: tuple[Owner, int]) -> None:
        owner, nbytes = made
        self._add(owner, -nbytes)

    def _add(self, owner: Owner, nbytes: int) -> None:
        """Count bytes that forward makes or frees; those of the loss and the parameters belong to no unit."""
        call, value = owner
        if call != OUTSIDE:
            self.units_bytes += nbytes
        if (value if call == GENERATOR else call) in self.closed:
            return
        if call == GENERATOR:
            self.counts[value].generator_bytes += nbytes
        elif call >= 0:
            kept = self.counts[call].kept
            kept[value] = kept.get(value, 0) + nbytes
            if not kept[value]:
                del kept[value]

    def _begin_phase(self, phase: int) -> None:
        super()._begin_phase(phase)
        if phase != BACKWARD:
            return
        self.closed.update(call for call, count in enumerate(self.counts) if count.has_run)
        kept_bytes = self.alive_bytes - self.profile.persistent_bytes
        if kept_bytes > self.most_kept_bytes:
            self.most_kept_bytes, self.outside_bytes = kept_bytes, kept_bytes - self.units_bytes

    def _op(self, call: int, run: ProgramOp) -> None:
        self.counts[call].has_run = True
        super()._op(call, run)
