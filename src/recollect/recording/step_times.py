"""Time a training step without recompute, and the tape's overhead, while holding the values of one unit at a time.

A step that keeps everything may not fit into memory, so it cannot simply be timed. The leanest step can, and so can each
unit alone, with and without the tape: forward on the inputs that it gets in the model, followed by its backward.

    step without recompute = leanest step - sum over units (with the tape - without)

The difference in forward is the tape's overhead; the difference in backward is recompute and the Python around it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from recollect._torch_private import tree_leaves, tree_map
from recollect.applying import apply_policy
from recollect.engine.policy import Policy
from recollect.engine.tape import Tape
from recollect.measuring.timing import timed
from recollect.plans.action import Action
from recollect.profile.profile import Profile
from recollect.recording.recording_tape import DropAll
from recollect.simulation.simulate import Simulation

# A fixed number, since all ranks must run equally many: units may wait for each other in collectives.
_ROUNDS = 2
# In a round before these, the tapes learn which modules to watch.
_WARM_UP_ROUNDS = 1
# Even if noise makes recompute look free, op times must still tell ops apart.
_LEAST_SHRUNK = 0.1


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Median seconds of one unit's forward and backward: without a tape, on one that drops all it can, on an idle one."""

    plain_forward_s: float
    plain_backward_s: float
    tape_forward_s: float
    tape_backward_s: float
    idle_forward_s: float

    @property
    def added_s(self) -> float:
        """Seconds that the tape and recompute add."""
        return self.tape_forward_s + self.tape_backward_s - self.plain_forward_s - self.plain_backward_s

    @property
    def idle_s(self) -> float:
        """Overhead in forward of a tape that drops nothing; 0 if noise makes it look negative."""
        return max(0.0, min(self.idle_forward_s, self.tape_forward_s) - self.plain_forward_s)

    @property
    def watching_s(self) -> float:
        """Further overhead in forward if the tape has to see every op."""
        return max(0.0, self.tape_forward_s - self.plain_forward_s) - self.idle_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of a step.

    Attributes:
        leanest_s: forward, loss and backward with everything dropped that can be; the fastest of the rounds.
        units: by call, in the order in which the units' forwards begin, without calls inside another unit and calls
            without anything to differentiate.
    """

    leanest_s: float
    units: Mapping[int, UnitTimes]


def measure_step_times(
    model: nn.Module,
    paths: list[str],
    *,
    forward: Callable[[], object],
    step: Callable[[], object],
    device: torch.device,
    alike: Callable[[int], int],
) -> StepTimes:
    """Time the leanest step, and each unit with and without the tape.

    Args:
        model: without a plan.
        paths: module paths of its units.
        forward: runs the model once.
        step: runs forward, loss and backward once.
        device: where it runs.
        alike: maps the index of a call to that of its graph; calls of one graph are timed together.
    """
    leanest_s = []
    notes = _Notes()
    modules = dict(model.named_modules(remove_duplicate=False))
    clocks = [_UnitClock(modules, notes, device, policy) for policy in (None, DropAll(), _KeepAll())]
    for number in range(_WARM_UP_ROUNDS + _ROUNDS):
        notes.requires_grad.clear()
        with apply_policy(model, paths, notes):
            leanest_s.append(timed(step, device)[1])
        for clock in clocks:
            clock.num_calls = 0
            with apply_policy(model, paths, clock):
                forward()
            if number < _WARM_UP_ROUNDS:
                clock.samples.clear()
    plain, tape, idle = (_medians(clock.samples, alike) for clock in clocks)
    return StepTimes(
        min(leanest_s),
        {
            call: UnitTimes(*plain[graph], *tape[graph], idle[graph][0])
            for call in clocks[0].samples
            if (graph := alike(call)) in tape and graph in idle
        },
    )


def with_step_times(
    profile: Profile, times: StepTimes, seen_ops: Mapping[int, Mapping[str, int]], leanest: Simulation
) -> Profile:
    """Return the profile with measured times in place of sums of op times.

    The overhead of a tape that drops everything, beyond that of an idle one, is divided among the unit's modules by the
    number of ops that the tape sees of each. The tape's overhead in backward is divided equally among the recomputed ops;
    if backward took less than their sum (ops are slower while they are recorded), all op times shrink in proportion.

    Args:
        profile: with op times only.
        times: measured on the same step.
        seen_ops: for each graph, the number of ops by module.
        leanest: the simulated step that drops everything.
    """
    added_s = math.fsum(unit.added_s for unit in times.units.values())
    plain_s = math.fsum(unit.plain_forward_s + unit.plain_backward_s for unit in times.units.values())
    measured_s = math.fsum(unit.tape_backward_s - unit.plain_backward_s for unit in times.units.values())
    rest_s = measured_s - leanest.recompute_s
    per_op_s = max(0.0, rest_s) / max(1, leanest.recomputed_ops)
    shrunk = min(1.0, max(_LEAST_SHRUNK, measured_s / leanest.recompute_s)) if leanest.recompute_s else 1.0
    timed = {profile.calls[call].graph: unit for call, unit in times.units.items()}
    graphs = tuple(
        replace(
            graph,
            ops=tuple(replace(op, time_s=op.time_s * shrunk + per_op_s) for op in graph.ops),
            tape_s=timed[index].idle_s if index in timed else 0.0,
            module_tape_s=_shared_out(timed[index].watching_s, seen_ops.get(index, {})) if index in timed else (),
        )
        for index, graph in enumerate(profile.graphs)
    )
    return replace(profile, graphs=graphs, step_s=max(plain_s, times.leanest_s - added_s))


def _shared_out(seconds: float, num_ops: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    total = sum(num_ops.values())
    return tuple((module, seconds * number / total) for module, number in num_ops.items()) if total else ()


def _medians(
    samples: Mapping[int, list[tuple[float, float]]], alike: Callable[[int], int]
) -> dict[int, tuple[float, float]]:
    """Return, for each graph, the median seconds of forward and of backward."""
    by_graph: dict[int, list[tuple[float, float]]] = {}
    for call, times in samples.items():
        by_graph.setdefault(alike(call), []).extend(times)
    return {
        graph: (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times))
        for graph, times in by_graph.items()
    }


class _Notes(Tape):
    """The leanest tape; notes which arguments of each call require grad."""

    def __init__(self) -> None:
        super().__init__(DropAll(), runs_to_settle=1)
        self.requires_grad: list[list[bool]] = []

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit on the tape."""
        leaves = tree_leaves((args, kwargs))
        self.requires_grad.append([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves])
        return super().run(unit_path, forward, args, kwargs)


class _UnitClock(Tape):
    """Times forward and backward of each unit alone; without a tape if there is no policy."""

    def __init__(
        self, modules: Mapping[str, nn.Module], notes: _Notes, device: torch.device, policy: Policy | None
    ) -> None:
        super().__init__(policy or _KeepAll(), runs_to_settle=1)
        self._modules = modules
        self._notes = notes
        self._device = device
        self._run = super().run if policy is not None else _run_plainly
        self._is_busy = False
        self.num_calls = 0
        self.samples: dict[int, list[tuple[float, float]]] = {}

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit; return its outputs detached, since their graph is used up."""
        call = self.num_calls
        self.num_calls += 1
        if self._is_busy:
            return self._run(unit_path, forward, args, kwargs)
        self._is_busy = True
        try:
            return self._timed(call, unit_path, forward, args, kwargs)
        finally:
            self._is_busy = False

    def _timed(self, call: int, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        requires_grad = iter(self._notes.requires_grad[call])
        trained = [p for p in self._modules[unit_path].parameters() if p.requires_grad]

        def private(item: Any) -> Any:
            if not next(requires_grad):
                return item
            trained.append(item.detach().requires_grad_())
            return trained[-1].clone()  # No leaf: the unit may write to it.

        args, kwargs = tree_map(private, (args, kwargs))
        output, forward_s = timed(lambda: self._run(unit_path, forward, args, kwargs), self._device)
        ends = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if ends and trained:
            ones = [torch.ones_like(end) for end in ends]
            # Not into `.grad`, which would trigger the hooks of data parallelism.
            _, backward_s = timed(lambda: torch.autograd.grad(ends, trained, ones, allow_unused=True), self._device)
            self.samples.setdefault(call, []).append((forward_s, backward_s))
        return tree_map(lambda item: item.detach() if isinstance(item, torch.Tensor) else item, output)


class _KeepAll(DropAll):
    """Drops nothing."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Keep every value."""
        return Action.KEEP

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Drop no module's values."""
        return False


def _run_plainly(unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)
