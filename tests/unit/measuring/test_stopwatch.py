"""What stretches of a step take, added up while it runs."""

import itertools

import pytest
import torch

from recollect.measuring import stopwatch
from recollect.measuring.stopwatch import Seconds, Stopwatch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """A watch whose clock is a second later each time."""
    seconds = itertools.count()
    monkeypatch.setattr(stopwatch, "work_clock", lambda _device: lambda: float(next(seconds)))
    return Stopwatch(torch.device("cpu"))


def test_stretches_are_added_up(watch: Stopwatch) -> None:
    for _ in range(3):
        with watch.running():
            pass
    assert watch.read() == Seconds(3.0, 3.0)


def test_a_stretch_within_one_is_part_of_it(watch: Stopwatch) -> None:
    with watch.running(), watch.running():
        pass
    assert watch.read() == Seconds(1.0, 1.0)


def test_a_stretch_that_fails_counts(watch: Stopwatch) -> None:
    with pytest.raises(ZeroDivisionError), watch.running():
        raise ZeroDivisionError
    watch.start()
    watch.stop()
    assert watch.read() == Seconds(2.0, 2.0)
