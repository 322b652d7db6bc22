"""Make the plan for a budget for units that run from traces, or for some of them that stay on the tape."""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, Literal

from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.planning.clocked_planner import tape_planner
from recollect.planning.output_choices import keeping_outputs
from recollect.plans.action import Action, EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import PEEK
from recollect.profile.graph import UnitGraph
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.programs.unit import cut_unit
from recollect.simulation.decisions import decide_call
from recollect.simulation.predicted import predicted_plan

# Under "auto", a plan from traces has to be faster than one on the tape by this fraction of the step.
_LITTLE_GAIN: Final = 0.01
# How often to plan for a smaller budget, if a plan takes more memory from traces than on the tape.
_MOST_ROUNDS: Final = 8


def traced_where_known(profile: Profile, plan: Plan) -> Plan:
    """Make a plan's units run from traces: those that were traced, or, without traces in the profile, all that can."""
    graphs = {call.path: profile.graph_of(call) for call in profile.calls}
    units = plan.with_engine("graph").units
    # The tape tells of what a layer computes whose modules did not run when it was recorded.
    skips = {path for path, unit in plan.units.items() if unit.may_be_of_a_skip}
    knows = _knows_traces(profile)
    stay = skips | {path for path in graphs.keys() & units if knows and not _is_traced(graphs[path], units[path])}
    dropped = {path for path, unit in plan.units.items() if unit.output is Action.RECOMPUTE}
    # What reads a dropped output runs on the tape.
    stay.update(c.path for c in profile.calls if any(profile.calls[at].path in dropped for _, at, _ in c.origins))
    return replace(plan, units={path: plan.units[path] if path in stay else units[path] for path in units})


def _is_traced(graph: UnitGraph, unit: UnitPlan) -> bool:
    """Whether a unit was traced, and can run again from its trace what its plan drops."""
    recomputed = decide_call(graph, unit).values.recomputed
    return graph.joint is not None and not (unit.recomputes_anything and cut_unit(graph, recomputed) is None)


def _why_on_tape(graph: UnitGraph, unit: UnitPlan) -> str:
    if graph.joint is not None and not _is_traced(graph, unit):
        return "a trace cannot run again all that the plan drops"
    return graph.why_not_traced or "no plan found with all from traces fits the budget"


def _knows_traces(profile: Profile) -> bool:
    return any(graph.joint is not None or graph.why_not_traced for graph in profile.graphs)


class TracePlanner(Planner):
    """Plans one profile for units that run from traces: all that can, or under "auto" those where the tape's work matters."""

    def __init__(self, profile: Profile, engine: Literal["auto", "graph"]) -> None:
        super().__init__(profile)
        self._engine = engine
        self._on_tape = tape_planner(profile)

    @cached_property
    def _keeping(self) -> Planner:
        return tape_planner(_without_tape(keeping_outputs(self.profile)))

    def bound_slowdown(self, budget_bytes: int) -> float | None:
        return self._on_tape.bound_slowdown(budget_bytes)

    def plan(self, budget: int | str) -> Plan:
        own = self._on_tape.plan(budget) if self._engine == "auto" else None
        # If a backward keeps its graph for a second one, as in halves, a trace runs all of it in each.
        if own is not None and any(True for _ in self.profile.log.operands(PEEK)):
            return own
        try:
            found = self._keeping.plan(budget)
        except BudgetTooSmallError:
            found = own or self._on_tape.plan(budget)
        traced = self._traced(found)
        if own is None:
            return self._noted(traced)
        gain = (own.predicted_slowdown or 0.0) - (traced.predicted_slowdown or 0.0)
        return traced if gain > _LITTLE_GAIN else own

    def _noted(self, made: Plan) -> Plan:
        """Note in a plan how many layers do not run from traces, and why."""
        layers = {call.path: self.profile.graph_of(call) for call in self.profile.calls if call.repeated}
        planned = [path for path, unit in made.units.items() if path in layers and unit.recomputes_anything]
        on_tape = [path for path in planned if made.units[path].engine is EngineChoice.TAPE]
        reasons = Counter(_why_on_tape(layers[path], made.units[path]) for path in on_tape)
        notes = [f"{count} of {len(planned)} layers run on the tape: {reason}" for reason, count in reasons.items()]
        return made.with_note("; ".join(filter(None, (made.note, *notes))))

    def _traced(self, found: Plan) -> Plan:
        """Return a plan whose units, or as many as fit, run from traces, within its budget as well as on the tape."""
        budget, first = found.budget_bytes or 0, found
        # Without traces in the profile, the tape's bytes are the prediction, and not its times.
        profile = self.profile if _knows_traces(self.profile) else _without_tape(self.profile)
        for _ in range(_MOST_ROUNDS):
            traced = predicted_plan(profile, traced_where_known(profile, found))
            excess = (traced.predicted_peak_bytes or 0) - budget
            if excess <= 0:
                return self._finished(traced, budget)
            try:
                # Of what the plan takes: its budget may be so much larger that less of it makes the same plan.
                found = self._keeping.plan(max(0, (found.predicted_peak_bytes or 0) - excess))
            except BudgetTooSmallError:
                break
        on_tape = self._on_tape.plan(budget)
        plans = [first, on_tape] if first.units != on_tape.units else [on_tape]
        mixed = [_as_far_as_it_fits(profile, plan, budget) for plan in plans]
        faster = min(mixed, key=lambda plan: plan.predicted_slowdown or 0.0)
        return self._finished(faster, budget) if faster.units != on_tape.units else on_tape

    def _finished(self, traced: Plan, budget_bytes: int) -> Plan:
        # The bound counts the tape's own work.
        return replace(traced, budget_bytes=budget_bytes, bound_slowdown=None, source=weakref.ref(self.profile))


def _as_far_as_it_fits(profile: Profile, plan: Plan, budget_bytes: int) -> Plan:
    """Make those units of a plan on the tape run from traces that still fit: all, else as many of each half as do.

    Units of one graph are not tried one by one if neither the first nor the last of them fits.
    """
    units = traced_where_known(profile, plan).units
    graphs = {call.path: call.graph for call in profile.calls}

    def fitting(paths: Sequence[str], made: Plan) -> Plan | None:
        more = predicted_plan(profile, replace(made, units={**made.units, **{path: units[path] for path in paths}}))
        return more if (more.predicted_peak_bytes or 0) <= budget_bytes else None

    def with_traces_of(paths: Sequence[str], made: Plan) -> Plan:
        if not paths:
            return made
        if (found := fitting(paths, made)) is not None:
            return found
        are_alike = len({graphs[path] for path in paths}) == 1
        if len(paths) == 1 or (are_alike and not any(fitting([path], made) for path in {paths[0], paths[-1]})):
            return made
        half = len(paths) // 2
        return with_traces_of(paths[half:], with_traces_of(paths[:half], made))

    paths = [path for path, unit in units.items() if unit != plan.units[path]]
    return with_traces_of(sorted(paths, key=graphs.__getitem__), predicted_plan(profile, plan))


def _without_tape(profile: Profile) -> Profile:
    """Return the profile of a step whose units run from traces: an op that runs again is issued as in forward."""
    host = profile.host or HostTimes()
    again_op_s, unit_s = host.forward_op_s, host.traced_unit_s
    graphs = (replace(g, tape_s=unit_s, module_tape_s=(), again_op_s=again_op_s) for g in profile.graphs)
    return replace(profile, graphs=tuple(graphs), host=replace(host, again_op_s=again_op_s))
