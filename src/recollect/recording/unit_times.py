"""Time each kind of unit, with and without the tape, on a copy of it.

A step that keeps everything may not fit into memory, so it cannot simply be timed; nor may the user's step run more often
than the user runs it. Copies of units can, each alone: forward on the inputs that the unit got, followed by backward.

    step without recompute = sum of the ops' times, with the units' own times in place of their ops'

The difference in forward is the tape's overhead; the difference in backward is recompute and the Python around it.

Long units run once or twice, short ones often, some not at all. Seconds that a round costs are seconds that the user waits.
The tape's overhead is the same for each op, however long the op takes. In a unit of a millisecond it is much of the time, and
many rounds tell it from noise; in a unit of a tenth of a second it is less than the rounds differ by, and more of them would
not help.
"""

import math
import statistics
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_private import tree_leaves
from recollect.applying import apply_policy
from recollect.engine.policy import DropAll, Policy
from recollect.engine.tape import Tape
from recollect.measuring.timing import timed, work_clock
from recollect.profile import events
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.recording.unit_samples import UnitSample
from recollect.simulation.decisions import CallActions, drop_all
from recollect.simulation.simulate import Simulation, simulate

# Even if noise makes recompute look free, op times must still tell ops apart.
_LEAST_SHRUNK = 0.1
# The part of forward that counts as nearly all of it.
_MOST = 0.5
# A kind of unit may take this long, however short the step is.
_FREE_S: Final = 0.25
# Seconds of a round for each second of the unit: plainly and on the leanest tape, with its recompute; on the idle tape.
_ROUND: Final = 2.4
_IDLE: Final = 1.0
# A median of three is not decided by one page fault.
_FEWEST_IF_SHORT: Final = 3
_MOST_IF_SHORT: Final = 7
_MOST_IF_LONG: Final = 2
# From this many rounds on, the fastest and the slowest do not count.
_FEW_ROUNDS: Final = 5
# Noise may make recompute look free, or worse, in some round.
_LEAST_FACTOR: Final = 0.01
# Where ways to run a unit are timed in turn: seconds of all rounds, and their number at least and at most.
_TIMED_S: Final = 3.0
_FEWEST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 15
# An upper limit on the tape's overhead for one op, and the part of a unit's time that is negligible.
_OVERHEAD_S: Final = 1e-4
_NEGLIGIBLE: Final = 0.02


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Median seconds of one unit's forward and backward: without a tape, on one that drops all it can, on an idle one.

    For a long unit, the idle tape is not timed and counts as no tape.

    `added_s`: what the leanest tape added, forward and backward, in the fastest and in the slowest of several rounds, of five
    or more without the one that is furthest out on each side; () if there was one round.
    """

    plain_forward_s: float
    plain_backward_s: float
    tape_forward_s: float
    tape_backward_s: float
    idle_forward_s: float
    added_s: tuple[float, ...] = ()

    @property
    def plain_s(self) -> float:
        """Seconds of forward and backward without the tape."""
        return self.plain_forward_s + self.plain_backward_s

    @property
    def idle_s(self) -> float:
        """Overhead in forward of a tape that drops nothing; 0 if noise makes it look negative."""
        return max(0.0, min(self.idle_forward_s, self.tape_forward_s) - self.plain_forward_s)

    @property
    def watching_s(self) -> float:
        """Further overhead in forward if the tape has to see every op."""
        return max(0.0, self.tape_forward_s - self.plain_forward_s) - self.idle_s


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often a unit runs."""

    number: int
    """Number of rounds that count, plainly and on the leanest tape; 0 if its ops' times suffice."""
    warms_up: bool
    """A round before them does not count."""
    has_idle: bool
    """It runs on an idle tape, too."""


# A fixed number where several processes train together, since all must run equally many: units may wait for each other in
# collectives.
TOGETHER: Final = Rounds(_FEWEST_IF_SHORT, warms_up=True, has_idle=True)


def rounds_for(unit_s: float, *, num_ops: int, num_calls: int, allocates: bool = False) -> Rounds:
    """Return how often to time a kind of unit.

    Args:
        unit_s: about how long forward and backward of one call take, by the times of their ops.
        num_ops: how many ops the tape sees in forward.
        num_calls: how many calls of this kind a step has.
        allocates: the device's first run takes longer than any other, since it allocates memory that is then reused.

    Example:
        >>> rounds_for(0.001, num_ops=40, num_calls=12)
        Rounds(number=7, warms_up=True, has_idle=True)
        >>> rounds_for(0.2, num_ops=40, num_calls=12)
        Rounds(number=2, warms_up=False, has_idle=False)
    """
    num_short = int(_FREE_S / ((_ROUND + _IDLE) * unit_s)) - 1 if unit_s > 0 else _MOST_IF_SHORT
    if num_short >= _FEWEST_IF_SHORT:
        return Rounds(min(num_short, _MOST_IF_SHORT), warms_up=True, has_idle=True)
    if num_calls == 1 and num_ops * _OVERHEAD_S <= _NEGLIGIBLE * unit_s:
        return Rounds(0, warms_up=False, has_idle=False)
    # Two rounds of a kind with six calls take about as long as its part of the step.
    allowed_s = max(_FREE_S, num_calls * unit_s)
    number = max(1, min(_MOST_IF_LONG, int(allowed_s / (_ROUND * unit_s))))
    return Rounds(number, warms_up=allocates, has_idle=False)


def rounds_within(round_s: float) -> int:
    return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_TIMED_S / max(1e-9, round_s))))


def measure_unit_times(
    samples: list[UnitSample],
    device: torch.device,
    *,
    room_bytes: Callable[[UnitSample], float] = lambda _: math.inf,
    rounds: Callable[[UnitSample], Rounds] = lambda _: TOGETHER,
) -> dict[int, UnitTimes]:
    """Time each sample with and without the tape.

    Args:
        samples: used up.
        device: where they run.
        room_bytes: bytes left for a sample once all its unit's values exist; below 0 it does not run.
        rounds: how often each runs.

    Returns:
        The times by call. Units that cannot be copied or cannot run alone, or have no room or no rounds, are missing.
    """
    found: dict[int, UnitTimes] = {}
    devices = [device] if device.type == "cuda" else []
    with stage("timing units", total=len(samples)) as done:
        while samples:
            sample = samples.pop()
            how_often = rounds(sample)
            # A copy of the parameters and its gradients, and the inputs and theirs.
            if how_often.number and room_bytes(sample) >= 2 * sample.parameter_bytes + 2 * sample.input_bytes:
                with torch.random.fork_rng(devices=devices):
                    times = _times_if_alone(sample, device, how_often)
                if times is not None:
                    found[sample.call] = times
            done()
    return found


def with_unit_times(
    profile: Profile,
    times: Mapping[int, UnitTimes],
    *,
    seen_ops: Mapping[int, Mapping[str, int]],
    backward_s: Sequence[float],
    leanest: Simulation,
    known: Collection[int] = (),
) -> Profile:
    """Return the profile with the measured times of units in place of the sums of their ops' times.

    The overhead of a tape that drops everything, beyond that of an idle one, is divided among the unit's modules by the
    number of ops that the tape sees of each. The tape's overhead in backward is divided equally among the recomputed ops;
    if backward took less than their sum (ops are slower while they are recorded), all op times shrink in proportion. If units
    that make up half of forward, known ones aside, were not timed, op times stay as they are.

    Args:
        profile: with op times only.
        times: by call; the first one stands for all calls with the same graph.
        seen_ops: for each graph, the number of ops by module.
        backward_s: for each call, the sum of the times of its backward's ops.
        leanest: the simulated step in which the timed calls drop everything, and the others nothing; see `in_one_backward`.
        known: graphs that were not timed since their ops' times say all.
    """
    by_graph = {profile.calls[call].graph: times[call] for call in sorted(times, reverse=True)}
    timed_calls = [(index, by_graph[c.graph]) for index, c in enumerate(profile.calls) if c.graph in by_graph]
    shift_s = math.fsum(
        unit.plain_s - profile.graph_of(profile.calls[index]).forward_s - backward_s[index]
        for index, unit in timed_calls
    )
    plain_s = math.fsum(unit.plain_s for _, unit in timed_calls)
    measured_s = math.fsum(unit.tape_backward_s - unit.plain_backward_s for _, unit in timed_calls)
    forward_s = math.fsum(profile.graph_of(call).forward_s for call in profile.calls if call.graph not in known)
    per_op_s, shrunk = 0.0, 1.0
    # The times of a few small units say nothing of the recompute of all.
    if math.fsum(profile.graph_of(profile.calls[index]).forward_s for index, _ in timed_calls) >= _MOST * forward_s:
        per_op_s = max(0.0, measured_s - leanest.recompute_s) / max(1, leanest.recomputed_ops)
        shrunk = min(1.0, max(_LEAST_SHRUNK, measured_s / leanest.recompute_s)) if leanest.recompute_s else 1.0
    graphs = tuple(
        replace(
            graph,
            ops=tuple(replace(op, time_s=op.time_s * shrunk + per_op_s) for op in graph.ops),
            tape_s=by_graph[index].idle_s if index in by_graph else 0.0,
            module_tape_s=_shared_out(by_graph[index].watching_s, seen_ops.get(index, {})) if index in by_graph else (),
        )
        for index, graph in enumerate(profile.graphs)
    )
    low, high = _factors([unit for _, unit in timed_calls])
    step_s = max(plain_s, profile.step_s + shift_s)
    return replace(profile, graphs=graphs, step_s=step_s, low_factor=low, high_factor=high)


def _factors(units: Sequence[UnitTimes]) -> tuple[float, float]:
    """Return by how much recompute may add less, and more, than the medians say, from the spread of rounds; 0, 0 if unknown."""
    spread = [unit for unit in units if unit.added_s]
    usual_s = math.fsum(unit.tape_forward_s + unit.tape_backward_s - unit.plain_s for unit in spread)
    if usual_s <= 0:
        return 0.0, 0.0
    low, high = (math.fsum(unit.added_s[side] for unit in spread) / usual_s for side in (0, 1))
    return min(1.0, max(_LEAST_FACTOR, low)), max(1.0, high)


def _spread(pairs: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return `UnitTimes.added_s`, from the times of forward and backward in each round."""
    added_s = sorted(math.fsum(mine) - math.fsum(its) for mine, its in zip(pairs, plain, strict=True))
    outer = len(added_s) >= _FEW_ROUNDS
    return () if len(added_s) < 2 else (added_s[outer], added_s[-1 - outer])


def leanest_of(profile: Profile, graphs: Container[int]) -> Simulation:
    """Simulate the step where calls of some graphs drop all they can except their outputs, and the others nothing."""
    return simulate(
        profile,
        [drop_all(profile.graph_of(call)) if call.graph in graphs else CallActions() for call in profile.calls],
    )


def in_one_backward(profile: Profile) -> Profile:
    """Return the profile of the same step with a backward that frees its graph, so that no op runs again twice.

    A unit is timed so; in the step, halves of a backward may each run an op again.
    """
    blocks = tuple(
        tuple(
            (events.USE, *event[1:]) if event[0] == events.PEEK else event
            for event in block
            if event[0] not in (events.GIVE_BACK, events.LET_GO)
        )
        for block in profile.log.blocks
    )
    return replace(profile, log=replace(profile.log, blocks=blocks))


def _shared_out(seconds: float, num_ops: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    total = sum(num_ops.values())
    return tuple((module, seconds * number / total) for module, number in num_ops.items()) if total else ()


def _times_if_alone(sample: UnitSample, device: torch.device, rounds: Rounds) -> UnitTimes | None:
    """Return the times of a unit; None if it cannot run alone, or has nothing to differentiate."""
    try:
        return _times_of(sample, device, rounds)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - the user's module, out of its model, may raise anything.
        return None


def _times_of(sample: UnitSample, device: torch.device, rounds: Rounds) -> UnitTimes | None:
    sample = sample.whole()
    module = sample.copied_module()
    # The last one keeps everything, since it names no unit.
    policies: tuple[Policy | None, ...] = (None, DropAll(), *([DropAll(but={})] if rounds.has_idle else []))
    # One tape for all rounds, since it learns in the first one which modules to watch.
    tapes = [None if policy is None else Tape(policy, runs_to_settle=1, compares=False) for policy in policies]
    taken: list[list[tuple[float, float]]] = [[] for _ in policies]
    for _ in range(rounds.number + rounds.warms_up):
        for tape, pairs in zip(tapes, taken, strict=True):
            with ExitStack() as stack:
                if tape is not None:
                    stack.enter_context(apply_policy(module, [""], tape))
                pair = time_run(sample, module, device)
            if pair is None:
                return None
            pairs.append(pair)
    counted = [pairs[-rounds.number :] for pairs in taken]
    plain, leanest, *idle = ([statistics.median(side) for side in zip(*pairs, strict=True)] for pairs in counted)
    idle_s = idle[0][0] if idle else plain[0]
    return UnitTimes(plain[0], plain[1], leanest[0], leanest[1], idle_s, _spread(counted[1], counted[0]))


def time_run(
    sample: UnitSample,
    module: nn.Module,
    device: torch.device,
    forward: Callable[..., Any] | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[float, float] | None:
    """Return the seconds of a unit's forward and backward; None if there is nothing to differentiate."""
    clock = clock or work_clock(device)
    trained: list[Any] = [p for p in module.parameters() if p.requires_grad]
    args, kwargs = sample.inputs(trained)
    autocast = sample.autocast
    with torch.enable_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        output, forward_s = timed(lambda: (forward or module)(*args, **kwargs), device, clock=clock)
    ends = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not ends or not trained:
        return None
    with torch.enable_grad():
        end = _End.apply([torch.ones_like(end) for end in ends], *ends)  # type: ignore[no-untyped-call]
    _, backward_s = timed(lambda: torch.autograd.grad(end, trained, allow_unused=True), device, clock=clock)
    return forward_s, backward_s


class _End(torch.autograd.Function):
    """A scalar whose backward hands on gradients; given gradients, `torch.autograd.grad` spends a second importing SymPy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *ends: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return ends[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)
