"""Measure the overhead of Python and PyTorch around ops, with small layers that run with and without the tape.

The ops of these layers compute next to nothing. On the tape, such a layer's overhead is proportional to the number of its ops,
plus a constant for each call; a layer of few ops and one of many separate the two.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from recollect._torch_functions import without_modes
from recollect._torch_private import without_global_hooks
from recollect.applying import apply, apply_policy
from recollect.costs.op_costs import MeasuredCosts
from recollect.engine.policy import DropAll
from recollect.engine.tape import Tape
from recollect.errors import ConfigWarning
from recollect.measuring.timing import wait_for, work_clock
from recollect.plans.plan import Plan
from recollect.profile.events import WORK
from recollect.profile.host_times import LARGE_BYTES, AroundOps, HostTimes
from recollect.recording.find_units import find_units
from recollect.recording.step_recording import StepRecording
from recollect.simulation.decisions import decide_call, recompute_all_unit, recompute_unread_unit
from recollect.simulation.simulate import simulate
from recollect.warning import warn_user

_WIDTH: Final = 8
_NUM_LAYERS: Final = 2
_NUM_MODULES: Final = 4
_CHAIN_OPS: Final = 18
_CHAIN_ROUNDS: Final = 15
# In the first rounds the tape learns which modules to watch, and layers are noted and traced.
_WARM_UPS: Final = 2
_ROUNDS: Final = 9
_MOST_TRIES: Final = 4
# Of the upper to the lower quartile of the same times; 1.2 beside nothing else, and up to 2 on a machine with too much to do.
_MOST_SPREAD: Final = 4.0


def around_ops(device: torch.device, *, traces: bool = False) -> AroundOps:
    """Measure the overhead around ops on a device, once per process; on a meta device there is none.

    It takes about a third of a second; for units that run from traces, which Dynamo makes first, two seconds more.
    """
    if device.type == "meta":
        return AroundOps(HostTimes(), 0.0)
    found = _measured(device)
    return replace(found, host=replace(found.host, traced_unit_s=_traced_unit_s(device))) if traces else found


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Within the block, the caller's modes and hooks neither see nor change anything."""
    # Not on a separate thread: it would leave a workspace of the device's libraries behind.
    with ExitStack() as stack:
        for context in (without_modes(), without_global_hooks()):
            stack.enter_context(context)
        for setting in (torch.enable_grad(), torch.inference_mode(False), torch.autocast(device.type, enabled=False)):
            stack.enter_context(setting)
        # Kernels as small as these gain nothing from more, and those of a busy machine wait for each other.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        yield


@cache
def _traced_unit_s(device: torch.device) -> float:
    """Measure a layer's overhead from a trace over plain eager mode, while nothing that backward reads is dropped."""
    with _alone(device):
        plain, traced = _model(_ManyOps, device), _model(_ManyOps, device)
        inputs = _inputs(device)
        plan = _keeping_all(plain, inputs, device)
        with apply(traced, plan.with_engine("graph")), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # If nothing can be traced, the model's own units say so.
            rounds = [tuple(map(sum, both)) for both in _in_turns(plain, traced, inputs, device, _ROUNDS)]
    plain_s, traced_s = map(_undisturbed, zip(*rounds, strict=True))
    return max(0.0, traced_s - plain_s) / _NUM_LAYERS


@cache
def _measured(device: torch.device) -> AroundOps:
    with _alone(device):
        for _ in range(_MOST_TRIES):
            layers = [_Layer.measured(kind, device) for kind in (_FewOps, _ManyOps, _Modules)]
            found, spread = _around(*layers, is_cpu=device.type == "cpu"), max(layer.spread for layer in layers)
            if found.host.unit_s and found.host.seen_op_s and spread < _MOST_SPREAD:
                large_op_s = _large_op_s(device) if device.type == "cpu" else 0.0
                return replace(found, host=replace(found.host, large_op_s=large_op_s))
            # Else the machine was busy while one of the layers ran, and not while the others did.
    warn_user(
        "recollect: what Python takes around ops could not be measured well: one run of a small layer took "
        f"{spread:.1f} times as long as a different one. Predicted slowdowns may be wrong; measured ones are not. Record where "
        "nothing else runs.",
        ConfigWarning,
    )
    return found


def _large_op_s(device: torch.device) -> float:
    """Measure how much longer the tape takes for an op with large results than for one with small results.

    Nothing that backward reads is dropped: memory that is free sooner would make kernels faster.
    """
    plain, on_tape = _model(_Chain, device), _model(_Chain, device)
    small, large = _inputs(device), _inputs(device, LARGE_BYTES // (4 * _WIDTH**2))
    with apply(on_tape, _keeping_all(plain, small, device)):
        small_s, large_s = (_added_forward_s(plain, on_tape, inputs, device) for inputs in (small, large))
    return max(0.0, large_s - small_s) / (_NUM_LAYERS * _CHAIN_OPS)


def _added_forward_s(plain: nn.Module, on_tape: nn.Module, inputs: Tensor, device: torch.device) -> float:
    rounds = _in_turns(plain, on_tape, inputs, device, _CHAIN_ROUNDS)
    return statistics.median(on_tape_s - plain_s for (plain_s, _), (on_tape_s, _) in rounds)


def _keeping_all(model: nn.Module, inputs: Tensor, device: torch.device) -> Plan:
    """Return a plan for which the units are seen, though nothing that backward reads is dropped."""
    profile = _recorded(model, inputs, device).profile(optimizer_step=None, gradients="freed", batch="")
    return Plan({call.path: recompute_unread_unit(profile.graph_of(call)) for call in profile.calls})


def _in_turns(
    one: nn.Module, other: nn.Module, inputs: Tensor, device: torch.device, num_rounds: int
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Return, for each round, the seconds of forward and backward of both."""
    clock = _clock(device)
    rounds = [
        (_timed(one, inputs, device, clock), _timed(other, inputs, device, clock))
        for _ in range(_WARM_UPS + num_rounds)
    ]
    return rounds[_WARM_UPS:]


def _around(few: _Layer, many: _Layer, modules: _Layer, *, is_cpu: bool) -> AroundOps:
    plain_s = sum(one.plain_forward_s + one.plain_backward_s for one in (few, many))
    recorded_s = (few.recorded_s + many.recorded_s - plain_s) / (few.num_all + many.num_all)
    recorded_s = max(0.0, recorded_s) if is_cpu else 0.0

    def again_s(layer: _Layer) -> float:
        kernels_s = layer.again_s - layer.num_again * recorded_s if is_cpu else 0.0
        return layer.backward_s - kernels_s

    forward_s, seen_op_s = _line((few.num_seen, few.forward_s), (many.num_seen, many.forward_s))
    backward_s, again_op_s = _line((few.num_again, again_s(few)), (many.num_again, again_s(many)))
    module_s = max(0.0, modules.forward_s - forward_s - modules.num_seen * seen_op_s) / modules.num_modules
    host = HostTimes(
        forward_op_s=0.0 if is_cpu else many.plain_forward_s / many.num_forward,
        backward_op_s=0.0 if is_cpu else many.plain_backward_s / (many.num_all - many.num_forward),
        unit_s=max(0.0, forward_s + backward_s),
        module_s=module_s,
        seen_op_s=seen_op_s,
        again_op_s=again_op_s,
    )
    return AroundOps(host, recorded_s)


def _line(few: tuple[int, float], many: tuple[int, float]) -> tuple[float, float]:
    """Return the overhead without ops, and of each op, at least 0."""
    each_s = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
    return few[1] - few[0] * each_s, each_s


@dataclass(frozen=True)
class _Layer:
    """Seconds and numbers of ops of one layer."""

    num_modules: int
    """Of calls of modules inside."""
    num_seen: int
    num_again: int
    num_forward: int
    num_all: int
    """Of ops that the tape sees in forward, that it runs again, that forward has, and that a step has, each for one layer."""
    recorded_s: float
    again_s: float
    """Seconds of all, and of those that run again, as recorded."""
    plain_forward_s: float
    plain_backward_s: float
    """A step without the tape."""
    forward_s: float
    backward_s: float
    """The tape's overhead when it drops all it can."""
    spread: float
    """How much longer the steps took in the upper quartile than in the lower one."""

    @classmethod
    def measured(cls, kind: type[nn.Module], device: torch.device) -> _Layer:
        model, inputs = _model(kind, device), _inputs(device)
        # First: nothing is then new when the step is recorded.
        rounds = _rounds(model, inputs, device)
        plain_forward_s, plain_backward_s, forward_s, backward_s = map(_undisturbed, zip(*rounds, strict=True))
        recording = _recorded(model, inputs, device)
        profile = recording.profile(optimizer_step=None, gradients="freed", batch="")
        graphs = [profile.graph_of(call) for call in profile.calls]
        leanest = simulate(profile, [decide_call(graph, recompute_all_unit(graph)) for graph in graphs])
        num_forward = sum(len(graph.ops) for graph in graphs)
        works_ns = [time_ns for _, time_ns in profile.log.operands(WORK)]
        calls = recording.recorder.calls
        num_seen = sum(call.seen_ops.total() for call in calls)
        return cls(
            calls[0].num_modules,
            num_seen // _NUM_LAYERS,
            leanest.recomputed_ops // _NUM_LAYERS,
            num_forward // _NUM_LAYERS,
            (num_forward + len(works_ns)) // _NUM_LAYERS,
            profile.step_s / _NUM_LAYERS,
            leanest.recompute_s / _NUM_LAYERS,
            plain_forward_s / _NUM_LAYERS,
            plain_backward_s / _NUM_LAYERS,
            (forward_s - plain_forward_s) / _NUM_LAYERS,
            (backward_s - plain_backward_s) / _NUM_LAYERS,
            _undisturbed([-sum(times) for times in rounds]) / -_undisturbed([sum(times) for times in rounds]),
        )


def _model(kind: type[nn.Module], device: torch.device) -> nn.Module:
    return nn.Sequential(*(kind(device) for _ in range(_NUM_LAYERS)))


def _inputs(device: torch.device, rows: int = 1) -> Tensor:
    return torch.full((rows, _WIDTH, _WIDTH), 0.5, device=device, dtype=torch.float32, requires_grad=True)


def _clock(device: torch.device) -> Callable[[], float]:
    return work_clock(device) if device.type == "cpu" else time.perf_counter


def _recorded(model: nn.Module, inputs: Tensor, device: torch.device) -> StepRecording:
    recording = StepRecording(
        model, find_units(model, [str(n) for n in range(_NUM_LAYERS)]), MeasuredCosts(device), device
    )
    recording.start({"parameters": list(model.parameters()), "batch": [inputs]})
    try:
        model(inputs).sum().backward()
    except BaseException:
        recording.abort()
        raise
    recording.stop()
    return recording


def _rounds(model: nn.Module, inputs: Tensor, device: torch.device) -> list[tuple[float, float, float, float]]:
    """Return, for each round, the seconds of forward and backward without the tape, and where it drops all it can."""
    tape = Tape(DropAll(), runs_to_settle=1, compares=False)
    rounds: list[tuple[float, float, float, float]] = []
    clock = _clock(device)
    for _ in range(_WARM_UPS + _ROUNDS):
        plain = _timed(model, inputs, device, clock)
        with apply_policy(model, [str(n) for n in range(_NUM_LAYERS)], tape):
            rounds.append((*plain, *_timed(model, inputs, device, clock)))
    return rounds[_WARM_UPS:]


def _undisturbed(seconds: Sequence[float]) -> float:
    """Return the lower quartile: other programs make times longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


def _timed(model: nn.Module, inputs: Tensor, device: torch.device, clock: Any) -> tuple[float, float]:
    """Return the seconds that the host takes for forward and backward."""
    wait_for(device)
    begin_s = clock()
    loss = model(inputs).sum()
    middle_s = clock()
    loss.backward()
    end_s = clock()
    model.zero_grad(set_to_none=True)
    inputs.grad = None
    return middle_s - begin_s, end_s - middle_s


class _FewOps(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(device, _WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + gelu(linear(inputs, self.weight))


class _ManyOps(nn.Module):
    """A layer as large models have it, without modules inside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = _weight(device)
        self.query, self.key, self.value, self.out = (_weight(device, _WIDTH) for _ in range(4))
        self.gate, self.up, self.down = (_weight(device, _WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self._normed(inputs)
        query, key, value = (
            linear(normed, weight).view(1, _WIDTH, 2, -1).transpose(1, 2)
            for weight in (self.query, self.key, self.value)
        )
        attended = (
            scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(1, _WIDTH, _WIDTH)
        )
        inputs = inputs + linear(attended, self.out)
        normed = self._normed(inputs)
        return inputs + linear(silu(linear(normed, self.gate)) * linear(normed, self.up), self.down)

    def _normed(self, inputs: Tensor) -> Tensor:
        return inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class _Chain(nn.Module):
    """A layer of ops that take next to no time even if their results are large."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = _weight(device)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs * self.weight
        for _ in range(_CHAIN_OPS - 2):
            inputs = inputs.abs()
        return -inputs


class _Modules(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(_FewOps(device) for _ in range(_NUM_MODULES)))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.parts(inputs)
        return inputs + outputs


def _weight(device: torch.device, *rows: int) -> nn.Parameter:
    # No random number is drawn.
    return nn.Parameter(torch.full((*rows, _WIDTH), 0.1, device=device, dtype=torch.float32))
