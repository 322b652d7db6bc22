"""Room in a step's plan for unit runs that it lacks and others have.

They run at their leanest. Each holds its output and values without a recipe until its backward; one at a time has a
workspace besides. What a workspace adds to the peak depends on the plan: where layers recompute anyway, nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import BACKWARD, FORWARD
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, calls_on_tape, decide, decide_call, recompute_all_unit
from recollect.simulation.playback import Playback
from recollect.simulation.predicted import predicted_plan, simulated_plan
from recollect.simulation.program import Program
from recollect.simulation.simulate import run
from recollect.simulation.windows import edges_for, windows

_KIND = "units_of_other_steps"
"""Under this name the bytes count in a profile as alive throughout the step."""
# Plans are made with more and more room, the last with enough for any.
_MOST_PLANS = 3


@dataclass(frozen=True)
class Room:
    """Memory for further unit runs."""

    held_bytes: int = 0
    """What they hold together."""
    working_bytes: Mapping[int, int] = field(default_factory=dict)
    """For forward and backward, the largest workspace of one."""
    calls: Sequence[int] = ()
    """Those of the profile that they are like, and among which they run."""

    def more(self, nbytes: int) -> Room:
        return replace(self, held_bytes=self.held_bytes + nbytes)

    @property
    def most_bytes(self) -> int:
        """Enough for any plan."""
        return self.held_bytes + max(self.working_bytes.values(), default=0)

    def beyond(self, profile: Profile, plan: Plan) -> int:
        """Return by how much the peak is higher where a further unit works; `profile` has room for what they hold."""
        return self._beyond(_Levels(profile, decide(profile, plan))) if self.working_bytes else 0

    def predicted(self, held: Profile, plan: Plan) -> Plan:
        """Return the plan with the predictions for a step that has further units; `held` has room for what they hold."""
        if not self.working_bytes:
            return predicted_plan(held, plan)
        levels = _Levels(held, decide(held, plan))
        plan = simulated_plan(held, plan, levels.simulation)
        return replace(plan, predicted_peak_bytes=levels.simulation.peak_bytes + self._beyond(levels))

    def _beyond(self, levels: _Levels) -> int:
        tops = [levels.most_bytes(phase, self.calls) + nbytes for phase, nbytes in self.working_bytes.items()]
        return max(0, max(tops) + levels.profile.calibration_bytes - levels.simulation.peak_bytes)


def room_for(profile: Profile, held_bytes: int, calls: Sequence[int]) -> Room:
    """Return room for further unit runs that are like these calls, and hold so much."""
    decisions = decide(profile, Plan({}))
    for index in calls:
        graph = profile.graph_of(profile.calls[index])
        decisions[index] = decide_call(graph, recompute_all_unit(graph))
    levels = _Levels(profile, decisions)
    # The loss belongs to the last call.
    working_bytes = {
        phase: max(levels.rise_bytes(phase, index) for index in calls[:-1] or calls) for phase in (FORWARD, BACKWARD)
    }
    return Room(held_bytes, working_bytes, tuple(calls))


def with_room(profile: Profile, nbytes: int) -> Profile:
    persistent = {kind: its for kind, its in profile.persistent.items() if kind != _KIND}
    return replace(profile, persistent={**persistent, _KIND: nbytes} if nbytes else persistent)


def plan_with_room(
    held: Profile, room: Room, budget_bytes: int, planner: Planner
) -> tuple[Plan, BudgetTooSmallError | None]:
    """Plan a step with as little room for workspaces as its plan needs; predictions count it.

    `held`: the step's profile with room for what further units hold; `planner`: its planner. If no plan fits, this is the
    leanest one, with an error.
    """
    if not room.working_bytes:
        return planner.plan_or_leanest(budget_bytes)
    tried: list[Plan] = []
    spent_bytes, most_bytes = 0, room.most_bytes - room.held_bytes
    for number in range(1, _MOST_PLANS + 1):
        plan, problem = planner.plan_or_leanest(max(1, budget_bytes - spent_bytes))
        beyond_bytes = room.beyond(held, plan)
        tried.append(replace(plan, predicted_peak_bytes=(plan.predicted_peak_bytes or 0) + beyond_bytes))
        if _fits(tried[-1], budget_bytes) or problem is not None:
            break
        spent_bytes = min(beyond_bytes, most_bytes) if number < _MOST_PLANS - 1 else most_bytes
    if not _fits(tried[-1], budget_bytes) and not plan.is_compiled:
        tried.append(_leaner(held, room, tried[0], budget_bytes))
    fits = _fits(tried[-1], budget_bytes)
    bound = planner.bound_slowdown(budget_bytes) if fits else None
    return replace(tried[-1], budget_bytes=budget_bytes, bound_slowdown=bound), None if fits else problem


def _fits(plan: Plan, budget_bytes: int) -> bool:
    return (plan.predicted_peak_bytes or 0) <= budget_bytes


def _leaner(held: Profile, room: Room, plan: Plan, budget_bytes: int) -> Plan:
    """Drop all values of as few of the last units as it takes: less is then alive where further units run."""
    last = list({held.calls[call].path: call for call in room.calls}.items())[::-1]

    def dropped(number: int) -> Plan:
        units = dict(plan.units)
        for path, call in last[:number]:
            actions = recompute_all_unit(held.graph_of(held.calls[call])).actions
            units[path] = UnitPlan(actions, engine=units[path].engine if path in units else EngineChoice.TAPE)
        return room.predicted(held, replace(plan, units=units))

    return dropped(bisect_left(range(len(last)), True, key=lambda number: _fits(dropped(number), budget_bytes)))


class _Levels(Playback):
    """Plays a step, and notes what is alive where its calls begin in forward and backward."""

    def __init__(self, profile: Profile, decisions: list[CallActions]) -> None:
        program = Program(profile, windows(profile), edges_for(profile, decisions))
        super().__init__(program, dict(enumerate(decisions)), calls_on_tape(decisions))
        self._begin_bytes: list[int] = [self.alive_bytes]
        self.simulation = run(self)
        for (_, early), left_bytes in zip(self.early, self.simulation.left_bytes, strict=False):
            self._begin_bytes[: len(early)] = [nbytes + left_bytes for nbytes in self._begin_bytes[: len(early)]]

    def _end_window(self) -> None:
        super()._end_window()
        self._begin_bytes.append(self.alive_bytes)

    def most_bytes(self, phase: int, calls: Sequence[int]) -> int:
        """Return the most bytes alive before, between and after these calls."""
        among = range(min(calls), max(calls) + 1)
        numbers = [n for n, window in enumerate(self.program.windows) if window.phase == phase and window.call in among]
        return max(self._begin_bytes[min(numbers) : max(numbers) + 2], default=0) if numbers else 0

    def rise_bytes(self, phase: int, call: int) -> int:
        """Return by how much memory rises in a call."""
        numbers = [n for n, window in enumerate(self.program.windows) if (window.phase, window.call) == (phase, call)]
        begin_bytes = self._begin_bytes[min(numbers)] if numbers else 0
        return max((self.window_peaks[n] - begin_bytes for n in numbers), default=0)
