"""Contestants in turns: whose time is compared with whose."""

import gc

from recollect.lab.bench.race import Contestant, Race, few_objects, percentile


def ignore(text: str) -> None:
    assert text


def test_a_drifting_machine_cancels_out() -> None:
    clock = [1.0]

    def step_s(factor: float) -> float:
        clock[0] *= 1.5  # each step of whoever it is takes longer than the one before
        return clock[0] * factor

    twice, thrice = Contestant(name="twice"), Contestant(name="thrice")
    factors = {"twice": 2.0, "thrice": 3.0}
    race = Race(lambda: step_s(1.0), lambda one: step_s(factors[one.name]), report=ignore, seed=0)
    race.run([[twice], [thrice]], seconds=0.0, least_rounds=4)
    # Between a reference of 1 and one of 2.25 times that, the step stands at 1.5.
    expected = 1.5 / ((1 + 2.25) / 2)
    assert [round(ratio, 9) for ratio in twice.ratios.values()] == [round(2 * expected, 9)] * 4
    assert round(thrice.slowdown, 9) == round(3 * expected - 1, 9)
    assert race.num_rounds == 4
    assert len(race.reference_s) == 4 * 3
    assert len(twice.seconds) == 4


def test_those_of_one_group_are_compared_with_each_other() -> None:
    one, two = Contestant(name="one"), Contestant(name="two")
    race = Race(lambda: 1.0, lambda who: 3.0 if who is two else 2.0, report=ignore, seed=0)
    race.run([[one, two]], seconds=0.0, least_rounds=2)
    assert [two.ratios[turn] / one.ratios[turn] for turn in two.ratios] == [1.5, 1.5]


def test_a_step_that_could_not_run_is_no_step() -> None:
    one, gone = Contestant(name="one"), Contestant(name="gone")
    race = Race(lambda: 1.0, lambda who: None if who is gone else 2.0, report=ignore, seed=0)
    race.run([[one, gone]], seconds=0.0, least_rounds=3)
    assert not gone.ratios
    assert not gone.seconds
    assert len(one.ratios) == 3


def test_ctrl_c_ends_the_race_and_keeps_what_there_is() -> None:
    one = Contestant(name="one")
    steps = iter([1.0, 2.0])

    def seconds(who: Contestant) -> float:
        step_s = next(steps, None)
        if step_s is None:
            raise KeyboardInterrupt
        return step_s

    race = Race(lambda: 1.0, seconds, report=ignore, seed=0)
    race.run([[one]], seconds=0.0, least_rounds=9)
    assert race.is_interrupted
    assert one.seconds == [1.0, 2.0]
    race.run([[one]], seconds=0.0, least_rounds=9)
    assert one.seconds == [1.0, 2.0]


def test_percentiles() -> None:
    assert percentile([5.0], 20) == 5.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 80) == 4.0


def test_what_others_have_excluded_from_collections_stays_so() -> None:
    gc.unfreeze()
    with few_objects():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.freeze()
    with few_objects():
        pass
    assert gc.get_freeze_count()
