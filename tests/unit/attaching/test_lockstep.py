"""What a process decides where the others have answered otherwise than it did."""

from collections.abc import Sequence

import pytest
from torch import nn

from recollect.attaching.lockstep import Lockstep
from recollect.ranks.group import ALONE, Place, Ranks


class Another(Ranks):
    """A second process, which answers the same to whatever is asked."""

    is_alone = False
    ranks = (0, 1)

    def __init__(self, answer: bool) -> None:
        self._answer = answer
        self.asked: list[Place] = []

    def all_of(self, flags: Sequence[bool], place: Place) -> list[bool]:
        self.asked.append(place)
        return [flag and self._answer for flag in flags]


@pytest.mark.parametrize(("own", "other"), [(True, True), (True, False), (False, True)])
def test_a_recorded_step_ends_in_all_processes_or_in_none(own: bool, other: bool) -> None:
    ranks = Another(other)
    assert Lockstep(nn.Linear(2, 2), ranks, may_differ=True).all_end(own) is (own and other)
    assert ranks.asked == [Place.STEP_END]


def test_alone_a_process_ends_as_it_sees_fit() -> None:
    lockstep = Lockstep(nn.Linear(2, 2), ALONE, may_differ=True)
    assert lockstep.all_end(True) and not lockstep.all_end(False)
