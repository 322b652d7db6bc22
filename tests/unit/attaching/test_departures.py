"""What `attach` does, and says, where a step does what no plan foresees; the peaks are in tests/integration/test_courses.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.attaching.reserve import Reserve
from recollect.attaching.step_planner import Missed, is_little
from recollect.attaching.step_shape import Structure
from recollect.attaching.unit_watch import Course, Runs
from recollect.errors import BudgetWarning, LargerStepError
from recollect.measuring.device_memory import held_now


class Blocks(nn.Module):
    """Runs as many of its blocks as it is told, each as often as its list of runs says."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(number)
        )
        self.runs = list(range(number))

    def forward(self, x: Tensor, flag: bool = False, way: str = "") -> Tensor:
        for index in self.runs:
            x = x + self.blocks[index](x)
        return x.square().mean()


@pytest.fixture
def model() -> Iterator[Blocks]:
    torch.manual_seed(0)
    yield Blocks()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: object) -> None:
    model(torch.randn(512, 32), **arguments).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_departure_raises_where_larger_steps_do(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.runs = [0, 1]
    with recollect.attach(model, optimizer, "90%", on_larger="raise", log=lambda _: None):
        step(model, optimizer)
        model.runs = [0, 1, 2]
        with pytest.raises(
            LargerStepError, match=r"a step ran unit 'blocks.2' more often than the plan foresees, or on more"
        ):
            step(model, optimizer)


def test_fewer_and_other_units_of_one_kind_need_one_recorded_step(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached, warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for model.runs in ([0, 1, 2, 3], [1, 3], [3, 2, 1, 0], [0], [0, 1, 2, 3]):
            step(model, optimizer)
        assert attached.recorded_steps == [0]


def test_flags_that_change_nothing_are_learned(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached, warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for number in range(6):
            step(model, optimizer, flag=number % 2 == 1)
        assert attached.recorded_steps == [0, 1]


def test_courses_without_end_are_named_and_run_lean(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "1GiB", log=lambda _: None) as attached:
        with pytest.warns(
            BudgetWarning, match=r"16 of 16 steps were recorded, since each .* \(arguments '14' and '15'\)"
        ) as found:
            for number in range(20):
                model.runs = [0] * (number + 1)
                step(model, optimizer, way=str(number))
        assert attached.recorded_steps == list(range(16))
        assert sum("steps were recorded" in str(warning.message) for warning in found) == 1


def test_two_handles_in_one_step_do_not_take_each_other_for_a_profiler() -> None:
    torch.manual_seed(0)
    models = [Blocks(), Blocks()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    handles = [recollect.attach(m, o, "1GiB", log=lambda _: None) for m, o in zip(models, optimizers, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(3):
            sum(model(torch.randn(512, 32)) for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [handle.recorded_steps for handle in handles] == [[0], [1]]
    for handle in handles:
        handle.remove()


def test_more_backwards_than_planned_are_said_and_recorded(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached:
        step(model, optimizer)
        loss = model(torch.randn(512, 32))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.warns(
            BudgetWarning, match=r"step 1 ran backward more often .* so that it may have needed more than the budget of"
        ):
            optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step(model, optimizer)
        assert attached.recorded_steps == [0, 2]


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_what_a_forward_holds_besides_is_read_from_the_allocator(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[Tensor] = []

    def hold(*_: object) -> None:
        held[:] = [torch.zeros(1 << 21)] if is_holding else []

    model.blocks[0].register_forward_hook(hold)
    is_holding = False
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached:
        for _ in range(3):
            step(model, optimizer)
        is_holding = True
        with pytest.warns(
            BudgetWarning, match=r"step 3 held more after forward than its plan foresees, so that it may have"
        ):
            step(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            step(model, optimizer)
        assert attached.recorded_steps == [0, 4]


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
@pytest.mark.parametrize("is_tensor", [False, True], ids=["NumPy's", "a tensor"])
def test_only_tensors_count_as_held_beside_the_step(model: Blocks, is_tensor: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[object] = []
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached, warnings.catch_warnings():
        warnings.simplefilter("ignore" if is_tensor else "error", BudgetWarning)
        for number in range(4):
            step(model, optimizer)
            if number == 1:
                held.append(torch.zeros(1 << 20) if is_tensor else np.zeros(1 << 20))
        # Not with the margin, with which no plan fits.
        assert attached.planned[0].more_bytes == (4 << 20 if is_tensor else 0)


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_what_was_there_before_the_first_planned_step_counts_too(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        step(model, optimizer)
        held = torch.zeros(1 << 20)
        with pytest.warns(BudgetWarning, match=r"[34]\.\d MiB of it for what came to be held beside the step since"):
            step(model, optimizer)
        assert 0.95 * held.nbytes < attached.planned[0].more_bytes <= held.nbytes


def test_calls_after_the_planned_ones_need_no_more_where_nothing_waits_for_backward(model: Blocks) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached, warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        step(model, optimizer)
        model(torch.randn(512, 32)).backward()
        model(torch.randn(512, 32), flag=True).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


@pytest.mark.skipif(held_now(torch.device("cpu")) is None, reason="nothing tells what the process holds")
def test_what_another_thread_releases_a_moment_late_is_not_said(model: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent: list[Tensor] = []
    waits: list[float] = []
    is_sending = False

    def send(*_: object) -> None:
        if is_sending:
            sent.append(torch.zeros(1 << 21))

    model.blocks[0].register_forward_hook(send)
    with recollect.attach(model, optimizer, "90%", log=lambda _: None) as attached:
        for _ in range(3):
            step(model, optimizer)
        is_sending = True
        monkeypatch.setattr("recollect.attaching.held.time.sleep", lambda wait_s: (waits.append(wait_s), sent.clear()))
        step(model, optimizer)
        assert waits and attached.recorded_steps == [0]


def test_what_was_missed_is_met_by_a_step_that_does_as_much() -> None:
    missed = Missed()
    missed.note([], [Course({"0": Runs(2, 8)})], attempts=2)
    assert missed.attempts_left == 2
    missed.end_attempt(is_met=False)
    assert missed.attempts_left == 1
    missed.end_attempt(is_met=True)
    assert missed.attempts_left == 0
    many = Course({str(number): Runs(1, 8) for number in range(20)})
    assert is_little([many], [{"0": 2}]) and not is_little([many], [{"0": 3}])


def test_spare_runs_are_completed_for_units_of_one_kind(model: Blocks) -> None:
    paths = [f"blocks.{number}" for number in range(4)]
    reserve = Reserve(model, paths, [], torch.device("cpu"))
    course = Course({"blocks.0": Runs(1, 8), "blocks.1": Runs(1, 8)})
    assert reserve.completed(course, {"blocks.2": 1}) == {"blocks.2": 1, "blocks.3": 1}
    assert reserve.completed(course, {}) == {}


def test_a_structure_is_looked_at(model: Blocks) -> None:
    structure = Structure(model)
    assert not structure.look() and structure.version == 0
    model.blocks.append(nn.GELU())
    assert structure.look(), "it has more modules"
    model.blocks[-1].weight = nn.Parameter(torch.zeros(32, 32))
    assert structure.look(), "it has another parameter"
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    assert structure.look(), "a module has a hook"
    handle.remove()
    assert not structure.look() and structure.version == 3
    structure.remove()
    model.blocks.append(nn.Linear(32, 32))
    assert structure.look(), "what is registered unseen shows in the lengths"
