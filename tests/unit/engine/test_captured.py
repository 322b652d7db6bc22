"""What units cannot do while a CUDA graph is captured is refused, by an error that names both settings."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import recollect
from blocks import Computes
from capture_checker import CaptureChecker
from contract_steps import Run, plain
from contract_units import UNITS
from engines import applied, num_tape_calls, traced
from gradients import assert_same_gradients
from policies import FULL, KEEP_ALL, AllButDraws
from recollect._torch_parallel import fake_process_group
from recollect._torch_private import is_capturing, rehearsing_capture
from recollect.applying import apply_policy
from recollect.attaching.attached import Attached
from recollect.engine import together
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.placed_forward import time_reruns
from recollect.engine.together import Agreement, Shards
from recollect.errors import ConfigError
from recollect.measuring.stopwatch import Stopwatch
from recollect.plans.unit_plan import UnitPlan

INSTEAD = "or run the step outside torch.cuda.graph."


def refuses(what: str, value: str, reason: str) -> Any:
    """The error names the setting, the capture, and a way out that needs no other loop."""
    text = f"got {what}={value!r}, torch.cuda.graph='capturing': {reason}"
    return pytest.raises(ConfigError, match=f"^{re.escape(text)}.*, {re.escape(INSTEAD)}$")


def test_nothing_is_captured_but_in_a_rehearsal() -> None:
    assert not is_capturing()
    with pytest.raises(KeyError), rehearsing_capture():
        with rehearsing_capture():
            assert is_capturing()
        assert is_capturing()
        raise KeyError
    assert not is_capturing()


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_unit_that_has_not_run_before(engine: str) -> None:
    run = Run(UNITS["feed forward"].model())
    with applied(engine, run.model, FULL):
        with rehearsing_capture(), refuses("unit 'units.0'", "the first call", "that compares what tensors hold"):
            run.through(plain)
        run.through(plain)
        with rehearsing_capture():
            run.through(plain)


def test_a_function_that_has_not_been_checkpointed_before() -> None:
    def squared(x: Tensor) -> Tensor:
        return x.sin().square()

    x = torch.ones(3, requires_grad=True)
    what = "unit 'test_a_function_that_has_not_been_checkpointed_before.<locals>.squared'"
    with rehearsing_capture(), refuses(what, "the first call", "that compares what tensors hold"):
        recollect.checkpoint(squared, x)


def test_a_unit_that_fits_no_trace_runs_on_the_tape() -> None:
    """Tracing reads the states of generators."""
    model, data = UNITS["feed forward"].model(), torch.randn(4, 8)
    with applied("graph", model, FULL) as handle:
        model(data)[0].backward()  # The next call would be traced.
        before = GraphForward.num_traces, num_tape_calls(handle)
        model.zero_grad()
        with rehearsing_capture():
            model(data)[0].backward()
        assert (GraphForward.num_traces, num_tape_calls(handle)) == (before[0], before[1] + 1)
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    model(data)[0].backward()
    assert_same_gradients({name: one.grad for name, one in model.named_parameters() if one.grad is not None}, found)


def test_the_value_to_keep_is_what_was_written_last() -> None:
    """In a trace, what is drawn and then changed in place runs again as a whole."""

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    noise = Computes(lambda self, x: self.inner(x) * torch.rand_like(x).mul_(2).add_(1), inner=nn.Linear(4, 4))
    model = nn.Sequential(noise)
    with traced(model, ["0"], FULL):
        for _ in range(3):
            step()
        with rehearsing_capture(), refuses("add_ in unit '0'", "recompute", "to draw the same random numbers again"):
            step()
    model.zero_grad()
    with traced(model, ["0"], AllButDraws(also=frozenset({"rand_like", "add_"}))):
        for _ in range(3):
            step()
        with rehearsing_capture():
            step()


# Functions of the model


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        output = F.dropout(x, p)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return gradient * output, None


class NoisyUnseen(Noisy):
    """Draws in a kernel that no dispatch mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        output = torch.empty_like(x)
        with torch.utils._python_dispatch._disable_current_modes():
            output.copy_(F.dropout(x, p))
        ctx.save_for_backward(output)
        return output


def noisy_unit(function: Any) -> Computes:
    return Computes(lambda self, x: function.apply(self.inner(x).sin(), self.p).cos(), inner=nn.Linear(4, 4), p=0.5)


def noisy_step(unit: nn.Module) -> None:
    unit(torch.ones(2, 4)).sum().backward()


@pytest.fixture
def watches_the_default_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA; on the CPU everything may draw from it, and nobody watches."""
    monkeypatch.setattr("recollect.engine.function_run.cuda_generators", lambda given: [torch.default_generator])


@pytest.mark.usefixtures("watches_the_default_generator")
@pytest.mark.parametrize("function", [Noisy, NoisyUnseen])
def test_a_function_that_draws(function: Any) -> None:
    unit = noisy_unit(function)
    with apply_policy(nn.Sequential(unit), ["0"], FULL):
        noisy_step(unit)
        what = f"{function.__name__} in unit '0'"
        with rehearsing_capture(), refuses(what, "recompute", "to draw the same random numbers again"):
            noisy_step(unit)


@pytest.mark.usefixtures("watches_the_default_generator")
def test_a_function_whose_results_are_kept_may_draw() -> None:
    unit = noisy_unit(Noisy)
    checker = CaptureChecker(sees_ops=True)
    with apply_policy(nn.Sequential(unit), ["0"], KEEP_ALL):
        noisy_step(unit)
        with checker.running():
            noisy_step(unit)
    assert not checker.lines


def test_a_function_that_gets_constants_which_it_has_not_had_before() -> None:
    """Its arguments were not compared for them."""
    unit = noisy_unit(Noisy)
    with apply_policy(nn.Sequential(unit), ["0"], KEEP_ALL):
        noisy_step(unit)
        unit.p = 0.25
        with (
            rehearsing_capture(),
            refuses("autograd Function Noisy", "the first call", "that compares what tensors hold"),
        ):
            noisy_step(unit)


# What the host decides in each step


def test_values_in_host_memory() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "ab"))
    unit = UnitPlan({"0.addmm": "offload", "1.gelu": "keep"})
    with recollect.apply(model, recollect.Plan({"0": unit, "1": unit})):
        model(torch.ones(2, 8)).sum().backward()
        with rehearsing_capture(), refuses("action", "offload", "the host decides in each step where and when"):
            model(torch.ones(2, 8))


def always(answer: CheckpointPolicy) -> Any:
    return partial(create_selective_checkpoint_contexts, lambda context, op, *args, **kwargs: answer)


def test_values_that_a_policy_sends_to_host_memory() -> None:
    def step() -> None:
        contexts = always(CheckpointPolicy.MUST_CPU_OFFLOAD)
        recollect.checkpoint(torch.sin, torch.ones(3, requires_grad=True).exp(), context_fn=contexts).sum().backward()

    step()
    with rehearsing_capture(), refuses("action", "offload", "the host decides in each step where and when"):
        step()


def test_what_a_policy_does_not_save_may_not_draw() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.rand_like(x).sin() * x

    def step() -> None:
        contexts = always(CheckpointPolicy.PREFER_RECOMPUTE)
        recollect.checkpoint(noise, torch.ones(3, requires_grad=True), context_fn=contexts).sum().backward()

    step()
    what = "rand_like in unit 'test_what_a_policy_does_not_save_may_not_draw.<locals>.noise'"
    with rehearsing_capture(), refuses(what, "recompute", "to draw the same random numbers again"):
        step()


def test_what_runs_again_is_not_timed() -> None:
    run, watch = Run(UNITS["feed forward"].model()), Stopwatch(torch.device("cpu"))
    with applied("tape", run.model, FULL) as handle:
        run.through(plain)
        time_reruns(handle, watch)
        with rehearsing_capture():
            run.through(plain)
        assert watch.read() == (0, 0)
        run.through(plain)
        assert watch.read() > (0, 0)


@pytest.mark.skipif(not dist.is_available(), reason="needs PyTorch with torch.distributed")
def test_ranks_that_have_not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement, value = Agreement("one"), torch.ones(6)
    monkeypatch.setattr(together, "gathered", lambda own, num_ranks, group: torch.cat([own] * num_ranks))
    with fake_process_group(0, 2):
        assert dist.group.WORLD is not None
        shards = Shards(dist.group.WORLD)
        with (
            rehearsing_capture(),
            refuses("hold values as parts on all ranks", "the first call", "they compare their plans"),
        ):
            shards.call(value, agreement, "0", "mm")
        shards.call(value, agreement, "0", "mm")
        checker = CaptureChecker(sees_ops=True)
        with checker.running():
            shards.call(value, agreement, "0", "mm")
        assert not checker.lines


# Loops that are attached to


def attached_loop(**how: Any) -> tuple[Attached, Callable[[int], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = recollect.attach(model, optimizer, budget="80%", **how)

    def step(rows: int) -> None:
        model(torch.ones(rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return handle, step


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_an_attached_loop_reads_no_clock(engine: str) -> None:
    """It does in the fifth step under a plan, and in others, where it is not captured."""
    _, step = attached_loop(engine=engine)
    for _ in range(5):
        step(256)
    checker, untold = CaptureChecker(sees_ops=False), CaptureChecker(sees_ops=False, tells=False)
    with checker.running():
        step(256)
    assert not checker.lines
    with untold.running():
        step(256)
    assert "attaching/held.py" in {one.file for one in untold.found}


def test_an_attached_loop_does_not_record() -> None:
    _, step = attached_loop()
    step(256)
    with rehearsing_capture():
        step(256)
        with refuses("attach", "a step of 264 x 64", "no plan covers it, and recording it needs clocks"):
            step(264)
    step(264)
