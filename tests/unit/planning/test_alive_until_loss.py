"""Values that the model's own code holds until forward ends: found, varied, and planned for."""

import random
from dataclasses import replace

import pytest

from recollect.planning import chain_solver
from recollect.planning.alive_until_loss import held_values
from recollect.planning.chain_solver import ChainSolver
from recollect.profile.events import BACKWARD, DIES, PHASE, StepLog
from recollect.profile.profile import Profile
from recollect.simulation.simulate import simulate
from synthetic_step import random_step
from toy_profile import peak_range

MANY_VALUES = 18


def caching(profile: Profile, values: frozenset[int], *, but: int = -1) -> Profile:
    """The step as it is where the model's code holds some values of each unit, but one, until forward has ended."""
    log = profile.log.events
    late = [event for event in log if event[0] == DIES and event[2] in values and event[1] != but]
    others = [event for event in log if event not in late]
    end = others.index((PHASE, BACKWARD))
    moved = (*others[:end], *late, *others[end:])
    return replace(profile, log=StepLog(moved))


def cached_step(seed: int, *, num_units: int) -> tuple[Profile, frozenset[int]]:
    profile = random_step(seed, num_values=MANY_VALUES, num_units=num_units)
    dying = {event[2] for event in profile.log.events if event[0] == DIES}
    saved = [
        index
        for index, value in enumerate(profile.graphs[0].values)
        if value.saved and value.producer is not None and not value.is_output and not value.must_keep and index in dying
    ]
    values = frozenset(random.Random(seed).sample(saved, min(2, len(saved))))
    return caching(profile, values), values


def budgets(profile: Profile) -> list[int]:
    """Budgets on the way from the peak of the leanest choices, with all outputs kept, to keeping everything."""
    least, most = peak_range(profile)
    return [least + (most - least) * step // 10 for step in (0, 1, 3)]


@pytest.mark.parametrize("seed", range(8))
def test_values_that_die_after_forward_are_found(seed: int) -> None:
    profile, values = cached_step(seed, num_units=3)
    outputs = {index for index, value in enumerate(profile.graphs[0].values) if value.is_output}
    assert values
    assert held_values(profile)[0] - outputs == values
    assert not held_values(random_step(seed, num_values=MANY_VALUES, num_units=3))[0] - outputs


def test_a_value_that_one_call_does_not_hold_is_not_held() -> None:
    plain, values = random_step(0, num_values=MANY_VALUES, num_units=3), cached_step(0, num_units=3)[1]
    assert not held_values(caching(plain, values, but=1))[0] & values


def test_plans_within_the_budget_get_faster_and_stay_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    num_faster = 0
    for seed in (0, 3):
        profile, _ = cached_step(seed, num_units=6)
        for budget in budgets(profile):
            best = ChainSolver(profile).best(budget, 0.0)
            with monkeypatch.context() as blind:
                blind.setattr(chain_solver, "layers_hold", lambda *_: False)
                plain = ChainSolver(profile).best(budget, 0.0)
            assert best is not None
            assert plain is not None
            again = simulate(profile, best.decisions())
            assert (again.peak_bytes, again.recompute_s) == (best.peak_bytes, best.recompute_s)
            assert again.peak_bytes <= budget
            num_faster += again.recompute_s < plain.recompute_s
    assert num_faster >= 3
