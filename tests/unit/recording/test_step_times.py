"""Times of a step and of its units: what is measured, how it gets into the profile, and what the planner makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from recollect.planning.hull import unit_hull
from recollect.planning.unit_options import unit_options
from recollect.profile.profile import Profile
from recollect.recording.model_step import call_model, run_forward
from recollect.recording.step_times import StepTimes, UnitTimes, measure_step_times, with_step_times
from recollect.simulation.decisions import decide, drop_all
from recollect.simulation.simulate import Simulation, simulate
from small_llama import batch_of, graph_at, llama
from toy_profile import layer

PATHS = [f"decoder.layers.{i}" for i in range(4)]


@pytest.fixture(scope="module")
def recorded() -> Profile:
    return recollect.record(llama(), batch_of())


def unit_times(profile: Profile, *, forward_s: float, backward_s: float, idle_s: float = 0.0) -> dict[int, UnitTimes]:
    """Each layer takes 1 s forward and 2 s backward, and this much longer on the tape."""
    times = UnitTimes(1.0, 2.0, 1.0 + forward_s, 2.0 + backward_s, 1.0 + idle_s)
    return {index: times for index, call in enumerate(profile.calls) if call.repeated}


def test_measured_on_each_unit_and_nothing_is_left_behind() -> None:
    model, batch = llama(), batch_of()
    before = [p.detach().clone() for p in model.parameters()]
    seen: list[bool] = []
    model.decoder.layers[0].register_forward_hook(lambda module, args, output: seen.append(output[0].requires_grad))
    times = measure_step_times(
        model,
        PATHS,
        forward=lambda: call_model(model, batch),
        step=lambda: run_forward(model, batch, None).backward(),
        device=torch.device("cpu"),
        alike=lambda call: 0,
    )
    assert list(times.units) == [0, 1, 2, 3]
    assert times.leanest_s > 0
    assert all(s > 0 for s in (times.units[0].plain_forward_s, times.units[0].tape_backward_s))
    assert len(set(times.units.values())) == 1, "calls that are alike share their medians"
    assert seen == [True, False, False, False] * 3, "one step with its graph, three passes in which units run alone"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert recollect.applied_to(model) == []


def test_units_that_write_to_their_input_and_nested_ones() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.mul_(2).add(self.linear(hidden))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Adds(), Adds()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(hidden * 1))

    model = nn.Sequential(nn.Linear(8, 8), Two())
    times = measure_step_times(
        model,
        ["0", "1", "1.first", "1.second"],
        forward=lambda: model(torch.randn(4, 8)),
        step=lambda: model(torch.randn(4, 8)).sum().backward(),
        device=torch.device("cpu"),
        alike=lambda call: call,
    )
    assert list(times.units) == [0, 1], "calls within another unit are part of it"


def test_step_is_the_leanest_one_without_what_the_tape_adds(recorded: Profile) -> None:
    bare = replace(recorded, graphs=tuple(replace(graph, tape_s=0.0, module_tape_s=()) for graph in recorded.graphs))
    leanest = simulated_leanest(bare)
    in_backward_s = leanest.recompute_s + 0.4
    units = unit_times(bare, forward_s=0.25, backward_s=in_backward_s / 4, idle_s=0.05)
    layer_graph = next(call.graph for call in bare.calls if call.repeated)
    timed = with_step_times(bare, StepTimes(20.0, units), {layer_graph: {"": 2, "mlp.linear_fc1": 6}}, leanest)
    assert timed.step_s == pytest.approx(20.0 - 4 * 0.25 - in_backward_s)
    assert graph_at(timed, "decoder.layers.0").tape_s == pytest.approx(0.05)
    assert dict(graph_at(timed, "decoder.layers.0").module_tape_s) == pytest.approx({"": 0.05, "mlp.linear_fc1": 0.15})
    assert graph_at(timed, "decoder.final_layernorm").watched_s(range(2)) == 0.0
    # The rest of backward goes to the ops that ran again, in equal parts.
    before, after = graph_at(bare, "decoder.layers.0").ops, graph_at(timed, "decoder.layers.0").ops
    added = [b.time_s - a.time_s for a, b in zip(before, after, strict=True)]
    assert added == pytest.approx([0.4 / leanest.recomputed_ops] * len(added))


def simulated_leanest(profile: Profile) -> Simulation:
    return simulate(profile, [drop_all(profile.graph_of(call)) for call in profile.calls])


def test_op_times_shrink_where_recompute_took_less(recorded: Profile) -> None:
    bare = replace(recorded, graphs=tuple(replace(graph, tape_s=0.0, module_tape_s=()) for graph in recorded.graphs))
    leanest = simulated_leanest(bare)
    times = unit_times(bare, forward_s=-1.0, backward_s=leanest.recompute_s / 8)
    half = with_step_times(bare, StepTimes(20.0, times), {}, leanest)
    before, after = graph_at(bare, "decoder.layers.0"), graph_at(half, "decoder.layers.0")
    assert after.ops[3].time_s == pytest.approx(before.ops[3].time_s / 2)
    assert after.watched_s(range(len(after.values))) == 0.0, "noise makes no tape faster than none"
    none = with_step_times(bare, StepTimes(1.0, unit_times(bare, forward_s=0.0, backward_s=-1.0)), {}, leanest)
    assert graph_at(none, "decoder.layers.0").ops[3].time_s == pytest.approx(before.ops[3].time_s / 10)
    assert none.step_s == 12.0, "a step takes no less than its units"


def test_options_that_need_the_tape_pay_for_it() -> None:
    graph = replace(layer(), tape_s=7.0, module_tape_s=(("norm", 1.0), ("mlp.act", 2.0)))
    for options in (unit_hull(graph), unit_options(graph)):
        for option in options:
            modules = {"norm": 1.0 * (0 in option.recompute_ops), "mlp.act": 2.0 * (2 in option.recompute_ops)}
            ops_s = math.fsum(graph.ops[op].time_s for op in option.recompute_ops)
            tape_s = 7.0 * bool(option.recompute_ops) + sum(modules.values())
            assert option.recompute_s == pytest.approx(ops_s + tape_s)
        assert not options[-1].recompute_ops


def test_simulation_counts_the_tape_of_units_that_are_on_it(recorded: Profile) -> None:
    slow = replace(recorded, graphs=tuple(replace(graph, tape_s=10.0, module_tape_s=()) for graph in recorded.graphs))
    keep_all = recollect.classic_plan(slow, "keep_all")
    assert keep_all.predicted_slowdown == 0.0
    full = simulate(slow, decide(slow, recollect.classic_plan(slow, "full")))
    assert math.floor(full.recompute_s / 10) == 4
    # A dropped output is computed by the next unit, so all layers are on the tape then.
    every_2nd = simulate(slow, decide(slow, recollect.classic_plan(slow, "every_nth", 2)))
    assert math.floor(every_2nd.recompute_s / 10) == 4


def test_fewer_units_recompute_where_the_tape_is_slow() -> None:
    recorded = recollect.record(llama(), batch_of(), fake=True)

    def num_recomputing(tape_s: float) -> int:
        profile = replace(
            recorded, graphs=tuple(replace(graph, tape_s=tape_s, module_tape_s=()) for graph in recorded.graphs)
        )
        plan = recollect.plan(profile, "90%")
        return sum(unit.recomputes_anything for unit in plan.units.values())

    assert num_recomputing(10.0) == 1 < num_recomputing(0.0)


def test_tape_time_is_saved_with_the_profile(recorded: Profile) -> None:
    times = {"tape_s": 0.125, "module_tape_s": (("", 0.5), ("mlp", 0.25))}
    profile = replace(recorded, graphs=tuple(replace(graph, **times) for graph in recorded.graphs))
    assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(ValueError, match=r"module_tape_s\['mlp'\]: got -1.0 s, expected a finite number, 0 or more"):
        replace(layer(), module_tape_s=(("mlp", -1.0),))
    with pytest.raises(ValueError, match="tape_s: got nan s, expected a finite number, 0 or more"):
        replace(layer(), tape_s=float("nan"))
