"""The bound on plans where it is known by hand, with host memory, and where a solver fails; see also `test_optimality.py`."""

import math
from dataclasses import replace
from typing import Any

import pytest

from recollect.planning import bound as bound_module
from recollect.planning.bound import LowerBound, away_limits, check_bound, host_bound
from recollect.planning.checkpoint_times import checkpoint_times
from recollect.planning.choose import Planner
from recollect.simulation.copy_clock import Link, event_times
from synthetic_step import random_step
from toy_profile import stack


def test_an_argument_of_another_unit_is_not_free() -> None:
    """The fastest of all plans takes 4 s."""
    profile = random_step(4, num_values=4, num_units=3, saved_part=0.4)
    # As if the input of each unit were always there.
    alone = replace(profile, calls=tuple(replace(call, origins=()) for call in profile.calls))
    assert LowerBound(profile).added_s(196) == pytest.approx(4.0, rel=1e-5)
    assert LowerBound(alone).added_s(196) == pytest.approx(3.0, rel=1e-5)


def test_an_answer_of_the_solver_that_is_none_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_step(0, num_values=8, num_units=4)
    budget = int(checkpoint_times(profile).fixed_bytes.max()) + 200
    assert LowerBound(profile).added_s(budget) > 0
    solve = bound_module.linprog

    def give_up(*args: Any, **options: Any) -> Any:
        result = solve(*args, **options)
        result.status = 1
        return result

    monkeypatch.setattr(bound_module, "linprog", give_up)
    assert LowerBound(profile).added_s(budget) == 0


def test_a_plan_below_its_bound_is_an_error() -> None:
    check_bound(1.0 + 1e-9, 1.0, 100)
    with pytest.raises(
        RuntimeError, match=r"^no plan for 100 bytes should take less than 1.1 s .* one takes 1.0 s: this is a bug"
    ):
        check_bound(1.1, 1.0, 100)


def test_what_is_away_has_gone_out_and_will_come_back() -> None:
    """Before backward nothing has run again; so only waiting gives copies out more time there, but for copies back any does."""
    profile = stack(3)
    found = checkpoint_times(profile)
    limits = away_limits(profile, found, Link(10.0, 20.0), 7)
    out, back, host = (slice(i * len(found.events), (i + 1) * len(found.events)) for i in range(3))
    times_s = event_times(profile)[found.events]
    is_backward = found.stages > 0
    assert is_backward.any() and not is_backward.all()
    assert limits.nbytes[out] == pytest.approx(10.0 * times_s)
    assert limits.nbytes[back] == pytest.approx(20.0 * (profile.step_s - times_s))
    assert (limits.nbytes[host] == 7).all()
    assert limits.per_recompute[out].tolist() == [10.0 * late for late in is_backward]
    for rates in (limits.per_wait[out] / 10, limits.per_wait[back] / 20, limits.per_recompute[back] / 20):
        assert (rates == 1).all()
    assert not limits.per_wait[host].any() and not limits.per_recompute[host].any()
    assert limits.moments.tolist() == 3 * list(range(len(found.events)))


def test_bound_with_host_memory_is_between_nothing_and_that_without() -> None:
    """With no time for copies it is that without; over a fast link nothing; and it never rises with the link's rate."""
    profile = stack(6)
    budget = Planner(profile).plain_peak_bytes * 3 // 4
    without = LowerBound(profile).added_s(budget)
    found = [host_bound(profile, Link(rate, rate), 10**9).added_s(budget) for rate in (1e-9, 10.0, 100.0, 1e12)]
    assert found[0] == pytest.approx(without) and without > found[1] > 0
    assert found == sorted(found, reverse=True) and found[-1] == pytest.approx(0, abs=1e-8)
    # Where nothing fits, however long the step waits.
    assert host_bound(profile, Link(1e9, 1e9), 10**9).added_s(profile.persistent_bytes) == math.inf
