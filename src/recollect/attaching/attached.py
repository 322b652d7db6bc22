"""The handle of `attach`: watches a training loop step by step, and decides what runs next.

At each outermost call of the model the step so far is compared with the recorded ones (`step_shape.py`). If one of them
covers it, its plan is put in place. If none does, the step is recorded; in the middle of a step, where recording cannot begin,
the rest of it runs at its leanest, and the next steps are recorded until one covers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from recollect._torch_private import num_dispatch_modes, profiler_is_active, uncompiled
from recollect.applying import apply_own, apply_policy
from recollect.attaching.begin_recording import begin_recording, excess_of
from recollect.attaching.entries import Removable, Watcher, entry_forwards
from recollect.attaching.lean_start import LeanStart
from recollect.attaching.lockstep import Lockstep
from recollect.attaching.other_mechanisms import OtherMechanisms
from recollect.attaching.planned_step import PlannedStep, plan_step, profile_of
from recollect.attaching.report import line_of, report_of
from recollect.attaching.seen_call import describe_call
from recollect.attaching.step_end import StepEnd, without_backward
from recollect.attaching.step_shape import Call, covers
from recollect.byte_format import format_bytes
from recollect.engine.placed_forward import Applied
from recollect.errors import BudgetWarning, LargerStepError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.progress.stage import stage
from recollect.ranks.group import ALONE, Ranks
from recollect.recording.find_units import Unit
from recollect.recording.leanest_policy import DropAll, leanest_policy
from recollect.recording.step_recording import StepRecording
from recollect.warning import warn_user

__all__ = ["Attached", "OnLarger"]

OnLarger: TypeAlias = Literal["replan", "warn", "raise"]

# A plan for a step of less than this part of the elements is worth one more recording, if recompute costs more than this.
_MUCH_SMALLER: Final = 0.5
_WORTH_SLOWDOWN: Final = 0.01
_MOST_PLANS: Final = 16
# Where steps alternate, a few begin like the one that was missed.
_MOST_ATTEMPTS: Final = 4


class Attached:
    """What `attach` returns.

    Attributes:
        budget_bytes: None until the first plan is made.
        planned: the steps that were recorded and planned.
        recorded_steps: their numbers, from 0.
        num_steps: steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        optimizers: Sequence[torch.optim.Optimizer],
        budget: int | str,
        *,
        device: torch.device,
        on_larger: OnLarger,
        log: Callable[[str], object],
        ends_by_hand: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.budget = budget
        self.budget_bytes: int | None = None
        self.planned: list[PlannedStep] = []
        self.recorded_steps: list[int] = []
        self.num_steps = 0
        self._units = units
        self._optimizers = list(optimizers)
        self._device = device
        self._on_larger: OnLarger = on_larger
        self._log = log
        self._lockstep = Lockstep(model, ranks, may_differ=on_larger == "replan")
        self._lean_start = LeanStart(self._lockstep, device)
        self._parameters = list(model.parameters())
        self._others = OtherMechanisms(model)
        # Raises if the model recomputes already.
        apply_policy(model, self.unit_paths, DropAll()).remove()
        self._watcher = Watcher(self._begin_call, self._abandon_step)
        self._entries = Applied(model, entry_forwards(model, self.unit_paths, self._watcher), None)
        # An engine that steps over parts of the parameters has several steps of an optimizer in one of its own.
        watched = [] if ends_by_hand else self._optimizers
        self._hooks: list[Removable] = [o.register_step_post_hook(self._after_optimizer) for o in watched]
        self._active: PlannedStep | None = None
        self._applied: Applied | None = None
        self._recording: StepRecording | None = None
        # What no plan covered when recording could not begin: steps are recorded until one covers it, or that many were.
        self._missed: list[Call] = []
        self._attempts_left = 0
        # The most that the device was seen to hold beyond what was expected.
        self._seen_bytes = 0
        self._warned: set[str] = set()
        self._calls: list[Call] = []
        self._group: list[Call] = []
        self._end = StepEnd(model, watched)

    @property
    def unit_paths(self) -> list[str]:
        """Paths of the units that are planned."""
        return [unit.path for unit in self._units]

    @property
    def plan(self) -> Plan | None:
        """The plan in place, or of the last step that had one; None before the first."""
        chosen = self._active or (self.planned[-1] if self.planned else None)
        return None if chosen is None else chosen.plan

    def report(self) -> str:
        """Return what was recorded and planned, what counts toward the budget, and what does not, in lines."""
        return report_of(self.planned, self.budget_bytes, self.num_steps, self.recorded_steps)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as a call of the model: a forward that calls parts of the model one by one, and no backward.

        Args:
            function: what to run.
            *args: what it takes; the shapes of the tensors in it tell which plan covers the call.
            **kwargs: the same.

        Returns:
            What the function returns.
        """
        return self._watcher.run("", self.model, function, args, kwargs)

    def remove(self) -> None:
        """Remove the plan and stop watching; do nothing the second time."""
        self._abandon_step()
        self._put(None)
        self._entries.remove()
        while self._hooks:
            self._hooks.pop().remove()

    def remove_too(self, handle: Removable) -> None:
        """Have `remove` remove something else as well."""
        self._hooks.append(handle)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<attached to {type(self.model).__name__}, {len(self.planned)} plans>"

    def _begin_call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Decide how the model runs, before an outermost call of it."""
        if not self.num_steps:
            self._end.note_call()
        is_disturbed = self._notices_others()
        call = describe_call(path, module, args, kwargs, self._parameters, self._device.type, is_open=self._is_open())
        if not call.is_open:
            self._group = []
        self._calls.append(call)
        self._group.append(call)
        if self._recording is not None:
            return
        if self._lockstep.is_alone:
            chosen = None if is_disturbed else self._choice(call)
        else:
            is_disturbed, chosen = self._common_choice(is_disturbed=is_disturbed)
        if is_disturbed:
            return
        if chosen is not None and not (self._is_first and self._attempts_left and self._all_can_record()):
            if chosen is not self._active:
                self._put(chosen)
        elif chosen is None and self.planned and self._on_larger != "replan":
            self._refuse(call)
        elif self._is_first and self._all_can_record():
            lean_units = self._lean_start.units(self.planned, call, self._parameters)
            self._lockstep.together(lambda: self._start_recording(lean_units))
        else:
            self._missed, self._attempts_left = list(self._calls), _MOST_ATTEMPTS
            self._run_leanest(call)

    @property
    def _is_first(self) -> bool:
        return len(self._calls) == 1

    def _choice(self, call: Call) -> PlannedStep | None:
        """Return the fastest planned step that covers the calls so far."""
        if self._active is not None and self._active.follows(self._calls):
            # The order of calls is the recorded one, so what is open is known from there.
            return self._active if not self._is_first else self._smallest(self._active, call)
        candidates = self._covering()
        if not candidates:
            return None
        if len(self._group) > 1 and self._active in candidates:
            return self._active
        best = min(candidates, key=lambda step: step.calls[0].numel)
        return self._smallest(best, call) if self._is_first else best

    def _covering(self) -> list[PlannedStep]:
        return [step for step in self.planned if step.follows(self._calls) or covers(step.calls, self._group)]

    def _common_choice(self, *, is_disturbed: bool) -> tuple[bool, PlannedStep | None]:
        """Return whether some process is disturbed; and the fastest planned step that covers the calls so far in all."""
        is_first, missed = self._is_first, self._attempts_left > 0
        found = self._lockstep.at_call(
            self._covering(), self.num_steps, is_first=is_first, is_calm=not is_disturbed, missed=missed
        )
        if found.has_missed and not missed:
            self._missed, self._attempts_left = [], 1  # Another one did; this one takes part in its recording.
        stays = self._active in found.steps and not is_first
        return not found.is_calm, self._active if stays else next(iter(found.steps), None)

    def _smallest(self, chosen: PlannedStep, call: Call) -> PlannedStep | None:
        """Return the covering step that is smallest; None to record this one, if it is much smaller still."""
        fitting = [step for step in self.planned if step.follows([call])]
        # Of equally large ones, that with more calls: what comes in this step is not known yet.
        best = min(fitting, key=lambda step: (step.calls[0].numel, -len(step.calls)), default=chosen)
        slowdown = best.plan.predicted_slowdown or 0.0
        is_worth_it = call.numel < _MUCH_SMALLER * best.calls[0].numel and slowdown > _WORTH_SLOWDOWN
        if is_worth_it and self._on_larger == "replan" and len(self.planned) < _MOST_PLANS and self._can_record():
            return None
        return best

    def _is_open(self) -> bool:
        """Whether an earlier call of this step still waits for its backward."""
        # After a backward, a graph may still be open (a gradient penalty); the recorder knows, a later step goes by its order.
        is_open = not self._watcher.saw_backward
        if self._recording is not None:
            is_open = self._recording.recorder.num_open_handles > 0
        return is_open and len(self._calls) > 0

    def _all_can_record(self) -> bool:
        return self._lockstep.all_can(self._can_record())

    def _can_record(self) -> bool:
        if profiler_is_active() and self._device.type == "cpu":
            self._warn_once(
                "a profiler is active, beside which a step cannot be recorded: running at the leanest until it ends"
            )
            return False
        if num_dispatch_modes():
            self._warn_once("a dispatch mode is active around the model: running at the leanest until it ends")
            return False
        return True

    def _start_recording(self, lean_units: Mapping[str, UnitPlan] | None) -> None:
        self._put(None)
        if not self.model.training and not any(module.training for module in self.model.modules()):
            self._warn_once("the model is in eval mode; a step in training mode will be recorded and planned anew")
        with self._entries.suspended():
            recording = begin_recording(
                self.model,
                self._units,
                self._optimizers,
                self._device,
                parameters=self._parameters,
                lean_units=lean_units,
                replays_collectives=not self._lockstep.is_alone,
            )
        self._recording, self._watcher.returns = recording, recording.returns

    def _abandon_step(self) -> None:
        """Forget the step under way."""
        if self._recording is not None:
            self._recording.abort()
            self._recording = self._watcher.returns = None
        self._calls, self._group = [], []

    @uncompiled
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Note that an optimizer stepped; end the step if all have."""
        self._end.note_optimizer(optimizer)
        if not self._calls and not self.num_steps:
            self._warn_once(
                f"the optimizer stepped, but {type(self.model).__name__} was not called with gradients on, so that nothing was "
                "planned: the loop calls parts of it one by one. Call the model, or put that forward into attached.call(...)"
            )
        if self._calls and self._end.is_reached:
            self._end.begin_next()
            self.end_step(type(optimizer).__name__)

    def end_step(self, stepped: str) -> None:
        """End the training step: plan what was recorded of it.

        Args:
            stepped: name of what did, for errors.
        """
        calls, recorded = self._calls, self._recording
        if not calls:
            return
        if recorded is not None and not self._lockstep.all_end(recorded.recorder.has_run_backward):
            self._abandon_step()
            text = without_backward(self.model, stepped, len(calls), is_first=not self.planned)
            self._warn_once(text, key="no backward")
            return
        self._calls, self._group, self._recording, self._watcher.returns = [], [], None, None
        number = self.num_steps
        self.num_steps += 1
        if recorded is not None:
            self._finish(recorded, calls, number)
        elif self._active is not None:
            self._check_peak(self._active)

    def _finish(self, recording: StepRecording, calls: list[Call], number: int) -> None:
        begin = time.perf_counter()
        budget = self.budget if self.budget_bytes is None else self.budget_bytes
        with stage("planning"):
            with self._entries.suspended():
                profile = self._lockstep.together(
                    lambda: profile_of(recording, calls, self._optimizers, budget), is_end=True
                )
            index = len(self.recorded_steps)
            self.recorded_steps.append(number)
            planned = plan_step(profile, calls, budget, self.planned, number=index, ranks=self._lockstep.ranks)
        self.budget_bytes = planned.budget_bytes
        if not planned.fits:
            self._warn_once(
                f"no plan fits a step of {calls[0]} into {format_bytes(planned.budget_bytes)}: it needs "
                f"{format_bytes(planned.peak_bytes)} at its leanest, which is how it will run",
                key=str(calls[0]),
            )
        elif excess := excess_of(recording, planned):
            self._warn_once(excess, key=f"recording {calls[0]}")
        has_missed = not self._lockstep.all_end(planned.follows(self._missed))
        self._attempts_left = max(0, self._attempts_left - 1) if has_missed else 0
        self.planned = [step for step in self.planned if not planned.replaces(step)]
        self.planned.append(planned)
        self._lockstep.note_plan(planned)
        self._put(planned)
        if self._device.type == "cuda":
            # To measure ops, recording resets the counter, too; what it took to time units is no step's peak.
            torch.cuda.reset_peak_memory_stats(self._device)
        self._log(line_of(planned, time.perf_counter() - begin))

    def _put(self, chosen: PlannedStep | None) -> None:
        """Replace the plan in place."""
        with self._entries.suspended():
            if self._applied is not None:
                self._applied.remove()
            self._applied = None if chosen is None else apply_own(self.model, chosen.plan)
        self._active = chosen

    def _run_leanest(self, call: Call) -> None:
        # The others may not be here, to be asked for theirs.
        lean_units = self._lean_start.units(self.planned if self._lockstep.is_alone else [], call, self._parameters)
        self._put(None)
        with self._entries.suspended():
            self._applied = apply_policy(self.model, self.unit_paths, leanest_policy(lean_units))

    def _refuse(self, call: Call) -> None:
        """Raise, or warn, at a step that no plan was made for."""
        sizes = ", ".join(str(step.calls[0]) for step in self.planned)
        own = f"a step of {call} is not covered by the plan, which was made for {sizes}"
        text = self._lockstep.first_text(None if self._covering() else own)
        if self._on_larger == "raise":
            raise LargerStepError(f"{text}. Pass on_larger='replan', or a first step that is as large as any.")
        self._warn_once(f"{text}; its peak may exceed the budget", key="larger")
        if self._active is None and self.planned:
            self._put(max(self.planned, key=lambda step: step.calls[0].numel))

    def _check_peak(self, planned: PlannedStep) -> None:
        """Compare with the most that the device ever held; on the CPU nothing counts it."""
        if self._device.type != "cuda" or self.budget_bytes is None:
            return
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        # Of any step, since a peak stays; and above the budget, since blocks may be a little larger than was predicted.
        expected_bytes = max(self.budget_bytes, *(step.peak_bytes for step in self.planned))
        if peak_bytes > max(expected_bytes, self._seen_bytes):
            self._seen_bytes = peak_bytes
            self._missed, self._attempts_left = list(planned.calls), 1
            self._warn_once(
                f"the device held {format_bytes(peak_bytes)} at its peak, {format_bytes(peak_bytes - expected_bytes)} more "
                "than was planned for: something besides the recorded step needs memory (evaluation, generation, another "
                "model). The next step will be recorded and planned anew",
                key="drift",
            )

    def _notices_others(self) -> bool:
        """Warn of another mechanism that was switched on after `attach`; return whether there is one."""
        if self._calls or not self._others.are_on():
            return False
        self._warn_once(
            "layers recompute by a mechanism of their own (checkpoint wrappers, or Hugging Face's switch), which "
            "was switched on after attach: values are recomputed twice, and the plan does not hold. Switch it off",
            key="other mechanism",
        )
        return True

    def _warn_once(self, text: str, *, key: str | None = None) -> None:
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            warn_user(f"recollect: {text}.", BudgetWarning)
