"""Compare recollect with its peers on one model: make plans, measure peaks and gradients, race at equal peak and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from contest import Contestant, Race, percentile, reason
from megatron_peers import megatron_peers
from milp import milp_peers
from models import ModelName
from peers import Peer, layer_peers
from recollect import Plan, apply
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recompute import Nothing, SwitchablePlan
from subject import Step, StepFlags, first_difference, largest_difference

FRACTIONS = (0.75, 0.5, 0.35, 0.25, 0.15)
PLAIN = "no recompute"


@dataclass(eq=False, kw_only=True)
class Match:
    """A peer and the plan whose budget is the peer's measured peak.

    Attributes:
        failure: why the peer could not run; it has no contestant then.
        least_bytes: the least peak that recollect finds, where that is above the peer's.
    """

    peer: Peer
    contestant: Contestant | None = None
    ours: Contestant | None = None
    failure: str = ""
    least_bytes: int = 0


@dataclass(eq=False, kw_only=True)
class BudgetMatch:
    """A budget, its plan, and the fastest peer within it, if any."""

    fraction: float
    budget_bytes: int
    ours: Contestant | None = None
    rival: Contestant | None = None
    least_bytes: int = 0


class Comparison:
    """The comparison of one model."""

    def __init__(self, flags: StepFlags, model: ModelName, say: Callable[[str], None]) -> None:
        self.say = say
        self.step = Step(flags, model)
        self.race = Race(self.step, lambda text: say(f"  {text}"))
        self._expected = self.step.gradients()
        self.plain = self._measured(Contestant(name=PLAIN, recompute=Nothing()))
        self._of_plan: dict[str, Contestant] = {}
        self.matches: list[Match] = []
        self.budgets: list[BudgetMatch] = []
        self.plans: list[Plan] = []
        self.num_over_budget = 0

    @property
    def activation_bytes(self) -> int:
        """Activations of the step without recompute: its peak minus parameters, gradients, buffers and batch."""
        return self.plain.peak_bytes - self.step.resident_bytes

    @property
    def recollect(self) -> list[Contestant]:
        """All contestants of recollect, leanest first."""
        return sorted(self._of_plan.values(), key=lambda one: one.peak_bytes)

    @property
    def peers(self) -> list[Contestant]:
        """All peers that run."""
        return [match.contestant for match in self.matches if match.contestant is not None]

    def prepare(self, names: Sequence[str] = (), *, peers: Sequence[Peer] | None = None, num_budgets: int) -> None:
        """Make all plans, and measure all peaks and gradients; Ctrl+C ends the benchmark, unlike in the race.

        Args:
            names: of the peers to run; all if empty.
            peers: instead of those that there are.
            num_budgets: budgets that are measured besides the others.
        """
        self.say("recording")
        self._planner = Planner(self.step.record())
        self.say("measuring peaks and gradients")
        self.budgets = [self._budget(fraction) for fraction in FRACTIONS]
        chosen = self._all_peers() if peers is None else peers
        self.matches = [self._match(peer) for peer in chosen if not names or peer.name in names]
        least_bytes = min((one.peak_bytes for one in self.recollect), default=self.plain.peak_bytes)
        step_bytes = (self.plain.peak_bytes - least_bytes) / max(1, num_budgets)
        for i in range(num_budgets):
            self._ours(least_bytes + round(i * step_bytes))

    def run(self, *, seconds: float, least_rounds: int) -> None:
        """Race each peer against the plan at its peak, and then the best peer within each budget against the plan."""
        pairs = [[one for one in (m.contestant, m.ours) if one is not None] for m in self.matches]
        groups = [pair for pair in pairs if pair]
        groups += [[one] for one in self.recollect if not any(one in group for group in groups)]
        self.say(f"timing {sum(map(len, groups))} contestants for {0.75 * seconds:.0f} s")
        self.race.run(groups, seconds=0.75 * seconds, least_rounds=least_rounds)
        for budget in self.budgets:
            within = [one for one in self.peers if one.peak_bytes <= budget.budget_bytes and one.ratios]
            budget.rival = min(within, key=lambda one: one.slowdown, default=None)
        finals = [[b.rival, b.ours] for b in self.budgets if b.rival is not None and b.ours is not None]
        self.say(f"timing the best peer within each budget for {0.25 * seconds:.0f} s")
        self.race.run(finals, seconds=0.25 * seconds, least_rounds=least_rounds)

    def smallest_at_time(self, peer: Contestant) -> Contestant | None:
        """Return recollect's contestant with the lowest measured peak among those no slower than the peer.

        Slowdowns count as smoothed over neighbours in peak; else the plan that was luckiest would be the answer.
        """
        ours = [one for one in self.recollect if one.ratios]
        smooth = falling([one.slowdown for one in ours])
        return next((one for one, slow in zip(ours, smooth, strict=True) if slow <= peer.slowdown), None)

    def standing(self) -> tuple[int, int, int]:
        """Count the peers that are slower than, equal to (within the spread), and faster than the plan of the same peak."""
        ratios = [
            match.ours.time_ratios_to(match.contestant)
            for match in self.matches
            if match.ours is not None and match.contestant is not None
        ]
        spreads = [(percentile(one, 20), percentile(one, 80)) for one in ratios if one]
        ahead, behind = (sum(high < 1 for _, high in spreads), sum(low > 1 for low, _ in spreads))
        return ahead, len(spreads) - ahead - behind, behind

    def _all_peers(self) -> list[Peer]:
        budgets_bytes = [budget.budget_bytes for budget in self.budgets]
        milp = milp_peers(self.step, budgets_bytes, FRACTIONS)
        return [*layer_peers(self.step), *megatron_peers(self.step), *milp]

    def _budget(self, fraction: float) -> BudgetMatch:
        budget_bytes = self.step.resident_bytes + round(fraction * self.activation_bytes)
        ours, least_bytes = self._ours(budget_bytes)
        return BudgetMatch(fraction=fraction, budget_bytes=budget_bytes, ours=ours, least_bytes=least_bytes)

    def _match(self, peer: Peer) -> Match:
        # A peer's error is a result; the others are still measured.
        try:
            contestant = self._measured(Contestant(name=peer.name, recompute=peer.recompute(self.step)))
        except Exception as error:
            self.say(f"  {peer.name}: {type(error).__name__}: {error}")
            return Match(peer=peer, failure=reason(error))
        ours, least_bytes = self._ours(contestant.peak_bytes)
        return Match(peer=peer, contestant=contestant, ours=ours, least_bytes=least_bytes)

    def _ours(self, budget_bytes: int) -> tuple[Contestant | None, int]:
        """Add the plan for a budget to the race, once even if it serves several budgets."""
        try:
            plan = self._planner.plan(budget_bytes)
        except BudgetTooSmallError as error:
            return None, error.least_peak_bytes
        self.plans.append(plan)
        key = repr(sorted((path, sorted(unit.actions.items()), unit.output) for path, unit in plan.units.items()))
        if key not in self._of_plan:
            applied = apply(self.step.model, plan)
            name = f"recollect {plan.predicted_peak_bytes}"
            contestant = self._measured(Contestant(name=name, recompute=SwitchablePlan(applied), plan=plan))
            self._of_plan[key] = contestant
        found = self._of_plan[key]
        if found.peak_bytes > budget_bytes:
            self.say(f"  OVER BUDGET: {found.name} peaks at {found.peak_bytes} bytes, its budget is {budget_bytes}")
            self.num_over_budget += 1
        return found, 0

    def _measured(self, contestant: Contestant) -> Contestant:
        with contestant.recompute.on(), _clean_failure(self.step):
            got = self.step.gradients(copied=False)
            contestant.differs_at = first_difference(self._expected, got)
            contestant.difference = largest_difference(self._expected, got)
            del got
            contestant.peak_bytes = self.step.peak_bytes()
        return contestant


@contextmanager
def _clean_failure(step: Step) -> Iterator[None]:
    """Free the graph held by an error's traceback, which would count in the next measurement."""
    try:
        yield
    except Exception as error:
        step.clear()
        raise error.with_traceback(None) from None


def falling(values: Sequence[float]) -> list[float]:
    """Return the non-increasing sequence closest to the values in least squares, by pooling neighbours that rise."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and _mean(blocks[-2]) < _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [_mean(block) for block in blocks for _ in block]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
