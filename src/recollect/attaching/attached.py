"""The handle of `attach`: watches a training loop step by step, and decides how each call runs.

| state | what is in place | it begins |
|---|---|---|
| `IDLE` | nothing | before the first call, and after an abandoned step |
| `RECORDING` | the recorder, dropping all it can | at the first call of a step that no plan covers |
| `PLANNED` | a plan | at a call that it covers |
| `LEAN` | a policy that drops all that can be dropped | at a call that no plan covers, where recording cannot begin |

At each outermost call of the model the step so far is compared with the recorded ones (`step_shape.py`). Within a call, each
unit tells when it runs (`unit_watch.py`): from the first unforeseen run on, the rest of the step is lean,
and the next steps are recorded until one covers it, or memory is reserved for its extra work (`step_planner.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from recollect._torch_private import compiler_around, current_backward, is_capturing, profiler_is_active, uncompiled
from recollect.arguments import listed
from recollect.attaching.held import CallWatch, Departure, OnLarger, StepUnderWay, departure_at_end
from recollect.attaching.lockstep import Lockstep
from recollect.attaching.placement import Placement, Removable, State, Watcher, obstacle, some_loop_records
from recollect.attaching.planned_step import PlannedStep, report_of, unforeseen
from recollect.attaching.reserve import LeanStart
from recollect.attaching.step_clock import StepClock
from recollect.attaching.step_end import OptimizersSeen, StepEnd, changes_weights, to_user, without_call
from recollect.attaching.step_meter import StepMeter
from recollect.attaching.step_planner import StepPlanner
from recollect.attaching.step_shape import Call, Structure, describe_call
from recollect.costs.op_costs import MeasuredCosts
from recollect.engine.captured import refused
from recollect.engine.placed_forward import Handle
from recollect.errors import LargerStepError, RecollectError
from recollect.planning.planners import Engine
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.ranks.group import ALONE, Ranks
from recollect.recording.find_units import find_units
from recollect.recording.model_step import step_tensors
from recollect.recording.step_recording import StepRecording
from recollect.tracebacks import lets_go


class Attached(Handle):
    """The handle that `attach` returns.

    Attributes:
        num_steps: steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[str] | None,
        optimizers: Sequence[torch.optim.Optimizer],
        budget: int | str,
        *,
        device: torch.device,
        on_larger: OnLarger,
        log: Callable[[str], object],
        host_bytes: int = 0,
        engine: Engine = "tape",
        measure: bool = False,
        ends_by_hand: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.budget = budget
        self.num_steps = 0
        self._named_units = listed(units)
        self._units = find_units(model, self._named_units)
        self._device = device
        self._on_larger: OnLarger = on_larger
        self._lockstep = Lockstep(model, ranks, may_differ=on_larger == "replan")
        self._watcher = Watcher(self._begin_call, self._end_call, self._abandon_step, self._departs)
        self._placement = Placement(model, self._watcher)
        self._placement.begin(self.unit_paths)
        self._structure = Structure(model)
        self._lean_start = LeanStart(self._lockstep, self._structure, device)
        # An engine that steps over parts of the parameters has several optimizer steps in one of its own.
        self._optimizers = list(optimizers)
        watched = [] if ends_by_hand else self._optimizers
        self._end = StepEnd(model, watched)
        self._hooks: list[Removable] = [o.register_step_post_hook(self._after_optimizer) for o in watched]
        self._planner = StepPlanner(
            self._placement, self._optimizers, budget, self._lockstep, log, device, host_bytes, engine, self._lean_start
        )
        told = model, self._optimizers, self._take_over, self._planner.warn_once
        self._optimizers_seen = None if ends_by_hand else OptimizersSeen(*told)
        self._hooks += [hook for hook in (self._optimizers_seen, self._structure) if hook is not None]
        self._meter = StepMeter(device, on_cpu=measure, log=log)
        self._clock = StepClock(device, self._placement.time_reruns)
        self._watch = CallWatch(
            self._placement, device, keeps_to_plan=on_larger == "warn", joins_others=not ranks.is_alone
        )
        self._now = StepUnderWay()

    @property
    def budget_bytes(self) -> int | None:
        """The budget; None until the first plan is made."""
        return self._planner.budget_bytes

    @property
    def recorded_steps(self) -> list[int]:
        """Numbers of the steps that were recorded, from 0."""
        return self._planner.recorded_steps

    @property
    def planned(self) -> list[PlannedStep]:
        """The steps that were recorded and planned."""
        return self._planner.steps.steps

    @property
    def unit_paths(self) -> list[str]:
        """Paths of the units that are planned."""
        return [unit.path for unit in self._units]

    @property
    def plan(self) -> Plan | None:
        """The plan in place, or of the last step that had one; None before the first."""
        return None if self._latest is None else self._latest.plan

    @property
    def numbers(self) -> dict[str, float]:
        """That plan's predictions and measurements, with names for loggers; {} before the first."""
        return {} if self._latest is None else self._latest.numbers()

    @property
    def _latest(self) -> PlannedStep | None:
        return self._placement.active or (self.planned[-1] if self.planned else None)

    def report(self) -> str:
        """Return a text report of recorded steps, their plans, and the memory that counts toward the budget."""
        return report_of(self.planned, self.budget_bytes, self.num_steps, self.recorded_steps)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function as a call of the model: a forward that calls parts of the model one by one, without backward.

        Args:
            function: the function to run.
            *args: its arguments; the shapes of their tensors tell which plan covers the call.
            **kwargs: the same.

        Returns:
            The function's result.
        """
        return self._watcher.run("", self.model, function, args, kwargs)

    def remove(self) -> None:
        """Remove the plan and stop watching; do nothing the second time."""
        self.is_removed = True
        self._abandon_step()
        self._placement.remove()
        self._watcher.forget()
        while self._hooks:
            self._hooks.pop().remove()

    def remove_too(self, handle: Removable) -> None:
        """Have `remove` remove something else as well."""
        self._hooks.append(handle)

    def __repr__(self) -> str:
        state = "removed from" if self.is_removed else "attached to"
        return f"<{state} {type(self.model).__name__}, {len(self.planned)} planned>"

    def _begin_call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Decide how the model runs, before an outermost call of it."""
        self._end_if_reached()
        if not self.num_steps:
            self._end.note_call()
        if self._optimizers_seen is not None:
            self._optimizers_seen.note_call()
        step = self._now
        step.end_call(self._placement.units)
        if not step.calls and self._structure.look():
            self._placement.remove()
            self._units = find_units(self.model, self._named_units)
            self._placement.begin(self.unit_paths)
        described = describe_call(
            path, module, args, kwargs, self._structure, self._device.type, is_open=step.waits_for_backward()
        )
        call = self._planner.steps.as_known(described)
        step.begin_call(call, self._watcher.backwards)
        if step.state is State.RECORDING:
            self._lockstep.at_recorded_call()
        else:
            step.state = self._decide(call)
        is_planned, active = step.state is State.PLANNED, self._placement.active
        if is_planned and step.is_first and active is not None:
            self._meter.begin(active, self.num_steps, lambda: chain(*self._tensors().values()))
            self._clock.begin(active)
        self._watch.begin(step, is_planned=is_planned)

    def _end_call(self, output: Any) -> None:
        self._watch.end(self._now, self._structure, output)
        self._end.note_end_of_call()

    def _decide(self, call: Call) -> State:
        """Choose the plan, recorder or policy for a call, and put it in place; return which of them."""
        chosen = self._choice()
        is_first = self._now.is_first
        is_refused = chosen is None and bool(self.planned) and self._on_larger != "replan"
        if is_first and not is_refused and (chosen is None or self._planner.missed.attempts_left > 0):
            # An exchange: all processes have come to this statement, or none has.
            can_record = self._lockstep.all_can(self._can_record())
            if can_record:
                self._start_recording(call)
                return State.RECORDING
        if chosen is not None and not (self._planner.missed.was_over and not self._lockstep.asks):
            self._placement.put(chosen)
            more_bytes = self._watch.missing_room(chosen) if is_first else 0
            if not more_bytes or self._planner.make_room(more_bytes, self._now.calls):
                return State.PLANNED
        if is_refused:
            self._refuse(call)
            return State.PLANNED
        if chosen is None:
            self._planner.missed.note(self._now.calls)
        # The others may not be here to answer.
        self._placement.put_leanest(self._lean_units(call, self.planned if self._lockstep.ranks.is_alone else []))
        return State.LEAN

    def _choice(self) -> PlannedStep | None:
        """Return the fastest planned step that covers the calls so far, in all processes."""
        step, active = self._now, self._placement.active
        if self._lockstep.ranks.is_alone:
            return self._planner.steps.choice(
                step.calls, active, lambda: self._on_larger == "replan" and self._can_record()
            )
        missed = self._planner.missed.attempts_left > 0
        covering = self._planner.steps.covering(step.calls, active)
        steps, has_missed = self._lockstep.at_call(covering, self.num_steps, is_first=step.is_first, missed=missed)
        if has_missed and not missed:
            self._planner.missed.note([], attempts=1)  # A different rank did; this one takes part in its recording.
        if not steps:
            self._planner.steps.note_other_end(step.calls)
        stays = active in steps and not step.is_first
        return active if stays else next(iter(steps), None)

    def _departs(self, text: str, **of_value: Any) -> None:
        """Note, in words, the first run of a unit that the plan does not foresee, or a value in one."""
        self._now.departure = (self._now.departure if of_value else None) or Departure(text, **of_value)
        if self._on_larger == "raise" and not of_value:
            raise LargerStepError(
                f"a step {self._now.departure.text}: it does more than the steps that were planned, at equal shapes. Pass "
                "on_larger='replan', or a first step that does as much as any."
            )

    def _can_record(self) -> bool:
        if some_loop_records():
            return False  # Another model in the same loop has its own handle.
        if text := obstacle(self._device):
            self._planner.warn_once(text)
            return False
        return not self._planner.has_given_up(self.num_steps)

    def _lean_units(self, call: Call, planned: Sequence[PlannedStep]) -> Mapping[str, UnitPlan] | None:
        """Return the leanest foreseen plan; None for a step that may do something unplanned."""
        is_new = self._planner.missed.did_more or not any(call.is_alike(step.calls[0]) for step in planned)
        if is_new and self._lockstep.ranks.is_alone:  # Others may know of nothing new, and would wait for an answer.
            return None
        return self._lean_start.units(planned, call, self.unit_paths)

    def _start_recording(self, call: Call) -> None:
        if is_capturing():
            raise refused(
                "attach",
                f"a step of {call}",
                "no plan covers it, and recording it needs clocks and synchronisation",
                "Run steps like it before the capture until one has run under a plan",
            )
        lean_units = self._lean_units(call, self.planned)
        self._placement.put(None)

        def begin() -> StepRecording:
            tensors = self._tensors()
            recording = StepRecording(
                self.model,
                self._units,
                MeasuredCosts(self._device),
                self._device,
                in_loop=True,
                replays_collectives=not self._lockstep.ranks.is_alone,
                lean_units=lean_units,
                engine=self._planner.engine,
            )
            with self._placement.suspended():
                recording.start(tensors, gradients=tensors.pop("gradients"))
            return recording

        self._now.in_compiled = compiler_around() is not None
        recording = self._now.recording = self._lockstep.together(begin)
        self._watcher.tell(recording.returns)

    def _tensors(self) -> dict[str, list[torch.Tensor]]:
        return step_tensors(self.model, None, self._optimizers, parameters=self._structure.parameters)

    def _abandon_step(self) -> None:
        if self._now.recording is not None:
            with self._placement.suspended():
                self._now.recording.abort()
        self._forget_step()
        self._end.is_lost = True

    def _forget_step(self) -> None:
        self._meter.abandon()
        self._clock.abandon()
        self._watcher.tell(None)
        self._now = StepUnderWay(self._now.returned)
        self._placement.units.begin_step()

    @uncompiled
    @lets_go
    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Note that an optimizer stepped; end the step if all have."""
        self._end.note_optimizer(optimizer)
        if self._end.is_reached:  # The step may end later, without its gradients.
            self._now.made = self._structure.with_gradients()
        is_first = not self._now.calls and not self.num_steps
        if is_first and self._structure.has_gradients() and changes_weights(optimizer):
            self._planner.warn_once(without_call(self.model))
        # After a node of backward, and after compiled code, PyTorch restores the thread's state, and with it a profiler or mode
        # that was left in there: the step then ends at the next call.
        is_watched = self._now.recording is not None or profiler_is_active()
        in_compiled = not self._now.in_compiled and compiler_around() is not None
        if not is_watched or (current_backward() < 0 and not in_compiled):
            self._end_if_reached()

    def _end_if_reached(self) -> None:
        if self._end.is_reached:
            # Other processes count a step that was lost in this one, and ask again by that number.
            self.num_steps += self._end.begin_next() and not self._now.calls
            try:
                self.end_step(self._end.stepped)
            except RecollectError as error:
                raise to_user(error, self.budget) from None

    def _take_over(self, optimizer: torch.optim.Optimizer, has_stepped: bool) -> None:
        """Watch an optimizer that the loop has made in place of an old one."""
        self._hooks.append(optimizer.register_step_post_hook(self._after_optimizer))
        if has_stepped:
            self._after_optimizer(optimizer, (), {})
        # The old one's state may be in memory at the same time as the new one's.
        self._planner.missed.note([], attempts=1)

    def end_step(self, stepped: str) -> None:
        """End the training step, and plan it if it was recorded.

        Args:
            stepped: name of the optimizer that stepped, for errors.
        """
        step, recorded = self._now, self._now.recording
        if not step.calls:
            return
        if recorded is not None and not self._lockstep.all_end(recorded.recorder.has_run_backward):
            self._abandon_step()
            text = self._end.note_skipped(stepped, len(step.calls), is_planned=bool(self.planned))
            self._planner.warn_once(text, key="no backward")
            return
        step.end_call(self._placement.units)
        excess, timed = self._meter.end(self.planned), self._clock.end(step, self._placement.active)
        self._forget_step()
        number = self.num_steps
        self.num_steps += 1
        if recorded is not None:
            self._planner.plan(recorded, step, number)
            self._meter.restart()
        elif step.state is State.PLANNED and self._placement.active is not None:
            step.departure = step.departure or departure_at_end(step, self._placement.active, self._structure)
            if step.departure is not None:
                self._planner.see_to(step, step.departure, number, self._meter.peak_bytes)
            elif excess is not None:
                self._planner.see_to_excess(excess, step.calls)
            elif timed is not None:
                self._planner.learn(self._placement.active, timed)
        elif step.state is State.LEAN:
            missed, courses = self._planner.missed, step.courses()
            text = "" if step.planned is None else unforeseen(step.planned, step.calls)
            self._planner.see_to(step, step.departure or Departure(text), number, self._meter.peak_bytes)
            if not missed.was_over:  # Otherwise an earlier step was missed, and this one may do less.
                missed.note(step.calls, courses, attempts=missed.attempts_left)
            self._planner.steps.note(step.calls, courses)

    def _refuse(self, call: Call) -> None:
        """Raise, or warn, at a step that no plan was made for."""
        sizes = ", ".join(str(step.calls[0]) for step in self.planned)
        own = f"a step of {call} is not covered by the plan, which was made for {sizes}"
        is_covered = bool(self._planner.steps.covering(self._now.calls, self._placement.active))
        text = self._lockstep.first_text(None if is_covered else own)
        if self._on_larger == "raise":
            raise LargerStepError(f"{text}. Pass on_larger='replan', or a first step that is as large as any.")
        self._planner.warn_once(f"{text}; its peak may exceed the budget", key="larger")
        if self._placement.active is None and self.planned:
            self._placement.put(max(self.planned, key=lambda step: step.calls[0].numel))
