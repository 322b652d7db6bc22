"""Peaks as sums over parts of a step: equal to the byte to what the simulator says of the whole step."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from recollect.planning.bound import LowerBound
from recollect.planning.planners import plan
from recollect.plans.action import Action
from recollect.profile.events import ALLOC, DIES, FREE, OP, RELEASE, RETURN, SAVE, USE, StepLog
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.call_groups import OUTSIDE, Division
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import windows
from synthetic_step import INPUT, Event, random_step

DROP_OUTPUTS = (0.0, 0.3, 0.7)


def random_decisions(profile: Profile, rng: random.Random) -> list[CallActions]:
    """A coin for each value, the same for some of the calls, and for each output."""
    share, drop_output = rng.choice((0.0, 0.2, 0.5, 0.9, 1.0)), rng.choice(DROP_OUTPUTS)
    made: list[CallActions] = []
    for call in profile.calls:
        values = enumerate(profile.graph_of(call).values)
        dropped = frozenset(i for i, v in values if v.producer is not None and not v.must_keep and rng.random() < share)
        output = Action.KEEP if rng.random() >= drop_output else Action.RECOMPUTE
        own = CallActions(ValueActions.recomputing(dropped), output, is_planned=rng.random() < 0.8)
        made.append(rng.choice([*made, own]) if rng.random() < 0.4 else own)
    return made


def check(profile: Profile, peak_sums: PeakSums, decisions: list[CallActions], what: str = "") -> None:
    expected = simulate(profile, decisions, windows=windows(profile))
    got = peak_sums.peaks(decisions)
    assert got.peak_bytes == expected.peak_bytes, what
    assert got.recompute_s == expected.recompute_s, what
    assert got.window_peaks == expected.window_peaks, what


def peak_sums_of(profile: Profile) -> PeakSums:
    return PeakSums.of(profile)


def with_log(profile: Profile, log: Iterable[Event]) -> Profile:
    return replace(profile, log=StepLog(tuple(log)))


def with_masks(profile: Profile, rng: random.Random) -> Profile:
    """Before the first layer storages are made that ops of many layers read and save; they die in the middle of forward."""
    graph = profile.graphs[0]
    masks = range(100, 100 + rng.choice((1, 2)))
    first = len(graph.values)
    values = (*graph.values, *[ValueRecord(f"mask {i}", 32, producer=None) for i in masks])
    ops = tuple(
        replace(op, inputs=(*op.inputs, first + rng.randrange(len(masks)))) if rng.random() < 0.5 else op
        for op in graph.ops
    )
    log: list[Event] = [(ALLOC, mask, 32) for mask in masks]
    handles: dict[int, list[int]] = {}
    num_handles = 1000
    for event in profile.log.events:
        log.append(event)
        if event[0] == OP and rng.random() < 0.3:
            number = rng.randrange(len(masks))
            log.append((SAVE, event[1], first + number, num_handles, event[1]))
            handles.setdefault(event[1], []).append(num_handles)
            num_handles += 1
        if event[0] == USE and rng.random() < 0.3:
            for handle in handles.pop(max(handles, default=-1), ()):
                log += [(USE, handle), (RELEASE, handle)]
    dying = rng.randrange(len(masks), len(log))
    log[dying:dying] = [(FREE, mask) for mask in masks]
    calls = tuple(replace(c, outside=tuple((first + i, mask) for i, mask in enumerate(masks))) for c in profile.calls)
    return with_log(replace(profile, graphs=(replace(graph, values=values, ops=ops),), calls=calls), log)


def with_reads_of_inner_values(profile: Profile, rng: random.Random) -> Profile:
    """Layers also read a value from the inside of the layer before, and save it."""
    graph = profile.graphs[0]
    first, inner = len(graph.values), rng.choice([i for i, v in enumerate(graph.values) if v.producer is not None])
    values = (*graph.values, ValueRecord("another layer's", graph.values[inner].nbytes, producer=None))
    ops = tuple(replace(op, inputs=(*op.inputs, first)) if rng.random() < 0.5 else op for op in graph.ops)
    calls = tuple(
        replace(c, origins=(*c.origins, (first, i - 1, inner))) if i else c for i, c in enumerate(profile.calls)
    )
    log: list[Event] = []
    for event in profile.log.events:
        # The model's own code holds it until the next layer has run.
        if event[:1] + event[2:] == (DIES, inner) and event[1] + 1 < len(calls) and inner != graph.ops[-1].outputs[-1]:
            continue
        log.append(event)
        if event[0] == OP and event[2] == len(ops) - 1 and event[1] and inner != graph.ops[-1].outputs[-1]:
            log += [(SAVE, event[1] - 1, inner, 2000 + event[1], event[1]), (DIES, event[1] - 1, inner)]
        if event[0] == USE and rng.random() < 0.2:
            ready = [e[3] for e in log if e[0] == SAVE and e[3] >= 2000 and (RELEASE, e[3]) not in log]
            log += [(code, handle) for handle in ready[-1:] for code in (USE, RELEASE)]
    return with_log(replace(profile, graphs=(replace(graph, values=values, ops=ops),), calls=calls), log)


def with_writes(profile: Profile, rng: random.Random) -> Profile:
    """Each layer writes in place to one of its values, or to its output, after the last of its ops."""
    graph = profile.graphs[0]
    output = len(graph.values) - 1
    saved = {e[2] for e in profile.log.events if e[0] == SAVE} | {output}
    old, new = output if rng.random() < 0.5 else rng.choice(sorted(saved - {INPUT})), output + 1
    values = list(graph.values)
    values[old] = replace(values[old], mutated_later=True, is_output=False)
    values.append(ValueRecord("written", values[old].nbytes, producer=len(graph.ops), is_output=old == output))
    write = OpRecord("write_", (old,), (new,), time_s=2.0, mutates=True)
    log: list[Event] = []
    for event in profile.log.events:
        if event[:1] + event[2:] == (DIES, old):
            event = (DIES, event[1], new)
            if old != output:
                continue
        log.append(event)
        if event[0] == OP and event[2] == len(graph.ops) - 1:
            log += [(OP, event[1], len(graph.ops))] + ([(DIES, event[1], new)] if old != output else [])
    graph = UnitGraph(tuple(values), (*graph.ops, write))
    reads = new if old == output else output
    calls = tuple(replace(c, origins=tuple((here, call, reads) for here, call, _ in c.origins)) for c in profile.calls)
    return with_log(replace(profile, graphs=(graph,), calls=calls), log)


def with_late_returns(profile: Profile, rng: random.Random) -> Profile:
    """Layers return after the next one has read their output, as a layer around other layers does."""
    output = len(profile.graphs[0].values) - 1
    log: list[Event] = []
    for event in profile.log.events:
        if event[:1] + event[2:] == (DIES, output):
            log.append((RETURN, event[1]))
        if event[0] != RETURN:
            log.append(event)
    return with_log(profile, log)


CHANGES = (
    (),
    (with_late_returns,),
    (with_masks,),
    (with_reads_of_inner_values,),
    (with_masks, with_reads_of_inner_values),
    (with_writes,),
)


def step(seed: int) -> Profile:
    """A step of several layers with a fair mixture of what can tie them together."""
    rng = random.Random(seed)
    profile = random_step(
        seed, num_values=rng.randint(3, 9), num_units=rng.randint(1, 6), state_bytes=rng.choice((0, 0, 24))
    )
    for change in rng.choice(CHANGES):
        profile = change(profile, rng)
    graphs = tuple(replace(graph, tape_s=0.7) for graph in profile.graphs) if rng.random() < 0.5 else profile.graphs
    return replace(profile, graphs=graphs, device=rng.choice(("cpu", "cuda:0")), calibration_bytes=rng.choice((0, 77)))


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_sum_is_what_the_simulator_says(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        profile = step(seed)
        peak_sums = peak_sums_of(profile)
        rng = random.Random(-seed)
        for _ in range(8):
            check(profile, peak_sums, random_decisions(profile, rng), f"seed {seed}")


def test_no_plan_of_such_steps_is_below_the_bound() -> None:
    for seed in range(0, 300, 6):
        profile = step(seed)
        bound, rng = LowerBound(profile), random.Random(-seed)
        for _ in range(4):
            peaks = peak_sums_of(profile).peaks(random_decisions(profile, rng))
            assert bound.added_s(peaks.peak_bytes) <= peaks.recompute_s + 1e-6, f"seed {seed}"


def num_tied(division: Division, decision: CallActions) -> int:
    """How many calls are played together with others when all are decided so."""
    groups = division.groups([decision] * (len(division.parts) - 1))
    return sum(len(group) for group in groups if len(group) > 1)


def test_the_steps_above_have_all_that_ties_calls_together() -> None:
    divisions = [Division(Program(profile, windows(profile))) for profile in map(step, range(300))]
    keep_all, drop_all = CallActions(), CallActions(ValueActions.recomputing(range(20)))
    assert sum(len(division.parts[OUTSIDE].made) > 0 for division in divisions) > 50
    # Writes tie calls together under every plan, inner values that are read and dropped under some.
    assert sum(num_tied(division, keep_all) > 0 for division in divisions) > 20
    assert sum(num_tied(division, drop_all) > num_tied(division, keep_all) for division in divisions) > 20


def test_calls_are_tied_where_outputs_are_dropped() -> None:
    division = Division(
        Program(random_step(0, num_values=6, num_units=5), windows(random_step(0, num_values=6, num_units=5)))
    )
    drop_all = ValueActions.recomputing(range(1, 7))
    decisions = [CallActions(drop_all, keeps_output=call not in (1, 2)) for call in range(5)]
    assert division.groups(decisions) == ((OUTSIDE,), (0,), (1, 2, 3), (4,))
    assert division.groups([CallActions(drop_all)] * 5) == ((OUTSIDE,), (0,), (1,), (2,), (3,), (4,))


def test_identical_layers_are_played_once() -> None:
    profile = random_step(3, num_values=8, num_units=12)
    peak_sums = peak_sums_of(profile)
    decisions = [CallActions(ValueActions.recomputing({1, 2, 3} if call % 2 else {4, 5})) for call in range(12)]
    check(profile, peak_sums, decisions)
    # The first and the last layer differ from those between; and what is outside of all layers is played, too.
    assert len(peak_sums._traces) <= 2 + 2 + 1
    again = [CallActions(ValueActions.recomputing({4, 5} if call % 3 else {1, 2, 3})) for call in range(12)]
    check(profile, peak_sums, again)
    assert len(peak_sums._traces) <= 2 * 3 + 1


@pytest.mark.parametrize("seed", range(10))
def test_a_log_that_uses_a_name_twice_is_played_in_one_piece(seed: int) -> None:
    profile = random_step(seed, num_values=6, num_units=3)
    last = max(event[3] for event in profile.log.events if event[0] == SAVE)
    # What the first layer saves is let go of at once, and its number is used again.
    log: list[Event] = []
    for event in profile.log.events:
        log.append(event)
        if event[0] == OP and event[1:] == (0, 0):
            log += [(SAVE, 0, profile.graphs[0].ops[0].outputs[0], last, 0), (RELEASE, last)]
    profile = with_log(profile, log)
    peak_sums = peak_sums_of(profile)
    assert len(peak_sums._division.groups([CallActions()] * 3)) == 1
    rng = random.Random(seed)
    for _ in range(8):
        check(profile, peak_sums, random_decisions(profile, rng))


def test_the_simulator_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_step(1, num_values=12, num_units=4)
    peaks = PeakSums.peaks
    monkeypatch.setattr(
        PeakSums, "peaks", lambda self, d: replace(found := peaks(self, d), peak_bytes=found.peak_bytes - 1)
    )
    with pytest.raises(
        RuntimeError, match=r"has a peak of \d+ bytes, where the sum over its units says \d+.*report it"
    ):
        plan(profile, "90%")
