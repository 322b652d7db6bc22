"""How fast a plan that may offload can be at best: a lower bound on what it adds to the step.

At any moment t of the step, no more can be away than has had time to go out, and no more than still has time to come back:

    away(t) <= min(host bytes, out rate x (t + s), back rate x (end - t + s))

where s is what the plan adds to the step, waiting included: it shifts t and the end by s at most. A plan within budget B that
has so much away is, at each moment, one within B + away(t) that offloads nothing; so it recomputes for at least L(s), the bound
of `planning/bound.py` with these budgets. L falls as s rises, and every plan has s >= L(s): where both are equal is a bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recollect.planning.bound import LowerBound
from recollect.planning.cheapest_step import CheapestStep
from recollect.planning.checkpoint_times import checkpoint_times
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Link, event_times

# Halve the range of the bound so often, from the bound without host memory or all that can run again.
_NUM_HALVINGS = 8


class HostBound:
    """The bound of one profile with host memory, for any number of budgets.

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

    def added_s(self, budget_bytes: int) -> float:
        """Return the least seconds that any plan within a budget adds to the step; inf if there is none."""
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
