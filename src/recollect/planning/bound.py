"""A lower bound on the time that any plan within a budget adds to a step, from prices and minimum cuts.

At every moment e of the step (`planning/checkpoint_times.py`) a plan within the budget B has

    fixed_e + kept_e <= B       fixed_e: bytes alive under every plan; kept_e: the other bytes that this plan holds

so at any prices lambda_e >= 0 its recompute is at least

    L(lambda) = cut(lambda) + sum of lambda_e * (fixed_e - B)
    cut(lambda) = least recompute + sum of lambda_e * kept_e, over all choices for the whole step (`planning/cheapest_step.py`)

Every lambda gives a bound. The highest is found by cutting planes: each cut comes with a choice, and L is nowhere above what
that choice costs, which is linear in lambda. The highest point under all known planes is a small linear program; at its prices
the next cut is made. L has finitely many planes, so this ends soon: after 5 to 40 cuts for the first budget, 1 to 10
for each one after it, as the planes are the same for every budget. The precision of the solver only decides which
prices are tried, not whether the result is a bound.

"Any plan" means: keep or recompute, value by value, or hold as parts values known to be the same on all ranks; unit
outputs dropped or not, each op running again at most once, and its results staying as long as backward still has
to ask for them, as on the tape; for the ops and the order of the recorded step. It does not hold for changes to the step
itself: a different micro-batch, a chunked loss, ops that are replaced by others; nor for offload, unless it knows the link.

With host memory, kept_e is less by the bytes that are away, which had time to leave and still have time to come back. In a step
that runs ops again for r seconds and waits w seconds for copies,

    away_e <= min(host memory, out rate x (t_e + later), back rate x (end - t_e + later))       `away_limits`

where t_e and the end refer to the step without a plan. Everything before backward is delayed by at most w, since nothing
has been rerun yet; everything after, by r + w. All limits are linear in the choice's r, and in w, a further unknown:
so is L(lambda), which is least at w = 0 or at the longest wait of any plan.

References:
    J. E. Kelley, "The cutting-plane method for solving convex programs", Journal of the SIAM 8(4), 1960.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from recollect.planning.cheapest_step import CheapestStep, StepChoice, StepCut
from recollect.planning.checkpoint_times import CheckpointTimes, checkpoint_times
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Link, event_times

# Relative rounding error of long sums.
_ROUNDING = 1e-12
# How far below the bound a plan may be, as a fraction of it, before that is an error.
_SAFETY = 1e-6
# Cutting planes stop when they can no longer raise the bound by this part of it, or of the step's recompute.
_GAP = 1e-6
_LEAST_GAP = 1e-10
# The precision of cuts, as a part of the gain that is still possible.
_PRECISION = 0.01
_MOST_CUTS = 200
# The largest sum of all prices, in units of "all that can run again for all bytes that can be kept". Low prices
# are tried first: they lead to useful choices sooner. The last ones show that not even recomputing everything fits.
_MOST_PRICES = (3.0, 1e3, 1e6)
# No plan waits for this many times its step.
_MOST_STEPS = 1e3


@dataclass(frozen=True, slots=True, eq=False)
class AwayLimits:
    """Limits on the bytes in host memory, which are not on the device, at moments of a step."""

    moments: NDArray[np.int64]
    """The moment of each limit."""
    nbytes: NDArray[np.float64]
    """The limit for a plan that adds nothing to the step."""
    per_recompute: NDArray[np.float64]
    per_wait: NDArray[np.float64]
    """Additional bytes for each second of recompute, and for each other second that is added."""
    most_wait_s: float
    """More seconds than any plan adds in other ways."""


def away_limits(profile: Profile, found: CheckpointTimes, link: Link, host_bytes: int) -> AwayLimits:
    times_s = event_times(profile)
    end_s = float(times_s[-1]) if len(times_s) else 0.0
    times_s = times_s[found.events]
    num_moments = len(times_s)
    out, back, zeros = link.to_host_bytes_per_s, link.from_host_bytes_per_s, np.zeros(num_moments)
    has_rerun = found.stages > 0
    return AwayLimits(
        moments=np.tile(np.arange(num_moments), 3),
        nbytes=np.concatenate((out * times_s, back * (end_s - times_s), np.full(num_moments, float(host_bytes)))),
        per_recompute=np.concatenate((out * has_rerun, np.full(num_moments, back), zeros)),
        per_wait=np.concatenate((np.full(num_moments, out), np.full(num_moments, back), zeros)),
        most_wait_s=_MOST_STEPS * end_s,
    )


class Steps(Protocol):
    """The cheapest choices of a step at any prices of its moments; see `CheapestStep`."""

    @property
    def most_s(self) -> float:
        """Seconds of recompute if everything runs again."""

    def everything_kept(self) -> StepChoice:
        """Return the choice that recomputes nothing."""

    def at(self, prices: NDArray[np.float64], *, missing_s: float = 0.0) -> StepCut:
        """Return the cheapest choice at some prices."""


class LowerBound:
    """The bound of one profile, for any number of budgets.

    Args:
        steps: its cheapest choices, if the caller knows better ones; by default each call of a unit decides by itself.
        fixed_bytes: bytes alive under every plan at the moments of `steps`.
        away: limits on the host memory of plans that offload at these moments; by default, plans do not offload.

    Complexity: a minimum cut and a small linear program, a few times per budget (80 layers: 0.02 s each).
    """

    def __init__(
        self,
        profile: Profile,
        *,
        steps: Steps | None = None,
        fixed_bytes: NDArray[np.int64] | None = None,
        away: AwayLimits | None = None,
    ) -> None:
        if steps is None or fixed_bytes is None:
            found = checkpoint_times(profile)
            steps, fixed_bytes = CheapestStep(profile, found), found.fixed_bytes
        self._fixed_bytes, self._step = fixed_bytes, steps
        self._offloads = away is not None
        zeros = np.zeros(len(fixed_bytes))
        away = away or AwayLimits(np.arange(len(zeros)), zeros, zeros, zeros, 0.0)
        keep_all = self._step.everything_kept()
        # Units of the linear program: its tolerances are fractions of these.
        self._seconds = self._step.most_s or 1.0
        self._bytes = float(keep_all.kept_bytes.max(initial=0)) or 1.0
        # The value of each limit, in these units.
        self._moments = away.moments
        self._away = away.nbytes / self._bytes
        self._per_recompute = away.per_recompute * (self._seconds / self._bytes)
        self._per_wait = away.per_wait * (self._seconds / self._bytes)
        self._most_wait = away.most_wait_s / self._seconds
        # For each choice that a cut has found: its recompute, and its bytes at each moment, in these units.
        self._recompute: list[float] = []
        self._alive: list[NDArray[np.float64]] = []
        self._known: set[tuple[float, bytes]] = set()
        self._learn(keep_all)

    def added_s(self, budget_bytes: int) -> float:
        """Return the least seconds that any plan whose peak is within the budget adds to the step; inf if there is none."""
        if (self._fixed_bytes > budget_bytes).any():
            return math.inf
        if not len(self._fixed_bytes) or not self._step.most_s:
            return 0.0
        highest = 0.0
        for most_price in _MOST_PRICES:
            found, is_held_down = self._raised(budget_bytes / self._bytes, most_price)
            highest = max(highest, found)
            if self._is_too_much(highest):
                return math.inf
            if not is_held_down:
                break
        return float(highest * self._seconds)

    def _is_too_much(self, added: float) -> bool:
        """Whether no plan adds this many seconds: it reruns everything at most, but may wait for any length of time."""
        return added > 1.0 and not self._offloads

    def _raised(self, budget: float, most_price: float) -> tuple[float, bool]:
        fixed, room = self._fixed_bytes / self._bytes, budget + self._away
        highest = -math.inf
        is_held_down = False
        for _ in range(_MOST_CUTS):
            ceiling, limit_prices, is_held_down = self._best_prices(room, most_price)
            # The cost of one more second of recompute, and of waiting, minus the price of the bytes that may then be away.
            recompute_price = 1.0 - math.fsum(limit_prices * self._per_recompute)
            wait_price = 1.0 - math.fsum(limit_prices * self._per_wait)
            if recompute_price <= 0:
                break
            enough = _GAP * abs(ceiling) + _LEAST_GAP
            missing_s = _PRECISION * max(ceiling - highest, enough) * self._seconds
            prices = np.bincount(self._moments, weights=limit_prices, minlength=len(fixed))
            cut = self._step.at(prices / recompute_price * (self._seconds / self._bytes), missing_s=missing_s)
            cost = recompute_price * cut.cost_s / self._seconds
            free = [*(prices * fixed), *(-limit_prices * room), min(0.0, wait_price) * self._most_wait]
            found = cost + math.fsum(free) - _ROUNDING * (cost + math.fsum(np.abs(free)))
            highest = max(highest, found)
            # A known plane is above the ceiling only by the error of the solver.
            is_new = self._learn(cut.choice)
            if not is_new or ceiling - highest <= enough or self._is_too_much(highest):
                break
        return highest, is_held_down

    def _best_prices(self, room: NDArray[np.float64], most_price: float) -> tuple[float, NDArray[np.float64], bool]:
        """Return the highest point under all known planes, its prices, and whether these would rise further.

        Its dual is solved: the fastest mix of known choices that fits, with a price for excess bytes.
        """
        alive, recompute = np.array(self._alive).T[self._moments], np.array(self._recompute)
        num_limits, num_choices = alive.shape
        alive -= np.outer(self._per_recompute, recompute)
        result = linprog(
            [*self._recompute, 1.0, most_price],
            A_ub=np.column_stack((alive, -self._per_wait, np.full(num_limits, -1.0))),
            b_ub=room,
            A_eq=[[*[1.0] * num_choices, 0.0, 0.0]],
            b_eq=[1.0],
            method="highs",
        )
        if result.status != 0:
            # Numbers that HiGHS cannot handle prove nothing: no price, no bound.
            return 0.0, np.zeros(num_limits), False
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


def host_bound(profile: Profile, link: Link, host_bytes: int) -> LowerBound:
    """Return the bound on plans that may offload over a link to this much host memory."""
    found = checkpoint_times(profile)
    away = away_limits(profile, found, link, host_bytes)
    return LowerBound(profile, steps=CheapestStep(profile, found), fixed_bytes=found.fixed_bytes, away=away)


def check_bound(bound_s: float, recompute_s: float, budget_bytes: int) -> None:
    """Check that a plan's seconds of recompute are not below the bound for its budget."""
    # Sums of the same seconds in a different order differ in their last digits.
    if bound_s > recompute_s * (1 + _SAFETY) + _SAFETY**2:
        raise RuntimeError(
            f"no plan for {budget_bytes} bytes should take less than {bound_s} s of recompute, and one takes {recompute_s} s: "
            "this is a bug in recollect, please report it"
        )
