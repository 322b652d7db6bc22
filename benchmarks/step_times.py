"""Compare predicted with measured step times: five models, budgets from the least peak to keeping everything.

    python benchmarks/step_times.py

Each step is recorded once; then the plans take turns for some rounds. A predicted step time is that of the recorded step
without recompute, times one plus the slowdown that is predicted of the plan.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

import recollect
from flags import RunFlags, parse
from models import HUGGING_FACE, ModelName
from recollect.errors import BudgetTooSmallError
from recollect.lab.bench.race import few_objects, keep_freed_memory
from recollect.planning.choose import Planner
from results_csv import Number, append
from subject import Step, StepFlags

KEEP_ALL, _FULL = "keep all", "full"
# In its first steps a plan looks closer: it compares content, and learns which modules to watch.
_UNSETTLED = 3


@dataclass(frozen=True, kw_only=True)
class Flags(RunFlags):
    """Compare predicted with measured step times."""

    step: StepFlags = field(default_factory=lambda: StepFlags(hidden_size=256, num_layers=4))
    """The training step."""
    models: tuple[ModelName, ...] = ("reference", *HUGGING_FACE, "gpt2")
    """Models to run."""
    budgets: tuple[float, ...] = (0.02, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
    """Budgets, as fractions of the range from the least peak to keeping everything."""
    least_rounds: int = 9
    """Rounds of all plans."""


@dataclass(frozen=True)
class Timed:
    """One plan: predicted and measured seconds of a step, and slowdowns."""

    name: str
    predicted_s: float
    measured_s: float
    predicted_slowdown: float
    measured_slowdown: float

    @property
    def off(self) -> float:
        """Relative error of the predicted step time."""
        return self.predicted_s / self.measured_s - 1


def plans_for(profile: recollect.Profile, budgets: tuple[float, ...]) -> dict[str, recollect.Plan]:
    """Return plans by name: keep all, full recompute, and one for each budget."""
    planner = Planner(profile)
    try:
        least_bytes = planner.plan(1).predicted_peak_bytes or 0
    except BudgetTooSmallError as error:
        least_bytes = error.least_peak_bytes
    most_bytes = planner.plain_peak_bytes
    plans = {name: recollect.classic_plan(profile, kind) for name, kind in ((KEEP_ALL, "keep_all"), (_FULL, "full"))}
    return plans | {f"{b:.0%}": planner.plan(round(least_bytes + b * (most_bytes - least_bytes))) for b in budgets}


@few_objects()
def run_model(flags: Flags, model: ModelName) -> list[Timed]:
    """Record, plan and time one model."""
    step = Step(flags.step, model)
    for _ in range(_UNSETTLED):  # Memory that is touched for the first time makes each op slower.
        step.seconds()
    profile = step.record()
    plans = plans_for(profile, flags.budgets)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(flags.least_rounds):
        for name, plan in plans.items():
            with recollect.apply(step.model, plan):
                for _ in range(_UNSETTLED):
                    step.seconds()
                seconds[name].append(step.seconds())
    found = []
    for name, plan in plans.items():
        slowdown = plan.predicted_slowdown or 0.0
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[KEEP_ALL], strict=True))
        measured_s = statistics.median(seconds[name])
        found.append(Timed(name, profile.step_s * (1 + slowdown), measured_s, slowdown, ratio - 1))
    return found


def report(found: list[Timed], title: str) -> Table:
    """Format the results of one model."""
    table = Table(title=title, title_justify="left")
    for heading in ("budget", "predicted", "measured", "off", "predicted slowdown", "measured slowdown"):
        table.add_column(heading, justify="right")
    for t in found:
        times = f"{1e3 * t.predicted_s:.0f} ms", f"{1e3 * t.measured_s:.0f} ms", f"{t.off:+.1%}"
        table.add_row(t.name, *times, f"{t.predicted_slowdown:.1%}", f"{t.measured_slowdown:.1%}")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = parse(Flags, __doc__, arguments)
    keep_freed_memory()
    console = Console()
    off: list[float] = []
    off_slowdown: list[float] = []
    for model in flags.models:
        found = run_model(flags, model)
        off += [abs(t.off) for t in found]
        off_slowdown += [abs(t.predicted_slowdown - t.measured_slowdown) for t in found]
        numbers = [
            Number(metric, unit, f"{model}, {t.name}", value)
            for t in found
            for metric, unit, value in (
                ("predicted_step_time", "s", t.predicted_s),
                ("measured_step_time", "s", t.measured_s),
                ("predicted_slowdown", "1", t.predicted_slowdown),
                ("measured_slowdown", "1", t.measured_slowdown),
            )
        ]
        append(flags.out / "step_times.csv", numbers, {**dataclasses.asdict(flags.step), "rounds": flags.least_rounds})
        console.print(report(found, f"{model}: {flags.step}"))
    worst = max(off)
    console.print(f"step times off by {statistics.median(off):.1%} in the median, {worst:.1%} at most; ", end="")
    console.print(f"slowdowns by {100 * statistics.median(off_slowdown):.1f} percentage points in the median")


if __name__ == "__main__":
    main()
