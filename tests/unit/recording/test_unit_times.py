"""Times of units: what is measured, how it gets into the profile, and what the planner makes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.engine.content import has_same_bits
from recollect.planning.chain_solver import unit_options
from recollect.planning.hull import unit_hull
from recollect.profile.profile import Profile
from recollect.recording.model_step import call_model
from recollect.recording.unit_samples import UnitSample, UnitSamples
from recollect.recording.unit_times import (
    UnitTimes,
    _factors,
    _spread,
    in_one_backward,
    leanest_of,
    measure_unit_times,
    with_unit_times,
)
from recollect.simulation.decisions import decide, drop_all
from recollect.simulation.simulate import Simulation, simulate
from small_llama import batch_of, graph_at, llama
from toy_profile import layer

CPU = torch.device("cpu")
PATHS = [f"decoder.layers.{i}" for i in range(4)]


@pytest.fixture(scope="module")
def recorded() -> Profile:
    return recollect.record(llama(), batch_of())


def unit_times(profile: Profile, *, forward_s: float, backward_s: float, idle_s: float = 0.0) -> dict[int, UnitTimes]:
    """Each layer, by the first one, takes 1 s forward and 2 s backward, and this much longer on the tape."""
    times = UnitTimes(1.0, 2.0, 1.0 + forward_s, 2.0 + backward_s, 1.0 + idle_s)
    return {next(index for index, call in enumerate(profile.calls) if call.repeated): times}


def samples_of(model: nn.Module, paths: list[str], run: Callable[[], Any]) -> list[UnitSample]:
    samples = UnitSamples(model, CPU)
    calls = itertools.count()
    modules = dict(model.named_modules())
    hooks = [
        modules[path].register_forward_pre_hook(
            lambda module, args, kwargs, path=path: samples.take(path, next(calls), args, kwargs), with_kwargs=True
        )
        for path in paths
    ]
    run()
    for hook in hooks:
        hook.remove()
    return samples.samples


def test_one_sample_of_each_kind_is_timed_on_a_copy() -> None:
    model, batch = llama(), batch_of()
    before = [p.detach().clone() for p in model.parameters()]
    samples = samples_of(model, PATHS, lambda: call_model(model, batch))
    assert [sample.call for sample in samples] == [0], "the four layers are alike"
    model.decoder.layers[0].register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    times = measure_unit_times(samples, CPU)
    assert list(times) == [0]
    assert all(s > 0 for s in (times[0].plain_forward_s, times[0].tape_backward_s))
    assert all(has_same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_that_are_alike_take_as_long_whatever_their_graphs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    hidden = torch.randn(32, 64, requires_grad=True)
    units = ["0", "1", "2", "3"]
    profile = recollect.record(model, hidden, loss_fn=torch.sum, units=units, holds_output=False)
    assert len({call.graph for call in profile.calls}) > 1, "the first and the last layer have graphs of their own"
    overhead_s = {math.fsum(s for _, s in graph.module_tape_s) + graph.tape_s for graph in profile.graphs}
    assert len(overhead_s) == 1
    assert overhead_s.pop() > 0


class Adds(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(2).add(self.linear(hidden))


class Scores(Adds):
    """Differentiates in forward, which takes a graph that leads out of the unit."""

    def forward(self, hidden: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.linear(hidden).sum(), self.outer, create_graph=True)
        return self.linear(hidden) + gradient.sum()


def test_units_that_write_to_their_input() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Adds())
    found = samples_of(model, ["1"], lambda: model(torch.randn(4, 8)))
    assert list(measure_unit_times([*found, *found], CPU)) == [0], "the sample is as it was"


def test_units_without_room_are_left_to_their_ops() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Adds())
    (sample,) = samples_of(model, ["1"], lambda: model(torch.randn(4, 8)))
    needed_bytes = 2 * (8 * 8 + 8) * 4 + 2 * 4 * 8 * 4
    assert list(measure_unit_times([sample], CPU, room_bytes=lambda _: needed_bytes - 1)) == []
    assert list(measure_unit_times([sample], CPU, room_bytes=lambda _: needed_bytes)) == [0]


def test_units_that_cannot_run_alone_are_left_to_their_ops() -> None:
    model = nn.Sequential(Scores(), Scores())
    for unit in model:
        unit.outer = torch.randn(4, 8, requires_grad=True)
    x = model[0].outer
    model[1].outer = x
    profile = recollect.record(model, x, loss_fn=lambda out: out.sum())
    assert profile.step_s > 0
    assert all(graph.tape_s == 0 for graph in profile.graphs)


def test_units_count_with_their_own_time_in_place_of_their_ops(recorded: Profile) -> None:
    bare = replace(
        recorded, step_s=20.0, graphs=tuple(replace(g, tape_s=0.0, module_tape_s=()) for g in recorded.graphs)
    )
    leanest = simulated_leanest(bare)
    in_backward_s = leanest.recompute_s + 0.4
    units = unit_times(bare, forward_s=0.25, backward_s=in_backward_s / 4, idle_s=0.05)
    layer_graph = next(call.graph for call in bare.calls if call.repeated)
    timed = with_unit_times(
        bare,
        units,
        seen_ops={layer_graph: {"": 2, "mlp.linear_fc1": 6}},
        backward_s=[0.5] * len(bare.calls),
        leanest=leanest,
    )
    forward_s = bare.graphs[layer_graph].forward_s
    assert timed.step_s == pytest.approx(20.0 + 4 * (3.0 - forward_s - 0.5))
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
    nothing: dict[str, Any] = {"seen_ops": {}, "backward_s": [0.0] * len(bare.calls), "leanest": leanest}
    half = with_unit_times(bare, unit_times(bare, forward_s=-1.0, backward_s=leanest.recompute_s / 8), **nothing)
    before, after = graph_at(bare, "decoder.layers.0"), graph_at(half, "decoder.layers.0")
    assert after.ops[3].time_s == pytest.approx(before.ops[3].time_s / 2)
    assert after.watched_s(range(len(after.values))) == 0.0, "noise makes no tape faster than none"
    none = with_unit_times(bare, unit_times(bare, forward_s=0.0, backward_s=-1.0), **nothing)
    assert graph_at(none, "decoder.layers.0").ops[3].time_s == pytest.approx(before.ops[3].time_s / 10)
    short = with_unit_times(replace(bare, step_s=0.0), unit_times(bare, forward_s=0.0, backward_s=1.0), **nothing)
    assert short.step_s == 12.0, "a step takes no less than its units"


def test_units_are_timed_in_one_backward_and_run_again_in_both_halves_of_one() -> None:
    stage = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)))
    whole, split = (
        recollect.record(
            stage, torch.randn(4, 8, requires_grad=True), loss_fn=torch.sum, fake=True, split_backward=split_backward
        )
        for split_backward in (False, True)
    )
    once, twice = (leanest_of(profile, range(len(profile.graphs))).recomputed_ops for profile in (whole, split))
    assert twice > once == leanest_of(in_one_backward(split), range(len(split.graphs))).recomputed_ops


def test_a_few_small_units_say_nothing_of_all(recorded: Profile) -> None:
    bare = replace(recorded, graphs=tuple(replace(graph, tape_s=0.0, module_tape_s=()) for graph in recorded.graphs))
    last = next(index for index, call in enumerate(bare.calls) if call.path == "decoder.final_layernorm")
    times = {last: UnitTimes(1.0, 2.0, 1.0, 2.0, 1.0)}
    timed = with_unit_times(
        bare, times, seen_ops={}, backward_s=[0.0] * len(bare.calls), leanest=simulated_leanest(bare)
    )
    assert graph_at(timed, "decoder.layers.0").ops == graph_at(bare, "decoder.layers.0").ops


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


def test_the_spread_of_rounds_says_how_sure_the_cost_of_recompute_is() -> None:
    steady = UnitTimes(1.0, 2.0, 1.5, 2.5, 1.0, (0.9, 1.2))
    assert _factors([steady, steady]) == pytest.approx((0.9, 1.2))
    noisy = UnitTimes(1.0, 2.0, 1.5, 2.5, 1.0, (-3.0, 5.0))
    assert _factors([steady, noisy]) == pytest.approx((0.01, 3.1))
    assert _factors([UnitTimes(1.0, 2.0, 1.5, 2.5, 1.0)]) == (0.0, 0.0), "one round says nothing"
    rounds = [(1.0, 2.0), (1.0, 3.0), (1.0, 4.0), (1.0, 5.0), (9.0, 9.0)]
    plain = [(1.0, 1.0)] * 5
    assert _spread(rounds, plain) == (2.0, 4.0), "of five, the outer ones do not count"
    assert _spread(rounds[:2], plain[:2]) == (1.0, 2.0) and _spread(rounds[:1], plain[:1]) == ()
