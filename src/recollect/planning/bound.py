"""How fast a plan within a budget can be at best: a lower bound on the recompute of any plan, from prices and minimum cuts.

At every moment e of the step (`planning/checkpoint_times.py`) a plan within the budget B has

    fixed_e + kept_e <= B       fixed_e: what every plan has alive; kept_e: what this one has in memory beside it

so at any prices lambda_e >= 0 its recompute is at least

    L(lambda) = cut(lambda) + sum of lambda_e * (fixed_e - B)
    cut(lambda) = least recompute + sum of lambda_e * kept_e, over all choices for the whole step (`planning/cheapest_step.py`)

Every lambda gives a bound. The highest is found by cutting planes: each cut comes with a choice, and L is nowhere above what
that choice costs, which is linear in lambda. The highest point under all known planes is a small linear program; at its prices
the next cut is made. L has finitely many planes, so this ends, and soon: after 5 to 40 cuts for the first budget, 1 to 10
for each one after it, as the planes are the same for every budget. How exactly the program was solved only decides which
prices are tried, not whether what is returned is a bound.

"Any plan" means: keep or recompute, value by value, or hold as parts what the profile knows to be the same on all ranks; unit
outputs dropped or not, each op running again at most once, and what it computed or gathered staying as long as backward has
still to ask for it, as on the tape; for the ops and the order of the recorded step. It does not hold for what changes the step
itself: offload, another micro-batch, a chunked loss, ops that are replaced by others.

References:
    J. E. Kelley, "The cutting-plane method for solving convex programs", Journal of the SIAM 8(4), 1960.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from recollect.planning.cheapest_step import CheapestStep, StepChoice, StepCut
from recollect.planning.checkpoint_times import checkpoint_times
from recollect.plans.engines import Tape
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Link, event_times

# Part of a number that its last digits may be wrong by, where many are added up.
_ROUNDING = 1e-12
# Part of the bound by which a plan may be below it before that is an error.
_SAFETY = 1e-6
# Cutting planes stop when they cannot raise the bound by this part of it, or of the step's recompute, any more.
_GAP = 1e-6
_LEAST_GAP = 1e-10
# Cuts are as precise as this part of what can still be gained.
_PRECISION = 0.01
_MOST_CUTS = 200
# Most that all prices together may be, in units of "all that can run again for all bytes that can be kept". Low prices
# are tried first: they lead to useful choices sooner. The last ones show that not even recomputing everything fits.
_MOST_PRICES = (3.0, 1e3, 1e6)


class Steps(Protocol):
    """The cheapest choices of a step at any prices of its moments; see `CheapestStep`."""

    @property
    def most_s(self) -> float:
        """Seconds of recompute if all runs again."""

    def everything_kept(self) -> StepChoice:
        """Return the choice that runs nothing again."""

    def at(self, prices: NDArray[np.float64], *, missing_s: float = 0.0) -> StepCut:
        """Return the cheapest choice at some prices."""


class LowerBound:
    """The bound of one profile, for any number of budgets.

    Args:
        profile: the recorded step.
        steps: its cheapest choices, for who knows more of the step; by default each call of a unit decides by itself.
        fixed_bytes: what every plan has alive at the moments of `steps`.

    Complexity: a minimum cut and a small linear program, a few times per budget (80 layers: 0.02 s each).

    Example:
        >>> from recollect.profile.events import ALLOC, FREE, StepLog
        >>> step = StepLog(blocks=(((ALLOC, 0, 512), (FREE, 0)),), sequence=((0, -1),))
        >>> bound = LowerBound(Profile((), (), step, step_s=1.0))
        >>> bound.recompute_s(512), bound.recompute_s(511)
        (0.0, inf)
    """

    def __init__(
        self, profile: Profile, *, steps: Steps | None = None, fixed_bytes: NDArray[np.int64] | None = None
    ) -> None:
        self._profile = profile
        if steps is None or fixed_bytes is None:
            found = checkpoint_times(profile)
            steps, fixed_bytes = CheapestStep(profile, found), found.fixed_bytes
        self._fixed_bytes, self._step = fixed_bytes, steps
        keep_all = self._step.everything_kept()
        # Units of the linear program, so that its tolerances are parts of these.
        self._seconds = self._step.most_s or 1.0
        self._bytes = float(keep_all.kept_bytes.max(initial=0)) or 1.0
        # For each choice that a cut has found: its recompute, and its bytes at each moment, in these units.
        self._recompute: list[float] = []
        self._alive: list[NDArray[np.float64]] = []
        self._known: set[tuple[float, bytes]] = set()
        self._learn(keep_all)

    def slowdown(self, budget_bytes: int) -> float:
        """Return the least slowdown of any plan whose peak is within the budget (0.03 is 3 %); inf if there is none."""
        recompute_s = self.recompute_s(budget_bytes)
        return recompute_s / self._profile.step_s if self._profile.step_s > 0 else min(recompute_s, 0.0)

    def recompute_s(self, budget_bytes: int) -> float:
        """Return the least seconds that ops run again under any plan whose peak is within the budget; inf if there is none."""
        if (self._fixed_bytes > budget_bytes).any():
            return math.inf
        if not len(self._fixed_bytes) or not self._step.most_s:
            return 0.0
        highest = 0.0
        for most_price in _MOST_PRICES:
            found, is_held_down = self._raised(budget_bytes / self._bytes, most_price)
            highest = max(highest, found)
            if highest > 1.0:
                # No plan runs more than everything.
                return math.inf
            if not is_held_down:
                break
        return float(highest * self._seconds)

    def _raised(self, budget: float, most_price: float) -> tuple[float, bool]:
        """Return the highest bound that these prices allow, and whether higher ones could raise it."""
        fixed = self._fixed_bytes / self._bytes
        highest = -math.inf
        is_held_down = False
        for _ in range(_MOST_CUTS):
            ceiling, prices, is_held_down = self._best_prices(budget, most_price)
            enough = _GAP * abs(ceiling) + _LEAST_GAP
            missing_s = _PRECISION * max(ceiling - highest, enough) * self._seconds
            cut = self._step.at(prices * (self._seconds / self._bytes), missing_s=missing_s)
            cost, free = cut.cost_s / self._seconds, prices * (fixed - budget)
            found = cost + math.fsum(free) - _ROUNDING * (cost + math.fsum(np.abs(free)))
            highest = max(highest, found)
            # A plane that is known is above the ceiling only by how exactly the program was solved.
            is_new = self._learn(cut.choice)
            if not is_new or ceiling - highest <= enough or highest > 1.0:
                break
        return highest, is_held_down

    def _best_prices(self, budget: float, most_price: float) -> tuple[float, NDArray[np.float64], bool]:
        """Return the highest point under all planes that are known, its prices, and whether these would rise further.

        What is solved is its dual: the fastest mix of known choices that fits the budget, bytes above it at a price.
        """
        alive = np.array(self._alive).T
        num_moments, num_choices = alive.shape
        result = linprog(
            [*self._recompute, most_price],
            A_ub=np.column_stack((alive, np.full(num_moments, -1.0))),
            b_ub=np.full(num_moments, budget),
            A_eq=[[*[1.0] * num_choices, 0.0]],
            b_eq=[1.0],
            method="highs",
        )
        if result.status != 0:
            # Numbers that HiGHS cannot handle prove nothing: no price, no bound.
            return 0.0, np.zeros(num_moments), False
        prices = np.maximum(-result.ineqlin.marginals, 0.0)
        return float(result.fun), prices, bool(result.x[-1] > 0)

    def _learn(self, choice: StepChoice) -> bool:
        """Remember a choice: the plane that L is nowhere above. Return whether it is new."""
        plane = (choice.recompute_s, choice.kept_bytes.tobytes())
        if plane in self._known:
            return False
        self._known.add(plane)
        self._recompute.append(choice.recompute_s / self._seconds)
        self._alive.append((choice.kept_bytes + self._fixed_bytes) / self._bytes)
        return True


def is_all_on_tape(plan: Plan) -> bool:
    """Whether the bound is of this plan: a module that runs again as a whole drops what the tape has to keep."""
    return all(isinstance(unit.engine, Tape) for unit in plan.units.values())


def check_bound(bound_s: float, recompute_s: float, budget_bytes: int) -> None:
    """Check that a plan's seconds of recompute are not below the bound for its budget.

    Raises:
        RuntimeError: they are, so the bound is wrong.
    """
    # Sums of the same seconds in another order differ in their last digits.
    if bound_s > recompute_s * (1 + _SAFETY) + _SAFETY**2:
        raise RuntimeError(
            f"no plan for {budget_bytes} bytes should take less than {bound_s} s of recompute, and one takes {recompute_s} s: "
            "this is a bug in recollect, please report it"
        )


# Halve the range of the bound so often, from the bound without host memory or all that can run again.
_NUM_HALVINGS = 8


class HostBound:
    """The bound of one profile with host memory, for any number of budgets: on what a plan that may offload adds to the step.

    At any moment t of the step, no more can be away than has had time to go out, and than still has time to come back:

        away(t) <= min(host bytes, out rate x (t + s), back rate x (end - t + s))

    where s is what the plan adds to the step, waiting included: it shifts t and the end by s at most. A plan within budget B
    that has so much away is, at each moment, one within B + away(t) that offloads nothing; so it recomputes for at least L(s),
    the bound of `LowerBound` with these budgets. L falls as s rises, and every plan has s >= L(s): where both are equal is a
    bound.

    Args:
        profile: the recorded step.
        link: what copies take.
        host_bytes: most bytes in host memory.

    Complexity: about ten bounds of `LowerBound` for a budget.
    """

    def __init__(self, profile: Profile, link: Link, host_bytes: int) -> None:
        self._profile = profile
        self._link = link
        self._host_bytes = host_bytes
        found = checkpoint_times(profile)
        self._steps = CheapestStep(profile, found)
        self._fixed_bytes = found.fixed_bytes
        times_s = event_times(profile)
        self._times_s = times_s[found.events]
        self._end_s = float(times_s[-1]) if len(times_s) else 0.0
        self._added_s: dict[int, float] = {}

    def added_s(self, budget_bytes: int) -> float:
        """Return the least seconds that any plan within a budget adds to the step; inf if there is none."""
        if budget_bytes not in self._added_s:
            self._added_s[budget_bytes] = self._found_s(budget_bytes)
        return self._added_s[budget_bytes]

    def _found_s(self, budget_bytes: int) -> float:
        least, most = 0.0, self._recompute_s(budget_bytes, 0.0)
        if not np.isfinite(most):
            most = self._steps.most_s + self._end_s
        for _ in range(_NUM_HALVINGS):
            middle = (least + most) / 2
            if self._recompute_s(budget_bytes, middle) > middle:
                least = middle
            else:
                most = middle
        return least

    def _recompute_s(self, budget_bytes: int, added_s: float) -> float:
        """Return the bound on recompute of a plan that adds so much to the step."""
        bound = LowerBound(self._profile, steps=self._steps, fixed_bytes=self._fixed_bytes - self._away(added_s))
        return bound.recompute_s(budget_bytes)

    def _away(self, added_s: float) -> NDArray[np.int64]:
        """Return the most bytes that can be away at each moment."""
        out = self._link.to_host_bytes_per_s * (self._times_s + added_s)
        back = self._link.from_host_bytes_per_s * (self._end_s - self._times_s + added_s)
        return np.ceil(np.minimum(np.minimum(out, back), self._host_bytes)).astype(np.int64)
