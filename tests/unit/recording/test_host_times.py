"""What is around ops is measured on layers of its own: the user's step runs once, and nobody else sees them."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import recollect
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.placed_forward import PlacedForward
from recollect.errors import ConfigWarning, ProfileFormatError
from recollect.profile.host_times import LARGE_BYTES, HostTimes
from recollect.profile.profile import Profile
from recollect.recording import host_times
from recollect.recording.host_times import around_ops

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.num_runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return x + self.down(self.up(self.norm(x)).relu())


def recorded(model: nn.Module) -> Profile:
    return recollect.record(model, torch.ones(4, 16), loss_fn=torch.sum)


@pytest.fixture
def measured_anew() -> None:
    host_times._measured.cache_clear()


@pytest.mark.usefixtures("measured_anew")
def test_the_step_runs_once_and_nobody_sees_more() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    seen = Counter[type]()
    hook = register_module_forward_hook(lambda module, _args, _output: seen.update([type(module)]))
    state = torch.get_rng_state()
    try:
        recorded(model)
    finally:
        hook.remove()
    # `record` restores attributes, but hooks of all modules are the user's.
    assert seen == {nn.Sequential: 1, Layer: 3, nn.LayerNorm: 3, nn.Linear: 6}
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("measured_anew")
def test_a_step_of_the_users_own_runs_once() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    recollect.record(model, step=lambda: model(torch.ones(4, 16)).sum().backward())
    assert [layer.num_runs for layer in model] == [1, 1, 1]


@pytest.mark.usefixtures("measured_anew")
def test_steps_under_attach_run_once_each() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recollect.attach(model, optimizer, budget="100%", log=lambda line: None)
    for _ in range(3):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [layer.num_runs for layer in model] == [3, 3, 3]


def test_modes_of_the_caller_see_only_the_step() -> None:
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.num_ops += 1
            return func(*args, **(kwargs or {}))

    numbers = []
    for clear in (True, False):  # Measured within the first recording, and known in the second.
        if clear:
            host_times._measured.cache_clear()
        Counting.num_ops = 0
        with Counting():
            recorded(nn.Sequential(*(Layer() for _ in range(3))))
        numbers.append(Counting.num_ops)
    assert numbers[0] == numbers[1] > 0


@pytest.mark.usefixtures("measured_anew")
@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_is_measured_as_usual_wherever_it_is_asked_for(context: Any) -> None:
    with context():
        found = around_ops(CPU)
    assert found is around_ops(CPU)
    assert min(found.host.unit_s, found.host.seen_op_s) > 0


def test_units_know_what_the_tape_takes() -> None:
    profile = recorded(nn.Sequential(*(Layer() for _ in range(3))))
    graph, measured = profile.graphs[0], around_ops(CPU).host
    assert profile.host == measured
    seen_s = measured.seen_s([sum(graph.values[value].nbytes for value in op.outputs) for op in graph.ops])
    host = replace(measured, seen_op_s=seen_s)
    assert graph.tape_s == host.unit_s + 3 * host.module_s and graph.again_op_s == host.again_op_s
    by_module = dict(graph.module_tape_s)
    # LayerNorm is one op for the tape; a linear layer of a matrix is a transposition and a product.
    assert by_module == {
        "": 2 * host.seen_op_s,
        "norm": host.seen_op_s,
        "up": 2 * host.seen_op_s,
        "down": 2 * host.seen_op_s,
    }
    assert graph.again_s(graph.ops[0]) == graph.ops[0].time_s + host.again_op_s


def test_an_op_with_large_results_takes_the_tape_longer() -> None:
    host = HostTimes(seen_op_s=0.125, large_op_s=0.5)
    assert host.seen_s([LARGE_BYTES, 4 * LARGE_BYTES]) == 0.625
    assert host.seen_s([0, LARGE_BYTES]) == host.seen_s([LARGE_BYTES // 2]) == 0.375
    assert host.seen_s([0, 0]) == host.seen_s([]) == 0.125


def test_what_is_longer_is_a_part_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 18 ops each."""

    def stated(model: Any, inputs: torch.Tensor, *_: Any) -> tuple[float, float]:
        on_tape = isinstance(model[0].forward, PlacedForward)
        return (1.0 + on_tape * (0.37 if inputs.numel() * 4 >= LARGE_BYTES else 0.01), 0.0)

    monkeypatch.setattr(host_times, "_timed", stated)
    assert host_times._large_op_s(CPU) == pytest.approx(0.01)


def test_what_it_is_made_from_is_in_the_file_and_must_be_a_time() -> None:
    profile = recorded(nn.Sequential(*(Layer() for _ in range(3))))
    assert Profile.from_json(profile.to_json()) == profile
    text = profile.to_json().replace(f'"unit_s":{profile.host.unit_s}', '"unit_s":-1.0')  # type: ignore[union-attr]
    with pytest.raises(
        ProfileFormatError, match=r"host: host\.unit_s: got -1\.0 s, expected a finite number, 0 or more"
    ):
        Profile.from_json(text)


def test_plans_of_measured_steps_say_how_sure_they_are() -> None:
    profile = recorded(nn.Sequential(*(Layer() for _ in range(3))))
    plan = recollect.classic_plan(profile, "full")
    assert plan.slowdown_error == pytest.approx(0.05 + 0.15 * plan.predicted_slowdown)  # type: ignore[operator]
    unsure = replace(profile, host=None)
    assert recollect.classic_plan(unsure, "full").slowdown_error is None


@pytest.mark.usefixtures("measured_anew")
def test_small_layers_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen, timed = torch.get_num_threads(), set[int](), host_times._timed
    monkeypatch.setattr(host_times, "_timed", lambda *args: (seen.add(torch.get_num_threads()), timed(*args))[1])
    torch.set_num_threads(2)
    try:
        around_ops(CPU)
        assert (torch.get_num_threads(), seen) == (2, {1})
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("measured_anew")
def test_times_that_vary_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other round runs beside something else."""
    numbers, timed = itertools.count(), host_times._timed

    def disturbed(*args: Any) -> tuple[float, float]:
        factor = 1 if next(numbers) % 4 < 2 else 10
        forward_s, backward_s = timed(*args)
        return factor * forward_s, factor * backward_s

    monkeypatch.setattr(host_times, "_timed", disturbed)
    with pytest.warns(
        ConfigWarning,
        match=r"^recollect: what Python takes around ops could not be measured well: one run of a small layer took \d+\.\d "
        r"times as long as a different one\. Predicted slowdowns may be wrong; measured ones are not\. Record where nothing "
        r"else runs\.$",
    ):
        around_ops(CPU)


def test_what_a_traced_unit_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers, in forward and backward together."""
    timed = host_times._timed

    def stated(model: Any, *args: Any) -> tuple[float, float]:
        timed(model, *args)
        return (0.003, 0.002) if isinstance(model[0].forward, GraphForward) else (0.001, 0.001)

    monkeypatch.setattr(host_times, "_timed", stated)
    host_times._traced_unit_s.cache_clear()
    try:
        assert host_times._traced_unit_s(CPU) == pytest.approx(0.0015)
    finally:
        host_times._traced_unit_s.cache_clear()
