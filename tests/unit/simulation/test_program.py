"""A step made ready for playing back: merged events say the same as the events one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from recollect.plans.action import Action
from recollect.profile.events import ALLOC, DIES, FREE, OP, RELEASE, SAVE, WORK
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.program import BULK, WINDOW, Program
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import windows
from synthetic_step import random_step


def peak_of_keeping_everything(profile: Profile) -> int:
    """The peak by counting holders, event by event: the model's code until a value dies, and each handle."""
    alive = peak = profile.persistent_bytes
    holders: Counter[tuple[int, ...]] = Counter()
    nbytes: dict[tuple[int, ...], int] = {}
    saved: dict[int, tuple[int, ...]] = {}

    def hold(key: tuple[int, ...], change: int) -> int:
        holders[key] += change
        is_first, is_last = change > 0 and holders[key] == 1, change < 0 and holders[key] == 0
        return nbytes[key] if is_first else -nbytes[key] if is_last else 0

    for event in profile.log.blocks[0]:
        if event[0] == ALLOC:
            nbytes[event[1:2]] = profile.block_bytes(event[2])
            alive += hold(event[1:2], 1)
        elif event[0] == FREE:
            alive += hold(event[1:2], -1)
        elif event[0] == OP:
            op = profile.graph_of(profile.calls[event[1]]).ops[event[2]]
            peak = max(peak, alive + op.working_bytes)
            for value in op.outputs:
                key = (event[1], value)
                nbytes[key] = profile.block_bytes(profile.graph_of(profile.calls[event[1]]).values[value].nbytes)
                alive += hold(key, 1)
        elif event[0] == DIES:
            alive += hold(event[1:], -1)
        elif event[0] == SAVE:
            saved[event[3]] = event[1:3]
            alive += hold(event[1:3], 1)
        elif event[0] == RELEASE:
            alive += hold(saved[event[1]], -1)
        peak = max(peak, alive + (event[1] if event[0] == WORK else 0))
    return peak


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_peak_is_that_of_counting_every_event(device: str) -> None:
    for seed in range(20):
        profile = replace(random_step(seed, num_values=8, num_units=3), device=device)
        keep_all = [CallActions()] * 3
        assert simulate(profile, keep_all).peak_bytes == peak_of_keeping_everything(profile), seed


def test_runs_of_events_that_no_plan_changes_are_one_instruction() -> None:
    profile = random_step(1, num_values=8, num_units=4)
    codes = [code for code, _ in Program(profile).instructions]
    assert {ALLOC, FREE, WORK, WINDOW}.isdisjoint(codes)
    assert not any(pair == (BULK, BULK) for pair in zip(codes, codes[1:], strict=False))
    assert len(codes) < len(profile.log.blocks[0])


def test_windows_divide_the_script() -> None:
    profile = random_step(1, num_values=8, num_units=4)
    found = windows(profile)
    assert [code for code, _ in Program(profile, found).instructions].count(WINDOW) == len(found) - 1


def test_script_can_be_played_again() -> None:
    profile = random_step(2, num_values=8, num_units=2, state_bytes=8)
    program = Program(profile, windows(profile))
    decisions = [
        CallActions(ValueActions.recomputing({1, 2, 3})),
        CallActions(ValueActions.recomputing({4}), output=Action.RECOMPUTE),
    ]
    first = simulate(profile, decisions, program=program)
    simulate(profile, [CallActions()] * 2, program=program)
    assert (
        simulate(profile, decisions, program=program) == first == simulate(profile, decisions, windows=windows(profile))
    )


def test_only_values_that_nobody_holds_are_merely_counted() -> None:
    profile = random_step(3, num_values=8, num_units=2)
    program, graph = Program(profile), profile.graphs[0]
    nothing, everything = (program.counted(0, frozenset(d)) for d in ((), range(1, len(graph.values))))
    lasting = {i for i, value in enumerate(graph.values) if value.saved or value.is_output}
    # An input is no value of the unit's own: whether it counts makes no difference.
    assert nothing | {0} == (set(range(len(graph.values))) - lasting) | {0}
    # What an op reads that may run again is held by its recipe, unless it has a recipe itself.
    assert everything - {0} == nothing - {0}
    last = len(graph.ops) - 1
    some = program.counted(0, frozenset(graph.ops[last].outputs))
    assert some == nothing - set(graph.ops[last].inputs)
