"""Times that processes measured for the same ops become one; for other ops they stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.common_times import with_common_times
from recollect.ranks.group import ALONE, Place, Ranks
from toy_profile import layer, stack


class Others(Ranks):
    """Processes that have answered already."""

    is_alone = False

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.answers: list[Any] = []
        for profile in profiles:
            with_common_times(profile, self)

    def gather(self, value: Any, place: Place) -> list[Any]:  # noqa: ARG002
        self.answers.append(value)
        return self.answers


def slower(profile: Profile, factor: float) -> Profile:
    def graph(its: UnitGraph) -> UnitGraph:
        return replace(its, ops=tuple(replace(op, time_s=factor * op.time_s) for op in its.ops))

    return replace(profile, step_s=factor * profile.step_s, graphs=tuple(map(graph, profile.graphs)))


def test_times_of_the_same_ops_become_their_median() -> None:
    profiles = [slower(stack(3), factor) for factor in (1.0, 9.0)]
    common = with_common_times(slower(stack(3), 2.0), Others(profiles))
    assert common == slower(stack(3), 2.0)
    assert with_common_times(slower(stack(3), 16.0), Others(profiles)) == slower(stack(3), 9.0)


def test_times_of_other_sizes_and_of_one_process_stay() -> None:
    longer = stack(3, graph=layer(up_bytes=800))
    assert with_common_times(stack(3), Others([slower(longer, 9.0), slower(longer, 9.0)])) == stack(3)
    assert with_common_times(slower(stack(3), 5.0), ALONE) == slower(stack(3), 5.0)
