"""Record steps with any order of forwards and backwards, and measure them under plans."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import recollect
from recollect.applying import apply_policy
from recollect.costs.hardware_table import choose_hardware
from recollect.costs.op_costs import Key, MeasuredCosts, OpRun
from recollect.costs.op_work import work_of
from recollect.costs.roofline import seconds
from recollect.engine.facts import OpFacts
from recollect.engine.policy import DropAll
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile import events
from recollect.profile.profile import Profile
from recollect.recording.assemble import assemble
from recollect.recording.compiled_code import UnseenStorages
from recollect.recording.find_units import find_units
from recollect.recording.recording_tape import RecordingTape
from recollect.recording.step_mode import StepMode
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.unit_samples import UnitSamples

Step = Callable[[], object]
"""A training step, which keeps nothing."""

# PyTorch makes some scalars out of sight.
UNSEEN_BYTES = 1024


class ModelledTimes(MeasuredCosts):
    """Measures workspaces and models times, so that two recordings of a step are equal."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._hardware = choose_hardware("H100", own_device="")
        self._modelled_s: dict[Key, float] = {}

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        output, run = super().run(func, facts, args, kwargs, may_repeat=False)
        if run.key not in self._modelled_s:
            self._modelled_s[run.key] = seconds(work_of(func, facts, args, kwargs, output), self._hardware)
        return output, run

    def seconds_of(self, run: OpRun | None) -> float:
        return self._modelled_s[run.key] if run is not None else 0.0


def recorded(model: nn.Module, step: Step, inputs: Sequence[Tensor], *, units: Iterable[str] | None = None) -> Profile:
    """The profile of a step with modelled times; the model has no gradients before it."""
    model.zero_grad(set_to_none=True)
    costs = ModelledTimes()
    recorder = StepRecorder(costs, torch.device("cpu"), None, traces=False)
    unseen = UnseenStorages(recorder, torch.device("cpu"), model.parameters)
    found = find_units(model, units)
    groups = {"parameters": list(model.parameters()), "buffers": list(model.buffers()), "batch": list(inputs)}
    persistent = {name: storage_bytes(tensors) for name, tensors in groups.items()}
    recorder.trackers.mark_persistent(tensor for tensors in groups.values() for tensor in tensors)
    tape = RecordingTape(DropAll(), unseen, UnitSamples(model, torch.device("cpu"), takes_any=False))
    with ExitStack() as stack:
        stack.callback(recorder.close)
        stack.enter_context(apply_policy(model, [unit.path for unit in found], tape))
        stack.callback(register_optimizer_step_pre_hook(lambda *_: recorder.begin_phase(events.OPTIMIZER)).remove)
        recorder.begin_phase(events.FORWARD)
        with costs.recording(), StepMode(unseen):
            step()
    model.zero_grad(set_to_none=True)
    layers = {unit.path for unit in found if unit.is_layer}
    return assemble(recorder, costs, layers, persistent=persistent, calibration_bytes=UNSEEN_BYTES, device="cpu")


def measured_bytes(profile: Profile, model: nn.Module, step: Step, plan: Plan | None = None) -> int:
    """The measured peak of the step under a plan, with all that is there before it."""
    model.zero_grad(set_to_none=True)
    with recollect.apply(model, plan or Plan({})):
        found = measure_peak(step, device="cpu")
    model.zero_grad(set_to_none=True)
    return profile.persistent_bytes + found.peak_growth_bytes


def random_plan(profile: Profile, seed: int) -> Plan:
    """A coin for each value of each unit, of which some keep most and others little, and for each output."""
    rng = random.Random(seed)
    units: dict[str, UnitPlan] = {}
    for call in profile.calls:
        values = [value for value in profile.graph_of(call).values if value.producer is not None]
        kept = rng.random()
        actions = {v.name: "keep" if v.must_keep or rng.random() < kept else "recompute" for v in values}
        units.setdefault(call.path, UnitPlan(actions, output="recompute" if rng.random() < 0.4 else "keep"))
    return Plan(units)
