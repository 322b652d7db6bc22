"""Compare predicted with measured slowdowns: 14 models, four budgets, on the tape and from traces.

    python benchmarks/step_times.py

Each step is recorded once. Its plans then take turns, each between two steps without a plan; a measured slowdown is the median
over rounds. Step times are said as parts of the step without a plan. That step itself takes two turns as well: no prediction
can come closer.
"""

from __future__ import annotations

import dataclasses
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, get_args

from rich.console import Console
from rich.table import Table

import recollect
from contest import Contestant
from flags import RunFlags, parse
from models import ModelName
from recollect.errors import BudgetTooSmallError
from recollect.lab.bench.race import Race, few_objects, keep_freed_memory
from recollect.planning.planners import planner_for
from recompute import Nothing, SwitchablePlan
from results_csv import Number, append
from subject import Step, StepFlags

Engine = Literal["tape", "graph"]

# In its first steps a plan looks closer: it compares content, learns which modules to watch, and traces layers.
_UNSETTLED = 4
_NEAR = 0.03
_ITSELF = "no plan"


@dataclass(frozen=True, kw_only=True)
class Flags(RunFlags):
    """Compare predicted with measured slowdowns."""

    step: StepFlags = field(default_factory=lambda: StepFlags(hidden_size=256, num_layers=4, threads=1))
    """The training step."""
    models: tuple[ModelName, ...] = get_args(ModelName)
    """Models to run."""
    engines: tuple[Engine, ...] = get_args(Engine)
    """Engines to plan for."""
    budgets: tuple[float, ...] = (0.05, 0.3, 0.6, 0.85)
    """Budgets, as fractions of the range from the least peak to keeping everything."""
    least_rounds: int = 9
    """Rounds of all plans."""


@dataclass(frozen=True)
class Timed:
    """One plan: predicted and measured slowdown, and between which of them the plan says that nine of ten are."""

    name: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def off(self) -> float:
        """By how much the measured slowdown is larger."""
        return self.measured - self.predicted

    @property
    def is_within(self) -> bool:
        """Whether it is in the range."""
        return self.low <= self.measured <= self.high


def plans_for(
    profile: recollect.Profile, budgets: tuple[float, ...], engine: Engine = "tape"
) -> dict[str, recollect.Plan]:
    """Return a plan for each budget, by name."""
    planner = planner_for(profile, engine=engine)
    try:
        least_bytes = planner.plan(1).predicted_peak_bytes or 0
    except BudgetTooSmallError as error:
        least_bytes = error.least_peak_bytes
    span = planner.plain_peak_bytes - least_bytes
    return {f"{part:.0%}": planner.plan(round(least_bytes + part * span)) for part in budgets}


@few_objects()
def run_model(flags: Flags, model: ModelName) -> list[Timed]:
    """Record, plan and time one model."""
    step = Step(flags.step, model)
    for _ in range(_UNSETTLED):  # Memory that is touched for the first time makes each op slower.
        step.seconds()
    profile = step.record("graph" if "graph" in flags.engines else "tape")
    plans = {
        f"{engine}, {name}": plan
        for engine in flags.engines
        for name, plan in plans_for(profile, flags.budgets, engine).items()
    }
    with ExitStack() as stack:
        ways = []
        for name, plan in plans.items():
            switched = SwitchablePlan(stack.enter_context(recollect.apply(step.model, plan)))
            with switched.on():
                for _ in range(_UNSETTLED):
                    step.seconds()
            ways.append(Contestant(name=name, recompute=switched, plan=plan))
        ways += [Contestant(name=f"{_ITSELF}, {turn}", recompute=Nothing()) for turn in ("once", "again")]

        def seconds(way: Contestant) -> float:
            with way.recompute.on():
                return step.seconds()

        race: Race[Contestant] = Race(step.seconds, seconds, report=lambda _: None, seed=flags.step.seed)
        race.run([[way] for way in ways], seconds=0, least_rounds=flags.least_rounds)
    return [_timed(way) for way in ways]


def _timed(way: Contestant) -> Timed:
    plan = way.plan
    if plan is None:
        return Timed(way.name, 0.0, way.slowdown, 0.0, 0.0)
    predicted = plan.predicted_slowdown or 0.0
    low, high = plan.slowdown_range or (predicted, predicted)
    return Timed(way.name, predicted, way.slowdown, low, high)


def report(found: list[Timed], title: str) -> Table:
    """Format the results of one model."""
    table = Table(title=title, title_justify="left")
    for heading in ("plan", "predicted", "range", "measured", "off"):
        table.add_column(heading, justify="right")
    for t in found:
        between = f"{t.low:.1%} to {t.high:.1%}"
        table.add_row(t.name, f"{t.predicted:.1%}", between, f"{t.measured:.1%}", f"{100 * t.off:+.1f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    console = Console()
    of_engine: dict[str, list[Timed]] = {engine: [] for engine in (*flags.engines, _ITSELF)}
    for model in flags.models:
        found = run_model(flags, model)
        for engine, timed in of_engine.items():
            timed += [t for t in found if t.name.startswith(engine)]
        numbers = [
            Number(metric, "1", f"{model}, {t.name}", value)
            for t in found
            for metric, value in (("predicted_slowdown", t.predicted), ("measured_slowdown", t.measured))
        ]
        append(flags.out / "step_times.csv", numbers, {**dataclasses.asdict(flags.step), "rounds": flags.least_rounds})
        console.print(report(found, f"{model}: {flags.step}"))
    for engine, timed in of_engine.items():
        off = [abs(t.off) for t in timed]
        in_range = "" if engine == _ITSELF else f", {sum(t.is_within for t in timed)} within the range of their plans"
        console.print(
            f"{engine}: off by {100 * statistics.median(off):.1f} points of the step in the median, {100 * max(off):.1f} at "
            f"most; {sum(one <= _NEAR for one in off)} of {len(off)} within {100 * _NEAR:.0f}{in_range}"
        )


if __name__ == "__main__":
    main()
