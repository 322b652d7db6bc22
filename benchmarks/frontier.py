"""Peak against step time, measured: recollect at many budgets, and its peers, on the reference Llama.

    python benchmarks/frontier.py

For each peer two plans are made: one whose budget is the peer's measured peak ("at equal peak, faster?"), and one that is
predicted to take the peer's time ("at equal time, smaller?"). Rules of the race: `contest.py`; what comes out: README.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environment import settle_allocator

if __name__ == "__main__":
    settle_allocator()

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes

import recollect
from contest import Contestant, Nothing, OnTape, Race, Replaced, percentile
from peers import PEERS
from picture import draw
from recollect import Plan, Profile
from recollect.errors import BudgetTooSmallError
from recollect.quantities import format_bytes
from results_csv import RESULTS, Number, append, machine_name
from subject import Step, StepFlags, first_difference

_NUM_BUDGETS = 32
_PLAIN = "no recompute"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Compare recollect's plans with what people set up by hand, at equal peak and at equal time."""

    step: OmitArgPrefixes[StepFlags] = field(default_factory=StepFlags)
    """The training step."""
    minutes: float = 4.0
    """Time for timed rounds; recording and measuring peaks comes on top."""
    least_rounds: int = 3
    """Rounds that are run even if the time is over, of each of the two races."""
    num_budgets: int = 6
    """Budgets of the frontier that are measured, besides those of the peers' peaks."""
    out: Path = RESULTS
    """Folder of the rows and the picture."""


@dataclass(eq=False, kw_only=True)
class Match:
    """A peer and recollect's answers to it. `too_small`: why there is no plan within the peer's peak."""

    peer: Contestant
    at_peak: Contestant | None = None
    at_time: Contestant | None = None
    too_small: str = ""


class Comparison:
    """The whole benchmark on one step."""

    def __init__(self, flags: Flags, console: Console) -> None:
        self.flags = flags
        self.console = console
        self.step = Step(flags.step)
        self.race = Race(self.step, lambda text: console.print(f"  {text}", style="dim"))
        self._expected = self.step.gradients()
        self.plain = self._measured(Contestant(name=_PLAIN, recompute=Nothing()))
        self._of_plan: dict[str, Contestant] = {}

    @property
    def recollect(self) -> list[Contestant]:
        """All contestants of recollect, the leanest first."""
        return sorted(self._of_plan.values(), key=lambda one: one.peak_bytes)

    def run(self) -> None:
        """Make the plans and run both races."""
        self._say("recording")
        profile = recollect.record(self.step.model, self.step.batch)
        self.plans = plans_at_all_budgets(profile)
        self._say("measuring peaks and gradients")
        self.matches = [self._match(profile, peer) for peer in self._peers()]
        groups = [[m.peer] if m.at_peak is None else [m.peer, m.at_peak] for m in self.matches]
        number = self.flags.num_budgets
        spread = [self.plans[round(i * (len(self.plans) - 1) / max(1, number - 1))] for i in range(number)]
        groups += [[one] for one in self._contestants(spread) if not any(one in group for group in groups)]
        self._run(groups, share=0.6)
        for match in self.matches:
            (match.at_time,) = self._contestants([self._plan_at_time(match.peer)])
        self._run([[m.peer, m.at_time] for m in self.matches if m.at_time is not None], share=0.4)

    def smallest_at_time(self, peer: Contestant) -> Contestant | None:
        """Return recollect's contestant with the least measured peak among those no slower than the peer.

        Slowdowns count as smoothed over neighbours in peak; else the plan that was luckiest would be the answer.
        """
        smooth = falling([one.slowdown for one in self.recollect])
        return next((one for one, slow in zip(self.recollect, smooth, strict=True) if slow <= peer.slowdown), None)

    def _say(self, text: str) -> None:
        self.console.print(f"{text} ...", style="bold")

    def _run(self, groups: list[list[Contestant]], *, share: float) -> None:
        seconds = 60 * self.flags.minutes * share
        self._say(f"timing {sum(map(len, groups))} contestants for {seconds:.0f} s")
        self.race.run(groups, seconds=seconds, least_rounds=self.flags.least_rounds)

    def _peers(self) -> list[Contestant]:
        layers = list(self.step.layers.values())
        found = [Contestant(name=peer.name, recompute=Replaced(peer.forwards(layers))) for peer in PEERS]
        return [self._measured(contestant) for contestant in found]

    def _match(self, profile: Profile, peer: Contestant) -> Match:
        try:
            plan = recollect.plan(profile, peer.peak_bytes)
        except BudgetTooSmallError as error:
            return Match(peer=peer, too_small=f"needs {format_bytes(error.least_peak_bytes)}")
        return Match(peer=peer, at_peak=self._contestants([plan])[0])

    def _contestants(self, plans: list[Plan]) -> list[Contestant]:
        """Put plans into the race, each once, however many budgets it is the answer to."""
        found = []
        for plan in plans:
            key = repr(sorted((path, sorted(unit.actions.items()), unit.output) for path, unit in plan.units.items()))
            if key not in self._of_plan:
                applied = recollect.apply(self.step.model, plan)
                name = f"recollect {plan.predicted_peak_bytes}"
                self._of_plan[key] = self._measured(Contestant(name=name, recompute=OnTape(applied), plan=plan))
            found.append(self._of_plan[key])
        return list(dict.fromkeys(found))

    def _measured(self, contestant: Contestant) -> Contestant:
        with contestant.recompute.on():
            contestant.differs_at = first_difference(self._expected, self.step.gradients())
            contestant.peak_bytes = self.step.peak_bytes()
        return contestant

    def _plan_at_time(self, peer: Contestant) -> Plan:
        """The leanest plan whose predicted slowdown, scaled by how predictions have turned out, is the peer's."""
        turned_out = [
            one.slowdown / one.plan.predicted_slowdown
            for one in self.recollect
            if one.ratios and one.plan is not None and (one.plan.predicted_slowdown or 0.0) > 0.02
        ]
        scale = max(statistics.median(turned_out), 0.1) if turned_out else 1.0
        within = [plan for plan in self.plans if scale * (plan.predicted_slowdown or 0.0) <= peer.slowdown]
        return min(within or self.plans[-1:], key=lambda plan: plan.predicted_peak_bytes or 0)


def falling(values: list[float]) -> list[float]:
    """Return the sequence that never rises and is closest to the values, by squares: means of neighbours that rise."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) < statistics.fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [statistics.fmean(block) for block in blocks for _ in block]


def plans_at_all_budgets(profile: Profile) -> list[Plan]:
    """Return plans for budgets from the least possible peak to that of the step without recompute, the leanest first."""
    try:
        least_bytes = recollect.plan(profile, 1).predicted_peak_bytes or 1
    except BudgetTooSmallError as error:
        least_bytes = error.least_peak_bytes
    most_bytes = recollect.classic_plan(profile, "keep_all").predicted_peak_bytes or least_bytes
    step_bytes = (most_bytes - least_bytes) / (_NUM_BUDGETS - 1)
    budgets = [least_bytes, *(least_bytes + round(step_bytes * i) for i in range(1, _NUM_BUDGETS - 1)), most_bytes]
    return [recollect.plan(profile, budget) for budget in budgets]


def contestants_table(found: Comparison) -> Table:
    """Everybody, the leanest first."""
    table = Table(title=f"Step of {found.flags.step}: absolute peak and slowdown", title_justify="left")
    for name in ("", "peak", "predicted", "slowdown", "p20 .. p80", "predicted", "gradients"):
        table.add_column(name, justify="left" if name in ("", "gradients") else "right")
    everybody = [*(m.peer for m in found.matches), *found.recollect]
    table.add_row(_PLAIN, format_bytes(found.plain.peak_bytes), "", "0.0 %", "", "", "")
    for one in sorted(everybody, key=lambda one: one.peak_bytes):
        plan = one.plan
        table.add_row(
            one.name.split()[0] if plan else one.name,
            format_bytes(one.peak_bytes),
            format_bytes(plan.predicted_peak_bytes or 0) if plan else "",
            f"{one.slowdown:.1%}",
            f"{one.percentile(20):.1%} .. {one.percentile(80):.1%}",
            f"{plan.predicted_slowdown or 0:.1%}" if plan else "",
            f"differ at {one.differs_at}" if one.differs_at else "equal",
            style="" if plan else "bold",
        )
    return table


def matches_table(found: Comparison) -> Table:
    """Each peer against recollect at its peak and at its time."""
    table = Table(title="Each peer against recollect", title_justify="left")
    table.add_column("peer")
    for name in ("peak", "slowdown", "at its peak: peak", "slowdown", "step time", "at its time: peak", "slowdown"):
        table.add_column(name, justify="right")
    table.add_column("less parameters", justify="right")
    for match in found.matches:
        peer, smallest = match.peer, found.smallest_at_time(match.peer)
        row = [peer.name, format_bytes(peer.peak_bytes), f"{peer.slowdown:.1%}"]
        if match.at_peak is None:
            row += [match.too_small, "", ""]
        else:
            ratio = percentile(match.at_peak.time_ratios_to(peer), 50)
            row += [format_bytes(match.at_peak.peak_bytes), f"{match.at_peak.slowdown:.1%}", f"{ratio - 1:+.1%}"]
        if smallest is None:
            row += ["none", "", ""]
        else:
            row += [format_bytes(smallest.peak_bytes), f"{smallest.slowdown:.1%}"]
            row += [f"{_ratio_above_resident(found, smallest, peer) - 1:+.1%}"]
        table.add_row(*row)
    return table


def _ratio_above_resident(found: Comparison, one: Contestant, other: Contestant) -> float:
    """Compare what lies above parameters and batch, which are the same for all."""
    resident_bytes = found.step.resident_bytes
    return (one.peak_bytes - resident_bytes) / (other.peak_bytes - resident_bytes)


def numbers(found: Comparison) -> list[Number]:
    """All results as rows."""
    rows = [
        Number("step_time", "s", _PLAIN, statistics.median(found.race.plain_s)),
        Number("peak", "bytes", _PLAIN, found.plain.peak_bytes),
        Number("resident", "bytes", _PLAIN, found.step.resident_bytes),
    ]
    for one in [*(m.peer for m in found.matches), *found.recollect]:
        rows += [Number("peak", "bytes", one.name, one.peak_bytes), Number("slowdown", "1", one.name, one.slowdown)]
        rows += [Number(f"slowdown_p{p}", "1", one.name, one.percentile(p)) for p in (20, 80)]
        rows += [Number("rounds", "1", one.name, len(one.ratios))]
        rows += [Number("gradients_equal", "bool", one.name, int(one.differs_at is None))]
        if one.plan is not None:
            rows += [Number("predicted_peak", "bytes", one.name, one.plan.predicted_peak_bytes or 0)]
            rows += [Number("predicted_slowdown", "1", one.name, one.plan.predicted_slowdown or 0.0)]
    for match in found.matches:
        name, smallest = match.peer.name, found.smallest_at_time(match.peer)
        if match.at_peak is not None:
            ratios = match.at_peak.time_ratios_to(match.peer)
            rows += [Number("recollect_peak_at_equal_peak", "bytes", name, match.at_peak.peak_bytes)]
            rows += [Number("recollect_time_ratio_at_equal_peak", "1", name, percentile(ratios, 50))]
        if smallest is not None:
            rows += [Number("recollect_peak_at_equal_time", "bytes", name, smallest.peak_bytes)]
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark with the flags of the command line."""
    flags = tyro.cli(Flags, args=arguments, description=__doc__)
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = Comparison(flags, console)
    found.run()
    console.print(contestants_table(found))
    console.print(matches_table(found))
    config: dict[str, Any] = dataclasses.asdict(flags.step)
    append(flags.out / "frontier.csv", numbers(found), config)
    machine = machine_name(flags.step.device)
    sizes = flags.step
    name = f"frontier-{sizes.device.partition(':')[0]}-{sizes.dtype}-d{sizes.hidden_size}-l{sizes.num_layers}.png"
    draw(
        found,
        flags.out / name,
        title=str(flags.step),
        note=f"reference Llama, eager, PyTorch {torch.__version__}, {machine}",
    )
    console.print(f"appended to {flags.out / 'frontier.csv'}, drawn to {flags.out / name}", soft_wrap=True)


if __name__ == "__main__":
    main()
