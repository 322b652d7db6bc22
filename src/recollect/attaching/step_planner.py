"""Plan recorded steps, and make sure that steps with unforeseen work get a plan."""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import torch

from recollect.attaching.held import Departure, StepUnderWay, beyond_noise, expect
from recollect.attaching.lockstep import Lockstep
from recollect.attaching.missed import Missed, is_little
from recollect.attaching.placement import Placement, excess_of
from recollect.attaching.planned_step import PlannedStep, PlannedSteps, difference, grouped
from recollect.attaching.reserve import LeanStart, Reserve, varying_bytes, without_last_output
from recollect.attaching.room import Room, plan_with_room, with_room
from recollect.attaching.step_clock import corrected
from recollect.attaching.step_meter import Excess
from recollect.attaching.step_shape import Call
from recollect.attaching.timed_steps import Timed
from recollect.attaching.unit_watch import Course
from recollect.byte_format import format_bytes
from recollect.costs.host_copies import with_host_link
from recollect.errors import BudgetWarning
from recollect.planning.classic import classic_plan
from recollect.planning.planners import Engine, planner_for
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.quantities import parse_budget
from recollect.ranks.group import Place
from recollect.ranks.members import common_plan
from recollect.recording.engines import with_engine
from recollect.recording.host_times import around_ops
from recollect.recording.step_recording import StepRecording
from recollect.warning import warn_user

# Memory that grows from step to step is reserved slightly ahead.
_MARGIN: Final = 1.5
# Beyond this times what was told of a step, a warning comes again.
_MUCH_MORE: Final = 1.05
# A step that differs from all before it is recorded, until this many do, and at least every second one.
_MOST_RECORDED: Final = 16
# After so many steps in which units get larger inputs at equal shapes, or compute what no plan names, others are recorded.
_MOST_SEARCHES: Final = 4


class _Next(Enum):
    """What follows a step that departed from its plan."""

    PLANNED = auto()
    RECORDED_ONCE = auto()
    RECORDED = auto()
    LEANEST = auto()
    RECOMPUTED = auto()


_SAID: Final = {
    _Next.LEANEST: "Units then run at their leanest",
    _Next.RECOMPUTED: "Values that plans do not name are recomputed",
}


@dataclass(eq=False)
class StepPlanner:
    """Knows the planned steps of a model, and plans more."""

    placement: Placement
    optimizers: Sequence[torch.optim.Optimizer]
    budget: int | str
    lockstep: Lockstep
    log: Callable[[str], object]
    device: torch.device
    host_bytes: int
    engine: Engine
    lean_start: LeanStart

    def __post_init__(self) -> None:
        self.budget_bytes: int | None = None
        self.recorded_steps: list[int] = []
        self.steps = PlannedSteps()
        self.missed = Missed()
        self._warned: set[str] = set()
        self._told_bytes: dict[str, int] = {}
        # Numbers of planned steps after which one was recorded, since the allocator showed more than was planned.
        self._tried: set[int] = set()
        self._searches: Counter[_Next] = Counter()

    def plan(self, recording: StepRecording, step: StepUnderWay, number: int) -> None:
        begin = time.perf_counter()
        modes = [call.context[1] for call in step.calls]
        model = self.placement.model
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if is_trained and not any([*modes, *(module.training for module in model.modules())]):
            self.warn_once(
                f"step {number} ran in eval mode, in which dropout holds less: call model.train() first if that is not meant; "
                "a step in training mode will be recorded and planned again",
                key="eval",
            )
        calls, courses = step.calls, step.courses()
        # A percentage is of what repeats: the first step may be the only one without gradients.
        had_gradients = any(known.calls[0].has_gradients for known in self.steps.steps)
        repeats = len(self.recorded_steps) > 1 or had_gradients or not calls[0].has_gradients
        budget = self.budget_bytes if self.budget_bytes is not None and repeats else self.budget
        self.steps.note(calls, courses)
        with stage("planning"):
            with self.placement.suspended():
                profile = self.lockstep.together(lambda: self._profile(recording, calls), is_end=True)
                profile = without_last_output(self._measured(profile, recording), step.before.nbytes)
            if recording.meets_gradients:
                calls = [replace(call, has_gradients=True) for call in calls]
            if late_bytes := recording.late_gradients_bytes:
                self.log(f"recollect: zero_grad() before forward, not after it, would free {format_bytes(late_bytes)}")
            for seen in self.lockstep.ranks.gather(self.steps.seen, Place.STEP_END):
                self.steps.note_seen(seen)
            index = len(self.recorded_steps)
            self.recorded_steps.append(number)
            room_bytes = step.beside_bytes + int(_MARGIN * varying_bytes(profile, calls))
            planned = self._planned(profile, calls, courses, budget, index, room_bytes)
        planned.made, planned.held_before = step.made, planned.held_before - step.beside_bytes
        self.budget_bytes = planned.budget_bytes
        if excess := excess_of(recording, planned):
            self._warn_of(recording.peak_bytes, excess, key=f"recording {calls[0]}")
        self.missed.end_attempt(is_met=self.lockstep.all_end(self.missed.is_met_by(planned)))
        self.missed.note_untraced(planned, self.steps.steps)
        if alike := [step for step in self.steps.steps if str(step).partition(" (")[0] == str(planned)]:
            differs = difference(alike[-1], planned)
            planned.unlike = differs and f"step {self.recorded_steps[alike[-1].number]}: {differs}"
        self.steps.add(planned)
        self.lockstep.note_plan(planned)
        self._renew()
        self.placement.put(planned)
        self.log(planned.line(time.perf_counter() - begin))
        kind = re.sub(r"\d+", "", planned.plan.note)  # The numbers in it are of one plan.
        if kind and kind not in self._warned:
            self._warned.add(kind)
            self.log(f"recollect: {planned.plan.note}")

    def _profile(self, recording: StepRecording, calls: Sequence[Call]) -> Profile:
        recording.stop(self.optimizers)
        profile = recording.profile(
            optimizer_step=None,
            gradients="freed",
            batch=f"{calls[0]}, {len(calls)} calls" if len(calls) > 1 else str(calls[0]),
            around=around_ops(self.device, traces=recording.traces),
        )
        return with_host_link(profile, self.device) if self.host_bytes else profile

    def _measured(self, profile: Profile, recording: StepRecording) -> Profile:
        seconds: list[float] = []
        profile = with_engine(
            self.engine,
            profile,
            recording.samples_of_graph,
            self.device,
            costs=recording.costs,
            ranks=self.lockstep.ranks,
            place=Place.STEP_END,
            compiled=lambda _, compile_s: seconds.append(compile_s),
        )
        if self.engine == "compile":
            self.log(
                f"recollect: compiled layers {len(seconds)} times in {sum(seconds):.0f} s, to measure what they take"
            )
        return profile

    def see_to(self, step: StepUnderWay, departure: Departure, number: int, measured_bytes: int) -> None:
        """Report the memory of a step that departed from its plan, and plan the next steps."""
        if (active := step.planned) is None:
            return
        courses, did_more = step.courses(), any(step.beyond()) or departure.is_of_names
        self.steps.note(step.calls, courses)
        more_bytes = self._more_bytes(step, departure, active)
        follows = self._after(step, departure, active, more_bytes)
        if said := departure.excess(active, more_bytes, measured_bytes):
            key = departure.text if departure.unnamed else f"step {number}"
            text = f"step {number} {said}. {_SAID.get(follows, 'What follows is planned for that, too')}"
            self.warn_once(text, key="larger units" if follows is _Next.LEANEST else key)
        if follows is _Next.PLANNED:
            active.made |= step.made
            self.placement.put(self._plan_again(active, departure.more_bytes or 0, grows=not departure.is_understood))
        elif follows is _Next.RECORDED_ONCE:
            self._tried.add(active.number)
            self.missed.note(step.calls, courses, attempts=1, did_more=did_more, was_over=bool(said))
        elif follows is _Next.RECORDED:
            self.missed.note(step.calls, courses, did_more=did_more, unnamed=departure.unnamed)

    def _more_bytes(self, step: StepUnderWay, departure: Departure, active: PlannedStep) -> int | None:
        """Return how much more than planned a step needed; None if that is not known."""
        if departure.more_bytes is not None:
            return departure.more_bytes
        if (lean_bytes := self._lean_bytes(step)) is not None:
            return max(0, lean_bytes - active.peak_bytes)
        reserve, beyond = self._reserve, step.beyond()
        room = reserve.room(active.profile, grouped(step.calls, beyond)) if any(beyond) else None
        if room is None:
            return None
        needed_bytes = room.held_bytes + room.beyond(active.profile, active.plan)
        return needed_bytes - reserve.held_bytes(active.profile, active.plan, step.skipped())

    def _after(self, step: StepUnderWay, departure: Departure, active: PlannedStep, more_bytes: int | None) -> _Next:
        is_read, is_unnamed = departure.more_bytes is not None, departure.unnamed is not None
        # No room is reserved for larger inputs of units: a recorded step has them, but one of many is seldom the largest.
        is_larger = not is_read and any(step.beyond()) and step.are_all_foreseen()
        is_larger = is_larger and self._spare(active.calls, active.courses, self._reserve) == active.spare
        has_further = is_read and self.lockstep.ranks.is_alone and bool(step.made - active.made)
        searched = {_Next.RECOMPUTED: is_unnamed, _Next.LEANEST: is_larger, _Next.PLANNED: has_further}
        self._searches.update(end for end, is_one in searched.items() if is_one)
        for end, is_one in searched.items():
            if is_one and self._searches[end] > _MOST_SEARCHES:
                return end
        if is_unnamed or departure.is_understood:
            return _Next.RECORDED if is_unnamed else _Next.PLANNED
        # Memory that the allocator showed once may appear in the next step, too, where it can be recorded.
        if not self.lockstep.ranks.is_alone or is_larger or (is_read and active.number not in self._tried):
            return _Next.RECORDED_ONCE
        has_room = (
            more_bytes is not None
            and is_little(active.courses, self.steps.spare(active.calls, active.courses))
            and not step.had_more_backwards(active)
        )
        return _Next.PLANNED if is_read or has_room else _Next.RECORDED

    def _lean_bytes(self, step: StepUnderWay) -> int | None:
        """Return the peak of the calls without a plan; None if others did more than planned, or no step like them is known."""
        alone = step.alone_without_plan() if self.lockstep.ranks.is_alone else []
        found = [self.lean_start.peak_bytes(self.steps.steps, call, course) for call, course in alone]
        return None if not found or None in found else max(filter(None, found))

    def see_to_excess(self, excess: Excess, calls: Sequence[Call]) -> None:
        """Report a measured peak above the budget, and plan with room for it, or have the next step recorded."""
        self.warn_once(excess.text, key="compiling" if excess.more_bytes == 0 else "drift")
        active = self.placement.active
        if excess.more_bytes and active is not None and self.lockstep.ranks.is_alone:
            self.placement.put(self._plan_again(active, excess.more_bytes))
        elif excess.more_bytes != 0:
            self.missed.note(calls, attempts=1)

    def learn(self, step: PlannedStep, timed: Timed) -> None:
        """Plan a step again, once, if it took longer than was predicted; not where other processes would have to do so, too."""
        profile = corrected(step, timed) if self.lockstep.ranks.is_alone and not step.is_corrected else None
        if profile is not None:
            why = f"since steps took {timed.slowdown:+.1%}"
            self.placement.put(self._plan_again(step, 0, profile=profile, why=why))

    def make_room(self, more_bytes: int, calls: Sequence[Call]) -> bool:
        """Have a step planned again before which more is in memory than earlier; return whether it can run under a plan now.

        Where other processes take part, the next step is recorded.
        """
        active = self.placement.active
        if active is None or not active.fits:
            return True
        # What the optimizers have since allocated counts whenever a step is planned.
        state_bytes = self._reserve.optimizer_bytes()
        more_bytes = beyond_noise(more_bytes - (state_bytes - active.state_bytes), active)
        new_state_bytes = max(0, state_bytes - active.profile.persistent.get("optimizer_state", 0))
        if not beyond_noise(more_bytes + new_state_bytes, active):
            return True
        if self.lockstep.ranks.is_alone:
            self.placement.put(self._plan_again(active, more_bytes))
            return True
        more_bytes += new_state_bytes
        if active.peak_bytes + more_bytes <= active.budget_bytes:
            return True
        lean_bytes = self.lean_start.peak_bytes(self.steps.steps, calls[0], active.courses[0])
        if active.needs_all_ranks or lean_bytes is None or lean_bytes + more_bytes > active.budget_bytes:
            self.warn_once(
                f"{format_bytes(more_bytes)} more are held beside a step than when it was planned, and it may need more than "
                f"the budget of {format_bytes(active.budget_bytes)}; one of the next will be recorded, and planned again",
                key="grown",
            )
        self.missed.note(calls, attempts=1, was_over=True)
        return active.needs_all_ranks

    def _plan_again(
        self, step: PlannedStep, more_bytes: int, *, grows: bool = True, profile: Profile | None = None, why: str = ""
    ) -> PlannedStep:
        """Plan a step again with current knowledge and room for more bytes; those that do not grow are there before it, too."""
        begin = time.perf_counter()
        known = profile or step.profile, step.calls, step.courses, step.budget_bytes, step.number
        again = self._planned(*known, step.more_bytes + more_bytes, int((_MARGIN - 1) * more_bytes) if grows else 0)
        again.held_before = step.held_before - (0 if grows else more_bytes)
        again.state_bytes, again.made = step.state_bytes, step.made
        self.steps.steps = [again if known is step else known for known in self.steps.steps]
        again.unlike, again.is_corrected = step.unlike, step.is_corrected or profile is not None
        room = f"room for {format_bytes(again.more_bytes)} more" if again.more_bytes else "the optimizer's state"
        self.log(again.line(time.perf_counter() - begin, f", {why or f'with {room}'},"))
        return again

    def _renew(self) -> None:
        """Plan steps again that were planned before the optimizers had all of the state that they have now."""
        own = {step.number: step for step in self.steps.steps}
        state_bytes = self._reserve.optimizer_bytes()
        stale = {n: step.profile.persistent.get("optimizer_state", 0) < state_bytes for n, step in own.items()}
        offered = self.lockstep.ranks.gather(stale, Place.STEP_END)
        # Processes may have forgotten different ones.
        for number in sorted(set(own).intersection(*offered)):
            if any(its[number] for its in offered):
                self._plan_again(own[number], 0)

    @property
    def _reserve(self) -> Reserve:
        return Reserve(self.placement.model, self.placement.unit_paths, self.optimizers, self.device)

    def _spare(self, calls: Sequence[Call], courses: Sequence[Course], reserve: Reserve) -> list[Mapping[str, int]]:
        """Return for each call of a step the further unit runs that memory is to be reserved for."""
        found = zip(courses, self.steps.spare(calls, courses), strict=True)
        return [reserve.completed(course, its) for course, its in found]

    def has_given_up(self, num_steps: int) -> bool:
        """Return, and log, whether recording stops because too many steps were recorded so far."""
        num_recorded, last = len(self.recorded_steps), self.steps.steps[-2:]
        if num_recorded < _MOST_RECORDED or 2 * num_recorded <= num_steps:
            return False
        self.warn_once(
            f"{num_recorded} of {num_steps} steps were recorded, since each differs from those before it "
            f"({(len(last) == 2 and difference(*last)) or 'what runs in it'}): steps that no plan covers run at their leanest "
            "from now on",
            key="no end",
        )
        return True

    def warn_once(self, text: str, *, key: str | None = None) -> None:
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            warn_user(f"recollect: {text}.", BudgetWarning)

    def _warn_of(self, peak_bytes: int, text: str, *, key: str) -> None:
        """Warn of a peak, unless one about as large was told of a step whose shapes are the same."""
        if peak_bytes > _MUCH_MORE * self._told_bytes.get(key, 0):
            self._told_bytes[key] = peak_bytes
            self.warn_once(text)

    def _planned(
        self,
        profile: Profile,
        calls: list[Call],
        courses: list[Course],
        budget: int | str,
        number: int,
        more_bytes: int = 0,
        ahead_bytes: int = 0,
    ) -> PlannedStep:
        """Return a recorded step with its plan, which has room for the extra work seen in other steps, and more if that fits.

        This is the leanest plan if none fits and it is not the first. A budget in percent is of the process that
        needs the most, or of each one's own device.
        """
        ranks, place, reserve = self.lockstep.ranks, Place.STEP_END, self._reserve
        held_before = profile.persistent_bytes + profile.last_step_bytes
        spare = self._spare(calls, courses, reserve)
        profile = reserve.with_state(profile)
        room = (reserve.room(profile, grouped(calls, spare)) or Room()).more(more_bytes + ahead_bytes)
        if self.host_bytes:  # Copies change what is alive between units.
            room = Room(room.most_bytes)
        roomy = with_room(profile, room.held_bytes)
        planner = planner_for(roomy, self.host_bytes, engine=self.engine)
        plain_bytes = max(ranks.gather(planner.plain_peak_bytes, place))
        budget_bytes = parse_budget(budget, reference_bytes=plain_bytes, device_bytes=profile.device_memory_bytes)
        own, problem = plan_with_room(roomy, room, budget_bytes, planner)
        problems = [found for found in ranks.gather(problem, place) if found is not None]
        if problems and ahead_bytes:
            return self._planned(profile, calls, courses, budget, number, more_bytes)
        if problems and not self.steps.steps:
            raise max(problems, key=lambda error: error.least_peak_bytes)
        known = {"plain_bytes": planner.plain_peak_bytes, "budget_bytes": budget_bytes}
        chosen, worst_slowdown = common_plan(roomy, own, **known, ranks=ranks, place=place, predicted=room.predicted)
        working_bytes = room.beyond(roomy, chosen)
        planned = PlannedStep(
            calls=calls,
            profile=with_room(profile, room.held_bytes + working_bytes),
            plan=chosen,
            budget_bytes=budget_bytes,
            plain_peak_bytes=planner.plain_peak_bytes + working_bytes,
            full_slowdown=classic_plan(profile, "full").predicted_slowdown or 0.0,
            number=number,
            worst_slowdown=worst_slowdown,
            courses=courses,
            spare=spare,
            more_bytes=more_bytes + ahead_bytes,
            state_bytes=reserve.optimizer_bytes(),
            held_before=held_before,
        )
        expect(planned)
        if not planned.fits:
            beside = f", {format_bytes(more_bytes)} of it as room for what other steps do or hold"
            self._warn_of(
                planned.peak_bytes,
                f"no plan fits a step of {calls[0]} into {format_bytes(planned.budget_bytes)}: it needs "
                f"{format_bytes(planned.peak_bytes)} at its leanest{beside if more_bytes else ''}, which is how it will run",
                key=str(calls[0]),
            )
        return planned
